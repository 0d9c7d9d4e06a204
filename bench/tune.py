"""
The search: for each method, the flags that are most accurate after a budget of seconds.

    python -m bench tune                                  GRPO and pps in both settings
    python -m bench tune --methods pods,cppo              two rivals, with as many trials

Random search with successive halving (Jamieson and Talwalkar, arXiv:1502.07943), and with children
of the best, in each setting at two budgets:

- at the smaller one, 16 random configurations and then three generations of 8 children have a run
  each. The best 8 of all have a second seed, and the best 3 two more.
- at the larger one, the best 5 of the smaller one and then two generations of 3 children have a
  run, the best 3 a second seed, and the best 2 a third.

A child has each flag from one of the best 4 so far, and a learning rate that is up to 1.4 times
larger or smaller for its batch. At the larger budget, every third child samples twice as many
prompts. A configuration's score is its mean accuracy over its seeds. The winner is the best of
those with most seeds.

All methods have equally many trials at the same budgets, so the same seconds. The i-th random
configurations of all methods share everything but the pruning: the prompts and completions that a
step samples, learning rate, warm-up, beta2, clip by norm, loss and schedule. Methods that prune
also draw their rates, but get no more trials for that. GRPO leaves out the terms that are exactly
0; PODS and CPPO train on those that their rules keep. Seeds begin at 100, and no trial is evaluated
on a problem of the race. A trial that fails has the accuracy 0. Every trial is a row of the file;
the same command resumes after a stop.
"""

import functools
import itertools
import math
import random
import statistics
from pathlib import Path

import arithmetic
import config
import sampler
from bench import JsonFile, timed
from bench.timed import Run
from runtime import InputError, log

FILE = Path("runs/tune.jsonl")
METHODS = ("grpo", "pps", "pods", "cppo")
BUDGETS = {"arithmetic": (10, 40), "arithmetic-mixed": (20, 80)}  # seconds; the race has others
RANDOM, PROMOTED = 16, 5  # configurations that the smaller and the larger budget begin with
CHILDREN = ((8, 8, 8), (3, 3))  # of each generation, at the smaller and the larger budget
PARENTS = 4
SEEDS = (((8, 1), (3, 2)), ((3, 1), (2, 1)))  # then: how many of the best have how many more seeds
FIRST_SEED = 100
CHOICES = (  # flags that all methods have, each with its default first
    ("", " --lr-schedule cosine", " --lr-schedule constant"),
    ("", " --loss dr_grpo"),
    ("", " --grad-clip 0"),
    ("", " --adam-beta2 0.95"),
    ("", " --warmup 1"),
)
BLOCKS = (  # flags that a child takes from the same parent
    ("--method", "--prompts-per-step", "--group-size", "--prompt-prune-rate"),
    ("--completion-prune-rate",),
    ("--lr-schedule",),
    ("--loss",),
    ("--grad-clip",),
    ("--adam-beta2",),
    ("--warmup",),
)
FACTORS = (0.7, 5.0)  # learning rates, over 6e-4 x root of the completions of a step over 512


def main(
    methods: str = "grpo,pps",
    settings: tuple[str, ...] = tuple(BUDGETS),
    workers: int = 2,
    json_file: JsonFile = FILE,
) -> None:
    """Search each method's flags at two budgets of each setting, and print the winners.

    Args:
        methods: of grpo (without the terms that are exactly 0), pps, pods and cppo
        settings: arithmetic, arithmetic-mixed
        workers: runs at a time, each with one thread
        json_file: where the rows of all trials are
    """
    methods = methods.split(",")
    timed.check_names("--methods", methods, METHODS)
    timed.check_names("--settings", settings, BUDGETS)
    spent = sum(map(seconds, settings)) * len(methods)
    print(f"{spent} seconds of one thread, and a tenth to a quarter more for evaluations")
    for setting, later in itertools.product(settings, (False, True)):
        for rung in range(rungs(later)):
            rows = log.read_rows(json_file)
            found = [trials(setting, name, later, rung, rows) for name in methods]
            runs = [run for turn in zip(*found, strict=True) for run in turn]  # methods take turns
            timed.make(runs, json_file, workers)
    rows = log.read_rows(json_file)
    for setting in settings:
        for limit, name in itertools.product(BUDGETS[setting], methods):
            print(f"{setting}, {limit} s, {name}: {ranking(tried(rows, setting, name, limit))[0]}")


