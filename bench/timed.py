"""
Runs by budget: how accurate a method is after so many seconds of training.

A run's schedule ends with its budget. Its number of steps is fixed beforehand: a first run of the
same flags, with a seed that is not reported, paces itself by the clock, and the others make as many
steps as it did. Seconds are those for which its one thread computes steps, because other processes
hardly change them; evaluation is left out. Each run is a row of a file, appended when the run ends,
so what is stopped goes on with the same command.
"""

import itertools
import multiprocessing
import os
import platform
import re
import statistics
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path

import torch

import config
import dppo
import eval as evaluation
import train
from bench.code import this_code
from run import EVAL_K
from runtime import InputError, log, ranks

SETTINGS = {  # flags that all runs of a setting share
    "arithmetic": "--data arithmetic",
    "arithmetic-mixed": "--data arithmetic-mixed --eval-data arithmetic",
}
REPORTED = (0, 1000)  # the held-out problems that a race evaluates on, 4 completions each
SEARCHED = (1000, 1250)  # and a search
PACE = 8  # the last steps, whose mean tells a paced run how long the next ones take


@dataclass(frozen=True)
class Run:
    """What a run is, before it is made."""

    setting: str
    method: str  # its name in the tables
    flags: str  # of train.py
    budget: float  # in seconds
    seed: int
    steps: int | None = None  # None: paced by the clock
    problems: tuple[int, int] = REPORTED

    def is_row(self, row: dict) -> bool:
        """Whether this run has been made, and is the row of a file."""
        names = ("setting", "flags", "budget", "seed")
        return row["paced"] == (self.steps is None) and all(
            row[name] == getattr(self, name) for name in names
        )


def check_names(flag: str, given: Iterable[str], known: Iterable[str]) -> None:
    """InputError for a name that a flag does not take, before anything runs."""
    for name in given:
        if name not in known:
            raise InputError(f"{flag} {name}: choose from {', '.join(known)}")


def make(runs: list[Run], file: Path, workers: int, here: bool = False) -> list[dict]:
    """The rows of the runs, in their order. Those that the file lacks are made, `workers` at a
    time; `here`: the rows of other machines do not count."""
    rows = log.cut_rows(file, lambda row: True)
    rows = [row for row in rows if not here or row["machine"] == machine()]
    missing = [run for run in dict.fromkeys(runs) if not any(map(run.is_row, rows))]
    if missing:
        os.environ["OMP_NUM_THREADS"] = "1"  # the workers inherit it
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(min(workers, len(missing)), context, warm_up) as pool:
            for done in as_completed([pool.submit(train_for, run) for run in missing]):
                log.append_rows(file, [done.result()])
                rows.append(done.result())
                print(line(done.result()), flush=True)
    return [next(filter(run.is_row, rows)) for run in runs]


def line(row: dict) -> str:
    """A row, as it is shown when the run ends."""
    steps = f"{row['steps']} steps in {row['seconds']:.1f} s" + " (paced)" * row["paced"]
    where = f"{row['setting']} {row['budget']:g} s seed {row['seed']}"
    return f"{row['accuracy']:.3f}  {where}: {row['method']}, {steps}: {row['flags']}"


def warm_up() -> None:
    """The first run of a process is slow: it loads libraries."""
    train_for(Run("arithmetic", "", "--prompts-per-step 8", 0.1, 0, problems=(0, 1)))


def train_for(run: Run) -> dict:
    """Make a run in this process; returns its row. One that cannot go on has the accuracy 0."""
    args = [*SETTINGS[run.setting].split(), *run.flags.split(), "--seed", str(run.seed)]
    args += ["--eval-problems", str(run.problems[1]), "--out-dir", "out-budget"]  # never written
    started, wall, times, tokens, failed = time.monotonic(), 0.0, [], 0, None
    trainer = train.Trainer(config.parse_config(args))
    try:
        for step in itertools.count(1):
            planned = run.steps or plan(times, run.budget)
            if step > planned:
                break
            trainer.cfg = replace(trainer.cfg, steps=planned)
            before = time.process_time()
            row, _samples = trainer.step(step)
            times.append(time.process_time() - before)
            trainer.stop.held = False
            wall += row["step_time"]
            tokens += row["tokens/generated"]
        rewards = evaluate(trainer, run)
    except InputError as problem:  # a loss that is not finite
        failed, rewards = str(problem), torch.zeros(1, EVAL_K)
    return {
        "setting": run.setting, "method": run.method, "flags": run.flags, "budget": run.budget,
        "seed": run.seed, "paced": run.steps is None, "steps": len(times),
        "seconds": round(sum(times), 3), "accuracy": round(evaluation.avg_at_k(rewards), 5),
        "problems": len(rewards), "tokens": int(tokens), "failed": failed,
        "wall_of_steps": round(wall, 3), "wall": round(time.monotonic() - started, 2),
        "machine": machine(), **this_code(),
    }  # fmt: skip


def plan(times: list[float], budget: float) -> int:
    """How many steps a paced run will make, from the seconds of those that it has made."""
    if not times:
        return 1000
    left = budget - sum(times)
    return len(times) + max(0, round(left / statistics.mean(times[-PACE:])))


def evaluate(trainer: train.Trainer, run: Run) -> torch.Tensor:
    """Rewards [problems, EVAL_K] of the trained policy on the run's held-out problems."""
    t, part = trainer, slice(*run.problems)
    ranks.refresh(t.policy, t.model)
    problems, ids = t.eval_set[part], t.eval_ids[part]
    options = {"k": EVAL_K, "seed": dppo.seed_for(run.seed, "final"), "keys": range(len(ids))}
    args = (t.policy, t.tokenizer, problems, ids, t.eval_reward, t.sampling)
    rewards, _truncated = evaluation.sample_rewards(*args, **options)
    return rewards


def machine() -> str:
    """The processor's name, because seconds compare only within one machine."""
    info = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*: (.*)", info.read_text()) if info.exists() else []
    return names[0] if names else platform.processor() or platform.machine()
