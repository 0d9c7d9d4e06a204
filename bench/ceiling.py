"""
What unbiased pruning could gain at most on a model, its data and this machine, from a run's log.

    python train.py --method grpo --steps 20 --out-dir out-grpo --save-every 0 --eval-every 0
    python -m bench ceiling out-grpo

So 20 steps of GRPO say whether pruning would pay, before it is turned on.

Where noise limits learning, progress in a second goes as 1 / (T V): T is the time of a step, and V
the noise of its gradient (dppo.adaptive_keep_prob). The ceiling of completions is T V of training
on all terms that are not exactly 0, over the least T V of all keep probabilities. V is that of
independent keeps. The systematic draws of pps and adaptive have less noise, so they may exceed the
ceiling. In batches above the critical size V does not matter, and a smaller batch gains
as much as any pruning.

Each step of train.py logs its ceilings for some ratios of `rest`, the time of all that is not
training, to training. The run's seconds say which ratio is its own.

The ceiling of prompts is what dropping prompts before the rollout could gain if the pass rate of
each were known. How pass rates are distributed is estimated from all groups of the run. What a
prompt contributes is then the expected sum of squared advantages of its group, and what it costs is
its rollout, and training on it if it is live. Lengths are taken to be equal.
"""

import bisect
import json
import math
import statistics
from pathlib import Path
from typing import Annotated

import torch
import tyro

import dppo
import metrics
from bench import JsonFile, write_json
from runtime import InputError, log

WARM = 1  # the first step also loads and compiles
PASS_RATES = torch.linspace(0, 1, 201, dtype=torch.float64)
ROUNDS = 1000  # of expectation and maximization


def main(run: Annotated[Path, tyro.conf.Positional], json_file: JsonFile = None) -> None:
    """Print the ceilings of a run, and what its own rule reached.

    Args:
        run: the run's folder
        json_file: where to write the figures
    """
    if not (run / "log.jsonl").exists():
        raise InputError(f"{run}: there is no log.jsonl")
    settings = json.loads((run / "config.json").read_text())["config"]
    found = figures(log.read_rows(run / "log.jsonl"), str(run), settings["scale_rewards"])
    print(report(found))
    write_json(json_file, found)


def figures(rows: list[dict], name: str, scale_rewards: str) -> dict:
    """The figures of a log, whose steps without a live group have no ceiling of completions.
    InputError if it has too few steps, or if an older version wrote it."""
    rows = [row for row in rows if row["step"] > WARM]
    if rows and "cost/kept" not in rows[0]:
        raise InputError(f"{name}: its log is of an older version; make a new run")
    trained = [row for row in rows if row["cost/kept"]]
    if len(trained) < 3:
        raise InputError(f"{name}: {len(trained)} steps after the first one were trained; make 20")

    def column(key):  # [steps]
        return torch.tensor([row[key] for row in trained], dtype=torch.float64)

    live = column("cost/live")
    kept = column("cost/kept")
    second = seconds_of_a_token(kept, column("time/train"))
    rest = (column("step_time") - second * kept).median().item() / second  # in tokens
    ratio = rest / column("cost/sampled").mean().item()
    groups = [row["groups_by_right"] for row in rows]
    prompts = math.nan
    if all(groups):
        prompts = ceiling_of_prompts(torch.tensor(groups).sum(dim=0), ratio, scale_rewards)
    noise = [row["kept/variance"] for row in trained if row["kept/variance"] is not None]
    noise = statistics.mean(noise) if noise else math.nan  # NaN: a rule by rank
    saved = statistics.geometric_mean(((rest + live) / (rest + kept)).tolist())
    return {
        "run": name,
        "steps": len(rows),
        "live_groups": 1 - statistics.mean(row["frac_reward_zero_std"] for row in rows),
        "rest_over_training": ratio,
        "ceiling/completions": geometric_mean([at(row, ratio) for row in trained]),
        "ceiling/prompts": prompts,
        "reached": saved / noise,
        "kept": (kept.sum() / live.sum()).item(),
        "variance": noise,
    }


