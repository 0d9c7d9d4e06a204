"""
The tables and pictures of the pages, from the rows of their runs.

    python -m bench results

A difference or a ratio is paired by seed: all methods of a seed draw their prompts in the same
order. An interval is Student's t over seeds, 95 %.
"""

import math
import statistics
from pathlib import Path

from bench import COLORS, peers
from runtime import log

FOLDER = Path("runs")
TASKS = {  # task: (title, the accuracy that its runs raced to)
    "arithmetic": ("default task", 0.98), "arithmetic-mixed": ("mixed task", 0.95),
}  # fmt: skip
T95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)  # 1 to 9 degrees; more use the last


def main() -> None:
    """Print all tables, and draw the pictures into runs/."""
    for name, table in tables().items():
        print(f"\n{name}\n\n{table}")
    draw_peers(log.read_rows(peers.ROWS)).savefig(FOLDER / "peers.png")
    draw_public(log.read_rows(FOLDER / "public-steps.jsonl")).savefig(FOLDER / "public-steps.png")


def tables() -> dict[str, str]:
    return {
        "train.py and TRL": peers_table(log.read_rows(peers.ROWS)),
        "equal steps": steps_table(log.read_rows(FOLDER / "savings.jsonl")),
        "SmolLM2": steps_table(log.read_rows(FOLDER / "words.jsonl"), 0.28),
        "seconds to an accuracy": reach_table(log.read_rows(FOLDER / "reach.jsonl")),
        "adaptive over the best group size": law_table(log.read_rows(FOLDER / "law.jsonl")),
    }


# ---------------------------------------------------------------------------- train.py and TRL

LINES = {  # of the picture: the color of the rule; dashed are TRL's
    "TRL": ("none", ".--"), "TRL, DPPOTrainer": ("adaptive", ".--"),
    "train.py, grpo": ("none", ".-"), "train.py, nonzero": ("nonzero", ".-"),
    "train.py": ("adaptive", ".-"),
}  # fmt: skip


def peers_table(rows: list[dict]) -> str:
    """Markdown: seconds of a step, and until two accuracies; medians and ranges over seeds."""
    cells = []
    order = lambda row: ([*peers.ARMS].index(row["arm"]), row["group_size"])
    rows = sorted(rows, key=order)
    batch = lambda row: "" if row["group_size"] == 8 else f", groups of {row['group_size']}"
    named = [row | {"method": row["arm"] + batch(row)} for row in rows]
    for name, runs in by_method(named).items():
        line = [name, spread([row["curve"][-1][2] / peers.STEPS for row in runs.values()], 2)]
        for target in (0.95, 0.98):
            line.append(spread([seconds_to(row, target) for row in runs.values()]))
        rests = [row["rest"] for row in runs.values() if row["rest"]]
        cells.append([*line, spread(rests, 2) if rests else ""])
    head = ["", "CPU seconds a step", "to 0.95", "to 0.98", "rest"]
    return as_markdown(head, cells)


def draw_peers(rows: list[dict]):
    """Median accuracy over median seconds, a line for each arm of LINES."""
    figure, panel = new_figure((7, 3.8))
    for name, (color, style) in LINES.items():
        curves = [row["curve"] for row in rows if (row["arm"], row["group_size"]) == (name, 8)]
        points = [[*zip(*point, strict=True)] for point in zip(*curves, strict=True)]
        seconds = [statistics.median(times) for _steps, _accuracies, times in points]
        accuracies = [statistics.median(found) for _steps, found, _times in points]
        panel.plot(seconds, accuracies, style, color=COLORS[color], label=name)
    panel.set(xscale="log", xlabel="CPU seconds of training", ylabel="accuracy, held out")
    panel.set_xticks([5, 10, 20, 50, 100], ["5", "10", "20", "50", "100"])
    panel.legend(frameon=False)
    return figure


# ---------------------------------------------------------------------------- equal steps


def steps_table(rows: list[dict], target: float = 0.0) -> str:
    """Markdown: what each method did in its steps, and its accuracy minus the first one's; with a
    target also the seconds until it."""
    of_methods = by_method(rows)
    first = next(iter(of_methods.values()))
    cells = []
    for name, runs in of_methods.items():
        steps, seconds, sampled, trained = (
            statistics.mean(row[key] for row in runs.values())
            for key in ("made", "seconds", "sampled", "trained")
        )
        accuracy = interval([row["accuracy"] for row in runs.values()])
        gap = interval([row["accuracy"] - first[s]["accuracy"] for s, row in runs.items()])
        cells.append([
            name, f"{steps:.0f}", f"{seconds:.1f}", f"{trained / max(1, sampled):.2f}",
            show(accuracy), show(gap, "+"),
        ])  # fmt: skip
        if target:
            cells[-1].append(spread([seconds_to(row, target) for row in runs.values()]))
    head = ["method", "steps", "CPU seconds", "trained on", "accuracy", "minus the first"]
    if target:
        head.append(f"to {target}")
    return as_markdown(head, cells)


# ---------------------------------------------------------------------------- until an accuracy


