"""
The search: for each method, the flags that are most accurate after a budget of seconds.

    python -m bench tune                                  GRPO and pps in both settings
    python -m bench tune --methods dppo,pods,cppo         three others, with as many trials
    python -m bench tune --settings words                 SmolLM2, after bash runs/smollm2.sh

Random search with successive halving (Jamieson and Talwalkar, arXiv:1502.07943), and with children
of the best, in each setting at two budgets (SEARCHES). In the default task:

- at the smaller one, 20 random configurations and then three generations of 8 children have a run
  each. The best 8 of all have a second seed, the best 3 two more, and the best 4 another four.
- at the larger one, the best 5 of the smaller one (before those four) and then two generations of 3
  children have a run, the best 3 a second seed, the best 2 a third, and the best 3 three more.

The mixed task has fewer trials, and SmolLM2 fewer still: see SEARCHES.

Of the random ones, equally many have each value of a flag. A child has each flag from one of the
best 4 so far, or, one time in six, from a new random configuration. Its learning rate is up to 1.4
times larger or smaller for its batch than that of one of the best. At the larger budget, every
third child samples twice as many prompts. A configuration's score is its mean accuracy over its
seeds. The winner is the best of those with most seeds.

All methods have equally many trials at the same budgets, so the same seconds. The i-th random
configurations of all methods share learning rate (for its batch), schedule and clip by norm; each
has batch, group and rates of its own (SPACES). GRPO, pps, PODS and CPPO leave out the terms that
are exactly 0; DPPO trains on those that its rule keeps. Seeds begin at 100, and no trial is
evaluated on a problem of the race. A trial that fails has the accuracy 0. Every trial is a row of
the file; the same command resumes after a stop.

GRPO and pps were searched before in the default task, in wider spaces and on a slower machine.
Those trials chose what all methods share (timed.BASE), and the spaces.
"""

import functools
import itertools
import math
import random
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import config
import sampler
from bench import JsonFile, timed
from bench.timed import Run
from runtime import InputError, log
from tasks.arithmetic import TRAIN_PROBLEMS  # words has as many

FILE = Path("runs/tune.jsonl")
PARENTS, STRANGE = 4, 1 / 6


class Search(NamedTuple):
    """A search at one budget. Counts are of each method."""

    budget: float  # in seconds
    first: int  # configurations that it begins with: random, or the best at the budget before
    children: tuple[int, ...]  # of each generation
    seeds: tuple[tuple[int, int], ...]  # then: how many of the best have how many more seeds

    @property
    def seconds(self) -> float:
        """Budgets of all trials of a method."""
        more = sum(count * seeds for count, seeds in self.seeds)
        return (self.first + sum(self.children) + more) * self.budget


SMALL = Search(10, 20, (8, 8, 8), ((8, 1), (3, 2), (4, 4)))
LARGE = Search(40, 5, (3, 3), ((3, 1), (2, 1), (3, 3)))
SEARCHES = {
    "arithmetic": (SMALL, LARGE),
    "arithmetic-mixed": (
        Search(20, 16, (8, 8), ((6, 1), (3, 2), (3, 4))),
        Search(80, 4, (3,), ((3, 1), (2, 2), (2, 4))),
    ),
    "words": (Search(240, 8, (4,), ((3, 1),)), Search(480, 3, (1,), ((2, 2),))),
}


class Space(NamedTuple):
    """What a search chooses from for one method."""

    method: str  # train.py's name
    groups: tuple[int, ...] = (8, 16, 32)
    prompt_rates: tuple[float, ...] = ()  # r_q
    completion_rates: tuple[float, ...] = ()  # r_o
    fewest: int = 0  # completions that the rule keeps of each group, in random configurations


SPACES = {
    "grpo": Space("grpo_zero", (2, 4, 8)),
    "pps": Space("pps", prompt_rates=(0.6, 0.75), completion_rates=(0.7, 0.8, 0.9, 0.95)),
    "dppo": Space("dppo", prompt_rates=(0.0, 0.3, 0.6), completion_rates=(0.5, 0.7, 0.9)),
    "pods": Space("pods", completion_rates=(0.5, 0.7, 0.8, 0.9), fewest=2),
    "cppo": Space("cppo", completion_rates=(0.5, 0.7, 0.8, 0.9), fewest=2),
}
BATCHES = {  # learning rate for 512 completions a step; the fewest and the most a second of budget
    "arithmetic": (6e-4, 6, 72),
    "arithmetic-mixed": (6e-4, 3, 36),
    "words": (2.8e-5, 0.1, 1.1),
}
MOST = {("words", "grpo"): 0.6}  # it trains on them all, and would have two or three steps
MORE_RATES = {("arithmetic", "pps"): (0.98,)}  # r_o; elsewhere not searched yet
FIRST_SEED = 100
CHOICES = (("", " --lr-schedule constant"), ("", " --grad-clip 0"))
BLOCKS = (  # flags that a child takes from the same parent
    ("--method", "--prompts-per-step", "--group-size", "--prompt-prune-rate"),
    ("--completion-prune-rate",),
    ("--lr-schedule", "--warmup"),
    ("--grad-clip", "--loss", "--adam-beta2"),
)
FACTORS = (0.7, 4.0)  # learning rates, over that of BATCHES x root(completions of a step / 512)


