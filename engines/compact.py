"""
Our fast engine. On a CPU, completions of a prompt share a row of the batch while their texts are
equal. Completions that have ended leave. fast_decoder.py computes the logits of the models that it
supports.

- `sample`: the engine. `_decode` is its loop over tokens.
- `Record`: draws tokens (by `draw`) and records them; engines/hf.py uses it, too
- `next_rows`: which rows the batch has after a token

Letters: K prompts, G completions each, T = max_new_tokens, V vocabulary, B = K x G completions of a
batch, W tokens of its longest prompt. n completions are unfinished; they have R distinct texts, one
row of the batch each; after the next token there are C distinct texts.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from tqdm import tqdm
from transformers import (
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

import rollout
from engines import check_decoder, prefill
from runtime import NotFiniteError
from runtime.device import send

NOT_FINITE = "the model's logits are not finite"
# Tokens between two checks for completions that have ended. On a GPU the host waits at a check, and
# completions that have ended go on until then.
CHECK_EVERY = {"cpu": 1, "cuda": 16}
BLOCK = 512  # tokens of the vocabulary that are summed together, see `draw`
BELOW_1 = 1 - 2**-53  # the largest float64 below 1


def sample(
    model, prompt_ids, sampling: rollout.Sampling, *, group_size: int, seed: int, keys
) -> rollout.Rollouts:
    """See rollout.sample."""
    options = {"group_size": group_size, "seed": seed, "keys": keys}
    return in_batches(_decode, model, prompt_ids, sampling, **options)


def in_batches(decode, model, prompt_ids, sampling, *, group_size, seed, keys) -> rollout.Rollouts:
    """Sample in batches: decode(model, prompts, group_size, record, progress) samples one batch and
    stores it in `record`, a Record."""
    K, G, T = len(prompt_ids), group_size, sampling.max_new_tokens
    bar = {"desc": "rollout", "unit": " completions", "delay": 3, "leave": False}
    progress = tqdm(total=K * G, disable=not sampling.show_progress, **bar)
    uniforms = rollout.random_numbers(seed, keys, K, G, T)
    # Made outside inference mode: autograd cannot use tensors that were made inside it.
    ids = torch.full((K, G, T), sampling.pad_id)
    statistics = torch.zeros(3, K, G, T)
    with progress, torch.inference_mode(), prefill.decoding(model):
        for batch in rollout.batches(model, prompt_ids, G, sampling):
            record = Record(sampling, uniforms[batch], model)
            decode(model, [prompt_ids[k] for k in batch], G, record, progress)
            ids[batch] = record.ids.cpu().view(-1, G, T)
            statistics[:, batch] = record.statistics.cpu().view(3, -1, G, T)
    return finish(prompt_ids, ids, statistics, sampling)


def _decode(model, prompt_ids, group_size, record, progress) -> None:
    """Read each prompt once, then decode its completions in step. A row of the batch serves all
    completions whose texts are equal so far, and splits when they draw different tokens. At each
    check, completions that have ended leave.

    To share rows, the host must read every token. On a GPU it would wait for each of them, so there
    every completion has a row of its own."""
    T, device = record.sampling.max_new_tokens, model.device
    interval = CHECK_EVERY[device.type]
    logits, W, positions, bias, cache = prefill.prefill(model, prompt_ids, T)
    ragged = prefill.is_ragged(prompt_ids)
    decode = check_decoder.decoder(model, W + T)
    active = torch.arange(len(record.ids), device=device)  # the unfinished completions, [n]
    row_of = active // group_size  # the batch's row of each of them; None: a row of its own
    if interval > 1:
        for layer in cache.layers:
            layer.keep(len(active), active, row_of, most=len(active))
        logits, positions, bias = logits[row_of], positions[row_of], bias[row_of]
    if len(logits) == len(active):
        row_of = None
    for step in range(T):
        logprobs = record.distribution(logits)
        # Text number i continues in row i, unless rows were freed or added (below).
        token, continued, row_of = record.draw(active, row_of, step, logprobs)  # [C, 1], [C], [n]
        last = step + 1 == T
        if last or (step + 1) % interval == 0:
            ended = record.ended(active, step // interval * interval, step + 1)
            live = 0 if last else len(active) - int(ended.sum())
            progress.update(len(active) - live)
            if live == 0:
                break
            if live < len(active) or len(token) > len(logits):
                rows = next_rows(continued, row_of, ended.to(device))
                for layer in cache.layers:
                    layer.keep(len(rows.text), rows.copied_to, rows.copied_from, most=live)
                active, token, row_of = active[rows.going], token[rows.text], rows.row_of
                positions, bias = positions[rows.source], bias[rows.source]
        visible = bias[..., : W + step + 1] if ragged else None
        logits = decode(token, positions, step + 1, cache, visible)  # [R, V]


class Record:
    """The samples of B = K x G completions: draws each token from its distribution and records it.
    uniforms [K, G, T] are the random numbers."""

    def __init__(self, sampling: rollout.Sampling, uniforms, model):
        device, uniforms = model.device, uniforms.flatten(0, 1)
        shape = uniforms.shape
        self.sampling = sampling
        self.vocab_size = model.vocab_size
        self.eos = torch.tensor(sampling.eos_ids, device=device)
        self.uniforms = send(uniforms, device)  # [B, T]
        self.ids = torch.full(shape, sampling.pad_id, device=device)  # [B, T]
        # log-prob of the token; over the other tokens, the sum of p log p and the 2-norm of p
        self.statistics = torch.zeros(3, *shape, device=device)
        self.warpers = warpers(sampling)

    def distribution(self, logits):
        """Log-probs [R, V] of the next token; the head's padding is excluded."""
        dtype = torch.promote_types(logits.dtype, torch.float32)
        logits = logits[:, : self.vocab_size]
        if self.warpers:
            logits = self.warpers(None, logits.to(dtype))  # these do not read the texts
        logprobs = torch.log_softmax(logits, dim=-1, dtype=dtype)
        # Finite, so that 0 * log 0 is 0 for the tokens that top-k and top-p leave out.
        return logprobs.clamp_(min=torch.finfo(dtype).min) if self.warpers else logprobs

    def draw(self, active, row_of, step, logprobs):
        """Draw token `step` of completions `active` [n] from log-probs [R, V]: completion i from
        row row_of[i], or with None from row i. Returns the texts after it: their last tokens
        [C, 1], the rows [C] that they continue, ascending, and the text of each completion [n]. If
        row_of is None: the tokens [n, 1], None and None."""
        probs = logprobs.exp()  # [R, V]
        if self.sampling.temperature:
            token = draw(probs, self.uniforms[active, step, None], row_of)  # [n, 1]
        else:  # there is one completion of each prompt
            token = logprobs.argmax(dim=1, keepdim=True)
        if row_of is None:
            self.take(active, step, logprobs, probs, token)
            return token, None, None
        V = logprobs.shape[1]
        texts, text_of = torch.unique(row_of * V + token[:, 0], return_inverse=True)  # [C], [n]
        continued, token = texts // V, texts[:, None] % V
        if len(texts) > len(logprobs):
            logprobs, probs = logprobs[continued], probs[continued]  # [C, V]
        self.take(active, step, logprobs, probs, token, text_of)
        return token, continued, text_of

    def take(self, active, step, logprobs, probs, token, text_of=slice(None)):
        """Record token[text_of] (token is [C, 1]) as token `step` of completions `active`.
        Overwrites probs [C, V], the exp of logprobs."""
        logprob = logprobs.gather(1, token)[:, 0]  # [C]
        probs.scatter_(1, token, 0.0)  # the others'
        others = (probs[:, None] @ logprobs[..., None]).flatten()  # the sum of p log p
        spread = torch.linalg.vector_norm(probs, dim=1)
        self.ids[active, step] = token[text_of, 0]
        statistics = torch.stack([logprob, others, spread]).float()  # [3, C]
        self.statistics[:, active, step] = statistics[:, text_of]

    def ended(self, active, start: int, stop: int):
        """[n] bool on the CPU: which of `active` drew an end token from `start` to `stop`. The host
        waits for it. NotFiniteError if the model's logits were not finite."""
        ends = torch.isin(self.ids[active, start:stop], self.eos).any(dim=1)
        finite = self.statistics[0, active, start:stop].isfinite().all(dim=1)
        ends, finite = torch.stack([ends, finite]).cpu()
        if not finite.all():
            raise NotFiniteError(NOT_FINITE)
        return ends


