"""
Measurements behind the README's figures. Rivals alternate in one run; medians and ratios are reported.

    python bench.py step --json runs/step.json            seconds of a training step and its parts
    python bench.py variance --json runs/variance.json    error of each completion rule, on real gradients
    python bench.py variance --level prompt --json runs/variance-prompt.json    and of each prompt rule, over whole runs
    python bench.py check --json runs/check.json          the running check over whole runs, and a twin it must catch
    python bench.py prompts                               what a million prompts cost
    python bench.py update --json runs/update.json        packed and padded updates on the lengths of real runs
    python bench.py update --shape 0.6b --json runs/update-0.6b.json    the same at a size for a GPU, random weights
"""

import itertools
import json
import math
import statistics
import tempfile
import time
from pathlib import Path
from typing import Annotated

import torch
import transformers
import tyro

import config
import dppo
import padding
import sampler
import train
import variance

PARTS = ("step_time", "time/rollout", "time/score", "time/train", "tokens/generated", "tokens/trained")


TIMED = ("grpo", "dppo", "pps")


def step(
    rounds: int = 3,
    steps: int = 32,
    skip: int = 16,
    json_file: Annotated[Path | None, tyro.conf.arg(name="json")] = None,
) -> None:
    """Time train.py's steps from the same base model, `rounds` times each method in turn, each round with its seed.

    Args:
        rounds: runs of each method
        steps: steps of a run
        skip: first steps of a run left out: the first epoch (16 steps), in which there is no history to prune by
        json_file: where to write the rows {method, round, part, median}
    """
    rows = []
    for number, method in itertools.product(range(rounds), TIMED):
        with tempfile.TemporaryDirectory() as folder:
            words = ["--method", method, "--steps", str(steps), "--seed", str(number), "--out-dir", f"{folder}/run"]
            train.main(config.parse_config([*words, "--eval-every", "0", "--save-every", "0"]))
            log = [json.loads(line) for line in Path(folder, "run", "log.jsonl").read_text().splitlines()][skip:]
        for part in PARTS:
            median = statistics.median(row[part] for row in log)
            rows.append({"method": method, "round": number, "part": part, "median": median})

    def medians(method, part):
        return [row["median"] for row in rows if (row["method"], row["part"]) == (method, part)]

    print(
        f"\nmedians over {rounds} alternating runs of steps {skip + 1} to {steps}, {torch.get_num_threads()} threads;"
    )
    print("in brackets the ratio to GRPO and its range over the runs")
    print(f"{'':16s}" + "".join(f"{method:>28s}" for method in TIMED))
    for part in PARTS:
        line = f"{part:16s}"
        for method in TIMED:
            ratios = sorted(m / g for m, g in zip(medians(method, part), medians("grpo", part), strict=True))
            spread = f"({statistics.median(ratios):.2f}, {ratios[0]:.2f} to {ratios[-1]:.2f})"
            line += f"{statistics.median(medians(method, part)):10.3f}{spread if method != 'grpo' else '':>20s}  "
        print(line)
    if json_file:
        json_file.write_text(json.dumps(rows, indent=1) + "\n")


# ---------------------------------------------------------------------------- the running check over whole runs


def check(
    steps: int = 60, every: int = 1, json_file: Annotated[Path | None, tyro.conf.arg(name="json")] = None
) -> None:
    """Mean and standard error of the running check of both levels over whole runs: dppo, pps, and pps with the weights
    of prompts and of completions times 0.9 each.

    Args:
        steps: steps of each run
        every: steps between checks
        json_file: where to write the rows {rule, key, mean, error, checks}
    """
    rows = []
    honest = dppo.ht_weights
    for name, method, factor in (("dppo", "dppo", 1.0), ("pps", "pps", 1.0), ("pps, weights x 0.9", "pps", 0.9)):
        dppo.ht_weights = lambda keep, keep_prob, factor=factor: factor * honest(keep, keep_prob)
        with tempfile.TemporaryDirectory() as folder:
            words = ["--method", method, "--steps", str(steps), "--check-every", str(every)]
            train.main(config.parse_config([*words, "--out-dir", f"{folder}/run", "--eval-every", "0"]))
            log = [json.loads(line) for line in Path(folder, "run", "log.jsonl").read_text().splitlines()]
        dppo.ht_weights = honest
        for key in ("check/bias2", "check/scale", "check/variance"):
            values = [row[key] for row in log if row.get(key) is not None]
            error = statistics.stdev(values) / math.sqrt(len(values))
            rows.append({"rule": name, "key": key, "mean": statistics.mean(values), "error": error,
                         "checks": len(values)})  # fmt: skip
    print(f"\n{'':20s} {'':16s} {'mean':>10s} {'std. error':>10s}  mean / error")
    for row in rows:
        print(f"{row['rule']:20s} {row['key']:16s} {row['mean']:10.5f} {row['error']:10.5f}  "
              f"{row['mean'] / row['error']:+6.1f}  ({row['checks']} checks)")  # fmt: skip
    if json_file:
        json_file.write_text(json.dumps(rows, indent=1) + "\n")


# ---------------------------------------------------------------------------- the prompt level on large data


def prompts(count: int = 1_000_000, candidates: int = 512, group_size: int = 16) -> None:
    """What the prompt level of a step costs with a data set of `count` prompts: time, memory, a checkpoint's weight.

    Args:
        count: prompts of the data, of 8 sources
        candidates: Q of a step
        group_size: G
    """
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(20, 500, (count,), generator=generator)
    started = time.perf_counter()
    history = sampler.PromptHistory(lengths, [f"source {index % 8}" for index in range(count)], candidates)
    print(f"{count} prompts, {candidates} candidates a step; made in {time.perf_counter() - started:.2f} s")
    seconds = []
    for step in range(1, 103):
        started = time.perf_counter()
        window = sampler.candidates(count, candidates, 0, step)
        keep, weights = history.prune("pps", 0.3, window, generator, step)
        history.summary(step, window, keep)
        seconds.append([time.perf_counter() - started])
        rewards = (torch.rand(int(keep.sum()), group_size, generator=generator) < 0.5).double()
        advantages = dppo.group_advantages(rewards, "grpo")
        told = advantages.square().sum(dim=1), 1000.0 * torch.ones(len(rewards), dtype=torch.float64)
        started = time.perf_counter()
        history.update(step, window[keep], weights[keep], rewards, advantages, *told)
        seconds[-1].append(time.perf_counter() - started)
    first, later = 1000 * sum(seconds[0]), sorted(1000 * sum(pair) for pair in seconds[2:])
    size = sum(tensor.numel() * tensor.element_size() for tensor in vars(history).values() if torch.is_tensor(tensor))
    with tempfile.TemporaryDirectory() as folder:
        torch.save(vars(history), f"{folder}/history.pt")
        weight = Path(folder, "history.pt").stat().st_size
    print(f"a step: median {later[50]:.1f} ms, at most {later[-1]:.1f} ms; one that shuffles an epoch: {first:.1f} ms")
    print(f"history {size / 1e6:.1f} MB in memory, {weight / 1e6:.1f} MB in a checkpoint; order {count * 8e-6:.1f} MB")


if __name__ == "__main__":
    transformers.utils.logging.disable_progress_bar()
    tyro.extras.subcommand_cli_from_dict(
        {"step": step, "variance": variance.main, "check": check, "prompts": prompts, "update": padding.main}
    )
