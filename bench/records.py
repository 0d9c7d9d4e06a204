"""
What a race's runs were: their records, and the tables and pictures that are made from them.

A record is what is kept of one run (`read_record`). Tables and pictures need nothing else, so they
also work on committed records:

    from bench import records
    runs = records.load(Path("runs/race.jsonl"))
    records.draw(runs).savefig("race.png")
"""

import itertools
import json
import math
import random
import statistics
from pathlib import Path

from matplotlib.figure import Figure  # not pyplot, which would choose a backend for the caller
from matplotlib.ticker import EngFormatter

from bench import code
from runtime import log

REACHED = 0.98  # of GRPO's final accuracy
ABSOLUTE = 0.8  # a fixed accuracy
WINDOW = 3  # evaluations that are averaged
COLUMNS = (  # of log.jsonl that a record keeps
    "step_time", "tokens/generated", "tokens/trained",
    "kept/prompts", "kept/completions", "kept/tokens", "weight/ess", "eval/avg@4",
)  # fmt: skip


def read_record(out_dir: Path) -> dict:
    """What is kept of a run: {setting, row, seed, lr, threads, alone, columns}.

    Each column is a list with an entry for each step from 0 on, null if the log has none.
    """
    settings = json.loads((out_dir / "config.json").read_text())["config"]
    rows = log.read_rows(out_dir / "log.jsonl")
    columns = {name: [_short(row.get(name)) for row in rows] for name in COLUMNS}
    columns["step_time"][0] = 0.0
    run = {
        "setting": settings["data"],
        "row": out_dir.name.split("-seed")[0],
        "seed": settings["seed"],
        "lr": settings["lr"],
    }
    return run | json.loads((out_dir / "race.json").read_text()) | columns


def _short(value):
    return float(f"{value:.5g}") if isinstance(value, float) else value


def collect(folder: Path, lr: float | None = None) -> list[dict]:
    """The records of all finished runs in a folder at this --lr (None: train.py's own).

    An unfinished run has no final accuracy.
    """
    records = []
    for path in [path.parent for path in sorted(folder.glob("*/*/race.json"))]:
        if path.name.partition("-lr")[2] == (f"{lr:g}" if lr else ""):
            steps = json.loads((path / "config.json").read_text())["config"]["steps"]
            if log.read_rows(path / "log.jsonl")[-1]["step"] == steps:
                records.append(read_record(path))
    return records


def load(*files: Path) -> list[dict]:
    """The records of committed logs."""
    return [record for file in files for record in code.read(file)]


def smoothed(record: dict) -> list[tuple[int, float]]:
    """(step, mean of the last three evaluations up to it), without the base model's evaluation.

    The first two means are of fewer evaluations and do not count as reaching a target.
    """
    found = [(step, x) for step, x in enumerate(record["eval/avg@4"]) if x is not None]
    values = [value for _, value in found]
    means = []
    for number, (step, _) in enumerate(found):
        last = values[max(1, number - WINDOW + 1) : number + 1]
        means.append((step, statistics.mean(last or values[:1])))
    return means


def final(record: dict) -> float:
    """Mean of the last three evaluations."""
    return smoothed(record)[-1][1]


def reached(record: dict, accuracy: float) -> float:
    """The first step whose mean of three evaluations is at the accuracy; infinite if none is."""
    return next((s for s, value in smoothed(record)[WINDOW:] if value >= accuracy), math.inf)


def seconds(record: dict, records: list[dict]) -> list[float]:
    """Seconds of training [steps + 1] up to each step.

    They are the run's own if it was alone on the machine. Otherwise they are the mean, step by
    step, of the same row's runs that were; beyond their last step, the mean of their last ten.
    """
    own = [record]
    if not record["alone"]:
        same = lambda other: all(other[key] == record[key] for key in ("setting", "row"))
        own = [other for other in records if other["alone"] and same(other)]
    if not own:
        return [math.nan] * len(record["step_time"])
    columns = zip(*(run["step_time"] for run in own), strict=False)
    steps = [statistics.mean(column) for column in columns]
    steps += [statistics.mean(steps[-10:])] * (len(record["step_time"]) - len(steps))
    return list(itertools.accumulate(steps[: len(record["step_time"])]))


def tokens(record: dict) -> list[float]:
    """Tokens generated plus tokens trained on (with prompts), [steps + 1] up to each step.

    TRL's trainer reports only the former, which count twice.
    """
    pairs = zip(record["tokens/generated"], record["tokens/trained"], strict=True)
    return list(itertools.accumulate((a or 0) + (b or 0) for a, b in pairs))


# ---------------------------------------------------------------------------- tables


