"""
One synchronous step on 1 to 10,000 GPUs, by arithmetic: `python -m bench scale`.

Lengths and keeps are those of a real run, or log-normal with the long tail of mathematics. Groups
and what is kept of them go to ranks by runtime/deal.py, or stay by turns. A rank's seconds follow
from data sheets (bench/roofline.py), and a stage takes as long as its slowest rank:
    rollout   continuous batching: a sequence that ends makes room for the next, until none is left
              and the longest ones run alone
    update    operations of forward and backward, with activations computed again; AdamW's bytes
    traffic   rings: the table of rewards and lengths, what the deal moves, FSDP's weights and
              gradients of each pack (beside the operations), and the sampler's copy of the weights
    host      this machine's own seconds for both deals
It leaves out what every method pays alike: kernel launches, rewards, waits for stragglers.

Letters: Q candidates, K prompts rolled out, G completions each, R ranks, n sequences.
"""

import functools
import heapq
import itertools
import time
from pathlib import Path
from typing import NamedTuple

import matplotlib.pyplot as plt
import numpy as np
import torch

import dppo
import sampler
from bench import JsonFile, roofline, run, shapes, write_json
from runtime import deal
from train import Trainer

WORLDS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 10_000)
WEIGHT, GRADIENT = 2, 4  # bytes of one under FSDP: bfloat16 gathered, float32 reduced
TOKEN = 2 * 8  # bytes of a token that moves: id and log-prob, as float64 (deal.exchange)
COLUMNS = 5 * 8  # bytes of a completion in the table that all ranks get (train.Trainer.roll_out)
PAYS = 1.5  # grpo's seconds over pps's, below which pruning saves less than a third
PROMPT, GROUP, PACK = 150, 16, 16_384  # tokens of a prompt, completions of it, tokens of a pack


class Rates(NamedTuple):
    """What one GPU and its share of the network do: operations, bytes, bytes a second; seconds."""

    flops: float
    memory: float
    network: float
    latency: float  # of one message


class Batch(NamedTuple):
    """What a step rolls out and trains on."""

    expected: torch.Tensor  # [K], tokens of each group that the history expects
    prompts: torch.Tensor  # [K], tokens
    lengths: torch.Tensor  # [K, G]
    keep: torch.Tensor  # [K, G] bool


def main(
    shape: shapes.Shape = "4b",
    gpu: str = "H100",
    network: float = 50e9,
    latency: float = 5e-6,
    candidates: int = 1024,
    at_once: int = 256,
    flags: str = "",
    picture: Path | None = None,
    json_file: JsonFile = None,
) -> None:
    """Print seconds of a step of grpo and pps with as many candidates, and where pruning stops
    paying.

    Args:
        shape: of the Qwen3
        gpu: H100, H200 or A100, by its data sheet
        network: bytes a second of each GPU; the default is one 400 Gb/s adapter for each
        latency: seconds of a message
        candidates: prompts of a step; pps rolls out 0.4 of them
        at_once: sequences that a GPU samples at once
        flags: more flags of train.py, for the run whose lengths and keeps are recorded
        picture: where to draw seconds and efficiency
        json_file: where to write the rows
    """
    options, sheet = shapes.qwen3(shape), shapes.GPUS[gpu]
    rates = Rates(sheet.flops, sheet.bandwidth, network, latency)
    changes = [{field: rate * by} for field, rate in rates._asdict().items() for by in (0.5, 2.0)]
    step = lambda *args: seconds(*args, options, at_once)
    rows = []
    works = {"log-normal": log_normal, "recorded": functools.partial(recorded, flags=flags)}
    for name, make in works.items():
        batches = {method: make(method, candidates) for method in ("grpo", "pps")}
        for method, dealt, world in itertools.product(batches, (True, False), WORLDS):
            row = {"work": name, "method": method, "dealt": dealt, "ranks": world}
            rows.append(row | step(batches[method], world, dealt, rates))
        print(table([row for row in rows if row["work"] == name]))
        for change in ({}, *changes):
            at = crossover(batches, step, rates._replace(**change))
            rows.append({"work": name, "below": PAYS, "ranks": at, "rates": change})
            print(f"{name}: grpo / pps falls below {PAYS} at {at} GPUs; {change or 'data sheet'}")
        at = crossover(batches, step, rates)
        for more in (2, 4, 8, 16) if at else ():
            both = (make(method, more * candidates) for method in ("grpo", "pps"))
            grpo, pps = (step(batch, at, True, rates)["seconds"] for batch in both)
            rows.append({"work": name, "ranks": at, "candidates": more, "saving": grpo / pps})
            print(f"{name}: {grpo / pps:.2f} with {more} times as many candidates on {at} GPUs")
    if picture:
        draw([row for row in rows if "seconds" in row and row["work"] == "log-normal"], picture)
    write_json(json_file, rows)


