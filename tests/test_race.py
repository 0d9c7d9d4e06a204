"""The race and the runs of equal steps, with runs that take no time except in one test; and the
tables of docs/results.md."""

from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch

import config
from bench import race, results, runs, savings
from bench.runs import Run
from runtime import InputError, log


@pytest.fixture
def fake_runs(monkeypatch):
    """Runs that take no time; returns the list of them."""
    made = []

    def make_one(run):
        made.append(run)
        figures = {"made": 7, "seconds": 1.0, "prompts": 7.0, "trained": 70.0, "probe": 1.0}
        return vars(run) | figures | {"accuracy": 0.5, "failed": None}

    class Pool:
        def __init__(self, *_args):
            pass

        def __enter__(self):
            return self

        def __exit__(self, *_error):
            pass

        def submit(self, work):
            future = Future()
            future.set_result(work())
            return future

    monkeypatch.setattr(runs, "make_one", make_one)
    monkeypatch.setattr(runs, "probe", lambda: 1.0)
    monkeypatch.setattr(runs, "ProcessPoolExecutor", Pool)
    monkeypatch.setattr(runs, "as_completed", list)
    return made


def test_the_race(fake_runs, tmp_path, capsys, monkeypatch):
    """Catches methods that do not take turns, a race on seeds of the search, another budget's
    flags, finished runs that are repeated, and a race that goes on on another machine."""
    options = {"methods": "grpo,pods", "json_file": tmp_path / "race.jsonl"}
    race.main(budgets=(5, 80), seeds=2, **options)
    assert "| PODS, tuned |" in capsys.readouterr().out
    assert [run.method for run in fake_runs] == ["grpo", "pods"] * 4
    assert [run.seed for run in fake_runs] == [10] * 4 + [11] * 4, "a seed is a block"
    for run in fake_runs:
        assert run.flags == race.flags_for("arithmetic", run.method, run.budget)
    monkeypatch.setattr(runs, "probe", lambda: 2.0)
    race.main(budgets=(5, 80), seeds=2, **options)
    assert len(fake_runs) == 8
    with pytest.raises(InputError, match=r"this machine is 0\.50 times as fast"):
        race.main(budgets=(5, 80), seeds=3, **options)


def test_the_winners_of_the_search():
    """Every method was raced with the flags that won, as the committed rows of search and race say.
    Catches a lucky seed that outranks more, and another budget's winner."""
    for row in log.read_rows(results.RACE):
        assert race.flags_for(row["setting"], row["method"], row["budget"]) == row["flags"]
    cheapest = race.flags_for("arithmetic", "grpo", 5)
    assert race.flags_for("arithmetic", "grpo", 1) == cheapest
    assert race.flags_for("arithmetic", "grpo", 19) == cheapest
    assert race.flags_for("arithmetic", "grpo", 20) != cheapest


def test_equal_steps(fake_runs, tmp_path):
    """Catches methods with other candidates, learning rates or steps than GRPO's, and blocks that
    hold two seeds."""
    savings.main(candidates=(32,), seeds=2, json_file=tmp_path / "savings.jsonl")
    count = len(savings.METHODS) * 2
    assert [run.seed for run in fake_runs] == [10] * count + [11] * count
    assert {(run.steps, run.budget) for run in fake_runs} == {(40, 0)}
    shared = set()
    for run in fake_runs:
        flags = f"{runs.SETTINGS[run.setting].flags} {run.flags} --device cpu"
        cfg = config.resolve(config.parse_config(flags.split()))
        batch = (cfg.prompts_per_step, cfg.group_size, cfg.lr, cfg.loss)
        shared.add((*batch, cfg.lr_schedule, cfg.scale_rewards, cfg.grad_clip))
    assert shared == {(32, 16, 6e-4, "dr_grpo", "linear", "none", 1.0)}


def rows_of(method, accuracies, **more):
    same = {"setting": "arithmetic", "method": method, "budget": 0, "made": 40, "prompts": 1280}
    same |= {"flags": "--prompts-per-step 32", "trained": 1000.0, "seconds": 80.0} | more
    return [same | {"seed": n, "accuracy": value} for n, value in enumerate(accuracies)]


def test_the_race_table():
    """By hand: adaptive 0.7, 0.8, 0.9 and GRPO 0.5, 0.7, 0.6, differences 0.2, 0.1, 0.3.

    Catches unpaired differences, normal quantiles, and a mean where the lowest belongs.
    """
    rows = rows_of("adaptive", (0.7, 0.8, 0.9), budget=10)
    rows += rows_of("grpo", (0.5, 0.7, 0.6), budget=10)
    assert results.race_table(rows, "arithmetic").splitlines()[2:] == [
        "| GRPO, tuned | 0.600 ± 0.248 |",  # 4.30 x 0.1 / sqrt(3)
        "| adaptive, tuned | 0.800 ± 0.248 |",
        "| adaptive - GRPO | +0.200 ± 0.248 |",
        "| lowest run of adaptive | 0.700 |",
    ]


