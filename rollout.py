"""
Rollouts: G completions per prompt from the current policy, with the log-probabilities they were sampled at.

The behaviour policy and the trained policy are the same distribution: plain sampling at a temperature that
the log-probabilities carry, no top-k, no top-p, no repetition penalty (eval.py may ask for them). The model's own
generation config (Qwen3 ships temperature 0.6, top-k 20, top-p 0.95) plays no part, but for its end tokens.

Two engines live here, a third in vllm_engine.py; `sample` is the door to all:
    compact  a decoding loop of ours: one prefill per prompt, shared by its G completions, and rows leave the batch
             as they end. The default.
    hf       transformers' model.generate, the plain reference.
    vllm     vLLM in this process, for large models on GPUs.

Letters: K prompts, G completions each, T = max_new_tokens, B sequences sampled at once, V vocabulary.
"""

import contextlib
from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from tqdm import tqdm
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    GenerationConfig,
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

import packing
from data import InputError


@dataclass
class Rollouts:
    """What sampling returns. Masks come from `lengths`, never from token values: pad may be an end token."""

    prompt_ids: list[list[int]]  # K prompts
    completion_ids: torch.Tensor  # [K, G, T] int64; beyond a completion's length: anything
    logprobs: torch.Tensor  # [K, G, T] float32, of the sampled tokens at the sampling temperature; 0 beyond
    entropy: torch.Tensor  # [K, G] float32, summed over the completion's tokens, in nats; NaN from vllm
    energy: torch.Tensor  # [K, G] float32, sum over its tokens of |onehot(token) - softmax|^2; from vllm a bound of it
    lengths: torch.Tensor  # [K, G] int64, tokens sampled, end token included
    truncated: torch.Tensor  # [K, G] bool, cut off by max_new_tokens before an end token


@dataclass
class Sampling:
    """How to sample. A policy trained on samples of any other top-k, top-p or penalty than these would be compared, in
    its importance ratio, with a distribution that it is not."""

    max_new_tokens: int  # T
    eos_ids: list[int]  # each ends a completion
    pad_id: int  # may be one of them
    temperature: float = 1.0  # the log-probs carry it; 0: greedy, and the log-probs are those at 1
    batch_size: int = 512  # sequences sampled at once, in whole groups: it bounds the memory of the key-value cache
    engine: object = "compact"  # or "hf", or a vllm_engine.Engine
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    show_progress: bool = False


def join(parts: list[Rollouts]) -> Rollouts:
    """One after the other, as if they had been sampled together."""
    prompt_ids, *columns = zip(*(vars(part).values() for part in parts), strict=True)
    return Rollouts([ids for part in prompt_ids for ids in part], *map(torch.cat, columns))


def eos_token_ids(model, tokenizer) -> list[int]:
    """Every token that ends a completion: the generation config's (a list for chat models), else the tokenizer's."""
    ids = model.generation_config.eos_token_id
    ids = tokenizer.eos_token_id if ids is None else ids
    if ids is None:
        raise ValueError("neither the generation config nor the tokenizer names an end token")
    return ids if isinstance(ids, list) else [ids]


