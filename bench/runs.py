"""
The runs of docs/results.md: each trains a model with some flags, and is a row of a file.

A run ends after a number of steps, or after a number of seconds. In the second case its schedule
ends with its budget: before each step, the seconds of its last steps say how many more there will
be. Seconds are those for which its one thread computes steps (CPU time); evaluation is left out. On
two cores two runs at a time are about as fast as one alone.

A row is appended when its run ends, so the same command resumes after a stop. A run is never
repeated for its result. Seconds compare only within one machine, and a name is not enough: of two
called AMD EPYC, one was twice as fast. So each row has the time of a fixed computation (probe), and
the runs of a setting that end after seconds are made on machines of one speed.
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

HELD_OUT = 2000  # held-out problems, of which the first are used
SAME_SPEED = 1.4  # a larger ratio of two probes is another machine, not the noise of neighbors
PACE = 8  # the last steps, whose mean says how long the next ones take
CURVE = 4  # evaluations of a run by steps, the last one included
SUMS = {  # column of a row: the column of the log that it sums over all steps
    "seconds": "seconds",  # CPU time
    "wall": "step_time",
    "prompts": "prompts",  # rolled out
    "rollout": "time/rollout",
    "train": "time/train",
    "sampled": "cost/sampled",  # tokens of prompts and completions that were rolled out
    "trained": "cost/kept",  # and of those that were trained on
}


class Setting(NamedTuple):
    """What all runs of a setting share."""

    flags: str  # of train.py; those of a run come after them
    problems: int = 1000  # held out, 4 completions each
    curve: int = 250  # problems of the evaluations before the last one; 0: none of these


SFT = Path("out-smollm2/sft/checkpoint")  # SmolLM2's supervised start
BASE = "--loss dr_grpo --adam-beta2 0.95 --lr-schedule linear --warmup 5 --grad-clip 1"
WORDS = f"--data words --prompt-format plain --rollout-batch 256 --model {SFT}"
SETTINGS = {
    "arithmetic": Setting(f"--data arithmetic {BASE}"),
    "arithmetic-mixed": Setting(f"--data arithmetic-mixed --eval-data arithmetic {BASE}"),
    "words": Setting(f"{WORDS} {BASE} --warmup 2", 256, curve=0),  # few steps
}


@dataclass(frozen=True)
class Run:
    """What a run is, before it is made."""

    setting: str
    method: str  # its name in the tables
    flags: str  # of train.py
    seed: int
    budget: float = 0  # in seconds, or:
    steps: int = 0

    def is_row(self, row: dict) -> bool:
        """Whether a row of a file is this run's."""
        return all(row[name] == value for name, value in vars(self).items())

    def make(self) -> dict:
        """Its row."""
        return make_one(self)

    def warm_up(self) -> None:
        """Load the libraries, before a run is timed."""
        make_one(replace(self, steps=1), problems=1)

    def line(self, row: dict) -> str:
        """Its row, as it is shown when the run ends."""
        where = f"{row['setting']} seed {row['seed']}"
        steps = f"{row['made']} steps in {row['seconds']:.1f} s"
        failed = f" failed: {row['failed']}" if row["failed"] else ""
        return f"{row['accuracy']:.3f}  {where}: {steps}, {row['flags']}{failed}"


def check_names(flag: str, given: Iterable[str], known: Iterable[str]) -> None:
    """InputError for a name that a flag does not take, before anything runs."""
    for name in given:
        if name not in known:
            raise InputError(f"{flag} {name}: choose from {', '.join(known)}")


def check_settings(given: Iterable[str], known: Iterable[str]) -> None:
    """InputError for a setting that is unknown, or whose model has not been made."""
    check_names("--settings", given, known)
    if "words" in given and not SFT.exists():
        raise InputError(f"--settings words: there is no {SFT}; run bash runs/smollm2.sh first")


