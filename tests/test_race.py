"""The race by budget and its search: runs that end with their budget, halving, and the table."""

import itertools
import math
import os
import re
import subprocess
import sys
import time
import zlib
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

import arithmetic
import config
import train
from bench import race, timed, tune
from bench.timed import Run
from runtime import InputError, log

# ---------------------------------------------------------------------------- a run


@pytest.fixture
def clock(monkeypatch, small_runs):
    """A tiny run whose every step takes 0.3 s; returns the steps that each has planned."""
    seen, now = [], itertools.accumulate(itertools.cycle([0.0, 0.3]))
    monkeypatch.setattr(timed.time, "process_time", lambda: next(now))
    small = timed.SETTINGS["arithmetic"]._replace(problems=20, searched=5)
    monkeypatch.setattr(timed, "HELD_OUT", 40)
    monkeypatch.setitem(timed.SETTINGS, "arithmetic", small)
    real = train.Trainer.step
    monkeypatch.setattr(
        train.Trainer, "step", lambda self, n: seen.append(self.cfg.steps) or real(self, n)
    )
    return seen


def test_a_run_ends_with_its_budget(clock):
    """Ten steps of 0.3 s fill 3 s, and the schedule ends there. Catches a plan from the budget's
    start alone, seconds of the evaluation, a schedule that ends elsewhere, and another seed's
    draws."""
    runs = [Run("arithmetic", "pps", "--lr 1e-4", 3.0, seed) for seed in (0, 0, 1)]
    rows = [timed.train_for(run) for run in runs]
    assert clock == ([1000] + [10] * 9) * 3
    for row in rows:
        assert (row["steps"], row["seconds"], row["problems"], row["failed"]) == (10, 3.0, 20, None)
        assert 0 < row["wall_of_steps"] < row["wall"]
    same = [(row["tokens"], row["accuracy"]) for row in rows]
    assert same[0] == same[1] != same[2]


def test_flags_of_a_setting_and_a_run(clock, monkeypatch):
    """A run's flags come after the setting's, which spell out what train.py's defaults may change.

    Catches trials whose meaning changes with a default, and a run whose own flags do nothing.
    """
    seen = []
    real = train.Trainer.__init__
    monkeypatch.setattr(
        train.Trainer, "__init__", lambda self, cfg: seen.append(cfg) or real(self, cfg)
    )
    for flags in ("", "--loss grpo --adam-beta2 0.999"):
        timed.train_for(Run("arithmetic", "pps", flags, 0.3, 0))
    assert [(cfg.loss, cfg.adam_beta2) for cfg in seen] == [("dr_grpo", 0.95), ("grpo", 0.999)]
    for setting in timed.SETTINGS.values():
        cfg = config.parse_config(setting.flags.split())
        assert (cfg.lr_schedule, cfg.grad_clip, cfg.warmup) == ("linear", 1.0, 5)
        for name in ("--lr-schedule", "--loss", "--grad-clip", "--adam-beta2", "--warmup"):
            assert name in setting.flags
    free = {name for flags in itertools.chain(*tune.CHOICES) for name in flags.split()[::2]}
    assert free <= {*timed.BASE.split()}, "a flag of the search without a value of its own"


def test_plan():
    """The last eight steps say how long the others will take. Catches a mean of all steps, which a
    slow start would spoil, and a plan below the steps that were made."""
    assert timed.plan([5.0] + [1.0] * 8, 20.0) == 9 + 7
    assert timed.plan([1.0] * 8 + [3.0] * 8, 62.0) == 16 + 10
    assert timed.plan([4.0], 3.0) == 1
    assert timed.plan([2.0], 2.9) == 1, "another would end further from the budget"
    assert timed.plan([2.0], 3.1) == 2


def test_a_search_evaluates_on_other_problems(clock, monkeypatch):
    """Catches a search that sees the problems of the race, under their numbers or others."""
    asked = []
    real = timed.evaluation.sample_rewards

    def sample(policy, tokenizer, problems, prompts, *rest, **options):
        asked.append([problem.text for problem in problems])
        assert [tokenizer.decode(ids) for ids in prompts] == asked[-1]
        return real(policy, tokenizer, problems, prompts, *rest, **options)

    monkeypatch.setattr(timed.evaluation, "sample_rewards", sample)
    for search in (False, True):
        timed.train_for(Run("arithmetic", "grpo", "", 0.3, 100, search))
    texts = [arithmetic.problem("heldout", i)[0] for i in range(40)]
    assert asked[0] == texts[:20]
    assert len(asked[1]) == 5
    assert {*asked[1]} <= {*texts[20:]} - {*texts[:20]}
    assert {*texts[:20]} & {*texts[20:]}, "some problems are there twice"


