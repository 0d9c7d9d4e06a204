"""
The law of pruning, tested: how long until an accuracy, for every group size, with and without pruning.

    python -m bench law     the tables of docs/method.md, from runs/law.jsonl; missing runs are made, hours

Time is virtual: m x tokens sampled + tokens trained on, where m is the time of everything but training
over the time of training on all completions. So one run of GRPO without zeros serves every m, and nothing
depends on the machine. adaptive keeps what pays at its own m, so it has runs for each m.

Every arm (rule, m, group size) has its own learning rate: of four, on two seeds, the one that reaches the
target soonest. It is then run again on fresh seeds, and only these count. runs/law-predicted.md was
written before the first run.
"""

import math
import multiprocessing
import os
import statistics
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

import torch

import config
import dppo
import eval as evaluation
import train
from bench import JsonFile, made_by
from runtime import log

ROWS = Path("runs/law.jsonl")
TARGETS = {"arithmetic": 0.85, "arithmetic-mixed": 0.7}  # accuracy on held-out problems
STEPS = {"arithmetic": 80, "arithmetic-mixed": 120}  # at most; a run ends soon after the target
GROUP_SIZES = (2, 4, 8, 16, 32)
RATIOS = (0.1, 0.3, 1.0, 3.0)  # m
COMPLETIONS = 64  # of a step
RATES = (2e-4, 3e-4, 4.5e-4, 6.7e-4)
TUNING_SEEDS = (100, 101)
EVERY = 4  # steps between evaluations
PROBLEMS = 100  # of an evaluation, 4 completions each
SURELY = 0.04  # a run ends when the mean of its last three evaluations is so far above the target
LOST = 0.25  # or so far below its best one
FLAGS = "--loss dr_grpo --adam-beta2 0.95 --lr-schedule constant --warmup 5 --grad-clip 1"


@dataclass(frozen=True)
class Run:
    """What a run is, before it is made."""

    task: str
    rule: str  # zero, adaptive; with prompts by history or blind: adaptive_history, adaptive_blind
    ratio: float  # m; 0: the rule does not depend on it
    group_size: int
    lr: float
    seed: int

    def flags(self) -> str:
        """The flags of train.py."""
        batch = (
            f"--prompts-per-step {COMPLETIONS // self.group_size} --group-size {self.group_size}"
        )
        pruning = "--prompt-rule none --completion-rule zero"
        if self.rule == "adaptive":
            share = 1 / (1 + self.ratio)
            pruning = (
                f"--prompt-rule none --completion-rule adaptive --completion-prune-rate {share}"
            )
        task = f"--data {self.task} --eval-data arithmetic --steps {STEPS[self.task]}"
        return f"{FLAGS} {task} {batch} {pruning} --lr {self.lr} --seed {self.seed}"

    def is_row(self, row: dict) -> bool:
        return all(row[name] == value for name, value in vars(self).items())


def main(
    tasks: tuple[str, ...] = ("arithmetic", "arithmetic-mixed"),
    seeds: int = 5,
    workers: int = 2,
    json_file: JsonFile = ROWS,
) -> None:
    """Make the runs that are missing.

    Args:
        tasks: arithmetic, arithmetic-mixed
        seeds: fresh seeds of each arm
        workers: runs at a time, each with one thread
        json_file: where the rows are; the same command resumes after a stop
    """
    for task in tasks:
        arms = [(task, "zero", 0.0, size) for size in GROUP_SIZES]
        arms += [(task, "adaptive", m, size) for m in RATIOS for size in GROUP_SIZES]
        make([Run(*arm, lr, seed) for seed in TUNING_SEEDS for lr in RATES for arm in arms],
             json_file, workers)  # fmt: skip
        rows = log.read_rows(json_file)
        chosen = dict.fromkeys(
            (*arm, best_rate(rows, arm, m))
            for arm in arms
            for m in ([arm[2]] if arm[2] else RATIOS)
        )
        make([Run(*arm, seed) for seed in range(seeds) for arm in chosen], json_file, workers)


