"""
A synchronous step on 1 to 10,000 GPUs, by arithmetic: `python -m bench scale`.

Lengths and keeps are those of a real run, or log-normal with the long tail of mathematics. Groups
and what is kept of them are dealt to ranks by runtime/deal.py; or prompt k is sampled on rank k mod
R, and what is kept stays there ("by turns"). Seconds follow from data sheets (bench/roofline.py),
and each part takes as long as on its slowest rank:
    rollout   Continuous batching: when a sequence ends, the next one takes its place. At last the
              longest ones run alone.
    update    Operations of forward and backward, with activations computed again. Or the traffic of
              --shard fsdp, if that takes longer: each pack gathers float32 weights twice, and sums
              gradients. Then AdamW's bytes.
    traffic   The sampler's copy of the weights, the table that all ranks get, what the deal moves.
              Collectives are rings, whose latency grows with R.
    host      The deals, measured on this machine. Rewards and kernel launches are left out.

Letters: Q candidates, K prompts rolled out, G completions each, R ranks, n kept sequences.
"""

import heapq
import itertools
import time
from pathlib import Path
from typing import NamedTuple

import matplotlib.pyplot as plt
import numpy as np
import torch

import config
import dppo
import sampler
from bench import JsonFile, roofline, run, shapes, sized, write_json
from bench.deal import Batch, Recorder
from runtime import deal

WORLDS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 10_000)
TOKEN = 2 * 8  # bytes of a token that moves: id and log-prob, float64 (deal.exchange)
COLUMNS = 5 * 8  # bytes of a completion in the table that all ranks get (Trainer.roll_out)
PAYS = 1.5  # times as fast as grpo; below it, pruning saves less than a third of a step
PROMPT, GROUP, PACK = 150, 16, 16_384  # tokens of a prompt, its completions, tokens of a pack


class Rates(NamedTuple):
    """Operations and bytes a second of each GPU; seconds of a message."""

    flops: float
    memory: float
    network: float
    latency: float


def main(
    shape: shapes.Shape = "4b",
    gpu: str = "H100",
    network: float = 50e9,
    latency: float = 5e-6,
    candidates: int = 1024,
    flags: str = "",
    picture: Path | None = None,
    json_file: JsonFile = None,
) -> None:
    """Print the seconds of a step of grpo and of pps with as many candidates, and how many GPUs
    make pruning save less than a third of it.

    Args:
        shape: of the Qwen3
        gpu: H100, H200 or A100, by its data sheet
        network: bytes a second of each GPU; the default is a 400 Gb/s adapter for each
        latency: seconds of a message
        candidates: prompts of a step, of which pps rolls out 0.4
        flags: more flags of train.py, for the run whose lengths and keeps are recorded
        picture: where to draw the log-normal setting
        json_file: where to write the rows
    """
    options, sheet = shapes.qwen3(shape), shapes.GPUS[gpu]
    rates = Rates(sheet.flops, sheet.bandwidth, network, latency)
    changes = [{name: rate * by} for name, rate in rates._asdict().items() for by in (0.5, 2.0)]
    step = lambda batch, world, rates, dealt=True: seconds(
        batch, place(batch, world, dealt, options.hidden_size), world, rates, options
    )
    rows = []
    for work, make in (("log-normal", log_normal), ("recorded", recorded(flags))):
        batches = {method: make(method, candidates) for method in ("grpo", "pps")}
        for method, dealt, world in itertools.product(batches, (True, False), WORLDS):
            row = {"work": work, "method": method, "dealt": dealt, "ranks": world}
            rows.append(row | step(batches[method], world, rates, dealt))
        print(table([row for row in rows if row["work"] == work]))
        for change in ({}, *changes):
            at = crossover(batches, step, rates._replace(**change))
            rows.append({"work": work, "below": PAYS, "ranks": at, "rates": change})
            print(f"{work}: grpo / pps first below {PAYS} at {at} GPUs; {change or 'data sheet'}")
        at = crossover(batches, step, rates)
        for more in (2, 4, 8) if at else ():
            both = (make(method, more * candidates) for method in batches)
            grpo, pps = (step(batch, at, rates)["seconds"] for batch in both)
            rows.append({"work": work, "ranks": at, "more": more, "ratio": grpo / pps})
            print(f"{work}: {grpo / pps:.2f} on {at} GPUs with {more} x the candidates")
    if picture:
        draw([row for row in rows if row["work"] == "log-normal" and "seconds" in row], picture)
    write_json(json_file, rows)


