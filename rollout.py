"""
Rollouts: G completions per prompt from the current policy, and the log-probabilities they had.

The distribution that samples and the one that is trained are the same: plain sampling at a
temperature that the log-probabilities include, without top-k, top-p or a repetition penalty
(eval.py may ask for those). The model's own generation config (Qwen3 ships temperature 0.6,
top-k 20, top-p 0.95) plays no part, except for its end tokens.

The plain loop below reads each prompt once, then samples its completions one token at a time.
Engines take the same arguments and return the same; tests compare them with the plain loop:
    compact  a faster loop, which on a CPU computes equal texts of a group once. The default of
             train.py.
    hf       transformers' model.generate
    vllm     vLLM in this process, for large models on GPUs

Letters: K prompts, G completions each, T = max_new_tokens, V vocabulary, B prompts read at once,
W tokens of the longest of them, n completions that are unfinished.
"""

import contextlib
import inspect
import math
import sys
from dataclasses import dataclass

import torch
from tqdm import tqdm
from transformers import DynamicCache

import dppo
from runtime import NotFiniteError

FREE_SHARE = 0.6  # of a GPU's free memory: the rest is for logits, and for reading prompts


@dataclass
class Rollouts:
    """What sampling returns, on the CPU. Use `lengths` to find a completion's end: the pad token
    may be an end token."""

    prompt_ids: list[list[int]]  # K prompts
    completion_ids: torch.Tensor  # [K, G, T] int64; arbitrary beyond a completion's length
    logprobs: torch.Tensor  # [K, G, T] float32, sampled tokens at the temperature; 0 beyond length
    entropy: torch.Tensor  # [K, G] float32, nats summed over the completion's tokens; vllm: NaN
    energy: torch.Tensor  # [K, G] float32, sum of |onehot(token) - softmax|^2; vllm: a bound of it
    lengths: torch.Tensor  # [K, G] int64, tokens sampled, end token included
    truncated: torch.Tensor  # [K, G] bool, cut off by max_new_tokens before an end token


@dataclass
class Sampling:
    """How to sample. Training needs the defaults of top_k and top_p: with other values, completions
    would not be drawn from the policy that is trained."""

    max_new_tokens: int  # T
    eos_ids: list[int]  # each ends a completion
    pad_id: int  # may be one of eos_ids
    temperature: float = 1.0  # log-probs include it; 0 is greedy, and log-probs are those at 1
    batch_size: int = 512  # sequences sampled at once, at most, in whole groups
    engine: object = None  # None: the plain loop. Else it has a `sample` function, see below
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    show_progress: bool = False


def sample(
    model, prompt_ids: list[list[int]], sampling: Sampling, *, group_size: int, seed: int, keys=None
) -> Rollouts:
    """Sample `group_size` completions of each prompt, shortest prompts first, batch by batch.

    A prompt has a key, by default its place in the list. A completion's random numbers follow from
    (seed, key, its place in the group). So, except for rounding, it does not depend on other
    prompts and completions, their order, the size of a batch, or the engine. (vLLM's samples depend
    on all prompts.) An engine is a module or an object: sampling.engine.sample takes the arguments
    of this function, and `keys` is never None.

    Raises NotFiniteError if the model's logits are not finite, and ValueError if the plain loop
    is asked for top_k or top_p.
    """
    keys = range(len(prompt_ids)) if keys is None else keys
    if sampling.temperature == 0 and group_size > 1:
        # Greedy completions of a prompt are all equal, and vLLM refuses to return several.
        single = sample(model, prompt_ids, sampling, group_size=1, seed=seed, keys=keys)
        _, *columns = vars(single).values()
        columns = (column.repeat_interleave(group_size, dim=1) for column in columns)
        return Rollouts(prompt_ids, *columns)
    sample_all = sampling.engine.sample if sampling.engine else _plain
    return sample_all(model, prompt_ids, sampling, group_size=group_size, seed=seed, keys=keys)


# ------------------------------------------------------------------------- the plain loop


@torch.no_grad()
def _plain(model, prompt_ids, sampling: Sampling, *, group_size, seed, keys) -> Rollouts:
    if sampling.top_k or sampling.top_p < 1:
        raise ValueError("the plain loop has no top_k or top_p: use an engine")
    K, G, T = len(prompt_ids), group_size, sampling.max_new_tokens
    uniforms = random_numbers(seed, keys, K, G, T)
    rollouts = Rollouts(
        prompt_ids,
        completion_ids=torch.full((K, G, T), sampling.pad_id),
        logprobs=torch.zeros(K, G, T),
        entropy=torch.zeros(K, G),
        energy=torch.zeros(K, G),
        lengths=torch.zeros(K, G, dtype=torch.long),
        truncated=torch.zeros(K, G, dtype=torch.bool),
    )
    cut = batches(model, prompt_ids, G, sampling)
    bar = {"desc": "rollout", "unit": " batches", "delay": 3, "leave": False}
    with evaluation_mode(model):
        for batch in tqdm(cut, disable=not sampling.show_progress, **bar):
            _sample_batch(model, batch, uniforms, sampling, rollouts)
    return rollouts


