"""
What unbiased pruning could gain at most on a model, its data and this machine, from a run's log.

    python train.py --method grpo --steps 20 --out-dir out-grpo --save-every 0 --eval-every 0
    python -m bench ceiling out-grpo

So 20 steps of GRPO say whether pruning would pay, before it is turned on. ceiling.py says what the
ceiling is. The run's own seconds say how `rest`, all that is not training, compares with training.
"""

import bisect
import math
import statistics
from pathlib import Path
from typing import Annotated

import torch
import tyro

import ceiling
from bench import JsonFile, write_json
from runtime import InputError, log

WARM = 1  # the first step also loads and compiles


def main(run: Annotated[Path, tyro.conf.Positional], json_file: JsonFile = None) -> None:
    """Print the ceilings of a run, and what its own rule reached.

    Args:
        run: the run's folder, or its log.jsonl
        json_file: where to write the figures
    """
    file = run / "log.jsonl" if run.is_dir() else run
    if not file.exists():
        raise InputError(f"{run}: there is no log.jsonl")
    found = figures(log.read_rows(file), str(run))
    print(report(found))
    write_json(json_file, found)


def figures(rows: list[dict], name: str) -> dict:
    """The figures of a log: geometric means over its steps. InputError if it has too few."""
    rows = [row for row in rows if row["step"] > WARM and row.get("cost/kept")]
    if len(rows) < 3:
        raise InputError(f"{name}: {len(rows)} steps after the first one were trained; make 20")
    column = lambda key: torch.tensor([row[key] for row in rows], dtype=torch.float64)
    sampled, live, kept = column("cost/sampled"), column("cost/live"), column("cost/kept")
    second = seconds_of_a_token(kept, column("time/train"))
    rest = (column("step_time") - second * kept).median().item() / second  # tokens
    ratio = rest / sampled.mean().item()
    of_all = {
        level: geometric_mean([at(row, level, ratio) for row in rows])
        for level in ("completions", "prompts")
    }
    gain = (rest + live) / ((rest + kept) * column("kept/variance"))
    return {
        "run": name,
        "steps": len(rows),
        "live_groups": 1 - column("frac_reward_zero_std").mean().item(),
        "rest_over_training": ratio,
        **{f"ceiling/{level}": value for level, value in of_all.items()},
        "reached": geometric_mean(gain.tolist()),
        "kept": (kept.sum() / live.sum()).item(),
        "variance": geometric_mean(column("kept/variance").tolist()),
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


def at(row: dict, level: str, ratio: float) -> float:
    """A row's ceiling at a value of `rest` over training, between the values that were logged."""
    known = ceiling.RATIOS.tolist()
    logged = [row[f"ceiling/{level}/{value:g}"] for value in known]
    if None in logged:
        return math.nan
    ratio = min(max(ratio, known[0]), known[-1])
    above = max(1, bisect.bisect_left(known, ratio))
    share = math.log(ratio / known[above - 1]) / math.log(known[above] / known[above - 1])
    return logged[above - 1] * (1 - share) + logged[above] * share


def geometric_mean(values: list[float]) -> float:
    known = [value for value in values if value is not None and not math.isnan(value)]
    return statistics.geometric_mean(known) if known else math.nan


def report(found: dict) -> str:
    """The figures in words."""
    ratio = found["rest_over_training"]
    beyond = ""
    if not ceiling.RATIOS[0] <= ratio <= ceiling.RATIOS[-1]:
        beyond = " (beyond the logged values, so the nearest of them is used)"
    lines = [
        f"{found['run']}: {found['steps']} steps; {found['live_groups']:.2f} of the groups are "
        "live.",
        f"All of a step that is not training takes {ratio:.2f} of the time that training on every",
        f"completion would take{beyond}.",
        "",
        "Progress in a second, relative to training on everything that contributes:",
        f"  {found['ceiling/completions']:.2f}  pruning completions, at most",
        f"  {found['ceiling/prompts']:.2f}  pruning prompts, at most, if pass rates were known",
        f"  {found['reached']:.2f}  this run's own rule for completions, which trains on "
        f"{found['kept']:.2f} of",
        f"        the live tokens, at {found['variance']:.2f} times the variance (with independent "
        "keeps;",
        "        systematic draws, such as those of pps, have less)",
    ]
    return "\n".join(lines)
