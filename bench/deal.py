"""
How evenly rollouts and updates are spread over ranks: `python -m bench deal`.

The prompts, keeps and lengths of real steps on one rank are dealt to many simulated ones. *Where
sampled* is what an update would do if each rank trained on what is kept of its own samples. *By
turns*, rank k mod R samples prompt k.
"""

import statistics
import time
from typing import NamedTuple

import torch
import torch.distributed as dist

import dppo
import packing
import sampler
from bench import JsonFile, run, sized, write_json
from runtime import deal, ranks
from train import Trainer
from update import accumulate_gradients

WORLDS = (2, 4, 8, 16, 32, 64)


class Batch(NamedTuple):
    """What a step rolls out and trains on."""

    expected: torch.Tensor  # [K], what the history expects of each group's tokens
    prompts: torch.Tensor  # [K], tokens
    lengths: torch.Tensor  # [K, G], tokens of the completions
    keep: torch.Tensor  # [K, G] bool
    size: torch.Tensor | None = None  # [K, G], dppo.contribution_size, without prompt weights
    weight: torch.Tensor | None = None  # [K], of the prompts

    def kept(self) -> tuple[list[int], list[int], list[int]]:
        """Group, prompt tokens and completion tokens of each kept sequence."""
        places = self.keep.flatten().nonzero()[:, 0]
        groups = places // self.keep.shape[1]
        tokens = (self.prompts[groups], self.lengths.flatten()[places])
        return groups.tolist(), *(column.long().tolist() for column in tokens)


class Recorder(Trainer):
    """Keeps every step's batch."""

    def __init__(self, *args):
        super().__init__(*args)
        self.batches = []

    def roll_out(self, prompts, step, *purpose, **limit):
        self.expected = self.history.relative_tokens(prompts, step)
        return super().roll_out(prompts, step, *purpose, **limit)

    def backward(self, full, keep, *args):
        prompts = self.prompt_tokens[full.batch.prompts]
        terms = (full.advantages, full.scale, full.batch.energy)
        sizes = (dppo.contribution_size(*terms, self.cfg.beta), full.chosen.weights)
        self.batches.append(Batch(self.expected, prompts, full.batch.lengths, keep, *sizes))
        return super().backward(full, keep, *args)


class Timed(Trainer):
    """Under torchrun: computes each update's gradient twice, from what each rank has sampled itself
    and from what is dealt, in turns, and times both until the gradients are summed."""

    def __init__(self, *args):
        super().__init__(*args)
        self.seconds = {"sampled": [], "dealt": []}
        self.gradients = {}

    def backward(self, full, keep, weights, *args):
        turn = len(self.seconds["dealt"]) % 2
        for how in sorted(self.seconds, reverse=turn == 1):
            self.optimizer.zero_grad()
            ranks.barrier()
            started = time.perf_counter()
            if how == "dealt":
                super().backward(full, keep, weights, *args)
            else:
                own = full.batch.rank == self.rank
                tables = (full.advantages, full.factor * weights, keep & own)
                rows = (table[full.batch.mine] for table in tables)
                accumulate_gradients(self.model, full.batch.rollouts, *rows, cfg=self.cfg)
                ranks.sum_gradients(self.model)
            self.seconds[how].append(time.perf_counter() - started)
            of = [p.grad.flatten().clone() for p in self.model.parameters() if p.requires_grad]
            self.gradients[how] = torch.cat(of)
        here, there = self.gradients["sampled"], self.gradients["dealt"]
        assert (here - there).norm() <= 1e-5 * here.norm(), "the deal changes the gradient"
        self.optimizer.zero_grad()
        return super().backward(full, keep, weights, *args)


