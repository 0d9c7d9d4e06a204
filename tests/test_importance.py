"""An engine that differs from the policy is measured, and corrected by truncated weights."""

from dataclasses import replace

import pytest
import torch
from toy import Recorder, flags, toy_reward

import config
import train
import update

CFG = config.resolve(config.Config(device="cpu", loss="dr_grpo", max_new_tokens=3))


def test_the_cap_is_above_not_at_it(make_policy, make_rollouts):
    """A sampler that equals the trainer has ratios of exactly 1, so a cap of 1 cuts none of them.
    Catches a ratio of other tokens, and a table of log-probs in the order of the slots."""
    model, _ = make_policy()
    rollouts, ones = make_rollouts(model, 3, 2), torch.ones(3, 2)
    own = update.trainer_logprobs(model, rollouts, CFG)
    torch.testing.assert_close(own, rollouts.logprobs, rtol=0, atol=1e-5)
    rollouts.logprobs = own
    cfg = replace(CFG, importance_cap=1.0)
    args = (model, rollouts, ones, ones, ones > 0)
    sums = update.accumulate_gradients(*args, cfg=cfg, old_logprobs=None)
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
