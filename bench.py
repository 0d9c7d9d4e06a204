"""
Measurements behind the README's figures. Rivals alternate in one run; medians and ratios are reported.

    python bench.py step --json runs/step.json            seconds of a training step and its parts
    python bench.py step --shape 0.6b --steps 10 --skip 2 --methods grpo pps --json runs/step-0.6b.json    for a GPU
    python bench.py variance --json runs/variance.json    error of each completion rule, on real gradients
    python bench.py variance --level prompt --json runs/variance-prompt.json    and of each prompt rule, over whole runs
    python bench.py check --json runs/check.json          the running check over whole runs, and a twin it must catch
    python bench.py prompts                               what a million prompts cost
    python bench.py update --json runs/update.json        packed and padded updates on the lengths of real runs
    python bench.py update --shape 0.6b --json runs/update-0.6b.json    the same at a size for a GPU, random weights
    python bench.py rollout --json runs/rollout.json      every engine that is installed, on the embedded task
    python bench.py rollout --shape 0.6b --batches 256 1024 --json runs/rollout-0.6b.json     the same for a GPU
    python bench.py hostile --json runs/hostile.json      answers that are made to hang whoever judges them
    python bench.py kills --json runs/kills.json          a run that is killed twenty times, and one that is not
    python bench.py trl --json runs/trl.json              whole steps against TRL's trainer (requirements-trl.txt)
    python bench.py race --methods grpo,pps --seeds 1     who reaches GRPO's accuracy first, live
"""

import importlib.util
import itertools
import json
import math
import statistics
import tempfile
import time
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal
from unittest import mock

import torch
import transformers
import tyro

import arithmetic
import config
import data
import dppo
import faults
import padding
import race
import rollout
import sampler
import train
import trl_trainer
import update
import variance
import vllm_engine

PARTS = ("step_time", "time/rollout", "time/score", "time/train", "tokens/generated", "tokens/trained")


def step(
    rounds: int = 3,
    steps: int = 32,
    skip: int = 16,
    methods: tuple[str, ...] = ("grpo", "dppo", "pps"),
    shape: Literal["embedded", "tiny", "0.6b", "1.7b"] = "embedded",
    new_tokens: int = 512,
    json_file: Annotated[Path | None, tyro.conf.arg(name="json")] = None,
) -> None:
    """Time train.py's steps from the same base model, `rounds` times each method in turn, each round with its seed.

    Args:
        rounds: runs of each method
        steps: steps of a run
        skip: first steps of a run left out: the first epoch (16 steps), in which there is no history to prune by
        methods: to compare; the first is what the others are divided by
        shape: embedded: base model and problems of the embedded task; else random weights of that size, 256 random
            prompts of 20 to 200 tokens, 32 of them a step with 8 completions of `new_tokens`, rewards by chance
        new_tokens: of a completion, with a shape that is not embedded
        json_file: where to write the rows {method, round, part, median}
    """
    rows, parts = [], PARTS + (("memory/peak_gib",) if torch.cuda.is_available() else ())
    for number, method in itertools.product(range(rounds), methods):
        with tempfile.TemporaryDirectory() as folder, mock.patch.object(data, "reward_function", data.reward_function):
            words = ["--method", method, "--steps", str(steps), "--seed", str(number), "--out-dir", f"{folder}/run"]
            if shape != "embedded":
                padding.random_policy(shape, folder)
                data.reward_function = lambda _name: lambda text, _gold: float(zlib.crc32(text.encode()) % 2)
                words += ["--model", folder, "--data", f"{folder}/problems.jsonl", "--max-new-tokens", str(new_tokens)]
                words += ["--group-size", "8", "--gradient-checkpointing"]
            train.main(config.parse_config([*words, "--eval-every", "0", "--save-every", "0"]))
            steps_log = [json.loads(line) for line in Path(folder, "run", "log.jsonl").read_text().splitlines()][skip:]
        for part in parts:
            median = statistics.median(row[part] for row in steps_log)
            rows.append({"method": method, "round": number, "part": part, "median": median})

    def medians(method, part):
        return [row["median"] for row in rows if (row["method"], row["part"]) == (method, part)]

    print(
        f"\nmedians over {rounds} alternating runs of steps {skip + 1} to {steps}, {torch.get_num_threads()} threads;"
    )
    print(f"in brackets the ratio to {methods[0]} and its range over the runs")
    print(f"{'':16s}" + "".join(f"{method:>28s}" for method in methods))
    for part in parts:
        line = f"{part:16s}"
        for method in methods:
            ratios = sorted(m / g for m, g in zip(medians(method, part), medians(methods[0], part), strict=True))
            spread = f"({statistics.median(ratios):.2f}, {ratios[0]:.2f} to {ratios[-1]:.2f})"
            line += f"{statistics.median(medians(method, part)):10.3f}{spread if method != methods[0] else '':>20s}  "
        print(line)
    if json_file:
        json_file.write_text(json.dumps(rows, indent=1) + "\n")


