"""
The law of pruning, tested: how long until an accuracy, for every group size, with and without
pruning?

    python -m bench law                      makes the runs that runs/law.jsonl lacks (hours), and
                                             prints the tables
    python -m bench law --correlations 2     measures how the gradients of a prompt's completions
                                             correlate, along two runs of each task

Time is virtual: m x tokens sampled + tokens trained on, where m is the time of everything but
training over the time of training on all completions. So one run of GRPO without zeros serves every
m, and nothing depends on the machine. adaptive keeps what pays at its own m, so it has runs for
each m.

Every arm (rule, m, group size) has its own learning rate: of three, on two seeds, the one that
reaches the target soonest. It is then run again on fresh seeds, and only these count.
runs/law-predicted.md was written before the first run.
"""

import itertools
import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from matplotlib.figure import Figure

import config
import dppo
import eval as evaluation
import rollout
import train
from bench import JsonFile, gradient, inner_products, made_by, results, runs
from rewards import score
from runtime import log
from update import accumulate_gradients

ROWS = Path("runs/law.jsonl")
CORRELATIONS = Path("runs/law-correlation.jsonl")
PREDICTED = Path("runs/law-predicted.md")
PREDICTIONS = ("Before the runs", "With the correlation of groups")  # its tables
TARGETS = {"arithmetic": 0.85, "arithmetic-mixed": 0.7}  # accuracy on held-out problems
STEPS = {"arithmetic": 80, "arithmetic-mixed": 120}  # at most; a run ends soon after the target
GROUP_SIZES = (2, 4, 8, 16, 32)
RATIOS = (0.1, 0.3, 1.0, 3.0)  # m
COMPLETIONS = 64  # of a step
RATES = (2e-4, 3e-4, 4.5e-4)
TUNING_SEEDS = (100, 101)
EVERY = 4  # steps between evaluations
PROBLEMS = 100  # of an evaluation, 4 completions each
MEASURED = (0, 4, 8, 16, 24)  # steps after which the correlation of groups is measured
SURELY = 0.04  # a run ends when the mean of its last three evaluations is so far above the target
LOST = 0.25  # or so far below its best one
FLAGS = "--loss dr_grpo --adam-beta2 0.95 --lr-schedule constant --warmup 5 --grad-clip 1"


@dataclass(frozen=True)
class Run:
    """What a run is, before it is made."""

    task: str
    rule: str  # zero: all terms that are not exactly 0; or adaptive
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
            pruning = f"--prompt-rule none --completion-rule adaptive --rest {self.ratio}"
        task = f"--data {self.task} --eval-data arithmetic --steps {STEPS[self.task]}"
        folder = "--out-dir out-law"  # nothing is written there; the default may hold a run
        return f"{FLAGS} {task} {batch} {pruning} --lr {self.lr} --seed {self.seed} {folder}"

    def is_row(self, row: dict) -> bool:
        return all(row[name] == value for name, value in vars(self).items())

    def make(self) -> dict:
        return make_one(self)

    def warm_up(self) -> None:
        """Virtual time needs none."""

    def line(self, row: dict) -> str:
        accuracies = [point[3] for point in row["curve"]]
        arm = f"{self.task} {self.rule} m {self.ratio:g} G {self.group_size}"
        return f"{arm} lr {self.lr:g} seed {self.seed} {accuracies}"


def main(
    tasks: tuple[str, ...] = ("arithmetic", "arithmetic-mixed"),
    seeds: int = 5,
    correlations: int = 0,
    workers: int = 2,
    json_file: JsonFile = ROWS,
) -> None:
    """Make the runs that are missing, and print and draw what they show.

    Args:
        tasks: arithmetic, arithmetic-mixed
        seeds: fresh seeds of each arm
        correlations: instead, the number of runs of each task along which to measure them
        workers: runs at a time, each with one thread
        json_file: where the rows are; the same command resumes after a stop
    """
    for task, seed in itertools.product(tasks, range(correlations)):
        log.append_rows(CORRELATIONS, measure_correlation(task, seed))
    if correlations:
        return
    for task in tasks:
        arms = [(task, "zero", 0.0, size) for size in GROUP_SIZES]
        arms += [(task, "adaptive", m, size) for m in RATIOS for size in GROUP_SIZES]
        tuning = itertools.product(TUNING_SEEDS, RATES, arms)
        rows = runs.make([Run(*arm, lr, seed) for seed, lr, arm in tuning], json_file, workers)
        chosen = dict.fromkeys(
            (*arm, best_rate(rows, arm, m))
            for arm in arms
            for m in ([arm[2]] if arm[2] else RATIOS)
        )
        fresh = [Run(*arm, seed) for seed in range(seeds) for arm in chosen]
        runs.make(fresh, json_file, workers)
        show(log.read_rows(json_file), task)


