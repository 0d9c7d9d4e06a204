"""
Rollouts: G completions per prompt from the current policy, and the log-probabilities they had.

The distribution that samples and the one that is trained are the same: plain sampling at a
temperature that the log-probabilities include, without top-k, top-p or a repetition penalty
(eval.py may ask for those). The model's own generation config (Qwen3 ships temperature 0.6,
top-k 20, top-p 0.95) plays no part, except for its end tokens.

`decode` is the loop: it reads each prompt once, then samples its completions one token at a time.
minimal.py's `sample` has the same loop. This one also reads each prompt once for its G completions,
lets them share a row of the batch while their texts are equal (on a CPU), and gives each completion
random numbers of its own, so that it does not depend on what else is sampled.

Two engines can take the loop's place, and also return Rollouts: hf (transformers' model.generate,
engines/hf.py) and vllm (for large models on GPUs, engines/vllm_engine.py).

Letters: K prompts, G completions each, T = max_new_tokens, V vocabulary, B = completions of a
batch, W tokens of the longest of their prompts. n completions are active. They have R texts, which
are rows of the batch, and C texts after the next token. (On a GPU each completion has a text of its
own, after its first token.)
"""

import math
import sys
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from tqdm import tqdm
from transformers import (
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

import decoder
import dppo
from runtime import NotFiniteError
from runtime.device import send

FREE_SHARE = 0.6  # of a GPU's free memory: the rest is for logits, and for reading prompts
# Tokens between two looks for completions that have ended. On a GPU the host waits at a look.
LOOK_EVERY = {"cpu": 1, "cuda": 16}
BLOCK = 512  # tokens of the vocabulary that are summed together, see `inverse_cdf`
BELOW_1 = 1 - 2**-53  # the largest float64 below 1


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
    engine: object = None  # None: the loop below. Else it has a `sample` function, see below
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    show_progress: bool = False


def sample(
    model, prompt_ids: list[list[int]], sampling: Sampling, *, group_size: int, seed: int, keys=None
) -> Rollouts:
    """Sample `group_size` completions of each prompt, shortest prompts first, batch by batch.

    A prompt has a key, by default its place in the list. A completion's random numbers follow from
    (seed, key, its place in the group). So, with the loop or hf and except for rounding, it does
    not depend on other prompts and completions, their order, or the size of a batch. (vLLM's
    samples depend on all prompts.) An engine is a module or an object: sampling.engine.sample takes
    the arguments of this function, and `keys` is never None.

    Raises NotFiniteError if the model's logits are not finite.
    """
    keys = range(len(prompt_ids)) if keys is None else keys
    if sampling.temperature == 0 and group_size > 1:
        # Greedy completions of a prompt are all equal, and vLLM refuses to return several.
        single = sample(model, prompt_ids, sampling, group_size=1, seed=seed, keys=keys)
        _, *columns = vars(single).values()
        columns = (column.repeat_interleave(group_size, dim=1) for column in columns)
        return Rollouts(prompt_ids, *columns)
    options = {"group_size": group_size, "seed": seed, "keys": keys}
    if sampling.engine:
        return sampling.engine.sample(model, prompt_ids, sampling, **options)
    return in_batches(decode, model, prompt_ids, sampling, **options)


# ------------------------------------------------------------------------- the loop


def in_batches(sample_batch, model, prompt_ids, sampling, *, group_size, seed, keys) -> Rollouts:
    """Rollouts of all prompts. sample_batch(model, prompts, group_size, record) samples the
    completions of one batch of them into a Record."""
    K, G, T = len(prompt_ids), group_size, sampling.max_new_tokens
    uniforms = random_numbers(seed, keys, K, G, T)
    ids = torch.full((K, G, T), sampling.pad_id)
    figures = torch.zeros(3, K, G, T)  # log-prob, entropy and energy of each token
    cut = batches(model, prompt_ids, G, sampling)
    bar = {"desc": "rollout", "unit": " batches", "delay": 3, "leave": False}
    with torch.inference_mode(), decoder.evaluation_mode(model):
        for batch in tqdm(cut, disable=not sampling.show_progress, **bar):
            record = Record(sampling, uniforms[batch].flatten(0, 1), model)
            sample_batch(model, [prompt_ids[k] for k in batch], G, record)
            ids[batch] = record.ids.cpu().view(-1, G, T)
            figures[:, batch] = record.figures.cpu().view(3, -1, G, T)

    # Cut each completion after its first end token.
    ends = torch.isin(ids, torch.tensor(sampling.eos_ids))
    ended = ends.any(dim=-1)  # [K, G]
    lengths = torch.where(ended, ends.int().argmax(dim=-1) + 1, T)
    inside = torch.arange(T) < lengths[..., None]  # [K, G, T]
    logprobs, entropy, energy = torch.where(inside, figures, 0.0)
    if not logprobs.isfinite().all():
        raise NotFiniteError("the model's logits are not finite")
    return Rollouts(prompt_ids, ids, logprobs, entropy.sum(-1), energy.sum(-1), lengths, ~ended)


def decode(model, prompts, group_size: int, record: "Record") -> None:
    """Read each prompt once, then sample its completions one token at a time.

    On a CPU, completions of a prompt share a row of the batch while their texts are equal. To know
    them, the host must read every token. On a GPU it would wait for each, so there every completion
    has a row of its own, and those that have ended go on until the next look.
    """
    T, device = record.sampling.max_new_tokens, model.device
    look = LOOK_EVERY[device.type]
    shares = look == 1  # on a CPU

    # Padding on the left makes all completions begin in one column.
    ids, mask = pad_left(prompts, device)  # [K, W]
    W = ids.shape[1]
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
    cache = decoder.new_cache()
    inputs = {"attention_mask": mask, "position_ids": positions, decoder.cache_name(model): cache}
    logits = model(ids, **inputs, logits_to_keep=1).logits[:, -1]  # [K, V]

    # What attention adds to its scores: 0, or -inf at padding. transformers would make it anew for
    # each token. Its memory is a multiple of 8 wide, because attention copies other widths.
    bias = F.pad(mask, (0, T + -(W + T) % 8), value=1)[:, None, None].to(model.dtype).log()
    last = positions[:, -1:]  # [K, 1], the position of the last token of the prompt
    is_padded = min(map(len, prompts)) < W
    forward = decoder.forward_of(model, W + T)

    active = torch.arange(len(record.ids), device=device)  # [n], completions that go on
    row_of = active // group_size  # the row of each of them
    for t in range(T):
        # Each new text continues a row [C] by a token [C, 1]. text_of [n]: the text of each
        # completion, from now on.
        rows, token, text_of = record.draw(logits, active, row_of, t, shares)
        if t + 1 == T:
            break
        if (t + 1) % look == 0:
            going = ~record.ended(active, t + 1 - look, t + 1)
            if not going.any():
                break
            if not going.all():  # completions that have ended leave
                active, text_of = active[going], text_of[going]
                kept, text_of = text_of.unique(return_inverse=True)  # texts of nobody leave, too
                rows, token = rows[kept], token[kept]

        row_of = text_of  # each text becomes a row
        R = len(logits)  # the rows until now: nothing moves if each of them goes on once, in place
        if len(rows) != R or (shares and not torch.equal(rows, torch.arange(R))):
            for layer in cache.layers:
                layer.select(rows)
            bias, last = bias[rows], last[rows]
        visible = bias[..., : W + t + 1] if is_padded else None
        logits = forward(token, last + t + 1, cache, visible)


class Record:
    """The tokens of B completions: draws each from its distribution, and records it.
    uniforms [B, T] are the random numbers."""

    def __init__(self, sampling: Sampling, uniforms, model):
        device, shape = model.device, uniforms.shape
        self.sampling, self.vocab_size = sampling, model.vocab_size
        self.uniforms = send(uniforms, device)
        self.end_ids = torch.tensor(sampling.eos_ids, device=device)
        self.ids = torch.full(shape, sampling.pad_id, device=device)  # [B, T]
        self.figures = torch.zeros(3, *shape, device=device)  # log-prob, entropy, energy
        self.warpers = warpers(sampling)

    def draw(self, logits, active, row_of, t: int, shares: bool):
        """Draw token t of the completions `active` [n] from the logits [R, V] of their rows, row_of
        [n]. Returns the texts after it: the row [C] that each continues, the token [C, 1] that it
        adds, and the text of each completion [n]. If rows are not shared, each has its own."""
        dtype = torch.promote_types(logits.dtype, torch.float32)
        logits = logits[:, : self.vocab_size].to(dtype)  # [R, V]; the head may have more rows
        logprobs = self.warpers(None, logits).log_softmax(dim=1)
        probs, V = logprobs.exp(), logprobs.shape[1]
        if self.sampling.temperature == 0:
            token = logprobs.argmax(dim=1)[row_of]  # [n]
        else:
            token = inverse_cdf(probs, self.uniforms[active, t, None], row_of)[:, 0]

        texts, text_of = row_of * V + token, torch.arange(len(active), device=active.device)
        if shares:
            texts, text_of = texts.unique(return_inverse=True)  # [C], [n]
        rows, token = texts // V, texts[:, None] % V
        logprob = logprobs[rows, token[:, 0]]  # [C]
        entropy = torch.special.entr(probs).sum(dim=1)[rows]
        # Energy: (1 - p)^2 of the token, by expm1, which does not cancel, and p^2 of all others.
        others = probs if not shares and len(rows) == len(probs) else probs[rows]  # [C, V]
        others.scatter_(1, token, 0.0)  # in probs itself, if each of its rows has one token
        energy = logprob.expm1().square() + others.square().sum(dim=1)
        self.ids[active, t] = token[text_of, 0]
        self.figures[:, active, t] = torch.stack([logprob, entropy, energy]).float()[:, text_of]
        return rows, token, text_of

    def ended(self, active, start: int, stop: int):
        """Which of the completions `active` drew an end token from `start` to `stop`, bool [n]."""
        return torch.isin(self.ids[active, start:stop], self.end_ids).any(dim=1)


def inverse_cdf(probs, uniform, row_of):
    """Draw indices [n, 1] from the rows row_of [n] of probabilities [R, V], with one number [n, 1]
    in [0, 1) for each: the first index whose cumulative sum is above `uniform` times the total.

    The sum must be in float64, because in float32 unlikely tokens would lose their share. Over a
    vocabulary of 150,000 it is the slowest part of sampling, so a draw first chooses a block, by
    the blocks' sums, and then a token of it. Block sums are rounded to the type of probs. The
    tokens of a block share exactly its rounded sum.
    """
    V = probs.shape[1]
    blocks = F.pad(probs, (0, -V % BLOCK)).unflatten(1, (-1, BLOCK))  # [R, blocks, BLOCK]
    sums = blocks.sum(dim=2).double()[row_of]  # [n, blocks]
    cumulative = sums.cumsum(dim=1)
    block = _place(cumulative, uniform)  # [n, 1]
    # A token of the block, by how far into the block the random number reaches.
    point = uniform * cumulative[:, -1:] - (cumulative - sums).gather(1, block)
    share = (point / sums.gather(1, block)).clamp(0.0, BELOW_1)
    entries = blocks[row_of, block[:, 0]].double()  # [n, BLOCK]
    return (block * BLOCK + _place(entries.cumsum(dim=1), share)).clamp(max=V - 1)


def _place(cumulative, share):
    """The first column [n, 1] whose cumulative sum is above this share of the total. An entry of 0
    is never chosen: a share below 1 of a total rounds to less than the total. If the sums are NaN,
    any column may come back."""
    point = share * cumulative[:, -1:]
    return torch.searchsorted(cumulative, point, right=True).clamp(max=cumulative.shape[1] - 1)


def warpers(sampling) -> LogitsProcessorList:
    """The functions that apply temperature, top-k and top-p to logits, in transformers' order."""
    processors = LogitsProcessorList()
    if sampling.temperature not in (0, 1):
        processors.append(TemperatureLogitsWarper(sampling.temperature))
    if sampling.top_k:
        processors.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        processors.append(TopPLogitsWarper(sampling.top_p))
    return processors


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


def pad_left(prompts, device):
    """(ids, mask) [K, W] of K prompts, padded on the left. Nothing attends to the padding."""
    W = max(map(len, prompts))
    ids = [[0] * (W - len(prompt)) + prompt for prompt in prompts]
    mask = [[0] * (W - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)
