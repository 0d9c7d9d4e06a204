"""
How noisy each prompt rule is on real gradients: `python -m bench variance --level prompt`. A run
that prunes nothing is recorded group by group, and then each rule is replayed on it.

Letters: Q prompts, G completions each, P parameters, r_q --prompt-prune-rate.
"""

import copy
import itertools
import math
import statistics
from typing import NamedTuple
from unittest import mock

import torch

import config
import dppo
import sampler
import train
from bench import gradient, inner_products, run, sized
from tasks import arithmetic
from update import UpdateStats, accumulate_gradients

SETTINGS = ("arithmetic", "arithmetic-mixed")  # the default and the realistic one
LOSSES = ("grpo", "dr_grpo")
PROMPT_RULES = ("uniform", "uniform, coins", "dppo", "oracle")  # coins: independent draws
PROMPT_RATES = (0.3, 0.6)  # r_q; 0.6 is the default of pps, but not with tiny
EPOCHS = 5  # of a run: visits of each prompt


class Step(NamedTuple):
    """The groups of one un-pruned step: what the prompt history learns, and their gradients."""

    step: int
    window: torch.Tensor  # [Q]
    advantages: torch.Tensor  # [Q, G]
    lengths: torch.Tensor  # [Q, G]
    gram: torch.Tensor  # [Q, Q] float64, of the groups' terms in the full gradient


class GroupByGroup(train.Trainer):
    """Computes each group's gradient alone; keeps the empty history and every step."""

    def __init__(self, *args):
        super().__init__(*args)
        self.empty = copy.deepcopy(self.history)
        self.recorded = []
        update = self.history.update

        def remember(prompts, advantages, lengths):
            number = len(self.recorded) + 1
            self.recorded.append(Step(number, prompts, advantages, lengths, self.gram))
            update(prompts, advantages, lengths)

        self.history.update = remember

    def step(self, step):
        with mock.patch.object(train, "accumulate_gradients", self.group_by_group):
            return super().step(step)

    def group_by_group(self, model, rollouts, advantages, factor, keep, **options):
        """In place of update.accumulate_gradients: the same gradient, and the groups' products."""
        parts, gradients = [], []
        for row in range(len(keep)):
            only = keep & (torch.arange(len(keep)) == row)[:, None]
            self.optimizer.zero_grad()
            tables = (advantages, factor, only)
            parts.append(accumulate_gradients(model, rollouts, *tables, **options))
            gradients.append(gradient(model))
        self.gram = inner_products(gradients)
        total = torch.stack(gradients).sum(dim=0)  # [P]
        parameters = list(model.parameters())
        sizes = [parameter.numel() for parameter in parameters]
        for parameter, grad in zip(parameters, total.split(sizes), strict=True):
            parameter.grad = grad.view_as(parameter)
        return UpdateStats(*map(math.fsum, zip(*parts, strict=True)))


def recorded_run(
    data_name: str, loss: str, seed: int, steps: int
) -> tuple[sampler.PromptHistory, list[Step]]:
    """An un-pruned run, group by group: the history before it, and its steps."""
    args = [*sized("grpo"), "--data", data_name, "--loss", loss]
    args += ["--seed", str(seed), "--steps", str(steps)]
    trainer, _ = run(args, GroupByGroup)
    return trainer.empty, trainer.recorded


def uniform_error(gram: torch.Tensor, count: float) -> float:
    """Expected |g - full|^2 of a simple random sample of `count` of the Q groups.

    A fractional count interpolates.
    """
    Q = len(gram)
    return (Q / count - 1) * Q / (Q - 1) * (gram.trace() - gram.sum() / Q).item()


def replay(
    rule: str, rate: float, empty: sampler.PromptHistory, steps: list[Step], draws: int, seed: int
) -> list[dict]:
    """What a rule would have done at every step if it had only seen the groups it rolled out.

    Rows have the rule's error, the error of a uniform draw of as many rollout tokens, and the share
    of the tokens that was rolled out.
    """
    history, rows = copy.deepcopy(empty), []
    for step, window, advantages, lengths, gram in steps:
        generator, tokens = dppo.generator_for(seed, step, "replay"), lengths.sum(dim=1)  # [Q]
        drawn = prompt_draws(rule, rate, history, window, gram, tokens, generator, draws)
        keeps, weights = (torch.stack(tables) for tables in zip(*drawn, strict=True))  # [draws, Q]
        error = weights - 1.0
        share = (keeps.double() @ tokens).mean().item() / tokens.sum().item()
        row = {
            "step": step,
            "error": ((error @ gram) * error).sum(dim=1).mean().item(),
            "uniform": uniform_error(gram, len(window) * share),
            "tokens": share,
            "square": gram.sum().item(),
            "dead": (advantages == 0).all(dim=1).double().mean().item(),
        }
        rows.append(row)
        keep = keeps[0]
        history.update(window[keep], advantages[keep], lengths[keep])
    return rows


