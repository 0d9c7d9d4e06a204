"""Resuming: a kill loses nothing, a step that is not finite is not applied, bad input is named."""

import functools
import itertools
import math
import sys
import types
from pathlib import Path

import pytest
import torch
import toy
from safetensors.torch import load_file
from toy import assert_same, flags, rows, timeless

import config
import dppo
import eval as evaluation
import train
from runtime import InputError, checkpoint, log


def saved_step(folder):
    return torch.load(folder / "checkpoint" / "trainer.pt", weights_only=True)["step"]


def test_resume_takes_the_runs_own_settings(policy_folder, run, tmp_path, monkeypatch):
    """--resume needs no flag but the folder, which may have moved; a changed flag is refused, and
    more steps are fine."""
    run("run", save_every=4, prompt_prune_rate=0.25)
    run("falling", steps=1, save_every=1, lr_schedule="linear")
    out, falling = (["--resume", "--out-dir", str(tmp_path / name)] for name in ("run", "falling"))
    cfg = config.parse_config(out)
    settings = (cfg.model, cfg.prompt_prune_rate, cfg.group_size, cfg.steps)
    assert settings == (policy_folder, 0.25, 6, 4)
    with pytest.raises(InputError, match=r"--data words: the run in .* has arithmetic; leave"):
        config.parse_config([*out, "--data", "words"])
    toy.main([*out, "--steps", "5"])
    assert [row["step"] for row in rows(tmp_path / "run")] == [1, 2, 3, 4, 5]
    with pytest.raises(InputError, match=r"--steps 4: the run in .* has 1"):
        config.parse_config([*falling, "--steps", "4"])
    with pytest.raises(InputError, match="nowhere holds no run, and no flag says what to start"):
        config.parse_config(["--resume", "--out-dir", "nowhere"])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").rename(tmp_path / "out")
    assert config.parse_config(["--resume"]).out_dir == "out", "not where it was"


def test_a_run_keeps_its_reward_and_its_trainer(run, tmp_path, monkeypatch):
    """Catches a run of a user's reward that `train.py --resume` continues with the data's own, and
    programs whose rewards have the same name."""
    monkeypatch.setattr(sys, "argv", ["mine.py"])
    run("run", steps=1, save_every=1)
    again = {"steps": 2, "resume": True}
    for found, changes in (
        ("the reward toy.toy_reward, not rewards.arithmetic_reward", {"reward": None}),
        ("the trainer train.Trainer, not toy.Recorder", {"trainer_class": toy.Recorder}),
    ):
        with pytest.raises(InputError, match=f"{found}: resume it with the program .*mine.py"):
            run("run", **again, **changes)
    own = types.SimpleNamespace(__qualname__="strict", __module__="__main__")  # a program's reward
    monkeypatch.setattr(sys.modules["__main__"], "__file__", "/there/mine.py", raising=False)
    assert checkpoint.name_of(own) == "mine.strict"


def test_a_file_that_has_changed(run, tmp_path):
    """Its rows have changed places. Catches a prompt history of other problems."""
    problems = [{"problem": f"{n}+{4 - n % 2}?", "answer": "4"} for n in range(8)]
    path = tmp_path / "train.jsonl"
    log.write_rows(path, problems)
    options = {"data": str(path), "eval_data": "arithmetic", "save_every": 1}
    run("run", steps=1, **options)
    log.write_rows(path, problems[::-1])
    with pytest.raises(
        InputError, match=r"--data .*train.jsonl: not the problems, or the prompts, that the run"
    ):
        run("run", steps=2, resume=True, **options)


def test_a_checkpoint_is_whole_when_it_gets_its_name(run, monkeypatch):
    """And the row of its step is in the log, so that a kill at the next moment loses nothing.
    Catches a checkpoint that is saved before its row, and a list of files that is written late."""
    rename, seen = Path.rename, []

    def watched(unfinished, final):
        if final.name.startswith("checkpoint-"):
            logged = rows(final.parent)[-1]["step"]
            seen.append((final.name, checkpoint.is_complete(unfinished), logged))
        return rename(unfinished, final)

    monkeypatch.setattr(Path, "rename", watched)
    run("run", steps=4, save_every=2)
    assert seen == [("checkpoint-000002", True, 2), ("checkpoint-000004", True, 4)]


def nth_call_fails(monkeypatch, owner, name, number, fails):
    """The n-th call of owner.name raises `fails`, or calls fails(*args) first and adds what that
    returns."""
    real, calls = getattr(owner, name), itertools.count(1)

    @functools.wraps(real)
    def called(*args, **options):
        now = next(calls) == number
        if now and isinstance(fails, Exception):
            raise fails
        add = fails(*args) if now else None
        found = real(*args, **options)
        return found if add is None else found + add

    monkeypatch.setattr(owner, name, called)