def log_normal(method: str, candidates: int) -> Batch:
    """The sixth visit of prompts whose completions have a median of 1,000 tokens, at most 16,384.
    Harder prompts have longer completions and lower pass rates; truncated ones are wrong."""
    cfg = config.resolve(config.parse_config(sized(method)))
    draw = torch.Generator().manual_seed(0)
    hard = torch.randn(candidates, 1, generator=draw)
    prompts = torch.full((candidates,), PROMPT)
    history = sampler.PromptHistory(prompts, [""] * candidates, candidates)
    chosen, weights = torch.arange(candidates), torch.ones(candidates, dtype=torch.float64)
    for step in range(1, 7):
        if step == 6:
            rule = (cfg.prompt_rule, cfg.prompt_prune_rate)
            keep, weights = history.prune(*rule, chosen, dppo.generator_for(0), step)
            chosen, weights = keep.nonzero()[:, 0], weights[keep]
        expected = history.relative_tokens(chosen, step)
        own = torch.randn(len(chosen), GROUP, generator=draw)
        lengths = (1000 * (0.7 * (hard[chosen] + own)).exp()).clamp(1, 16_384).long()
        right = torch.rand(own.shape, generator=draw) < torch.sigmoid(-1.5 * hard[chosen])
        rewards = (right & (lengths < 16_384)).double()
        advantages = dppo.group_advantages(rewards, "grpo")
        size = dppo.contribution_size(advantages, 1.0 / lengths.double(), lengths, 0.0)
        seen = (rewards, advantages, size.square().sum(dim=1), lengths.sum(dim=1).double())
        history.update(step, chosen, weights, *seen)
    part = dppo.Completions(advantages, rewards, lengths + PROMPT, weights[:, None] * size)
    rule = (cfg.completion_rule, cfg.completion_prune_rate)
    keep, _ = dppo.prune_completions(*rule, part, dppo.generator_for(1))
    return Batch(expected, prompts[chosen], lengths, keep, size, weights)


def recorded(flags: str):
    """A function like log_normal. It repeats the last of twelve steps of a real run as often as it
    needs groups."""

    last = {}
    for method in ("grpo", "pps"):
        own = f"--data arithmetic-mixed --prompts-per-step 256 --group-size {GROUP} --steps 12"
        trainer, _ = run(sized(method, f"{own} {flags}"), Recorder)
        last[method] = (trainer.batches[-1], trainer.num_candidates)

    def make(method: str, candidates: int) -> Batch:
        batch, of = last[method]
        index = torch.arange(round(len(batch.prompts) * candidates / of)) % len(batch.prompts)
        return Batch(*(column[index] for column in batch))

    return make


def place(batch: Batch, world: int, dealt: bool, hidden: int) -> tuple:
    """Deal a batch, as train.py does if prompts are not shared, or leave it by turns. Returns the
    ranks [K, G] that sample it and [n] that train on it, prompt and completion tokens [2, n] of
    what is kept, bytes [R] of ids and log-probs that leave a rank, and seconds that this took."""
    K, G = batch.lengths.shape
    started = time.perf_counter()
    sampled_on = (torch.arange(K) % world)[:, None].expand(K, G)
    if dealt:
        sampled_on = deal.rollouts(batch.expected.tolist(), G, world, whole=False)
    kept = batch.kept()
    owner = trained_on = sampled_on[batch.keep]
    if dealt:
        trained_on = torch.tensor(deal.deal(*kept, world, False, hidden), dtype=torch.long)
    tokens = torch.tensor(kept[1:])
    leaves = owner != trained_on
    moved = TOKEN * torch.bincount(owner[leaves], tokens[1, leaves], world).double()
    host = time.perf_counter() - started if world > 1 else 0.0
    return sampled_on, trained_on, tokens, moved, host


