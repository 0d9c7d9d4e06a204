"""
run.png: a run's log.jsonl in twelve panels. The last row shows the prompt level.

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
BIN_COLORS = ("#BBBBBB", "#0D0887", "#6A00A8", "#A51F99", "#D04D73", "#EF7E50", "#FEBE2A")
CURVES = ("#0072B2", "#D55E00", "#009E73", "#000000")  # of a panel whose curves are not rules
LEGEND = {"frameon": False, "fontsize": "small", "handlelength": 1.2, "columnspacing": 1}


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
    """Draw run.png, one unit per panel: reward by step and by time, seconds and density; groups,
    lengths, entropy and gradient norm; the prompts' history, what was kept, and the weights."""
    lines = (out_dir / "log.jsonl").read_text().split("\n")[:-1]  # without a half-written last line
    rows = [json.loads(line) for line in lines]
    cfg = json.loads((out_dir / "config.json").read_text())["config"]
    steps = [row for row in rows if row["step"] > 0]
    figure = Figure(figsize=(16, 11), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.1, h_pad=0.1)
    axes = figure.subplots(3, 4)
    for axis in axes.flat:
        axis.set_prop_cycle(color=CURVES)
        axis.set_xlabel("step")
        axis.spines[["top", "right"]].set_visible(False)
    draw_reward(axes[0, :2], rows)
    panels = {  # axis: (its name, {key of a row: name of the curve}); every y axis begins at 0
        axes[0, 2]: ("seconds per step", {f"time/{x}": x for x in ("rollout", "train", "score")}),
        axes[0, 3]: ("share of the slots in use (density)", {"pack/density": None}),
        axes[1, 0]: ("share of groups with equal rewards", {"frac_reward_zero_std": None}),
        axes[1, 1]: ("tokens per completion, mean", {"completions/mean_length": None}),
        axes[1, 2]: ("entropy, nats per token", {"entropy": None}),
        axes[1, 3]: ("gradient norm before clipping", {"grad_norm": None}),
        axes[2, 2]: ("share", {
            "kept/prompts": "prompts kept",
            "kept/completions": "completions kept",
            "kept/tokens": "tokens kept",
            "history/skipped_this_epoch": "prompts skipped this epoch",
        }),
        axes[2, 3]: ("largest prompt weight", {"weight/prompt_max": None}),
    }  # fmt: skip
    for axis, (name, curves) in panels.items():
        for key, label in curves.items():
            series(axis, steps, key, label)
        axis.set(ylabel=name, ylim=(0, 1.05) if name.startswith("share") else (0, None))
    draw_prompts(figure, axes[2, :2], steps)
    for axis in axes.flat:
        if axis.get_legend_handles_labels()[0]:  # above the panel, where no curve is
            columns = 3 if axis is axes[0, 2] else 2
            axis.legend(ncols=columns, bbox_to_anchor=(0, 1), loc="lower left", **LEGEND)
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
        axis.plot(*zip(*points, strict=True), label=label, **style)


def draw_reward(axes, rows: list[dict]) -> None:
    """Reward and evaluation, by step and by seconds."""
    steps = [row for row in rows if row["step"] > 0]
    seconds = {0: 0.0}
    for row in steps:
        seconds[row["step"]] = seconds[row["step"] - 1] + row["step_time"]
    units = {
        "step": lambda row: row["step"],
        "seconds of training, without evaluations": lambda row: seconds[row["step"]],
    }
    for axis, (unit, x) in zip(axes, units.items(), strict=True):
        series(axis, steps, "reward", "reward (train)", x)
        series(axis, rows, "eval/avg@4", "avg@4 (held out)", x, marker="o")
        axis.set(xlabel=unit, ylabel="reward (train), avg@4 (held out)")
        low, high = axis.get_ylim()
        axis.set_ylim(min(0, low), max(1.05, high))  # a reward may lie outside 0 to 1


def draw_prompts(figure, axes, steps: list[dict]) -> None:
    """The prompts' last pass rates, and what was kept of each bin."""
    axes[0].set(ylabel="share of the prompts", ylim=(0, 1))
    axes[1].set(ylabel="share kept, over 16 steps", ylim=(0, 1.05))
    if steps:
        numbers = [row["step"] for row in steps]
        bands = axes[0].stackplot(numbers, pass_rates(steps), colors=BIN_COLORS)
        title = "the two panels above: prompts by their last pass rate"
        figure.legend(bands, BINS, title=title, ncols=7, loc="outside lower left", **LEGEND)
        if "history/kept_by_pass_rate" in steps[0]:
            for color, shares in zip(BIN_COLORS, kept_by_pass_rate(steps), strict=True):
                axes[1].plot(numbers, shares, color=color, linewidth=2)


if __name__ == "__main__":
    if len(sys.argv) != 2 or not (Path(sys.argv[1]) / "log.jsonl").exists():
        raise SystemExit("usage: python -m runtime.plot FOLDER, the --out-dir of a run")
    draw_run(Path(sys.argv[1]))
    print(Path(sys.argv[1]) / "run.png")
