"""
How many threads a step computes with: one for each core that is idle.

OpenMP's threads spin while they wait for each other. Beside another busy process, a spinning thread
occupies the core that the other thread needs: on 2 cores a step of 0.7 s took 2.9 s beside one busy
loop, and up to 25 s beside a program with two threads. With one thread it takes 0.9 and 1.6 s.
Spinning less helps too, but costs a fifth to a third of a step on an idle machine (runs/LOG.md).

Results differ in rounding with the number of threads. Set OMP_NUM_THREADS to fix it.
"""

import os
import sys
import time

import torch

MOST = torch.get_num_threads()  # torch's own choice, before any run has changed it
PERIOD = 5.0  # seconds between two looks at the machine
LOOK = 0.05  # seconds that a look takes
SLACK = 0.75  # cores: a smaller difference changes nothing, so that noise does not


class Threads:
    def __init__(self, device: str):
        self.chooses = device == "cpu" and MOST > 1 and "OMP_NUM_THREADS" not in os.environ
        self.looked = -PERIOD

    def fit(self) -> None:
        """Compute with as many threads as there are idle cores, from 1 to torch's own choice."""
        if not self.chooses or time.monotonic() - self.looked < PERIOD:
            return
        idle = min(MOST, idle_cores())
        self.looked = time.monotonic()
        if abs(idle - torch.get_num_threads()) < SLACK:
            return
        threads = max(1, round(idle))
        if threads != torch.get_num_threads():
            torch.set_num_threads(threads)
            message = f"computing with {threads} of {MOST} threads, one for each idle core"
            print(message, file=sys.stderr, flush=True)


def idle_cores() -> float:
    """How many of this process's cores other processes leave idle; all, if that is not known."""
    try:
        before, own = _ticks(), time.process_time()
        time.sleep(LOOK)
        after, own = _ticks(), time.process_time() - own  # own threads may spin for a while
    except (OSError, ValueError, AttributeError):  # not Linux
        return float(MOST)
    idle, known = own / LOOK, False
    for core in before.keys() & after.keys():
        total = after[core][1] - before[core][1]
        known |= total > 0
        idle += (after[core][0] - before[core][0]) / max(1, total)
    return idle if known else float(MOST)


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
