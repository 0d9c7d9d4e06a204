"""
Methods at equal steps, or until they reach an accuracy.

    python -m bench race --steps 10 --seeds 2         a minute
    python -m bench race --steps 40 --methods grpo nonzero adaptive pps
    python -m bench race --reach 0.98 --methods adaptive "small=--steps 200 --method nonzero"

Until an accuracy, each method should have the flags that suit it. Seconds are CPU time of a run's
one thread, without evaluation, and compare only within one machine. Methods take turns. A row is
appended when its run ends, so the same command resumes after a stop.
"""

import functools
import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

import config
import train
from bench import JsonFile, made_by, results
from runtime import InputError, NotFiniteError, log, timer

METHODS = {  # flags. Rates are the usual ones of each method; blind draws keep what pps keeps
    "grpo": "--method grpo",
    "nonzero": "--method nonzero",
    "adaptive": "--method adaptive --rest 0.1111",
    "adaptive_prompts": (
        "--method adaptive --rest 0.1111 --prompt-rule uniform --prompt-prune-rate 0.6"
    ),
    "pps": "--method pps --completion-prune-rate 0.9",
    "uniform": "--completion-rule uniform --method grpo --completion-prune-rate 0.9",
    "dppo": "--method dppo",
    "pods": "--method pods --completion-prune-rate 0.8",
    "cppo": "--method cppo --completion-prune-rate 0.8",
}
BASE = "--loss dr_grpo --lr-schedule linear --warmup 5 --grad-clip 1 --eval-every 10"
SFT = "out-smollm2/sft/checkpoint"  # SmolLM2's supervised start, by bash runs/smollm2.sh
SETTINGS = {  # flags that all runs share; those of a method come after them
    "arithmetic": f"--data arithmetic --eval-problems 1000 {BASE}",
    "arithmetic-mixed": (
        f"--data arithmetic-mixed --eval-data arithmetic --eval-problems 1000 {BASE}"
    ),
    "words": (
        f"--data words --prompt-format plain --rollout-batch 256 --model {SFT} --eval-problems 256 "
        f"{BASE} --warmup 2 --eval-every 4"
    ),
}
PROBLEMS = 150  # of an evaluation with --reach
SUMS = {  # column of a row: the column of the log that it sums over all steps
    "seconds": "seconds",
    "sampled": "cost/sampled",  # tokens of prompts and completions that were rolled out
    "trained": "cost/kept",  # and of those that were trained on
}


@dataclass(frozen=True)
class Run:
    """What a run is, before it is made."""

    setting: str
    method: str  # its name in the tables
    flags: str  # of train.py
    seed: int
    steps: int  # 0: the --steps of its flags
    reach: float = 0.0  # the accuracy at which it ends sooner

    def config(self) -> config.Config:
        flags = f"{SETTINGS[self.setting]} {self.flags} --seed {self.seed}"
        flags += f" --steps {self.steps}" if self.steps else ""
        return config.parse_config(f"{flags} --out-dir out-race/never-written".split())

    def is_row(self, row: dict) -> bool:
        """Whether a row of a file is this run's."""
        return all(row.get(name, 0.0) == value for name, value in vars(self).items())


def main(
    methods: tuple[str, ...] = ("nonzero", "adaptive"),
    setting: Literal["arithmetic", "arithmetic-mixed", "words"] = "arithmetic",
    steps: int = 0,
    reach: float = 0,
    flags: str = "",
    seeds: int = 5,
    first_seed: int = 10,
    workers: int = 2,
    json_file: JsonFile = Path("out-race/rows.jsonl"),
) -> None:
    """Train each method for equal steps, or until an accuracy, and print the table.

    Args:
        methods: grpo, nonzero, adaptive, adaptive_prompts, pps, uniform, dppo, pods, cppo, or
            NAME=FLAGS with flags of train.py
        setting: the task. words is SmolLM2's, and begins with bash runs/smollm2.sh
        steps: of each run
        reach: end a run when it has this accuracy; it fails if it has not after its own --steps
        flags: of train.py, for all methods
        seeds: of each method
        first_seed: the lowest of them
        workers: runs at a time, each with one thread
        json_file: where the rows of all runs are; the same command resumes after a stop
    """
    if bool(steps) == bool(reach):
        raise InputError("give one of --steps and --reach")
    planned = [
        Run(setting, *arm(method, flags), first_seed + seed, steps, reach)
        for seed in range(seeds)
        for method in methods
    ]
    print(f"\n{results.steps_table(make(planned, json_file, workers))}")


