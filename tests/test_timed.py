"""Runs by budget: they end with it, two workers make them, and each is a row."""

import itertools
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

import config
import train
from bench import timed, tune
from bench.timed import Run
from runtime import InputError, log
from tasks import arithmetic


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
        assert row["probe"] == 300
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
        assert (cfg.lr_schedule, cfg.grad_clip) == ("linear", 1.0)
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


def test_the_base_model_is_made_once(fake_runs, tmp_path, monkeypatch):
    """Before the workers start, and not for SmolLM2. Catches two workers that each train it."""
    made = []
    monkeypatch.setattr(timed.arithmetic, "base_folder", lambda: made.append(len(fake_runs)))
    for setting, flags in (("words", ""), ("arithmetic", "--model x"), ("arithmetic", "--lr 1")):
        timed.make([Run(setting, "pps", flags, 5, 0)], tmp_path / "rows.jsonl", 2)
    assert made == [2]


def test_a_stop_cancels_the_rest(fake_runs, tmp_path, monkeypatch):
    """Catches a Ctrl-C that makes all runs that were planned and records none."""
    stops = []
    monkeypatch.setattr(
        timed.ProcessPoolExecutor, "shutdown", lambda _, **given: stops.append(given)
    )
    monkeypatch.setattr(log, "append_rows", mock.Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        timed.make([Run("arithmetic", "pps", "", 10, 0)], tmp_path / "rows.jsonl", 2)
    assert stops == [{"cancel_futures": True}]


def test_rows_of_another_machine(fake_runs, tmp_path, monkeypatch):
    """Catches a race whose methods ran on machines of different speed, a stop for the noise of
    neighbours, and a file that is refused although all of its runs are made."""
    file, runs = tmp_path / "rows.jsonl", [Run("arithmetic", "pps", "", 10, i) for i in range(4)]
    monkeypatch.setattr(timed, "probe", lambda: 10.0)
    timed.make(runs[:1], file, 2)
    log.append_rows(file, [log.read_rows(file)[0] | {"seed": 9, "probe": 10.0}])
    monkeypatch.setattr(timed, "probe", lambda: 12.0)
    timed.make(runs[:2], file, 2)
    monkeypatch.setattr(timed, "probe", lambda: 5.9)
    timed.make(runs[:2], file, 2)
    with pytest.raises(InputError, match=r"this machine is 1\.69 times as fast"):
        timed.make(runs[:3], file, 2)
    monkeypatch.setattr(timed, "probe", lambda: 17.0)
    with pytest.raises(InputError, match=r"rows.jsonl: this machine is 0.59 times as fast"):
        timed.make(runs, file, 2)
    assert fake_runs == runs[:2]
    other = Run("words", "pps", "", 10, 0)
    timed.make([other], file, 2)
    assert fake_runs[2:] == [other], "another setting is another table"


def test_probe(monkeypatch):
    """Catches a probe of all threads, of which the parent has more than its workers, one that
    leaves them at one, and microseconds."""
    seen, real = [], timed.torch.relu
    monkeypatch.setattr(
        timed.torch, "relu", lambda x: seen.append(timed.torch.get_num_threads()) or real(x)
    )
    threads = timed.torch.get_num_threads()
    timed.torch.set_num_threads(2)
    started = time.process_time()
    found = timed.probe()
    spent = time.process_time() - started
    assert timed.torch.get_num_threads() == 2
    timed.torch.set_num_threads(threads)
    assert {*seen} == {1}
    assert 0.3 < 20 * found / 1000 / spent < 1.1


def test_rows_that_do_not_stand_for_a_run(fake_runs, tmp_path):
    """Catches a row of other flags, another budget, seed, setting or method, and a search's row in
    place of the race's."""
    file = tmp_path / "rows.jsonl"
    run = Run("arithmetic", "pps", "--lr 1", 10, 0)
    timed.make([run, replace(run, budget=10.0)], file, 2)
    assert fake_runs == [run], "once"
    changes = {"setting": "arithmetic-mixed", "method": "grpo", "flags": "", "budget": 20}
    changes |= {"seed": 1, "search": True}
    others = [replace(run, **{name: value}) for name, value in changes.items()]
    timed.make(others, file, 2)
    assert fake_runs == [run, *others]
