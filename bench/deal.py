"""
How evenly an update's work is spread over ranks: `python -m bench deal`.

The keeps and lengths of real steps on one rank are dealt to many simulated ones. *Where sampled* is
what an update would do if each rank trained on what is kept of its own samples.
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
    flags: str = "",
    long: int = 1000,
    json_file: JsonFile = None,
) -> None:
    """Busiest rank over the mean, in forwarded tokens, for 2 to 64 ranks.

    Args:
        steps: of a run of pps on arithmetic-mixed
        prompts: candidates of a step
        flags: more flags of train.py
        long: median tokens of a second setting, whose lengths are log-normal and whose keeps are
            those of the run; its prompts are not shared
        json_file: where to write the rows {setting, ranks, how, mean, worst}
    """
    args = ["--data", "arithmetic-mixed", "--prompts-per-step", str(prompts), "--steps", str(steps)]
    trainer, _ = run([*args, *flags.split()], Recorder)
    hidden = trainer.model.config.hidden_size
    draw = torch.Generator().manual_seed(0)
    rows = []
    for setting, share in (("arithmetic-mixed", trainer.cfg.share_prompts), ("long", False)):
        updates = trainer.updates
        if setting == "long":
            updates, hidden = [(g, p, _long(len(g), long, draw)) for g, p, _ in updates], 1024
        for world in WORLDS:
            of = {"where sampled": [], "dealt": [], "prompt tokens twice": []}
            for groups, prompt, completion in updates:
                here = [group % world for group in groups]
                there = deal.deal(groups, prompt, completion, world, share, hidden)
                for how, ranks in (("where sampled", here), ("dealt", there)):
                    of[how].append(spread(groups, prompt, completion, ranks, world, share))
                totals = [
                    sum(tokens(groups, prompt, completion, r, world, share)) for r in (here, there)
                ]
                of["prompt tokens twice"].append(totals[1] / totals[0] - 1 + 1)
            for how, found in of.items():
                row = {"setting": setting, "ranks": world, "how": how}
                rows.append(row | {"mean": statistics.mean(found), "worst": max(found)})
    print(f"{'':18s}{'ranks':>6s}{'where sampled':>20s}{'dealt':>16s}{'tokens, dealt':>16s}")
    for first, second, third in zip(rows[::3], rows[1::3], rows[2::3], strict=True):
        print(
            f"{first['setting']:18s}{first['ranks']:6d}{first['mean']:12.2f} ({first['worst']:.2f})"
            f"{second['mean']:9.3f} ({second['worst']:.3f}) {third['mean']:9.3f}"
        )
    groups = [number // 16 for number in range(65_536)]
    lengths = _long(len(groups), long, draw)
    started = time.perf_counter()
    deal.deal(groups, [100] * len(groups), lengths, 1024, False, 1024)
    print(f"65,536 completions to 1,024 ranks: {time.perf_counter() - started:.2f} s")
    write_json(json_file, rows)


def tokens(groups, prompts, completions, ranks, world: int, share: bool) -> list[int]:
    """Tokens that each rank forwards; with `share`, a prompt once for all of its completions."""
    found, seen = [0] * world, set()
    for group, prompt, completion, rank in zip(groups, prompts, completions, ranks, strict=True):
        found[rank] += completion - 1
        if not share or (rank, group) not in seen:
            found[rank] += prompt
        seen.add((rank, group))
    return found


def spread(*args) -> float:
    """The tokens of the busiest rank over the mean."""
    found = tokens(*args)
    return max(found) / statistics.mean(found)


def _long(number: int, median: int, generator) -> list[int]:
    """Log-normal lengths in tokens, at most 16 times the median."""
    lengths = median * torch.randn(number, generator=generator).exp()
    return lengths.clamp(1, 16 * median).long().tolist()
