"""The coin for long rollouts: the expected gradient over both sides of it, and whole runs."""

import copy
import subprocess
import sys

import pytest
import torch
import toy

import config
import train
from related.tail import CoinTrainer
from runtime import InputError

COIN = {"checkpoint": 3, "rate": 0.4}


def make(policy_folder, folder, kind=train.Trainer, changes=(), **coin):
    options = {"prompts_per_step": 12, "group_size": 4, "method": "grpo", "loss": "dr_grpo"}
    args = toy.flags(policy_folder, str(folder), **options | dict(changes))
    trainer = kind(config.parse_config(args), toy.toy_reward, **coin)
    trainer.sampling.eos_ids = [*range(85)]  # a third of the vocabulary: lengths from 1 to 6
    return trainer


def gradient(trainer):
    """The gradient [P] of a step in which no completion is dropped, and its groups' weights."""
    prompts = trainer.candidates(1)
    ones = torch.ones(len(prompts), dtype=torch.float64)
    everything = torch.ones(len(prompts), dtype=torch.bool)
    chosen = train.sampler.Selection(prompts, ones, torch.arange(len(prompts)), everything)
    full = trainer.full_batch(trainer.roll_out(prompts, 1, "rollout"), chosen)
    keep = torch.ones_like(full.factor, dtype=torch.bool)
    trainer.backward(full, keep, keep.double())
    grads = [parameter.grad.flatten() for parameter in trainer.model.parameters()]
    return torch.cat(grads).double(), full


def test_both_sides_of_the_coin_average_to_the_full_gradient(policy_folder, tmp_path):
    """In some groups a completion passes the checkpoint, in others one ends right at it. Catches a
    weight that is left out, a group that is dropped in part, and a limit that changes the random
    numbers."""
    whole, full = gradient(make(policy_folder, tmp_path))
    trainer = make(policy_folder, tmp_path, CoinTrainer, **COIN)
    found = {}
    for stops in (True, False):
        trainer.stops = stops
        found[stops], tossed = gradient(trainer)
        assert tossed.batch.lengths.max() == (COIN["checkpoint"] if stops else 6)
    beyond = (full.batch.lengths > COIN["checkpoint"]).any(dim=1)
    assert torch.equal(tossed.factor[~beyond], full.factor[~beyond]), "finished in time: weight 1"
    assert 1 < beyond.sum() < 11
    assert (full.batch.lengths[~beyond] == COIN["checkpoint"]).any()
    mean = 0.4 * found[True] + 0.6 * found[False]
    assert (mean - whole).norm() < 1e-5 * whole.norm()
    assert (found[True] - whole).norm() > 0.1 * whole.norm()


def test_a_stopped_step_teaches_nothing(policy_folder, tmp_path):
    """Its averages are NaN in the log. Catches a history that learns from short groups alone, and
    a run that is resumed with another coin."""
    trainer = make(policy_folder, tmp_path, CoinTrainer, {"method": "pps"}, **COIN)
    trainer.rate = 0.999
    before = copy.deepcopy(vars(trainer.history))
    row, _ = trainer.step(1)
    assert trainer.stops
    assert row["reward"] != row["reward"]
    torch.testing.assert_close(vars(trainer.history), before, rtol=0, atol=0, equal_nan=True)
    assert trainer.sampling.max_new_tokens == 6, "the next step has its whole length"
    saved = trainer.state()
    trainer.load_state(saved)
    trainer.rate = 0.5
    with pytest.raises(InputError, match=r"began with --rollout-checkpoint 3 .*-rate 0\.999: give"):
        trainer.load_state(saved)


def test_a_stopped_step_trains_on_finished_groups_alone(policy_folder, tmp_path):
    """Catches groups that are dropped, but cost a backward pass or a part of the budget of pps."""
    trainer = make(policy_folder, tmp_path, CoinTrainer, **COIN)
    trainer.rate = 0.999
    row, _ = trainer.step(1)
    assert trainer.stops
    finished = (trainer.batch.truncated == 0).all(dim=1)  # [K]
    assert 0 < finished.sum() < len(finished)
    assert row["kept/completions"] == pytest.approx(finished.double().mean().item())
    assert row["kept/tokens"] == 1, "of the tokens of finished groups"


def test_a_whole_step_shows_its_weights(policy_folder, tmp_path):
    """Long groups weigh more in the update and in the log, but not in averages or in the history.
    Catches averages that are biased to long groups."""
    plain = make(policy_folder, tmp_path)
    trainer = make(policy_folder, tmp_path, CoinTrainer, checkpoint=3, rate=0.001)
    expected, _ = plain.step(1)
    row, _ = trainer.step(1)
    assert not trainer.stops
    assert (expected["weight/max"], row["weight/max"]) == (1, pytest.approx(1 / 0.999))
    names = ("reward", "reward_std", "completions/mean_length", "completions/clipped_ratio")
    assert [row[name] for name in names] == [expected[name] for name in names]
    learned, wanted = vars(trainer.history), vars(plain.history)
    torch.testing.assert_close(learned, wanted, rtol=0, atol=0, equal_nan=True)


def test_the_command(policy_folder, tmp_path):
    """As a program, and what it refuses. Catches flags that do not reach train.py."""
    args = toy.flags(policy_folder, str(tmp_path / "run"), steps=2)
    command = [sys.executable, "-m", "related.tail", "--rollout-checkpoint", "3", *args]
    done = subprocess.run(command, cwd=toy.ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "done: " in done.stdout
    for changes, coin in (
        ({}, {"checkpoint": 6, "rate": 0.5}),
        ({}, {"checkpoint": 3, "rate": 1.0}),
        ({"loss": "dapo"}, COIN),
        ({"minibatches": 2}, COIN),
    ):
        with pytest.raises(InputError, match=r"--rollout-checkpoint|related\.tail needs"):
            make(policy_folder, tmp_path, CoinTrainer, changes, **coin)