# ---------------------------------------------------------------------------- what is sampled


def log_normal(method: str, candidates: int) -> Batch:
    """The second visit of prompts whose completions have a median of 1,000 tokens, at most 16,384.
    Harder prompts have longer completions and lower pass rates; a truncated one is wrong."""
    draw = torch.Generator().manual_seed(0)
    hard = torch.randn(candidates, 1, generator=draw)
    prompts = torch.full((candidates,), PROMPT)
    history = sampler.PromptHistory(prompts, [""] * candidates, candidates)
    chosen, weights = torch.arange(candidates), torch.ones(candidates, dtype=torch.float64)
    for step in (1, 2):
        if step == 2 and method == "pps":
            generator = dppo.generator_for(0)
            keep, weights = history.prune("pps", 0.6, chosen, generator, step)
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
    rule = ("pps", 0.7) if method == "pps" else ("none", 0.0)
    keep, _ = dppo.prune_completions(*rule, part, dppo.generator_for(1))
    return Batch(expected, prompts[chosen], lengths, keep)


class Recorder(Trainer):
    """Keeps each step's batch."""

    def __init__(self, *args):
        super().__init__(*args)
        self.batches = []

    def roll_out(self, prompts, step, *purpose):
        self.expected = self.history.relative_tokens(prompts, step)
        return super().roll_out(prompts, step, *purpose)

    def backward(self, full, keep, *args):
        prompts = self.prompt_tokens[full.batch.prompts]
        self.batches.append(Batch(self.expected, prompts, full.batch.lengths.long(), keep))
        return super().backward(full, keep, *args)


def recorded(method: str, candidates: int, flags: str) -> Batch:
    """The last of twelve steps of a real run, again and again until there are enough groups."""
    last, per_step = _last_batch(method, flags)
    groups = round(len(last.prompts) * candidates / per_step)
    index = torch.arange(groups) % len(last.prompts)
    return Batch(*(column[index] for column in last))


@functools.cache
def _last_batch(method, flags):
    args = ["--method", method, "--data", "arithmetic-mixed", "--prompts-per-step", "256"]
    args += ["--steps", "12", "--group-size", str(GROUP), *flags.split()]
    trainer, _ = run(args, Recorder)
    return trainer.batches[-1], trainer.num_candidates


# ---------------------------------------------------------------------------- seconds


