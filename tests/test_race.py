"""The race: runs that take turns or run two at a time, and the tables made from their records."""

import functools
import itertools
import math

import pytest

import config
from bench import race, records
from runtime import InputError


def record(name, seed, accuracy, step_time, alone=True, setting="arithmetic", **more):
    """A record of steps 0, 1, ... with an evaluation at each."""
    steps = len(accuracy)
    columns = {column: [None] + [1.0] * (steps - 1) for column in records.COLUMNS}
    columns |= {"eval/avg@4": accuracy, "step_time": [0.0] + [step_time] * (steps - 1)}
    columns |= {
        "tokens/generated": [None] + [30] * (steps - 1),
        "tokens/trained": [None] + [10] * (steps - 1),
    }
    return (
        {"setting": setting, "row": name, "seed": seed, "lr": 1e-4, "alone": alone, "threads": 1}
        | columns
        | more
    )


RISING = [0.1, 0.2, 0.5, 0.8, 0.9, 0.9, 0.9]  # means of three: 0.2, 0.35, 0.5, 0.733, 0.867, 0.9


def test_reached_is_the_mean_of_three():
    """Catches a single evaluation that wins, the base model's accuracy in a mean, and a mean of
    fewer than three."""
    run = record("grpo", 0, RISING, 2.0)
    means = [0.1, 0.2, 0.35, 0.5, 2.2 / 3, 2.6 / 3, 0.9]
    assert [value for _, value in records.smoothed(run)] == pytest.approx(means)
    assert records.final(run) == pytest.approx(0.9)
    assert records.reached(run, 0.8) == 5, "not 3, where a single evaluation is there"
    assert records.reached(run, 0.95) == math.inf
    early = record("grpo", 0, [0.1, 0.9, 0.9, 0.9, 0.9], 1.0)
    assert records.reached(early, 0.8) == 3, "three evaluations, not one"


def test_seconds_of_runs_that_shared_the_machine():
    """A run's own seconds count only if it was alone; otherwise those of the same row and setting
    do, step by step, and beyond their end their last ten. Catches the run's own, another row's or
    another setting's seconds, and a median, which would make expensive first steps cheap."""
    alone = [record("pps", seed, RISING, 1.0 + seed) for seed in (0, 1)]
    others = [record("grpo", 0, RISING, 50.0)]
    others += [record("pps", 0, RISING, 70.0, setting="arithmetic-mixed")]
    shared = record("pps", 2, [*RISING, 0.9, 0.9], 30.0, alone=False)
    found = records.seconds(shared, [*alone, *others, shared])
    beyond = [9 + 1.5 * 6 / 7, 9 + 3 * 6 / 7]
    assert found == pytest.approx([1.5 * step for step in range(7)] + beyond)
    alone[1]["step_time"][1] = 4.0
    own = [0.0] + [2.0 * step + 2 for step in range(1, 7)]
    assert records.seconds(alone[1], alone) == pytest.approx(own)
    assert math.isnan(records.seconds(shared, [shared])[3]), "none was alone: unknown"


