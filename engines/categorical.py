"""
Draws from many categorical distributions at once, one random number each; and these numbers.

Cumulative sums must be in float64, or rounding takes the shares of unlikely tokens away. Over a
vocabulary of 150,000 that would be the slowest part of sampling. So a draw first chooses one of the
blocks of the vocabulary, by their sums, and then a token of that block.
"""

import math

import torch

BLOCK = 512  # entries
BELOW_1 = 1 - 2**-53  # the largest share


def fill(uniforms, generator):
    """Fill a tensor [G, T] on the CPU with random numbers in [0, 1), by a numpy Generator of
    Philox. Row g begins where the generator's counter is g * 2^64, so a row depends neither on the
    other rows nor, but for its length, on T."""
    for row in uniforms.numpy():
        generator.random(out=row)
        generator.bit_generator.advance(2**64 - math.ceil(len(row) / 4))  # a count: four numbers


def draw(probs, uniform, row=None):
    """Indices [B, 1] drawn from probabilities [B, V], which need not be normalized, with one number
    [B, 1] in [0, 1) per row: the first index whose cumulative sum is above that share of the total.
    With row [B], draw i is from row `row[i]` of [R, V], and the work for a row is done once.

    Each block's sum is rounded to probs' type, and its tokens share exactly what it got. So every
    token's probability is as exact as its entry."""
    V = probs.shape[1]
    if V <= BLOCK:
        ends = probs.cumsum(dim=1, dtype=torch.float64)
        return _place(ends if row is None else ends[row], uniform)
    whole = V // BLOCK * BLOCK
    sums = probs[:, :whole].unflatten(1, (-1, BLOCK)).sum(dim=2)
    sums = torch.cat([sums, probs[:, whole:].sum(dim=1, keepdim=True)], dim=1).double()
    ends = sums.cumsum(dim=1)
    sums, ends = (sums, ends) if row is None else (sums[row], ends[row])  # [B, blocks]
    block = _place(ends, uniform)  # [B, 1]
    point = uniform * ends[:, -1:] - (ends - sums).gather(1, block)
    share = (point / sums.gather(1, block)).clamp(0.0, BELOW_1)
    columns = block * BLOCK + torch.arange(BLOCK, device=probs.device)  # [B, BLOCK]
    real = columns.clamp(max=V - 1)
    inside = probs.gather(1, real) if row is None else probs[row[:, None], real]
    inside = inside.double().masked_fill(columns >= V, 0.0).cumsum(dim=1)
    return columns.gather(1, _place(inside, share)).clamp(max=V - 1)


def _place(ends, share):
    """The first column [B, 1] whose cumulative sum is above this share of the total: never one that
    adds 0, since a share below 1 of a total rounds to less than the total. For NaN any column."""
    point = share * ends[:, -1:]
    return torch.searchsorted(ends, point, right=True).clamp(max=ends.shape[1] - 1)
