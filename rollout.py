"""
Rollouts: G completions per prompt from the current policy, with the log-probabilities they were sampled at.

The behaviour policy and the trained policy are the same distribution: plain sampling at a temperature that
the log-probabilities carry, no top-k, no top-p, no repetition penalty. The model's own generation config
(Qwen3 ships temperature 0.6, top-k 20, top-p 0.95) is set aside while sampling: transformers would fill
whatever a call leaves open from it.

Letters: K prompts, G completions each, T = max_new_tokens, B sequences sampled at once, V vocabulary.
"""

import contextlib
from dataclasses import dataclass

import torch
from tqdm import tqdm
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
)

import packing
from data import InputError


@dataclass
class Rollouts:
    """What sampling returns. Masks come from `lengths`, never from token values: pad may be an end token."""

    prompt_ids: list[list[int]]  # K prompts
    completion_ids: torch.Tensor  # [K, G, T] int64; beyond a completion's length: anything
    logprobs: torch.Tensor  # [K, G, T] float32, of the sampled tokens at the sampling temperature; 0 beyond
    entropy: torch.Tensor  # [K, G] float32, summed over the completion's tokens, in nats
    energy: torch.Tensor  # [K, G] float32, sum over its tokens of |onehot(token) - softmax|^2, the logit gradient's
    lengths: torch.Tensor  # [K, G] int64, tokens sampled, end token included
    truncated: torch.Tensor  # [K, G] bool, cut off by max_new_tokens before an end token


def join(parts: list[Rollouts]) -> Rollouts:
    """One after the other, as if they had been sampled together."""
    parts = [part for part in parts if part.prompt_ids] or parts[:1]  # those without a prompt have no width either
    prompt_ids, *columns = zip(*(vars(part).values() for part in parts), strict=True)
    return Rollouts([ids for part in prompt_ids for ids in part], *map(torch.cat, columns))


def eos_token_ids(model, tokenizer) -> list[int]:
    """Every token that ends a completion: the generation config's (a list for chat models), else the tokenizer's."""
    ids = model.generation_config.eos_token_id
    ids = tokenizer.eos_token_id if ids is None else ids
    if ids is None:
        raise ValueError("neither the generation config nor the tokenizer names an end token")
    return ids if isinstance(ids, list) else [ids]


class _Recorder(LogitsProcessor):
    """Applies the temperature; records log-prob, entropy and logit-gradient energy of what is sampled, holding [B, V]
    for one step only."""

    def __init__(self, temperature: float):
        self.temperature = temperature
        self.logprobs, self.entropies, self.energies = [], [], []  # one [B] a step
        self.scores = self.probs = None  # [B, V] of the step being sampled

    def __call__(self, input_ids, scores):
        self.take(input_ids)
        self.scores = torch.log_softmax(scores.float() / self.temperature, dim=-1)  # [B, V]
        if not self.scores[:, 0].isfinite().all():  # a NaN or an infinity anywhere in a row spreads to all of it
            raise FloatingPointError("the model's logits are not finite")
        self.probs = self.scores.exp()  # [B, V]
        self.entropies.append(-(self.probs * self.scores).sum(-1))  # [B]
        return self.scores

    def take(self, input_ids):
        """Read what belongs to the newest token from the distribution it was drawn from."""
        if self.scores is None:
            return
        token = input_ids[:, -1:]  # [B, 1]
        logprob = self.scores.gather(1, token).squeeze(1)  # [B]
        others = self.probs.scatter_(1, token, 0.0).square().sum(-1)  # [B]
        self.logprobs.append(logprob)
        self.energies.append(
            torch.expm1(logprob).square() + others
        )  # (1 - p)^2 + sum of the others' p^2: no cancellation


@contextlib.contextmanager
def _sampling_setup(model, config: GenerationConfig):
    """Plain generation settings and transformers' own attention while sampling; the model's after."""
    was_training, own_config = model.training, model.generation_config
    attention = model.config._attn_implementation
    model.eval()
    model.generation_config = config
    model.set_attn_implementation("sdpa")
    try:
        yield
    finally:
        model.set_attn_implementation(attention)
        model.generation_config = own_config
        model.train(was_training)