def seconds(batch: Batch, placed: tuple, world: int, rates: Rates, options) -> dict:
    """Seconds of a step on R ranks, and of its parts."""
    K, G = batch.lengths.shape
    ranks, trained_on, kept, moved, host = placed
    gpu, weights = shapes.GPU(rates.flops, rates.memory), roofline.parameters(options)
    each, ranks = batch.prompts[:, None].expand(K, G).flatten(), ranks.flatten()
    arrays = (ranks.numpy(), each.numpy(), batch.lengths.flatten().numpy())
    prefill = {p: shapes.model_flops(options, [(p, 1)]) / 3 / G for p in set(each.tolist())}
    prefill = torch.tensor([prefill[p] for p in each.tolist()], dtype=torch.float64)
    rollout = decoding_seconds(options, gpu, *arrays, world)
    rollout += torch.bincount(ranks, prefill, world).numpy() / rates.flops

    flops = [4 / 3 * shapes.model_flops(options, [pair]) for pair in kept.T.tolist()]
    flops = torch.bincount(trained_on, torch.tensor(flops).double(), world).max().item()
    tokens = torch.bincount(trained_on, kept.sum(dim=0).double(), world)
    packs = -(-tokens.max().item() // PACK)
    ring = lambda size: (world - 1) * (size / world / rates.network + rates.latency)  # one way
    layers = options.num_hidden_layers
    update = max(flops / rates.flops, packs * 3 * layers * ring(4 * weights / layers))
    parts = {
        "rollout": rollout.max().item(),
        "update": update + roofline.ADAMW * weights / world / rates.memory,
        "traffic": ring(4 * weights) + 2 * ring(COLUMNS * K * G)
        + moved.max().item() / rates.network + ring(0),
        "host": host,
    }  # fmt: skip
    return {"seconds": sum(parts.values())} | parts


def decoding_seconds(options, gpu, rank_of, prompts, lengths, world: int, at_once=256):
    """Seconds [R] of decoding with continuous batching, of arrays [K * G] of all sequences."""
    start = np.zeros(len(lengths))
    order = np.argsort(rank_of, kind="stable")
    for some in np.split(order, np.searchsorted(rank_of[order], np.arange(1, world))):
        if len(some) > at_once:
            room = [0.0] * at_once  # the pass in which each place is free
            for number in some:
                start[number] = room[0]
                heapq.heapreplace(room, room[0] + lengths[number])
    # Sequences start and end at events. Between two events the same ones are active; after the
    # last event of a rank, none is.
    rank = np.concatenate([rank_of, rank_of])
    at = np.concatenate([start, start + lengths])
    change = np.repeat([1.0, -1.0], len(lengths))
    offset = change * np.concatenate([prompts - start, prompts - start])
    order = np.lexsort((at, rank))
    rank, at = rank[order], at[order]
    active, offset = change[order].cumsum(), offset[order].cumsum()
    passes = np.where(active[:-1] > 0, np.diff(at), 0.0)
    context = offset[:-1] + active[:-1] * (at[1:] + at[:-1]) / 2
    each = roofline.decode_seconds(options, gpu, active[:-1], context)
    return np.bincount(rank[:-1], passes * each, minlength=world)


def crossover(batches, step, rates) -> int | None:
    """The fewest GPUs on which grpo's seconds are less than PAYS times those of pps, both dealt."""
    for world in WORLDS:
        grpo, pps = (step(batches[method], world, rates)["seconds"] for method in ("grpo", "pps"))
        if grpo < PAYS * pps:
            return world
    return None


def table(rows: list[dict]) -> str:
    """A line for each number of GPUs: seconds of the four variants, and grpo's over pps's."""
    lines = [f"{rows[0]['work']:10s} GPUs    grpo, dealt     pps, dealt    grpo / pps (by turns)"]
    for world in WORLDS:
        found = {(r["method"], r["dealt"]): r["seconds"] for r in rows if r["ranks"] == world}
        cells = (f"{found[m, True]:8.2f} ({found[m, False]:7.2f})" for m in ("grpo", "pps"))
        ratios = (found["grpo", dealt] / found["pps", dealt] for dealt in (True, False))
        lines.append(f"{world:15d} {' '.join(cells)}  {' '.join(f'{r:6.2f}' for r in ratios)}")
    return "\n".join(lines)


def draw(rows: list[dict], path: Path) -> None:
    """Seconds of a step, and the share of ideal speed-up, over the number of GPUs."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
    for method, dealt in itertools.product(("grpo", "pps"), (True, False)):
        took = [r["seconds"] for r in rows if (r["method"], r["dealt"]) == (method, dealt)]
        how = {"color": "C7" if method == "grpo" else "C0", "ls": "-" if dealt else "--"}
        left.plot(WORLDS, took, label=f"{method}, {'dealt' if dealt else 'by turns'}", **how)
        right.plot(WORLDS, [took[0] / w / now for w, now in zip(WORLDS, took, strict=True)], **how)
    left.set(xscale="log", yscale="log", xlabel="GPUs", ylabel="seconds a step")
    right.set(xscale="log", ylim=(0, 1.02), xlabel="GPUs", ylabel="share of the ideal speed-up")
    left.legend(frameon=False)
    figure.savefig(path, dpi=150)
    plt.close(figure)
