"""
The seconds of a step's parts, measured after the device has finished its work; and from them, for
reports, `rest`: the time of all of a step but training over the time of training on everything.
"""

import contextlib
import statistics
import time

import torch

PARTS = ("rollout", "score", "train")
RECENT = 20  # steps that `measured_rest` looks at, because lengths change in a run


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


# ---------------------------------------------------------------------------- rest, for reports


def recent_steps(rows: list[dict]) -> list[dict]:
    """The last steps that trained on anything, from rows of log.jsonl, without step 1, which loads
    and compiles."""
    return [row for row in rows if row["step"] > 1 and row["cost/kept"]][-RECENT:]


def median(rows: list[dict], key: str) -> float:
    """The lower median, so that a step that waited, or loaded and compiled, changes nothing."""
    return statistics.median_low(row[key] for row in rows)


def measured_rest(rows: list[dict]) -> float | None:
    """`rest` of a run's last steps, from rows of log.jsonl. None if it cannot be known.

    rest = (seconds of a step - seconds of a token * tokens kept) / (seconds of a token * tokens
    sampled), where `seconds of a token` leaves out what an update takes whatever it keeps.
    """
    steps = recent_steps(rows)
    if not steps:
        return None
    token = seconds_of_a_token(steps)
    others = [row["step_time"] - min(token * row["cost/kept"], row["time/train"]) for row in steps]
    return statistics.median_low(others) / (token * median(steps, "cost/sampled"))


def seconds_of_a_token(steps: list[dict]) -> float:
    """Seconds of training on one more token.

    An update that keeps little also takes its fixed time. Where the tokens differ enough, a line
    tells the two apart: through the median of the half that kept less, and that of the half that
    kept more. Else all of the time is taken to grow with the tokens.
    """
    steps = sorted(steps, key=lambda row: row["cost/kept"])
    less, more = steps[: len(steps) // 2], steps[len(steps) // 2 :]
    if less and median(more, "cost/kept") > 1.5 * median(less, "cost/kept"):
        tokens = median(more, "cost/kept") - median(less, "cost/kept")
        slope = (median(more, "time/train") - median(less, "time/train")) / tokens
        if 0 < slope * median(less, "cost/kept") < median(less, "time/train"):
            return slope
    return statistics.median_low(row["time/train"] / row["cost/kept"] for row in steps)
