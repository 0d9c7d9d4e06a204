"""An engine that differs from the policy is measured, and corrected by truncated weights."""

import sys
from dataclasses import replace

import pytest
import torch
from toy import Recorder, flags, toy_reward

import config
import packing
import rollout
import train
import update
from runtime import InputError

CFG = config.resolve(config.Config(device="cpu", loss="dr_grpo", max_new_tokens=3))


def gradient(model, rollouts, advantages, scale, **changes):
    """(sums, gradient [P]) with everything kept."""
    model.zero_grad()
    keep = torch.ones_like(rollouts.truncated)
    cfg = replace(CFG, **changes)
    old_logprobs = None if cfg.importance_cap else rollouts.logprobs
    sums = update.accumulate_gradients(
        model, rollouts, advantages, scale, keep, cfg=cfg, old_logprobs=old_logprobs
    )
    return sums, torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def test_a_ratio_that_overflows():
    """An engine that is 200 nats off: the logged ratio stays finite."""
    assert update.importance_ratio(torch.tensor([200.0])).isfinite().all()


def test_trainer_logprobs_are_in_their_places(make_policy, monkeypatch):
    """Ragged completions, one of them empty, in slots that mix prompts. Catches rows in the order
    of the packs."""
    model, _ = make_policy()
    prompts = [[65, 66], [67], [68, 69, 70]]
    sampling = rollout.Sampling(9, [256, *range(0, 256, 8)], 257, temperature=0.6)
    got = rollout.sample(model, prompts, sampling, group_size=5, seed=1)
    got.lengths[1, 2] = 0
    got.logprobs[1, 2] = 0.0
    for share in (False, True):
        monkeypatch.setattr(packing, "shares_prompts", lambda device, share=share: share)
        cfg = replace(CFG, pack_tokens=20, temperature=0.6)
        assert (update.trainer_logprobs(model, got, cfg) - got.logprobs).abs().max() < 1e-5


def test_an_empty_completion_adds_nothing(make_policy):
    """Catches a division by its length, and a target that does not exist."""
    model, _ = make_policy()
    got = rollout.sample(model, [[65, 66]], rollout.Sampling(6, [256], 257), group_size=3, seed=1)
    scale = torch.ones(1, 3)
    advantages = torch.tensor([[1.0, -1.0, 1.0]])
    got.lengths[0, 2] = 0
    sums, with_empty = gradient(model, got, advantages, scale)
    scale[0, 2] = 0.0
    assert torch.equal(with_empty, gradient(model, got, advantages, scale)[1])
    assert sums.completion_tokens == got.lengths.sum()
    assert with_empty.isfinite().all()


def test_the_cap_is_above_not_at_it(make_policy, make_rollouts):
    """A sampler that equals the trainer has ratios of exactly 1, so a cap of 1 cuts none of
    them. Catches a ratio of other tokens."""
    model, _ = make_policy()
    rollouts = make_rollouts(model, 3, 2)
    rollouts.logprobs = update.trainer_logprobs(model, rollouts, CFG)
    ones = torch.ones(3, 2)
    sums, _ = gradient(model, rollouts, ones, ones, importance_cap=1.0)
    assert sums.importance == sums.completion_tokens == rollouts.lengths.sum()
    assert sums.capped == sums.gap == 0


@pytest.mark.parametrize("minibatches", [1, 2])
def test_what_updates_compare_with(policy_folder, tmp_path, monkeypatch, minibatches):
    """One update a step: with the current log-probs. Several: with the model before the first.
    Catches a look-up after an update."""
    look_ups = []

    def look_up(model, rollouts, cfg, keep):
        look_ups.append(sum(weight.sum().item() for weight in model.parameters()))
        return update.trainer_logprobs(model, rollouts, cfg, keep)

    monkeypatch.setattr(train, "trainer_logprobs", look_up)
    options = {"method": "grpo", "importance_cap": 2.0, "minibatches": minibatches}
    args = flags(policy_folder, str(tmp_path), **options)
    trainer = Recorder(config.parse_config(args), toy_reward)
    for step in range(1, 5):
        trainer.step(step)
        first, *others = (each.options["old_logprobs"] for each in trainer.now.updates)
        if minibatches == 1:
            assert first is None
            continue
        assert others[0] is first
        kept = trainer.now.keep & (trainer.now.lengths > 0)
        assert torch.equal((first != 0).any(dim=2), kept), "of what any draw has kept"
    assert len(look_ups) == len(set(look_ups)) == (0 if minibatches == 1 else 4)


@pytest.mark.parametrize(
    ("given", "cap"),
    [
        ({}, 0.0), ({"dtype": "bfloat16"}, 2.0),
        ({"engine": "vllm", "importance_cap": 0.0}, 0.0),
    ],
)  # fmt: skip
def test_the_cap_is_on_where_the_sampler_differs(given, cap):
    """By more than the clip tolerates. Fails if the correction is on where it is not needed, or off
    where it is, or if it cannot be turned off."""
    assert config.resolve(config.Config(device="cpu", **given)).importance_cap == cap


def test_vllm_that_is_not_installed(run, monkeypatch, tmp_path):
    """Reported before anything is written. Catches a bare ImportError, and a folder that then holds
    a run."""
    monkeypatch.setitem(sys.modules, "vllm", None)
    complaint = r"--engine vllm: cannot import it .*install vLLM, or use --engine compact"
    with pytest.raises(InputError, match=complaint):
        run("run", engine="vllm")
    assert not (tmp_path / "run").exists()
