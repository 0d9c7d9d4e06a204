"""
How many threads a step computes with: one for each core that is idle.

OpenMP's threads spin while they wait for each other. Beside another busy process, a spinning thread
occupies the core that the other thread needs: on 2 cores a step of 0.7 s took 2.9 s beside one busy
loop, and up to 25 s beside a program with two threads. With one thread it takes 0.9 and 1.6 s.
Spinning less helps too, but costs a fifth to a third of a step on an idle machine (runs/LOG.md).

Another number of threads rounds sums differently. Set OMP_NUM_THREADS to fix the number.
"""

import os
import time

import torch

MOST = torch.get_num_threads()  # torch's own choice, before any run has changed it
PERIOD = 5.0  # seconds between two looks at the machine
LOOK = 0.05  # seconds that a look takes


class Threads:
    def __init__(self, device: str):
        self.chooses = device == "cpu" and MOST > 1 and "OMP_NUM_THREADS" not in os.environ
        self.looked = -PERIOD

    def fit(self) -> None:
        """Compute with as many threads as there are idle cores, from 1 to torch's own choice."""
        if not self.chooses or time.monotonic() - self.looked < PERIOD:
            return
        threads = max(1, min(MOST, idle_cores()))
        self.looked = time.monotonic()
        if threads != torch.get_num_threads():
            torch.set_num_threads(threads)
            print(f"computing with {threads} of {MOST} threads, one for each idle core")


def idle_cores() -> int:
    """How many of this process's cores are idle while it sleeps. Without /proc: all."""
    try:
        before = _ticks()
        time.sleep(LOOK)
        after = _ticks()
    except (OSError, ValueError, AttributeError):  # not Linux
        return os.cpu_count() or 1
    idle = 0.0
    for core, (idle_after, total_after) in after.items():
        idle_before, total_before = before[core]
        idle += (idle_after - idle_before) / max(1, total_after - total_before)
    return round(idle)


def _ticks() -> dict[int, tuple[int, int]]:
    """(idle, total) clock ticks since boot of each core that this process may use."""
    cores = os.sched_getaffinity(0)
    found = {}
    with open("/proc/stat") as file:
        for line in file:
            name, *ticks = line.split()
            if name.startswith("cpu") and name != "cpu" and int(name[3:]) in cores:
                ticks = [int(count) for count in ticks[:8]]  # user, nice, system, idle, iowait, ...
                found[int(name[3:])] = (ticks[3] + ticks[4], sum(ticks))
    return found
