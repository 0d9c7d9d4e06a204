"""The log's figures under pruning, worked out again from what a step drew; and flags that only the
optimizer sees."""

import inspect
import math
from dataclasses import replace
from unittest import mock

import pytest
import torch
from toy import Recorder, flags, toy_reward

import config
import dppo
import metrics
import proof
import sampler
import train
from bench import check
from rollout import Rollouts
from runtime import log
from tasks import arithmetic
from update import UpdateStats, trainer_logprobs


@pytest.fixture
def steps(policy_folder, tmp_path, monkeypatch):
    """Run steps of pps after blind prompts, and return (trainer, row of the last step, its rows of
    other files). `trainer.steps` has what the steps did."""
    monkeypatch.setattr(arithmetic, "TRAIN_PROBLEMS", 16)

    def go(count=8, reward=toy_reward, **changes):
        own = {"method": "pps", "prompt_rule": "uniform", "prompts_per_step": 8}
        own |= {"prompt_prune_rate": 0.5, "completion_prune_rate": 0.5}
        args = flags(policy_folder, str(tmp_path / "run"), **(own | changes))
        trainer = Recorder(config.parse_config(args), reward)
        for step in range(1, count + 1):
            row, others = trainer.step(step)
        return trainer, row, others

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
    trainer, _, others = steps(count=3, reward=some_fail, minibatches=2)
    seen, samples = trainer.steps[-1], others["samples"]
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


def test_groups(steps):
    """A step's row of groups.jsonl: what was rolled out, whole. Catches a weight of the prompt in a
    size or in a completion's weight, where it would count twice, a size of a masked completion, and
    a NaN that is no JSON."""
    some_none = lambda text, _answer: None if text[:1] > "P" else float(text[:1] < "@")
    trainer, _, others = steps(count=3, reward=some_none, minibatches=2)
    seen, (row,) = trainer.steps[-1], others["groups"]
    assert 0 < seen.keep.sum() < seen.keep.numel()
    assert (row["step"], row["prompts"]) == (3, seen.taught.prompts.tolist())
    assert row["prompt_weights"] == seen.prompt_weights.tolist() == [2.0] * 4
    assert row["tokens"] == seen.cost.tolist()
    stored = lambda table: [[None if math.isnan(x) else x for x in group] for group in table]
    assert '"rewards": ' + str(stored(seen.rewards.tolist())).replace("None", "null") in (
        log.as_json(row)
    )
    assert torch.allclose(torch.tensor(row["weights"]).double(), seen.weights / 2, rtol=1e-4)
    energy = seen.updates[0].rollouts.energy
    size = dppo.contribution_size(torch.ones(4, 6), seen.scale, energy, 0.0)
    assert torch.allclose(torch.tensor(row["size_of_1"]).double(), size, rtol=1e-4)
    masked = torch.tensor([[0.0, 0.5]])
    tables = {"rewards": masked, "cost": masked, "energy": 4 + masked, "weights": masked}
    ids = torch.tensor([7])
    row = metrics.groups(1, ids, prompt_weights=ids, scale=masked, **tables)
    assert row["size_of_1"] == [[0.0, pytest.approx(0.5 * 4.5**0.5, rel=1e-4)]]


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


# ---------------------------------------------------------------------------- the full batch's

# Four groups of three. Prompts 2 and 3 are those that a draw by score may drop.
LENGTHS = torch.tensor([[1, 3, 5], [2, 4, 6], [3, 5, 7], [4, 6, 8]])
REWARDS = torch.tensor([[1, 0, 1], [0, 0, 0], [1, math.nan, 0], [1, 0, 0]]).double()
TRUNCATED = torch.tensor([[0, 0, 0], [0, 0, 0], [0, 0, 1], [0, 1, 1]]).bool()
ENTROPY = LENGTHS * torch.tensor([[1.6], [1.2], [0.9], [0.7]])  # the longer, the less a token
CAP, BETA = 1.2, 0.3


