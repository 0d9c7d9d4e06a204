"""Real problems, whole runs: training on GSM8K and MATH, evaluation on three benchmarks, each stopped in the middle."""

import math
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
from toy import assert_same, flags, rows, timeless

import config
import data
import eval as evaluation
import rewards
import train
from data import InputError

ROOT = Path(__file__).resolve().parents[1]
SHARED = ROOT.parent / "shared" / "data"
needs_problems = pytest.mark.skipif(not SHARED.exists(), reason="real problem files are not part of the repository")


@needs_problems
@pytest.mark.parametrize("name", ["gsm8k_train.jsonl", "math_train.json"])
def test_training(policy_folder, tmp_path, capsys, monkeypatch, name):
    """Three steps and two evaluations, in one go and in two. Kills: another order of the problems when it goes on."""
    monkeypatch.setattr(data.rewards, "math_reward", lambda text, gold: None if not gold else float(len(text) % 2))
    common = {"data": str(SHARED / name), "eval_every": 2, "eval_problems": 4, "save_every": 1}
    for folder, steps in (("whole", 3), ("broken", 2)):
        train.main(config.parse_config(flags(policy_folder, str(tmp_path / folder), **(common | {"steps": steps}))))
    train.main(config.parse_config(["--out-dir", str(tmp_path / "broken"), "--resume", "--steps", "3"]))
    whole, broken = timeless(tmp_path / "whole"), timeless(tmp_path / "broken")
    assert_same(whole, broken)
    assert "prompts: longer than 506 tokens" in capsys.readouterr().out
    assert any(row["reward"] > 0 for row in whole[0][1:])


@needs_problems
def test_rewards_of_a_run(policy_folder, tmp_path, monkeypatch):
    """A model that boxes the gold earns 1, through prompts, sampling, decoding and math-verify. Kills: a gold of
    another problem, a reward of the raw solution."""
    golds = {problem.text: problem.answer for problem in data.read_problems(str(SHARED / "math500.jsonl"))}
    asked = []

    def tell(text, gold, real=rewards.math_reward):
        asked.append(gold)
        return real(f"it is $\\boxed{{ {gold} }}$." if text else "", gold)

    monkeypatch.setattr(data.rewards, "math_reward", tell)
    words = flags(policy_folder, str(tmp_path / "run"), data=str(SHARED / "math500.jsonl"), steps=2, method="grpo")
    train.main(config.parse_config(words))
    assert [row["reward"] for row in rows(tmp_path / "run")] == [1.0, 1.0]
    assert all(row["answer"] == golds[row["prompt"]] for row in rows(tmp_path / "run", "samples.jsonl"))


@needs_problems
def test_evaluation(policy_folder, tmp_path, monkeypatch):
    """MATH-500, AIME24 and AMC23, killed in the second set; the same command ends with the rows of one never killed."""
    sets = tuple(str(SHARED / f"{name}.jsonl") for name in ("math500", "aime24", "amc23"))
    flags = {"data": sets, "k": 2, "max_new_tokens": 4, "problems": 6, "batch_size": 6}

    def go(folder):
        return evaluation.main(evaluation.EvalConfig(policy_folder, out_dir=str(tmp_path / folder), **flags))

    whole = go("whole")
    assert [row["problems"] for row in whole] == [5, 4, 6], "three were too long"

    class Killed(BaseException):
        pass

    sampled, real = [], evaluation.rollout.sample

    def dies(*words, **options):
        sampled.append(1)
        if len(sampled) == 4:
            raise Killed
        return real(*words, **options)

    monkeypatch.setattr(evaluation.rollout, "sample", dies)
    with pytest.raises(Killed):
        go("broken")
    assert go("broken") == whole
    assert len(sampled) == 4 + 3, "three batches were there"