def main(
    methods: str = "grpo,pps",
    settings: tuple[str, ...] = ("arithmetic", "arithmetic-mixed"),
    workers: int = 2,
    json_file: JsonFile = FILE,
) -> None:
    """Search each method's flags at two budgets of each setting, and print the winners.

    Args:
        methods: of grpo (without the terms that are exactly 0), pps, dppo, pods and cppo
        settings: arithmetic, arithmetic-mixed, words
        workers: runs at a time, each with one thread
        json_file: where the rows of all trials are
    """
    methods = methods.split(",")
    timed.check_names("--methods", methods, SPACES)
    timed.check_settings(settings)
    spent = sum(one.seconds for name in settings for one in SEARCHES[name]) * len(methods)
    print(f"{spent} seconds of one thread, and a tenth to a quarter more for evaluations")
    for setting in settings:
        for number, search in enumerate(SEARCHES[setting]):
            for rung in range(1 + len(search.children) + len(search.seeds)):
                rows = log.read_rows(json_file)
                found = [trials(setting, name, number, rung, rows) for name in methods]
                runs = [run for turn in zip(*found, strict=True) for run in turn]  # in turns
                timed.make(runs, json_file, workers)
    for setting in settings:
        for search, name in itertools.product(SEARCHES[setting], methods):
            best = winners(setting, name, search.budget, json_file)[0]
            print(f"{setting}, {search.budget} s, {name}: {best}")


def trials(setting: str, method: str, number: int, rung: int, rows: list[dict]) -> list[Run]:
    """The runs of a rung: the first ones, a generation, or more seeds. The rows of its own runs do
    not change its configurations, because the search may have been stopped among them."""
    search = SEARCHES[setting][number]
    first, more, old = FIRST_SEED, 1, len(search.children)
    if rung <= old:
        flags = generations(setting, method, number, rows)[rung]
    else:
        seeds = search.seeds[: rung - old]
        (count, more), first = seeds[-1], first + 1 + sum(more for _, more in seeds[:-1])
        flags = ranking(tried(rows, setting, method, search.budget), first)[:count]
    pairs = itertools.product(range(first, first + more), flags)
    make = lambda seed, one: Run(setting, method, one, search.budget, seed, search=True)
    return list(itertools.starmap(make, pairs))


def generations(setting: str, method: str, number: int, rows: list[dict]) -> list[list[str]]:
    """The configurations of a search: those that it begins with, and its generations, as far as the
    rows of each one's parents are there."""
    search, before = SEARCHES[setting][number], SEARCHES[setting][:number]
    limit = search.budget
    if before:
        finals = FIRST_SEED + 1 + sum(more for _, more in before[-1].seeds[:-1])
        best = ranking(tried(rows, setting, method, before[-1].budget), finals)
        found = [best[: search.first]]
    else:
        found = [configurations(setting, method, limit, search.first)]
    scores = ranking(tried(rows, setting, method, limit), FIRST_SEED + 1)
    for generation, count in enumerate(search.children):
        known = list(itertools.chain(*found))
        if not {*known} <= {*scores}:
            break
        best = [one for one in scores if one in known][:PARENTS]
        names, larger = (setting, method, limit), 3 if before else 0
        found.append(children(*names, best, count, str(generation), known, larger))
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
            found.setdefault(row["flags"], {})[row["seed"]] = row["accuracy"]
    mean = lambda one: statistics.mean(found[one].values())
    return sorted(found, key=lambda one: (-len(found[one]), -mean(one)))


def winners(setting: str, method: str, budget: float, file: Path = FILE) -> list[str]:
    """The flags that won at this budget or, if it was not searched, at those that are at most a
    factor of two away.

    InputError if there are none, or if this search has not ended.
    """
    found = []
    factor = 1 if budget in [search.budget for search in SEARCHES[setting]] else 2
    for limit, _first, _children, seeds in SEARCHES[setting]:
        if 1 / factor <= budget / limit <= factor:
            own = tried(log.read_rows(file), setting, method, limit)
            last = FIRST_SEED + sum(more for _, more in seeds)  # the seed of the last runs
            if sum(row["seed"] == last for row in own) < seeds[-1][0]:
                command = f"python -m bench tune --methods {method} --settings {setting}"
                raise InputError(f"{file} has no whole search at {limit} s; run {command}")
            found.append(ranking(own)[0])
    if not found:
        limits = " and ".join(str(search.budget) for search in SEARCHES[setting])
        raise InputError(
            f"--budgets {budget:g}: flags were searched for {limits} s in {setting}; give budgets "
            f"between half and twice of these"
        )
    return [*dict.fromkeys(found)]


