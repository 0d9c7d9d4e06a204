"""
Runs by budget: how accurate a method is after so many seconds of training.

A run's schedule ends with its budget: before each step, the seconds of its last steps say how many
more there will be. Seconds are those for which its one thread computes steps; evaluation is left
out. On two cores, two runs at a time are as fast as one alone, but other programs may slow a run
down. Each run is a row of a file, appended when the run ends, so the same command resumes after a
stop. A run is never repeated for its result.

Seconds compare only within one machine, and a name is not enough: on two called AMD EPYC, the same
flags made 1.3 to 1.7 times as many steps. So each row has the time of a fixed computation (probe),
and all rows of a setting in a file are from machines of one speed.
"""

import itertools
import multiprocessing
import os
import statistics
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch

import config
import dppo
import eval as evaluation
import train
from bench import made_by
from runtime import InputError, log, ranks

HELD_OUT = 2000  # problems that a race's and a search's are chosen from
SAME_SPEED = 1.4  # a larger ratio of two probes is another machine, not the noise of neighbors
PACE = 8  # the last steps, whose mean says how long the next ones take


class Setting(NamedTuple):
    """What all runs of a setting share."""

    flags: str  # of train.py; those of a run come after them
    problems: int  # held-out problems that a race evaluates on, 4 completions each
    searched: int  # and a search: others, whose texts differ too


SFT = Path("out-smollm2/sft/checkpoint")  # SmolLM2's supervised start
BASE = "--loss dr_grpo --adam-beta2 0.95 --lr-schedule linear --warmup 5 --grad-clip 1"
WORDS = f"--data words --prompt-format plain --rollout-batch 256 --model {SFT}"
SETTINGS = {
    "arithmetic": Setting(f"--data arithmetic {BASE}", 1000, 250),
    "arithmetic-mixed": Setting(
        f"--data arithmetic-mixed --eval-data arithmetic {BASE}", 1000, 250
    ),
    "words": Setting(f"{WORDS} {BASE} --warmup 2", 256, 128),  # few steps
}


@dataclass(frozen=True)
class Run:
    """What a run is, before it is made."""

    setting: str
    method: str  # its name in the tables
    flags: str  # of train.py
    budget: float  # in seconds
    seed: int
    search: bool = False  # evaluated on the problems of a search

    def is_row(self, row: dict) -> bool:
        """Whether this run has been made, and is the row of a file."""
        return all(row[name] == value for name, value in vars(self).items())


def check_names(flag: str, given: Iterable[str], known: Iterable[str]) -> None:
    """InputError for a name that a flag does not take, before anything runs."""
    for name in given:
        if name not in known:
            raise InputError(f"{flag} {name}: choose from {', '.join(known)}")


def check_settings(given: Iterable[str]) -> None:
    """InputError for a setting that is unknown, or whose model has not been made."""
    check_names("--settings", given, SETTINGS)
    if "words" in given and not SFT.exists():
        raise InputError(f"--settings words: there is no {SFT}; run bash runs/smollm2.sh first")


def make(runs: list[Run], file: Path, workers: int) -> list[dict]:
    """The rows of the runs, in their order. Those that the file lacks are made, `workers` at a
    time."""
    file.parent.mkdir(parents=True, exist_ok=True)
    rows = log.cut_rows(file, lambda row: True)
    missing = [run for run in dict.fromkeys(runs) if not any(map(run.is_row, rows))]
    if missing:
        settings = {run.setting for run in missing}
        check_speed([row for row in rows if row["setting"] in settings], file)
        os.environ["OMP_NUM_THREADS"] = "1"  # the workers inherit it
        context = multiprocessing.get_context("spawn")
        started = (min(workers, len(missing)), context, start_worker, missing[:1])
        with ProcessPoolExecutor(*started) as pool:
            try:
                for done in as_completed([pool.submit(train_for, run) for run in missing]):
                    log.append_rows(file, [done.result()])
                    rows.append(done.result())
                    print(line(done.result()), flush=True)
            except BaseException:  # Ctrl-C, too: the runs that have not begun never will
                pool.shutdown(cancel_futures=True)
                raise
    return [next(filter(run.is_row, rows)) for run in runs]


