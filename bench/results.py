"""
The tables and pictures of docs/results.md, from the rows of its runs.

    python -m bench results

A difference is paired by seed: all methods of a seed draw their prompts in the same order. An
interval is Student's t over seeds, 95 %.
"""

import itertools
import math
import statistics
from collections.abc import Iterable
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure  # not pyplot, which would choose a backend for the caller

from runtime import InputError, log

METHODS = {  # name in the tables and color in the pictures
    "grpo": ("GRPO", "#000000"),
    "grpo_zero": ("GRPO without zeros", "#777777"),
    "adaptive": ("adaptive", "#009E73"),
    "adaptive_prompts": ("adaptive, fewer prompts", "#E69F00"),
    "pps": ("pps", "#56B4E9"),
    "uniform": ("blind draws", "#CC79A7"),
    "dppo": ("dppo", "#0072B2"),
    "pods": ("PODS", "#999933"),
    "cppo": ("CPPO", "#D55E00"),
}
MARKERS = {  # so that colors need not be told apart
    "grpo": "o",
    "grpo_zero": "P",
    "adaptive": "D",
    "adaptive_prompts": "d",
    "pps": "s",
    "uniform": "X",
    "dppo": "^",
    "pods": "v",
    "cppo": "<",
}
OURS = "adaptive"
# What others are compared with at equal steps. GRPO without zeros has GRPO's gradient.
REFERENCES = {"words": "grpo_zero"}  # else grpo
TITLES = {"arithmetic": "default task", "arithmetic-mixed": "mixed task", "words": "SmolLM2"}
FOLDER = Path("runs")
SAVINGS, RACE = FOLDER / "savings.jsonl", FOLDER / "race.jsonl"
T95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)  # Student's t, 1 to 9 degrees


def main() -> None:
    """Print all tables, and draw the pictures into runs/."""
    for file in (SAVINGS, RACE):
        if not file.exists():
            raise InputError(f"there is no {file}: run bash runs/results.sh {file.stem} first")
    for name, table in tables().items():
        print(f"\n{name}\n\n{table}")
    saved, raced = log.read_rows(SAVINGS), log.read_rows(RACE)
    draw_savings(saved).savefig(FOLDER / "savings.png")
    draw_race(raced).savefig(FOLDER / "race.png")


def tables() -> dict[str, str]:
    """All tables of the page, by name."""
    saved, raced = log.read_rows(SAVINGS), log.read_rows(RACE)
    by_name = {}
    for setting in settings_of(saved):
        by_name[f"savings, {TITLES[setting]}"] = savings_table(saved, setting)
    for setting in settings_of(raced):
        by_name[f"race, {TITLES[setting]}"] = race_table(raced, setting)
    return by_name


# ---------------------------------------------------------------------------- question 1


def savings_table(rows: list[dict], setting: str) -> str:
    """Markdown: what a method rolls out and trains on, and for each number of candidates its
    accuracy minus the reference's, and its time over the reference's. The reference's line has its
    accuracy and its seconds."""
    counts, reference = candidates_of(rows, setting), REFERENCES.get(setting, "grpo")
    head = ["method", "prompts", "trained on"]
    for count in counts:
        head += [f"{count} x 16: accuracy", f"{count} x 16: step time"]
    cells = [head, ["---"] * len(head)]
    for name, (title, _color) in METHODS.items():
        of_counts = [by_seed(rows, setting, name, candidates=count) for count in counts]
        if not any(of_counts):
            continue
        runs = of_counts[0]
        full = by_seed(rows, setting, reference, candidates=counts[0])
        full = {seed: full[seed] for seed in runs}
        line = [
            title,
            f"{mean_of(runs, 'prompts') / mean_of(runs, 'made'):.0f} of {counts[0]}",
            f"{mean_of(runs, 'trained') / mean_of(full, 'trained'):.2f}",
        ]
        for count, runs in zip(counts, of_counts, strict=True):
            full = by_seed(rows, setting, reference, candidates=count)
            if name == reference:
                seconds = statistics.median(row["seconds"] / row["made"] for row in runs.values())
                line += [show(interval(accuracies(runs))), f"{seconds:.2f} s a step"]
            else:
                apart = difference(accuracies(runs), accuracies(full))
                line += [show(interval(apart), "+"), f"{time_ratio(runs, full):.2f}"]
        cells.append(line)
    return as_markdown(cells)


