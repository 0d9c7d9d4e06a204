"""
What sampling needs of transformers: a model in its plain state, and a cache of keys and values
whose rows can be split and dropped.

transformers' own cache copies the keys and values of all tokens for every new one.
"""

import contextlib

import torch
from transformers import GenerationConfig
from transformers.cache_utils import Cache, DynamicLayer

ROOM = 64  # columns that are allocated ahead


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


class GrowingLayer(DynamicLayer):
    """Keys and values [R, H, n, D] of one layer: the first part of buffers with more rows and
    columns."""

    def update(self, key_states, value_states, *args, **kwargs):
        """Write the columns of new tokens; returns the keys and values of all tokens."""
        new = (key_states, value_states)
        if not self.is_initialized:
            self.lazy_initialization(*new)
            self.buffers = [states[:, :, :0] for states in new]
            self._show(len(key_states), 0)
        start = self.get_seq_length()
        end = start + key_states.shape[2]
        if end > self.buffers[0].shape[2]:
            self._allocate(len(key_states), end + ROOM)
        for buffer, states in zip(self.buffers, new, strict=True):
            buffer[: len(states), :, start:end] = states
        self._show(len(key_states), end)
        return self.keys, self.values

    def keep(self, count, gaps, movers, most):
        """Keep the first `count` rows, after rows `movers` have been copied to rows `gaps`. There
        may be more rows than before, and later up to `most`."""
        length = self.get_seq_length()
        if count > len(self.buffers[0]):
            self._allocate(min(2 * count, most), self.buffers[0].shape[2])
        for buffer in self.buffers:
            used = buffer[:, :, :length]
            used.index_copy_(0, gaps, used.index_select(0, movers))
        self._show(count, length)

    def _allocate(self, rows, columns):
        """Move the keys and values to buffers of this size."""
        for number, old in enumerate((self.keys, self.values)):
            R, H, n, D = old.shape
            self.buffers[number] = old.new_empty(rows, H, columns, D)
            self.buffers[number][:R, :, :n] = old

    def _show(self, rows, length):
        self.keys, self.values = (buffer[:rows, :, :length] for buffer in self.buffers)


def growing_cache() -> Cache:
    """An empty cache for a model whose layers all have full attention."""
    return Cache(layer_class_to_replicate=GrowingLayer)


def next_rows(parent, text, ended):
    """Which rows the batch has after a token. All tensors are small and on the CPU.

    parent [C] is the row that each text continues, ascending; text [n] the text of each completion;
    ended [n] says which completions leave. Without texts (None), each completion is its own row and
    text. A row's first text stays in its place. Other texts fill places that are free, then new
    ones at the end, so that few keys and values are copied.

    Returns (completions that go on, in the order of their rows; the text in each row; the row that
    it continues; the rows that it is copied to; the rows that it is copied from), and the row of
    each completion that goes on, or None if each has its own."""
    every = torch.arange(len(ended))
    parent, text = (every, every) if text is None else (parent, text)
    going = every[~ended]
    kept, text = text[going].unique(return_inverse=True)  # the texts of completions that go on
    parent = parent[kept]
    stays = (parent.diff(prepend=torch.tensor([-1])) > 0) & (parent < len(kept))
    order = torch.full_like(parent, -1)  # which of the texts comes in each row
    order[parent[stays]] = stays.nonzero()[:, 0]
    gaps = (order < 0).nonzero()[:, 0]
    order[gaps] = (~stays).nonzero()[:, 0]
    row, by_row = order.argsort()[text].sort(stable=True)
    sources = parent[order]
    places = going[by_row], kept[order], sources, gaps, sources[gaps]
    return places, row if len(kept) < len(going) else None
