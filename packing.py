"""
Dense prompt packing: lay sequences of very different lengths, window by window, into token slots.

Three parts, in the order they are used:
    plan_packs       integers only: which sequence goes into which slot
    build_pack       tensors: one slot, its segments end to end, positions restarted at each
    packed_logprobs  the model's log-probabilities of the completion tokens of one slot

Segments never see each other. Their boundaries reach the attention function explicitly, through
transformers' AttentionInterface, and are never guessed from position ids: transformers' own detection is
silently off unless `use_cache=False`, and builds an L x L mask.

Packing cannot change the objective: nothing is dropped, split or truncated, and whatever multiplies a
sequence in the loss travels with the sequence, not with the slot.

Source: arXiv:2603.04135 section 4.3 (window-based greedy); the details are our reconstruction.
Letters: L tokens in a slot, S segments in it, N completion tokens in it, H heads, D head width.
"""

from collections import deque
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from transformers import AttentionInterface

ATTENTION = "packed"  # the name packed_attention is registered under


def plan_packs(lengths: list[int], pack_tokens: int, window: int) -> list[list[int]]:
    """Assign each sequence to a slot of at most `pack_tokens` tokens; returns lists of indices into `lengths`.

    A window of `window` sequences in arrival order: the oldest opens a slot, so nothing starves; then the
    longest that fits is added and the window refilled, until none fits. A sequence longer than a slot gets
    a slot of its own. Deterministic; of equal lengths the older goes first.

        >>> plan_packs([5, 3, 4, 2, 6], pack_tokens=10, window=3)
        [[0, 2], [1, 4], [3]]
    """
    if pack_tokens < 1 or window < 1:
        raise ValueError(f"pack_tokens and window must be at least 1, got {pack_tokens} and {window}")
    arrivals, waiting, packs = deque(range(len(lengths))), [], []

    def refill():
        while arrivals and len(waiting) < window:
            waiting.append(arrivals.popleft())

    refill()
    while waiting:
        pack = [waiting.pop(0)]
        room = pack_tokens - lengths[pack[0]]
        refill()
        while fitting := [index for index in waiting if lengths[index] <= room]:
            longest = max(fitting, key=lambda index: lengths[index])  # the first, so the oldest, of equals
            waiting.remove(longest)
            pack.append(longest)
            room -= lengths[longest]
            refill()
        packs.append(pack)
    return packs


def pack_density(lengths: list[int], packs: list[list[int]], pack_tokens: int) -> float:
    """Share of the slots' tokens that are real: sum of lengths / (slots x pack_tokens). An over-long
    sequence makes its slot as long as itself."""
    slots = [max(pack_tokens, sum(lengths[index] for index in pack)) for pack in packs]
    return sum(lengths[index] for pack in packs for index in pack) / sum(slots) if slots else float("nan")


@dataclass
class Pack:
    """One slot. Two segments, prompt `a b` completion `x y` and prompt `c` completion `z`, become

    input_ids     a b x y c z
    position_ids  0 1 2 3 0 1
    bounds        (0, 4, 6)
    predictors    1 2 4        the positions whose output predicts a completion token
    targets       x y z        the token each of them predicts
    owner         0 0 1        the segment each target belongs to
    """

    input_ids: torch.Tensor  # [1, L]
    position_ids: torch.Tensor  # [1, L]
    bounds: tuple[int, ...]  # S + 1 cumulative lengths
    predictors: torch.Tensor  # [N]
    targets: torch.Tensor  # [N]
    owner: torch.Tensor  # [N]


def build_pack(prompts: list[list[int]], completions: list[list[int]], device: str = "cpu") -> Pack:
    """Lay the segments (prompt + completion, token ids) end to end. A prompt has at least one token."""
    ids, positions, bounds, predictors, targets, owner = [], [], [0], [], [], []
    for segment, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        if not prompt:
            raise ValueError(f"segment {segment} has an empty prompt: no position predicts its first token")
        first = bounds[-1] + len(prompt) - 1  # the last prompt token predicts the first completion token
        predictors += range(first, first + len(completion))
        targets += completion
        owner += [segment] * len(completion)
        ids += prompt + completion
        positions += range(len(prompt) + len(completion))
        bounds.append(len(ids))
    row = torch.tensor([ids, positions], device=device)  # [2, L]
    index = torch.tensor([predictors, targets, owner], dtype=torch.long, device=device)  # [3, N]
    return Pack(row[:1], row[1:], tuple(bounds), *index)


def packed_attention(
    module, query, key, value, attention_mask, scaling=None, dropout=0.0, segment_bounds=None, **kwargs
):
    """Causal attention inside each segment; query [1, H, L, D], key and value [1, H_kv, L, D] -> [1, L, H, D]."""
    for name in ("sliding_window", "softcap", "s_aux"):
        if kwargs.get(name) is not None:
            raise NotImplementedError(f"packed attention has no {name}: this model would be trained on another policy")
    assert segment_bounds is not None, "packed attention needs segment_bounds: call the model through packed_logprobs"
    lengths = [end - start for start, end in pairwise(segment_bounds)]
    segments = zip(*(states.split(lengths, dim=2) for states in (query, key, value)), strict=True)
    grouped = query.shape[1] != key.shape[1]
    out = [
        F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=grouped)
        for q, k, v in segments
    ]
    return torch.cat(out, dim=2).transpose(1, 2), None  # [1, L, H, D]


AttentionInterface.register(ATTENTION, packed_attention)


def packed_logprobs(model, pack: Pack, *, temperature: float = 1.0) -> torch.Tensor:
    """Log-probabilities [N] of the pack's completion tokens under the policy that samples at `temperature`.

    `model` is a causal LM loaded with `attn_implementation=packing.ATTENTION`. The LM head runs on the
    predicting positions only; the softmax is float32 or wider whatever the model's dtype.
    """
    logits = model(
        input_ids=pack.input_ids,
        position_ids=pack.position_ids,
        use_cache=False,
        logits_to_keep=pack.predictors,
        segment_bounds=pack.bounds,
    ).logits[0]  # [N, V]
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    return -F.cross_entropy(logits, pack.targets, reduction="none")  # [N]
