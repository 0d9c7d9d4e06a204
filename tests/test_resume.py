"""Resuming: a kill loses nothing, a step that is not finite is not applied, bad input is named."""

import itertools
import json
import math
import os
import random
import runpy
import shutil
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest
import torch
import toy
from safetensors.torch import load_file
from toy import ROOT, assert_same, flags, in_processes, rows, timeless

import config
import dppo
import eval as evaluation
import train
from runtime import InputError, log
from tasks import arithmetic


def test_resumed_in_the_middle_of_an_epoch(run, tmp_path, monkeypatch):
    """Log, samples and weights as if never stopped: the whole prompt history is saved.

    Fails if scores or dapo's mean token count are lost.
    """
    monkeypatch.setattr(arithmetic, "TRAIN_PROBLEMS", 32)
    common = {"method": "pps", "group_size": 3, "lr": 3e-3, "loss": "dapo"}
    common |= {"prompt_rule": "uniform", "prompt_prune_rate": 0.5}
    run("whole", steps=30, save_every=30, **common)
    run("part", steps=19, save_every=19, **common)
    state = torch.load(tmp_path / "part" / "checkpoint" / "trainer.pt", weights_only=True)
    assert (state["trainer"]["history"]["score"] > 0).sum() > 10
    toy.main(["--out-dir", str(tmp_path / "part"), "--resume", "--steps", "30"])
    assert_same(timeless(tmp_path / "whole"), timeless(tmp_path / "part"))


def main_until_killed(args, wanted, seconds):
    """A run that the kernel ends so many seconds of CPU time after its log has `wanted` rows."""
    append = log.append_rows

    def append_rows(path, new):
        append(path, new)
        if path.name == "log.jsonl" and len(log.read_rows(path)) == wanted:
            signal.setitimer(signal.ITIMER_PROF, seconds)  # SIGPROF has no handler: it kills

    log.append_rows = append_rows
    toy.main(args)


def test_killed_and_resumed(policy_folder, tmp_path):
    """Killed at random moments before and after the first checkpoint, then resumed: log, samples
    and weights equal an uninterrupted run's bit for bit, times excepted.

    The moments are counted in rows and CPU time, so that a busy machine cannot miss them. Catches
    state that is not saved (optimizer, history, step), and rows that are written twice.
    """
    common = {"steps": 24, "save_every": 5, "eval_every": 6, "eval_problems": 4}
    common |= {"prompts_per_step": 12, "prompt_prune_rate": 0.4}
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    in_processes(1, toy.main, flags(policy_folder, str(whole), **common))
    args = flags(policy_folder, str(broken), **common)
    for number, (least, most) in enumerate(((2, 5), (8, 18))):
        moment = random.Random(f"kill {number}")
        killed = (moment.randint(least, most), moment.uniform(0, 0.05))
        resume = ["--resume"][:number]
        in_processes(1, main_until_killed, args + resume, *killed, codes=[-signal.SIGPROF])
    in_processes(1, toy.main, [*args, "--resume"])
    assert_same(timeless(whole), timeless(broken))


def test_resume_takes_the_runs_own_settings(policy_folder, run, tmp_path, monkeypatch):
    """--resume needs no flag but the folder; a changed one is refused, more steps are fine."""
    run("run", steps=4, save_every=2, prompt_prune_rate=0.25)
    out = ["--out-dir", str(tmp_path / "run"), "--resume"]
    cfg = config.parse_config(out)
    settings = (cfg.model, cfg.prompt_prune_rate, cfg.group_size, cfg.steps)
    assert settings == (policy_folder, 0.25, 6, 4)
    with monkeypatch.context() as patch:
        patch.chdir(tmp_path)
        moved = (tmp_path / "run").rename(tmp_path / "out")
        assert config.parse_config(["--resume"]).out_dir == "out", "not where it was"
        moved.rename(tmp_path / "run")
    with pytest.raises(InputError, match=r"--group-size 8: the run in .* has 6"):
        config.parse_config([*out, "--group-size", "8"])
    toy.main([*out, "--steps", "6"])
    run("falling", steps=2, save_every=2, lr_schedule="linear")
    with pytest.raises(InputError, match=r"--steps 4: the run in .* has 2"):
        config.parse_config(["--out-dir", str(tmp_path / "falling"), "--resume", "--steps", "4"])
    assert [row["step"] for row in rows(tmp_path / "run")] == [1, 2, 3, 4, 5, 6]
    monkeypatch.setattr(arithmetic, "TRAIN_PROBLEMS", 412)
    with pytest.raises(InputError, match=r"--data: the problems to train on have other prompts"):
        toy.main([*out, "--steps", "8"])
    holds = "holds a run: give --resume to continue it, or another --out-dir"
    with pytest.raises(InputError, match=holds):
        run("run")


