"""The log's figures under pruning, worked out again from what a step drew; and flags that only the
optimizer sees."""

import math

import pytest
import torch
from toy import flags, toy_reward

import arithmetic
import config
import metrics
import train
from runtime import InputError


class Recorder(train.Trainer):
    """Keeps the last full batch, its updates' draws, and what the history was taught."""

    def prune_completions(self, *args):
        found = super().prune_completions(*args)
        self.full, self.drawn = args[0], [*getattr(self, "drawn", []), found]
        return found

    def learn(self, step, full):
        update = self.history.update
        self.history.update = lambda *args: setattr(self, "taught", args)
        super().learn(step, full)
        del self.history.update
        update(*self.taught)


@pytest.fixture
def steps(policy_folder, tmp_path, monkeypatch):
    """Run steps and return (trainer, row of the last step, its samples)."""
    monkeypatch.setattr(arithmetic, "TRAIN_PROBLEMS", 16)

    def go(count=8, reward=toy_reward, **changes):
        own = {"prompts_per_step": 8, "prompt_prune_rate": 0.5, "completion_prune_rate": 0.5}
        args = flags(policy_folder, str(tmp_path / "run"), **({"method": "pps"} | own | changes))
        trainer = Recorder(config.parse_config(args), reward)
        for step in range(1, count + 1):
            trainer.drawn = []
            row, samples = trainer.step(step)
            trainer.stop.held = False
        return trainer, row, samples

    return go


def some_fail(completion, gold):
    """1 for some completions of some prompts; elsewhere all are equal."""
    return toy_reward(completion, gold) * (int(gold) % 2)


def test_means_stand_for_all_candidates(steps):
    """With prompt weights that differ. Catches a mean over the groups that happened to be rolled
    out: of dead groups, of rewards, of their deviation, of lengths and of entropies."""
    trainer, row, _ = steps(reward=some_fail)
    full = trainer.full
    batch, weights = full.batch, full.chosen.weights
    assert len(set(weights.tolist())) > 1, "else a plain mean is the same"
    mean = lambda values: ((weights * values).sum() / weights.sum()).item()
    dead = (batch.rewards == batch.rewards[:, :1]).all(dim=1)
    assert 0 < dead.sum() < len(dead)
    assert row["frac_reward_zero_std"] == pytest.approx(mean(dead.double()))
    assert row["frac_reward_zero_std"] != pytest.approx(dead.double().mean().item())
    assert row["reward"] == pytest.approx(mean(batch.rewards.mean(dim=1)))
    assert row["reward_std"] == pytest.approx(mean(batch.rewards.std(dim=1)))
    lengths = mean(batch.lengths.mean(dim=1))
    assert row["completions/mean_length"] == pytest.approx(lengths)
    assert row["completions/clipped_ratio"] == pytest.approx(mean(batch.truncated.mean(dim=1)))
    entropy = mean(batch.entropy.mean(dim=1)) / lengths
    assert row["entropy"] == pytest.approx(entropy)
    ((keep, _),) = trainer.drawn
    kept_only = (batch.entropy * keep).sum() / (batch.lengths * keep).sum()
    assert row["entropy"] != pytest.approx(kept_only.item(), rel=1e-4)


def test_deviation_of_scored_rewards():
    """Of a group's scorable rewards only. Catches a divisor that counts the others."""
    nan = math.nan
    rewards = torch.tensor([[1, 0, nan, nan], [1, 0, 1, 0], [1, nan, nan, nan]])
    found = metrics.nan_std(rewards)
    assert found[:2].tolist() == pytest.approx([math.sqrt(0.5), math.sqrt(1 / 3)])
    assert found[2].isnan()


def test_weights_of_samples(steps):
    """A sample's weight is its prompt's times its own. Catches one that is left out."""
    trainer, _, samples = steps(count=6, reward=some_fail)
    ((keep, weights),) = trainer.drawn
    prompt_weights = trainer.full.chosen.weights
    wanted = [(prompt_weights[k] * weights[k, 0]).item() for k in range(3)]
    assert [row["weight"] for row in samples] == pytest.approx(wanted)
    assert [row["kept"] for row in samples] == keep[:3, 0].tolist()
    both = [weight > 0 and prompt_weights[k] != 1 for k, weight in enumerate(wanted)]
    assert any(both)


def test_shares_without_weights(steps):
    """greso rolls out more than Q prompts, and each stands for Q / K candidates. Catches a share of
    one each."""
    rates = {"prompt_prune_rate": 0, "completion_prune_rate": 0}
    trainer, row, _ = steps(count=3, method="greso", group_size=3, prompts_per_step=4, **rates)
    full, K = trainer.full, len(trainer.full.batch.prompts)
    assert K > 4
    ((keep, _),) = trainer.drawn
    wanted = (keep * full.cost).sum() / (full.cost.sum() * 4 / K)
    assert row["kept/tokens"] == pytest.approx(wanted.item())


def test_pps_learns_sizes_without_its_own_draw(steps):
    """What the history learns of a group is its size in the full gradient. Catches squares with the
    prompt's weight, from which pps would learn its own draw."""
    trainer, _, _ = steps(count=6, reward=some_fail)
    full, batch = trainer.full, trainer.full.batch
    size = full.advantages.abs() * batch.energy.sqrt() / (batch.lengths * 8 * 6)
    live = full.advantages != 0
    size = torch.where(live, size.clamp(min=0.03 * size[live].mean()), 0.0)
    _step, prompts, weights, _rewards, _advantages, square, tokens = trainer.taught
    assert torch.equal(prompts, batch.prompts)
    assert torch.equal(weights, full.chosen.weights)
    assert len(set(weights.tolist())) > 1
    assert square.tolist() == pytest.approx(size.square().sum(dim=1).tolist())
    assert tokens.tolist() == batch.lengths.sum(dim=1).tolist()


def test_flags_of_the_optimizer(steps, monkeypatch):
    """Catches --grad-clip, --weight-decay and --lr that the optimizer never sees."""
    clip, seen = torch.nn.utils.clip_grad_norm_, []
    record = lambda parameters, norm: seen.append(norm) or clip(parameters, norm)
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", record)
    options = {"grad_clip": 0.37, "weight_decay": 0.123, "lr": 0.01, "warmup": 0}
    trainer, _, _ = steps(count=1, **options)
    (group,) = trainer.optimizer.param_groups
    assert (seen, group["weight_decay"], group["lr"]) == ([0.37], 0.123, 0.01)


def test_the_default_rate_is_the_optimizers():
    """Fails if SGD gets AdamW's rate, a thousand times too small for it, if a momentum does not
    divide it, or if a model for which no rate was searched gets one."""
    rate = lambda **given: config.resolve(config.Config(device="cpu", **given)).lr
    assert rate() == 6e-4
    assert rate(model="Qwen/Qwen3-0.6B") == 1e-6
    assert rate(optimizer="sgd") == 0.5
    assert rate(optimizer="sgd", momentum=0.9) == pytest.approx(0.07)
    assert rate(optimizer="sgd", model="Qwen/Qwen3-0.6B", lr=0.1) == 0.1
    with pytest.raises(InputError, match=r"--optimizer sgd with --model Qwen/.* give --lr"):
        rate(optimizer="sgd", model="Qwen/Qwen3-0.6B")
