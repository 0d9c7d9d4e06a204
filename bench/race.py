"""
The race by budget: which method is most accurate after so many seconds of training?

    python -m bench race --budgets 5 10 --seeds 4    tuned GRPO and pps, live, 2 minutes
    python -m bench race --table                     the tables and the picture of docs/race.md
    bash runs/race.sh                                all of their rows, hours; resumable

Name all methods in one command: they take turns, because a shared machine is faster in one hour
than in the next.

A tuned method has the flags that won the search (`python -m bench tune`) at the race's budget or,
if that was not searched, at one at most a factor of two away. If several flags did, a contest
decides: four runs of each, on seeds and problems of the search, at the race's budget or at the
largest one that was searched, whichever is less. The best mean wins, over these runs and the
search's own at that budget. Runs of a contest that are in runs/race.jsonl are not repeated.
Intervals are over the seeds of a race, with these flags. They do not say how lucky the search was.
"""

import itertools
import math
import re
import statistics
from dataclasses import replace
from pathlib import Path

from matplotlib.figure import Figure  # not pyplot, which would choose a backend for the caller

from bench import JsonFile, timed, tune
from bench.timed import Run
from runtime import InputError, log

METHODS = {  # name in the tables and color in the picture
    "pps": ("pps", "#009E73"),
    "grpo": ("GRPO, tuned", "#000000"),
    "dppo": ("DPPO, tuned", "#0072B2"),
    "pods": ("PODS, tuned", "#999933"),
    "cppo": ("CPPO, tuned", "#D55E00"),
    "uniform": ("pps, blind draws", "#F0E442"),
    "dppo_floor": ("DPPO with a floor", "#CC79A7"),
    "grpo-32x16": ("GRPO, 32 x 16", "#999999"),
}
FIXED = {
    "grpo-32x16": "--method grpo --prompts-per-step 32 --group-size 16 --lr 6e-4 --loss grpo "
    "--adam-beta2 0.999"
}
BORROWED = {  # methods that were not searched, and whose flags they have
    "uniform": "pps",
    "dppo_floor": "grpo",
}
BUDGETS = {  # seconds of one thread
    "arithmetic": (5, 10, 20, 40, 80),
    "arithmetic-mixed": (10, 20, 40, 80, 160),
    "words": (240, 480),
}
ROWS = Path("runs/race.jsonl")  # of docs/race.md
OWN = Path("out-race/rows.jsonl")
FIRST_SEED = 10  # of the race; lower ones had trials (runs/LOG.md)
CONTEST = 4  # runs of each of several winners, before one of them is raced
T95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)  # Student's t, 1 to 9 degrees


def main(
    methods: str = "grpo,pps",
    settings: tuple[str, ...] = ("arithmetic",),
    budgets: tuple[float, ...] = (),
    seeds: int | None = None,
    workers: int = 2,
    table: bool = False,
    json_file: JsonFile = None,
) -> None:
    """Race methods, each with its best flags for every budget, and print the table.

    Args:
        methods: of pps, grpo, dppo, pods, cppo, which are searched; uniform, with pps's flags;
            dppo_floor, with tuned GRPO's; grpo-32x16; separated by commas
        settings: arithmetic, arithmetic-mixed, words (SmolLM2, after bash runs/smollm2.sh)
        budgets: seconds of training; default: all of the setting
        seeds: of each method and budget; default: 10 at the two smallest of five budgets, else 5
        workers: runs at a time, each with one thread
        table: only print the tables of all settings of the file, and draw them into a .png beside
        json_file: where the rows of all runs are; the same command resumes after a stop; default:
            out-race/rows.jsonl, or runs/race.jsonl with --table
    """
    if table:
        file = json_file or ROWS
        rows = log.read_rows(file)
        if not rows:
            raise InputError(f"--table: {file} has no rows; race first, with --json {file}")
        draw(rows).savefig(file.with_suffix(".png"))
        settings = [name for name in BUDGETS if budgets_of(rows, name)]
    else:
        methods = methods.split(",")
        timed.check_names("--methods", methods, METHODS)
        timed.check_settings(settings)
        fixed = [name for name in methods if name in FIXED]
        if fixed and "words" in settings:
            raise InputError(f"--methods {fixed[0]}: its flags are not for --settings words")
        rows = race(methods, settings, budgets, seeds, workers, json_file or OWN)
    for setting in settings:
        print(f"\n{setting}: accuracy after so many seconds of training\n")
        print(as_table(rows, setting))


