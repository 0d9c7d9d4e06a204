"""Stopping and going on: a kill loses nothing, what is not finite is not applied, and bad input is named."""

import itertools
import math
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from toy import assert_same, flags, rows, timeless

import arithmetic
import config
import dppo
import train
from data import InputError

ROOT = Path(__file__).resolve().parents[1]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
ONE_THREAD = os.environ | {"OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize("method", ["pps", "greso"])
def test_resumed_in_the_middle_of_an_epoch(run, tmp_path, monkeypatch, method):
    """Log, samples and weights as if never stopped: the prompt level's memory is whole. Kills: strata, ages, streaks,
    probabilities or the cursor not saved."""
    monkeypatch.setattr(arithmetic, "TRAIN_PROBLEMS", 32)
    common = {"method": method, "group_size": 3, "lr": 3e-3}
    if method == "pps":
        common |= {"prompt_prune_rate": 0.5}
    run("whole", steps=30, save_every=30, **common)
    run("part", steps=19, save_every=19, **common)
    checkpoints = torch.load(tmp_path / "part" / "checkpoint" / "trainer.pt", weights_only=True)
    assert checkpoints["history"]["sums"][0].sum() > 10
    train.main(config.parse_config(["--out-dir", str(tmp_path / "part"), "--resume", "--steps", "30"]))
    assert_same(timeless(tmp_path / "whole"), timeless(tmp_path / "part"))


def test_killed_and_resumed(policy_folder, tmp_path):
    """kill -9 at random moments before and after the first checkpoint, --resume: log, samples and weights equal an
    uninterrupted run's bit for bit, times excepted; `bench.py kills` has twenty. Kills: state that is not saved
    (optimizer, history, step), rows twice."""
    common = {"steps": 24, "save_every": 5, "eval_every": 6, "eval_problems": 4, "prompt_prune_rate": 0.4}
    program = [sys.executable, str(ROOT / "tests" / "toy.py")]
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    words = {folder: flags(policy_folder, str(folder), prompts_per_step=40, **common) for folder in (whole, broken)}
    subprocess.run([*program, *words[whole]], check=True, env=ONE_THREAD, timeout=200)
    log = broken / "log.jsonl"
    for number, (least, most) in enumerate(((0, 5), (7, 22))):
        moment = random.Random(f"kill {number}")
        wanted = moment.randint(least, most)
        process = subprocess.Popen([*program, *words[broken], *["--resume"][:number]], env=ONE_THREAD)
        while process.poll() is None and not (log.exists() and len(log.read_text().splitlines()) >= wanted):
            time.sleep(0.005)
        time.sleep(moment.uniform(0, 0.1))
        process.kill()
        assert process.wait() == -9, "it was to be killed before its end"
    subprocess.run([*program, *words[broken], "--resume"], check=True, env=ONE_THREAD, timeout=200)
    assert_same(timeless(whole), timeless(broken))


def test_resume_takes_the_runs_own_settings(policy_folder, run, tmp_path, monkeypatch):
    """--resume needs no other flag than the folder; a changed one is refused, more steps are welcome."""
    run("run", steps=4, save_every=2, prompt_prune_rate=0.25)
    out = ["--out-dir", str(tmp_path / "run"), "--resume"]
    cfg = config.parse_config(out)
    assert (cfg.model, cfg.prompt_prune_rate, cfg.group_size, cfg.steps) == (policy_folder, 0.25, 6, 4)
    with pytest.raises(InputError, match=r"--group-size 8: the run in .* has 6"):
        config.parse_config([*out, "--group-size", "8"])
    train.main(config.parse_config([*out, "--steps", "6"]))
    run("falling", steps=2, save_every=2, lr_schedule="linear")
    with pytest.raises(InputError, match=r"--steps 4: the run in .* has 2"):
        config.parse_config(["--out-dir", str(tmp_path / "falling"), "--resume", "--steps", "4"])
    assert [row["step"] for row in rows(tmp_path / "run")] == [1, 2, 3, 4, 5, 6]
    monkeypatch.setattr(arithmetic, "TRAIN_PROBLEMS", 412)
    with pytest.raises(InputError, match=r"412 prompts, but the run in .* was started with 512"):
        train.main(config.parse_config([*out, "--steps", "8"]))
    with pytest.raises(InputError, match="holds a run: give --resume to continue it, or another --out-dir"):
        run("run")


def test_not_finite_stops_and_the_checkpoint_survives(run, tmp_path):
    """A learning rate that blows the weights up. Kills: a traceback instead of the step, a checkpoint of a step that
    did not end."""
    with pytest.raises(InputError, match=r"step \d+ is not finite .*Lower --lr") as caught:
        run("run", steps=9, lr=1e30, warmup=0, save_every=1)
    assert "\n" not in str(caught.value)
    saved = torch.load(tmp_path / "run" / "checkpoint" / "trainer.pt", weights_only=True)["step"]
    assert saved == rows(tmp_path / "run")[-1]["step"]


def test_not_finite_evaluation(run, tmp_path, monkeypatch):
    """Weights that an update of step 2 broke, found by its evaluation: that step is neither logged nor saved."""
    calls, evaluate = itertools.count(), train.evaluation.sample_rewards

    def breaks_at_third(model, *words, **options):
        if next(calls) == 2:
            with torch.no_grad():
                model.model.norm.weight.fill_(math.nan)
        return evaluate(model, *words, **options)

    monkeypatch.setattr(train.evaluation, "sample_rewards", breaks_at_third)
    with pytest.raises(InputError, match=r"step 2 is not finite \(the model's logits are not finite"):
        run("run", steps=4, eval_every=1, eval_problems=2, save_every=1)
    assert [row["step"] for row in rows(tmp_path / "run")] == [0, 1]
    assert torch.load(tmp_path / "run" / "checkpoint" / "trainer.pt", weights_only=True)["step"] == 1


def test_not_finite_loss_is_not_applied(run, tmp_path, monkeypatch):
    """Advantages that break in step 3: the weights of step 2 stay. Kills: stepping with a NaN gradient."""
    calls, advantages = itertools.count(1), dppo.group_advantages
    broken = lambda rewards, loss: advantages(rewards, loss) + (math.nan if next(calls) == 3 else 0)
    monkeypatch.setattr(dppo, "group_advantages", broken)
    with pytest.raises(InputError, match=r"step 3 is not finite \(loss nan"):
        run("run", steps=5, save_every=1)
    weights = load_file(tmp_path / "run" / "checkpoint" / "model.safetensors")
    assert all(weight.isfinite().all() for weight in weights.values())
    assert [row["step"] for row in rows(tmp_path / "run")] == [1, 2]


# ---------------------------------------------------------------------------- input


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--prompt-prune-rate", "1.0"], "--prompt-prune-rate 1.0: must be at least 0 and below 1"),
        (["--completion-prune-rate", "-0.1"], "--completion-prune-rate -0.1: must be at least 0 and below 1"),
        (["--completion-prune-rate", "nan"], "--completion-prune-rate nan: must be"),
        (
            ["--method", "grpo", "--prompt-prune-rate", "0.5"],
            "--prompt-prune-rate 0.5: must be 0 with --prompt-rule none (--method grpo)",
        ),
        (["--method", "grpo_zero", "--completion-prune-rate", "0.5"], "0.5: must be 0 with --completion-rule zero"),
        (["--method", "cppo", "--completion-prune-rate", "0.9"], "0.9: must be lower: it keeps none of 6"),
        (["--completion-rule", "cppo_batch", "--completion-prune-rate", "0.97"], "must be lower: it keeps none of 24"),
        (["--method", "pps", "--cppo-allocation"], "--cppo-allocation: belongs to --method cppo, not to"),
        (["--method", "greso", "--prompt-prune-rate", "0.5"], "0.5: must be 0 with --prompt-rule greso"),
        (["--method", "greso", "--check-every", "1"], "--check-every 1: must be 0 with --prompt-rule greso"),
        (["--method", "greso", "--prompts-per-step", "300"], "its first round is 1.5 x 300 prompts of 512"),
        (["--method", "pps", "--prompt-prune-rate", "0.9"], "0.9: must be lower: it keeps 0 of 4 prompts"),
        (
            ["--prompt-rule", "uniform", "--prompt-prune-rate", "0.7", "--minibatches", "2"],
            "0.7: must be lower: it keeps 1 of 4 prompts, and each of 2 updates needs one",
        ),
        (["--minibatches", "3"], "--minibatches 3: must be a divisor of the step's 4 prompts"),
        (["--epochs", "0"], "--epochs 0: must be at least 1"),
        (["--beta", "-1"], "--beta -1.0: must be at least 0"),
        (["--check-every", "-1"], "--check-every -1: must be at least 0"),
        (["--loss", "cispo", "--eps-low", "1.5"], "--eps-low 1.5: must be above 0"),
        (["--completion-rule", "topk"], "invalid choice 'topk' for argument '--completion-rule'"),
        (["--group-size", "1"], "--group-size 1: must be at least 2"),
        (["--steps", "-1"], "--steps -1: must be at least 1"),
        (["--steps", "0"], "--steps 0: must be at least 1"),
        (["--steps", "many"], "invalid literal for int() with base 10: 'many'"),
        (["--lr", "0"], "--lr 0.0: must be above 0"),
        (["--lr", "inf"], "--lr inf: must be above 0 and finite"),
        (["--temperature", "0"], "--temperature 0.0: must be above 0"),
        (["--eps-low", "1"], "--eps-low 1.0: must be above 0 and below 1"),
        (["--save-every", "-5"], "--save-every -5: must be at least 0"),
        (["--pack-window", "0"], "--pack-window 0: must be at least 1"),
        (["--loss", "ppo"], "invalid choice 'ppo' for argument '--loss'. Expected one of ('grpo', 'dr_grpo', 'dapo',"),
        (["--lrr", "1"], "unknown flag --lrr: did you mean --lr?"),
        (["--top-p", "0.9"], "unknown flag --top-p: what is trained must be the distribution that was sampled, whole"),
        (
            ["--repetition_penalty=1.1"],
            "unknown flag --repetition_penalty=1.1: what is trained must be the distribution",
        ),
        (["--engine", "fast"], "invalid choice 'fast' for argument '--engine'"),
        (["--vllm-memory", "1.5"], "--vllm-memory 1.5: must be above 0 and below 1"),
        (["--importance-cap", "0.5"], "--importance-cap 0.5: must be 0 (no correction) or at least 1"),
        (["--lr-schedule", "step"], "invalid choice 'step' for argument '--lr-schedule'"),
        (["--keep-checkpoints", "0"], "--keep-checkpoints 0: must be at least 1"),
        (["--shard", "fsdp"], "--shard fsdp: there are no ranks to share the weights; start train.py with torchrun"),
        (["--prompt-format", "chat"], "--prompt-format chat: the tokenizer has no chat template; use plain"),
        (["--data", "nothing.jsonl"], "nothing.jsonl: no such file"),
        (["--data", "arithmetic-longer"], "evaluation only"),
        (["--eval-every", "1", "--eval-data", "nothing.jsonl"], "nothing.jsonl: no such file"),
        (["--model", "/nowhere/model"], "--model /nowhere/model cannot be loaded"),
        (["--prompts-per-step", "513"], "--prompts-per-step 513: the data holds only 512 prompts"),
        (["--max-new-tokens", "512"], "all 512 prompts are longer than 0 tokens: lower --max-new-tokens"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(policy_folder, tmp_path, words, said):
    with pytest.raises(InputError) as caught:
        train.main(config.parse_config([*flags(policy_folder, str(tmp_path / "run")), *words]))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_bad_input_has_no_traceback(tmp_path):
    """As a program, alone and under torchrun, whose own report follows."""
    (tmp_path / "bad.jsonl").write_text('{"question": "a", "answer": "1"}\noops\n')
    words = ["train.py", "--data", str(tmp_path / "bad.jsonl"), "--out-dir", str(tmp_path / "run")]
    alone = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True, check=False)
    assert alone.returncode == 2
    assert alone.stderr.startswith("error: ")
    assert alone.stderr.count("\n") == 1
    assert "bad.jsonl, line 2 is not JSON" in alone.stderr
    command = [*TORCHRUN, "--nproc-per-node", "2", *words]
    together = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env=ONE_THREAD)
    assert together.returncode != 0
    assert together.stderr.count("bad.jsonl, line 2 is not JSON") == 1, "one rank says it"
