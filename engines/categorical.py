"""
Draw tokens from many probability rows at once, with one random number for each draw.

A draw inverts the cumulative sum of a row. The sum must be in float64, because in float32 unlikely
tokens would lose their share. Over a vocabulary of 150,000 that sum would be the slowest part of
sampling. So a draw first chooses a block of the vocabulary, by the blocks' sums, and then a token
of that block. Only one block per draw is summed in float64.
"""

import torch

BLOCK = 512  # tokens of a block
BELOW_1 = 1 - 2**-53  # the largest float64 below 1


def draw(probs, uniform, row=None):
    """Draw indices [B, 1] from probabilities [B, V], with one number [B, 1] in [0, 1) for each.

    The index drawn is the first whose cumulative sum is above `uniform` times the total, so rows
    need not sum to 1. With row [B], probs is [R, V] and draw i uses probs[row[i]]; the sums of a
    row are then computed once, however many draws use it.

    Block sums are rounded to the type of probs. The tokens of a block share exactly its rounded
    sum, so each token's probability is as exact as its entry.
    """
    V = probs.shape[1]
    if V <= BLOCK:
        ends = probs.cumsum(dim=1, dtype=torch.float64)
        return _place(ends if row is None else ends[row], uniform)

    # Choose a block. The last one is shorter than the others, and may be empty.
    full = V // BLOCK * BLOCK
    sums = probs[:, :full].unflatten(1, (-1, BLOCK)).sum(dim=2)
    sums = torch.cat([sums, probs[:, full:].sum(dim=1, keepdim=True)], dim=1).double()
    ends = sums.cumsum(dim=1)
    if row is not None:
        sums, ends = sums[row], ends[row]  # [B, blocks]
    block = _place(ends, uniform)  # [B, 1]

    # Choose a token of the block, by how far into the block the random number reaches.
    point = uniform * ends[:, -1:] - (ends - sums).gather(1, block)
    share = (point / sums.gather(1, block)).clamp(0.0, BELOW_1)
    columns = block * BLOCK + torch.arange(BLOCK, device=probs.device)  # [B, BLOCK]
    readable = columns.clamp(max=V - 1)
    entries = probs.gather(1, readable) if row is None else probs[row[:, None], readable]
    entries = entries.double().masked_fill(columns >= V, 0.0)
    return columns.gather(1, _place(entries.cumsum(dim=1), share)).clamp(max=V - 1)


def _place(ends, share):
    """The first column [B, 1] whose cumulative sum is above this share of the total.

    An entry of 0 is never chosen: a share below 1 of a total rounds to less than the total. If the
    sums are NaN, any column may come back.
    """
    point = share * ends[:, -1:]
    return torch.searchsorted(ends, point, right=True).clamp(max=ends.shape[1] - 1)