def test_a_run_that_fails_is_a_row(small_runs, monkeypatch):
    """Accuracy 0, and what was wrong. Catches a search that a large learning rate ends."""

    for error in (InputError, FloatingPointError):

        def fails(self, step, error=error):
            raise error(f"step {step} is not finite")

        monkeypatch.setattr(train.Trainer, "step", fails)
        row = timed.train_for(Run("arithmetic", "grpo", "--lr 9", 3.0, 100))
        assert (row["accuracy"], row["failed"]) == (0.0, "step 1 is not finite")
    row = timed.train_for(Run("arithmetic", "grpo", "--lr -1", 3.0, 100))
    assert "must be above 0" in row["failed"]


# ---------------------------------------------------------------------------- many runs


@pytest.fixture
def fake(monkeypatch):
    """Runs that take no time; returns the list of them. Accuracy is a function of what a run is."""
    made = []

    def train_for(run):
        made.append(run)
        parts = [(run.flags,), (run.flags, run.budget), (run.flags, run.budget, run.seed)]
        accuracy = (
            sum(share * hash_of(part) for share, part in zip((1, 4, 4), parts, strict=True)) / 9
        )
        return vars(run) | {"accuracy": accuracy, "steps": 7, "seconds": 1.0, "failed": None}

    class Pool:
        def __init__(self, *_args):
            pass

        def __enter__(self):
            return self

        def __exit__(self, *_error):
            pass

        def shutdown(self, **_options):
            pass

        def submit(self, work, run):
            future = Future()
            future.set_result(work(run))
            return future

    monkeypatch.setattr(tune, "EARLIER", Path("there is none"))
    monkeypatch.setattr(timed, "train_for", train_for)
    monkeypatch.setattr(timed.arithmetic, "base_folder", lambda: None)
    monkeypatch.setattr(timed, "ProcessPoolExecutor", Pool)
    monkeypatch.setattr(timed, "as_completed", list)
    return made


def hash_of(thing):
    """A number from 0 to 1."""
    return zlib.crc32(repr(thing).encode()) / 2**32


