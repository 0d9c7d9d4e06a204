"""The race: runs that take turns or run two at a time, and what the records are made to say."""

import itertools
import math
import os
import signal

import pytest

import data
import race


def record(name, seed, accuracy, step_time, alone=True, setting="arithmetic", **more):
    """A record of steps 0, 1, ... with an evaluation at each."""
    steps = len(accuracy)
    columns = {column: [None] + [1.0] * (steps - 1) for column in race.COLUMNS}
    columns |= {"eval/avg@4": accuracy, "step_time": [0.0] + [step_time] * (steps - 1)}
    columns |= {"tokens/generated": [None] + [30] * (steps - 1), "tokens/trained": [None] + [10] * (steps - 1)}
    return {"setting": setting, "row": name, "seed": seed, "lr": 1e-4, "alone": alone, "threads": 1} | columns | more


RISING = [0.1, 0.2, 0.5, 0.8, 0.9, 0.9, 0.9]  # means of three: 0.2, 0.35, 0.5, 0.733, 0.867, 0.9


def test_reached_is_the_mean_of_three():
    """Kills: a single evaluation that wins, the base model's accuracy in a mean, a mean of fewer than three."""
    run = record("grpo", 0, RISING, 2.0)
    assert [value for _, value in race.smoothed(run)] == pytest.approx([0.1, 0.2, 0.35, 0.5, 2.2 / 3, 2.6 / 3, 0.9])
    assert race.final(run) == pytest.approx(0.9)
    assert race.reached(run, 0.8) == 5, "not 3, where a single evaluation is there"
    assert race.reached(run, 0.95) == math.inf
    assert race.reached(record("grpo", 0, [0.1, 0.9, 0.9, 0.9, 0.9], 1.0), 0.8) == 3, "three evaluations, not one"


def test_seconds_of_runs_that_shared_the_machine():
    """Their own only if they were alone; else those of the same row and setting that were, step by step, and beyond
    these their last ten. Kills: their own, another row's, another setting's, a median
    that makes dear first steps cheap."""
    alone = [record("pps", seed, RISING, 1.0 + seed) for seed in (0, 1)]
    others = [record("grpo", 0, RISING, 50.0), record("pps", 0, RISING, 70.0, setting="arithmetic-mixed")]
    shared = record("pps", 2, [*RISING, 0.9, 0.9], 30.0, alone=False)
    found = race.seconds(shared, [*alone, *others, shared])
    assert found == pytest.approx([1.5 * step for step in range(7)] + [9 + 1.5 * 6 / 7, 9 + 3 * 6 / 7])
    alone[1]["step_time"][1] = 4.0
    assert race.seconds(alone[1], alone) == pytest.approx([0.0] + [2.0 * step + 2 for step in range(1, 7)])
    assert math.isnan(race.seconds(shared, [shared])[3]), "nobody was alone: nothing is known"


def test_summary():
    """Targets are each seed's own GRPO's; ratios pair seeds. Kills: an unpaired ratio, this row's own target, a ratio
    upside down, a row that never arrives taken for a fast one, evaluations of the wrong setting."""
    slow = [0.1, 0.1, 0.2, 0.5, 0.8, 0.9, 0.9, 0.9]
    runs = [record("grpo", seed, [*RISING, 0.9], time) for seed, time in ((0, 2.0), (1, 4.0))]
    runs += [record("pps", 0, slow, 0.5), record("pps", 1, [*RISING, 0.9], 0.5)]
    runs += [record("cppo", 0, [0.1, 0.2, 0.3, 0.3, 0.3, 0.3, 0.3, 0.3], 0.5)]
    runs += [record("pps", 0, slow, 0.1, setting="arithmetic-mixed")]  # no GRPO there: no row
    rows = {row["row"]: row for row in race.summary(runs)}
    assert [*rows] == ["grpo", "cppo", "pps"]
    assert rows["grpo"]["reached/seconds"] == pytest.approx((12 + 24) / 2), "0.882 at step 6"
    pps = rows["pps"]
    assert pps["reached/seconds"] == pytest.approx((3.5 + 3.0) / 2)
    assert pps["reached/seconds_ratio"] == pytest.approx(((12 / 3.5 + 24 / 3.0) / 2, 12 / 3.5, 24 / 3.0))
    assert pps["absolute/steps_ratio"][0] == pytest.approx((5 / 6 + 1) / 2)
    assert pps["reached/tokens_ratio"][0] == pytest.approx((6 / 7 + 1) / 2)
    assert pps["final_gap"][0] == pytest.approx(0.0)
    assert rows["cppo"]["reached/seconds"] == math.inf
    assert rows["cppo"]["reached/seconds_ratio"] == (0, 0, 0), "never is no time at all"
    assert rows["cppo"]["final_gap"][0] == pytest.approx(-0.6)
    flat = [record(name, 0, [0.1, 0.2, 0.3, 0.3, 0.3], 1.0) for name in ("grpo", "pps")]
    assert race.summary(flat)[1]["absolute/seconds_ratio"] == (0, 0, 0), "where neither arrives there is no ratio"
    assert "never" in race.table([rows["cppo"]], "arithmetic")
    assert pps["at_equal_time"] == pytest.approx(0.9), "when the first is done, at 3.5 s"
    assert rows["grpo"]["at_equal_time"] == pytest.approx((0.2 + 0.1) / 2), "then it was at steps 1 and 0"


