"""
P^2 Law (arXiv:2411.10272): how far a pruned model's loss falls while it is trained again.

    L = L0 + rho^-gamma N0^-delta (N_C N0^-alpha + D_C D^-beta + E)

L0 and N0 are the loss and the size of the whole model, rho is the share that was removed, and D is
the number of tokens since. The seven constants are fitted to cheap runs, and tell whether an
expensive one is worth it. gamma is negative: the more is removed, the higher the loss.

The form is as a summary of the paper gives it. How it is fitted and the unit of a slope are our
reconstruction.

Letters: R measurements.
"""

import math
from typing import NamedTuple

import torch

HUBER = 0.01  # nats; beyond, a residual counts linearly
STARTS, ITERATIONS = 32, 300  # of the fit
CENTRE = (-2.0, -2.0, -4.0, -1.0, -1.0, 0.0, 0.0)  # of the random starts


class Rows(NamedTuple):
    """Measurements, float64 [R] each. The constants absorb all units; values near 1 are best."""

    size: torch.Tensor  # N0
    tokens: torch.Tensor  # D, above 0
    rate: torch.Tensor  # rho, above 0
    whole: torch.Tensor  # L0, nats
    loss: torch.Tensor  # L, nats

    def where(self, chosen: torch.Tensor) -> "Rows":
        """The chosen rows, bool [R], alone."""
        return Rows(*(column[chosen] for column in self))


class Law(NamedTuple):
    """The constants, under the names of the equation."""

    N_C: float
    D_C: float
    E: float
    alpha: float
    beta: float
    gamma: float
    delta: float

    def predict(self, rows: Rows) -> torch.Tensor:
        """The losses [R] that the law expects; rows.loss is not read."""
        inner = self.N_C * rows.size**-self.alpha + self.D_C * rows.tokens**-self.beta + self.E
        return rows.whole + rows.rate**-self.gamma * rows.size**-self.delta * inner


def fit(rows: Rows, seed: int = 0) -> Law:
    """The constants with the least mean Huber loss, from the best of several random starts.

    All but gamma and delta are exponentials of what is fitted, so that they stay positive."""
    generator = torch.Generator().manual_seed(seed)
    best, found = math.inf, None
    for _ in range(STARTS):
        start = torch.tensor(CENTRE) + torch.randn(len(CENTRE), generator=generator)
        free = start.double().requires_grad_()
        optimizer = torch.optim.LBFGS([free], max_iter=ITERATIONS, line_search_fn="strong_wolfe")

        def law(free=free):
            return Law(*free[:5].exp(), *free[5:])

        def huber(free=free, optimizer=optimizer, law=law):
            optimizer.zero_grad()
            predicted = law().predict(rows)
            loss = torch.nn.functional.huber_loss(predicted, rows.loss, delta=HUBER)
            loss.backward()
            return loss

        optimizer.step(huber)
        last = huber().item()
        if last < best:  # False for a start that diverged to NaN
            best, found = last, Law(*(constant.item() for constant in law()))
    return found


def errors(law: Law, rows: Rows, run: torch.Tensor) -> dict[str, float]:
    """How well the law predicts: mean_error (of the loss, nats), r2, and asd, the paper's Average
    Slope Difference, here in nats per doubling of D. run [R] numbers the runs; slopes are between
    neighbours in D of one run."""
    residual = law.predict(rows) - rows.loss
    spread = (rows.loss - rows.loss.mean()).square().sum()
    order = sorted(range(len(run)), key=lambda r: (run[r].item(), rows.tokens[r].item()))
    inside = run[order].diff() == 0
    doublings = rows.tokens[order].log2().diff()[inside]
    slopes = (residual[order].diff()[inside] / doublings).abs()
    return {
        "mean_error": residual.abs().mean().item(),
        "r2": (1 - residual.square().sum() / spread).item(),
        "asd": slopes.mean().item(),
    }
