"""
run.png: a run's log.jsonl in nine pictures. The last three show the prompt level.

    python -m runtime.plot out

A training run draws it at its end. This command redraws it at any time, even during the run.
"""

import json
import math
import sys
from pathlib import Path

from matplotlib.figure import Figure  # not pyplot, whose backend is the caller's

COLORS = {  # of each rule in every picture; safe for colour-blind readers (Okabe and Ito)
    "none": "#000000",
    "zero": "#999999",
    "uniform": "#56B4E9",
    "dppo": "#0072B2",
    "pps": "#009E73",
    "cppo": "#D55E00",
    "pods": "#999933",
    "cppo_batch": "#E69F00",
    "dppo_floor": "#CC79A7",
}
BINS = (  # of a prompt's last pass rate
    "never rolled out", "all wrong", "up to 1/4 right", "up to 1/2", "up to 3/4", "above 3/4",
    "all right",
)  # fmt: skip
BIN_COLORS = ("#DDDDDD", "#762A83", "#AF8DC3", "#E7D4E8", "#D9F0D3", "#7FBF7B", "#1B7837")


def pass_rates(steps: list[dict]) -> list[list[float]]:
    """[BINS][steps]: shares of all prompts by their last pass rate, as known before each step."""
    counts = [row["history/pass_rates"] for row in steps]
    return [[count[bin_] / sum(count) for count in counts] for bin_ in range(len(BINS))]


def kept_by_pass_rate(steps: list[dict]) -> list[list[float]]:
    """[BINS][steps]: the share of a bin's candidates that was kept over the last 16 steps; NaN if
    there were fewer than 8."""

    def share(bin_, end):
        recent = steps[max(0, end - 16) : end]
        seen = sum(row["history/candidates_by_pass_rate"][bin_] for row in recent)
        kept = sum(row["history/kept_by_pass_rate"][bin_] for row in recent)
        return kept / seen if seen >= 8 else math.nan

    return [[share(bin_, end) for end in range(1, len(steps) + 1)] for bin_ in range(len(BINS))]


def draw_run(out_dir: Path) -> None:
    """Draw run.png: accuracy by step and by time, what was kept, where the time went, the
    completions, and the prompts' history and how pruning used it."""
    lines = (out_dir / "log.jsonl").read_text().split("\n")[:-1]  # without a half-written last line
    rows = [json.loads(line) for line in lines]
    cfg = json.loads((out_dir / "config.json").read_text())["config"]
    steps = [row for row in rows if row["step"] > 0]
    figure = Figure(figsize=(15, 12), layout="constrained")
    axes = figure.subplots(3, 3)
    draw_accuracy(axes[0, :2], rows)
    shares = ("prompts", "completions", "tokens")
    for key in (*(f"kept/{name}" for name in shares), "pack/density", "frac_reward_zero_std"):
        series(axes[0, 2], steps, key)
    axes[0, 2].set(xlabel="step", ylabel="share", ylim=(0, 1.05))
    for key in ("time/rollout", "time/train", "time/score"):
        series(axes[1, 0], steps, key)
    axes[1, 0].set(xlabel="step", ylabel="seconds per step", ylim=(0, None))
    series(axes[1, 1], steps, "completions/mean_length", color="#1b9e77")
    axes[1, 1].set(xlabel="step", ylabel="tokens per completion", ylim=(0, None))
    series(axes[1, 2], steps, "entropy", "entropy, nats per token")
    series(axes[1, 2], steps, "grad_norm", "gradient norm before clipping")
    axes[1, 2].set(xlabel="step", ylim=(0, None))
    draw_prompts(axes[2], steps)
    for axis in axes.flat:
        if axis.get_legend_handles_labels()[0]:
            axis.legend(frameon=axis is axes[2, 0], fontsize="small")
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(
        f"{cfg['loss']} loss on {cfg['data']}, {cfg['model']} model, seed {cfg['seed']}: "
        f"prompts {cfg['prompt_rule']} (rate {cfg['prompt_prune_rate']}), "
        f"completions {cfg['completion_rule']} (rate {cfg['completion_prune_rate']})"
    )
    figure.savefig(out_dir / "run.png", dpi=100)


def series(axis, rows, key, label=None, x=lambda row: row["step"], **style) -> None:
    """One curve of the rows that have the key."""
    points = [(x(row), row[key]) for row in rows if row.get(key) is not None]
    if points:
        axis.plot(*zip(*points, strict=True), label=label or key, **style)


def draw_accuracy(axes, rows: list[dict]) -> None:
    """Reward and evaluation, by step and by seconds."""
    steps = [row for row in rows if row["step"] > 0]
    seconds = {0: 0.0}
    for row in steps:
        seconds[row["step"]] = seconds[row["step"] - 1] + row["step_time"]
    units = {
        "step": lambda row: row["step"],
        "seconds without evaluations": lambda row: seconds[row["step"]],
    }
    for axis, (unit, x) in zip(axes, units.items(), strict=True):
        series(axis, steps, "reward", "reward, training batch", x, color="#9ecae1")
        series(axis, rows, "eval/avg@4", "avg@4, held out", x, color="#d95f02", marker="o")
        axis.set(xlabel=unit, ylabel="accuracy", ylim=(0, 1))


def draw_prompts(axes, steps: list[dict]) -> None:
    """The prompts' last pass rates, what was kept of each bin, and the largest prompt weight."""
    numbers = [row["step"] for row in steps]
    if steps:
        axes[0].stackplot(numbers, pass_rates(steps), labels=BINS, colors=BIN_COLORS)
    axes[0].set(xlabel="step", ylabel="share of the prompts, by last pass rate", ylim=(0, 1))
    if steps and "history/kept_by_pass_rate" in steps[0]:
        for name, color, shares in zip(BINS, BIN_COLORS, kept_by_pass_rate(steps), strict=True):
            axes[1].plot(numbers, shares, label=name, color=color, linewidth=2)
        kept = "share kept of a bin's candidates (16 steps)"
        axes[1].set(xlabel="step", ylabel=kept, ylim=(0, 1.05))
    for key in ("history/never_rolled_out", "history/skipped_this_epoch"):
        series(axes[2], steps, key)
    series(axes[2], steps, "weight/prompt_max", color="#D55E00")
    axes[2].set(xlabel="step", ylabel="share; largest prompt weight", ylim=(0, None))


if __name__ == "__main__":
    if len(sys.argv) != 2 or not (Path(sys.argv[1]) / "log.jsonl").exists():
        raise SystemExit("usage: python -m runtime.plot FOLDER, the --out-dir of a run")
    draw_run(Path(sys.argv[1]))
    print(Path(sys.argv[1]) / "run.png")