def seconds_of_a_token(kept: torch.Tensor, seconds: torch.Tensor) -> float:
    """Seconds of training on one more token, from the tokens [n] and the seconds [n] of n updates.

    An update that keeps little also takes its fixed time. Where the tokens differ enough, a line
    through the points tells the two apart; else all of the time is taken to grow with the tokens.
    """
    low, high = kept.quantile(torch.tensor([0.1, 0.9], dtype=torch.float64)).tolist()
    if high > 2 * low:
        centred = kept - kept.mean()
        slope = ((centred * seconds).sum() / centred.square().sum()).item()
        if 0 < slope * kept.mean() < seconds.mean():
            return slope
    return (seconds / kept).median().item()


def at(row: dict, ratio: float) -> float:
    """A row's ceiling at a value of `rest` over training, between the values that were logged."""
    known = metrics.REST_RATIOS
    logged = [row[f"ceiling/{value:g}"] for value in known]
    if None in logged:
        return math.nan
    ratio = min(max(ratio, known[0]), known[-1])
    above = max(1, bisect.bisect_left(known, ratio))
    share = math.log(ratio / known[above - 1]) / math.log(known[above] / known[above - 1])
    return logged[above - 1] * (1 - share) + logged[above] * share


def geometric_mean(values: list[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return statistics.geometric_mean(known) if known else math.nan


def ceiling_of_prompts(groups: torch.Tensor, ratio: float, scale_rewards: str) -> float:
    """The ceiling of pruning prompts of known pass rates, from the number of groups [G + 1] with 0,
    1, .., G right completions; `ratio` is rest over training.

    The shares of pass rates are those of maximum likelihood (Laird 1978), by expectation and
    maximization. Prompts are kept in proportion to size / sqrt(cost). All of a step's time is taken
    to grow with the prompts that are rolled out.
    """
    G = len(groups) - 1
    right = torch.arange(G + 1)
    chance = torch.distributions.Binomial(G, PASS_RATES[:, None]).log_prob(right.double()).exp()
    share = torch.full_like(PASS_RATES, 1 / len(PASS_RATES))
    for _ in range(ROUNDS):
        of_each = share[:, None] * chance  # [pass rates, G + 1]
        share = (of_each / of_each.sum(dim=0).clamp(min=1e-300) * groups).sum(dim=1) / groups.sum()
    rewards = (torch.arange(G) < right[:, None]).double()  # [G + 1, G]
    squares = dppo.group_advantages(rewards, scale_rewards).square().sum(dim=1)
    size2 = chance @ squares  # [pass rates]
    cost = ratio + 1 - chance[:, 0] - chance[:, -1]
    everything = (share @ cost) * (share @ size2)
    return (everything / (share @ (size2 * cost).sqrt()).square()).item()


def report(found: dict) -> str:
    """The figures in words."""
    ratio = found["rest_over_training"]
    beyond = ""
    if not metrics.REST_RATIOS[0] <= ratio <= metrics.REST_RATIOS[-1]:
        beyond = " (beyond the logged values: the nearest one is used)"
    number = lambda value: "   -" if math.isnan(value) else f"{value:.2f}"
    lines = [
        f"{found['run']}: {found['steps']} steps after the first one; "
        f"{found['live_groups']:.2f} of the groups are live.",
        f"Everything but training takes {ratio:.2f} of the time of training on every completion"
        f"{beyond}:",
        f"so --method adaptive should get --completion-prune-rate {1 / (1 + ratio):.2f}.",
        "",
        "Progress in a second, relative to training on everything that contributes:",
        f"  {number(found['ceiling/completions'])}  pruning completions, at most with independent "
        "keeps",
        f"  {number(found['ceiling/prompts'])}  pruning prompts, at most, if pass rates were known "
        "(needs rewards of 0 and 1)",
        f"  {number(found['reached'])}  what this run did: it trains on {found['kept']:.2f} times "
        "the tokens of live completions,",
        f"        at {number(found['variance']).strip()} times the noise of sampling alone "
        "(computed for independent keeps)",
    ]
    return "\n".join(lines)