def interval(
    values: list[float], middle=statistics.median, draws: int = 10_000
) -> tuple[float, float, float]:
    """(middle, low, high): an average over seeds and its 95 % bootstrap interval."""
    rng = random.Random(0)
    found = sorted(middle(rng.choices(values, k=len(values))) for _ in range(draws))
    return middle(values), found[draws // 40], found[-1 - draws // 40]


def scales(records: list[dict]) -> dict:
    """The axes of the race: {name: function of a record that gives [steps + 1] figures}."""
    return {
        "steps": lambda run: range(len(run["step_time"])),
        "seconds": lambda run: seconds(run, records),
        "tokens": tokens,
    }


def summary(records: list[dict], against: str = "grpo") -> list[dict]:
    """The figures of each setting and row, paired with the GRPO runs of the same seeds.

    reached/* and absolute/* say when 0.98 of GRPO's final accuracy, and 0.8, are reached, on three
    axes. Ratios are the figure of the row `against`, with the same seed, over the row's: 2 is twice
    as soon, 0 is never, and infinite is never for the row `against` alone. Triples are (middle,
    low, high) over seeds: medians of ratios, means of differences.
    """
    found = []
    found_by = {(run["setting"], run["row"], run["seed"]): run for run in records}
    twin = lambda run, row: found_by.get((run["setting"], row, run["seed"]))
    settings = dict.fromkeys(run["setting"] for run in records)
    for setting, name in itertools.product(settings, COLORS):
        runs = [run for run in records if (run["setting"], run["row"]) == (setting, name)]
        runs = [run for run in runs if twin(run, "grpo") and twin(run, against)]
        if runs:
            baselines, rivals = ([twin(run, row) for run in runs] for row in ("grpo", against))
            row = {"setting": setting, "row": name, "seeds": len(runs)}
            row |= _targets(runs, baselines, rivals, scales(records))
            found.append(row | _averages(setting, runs, baselines, records))
    return found


def _targets(runs: list[dict], baselines: list[dict], rivals: list[dict], axes: dict) -> dict:
    """When each target of the baselines is reached on each axis, and how much later by rivals."""

    def cost(run, axis, accuracy):
        step = reached(run, accuracy)
        return axes[axis](run)[step] if step < math.inf else math.inf

    figures = {}
    for goal, axis in itertools.product(("reached", "absolute"), axes):
        costs, ratios = [], []
        for run, baseline, rival in zip(runs, baselines, rivals, strict=True):
            accuracy = REACHED * final(baseline) if goal == "reached" else ABSOLUTE
            own = cost(run, axis, accuracy)
            costs.append(own)
            ratios.append(cost(rival, axis, accuracy) / own if own < math.inf else 0.0)
        figures[f"{goal}/{axis}"] = statistics.median(costs)
        figures[f"{goal}/{axis}_ratio"] = interval(ratios)
    return figures


def _averages(setting: str, runs: list[dict], baselines: list[dict], records: list[dict]) -> dict:
    """Accuracy at the end and at equal time, seconds per step, and what was kept."""
    pairs = zip(runs, baselines, strict=True)
    gaps = [final(run) - final(baseline) for run, baseline in pairs]
    time_limit = min(seconds(run, records)[-1] for run in records if run["setting"] == setting)

    def in_time(run):
        spent = seconds(run, records)
        return [value for step, value in smoothed(run) if spent[step] <= time_limit][-1]

    def per_step(run):
        return seconds(run, records)[-1] / (len(run["step_time"]) - 1)

    figures = {
        "final": statistics.mean(map(final, runs)),
        "final_gap": interval(gaps, statistics.mean),
        "at_equal_time": statistics.mean(map(in_time, runs)),
        "seconds_per_step": statistics.mean(map(per_step, runs)),
    }
    for column in ("kept/prompts", "kept/tokens", "weight/ess"):
        values = [value for run in runs for value in run[column] if value is not None]
        figures[column] = statistics.mean(values) if values else math.nan
    peaks = [run["peak_gib"] for run in runs if "peak_gib" in run]
    return figures | {"peak_gib": max(peaks, default=math.nan)}


def table(rows: list[dict], setting: str) -> str:
    """A setting's rows of `summary`, as Markdown."""

    def triple(values, digits=2):
        return "{1:.{0}f} ({2:.{0}f} to {3:.{0}f})".format(digits, *values)

    def spent(value):
        return f"{value:.0f} s" if value < math.inf else "never"

    columns = {
        "": lambda row: row["row"],
        "seeds": lambda row: str(row["seeds"]),
        f"to {REACHED} of GRPO's final": lambda row: spent(row["reached/seconds"]),
        "speed-up (95 %)": lambda row: triple(row["reached/seconds_ratio"]),
        "steps": lambda row: f"{row['reached/steps']:.0f}",
        "fewer tokens by": lambda row: triple(row["reached/tokens_ratio"]),
        f"to {ABSOLUTE}": lambda row: spent(row["absolute/seconds"]),
        "speed-up": lambda row: triple(row["absolute/seconds_ratio"]),
        "final accuracy": lambda row: f"{row['final']:.3f}",
        "minus GRPO's (95 %)": lambda row: triple(row["final_gap"], 3),
        "at equal time": lambda row: f"{row['at_equal_time']:.3f}",
        "s / step": lambda row: f"{row['seconds_per_step']:.2f}",
        "prompts kept": lambda row: f"{row['kept/prompts']:.2f}",
        "tokens kept": lambda row: f"{row['kept/tokens']:.2f}",
        "ESS": lambda row: f"{row['weight/ess']:.0f}",
        "GiB": lambda row: f"{row['peak_gib']:.2f}",
    }
    cells = [list(columns), ["---"] * len(columns)]
    for row in rows:
        if row["setting"] == setting:
            cells.append([cell(row) for cell in columns.values()])
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join("| " + " | ".join(map(str.ljust, line, widths)) + " |" for line in cells)


# ---------------------------------------------------------------------------- pictures


COLORS = {  # in the order of the tables: the race's ROWS and BEST, and trl; best_* is dashed
    "grpo": "#000000",
    "grpo_zero": "#999999",
    "best_grpo": "#000000",
    "cppo": "#D55E00",
    "pods": "#999933",
    "cppo_allocated": "#E69F00",
    "greso": "#56B4E9",
    "dynamic": "#882255",
    "mopps": "#44AA99",
    "dppo": "#0072B2",
    "dppo_floor": "#CC79A7",
    "pps": "#009E73",
    "best_pps": "#005F45",
    "uniform": "#F0E442",
    "trl": "#8B4513",
}
OTHERS, OTHERS_COLOR = "other methods", "#C4C4C4"
GOAL = f"{REACHED} of grpo's final"


def draw(
    records: list[dict], axis: str = "seconds", rows=tuple(COLORS), colored=tuple(COLORS)
) -> Figure:
    """Accuracy (means of three evaluations) over seconds, tokens or steps, a panel per setting.

    Seeds are thin, their mean at each step is thick, a single seed is in between, and 0.98 of
    GRPO's final accuracy is dotted. Rows that are not `colored` are grey, without their seeds.
    Lines start with the base model's evaluation and go on from the third one. Panels end where the
    last colored row does, but at most at twice GRPO's end.
    """
    settings = list(dict.fromkeys(record["setting"] for record in records))
    figure = Figure(figsize=(5.2 * len(settings) + 2, 3.6), dpi=110, layout="constrained")
    scale = scales(records)[axis]
    panels = figure.subplots(1, len(settings), sharey=True, squeeze=False)[0]
    lines = {}  # of the legend, by name
    for panel, setting in zip(panels, settings, strict=True):
        here = [record for record in records if record["setting"] == setting]
        for name in rows:
            runs = [run for run in here if run["row"] == name]
            lines |= _draw_row(panel, runs, scale, name, name in colored)
        end = 1.05 * max(scale(run)[-1] for run in here if run["row"] in {*rows} & {*colored})
        if grpo := [run for run in here if run["row"] == "grpo"]:
            goal = statistics.mean(REACHED * final(run) for run in grpo)
            lines[GOAL] = panel.axhline(goal, color="#000000", ls=":", lw=1)
            end = min(end, 2 * max(scale(run)[-1] for run in grpo))
        xlabel = "seconds of training" if axis == "seconds" else axis
        panel.set(title=setting, xlabel=xlabel, xlim=(0, end))
        if axis == "tokens":
            panel.xaxis.set_major_formatter(EngFormatter(sep=""))  # 1.5M
        panel.grid(alpha=0.2)
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("avg@4, held out (mean of 3 evaluations)")

    def label(name):
        own = [run["setting"] for run in records if run["row"] == name]
        counts = [own.count(setting) for setting in settings]
        return f"{name} ({', '.join(map(str, counts))})" if any(counts) else name

    names = [name for name in (*COLORS, OTHERS, GOAL) if name in lines]
    style = {"title": "method (seeds)", "frameon": False, "loc": "outside right center"}
    figure.legend([lines[name] for name in names], map(label, names), fontsize=9, **style)
    return figure


def _draw_row(panel, runs: list[dict], scale, name: str, colored: bool) -> dict:
    """Draw the lines of a row: its seeds, and their mean. Returns {name in the legend: line}."""
    lines, color = [], COLORS[name] if colored else OTHERS_COLOR
    for run in runs:
        points = smoothed(run)[:1] + smoothed(run)[WINDOW:]
        lines.append([(scale(run)[step], value) for step, value in points])
        if colored:
            panel.plot(*zip(*lines[-1], strict=True), color=color, lw=0.5, alpha=0.7)
    if not lines:
        return {}
    columns = zip(*lines, strict=False)
    mean = [tuple(map(statistics.mean, zip(*points, strict=True))) for points in columns]
    style = {"ls": "--" if name.startswith("best_") else "-", "zorder": 2 if colored else 1}
    style["lw"] = 2 if len(runs) > 1 and colored else 1.2
    (line,) = panel.plot(*zip(*mean, strict=True), color=color, **style)
    return {name if colored else OTHERS: line}
