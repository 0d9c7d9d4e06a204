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


# ---------------------------------------------------------------------------- what it predicts


def as_rows(rows: list[dict]) -> Rows:
    """For the fit, in millions of parameters and 100,000s of tokens."""
    columns = ("size", "tokens", "rate", "whole", "loss")
    found = Rows(*(torch.tensor([row[name] for row in rows]).double() for name in columns))
    return found._replace(size=found.size / 1e6, tokens=found.tokens / 1e5)


def fits_of(rows: list[dict], method: str) -> list[dict]:
    """The law of a method, fitted to all of its rows, and without the largest size, the highest
    rate or the most tokens (of each run), which it then predicts."""
    own = [row for row in rows if row["method"] == method]
    measured = as_rows(own)
    step = torch.tensor([row["step"] for row in own])
    runs = [(row["width"], row["rate"]) for row in own]
    run = torch.tensor([runs.index(one) for one in runs])
    nothing = torch.zeros(len(own), dtype=torch.bool)
    held_out = {
        "none": nothing,
        "size": measured.size == measured.size.max(),
        "rate": measured.rate == measured.rate.max(),
        "tokens": step == step.max(),
    }
    found = []
    for name, hidden in held_out.items():
        law = fit(measured.where(~hidden))
        tested = hidden if hidden.any() else ~nothing
        # A slope needs two losses; that of the last doubling starts at one that was fitted.
        sloped = step >= step.max() / 2 if name == "tokens" else tested
        wrong = errors(law, measured.where(tested), run[tested])
        wrong["asd"] = errors(law, measured.where(sloped), run[sloped])["asd"]
        counts = {"fitted": int((~hidden).sum()), "tested": int(tested.sum())}
        facts = {"method": method, "held_out": name} | counts | wrong
        found.append(facts | {"constants": law._asdict()})
    return found


def main() -> None:
    """Fit the law to the rows of runs/law.json, and print how well it predicts."""
    rows = json.loads(ROWS.read_text())["rows"]
    print(f"{'method':8}{'held out':10}{'fitted':>7}{'tested':>7}{'error':>9}{'r2':>9}{'asd':>9}")
    for method in dict.fromkeys(row["method"] for row in rows):
        for one in fits_of(rows, method):
            counts = f"{one['fitted']:7}{one['tested']:7}"
            figures = f"{one['mean_error']:9.4f}{one['r2']:9.4f}{one['asd']:9.4f}"
            print(f"{one['method']:8}{one['held_out']:10}{counts}{figures}", flush=True)


if __name__ == "__main__":
    main()