EVALUATED, REWARDED = 8, 24  # completions of an evaluation, as before the first step, and of a step
IN_AN_EVALUATION = EVALUATED + 2 * REWARDED + 3
IN_STEP_3 = EVALUATED + 2 * REWARDED + EVALUATED + 5


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (IN_STEP_3, FloatingPointError("divide by zero")),
        (IN_AN_EVALUATION, InputError("the reward is 'x'")),  # a reward that returns a text
    ],
)
def test_a_reward_that_raises_loses_no_step(run, tmp_path, monkeypatch, capsys, call, error):
    """The finished steps are saved, then the error goes on; --resume continues, and the run is the
    one that never failed, but for an evaluation that was not made."""
    options = {"steps": 4, "eval_every": 2, "eval_problems": 2, "lr": 3e-3, "save_every": 4}
    run("whole", **options)
    with monkeypatch.context() as patch:
        nth_call_fails(patch, toy, "toy_reward", call, error)
        with pytest.raises(type(error), match=str(error)) as caught:
            run("part", reward=toy.toy_reward, **options)
    assert str(caught.traceback[-1].statement).strip() == "raise fails"
    folder = tmp_path / "part"
    assert rows(folder)[-1]["step"] == saved_step(folder) == 2
    assert "stopped after step 2; to continue: python " in capsys.readouterr().out
    run("part", resume=True, **options)
    whole, part = timeless(tmp_path / "whole"), timeless(folder)
    if call == IN_AN_EVALUATION:
        missing = [whole[0][2].pop(f"eval/{name}") for name in ("avg@4", "accuracy")]
        assert None not in missing
    assert_same(whole, part)


def test_half_a_step_is_not_saved(run, tmp_path, monkeypatch):
    """A loss that fails in the second update of step 2. Catches a checkpoint whose weights are
    ahead of its step."""
    error = ArithmeticError("of a loss")
    nth_call_fails(monkeypatch, train, "accumulate_gradients", 4, error)
    with pytest.raises(ArithmeticError, match="of a loss"):
        run("run", minibatches=2)
    assert not (tmp_path / "run" / "checkpoint-000001").exists()


def infinite(*_args):
    return math.inf


def not_a_number(*_args):
    return math.nan


def break_weights(trainer, *_args):
    with torch.no_grad():
        trainer.model.model.norm.weight.fill_(math.nan)


@pytest.mark.parametrize(
    ("owner", "name", "breaks", "message", "last"),
    [
        (dppo, "group_advantages", not_a_number, r"step 3 is not finite \(loss nan", 2),
        (torch.nn.utils, "clip_grad_norm_", infinite,
         r"step 3 is not finite \(loss -?\d.*, gradient norm inf\)", 2),
        # found by the evaluation after step 2
        (train.Trainer, "scores", break_weights,
         r"step 2 is not finite \(the model's logits", 1),
    ],
)  # fmt: skip
def test_not_finite_is_neither_applied_nor_saved(
    run, tmp_path, monkeypatch, owner, name, breaks, message, last
):
    """A loss, the norm of a gradient whose loss is finite, or weights, at the third call. Catches a
    traceback in place of the message, an update with such a gradient, and a checkpoint of a step
    that did not end."""
    nth_call_fails(monkeypatch, owner, name, 3, breaks)
    eval_every = 1 if owner is train.Trainer else 0
    with pytest.raises(InputError, match=message) as caught:
        run("run", steps=5, save_every=1, eval_every=eval_every, eval_problems=2)
    assert "\n" not in str(caught.value)
    folder = tmp_path / "run"
    assert f"from --model {folder / 'checkpoint'}, with a lower --lr" in str(caught.value)
    assert saved_step(folder) == rows(folder)[-1]["step"] == last
    weights = load_file(folder / "checkpoint" / "model.safetensors")
    assert all(weight.isfinite().all() for weight in weights.values())


# ---------------------------------------------------------------------------- input


def test_a_tilde_is_the_home(monkeypatch):
    """Catches a folder that is called ~."""
    monkeypatch.setenv("HOME", "/there")
    cfg = config.parse_config(["--model=~/a", "--out-dir=~/b"])
    assert (cfg.model, cfg.out_dir) == ("/there/a", "/there/b")
    assert evaluation.EvalConfig(data=("~/c", "words")).data == ("/there/c", "words")


BAD_INPUT = """
--prompt-prune-rate 1.0 | --prompt-prune-rate 1.0: must be at least 0 and below 1
--method grpo --prompt-prune-rate 0.5 | 0.5: must be 0 with --prompt-rule none, which has no
--prompt-rule uniform --prompt-prune-rate 0.8 --minibatches 2 | an update would keep 0 of 2
--minibatches 3 | --minibatches 3: must be a divisor of the step's 4 prompts
--prompts-per-step 513 | 513: must be at most 512, which is all that the data hold
--shard fsdp | --shard fsdp: no ranks share the weights; start train.py with torchrun
--lora 4 --shard fsdp | --lora 4: must be at least 0, and 0 with --shard fsdp
--track= | --track is empty: give it a value, or leave it out
--max-new-tokens 512 | 512: must be below 512, the most tokens of a sequence
"""  # arguments | a part of the message


@pytest.mark.parametrize("line", BAD_INPUT.strip().splitlines())
def test_bad_input_is_one_line_and_leaves_nothing(policy_folder, tmp_path, line):
    args, message = line.split(" | ")
    with pytest.raises(InputError) as caught:
        toy.main([*flags(policy_folder, str(tmp_path / "run")), *args.split()])
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()