def make_one(run: Run) -> dict:
    """Train until the accuracy is surely above the target; returns the run's row. A point of its
    curve is [step, tokens sampled, tokens trained on, accuracy], all tokens since the start."""
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


# ---------------------------------------------------------------------------- how groups correlate


def measure_correlation(task: str, seed: int) -> list[dict]:
    """Design effects (Kish 1965) of groups along a run of GRPO without zeros: the noise of the
    gradient over what it would be if completions of a prompt were independent. {task, seed, step,
    "2": .., "4": ..}, by group size.

    Computed from the gradient of every completion of 24 prompts x 32, all of them in memory.
    """
    torch.set_num_threads(1)
    run = Run(task, "zero", 0.0, 8, 3e-4, seed)
    trainer = train.Trainer(config.parse_config(run.flags().split()))
    rows = []
    for step in range(max(MEASURED) + 1):
        if step:
            trainer.step(step)
        if step in MEASURED:
            rows.append({"task": task, "seed": seed, "step": step} | design_effects(trainer, step))
    return rows


def design_effects(trainer: train.Trainer, step: int) -> dict[str, float]:
    """{group size: design effect} of 24 prompts x 32 completions of the policy as it is."""
    K, G = 24, max(GROUP_SIZES)
    generator = torch.Generator().manual_seed(step)
    prompts = torch.randperm(len(trainer.train_set), generator=generator)[:K].tolist()
    rollouts = rollout.sample(
        trainer.policy, [trainer.train_ids[q] for q in prompts], trainer.sampling, group_size=G,
        seed=dppo.seed_for(trainer.cfg.seed, step, "correlation"), keys=prompts,
    )  # fmt: skip
    problems = [trainer.train_set[q] for q in prompts]
    _texts, rewards = score(rollouts, problems, trainer.tokenizer, trainer.reward)  # [K, G]
    live = ~dppo.dead_groups(rewards)[:, None].expand(K, G)
    ones = torch.ones(K, G, dtype=torch.float64)
    places = live.flatten().nonzero()[:, 0]
    gradients = []  # of log-probs; a dead group's are never needed
    for place in places.tolist():
        keep = torch.zeros(K * G, dtype=torch.bool)
        keep[place] = True
        trainer.model.zero_grad()
        accumulate_gradients(trainer.model, rollouts, ones, ones, keep.view(K, G), cfg=trainer.cfg)
        gradients.append(gradient(trainer.model).half())
    gram = torch.zeros(K * G, K * G, dtype=torch.float64)
    gram[places[:, None], places] = inner_products(gradients)
    return effects_of(gram, rewards.double())


def effects_of(gram: torch.Tensor, rewards: torch.Tensor) -> dict[str, float]:
    """The design effects, from the inner products [K * G, K * G] of the gradients of log-probs.

    A group's gradient is the sum of its completions', times their advantages. Its expectation is
    left out: it is the signal, and the mean inner product of different prompts estimates it.
    """
    K, G = rewards.shape
    prompt = torch.arange(K).repeat_interleave(G)
    effects = {}
    for size in GROUP_SIZES:
        advantages = dppo.group_advantages(rewards.view(-1, size), "none").flatten()
        products = advantages[:, None] * gram * advantages
        group = torch.arange(K * G) // size
        signal = products[prompt[:, None] != prompt].mean().item()  # |E|^2 of a completion
        of_groups = products[group[:, None] == group].sum().item() - K * G * size * signal
        effects[str(size)] = of_groups / products.diagonal().sum().item()
    return effects


# ---------------------------------------------------------------------------- figures


def monotone(values: list[float]) -> list[float]:
    """The increasing sequence that is nearest by squares (pool adjacent violators)."""
    pools = []  # [mean, count]
    for value in values:
        pools.append([value, 1])
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (first, n), (second, k) = pools[-2:]
            pools[-2:] = [[(first * n + second * k) / (n + k), n + k]]
    return [mean for mean, count in pools for _ in range(count)]