def seconds(batch: Batch, world: int, dealt: bool, rates: Rates, options, at_once: int) -> dict:
    """Seconds of a step's parts on R ranks, and of the whole. Data-sheet rates; see above."""
    K, G = batch.lengths.shape
    started = time.perf_counter()
    rank_of = (torch.arange(K) % world)[:, None].expand(K, G)
    if dealt:
        rank_of = deal.rollouts(batch.expected.tolist(), G, world, whole=False)
    kept = batch.keep.flatten().nonzero()[:, 0]
    prompts, lengths = batch.prompts[kept // G], batch.lengths.flatten()[kept]
    owner = target = rank_of.flatten()[kept]
    if dealt:
        args = ((kept // G).tolist(), prompts.tolist(), lengths.tolist(), world, False)
        target = torch.tensor(deal.deal(*args, options.hidden_size), dtype=torch.long)
    host = time.perf_counter() - started if world > 1 else 0.0

    gpu = shapes.GPU(rates.flops, rates.memory)
    every = batch.prompts[:, None].expand(K, G).flatten().numpy()
    order = (rank_of.flatten().numpy(), every, batch.lengths.flatten().numpy())
    rollout = rollout_seconds(options, gpu, *order, world, at_once).max()
    prefill = torch.zeros(world, dtype=torch.float64)
    one = [shapes.model_flops(options, [(tokens, 1)]) / 3 for tokens in batch.prompts.tolist()]
    prefill.index_add_(0, rank_of.flatten(), torch.tensor(one).repeat_interleave(G).double() / G)
    rollout += prefill.max().item() / rates.flops

    flops = [
        4 / 3 * shapes.model_flops(options, [pair])
        for pair in zip(prompts.tolist(), lengths.tolist(), strict=True)
    ]
    flops = torch.bincount(target, torch.tensor(flops).double(), world)
    packs = -(-torch.bincount(target, (prompts + lengths).double(), world).max().item() // PACK)
    ring, messages = (world - 1) / world / rates.network, rates.latency * (world - 1)
    weights = roofline.parameters(options)
    layers = options.num_hidden_layers
    gathers = packs * ((2 * WEIGHT + GRADIENT) * weights * ring + 3 * layers * messages)
    update = max(flops.max().item() / rates.flops, gathers)
    update += roofline.ADAMW * weights / world / rates.memory
    moved = moved_bytes(owner, target, lengths, world).max().item()
    traffic = WEIGHT * weights * ring + messages  # the sampler's copy
    traffic += 2 * (COLUMNS * K * G * ring + messages)  # an all-reduce
    traffic += moved / rates.network + (messages if dealt else 0.0)
    parts = {"rollout": float(rollout), "update": update, "traffic": traffic, "host": host}
    return {"seconds": sum(parts.values())} | parts


def moved_bytes(owner, target, lengths, world: int) -> torch.Tensor:
    """Bytes [R] that each rank sends to others in deal.exchange, for n sequences."""
    there = owner != target
    return TOKEN * torch.bincount(owner[there], lengths[there], world).double()


def rollout_seconds(options, gpu, rank_of, prompts, lengths, world: int, at_once: int):
    """Seconds [R] of decoding with continuous batching; three arrays [n] of all sequences."""
    start = np.zeros(len(lengths))
    order = np.argsort(rank_of, kind="stable")
    for some in np.split(order, np.searchsorted(rank_of[order], np.arange(1, world))):
        if len(some) > at_once:
            room = [0.0] * at_once  # the pass in which each place is free
            for number in some:
                start[number] = room[0]
                heapq.heapreplace(room, room[0] + lengths[number])
    # Between two events as many sequences are active; all are gone at the end of a rank.
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
    """The fewest GPUs on which grpo's seconds are less than PAYS times those of pps; both dealt."""
    for world in WORLDS:
        grpo, pps = (step(batches[method], world, True, rates) for method in ("grpo", "pps"))
        if grpo["seconds"] < PAYS * pps["seconds"]:
            return world
    return None


# ---------------------------------------------------------------------------- output


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
    for method, color in (("grpo", "C7"), ("pps", "C0")):
        for dealt, style in ((True, "-"), (False, "--")):
            some = [r for r in rows if (r["method"], r["dealt"]) == (method, dealt)]
            worlds, whole = [r["ranks"] for r in some], [r["seconds"] for r in some]
            label = f"{method}, {'dealt' if dealt else 'by turns'}"
            left.plot(worlds, whole, style, color=color, label=label)
            ideal = [whole[0] / (world * now) for world, now in zip(worlds, whole, strict=True)]
            right.plot(worlds, ideal, style, color=color, label=label)
    left.set(xscale="log", yscale="log", xlabel="GPUs", ylabel="seconds a step")
    right.set(xscale="log", ylim=(0, 1.02), xlabel="GPUs", ylabel="share of the ideal speed-up")
    left.legend(frameon=False)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150)
    plt.close(figure)
