"""
What --rollout-checkpoint saves at equal noise: `python -m bench tail`. Arithmetic, no GPU.

Batches and seconds are those of bench/scale.py. A step that stops at c tokens is shorter, but its
coin makes the gradient noisier, in two ways. V is its variance without a checkpoint:
    the groups   Their terms beyond c are divided by 1 - r, or are 0. That makes V * v, from the
                 sizes of the batch's terms. More prompts average it out.
    the coin     It adds r / (1 - r) times the squared mean gradient of all groups beyond c. That
                 gradient is taken as a share f of the whole one: their share of the groups' sizes,
                 as if all pointed the same way. More prompts do not average it out.
So q = v / (1 - r / (1 - r) f^2 / noise) times the prompts make a step as exact as before, where
`noise` is V over the squared mean gradient. At 1 a batch is as large as is worth its while
(McCandlish et al. 2018, arXiv:1812.06162). The ratio printed is the mean seconds of such steps over
those of a step without a checkpoint.

*Cut* is the biased way: every step stops at c, and what is beyond is dropped without weights.

Letters: K prompts rolled out, G completions each, R GPUs.
"""

import itertools
import math
from dataclasses import dataclass

import torch

import config
import dppo
from bench import JsonFile, scale, shapes, sized, write_json
from bench.deal import Batch

WORLDS = (8, 64, 512)
SHARES = (0.125, 0.25, 0.5, 0.75)  # checkpoints, of the longest completion
RATES = (0.3, 0.5, 0.7)
MOST = 8.0  # times the prompts; a step that needs more is not considered


def main(
    shape: shapes.Shape = "4b",
    gpu: str = "H100",
    candidates: int = 1024,
    noise: float = 1.0,
    flags: str = "",
    json_file: JsonFile = None,
) -> None:
    """Print, for each checkpoint and rate, the seconds of equally exact steps over those without.

    Args:
        shape: of the Qwen3
        gpu: H100, H200 or A100, by its data sheet
        candidates: prompts of a step, of which pps rolls out 0.4
        noise: variance of a step's gradient over its squared mean
        flags: more flags of train.py, for the run whose lengths and sizes are recorded
        json_file: where to write the rows
    """
    sheet = shapes.GPUS[gpu]
    machine = Machine(shape, scale.Rates(sheet.flops, sheet.bandwidth, 50e9, 5e-6))
    rows, rates = [], " ".join(f"{r:4.1f}" for r in RATES)
    print(f"lengths       GPUs  tokens  beyond: groups, sizes    r: {rates}  cut, its mean length")
    works = {"log-normal": scale.log_normal, "recorded": scale.recorded(flags)}
    for (work, make), method in itertools.product(works.items(), ("grpo", "pps")):
        batch = make(method, candidates)
        rate = config.resolve(config.parse_config(sized(method))).completion_prune_rate
        for world in WORLDS:
            before = machine.seconds(batch, world)
            for share in SHARES:
                tail = Tail(batch, round(share * batch.lengths.max().item()), rate)
                if tail.beyond.all():
                    continue
                cut = machine.seconds(tail.stopped(), world) / before
                some = [tail.facts() | {"rate": None, "ratio": cut}]
                for r in RATES:
                    ratio, prompts = machine.ratio(tail, r, noise, world, before)
                    some.append(tail.facts() | {"rate": r, "ratio": ratio, "prompts": prompts})
                print(line(work, method, world, some), flush=True)
                rows += [{"work": work, "method": method, "ranks": world} | row for row in some]
    write_json(json_file, rows)


@dataclass
class Tail:
    """A batch and a checkpoint; `rate` is r_o of pps, or 0 to keep all completions."""

    batch: Batch
    checkpoint: int
    rate: float

    def __post_init__(self):
        self.beyond = (self.batch.lengths > self.checkpoint).any(dim=1)  # [K]
        sizes = self.batch.weight * self.batch.size.square().sum(dim=1).sqrt()  # [K]
        self.share = (sizes[self.beyond].sum() / sizes.sum()).item()  # f

    def facts(self) -> dict:
        lengths = self.batch.lengths
        mean = lambda some: lengths[some].double().mean().item()
        return {
            "checkpoint": self.checkpoint,
            "groups_beyond": self.beyond.double().mean().item(),
            "sizes_beyond": self.share,
            "mean_length": mean(slice(None)),
            "mean_length_within": mean(~self.beyond),
        }

    def kept(self, weight: float) -> tuple[Batch, float]:
        """The batch with terms beyond the checkpoint times `weight`, pruned again, and the sum of
        its squared terms over their keep probabilities."""
        factor = torch.where(self.beyond, weight, 1.0)[:, None]  # [K, 1]
        size = factor * self.batch.weight[:, None] * self.batch.size
        keep_prob = (factor > 0).double().expand_as(size)
        if self.rate:
            cost = (self.batch.prompts[:, None] + self.batch.lengths) * keep_prob
            keep_prob = dppo.pps_keep_prob(size, cost, (1 - self.rate) * cost.sum().item())
        keep = dppo.systematic(keep_prob, torch.arange(size.numel()), start=0.5)
        second = (size.square() / keep_prob.clamp(min=1e-12)).sum().item()
        return self.batch._replace(keep=keep), second

    def stopped(self) -> Batch:
        """What a step that stops samples and trains on."""
        batch, _ = self.kept(0.0)
        short = batch.lengths.clamp(max=self.checkpoint)
        return batch._replace(lengths=torch.where(self.beyond[:, None], short, batch.lengths))


class Machine:
    """A model on GPUs of these rates."""

    def __init__(self, shape: str, rates: scale.Rates):
        self.options, self.rates = shapes.qwen3(shape), rates

    def seconds(self, batch: Batch, world: int, prompts: float = 1.0) -> float:
        """Of a step on this many GPUs, with `prompts` times as many prompts; what the host takes to
        deal them, which scale.seconds measures, is left out."""
        K = len(batch.prompts)
        index = torch.arange(max(1, round(prompts * K))) % K
        batch = Batch(*(column[index] for column in batch))
        placed = scale.place(batch, world, True, self.options.hidden_size)
        parts = scale.seconds(batch, placed, world, self.rates, self.options)
        return parts["seconds"] - parts["host"]

    def ratio(self, tail: Tail, r: float, noise: float, world: int, before: float):
        """(seconds of steps with a coin over `before`, their prompts), equally exact; None where no
        number of prompts, or too many, would do."""
        whole, second = tail.kept(1 / (1 - r))
        _, second_stopped = tail.kept(0.0)
        _, second_before = tail.kept(1.0)
        v = (r * second_stopped + (1 - r) * second) / second_before
        coin = r / (1 - r) * tail.share**2 / noise
        prompts = v / (1 - coin) if coin < 1 else math.inf
        if prompts > MOST:
            return None, None
        steps = (tail.stopped(), whole)
        stopped, finished = (self.seconds(step, world, prompts) for step in steps)
        return (r * stopped + (1 - r) * finished) / before, prompts


def line(work: str, method: str, world: int, rows: list[dict]) -> str:
    """A line of the table: the rows of a checkpoint."""
    cut, *others = rows
    ratios = " ".join("   -" if row["ratio"] is None else f"{row['ratio']:.2f}" for row in others)
    return (
        f"{work:10s} {method:4s} {world:4d} {cut['checkpoint']:7,d} {cut['groups_beyond']:7.2f} "
        f"{cut['sizes_beyond']:8.3f}   {ratios}   {cut['ratio']:.2f} "
        f"({cut['mean_length_within']:,.0f} for {cut['mean_length']:,.0f})"
    )
