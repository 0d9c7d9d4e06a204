"""
The race by budget: which method is most accurate after so many seconds of training?

    python -m bench budget --budgets 10 20     GRPO and pps, each with flags that won a search
    python -m bench budget --table             the tables, from the rows that are there

Every method has the flags that `python -m bench tune` found best for the budget, or for one at most
a factor of two away. If two were found, one run of each, with a seed and problems of the search,
decides between them. Intervals are over the seeds of a race, with these flags: they do not say how
lucky the search was.
"""

import itertools
import math
import statistics
from dataclasses import replace
from pathlib import Path

from bench import JsonFile, timed, tune
from bench.timed import Run
from runtime import log

METHODS = {  # as the tables call them; all but the last have the flags that won a search
    "pps": "pps",
    "grpo": "GRPO, tuned",
    "pods": "PODS, tuned",
    "cppo": "CPPO, tuned",
    "grpo-32x16": "GRPO, 32 x 16",
}
FIXED = {"grpo-32x16": "--method grpo"}  # flags of methods without a search
RACE = {  # budgets in seconds of one thread
    "arithmetic": (5, 10, 20, 40, 80),
    "arithmetic-mixed": (10, 20, 40, 80, 160),
}
T95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)  # Student's t, 1 to 9 degrees


def main(
    methods: str = "grpo,pps",
    settings: tuple[str, ...] = ("arithmetic",),
    budgets: tuple[float, ...] = (),
    seeds: int | None = None,
    workers: int = 2,
    table: bool = False,
    json_file: JsonFile = Path("out-budget/rows.jsonl"),
) -> None:
    """Race methods, each with its best flags for every budget, and print the table.

    Args:
        methods: of pps, grpo, pods, cppo and grpo-32x16, separated by commas
        settings: arithmetic, arithmetic-mixed
        budgets: seconds of training; default: all of the setting
        seeds: of each method and budget; default: 10 at the two smallest budgets, else 5
        workers: runs at a time, each with one thread
        table: only print the tables of what the file holds
        json_file: where the rows of all runs are; the same command resumes after a stop
    """
    methods = methods.split(",")
    timed.check_names("--methods", methods, METHODS)
    timed.check_names("--settings", settings, RACE)
    tried = [  # first: a search may be missing
        attempts(setting, name, one)
        for setting in (() if table else settings)
        for one in budgets or RACE[setting]
        for name in methods
    ]
    contests = [run for runs in tried if len(runs) > 1 for run in runs]
    scores = dict(zip(contests, timed.make(contests, json_file, workers), strict=True))
    raced = []
    for runs in tried:
        best = max(runs, key=lambda run: scores[run]["accuracy"] if run in scores else 0.0)
        count = seeds or (10 if best.budget in RACE[best.setting][:2] else 5)
        raced += [replace(best, seed=seed, search=False) for seed in range(count)]
    raced.sort(key=lambda run: (run.setting, run.budget, run.seed))  # methods take turns
    timed.make(raced, json_file, workers)
    for setting in settings:
        print(f"\n{setting}: accuracy after so many seconds of training\n")
        print(as_table(log.read_rows(json_file), setting))


def attempts(setting: str, method: str, budget: float) -> list[Run]:
    """A run of each of the flags that a method may have at a budget."""
    flags = [FIXED[method]] if method in FIXED else tune.winners(setting, method, budget)
    return [Run(setting, method, one, budget, tune.FIRST_SEED, search=True) for one in flags]


# ---------------------------------------------------------------------------- tables


def accuracies(rows: list[dict], setting: str, method: str, budget: float) -> dict[int, float]:
    """{seed: accuracy} of the runs with the flags that were raced last."""
    own = [row for row in tune.tried(rows, setting, method, budget) if not row["search"]]
    return {row["seed"]: row["accuracy"] for row in own if row["flags"] == own[-1]["flags"]}


def as_table(rows: list[dict], setting: str) -> str:
    """Markdown: each method's mean accuracy at each budget with its 95 % interval; then pps minus
    tuned GRPO, paired by seed, at the same budget and at half of GRPO's."""
    names = [*METHODS]
    budgets = sorted({row["budget"] for row in rows if row["setting"] == setting})
    found = {key: accuracies(rows, setting, *key) for key in itertools.product(names, budgets)}
    cells = [["seconds", *(f"{one:g}" for one in budgets)], ["---"] * (1 + len(budgets))]
    for name in names:
        if any(found[name, one] for one in budgets):
            cells.append([METHODS[name], *(show(interval(found[name, one])) for one in budgets)])
    titles = {1: "pps minus tuned GRPO", 2: "pps minus tuned GRPO at twice the budget"}
    for times, title in titles.items():
        gaps = [
            difference(found["pps", one], found.get(("grpo", times * one), {})) for one in budgets
        ]
        cells.append([title, *(show(interval(gap), "+") for gap in gaps)])
    return "\n".join("| " + " | ".join(row) + " |" for row in cells)


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


def show(figures: tuple[float, float], sign: str = "") -> str:
    """mean ± half, as far as they are known."""
    mean, half = figures
    text = "" if math.isnan(mean) else f"{mean:{sign}.3f}"
    return text if math.isnan(half) else f"{text} ± {half:.3f}"
