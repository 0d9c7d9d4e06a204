"""
What stands in for a removed sub-layer, in closed form (after arXiv:2407.16286): the map of rank r
of its normed input, and the bias, that come nearest to what it added.

The paper's code for these is not public; the forms are ours. Letters: N sequences of T tokens, m
tokens in all, d hidden size, r rank.
"""

import torch

from related import pruned

RIDGE = 1e-3  # relative to the inputs' mean square


@torch.no_grad()
def recover(model, sequences, removed: list[str], rank: int) -> dict:
    """The tensors of the stand-ins of removed sub-layers, for `pruned.rebuild`.

    One forward of the sequences [N, T] fits them all, and goes on with what each stand-in adds. So
    each is fitted to what its sub-layer would add behind the stand-ins before it."""
    name_of = {pruned.sublayer(model, name): name for name in removed}
    tensors = {}

    def stand_in(sublayer, args, kwargs, output):
        x = args[0] if args else kwargs["hidden_states"]  # [N, T, d]
        is_attention = isinstance(output, tuple)
        change = output[0] if is_attention else output
        bias, down, up = fit(x.flatten(0, 1).double(), change.flatten(0, 1).double(), rank)
        fitted = {"bias": bias, "down.weight": down, "up.weight": up}
        for part, tensor in fitted.items():
            tensors[f"model.layers.{name_of[sublayer]}.{part}"] = tensor.to(x)
        change = (bias + x.double() @ down.T @ up.T).to(x)
        return (change, *output[1:]) if is_attention else change

    with pruned.hooked(name_of, stand_in, with_kwargs=True):
        model.base_model(sequences, use_cache=False)
    return tensors


def fit(x, y, rank: int, ridge: float = RIDGE):
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