def sample(model, prompt_ids: list[list[int]], sampling: Sampling, *, group_size: int, seed: int) -> Rollouts:
    """Sample `group_size` completions for each prompt. The draw is a function of (weights, prompts, sampling, seed).

    sampling.batch_size sequences are sampled at once, shortest prompts first. Raises FloatingPointError if the model's
    logits are not finite.
    """
    if sampling.temperature == 0 and group_size > 1:  # all the same, and generate and vLLM refuse to do it twice
        one = sample(model, prompt_ids, sampling, group_size=1, seed=seed)
        columns = [getattr(one, field.name) for field in fields(one)[1:]]
        return Rollouts(prompt_ids, *(column.repeat_interleave(group_size, dim=1) for column in columns))
    if not isinstance(sampling.engine, str):
        return sampling.engine.sample(model, prompt_ids, sampling, group_size=group_size, seed=seed)
    torch.manual_seed(seed)
    decode = {"compact": _compact, "hf": _generate}[sampling.engine]
    K, G, T, device = len(prompt_ids), group_size, sampling.max_new_tokens, model.device
    progress = tqdm(
        total=K * G, desc="rollout", unit=" completions", delay=3, leave=False, disable=not sampling.show_progress
    )
    with progress, torch.no_grad(), _set_aside(model):
        ids, statistics = torch.full((K, G, T), sampling.pad_id, device=device), torch.zeros(3, K, G, T, device=device)
        order = sorted(range(K), key=lambda k: len(prompt_ids[k]))
        step = max(1, sampling.batch_size // G)
        for batch in (order[start : start + step] for start in range(0, K, step)):
            record = _Record(sampling, len(batch) * G, model.vocab_size, device)
            decode(model, [prompt_ids[k] for k in batch], G, record, progress)
            ids[batch], statistics[:, batch] = record.ids.view(-1, G, T), record.statistics.view(3, -1, G, T)
    return finish(prompt_ids, ids, *statistics, sampling)


def finish(prompt_ids, ids, logprobs, entropy, energy, sampling) -> Rollouts:
    """Rollouts of what was sampled, [K, G, T] each: a completion ends with its first end token."""
    ends = torch.isin(ids, torch.tensor(sampling.eos_ids, device=ids.device))
    ended = ends.any(dim=-1)  # [K, G]
    lengths = torch.where(ended, ends.int().argmax(dim=-1) + 1, ids.shape[-1])
    inside = torch.arange(ids.shape[-1], device=ids.device) < lengths[..., None]  # [K, G, T]
    logprobs, entropy, energy = (torch.where(inside, table, 0.0) for table in (logprobs, entropy, energy))
    return Rollouts(prompt_ids, ids, logprobs, entropy.sum(dim=-1), energy.sum(dim=-1), lengths, ~ended)


# ---------------------------------------------------------------------------- what both engines share


class _Record:
    """The distribution that the next tokens of B sequences come from, and what was sampled of it."""

    def __init__(self, sampling: Sampling, rows: int, vocab_size: int, device):
        self.sampling, self.vocab_size = sampling, vocab_size
        self.eos = torch.tensor(sampling.eos_ids, device=device)
        self.ids = torch.full((rows, sampling.max_new_tokens), sampling.pad_id, device=device)  # [B, T]
        self.statistics = torch.zeros(3, rows, sampling.max_new_tokens, device=device)  # log-prob, entropy, energy
        self.warpers = LogitsProcessorList()  # in transformers' order
        if sampling.repetition_penalty != 1:
            self.warpers.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
        if sampling.temperature not in (0, 1):
            self.warpers.append(TemperatureLogitsWarper(sampling.temperature))
        if sampling.top_k:
            self.warpers.append(TopKLogitsWarper(sampling.top_k))
        if sampling.top_p < 1:
            self.warpers.append(TopPLogitsWarper(sampling.top_p))

    def distribution(self, sequences, logits):
        """Log-probs [B, V] of the next token of sequences [B, n]; the vocabulary's padding is not among them."""
        logits = logits[:, : self.vocab_size]
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if not logits.sum().isfinite():
            raise FloatingPointError("the model's logits are not finite")
        return torch.log_softmax(self.warpers(sequences, logits), dim=-1)

    def take(self, rows, step: int, scores, token):
        """Token [B] was drawn from scores [B, V]: it is number `step` of the completions `rows`."""
        probs = scores.exp()  # [B, V]
        logprob = scores.gather(1, token[:, None])  # [B, 1]
        entropy = -torch.nansum(probs * scores, dim=-1)  # [B]; what top-k or top-p took has 0 * -inf
        others = probs.scatter_(1, token[:, None], 0.0).square().sum(dim=-1)  # [B]
        energy = torch.expm1(logprob[:, 0]).square() + others  # (1 - p)^2 + sum of the others' p^2: no cancellation
        self.ids[rows, step] = token
        self.statistics[:, rows, step] = torch.stack([logprob[:, 0], entropy, energy]).float()


def _pad_left(prompt_ids, device):
    """(ids, mask), [K, width]: completions start in one column. The padding repeats a token of the prompt, so that a
    repetition penalty finds nothing there that the prompt does not hold."""
    width = max(map(len, prompt_ids))
    ids = [[ids[0]] * (width - len(ids)) + ids for ids in prompt_ids]
    mask = [[0] * (width - len(ids)) + [1] * len(ids) for ids in prompt_ids]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)


@contextlib.contextmanager
def _set_aside(model):
    """Evaluation mode, transformers' attention and no generation settings of the model's own; all come back after."""
    was_training, own_config, attention = model.training, model.generation_config, model.config._attn_implementation
    model.eval().set_attn_implementation("sdpa")
    model.generation_config = GenerationConfig()  # transformers would fill whatever a call leaves open from it
    try:
        yield
    finally:
        model.train(was_training).set_attn_implementation(attention)
        model.generation_config = own_config


# ---------------------------------------------------------------------------- engine: compact


