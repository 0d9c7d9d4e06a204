"""A sampler that differs from the policy is measured, and corrected by truncated weights."""

import math
import sys
from dataclasses import replace

import pytest
import torch
from toy import Recorder, flags, plain_logits, toy_reward

import config
import packing
import rollout
import train
import update
from engines import compact
from runtime import InputError
from runtime.device import cast_weights

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


def one_token_rollouts(logprobs):
    """All five one-token completions of prompt [1, 2], each a group of 1, with log-probs [5]."""
    ids = torch.arange(5).view(5, 1, 1)
    zeros = torch.zeros(5, 1)
    lengths = torch.ones(5, 1, dtype=torch.long)
    columns = (logprobs.view(5, 1, 1), zeros, zeros, lengths, zeros.bool())
    return rollout.Rollouts([[1, 2]] * 5, ids, *columns)


def test_importance_weights_give_the_policys_gradient(small_world):
    """Every one-token completion, weighted by its probability under a sampler that is 0.5 nats off:
    with importance weights, the expected gradient is that of the policy's own samples; without
    them, or with a low cap, it is not. Catches the inverse ratio, weights that carry a gradient, a
    cap without effect, and a clip that is measured from the sampler."""
    model, _ = small_world
    policy = plain_logits(model, torch.tensor([[1, 2]]))[0, -1, :5].log_softmax(dim=0)
    sampler = (policy + torch.tensor([0.5, -0.5, 0.3, -0.2, 0.1])).log_softmax(dim=0)
    advantages = torch.tensor([[1.0], [-2.0], [0.5], [3.0], [-1.0]])
    _, truth = gradient(model, one_token_rollouts(policy), advantages, policy.exp()[:, None])

    def sampled(**changes):
        rollouts = one_token_rollouts(sampler)
        return gradient(model, rollouts, advantages, sampler.exp()[:, None], **changes)

    def error(biased):
        return ((biased - truth).norm() / truth.norm()).item()

    sums, exact = sampled(importance_cap=10.0)
    assert error(exact) < 1e-5
    assert sums.gap == pytest.approx((policy - sampler).abs().sum().item(), rel=1e-4)
    assert sums.importance == pytest.approx((policy - sampler).exp().sum().item(), rel=1e-4)
    assert sums.capped == sums.clipped == 0
    assert error(sampled(importance_cap=0.0)[1]) > 0.05

    cut, biased = sampled(importance_cap=1.0)
    assert error(biased) > 0.02
    lower = torch.minimum(policy, sampler).exp()[:, None]
    _, constant = gradient(model, one_token_rollouts(policy), advantages, lower)
    assert torch.allclose(biased, constant, atol=1e-6), "weights are constants, cut or not"
    assert cut.capped == (policy > sampler).sum().item()

    old = policy.view(5, 1, 1)
    same = sampled(importance_cap=10.0, old_logprobs=old)[1]
    assert error(same) < 1e-5, "looked up instead of current"
    moved, _ = sampled(importance_cap=10.0, old_logprobs=old - 0.4)
    assert moved.importance == pytest.approx(sums.importance * math.exp(-0.4), rel=1e-4)
    assert moved.clipped > 0, "the clip starts from the old log-probs"


def test_a_ratio_that_overflows(small_world):
    """A sampler that is 200 nats off: the logged ratio and the gradient stay finite."""
    model, _ = small_world
    rollouts = one_token_rollouts(torch.full((5,), -200.0))
    sums, grad = gradient(model, rollouts, torch.ones(5, 1), torch.ones(5, 1), importance_cap=2.0)
    assert math.isfinite(sums.importance)
    assert grad.isfinite().all()


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
def look_ups(monkeypatch):
    """Samplers report log-probs that are 0.1 too low in every other place. A list that gets, at
    each look-up of old log-probs, the sum of the weights."""
    sample, sums = rollout.sample, []

    def off(*args, **options):
        rollouts = sample(*args, **options)
        rollouts.logprobs[..., ::2] -= 0.1
        return rollouts

    def look_up(model, rollouts, cfg, keep):
        sums.append(sum(weight.sum().item() for weight in model.parameters()))
        return update.trainer_logprobs(model, rollouts, cfg, keep)

    monkeypatch.setattr(rollout, "sample", off)
    monkeypatch.setattr(train, "trainer_logprobs", look_up)
    return sums


