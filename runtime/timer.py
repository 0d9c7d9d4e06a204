"""Times of a step's parts, measured after the device has finished its work."""

import contextlib
import time

import torch

PARTS = ("rollout", "score", "train")


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