@pytest.fixture
def full_batch(policy_folder, tmp_path, monkeypatch):
    """(a trainer that samples the four groups, the figures of all of them, each worked out from its
    definition). The sampler is off, so that the cap acts, and the reference is another model."""
    monkeypatch.setattr(arithmetic, "TRAIN_PROBLEMS", 4)
    options = {"method": "pps", "loss": "grpo", "beta": BETA, "importance_cap": CAP}
    options |= {"group_size": 3, "max_new_tokens": 8}
    args = flags(policy_folder, str(tmp_path / "run"), **options)
    trainer = train.Trainer(config.parse_config(args), toy_reward)
    with torch.no_grad():
        trainer.model.model.norm.weight.mul_(1.3)
    draw, window = torch.Generator().manual_seed(0), trainer.candidates(1)
    prompt_ids = [trainer.train_ids[q] for q in window.tolist()]
    ids = torch.randint(0, 256, (4, 3, 8), generator=draw)
    nothing, energy = torch.zeros(4, 3, 8), LENGTHS * torch.rand(4, 3, generator=draw)
    rollouts = Rollouts(prompt_ids, ids, nothing, ENTROPY, energy, LENGTHS, TRUNCATED)
    now, ref = (
        trainer_logprobs(one, rollouts, trainer.cfg) for one in (trainer.model, trainer.reference)
    )
    rollouts.logprobs = now + 0.3 * torch.randn(now.shape, generator=draw) * (now != 0)
    trainer.sampling = replace(trainer.sampling, engine=check.Stored(rollouts, window))
    # a group's first length says which one it is
    score = lambda part, *_: ([["text"]] * len(part.lengths), REWARDS[part.lengths[:, 0] - 1])
    monkeypatch.setattr(train, "score", score)

    importance = (now - rollouts.logprobs).exp()
    assert 0.2 < (importance > CAP).sum() / LENGTHS.sum() < 0.5
    factor = importance.clamp(max=CAP) / LENGTHS[..., None] / 12
    kl = (ref - now).expm1() - (ref - now)
    advantages = dppo.group_advantages(REWARDS, "group")[..., None]
    return trainer, {
        "reward": (2 / 3 + 0 + 1 / 2 + 1 / 3) / 4,
        "reward_std": (2 * (1 / 3) ** 0.5 + 0.5**0.5) / 4,
        "frac_reward_zero_std": 1 / 4,
        "frac_reward_some_none": 1 / 4,
        "completions/mean_length": 4.5,
        "completions/clipped_ratio": 3 / 12,
        "entropy": (ENTROPY.sum() / LENGTHS.sum()).item(),
        "loss": (factor * (BETA * kl - advantages) * (now != 0)).sum().item(),
        "kl": (factor * kl).sum().item(),
    }


def figures_of(trainer, prompts, completions=None):
    """(the row of step 1, what its completions are drawn from), with these draws: (kept, weights)
    [Q] and (keep, weights) [K, G], by default all. Nothing is updated."""
    seen = []

    def drawn(_name, _rate, batch, _generator):
        seen.append(batch)
        return completions or (batch.size >= 0, torch.ones_like(batch.size))

    with (
        mock.patch.object(trainer.history, "prune", return_value=prompts),
        mock.patch.object(trainer.history, "update"),
        mock.patch.object(dppo, "prune_completions", drawn),
        mock.patch.object(trainer.optimizer, "step"),
    ):
        row, _ = trainer.step(1)
    return row, seen[0]