def time_ratio(first: dict[int, dict], second: dict[int, dict]) -> float:
    """Median over seeds of the first runs' seconds over the second ones'."""
    both = [seed for seed in first if seed in second]
    return statistics.median(first[seed]["seconds"] / second[seed]["seconds"] for seed in both)


def draw_savings(rows: list[dict]) -> Figure:
    """A line for each method: its seconds a step over GRPO's, and its accuracy minus GRPO's. A row
    of panels for each task: its largest batch. Of words, which has another reference, there is only
    a table."""
    settings = [name for name in settings_of(rows) if name != "words"]
    figure = Figure(figsize=(7, 3 * len(settings)), dpi=120, layout="constrained")
    panels = figure.subplots(len(settings), 2, squeeze=False, sharey="row", sharex="col")
    for (times, gaps), setting in zip(panels, settings, strict=True):
        count = candidates_of(rows, setting)[-1]
        full = by_seed(rows, setting, "grpo", candidates=count)
        names = [
            name for name in METHODS if full and by_seed(rows, setting, name, candidates=count)
        ]
        for place, name in enumerate(names):
            color = METHODS[name][1]
            runs = by_seed(rows, setting, name, candidates=count)
            mean, half = interval(difference(accuracies(runs), accuracies(full)))
            times.barh(place, time_ratio(runs, full), color=color)
            gaps.errorbar(mean, place, xerr=half, color=color, marker="o", capsize=3)
        times.set(yticks=range(len(names)), yticklabels=[METHODS[name][0] for name in names])
        times.set_title(f"{TITLES[setting]}, {count} x 16")
        gaps.axvline(0, color="#cccccc", lw=1, zorder=0)
        for panel in (times, gaps):
            panel.spines[["top", "right"]].set_visible(False)
            panel.grid(axis="x", alpha=0.2)
        times.set_xticks([0, 0.5, 1])
        times.invert_yaxis()
    panels[-1, 0].set_xlabel("step time, GRPO's = 1")
    panels[-1, 1].set_xlabel("accuracy minus GRPO's")
    return figure


# ---------------------------------------------------------------------------- question 2


def race_table(rows: list[dict], setting: str) -> str:
    """Markdown: each method's mean accuracy at each budget, and ours minus each, paired."""
    budgets = budgets_of(rows, setting)
    raced = {row["method"] for row in rows if row["setting"] == setting}
    names = [name for name in METHODS if name in raced]
    cells = [["seconds", *(f"{budget:g}" for budget in budgets)], ["---"] * (1 + len(budgets))]
    of_runs = {
        key: accuracies(by_seed(rows, setting, key[0], budget=key[1]))
        for key in itertools.product(names, budgets)
    }
    for name in names:
        shown = [show(interval(of_runs[name, budget])) for budget in budgets]
        cells.append([f"{METHODS[name][0]}, tuned", *shown])
    if OURS not in names:
        return as_markdown(cells)
    for name in names:
        if name != OURS:
            gaps = [difference(of_runs[OURS, budget], of_runs[name, budget]) for budget in budgets]
            title = f"{METHODS[OURS][0]} - {METHODS[name][0]}"
            cells.append([title, *(show(interval(gap), "+") for gap in gaps)])
    lowest = [min(of_runs[OURS, budget].values(), default=math.nan) for budget in budgets]
    cells.append([f"lowest run of {METHODS[OURS][0]}", *(f"{accuracy:.3f}" for accuracy in lowest)])
    return as_markdown(cells)