def test_workers(tmp_path, monkeypatch, policy_folder):
    """Two real processes with one thread each. Catches workers that use all cores, a half-written
    line that stays, and rows in another order than the runs."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    file = tmp_path / "made" / "rows.jsonl"
    file.parent.mkdir()
    file.write_text('{"setting": "arith')
    flags = f"--model {policy_folder} --prompts-per-step 4 --group-size 2 --max-new-tokens 2"
    runs = [Run("arithmetic", "grpo", flags, 0.1, seed, search=True) for seed in (0, 1)]
    rows = timed.make(runs, file, workers=2)
    assert [row["seed"] for row in rows] == [0, 1]
    assert all(row["steps"] > 0 and row["failed"] is None for row in rows)
    assert sorted(row["seed"] for row in log.read_rows(file)) == [0, 1]
    assert timed.os.environ["OMP_NUM_THREADS"] == "1"
    monkeypatch.setattr(timed, "ProcessPoolExecutor", lambda *_: pytest.fail("made again"))
    assert timed.make(runs[::-1], file, 2) == rows[::-1]


def test_workers_end_with_their_parent(tmp_path, policy_folder):
    """Killed with -9. Catches workers that go on beside the next start, and record nothing."""
    program = (
        "from pathlib import Path\nfrom bench import timed\n"
        "if __name__ == '__main__':\n"
        f"    flags = '--model {policy_folder}'\n"
        "    runs = [timed.Run('arithmetic', '', flags, 900, seed) for seed in (0, 1)]\n"
        f"    timed.make(runs, Path({str(tmp_path)!r}, 'rows.jsonl'), 2)\n"
    )
    (tmp_path / "program.py").write_text(program)
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    parent = subprocess.Popen([sys.executable, tmp_path / "program.py"], env=environment)
    workers = []
    while len(workers) < 2:
        time.sleep(0.5)
        assert parent.poll() is None
        found = ["pgrep", "-f", "-P", str(parent.pid), "spawn_main"]
        found = subprocess.run(found, capture_output=True, text=True, check=False).stdout
        workers = [int(number) for number in found.split()]
    time.sleep(2)
    parent.kill()
    parent.wait()
    for _ in range(100):
        alive = [number for number in workers if Path(f"/proc/{number}").exists()]
        if not alive:
            return
        time.sleep(0.5)
    pytest.fail(f"{alive} are alive")


def test_the_base_model_is_made_once(fake, tmp_path, monkeypatch):
    """Before the workers start, and not for SmolLM2. Catches two workers that each train it."""
    made = []
    monkeypatch.setattr(timed.arithmetic, "base_folder", lambda: made.append(len(fake)))
    for setting, flags in (("words", ""), ("arithmetic", "--model x"), ("arithmetic", "--lr 1")):
        timed.make([Run(setting, "pps", flags, 5, 0)], tmp_path / "rows.jsonl", 2)
    assert made == [2]


def test_a_stop_cancels_the_rest(fake, tmp_path, monkeypatch):
    """Catches a Ctrl-C that makes all runs that were planned and records none."""
    stops = []
    monkeypatch.setattr(
        timed.ProcessPoolExecutor, "shutdown", lambda _, **given: stops.append(given)
    )
    monkeypatch.setattr(log, "append_rows", mock.Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        timed.make([Run("arithmetic", "pps", "", 10, 0)], tmp_path / "rows.jsonl", 2)
    assert stops == [{"cancel_futures": True}]


def test_rows_that_do_not_stand_for_a_run(fake, tmp_path):
    """Catches a row of other flags, another budget, seed, setting or method, and a search's row in
    place of the race's."""
    file = tmp_path / "rows.jsonl"
    run = Run("arithmetic", "pps", "--lr 1", 10, 0)
    timed.make([run, replace(run, budget=10.0)], file, 2)
    assert fake == [run], "once"
    changes = {"setting": "arithmetic-mixed", "method": "grpo", "flags": "", "budget": 20}
    changes |= {"seed": 1, "search": True}
    others = [replace(run, **{name: value}) for name, value in changes.items()]
    timed.make(others, file, 2)
    assert fake == [run, *others]


# ---------------------------------------------------------------------------- the search


@pytest.mark.parametrize("setting", tune.SEARCHES)
def test_configurations(setting):
    """The i-th configurations of all methods share their rate for its batch, schedule and clip, and
    all are accepted.

    Catches a larger search for pps, other learning rates for it, batches counted before the
    pruning, rates that are not spread, and rivals that keep none of a group.
    """
    for limit, count, *_rest in tune.SEARCHES[setting]:
        (lr_of_512, least), factors = tune.SPACE[setting], []
        found = {name: tune.configurations(setting, name, limit, count) for name in tune.RATES}
        assert {len({*own}) for own in found.values()} == {count}
        for together in zip(*found.values(), strict=True):
            shared, steps = set(), []
            for name, flags in zip(found, together, strict=True):
                assert tune.is_valid(flags)
                cfg = config.resolve(config.parse_config(flags.split()))
                assert cfg.method == {"grpo": "grpo_zero"}.get(name, name)
                assert cfg.group_size in ((2, 4, 8) if name == "grpo" else (8, 16, 32))
                kept = round(cfg.prompts_per_step * (1 - cfg.prompt_prune_rate))
                assert 0.95 * least <= kept * cfg.group_size / limit <= 12.2 * least
                factor = cfg.lr / lr_of_512 / math.sqrt(kept * cfg.group_size / 512)
                assert 0.95 * tune.FACTORS[0] < factor < 1.05 * tune.FACTORS[1]
                steps.append(factor)
                shared.add(("constant" in flags, "clip" in flags))
            assert max(steps) < 1.08 * min(steps), "a learning rate has two digits"
            assert len(shared) == 1
            factors += steps
        if count == 20:
            assert max(factors) > 4 * min(factors)


