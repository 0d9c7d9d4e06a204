"""The search: trials that take turns, are halved at equal seconds, and win only as a whole."""

import collections
import dataclasses
import itertools
import json
import math
import shutil
import time

import pytest

import config
from bench import race, records, search
from runtime import InputError, log


def curve(*accuracies, seconds=1.0, reached=math.inf, ended=False):
    """Evaluations every so many seconds, from 0 on."""
    points = [(seconds * number, value) for number, value in enumerate(accuracies)]
    return search.Curve(points, reached, ended)


# ---------------------------------------------------------------------------- the trials


@pytest.mark.parametrize("method", ["grpo", "grpo_zero", "pps"])
def test_configurations(method):
    """24 for every method, whose rates follow the square root of what a step samples.

    Catches a larger search for pps, candidates counted as samples, and one rate for all batches.
    """
    found = search.configurations(method, 6e-4)
    assert len(found) == len({one.flags for one in found}) == 24
    for one in found:
        cfg = config.resolve(config.parse_config(one.flags.split()))
        assert (cfg.method, cfg.prompts_per_step, cfg.group_size) == one[:1] + one[1:3]
        assert (cfg.lr, cfg.prompt_prune_rate) == (one.lr, one.rate)
    if method == "pps":
        assert {one.prompts for one in found} == {16, 32, 64}
        at = {(one.prompts, one.group, one.rate): one.completions for one in found}
        assert at[64, 16, 0.6] == 26 * 16
        assert at[16, 8, 0.75] == 4 * 8
    else:
        assert {(one.prompts, one.group) for one in found} == {
            *itertools.product((4, 8, 16, 32), (8, 16))
        }
        rates = lambda *size: [one.lr for one in found if one[1:3] == size]
        assert rates(32, 16) == [3e-4, 6e-4, 1.2e-3]
        assert rates(8, 16) == [1.5e-4, 3e-4, 6e-4], "a quarter of the completions"


def test_second_round():
    """As many for both methods, none of the first round, in the search's own flags.

    Catches a larger second search for pps, a repeated trial, and a rate that is not passed on."""
    rounds = {method: search.configurations(method, 6e-4, True) for method in ("grpo_zero", "pps")}
    for method, found in rounds.items():
        before = {one.flags for one in search.configurations(method, 6e-4)}
        assert len({one.flags for one in found} - before) == len(found) == 8
        for one in found:
            cfg = config.resolve(config.parse_config(one.flags.split()))
            assert (cfg.prompts_per_step, cfg.group_size) == (one.prompts, one.group)
            assert (cfg.lr, cfg.prompt_prune_rate) == (one.lr, one.rate)
            assert one.drop in {None, cfg.completion_prune_rate}
    assert {one.drop for one in rounds["pps"]} == {0.8, 0.9}
    assert {one.drop for one in rounds["grpo_zero"]} == {None}


def test_as_many_completions_in_all_and_between_evaluations():
    """Catches steps that are the same for all batches, and evaluations counted in steps."""
    for method in ("grpo", "pps"):
        for one in search.configurations(method, 6e-4):
            steps, every = race.rescaled("arithmetic", one.completions, 60, 3)
            assert steps * one.completions == pytest.approx(60 * 512, abs=one.completions / 2)
            assert every * one.completions == pytest.approx(3 * 512, abs=one.completions / 2)
    assert race.rescaled("arithmetic", 512, 60, 3) == (60, 3)
    assert race.rescaled("arithmetic", 32, 75, 3) == (1200, 48)
    assert race.rescaled("words", 256, 24, 4) == (24, 4)


# ---------------------------------------------------------------------------- the ranking