def draw_race(rows: list[dict]) -> Figure:
    """Wrong answers over the budget, a panel for each task. Bars are 95 % intervals."""
    settings = settings_of(rows)
    figure, panels = new_figure(len(settings))
    for panel, setting in zip(panels, settings, strict=True):
        budgets = budgets_of(rows, setting)
        for place, name in enumerate(METHODS):
            of_budgets = [
                accuracies(by_seed(rows, setting, name, budget=budget)) for budget in budgets
            ]
            if any(of_budgets):
                mean, half = zip(*map(interval, of_budgets), strict=True)
                wrong = [1 - accuracy for accuracy in mean]
                title, color = METHODS[name]
                x = [budget * 1.03 ** (place - 4) for budget in budgets]  # apart
                style = {
                    "color": color,
                    "marker": MARKERS[name],
                    "ms": 5,
                    "capsize": 3,
                    "label": title,
                }
                panel.errorbar(x, wrong, half, **style)
        panel.set(title=TITLES[setting], xscale="log", yscale="log", xlabel="seconds of training")
        panel.set_xticks(budgets, [f"{budget:g}" for budget in budgets])
        shares = [share for share in (0.003, 0.01, 0.03, 0.1, 0.3) if panel.get_ylim()[0] < share]
        panel.set_yticks(shares, [f"{100 * share:g} %" for share in shares])
        panel.minorticks_off()
    panels[0].set_ylabel("wrong answers, held out")
    add_legend(figure, panels)
    return figure


# ---------------------------------------------------------------------------- rows


def settings_of(rows: list[dict]) -> list[str]:
    known = {row["setting"] for row in rows}
    return [name for name in TITLES if name in known]


def budgets_of(rows: list[dict], setting: str) -> list[float]:
    return sorted({row["budget"] for row in rows if row["setting"] == setting})


def candidates_of(rows: list[dict], setting: str) -> list[int]:
    return sorted({candidates_of_row(row) for row in rows if row["setting"] == setting})


def candidates_of_row(row: dict) -> int:
    """Prompts of a step."""
    words = row["flags"].split()
    return int(words[words.index("--prompts-per-step") + 1])


def by_seed(
    rows: Iterable[dict], setting: str, method: str, budget: float = 0, candidates: int = 0
) -> dict[int, dict]:
    """{seed: row} of the runs of a method, at a budget or with a number of candidates."""
    runs = {}
    for row in rows:
        same = (row["setting"], row["method"], row["budget"]) == (setting, method, budget)
        if same and (budget or candidates_of_row(row) == candidates):
            runs[row["seed"]] = row
    return runs


def accuracies(runs: dict[int, dict]) -> dict[int, float]:
    return {seed: row["accuracy"] for seed, row in runs.items()}


def mean_of(runs: dict[int, dict], name: str) -> float:
    return statistics.mean(row[name] for row in runs.values())


def difference(first: dict[int, float], second: dict[int, float]) -> dict[int, float]:
    """{seed: first minus second} of the seeds that both have."""
    return {seed: first[seed] - second[seed] for seed in first if seed in second}


def interval(values: dict[int, float]) -> tuple[float, float]:
    """(mean, half of its 95 % interval by Student's t) over seeds; NaN where there are too few."""
    values = [*values.values()]
    if len(values) < 2:
        return values[0] if values else math.nan, math.nan
    error = statistics.stdev(values) / math.sqrt(len(values))
    return statistics.mean(values), error * T95[min(len(values) - 2, len(T95) - 1)]


def show(figures: tuple[float, float], sign: str = "", digits: int = 3) -> str:
    """mean ± half, as far as they are known."""
    mean, half = figures
    text = "" if math.isnan(mean) else f"{mean:{sign}.{digits}f}"
    return text if math.isnan(half) else f"{text} ± {half:.{digits}f}"


def as_markdown(cells: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in cells)


# ---------------------------------------------------------------------------- pictures


def new_figure(count: int) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(3.2 * count + 0.6, 3.8), dpi=120, layout="constrained")
    panels = [*figure.subplots(1, count, squeeze=False)[0]]
    for panel in panels:
        panel.grid(alpha=0.2)
        panel.spines[["top", "right"]].set_visible(False)
    return figure, panels


def add_legend(figure: Figure, panels: list[Axes]) -> None:
    """One legend for all panels, below them, with each title once."""
    handles = {}
    for panel in panels:
        for handle, title in zip(*panel.get_legend_handles_labels(), strict=True):
            handles.setdefault(title, handle)
    titles = [title for title, _color in METHODS.values() if title in handles]
    style = {"frameon": False, "loc": "outside lower center", "ncols": 2 * len(panels)}
    figure.legend([handles[title] for title in titles], titles, **style)