def search(tmp_path, methods="grpo,pps"):
    tune.main(methods, ("arithmetic",), 2, tmp_path / "tune.jsonl")


def prompts(flags):
    return int(re.search(r"--prompts-per-step (\d+)", flags)[1])


def is_child(flags, parents, larger):
    """Whether each flag is that of one of the parents, but for twice the prompts, and the learning
    rate is near one of theirs, over the root of the completions of a step."""

    def parts(text):
        found = dict(zip(*[iter(text.split())] * 2, strict=True))
        dropped = float(found.get("--prompt-prune-rate", 0))
        kept = round(int(found["--prompts-per-step"]) * (1 - dropped))
        return found, float(found["--lr"]) / math.sqrt(kept * int(found["--group-size"]))

    own, rate = parts(flags)
    theirs = [parts(one) for one in parents]
    near = any(1 / 1.45 < rate / other < 1.45 for _, other in theirs)
    prompts = {int(other["--prompts-per-step"]) for other, _ in theirs}
    prompts |= {2 * count for count in prompts if larger}
    same = lambda name: any(own.get(name) == other.get(name) for other, _ in theirs)
    rest = ({*own} | {*theirs[0][0]}) - {"--lr", "--prompts-per-step"}
    return near and int(own["--prompts-per-step"]) in prompts and all(map(same, rest))


