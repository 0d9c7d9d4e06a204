"""
Draws from many categorical distributions at once, one random number each.

The cumulated sums must be in float64, or rounding takes the shares of unlikely tokens away. Over a
vocabulary of 150,000 that would be the slowest part of sampling. So only blocks are summed up, and
then one block of each row is searched. torch.multinomial draws a random number per entry.
"""

import torch

BLOCK = 512  # entries


def draw(probs, uniform):
    """Indices [B, 1] drawn from probabilities [B, V], which need not be normalized, with one number
    [B, 1] in [0, 1) per row: the first index whose cumulated sum is above that share of the total.
    """
    V = probs.shape[1]
    size = min(BLOCK, V)
    whole = V // size * size
    sums = probs[:, :whole].unflatten(1, (-1, size)).sum(dim=2, dtype=torch.float64)
    rest = probs[:, whole:].sum(dim=1, keepdim=True, dtype=torch.float64)
    sums = torch.cat([sums, rest], dim=1)  # [B, blocks]
    before = sums.cumsum(dim=1)
    point = uniform * before[:, -1:]
    block = _place(before, point)  # [B, 1]
    point = point - (before - sums).gather(1, block)
    columns = (block * size + torch.arange(size, device=probs.device)).clamp(max=V - 1)
    inside = probs.gather(1, columns).double().cumsum(dim=1)  # [B, size]
    return columns.gather(1, _place(inside, point))


def _place(cumulated, point):
    """The first column whose cumulated sum is above the point [B, 1]: never one that adds 0."""
    total = cumulated[:, -1:]
    point = point.clamp(min=0.0).minimum(total.nextafter(torch.zeros_like(total)))
    return torch.searchsorted(cumulated, point, right=True).clamp(max=cumulated.shape[1] - 1)