def check_speed(rows: list[dict], file: Path) -> None:
    """InputError if these rows of the file were made on a faster or slower machine than this."""
    before = [row["probe"] for row in rows if "probe" in row]
    ratio = statistics.median(before) / probe() if before else 1.0
    if not 1 / SAME_SPEED < ratio < SAME_SPEED:
        raise InputError(
            f"{file}: this machine is {ratio:.2f} times as fast as the one of its rows, and "
            "seconds compare only within one; give --json another file"
        )


def probe() -> float:
    """CPU milliseconds of a fixed computation of one thread: small products, like tiny's."""
    x, weight, times = torch.ones(32, 256), torch.eye(256), []
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for _ in range(20):
        started = time.process_time()
        for _ in range(200):
            x = torch.relu(x @ weight)
        times.append(time.process_time() - started)
    torch.set_num_threads(threads)
    return round(1000 * statistics.median(times), 3)


def line(row: dict) -> str:
    """A row, as it is shown when the run ends."""
    where = f"{row['setting']} {row['budget']:g} s seed {row['seed']}"
    steps = f"{row['steps']} steps in {row['seconds']:.1f} s"
    return f"{row['accuracy']:.3f}  {where}: {steps}, {row['flags']}"


def start_worker(run: Run) -> None:
    """End with the parent, however it ends; and load libraries, which slows a first run down."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    train_for(replace(run, budget=0.1), problems=1)


def _end_with_parent() -> None:
    multiprocessing.parent_process().join()
    os._exit(1)


def train_for(run: Run, problems: int | None = None) -> dict:
    """Make a run in this process, and evaluate it on at most so many problems; returns its row.

    A run that cannot go on has the accuracy 0.
    """
    args = [*SETTINGS[run.setting].flags.split(), *run.flags.split(), "--seed", str(run.seed)]
    args += ["--eval-problems", str(HELD_OUT), "--out-dir", "out-race/never-written"]
    started, wall, times, tokens, failed = time.monotonic(), 0.0, [], 0, None
    speed = probe()
    try:
        trainer = train.Trainer(config.parse_config(args))
        for step in itertools.count(1):
            planned = plan(times, run.budget)
            if step > planned:
                break
            trainer.cfg = replace(trainer.cfg, steps=planned)
            before = time.process_time()
            row, _samples = trainer.step(step)
            times.append(time.process_time() - before)
            wall += row["step_time"]
            tokens += row["tokens/generated"]
        rewards = evaluate(trainer, run, problems)
    except (InputError, FloatingPointError) as problem:  # such as a loss that is not finite
        failed, rewards = str(problem), torch.zeros(1, train.EVAL_K)
    return vars(run) | {
        "steps": len(times), "seconds": round(sum(times), 3), "wall_of_steps": round(wall, 3),
        "accuracy": round(evaluation.avg_at_k(rewards), 5), "problems": len(rewards),
        "tokens": int(tokens), "failed": failed, "wall": round(time.monotonic() - started, 2),
        "probe": speed, **made_by(),
    }  # fmt: skip


def plan(times: list[float], budget: float) -> int:
    """How many steps a run will have, from the seconds of those that it has made."""
    if not times:
        return 1000
    left = budget - sum(times)
    return len(times) + max(0, round(left / statistics.mean(times[-PACE:])))


def evaluate(trainer: train.Trainer, run: Run, problems: int | None) -> torch.Tensor:
    """Rewards [problems, EVAL_K] of the trained policy on the problems of the race or search."""
    t, setting = trainer, SETTINGS[run.setting]
    texts = [problem.text for problem in t.eval_set]
    chosen = range(setting.problems)
    if run.search:
        raced = set(texts[: setting.problems])
        chosen = [i for i, text in enumerate(texts) if text not in raced][: setting.searched]
    chosen = chosen[:problems]
    ranks.refresh(t.policy, t.model)
    columns = ([table[i] for i in chosen] for table in (t.eval_set, t.eval_ids))
    options = {"k": train.EVAL_K, "seed": dppo.seed_for(run.seed, "final"), "keys": chosen}
    args = (t.policy, t.tokenizer, *columns, t.eval_reward, t.sampling)
    rewards, _truncated = evaluation.sample_rewards(*args, **options)
    return rewards
