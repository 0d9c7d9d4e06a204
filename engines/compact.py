"""
What sampling needs of transformers: a model in its plain state, its generate function, and a cache
of keys and values whose rows can be split and dropped.

transformers' own cache copies the keys and values of all tokens for every new one.
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

ROOM = 64  # columns that are allocated ahead
SHARED = 16  # tokens that prompts have in common, from which on they are read once
NOT_FINITE = "the model's logits are not finite"


@contextlib.contextmanager
def plain_generation(model):
    """Evaluation mode, transformers' attention and an empty generation config; restored on exit.

    Without cuDNN's attention: it makes a plan for each shape, and each token is a shape of its own.
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
    """Every token that ends a completion, from the generation config, else from the tokenizer.

    Chat models have a list of them in the generation config."""
    ids = model.generation_config.eos_token_id
    ids = tokenizer.eos_token_id if ids is None else ids
    if ids is None:
        raise ValueError("neither the generation config nor the tokenizer names an end token")
    return ids if isinstance(ids, list) else [ids]


def warpers(sampling) -> LogitsProcessorList:
    """What turns logits into those of a rollout.Sampling's distribution, in transformers' order;
    empty for plain sampling at temperature 1 or 0."""
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
    """(ids, mask) [K, width]: all completions start in the same column.

    The padding repeats a token of the prompt, so that it adds nothing to a repetition penalty."""
    width = max(map(len, prompt_ids))
    ids = [[ids[0]] * (width - len(ids)) + ids for ids in prompt_ids]
    mask = [[0] * (width - len(ids)) + [1] * len(ids) for ids in prompt_ids]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)


def prefill(model, prompt_ids, room):
    """Read K prompts, the longest of W tokens; `room` tokens will follow each. What all of them
    begin with (a system prompt, examples) is read once.

    Returns the logits [K, V] after them, their ids [K, W], the positions [K, 1] of their last
    tokens, what attention adds at each column [K, 1, 1, W + room or more], and the cache."""
    begun = common_beginning(prompt_ids)  # P tokens
    ids, mask = pad_left([prompt[len(begun) :] for prompt in prompt_ids], model.device)
    K, P, device = len(ids), len(begun), model.device
    cache = growing_cache()
    if begun:
        begun = torch.tensor([begun], device=device)
        model(begun, past_key_values=cache, logits_to_keep=1)
        others = torch.arange(1, K, device=device)
        for layer in cache.layers:
            layer.keep(K, others, torch.zeros_like(others), most=K)
        ids = torch.cat([begun.expand(K, -1), ids], dim=1)  # [K, W]
        mask = F.pad(mask, (P, 0), value=1)  # [K, W]
    W = mask.shape[1]
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
    inputs = {"position_ids": positions[:, P:], "past_key_values": cache, "attention_mask": None}
    if P or is_ragged(prompt_ids):
        # transformers takes a mask of four dimensions as it is. Padding attends to itself, because
        # kernels differ in what a query without keys gets.
        visible = mask.bool()[:, None, None].expand(K, 1, W, W).tril()
        visible = visible | torch.eye(W, dtype=torch.bool, device=device)
        inputs["attention_mask"] = visible[:, :, P:]
    logits = model(ids[:, P:], **inputs, logits_to_keep=1).logits[:, -1]
    # Attention takes a mask as it is if it has the queries' dtype, and rows of whole 16 bytes.
    bias = torch.zeros_like(mask, dtype=model.dtype).masked_fill(mask == 0, -torch.inf)
    bias = F.pad(bias, (0, room + -(W + room) % 8))[:, None, None]
    return logits, ids, positions[:, -1:], bias, cache


def common_beginning(prompt_ids) -> list[int]:
    """The tokens that all prompts begin with, without the last token of any; [] if there are fewer
    than SHARED of them, which would not be worth a forward of their own."""
    least, most = min(prompt_ids), max(prompt_ids)  # in the order of lists: these two differ first
    shortest = min(map(len, prompt_ids)) - 1
    pairs = zip(least[:shortest], most, strict=False)
    number = next((place for place, (a, b) in enumerate(pairs) if a != b), shortest)
    return least[:number] if number >= SHARED and len(prompt_ids) > 1 else []


def is_ragged(prompt_ids) -> bool:
    """Whether prompts have padding, which attention must not see."""
    return len(set(map(len, prompt_ids))) > 1


def generate(model, prompt_ids, group_size, record, progress):
    """One call of model.generate. It gets scores that leave only the token that we have drawn."""
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
    """Keys and values [R, H, n, D] of one layer: the first rows and columns of one buffer
    [2, rows, H, columns, D]."""

    buffer = None

    def update(self, key_states, value_states, *args, **kwargs):
        """Write the columns of new tokens, [R, H, new, D] each; returns the keys and values of all
        tokens, [R, H, n, D] each."""
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
        """`update` by one token, whose keys and values are one tensor [R, 2, H, D]: one copy."""
        self._room(1)[:, :, :, 0].copy_(states.transpose(0, 1))
        return self.keys, self.values

    def keep(self, count, gaps, movers, most):
        """Keep the first `count` rows, after rows `movers` have been copied to rows `gaps`. There
        may be more rows than before, and later up to `most`."""
        length = self.get_seq_length()
        if count > self.buffer.shape[1]:
            self._allocate(min(2 * count, most), self.buffer.shape[3])
        used = self.buffer[:, :, :, :length]
        used.index_copy_(1, gaps, used.index_select(1, movers))
        self._show(count, length)

    def _room(self, new):
        """The columns [2, R, H, new, D] of new tokens, which the keys and values now include."""
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
    """The rows of the batch after a token, R of them. All tensors are small and on the CPU."""

    going: torch.Tensor  # [n] the completions that go on, in the order of their rows
    text: torch.Tensor  # [R] the text in each row
    source: torch.Tensor  # [R] the row that it continues
    copied_to: torch.Tensor  # the rows whose keys and values come from another row,
    copied_from: torch.Tensor  # and from which
    row_of: torch.Tensor | None  # [n] the row of each completion that goes on; None: its own


def next_rows(continued, text_of, ended) -> Rows:
    """Which rows the batch has after a token.

    continued [C] is the row that each text continues, ascending; text_of [n] the text of each
    completion; ended [n] says which completions leave. Without texts (None), each completion is its
    own row and text. A row's first text stays in its place. Other texts fill places that are free,
    then new ones at the end, so that few keys and values are copied."""
    every = torch.arange(len(ended))
    continued, text_of = (every, every) if text_of is None else (continued, text_of)
    going = every[~ended]
    kept, text_of = text_of[going].unique(return_inverse=True)  # texts of completions that go on
    continued = continued[kept]
    stays = (continued.diff(prepend=torch.tensor([-1])) > 0) & (continued < len(kept))
    order = torch.full_like(continued, -1)  # which of the texts comes in each row
    order[continued[stays]] = stays.nonzero()[:, 0]
    free = (order < 0).nonzero()[:, 0]
    order[free] = (~stays).nonzero()[:, 0]
    row, by_row = order.argsort()[text_of].sort(stable=True)
    source = continued[order]
    row_of = row if len(kept) < len(going) else None
    return Rows(going[by_row], kept[order], source, free, source[free], row_of)