def test_resume_with_other_prompts(policy_folder, run, tmp_path):
    """As many as before, each of the same length, in another order. Catches a history that is given
    to other prompts, and data that is compared by lengths alone."""
    one, other = '{"problem": "1+3?", "answer": "4"}', '{"problem": "2+2?", "answer": "4"}'
    last = [one, one]  # of which one is held out
    file = tmp_path / "problems.jsonl"
    file.write_text("\n".join([one, other] * 3 + last) + "\n")
    run("run", steps=2, save_every=2, data=str(file))
    file.write_text("\n".join([other, one] * 3 + last) + "\n")
    with pytest.raises(InputError, match=r"to train on have other prompts or reference"):
        toy.main(["--out-dir", str(tmp_path / "run"), "--resume", "--steps", "4"])


def test_only_contents_count_on_resume(policy_folder, run, tmp_path):
    """Data and model may have moved, and the run is the one that never stopped. Other answers,
    other problems to evaluate on and another model are named.

    Catches contents that are not compared, and a path that is.
    """
    rows_of = {
        "train": [{"problem": f"{n}+1?", "answer": str(n + 1)} for n in range(8)],
        "eval": [{"problem": f"{n}+2?", "answer": str(n + 2)} for n in range(3)],
    }
    paths = {name: str(tmp_path / f"{name}.jsonl") for name in rows_of}
    for name, content in rows_of.items():
        log.append_rows(Path(paths[name]), content)
    options = {"data": paths["train"], "eval_data": paths["eval"], "steps": 4, "save_every": 2}
    options |= {"eval_every": 2, "lr": 3e-3}
    run("whole", **options)
    run("part", until=2, **options)
    (tmp_path / "part" / "checkpoint").unlink()  # the link, which some file systems cannot have
    moved = tmp_path / "moved"
    moved.mkdir()
    for path in (policy_folder, *paths.values()):
        shutil.move(path, moved)
    out = ["--out-dir", str(tmp_path / "part"), "--resume"]
    data, evaluated = (
        ["--data", str(moved / "train.jsonl")],
        ["--eval-data", str(moved / "eval.jsonl")],
    )

    def refused(message, *args):
        with pytest.raises(InputError, match=message):
            toy.main([*out, *args])

    refused(r"train.jsonl cannot be read .*No such file", *evaluated)
    answers = [row | {"answer": "7"} for row in rows_of["train"]]
    log.append_rows(tmp_path / "answers.jsonl", answers)
    log.append_rows(tmp_path / "longer.jsonl", [*rows_of["eval"], {"problem": "?", "answer": "1"}])
    other = ["--data", str(tmp_path / "answers.jsonl")]
    refused("problems to train on have other prompts or reference answers than", *other, *evaluated)
    other = ["--eval-data", str(tmp_path / "longer.jsonl")]
    refused("--eval-data: the problems to evaluate on have other prompts or", *data, *other)
    model = ["--model", str(tmp_path / "part" / "checkpoint")]
    unwatched = config.parse_config([*out, *data, *evaluated, "--eval-every", "0"])
    train.main(unwatched, reward=toy.toy_reward, until=3)
    evaluated = ["--eval-every", "2", *evaluated]
    refused("--eval-data: the problems to evaluate on have other", *data, *evaluated, *other)
    refused("checkpoint is not the model that the run in .* began with", *data, *evaluated, *model)
    toy.main([*out, *data, *evaluated, "--model", str(moved / "policy")])
    assert_same(timeless(tmp_path / "whole"), timeless(tmp_path / "part"))


