"""
The parts of sampling that deal with transformers.

- `plain_generation` and `warpers`: a model in a known state, and the settings that change logits
- `prefill`: read the prompts
- `generate`: the reference engine, transformers' own model.generate
- `GrowingLayer`: a key-value cache for the compact engine, whose rows can be split and dropped.
  transformers' own cache copies all keys and values for every new token.
- `next_rows`: which rows the compact engine's batch has after a token
"""

import contextlib
from typing import NamedTuple

import torch
import torch.nn.functional as F
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.cache_utils import Cache, DynamicLayer

ROOM = 64  # columns of the cache that are allocated ahead
SHARED = 16  # a beginning that all prompts share is read once if it has this many tokens
NOT_FINITE = "the model's logits are not finite"


@contextlib.contextmanager
def plain_generation(model):
    """Evaluation mode, transformers' attention and an empty generation config; restored on exit.

    cuDNN's attention is off: it makes a plan for each shape, and every token brings a new shape.
    """
    was_training = model.training
    own_config = model.generation_config
    attention = model.config._attn_implementation
    cudnn = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    model.eval().set_attn_implementation("sdpa")
    # transformers fills whatever a call leaves open from the model's generation config.
    model.generation_config = GenerationConfig()
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(cudnn)
        model.train(was_training).set_attn_implementation(attention)
        model.generation_config = own_config


def eos_token_ids(model, tokenizer) -> list[int]:
    """Every token that ends a completion. The generation config names them, for chat models in a
    list; if it does not, the tokenizer's end token is the only one."""
    ids = model.generation_config.eos_token_id
    ids = tokenizer.eos_token_id if ids is None else ids
    if ids is None:
        raise ValueError("neither the generation config nor the tokenizer names an end token")
    return ids if isinstance(ids, list) else [ids]


def warpers(sampling) -> LogitsProcessorList:
    """The functions that apply a rollout.Sampling's settings to logits, in transformers' order.
    There are none for plain sampling at temperature 1 or 0."""
    found = LogitsProcessorList()
    if sampling.repetition_penalty != 1:
        found.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    if sampling.temperature not in (0, 1):
        found.append(TemperatureLogitsWarper(sampling.temperature))
    if sampling.top_k:
        found.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        found.append(TopPLogitsWarper(sampling.top_p))
    return found


def pad_left(prompt_ids, device):
    """(ids, mask) [K, width], padded on the left, so that all completions start in one column.

    The padding repeats a token of the prompt. A repetition penalty penalizes that one anyway."""
    width = max(map(len, prompt_ids))
    ids = [[ids[0]] * (width - len(ids)) + ids for ids in prompt_ids]
    mask = [[0] * (width - len(ids)) + [1] * len(ids) for ids in prompt_ids]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)


def prefill(model, prompt_ids, room):
    """Read K prompts, the longest of W tokens, after each of which `room` tokens will be sampled.

    Returns (logits, ids, positions, bias, cache): the logits [K, V] of the first sampled token, the
    padded prompts [K, W], the position [K, 1] of each prompt's last token, and the cache. bias
    [K, 1, 1, W + room or more] is added to attention's scores: 0, and -inf at padding.

    If all prompts begin with the same P tokens (a system prompt, examples), these are read once.
    """
    beginning = common_beginning(prompt_ids)
    K, P, device = len(prompt_ids), len(beginning), model.device
    ids, mask = pad_left([prompt[P:] for prompt in prompt_ids], device)
    cache = growing_cache()
    if P:
        beginning = torch.tensor([beginning], device=device)
        model(beginning, past_key_values=cache, logits_to_keep=1)
        others = torch.arange(1, K, device=device)
        for layer in cache.layers:  # every prompt gets a copy of the beginning's row
            layer.keep(K, others, torch.zeros_like(others), most=K)
        ids = torch.cat([beginning.expand(K, -1), ids], dim=1)  # [K, W]
        mask = F.pad(mask, (P, 0), value=1)  # [K, W]
    W = mask.shape[1]
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
    inputs = {"position_ids": positions[:, P:], "past_key_values": cache, "attention_mask": None}
    if P or is_ragged(prompt_ids):
        # transformers uses a mask of four dimensions unchanged. Padding attends to itself: kernels
        # differ in what they return for a query without keys.
        visible = mask.bool()[:, None, None].expand(K, 1, W, W).tril()
        visible = visible | torch.eye(W, dtype=torch.bool, device=device)
        inputs["attention_mask"] = visible[:, :, P:]
    logits = model(ids[:, P:], **inputs, logits_to_keep=1).logits[:, -1]
    # Attention need not copy the bias if it has the queries' type, and rows of whole 16 bytes.
    bias = torch.zeros_like(mask, dtype=model.dtype).masked_fill(mask == 0, -torch.inf)
    bias = F.pad(bias, (0, room + -(W + room) % 8))[:, None, None]
    return logits, ids, positions[:, -1:], bias, cache


def common_beginning(prompt_ids) -> list[int]:
    """The tokens that all prompts begin with; [] if they are too few to be worth a forward.

    A prompt's last token is never part of it, because its logits predict the first sampled token.
    """
    # What the smallest and the largest list share, all lists between them share, too.
    first, last = min(prompt_ids), max(prompt_ids)
    longest = min(map(len, prompt_ids)) - 1
    pairs = zip(first[:longest], last, strict=False)
    number = next((place for place, (a, b) in enumerate(pairs) if a != b), longest)
    return first[:number] if number >= SHARED and len(prompt_ids) > 1 else []