def reach_table(rows: list[dict]) -> str:
    """Markdown: each method's speed to its task's target, over that of GRPO without zeros with the
    same batch. Names end in their batch."""
    cells = []
    for task, (title, target) in TASKS.items():
        runs_of = by_method([row for row in rows if row["setting"] == task])
        for name, runs in runs_of.items():
            others = runs_of[f"nonzero, {name.rpartition(', ')[2]}"]
            if runs is others:
                continue
            seeds = sorted(runs.keys() & others.keys())
            sides = [[side[seed] for seed in seeds] for side in (runs, others)]
            never, seconds = restricted(sides, target)
            rest = statistics.median(row["rest"] for row in sides[1])
            line = [f"{title}: {name}", f"{rest:.2f}", str(len(seeds)), "{} and {}".format(*never)]
            cells.append([*line, speed(*seconds)])
    head = ["", "rest", "pairs", "never arrived", "times as fast"]
    return as_markdown(head, cells)


def restricted(sides: list[list[dict]], target: float) -> tuple[list[int], list[list[float]]]:
    """How many runs of each side never arrived, and the seconds of all. They end where the first
    run gave up that never arrived, so that no pair has to be left out."""
    failed = [[row for row in side if math.isinf(seconds_to(row, target))] for side in sides]
    end = min((row["seconds"] for row in failed[0] + failed[1]), default=math.inf)
    seconds = [[min(seconds_to(row, target), end) for row in side] for side in sides]
    return [*map(len, failed)], seconds


def seconds_to(row: dict, target: float) -> float:
    """Seconds until a run's first evaluation with at least this accuracy, or infinity."""
    reached = (seconds for _step, accuracy, seconds in row["curve"] if accuracy >= target)
    return min(reached, default=math.inf)


def speed(times, others) -> str:
    """How many times as fast: the geometric mean over pairs, and its 95 % interval."""
    logs = [math.log(other / time) for time, other in zip(times, others, strict=True)]
    mean, half = interval(logs)
    low, high = math.exp(mean - half), math.exp(mean + half)
    return f"{math.exp(mean):.2f} ({low:.2f} to {high:.2f})"


# ---------------------------------------------------------------------------- the law


def law_table(rows: list[dict]) -> str:
    """Markdown: how many times as fast adaptive with its best group size is as GRPO without zeros
    with its own; in each task, and pooled over the seeds of both."""

    def best(*arm):
        """Times of the seeds, of the group size that failed least and then was fastest."""
        sizes = {
            row["group_size"]: [time or math.inf for time in row["times"]]
            for row in rows
            if (row["rest"], row["task"], row["method"]) == arm
        }
        order = lambda size: (sizes[size].count(math.inf), statistics.median(sizes[size]))
        return sizes[min(sizes, key=order)]

    cells = []
    for rest in sorted({row["rest"] for row in rows}):
        line, pooled = [f"{rest:g}"], ([], [])
        for task in TASKS:
            times, others = (best(rest, task, method) for method in ("adaptive", "nonzero"))
            line.append(speed(times, others))
            pooled = (pooled[0] + times, pooled[1] + others)
        cells.append([*line, speed(*pooled)])
    titles = [title for title, _target in TASKS.values()]
    return as_markdown(["rest", *titles, "both tasks"], cells)


# ---------------------------------------------------------------------------- public runs


def draw_public(rows: list[dict]):
    """The rest of published steps, a point each; hollow if its author reports a fault."""
    figure, panel = new_figure((7, 1.6))
    for number, row in enumerate(rows):
        face = "none" if row["fault"] else "C0"
        place = row["asynchronous"] + 0.2 * (number % 3 - 1)
        panel.plot(row["rest"], place, "o", color="C0", mfc=face)
    panel.set(xscale="log", xlabel="rest", ylim=(-0.6, 1.6))
    panel.set_yticks([0, 1], ["synchronous", "asynchronous"])
    panel.set_xticks([0.1, 0.5, 1, 2, 4], ["0.1", "0.5", "1", "2", "4"])
    panel.minorticks_off()
    return figure


# ---------------------------------------------------------------------------- rows and figures


def by_method(rows: list[dict]) -> dict[str, dict[int, dict]]:
    """{method: {seed: row}}, in the order of the rows."""
    found = {}
    for row in rows:
        found.setdefault(row["method"], {})[row["seed"]] = row
    return found


def interval(values: list[float]) -> tuple[float, float]:
    """(mean, half of its 95 % interval by Student's t); NaN where there are too few values."""
    if len(values) < 2:
        return values[0] if values else math.nan, math.nan
    error = statistics.stdev(values) / math.sqrt(len(values))
    return statistics.mean(values), error * T95[min(len(values) - 2, len(T95) - 1)]


def show(figures: tuple[float, float], sign: str = "") -> str:
    """mean ± half, as far as they are known."""
    mean, half = figures
    text = "" if math.isnan(mean) else f"{mean:{sign}.3f}"
    return text if math.isnan(half) else f"{text} ± {half:.3f}"


def spread(values: list[float], digits: int = 0) -> str:
    """median (range)."""
    numbers = (statistics.median(values), min(values), max(values))
    middle, low, high = ("never" if math.isinf(n) else f"{n:.{digits}f}" for n in numbers)
    return middle if low == high else f"{middle} ({low} to {high})"


def as_markdown(head: list[str], cells: list[list[str]]) -> str:
    rows = [head, ["---"] * len(head), *cells]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def new_figure(size: tuple[float, float]):
    """(figure, panel)."""
    from matplotlib.figure import Figure  # not pyplot, whose backend is the caller's

    figure = Figure(figsize=size, dpi=120, layout="constrained")
    panel = figure.subplots()
    panel.grid(alpha=0.2)
    panel.spines[["top", "right"]].set_visible(False)
    return figure, panel