def test_what_is_lost_is_said(run, tmp_path, capsys, pictures):
    """A resume before the first checkpoint starts over; one without its log goes on, and draws what
    is left. Catches rows that go without a word, and a run that fails at its end."""
    run("run", steps=3)
    (tmp_path / "run" / "checkpoint").unlink(missing_ok=True)
    capsys.readouterr()
    assert [row["step"] for row in run("run", steps=3, resume=True)] == [1, 2, 3]
    said = capsys.readouterr().out
    assert "no checkpoint was saved: removing 3 rows of log.jsonl and starting at step 1" in said
    run("other", steps=4, until=2, save_every=2)
    for name in ("log.jsonl", "samples.jsonl", "groups.jsonl", "run.png"):
        (tmp_path / "other" / name).unlink()
    assert [row["step"] for row in run("other", steps=4, save_every=2, resume=True)] == [3, 4]
    assert "log.jsonl has no row of step 2" in capsys.readouterr().out
    assert (tmp_path / "other" / "run.png").exists()


def test_a_picture_that_fails_is_a_note(run, tmp_path, monkeypatch, capsys):
    """Catches a complete run that ends in a traceback because the disk is full."""

    def full(_folder):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(log, "plot", types.SimpleNamespace(draw_run=full))
    run("run", steps=1)
    said = capsys.readouterr().out
    assert (
        f"run.png could not be drawn; to try again: python -m runtime.plot {tmp_path}/run" in said
    )
    assert "(OSError: [Errno 28] No space left on device)" in said
    assert said.splitlines()[-1].startswith("done: ")


def fails_at(call, error):
    """The toy reward, which raises an error at its n-th call, once."""
    calls = itertools.count(1)

    def reward(completion, answer):
        if next(calls) == call:
            raise error
        return toy.toy_reward(completion, answer)

    return reward


# Of a step 24 completions are rewarded, of an evaluation 8; there is one before the first step.
@pytest.mark.parametrize(
    ("call", "error", "last"),
    [
        (8 + 2 * 24 + 8 + 5, ConnectionError("judge away"), 2),
        (8 + 2 * 24 + 8 + 5, InputError("the reward is 'x'"), 2),  # a reward that returns a text
        (8 + 2 * 24 + 3, ConnectionError("judge away"), 2),  # in an evaluation
        (8 + 5, ConnectionError("judge away"), 0),
    ],
)
def test_a_reward_that_raises_loses_no_step(run, tmp_path, capsys, call, error, last):
    """The finished steps are saved, then the error goes on; --resume continues, and the run is the
    one that never failed, but for an evaluation that was not made.

    Catches an error that loses the steps since the checkpoint, one that is hidden, and a log
    without the step that was saved.
    """
    common = {"steps": 4, "eval_every": 2, "eval_problems": 2, "lr": 3e-3, "save_every": 4}
    run("whole", **common)
    with pytest.raises(type(error), match=str(error)):
        run("part", reward=fails_at(call, error), **common)
    folder = tmp_path / "part"
    assert rows(folder)[-1]["step"] == last
    assert (folder / "checkpoint").exists() == (last > 0)
    said = f"stopped after step {last}; to continue: the same program with --resume"
    assert (said in capsys.readouterr().out) == (last > 0)
    run("part", resume=True, **common)
    (log, *rest), (log_of_part, *rest_of_part) = timeless(tmp_path / "whole"), timeless(folder)
    if call == 8 + 2 * 24 + 3:
        assert log[2].pop("eval/avg@4") is not None
    assert_same((log, *rest), (log_of_part, *rest_of_part))


@pytest.mark.parametrize(("update", "saved"), [(3, True), (4, False)])
def test_half_a_step_is_not_saved(run, tmp_path, monkeypatch, update, saved):
    """A loss that fails in the first or in the second update of step 2. Catches a checkpoint whose
    weights are ahead of its step."""
    calls, accumulate = itertools.count(1), train.accumulate_gradients

    def fails(*args, **options):
        if next(calls) == update:
            raise ArithmeticError("of a loss")
        return accumulate(*args, **options)

    monkeypatch.setattr(train, "accumulate_gradients", fails)
    with pytest.raises(ArithmeticError, match="of a loss"):
        run("run", minibatches=2)
    assert (tmp_path / "run" / "checkpoint-000001").exists() == saved


