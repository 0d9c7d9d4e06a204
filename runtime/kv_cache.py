"""Keys and values of the tokens so far. transformers' own cache copies all of them per token."""

from transformers.cache_utils import Cache, DynamicLayer

ROOM = 64  # columns that are allocated ahead


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