def main(
    steps: int = 12,
    prompts: int = 256,
    long: int = 1000,
    flags: str = "",
    json_file: JsonFile = None,
) -> None:
    """Busiest rank over the mean, in tokens, for 2 to 64 ranks; and the seconds of what every rank
    computes alike with 1 M prompts, 65,536 completions and 1,024 ranks.

    `torchrun --nproc-per-node 2 -m bench deal` measures seconds of an update on real ranks instead.

    Args:
        steps: of a run of pps on arithmetic-mixed
        prompts: candidates of a step
        long: median tokens of a second setting. Its lengths are log-normal, its keeps those of the
            run, and its prompts are not shared
        flags: more flags of train.py
        json_file: where to write the rows {setting, ranks, how, mean, worst}
    """
    own = f"--data arithmetic-mixed --prompts-per-step {prompts} --steps {steps} {flags}"
    args = sized("pps", own)
    if dist.is_torchelastic_launched():
        return _in_seconds(args)
    trainer, _ = run(args, Recorder)
    draw = torch.Generator().manual_seed(0)
    kept = [batch.kept() for batch in trainer.batches]
    longer = [(groups, prompts, _long(len(groups), long, draw)) for groups, prompts, _ in kept]
    width = trainer.model.config.hidden_size
    rows = []
    for setting, updates, share, hidden in (
        ("arithmetic-mixed", kept, trainer.cfg.share_prompts, width),
        (f"{long} tokens", longer, False, 1024),
    ):
        for world in WORLDS:
            found = [spread(*update, world, share, hidden) for update in updates]
            columns = zip(*found, strict=True)
            for how, ratios in zip(("sampled", "dealt", "bound", "more"), columns, strict=True):
                row = {"setting": setting, "ranks": world, "how": how}
                rows.append(row | {"mean": statistics.mean(ratios), "worst": max(ratios)})
    print(table(rows))
    for world in WORLDS:
        for how, ratios in rollouts(trainer.batches, world).items():
            row = {"setting": "rollouts", "ranks": world, "how": how}
            rows.append(row | {"mean": statistics.mean(ratios), "worst": max(ratios)})
            print("rollouts{ranks:>4d} {how:20s} {mean:.3f} ({worst:.3f})".format(**rows[-1]))
    for how, seconds in large_step().items():
        rows.append({"setting": "1 M prompts", "ranks": 1024, "how": how, "seconds": seconds})
        print(f"1 M prompts, 65,536 completions, 1,024 ranks: {how} {seconds:.3f} s")
    write_json(json_file, rows)


def _in_seconds(args):
    trainer, _ = run(args, Timed)
    if trainer.is_main:
        for how, seconds in trainer.seconds.items():
            quarters = statistics.quantiles(seconds, n=4)
            middle = " to ".join(f"{value:.3f}" for value in (quarters[0], quarters[2]))
            print(f"{how}: {quarters[1]:.3f} s an update (middle half {middle})")
        pairs = zip(trainer.seconds["sampled"], trainer.seconds["dealt"], strict=True)
        print(f"ratio, median: {statistics.median(here / there for here, there in pairs):.2f}")


