"""The runner of equal steps, with runs that take no time except in one test."""

from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest
from toy import FORKS

from bench import race
from bench.race import Run
from runtime import NotFiniteError, log


@pytest.fixture
def fake_runs(monkeypatch):
    """Runs that take no time, one after another; returns the list of them."""
    made = []

    def make_one(run):
        made.append(run)
        sums = {"made": 7, "seconds": 1.0, "sampled": 100.0, "trained": 50.0}
        accuracy = 0.1 * run.seed * (run.method == "pps")
        return vars(run) | sums | {"accuracy": accuracy, "curve": [], "failed": None}

    monkeypatch.setattr(race, "make_one", make_one)
    monkeypatch.setattr(race, "ProcessPoolExecutor", lambda *_: ThreadPoolExecutor(1))
    return made


def test_methods_take_turns(fake_runs, tmp_path, capsys):
    """Catches a seed that is not a block, flags that are not shared, finished runs that are
    repeated, and a table of other rows than the asked ones."""
    file = tmp_path / "rows.jsonl"
    options = {"flags": "--group-size 16", "json_file": file}
    race.main(("pps", "mine=--method grpo --lr 1e-3"), steps=40, seeds=2, **options)
    assert [(run.method, run.seed) for run in fake_runs] == [
        ("pps", 10), ("mine", 10), ("pps", 11), ("mine", 11),
    ]  # fmt: skip
    assert {run.steps for run in fake_runs} == {40}
    assert fake_runs[0].flags == "--method pps --completion-prune-rate 0.9 --group-size 16"
    assert fake_runs[1].flags == "--method grpo --lr 1e-3 --group-size 16"
    capsys.readouterr()

    race.main(("mine=--method grpo --lr 1e-3", "pps"), steps=40, seeds=2, **options)
    assert len(fake_runs) == 4
    assert capsys.readouterr().out.splitlines()[3:] == [
        "| mine | 7 | 1.0 | 0.50 | 0.000 ± 0.000 | +0.000 ± 0.000 |",
        "| pps | 7 | 1.0 | 0.50 | 1.050 ± 0.636 | +1.050 ± 0.636 |",  # 12.71 x 0.1 / 2
    ]

    race.main(("pps",), reach=0.5, seeds=1, **options)
    assert (fake_runs[-1].steps, fake_runs[-1].reach) == (0, 0.5)
    assert len(log.read_rows(file)) == 5


def test_real_runs(tmp_path, monkeypatch, policy_folder):
    """In another process; a second call does not repeat them. Catches a half-written line that
    stays, and sums of other columns."""
    monkeypatch.setattr(race.multiprocessing, "get_context", lambda _spawn: FORKS)  # sooner there
    file = tmp_path / "rows.jsonl"
    file.write_text('{"setting": "arith')
    flags = f"--model {policy_folder} --prompts-per-step 4 --group-size 2 --max-new-tokens 2"
    blind = f"--completion-rule uniform --completion-prune-rate 0.5 {flags} --eval-problems 8"
    planned = [Run("arithmetic", "uniform", f"--method grpo {blind}", 0, steps=3)]
    (row,) = race.make(planned, file, workers=1)
    assert row["made"] == 3
    assert row["sampled"] > 3 * 8 * 2, "a prompt has more than 2 tokens"
    assert 0.3 < row["trained"] / row["sampled"] < 0.7
    assert log.read_rows(file) == [row]
    assert race.make(planned, file, 1) == [row]


def test_until_an_accuracy_or_a_failure(monkeypatch, policy_folder):
    """Evaluated after every tenth step. Catches a run that goes on, seconds of other steps, and a
    race that ends with its first run that diverges."""
    found = iter([0.2, 0.7])
    monkeypatch.setattr(race, "warm_up", lambda _setting: None)
    monkeypatch.setattr(race.train.Trainer, "accuracy", lambda *_: next(found))
    flags = f"--model {policy_folder} --prompts-per-step 1 --group-size 2 --max-new-tokens 1"
    run = Run("arithmetic", "grpo", f"{flags} --steps 30", 0, steps=0, reach=0.7)
    row = race.make_one(run)
    assert [point[:2] for point in row["curve"]] == [[10, 0.2], [20, 0.7]]
    assert 0 < row["curve"][0][2] < row["curve"][1][2] == row["seconds"]
    monkeypatch.setattr(race.train.Trainer, "step", mock.Mock(side_effect=NotFiniteError("nan")))
    row = race.make_one(run)
    assert (row["accuracy"], row["failed"], row["made"]) == (0.0, "nan", 0)