def race(
    methods: list[str],
    settings: tuple[str, ...],
    budgets: tuple[float, ...],
    seeds: int | None,
    workers: int,
    file: Path,
) -> list[dict]:
    """Make the runs that the file lacks; returns all of its rows."""
    tried = [  # first: a search may be missing
        (name, one, attempts(setting, BORROWED.get(name, name), one))
        for setting in settings
        for one in budgets or BUDGETS[setting]
        for name in methods
    ]
    contests = [runs for *_, runs in tried if len({run.flags for run in runs}) > 1]
    known = log.read_rows(ROWS)
    missing = [run for run in itertools.chain(*contests) if not any(map(run.is_row, known))]
    in_turns = lambda run: (run.setting, run.budget, run.seed)  # of methods
    timed.make(sorted(missing, key=in_turns), file, workers)
    raced = []
    for name, one, runs in tried:
        flags = runs[0].flags
        if runs in contests:
            files = dict.fromkeys((tune.FILE, ROWS, file))
            flags = best_of(runs, [*itertools.chain(*map(log.read_rows, files))])
        if name in BORROWED:
            flags = re.sub(r"--method \w+", f"--method {name}", flags)
        best = replace(runs[0], method=name, flags=flags, budget=one)
        count = seeds or (10 if best.budget in BUDGETS[best.setting][:-3] else 5)
        raced += [
            replace(best, seed=seed, search=False) for seed in range(FIRST_SEED, FIRST_SEED + count)
        ]
    for row in timed.make(sorted(raced, key=in_turns), file, workers):
        if row["failed"]:
            raise InputError(f"{row['setting']}, {row['flags']}: {row['failed']}")
    return log.read_rows(file)


def attempts(setting: str, method: str, budget: float) -> list[Run]:
    """CONTEST runs of each of the flags that a method may have at a budget."""
    flags = [FIXED[method]] if method in FIXED else tune.winners(setting, method, budget)
    seeds = range(tune.FIRST_SEED, tune.FIRST_SEED + CONTEST)
    limit = min(budget, tune.SEARCHES[setting][-1].budget)
    make = lambda seed, one: Run(setting, method, one, limit, seed, search=True)
    return list(itertools.starmap(make, itertools.product(seeds, flags)))


def best_of(runs: list[Run], rows: list[dict]) -> str:
    """The flags of a contest with the best mean accuracy over its runs and those of the search: a
    contest of four may miss a failure that the search has seen."""
    found = {run.flags: [] for run in runs}
    for row in tune.tried(rows, runs[0].setting, runs[0].method, runs[0].budget):
        if row["search"] and row["flags"] in found:
            found[row["flags"]].append(row["accuracy"])
    return max(found, key=lambda flags: statistics.mean(found[flags]))


# ---------------------------------------------------------------------------- tables


def accuracies(rows: list[dict], setting: str, method: str, budget: float) -> dict[int, float]:
    """{seed: accuracy} of the runs with the flags that were raced last."""
    own = [row for row in tune.tried(rows, setting, method, budget) if not row["search"]]
    return {row["seed"]: row["accuracy"] for row in own if row["flags"] == own[-1]["flags"]}


def budgets_of(rows: list[dict], setting: str) -> list[float]:
    return sorted({row["budget"] for row in rows if row["setting"] == setting})


def as_table(rows: list[dict], setting: str) -> str:
    """Markdown: each method's mean accuracy at each budget with its 95 % interval; then pps minus
    each tuned method, paired by seed, and pps minus tuned GRPO that has twice the seconds."""
    budgets = budgets_of(rows, setting)
    found = {key: accuracies(rows, setting, *key) for key in itertools.product(METHODS, budgets)}
    cells = [["seconds", *(f"{one:g}" for one in budgets)], ["---"] * (1 + len(budgets))]
    for name, (title, _color) in METHODS.items():
        if any(found[name, one] for one in budgets):
            cells.append([title, *(show(interval(found[name, one])) for one in budgets)])
    gaps = {"pps - GRPO": ("grpo", 1), "pps - GRPO at twice": ("grpo", 2)}
    gaps |= {"pps - PODS": ("pods", 1), "pps - CPPO": ("cppo", 1)}
    for title, (name, times) in gaps.items():
        others = [found.get((name, times * one), {}) for one in budgets]
        if any(others):
            own = [found["pps", one] for one in budgets]
            shown = [interval(difference(*both)) for both in zip(own, others, strict=True)]
            cells.append([title, *(show(figures, "+") for figures in shown)])
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


# ---------------------------------------------------------------------------- the picture


def draw(rows: list[dict], settings: tuple[str, ...] = tuple(BUDGETS)) -> Figure:
    """Accuracy over the budget, a panel per setting that the rows have. Bars are 95 % intervals."""
    settings = [name for name in settings if budgets_of(rows, name)]
    figure = Figure(figsize=(4.2 * len(settings) + 1.8, 3.4), dpi=110, layout="constrained")
    panels = figure.subplots(1, len(settings), squeeze=False)[0]
    lines = {}  # of the legend
    for panel, setting in zip(panels, settings, strict=True):
        budgets = budgets_of(rows, setting)
        for name, (title, color) in METHODS.items():
            found = {one: accuracies(rows, setting, name, one) for one in budgets}
            points = [(one, *interval(found[one])) for one in budgets if found[one]]
            if points:
                x, y, half = zip(*points, strict=True)
                style = {"color": color, "marker": "o", "ms": 4, "capsize": 3}
                lines[title] = panel.errorbar(x, y, half, **style)
        panel.set(title=setting, xscale="log", xlabel="seconds of training")
        panel.set_xticks(budgets, [f"{one:g}" for one in budgets])
        panel.set_ylim(top=min(1.02, panel.get_ylim()[1]))  # intervals may pass 1
        panel.minorticks_off()
        panel.grid(alpha=0.2)
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("avg@4, held out")
    names = [title for title, _color in METHODS.values() if title in lines]
    style = {"frameon": False, "loc": "outside right center"}
    figure.legend([lines[name] for name in names], names, fontsize=9, **style)
    return figure