def test_score():
    """Catches the last accuracies in place of those at the clock, the best seed in place of the
    mean, and one seed at the target that counts for all."""
    slow = [curve(0.2, 0.3, 0.4, 0.9), curve(0.2, 0.4, 0.6, 0.9)]
    fast = [curve(0.2, 0.5, 0.8, seconds=0.5), curve(0.2, 0.5, 0.6, seconds=0.5)]
    assert search.score(slow, 1.5) == (1, pytest.approx(-(0.35 + 0.5) / 2))
    assert search.score(fast, 0.75) == (1, pytest.approx(-(0.65 + 0.55) / 2))
    assert search.score(fast, math.inf) == (1, pytest.approx(-0.7)), "no trial is left to wait for"
    there = curve(0.9, 0.95, reached=40.0, ended=True)
    assert search.score([there, fast[0]], 1.0)[0] == 1
    assert search.score([there, there._replace(reached=20.0)], 1.0) == (0, 30.0)
    assert search.score([there, there], 1.0) < search.score(fast, 1.0)


def trial(flags, seconds, seed=100, method="grpo_zero", trials=4, setting="arithmetic"):
    return {
        "setting": setting, "method": method, "flags": flags, "seed": seed, "trials": trials,
        "seconds": seconds, "rung": 1, "completions": 64, "points": [[1.0, 0.5]],
    }  # fmt: skip


def test_winner():
    """The least mean over all seeds. Catches a seed that was not there counted as 0 or left out, a
    search that is not over, another setting's or method's trials, and a winner that is none."""
    trials = [trial("a", 10.0), trial("a", None, 101), trial("b", 30.0), trial("b", 20.0, 101)]
    others = [trial("c", 1.0, setting="arithmetic-mixed"), trial("d", 1.0, method="pps")]
    assert race.winner(trials + others, "best_grpo", "arithmetic")["flags"] == "b"
    more = [trial("e", 12.0, method="grpo", trials=1)]
    assert race.winner(trials + more, "best_grpo", "arithmetic")["flags"] == "e"
    for part, row in ((trials[:3], "best_grpo"), ([], "best_grpo"), (others, "best_pps")):
        with pytest.raises(InputError, match=f"{row}: runs/search.jsonl has no whole search in"):
            race.winner(part, row, "arithmetic")
    with pytest.raises(InputError, match="no configuration was at the target in arithmetic"):
        race.winner([trial("a", None, seed) for seed in range(4)], "best_grpo", "arithmetic")


def test_table_puts_the_best_first():
    """Catches a mean that forgets a seed, and never at the top."""
    rows = [trial("a", 10.0), trial("a", None, 101), trial("b", 30.0), trial("b", 20.0, 101)]
    rows += [trial("c", None, seed) | {"rung": 2} for seed in (100, 101)]
    lines = search.table(rows).splitlines()[2:]
    assert [line.split()[1] for line in lines] == ["b", "c", "a"]
    assert "| a | 1 | 10.0, - | 1.0, 1.0 | 0.500, 0.500 |" in lines


# ---------------------------------------------------------------------------- halving


@pytest.fixture
def fake(monkeypatch, tmp_path):
    """Trials without training: `speed[flags]` is the seconds of a turn, and accuracy rises by
    `gain[flags]` in each. Returns a function that halves them, and the order of their turns."""
    order = []

    def turn(run, upto):
        order.append((run.row, upto))
        run.out_dir.mkdir(parents=True, exist_ok=True)
        run.finish(upto=upto, wall=run.wall + 2 * speed[run.row])

    def curve_of(run, target):
        facts = run.out_dir / "race.json"
        if not facts.exists():
            return search.Curve([], math.inf, False)
        turns = math.ceil(json.loads(facts.read_text())["upto"] / run.every)
        points = [(speed[run.row] * n, gain[run.row] * n) for n in range(turns + 1)]
        reached = next((time for time, value in points if value >= target), math.inf)
        return search.Curve(points, reached, reached < math.inf or turns == run.turns)

    speed, gain = {}, {}
    monkeypatch.setattr(race, "turn", turn)
    monkeypatch.setattr(search, "curve_of", curve_of)

    def halve(budget, target=9.0):
        trials = {}
        for number in range(8):
            one = search.Configuration("grpo_zero", 4 + number, 8, 0.0, 1e-4)
            speed[one.flags] = 1.0 + number
            gain[one.flags] = 0.2 if number == 5 else 0.02
            run = race.Run("arithmetic", one.flags, 100, 999, 2, 3, None, "m", tmp_path, one.flags)
            trials[one] = [run, dataclasses.replace(run, seed=101)]
        search.halve(trials, target, budget, tmp_path / "search.jsonl")
        return log.read_rows(tmp_path / "search.jsonl")

    return halve, order


