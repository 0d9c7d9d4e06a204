"""
Times of a step's parts, measured after the device has finished its work; and from them `rest`, the
time of all of a step but training over the time of training on every completion.
"""

import contextlib
import math
import time

import torch

from runtime import ranks

PARTS = ("rollout", "score", "train")
TIMES = ("cost/kept", "cost/sampled", "time/train", "step_time")  # a row's, which give `rest`
GRID = 1.4  # `rest` is rounded to its powers, so that a run seldom differs from its repetition


def clock(device: str) -> float:
    """Seconds, after the device has finished its work."""
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


class Timer:
    """The seconds of each part of a step, under the names that the log gives them."""

    def __init__(self, device: str):
        self.device = device
        self.start()

    def now(self) -> float:
        return clock(self.device)

    def start(self) -> float:
        """Set every part to 0; returns the time."""
        self.seconds = {f"time/{part}": 0.0 for part in PARTS}
        return self.now()

    @contextlib.contextmanager
    def measure(self, part: str):
        """Add the seconds of a block to time/`part`."""
        started = self.now()
        yield
        self.seconds[f"time/{part}"] += self.now() - started


class Rest:
    """The `rest` of a run. --rest auto measures it after the steps 4, 8, 16, 32, ..., because
    lengths change; until then it is infinite, and adaptive keeps every term that is not 0.

    A step's rest follows from earlier steps only. It is known before the draw, so the gradient
    stays unbiased.
    """

    def __init__(self, flag: float | str):
        self.value = math.inf if flag == "auto" else flag
        self.is_measured = flag == "auto"
        self.rows = []  # TIMES of each step but the first, which warms up

    def add(self, step: int, row: dict) -> None:
        """Learn from a step's row of the log; the seconds are the mean of all ranks."""
        if not self.is_measured or step == 1:
            return
        figures = torch.tensor([row[name] for name in TIMES], dtype=torch.float64)
        mean = ranks.all_reduce(figures) / ranks.world()
        self.rows.append(dict(zip(TIMES, mean.tolist(), strict=True)))
        is_due = step >= 4 and step & (step - 1) == 0  # a power of 2
        if not is_due:
            return
        now = measured_rest(self.rows)
        is_known = 0 < now < math.inf  # not if nothing was sampled, or nothing trained on
        is_near = self.value / GRID < now < self.value * GRID
        if is_known and not is_near:
            self.value = GRID ** round(math.log(now, GRID))


def measured_rest(rows: list[dict]) -> float:
    """The time of all of a step but training, over that of training on all that was sampled, from
    rows of log.jsonl. It is the median of their later half."""
    second = seconds_of_a_token(rows)
    recent = rows[len(rows) // 2 :]
    training = second * column(recent, "cost/kept")
    others = column(recent, "step_time") - training.minimum(column(recent, "time/train"))
    return (others.median() / second / column(recent, "cost/sampled").mean()).item()


def seconds_of_a_token(rows: list[dict]) -> float:
    """Seconds of training on one more token, from rows of log.jsonl.

    An update that keeps little also takes its fixed time. Where the tokens differ enough, a line
    through the points tells the two apart; else all of the time is taken to grow with the tokens.
    """
    kept, seconds = column(rows, "cost/kept"), column(rows, "time/train")
    if kept.max() > 2 * kept.min():
        centred = kept - kept.mean()
        slope = ((centred * seconds).sum() / centred.square().sum()).item()
        if 0 < slope * kept.mean() < seconds.mean():
            return slope
    return (seconds.sum() / kept.sum()).item()


def column(rows: list[dict], key: str) -> torch.Tensor:
    return torch.tensor([row[key] for row in rows], dtype=torch.float64)
