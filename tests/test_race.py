"""The search, the race and the runs of equal steps, with runs that take no time except in one test;
and the tables of docs/results.md."""

import itertools
import statistics
import zlib
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

import config
from bench import race, results, runs, savings, search
from bench.runs import Run
from runtime import InputError, log


@pytest.fixture
def fake_runs(monkeypatch):
    """Runs that take no time; returns the list of them. Accuracy is a function of what a run is."""
    made = []

    def make_one(run):
        made.append(run)
        parts = [(run.flags,), (run.flags, run.budget), (run.flags, run.budget, run.seed)]
        numbers = [zlib.crc32(repr(part).encode()) / 2**32 for part in parts]
        more = {"made": 7, "seconds": 1.0, "prompts": 7.0, "trained": 70.0, "probe": 1.0}
        accuracy = sum(share * number for share, number in zip((1, 4, 4), numbers, strict=True)) / 9
        return vars(run) | {"accuracy": accuracy, "failed": None} | more

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

    monkeypatch.setattr(runs, "make_one", make_one)
    monkeypatch.setattr(runs, "probe", lambda: 1.0)
    monkeypatch.setattr(runs, "ProcessPoolExecutor", Pool)
    monkeypatch.setattr(runs, "as_completed", list)
    return made


@pytest.mark.parametrize("kills", [(), (1, 30, 50, 75, 100)])
def test_search_and_race(fake_runs, tmp_path, monkeypatch, capsys, kills):
    """Two methods are searched, killed now and then, and raced. Catches a method with more trials
    than another, trials that are chosen again after a kill, flags that did not win, and a race on
    seeds or problems of the search."""
    file = tmp_path / "search.jsonl"
    append, counts = log.append_rows, itertools.count()

    def killed(path, rows):
        if next(counts) in kills:
            raise KeyboardInterrupt
        append(path, rows)

    monkeypatch.setattr(log, "append_rows", killed)
    for _ in kills:
        with pytest.raises(KeyboardInterrupt):
            search.main("grpo,pods", ("arithmetic",), 2, file)
    search.main("grpo,pods", ("arithmetic",), 2, file)
    rows = log.read_rows(file)
    assert [row["method"] for row in rows[:40]] == ["grpo", "pods"] * 20, "they take turns"
    trials = {5: [40, 6, 3, 3], 20: [10, 4, 3, 3]}  # by seed
    winners = {}
    for method, budget in itertools.product(("grpo", "pods"), trials):
        own = search.tried(rows, "arithmetic", method, budget)
        assert [sum(row["seed"] == seed for row in own) for seed in range(100, 104)] == trials[
            budget
        ]
        seeds = {}
        for row in own:
            seeds.setdefault(row["flags"], []).append(row["accuracy"])
        finalists = [flags for flags in seeds if len(seeds[flags]) == 4]
        assert len(finalists) == 3
        best = max(finalists, key=lambda flags: statistics.mean(seeds[flags]))
        winners[method, budget] = best
        assert search.winner("arithmetic", method, budget, file) == best
    assert search.winner("arithmetic", "grpo", 80, file) == winners["grpo", 20]
    assert search.winner("arithmetic", "grpo", 10, file) == winners["grpo", 5]

    monkeypatch.setattr(search.winner, "__defaults__", (file,))
    fake_runs.clear()
    options = {"methods": "grpo,pods", "json_file": tmp_path / "race.jsonl"}
    race.main(budgets=(5, 80), seeds=2, **options)
    assert "| PODS, tuned |" in capsys.readouterr().out
    assert [run.method for run in fake_runs] == ["grpo", "pods"] * 4, "methods take turns"
    assert [run.seed for run in fake_runs] == [10] * 4 + [11] * 4, "a seed is a block"
    assert not any(run.search for run in fake_runs)
    for run in fake_runs:
        won = winners[run.method, min(run.budget, 20)]
        expected = won if run.budget == 5 else won.replace("constant", "linear")
        assert run.flags == expected
    race.main(budgets=(5, 80), seeds=2, **options)
    assert len(fake_runs) == 8, "finished runs are not repeated"


def test_configurations(tmp_path):
    """Every configuration of a search is one that train.py takes, has a batch that fits its budget,
    and can be read back; a child differs from a parent in at most two flags, by one value. Catches
    a space with a flag that train.py refuses, hours later."""
    one = search.SEARCHES["arithmetic"][0]
    rng = search.random.Random(0)
    for method in search.SPACES:
        space = search.SPACES[method][1]
        found = search.random_flags("arithmetic", method, one)
        assert len({*found}) == one.first
        for flags in found:
            config.resolve(config.parse_config(flags.split()))
            chosen = search.parse(method, flags)
            assert search.to_flags(method, chosen, one.budget) == flags
            child = search.moved(method, chosen, rng)
            places = [
                space[name].index(child[name]) - space[name].index(chosen[name]) for name in space
            ]
            assert all(abs(place) <= 1 for place in places)
            assert sum(map(abs, places)) <= 2
    chosen = {"--prompts-per-step": 8, "--group-size": 32, "--lr": 6e-4}
    assert search.to_flags("grpo", chosen, 5).endswith("--lr 0.000424"), "6e-4 sqrt(256 / 512)"
    assert search.to_flags("grpo", chosen | {"--group-size": 64}, 5) is None, "512 in 5 s"
    assert search.to_flags("grpo", chosen | {"--group-size": 2}, 5) is None, "16 completions"
    kept = chosen | {"--group-size": 8, "--completion-prune-rate": 0.8}
    assert search.to_flags("pods", kept, 5) is None, "it needs two of eight"
    assert search.to_flags("dppo", kept, 5)