def test_a_run_whose_sampler_is_off(policy_folder, tmp_path, look_ups):
    """The log shows the gap, and corrected runs differ from plain ones. With two mini-batches
    old log-probs are looked up once a step, before its first update. Catches a look-up
    after an update, and updates that use current log-probs instead."""

    def run(**changes):
        args = flags(policy_folder, str(tmp_path), method="grpo", **changes)
        trainer = Recorder(config.parse_config(args), toy_reward)
        log = [trainer.step(step)[0] for step in range(1, trainer.cfg.steps + 1)]
        return log, trainer.steps

    ratio = "sampling/importance_sampling_ratio"
    plain, _ = run()
    assert not any(f"{ratio}/mean" in row for row in plain)
    corrected, steps = run(importance_cap=1.05)
    assert not look_ups
    assert all(each.options["old_logprobs"] is None for step in steps for each in step.updates)
    twice, steps = run(importance_cap=2.0, minibatches=2)
    assert len(look_ups) == len(set(look_ups)) == len(steps) == 4
    for step in steps:
        first, second = (each.options["old_logprobs"] for each in step.updates)
        assert first is second
        kept = step.keep & (step.lengths > 0)
        assert torch.equal((first != 0).any(dim=2), kept), "of what any draw has kept"

    for row in corrected + twice:
        assert 0.049 < row["sampling/sampling_logp_difference/mean"] < 0.1
        assert 1.05 < row[f"{ratio}/mean"] < 1.11
        assert row[f"{ratio}/capped"] == pytest.approx(0.58 if row in corrected else 0, abs=0.2)
    assert corrected[0]["grad_norm"] != plain[0]["grad_norm"]
    assert plain[0]["clip_ratio/region_mean"] == corrected[0]["clip_ratio/region_mean"] == 0


def test_gspo_in_bfloat16_clips_nothing_before_an_update(make_policy):
    """In bfloat16, sampler and trainer round differently by much more than gspo's clip of 3e-4.
    With the default cap, ratios start from the trainer's own log-probs, so that no token is clipped
    before any update. Fails if the default does not count bfloat16 as another sampler.
    """
    model, _ = make_policy()
    given = config.Config(device="cpu", loss="gspo", dtype="bfloat16", max_new_tokens=12)
    cfg = config.resolve(given)
    prompts = [[65 + n] * (1 + n % 5) for n in range(16)]
    sampling = rollout.Sampling(12, [256], 257, engine=compact)
    policy, _ = make_policy()
    cast_weights(policy, "bfloat16")
    rollouts = rollout.sample(policy, prompts, sampling, group_size=8, seed=1)
    advantages = torch.randn(16, 8, generator=torch.Generator().manual_seed(2))
    ones = torch.ones(16, 8)

    def clipped(cfg):
        args = (model, rollouts, advantages, ones, ones.bool())
        old = None if cfg.importance_cap else rollouts.logprobs
        sums = update.accumulate_gradients(*args, cfg=cfg, old_logprobs=old)
        return sums.clipped / sums.completion_tokens

    assert clipped(cfg) == 0
    assert clipped(replace(cfg, importance_cap=0.0)) > 0.1


@pytest.mark.parametrize(
    ("given", "cap"),
    [
        ({}, 0.0), ({"loss": "gspo"}, 0.0), ({"shard": "fsdp"}, 0.0),
        ({"dtype": "bfloat16"}, 2.0), ({"loss": "gspo", "dtype": "bfloat16"}, 2.0),
        ({"engine": "vllm"}, 2.0), ({"engine": "vllm", "importance_cap": 0.0}, 0.0),
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
