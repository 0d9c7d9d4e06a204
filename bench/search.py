"""
The search: for each method, the flags that are most accurate after a budget of seconds.

    python -m bench search                                all methods in both tasks, two hours
    python -m bench search --methods grpo,adaptive        two of them

A configuration is a value for each flag of a table (SPACES). In each task the search has two
budgets (SEARCHES). At the smaller one it tries random configurations; then generations of children,
each of which is one of the best with two flags moved to the next value; then the best have more
seeds. At the larger one it begins with the best of the smaller one. This is successive halving
(Jamieson and Talwalkar, arXiv:1502.07943) with a local search.

All methods have equally many trials of the same budgets, so the same seconds. All choose batch,
group, learning rate, schedule, clip and objective; the rates are those that a method has. All leave
out completions whose term is exactly 0, or what their rule drops. A configuration's score is its
mean accuracy over its seeds. The winner is the best of those with most seeds. Seeds begin at 100,
and no trial is evaluated on a problem of the race. A trial that fails has the accuracy 0. Every
trial is a row of the file; the same command resumes after a stop.
"""

import itertools
import math
import random
import statistics
from pathlib import Path
from typing import NamedTuple

from bench import JsonFile, runs
from bench.runs import Run
from runtime import InputError, log

FILE = Path("runs/search.jsonl")
FIRST_SEED = 100
PARENTS = 4
MOVES = 2  # flags in which a child differs from its parent, at most


class Search(NamedTuple):
    """A search at one budget. Counts are of each method."""

    budget: float  # in seconds
    first: int  # configurations that it begins with: random, or the best at the budget before
    children: tuple[int, ...]  # of each generation
    seeds: tuple[tuple[int, int], ...]  # then (n, m): the n best get m more seeds each


SMALL = {"first": 20, "children": (10, 10), "seeds": ((6, 1), (3, 2))}
LARGE = {"first": 5, "children": (5,), "seeds": ((4, 1), (3, 2))}
SEARCHES = {
    "arithmetic": (Search(5, **SMALL), Search(20, **LARGE)),
    "arithmetic-mixed": (Search(10, **SMALL), Search(40, **LARGE)),
}

# The learning rate is written for 512 completions and scaled by the root of a step's completions.
LEARNING_RATES = (2.1e-4, 3e-4, 4.2e-4, 6e-4, 8.5e-4, 1.2e-3, 1.7e-3, 2.4e-3)
SHARED = {
    "--prompts-per-step": (8, 16, 32, 64, 128),
    "--group-size": (4, 8, 16, 32),
    "--lr": LEARNING_RATES,
    "--scale-rewards": ("none", "group", "variance"),
    "--lr-schedule": ("linear", "constant"),
    "--grad-clip": (1, 0.01),
}
PROMPTS = {"--prompt-prune-rate": (0.0, 0.3, 0.6)}
RANKED = {"--completion-prune-rate": (0.5, 0.7, 0.8, 0.9)}
SPACES = {  # method: flags that all of its configurations have, and those that are searched
    "grpo": ("--method grpo_zero", SHARED | {"--group-size": (2, 4, 8, 16)}),
    "adaptive": (
        "--prompt-rule dppo --completion-rule adaptive",
        SHARED | PROMPTS | {"--rest": (0.4286, 0.25, 0.1111, 0.0526)},
    ),
    "dppo": ("--method dppo", SHARED | PROMPTS | {"--completion-prune-rate": (0.5, 0.7, 0.9)}),
    "pods": ("--method pods", SHARED | RANKED),
    "cppo": ("--method cppo", SHARED | RANKED),
}
KEPT = {"pods": 2, "cppo": 2}  # completions of each group, at least
FEWEST = 32  # completions of a step
MOST = 52  # at most this many for each second of budget

Configuration = dict[str, float | str]


def main(
    methods: str = ",".join(SPACES),
    settings: tuple[str, ...] = tuple(SEARCHES),
    workers: int = 2,
    json_file: JsonFile = FILE,
) -> None:
    """Search each method's flags at two budgets of each setting, and print the winners.

    Args:
        methods: of grpo (without the terms that are exactly 0), adaptive, dppo, pods and cppo
        settings: arithmetic, arithmetic-mixed
        workers: runs at a time, each with one thread
        json_file: where the rows of all trials are
    """
    methods = methods.split(",")
    runs.check_names("--methods", methods, SPACES)
    runs.check_names("--settings", settings, SEARCHES)
    for setting in settings:
        for number, search in enumerate(SEARCHES[setting]):
            for rung in range(1 + len(search.children) + len(search.seeds)):
                rows = log.read_rows(json_file)
                found = [trials(setting, name, number, rung, rows) for name in methods]
                in_turns = [run for turn in zip(*found, strict=True) for run in turn]
                runs.make(in_turns, json_file, workers)
    for setting in settings:
        for search, name in itertools.product(SEARCHES[setting], methods):
            best = winner(setting, name, search.budget, json_file)
            print(f"{setting}, {search.budget} s, {name}: {best}")


def trials(setting: str, method: str, number: int, rung: int, rows: list[dict]) -> list[Run]:
    """The runs of one stage (rung): the first ones, a generation of children, or more seeds.

    It depends on the rows of earlier rungs only, because the search may have been stopped in this
    one.
    """
    search = SEARCHES[setting][number]
    seeds, generations = [FIRST_SEED], len(search.children)
    if rung <= generations:
        flags = generation(setting, method, number, rung, rows)
    else:
        given = search.seeds[: rung - generations]
        first = FIRST_SEED + 1 + sum(more for _, more in given[:-1])
        best, more = given[-1]
        seeds = range(first, first + more)
        flags = ranking(tried(rows, setting, method, search.budget), before=first)[:best]
    return [
        Run(setting, method, one, seed, search.budget, search=True)
        for seed in seeds
        for one in flags
    ]