def test_presets(monkeypatch):
    """Every preset of runs/qwen3.sh is a good command line on its GPUs. Kills: a flag that was renamed."""
    monkeypatch.setattr("rollout.choose_device", lambda device: "cuda")
    script = ROOT / "runs" / "qwen3.sh"
    names = [
        line.split(")")[0].strip()
        for line in script.read_text().splitlines()
        if line.strip()[:2] in ("0.", "1.", "4b", "8b")
    ]
    assert len(names) == 6
    for name in names:
        said = subprocess.run(["bash", str(script), name, "--steps", "7"], env=os.environ | {"TORCHRUN": "echo"},
                              capture_output=True, text=True, check=True).stdout.split()  # fmt: skip
        cfg = config.resolve(config.parse_config(said[said.index("train.py") + 1 :]))
        assert cfg.steps == 7
        assert cfg.model.lower().endswith(name.split("-")[0])
        assert (cfg.shard == "fsdp") == (said[said.index("--nproc-per-node") + 1] == "8")
        assert cfg.importance_cap == 2.0


def test_learning_rate_schedules():
    cfg = config.Config(steps=14, warmup=5)
    for schedule, wanted in (("constant", [1.0] * 10), ("linear", [n / 10 for n in range(10, 0, -1)])):
        cfg.lr_schedule = schedule
        assert [train.decay(cfg, step) for step in range(5, 15)] == pytest.approx(wanted)
    cfg.lr_schedule = "cosine"
    assert train.decay(cfg, 5) == 1
    assert train.decay(cfg, 10) == pytest.approx(0.5)
    assert 0 < train.decay(cfg, 14) == pytest.approx((1 - math.cos(math.pi / 10)) / 2)
    assert train.decay(cfg, 1) == 1, "warm-up is not this one's"


def test_tracking(run, monkeypatch, tmp_path):
    """Every row goes to the tracker as it is in the log, the resumed run under the same name. Kills: a tracker on every
    rank, nulls that it cannot plot, a run that is never finished."""
    calls = []
    fake = types.SimpleNamespace(
        init=lambda **options: calls.append(("init", options)),
        log=lambda row, step: calls.append(("log", step, row)),
        finish=lambda: calls.append(("finish",)),
    )
    monkeypatch.setitem(sys.modules, "mytracker", fake)
    log = run("run", steps=2, save_every=1, track="mytracker", eval_every=2, eval_problems=2)
    train.main(config.parse_config(["--out-dir", str(tmp_path / "run"), "--resume", "--steps", "3"]))
    assert [call[0] for call in calls] == ["init", "log", "log", "finish", "init", "log", "finish"]
    first, again = (call[1] for call in calls if call[0] == "init")
    assert first["name"] == again["name"]
    assert (first["project"], first["resume"], first["config"]["steps"]) == ("nanodppo", "allow", 2)
    for (_, step, row), logged in zip([call for call in calls if call[0] == "log"], log[1:], strict=False):
        assert step == logged["step"]
        assert {"step": step} | row == {name: value for name, value in logged.items() if isinstance(value, int | float)}
    assert "eval/avg@4" in calls[2][2]
    with pytest.raises(InputError, match=r"--track nothing: cannot import it .*; pip install nothing"):
        run("other", track="nothing")


def test_the_recipe_for_a_reward(policy_folder, tmp_path):
    """The README's lines, as they stand there, train. Kills: a recipe that no longer works."""
    lines = (ROOT / "README.md").read_text().split("    # myreward.py\n")[1].split("\n\nA pruning rule")[0].splitlines()
    code = "\n".join(line[4:] for line in lines)
    assert len(lines) <= 10
    (tmp_path / "myreward.py").write_text(code.replace("gold in completion.split()", "'a' in completion + gold"))
    (tmp_path / "problems.jsonl").write_text("".join(f'{{"problem": "{n}", "answer": "a"}}\n' for n in range(8)))
    words = flags(policy_folder, str(tmp_path / "run"), data=str(tmp_path / "problems.jsonl"), steps=1, method="grpo")
    program = [sys.executable, str(tmp_path / "myreward.py"), *words]
    subprocess.run(program, check=True, timeout=100, env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert rows(tmp_path / "run")[0]["reward"] == 1.0