def draw(probs, uniform, row=None):
    """Draw indices [B, 1] from probabilities [B, V], with one number [B, 1] in [0, 1) for each.

    A draw inverts the cumulative sum of a row. That sum must be in float64, because in float32
    unlikely tokens would lose their share. Over a vocabulary of 150,000 it is the slowest part of
    sampling, so a draw first chooses a block, by the blocks' sums, and then a token of it.

    The index drawn is the first whose cumulative sum is above `uniform` times the total, so rows
    need not sum to 1. With row [B], probs is [R, V] and draw i uses probs[row[i]]; the sums of a
    row are then computed once, however many draws use it.

    Block sums are rounded to the type of probs. The tokens of a block share exactly its rounded
    sum, so each token's probability is as exact as its entry.
    """
    V = probs.shape[1]
    if V <= BLOCK:
        ends = probs.cumsum(dim=1, dtype=torch.float64)
        return _place(ends if row is None else ends[row], uniform)

    # Choose a block. The last one is filled up with zeros.
    row = torch.arange(len(probs), device=probs.device) if row is None else row  # [B]
    blocks = F.pad(probs, (0, -V % BLOCK)).unflatten(1, (-1, BLOCK))  # [R, blocks, BLOCK]
    sums = blocks.sum(dim=2).double()[row]  # [B, blocks]
    ends = sums.cumsum(dim=1)
    block = _place(ends, uniform)  # [B, 1]

    # Choose a token of the block, by how far into the block the random number reaches.
    point = uniform * ends[:, -1:] - (ends - sums).gather(1, block)
    share = (point / sums.gather(1, block)).clamp(0.0, BELOW_1)
    entries = blocks[row, block[:, 0]].double()  # [B, BLOCK]
    token = block * BLOCK + _place(entries.cumsum(dim=1), share)
    return token.clamp(max=V - 1)


