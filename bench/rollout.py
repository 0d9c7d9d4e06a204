"""How fast each engine but vLLM samples a step's rollouts: `python -m bench rollout`."""

import copy
import itertools
import statistics
from dataclasses import replace

import torch

import config
import data
import models
import rollout
from bench import JsonFile, shapes, write_json
from runtime.device import cast_weights
from runtime.timer import clock
from tasks import arithmetic
from update import trainer_logprobs

ENGINES = ("hf", "compact", "plain")


def main(
    rounds: int = 7,
    batches: tuple[int, ...] = (128, 512),
    shape: shapes.Shape | None = None,
    new_tokens: int = 512,
    json_file: JsonFile = None,
) -> None:
    """Time one step's rollouts. Engines take turns; prompts change with the round.

    Args:
        rounds: timed rollouts of each engine and batch
        batches: sequences sampled at once; the embedded task has the largest of them in all, so
            smaller batches take several turns
        shape: by default the base model and the problems of the embedded task. Otherwise random
            weights of that size and random prompts, one batch of sequences in all
        new_tokens: length of each completion, with random weights
        json_file: where to write the rows {engine, batch, seconds, tokens_per_s,
            max_logprob_gap, ...}
    """
    cfg = config.resolve(config.Config(group_size=16))
    group_size = cfg.group_size
    totals = [max(batches)] * len(batches)  # sequences in all
    if shape:
        totals, eos_ids = batches, []
        cfg = replace(cfg, max_new_tokens=new_tokens)
        model = shapes.random_model(shape, cfg.device)
        prompts = random_prompts(max(batches) // group_size * (rounds + 1), model.vocab_size)
    else:
        model, tokenizer = models.load_policy(str(arithmetic.BASE), cfg.device)
        problems = data.train_problems(cfg.data)
        _, prompts = data.encode_prompts(problems, tokenizer, 400)
        eos_ids = models.sampling(model, tokenizer, cfg.max_new_tokens).eos_ids
    policy = model
    if cfg.dtype != "float32":  # train.py samples from a copy
        policy = copy.deepcopy(model)
        cast_weights(policy, cfg.dtype)
    timed = {}  # (engine's name, batch) -> its measurements
    sizes = zip(batches, totals, strict=True)
    for number, (batch, total), name in itertools.product(range(rounds + 1), sizes, ENGINES):
        options = {"batch_size": batch, "engine": models.ENGINES[name]}
        sampling = rollout.Sampling(cfg.max_new_tokens, eos_ids, 0, **options)
        first, count = number * total // group_size, total // group_size
        some = [prompts[(first + place) % len(prompts)] for place in range(count)]
        measured = measure(model, policy, some, sampling, cfg, seed=number)
        runs = timed.setdefault((name, batch), [])
        if number > 0:  # the first warms up
            runs.append(measured)
    write_json(json_file, compare(timed))


def random_prompts(count: int, vocabulary: int) -> list[list[int]]:
    """Prompts of 50 to 249 random tokens."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(50, 250, (count,), generator=generator).tolist()
    return [torch.randint(vocabulary, (n,), generator=generator).tolist() for n in lengths]


def measure(model, policy, prompts, sampling, cfg, seed: int) -> dict:
    """Seconds and tokens of one rollout, and how far its log-probs are from the trainer's."""
    started = clock(cfg.device)
    rollouts = rollout.sample(policy, prompts, sampling, group_size=cfg.group_size, seed=seed)
    seconds = clock(cfg.device) - started
    gaps = (trainer_logprobs(model, rollouts, cfg) - rollouts.logprobs).abs()
    return {"seconds": seconds, "tokens": int(rollouts.lengths.sum()), "gap": gaps.max().item()}


def compare(timed: dict[tuple[str, int], list[dict]]) -> list[dict]:
    """Print and return a row for each engine and batch, with ratios to hf's best batch."""
    rates = {key: [run["tokens"] / run["seconds"] for run in runs] for key, runs in timed.items()}
    of_hf = [values for (name, _), values in rates.items() if name == "hf"]
    plain = max(of_hf, key=statistics.median)
    table = []
    for (name, batch), runs in timed.items():
        own = rates[name, batch]
        ratios = sorted(fast / slow for fast, slow in zip(own, plain, strict=True))
        row = {
            "engine": name,
            "batch": batch,
            "seconds": statistics.median(run["seconds"] for run in runs),
            "tokens_per_s": statistics.median(own),
            "times_as_fast": [statistics.median(ratios), ratios[0], ratios[-1]],
            "max_logprob_gap": max(run["gap"] for run in runs),
            "tokens": sum(run["tokens"] for run in runs),
        }
        table.append(row)
        print(
            f"{name:8s} {batch:5d} at once {row['seconds']:8.3f} s {row['tokens_per_s']:10.0f} "
            f"tokens/s   {row['times_as_fast'][0]:.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f}) times "
            f"hf's best   largest log-prob gap {row['max_logprob_gap']:.1e}"
        )
    return table