def test_interval_covers():
    """Of means of five normal numbers. Kills: an interval of the values instead of their middle, one-sided ends."""
    middle, low, high = race.interval([1.0, 2.0, 3.0, 4.0, 5.0], lambda values: sum(values) / len(values))
    assert middle == 3
    assert (low, high) == pytest.approx((1.8, 4.2), abs=0.11), "3 -+ 1.96 sqrt(2 / 5)"


def test_turns_processes_and_what_is_there(policy_folder, tmp_path, monkeypatch, capsys):
    """A seed that takes turns and one in a process of its own; called again, nothing runs; a race that was stopped
    goes on and makes the same rows. Kills: a turn that starts anew, a chosen rate that is not passed on, a run that is
    run twice, an evaluation set of the training data's, runs of another rate in the records."""
    small = f"--model {policy_folder} --prompts-per-step 4 --group-size 4 --max-new-tokens 6 --lr-schedule linear"
    monkeypatch.setattr(race, "ROWS", {name: f"--method {name} {small}" for name in ("grpo", "pps")})
    options = {"methods": "grpo,pps:1", "seeds": 2, "alone": 1, "every": 2, "eval_problems": 3, "lr": 3e-4}
    race.main(steps=4, folder=tmp_path / "whole", json_file=tmp_path / "log" / "race.jsonl", **options)
    shown = capsys.readouterr().out
    records = race.load(tmp_path / "log" / "race.jsonl")
    assert [(run["row"], run["seed"], run["alone"]) for run in records] == [
        ("grpo", 0, True), ("grpo", 1, False), ("pps", 0, True)
    ]  # fmt: skip
    assert all(len(run[column]) == 5 for run in records for column in race.COLUMNS)
    assert all([value is None for value in run["eval/avg@4"]] == [False, True, False, True, False] for run in records)
    assert all(run["lr"] == 3e-4 for run in records)
    assert 0.05 < records[1]["peak_gib"] < 5
    assert "     4" in shown, "live"
    assert "s" in shown.splitlines()[-1]
    calls, real = itertools.count(), race.train.main
    breaks_off = lambda cfg: pytest.fail("stopped") if next(calls) == 2 else real(cfg)
    monkeypatch.setattr(race.train, "main", breaks_off)
    with pytest.raises(pytest.fail.Exception, match="stopped"):
        race.main(steps=4, folder=tmp_path / "stopped", **(options | {"seeds": 1}))
    monkeypatch.setattr(race.train, "main", real)
    race.main(steps=4, folder=tmp_path / "stopped", **(options | {"seeds": 1}))
    again = {run["row"]: run for run in race.collect(tmp_path / "stopped", 3e-4)}
    assert race.collect(tmp_path / "stopped") == [], "another rate is another race"
    same = [column for column in race.COLUMNS if column != "step_time"]
    for run in (records[0], records[2]):
        assert {column: again[run["row"]][column] for column in same} == {column: run[column] for column in same}
    monkeypatch.setattr(race.train, "main", lambda _cfg: pytest.fail("it is done"))
    race.main(steps=4, folder=tmp_path / "whole", **options)


def test_a_stop_is_a_stop(policy_folder, tmp_path, monkeypatch):
    """SIGTERM or Ctrl-C in a turn ends the race, not the turn alone. Kills: a race that goes on with the next row."""
    small = f"--model {policy_folder} --prompts-per-step 4 --group-size 4 --max-new-tokens 6"
    monkeypatch.setattr(race, "ROWS", {name: f"--method {name} {small}" for name in ("grpo", "pps")})
    draw, calls = race.train.dppo.prune_completions, itertools.count(1)

    def asks(*words):
        if next(calls) == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return draw(*words)

    monkeypatch.setattr(race.train.dppo, "prune_completions", asks)
    with pytest.raises(SystemExit, match="the same command goes on"):
        race.main(methods="grpo,pps", seeds=1, steps=4, every=2, eval_problems=3, folder=tmp_path)
    assert not (tmp_path / "arithmetic" / "pps-seed0").exists()
    assert race.collect(tmp_path) == [], "what is not done has no final accuracy"
    race.main(methods="grpo,pps", seeds=1, steps=4, every=2, eval_problems=3, folder=tmp_path)
    assert len(race.collect(tmp_path)) == 2


def test_the_picture_ends_at_twice_grpos_end():
    """Kills: a slow rival that squeezes all others into a corner, a picture that needs GRPO."""
    rows = [record("grpo", 0, RISING, 2.0), record("trl", 0, RISING, 20.0)]
    assert race.draw(rows).axes[0].get_xlim() == (0, 2 * 6 * 2.0)
    assert race.draw(rows[1:]).axes[0].get_xlim()[1] > 6 * 20.0


def test_names_are_checked(tmp_path):
    """Kills: a run that starts and fails at its end."""
    with pytest.raises(data.InputError, match="--methods grop: choose of grpo, grpo_zero"):
        race.main(methods="grpo,grop", folder=tmp_path)
    with pytest.raises(data.InputError, match="--methods trl --settings arithmetic-mixed: trl is raced in arithmetic"):
        race.main(methods="trl", settings=("arithmetic-mixed",), folder=tmp_path)
    with pytest.raises(data.InputError, match="--settings gsm8k: choose of arithmetic, arithmetic-mixed"):
        race.main(settings=("gsm8k",), folder=tmp_path)
