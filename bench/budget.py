"""
The race by budget: which method is most accurate after so many seconds of training?

    python -m bench budget --budgets 10 20     GRPO and pps, each with flags that won a search
    bash runs/budget.sh                        everything in docs/race.md, hours; resumable
    python -m bench budget --table             the tables, from the rows that are there

Every method has the flags that `python -m bench tune` found best for the budget, or for one at most
a factor of two away: if two were found, a run of each with a seed of the search decides. That run
paces itself by the clock, and the runs that are raced make as many steps as it did. Their schedule
ends with the budget. Runs that end more than a tenth beside it are kept, but do not count. A run is
never repeated for its result.
"""

import itertools
import math
import statistics
from pathlib import Path

from bench import timed, tune
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
NEAR = 0.1  # runs that end further from their budget do not count
T95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)  # Student's t, 1 to 9 degrees


def main(
    methods: str = "grpo,pps",
    settings: tuple[str, ...] = ("arithmetic",),
    budgets: tuple[float, ...] = (),
    seeds: int | None = None,
    workers: int = 2,
    table: bool = False,
    file: Path = Path("out-budget.jsonl"),
) -> None:
    """Race methods, each with its best flags for every budget, and print the table.

    Args:
        methods: of pps, grpo, pods, cppo and grpo-32x16, separated by commas
        settings: arithmetic, arithmetic-mixed
        budgets: seconds of training; default: all of the setting
        seeds: of each method and budget; default: 10 at the two smallest budgets, else 5
        workers: runs at a time, each with one thread
        table: only print the tables of what the file holds
        file: where the rows of all runs are; the same command goes on with it
    """
    methods = methods.split(",")
    timed.check_names("--methods", methods, METHODS)
    timed.check_names("--settings", settings, RACE)
    for setting in settings if not table else ():
        own = budgets or RACE[setting]
        tried = {
            (name, one): attempts(setting, name, one)
            for one, name in itertools.product(own, methods)
        }
        timed.make([run for runs in tried.values() for run in runs], file, workers, here=True)
        runs = []
        for (name, one), attempt in tried.items():
            rows = timed.make(attempt, file, workers, here=True)
            best = max(rows, key=lambda row: row["accuracy"])
            count = seeds or (10 if one in RACE[setting][:2] else 5)
            plan = (setting, name, best["flags"], one)
            runs += [Run(*plan, seed, best["steps"]) for seed in range(count)]
        runs.sort(key=lambda run: (run.budget, run.seed))  # methods take turns
        timed.make(runs, file, workers)
    for setting in settings:
        print(f"\n{setting}: accuracy after so many seconds of training\n")
        print(as_table(log.read_rows(file), setting))


def attempts(setting: str, method: str, budget: float) -> list[Run]:
    """The paced runs of a method's flags, of which the best one is raced."""
    flags = [FIXED[method]] if method in FIXED else tune.winners(setting, method, budget)
    seed, problems = tune.FIRST_SEED, timed.SEARCHED
    return [Run(setting, method, one, budget, seed, problems=problems) for one in flags]


# ---------------------------------------------------------------------------- tables


def accuracies(rows: list[dict], setting: str, method: str, budget: float) -> dict[int, float]:
    """{seed: accuracy} of the runs that count."""
    return {
        row["seed"]: row["accuracy"]
        for row in rows
        if (row["setting"], row["method"], row["budget"]) == (setting, method, budget)
        and not row["paced"]
        and abs(row["seconds"] / budget - 1) <= NEAR
    }


def as_table(rows: list[dict], setting: str) -> str:
    """Markdown: mean accuracies of each method at each budget with 95 % intervals, and pps minus
    tuned GRPO, paired by seed, with as much time and with half of its time."""
    names = [*METHODS]
    budgets = sorted({row["budget"] for row in rows if row["setting"] == setting})
    found = {key: accuracies(rows, setting, *key) for key in itertools.product(names, budgets)}
    cells = [["seconds", *(f"{one:g}" for one in budgets)], ["---"] * (1 + len(budgets))]
    for name in names:
        if any(found[name, one] for one in budgets):
            cells.append([METHODS[name], *(show(interval(found[name, one])) for one in budgets)])
    for title, times in (("pps minus tuned GRPO", 1), ("minus tuned GRPO, with twice the time", 2)):
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