def configurations(setting: str, method: str, limit: float, count: int, key: str = "") -> list[str]:
    """`count` random flags for runs of so many seconds, other ones for each key."""
    shared = random.Random(f"{setting} {limit} {key}")
    own = random.Random(f"{setting} {limit} {key} {method}")
    columns = [balanced(shared, values, count) for values in CHOICES]
    places = shared.sample(range(count), count)
    factors = [
        FACTORS[0] * (FACTORS[1] / FACTORS[0]) ** ((place + shared.random()) / count)
        for place in places
    ]
    lr_of_512, fewest, most = BATCHES[setting]
    fewest, most = fewest * limit, MOST.get((setting, method), most) * limit
    space, sizes = SPACES[method], (16, 32, 64, 128, 256)  # prompts
    groups = [group for group in space.groups if sizes[0] * group <= most]
    groups = balanced(own, groups, count)
    more = space.completion_rates + MORE_RATES.get((setting, method), ())
    rates = itertools.product(space.prompt_rates or (0.0,), more or (0.0,))
    rates = balanced(own, tuple(rates), count)
    found = []
    for group, (dropped, rate), factor, *choices in zip(
        groups, rates, factors, *columns, strict=True
    ):
        valid = [n for n in sizes if fewest <= n * group <= most]
        valid = [n for n in valid if n <= TRAIN_PROBLEMS * (1 - dropped)]
        prompts = own.choice(valid)
        lr = lr_of_512 * factor * math.sqrt(prompts * group / 512)
        flags = f"--method {space.method} --prompts-per-step {round(prompts / (1 - dropped))}"
        flags += f" --group-size {group}"
        if space.prompt_rates:
            flags += f" --prompt-prune-rate {dropped}"
        if space.completion_rates:
            flags += f" --completion-prune-rate {min(rate, 1 - space.fewest / group)}"
        found.append(f"{flags} --lr {lr:.2g}{''.join(choices)}")
    return found


def balanced(rng: random.Random, values: Sequence, count: int) -> list:
    """`count` of the values in random order, each equally often or once more."""
    values = rng.sample(values, len(values))
    return rng.sample([values[i % len(values)] for i in range(count)], count)


def children(
    setting: str,
    method: str,
    limit: float,
    parents: list[str],
    count: int,
    key: str,
    known: list[str],
    larger: int = 0,
) -> list[str]:
    """`count` new flags. Each block comes from one parent or, with the chance STRANGE, from a
    random configuration. The learning rate keeps a parent's ratio to the root of a step's
    completions, times 0.7 to 1.4. One in `larger` has twice the prompts."""
    rng, found = random.Random(f"children {setting} {limit} {method} {key}"), []
    parsed = list(map(parse, parents))
    strangers = list(map(parse, configurations(setting, method, limit, 8, f"strangers {key}")))
    while len(found) < count:
        child = {}
        for block in BLOCKS:
            source = rng.choice(strangers if rng.random() < STRANGE else parsed)
            child |= {name: source[name] for name in block if name in source}
        prompts = int(child["--prompts-per-step"])
        if larger and len(found) % larger == 0 and 2 * prompts <= TRAIN_PROBLEMS:
            child["--prompts-per-step"] = str(2 * prompts)
        parent = rng.choice(parsed)
        factor = math.sqrt(completions(child) / completions(parent)) * 1.4 ** rng.uniform(-1, 1)
        child["--lr"] = f"{float(parent['--lr']) * factor:.2g}"
        flags = " ".join(itertools.chain(*child.items()))
        if flags not in [*known, *found] and is_valid(flags):
            found.append(flags)
    return found


def parse(flags: str) -> dict[str, str]:
    """{flag: value} of flags that all have one."""
    return dict(zip(*[iter(flags.split())] * 2, strict=True))


def completions(flags: dict[str, str]) -> int:
    """How many a step of these flags samples."""
    dropped = float(flags.get("--prompt-prune-rate", 0))
    return sampler.kept_prompts(int(flags["--prompts-per-step"]), dropped) * int(
        flags["--group-size"]
    )


@functools.cache
def is_valid(flags: str) -> bool:
    """Whether train.py takes the flags, for as many prompts as the embedded tasks have."""
    try:
        cfg = config.resolve(config.parse_config(flags.split()))
        config.check_prompts(cfg, TRAIN_PROBLEMS)
    except InputError:
        return False
    return True
