"""
The search: for each method, the flags that are most accurate after a budget of seconds.

    python -m bench tune                                  GRPO and pps in both settings
    python -m bench tune --methods pods,cppo              as many trials of two rivals

Random search with successive halving (Jamieson and Talwalkar, arXiv:1502.07943), and with children
of the best, in each setting at two budgets:

- at the smaller one, 24 random configurations and then 12 children of the best 4 of them have a run
  each. The best 8 of all have a second seed, and the best 3 two more.
- at the larger one, the best 5 of the smaller one and then 5 children of their best 3 have a run,
  the best 3 a second seed, and the best 2 a third.

A child has each flag from one of its parents, and a learning rate that is up to 1.4 times larger or
smaller for its batch. A configuration's score is its mean accuracy over its seeds; the winner is
the best of those with most seeds.

All methods have as many trials at the same budgets, so the same seconds. The i-th random ones of
all methods share the prompts and completions that a step samples, the learning rate, warm-up,
beta2, clip by norm, loss and schedule. Methods that prune also draw their rates, from the same
number of trials. GRPO leaves out the terms that are exactly 0; PODS and CPPO train on those that
their rules keep. Seeds begin at 100, and no problem of the race is evaluated. Trials that fail
count as accuracy 0. Every trial is a row of the file; the same command resumes after a stop.
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
from bench import timed
from bench.timed import Run
from runtime import InputError, log

FILE = Path("runs/tune.jsonl")
METHODS = ("grpo", "pps", "pods", "cppo")
BUDGETS = {"arithmetic": (10, 40), "arithmetic-mixed": (20, 80)}  # seconds; the race has others
RANDOM, CHILDREN, PARENTS = 24, 12, 4  # configurations at the smaller budget
PROMOTED, CHILDREN_LATER, PARENTS_LATER = 5, 5, 3  # and at the larger one
SEEDS = ((8, 1), (3, 2))  # then, twice: how many of the best have how many seeds more
SEEDS_LATER = ((3, 1), (2, 1))
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
FACTORS = (0.5, 6.0)  # learning rates, over 6e-4 x root of the completions of a step over 512


def main(
    methods: str = "grpo,pps",
    settings: tuple[str, ...] = tuple(BUDGETS),
    workers: int = 2,
    file: Path = FILE,
) -> None:
    """Search each method's flags at two budgets of each setting, and print the winners.

    Args:
        methods: of grpo (without the terms that are exactly 0), pps, pods and cppo
        settings: arithmetic, arithmetic-mixed
        workers: runs at a time, each with one thread
        file: where the rows of all trials are
    """
    methods = methods.split(",")
    timed.check_names("--methods", methods, METHODS)
    timed.check_names("--settings", settings, BUDGETS)
    spent = sum(map(seconds, settings)) * len(methods)
    print(f"{spent} seconds of one thread, and a tenth to a quarter more for evaluations")
    for setting, later, rung in itertools.product(settings, (False, True), range(4)):
        rows = log.read_rows(file)
        found = [trials(setting, name, later, rung, rows) for name in methods]
        runs = [run for turn in zip(*found, strict=True) for run in turn]  # methods take turns
        timed.make(runs, file, workers)
    rows = log.read_rows(file)
    for setting in settings:
        for limit, name in itertools.product(BUDGETS[setting], methods):
            print(f"{setting}, {limit} s, {name}: {ranking(tried(rows, setting, name, limit))[0]}")


def seconds(setting: str) -> int:
    """Budgets of all trials of a method in a setting."""
    first, later = (sum(n * more for n, more in rungs) for rungs in (SEEDS, SEEDS_LATER))
    small, large = BUDGETS[setting]
    return (RANDOM + CHILDREN + first) * small + (PROMOTED + CHILDREN_LATER + later) * large


def trials(setting: str, method: str, later: bool, rung: int, rows: list[dict]) -> list[Run]:
    """The runs of one of four rungs. The rows of its own runs do not change its configurations,
    because the search may have been stopped among them."""
    limit = BUDGETS[setting][later]
    own = tried(rows, setting, method, limit)
    if later:
        old = ranking(tried(rows, setting, method, BUDGETS[setting][0]))[:PROMOTED]
    else:
        old = configurations(setting, method, limit, RANDOM)
    first, more = FIRST_SEED, 1
    if rung == 0:
        flags = old
    elif rung == 1:
        best = [one for one in ranking(own, FIRST_SEED + 1) if one in old]
        parents, count = ((PARENTS, CHILDREN), (PARENTS_LATER, CHILDREN_LATER))[later]
        flags = children(best[:parents], count, f"{setting} {limit} {method}", old)
    else:
        rungs = (SEEDS, SEEDS_LATER)[later]
        first += 1 + sum(seeds for _, seeds in rungs[: rung - 2])
        count, more = rungs[rung - 2]
        flags = ranking(own)[:count]
    pairs = itertools.product(range(first, first + more), flags)
    make = lambda seed, one: Run(setting, method, one, limit, seed, search=True)
    return list(itertools.starmap(make, pairs))


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
    for limit, rungs in zip(BUDGETS[setting], (SEEDS, SEEDS_LATER), strict=True):
        if 0.5 <= budget / limit <= 2:
            own = tried(log.read_rows(file), setting, method, limit)
            last = FIRST_SEED + sum(more for _, more in rungs)  # the seed of the last runs
            if sum(row["seed"] == last for row in own) < rungs[-1][0]:
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


def children(parents: list[str], count: int, key: str, known: list[str]) -> list[str]:
    """`count` new flags. Each block comes from one parent. The learning rate keeps its ratio
    to the root of a step's completions, times 0.7 to 1.4."""
    rng, found = random.Random(f"children {key}"), []
    parsed = [dict(zip(*[iter(one.split())] * 2, strict=True)) for one in parents]
    while len(found) < count:
        child = {}
        for block in BLOCKS:
            parent = rng.choice(parsed)
            child |= {name: parent[name] for name in block if name in parent}
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
