"""
What stands in for a removed sub-layer, in closed form (after arXiv:2407.16286): the map of rank r
of its normed input, and the bias, that come nearest to what it added.

The paper's code for these is not public; the forms are ours. Letters: N sequences of T tokens, m
tokens in all, d hidden size, r rank.
"""

import torch

from related import stream

RIDGE = 1e-3  # relative to the inputs' mean square


@torch.no_grad()
def recover(model, sequences, removed: list[str], rank: int, ridge: float = RIDGE) -> dict:
    """The tensors of the stand-ins of removed sub-layers, for `rebuild`.

    Each is fitted to what its sub-layer would add behind the stand-ins before it."""
    tensors, h = {}, stream.embed(model, sequences)  # [N, T, d]
    for name in stream.all_names(model):
        x, change = stream.update(model, name, h)
        if name in removed:
            tokens = (x.flatten(0, 1).double(), change.flatten(0, 1).double())  # [m, d] each
            bias, down, up = fit(*tokens, rank, ridge)
            change = (bias + x.double() @ down.T @ up.T).to(h)
            stand_in = {"bias": bias, "down.weight": down, "up.weight": up}
            tensors |= {f"model.layers.{name}.{part}": t.to(h) for part, t in stand_in.items()}
        h = h + change
    return tensors


def fit(x, y, rank: int, ridge: float):
    """(bias [d], down [r, d], up [d, r]) with bias + up down x nearest to y; x, y [m, d].

    Reduced-rank ridge regression: of all maps of this rank, the least squared error plus a penalty
    on the squared norm of up down, whose weight is ridge times the sum of squares of x, over d."""
    center, bias = x.mean(dim=0), y.mean(dim=0)
    x = x - center  # then the mean of y does not matter
    gram, cross = x.T @ x, x.T @ y
    penalty = ridge * gram.trace() / len(gram)
    full = torch.linalg.solve(gram + penalty * torch.eye(len(gram)).to(gram), cross)  # [d, d]
    # Among maps of rank r, the penalized error falls by the eigenvalues that they keep.
    up = torch.linalg.eigh(cross.T @ full).eigenvectors[:, -rank:]  # ascending
    down = (full @ up).T
    return bias - up @ (down @ center), down, up
