"""
run.png: what a run's log.jsonl says, in six pictures.

    python plot.py out

A training run draws it at its end; this redraws it at any time, also while the run goes on.
"""

import json
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


def draw_run(out_dir: Path) -> None:
    """run.png from log.jsonl: reward and evaluation by step and by time, what was kept, where the time went."""
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

    figure = Figure(figsize=(15, 8), layout="constrained")
    axes = figure.subplots(2, 3)
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
    for axis in axes.flat:
        if axis.get_lines():
            axis.legend(frameon=False)
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
