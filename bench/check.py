"""
Are pruned gradients unbiased in whole runs? `python -m bench check`.

At every `--every`-th step all Q candidates are rolled out once more; training does not use these
rollouts. Their full gradient is compared with many pruned ones, each with its own prompt draw and
its own completion draw.

Letters: Q candidates of a step, P parameters.
"""

import contextlib
import functools
import math
from collections.abc import Iterable
from dataclasses import replace
from unittest import mock

import torch

import dppo
import rollout
from bench import JsonFile, gradient, run, sized, write_json
from runtime import InputError
from train import Trainer


class Checked(Trainer):
    """A Trainer that checks its own pruning in every `every`-th step, with `draws` draws."""

    def __init__(self, *args, every: int, draws: int):
        super().__init__(*args)
        self.every, self.draws = every, draws

    def step(self, step: int) -> tuple[dict, dict[str, list[dict]]]:
        due = step % self.every == 0
        checks = check(self, step, self.draws) if due else {}
        row, others = super().step(step)
        return row | checks, others


class Underweighted(Checked):
    """A planted mistake that the check must find: the weights of both levels are 10 % too small."""

    def step(self, step: int) -> tuple[dict, dict[str, list[dict]]]:
        def too_small(prune):
            def pruned(name, *args):
                keep, weights = prune(name, *args)
                return keep, weights if name == "none" else 0.9 * weights

            return pruned

        completions, prompts = dppo.prune_completions, self.history.prune
        with (
            mock.patch.object(dppo, "prune_completions", too_small(completions)),
            mock.patch.object(self.history, "prune", too_small(prompts)),
        ):
            return super().step(step)


def check(trainer: Trainer, step: int, draws: int) -> dict[str, float]:
    """The figures of `compare` for the candidates of a step, at the trainer's present parameters.

    Of several mini-batches it checks the first. It runs in one process.
    """
    window = trainer.candidates(step)  # [Q]
    stored = Stored(roll_out(trainer, window, step, "check rollout"), window)
    nothing_pruned = {"prompt_rule": "none", "completion_rule": "none"}
    full = gradient_of_step(trainer, step, stored, **nothing_pruned)  # [P]
    seeds = (dppo.seed_for(trainer.cfg.seed, step, "check keep", n) for n in range(draws))
    return compare(full, (gradient_of_step(trainer, step, stored, seed=seed) for seed in seeds))


def roll_out(trainer: Trainer, prompts: torch.Tensor, *purpose) -> rollout.Rollouts:
    """Completions of prompts [K] by the present policy, as train.py would sample them."""
    prompt_ids = [trainer.train_ids[index] for index in prompts.tolist()]
    seed = dppo.seed_for(trainer.cfg.seed, *purpose)
    options = {"group_size": trainer.cfg.group_size, "seed": seed}
    return rollout.sample(trainer.policy, prompt_ids, trainer.sampling, **options)


class Stored:
    """An engine that returns what was sampled before for the prompts `window` [Q]."""

    def __init__(self, rollouts: rollout.Rollouts, window: torch.Tensor):
        self.rollouts = rollouts
        self.place = {index: place for place, index in enumerate(window.tolist())}

    def sample(self, model, prompt_ids, sampling, *, keys, **options) -> rollout.Rollouts:
        places = [self.place[key] for key in keys]
        columns = vars(self.rollouts).values()
        pick = lambda value: value[places] if torch.is_tensor(value) else prompt_ids
        return rollout.Rollouts(*map(pick, columns))


class Updated(Exception):
    """Raised in place of the optimizer's first step, once .grad holds that update's gradient."""


def gradient_of_step(trainer: Trainer, step: int, stored: Stored, **changes) -> torch.Tensor:
    """The gradient [P] of the first update of a step, before it is clipped. It is the step of
    train.py, with stored completions, changed settings, and nothing updated."""
    cfg, sampling, candidates = trainer.cfg, trainer.sampling, trainer.candidates
    window = candidates(step)
    trainer.candidates = lambda _step: window  # of the run's seed; changes may have another
    trainer.cfg = replace(cfg, grad_clip=0.0, **changes)
    trainer.sampling = replace(sampling, engine=stored)
    stop = mock.patch.object(trainer.optimizer, "step", side_effect=Updated)
    try:
        with stop, contextlib.suppress(Updated):
            Trainer.step(trainer, step)
        return gradient(trainer.model)
    finally:
        trainer.optimizer.zero_grad()
        trainer.cfg, trainer.sampling, trainer.candidates = cfg, sampling, candidates