def sample(
    model,
    prompt_ids: list[list[int]],
    *,
    group_size: int,
    max_new_tokens: int,
    temperature: float,
    eos_ids: list[int],
    pad_id: int,
    batch_size: int,
    seed: int,
    show_progress: bool = False,
) -> Rollouts:
    """Sample `group_size` completions for each prompt. The draw is a function of (weights, prompts, batch_size, seed).

    `batch_size` sequences are sampled at once, whole groups, shortest prompts first: it bounds the memory, and what
    is short need not wait for what is long. Raises FloatingPointError if the model's logits are not finite.
    """
    K, G, device = len(prompt_ids), group_size, model.device
    T = max_new_tokens if K else 0
    completion_ids = torch.full((K, G, T), pad_id, device=device)
    logprobs = torch.zeros(K, G, T, device=device)
    entropy, energy = torch.zeros(K, G, device=device), torch.zeros(K, G, device=device)
    lengths = torch.zeros(K, G, dtype=torch.long, device=device)
    truncated = torch.zeros(K, G, dtype=torch.bool, device=device)

    order = sorted(range(K), key=lambda k: len(prompt_ids[k]))
    step = max(1, batch_size // G)
    batches = [order[start : start + step] for start in range(0, K, step)]
    config = GenerationConfig(
        do_sample=True,
        temperature=1.0,  # the recorder applies ours, so that the log-probs carry it
        top_k=0,
        top_p=1.0,
        num_return_sequences=G,
        max_new_tokens=max_new_tokens,
        eos_token_id=eos_ids,
        pad_token_id=pad_id,
    )
    torch.manual_seed(seed)
    progress = tqdm(total=K, desc="rollout", unit="prompt", delay=3, leave=False, disable=not show_progress)
    with torch.no_grad(), _sampling_setup(model, config), progress:
        for batch in batches:
            ids, recorder = _sample_batch(model, [prompt_ids[k] for k in batch], config, temperature=temperature)
            batch_logprobs = torch.stack(recorder.logprobs, dim=1)  # [len(batch) * G, t], as ids
            t = ids.shape[1]
            ends = torch.isin(ids, torch.tensor(eos_ids, device=device))
            ended = ends.any(dim=1)
            length = torch.where(ended, ends.int().argmax(dim=1) + 1, t)  # up to the first end token
            sampled = torch.arange(t, device=device) < length[:, None]  # [len(batch) * G, t]
            completion_ids[batch, :, :t] = ids.view(-1, G, t)
            logprobs[batch, :, :t] = (batch_logprobs * sampled).view(-1, G, t)
            entropy[batch] = (torch.stack(recorder.entropies, dim=1) * sampled).sum(dim=1).view(-1, G)
            energy[batch] = (torch.stack(recorder.energies, dim=1) * sampled).sum(dim=1).view(-1, G)
            lengths[batch], truncated[batch] = length.view(-1, G), ~ended.view(-1, G)
            progress.update(len(batch))
    return Rollouts(prompt_ids, completion_ids, logprobs, entropy, energy, lengths, truncated)


def _sample_batch(model, prompt_ids, config, *, temperature):
    """One call of generate: completion ids [B, t], and what was recorded of their t steps."""
    width = max(map(len, prompt_ids))  # left padding, so that all completions start in one column
    padded = [[config.pad_token_id] * (width - len(ids)) + ids for ids in prompt_ids]
    real = [[0] * (width - len(ids)) + [1] * len(ids) for ids in prompt_ids]
    recorder = _Recorder(temperature)
    sequences = model.generate(
        input_ids=torch.tensor(padded, device=model.device),
        attention_mask=torch.tensor(real, device=model.device),
        generation_config=config,
        logits_processor=LogitsProcessorList([recorder]),
    )
    recorder.take(sequences)
    return sequences[:, width:], recorder


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
