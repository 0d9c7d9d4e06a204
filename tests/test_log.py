"""The log's figures under pruning, worked out again from what a step drew; and flags that only the
optimizer sees."""

import inspect
import math

import pytest
import torch
from toy import Recorder, flags, toy_reward

import config
import metrics
from tasks import arithmetic
from update import UpdateStats


@pytest.fixture
def steps(policy_folder, tmp_path, monkeypatch):
    """Run steps and return (trainer, row of the last step, its samples). `trainer.steps` has what
    the steps did."""
    monkeypatch.setattr(arithmetic, "TRAIN_PROBLEMS", 16)

    def go(count=8, reward=toy_reward, **changes):
        own = {"prompts_per_step": 8, "prompt_prune_rate": 0.5, "completion_prune_rate": 0.5}
        args = flags(policy_folder, str(tmp_path / "run"), **({"method": "pps"} | own | changes))
        trainer = Recorder(config.parse_config(args), reward)
        for step in range(1, count + 1):
            row, samples = trainer.step(step)
        return trainer, row, samples

    return go


def some_fail(completion, answer):
    """1 for some completions of some prompts; elsewhere all are equal."""
    return toy_reward(completion, answer) * (int(answer) % 2)


def test_means_stand_for_all_candidates(steps):
    """With prompt weights that differ. Catches a mean over the groups that happened to be rolled
    out: of dead groups, of rewards, of their deviation, of lengths and of entropies."""
    trainer, row, _ = steps(reward=some_fail, prompt_rule="dppo")
    seen = trainer.steps[-1]
    rewards, weights = seen.rewards, seen.prompt_weights
    assert len(set(weights.tolist())) > 1, "else a plain mean is the same"
    mean = lambda values: ((weights * values).sum() / weights.sum()).item()
    dead = (rewards == rewards[:, :1]).all(dim=1)
    assert 0 < dead.sum() < len(dead)
    assert row["frac_reward_zero_std"] == pytest.approx(mean(dead.double()))
    assert row["frac_reward_zero_std"] != pytest.approx(dead.double().mean().item())
    assert row["reward"] == pytest.approx(mean(rewards.mean(dim=1)))
    assert row["reward_std"] == pytest.approx(mean(rewards.std(dim=1)))
    lengths = mean(seen.lengths.mean(dim=1))
    assert row["completions/mean_length"] == pytest.approx(lengths)
    assert row["completions/clipped_ratio"] == pytest.approx(mean(seen.truncated.mean(dim=1)))
    entropy = mean(seen.entropy.mean(dim=1)) / lengths
    assert row["entropy"] == pytest.approx(entropy)
    kept_only = (seen.entropy * seen.keep).sum() / (seen.lengths * seen.keep).sum()
    assert row["entropy"] != pytest.approx(kept_only.item(), rel=1e-4)


def test_deviation_of_scored_rewards():
    """Of a group's scorable rewards only. Catches a divisor that counts the others."""
    nan = math.nan
    rewards = torch.tensor([[1, 0, nan, nan], [1, 0, 1, 0], [1, nan, nan, nan]])
    found = metrics.nan_std(rewards)
    assert found[:2].tolist() == pytest.approx([math.sqrt(0.5), math.sqrt(1 / 3)])
    assert found[2].isnan()


def test_samples(steps):
    """Of three prompts the first completion: a sample's weight is its prompt's times its own, of
    the one update that may have kept it. Catches a weight that is left out, and another's row."""
    trainer, _, samples = steps(count=3, reward=some_fail, minibatches=2)
    seen = trainer.steps[-1]
    weights = sum(one.factor * one.keep for one in seen.updates) / seen.scale
    assert len(samples) == 3
    for k, sample in enumerate(samples):
        problem = trainer.train_set[seen.taught.prompts[k]]
        assert (sample["step"], sample["prompt"]) == (3, problem.text)
        assert sample["answer"] == problem.answer
        assert sample["reward"] == some_fail(sample["completion"], problem.answer)
        assert sample["reward"] == seen.rewards[k, 0]
        assert sample["advantage"] == seen.advantages[k, 0]
        assert sample["weight"] == pytest.approx(weights[k, 0].item())
        assert sample["kept"] == (sample["weight"] > 0)
    table = torch.arange(8.0).view(4, 2)
    found = metrics.samples(
        1, trainer.train_set[:4], ["ab", "cd", "ef", "gh"], table, -table, table > 3, table / 2
    )
    assert [sample["completion"] for sample in found] == ["a", "c", "e"]
    assert [sample["reward"] for sample in found] == [0, 2, 4]
    assert [sample["advantage"] for sample in found] == [0, -2, -4]
    assert [sample["kept"] for sample in found] == [False, False, True]
    assert [sample["weight"] for sample in found] == [0, 1, 2]