def test_halving(fake):
    """Eight configurations, then four, then two; the trial behind goes next.

    Catches a trial that runs ahead, the better half dropped, rungs without a limit, a row too few
    or too many, and a last rung that drops nothing.
    """
    halve, order = fake
    rows = halve(budget=1500.0)
    assert len(rows) == len({(row["flags"], row["seed"]) for row in rows}) == 16
    assert [sum(row["rung"] == rung for row in rows) for rung in (1, 2, 3)] == [8, 4, 4]
    first = [row for row, upto in order if upto == 2]
    assert len(first) == 16, "every trial has a first turn"
    ends = {row["flags"]: row["points"][-1][0] for row in rows if row["rung"] == 1}
    longest = max(ends.values())
    assert longest - min(ends.values()) <= 8, "within a turn of each other"
    assert 450 <= sum(row["wall"] for row in rows if row["rung"] == 1) * 2 <= 600
    assert 1500 <= sum(row["wall"] for row in rows) <= 1516, "the budget, and at most a turn"
    best = {row["flags"].split()[3] for row in rows if row["rung"] == 3}
    assert best == {"4", "9"}, "the fastest, and the one that gains most"
    assert all(row["seconds"] is None for row in rows)
    assert {row["trials"] for row in rows} == {16}


def test_every_trial_has_a_turn(fake):
    """Even if there is no time. Catches trials that are dropped unseen."""
    halve, order = fake
    assert len(halve(budget=0.0)) == len(order) == 16


def test_a_trial_at_the_target_stops(fake):
    """Catches training on after the target, and a budget that must be spent."""
    halve, order = fake
    rows = halve(budget=1e6, target=0.1)
    assert all(row["seconds"] is not None for row in rows)
    assert max(upto for _, upto in order) == 10, "0.02 a turn"
    assert len(order) == 14 * 5 + 2 * 1


def test_a_killed_search_goes_on(fake, monkeypatch, tmp_path):
    """Killed after 5, 30 and 80 turns: the same turns and rows as a search that was not.

    Catches time that a kill forgets, a rung that is done twice, and a search that begins anew.
    """
    halve, order = fake
    whole = halve(600.0)
    turns = list(order)
    (tmp_path / "search.jsonl").rename(tmp_path / "whole.jsonl")
    shutil.rmtree(tmp_path / "arithmetic")
    order.clear()
    real, kills = race.turn, [5, 30, 80]

    def killed(run, upto):
        if kills and len(order) == kills[0]:
            kills.pop(0)
            raise KeyboardInterrupt
        real(run, upto)

    monkeypatch.setattr(race, "turn", killed)
    for _ in list(kills):
        with pytest.raises(KeyboardInterrupt):
            halve(600.0)
    again = halve(600.0)
    assert order == turns
    assert again == whole
    assert halve(600.0) == whole
    assert len(order) == len(turns), "a search that has ended is not repeated"


@pytest.fixture
def small(policy_folder, monkeypatch, tmp_path):
    """Options of searches and races of seconds, in a setting of 2 prompts a step."""
    flags = "--max-new-tokens 6 --device cpu --lr-schedule linear"
    monkeypatch.setattr(race, "SETTINGS", {"arithmetic": race.Setting(4, 2, "arithmetic", flags)})
    monkeypatch.setattr(race, "SEARCH", tmp_path / "search.jsonl")
    sizes = ((2, 8, 2e-3), (1, 16, 1e-3))
    new = search.Configuration
    some = lambda method, lr, second: [new(method, *s[:2], 0.0, s[2] * lr) for s in sizes]
    monkeypatch.setattr(search, "configurations", some)
    return {"eval_problems": 3, "every": 1, "model": policy_folder, "settings": ("arithmetic",)}


