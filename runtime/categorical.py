"""
Draws from many categorical distributions at once, one random number each.

Cumulative sums must be in float64, or rounding takes the shares of unlikely tokens away. Over a
vocabulary of 150,000 that would be the slowest part of sampling. So a draw first chooses one of the
blocks of the vocabulary, by their sums, and then a token of that block.
"""

import torch

BLOCK = 512  # entries


def draw(probs, uniform, row=None):
    """Indices [B, 1] drawn from probabilities [B, V], which need not be normalized, with one number
    [B, 1] in [0, 1) per row: the first index whose cumulative sum is above that share of the total.
    With row [B], draw i is from row `row[i]` of [R, V], and the work for a row is done once.

    Each block's sum is rounded to probs' type, and its tokens share exactly what it got. So every
    token's probability is as exact as its entry."""
    V = probs.shape[1]
    if V <= BLOCK:
        ends = probs.cumsum(dim=1, dtype=torch.float64)
        ends = ends if row is None else ends[row]  # [B, V]
        place = torch.searchsorted(ends, uniform * ends[:, -1:], right=True)
        return place.clamp(max=V - 1)  # for NaN: an index all the same
    size = BLOCK
    whole = V // size * size
    sums = probs[:, :whole].unflatten(1, (-1, size)).sum(dim=2)
    sums = torch.cat([sums, probs[:, whole:].sum(dim=1, keepdim=True)], dim=1).double()
    ends = sums.cumsum(dim=1)
    sums, ends = (sums, ends) if row is None else (sums[row], ends[row])  # [B, blocks]
    point = uniform * ends[:, -1:]
    block = _place(ends, point)  # [B, 1]
    share = (point - (ends - sums).gather(1, block)) / sums.gather(1, block)
    columns = block * size + torch.arange(size, device=probs.device)  # [B, size]
    real = columns.clamp(max=V - 1)
    inside = probs.gather(1, real) if row is None else probs[row[:, None], real]
    inside = inside.double().masked_fill(columns >= V, 0.0).cumsum(dim=1)
    token = columns.gather(1, _place(inside, share * inside[:, -1:]))
    return token.clamp(max=V - 1)


def _place(ends, point):
    """The first column whose cumulative sum is above the point [B, 1]: never one that adds 0."""
    total = ends[:, -1:]
    point = point.clamp(min=0.0).minimum(total.nextafter(torch.zeros_like(total)))
    return torch.searchsorted(ends, point, right=True).clamp(max=ends.shape[1] - 1)
