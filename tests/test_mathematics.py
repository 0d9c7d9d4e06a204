"""Real problems in whole runs: GSM8K, MATH and MATH-500. And what such runs need: presets,
schedules, a tracker."""

import math
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
from test_rewards import SHARED, needs_problems
from toy import ROOT, flags, rows, toy_reward

import config
import data
import rewards
import train


@needs_problems
@pytest.mark.parametrize("name", ["gsm8k_train.jsonl", "math500.jsonl"])
def test_training(policy_folder, tmp_path, capsys, name):
    """A model that boxes the reference answer earns 1, through prompts, sampling, decoding and
    math-verify.

    Fails if a completion is compared with another problem's answer, or with the raw solution.
    """
    rows_of_file = (SHARED / name).read_text().split("\n")
    path = str(tmp_path / name)
    Path(path).write_text("\n".join(rows_of_file[:100]))
    answers = {problem.text: problem.answer for problem in data.read_problems(path)}

    def boxes_the_answer(text, answer):
        return rewards.math_reward(f"it is $\\boxed{{ {answer} }}$." if text else "", answer)

    options = {"data": path, "steps": 2, "method": "grpo", "eval_every": 2, "eval_problems": 4}
    args = flags(policy_folder, str(tmp_path / "run"), **options)
    train.main(config.parse_config(args), reward=boxes_the_answer)
    log = rows(tmp_path / "run")
    assert [row["reward"] for row in log if "reward" in row] == [1.0, 1.0]
    assert log[-1]["eval/avg@4"] == 1.0
    samples = rows(tmp_path / "run", "samples.jsonl")
    assert all(row["answer"] == answers[row["prompt"]] for row in samples)
    assert "longer than the 506 tokens" in capsys.readouterr().out


def test_presets(monkeypatch):
    """Every preset of runs/qwen3.sh is a valid command line on its GPUs. Catches a renamed flag."""
    monkeypatch.setattr("config.choose_device", lambda device: "cuda")
    script = ROOT / "runs" / "qwen3.sh"
    lines = [line.strip() for line in script.read_text().splitlines()]
    names = [line.split(")")[0] for line in lines if line[:2] in ("0.", "1.", "4b", "8b")]
    assert len(names) == 8
    for name in names:
        command = ["bash", str(script), name, "--steps", "7"]
        environment = os.environ | {"TORCHRUN": "echo"}
        args = subprocess.check_output(command, env=environment, text=True).split()
        cfg = config.resolve(config.parse_config(args[args.index("train.py") + 1 :]))
        assert cfg.steps == 7
        assert cfg.model.lower().endswith(name.split("-")[0])
        assert (cfg.lora > 0) == name.endswith("lora")
        assert cfg.lr == (1e-5 if cfg.lora else 1e-6)
        assert (cfg.shard == "fsdp") == (args[args.index("--nproc-per-node") + 1] == "8")
        assert cfg.importance_cap == 2.0


def test_learning_rate_schedules():
    """Fails if a schedule ends early or begins late, or if a run that ends within its warm-up
    decays."""
    cfg = config.Config(steps=14, warmup=5)
    rates = lambda: [config.learning_rate(cfg, step, 2.0) / 2 for step in range(1, cfg.steps + 1)]
    tenths = [n / 10 for n in range(10, 0, -1)]
    cosine = [(1 - math.cos(math.pi * left)) / 2 for left in tenths]
    for schedule, fall in (("constant", [1.0] * 10), ("linear", tenths), ("cosine", cosine)):
        cfg.lr_schedule = schedule
        assert rates() == pytest.approx([0.2, 0.4, 0.6, 0.8, *fall])
    cfg.steps = 4
    assert rates() == pytest.approx([0.2, 0.4, 0.6, 0.8])


def test_tracking(run, monkeypatch, tmp_path):
    """Every row of the log goes to the tracker; a resumed run keeps its name there.

    Catches a tracker on every rank, nulls that it cannot plot, and a run that is never finished.
    """
    fake = mock.Mock()
    monkeypatch.setitem(sys.modules, "mytracker", fake)
    log = run("run", steps=2, save_every=1, track="mytracker", eval_every=2, eval_problems=2)
    args = ["--out-dir", str(tmp_path / "run"), "--resume", "--steps", "3"]
    train.main(config.parse_config(args), reward=toy_reward)
    names = [name for name, *_ in fake.mock_calls]
    assert names == ["init", "log", "log", "log", "finish", "init", "log", "finish"]
    first, again = (call.kwargs for call in fake.init.call_args_list)
    assert first["name"] == again["name"]
    options = (first["project"], first["resume"], first["config"]["steps"])
    assert options == ("nanodppo", "allow", 2)
    for call, logged in zip(fake.log.call_args_list, log, strict=False):
        numbers = {key: value for key, value in logged.items() if isinstance(value, int | float)}
        assert call.kwargs | call.args[0] == numbers
    assert "eval/avg@4" in fake.log.call_args_list[2].args[0]


@pytest.mark.parametrize("call", ["init", "log", "finish"])
def test_a_tracker_out_of_reach(run, monkeypatch, capsys, tmp_path, call):
    """Is a note, once; what it did not get is in the log. Catches a run that ends with a service,
    and a tracker that is not told of later steps."""
    fake = mock.Mock(**{f"{call}.side_effect": ConnectionError("service unreachable")})
    monkeypatch.setitem(sys.modules, "mytracker", fake)
    log = run("run", steps=3, track="mytracker")
    assert [row["step"] for row in log] == [1, 2, 3]
    names = [name for name, *_ in fake.mock_calls]
    assert names == (["init"] if call == "init" else ["init", "log", "log", "log", "finish"])
    said = capsys.readouterr().out
    assert said.count("(ConnectionError: service unreachable)") == 1
    assert said.splitlines()[-1].startswith("done: ")
