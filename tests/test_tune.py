"""The search: its space, children, halving, finals and winners."""

import itertools
import math
import re
import statistics
from dataclasses import replace

import pytest

import config
from bench import race, timed, tune
from runtime import InputError, log
from tasks import arithmetic


@pytest.mark.parametrize("setting", tune.SEARCHES)
def test_configurations(setting):
    """The i-th configurations of all methods share their rate for its batch, schedule and clip, and
    all are accepted.

    Catches a larger search for pps, other learning rates for it, batches counted before the
    pruning, rates that are not spread, rivals that keep none of a group, and steps too large for a
    budget.
    """
    for limit, count, *_rest in tune.SEARCHES[setting]:
        (lr_of_512, fewest, most), factors = tune.BATCHES[setting], []
        found = {name: tune.configurations(setting, name, limit, count) for name in tune.SPACES}
        assert {len({*own}) for own in found.values()} == {count}
        for together in zip(*found.values(), strict=True):
            shared, steps = set(), []
            for name, flags in zip(found, together, strict=True):
                assert tune.is_valid(flags)
                cfg = config.resolve(config.parse_config(flags.split()))
                assert cfg.method == {"grpo": "grpo_zero"}.get(name, name)
                assert cfg.group_size in ((2, 4, 8) if name == "grpo" else (8, 16, 32))
                kept = round(cfg.prompts_per_step * (1 - cfg.prompt_prune_rate))
                largest = tune.MOST.get((setting, name), most)
                assert 0.95 * fewest <= kept * cfg.group_size / limit <= 1.02 * largest
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