def _place(ends, share):
    """The first column [B, 1] whose cumulative sum is above this share of the total.

    An entry of 0 is never chosen: a share below 1 of a total rounds to less than the total. If the
    sums are NaN, any column may come back.
    """
    point = share * ends[:, -1:]
    return torch.searchsorted(ends, point, right=True).clamp(max=ends.shape[1] - 1)


def finish(prompt_ids, ids, statistics, sampling) -> rollout.Rollouts:
    """Cut each completion after its first end token; ids [K, G, T], statistics [3, K, G, T]."""
    ends = torch.isin(ids, torch.tensor(sampling.eos_ids))
    ended = ends.any(dim=-1)  # [K, G]
    lengths = torch.where(ended, ends.int().argmax(dim=-1) + 1, ids.shape[-1])
    inside = torch.arange(ids.shape[-1]) < lengths[..., None]  # [K, G, T]
    logprobs, others, spread = torch.where(inside, statistics, 0.0)
    entropy = -(others + logprobs.exp() * logprobs).sum(dim=-1)
    # (1 - p)^2 + sum of the others' p^2, which does not cancel for p near 1
    energy = (torch.expm1(logprobs).square() + spread.square()).sum(dim=-1)
    return rollout.Rollouts(prompt_ids, ids, logprobs, entropy, energy, lengths, ~ended)


def warpers(sampling) -> LogitsProcessorList:
    """The functions that apply a rollout.Sampling's settings to logits, in transformers' order.
    There are none for plain sampling at temperature 1 or 0."""
    processors = LogitsProcessorList()
    if sampling.temperature not in (0, 1):
        processors.append(TemperatureLogitsWarper(sampling.temperature))
    if sampling.top_k:
        processors.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        processors.append(TopPLogitsWarper(sampling.top_p))
    return processors


class Rows(NamedTuple):
    """The R rows of the batch after a token."""

    going: torch.Tensor  # [n] the unfinished completions, in the order of their rows
    text: torch.Tensor  # [R] the text in each row
    source: torch.Tensor  # [R] the row that held the text before this token
    copied_to: torch.Tensor  # rows that get keys and values from another row
    copied_from: torch.Tensor  # the row that each gets them from
    row_of: torch.Tensor | None  # [n] each unfinished completion's row; None: each has its own


def next_rows(continued, text_of, ended) -> Rows:
    """Which rows the batch has after a token.

    continued [C] is the row that each text continues, ascending. text_of [n] is the text of each
    completion, and ended [n] says which completions are finished.

    A row that continues as one text stays where it is. If it splits, the first continuation stays,
    and the others go to freed rows, then to new rows at the end. This copies as little of the cache
    as possible. If continued and text_of are None, no completions share a row.
    """
    numbers = torch.arange(len(ended), device=ended.device)
    if text_of is None:
        continued = text_of = numbers
    going = numbers[~ended]
    kept, text_of = text_of[going].unique(return_inverse=True)  # texts of unfinished completions
    continued = continued[kept]

    # The first continuation of a row stays, unless its row is beyond the last one that is needed.
    first = continued.diff(prepend=continued.new_tensor([-1])) > 0
    stays = first & (continued < len(kept))
    order = torch.full_like(continued, -1)  # [R], which of the kept texts is in each row
    order[continued[stays]] = stays.nonzero()[:, 0]
    free = (order < 0).nonzero()[:, 0]
    order[free] = (~stays).nonzero()[:, 0]

    row_of = order.argsort()[text_of]  # [n] the row of each unfinished completion
    row_of, by_row = row_of.sort(stable=True)
    if len(kept) == len(going):
        row_of = None
    source = continued[order]
    return Rows(going[by_row], kept[order], source, free, source[free], row_of)