def test_halving(fake, tmp_path, capsys, monkeypatch):
    """44 runs, then 8, 2 x 3 and 4 x 4 more; 11, 3, 2 and 3 x 3 with the larger budget; seeds from
    100.

    Catches a rung that keeps the worse ones, a method with more trials, candidates of the larger
    budget that are all new, parents that are not the best, and a winner with fewer seeds.
    """
    real, known = tune.children, []
    record = lambda *args: known.append({*args[3]} <= {*args[6]})
    monkeypatch.setattr(tune, "STRANGE", 0.0)
    monkeypatch.setattr(tune, "children", lambda *args: record(*args) or real(*args))
    search(tmp_path)
    rows = log.read_rows(file := tmp_path / "tune.jsonl")
    said = capsys.readouterr().out
    for method in ("grpo", "pps"):
        own = [row for row in rows if row["method"] == method]
        counts = [
            sum(r["budget"] == one and r["seed"] == seed for r in own)
            for one, seed in itertools.product((10, 40), range(100, 108))
        ]
        assert counts == [44, 8, 3, 3, 4, 4, 4, 4, 11, 3, 2, 3, 3, 3, 0, 0]
        at = lambda one, seed, own=own: [
            r["flags"] for r in own if (r["budget"], r["seed"]) == (one, seed)
        ]
        score = {r["flags"]: r["accuracy"] for r in own if (r["budget"], r["seed"]) == (10, 100)}
        assert set(at(10, 101)) == set(sorted(score, key=score.get)[-8:])
        assert set(at(10, 102)) == set(at(10, 103)) <= set(at(10, 101))
        assert set(at(10, 102)) <= set(at(40, 100)[:5]) <= set(score)
        assert not set(at(40, 100)[5:]) <= set(score)
        for one, sizes in ((10, (20, 8, 8, 8)), (40, (5, 3, 3))):
            flags = at(one, 100)
            same = [row for row in own if (row["budget"], row["seed"]) == (one, 100)]
            score = {row["flags"]: row["accuracy"] for row in same}
            for older, upto in itertools.pairwise(itertools.accumulate(sizes)):
                parents = sorted(flags[:older], key=score.get)[-4:]
                assert all(is_child(child, parents, one == 40) for child in flags[older:upto])
                if one == 40:
                    twice = {
                        2 * size if 2 * size <= 512 else size for size in map(prompts, parents)
                    }
                    assert prompts(flags[older]) in twice
        winners = lambda limit, name=method: tune.winners("arithmetic", name, limit, file)
        (ten,), (forty,) = winners(5), winners(80)
        assert ten in at(10, 107)
        assert forty in at(40, 105)
        assert set(at(10, 103)) < set(at(10, 104)) == set(at(10, 107))
        assert set(at(40, 102)) < set(at(40, 103)) == set(at(40, 105))
        assert winners(20) == [ten, forty]
        assert f"arithmetic, 40 s, {method}: {forty}\n" in said
    spent = sum(row["budget"] for row in rows)
    assert said.startswith(f"{spent} seconds")
    assert known
    assert all(known), "a child may not be one of the earlier configurations"
    assert all(run.search for run in fake)
    for name, number in itertools.product(("grpo", "pps"), (0, 1)):
        rungs = sum(map(len, tune.SEARCHES["arithmetic"][number][2:])) + 1
        again = [tune.trials("arithmetic", name, number, rung, rows) for rung in range(rungs)]
        assert all(any(map(run.is_row, rows)) for run in itertools.chain(*again)), "not chosen anew"
    order = [run.method for run in fake]
    assert order == ["grpo", "pps"] * (len(order) // 2), "methods take turns"


def children(parents, count, known=(), larger=0):
    return tune.children("arithmetic", "grpo", 10, parents, count, "", [*known], larger)


def test_children_are_new(monkeypatch):
    """Catches a trial that is made twice: two digits of a learning rate are soon used up."""
    monkeypatch.setattr(tune, "STRANGE", 0.0)
    (parent,) = tune.configurations("arithmetic", "grpo", 10, 1)
    found = children([parent], 15, [parent])
    assert len({*found, parent}) == 16
    assert [prompts(one) / prompts(parent) for one in children([parent], 6, (), 3)] == [
        2, 1, 1, 2, 1, 1,
    ]  # fmt: skip
    full = re.sub(r"step \d+", f"step {arithmetic.TRAIN_PROBLEMS}", parent)
    assert len(children([full], 3, (), 3)) == 3, "there are no more prompts"


def test_strange_flags(monkeypatch):
    """Some blocks of a child are those of new random configurations, and the chance says how many.

    Catches children that only ever have their parents' flags, or the same strangers each time.
    """
    parents = [one for one in tune.configurations("arithmetic", "grpo", 10, 20) if "size 2" in one]
    groups = lambda flags: [tune.parse(one)["--group-size"] for one in flags]
    assert groups(parents) == ["2"] * len(parents)
    few = groups(children(parents, 100))
    assert {*few} == {"2", "4", "8"}
    assert 70 < few.count("2") < 95, "a sixth of two thirds are others"
    for chance in (0.0, 1.0):
        monkeypatch.setattr(tune, "STRANGE", chance)
        assert len({*groups(children(parents, 20))}) == (1, 3)[int(chance)]
    keys, real = [], tune.configurations
    record = lambda *args: keys.append(args[-1]) or real(*args)
    monkeypatch.setattr(tune, "configurations", record)
    for generation in ("0", "1"):
        tune.children("arithmetic", "grpo", 10, parents, 3, generation, [])
    assert len({*keys}) == 2


def test_balanced():
    """Each value equally often or once more, in random order. Catches choices that are drawn one by
    one, of which six of sixteen had groups of 32."""
    found = [tune.balanced(tune.random.Random(seed), "abc", 8) for seed in range(20)]
    assert {tuple(sorted(one.count(x) for x in "abc")) for one in found} == {(2, 3, 3)}
    assert len({tuple(one) for one in found}) > 15
    assert len({min("abc", key=one.count) for one in found}) == 3, "any value may be the rarer one"
    flags = [tune.parse(one) for one in tune.configurations("arithmetic", "pps", 10, 20)]
    for name, counts in (("--group-size", {6, 7}), ("--lr-schedule", {10}), ("--grad-clip", {10})):
        values = [one[name] for one in flags if name in one]
        assert {values.count(value) for value in values} <= counts, name
    rates = [(one["--prompt-prune-rate"], one["--completion-prune-rate"]) for one in flags]
    assert {rates.count(pair) for pair in rates} == {2, 3}


@pytest.mark.parametrize("kills", [(1, 30, 50, 60, 75), (95, 110, 125, 136, 145)])
def test_a_killed_search_goes_on(fake, tmp_path, monkeypatch, kills):
    """The same rows as a search that was not killed. Catches rungs that are chosen anew by what
    their own first runs have shown, and trials that are repeated."""
    search(tmp_path)
    whole = sorted((tmp_path / "tune.jsonl").read_text().splitlines())
    (tmp_path / "tune.jsonl").unlink()
    fake.clear()
    real = log.append_rows
    counts = iter(range(1000))

    def killed(path, rows):
        if next(counts) in kills:
            raise KeyboardInterrupt
        real(path, rows)

    monkeypatch.setattr(log, "append_rows", killed)
    for _ in kills:
        with pytest.raises(KeyboardInterrupt):
            search(tmp_path)
    search(tmp_path)
    assert sorted((tmp_path / "tune.jsonl").read_text().splitlines()) == whole
    monkeypatch.setattr(timed, "train_for", lambda _run: pytest.fail("repeated"))
    search(tmp_path)


def test_finals_are_of_all_searches(fake, tmp_path, monkeypatch):
    """Catches a lucky configuration of an earlier search that gets no more seeds, but still wins,
    and a larger budget that begins without it."""
    search(tmp_path, "grpo")
    rows, lucky = log.read_rows(tmp_path / "tune.jsonl"), "--method grpo_zero --lr 9"
    monkeypatch.setattr(tune, "EARLIER", tmp_path / "earlier.jsonl")
    own = [rows[0] | {"flags": lucky, "seed": seed, "accuracy": 1.0} for seed in range(100, 104)]
    log.write_rows(tune.EARLIER, own)
    finals = tune.trials("arithmetic", "grpo", 0, 6, rows)
    assert {run.seed for run in finals if run.flags == lucky} == {104, 105, 106, 107}
    assert lucky in [run.flags for run in tune.trials("arithmetic", "grpo", 1, 0, rows)]
    assert lucky not in [run.flags for run in tune.trials("arithmetic", "grpo", 0, 4, rows)]


def test_winners_of_earlier_searches(fake, tmp_path, monkeypatch):
    """Catches a baseline without the better flags that an earlier search had found, and one of
    fewer seeds that was lucky."""
    search(tmp_path, "grpo")
    file, earlier = tmp_path / "tune.jsonl", tmp_path / "earlier.jsonl"
    monkeypatch.setattr(tune, "EARLIER", earlier)
    (best,) = tune.winners("arithmetic", "grpo", 5, file)
    own = log.read_rows(file)[0]
    log.write_rows(earlier, 9 * [own | {"flags": "--lr 9", "accuracy": 1.0}])
    assert tune.winners("arithmetic", "grpo", 5, file) == [best], "nine runs of one seed"
    for seeds, accuracy, flags in ((7, 1.0, best), (8, 0.0, best), (8, 1.0, "--lr 9")):
        rows = [own | {"flags": "--lr 9", "seed": n, "accuracy": accuracy} for n in range(seeds)]
        log.write_rows(earlier, rows)
        assert tune.winners("arithmetic", "grpo", 5, file) == [flags]


def test_winners_of_an_unfinished_search(fake, tmp_path):
    """Catches a race with flags that no search has finished, or far from a searched budget."""
    search(tmp_path, "pps")
    file = tmp_path / "tune.jsonl"
    with pytest.raises(InputError, match="--budgets 81: flags were searched for 10 and 40 s"):
        tune.winners("arithmetic", "pps", 81, file)
    with pytest.raises(InputError, match="no whole search at 10 s; run python -m bench tune"):
        tune.winners("arithmetic", "grpo", 10, file)
    rows = log.read_rows(file)
    log.write_rows(file, rows[:-1])
    with pytest.raises(InputError, match="no whole search at 40 s"):
        tune.winners("arithmetic", "pps", 40, file)
    log.write_rows(file, [row for row in rows if row["budget"] == 40 or row["seed"] < 107])
    with pytest.raises(InputError, match="no whole search at 10 s"):
        tune.winners("arithmetic", "pps", 10, file)
    assert tune.winners("arithmetic", "pps", 40, file)


# ---------------------------------------------------------------------------- the race


def raced(tmp_path, **options):
    race.main(json_file=tmp_path / "race.jsonl", **options)
    return log.read_rows(tmp_path / "race.jsonl")


def test_the_race(fake, tmp_path, monkeypatch, capsys):
    """The better winner is raced at a budget between two.

    Catches the worse one, a race on seeds or problems of the search, more seeds for a method, and
    methods that do not take turns.
    """
    found = lambda setting, method, one: [f"{method} --lr 1", f"{method} --lr 5"][: 1 + (one > 9)]
    monkeypatch.setattr(tune, "winners", found)
    rows = raced(tmp_path, methods="pps,grpo,grpo-32x16", budgets=(5, 20))
    contests = [run for run in fake if run.search]
    assert [(run.seed, run.budget) for run in contests] == [(100, 20)] * 4
    made = [run for run in fake if not run.search]
    assert [run.seed for run in made[:7]] == [10, 10, 10, 11, 11, 11, 12]
    assert [run.method for run in made] == ["pps", "grpo", "grpo-32x16"] * (10 + 5)
    assert [run.budget for run in made] == [5] * 30 + [20] * 15
    assert len({run.flags.split()[-1] for run in made if run.budget == 20}) == 3, "1, 5, and none"
    for name in ("pps", "grpo"):
        own = [row for row in rows if row["search"] and row["method"] == name]
        best = max(own, key=lambda row: row["accuracy"])["flags"]
        assert {run.flags for run in made if (run.method, run.budget) == (name, 20)} == {best}
    count = len(fake)
    said = capsys.readouterr().out
    raced(tmp_path, methods="pps,grpo", budgets=(5, 20), table=True)
    assert capsys.readouterr().out.strip() in said
    raced(tmp_path, methods="pps,grpo", budgets=(5, 20))
    assert len(fake) == count, "finished runs are not repeated"


def test_borrowed_flags(monkeypatch):
    """A rule without a search has all of another's flags but the method, and --method grpo has
    its own. Catches rivals with train.py's defaults, which are pps's."""
    flags = {"grpo": "--method grpo_zero --lr 1", "pps": "--method pps --lr 2"}
    monkeypatch.setattr(tune, "winners", lambda _setting, name, _budget: [flags[name]])
    for name, lr in (("uniform", 2), ("greso", 1), ("dppo_floor", 1), ("dynamic", 1), ("mopps", 1)):
        (run,) = race.attempts("arithmetic", name, 10)
        assert run.flags == f"--method {name} --lr {lr}"
        assert config.parse_config(run.flags.split()).method == run.method == name
    (run,) = race.attempts("arithmetic", "grpo-32x16", 10)
    flags = f"{timed.SETTINGS['arithmetic'].flags} {run.flags}".split()
    cfg = config.resolve(config.parse_config(flags))
    assert (cfg.method, cfg.prompts_per_step, cfg.group_size, cfg.lr) == ("grpo", 32, 16, 6e-4)
    assert (cfg.loss, cfg.adam_beta2, cfg.lr_schedule) == ("grpo", 0.999, "linear")
    assert {*tune.RATES, *race.BORROWED, *race.FIXED} == {*race.METHODS}


def test_a_failed_run_of_a_race(fake, tmp_path, monkeypatch):
    """Catches a table in which a run that could not go on has the accuracy 0."""
    real = timed.train_for
    monkeypatch.setattr(timed, "train_for", lambda run: real(run) | {"failed": "the loss is nan"})
    with pytest.raises(InputError, match="arithmetic, --method grpo --prompts-per-step 32 "):
        raced(tmp_path, methods="grpo-32x16", budgets=(5,))


def test_a_missing_search_is_reported_first(fake, tmp_path, monkeypatch):
    """Catches a race that finds out after its first setting."""
    search(tmp_path)
    fake.clear()
    monkeypatch.setattr(tune.winners, "__defaults__", (tmp_path / "tune.jsonl",))
    with pytest.raises(InputError, match="no whole search at 20 s"):
        raced(tmp_path, settings=("arithmetic", "arithmetic-mixed"), budgets=(20,))
    assert fake == []


def rows_of(method, accuracy, one=10, flags="", setting="arithmetic", search=False):
    return [
        {"setting": setting, "method": method, "flags": flags, "budget": one, "seed": seed,
         "search": search, "accuracy": value}
        for seed, value in enumerate(accuracy)
    ]  # fmt: skip


def test_the_table():
    """By hand: pps 0.7, 0.8, 0.9 and GRPO 0.5, 0.7, 0.6, differences 0.2, 0.1, 0.3.

    Catches unpaired differences, normal quantiles, runs of a search, of flags that are no longer
    raced and of another setting, and a comparison with half of the time in place of twice.
    """
    rows = rows_of("pps", (0.1,) * 9, flags="--lr 1")
    rows += rows_of("pps", (0.7, 0.8, 0.9)) + rows_of("grpo", (0.5, 0.7, 0.6))
    rows += rows_of("pps", (0.0,) * 9, search=True)
    rows += rows_of("pps", (0.0,) * 9, setting="arithmetic-mixed")
    rows += rows_of("grpo", (0.65, 0.95), one=20)
    table = race.as_table(rows, "arithmetic").splitlines()
    cells = {line.split(" | ")[0].strip("| "): line.strip("| ").split(" | ")[1:] for line in table}
    assert cells["seconds"] == ["10", "20"]
    half = 4.30 * 0.1 / math.sqrt(3)
    assert cells["pps"][0] == f"0.800 ± {half:.3f}"
    assert cells["GRPO, tuned"] == [f"0.600 ± {half:.3f}", "0.800 ± 1.906"]
    assert cells["pps - GRPO"][0] == f"+0.200 ± {half:.3f}"
    assert cells["pps - GRPO at twice"][0] == f"-0.050 ± {12.71 * 0.1:.3f}"
    assert "PODS, tuned" not in cells


def test_the_picture(tmp_path):
    """A panel for each setting that has rows, a line for each method that has, at the mean with its
    interval. Catches accuracies of other flags, and budgets at the wrong place."""
    rows = rows_of("pps", (0.7, 0.8, 0.9)) + rows_of("pps", (0.9, 1.0), one=20)
    rows += rows_of("grpo", (0.5,)) + rows_of("grpo", (0.6, 0.8), setting="words", one=300)
    figure = race.draw(rows)
    first, second = figure.axes
    assert [axes.get_title() for axes in figure.axes] == ["arithmetic", "words"]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["pps", "GRPO, tuned"]
    (pps, bars, _), (grpo, *_) = (line.lines for line in first.containers)
    assert [*pps.get_xdata()] == [10, 20]
    assert [*pps.get_ydata()] == pytest.approx([0.8, 0.95])
    half = 4.30 * 0.1 / math.sqrt(3)
    assert bars[1].get_ydata()[0] == pytest.approx(0.8 + half)
    assert [*grpo.get_ydata()] == [0.5]
    assert [label.get_text() for label in second.get_xticklabels()] == ["300"]
    log.write_rows(file := tmp_path / "rows.jsonl", rows)
    race.main(table=True, json_file=file)
    assert (tmp_path / "rows.png").exists()


def test_interval_is_students():
    """Of ten and of three values; none for one. Catches a degree of freedom too many."""
    values = dict(enumerate([1.0, 2.0, 3.0]))
    assert race.interval(values) == pytest.approx((2.0, 4.30 / math.sqrt(3)))
    ten = dict(enumerate([0.0, 2.0] * 5))
    assert race.interval(ten) == pytest.approx((1.0, 2.26 * math.sqrt(10 / 9) / math.sqrt(10)))
    assert race.interval({0: 0.5})[0] == 0.5
    assert math.isnan(race.interval({0: 0.5})[1])
    assert all(map(math.isnan, race.interval({})))


@pytest.mark.parametrize(
    ("command", "options", "message"),
    [
        (race, {"methods": "pps,grop"}, "--methods grop: choose from pps, grpo"),
        (
            race,
            {"settings": ("words",), "methods": "pps,grpo-32x16"},
            "--methods grpo-32x16: its flags are not for --settings words",
        ),
        (race, {"settings": ("gsm8k",)}, "--settings gsm8k: choose from arithmetic, arithm"),
        (tune, {"methods": "greso"}, "--methods greso: choose from grpo, pps, dppo"),
        (tune, {"settings": ("words",)}, "--settings words: there is no .*; run bash runs/smollm2"),
        (race, {"settings": ("words",)}, "--settings words: there is no .*; run bash runs/smollm2"),
    ],
)
def test_names_are_checked_first(command, options, message, tmp_path, monkeypatch):
    """Catches a race that fails hours later."""
    missing = tmp_path / "sft"
    monkeypatch.setattr(timed, "SFT", tmp_path if "methods" in options else missing)
    with pytest.raises(InputError, match=message):
        command.main(json_file=tmp_path / "rows.jsonl", **options)
    assert not list(tmp_path.iterdir())
