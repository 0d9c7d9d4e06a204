"""A sampler that is not quite the policy: measured, and corrected by truncated importance weights."""

import itertools
import math
import sys
from dataclasses import replace

import pytest
import torch
from toy import plain_logits

import config
import rollout
import train
import update
from data import InputError

CFG = config.resolve(config.Config(device="cpu", loss="dr_grpo", max_new_tokens=3, share_prompts=False))


def gradient(model, rollouts, advantages, scale, **changes):
    """(sums by name, gradient [P]) of everything."""
    model.zero_grad()
    keep, old_logprobs = torch.ones_like(rollouts.truncated), changes.pop("old_logprobs", None)
    cfg = replace(CFG, **changes)
    sums = update.accumulate_gradients(model, rollouts, advantages, scale, keep, cfg=cfg, old_logprobs=old_logprobs)
    return dict(zip(update.SUMS, sums.tolist(), strict=True)), torch.cat([p.grad.flatten() for p in model.parameters()])


def one_token_rollouts(logprobs):
    """All five completions of one token, a prompt [1, 2] each, with these log-probs [5]."""
    nothing = torch.zeros(5, 1)
    ones = torch.ones(5, 1, dtype=torch.long)
    return rollout.Rollouts(
        [[1, 2]] * 5, torch.arange(5).view(5, 1, 1), logprobs.view(5, 1, 1), nothing, nothing, ones, nothing.bool()
    )


def test_importance_weights_give_the_policys_gradient(small_world):
    """Every outcome of a one-token completion, times its chance under a sampler that is 0.5 nats off: with the weights
    the expected gradient is that of the policy's own samples; without, or with a low cap, it is not. Kills: the inverse
    ratio, weights that carry a gradient, a cap that does nothing, a clip that is measured from the sampler."""
    model, _ = small_world
    policy = plain_logits(model, torch.tensor([[1, 2]]))[0, -1, :5].log_softmax(dim=0)
    sampler = (policy + torch.tensor([0.5, -0.5, 0.3, -0.2, 0.1])).log_softmax(dim=0)
    advantages = torch.tensor([[1.0], [-2.0], [0.5], [3.0], [-1.0]])
    _, truth = gradient(model, one_token_rollouts(policy), advantages, policy.exp()[:, None])

    def error(**changes):
        sums, found = gradient(model, one_token_rollouts(sampler), advantages, sampler.exp()[:, None], **changes)
        return sums, ((found - truth).norm() / truth.norm()).item()

    sums, exact = error(importance_cap=10.0)
    assert exact < 1e-5
    assert sums["gap"] == pytest.approx((policy - sampler).abs().sum().item(), rel=1e-4)
    assert sums["importance"] == pytest.approx((policy - sampler).exp().sum().item(), rel=1e-4)
    assert sums["capped"] == sums["clipped"] == 0
    assert error(importance_cap=0.0)[1] > 0.05
    cut, biased = error(importance_cap=1.0)
    assert biased > 0.02
    _, found = gradient(model, one_token_rollouts(sampler), advantages, sampler.exp()[:, None], importance_cap=1.0)
    lower = torch.minimum(policy, sampler).exp()[:, None]
    _, constant = gradient(model, one_token_rollouts(policy), advantages, lower)
    assert torch.allclose(found, constant, atol=1e-6), "weights are constants, cut or not"
    assert cut["capped"] == (policy > sampler).sum().item()
    policy = policy.view(5, 1, 1)
    looked_up = error(importance_cap=10.0, old_logprobs=policy - 0.4)[0]["importance"]
    assert looked_up == pytest.approx(sums["importance"] * math.exp(-0.4), rel=1e-4)
    assert error(importance_cap=10.0, old_logprobs=policy)[1] < 1e-5, "the same, looked up instead of now"
    assert error(importance_cap=10.0, old_logprobs=policy - 0.4)[0]["clipped"] > 0, "they are what the clip looks at"