def arm(method: str, shared: str) -> tuple[str, str]:
    """(name, flags) of a name of METHODS, or of NAME=FLAGS."""
    name, equals, flags = method.partition("=")
    if not equals and name not in METHODS:
        raise InputError(f"--methods {name}: give NAME=FLAGS, or one of {', '.join(METHODS)}")
    return name, f"{flags if equals else METHODS[name]} {shared}".strip()


# ---------------------------------------------------------------------------- runs


def make(runs: list[Run], file: Path, workers: int) -> list[dict]:
    """The rows of the runs, in their order. Those that the file lacks are made, `workers` at a
    time."""
    file.parent.mkdir(parents=True, exist_ok=True)
    rows = log.cut_rows(file, lambda row: True)  # without a half-written line
    missing = [run for run in runs if not any(map(run.is_row, rows))]
    for run in missing:
        run.config()  # a flag that is mistyped ends the command here
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        waiting = [pool.submit(make_one, run) for run in missing]
        try:
            for done in as_completed(waiting):
                row = done.result()
                log.append_rows(file, [row])
                rows.append(row)
                where = f"{row['setting']}, {row['method']}, seed {row['seed']}"
                steps = f"{row['made']} steps in {row['seconds']:.1f} s"
                failed = row["failed"] or ""
                print(f"{where}: {row['accuracy']:.3f} after {steps} {failed}", flush=True)
        except BaseException:  # Ctrl-C, too: the runs that have not begun never will
            pool.shutdown(cancel_futures=True)
            raise
    return [next(filter(run.is_row, rows)) for run in runs]


def make_one(run: Run) -> dict:
    """Make a run in this process, and evaluate it; returns its row. A run whose loss or gradient is
    not finite has the accuracy 0."""
    torch.set_num_threads(1)
    warm_up(run.setting)
    rows = []  # of log.jsonl
    curve = []  # with --reach: [step, accuracy, seconds]
    accuracy, failed = 0.0, None
    trainer = train.Trainer(run.config())
    try:
        for step in range(1, trainer.cfg.steps + 1):
            before = time.process_time()
            row, _others = trainer.step(step)
            rows.append(row | {"seconds": time.process_time() - before})
            if run.reach and step % trainer.cfg.eval_every == 0:
                so_far = round(sum(row["seconds"] for row in rows), 3)
                curve.append([step, round(trainer.accuracy(PROBLEMS, "final"), 5), so_far])
                if curve[-1][1] >= run.reach:
                    break
        if curve and curve[-1][0] == len(rows):
            accuracy = curve[-1][1]
        else:
            problems = PROBLEMS if run.reach else len(trainer.eval_set)
            accuracy = round(trainer.accuracy(problems, "final"), 5)
    except NotFiniteError as problem:
        failed = str(problem)
    sums = {name: round(sum(row[key] for row in rows), 3) for name, key in SUMS.items()}
    result = {"made": len(rows), "accuracy": accuracy, "curve": curve, "failed": failed}
    result["rest"] = timer.measured_rest(rows)
    result["entropy"] = rows[-1]["entropy"] if rows else None
    return vars(run) | result | sums | made_by()


@functools.cache
def warm_up(setting: str) -> None:
    """Load and compile what the first step of a process does, before a run is timed."""
    flags = "--method grpo --prompts-per-step 2 --group-size 2"
    train.Trainer(Run(setting, "warm-up", flags, seed=0, steps=1).config()).step(1)