def test_unscorable_completions_are_left_out(steps):
    """Fails if they lower the mean reward, or if a group without a score counts in it."""

    def some(text, answer):
        return None if int(answer) % 3 == 0 or text[:1] < "@" else float(text[:1] < "P")

    trainer, row, _ = steps(count=1, reward=some, prompts_per_step=16, prompt_prune_rate=0)
    rewards = trainer.steps[-1].rewards
    none, all_none = rewards.isnan().any(dim=1), rewards.isnan().all(dim=1)
    assert 0 < all_none.sum() < none.sum()
    assert row["reward"] == pytest.approx(rewards[~all_none].nanmean(dim=1).mean().item())
    assert row["frac_reward_some_none"] == (none & ~all_none).double().mean()


def test_effective_sample_size_is_of_live_completions(steps):
    """Fails if it counts completions that are kept although their term is 0."""
    rates = {"prompt_prune_rate": 0, "completion_prune_rate": 0}
    trainer, row, _ = steps(count=1, method="grpo", reward=some_fail, **rates)
    advantages = trainer.steps[-1].advantages
    live = (advantages != 0).sum().item()
    assert 0 < live < advantages.numel()
    assert row["weight/ess"] == pytest.approx(live)


def test_figures_of_the_first_update(steps):
    """What compares sampler and trainer is of the first update only, and clipping is of all. Fails
    if one is the other."""
    trainer, _, _ = steps(count=1, importance_cap=2.0)
    one, other = (UpdateStats(*[value] * len(UpdateStats._fields)) for value in (2.0, 5.0))
    names = inspect.signature(metrics.row).parameters.keys() - {"cfg", "stats", "grad_norms"}
    tensors = {name: getattr(trainer.steps[-1], name) for name in names}
    stats = [one, other._replace(completion_tokens=1.0)]
    row = metrics.row(trainer.cfg, **tensors, stats=stats, grad_norms=[1.0, 3.0])
    ratio, gap = "sampling/importance_sampling_ratio", "sampling/sampling_logp_difference/mean"
    assert [row[name] for name in (f"{ratio}/mean", f"{ratio}/capped", gap)] == [1.0] * 3
    assert row["clip_ratio/region_mean"] == pytest.approx(7 / 3)
    assert (row["loss"], row["grad_norm"]) == (3.5, 2.0)


def test_the_history_learns_from_full_groups(steps):
    """From the groups that were rolled out, whole, whatever is dropped or masked. Catches a
    history of what was kept."""
    trainer, _, _ = steps(count=6, reward=some_fail, mask_truncated=True)
    seen, taught = trainer.steps[-1], trainer.steps[-1].taught
    assert 0 < seen.keep.sum() < seen.keep.numel()
    assert torch.equal(taught.prompts, trainer.candidates(6)[seen.kept])
    assert torch.equal(taught.advantages, seen.advantages)
    assert torch.equal(taught.lengths, seen.lengths)


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


def test_every_step_has_its_learning_rate(steps):
    """Warm-up, then the schedule, in the optimizer and in the log. Catches a schedule that the
    optimizer never sees."""
    options = {"steps": 4, "warmup": 2, "lr": 0.01, "lr_schedule": "linear"}
    for count, expected in ((1, 0.005), (2, 0.01), (3, 0.02 / 3), (4, 0.01 / 3)):
        trainer, row, _ = steps(count=count, **options)
        assert trainer.optimizer.param_groups[0]["lr"] == pytest.approx(expected)
        assert row["learning_rate"] == pytest.approx(expected)


def test_the_default_rate():
    """Fails if another model gets the rate that was searched for tiny, a thousand times too large,
    or its clip."""
    resolved = lambda **given: config.resolve(config.Config(device="cpu", **given))
    rate = lambda method: resolved(method=method).lr
    found = [rate(method) for method in ("adaptive", "pps", "dppo", "grpo")]
    assert found == [7e-4, 4.3e-4, 6e-4, 1.2e-3]
    assert (resolved().grad_clip, resolved(method="pps").grad_clip) == (0.01, 1.0)
    other = resolved(model="Qwen/Qwen3-0.6B")
    assert (other.lr, other.grad_clip, other.completion_rule) == (1e-6, 1.0, "adaptive")
