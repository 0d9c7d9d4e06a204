"""
Read prompts into a cache whose rows can be split and dropped.

- `decoding`: the model in a known state while it samples
- `prefill`: read the prompts
- `GrowingLayer`: a key-value cache. transformers' own copies all keys and values for every token.
"""

import contextlib

import torch
import torch.nn.functional as F
from transformers.cache_utils import Cache, DynamicLayer

import rollout

ROOM = 64  # columns of the cache that are allocated ahead


@contextlib.contextmanager
def decoding(model):
    """rollout.evaluation_mode without cuDNN's attention; restored on exit.

    cuDNN makes a plan for each shape, and every token brings a new shape.
    """
    cudnn = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        with rollout.evaluation_mode(model):
            yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(cudnn)


def pad_left(prompt_ids, device):
    """(ids, mask) [K, width], padded on the left, so that all completions start in one column.

    Nothing attends to the padding; it repeats a token of the prompt."""
    width = max(map(len, prompt_ids))
    ids = [[ids[0]] * (width - len(ids)) + ids for ids in prompt_ids]
    mask = [[0] * (width - len(ids)) + [1] * len(ids) for ids in prompt_ids]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)


def prefill(model, prompt_ids, room):
    """Read K prompts, the longest of W tokens. `room` tokens will be sampled after each.

    Returns (logits, W, positions, bias, cache): the logits [K, V] of the first sampled token, W,
    the position [K, 1] of each prompt's last token, a bias [K, 1, 1, W + room or more], and the
    cache. The bias is added to attention's scores: 0, and -inf at padding.
    """
    ids, mask = pad_left(prompt_ids, model.device)  # [K, W] each
    K, W = mask.shape
    cache = Cache(layer_class_to_replicate=GrowingLayer)
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
    inputs = {"position_ids": positions, "attention_mask": None, rollout.cache_name(model): cache}
    if is_ragged(prompt_ids):
        # transformers uses a mask of four dimensions unchanged. Padding attends to itself: kernels
        # differ in what they return for a query without keys.
        visible = mask.bool()[:, None, None].expand(K, 1, W, W).tril()
        diagonal = torch.eye(W, dtype=torch.bool, device=model.device)
        inputs["attention_mask"] = visible | diagonal
    logits = model(ids, **inputs, logits_to_keep=1).logits[:, -1]
    # Attention copies the bias unless it has the queries' type and rows of a multiple of 16 bytes.
    bias = torch.zeros_like(mask, dtype=model.dtype).masked_fill(mask == 0, -torch.inf)
    padding = -(W + room) % 8
    bias = F.pad(bias, (0, room + padding))[:, None, None]
    return logits, W, positions[:, -1:], bias, cache


def is_ragged(prompt_ids) -> bool:
    """Whether some prompts are padded. Attention must not see padding."""
    return len(set(map(len, prompt_ids))) > 1


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

    def attend(self, queries, states, bias):
        """Add keys and values [R, 2, H, D] of one token; attention of its queries [R, H, .., D]."""
        self._room(1)[:, :, :, 0].copy_(states.transpose(0, 1))
        return F.scaled_dot_product_attention(queries, self.keys, self.values, bias)

    def keep(self, count, copied_to, copied_from, most):
        """Copy rows `copied_from` to rows `copied_to`, then keep the first `count` rows.

        `count` may be larger than before; there will never be more than `most` rows.
        """
        length = self.get_seq_length()
        if count > self.buffer.shape[1]:
            self._allocate(min(2 * count, most), self.buffer.shape[3])
        used = self.buffer[:, :, :, :length]
        used.index_copy_(1, copied_to, used.index_select(1, copied_from))
        self._show(count, length)

    def _room(self, new):
        """Make room for new tokens; returns their columns [2, R, H, new, D], to be written."""
        rows, start = len(self.keys), self.get_seq_length()
        if start + new > self.buffer.shape[3]:
            self._allocate(rows, max(start + new + ROOM, 2 * self.buffer.shape[3]))
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