def time_to_target(row: dict, m: float) -> float:
    """Virtual time until the run's accuracy, made monotone, is at the target; else infinite."""
    target = TARGETS[row["task"]]
    times = [m * sampled + trained for _step, sampled, trained, _accuracy in row["curve"]]
    heights = monotone([point[3] for point in row["curve"]])
    for i in range(1, len(times)):
        if heights[i] >= target:
            share = (target - heights[i - 1]) / (heights[i] - heights[i - 1])
            return times[i - 1] + share * (times[i] - times[i - 1])
    return math.inf


def rows_of(rows: list[dict], arm: tuple, lr: float, seeds: Iterable[int]) -> list[dict]:
    """The runs of an arm at a learning rate, in the order of the seeds."""
    of_arm = {row["seed"]: row for row in rows if Run(*arm, lr, row["seed"]).is_row(row)}
    return [of_arm[seed] for seed in seeds if seed in of_arm]


def best_rate(rows: list[dict], arm: tuple, m: float) -> float:
    """The learning rate whose runs on the tuning seeds reach the target soonest."""

    def slowness(lr):
        times = [time_to_target(row, m) for row in rows_of(rows, arm, lr, TUNING_SEEDS)]
        return sum(map(math.isinf, times)), statistics.mean(times)

    return min(RATES, key=slowness)


def measured(rows: list[dict], task: str, rule: str, m: float, size: int) -> dict[int, float]:
    """{fresh seed: virtual time to the target} of an arm, at its learning rate."""
    arm = (task, rule, 0.0 if rule == "zero" else m, size)
    lr = best_rate(rows, arm, m)
    of_arm = rows_of(rows, arm, lr, range(100))
    return {row["seed"]: time_to_target(row, m) for row in of_arm}


def progress(rows: list[dict], task: str, rule: str, m: float, size: int) -> dict[int, float]:
    """{fresh seed: the time of the best group size without pruning over the arm's own}; 0 if that
    run never arrived."""
    best = measured(rows, task, "zero", m, best_size(rows, task, "zero", m))
    times = measured(rows, task, rule, m, size)
    return {seed: best[seed] / times[seed] for seed in times if seed in best}


def best_size(rows: list[dict], task: str, rule: str, m: float) -> int:
    """The group size with the fewest fresh runs that never arrive, and among these the least median
    time."""

    def slowness(size):
        times = measured(rows, task, rule, m, size).values()
        return sum(map(math.isinf, times)), statistics.median(times)

    return min(GROUP_SIZES, key=slowness)


def predictions(title: str) -> dict[tuple, list[float]]:
    """{(task, m, rule): progress by group size}, of the table below a title of PREDICTED."""
    names = {"default": "arithmetic", "mixed": "arithmetic-mixed"}
    by_arm = {}
    for line in PREDICTED.read_text().split(f"## {title}")[1].split("\n## ")[0].splitlines():
        task, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        if task in names:
            m, rule, *values = cells
            by_arm[names[task], float(m), rule] = [float(value) for value in values]
    return by_arm


def table(rows: list[dict], task: str) -> str:
    """Markdown: progress of every arm, predicted and measured, relative to the best group size
    without pruning."""
    cells = [["m", "rule", "", *map(str, GROUP_SIZES)], ["---"] * (3 + len(GROUP_SIZES))]
    for m, rule in itertools.product(RATIOS, ("zero", "adaptive")):
        for title in PREDICTIONS:
            values = predictions(title)[task, m, rule]
            cells.append([f"{m:g}", rule, title, *(f"{value:.2f}" for value in values)])
        of_sizes = [progress(rows, task, rule, m, size) for size in GROUP_SIZES]
        shown = [results.show(results.interval(seeds), digits=2) for seeds in of_sizes]
        cells.append([f"{m:g}", rule, "measured", *shown])
    return results.as_markdown(cells)