def test_summary():
    """Each seed's target comes from its own GRPO run, and ratios pair seeds. Catches an unpaired
    ratio, a target from the row itself, a ratio upside down, a row that never gets there counted as
    fast, evaluations of the wrong setting, and, against another row, its targets or unpaired
    seeds."""
    slow = [0.1, 0.1, 0.2, 0.5, 0.8, 0.9, 0.9, 0.9]
    runs = [record("grpo", seed, [*RISING, 0.9], time) for seed, time in ((0, 2.0), (1, 4.0))]
    runs += [record("pps", 0, slow, 0.5), record("pps", 1, [*RISING, 0.9], 0.5)]
    runs += [record("cppo", 0, [0.1, 0.2, 0.3, 0.3, 0.3, 0.3, 0.3, 0.3], 0.5)]
    runs += [record("pps", 0, slow, 0.1, setting="arithmetic-mixed")]  # no GRPO there: no row
    rows = {row["row"]: row for row in records.summary(runs)}
    assert [*rows] == ["grpo", "cppo", "pps"]
    assert rows["grpo"]["reached/seconds"] == pytest.approx((12 + 24) / 2), "0.882 at step 6"
    pps = rows["pps"]
    assert pps["reached/seconds"] == pytest.approx((3.5 + 3.0) / 2)
    ratios = (12 / 3.5, 24 / 3.0)
    assert pps["reached/seconds_ratio"] == pytest.approx((sum(ratios) / 2, *ratios))
    assert pps["absolute/steps_ratio"][0] == pytest.approx((5 / 6 + 1) / 2)
    assert pps["reached/tokens_ratio"][0] == pytest.approx((6 / 7 + 1) / 2)
    assert pps["final_gap"][0] == pytest.approx(0.0)
    assert rows["cppo"]["reached/seconds"] == math.inf
    assert rows["cppo"]["reached/seconds_ratio"] == (0, 0, 0), "never is 0"
    assert rows["cppo"]["final_gap"][0] == pytest.approx(-0.6)
    others = {row["row"]: row for row in records.summary(runs, "pps")}
    assert [*others] == ["grpo", "cppo", "pps"]
    inverse = (3.5 / 12, 3.0 / 24)
    assert others["grpo"]["reached/seconds_ratio"][0] == pytest.approx(sum(inverse) / 2)
    assert others["pps"]["reached/seconds_ratio"] == (1, 1, 1)
    others = records.summary(runs, "cppo")
    assert [row["seeds"] for row in others] == [1, 1, 1], "its only seed"
    assert others[2]["reached/seconds"] == 3.5, "the target stays GRPO's"
    assert others[2]["reached/seconds_ratio"] == (math.inf,) * 3, "cppo never gets there"
    flat = [record(name, 0, [0.1, 0.2, 0.3, 0.3, 0.3], 1.0) for name in ("grpo", "pps")]
    assert records.summary(flat)[1]["absolute/seconds_ratio"] == (0, 0, 0), "neither gets there"
    assert "never" in records.table([rows["cppo"]], "arithmetic")
    assert pps["at_equal_time"] == pytest.approx(0.9), "at 3.5 s, the first end"
    assert rows["grpo"]["at_equal_time"] == pytest.approx((0.2 + 0.1) / 2), (
        "then it was at steps 1 and 0"
    )


def test_interval_covers():
    """The mean of five numbers. Catches an interval of the values in place of their average, and
    one-sided ends."""
    mean = lambda values: sum(values) / len(values)
    middle, low, high = records.interval([1.0, 2.0, 3.0, 4.0, 5.0], mean)
    assert middle == 3
    assert (low, high) == pytest.approx((1.8, 4.2), abs=0.11), "3 -+ 1.96 sqrt(2 / 5)"


@pytest.fixture
def tiny_rows(policy_folder, monkeypatch):
    """Two rows of runs that take a second."""
    small = f"--model {policy_folder} --prompts-per-step 4 --group-size 4 --max-new-tokens 6"
    rows = {name: f"--method {name} {small} --lr-schedule linear" for name in ("grpo", "pps")}
    monkeypatch.setattr(race, "ROWS", rows)


def test_turns_processes_and_finished_runs(tiny_rows, tmp_path, monkeypatch, capsys):
    """One seed takes turns, one is a process of its own. A repeated call runs nothing, and a race
    that was broken off continues and makes the same rows. Catches a turn that starts over, a --lr
    that is not passed on, a run that is repeated, evaluation on training data, and records of runs
    at another --lr."""
    options = {"methods": "grpo,pps:1", "seeds": 2, "alone": 1}
    options |= {"steps": 4, "every": 2, "eval_problems": 3, "lr": 3e-4}
    file = tmp_path / "log" / "race.jsonl"
    race.main(folder=tmp_path / "whole", json_file=file, **options)
    shown = capsys.readouterr().out
    runs = records.load(file)
    names = [("grpo", 0, True), ("grpo", 1, False), ("pps", 0, True)]
    assert [(run["row"], run["seed"], run["alone"]) for run in runs] == names
    for run in runs:
        assert all(len(run[column]) == 5 for column in records.COLUMNS)
        evaluated = [value is not None for value in run["eval/avg@4"]]
        assert evaluated == [True, False, True, False, True]
        assert run["lr"] == 3e-4
    assert 0.05 < runs[1]["peak_gib"] < 5
    assert "     4" in shown, "live"
    assert "s" in shown.splitlines()[-1]

    calls, real = itertools.count(), race.train.main

    def breaks_off(cfg, until):
        if next(calls) == 2:
            raise ConnectionError
        real(cfg, until=until)

    monkeypatch.setattr(race.train, "main", breaks_off)
    again = options | {"folder": tmp_path / "broken off", "seeds": 1}
    with pytest.raises(ConnectionError):
        race.main(**again)
    monkeypatch.setattr(race.train, "main", real)
    race.main(**again)
    same = lambda run: {name: run[name] for name in records.COLUMNS if name != "step_time"}
    continued = {run["row"]: run for run in records.collect(again["folder"], 3e-4)}
    assert records.collect(again["folder"]) == [], "another --lr is another race"
    for run in (runs[0], runs[2]):
        assert same(continued[run["row"]]) == same(run)
    monkeypatch.setattr(race.train, "main", lambda *_args, **_options: pytest.fail("repeated"))
    race.main(folder=tmp_path / "whole", **options)


