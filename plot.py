"""
run.png: what a run's log.jsonl says, in nine pictures; the last three are of the prompt level.

    python plot.py out

A training run draws it at its end; this redraws it at any time, also while the run goes on.
"""

import json
import math
import sys
from pathlib import Path

from matplotlib.figure import Figure  # not pyplot, whose backend is the caller's

COLORS = {  # one for each rule, in every picture (Okabe and Ito's, safe for the colour-blind)
    "none": "#000000",
    "zero": "#999999",
    "uniform": "#56B4E9",
    "dppo": "#0072B2",
    "pps": "#009E73",
    "cppo": "#D55E00",
    "cppo_batch": "#E69F00",
    "dppo_floor": "#CC79A7",
}


BINS = ("never rolled out", "all wrong", "up to 1/4 right", "up to 1/2", "up to 3/4", "above 3/4", "all right")
BIN_COLORS = ("#DDDDDD", "#762A83", "#AF8DC3", "#E7D4E8", "#D9F0D3", "#7FBF7B", "#1B7837")  # of the last pass rate


def pass_rates(steps: list[dict]) -> list[list[float]]:
    """[BINS][steps]: shares of all prompts by their last pass rate, as known before each step."""
    return [
        [row["history/pass_rates"][bin_] / sum(row["history/pass_rates"]) for row in steps] for bin_ in range(len(BINS))
    ]


def kept_by_pass_rate(steps: list[dict]) -> list[list[float]]:
    """[BINS][steps]: share kept of a bin's candidates, over the last 16 steps; NaN where these held fewer than 8."""

    def share(bin_, end):
        recent = steps[max(0, end - 16) : end]
        seen = sum(row["history/candidates_by_pass_rate"][bin_] for row in recent)
        return sum(row["history/kept_by_pass_rate"][bin_] for row in recent) / seen if seen >= 8 else math.nan

    return [[share(bin_, end) for end in range(1, len(steps) + 1)] for bin_ in range(len(BINS))]


def draw_run(out_dir: Path) -> None:
    """run.png from log.jsonl: reward and evaluation by step and by time, what was kept, where the time went, what is
    known of the prompts and what the prompt rule makes of it."""
    rows = [json.loads(line) for line in (out_dir / "log.jsonl").read_text().splitlines()]
    cfg = json.loads((out_dir / "config.json").read_text())["config"]
    steps = [row for row in rows if row["step"] > 0]
    seconds = {0: 0.0}
    for row in steps:
        seconds[row["step"]] = seconds[row["step"] - 1] + row["step_time"]

    def series(axes, key, label=None, x=lambda row: row["step"], source=steps, **style):
        points = [(x(row), row[key]) for row in source if row.get(key) is not None]
        if points:
            axes.plot(*zip(*points, strict=True), label=label or key, **style)

    figure = Figure(figsize=(15, 12), layout="constrained")
    axes = figure.subplots(3, 3)
    for axis, x, unit in (
        (axes[0, 0], lambda row: row["step"], "step"),
        (axes[0, 1], lambda row: seconds[row["step"]], "seconds, evaluation not counted"),
    ):
        series(axis, "reward", "reward, training batch", x=x, color="#9ecae1")
        series(axis, "eval/avg@4", "avg@4, held out", x=x, source=rows, color="#d95f02", marker="o")
        axis.set(xlabel=unit, ylabel="accuracy", ylim=(0, 1))
    for key in ("kept/prompts", "kept/completions", "kept/tokens", "pack/density", "frac_reward_zero_std"):
        series(axes[0, 2], key)
    axes[0, 2].set(xlabel="step", ylabel="share", ylim=(0, 1.05))
    for key in ("time/rollout", "time/train", "time/score"):
        series(axes[1, 0], key)
    axes[1, 0].set(xlabel="step", ylabel="seconds a step", ylim=(0, None))
    series(axes[1, 1], "completions/mean_length", color="#1b9e77")
    axes[1, 1].set(xlabel="step", ylabel="tokens in a completion", ylim=(0, None))
    series(axes[1, 2], "entropy", "entropy, nats a token")
    series(axes[1, 2], "grad_norm", "gradient norm before clipping")
    axes[1, 2].set(xlabel="step", ylim=(0, None))
    numbers = [row["step"] for row in steps]
    if steps:
        axes[2, 0].stackplot(numbers, pass_rates(steps), labels=BINS, colors=BIN_COLORS)
    axes[2, 0].set(xlabel="step", ylabel="share of the prompts, by last pass rate", ylim=(0, 1))
    if steps and "history/kept_by_pass_rate" in steps[0]:
        for name, color, shares in zip(BINS, BIN_COLORS, kept_by_pass_rate(steps), strict=True):
            axes[2, 1].plot(numbers, shares, label=name, color=color, linewidth=2)
        axes[2, 1].set(xlabel="step", ylabel="kept, of the candidates of a bin (16 steps)", ylim=(0, 1.05))
    for key in ("history/never_rolled_out", "history/skipped_this_epoch"):
        series(axes[2, 2], key)
    series(axes[2, 2], "weight/prompt_max", color="#D55E00")
    axes[2, 2].set(xlabel="step", ylabel="share; largest prompt weight", ylim=(0, None))
    for axis in axes.flat:
        if axis.get_legend_handles_labels()[0]:
            axis.legend(frameon=axis is axes[2, 0], fontsize="small")
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(
        f"{cfg['loss']} loss on {cfg['data']}, {cfg['model']} model, seed {cfg['seed']}: prompts {cfg['prompt_rule']} "
        f"(rate {cfg['prompt_prune_rate']}), completions {cfg['completion_rule']} (rate {cfg['completion_prune_rate']})"
    )
    figure.savefig(out_dir / "run.png", dpi=100)


if __name__ == "__main__":
    if len(sys.argv) != 2 or not (Path(sys.argv[1]) / "log.jsonl").exists():
        raise SystemExit("usage: python plot.py FOLDER, the --out-dir of a run")
    draw_run(Path(sys.argv[1]))
    print(Path(sys.argv[1]) / "run.png")
