"""
How fast this machine samples a batch, with every engine but vLLM, and how fast it trains on it.

    python -m bench speed
    python -m bench speed --flags="--model Qwen/Qwen3-0.6B --data gsm8k"

Variants take turns. All speeds are in tokens of completions.
"""

import functools
import statistics
from collections.abc import Callable
from dataclasses import replace

import torch

import config
import models
import rollout
import train
from bench import JsonFile, write_json
from runtime.timer import clock
from update import accumulate_gradients, trainer_logprobs

FLAGS = "--prompts-per-step 32 --group-size 16 --out-dir out-speed/never-written"
ENGINES = ("hf", "loop")
AT_ONCE = (128, 512)  # sequences
SHARES = {"all": 1.0, "a tenth": 0.1}  # of the completions, at random


def main(flags: str = "", rounds: int = 7, json_file: JsonFile = None) -> None:
    """Time the rollouts of a batch, and updates with it.

    Args:
        flags: of train.py. By default the embedded model samples 32 x 16 completions of its task
        rounds: how often each variant is timed
        json_file: where to write the rows {part, variant, tokens_per_s, ratio, ratio_low,
            ratio_high}: medians, and speeds over that of the part's first variant
    """
    trainer = train.Trainer(config.parse_config(f"{FLAGS} {flags}".split()))
    model, cfg = trainer.model, trainer.cfg
    prompts = [trainer.train_ids[q] for q in trainer.candidates(1).tolist()]
    sampled = {}  # what each engine sampled

    def sample(engine: str, at_once: int) -> int:
        how = replace(trainer.sampling, engine=models.ENGINES[engine], batch_size=at_once)
        options = {"group_size": cfg.group_size, "seed": cfg.seed}
        sampled[engine] = rollout.sample(trainer.policy, prompts, how, **options)
        return sampled[engine].lengths.sum().item()

    def update(rollouts: rollout.Rollouts, keep: torch.Tensor) -> int:
        advantages, factor = torch.ones(2, *keep.shape, dtype=torch.float64)
        accumulate_gradients(
            model, rollouts, advantages, factor, keep, cfg=cfg, old_logprobs=rollouts.logprobs
        )
        return rollouts.lengths[keep].sum().item()

    engines = {
        f"{engine}, {at_once} at once": functools.partial(sample, engine, at_once)
        for at_once in AT_ONCE
        for engine in ENGINES
    }
    rows = in_turns("rollout", engines, rounds, cfg.device)
    for engine, rollouts in sampled.items():
        gap = (trainer_logprobs(model, rollouts, cfg) - rollouts.logprobs).abs().max()
        print(f"{engine}: log-probs differ from the trainer's by at most {gap:.1e}")

    draws = torch.rand(rollouts.lengths.shape, generator=torch.Generator().manual_seed(0))
    updates = {
        name: functools.partial(update, rollouts, draws < share) for name, share in SHARES.items()
    }
    rows += in_turns("update", updates, rounds, cfg.device)
    write_json(json_file, {"rows": rows})


def in_turns(part: str, variants: dict[str, Callable], rounds: int, device: str) -> list[dict]:
    """Time variants, each of which returns how many tokens it handled; returns and prints a row for
    each."""
    speeds = {name: [] for name in variants}
    for number in range(rounds + 1):
        for name, variant in variants.items():
            started = clock(device)
            speed = variant() / (clock(device) - started)
            if number > 0:  # the first round warms up
                speeds[name].append(speed)
    rows, (first, *_) = [], speeds.values()
    for name, own in speeds.items():
        ratios = [fast / slow for fast, slow in zip(own, first, strict=True)]
        row = {
            "part": part,
            "variant": name,
            "tokens_per_s": statistics.median(own),
            "ratio": statistics.median(ratios),
            "ratio_low": min(ratios),
            "ratio_high": max(ratios),
        }
        rows.append(row)
        shown = "{tokens_per_s:9.0f} tokens/s {ratio:6.2f} ({ratio_low:.2f} to {ratio_high:.2f})"
        print(f"{part:16s} {name:24s} {shown.format(**row)}", flush=True)
    return rows