def test_search_and_race(small, tmp_path, capsys, monkeypatch):
    """From trials to a raced winner, with the real trainer.

    Catches flags that do not arrive, steps of another batch, evaluations in a trial's seconds, a
    seed of the race, and a winner that changed under a finished run.
    """
    options = small | {"methods": "grpo_zero", "json_file": race.SEARCH, "target": 0.0}
    real, wall = race.turn, collections.Counter()

    def timed(run, upto):
        started = time.monotonic()
        real(run, upto)
        wall[run.flags, run.seed] += time.monotonic() - started

    monkeypatch.setattr(race, "turn", timed)
    search.main(minutes=1e9, folder=tmp_path / "trials", **options)
    monkeypatch.setattr(race, "turn", real)
    rows = log.read_rows(race.SEARCH)
    assert {(row["completions"], row["steps"], row["every"]) for row in rows} == {(16, 8, 2)}
    assert sorted(row["seed"] for row in rows) == [100, 100, 101, 101]
    for row in rows:
        assert len(row["points"]) == 4, "at the target after three evaluations, then it stops"
        assert row["seconds"] == row["points"][3][0] < row["wall"]
        assert row["wall"] == pytest.approx(wall[row["flags"], row["seed"]], rel=0.3)
        name = row["flags"].replace("--", "").replace(" ", "-") + f"-seed{row['seed']}"
        stored = json.loads((tmp_path / "trials" / "arithmetic" / name / "config.json").read_text())
        assert f"--group-size {stored['config']['group_size']} " in row["flags"]
        assert stored["config"]["steps"] == row["steps"], "the schedule ends at the whole length"
        seconds = [
            step["step_time"]
            for step in log.read_rows(tmp_path / "trials" / "arithmetic" / name / "log.jsonl")[1:]
        ]
        assert row["seconds"] == pytest.approx(sum(seconds), abs=1e-3)
    best = race.winner(rows, "best_grpo", "arithmetic")
    assert f"best_grpo in arithmetic: {best['flags']}" in capsys.readouterr().out

    race_options = small | {"seeds": 1, "methods": "grpo,best_grpo", "against": "best_grpo"}
    del race_options["settings"]
    race.main(folder=tmp_path / "race", json_file=tmp_path / "race.jsonl", **race_options)
    raced = {run["row"]: run for run in records.load(tmp_path / "race.jsonl")}
    assert raced["best_grpo"]["lr"] == float(best["flags"].split()[-1])
    assert len(raced["best_grpo"]["step_time"]) == best["steps"] + 1
    assert len(raced["grpo"]["step_time"]) == 5
    evaluations = lambda run: sum(value is not None for value in run["eval/avg@4"])
    assert evaluations(raced["best_grpo"]) == evaluations(raced["grpo"]) == 5
    other = [row | {"seconds": 1e9 if row["flags"] == best["flags"] else 1.0} for row in rows]
    log.write_rows(race.SEARCH, other)
    with pytest.raises(InputError, match=r"the run in .*best_grpo-seed0 has"):
        race.main(folder=tmp_path / "race", **race_options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"methods": "cppo"}, "--methods cppo: choose from grpo, grpo_zero, pps"),
        ({"first_seed": 99}, "--first-seed 99: must be 100 or more; lower ones are raced"),
        ({"settings": ("gsm8k",)}, "--settings gsm8k: choose from arithmetic, arithmetic-mixed"),
        ({"settings": ("words",)}, "--settings words: tiny cannot read; give --model"),
        (
            {"settings": ("words",), "model": "a-model"},
            "--settings words: runs/race.jsonl has no run of grpo there; give --target",
        ),
    ],
)
def test_bad_values_are_named_first(options, message, tmp_path):
    """Catches a search that fails after an hour, and trials on the seeds of the race."""
    with pytest.raises(InputError, match=message):
        search.main(folder=tmp_path / "trials", json_file=tmp_path / "rows.jsonl", **options)
    assert not list(tmp_path.iterdir())


def test_the_target_is_grpos():
    """0.98 of the mean final accuracy of the committed runs. Catches another row's or setting's."""
    for setting in ("arithmetic", "arithmetic-mixed"):
        runs = records.load(race.Path("runs/race.jsonl"))
        finals = [records.final(r) for r in runs if (r["row"], r["setting"]) == ("grpo", setting)]
        assert search.race_target(setting) == pytest.approx(0.98 * sum(finals) / len(finals))
