"""
Our loop for GPUs: a step of fixed shapes, captured once as a CUDA graph and then replayed.

Launching a kernel takes longer than most of a step's kernels compute. A graph launches all of them
at once, on the memory that it was captured with. So the batch is a number of slots that stay where
they are. Each holds a completion that begins in its first column, so nothing is padded. Every 16
tokens the host reads which have ended, and gives their slots to the next ones. When none is left,
it shrinks the batch and captures again.

Letters: R slots, C columns of a slot, G completions of a prompt, T = max_new_tokens, V vocabulary,
H query heads, H_kv key heads, D width of a head, W tokens of the longest prompt that is read.
"""

import inspect
from collections import deque
from typing import NamedTuple

import torch
import torch.nn.functional as F

import rollout
from engines import prefill
from engines.fast_decoder import Decoder
from runtime.device import send

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:
    varlen_attn = None

DEVICES = ("cuda",)  # where compact.py decodes in slots
EVERY = 16  # tokens between two waits of the host. A completion that has ended goes on until then
FREE = 8  # prompts are read once an eighth of the slots is free: a few take as long as many
READ = 2**14  # tokens of prompts that are read at once


def decode(model, prompt_ids, group_size, record, progress) -> None:
    """Sample all completions. `record`, a compact.Record, has T + EVERY columns."""
    slots = Slots(model, prompt_ids, group_size, record)
    while slots.queue or slots.held:
        slots.refill()
        slots.run()
        progress.update(slots.release())


class Layer(NamedTuple):
    """Keys and values of a layer."""

    states: torch.Tensor  # [2, R or more, C, H_kv, D]

    def attend(self, queries, new, seen):
        """Add keys and values `new` [R, 2, H_kv, D] of one token; attention of its queries [R,
        H_kv, H / H_kv, D]: [R, H, D], with H in one dimension or in two."""
        place, lengths, bounds, bias = seen
        self.states.flatten(1, 2).index_copy_(1, place, new.transpose(0, 1))
        keys, values = self.states[:, : len(queries)]  # [R, C, H_kv, D]
        kernel = new.is_cuda and new.dtype.itemsize == 2 and varlen_attn
        if not kernel or "seqused_k" not in inspect.signature(kernel).parameters:  # since 2.12
            keys, values = keys.transpose(1, 2), values.transpose(1, 2)
            return F.scaled_dot_product_attention(queries, keys, values, bias)
        queries, keys, values = queries.flatten(1, 2), keys.flatten(0, 1), values.flatten(0, 1)
        return kernel(queries, keys, values, *bounds, seqused_k=lengths, enable_gqa=True)