@pytest.mark.parametrize("prompt_rule", ["none", "uniform", "dppo"])
def test_figures_are_estimates_of_the_full_batch(full_batch, prompt_rule):
    """Averaged over every draw of prompts (two of four; or by score, with unequal weights), and
    then of completions by pps: exactly, where a figure is linear in the weights.

    Catches a figure without its weights, a KL term without the importance ratio, a denominator that
    the draw decides, and an entropy that is a mean of ratios.
    """
    trainer, full = full_batch
    window = trainer.candidates(1)
    scores = torch.tensor([[1, -1, 0], [1, -1, 0], [0.1, -0.1, 0], [0.1, -0.1, 0]])
    trainer.history.update(window, scores, LENGTHS)
    expected, chances, drawn = dict.fromkeys(full, 0.0), 0.0, set()
    rule = sampler.PROMPT_RULES[prompt_rule]
    for kept, prompt_weights, chance in proof.outcomes(rule, 0.5, trainer.history.of(window)):
        drawn |= set(prompt_weights.tolist())
        _, batch = figures_of(trainer, (kept, prompt_weights))
        for keep, weights, own_chance in proof.outcomes(dppo.COMPLETION_RULES["pps"], 0.6, batch):
            row, _ = figures_of(trainer, (kept, prompt_weights), (keep, weights))
            chances += chance * own_chance
            for name in full:
                expected[name] += chance * own_chance * row[name]
    assert chances == pytest.approx(1.0)
    assert drawn == {"none": {1}, "uniform": {0, 2}, "dppo": {0, 1, 2}}[prompt_rule]
    for name, value in full.items():
        near = 0.04 if name == "entropy" else 2e-5  # a ratio of two estimates; and float32
        assert expected[name] == pytest.approx(value, rel=near), name


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
    """Catches --grad-clip and --lr that the optimizer never sees."""
    clip, seen = torch.nn.utils.clip_grad_norm_, []
    record = lambda parameters, norm: seen.append(norm) or clip(parameters, norm)
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", record)
    options = {"grad_clip": 0.37, "lr": 0.01, "warmup": 0}
    options["adam_beta2"] = 0.91
    trainer, _, _ = steps(count=1, **options)
    (group,) = trainer.optimizer.param_groups
    assert (seen, group["lr"]) == ([0.37], 0.01)
    assert group["betas"] == (0.9, 0.91)


def test_every_step_has_its_learning_rate(steps):
    """Warm-up, then the schedule, in the optimizer and in the log. Catches a schedule that the
    optimizer never sees."""
    options = {"steps": 4, "warmup": 2, "lr": 0.01, "lr_schedule": "linear"}
    for count, expected in ((1, 0.005), (2, 0.01), (3, 0.02 / 3), (4, 0.01 / 3)):
        trainer, row, _ = steps(count=count, **options)
        assert trainer.optimizer.param_groups[0]["lr"] == pytest.approx(expected)
        assert row["learning_rate"] == pytest.approx(expected)


OF_TINY = """
adaptive  | 32  8 none   6e-4   0    0.1
pps       | 32  8 none   4.3e-4 0.9  0.4
dppo      | 32 16 none   6e-4   0.7  0.4
grpo      | 32  8 none   6e-4   0    0.4
grpo_zero | 16  4 none   6e-4   0    0.4
"""


def test_defaults_of_the_methods():
    """Fails if another model gets the rate that was searched for tiny, a thousand times too large,
    or its sizes."""
    names = ("prompts_per_step", "group_size", "scale_rewards", "lr", "completion_prune_rate")
    for line in OF_TINY.strip().splitlines():
        method, *values = line.replace("|", "").split()
        tiny = config.resolve(config.Config(device="cpu", method=method))
        for name, value in zip((*names, "rest"), values, strict=True):
            assert str(getattr(tiny, name)) == str(type(getattr(tiny, name))(value)), (method, name)
        given = config.Config(device="cpu", method=method, model="Qwen/Qwen3-0.6B")
        other = config.resolve(given)
        assert (other.lr, other.rest, other.scale_rewards) == (1e-6, 0.4, "group")
        assert (other.prompts_per_step, other.group_size) == (32, 16)
        assert tiny.grad_clip == other.grad_clip == 1.0
    switched = config.resolve(config.Config(device="cpu", method="pps", completion_rule="zero"))
    assert switched.completion_prune_rate == 0, "a rule without a rate"
