"""
P^2 Law (arXiv:2411.10272): how far a pruned model's loss falls while it is trained again.

    L = L0 + rho^-gamma N0^-delta (N_C N0^-alpha + D_C D^-beta + E)

L0 and N0 are the loss and the size of the whole model, rho is the share that was removed, and D is
the number of tokens since. The seven constants are fitted to cheap runs, and tell whether an
expensive one is worth it. gamma is negative: the more is removed, the higher the loss.

    python -m related.law    fit it to the rows of small runs, and predict others

The rows are runs/law.json: models like that of the embedded task, in three widths, were trained on
it, pruned by 2ssp or by depth (relative L2, whose code is gone), and trained again.

The form is as a summary of the paper gives it. How it is fitted is our reconstruction.

Letters: R measurements.
"""

import json
import math
from pathlib import Path

import torch

ROWS = Path("runs/law.json")  # {method, width, rate, size, whole, pruned, step, tokens, loss}
HUBER = 0.01  # nats; beyond, a residual counts linearly
STARTS, ITERATIONS = 32, 300  # of the fit
HELD_OUT = ("size", "rate", "step")
CENTRE = (-2.0, -2.0, -4.0, -1.0, -1.0, 0.0, 0.0)  # of the random starts


def columns(rows: list[dict]) -> dict[str, torch.Tensor]:
    """float64 [R] each: N0 in millions, D in 100,000s, rho, and L0 and L in nats. The constants
    absorb all units; values near 1 are best."""
    names = ("size", "tokens", "rate", "whole", "loss")
    found = {name: torch.tensor([row[name] for row in rows]).double() for name in names}
    return found | {"size": found["size"] / 1e6, "tokens": found["tokens"] / 1e5}


def predict(rows: dict[str, torch.Tensor], constants) -> torch.Tensor:
    """The losses [R] that the law expects. The constants are N_C, D_C, E, alpha, beta, gamma and
    delta."""
    N_C, D_C, E, alpha, beta, gamma, delta = constants
    inner = N_C * rows["size"] ** -alpha + D_C * rows["tokens"] ** -beta + E
    return rows["whole"] + rows["rate"] ** -gamma * rows["size"] ** -delta * inner


def fit(rows: dict[str, torch.Tensor]) -> torch.Tensor:
    """The constants [7] with the least mean Huber loss, from the best of several random starts."""
    generator = torch.Generator().manual_seed(0)
    ends = []
    for _ in range(STARTS):
        start = torch.tensor(CENTRE) + torch.randn(len(CENTRE), generator=generator)
        ends.append(descend(rows, start.double()))
    ends = [end for end in ends if math.isfinite(end[0])]  # others diverged
    _loss, constants = min(ends, key=lambda end: end[0])
    return constants


def descend(rows, start: torch.Tensor) -> tuple[float, torch.Tensor]:
    """(loss, constants [7]) at the end of one descent. All but gamma and delta are exponentials of
    what is fitted, so that they stay positive."""
    free = start.requires_grad_()
    optimizer = torch.optim.LBFGS([free], max_iter=ITERATIONS, line_search_fn="strong_wolfe")

    def constants():
        return torch.cat([free[:5].exp(), free[5:]])

    def huber():
        optimizer.zero_grad()
        predicted = predict(rows, constants())
        loss = torch.nn.functional.huber_loss(predicted, rows["loss"], delta=HUBER)
        loss.backward()
        return loss

    optimizer.step(huber)
    return huber().item(), constants().detach()


def error(rows: list[dict], held_out: str) -> float:
    """The mean error, in nats, of the law that is fitted to the rows without those of the largest
    `held_out` (size, rate or step of each run), on those."""
    largest = max(row[held_out] for row in rows)
    tested = columns([row for row in rows if row[held_out] == largest])
    constants = fit(columns([row for row in rows if row[held_out] < largest]))
    return (predict(tested, constants) - tested["loss"]).abs().mean().item()


def main() -> None:
    rows = json.loads(ROWS.read_text())["rows"]
    print("held out: the largest size, the highest rate, the most tokens")
    for method in dict.fromkeys(row["method"] for row in rows):
        of_method = [row for row in rows if row["method"] == method]
        print(f"{method:8}", *(f"{error(of_method, name):8.3f}" for name in HELD_OUT))


if __name__ == "__main__":
    main()
