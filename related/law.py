"""
P^2 Law (arXiv:2411.10272): how far a pruned model's loss falls while it is trained again.

    L = L0 + rho^-gamma N0^-delta (N_C N0^-alpha + D_C D^-beta + E)

L0 and N0 are the loss and the size of the whole model, rho is the share that was removed, and D is
the number of tokens since. The seven constants are fitted to cheap runs, and tell whether an
expensive one is worth it. gamma is negative: the more is removed, the higher the loss.

    python -m related.law    fit it to the rows of small runs, and predict others

The rows are runs/law.json: models like that of the embedded task, in three widths, were trained on
it, pruned by related/structured.py, and trained again (`git show 380940f:related/law.py`, half an
hour of one core). The law is fitted to some of them and predicts the others.

The form is as a summary of the paper gives it. How it is fitted and the unit of a slope are our
reconstruction.

Letters: R measurements.
"""

import json
import math
from pathlib import Path
from typing import NamedTuple

import torch

ROWS = Path("runs/law.json")  # {method, width, rate, size, whole, pruned, step, tokens, loss}
HUBER = 0.01  # nats; beyond, a residual counts linearly
STARTS, ITERATIONS = 32, 300  # of the fit
CENTRE = (-2.0, -2.0, -4.0, -1.0, -1.0, 0.0, 0.0)  # of the random starts


# ---------------------------------------------------------------------------- the law


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


def fit(rows: Rows) -> Law:
    """The constants with the least mean Huber loss, from the best of several random starts."""
    generator = torch.Generator().manual_seed(0)
    best, found = math.inf, None
    for _ in range(STARTS):
        start = torch.tensor(CENTRE) + torch.randn(len(CENTRE), generator=generator)
        loss, law = descend(rows, start.double())
        if loss < best:  # False for a start that diverged to NaN
            best, found = loss, law
    return found


def descend(rows: Rows, start: torch.Tensor) -> tuple[float, Law]:
    """(loss, law) at the end of one descent. All constants but gamma and delta are exponentials of
    what is fitted, so that they stay positive."""
    free = start.requires_grad_()
    optimizer = torch.optim.LBFGS([free], max_iter=ITERATIONS, line_search_fn="strong_wolfe")

    def huber():
        optimizer.zero_grad()
        predicted = Law(*free[:5].exp(), *free[5:]).predict(rows)
        loss = torch.nn.functional.huber_loss(predicted, rows.loss, delta=HUBER)
        loss.backward()
        return loss

    optimizer.step(huber)
    loss = huber().item()
    return loss, Law(*free[:5].exp().tolist(), *free[5:].tolist())


# ---------------------------------------------------------------------------- what it predicts


def as_rows(rows: list[dict]) -> Rows:
    """For the fit, in millions of parameters and 100,000s of tokens."""
    columns = ("size", "tokens", "rate", "whole", "loss")
    found = Rows(*(torch.tensor([row[name] for row in rows]).double() for name in columns))
    return found._replace(size=found.size / 1e6, tokens=found.tokens / 1e5)


def errors(rows: list[dict]) -> dict[str, float]:
    """The mean errors, in nats, of the law that is fitted to all rows of a method, and of laws that
    are fitted without the largest size, the highest rate or the most tokens (of each run), on these
    rows."""
    measured, step = as_rows(rows), torch.tensor([row["step"] for row in rows])
    held_out = {
        "nothing": torch.zeros(len(rows), dtype=torch.bool),
        "size": measured.size == measured.size.max(),
        "rate": measured.rate == measured.rate.max(),
        "tokens": step == step.max(),
    }
    found = {}
    for name, hidden in held_out.items():
        tested = measured.where(hidden if hidden.any() else ~hidden)
        error = fit(measured.where(~hidden)).predict(tested) - tested.loss
        found[name] = error.abs().mean().item()
    return found


def main() -> None:
    """Fit the law to the rows of runs/law.json, and print how well it predicts those that were
    held out."""
    rows = json.loads(ROWS.read_text())["rows"]
    print("held out:", "nothing, the largest size, the highest rate, the most tokens")
    for method in dict.fromkeys(row["method"] for row in rows):
        found = errors([row for row in rows if row["method"] == method])
        print(f"{method:8}", *(f"{error:8.3f}" for error in found.values()))


if __name__ == "__main__":
    main()