def compare(full: torch.Tensor, pruned: Iterable[torch.Tensor]) -> dict[str, float]:
    """The full gradient [P] against n independent pruned ones of the same batch.

    `pruned` yields them one at a time, so only one is in memory.
    bias2     its mean over many batches is the squared relative bias
    variance  of one pruned gradient, relative to |full|^2
    scale     its mean is the relative error of the component along the full gradient
    norm      |full|
    Where the pruning is unbiased, bias2 and scale average to 0. That also holds for an average
    weighted by norm, because no draw changes it.
    """
    n, total, squares = 0, torch.zeros_like(full), 0.0
    square = full.square().sum()
    for one in pruned:
        error = one - full
        n, squares = n + 1, squares + error.square().sum()
        total += error
    between = total.square().sum() - squares  # n (n - 1) times the mean product of two errors
    return {
        "check/bias2": (between / (n * (n - 1) * square)).item(),
        "check/variance": ((squares - between / (n - 1)) / (n * square)).item(),
        "check/scale": ((total * full).sum() / (n * square)).item(),
        "check/norm": square.sqrt().item(),
    }


# ---------------------------------------------------------------------------- the command

RUNS = (  # name of the row, --method, trainer
    ("grpo_zero", "grpo_zero", Checked),
    ("dppo", "dppo", Checked),
    ("pps", "pps", Checked),
    ("pps, weights x 0.9", "pps", Underweighted),
    ("dppo_floor", "dppo_floor", Checked),
    ("cppo", "cppo", Checked),
)
WITHOUT_CHANCE = ("grpo_zero", "dppo_floor", "cppo")  # two draws are as good as many


def main(steps: int = 60, every: int = 6, draws: int = 64, json_file: JsonFile = None) -> None:
    """Means and standard errors of the check over whole runs, both levels at once.

    The runs are the exact rules, pps with a planted mistake (weights that are 10 % too small), and
    two biased rules.

    Args:
        steps: steps of each run
        every: steps between checks
        draws: pruned gradients of a check; the standard error of bias2 falls as 1 / draws
        json_file: where to write the rows {rule, key, mean, error, checks}
    """
    if every > steps:
        raise InputError(f"--steps {steps} --every {every}: no check; give more steps")
    rows = []
    for name, method, trainer_class in RUNS:
        args = [*sized(method), "--steps", str(steps)]
        number = 2 if method in WITHOUT_CHANCE else draws
        checked = functools.partial(trainer_class, every=every, draws=number)
        _, log_rows = run(args, checked)
        with_check = [row for row in log_rows if row.get("check/norm")]
        norms = [row["check/norm"] for row in with_check]
        for key in ("check/bias2", "check/scale", "check/variance"):
            mean, error = mean_and_error([row[key] for row in with_check], norms)
            result = {"rule": name, "key": key, "mean": mean, "error": error}
            rows.append(result | {"checks": len(with_check)})
    print("\nmean ± standard error over the checks")
    for row in rows:
        print(f"{row['rule']:20s} {row['key']:16s} {row['mean']:10.5f} ± {row['error']:.5f}")
    write_json(json_file, rows)


def mean_and_error(values: list[float], norms: list[float]) -> tuple[float, float]:
    """Mean of the steps' values, weighted by their |full|, and its standard error.

    Without weights, steps with hardly a gradient would decide the mean; with |full|^2, a few large
    ones would (runs/LOG.md).
    """
    count, total = len(values), math.fsum(norms)
    mean = math.fsum(value * norm for value, norm in zip(values, norms, strict=True)) / total
    pairs = zip(values, norms, strict=True)
    rest = math.fsum(((value - mean) * norm) ** 2 for value, norm in pairs)
    if count == 1:
        return mean, math.nan
    return mean, math.sqrt(rest * count / (count - 1)) / total