def make(runs: list, file: Path, workers: int) -> list[dict]:
    """The rows of the runs, in their order. Those that the file lacks are made, `workers` at a
    time. A run is a Run, or a dataclass with the same methods."""
    file.parent.mkdir(parents=True, exist_ok=True)
    rows = log.cut_rows(file, lambda row: True)
    missing = [run for run in dict.fromkeys(runs) if not any(map(run.is_row, rows))]
    if missing:
        os.environ["OMP_NUM_THREADS"] = "1"  # the workers inherit it
        context = multiprocessing.get_context("spawn")
        started = (min(workers, len(missing)), context, start_worker, missing[:1])
        with ProcessPoolExecutor(*started) as pool:
            run_of = {pool.submit(run.make): run for run in missing}
            try:
                for done in as_completed(run_of):
                    row = done.result()
                    log.append_rows(file, [row])
                    rows.append(row)
                    print(run_of[done].line(row), flush=True)
            except BaseException:  # Ctrl-C, too: the runs that have not begun never will
                pool.shutdown(cancel_futures=True)
                raise
    return [next(filter(run.is_row, rows)) for run in runs]


def check_speed(runs: list[Run], file: Path) -> None:
    """InputError if runs that end after seconds would join rows of a faster or slower machine."""
    rows = log.read_rows(file)
    settings = {run.setting for run in runs if not any(map(run.is_row, rows))}
    before = [row["probe"] for row in rows if row["setting"] in settings]
    ratio = statistics.median(before) / probe() if before else 1.0
    if not 1 / SAME_SPEED < ratio < SAME_SPEED:
        raise InputError(
            f"{file}: this machine is {ratio:.2f} times as fast as the one that made its "
            "rows, and seconds compare only within one machine; give --json another file"
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


def start_worker(run) -> None:
    """Let this worker end with its parent, and be warm when its first run begins."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    run.warm_up()


def _end_with_parent() -> None:
    multiprocessing.parent_process().join()
    os._exit(1)


def make_one(run: Run, problems: int | None = None) -> dict:
    """Make a run in this process, and evaluate it on at most so many problems; returns its row.

    A run that cannot go on has the accuracy 0.
    """
    setting = SETTINGS[run.setting]
    args = [*setting.flags.split(), *run.flags.split(), "--seed", str(run.seed)]
    args += ["--eval-problems", str(HELD_OUT), "--out-dir", "out-race/never-written"]
    started = time.monotonic()
    speed = probe()
    rows = []  # of log.jsonl
    curve = []  # [step, accuracy], before the last step
    accuracy, failed = 0.0, None
    try:
        trainer = train.Trainer(config.parse_config(args))
        for step in itertools.count(1):
            planned = run.steps or plan([row["seconds"] for row in rows], run.budget)
            if step > planned:
                break
            trainer.cfg = replace(trainer.cfg, steps=planned)
            before = time.process_time()
            row, _others = trainer.step(step)
            seconds = time.process_time() - before
            prompts = row["kept/prompts"] * trainer.cfg.prompts_per_step
            rows.append(row | {"seconds": seconds, "prompts": prompts})
            if setting.curve and step < run.steps and step % max(1, run.steps // CURVE) == 0:
                curve.append([step, evaluate(trainer, run, problems or setting.curve)])
        accuracy = evaluate(trainer, run, problems or setting.problems)
    except (InputError, FloatingPointError) as problem:  # such as a loss that is not finite
        failed = str(problem)
    sums = {name: round(sum(row[key] for row in rows), 3) for name, key in SUMS.items()}
    result = {"made": len(rows), "accuracy": accuracy, "curve": curve, "failed": failed}
    wall = round(time.monotonic() - started, 2)
    return vars(run) | result | sums | {"wall_of_run": wall, "probe": speed, **made_by()}


def plan(times: list[float], budget: float) -> int:
    """How many steps a run will have, from the seconds of those that it has made."""
    if not times:
        return 1000
    left = budget - sum(times)
    return len(times) + max(0, round(left / statistics.mean(times[-PACE:])))


def evaluate(trainer: train.Trainer, run: Run, problems: int) -> float:
    """avg@4 of the trained policy on the first held-out problems."""
    ranks.refresh(trainer.policy, trainer.model)
    rewards, _truncated = evaluation.sample_rewards(
        trainer.policy, trainer.tokenizer, trainer.eval_set[:problems],
        trainer.eval_ids[:problems], trainer.eval_reward, trainer.sampling,
        k=train.EVAL_K, seed=dppo.seed_for(run.seed, "final"), keys=range(problems),
    )  # fmt: skip
    return round(evaluation.avg_at_k(rewards), 5)