def _compact(model, prompt_ids, group_size, record, progress):
    """Every prompt goes through the model once, its keys and values are repeated for its completions, and these leave
    the batch as they end."""
    sequences, mask = _pad_left(prompt_ids, model.device)
    tokens, positions = sequences, (mask.cumsum(dim=1) - 1).clamp(min=0)
    rows = torch.arange(len(record.ids), device=model.device)  # which completion each row of the batch is
    cache = DynamicCache(config=model.config)
    for step in range(record.sampling.max_new_tokens):
        logits = model(
            tokens, attention_mask=mask, position_ids=positions, past_key_values=cache, logits_to_keep=1
        ).logits[:, -1]
        if step == 0:
            cache.batch_repeat_interleave(group_size)
            logits, sequences, mask, positions = (
                tensor.repeat_interleave(group_size, dim=0) for tensor in (logits, sequences, mask, positions)
            )
        scores = record.distribution(sequences, logits)
        token = _draw(scores) if record.sampling.temperature else scores.argmax(dim=1, keepdim=True)
        record.take(rows, step, scores, token[:, 0])
        live = (~torch.isin(token[:, 0], record.eos)).nonzero()[:, 0]
        progress.update(len(rows) - len(live))
        if len(live) == 0:
            break
        tokens, sequences, positions = token, torch.cat([sequences, token], dim=1), positions[:, -1:] + 1
        mask = F.pad(mask, (0, 1), value=1)
        if len(live) < len(rows):
            cache.batch_select_indices(live)
            rows, tokens, sequences, mask, positions = (t[live] for t in (rows, tokens, sequences, mask, positions))
    else:  # these are cut off
        progress.update(len(rows))


def _draw(scores):
    """A token [B, 1] from log-probs [B, V]: where one random number a row falls in the cumulated probabilities. Float64
    sums to the last bit; torch.multinomial takes a random number a token, and three times as long."""
    cumulated = scores.double().exp().cumsum(dim=1)
    point = torch.rand(len(scores), 1, dtype=torch.float64, device=scores.device) * cumulated[:, -1:]
    return torch.searchsorted(cumulated, point, right=True).clamp(max=scores.shape[1] - 1)


# ---------------------------------------------------------------------------- engine: hf


def _generate(model, prompt_ids, group_size, record, progress):
    """One call of model.generate, which says what it drew from a distribution when it asks for the next one."""
    sequences, mask = _pad_left(prompt_ids, model.device)
    rows = torch.arange(len(prompt_ids) * group_size, device=model.device)
    width, scores = sequences.shape[1], None

    def process(sequences, logits):
        nonlocal scores
        if scores is not None:
            record.take(rows, sequences.shape[1] - width - 1, scores, sequences[:, -1])
        scores = record.distribution(sequences, logits)
        return scores

    sequences = model.generate(
        sequences,
        attention_mask=mask,
        logits_processor=LogitsProcessorList([process]),
        generation_config=GenerationConfig(
            do_sample=record.sampling.temperature > 0,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            num_return_sequences=group_size,
            max_new_tokens=record.sampling.max_new_tokens,
            eos_token_id=record.sampling.eos_ids,
            pad_token_id=record.sampling.pad_id,
        ),
    )
    record.take(rows, sequences.shape[1] - width - 1, scores, sequences[:, -1])
    progress.update(len(rows))


# ---------------------------------------------------------------------------- loading


def choose_device(device: str) -> str:
    """`auto` is cuda where there is one; InputError for a cuda that is not there."""
    if device == "cuda" and not torch.cuda.is_available():
        raise InputError("--device cuda: this PyTorch sees no CUDA device; use --device cpu")
    return ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device


def load_policy(name: str, device: str):
    """(model, tokenizer) from a hub id or a folder: float32 weights, packed attention, a pad token, no remote code."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, padding_side="left")
        model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32, attn_implementation=packing.ATTENTION)
    except (OSError, ValueError) as error:
        raise InputError(f"--model {name} cannot be loaded: {str(error).splitlines()[0]}") from None
    tokens = max(tokenizer.get_vocab().values()) + 1  # Qwen3 pads its head with rows that are no tokens
    model.vocab_size = min(tokens, model.config.vocab_size)
    kinds = set(getattr(model.config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"}:
        raise InputError(f"--model {name} has layers of kinds {sorted(kinds)}: only full attention can be packed here")
    if not packing.packs_exactly(model):
        why = "it has attention of its own, or logits that are more than its output embedding of the last hidden state"
        raise InputError(f"--model {name} cannot be packed exactly: {why}")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    for parameter in model.parameters():  # loaded ones may be unaligned views of the file, and then the same
        parameter.data = parameter.data.clone()  # arithmetic can round differently from one load to the next
    return model.to(device), tokenizer