def prompt_draws(rule, rate, history, window, gram, tokens, generator, draws) -> list[tuple]:
    """(keep, weights) [Q] of each draw of one rule."""
    if rule == "uniform, coins":
        even = torch.full(window.shape, 1 - rate, dtype=torch.float64)
        keeps = [dppo.independent(even, generator) for _ in range(draws)]
        return [(keep, dppo.ht_weights(keep, even)) for keep in keeps]
    own = {}
    if rule == "oracle":  # pps, with the true norms in place of what the history learned
        norm = gram.diagonal().clamp(min=0).sqrt()
        size = norm.clamp(min=1e-3 * norm.mean().item() + 1e-30) / tokens.sqrt()
        ones, count = torch.ones_like(size), round((1 - rate) * len(size))
        own["oracle"] = dppo.by_probability(
            lambda *_: dppo.pps_keep_prob(size, ones, count), rate=0.3
        )
    with mock.patch.dict(sampler.PROMPT_RULES, own):
        return [history.prune(rule, rate, window, generator) for _ in range(draws)]


def prompt_variance(seeds: tuple[int, ...], draws: int) -> list[dict]:
    """Print a table, and return its rows, one per visit (epoch).

    {seed, data, loss, rule, r_q, visit, dead, tokens, rel_mse, over_uniform}
    Errors are summed over a visit's steps before they are divided.
    """
    rows = []
    prompts_per_step = config.parse_config(sized("grpo")).prompts_per_step
    per_epoch = arithmetic.TRAIN_PROBLEMS // prompts_per_step
    for seed, data_name, loss in itertools.product(seeds, SETTINGS, LOSSES):
        empty, steps = recorded_run(data_name, loss, seed, EPOCHS * per_epoch)
        for rule, rate in itertools.product(PROMPT_RULES, PROMPT_RATES):
            replays = [replay(rule, rate, empty, steps, draws, number) for number in range(4)]
            for visit in range(EPOCHS):
                part = slice(visit * per_epoch, (visit + 1) * per_epoch)
                of_visit = [row for replayed in replays for row in replayed[part]]
                marks = {"seed": seed, "data": data_name, "loss": loss, "rule": rule, "r_q": rate}
                rows.append(marks | {"visit": visit + 1} | visit_figures(of_visit))
    for data_name, loss, rate in itertools.product(SETTINGS, LOSSES, PROMPT_RATES):
        what = "error over that of a uniform draw of as many rollout tokens (tokens)"
        print(f"\n{data_name}, {loss}, r_q {rate}: {what}")
        for rule in PROMPT_RULES:
            line = f"{rule:14s}"
            for visit in range(1, EPOCHS + 1):
                wanted = {"data": data_name, "loss": loss, "r_q": rate, "rule": rule}
                wanted |= {"visit": visit}
                found = [row for row in rows if wanted.items() <= row.items()]
                ratios = (row["over_uniform"] for row in found)
                over = sorted(ratio for ratio in ratios if ratio is not None)
                spread = f"{'-':>19s}"
                if over:
                    spread = f"{statistics.median(over):6.2f} [{over[0]:.2f}, {over[-1]:.2f}]"
                line += f"{spread} ({statistics.median(row['tokens'] for row in found):.2f})"
            print(line)
    return rows


def visit_figures(rows: list[dict]) -> dict:
    """Aggregate the replays of one visit."""
    total = {key: math.fsum(row[key] for row in rows) for key in rows[0]}
    return {
        "dead": total["dead"] / len(rows),
        "tokens": total["tokens"] / len(rows),
        "rel_mse": total["error"] / total["square"],
        "over_uniform": total["error"] / total["uniform"] if total["uniform"] else None,
    }