# ---------------------------------------------------------------------------- engines that sample


def rollout_engines(
    rounds: int = 7,
    batches: tuple[int, ...] = (128, 512),
    shape: Literal["embedded", "tiny", "0.6b", "1.7b"] = "embedded",
    new_tokens: int = 512,
    json_file: Annotated[Path | None, tyro.conf.arg(name="json")] = None,
) -> None:
    """Time one step's rollouts by every engine that is installed; engines alternate, prompts change with the round.

    Args:
        rounds: timed rollouts of each engine and batch
        batches: sequences sampled at once; embedded: 512 in all, so smaller ones take several turns
        shape: embedded: base model and problems of the embedded task; else random weights of that size and random
            prompts, one batch of sequences in all, each of `new_tokens`
        new_tokens: of each completion, with a shape that is not embedded
        json_file: where to write the rows {engine, batch, seconds, tokens_per_s, max_logprob_gap, ...}
    """
    cfg = config.resolve(config.Config())
    group, folder = cfg.group_size, tempfile.TemporaryDirectory()
    if shape == "embedded":
        base = str(arithmetic.base_folder())
        model, tokenizer = rollout.load_policy(base, cfg.device)
        _, prompts = data.encode_prompts(data.train_problems(cfg.data, hold_out=True), tokenizer, 400)
        eos_ids, sequences = rollout.eos_token_ids(model, tokenizer), [512] * len(batches)
    else:
        base, model, generator = folder.name, padding.random_model(shape, cfg.device), torch.Generator().manual_seed(0)
        model.save_pretrained(base)
        lengths = torch.randint(50, 250, (max(batches) // group * (rounds + 1),), generator=generator).tolist()
        prompts = [torch.randint(model.vocab_size, (length,), generator=generator).tolist() for length in lengths]
        cfg, eos_ids, sequences = replace(cfg, max_new_tokens=new_tokens), [], batches
    engines = ["hf", "compact"]
    if importlib.util.find_spec("vllm"):
        engines.append(vllm_engine.Engine(
            base, vocab_size=model.vocab_size, max_tokens=max(map(len, prompts)) + cfg.max_new_tokens,
            sequences=max(batches), dtype=cfg.dtype, device=cfg.device, memory=cfg.vllm_memory,
        ))  # fmt: skip
    rows = {}
    for number, (batch, total), engine in itertools.product(
        range(rounds + 1), zip(batches, sequences, strict=True), engines
    ):
        name = engine if isinstance(engine, str) else "vllm"
        if name == "vllm" and batch < max(batches):
            continue  # it schedules by itself
        sampling = rollout.Sampling(cfg.max_new_tokens, eos_ids, 0, batch_size=batch, engine=engine)
        asked = [prompts[(number * total // group + k) % len(prompts)] for k in range(total // group)]
        started = train.clock(cfg)
        with update.autocast(cfg):
            rollouts = rollout.sample(model, asked, sampling, group_size=group, seed=number)
        spent, tokens = train.clock(cfg) - started, int(rollouts.lengths.sum())
        gaps = (update.trainer_logprobs(model, rollouts, cfg) - rollouts.logprobs).abs()
        row = rows.setdefault((name, batch), {"all_seconds": [], "rates": [], "gaps": []})
        if number > 0:  # the first warms up
            row["all_seconds"].append(spent)
            row["rates"].append(tokens / spent)
            row["gaps"].append((gaps.max().item(), int((gaps > 1e-5).sum()), tokens))
    plain = max((row["rates"] for (name, _), row in rows.items() if name == "hf"), key=statistics.median)
    table = []
    for (name, batch), row in rows.items():
        ratios = sorted(fast / slow for fast, slow in zip(row["rates"], plain, strict=True))
        largest, above, tokens = zip(*row["gaps"], strict=True)
        table.append(
            {
                "engine": name,
                "batch": batch,
                "seconds": statistics.median(row["all_seconds"]),
                "tokens_per_s": statistics.median(row["rates"]),
                "times_as_fast": [statistics.median(ratios), ratios[0], ratios[-1]],
                "max_logprob_gap": max(largest),
                "tokens_above_1e-5": sum(above),
                "tokens": sum(tokens),
                "all_seconds": row["all_seconds"],
            }
        )
        print(
            f"{name:8s} {batch:5d} at once {table[-1]['seconds']:8.3f} s {table[-1]['tokens_per_s']:10.0f} tokens/s   "
            f"{table[-1]['times_as_fast'][0]:.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f}) times hf's best   largest "
            f"log-prob gap {max(largest):.1e}, above 1e-5: {sum(above)} of {sum(tokens)}"
        )
    if json_file:
        json_file.write_text(json.dumps(table, indent=1) + "\n")


# ---------------------------------------------------------------------------- the running check over whole runs


def check(
    steps: int = 60, every: int = 1, json_file: Annotated[Path | None, tyro.conf.arg(name="json")] = None
) -> None:
    """Means and standard errors of the running check of both levels over whole runs: the exact rules, pps with the
    weights of prompts and of completions times 0.9 each, and two biased rules. A step counts as its |full|: a plain
    mean is decided by steps with hardly a gradient, one by |full|^2 by a few large ones (runs/LOG.md).

    Args:
        steps: steps of each run
        every: steps between checks
        json_file: where to write the rows {rule, key, mean, error, checks}
    """
    rows = []
    honest = dppo.ht_weights
    for name, method, factor in (
        ("grpo_zero", "grpo_zero", 1.0), ("dppo", "dppo", 1.0), ("pps", "pps", 1.0), ("pps, weights x 0.9", "pps", 0.9),
        ("dppo_floor", "dppo_floor", 1.0), ("cppo", "cppo", 1.0),
    ):  # fmt: skip
        fault = lambda keep, keep_prob, factor=factor: factor * honest(keep, keep_prob)
        with tempfile.TemporaryDirectory() as folder, mock.patch.object(dppo, "ht_weights", fault):
            words = ["--method", method, "--steps", str(steps), "--check-every", str(every)]
            train.main(config.parse_config([*words, "--out-dir", f"{folder}/run", "--eval-every", "0"]))
            steps_log = [json.loads(line) for line in Path(folder, "run", "log.jsonl").read_text().splitlines()]
        found = [row for row in steps_log if row.get("check/norm")]
        total = math.fsum(row["check/norm"] for row in found)
        for key in ("check/bias2", "check/scale", "check/variance"):
            mean = math.fsum(row[key] * row["check/norm"] for row in found) / total
            rest = math.fsum(((row[key] - mean) * row["check/norm"]) ** 2 for row in found)
            error = math.sqrt(rest * len(found) / (len(found) - 1)) / total
            rows.append({"rule": name, "key": key, "mean": mean, "error": error, "checks": len(found)})
    print(f"\n{'':20s} {'':16s} {'mean':>10s} {'std. error':>10s}  mean / error")
    for row in rows:
        print(f"{row['rule']:20s} {row['key']:16s} {row['mean']:10.5f} {row['error']:10.5f}  "
              f"{row['mean'] / (row['error'] or math.nan):+6.1f}  ({row['checks']} checks)")  # fmt: skip
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
        {
            "step": step,
            "variance": variance.main,
            "check": check,
            "prompts": prompts,
            "update": padding.main,
            "rollout": rollout_engines,
            "hostile": faults.hostile,
            "kills": faults.kills,
            "trl": trl_trainer.main,
            "race": race.main,
        }
    )