def test_equal_steps(fake_runs, tmp_path):
    """Catches methods with other candidates, learning rates or steps than GRPO's, and blocks that
    hold two seeds."""
    file = tmp_path / "savings.jsonl"
    savings.main(candidates=(32,), seeds=2, json_file=file)
    count = len(savings.METHODS) * 2
    assert [run.seed for run in fake_runs] == [10] * count + [11] * count
    resolved = [
        config.resolve(
            config.parse_config(
                [*runs.SETTINGS[run.setting].flags.split(), *run.flags.split(), "--device", "cpu"]
            )
        )
        for run in fake_runs
    ]
    shared = {(cfg.prompts_per_step, cfg.group_size, cfg.lr, cfg.loss) for cfg in resolved}
    assert shared == {(32, 16, 6e-4, "dr_grpo")}
    assert len({(cfg.lr_schedule, cfg.scale_rewards, cfg.grad_clip) for cfg in resolved}) == 1
    assert {(run.steps, run.budget) for run in fake_runs} == {(40, 0)}


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


def test_real_runs(tmp_path, monkeypatch, policy_folder):
    """Two processes with one thread each, whose rows a second call does not repeat. A run that
    fails is a row. Catches a half-written line that stays, a run that does not end with its budget
    or its steps, and sums of other columns."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    file = tmp_path / "rows.jsonl"
    file.write_text('{"setting": "arith')
    flags = f"--method grpo --model {policy_folder} --prompts-per-step 4 --group-size 2"
    flags += " --max-new-tokens 2"
    planned = [Run("arithmetic", "grpo", flags, seed, budget=0.5, search=True) for seed in (0, 1)]
    blind = flags.replace("--method grpo", "--method uniform --prompt-prune-rate 0.5")
    planned.append(Run("arithmetic", "uniform", blind, 0, steps=8, search=True))
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
    monkeypatch.setattr(runs, "probe", lambda: 2 * rows[0]["probe"])
    with pytest.raises(InputError, match=r"this machine is 0\.\d+ times as fast"):
        runs.make([replace(planned[0], seed=2)], file, 2)
    runs.check_speed([replace(planned[2], seed=2)], rows, file)  # equal steps compare in pairs


def test_ranking():
    """Catches a lucky seed that outranks more, and later seeds that change an earlier rung."""
    rows = [
        {"flags": flags, "seed": seed, "accuracy": accuracy}
        for flags, seed, accuracy in (("a", 100, 0.8), ("a", 101, 0.8), ("b", 100, 0.9))
    ]
    assert search.ranking(rows) == ["a", "b"]
    assert search.ranking(rows, before=101) == ["b", "a"]


def test_plan():
    """Catches a schedule that ends before or after its budget."""
    assert runs.plan([1.0] * 4, 10) == 10
    assert runs.plan([5.0, *[0.5] * 8], 10) == 11, "the first step was slow"
    assert runs.plan([1.0] * 12, 10) == 12


def test_problems_of_a_search(monkeypatch):
    """Catches trials that are evaluated on a text of the race."""
    texts = [str(i % 1100) for i in range(2000)]  # the last 900 repeat the first ones
    race_run = Run("arithmetic", "grpo", "", 0, budget=5)
    assert runs.held_out(race_run, texts) == [*range(1000)]
    chosen = runs.held_out(replace(race_run, search=True), texts)
    assert chosen == [*range(1000, 1100)]
    assert len(runs.held_out(replace(race_run, search=True), [*map(str, range(2000))])) == 250

    asked = []

    def sample_rewards(*_args, keys, **_options):
        asked.append(keys)
        return torch.zeros(len(keys), 4), 0

    monkeypatch.setattr(runs.evaluation, "sample_rewards", sample_rewards)
    trainer = mock.MagicMock(eval_set=[SimpleNamespace(text=text) for text in texts])
    trainer.policy = trainer.model
    runs.evaluate(trainer, replace(race_run, search=True), None)
    runs.evaluate(trainer, race_run, 3)
    assert asked == [[*range(1000, 1100)], [0, 1, 2]]


def test_names_are_checked_first(tmp_path):
    """Catches a race that fails hours later."""
    for methods in ("grpo,padaptive", "greso"):
        with pytest.raises(InputError, match=r"--methods \w+: choose from grpo, adaptive"):
            race.main(methods, json_file=tmp_path / "rows.jsonl")
    with pytest.raises(InputError, match="--settings words: choose from arithmetic, arith"):
        race.main("grpo", ("words",), json_file=tmp_path / "rows.jsonl")
    with pytest.raises(InputError, match="no whole search at 5 s; run python -m bench search"):
        search.winner("arithmetic", "grpo", 5, tmp_path / "none.jsonl")
    assert not list(tmp_path.iterdir())


def test_committed_tables():
    """Every table of docs/results.md is one that `bench results` prints. Catches a figure that
    outlived the rows that it came from."""
    page = Path("docs/results.md").read_text()
    for name, table in results.tables().items():
        assert table in page, name
