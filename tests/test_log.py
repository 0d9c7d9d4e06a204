"""The log's figures under pruning, worked out again from what a step drew; and flags that only the
optimizer sees."""

import math
from dataclasses import replace

import pytest
import torch
from toy import flags, toy_reward

import config
import metrics
import train
from tasks import arithmetic
from update import UpdateStats


class Recorder(train.Trainer):
    """Keeps the last full batch, its updates' draws, and what the history was taught."""

    def prune_completions(self, *args):
        found = super().prune_completions(*args)
        self.full, self.drawn = args[0], [*getattr(self, "drawn", []), found]
        return found

    def update_history(self, step, full):
        update = self.history.update
        self.history.update = lambda *args: setattr(self, "taught", args)
        super().update_history(step, full)
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
        return trainer, row, samples

    return go


def some_fail(completion, answer):
    """1 for some completions of some prompts; elsewhere all are equal."""
    return toy_reward(completion, answer) * (int(answer) % 2)


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


def test_samples_of_a_rank(steps):
    """A sample's weight is its prompt's times its own, of the one update that may have kept it.
    Catches one that is left out, and rows of another rank's prompts."""
    trainer, _, samples = steps(count=1, reward=some_fail, minibatches=2)
    full, problems = trainer.full, trainer.train_set
    updates = [train.Update(*found, None, 0.0) for found in trainer.drawn]
    assert metrics.samples(1, trainer.cfg, full, updates, problems) == samples
    K, G = full.advantages.shape
    weights = torch.arange(2.0 * K * G).view(2, K, G) % 5
    weights[0, 1::2] = weights[1, ::2] = 0.0  # a prompt is in one mini-batch
    updates = [train.Update(weight > 0, weight, None, 0.0) for weight in weights]
    prompt_weights = torch.arange(2.0, K + 2)
    batch = replace(full.batch, rewards=torch.arange(1.0 * K * G).view(K, G))
    chosen = full.chosen._replace(weights=prompt_weights)
    for mine, g in ((torch.tensor([0, 2]), 0), (torch.tensor([1, 3]), 1)):  # as of two ranks
        lengths = batch.rollouts.lengths[mine]
        lengths[:, :g] = 0  # the second has none of the first completions
        texts = [batch.texts[k] for k in mine]
        rollouts = replace(batch.rollouts, lengths=lengths)
        of_rank = replace(batch, mine=mine, texts=texts, rollouts=rollouts)
        of_rank = replace(full, batch=of_rank, chosen=chosen, advantages=-batch.rewards)
        rows = metrics.samples(1, trainer.cfg, of_rank, updates, problems)
        for k, row in zip(mine, rows, strict=True):
            assert row["weight"] == prompt_weights[k] * weights[:, k, g].sum()
            assert row["kept"] == (row["weight"] > 0)
            assert row["completion"] == batch.texts[k][g]
            assert row["prompt"] == problems[batch.prompts[k]].text
            assert row["reward"] == -row["advantage"] == batch.rewards[k, g]
    nothing = [train.Update(weight < 0, 0 * weight, None, 0.0) for weight in weights]
    assert not metrics.samples(1, trainer.cfg, full, nothing, problems)[0]["kept"]


def test_unscorable_completions_are_left_out(steps):
    """Fails if they lower the mean reward, or if a group without a score counts in it."""

    def some(text, answer):
        return None if int(answer) % 3 == 0 or text[:1] < "@" else float(text[:1] < "P")

    trainer, row, _ = steps(count=1, reward=some, prompts_per_step=16, prompt_prune_rate=0)
    rewards = trainer.full.batch.rewards
    none, all_none = rewards.isnan().any(dim=1), rewards.isnan().all(dim=1)
    assert 0 < all_none.sum() < none.sum()
    assert row["reward"] == pytest.approx(rewards[~all_none].nanmean(dim=1).mean().item())
    assert row["frac_reward_some_none"] == (none & ~all_none).double().mean()


def test_effective_sample_size_is_of_live_completions(steps):
    """Fails if it counts completions that are kept although their term is 0."""
    rates = {"prompt_prune_rate": 0, "completion_prune_rate": 0}
    trainer, row, _ = steps(count=1, method="grpo", reward=some_fail, **rates)
    live = (trainer.full.advantages != 0).sum().item()
    assert 0 < live < trainer.full.advantages.numel()
    assert row["weight/ess"] == pytest.approx(live)


def test_figures_of_the_first_update(steps):
    """What compares sampler and trainer is of the first update only, and clipping is of all. Fails
    if one is the other."""
    trainer, _, _ = steps(count=1, importance_cap=2.0)
    one, other = (UpdateStats(*[value] * len(UpdateStats._fields)) for value in (2.0, 5.0))
    sums = (one, other._replace(completion_tokens=1.0))
    updates = [train.Update(*trainer.drawn[0], found, 1.0) for found in sums]
    row = metrics.row(trainer.cfg, trainer.full, updates, 0.1)
    ratio, gap = "sampling/importance_sampling_ratio", "sampling/sampling_logp_difference/mean"
    assert [row[name] for name in (f"{ratio}/mean", f"{ratio}/capped", gap)] == [1.0] * 3
    assert row["clip_ratio/region_mean"] == pytest.approx(7 / 3)


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_pps_learns_sizes_without_its_own_draw(steps, beta):
    """What the history learns of a group is its size in the full gradient. Catches squares with the
    prompt's weight, from which pps would learn its own draw, and without the KL term."""
    trainer, _, _ = steps(count=6, reward=some_fail, beta=beta)
    full, batch = trainer.full, trainer.full.batch
    size = (full.advantages.abs() + beta) * batch.energy.sqrt() / (batch.lengths * 8 * 6)
    live = (full.advantages != 0) | (beta > 0)
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
    options["adam_beta2"] = 0.91
    trainer, _, _ = steps(count=1, **options)
    (group,) = trainer.optimizer.param_groups
    assert (seen, group["weight_decay"], group["lr"]) == ([0.37], 0.123, 0.01)
    assert group["betas"] == (0.9, 0.91)


def test_the_default_rate():
    """Fails if another model gets the rate that was searched for tiny, a thousand times too
    large."""
    rate = lambda **given: config.resolve(config.Config(device="cpu", **given)).lr
    assert (rate(), rate(method="dppo"), rate(method="grpo")) == (4.3e-4, 6e-4, 1.2e-3)
    assert rate(model="Qwen/Qwen3-0.6B") == 1e-6
