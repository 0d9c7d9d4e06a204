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


def gradient(model, rollouts, advantages, scale, old_logprobs=None, **changes):
    """(sums, gradient [P]) with everything kept."""
    model.zero_grad()
    keep = torch.ones_like(rollouts.truncated)
    cfg = replace(CFG, **changes)
    if not cfg.importance_cap:
        old_logprobs = rollouts.logprobs
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


@pytest.fixture
def corrected_run(policy_folder, tmp_path, monkeypatch):
    """Run grpo with engines whose log-probs are 0.1 too low in every other place. Returns (rows,
    what the steps did, the sum of the weights at each look-up of old log-probs)."""
    sample = rollout.sample

    def off(*args, **options):
        rollouts = sample(*args, **options)
        rollouts.logprobs[..., ::2] -= 0.1
        return rollouts

    def run(**changes):
        look_ups = []

        def look_up(model, rollouts, cfg, keep):
            look_ups.append(sum(weight.sum().item() for weight in model.parameters()))
            return update.trainer_logprobs(model, rollouts, cfg, keep)

        monkeypatch.setattr(rollout, "sample", off)
        monkeypatch.setattr(train, "trainer_logprobs", look_up)
        args = flags(policy_folder, str(tmp_path), method="grpo", **changes)
        trainer = Recorder(config.parse_config(args), toy_reward)
        rows = [trainer.step(step)[0] for step in range(1, 5)]
        return rows, trainer.steps, look_ups

    return run


RATIO = "sampling/importance_sampling_ratio"


def test_one_update_a_step_compares_with_the_current_log_probs(corrected_run):
    rows, steps, look_ups = corrected_run(importance_cap=1.05)
    assert not look_ups
    assert all(step.updates[0].options["old_logprobs"] is None for step in steps)
    for row in rows:
        assert 0.049 < row["sampling/sampling_logp_difference/mean"] < 0.1
        assert 1.05 < row[f"{RATIO}/mean"] < 1.11
        assert row[f"{RATIO}/capped"] == pytest.approx(0.58, abs=0.2)


def test_several_updates_compare_with_the_model_before_the_first(corrected_run):
    """Catches a look-up after an update, and updates that use current log-probs instead."""
    _, steps, look_ups = corrected_run(importance_cap=2.0, minibatches=2)
    assert len(look_ups) == len(set(look_ups)) == len(steps) == 4
    for step in steps:
        first, second = (each.options["old_logprobs"] for each in step.updates)
        assert first is second
        kept = step.keep & (step.lengths > 0)
        assert torch.equal((first != 0).any(dim=2), kept), "of what any draw has kept"


@pytest.mark.parametrize(
    ("given", "cap"),
    [
        ({}, 0.0), ({"dtype": "bfloat16"}, 2.0), ({"engine": "vllm"}, 2.0),
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
    cfg = config.resolve(config.Config(device="cpu", engine="vllm", method="pps"))
    assert any("upper bound" in line for line in config.warnings(cfg))
