"""
How evenly rollouts and updates are spread over ranks: `python -m bench deal`.

The prompts, keeps and lengths of real steps on one rank are dealt to many simulated ones. *Where
sampled* is what an update would do if each rank trained on what is kept of its own samples; rollouts
*by turns* give prompt k to rank k mod R.
"""

import statistics
import time

import torch

from bench import JsonFile, run, write_json
from runtime import deal
from train import Trainer

WORLDS = (2, 4, 8, 16, 32, 64)


class Recorder(Trainer):
    """Records what each update of a run is about to train on."""

    def __init__(self, *args):
        super().__init__(*args)
        self.updates = []  # (groups, prompt tokens, completion tokens) of the sequences
        self.sampled = []  # (expected tokens [K], tokens [K, G]) of each step's rollouts

    def roll_out(self, prompts, step, *purpose):
        batch = super().roll_out(prompts, step, *purpose)
        expected = self.history.relative_tokens(prompts, step)
        self.sampled.append((expected, batch.lengths))
        return batch

    def backward(self, full, keep, *args):
        kept = keep.flatten().nonzero()[:, 0]
        groups = kept // keep.shape[1]
        prompts = self.prompt_tokens[full.batch.prompts][groups]
        lengths = full.batch.lengths.flatten()[kept].long()
        self.updates.append((groups.tolist(), prompts.tolist(), lengths.tolist()))
        return super().backward(full, keep, *args)


def main(
    steps: int = 12,
    prompts: int = 256,
    long: int = 1000,
    flags: str = "",
    json_file: JsonFile = None,
) -> None:
    """Busiest rank over the mean, in forwarded tokens, for 2 to 64 ranks.

    Args:
        steps: of a run of pps on arithmetic-mixed
        prompts: candidates of a step
        long: median tokens of a second setting. Its lengths are log-normal, its keeps those of the
            run, and its prompts are not shared
        flags: more flags of train.py
        json_file: where to write the rows {setting, ranks, how, mean, worst}
    """
    args = ["--data", "arithmetic-mixed", "--prompts-per-step", str(prompts), "--steps", str(steps)]
    trainer, _ = run([*args, *flags.split()], Recorder)
    draw = torch.Generator().manual_seed(0)
    longer = [
        (groups, tokens, _long(len(groups), long, draw)) for groups, tokens, _ in trainer.updates
    ]
    width = trainer.model.config.hidden_size
    rows = []
    for setting, updates, share, hidden in (
        ("arithmetic-mixed", trainer.updates, trainer.cfg.share_prompts, width),
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
        for how, ratios in rollouts(trainer.sampled, world).items():
            row = {"setting": "rollouts", "ranks": world, "how": how}
            rows.append(row | {"mean": statistics.mean(ratios), "worst": max(ratios)})
            print("rollouts{ranks:>4d} {how:20s} {mean:.3f} ({worst:.3f})".format(**rows[-1]))
    write_json(json_file, rows)


def rollouts(sampled, world: int) -> dict[str, list[float]]:
    """Busiest rank over the mean in each step's rollouts, in tokens: by turns, and dealt; the
    expected ones of the deal; and the actual ones had the deal known them."""
    found = {"by turns": [], "dealt": [], "dealt, expected": [], "dealt, foreknown": []}
    for expected, tokens in sampled:
        K, G = tokens.shape
        groups = tokens.sum(dim=1)
        to = lambda sizes: deal.rollouts(sizes.tolist(), G, world, whole=False)  # noqa: B023
        evenly = (expected / G)[:, None].expand(K, G)
        turns = (torch.arange(K) % world)[:, None].expand(K, G)
        for how, ranks, load in (
            ("by turns", turns, tokens), ("dealt", to(expected), tokens),
            ("dealt, expected", to(expected), evenly), ("dealt, foreknown", to(groups), tokens),
        ):  # fmt: skip
            loads = torch.bincount(ranks.flatten(), load.flatten(), minlength=world)
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