def test_rows_of_a_setting(tmp_path):
    """pps considers twice the prompts of the others, in every setting, and --lr beats the setting's
    own. Catches a setting's flag that is not passed on, and a row that loses its own flags."""

    def resolved(setting, row, lr=None):
        run = race.Run(setting, row, 0, 9, 3, 5, lr, "a-model", tmp_path)
        return config.resolve(config.parse_config(run.args()))

    for setting, prompts in (("arithmetic", 32), ("arithmetic-mixed", 32), ("words", 16)):
        for row in race.ROWS:
            cfg = resolved(setting, row)
            assert cfg.prompts_per_step == prompts * (2 if row in ("pps", "uniform") else 1)
            assert (cfg.data, cfg.model) == (setting, "a-model")
            assert cfg.lr == (2e-5 if setting == "words" else 1e-6)
        assert resolved(setting, "pps", 3e-4).lr == 3e-4
    uniform = resolved("words", "uniform")
    assert (uniform.prompt_rule, uniform.prompt_prune_rate) == ("uniform", 0.6)
    assert (uniform.prompt_format, uniform.eval_data) == ("plain", "words")
    assert resolved("arithmetic-mixed", "pps").eval_data == "arithmetic"


def test_a_stop_ends_the_race(tiny_rows, tmp_path, monkeypatch):
    """A run that ends before its turn is over was stopped by SIGTERM or Ctrl-C. Catches a race that
    goes on with the next row."""
    start = functools.partial(race.main, methods="grpo,pps", seeds=1, steps=4, every=2)
    real = race.train.main
    monkeypatch.setattr(race.train, "main", lambda cfg, until: real(cfg, until=1))
    with pytest.raises(SystemExit, match="the same command continues"):
        start(eval_problems=3, folder=tmp_path)
    assert not (tmp_path / "arithmetic" / "pps-seed0").exists()
    assert records.collect(tmp_path) == [], "an unfinished run has no final accuracy"
    monkeypatch.setattr(race.train, "main", real)
    start(eval_problems=3, folder=tmp_path)
    assert len(records.collect(tmp_path)) == 2


def test_the_picture_ends_at_twice_grpos_end():
    """Catches a slow row that squeezes all others into a corner, and a picture that needs GRPO."""
    rows = [record("grpo", 0, RISING, 2.0), record("trl", 0, RISING, 20.0)]
    assert records.draw(rows).axes[0].get_xlim() == (0, 2 * 6 * 2.0)
    assert records.draw(rows[1:]).axes[0].get_xlim()[1] > 6 * 20.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"alone": 0}, "--alone 0: seconds come from seeds that ran alone"),
        ({"methods": "grpo,grop"}, "--methods grop: choose from grpo, grpo_zero"),
        ({"settings": ("words",)}, "--settings words: tiny cannot read; give --model"),
        ({"settings": ("gsm8k",)}, "--settings gsm8k: choose from arithmetic, arithmetic-mixed"),
        (
            {"methods": "trl", "settings": ("arithmetic-mixed",)},
            "--methods trl --settings arithmetic-mixed: trl is raced in arithmetic only",
        ),
    ],
)
def test_names_are_checked_first(options, message, tmp_path):
    """Catches a race that starts and fails hours later."""
    with pytest.raises(InputError, match=message):
        race.main(folder=tmp_path, **options)
    assert not list(tmp_path.iterdir())
