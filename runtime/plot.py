"""
run.png: a run's log.jsonl in pictures. Those of pruning are there if something was pruned.

    python -m runtime.plot out

A training run draws it at its end. This command redraws it at any time, even during the run.
"""

import json
import math
import sys
from pathlib import Path

from runtime import console

CURVES = ("#0072B2", "#D55E00", "#009E73")  # of Okabe and Ito, for the colour-blind
LEGEND = {"ncols": 3, "frameon": False, "fontsize": "small", "columnspacing": 1}
REWARD = {"reward": "train", "eval/avg@4": "held out, avg@4"}
HELD_OUT = {"eval/avg@4": None}
# The y axis of a panel: {key of a row: name of its curve}. All begin at 0.
OF_ALL = {
    "seconds per step": {f"time/{part}": part for part in ("rollout", "train", "score")},
    "share of dead groups": {"frac_reward_zero_std": None},
    "tokens per completion": {"completions/mean_length": None},
    "entropy, nats per token": {"entropy": None},
    "gradient norm, unclipped": {"grad_norm": None},
}
OF_PRUNED = {
    "share kept": {"kept/completions": "completions", "kept/tokens": "tokens"},
    "largest weight": {"weight/max": None},
}
OF_PRUNED_PROMPTS = {
    "share kept": {"kept/prompts": "prompts", **OF_PRUNED["share kept"]},
    "largest weight": {"weight/max": "of a completion", "weight/prompt_max": "of a prompt"},
    "share of all prompts": {"history/never_rolled_out": "not yet seen", "history/dead": "dead"},
    "share of prompts kept": {"kept/dead_prompts": "dead", "kept/other_prompts": "others"},
}


def draw_run(out_dir: Path) -> None:
    """Draw run.png: reward by step and by time, then the panels above. In a dead group all rewards
    are equal; a prompt is dead if its last group was."""
    # Not pyplot, whose backend is the caller's. Here, because a run goes on where it is missing.
    from matplotlib.figure import Figure

    lines = (out_dir / "log.jsonl").read_text().split("\n")[:-1]  # without a half-written last line
    rows = [json.loads(line) for line in lines]
    cfg = json.loads((out_dir / "config.json").read_text())["config"]
    seconds = 0.0  # of training, without evaluations
    for row in rows:
        row["seconds of steps"] = seconds = seconds + row.get("step_time", 0.0)
    panels = [("step", "reward", REWARD)]
    if any("eval/avg@4" in row for row in rows):
        panels.append(("seconds of steps", "reward, held out", HELD_OUT))
    panels += [("step", name, curves) for name, curves in panels_of(rows).items()]

    height = math.ceil(len(panels) / 3)  # in rows of at most three
    figure = Figure(figsize=(9.5, 2.8 * height), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.1, h_pad=0.1)
    title = "{method} on {data}: {model}, seed {seed}. In a dead group all rewards are equal."
    figure.suptitle(title.format(**cfg), fontsize="medium")
    for number, part in enumerate(figure.subfigures(height, 1, squeeze=False)[:, 0]):
        first, end = (len(panels) * place // height for place in (number, number + 1))
        axes = part.subplots(1, end - first, squeeze=False)[0]
        for axis, panel in zip(axes, panels[first:end], strict=True):
            draw_panel(axis, rows, *panel)
    figure.savefig(out_dir / "run.png", dpi=100)


def panels_of(rows: list[dict]) -> dict[str, dict]:
    """The panels that a run needs, beside those of its reward."""
    pruned = {
        level: any((row.get(f"kept/{level}") or 1) < 1 for row in rows)
        for level in ("prompts", "completions")
    }
    panels = OF_ALL
    if pruned["completions"]:
        panels = panels | OF_PRUNED
    if pruned["prompts"]:
        panels = panels | OF_PRUNED_PROMPTS
    return panels


def draw_panel(axis, rows: list[dict], x: str, name: str, curves: dict) -> None:
    """The curves of one panel over `x`, a key of the rows, each where its figure exists."""
    axis.set_prop_cycle(color=CURVES)
    axis.spines[["top", "right"]].set_visible(False)
    for key, label in curves.items():
        points = [(row[x], row[key]) for row in rows if row.get(key) is not None]
        if points:
            marker = "o" if key.startswith("eval/") else None
            axis.plot(*zip(*points, strict=True), label=label, marker=marker)
    axis.set(xlabel=x, ylabel=name)
    low, high = axis.get_ylim()
    least = 1.05 if name.startswith(("share", "reward")) else 0
    axis.set_ylim(min(0, low) if name.startswith("reward") else 0, max(least, high))
    if axis.get_legend_handles_labels()[0]:  # above the panel, where no curve is
        axis.legend(bbox_to_anchor=(0, 1), loc="lower left", **LEGEND)


def main(folder: Path) -> None:
    """Draw a run's picture, and print where it is. SystemExit says why there is none."""
    try:
        draw_run(folder)
    except (ImportError, OSError, ValueError, KeyError, TypeError) as problem:
        kind = type(problem).__name__
        print(f"error: {folder} is not drawn ({kind}: {problem})", file=sys.stderr)
        sys.exit(2)
    print(folder / "run.png")


if __name__ == "__main__":
    console.result()
    main(Path(*sys.argv[1:]))