def agreement(rows: list[dict], task: str) -> str:
    """Markdown: how well each prediction describes the runs. A cell is an arm; those that are 1 by
    definition do not count, nor those of which a run never arrived."""
    head = ["", "cells inside their interval", "off by a factor of", "rank correlation by m"]
    head.append("best group size named")
    cells = [head, ["---"] * len(head)]
    for title in PREDICTIONS:
        inside, factors, correlations, named = [], [], [], []
        for m in RATIOS:
            of_m = []  # (predicted, measured)
            for rule in ("zero", "adaptive"):
                predicted = predictions(title)[task, m, rule]
                best = predicted.index(max(predicted))
                named.append(GROUP_SIZES[best] == best_size(rows, task, rule, m))
                for value, size in zip(predicted, GROUP_SIZES, strict=True):
                    of_seeds = progress(rows, task, rule, m, size)
                    if not all(of_seeds.values()):
                        continue
                    mean, half = results.interval(of_seeds)
                    of_m.append((value, mean))
                    if half > 0:
                        inside.append(abs(value - mean) <= half)
                        factors.append(abs(math.log(value / mean)))
            ranks = torch.tensor(of_m).argsort(dim=0, stable=True).argsort(dim=0).T  # [2, arms]
            correlations.append(torch.corrcoef(ranks.double())[0, 1].item())
        cells.append([
            title,
            f"{sum(inside)} of {len(inside)}",
            f"{math.exp(statistics.mean(factors)):.2f}",
            ", ".join(f"{value:.2f}" for value in correlations),
            f"{sum(named)} of {len(named)}",
        ])  # fmt: skip
    return results.as_markdown(cells)


def show(rows: list[dict], task: str) -> None:
    """Print the tables of a task, and draw its picture into runs/."""
    print(f"\n{results.TITLES[task]}: progress in a second of virtual time\n\n{table(rows, task)}")
    print(f"\n{gains(rows, task)}\n\n{agreement(rows, task)}")
    draw(rows, task).savefig(f"runs/law-{task}.png")


def gains(rows: list[dict], task: str) -> str:
    """Markdown: the best group sizes, and what the best adaptive gains over the best group size
    without pruning."""
    head = ["m", "best size without pruning", "with", "adaptive gains", "predicted"]
    cells = [head, ["---"] * len(head)]
    for m in RATIOS:
        sizes = [best_size(rows, task, rule, m) for rule in ("zero", "adaptive")]
        gain = results.interval(progress(rows, task, "adaptive", m, sizes[1]))
        predicted = " and ".join(
            f"{max(predictions(title)[task, m, 'adaptive']):.2f}" for title in PREDICTIONS
        )
        cells.append([f"{m:g}", *map(str, sizes), results.show(gain, digits=2), predicted])
    return results.as_markdown(cells)


def draw(rows: list[dict], task: str) -> Figure:
    """Virtual time to the target over the group size, at two values of m, relative to the best
    group size without pruning. Lines are predicted, points measured, with 95 % intervals; an arm
    of which a run never arrived has no point."""
    figure, panels = results.new_figure(2)
    for panel, m in zip(panels, (0.1, 1.0), strict=True):
        for rule, name in (("zero", "grpo_zero"), ("adaptive", "adaptive")):
            title, color = results.METHODS[name]
            for predicted, style in zip(PREDICTIONS, (":", "-"), strict=True):
                times = [1 / value for value in predictions(predicted)[task, m, rule]]
                panel.plot(GROUP_SIZES, times, style, color=color, lw=1.2)
            of_sizes = {size: progress(rows, task, rule, m, size) for size in GROUP_SIZES}
            arrived = [size for size in GROUP_SIZES if all(of_sizes[size].values())]
            logs = [
                {seed: -math.log(value) for seed, value in of_sizes[size].items()}
                for size in arrived
            ]
            middle, half = torch.tensor([results.interval(log_time) for log_time in logs]).T
            times = middle.exp()
            bars = torch.stack([times - (middle - half).exp(), (middle + half).exp() - times])
            style = {"color": color, "marker": results.MARKERS[name], "ls": "", "capsize": 3}
            panel.errorbar(arrived, times, bars, label=title, **style)
        panel.set(title=f"m = {m:g}", xscale="log", yscale="log", xlabel="group size")
        panel.set_xticks(GROUP_SIZES, map(str, GROUP_SIZES))
        panel.set_yticks([0.5, 0.7, 1, 1.5, 2, 3, 4], ["0.5", "0.7", "1", "1.5", "2", "3", "4"])
        panel.minorticks_off()
    panels[0].set_ylabel("time to the target")
    results.add_legend(figure, panels)
    return figure