def seconds(setting: str) -> int:
    """Budgets of all trials of a method in a setting."""
    return sum(
        (first + sum(children) + sum(count * more for count, more in seeds)) * limit
        for limit, first, children, seeds in zip(
            BUDGETS[setting], (RANDOM, PROMOTED), CHILDREN, SEEDS, strict=True
        )
    )


def rungs(later: bool) -> int:
    """How many rungs a budget has: the first one, its generations, and those of more seeds."""
    return 1 + len(CHILDREN[later]) + len(SEEDS[later])


def trials(setting: str, method: str, later: bool, rung: int, rows: list[dict]) -> list[Run]:
    """The runs of a rung. The rows of its own runs do not change its configurations, because the
    search may have been stopped among them."""
    limit, old = BUDGETS[setting][later], len(CHILDREN[later])
    first, more = FIRST_SEED, 1
    if rung <= old:
        flags = generations(setting, method, later, rows)[rung]
    else:
        seeds = SEEDS[later][: rung - old]
        (count, more), first = seeds[-1], first + 1 + sum(more for _, more in seeds[:-1])
        flags = ranking(tried(rows, setting, method, limit))[:count]
    pairs = itertools.product(range(first, first + more), flags)
    make = lambda seed, one: Run(setting, method, one, limit, seed, search=True)
    return list(itertools.starmap(make, pairs))


def generations(setting: str, method: str, later: bool, rows: list[dict]) -> list[list[str]]:
    """The configurations of a budget: those that it begins with, and its generations, as far as the
    rows of each one's parents are there."""
    limit = BUDGETS[setting][later]
    if later:
        found = [ranking(tried(rows, setting, method, BUDGETS[setting][0]))[:PROMOTED]]
    else:
        found = [configurations(setting, method, limit, RANDOM)]
    scores = ranking(tried(rows, setting, method, limit), FIRST_SEED + 1)
    for number, count in enumerate(CHILDREN[later]):
        known = list(itertools.chain(*found))
        if not {*known} <= {*scores}:
            break
        best = [one for one in scores if one in known][:PARENTS]
        key = f"{setting} {limit} {method} {number}"
        found.append(children(best, count, key, known, 3 if later else 0))
    return found


def tried(rows: list[dict], setting: str, method: str, limit: float) -> list[dict]:
    """The trials of a method at a budget."""
    names = ("setting", "method", "budget")
    return [row for row in rows if [row[name] for name in names] == [setting, method, limit]]


def ranking(trials: list[dict], before: float = math.inf) -> list[str]:
    """Their flags: those with more seeds first, then by mean accuracy. Only seeds below `before`
    count."""
    found = {}
    for row in trials:
        if row["seed"] < before:
            found.setdefault(row["flags"], []).append(row["accuracy"])
    return sorted(found, key=lambda one: (-len(found[one]), -statistics.mean(found[one])))


def winners(setting: str, method: str, budget: float, file: Path = FILE) -> list[str]:
    """The flags that won at the budgets that are at most a factor of two away.

    InputError if there are none, or if a search has not ended.
    """
    found = []
    for limit, seeds in zip(BUDGETS[setting], SEEDS, strict=True):
        if 0.5 <= budget / limit <= 2:
            own = tried(log.read_rows(file), setting, method, limit)
            last = FIRST_SEED + sum(more for _, more in seeds)  # the seed of the last runs
            if sum(row["seed"] == last for row in own) < seeds[-1][0]:
                command = f"python -m bench tune --methods {method} --settings {setting}"
                raise InputError(f"{file} has no whole search at {limit} s; run {command}")
            found.append(ranking(own)[0])
    if not found:
        limits = " and ".join(map(str, BUDGETS[setting]))
        raise InputError(
            f"--budgets {budget:g}: flags were searched for {limits} s in {setting}; give budgets "
            f"between half and twice of these"
        )
    return found


