"""
run.png: a run's log.jsonl in pictures.

    python -m runtime.plot out             out/run.png, which a run also draws at its end
    python -m runtime.plot out out-grpo    out/compare.png: a second run, dashed, beside the first

Both work at any time, even during a run.
"""

import json
import sys
from pathlib import Path

from runtime import console, timer

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")  # of Okabe and Ito, for the colour-blind
LINES = ("-", "--")  # of the first run, and of the second
LEGEND = {"ncols": 2, "frameon": False, "fontsize": "small", "columnspacing": 1}
TITLE = "{method} on {data}: {model}, seed {seed}"
WORDS = "dead group: all rewards are equal; live token: of a completion whose term is not 0"
# (x axis, y axis, {key of a row: name of its curve}) of each panel. All begin at 0.
PANELS = [
    ("seconds of steps", "reward, held out", {"eval/avg@4": None}),
    ("step", "reward", {"reward": "train", "eval/avg@4": "held out, avg@4"}),
    ("step", "seconds per step", {
        "time/rollout": "rollout", "time/train": "train", "time/score": "score",
        "train on all": "train on all (estimate)",
    }),
    ("step", "share of live tokens kept", {"kept/live_tokens": None}),
    ("step", "largest weight", {"weight/max": "of completions", "weight/prompt_max": "of prompts"}),
    ("step", "share of dead groups", {"frac_reward_zero_std": None}),
    ("step", "tokens per completion", {"completions/mean_length": None}),
    ("step", "entropy, nats per token", {"entropy": None}),
    ("step", "gradient norm, unclipped", {"grad_norm": None}),
]  # fmt: skip


def draw_run(folder: Path, other: Path | None = None) -> Path:
    """Draw a run, or two beside each other; returns the picture's path."""
    # Not pyplot, whose backend is the caller's. Here, because a run goes on where it is missing.
    from matplotlib.figure import Figure

    runs = [read_run(one) for one in (folder, other) if one]
    titles = [TITLE.format(**cfg).replace("$", r"\$") for _, cfg in runs]  # $: mathematics
    if other:
        titles = [f"solid: {titles[0]}", f"dashed: {titles[1]}"]
    figure = Figure(figsize=(9.5, 8.4), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.1, h_pad=0.1)
    figure.suptitle("\n".join([*titles, WORDS]), fontsize="medium")
    for axis, panel in zip(figure.subplots(3, 3).flat, PANELS, strict=True):
        draw_panel(axis, [rows for rows, _ in runs], *panel)
    path = folder / ("compare.png" if other else "run.png")
    figure.savefig(path, dpi=100)
    return path


def read_run(folder: Path) -> tuple[list[dict], dict]:
    """(rows of a run's log, its settings). Rows get two more figures: the `seconds of steps` until
    then, and how long it would have taken to `train on all` that was sampled."""
    lines = (folder / "log.jsonl").read_text().split("\n")[:-1]  # without a half-written last line
    rows = [json.loads(line) for line in lines]
    recent = timer.recent_steps(rows)
    token = timer.seconds_of_a_token(recent) if recent else 0.0
    seconds = 0.0  # of training, without evaluations
    for row in rows:
        row["seconds of steps"] = seconds = seconds + row.get("step_time", 0.0)
        if row["step"] > 0:
            dropped = row["cost/sampled"] - row["cost/kept"]
            row["train on all"] = row["time/train"] + token * dropped
    return rows, json.loads((folder / "config.json").read_text())["config"]


def draw_panel(axis, runs: list[list[dict]], x: str, y: str, curves: dict) -> None:
    """Each curve where its figure exists: a colour for each, a kind of line for each run."""
    axis.spines[["top", "right"]].set_visible(False)
    for rows, line in zip(runs, LINES, strict=False):
        for (key, label), colour in zip(curves.items(), COLOURS, strict=False):
            points = [(row[x], row[key]) for row in rows if row.get(key) is not None]
            style = {"color": colour, "label": label if rows is runs[0] else None}
            if points:
                marker = "o" if key.startswith("eval/") else None
                axis.plot(*zip(*points, strict=True), line, marker=marker, **style)
    axis.set(xlabel=x, ylabel=y)
    low, high = axis.get_ylim()
    least = 1.05 if y.startswith(("share", "reward")) else 0
    axis.set_ylim(min(0, low) if y.startswith("reward") else 0, max(least, high))
    if axis.get_legend_handles_labels()[0]:  # above the panel, where no curve is
        axis.legend(bbox_to_anchor=(0, 1), loc="lower left", **LEGEND)


def main(*folders: str) -> None:
    """Draw a picture, and print where it is. SystemExit says why there is none."""
    try:
        print(draw_run(*map(Path, folders)))
    except (ImportError, OSError, ValueError, KeyError, TypeError) as problem:
        kind = type(problem).__name__
        print(f"error: {' '.join(folders)} not drawn ({kind}: {problem})", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    with console.result():
        main(*sys.argv[1:])