def test_the_savings_table():
    """By hand: dppo rolls out 24 of 32, trains on half, and takes 0.3, 0.5 and 0.7 of GRPO's
    seconds. Catches a ratio of means where the median of pairs belongs."""
    rows = rows_of("grpo", (0.5, 0.7, 0.6))
    for seed, seconds in enumerate((24.0, 40.0, 56.0)):
        own = rows_of("dppo", (0.6, 0.7, 0.5), prompts=960, trained=500.0, seconds=seconds)
        rows.append(own[seed])
    assert results.savings_table(rows, "arithmetic").splitlines()[2:] == [
        "| GRPO | 32 of 32 | 1.00 | 0.600 ± 0.248 | 2.00 s a step |",
        "| dppo | 24 of 32 | 0.50 | +0.000 ± 0.248 | 0.50 |",
    ]
    words = [row | {"setting": "words"} for row in rows]
    words += [row | {"method": "grpo_zero", "seconds": 40.0} for row in words[:3]]
    grpo, zeros, dppo = results.savings_table(words[1:], "words").splitlines()[2:]
    assert grpo == "| GRPO | 32 of 32 | 1.00 | +0.000 ± 0.000 | 2.00 |", "of the seeds that it has"
    assert zeros.endswith("| 0.600 ± 0.248 | 1.00 s a step |")
    assert dppo.endswith("| +0.000 ± 0.248 | 1.00 |")


def test_real_runs(tmp_path, monkeypatch, policy_folder):
    """Two processes with one thread each, whose rows a second call does not repeat. A run that
    fails is a row. Catches a half-written line that stays, a run that does not end with its budget
    or its steps, and sums of other columns."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    file = tmp_path / "rows.jsonl"
    file.write_text('{"setting": "arith')
    flags = f"--method grpo --model {policy_folder} --prompts-per-step 4 --group-size 2"
    flags += " --max-new-tokens 2"
    planned = [Run("arithmetic", "grpo", flags, seed, budget=0.5) for seed in (0, 1)]
    blind = flags.replace("--method grpo", "--method uniform --prompt-prune-rate 0.5")
    planned.append(Run("arithmetic", "uniform", blind, 0, steps=8))
    planned.append(replace(planned[0], flags=f"{flags} --lr -1"))
    rows = runs.make(planned, file, workers=2)
    assert [row["seed"] for row in rows] == [0, 1, 0, 0]
    assert all(0.3 < row["seconds"] < 1 for row in rows[:2])
    assert all(row["failed"] is None and row["made"] > 0 for row in rows[:3])
    assert rows[2]["made"] == 8
    assert rows[2]["prompts"] == 16, "half of 8 x 4"
    assert [step for step, _accuracy in rows[2]["curve"]] == [2, 4, 6]
    assert rows[2]["train"] + rows[2]["rollout"] < rows[2]["wall"]
    assert 0 < rows[2]["trained"] < rows[2]["sampled"]
    assert rows[2]["sampled"] > 16 * 2 * 2, "a prompt has more than 2 tokens"
    assert rows[3]["accuracy"] == 0
    assert "must be above 0" in rows[3]["failed"]
    assert len(log.read_rows(file)) == 4
    monkeypatch.setattr(runs, "ProcessPoolExecutor", lambda *_: pytest.fail("made again"))
    assert runs.make(planned[::-1], file, 2) == rows[::-1]


def test_plan():
    """Catches a schedule that ends before or after its budget."""
    assert runs.plan([1.0] * 4, 10) == 10
    assert runs.plan([5.0, *[0.5] * 8], 10) == 11, "the first step was slow"
    assert runs.plan([1.0] * 12, 10) == 12


def test_problems(monkeypatch):
    """Catches a run that is evaluated on other problems than the first ones."""
    asked = []

    def sample_rewards(_model, _tokenizer, problems, ids, *_args, keys, **_options):
        asked.append((problems, ids, [*keys]))
        return torch.tensor([[1.0, 0.0]]), 0

    monkeypatch.setattr(runs.evaluation, "sample_rewards", sample_rewards)
    monkeypatch.setattr(runs.ranks, "refresh", lambda *_: None)
    trainer = mock.MagicMock(eval_set=[*"abcde"], eval_ids=[*"fghij"])
    assert runs.evaluate(trainer, Run("arithmetic", "grpo", "", 0, steps=5), 2) == 0.5
    assert asked == [(["a", "b"], ["f", "g"], [0, 1])]


def test_names_are_checked_first(tmp_path):
    """Catches a race that fails hours later."""
    file = tmp_path / "rows.jsonl"
    for methods in ("grpo,padaptive", "greso"):
        with pytest.raises(InputError, match=r"--methods \w+: choose from grpo, adaptive"):
            race.main(methods, json_file=file)
    with pytest.raises(InputError, match="--settings words: choose from arithmetic, arith"):
        race.main("grpo", ("words",), json_file=file)
    assert not file.exists()


def test_committed_tables():
    """Every table of docs/results.md is one that `bench results` prints. Catches a figure that
    outlived the rows that it came from."""
    page = Path("docs/results.md").read_text()
    for name, table in results.tables().items():
        assert table in page, name
