"""
What sampling needs of transformers: a model in its plain state, and a cache of keys and values.

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
    """Keys and values [B, H, n, D] of one layer: the first n columns of buffers with more."""

    def update(self, key_states, value_states, *args, **kwargs):
        """Write the columns of new tokens; returns the keys and values of all tokens."""
        new = (key_states, value_states)
        if not self.is_initialized:
            self.lazy_initialization(*new)
            self.buffers = [states[:, :, :0] for states in new]
        start = self.get_seq_length()
        end = start + key_states.shape[2]
        if end > self.buffers[0].shape[2]:
            for number, old in enumerate(self.buffers):
                B, H, _, D = old.shape
                self.buffers[number] = old.new_empty(B, H, end + ROOM, D)
                self.buffers[number][:, :, :start] = old[:, :, :start]
        for buffer, states in zip(self.buffers, new, strict=True):
            buffer[:, :, start:end] = states
        self._show(end)
        return self.keys, self.values

    def batch_repeat_interleave(self, repeats):
        """Repeat each row."""
        self.buffers = [buffer.repeat_interleave(repeats, dim=0) for buffer in self.buffers]
        self._show(self.get_seq_length())

    def keep(self, count, gaps, movers):
        """Keep the first `count` rows, after rows `movers` have been copied over rows `gaps`."""
        length = self.get_seq_length()
        for buffer in self.buffers:
            used = buffer[:, :, :length]
            used.index_copy_(0, gaps, used.index_select(0, movers))
        self.buffers = [buffer[:count] for buffer in self.buffers]
        self._show(length)

    def _show(self, length):
        self.keys, self.values = (buffer[:, :, :length] for buffer in self.buffers)


def growing_cache() -> Cache:
    """An empty cache for a model whose layers all have full attention."""
    return Cache(layer_class_to_replicate=GrowingLayer)