def large_step(
    prompts: int = 1_000_000, candidates: int = 10_240, group: int = 16, world: int = 1024
) -> dict[str, float]:
    """Seconds of one rank in the second step of an epoch for what grows with the whole batch: the
    prompts' draw, the deal of rollouts, the completions' draw, the deal of what is kept, packs, and
    the history."""
    draw = torch.Generator().manual_seed(0)
    history = sampler.PromptHistory(torch.full((prompts,), 100), ["a"] * prompts, candidates)
    generator, seconds, step = dppo.generator_for(0), {}, 1

    def timed(name, work, *args):
        started = time.perf_counter()
        found = work(*args)
        seconds[name] = time.perf_counter() - started
        return found

    for step in (1, 2):
        window = timed("candidates", sampler.candidates, prompts, candidates, 0, step)
        found = timed("select", history.prune, "pps", 0.6, window, generator, step)
        keep, weights = found
        chosen = window[keep]
        expected = history.relative_tokens(chosen, step).tolist()
        timed("deal rollouts", deal.rollouts, expected, group, world, False)
        K = len(chosen)
        rewards = (torch.rand(K, group, generator=draw) < 0.5).double()
        advantages = timed("advantages", dppo.group_advantages, rewards, "grpo")
        lengths = torch.tensor(_long(K * group, 1000, draw)).view(K, group)
        size = advantages.abs() / lengths.sqrt()
        part = dppo.Completions(advantages, rewards, lengths + 100.0, size)
        kept, _ = timed("prune", dppo.prune_completions, "pps", 0.5, part, generator)
        places = kept.flatten().nonzero()[:, 0]
        groups, some = (places // group).tolist(), lengths.flatten()[places].tolist()
        ranks_of = timed("deal", deal.deal, groups, [100] * len(some), some, world, False, 1024)
        own = [length for length, rank in zip(some, ranks_of, strict=True) if rank == 0]
        timed("plan", packing.plan_packs, own, 16_384, 256)
        squares, tokens = size.square().sum(dim=1), lengths.sum(dim=1).double()
        seen = (chosen, weights[keep], rewards, advantages, squares, tokens)
        timed("history", history.update, step, *seen)
    return seconds | {"all": sum(seconds.values())}


def rollouts(batches: list[Batch], world: int) -> dict[str, list[float]]:
    """Busiest rank over the mean in each step's rollouts, in tokens: by turns, and dealt; the
    expected ones of the deal; and the actual ones had the deal known them."""
    found = {"by turns": [], "dealt": [], "dealt, expected": [], "dealt, foreknown": []}
    for batch in batches:
        expected, tokens = batch.expected, batch.lengths
        K, G = tokens.shape
        groups = tokens.sum(dim=1)
        to = lambda sizes: deal.rollouts(sizes.tolist(), G, world, whole=False)  # noqa: B023
        evenly = (expected / G)[:, None].expand(K, G)
        turns = (torch.arange(K) % world)[:, None].expand(K, G)
        for how, rank_of, load in (
            ("by turns", turns, tokens), ("dealt", to(expected), tokens),
            ("dealt, expected", to(expected), evenly), ("dealt, foreknown", to(groups), tokens),
        ):  # fmt: skip
            loads = torch.bincount(rank_of.flatten(), load.flatten(), minlength=world)
            found[how].append((loads.max() / loads.mean()).item())
    return found


def table(rows: list[dict]) -> str:
    """A line for each setting and number of ranks: means over updates, and the worst update."""
    lines = [
        f"{'':18s}{'ranks':>6s}{'where sampled':>18s}{'dealt':>18s}{'at best':>10s}{'tokens':>10s}"
    ]
    for start in range(0, len(rows), 4):
        sampled, dealt, bound, more = rows[start : start + 4]
        lines.append(
            f"{sampled['setting']:18s}{sampled['ranks']:6d}"
            f"{sampled['mean']:10.2f} ({sampled['worst']:.2f}) {dealt['mean']:9.3f} "
            f"({dealt['worst']:.3f}){bound['mean']:10.3f}{more['mean']:10.3f}"
        )
    return "\n".join(lines)


def spread(groups, prompts, completions, world: int, share: bool, hidden: int) -> tuple:
    """Of an update: busiest rank over the mean where sampled, and dealt; the same if only the
    longest sequence stood in the way; and the tokens forwarded, dealt over where sampled."""
    of = (groups, prompts, completions)
    here = tokens(*of, [group % world for group in groups], world, share)
    there = tokens(*of, deal.deal(*of, world, share, hidden), world, share)
    longest = max(sum(pair) - 1 for pair in zip(prompts, completions, strict=True))
    mean = statistics.mean(there)
    busiest = max(here) / statistics.mean(here)
    return busiest, max(there) / mean, max(1.0, longest / mean), sum(there) / sum(here)


def tokens(groups, prompts, completions, ranks, world: int, share: bool) -> list[int]:
    """Tokens that each rank forwards; with `share`, a prompt once for all of its completions."""
    found, seen = [0] * world, set()
    for group, prompt, completion, rank in zip(groups, prompts, completions, ranks, strict=True):
        found[rank] += completion - 1
        if not share or (rank, group) not in seen:
            found[rank] += prompt
        seen.add((rank, group))
    return found


def _long(number: int, median: int, generator) -> list[int]:
    """Log-normal lengths in tokens, half to twice the median for most."""
    lengths = median * (0.5 * torch.randn(number, generator=generator)).exp()
    return lengths.clamp(min=1).long().tolist()