def test_not_finite_stops_and_the_checkpoint_survives(run, tmp_path):
    """A learning rate that makes the weights explode.

    Catches a traceback in place of the message, and a checkpoint of a step that did not end.
    """
    with pytest.raises(InputError, match=r"step \d+ is not finite .* a lower --lr") as caught:
        run("run", steps=9, lr=1e30, warmup=0, save_every=1)
    assert "\n" not in str(caught.value)
    assert f"from --model {tmp_path / 'run' / 'checkpoint'}, with a lower" in str(caught.value)
    saved = torch.load(tmp_path / "run" / "checkpoint" / "trainer.pt", weights_only=True)["step"]
    assert saved == rows(tmp_path / "run")[-1]["step"]


def test_not_finite_evaluation(run, tmp_path, monkeypatch):
    """An update of step 2 broke the weights, and its evaluation finds it: that step is neither
    logged nor saved."""
    calls, evaluate = itertools.count(), evaluation.sample_rewards

    def breaks_at_third(model, *args, **kwargs):
        if next(calls) == 2:
            with torch.no_grad():
                model.model.norm.weight.fill_(math.nan)
        return evaluate(model, *args, **kwargs)

    monkeypatch.setattr(evaluation, "sample_rewards", breaks_at_third)
    message = r"step 2 is not finite \(the model's logits are not finite"
    with pytest.raises(InputError, match=message):
        run("run", steps=4, eval_every=1, eval_problems=2, save_every=1)
    assert [row["step"] for row in rows(tmp_path / "run")] == [0, 1]
    saved = torch.load(tmp_path / "run" / "checkpoint" / "trainer.pt", weights_only=True)["step"]
    assert saved == 1


def test_not_finite_loss_is_not_applied(run, tmp_path, monkeypatch):
    """Advantages become NaN in step 3: the weights of step 2 stay.

    Catches an optimizer step with a NaN gradient.
    """
    calls, advantages = itertools.count(1), dppo.group_advantages

    def broken(*args):
        return advantages(*args) + (math.nan if next(calls) == 3 else 0)

    monkeypatch.setattr(dppo, "group_advantages", broken)
    with pytest.raises(InputError, match=r"step 3 is not finite \(loss nan"):
        run("run", steps=5, save_every=1)
    weights = load_file(tmp_path / "run" / "checkpoint" / "model.safetensors")
    assert all(weight.isfinite().all() for weight in weights.values())
    assert [row["step"] for row in rows(tmp_path / "run")] == [1, 2]


# ---------------------------------------------------------------------------- input


BAD_INPUT = """
--prompt-prune-rate 1.0 | --prompt-prune-rate 1.0: must be at least 0 and below 1
--completion-prune-rate -0.1 | --completion-prune-rate -0.1: must be at least 0 and below 1
--completion-prune-rate nan | --completion-prune-rate nan: must be
--method grpo --prompt-prune-rate 0.5 | 0.5: must be 0 with --prompt-rule none (--method grpo)
--method grpo_zero --completion-prune-rate 0.5 | 0.5: must be 0 with --completion-rule zero
--method adaptive --completion-prune-rate 0.8 | has no rate but --rest (rate 0.8 is now --rest 0.25)
--method uniform --prompt-prune-rate 0.9 | 0.9: must be lower: an update would keep 0 of 4 prompts
--prompt-rule uniform --prompt-prune-rate 0.8 --minibatches 2 | an update would keep 0 of 2
--minibatches 3 | --minibatches 3: must be a divisor of the step's 4 prompts
--beta -1 | --beta -1.0: must be at least 0
--loss cispo --eps-low 1.5 | --eps-low 1.5: must be above 0
--completion-rule topk | --completion-rule topk: choose one of none, zero, uniform, dppo, pps
--group-size 1 | --group-size 1: must be at least 2
--steps -1 | --steps -1: must be at least 1
--steps 0 | --steps 0: must be at least 1
--steps many | invalid literal for int() with base 10: 'many'
--lr 0 | --lr 0.0: must be above 0
--lr inf | --lr inf: must be above 0 and finite
--rest 0 | --rest 0.0: must be above 0 and finite
--grad-clip -1 | --grad-clip -1.0: must be at least 0
--grad-clip inf | --grad-clip inf: must be at least 0 and finite
--adam-beta2 1 | --adam-beta2 1.0: must be at least 0 and below 1
--temperature 0 | --temperature 0.0: must be above 0
--eps-high 0 | --eps-high 0.0: must be above 0
--eps-low 1 | --eps-low 1.0: must be above 0 and below 1
--save-every -5 | --save-every -5: must be at least 0
--loss ppo | --loss ppo: choose one of grpo, dr_grpo, dapo, gspo, cispo
--lrr 1 | unknown flag --lrr: did you mean --lr?
--top-p 0.9 | unknown flag --top-p: training needs the distribution that was sampled
--repetition_penalty=1.1 | unknown flag --repetition_penalty=1.1: training needs the distribution
--engine fast | invalid choice 'fast' for argument '--engine'
--resume maybe | invalid choice 'maybe' for argument '--resume'
--timeout 0 | --timeout 0: must be at least 1
--vllm-memory 1 | --vllm-memory 1.0: must be above 0 and below 1
--importance-cap 0.5 | --importance-cap 0.5: must be 0 (no correction) or at least 1
--lr-schedule step | invalid choice 'step' for argument '--lr-schedule'
--keep-checkpoints 0 | --keep-checkpoints 0: must be at least 1
--shard fsdp | --shard fsdp: no ranks share the weights; start train.py with torchrun
--prompt-format chat | --prompt-format chat: the tokenizer has no chat template; use plain
--data nothing.jsonl | nothing.jsonl cannot be read (FileNotFoundError
--data arithmetic-longer | evaluation only
--eval-every 1 --eval-data nothing.jsonl | nothing.jsonl cannot be read (FileNotFoundError
--model /nowhere/model | --model /nowhere/model cannot be loaded
--prompts-per-step 513 | --prompts-per-step 513: the data hold only 512; lower it
--max-new-tokens 512 | 512: a sequence has at most 512 tokens, prompt included
--max-new-tokens 511 | all 512 prompts are longer than 1 tokens: lower --max-new-tokens
"""  # arguments | a part of the message