def is_ragged(prompt_ids) -> bool:
    """Whether some prompts are padded. Attention must not see padding."""
    return len(set(map(len, prompt_ids))) > 1


def generate(model, prompt_ids, group_size, record, progress):
    """Sample by one call of model.generate. Our own code draws each token, with its own random
    numbers, and generate gets scores that leave it only that token."""
    active = record.wanted
    repeated = [prompt_ids[number // group_size] for number in active.tolist()]
    sequences, mask = pad_left(repeated, model.device)
    B, width = sequences.shape

    def draw(sequences, logits):
        scores = record.distribution(sequences, logits)
        if scores.isnan().any():  # generate would go on with them
            raise FloatingPointError(NOT_FINITE)
        token, _, _ = record.draw(active, None, sequences.shape[1] - width, scores)
        return torch.full_like(logits, -torch.inf).scatter_(1, token, 0.0)

    model.generate(
        sequences,
        attention_mask=mask,
        logits_processor=LogitsProcessorList([draw]),
        generation_config=GenerationConfig(
            do_sample=False,
            max_new_tokens=record.sampling.max_new_tokens,
            eos_token_id=record.sampling.eos_ids,
            pad_token_id=record.sampling.pad_id,
        ),
    )
    record.keep_recent(active, 0)
    progress.update(B)


class GrowingLayer(DynamicLayer):
    """Keys and values [R, H, n, D] of one layer, for R rows and n tokens.

    They are views of a larger buffer [2, rows, H, columns, D], so a new token is one copy.
    """

    buffer = None

    def update(self, key_states, value_states, *args, **kwargs):
        """Add the keys and values [R, H, new, D] of new tokens; returns those of all tokens."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            R, H, _, D = key_states.shape
            self.buffer = key_states.new_empty(2, R, H, 0, D)
            self._show(R, 0)
        keys, values = self._room(key_states.shape[2])
        keys.copy_(key_states)
        values.copy_(value_states)
        return self.keys, self.values

    def append(self, states):
        """`update` by one token, whose keys and values come as one tensor [R, 2, H, D]."""
        self._room(1)[:, :, :, 0].copy_(states.transpose(0, 1))
        return self.keys, self.values

    def keep(self, count, gaps, movers, most):
        """Copy rows `movers` to rows `gaps`, then keep the first `count` rows.

        `count` may be larger than before; there will never be more than `most` rows.
        """
        length = self.get_seq_length()
        if count > self.buffer.shape[1]:
            self._allocate(min(2 * count, most), self.buffer.shape[3])
        used = self.buffer[:, :, :, :length]
        used.index_copy_(1, gaps, used.index_select(1, movers))
        self._show(count, length)

    def _room(self, new):
        """Make room for new tokens; returns their columns [2, R, H, new, D], to be written."""
        rows, start = len(self.keys), self.get_seq_length()
        if start + new > self.buffer.shape[3]:
            self._allocate(rows, start + new + ROOM)
        self._show(rows, start + new)
        return self.buffer[:, :rows, :, start : start + new]

    def _allocate(self, rows, columns):
        """Move the keys and values to a buffer of this size."""
        old = self.buffer[:, : len(self.keys), :, : self.get_seq_length()]
        _, R, H, n, D = old.shape
        self.buffer = old.new_empty(2, rows, H, columns, D)
        self.buffer[:, :R, :, :n] = old

    def _show(self, rows, length):
        self.keys, self.values = self.buffer[:, :rows, :, :length]


def growing_cache() -> Cache:
    """An empty cache for a model whose layers all have full attention."""
    return Cache(layer_class_to_replicate=GrowingLayer)


class Rows(NamedTuple):
    """The R rows of the batch after a token. All tensors are small and on the CPU."""

    going: torch.Tensor  # [n] the unfinished completions, in the order of their rows
    text: torch.Tensor  # [R] the text in each row
    source: torch.Tensor  # [R] the row before this token that the text continues
    copied_to: torch.Tensor  # the rows whose keys and values must be copied from another row,
    copied_from: torch.Tensor  # and from which
    row_of: torch.Tensor | None  # [n] each unfinished completion's row; None: each has its own


def next_rows(continued, text_of, ended) -> Rows:
    """Which rows the batch has after a token.

    continued [C] is the row that each text continues, ascending. text_of [n] is the text of each
    completion, and ended [n] says which completions are finished.

    A row that continues as one text stays where it is. If it splits, the first continuation stays,
    and the others go to freed rows, then to new rows at the end. This copies as little of the cache
    as possible. If continued and text_of are None, no completions share a row.
    """
    every = torch.arange(len(ended))
    if text_of is None:
        continued = text_of = every
    going = every[~ended]
    kept, text_of = text_of[going].unique(return_inverse=True)  # texts of unfinished completions
    continued = continued[kept]

    # The first continuation of a row stays, unless its row is beyond the last one that is needed.
    first = continued.diff(prepend=torch.tensor([-1])) > 0
    stays = first & (continued < len(kept))
    order = torch.full_like(continued, -1)  # [R], which of the kept texts is in each row
    order[continued[stays]] = stays.nonzero()[:, 0]
    free = (order < 0).nonzero()[:, 0]
    order[free] = (~stays).nonzero()[:, 0]

    row, by_row = order.argsort()[text_of].sort(stable=True)
    source = continued[order]
    row_of = row if len(kept) < len(going) else None
    return Rows(going[by_row], kept[order], source, free, source[free], row_of)