def _sample_batch(
    model, batch: list[int], uniforms, sampling: Sampling, rollouts: Rollouts
) -> None:
    """Sample completions of B prompts, whose places are `batch`, into the rollouts."""
    G, T = rollouts.completion_ids.shape[1:]
    end_ids = torch.tensor(sampling.eos_ids, device=model.device)

    # Read each prompt once, padded on the left, so that all completions begin in one column.
    prompts = [rollouts.prompt_ids[k] for k in batch]
    W = max(map(len, prompts))
    ids = [[0] * (W - len(prompt)) + prompt for prompt in prompts]
    mask = [[0] * (W - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    ids, mask = (torch.tensor(rows, device=model.device) for rows in (ids, mask))  # [B, W] each
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
    cache = DynamicCache()
    read_with = {cache_name(model): cache}
    inputs = {"attention_mask": mask, "position_ids": positions, **read_with}
    logits = model(ids, **inputs, logits_to_keep=1).logits[:, -1]  # [B, padded V]

    # From here on each unfinished completion has a row: completion g of prompt k.
    k = torch.tensor(batch).repeat_interleave(G)  # [n]
    g = torch.arange(G).repeat(len(batch))  # [n]
    logits, mask = logits.repeat_interleave(G, dim=0), mask.repeat_interleave(G, dim=0)
    cache.batch_repeat_interleave(G)

    for t in range(T):
        # The distribution of token t. In float64, sums over the vocabulary lose nothing.
        logits = logits[:, : model.vocab_size].double()  # [n, V]
        logprobs = (logits / (sampling.temperature or 1.0)).log_softmax(dim=1)  # [n, V]
        if logprobs.isnan().any():
            raise NotFiniteError("the model's logits are not finite")
        probs = logprobs.exp()

        # The token is the first whose cumulative probability is above a uniform random number.
        if sampling.temperature == 0:
            token = logprobs.argmax(dim=1, keepdim=True)  # [n, 1]
        else:
            ends = probs.cumsum(dim=1)
            # The probabilities may not sum to exactly 1.
            point = uniforms[k, g, t, None].to(ends.device) * ends[:, -1:]
            token = torch.searchsorted(ends, point, right=True)  # [n, 1]
        one_hot = torch.zeros_like(probs).scatter_(1, token, 1.0)
        going = ~torch.isin(token[:, 0], end_ids)  # [n]

        rollouts.completion_ids[k, g, t] = token[:, 0].cpu()
        rollouts.logprobs[k, g, t] = logprobs.gather(1, token)[:, 0].float().cpu()
        rollouts.entropy[k, g] += torch.special.entr(probs).sum(dim=1).float().cpu()
        rollouts.energy[k, g] += (one_hot - probs).square().sum(dim=1).float().cpu()
        rollouts.lengths[k, g] += 1
        rollouts.truncated[k, g] = going.cpu()  # until a later token is an end
        if t + 1 == T or not going.any():
            break

        # Completions that have ended leave; the others read their new token.
        if not going.all():
            k, g, token, mask = k[going.cpu()], g[going.cpu()], token[going], mask[going]
            cache.batch_select_indices(going)
        mask = torch.cat([mask, torch.ones_like(token)], dim=1)
        positions = mask.sum(dim=1, keepdim=True) - 1
        inputs = {"attention_mask": mask, "position_ids": positions, **read_with}
        logits = model(token, **inputs).logits[:, -1]


# ------------------------------------------------------------------------- what engines use, too


def cache_bytes(config, dtype: torch.dtype) -> int:
    """Bytes of a token's keys and values in the cache of a model with this config."""
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return 2 * config.num_hidden_layers * heads * width * dtype.itemsize


def cache_tokens(model) -> int:
    """The number of tokens that the key-value cache of all sequences sampled at once may hold."""
    if model.device.type != "cuda":
        return sys.maxsize
    free, _ = torch.cuda.mem_get_info()
    free += torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    return int(FREE_SHARE * free) // cache_bytes(model.config, model.dtype)


def batches(model, prompt_ids, group_size: int, sampling: Sampling) -> list[list[int]]:
    """The places of the prompts, in batches of whole groups. Short prompts come first: similar
    lengths need less padding."""
    tokens, cut = cache_tokens(model), []
    for k in sorted(range(len(prompt_ids)), key=lambda k: len(prompt_ids[k])):
        longest = len(prompt_ids[k]) + sampling.max_new_tokens
        most = min(sampling.batch_size, tokens // longest)  # sequences
        if not cut or (len(cut[-1]) + 1) * group_size > most:
            cut.append([])
        cut[-1].append(k)
    return cut


def cache_name(model) -> str:
    """What a model calls its key-value cache: `cache` since transformers 5.24, `past_key_values`
    before. Older models silently ignore an argument that is called `cache`."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def random_numbers(seed: int, keys, K: int, G: int, T: int) -> torch.Tensor:
    """Random numbers [K, G, T] in [0, 1), float64, of the K prompts with these keys.

    Those of completion g begin where the generator of (seed, key) has counted to g * 2^64. So they
    do not depend on G, and a larger T only adds numbers.
    """
    numbers = torch.empty(K, G, T, dtype=torch.float64)
    for key, of_prompt in zip(keys, numbers.numpy(), strict=True):
        generator = dppo.generator_for(seed, key)
        for of_completion in of_prompt:
            generator.random(out=of_completion)
            counted = math.ceil(T / 4)  # Philox counts once for four numbers
            generator.bit_generator.advance(2**64 - counted)
    return numbers


@contextlib.contextmanager
def evaluation_mode(model):
    """No dropout, and transformers' attention, since packing's has no cache; restored on exit."""
    was_training, attention = model.training, model.config._attn_implementation
    model.eval().set_attn_implementation("sdpa")
    try:
        yield
    finally:
        model.train(was_training).set_attn_implementation(attention)