def configurations(setting: str, method: str, limit: float, count: int) -> list[str]:
    """`count` random flags for runs of so many seconds."""
    shared, own = random.Random(f"{setting} {limit}"), random.Random(f"{setting} {limit} {method}")
    least = limit * {"arithmetic": 6, "arithmetic-mixed": 3}[setting]  # completions of a step
    sizes = {
        group: [n for n in (16, 32, 64, 128, 256) if least <= n * group <= 12 * least]
        for group in (2, 4, 8, 16, 32)
    }
    found = []
    for place in shared.sample(range(count), count):  # learning rates are spread evenly
        group, prompts = shared.choice([pair for pair in sizes.items() if pair[1]])
        prompts = shared.choice(prompts)
        factor = FACTORS[0] * (FACTORS[1] / FACTORS[0]) ** ((place + shared.random()) / count)
        lr = 6e-4 * factor * math.sqrt(prompts * group / 512)
        flags = f"--lr {lr:.2g}" + "".join(shared.choice(pair) for pair in CHOICES)
        *options, fallback = method_flags(method, prompts, group)
        options = [*own.sample(options, len(options)), fallback]
        valid = (f"--method {one} {flags}" for one in options)
        found.append(next(one for one in valid if is_valid(one)))
    return found


def children(
    parents: list[str], count: int, key: str, known: list[str], larger: int = 0
) -> list[str]:
    """`count` new flags. Each block comes from one parent. The learning rate keeps its ratio to the
    root of a step's completions, times 0.7 to 1.4. One in `larger` has twice the prompts."""
    rng, found = random.Random(f"children {key}"), []
    parsed = [dict(zip(*[iter(one.split())] * 2, strict=True)) for one in parents]
    while len(found) < count:
        child = {}
        for block in BLOCKS:
            parent = rng.choice(parsed)
            child |= {name: parent[name] for name in block if name in parent}
        prompts = int(child["--prompts-per-step"])
        if larger and len(found) % larger == 0 and 2 * prompts <= arithmetic.TRAIN_PROBLEMS:
            child["--prompts-per-step"] = str(2 * prompts)
        parent = rng.choice(parsed)
        factor = math.sqrt(completions(child) / completions(parent)) * 1.4 ** rng.uniform(-1, 1)
        child["--lr"] = f"{float(parent['--lr']) * factor:.2g}"
        flags = " ".join(itertools.chain(*child.items()))
        if flags not in [*known, *found] and is_valid(flags):
            found.append(flags)
    return found


def completions(flags: dict[str, str]) -> int:
    """How many a step of these flags samples."""
    dropped = float(flags.get("--prompt-prune-rate", 0))
    return sampler.kept_prompts(int(flags["--prompts-per-step"]), dropped) * int(
        flags["--group-size"]
    )


def method_flags(method: str, prompts: int, group: int) -> list[str]:
    """All flags of a method that rolls out `prompts` prompts, with `group` completions each; the
    last ones are a fallback, for rivals that cannot prune groups of two."""
    size = f"--prompts-per-step {prompts} --group-size {group}"
    if method == "grpo":
        return [f"grpo_zero {size}"]
    if method != "pps":
        rates = (0.5, 0.7, 0.8, 0.9, 0.0)
        return [f"{method} {size} --completion-prune-rate {rate}" for rate in rates]
    return [
        f"pps --prompts-per-step {round(prompts / (1 - dropped))} --group-size {group} "
        f"--prompt-prune-rate {dropped} --completion-prune-rate {rate}"
        for dropped in (0.4, 0.6, 0.75)
        for rate in (0.7, 0.8, 0.9, 0.95, 0.98)
    ]


@functools.cache
def is_valid(flags: str) -> bool:
    """Whether train.py takes the flags, for as many prompts as the embedded tasks have."""
    try:
        cfg = config.resolve(config.parse_config(flags.split()))
        config.check_prompts(cfg, arithmetic.TRAIN_PROBLEMS)
    except InputError:
        return False
    return True