def generation(setting: str, method: str, number: int, rung: int, rows: list[dict]) -> list[str]:
    """The new flags of a rung: random ones or the best of the smaller budget, then children."""
    search = SEARCHES[setting][number]
    if rung == 0 and number == 0:
        return random_flags(setting, method, search)
    if rung == 0:
        before = SEARCHES[setting][number - 1].budget
        return ranking(tried(rows, setting, method, before))[: search.first]
    known = []
    for earlier in range(rung):
        known += generation(setting, method, number, earlier, rows)
    scores = ranking(tried(rows, setting, method, search.budget), before=FIRST_SEED + 1)
    parents = [flags for flags in scores if flags in known][:PARENTS]
    rng = random.Random(f"{setting} {method} {search.budget} {rung}")
    found = []
    while len(found) < search.children[rung - 1]:
        child = moved(method, parse(method, rng.choice(parents)), rng)
        child = to_flags(method, child, search.budget)
        if child not in [None, *known, *found]:
            found.append(child)
    return found


def random_flags(setting: str, method: str, search: Search) -> list[str]:
    """The random configurations of a search. All methods use the same random numbers, so they try
    about the same learning rates, schedules and objectives."""
    rng, found = random.Random(setting), []
    while len(found) < search.first:
        shares = [rng.random() for _ in range(10)]  # more than any method has flags
        space = SPACES[method][1]
        chosen = {
            name: space[name][int(share * len(space[name]))]
            for name, share in zip(space, shares, strict=False)
        }
        flags = to_flags(method, chosen, search.budget)
        if flags not in [None, *found]:
            found.append(flags)
    return found


def moved(method: str, parent: Configuration, rng: random.Random) -> Configuration:
    """A child: some flags of its parent have the next higher or lower value."""
    child, space = dict(parent), SPACES[method][1]
    for name in rng.sample(list(space), MOVES):
        place = space[name].index(child[name]) + rng.choice((-1, 1))
        child[name] = space[name][min(max(place, 0), len(space[name]) - 1)]
    return child


def to_flags(method: str, chosen: Configuration, budget: float) -> str | None:
    """A configuration as flags of train.py, or None if runs of this budget may not have it."""
    count = completions(chosen)
    if not FEWEST <= count <= MOST * budget:
        return None
    kept = chosen["--group-size"] * (1 - chosen.get("--completion-prune-rate", 0))
    if kept < KEPT.get(method, 0) - 1e-9:
        return None
    values = chosen | {"--lr": f"{chosen['--lr'] * math.sqrt(count / 512):.3g}"}
    flags = " ".join(f"{name} {value}" for name, value in values.items())
    return f"{SPACES[method][0]} {flags}"


def parse(method: str, flags: str) -> Configuration:
    """The configuration of flags that to_flags has written."""
    given, chosen = values_of(method, flags), {}
    for name, values in SPACES[method][1].items():
        chosen[name] = next((value for value in values if str(value) == given[name]), None)
    rate = float(given["--lr"]) / math.sqrt(completions(chosen) / 512)
    chosen["--lr"] = min(LEARNING_RATES, key=lambda known: abs(known - rate))
    return chosen


def values_of(method: str, flags: str) -> dict[str, str]:
    """{flag: value} of the searched flags that to_flags has written."""
    words = iter(flags.removeprefix(SPACES[method][0]).split())
    return dict(zip(words, words, strict=True))


def completions(chosen: Configuration) -> float:
    """How many a step of this configuration samples, on average."""
    prompts = chosen["--prompts-per-step"] * (1 - chosen.get("--prompt-prune-rate", 0))
    return prompts * chosen["--group-size"]


def tried(rows: list[dict], setting: str, method: str, budget: float) -> list[dict]:
    """The trials of a method at a budget."""
    wanted = (setting, method, budget)
    return [row for row in rows if (row["setting"], row["method"], row["budget"]) == wanted]


def ranking(trials: list[dict], before: float = math.inf) -> list[str]:
    """Their flags: those with more seeds first, then by mean accuracy. Only seeds below `before`
    count."""
    found = {}
    for row in trials:
        if row["seed"] < before:
            found.setdefault(row["flags"], {})[row["seed"]] = row["accuracy"]
    mean = lambda one: statistics.mean(found[one].values())
    return sorted(found, key=lambda one: (-len(found[one]), -mean(one)))


def winner(setting: str, method: str, budget: float, file: Path = FILE) -> str:
    """The flags that won at the largest budget that was searched and is not above this one, or at
    the smallest.

    InputError if this search has not ended.
    """
    searches = SEARCHES[setting]
    search = max((one for one in searches if one.budget <= budget), default=searches[0])
    own = tried(log.read_rows(file), setting, method, search.budget)
    last = FIRST_SEED + sum(more for _, more in search.seeds)  # the seed of the last runs
    if sum(row["seed"] == last for row in own) < search.seeds[-1][0]:
        command = f"python -m bench search --methods {method} --settings {setting}"
        raise InputError(f"{file} has no whole search at {search.budget} s; run {command}")
    return ranking(own)[0]