class Slots:
    """What a step reads and writes, and the completions in it."""

    def __init__(self, model, prompt_ids, group_size, record):
        self.model, self.prompts, self.group_size = model, prompt_ids, group_size
        self.record, self.device = record, model.device
        self.queue = deque(range(len(record.ids)))  # completions that wait, group by group
        self.held = {}  # slot: (the number of its completion, tokens drawn)
        self.graphs, self.pool = {}, None  # of R slots
        C = max(map(len, prompt_ids), default=0) + record.ids.shape[1]
        C += -C % 8  # kernels take a mask as it is if its rows begin at multiples of 16 bytes
        most = max(1, rollout.cache_tokens(model, record.sampling) // C)
        self.rows = R = min(len(self.queue), record.sampling.batch_size, most)
        self.decoder = Decoder(model, C)
        zeros = self.decoder.head.new_zeros
        shape = (2, R, C, self.decoder.kv_heads, self.decoder.width)
        self.layers = [Layer(zeros(shape)) for _ in self.decoder.layers]
        self.columns = C
        self.logits = zeros(R, len(self.decoder.head))  # of each slot's next token
        self.state = zeros(3, R, dtype=torch.long)  # completion, its position, tokens drawn

    def step(self) -> None:
        """Draw a token in each slot and read it. The host reads nothing, and all shapes are fixed:
        what is not a tensor is the same in every step of R slots."""
        R, C = self.rows, self.columns
        number, position, drawn = self.state[:, :R]  # [R] each
        logprobs = self.record.distribution(self.logits[:R])
        token, *_ = self.record.draw(number, None, drawn, logprobs)  # [R, 1]
        rows = torch.arange(R + 1, dtype=torch.int32, device=self.device)
        after = torch.arange(C, device=self.device) > position[:, None]  # [R, C]
        bias = self.logits.new_zeros(R, C).masked_fill_(after, -torch.inf)[:, None, None]
        # the token's column, counted over all slots; tokens in each slot; whose they are; a mask
        seen = rows[:R] * C + position, (position + 1).int(), (rows, rows * C, 1, C), bias
        self.logits[:R] = self.decoder(token, position[:, None], 0, self, seen)
        self.state[1:, :R] += 1

    def run(self) -> None:
        """EVERY steps. A slot without a completion draws what nobody reads: tokens of the first
        completion, past its end."""
        state = [(0, 0, self.record.sampling.max_new_tokens)] * self.rows
        for row, (number, drawn) in self.held.items():
            state[row] = (number, len(self.prompts[number // self.group_size]) + drawn, drawn)
        self.state[:, : self.rows] = send(torch.tensor([*zip(*state, strict=True)]), self.device)
        step, steps = self.step, EVERY
        if self.device.type == "cuda":
            if self.rows not in self.graphs:
                step()  # loads the kernels, which a capture cannot
                steps -= 1
                graph = self.graphs[self.rows] = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, self.pool, capture_error_mode="thread_local"):
                    step()
                self.pool = graph.pool()
            step = self.graphs[self.rows].replay
        for _ in range(steps):
            step()

    def release(self) -> int:
        """Free the slots of completions that have ended; returns their number."""
        number, _, drawn = self.state[:, : self.rows, None]  # [R, 1] each
        recent = drawn - torch.arange(EVERY, 0, -1, device=self.device)  # [R, EVERY]
        ended = self.record.ended(number, recent).any(dim=1).tolist()  # [R]
        before, most = len(self.held), self.record.sampling.max_new_tokens
        for row, (number, drawn) in [*self.held.items()]:
            self.held[row] = number, drawn + EVERY
            if ended[row] or drawn + EVERY >= most:
                del self.held[row]
        return before - len(self.held)

    def refill(self) -> None:
        """Put the next completions into free slots. If there are none, shrink a batch that is three
        quarters empty."""
        G = self.group_size
        while not self.queue and 4 * len(self.held) <= self.rows:
            self.shrink()
        free = [row for row in range(self.rows) if row not in self.held]
        if not self.queue or FREE * len(free) < self.rows:
            return
        new = [*zip(free, [self.queue.popleft() for _ in free[: len(self.queue)]], strict=False)]
        self.held |= {row: (number, 0) for row, number in new}
        wanted = sorted({number // G for _, number in new})  # prompts, of which the last is longest
        step = max(1, READ // len(self.prompts[wanted[-1]]))
        for some in (wanted[start : start + step] for start in range(0, len(wanted), step)):
            self.read(some, [(row, number // G) for row, number in new if number // G in some])

    def read(self, prompts: list[int], slots: list[tuple[int, int]]) -> None:
        """Read prompts, and copy them to `slots` (slot, prompt)."""
        ids = [self.prompts[k] for k in prompts]
        logits, W, _, _, cache = prefill.prefill(self.model, ids, 0)
        table = [(row, prompts.index(k), W - len(self.prompts[k])) for row, k in slots]
        row, source, padding = send(torch.tensor([*zip(*table, strict=True)]), self.device)
        # A prompt is padded on the left, and begins in its slot's first column.
        columns = (torch.arange(W, device=self.device) + padding[:, None]).clamp(max=W - 1)
        pairs = source[:, None], columns  # [n, W]
        self.logits[row] = logits[source]
        for layer, read in zip(self.layers, cache.layers, strict=True):
            for to, states in zip(layer.states, (read.keys, read.values), strict=True):
                to[row, :W] = states[pairs[0], :, pairs[1]]

    def shrink(self) -> None:
        """Keep the first quarter of the slots. What the others hold moves there."""
        self.rows //= 4
        free = (row for row in range(self.rows) if row not in self.held)
        moves = [(row, next(free)) for row in self.held if row >= self.rows]
        if not moves:
            return
        source, to = send(torch.tensor([*zip(*moves, strict=True)]), self.device)
        caches = [cache for layer in self.layers for cache in layer[0]]
        for table in (self.logits, *caches):
            table[to] = table[source]
        for row, new in moves:
            self.held[new] = self.held.pop(row)