@pytest.mark.parametrize("line", BAD_INPUT.strip().splitlines())
def test_bad_input_is_one_line_and_leaves_nothing(policy_folder, tmp_path, line):
    args, message = line.split(" | ")
    with pytest.raises(InputError) as caught:
        toy.main([*flags(policy_folder, str(tmp_path / "run")), *args.split()])
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_just_enough_prompts():
    """Fails if a step that needs each of 24 prompts is refused, or one that needs more is not."""
    cfg = config.resolve(config.Config(device="cpu", method="grpo", prompts_per_step=24))
    config.check_prompts(cfg, 24)
    with pytest.raises(InputError, match="--prompts-per-step"):
        config.check_prompts(cfg, 23)


def test_a_run_of_another_version(run, tmp_path):
    """Its config.json has a flag that went. Catches a TypeError in place of the way out."""
    run("run", steps=2, save_every=1)
    path = tmp_path / "run" / "config.json"
    written = json.loads(path.read_text())
    written["config"]["epochs"] = 1
    path.write_text(json.dumps(written))
    with pytest.raises(InputError, match="another version, which had --epochs: use another --out"):
        toy.main(["--out-dir", str(tmp_path / "run"), "--resume"])


def program(args):
    """train.py as a program that ends with status 77 where it would wait for torchrun to end it."""
    os.environ["TORCHELASTIC_ERROR_FILE"] = args[-1] + ".json"
    sleep = time.sleep
    time.sleep = lambda seconds: sleep(seconds) if seconds < 1 else os._exit(77)
    sys.argv = ["train.py", *args]
    runpy.run_path(str(ROOT / "train.py"), run_name="__main__")


def test_bad_input_has_no_traceback(tmp_path):
    """As a program, alone and on two ranks, of which only the first reports it: the second waits.

    Catches an error that every rank prints, and one that is not in torchrun's last lines.
    """
    (tmp_path / "bad.jsonl").write_text('{"question": "a", "answer": "1"}\noops\n')
    message = "bad.jsonl: JSONDecodeError: Expecting value"
    args = ["--data", str(tmp_path / "bad.jsonl"), "--out-dir", str(tmp_path / "run")]
    command = [sys.executable, "train.py", *args]
    alone = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert alone.returncode == 2
    assert alone.stderr.startswith("error: ")
    assert alone.stderr.count("\n") == 1
    assert message in alone.stderr
    first, second = in_processes(2, program, args, codes=[2, 77])
    assert first.count(message) == 1
    assert message not in second
    assert "Traceback" not in first + second
    assert message in json.loads((tmp_path / "run.json").read_text())["message"]
