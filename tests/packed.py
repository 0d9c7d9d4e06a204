"""What packing.py is compared with: attention with one mask of all queries and keys, slow and
obvious, and the tokens of a planned slot. Importing this file registers the attention with
transformers.

Letters: L tokens in a slot, K keys, H heads, D head width.
"""

import torch
import torch.nn.functional as F
from transformers import AttentionInterface

import packing

MASKED = "packed_masked"  # for set_attn_implementation


def masked_attention(
    module, query, key, value, attention_mask, scaling=None, dropout=0.0, segments=None, **kwargs
):
    """As packing.packed_attention, with one L x K mask."""
    return packing._attend(_by_mask, query, key, value, segments, scaling, dropout, kwargs)


def _by_mask(query, key, value, segments, scaling):
    shapes = [shape for count, *shape in segments.runs for _ in range(count)]
    mask = torch.block_diag(
        *(packing._causal(*shape, query.device) for shape in shapes)
    ).bool()  # [L, K]
    q, k, v = (states.transpose(0, 1)[None] for states in (query, key, value))  # [1, H, L or K, D]
    options = {"scale": scaling, "enable_gqa": q.shape[1] != k.shape[1]}
    return F.scaled_dot_product_attention(q, k, v, mask, **options)[0].transpose(0, 1)


AttentionInterface.register(MASKED, masked_attention)


def slot_tokens(pack: list[int], lengths: list[int], prompts=None, prompt_lengths=None) -> int:
    """Tokens that the sequences of one slot take, counted as in plan_packs."""
    tokens = sum(lengths[index] for index in pack)
    if prompts:
        own = {prompts[index]: prompt_lengths[index] for index in pack}
        tokens += sum(own.values()) - sum(prompt_lengths[index] for index in pack)
    return tokens
