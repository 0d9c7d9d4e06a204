"""
The race at equal seconds: which method is most accurate, if everything is tuned?

    python -m bench race --budgets 5 --seeds 2      all methods, live, in a minute
    bash runs/results.sh race                       the race of docs/results.md, hours

Every method has the flags that won its search at the largest budget that was searched and is not
above the race's. runs/search.jsonl has the trials; `git show 380940f:bench/search.py` made them.
Where the race's budget is larger, the learning rate of all methods falls linearly: a search of
short runs prefers a constant one, which ends lower after four times as long (three methods, one
seed each: by 0.01, 0.03 and 0.10).

A seed of all methods is one block, and in it they take turns, because a shared machine is faster in
one hour than in the next. Intervals are over seeds, with these flags. They do not say how lucky the
search was.
"""

import statistics
from pathlib import Path

from bench import JsonFile, results, runs
from bench.runs import Run
from runtime import log

OWN = Path("out-race/rows.jsonl")
SEARCHED = Path("runs/search.jsonl")
METHODS = ("grpo", "adaptive", "dppo", "pods", "cppo")
FIRST_SEED = 10  # of the race; those of the search begin at 100
BUDGETS = {"arithmetic": (5, 20, 80), "arithmetic-mixed": (10, 40, 160)}  # seconds


def main(
    methods: str = ",".join(METHODS),
    settings: tuple[str, ...] = ("arithmetic",),
    budgets: tuple[float, ...] = (),
    seeds: int | None = None,
    workers: int = 2,
    json_file: JsonFile = OWN,
) -> None:
    """Race methods, each with the flags that won its search, and print the table.

    Args:
        methods: of grpo, adaptive, dppo, pods and cppo, separated by commas
        settings: arithmetic, arithmetic-mixed
        budgets: seconds of training; default: all of the setting
        seeds: of each method and budget; default: 10, and 8 at the largest budget
        workers: runs at a time, each with one thread
        json_file: where the rows of all runs are; the same command resumes after a stop
    """
    methods = methods.split(",")
    runs.check_names("--methods", methods, METHODS)
    runs.check_settings(settings, BUDGETS)
    raced = [
        Run(setting, name, flags_for(setting, name, budget), FIRST_SEED + seed, budget)
        for setting in settings
        for budget in budgets or BUDGETS[setting]
        for name in methods
        for seed in range(seeds or (8 if budget == BUDGETS[setting][-1] else 10))
    ]
    in_blocks = sorted(raced, key=lambda run: (run.seed, run.setting, run.budget))
    runs.check_speed(in_blocks, json_file)
    runs.make(in_blocks, json_file, workers)
    for setting in settings:
        print(f"\n{setting}: accuracy after so many seconds of training\n")
        print(results.race_table(log.read_rows(json_file), setting))


def flags_for(setting: str, method: str, budget: float) -> str:
    """The flags with which a method is raced at a budget: of those that were tried on most seeds,
    the best by mean accuracy."""
    trials = [
        row
        for row in log.read_rows(SEARCHED)
        if (row["setting"], row["method"]) == (setting, method)
    ]
    searched = sorted({row["budget"] for row in trials})
    nearest = max((one for one in searched if one <= budget), default=searched[0])
    accuracies = {}
    for row in trials:
        if row["budget"] == nearest:
            accuracies.setdefault(row["flags"], []).append(row["accuracy"])
    rank = lambda flags: (len(accuracies[flags]), statistics.mean(accuracies[flags]))
    winner = max(accuracies, key=rank)
    if budget > searched[-1]:
        return winner.replace("--lr-schedule constant", "--lr-schedule linear")
    return winner
