"""
run.png: a run's log.jsonl in twelve panels. The last row shows what was pruned.

    python -m runtime.plot out

A training run draws it at its end. This command redraws it at any time, even during the run.
"""

import json
import sys
from pathlib import Path

from matplotlib.figure import Figure  # not pyplot, whose backend is the caller's

CURVES = ("#0072B2", "#D55E00", "#009E73", "#000000")  # of Okabe and Ito, for the colour-blind
LEGEND = {"frameon": False, "fontsize": "small", "handlelength": 1.2, "columnspacing": 1}


def draw_run(out_dir: Path) -> None:
    """Draw run.png, one unit per panel: reward by step and by time, seconds and density; groups,
    lengths, entropy and gradient norm; the prompts' history, what was kept, and the largest
    prompt weight."""
    lines = (out_dir / "log.jsonl").read_text().split("\n")[:-1]  # without a half-written last line
    rows = [json.loads(line) for line in lines]
    cfg = json.loads((out_dir / "config.json").read_text())["config"]
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
        axes[2, 0]: ("share of all prompts", {
            "history/never_rolled_out": "never rolled out",
            "history/dull": "last group had equal rewards",
        }),
        axes[2, 1]: ("share kept", {
            "kept/dull_prompts": "prompts whose last group had equal rewards",
            "kept/other_prompts": "other prompts",
        }),
        axes[2, 2]: ("share", {
            "kept/prompts": "prompts kept",
            "kept/completions": "completions kept",
            "kept/tokens": "tokens kept",
        }),
        axes[2, 3]: ("largest prompt weight", {"weight/prompt_max": None}),
    }  # fmt: skip
    for axis, (name, curves) in panels.items():
        for key, label in curves.items():
            series(axis, rows, key, label)
        axis.set(ylabel=name, ylim=(0, 1.05) if name.startswith("share") else (0, None))
    for axis in axes.flat:
        if axis.get_legend_handles_labels()[0]:  # above the panel, where no curve is
            columns = 3 if axis is axes[0, 2] else 2
            axis.legend(ncols=columns, bbox_to_anchor=(0, 1), loc="lower left", **LEGEND)
    figure.suptitle("{method} on {data}: {model}, seed {seed}".format(**cfg))
    figure.savefig(out_dir / "run.png", dpi=100)


def series(axis, rows, key, label=None, x="step", **style) -> None:
    """One curve of the rows that have the key."""
    points = [(row[x], row[key]) for row in rows if row.get(key) is not None]
    if points:
        axis.plot(*zip(*points, strict=True), label=label, **style)


def draw_reward(axes, rows: list[dict]) -> None:
    """Reward and evaluation, by step and by seconds of training, without evaluations."""
    seconds = 0.0
    for row in rows:
        row["seconds of training"] = seconds = seconds + row.get("step_time", 0.0)
    for axis, x in zip(axes, ("step", "seconds of training"), strict=True):
        series(axis, rows, "reward", "reward (train)", x)
        series(axis, rows, "eval/avg@4", "avg@4 (held out)", x, marker="o")
        axis.set(xlabel=x, ylabel="reward (train), avg@4 (held out)")
        low, high = axis.get_ylim()
        axis.set_ylim(min(0, low), max(1.05, high))  # a reward may lie outside 0 to 1


if __name__ == "__main__":
    if len(sys.argv) != 2 or not (Path(sys.argv[1]) / "log.jsonl").exists():
        raise SystemExit("usage: python -m runtime.plot FOLDER, the --out-dir of a run")
    draw_run(Path(sys.argv[1]))
    print(Path(sys.argv[1]) / "run.png")