def make(runs: Iterable[Run], file: Path, workers: int) -> None:
    """Make the runs that the file lacks, `workers` at a time."""
    rows = log.cut_rows(file, lambda row: True)
    missing = [run for run in runs if not any(map(run.is_row, rows))]
    os.environ["OMP_NUM_THREADS"] = "1"  # the workers inherit it
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        for done in as_completed([pool.submit(make_one, run) for run in missing]):
            row = done.result()
            log.append_rows(file, [row])
            name = f"{row['task']} {row['rule']} m {row['ratio']:g} G {row['group_size']}"
            accuracies = [point[3] for point in row["curve"]]
            print(name, f"lr {row['lr']:g} seed {row['seed']}", accuracies, flush=True)


def make_one(run: Run) -> dict:
    """Train until the accuracy is surely above the target; returns the run's row. A point of its curve
    is [step, tokens sampled, tokens trained on, accuracy], all tokens since the start."""
    torch.set_num_threads(1)
    trainer = train.Trainer(config.parse_config(run.flags().split()))
    sampled = trained = 0
    curve = [[0, 0, 0, accuracy(trainer)]]
    for step in range(1, STEPS[run.task] + 1):
        row, *_ = trainer.step(step)
        sampled += int(row["cost/sampled"])
        trained += int(row["cost/kept"])
        if step % EVERY == 0:
            curve.append([step, sampled, trained, accuracy(trainer)])
            last = statistics.mean(point[3] for point in curve[-3:])
            best = max(point[3] for point in curve)
            if last > TARGETS[run.task] + SURELY or last < best - LOST:
                break
    return vars(run) | {"curve": curve} | made_by()


def accuracy(trainer: train.Trainer) -> float:
    """avg@4 on the first held-out problems."""
    rewards, _truncated = evaluation.sample_rewards(
        trainer.policy, trainer.tokenizer, trainer.eval_set[:PROBLEMS], trainer.eval_ids[:PROBLEMS],
        trainer.eval_reward, trainer.sampling, k=train.EVAL_K,
        seed=dppo.seed_for(trainer.cfg.seed, "law"), keys=range(PROBLEMS),
    )  # fmt: skip
    return round(evaluation.avg_at_k(rewards), 4)


# ---------------------------------------------------------------------------- figures


def monotone(values: list[float]) -> list[float]:
    """The increasing sequence that is nearest to the values by squares (pool adjacent violators)."""
    pools = []  # [mean, count]
    for value in values:
        pools.append([value, 1])
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (first, n), (second, k) = pools[-2:]
            pools[-2:] = [[(first * n + second * k) / (n + k), n + k]]
    return [mean for mean, count in pools for _ in range(count)]


def time_to_target(row: dict, m: float, target: float | None = None) -> float:
    """Virtual time until the run's accuracy, made monotone, is at the target; infinite if it never is."""
    target = TARGETS[row["task"]] if target is None else target
    times = [m * sampled + trained for _step, sampled, trained, _accuracy in row["curve"]]
    heights = monotone([point[3] for point in row["curve"]])
    for i in range(1, len(times)):
        if heights[i] >= target:
            share = (target - heights[i - 1]) / (heights[i] - heights[i - 1])
            return times[i - 1] + share * (times[i] - times[i - 1])
    return math.inf


def rows_of(rows: list[dict], arm: tuple, seeds=None) -> list[dict]:
    task, rule, m, size = arm
    wanted = {"task": task, "rule": rule, "ratio": m, "group_size": size}
    return [row for row in rows if wanted.items() <= row.items() and row["seed"] in seeds]


def best_rate(rows: list[dict], arm: tuple, m: float) -> float:
    """The learning rate whose runs on the tuning seeds reach the target soonest."""

    def slowness(lr):
        times = [time_to_target(r, m) for r in rows_of(rows, arm, TUNING_SEEDS) if r["lr"] == lr]
        return sum(map(math.isinf, times)), statistics.mean(times)

    return min(RATES, key=slowness)