def test_trainer_logprobs_are_in_their_places(make_policy):
    """Ragged completions, one of them empty, in slots that mix prompts. Kills: rows in the order of the packs."""
    model, _ = make_policy()
    prompts = [[65, 66], [67], [68, 69, 70]]
    sampling = rollout.Sampling(9, [256, *range(0, 256, 8)], 257, temperature=0.6)
    got = rollout.sample(model, prompts, sampling, group_size=5, seed=1)
    got.lengths[1, 2] = 0
    got.logprobs[1, 2] = 0.0
    for share in (False, True):
        cfg = replace(CFG, pack_tokens=20, share_prompts=share, temperature=0.6)
        assert (update.trainer_logprobs(model, got, cfg) - got.logprobs).abs().max() < 1e-5


def test_an_empty_completion_adds_nothing(make_policy):
    """Kills: a division by its length, a target that is not there."""
    model, _ = make_policy()
    got = rollout.sample(model, [[65, 66]], rollout.Sampling(6, [256], 257), group_size=3, seed=1)
    scale, advantages = torch.ones(1, 3), torch.tensor([[1.0, -1.0, 1.0]])
    got.lengths[0, 2] = 0
    sums, with_empty = gradient(model, got, advantages, scale)
    scale[0, 2] = 0.0
    assert torch.equal(with_empty, gradient(model, got, advantages, scale)[1])
    assert sums["completion_tokens"] == got.lengths.sum()
    assert with_empty.isfinite().all()


def test_a_run_whose_sampler_is_off(run, monkeypatch):
    """Reported log-probs 0.1 too low in every other place: the log says so, and corrected runs differ from plain ones.
    Two mini-batches look their old log-probs up, once a step. Kills: old log-probs of after the first update."""
    sample, looked_up = rollout.sample, []

    def off(*words, **options):
        rollouts = sample(*words, **options)
        rollouts.logprobs[..., ::2] -= 0.1
        return rollouts

    def look_up(model, rollouts, cfg):
        looked_up.append(fingerprint(model))
        return real(model, rollouts, cfg)

    accumulate, given = train.accumulate_gradients, []

    def record(*words, old_logprobs, **options):
        given.append(old_logprobs)
        return accumulate(*words, old_logprobs=old_logprobs, **options)

    monkeypatch.setattr(train, "accumulate_gradients", record)

    def fingerprint(model):
        return sum(parameter.sum().item() for parameter in model.parameters())

    real = train.trainer_logprobs
    monkeypatch.setattr(rollout, "sample", off)
    monkeypatch.setattr(train, "trainer_logprobs", look_up)
    plain = run("plain", method="grpo")
    assert not any("sampling/importance_sampling_ratio/mean" in row for row in plain)
    corrected = run("corrected", method="grpo", importance_cap=1.05)
    assert not looked_up
    twice = run("twice", method="grpo", importance_cap=2.0, minibatches=2)
    run("again", method="grpo", importance_cap=2.0, epochs=2, steps=1)
    assert len(looked_up) == 5, "once a step, with mini-batches or epochs"
    assert len(set(looked_up[:4])) == 4
    assert [old is None for old in given] == 8 * [True] + 10 * [False]
    assert all(first is second for first, second in zip(given[8::2], given[9::2], strict=True))
    for row in itertools.chain(corrected, twice):
        assert 0.05 < row["sampling/sampling_logp_difference/mean"] < 0.1
        assert 1.05 < row["sampling/importance_sampling_ratio/mean"] < 1.11
        assert row["sampling/importance_sampling_ratio/capped"] == pytest.approx(
            0.58 if row in corrected else 0, abs=0.2
        )
    assert corrected[0]["grad_norm"] != plain[0]["grad_norm"]
    assert plain[0]["clip_ratio/region_mean"] == corrected[0]["clip_ratio/region_mean"] == 0


def test_vllm_that_is_not_there(run, monkeypatch, tmp_path):
    """Said before anything is written; with it the correction is on unless it is turned off. Kills: a bare ImportError,
    a folder that then holds a run, a correction that nobody asked for."""
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(InputError, match=r"--engine vllm: cannot import it .*install vLLM, or use --engine compact"):
        run("run", engine="vllm")
    assert not (tmp_path / "run").exists()
    caps = [({}, 0.0), ({"engine": "vllm"}, 2.0), ({"engine": "vllm", "importance_cap": 0.0}, 0.0)]
    for given, cap in caps:
        assert config.resolve(config.Config(device="cpu", **given)).importance_cap == cap
    said = config.warnings(config.resolve(config.Config(device="cpu", engine="vllm", method="pps")), 16)
    assert any("upper bound" in line for line in said)