def test_halving(fake_runs, tmp_path, capsys, monkeypatch):
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
        assert winners(20) == [*dict.fromkeys([ten, forty])]
        assert f"arithmetic, 40 s, {method}: {forty}\n" in said
    spent = sum(row["budget"] for row in rows)
    assert said.startswith(f"{spent} seconds")
    assert known
    assert all(known), "a child may not be one of the earlier configurations"
    assert all(run.search for run in fake_runs)
    for name, number in itertools.product(("grpo", "pps"), (0, 1)):
        rungs = sum(map(len, tune.SEARCHES["arithmetic"][number][2:])) + 1
        again = [tune.trials("arithmetic", name, number, rung, rows) for rung in range(rungs)]
        assert all(any(map(run.is_row, rows)) for run in itertools.chain(*again)), "not chosen anew"
    order = [run.method for run in fake_runs]
    assert order == ["grpo", "pps"] * (len(order) // 2), "methods take turns"


def test_search_of_smollm2(fake_runs, tmp_path, monkeypatch):
    """The best three of 240 s and a child with twice the prompts are tried for 480 s, and each
    budget is raced with its own winner. Catches flags that were searched for half of their time."""
    monkeypatch.setattr(timed, "SFT", tmp_path)
    tune.main("grpo", ("words",), 2, file := tmp_path / "tune.jsonl")
    rows = log.read_rows(file)
    at = lambda one, seed: [r for r in rows if (r["budget"], r["seed"]) == (one, seed)]
    flags = lambda one, seed: {row["flags"] for row in at(one, seed)}
    assert [len(at(240, n)) for n in (100, 101, 102)] == [12, 3, 0]
    assert [len(at(480, n)) for n in (100, 101, 102, 103)] == [4, 2, 2, 0]
    best = sorted(at(240, 100), key=lambda row: row["accuracy"])[-3:]
    assert flags(480, 100) > flags(240, 101) == {row["flags"] for row in best}
    (child,) = flags(480, 100) - flags(240, 101)
    assert prompts(child) in {2 * prompts(row["flags"]) for row in best}
    assert flags(480, 101) == flags(480, 102) < flags(480, 100)
    (small,) = tune.winners("words", "grpo", 240, file)
    fails = lambda row: row["budget"] == 480 and row["flags"] == small
    log.write_rows(file, [row | {"accuracy": 0.0} if fails(row) else row for row in rows])
    found = {one: tune.winners("words", "grpo", one, file) for one in (120, 240, 360, 480, 960)}
    assert found[240] == [small] != found[480]
    assert found[360] == found[240] + found[480]
    assert found[120] == found[240]
    assert found[960] == found[480]


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
    assert {rates.count(pair) for pair in rates} == {2}
    mixed = " ".join(tune.configurations("arithmetic-mixed", "pps", 20, 16))
    assert "--completion-prune-rate 0.95" in mixed
    assert "--completion-prune-rate 0.98" not in mixed


@pytest.mark.parametrize("kills", [(1, 30, 50, 60, 75), (95, 110, 125, 136, 145)])
def test_a_killed_search_goes_on(fake_runs, tmp_path, monkeypatch, kills):
    """The same rows as a search that was not killed. Catches rungs that are chosen anew by what
    their own first runs have shown, and trials that are repeated."""
    search(tmp_path)
    whole = sorted((tmp_path / "tune.jsonl").read_text().splitlines())
    (tmp_path / "tune.jsonl").unlink()
    fake_runs.clear()
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


def test_a_lucky_seed_does_not_win(fake_runs, tmp_path, monkeypatch, capsys):
    """Flags with fewer seeds never win, and what is printed is what is raced. Catches a winner by
    the best single run."""
    search(tmp_path, "grpo")
    file = tmp_path / "tune.jsonl"
    (best,) = tune.winners("arithmetic", "grpo", 5, file)
    with monkeypatch.context() as patch:
        patch.setattr(tune, "winners", lambda *given: [f"of {given[1]} at {given[2]} s"])
        search(tmp_path, "grpo")
    assert "arithmetic, 40 s, grpo: of grpo at 40 s" in capsys.readouterr().out, "what is raced"
    rows = log.read_rows(file)
    lucky = rows[0] | {"flags": "--lr 9", "accuracy": 1.0}
    log.write_rows(file, rows + 9 * [lucky])
    assert tune.winners("arithmetic", "grpo", 5, file) == [best], "nine runs of one seed"
    for seeds, accuracy, flags in ((7, 1.0, best), (8, 0.0, best), (8, 1.0, "--lr 9")):
        more = [lucky | {"seed": 100 + n, "accuracy": accuracy} for n in range(seeds)]
        log.write_rows(file, rows + more)
        assert tune.winners("arithmetic", "grpo", 5, file) == [flags]


def test_winners_between_two_budgets(fake_runs, tmp_path):
    """A budget between two that were searched has the winners of both, once if they agree. Catches
    a baseline that lost the better of two, and a contest between equals."""
    search(tmp_path, "grpo")
    file = tmp_path / "tune.jsonl"
    (ten,) = tune.winners("arithmetic", "grpo", 5, file)
    rows = log.read_rows(file)
    last = [row for row in rows if row["budget"] == 40][-1]
    for flags, found in (("--lr 9", [ten, "--lr 9"]), (ten, [ten])):
        better = [last | {"flags": flags, "accuracy": 1.0, "seed": 100 + n} for n in range(7)]
        log.write_rows(file, rows + better)
        assert tune.winners("arithmetic", "grpo", 20, file) == found


def test_winners_of_an_unfinished_search(fake_runs, tmp_path):
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


def test_defaults_of_tiny():
    """The defaults of pps and GRPO are flags of the race of 40 seconds, and no worse there than the
    table's. Clipping by norm, which does not act on them, is left out. Catches a default that a new
    race has outdated, one that reaches another method, SGD or a model of yours, and a rate for a
    rule without one."""
    given = ["--device", "cpu", "--data", "arithmetic"]
    resolve = lambda *flags: config.resolve(config.parse_config([*given, *flags]))
    for method in ("pps", "grpo"):
        rows = tune.tried(log.read_rows(race.ROWS), "arithmetic", method, 40)
        rows = [row for row in rows if not row["search"]]
        base = timed.SETTINGS["arithmetic"].flags.split()
        raced = [replace(resolve(*base, *row["flags"].split()), grad_clip=0.0) for row in rows]
        own = replace(resolve("--method", raced[-1].method), grad_clip=0.0)
        means = [
            statistics.mean(
                row["accuracy"] for row, cfg in zip(rows, raced, strict=True) if cfg == one
            )
            for one in (own, raced[-1])  # the last row's flags are the table's
        ]
        assert means[0] >= means[1]
    plain = resolve("--method", "pps", "--prompt-rule", "none")
    assert (plain.prompt_prune_rate, plain.completion_prune_rate) == (0.0, 0.9)
    for flags in (["--optimizer", "sgd"], ["--model", "folder"]):
        other = resolve(*flags)
        sizes = (other.prompts_per_step, other.group_size, other.prompt_prune_rate)
        assert (*sizes, other.loss, other.adam_beta2) == (64, 16, 0.6, "grpo", 0.999)
    assert resolve("--method", "dppo").group_size == 16
    assert resolve("--group-size", "4", "--loss", "grpo").group_size == 4
