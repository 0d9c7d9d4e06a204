"""The figures of the log by hand, and that a step gives them its tensors; and flags that only the
optimizer sees."""

import math
import types

import pytest
import torch
from toy import Recorder, flags, toy_reward

import config
import dppo
import metrics
from runtime import log
from tasks import arithmetic
from update import UpdateStats

nan = math.nan


def table(*rows):
    return torch.tensor(rows, dtype=torch.float64)


SUMS = {  # of the first of two updates
    "loss": 1, "kl": 2, "clipped": 3, "gap": 4, "importance": 5, "capped": 6, "entropy": 7,
    "completion_tokens": 8, "tokens": 9, "slots": 10,
}  # fmt: skip
# Two prompts of the four candidates, three completions each; the second group is dead.
BATCH = {
    "prompt_weights": table(2, 1),
    "rewards": table([1, 0, nan], [0, 0, 0]),
    "lengths": table([1, 2, 3], [2, 2, 2]),
    "truncated": table([0, 0, 1], [1, 1, 1]),
    "entropy": table([1, 2, 3], [1, 1, 1]),
    "advantages": table([1, -1, 0], [0, 0, 0]),
    "scale": table([0.5, 0.5, 0.5], [1, 1, 1]),
    "cost": table([2, 3, 4], [5, 5, 5]),
    "keep": table([1, 0, 0], [0, 1, 0]).bool(),
    "weights": table([4, 0, 0], [0, 3, 0]),
    "grad_norms": [1.0, 3.0],
    "stats": [UpdateStats(**SUMS), UpdateStats(**{name: 10 * one for name, one in SUMS.items()})],
}  # fmt: skip
IMPORTANCE = "sampling/importance_sampling_ratio"
BY_HAND = {
    # means over what was rolled out, each prompt with its weight
    "reward": (2 * 0.5 + 0) / 3,  # of scored completions
    "reward_std": 2 * 0.5**0.5 / 3,
    "frac_reward_zero_std": 1 / 3,
    "frac_reward_some_none": 2 / 3,
    "completions/mean_length": (2 * 2 + 2) / 3,
    "completions/clipped_ratio": (2 / 3 + 1) / 3,
    "entropy": (2 * 2 + 1) / (2 * 2 + 2),
    # of all updates, or of the first one only
    "loss": (1 + 10) / 2,
    "kl": (2 + 20) / (2 * 0.5 * 6 + 6),
    "grad_norm": 2,
    "clip_ratio/region_mean": (3 + 30) / (8 + 80),
    "entropy/trained": 7 / 8,
    "sampling/sampling_logp_difference/mean": 4 / 8,
    f"{IMPORTANCE}/mean": 5 / 8,
    f"{IMPORTANCE}/capped": 6 / 8,
    # of the four candidates
    "kept/prompts": 2 / 4,
    "kept/completions": 2 / 12,
    "kept/tokens": (2 + 5) / (2 * 9 + 15),
    "kept/live_tokens": 7 / 24,  # with a KL term all are live
    "cost/sampled": 24,
    "cost/kept": 7,
    "weight/max": 4,
    "weight/prompt_max": 2,
    "pack/density": 99 / 110,
    "tokens/generated": 12,
}


def test_figures_by_hand():
    """Catches a mean without the prompts' weights, an unscorable completion or group that counts,
    and a ratio of other updates."""
    sizes = {"device": "cpu", "prompts_per_step": 4, "group_size": 3}
    row = lambda **cfg: metrics.row(types.SimpleNamespace(**sizes, **cfg), **BATCH)
    assert row(importance_cap=2.0, beta=0.5) == pytest.approx(BY_HAND)
    plain = row(importance_cap=0, beta=0)
    assert BY_HAND.keys() - plain.keys() == {"kl", f"{IMPORTANCE}/mean", f"{IMPORTANCE}/capped"}
    # without a KL term only the first two completions contribute, and the first of them is kept
    assert plain["kept/live_tokens"] == 2 / (2 + 3)


def test_a_group_that_cannot_be_scored_has_no_reward():
    """It counts as a group with equal rewards. Catches one that lowers the mean reward, or that
    makes it NaN."""
    tables = [BATCH[name] for name in ("lengths", "truncated", "entropy")]
    found = metrics.averages(table(2, 1), table([1, 0, 1], [nan] * 3), *tables)
    assert found["reward"] == pytest.approx(2 / 3)
    assert found["reward_std"] == pytest.approx(2 * (1 / 3) ** 0.5 / 3)
    assert (found["frac_reward_zero_std"], found["frac_reward_some_none"]) == (1 / 3, 0)


@pytest.fixture
def steps(policy_folder, tmp_path, monkeypatch):
    """Run steps of pps after blind prompts, and return (trainer, row of the last step, its rows of
    other files). `trainer.steps` has what the steps did."""
    monkeypatch.setattr(arithmetic, "TRAIN_PROBLEMS", 16)

    def go(count, reward=toy_reward, **changes):
        own = {"method": "pps", "prompt_rule": "uniform", "prompts_per_step": 8}
        own |= {"prompt_prune_rate": 0.5, "completion_prune_rate": 0.5}
        args = flags(policy_folder, str(tmp_path / "run"), **(own | changes))
        trainer = Recorder(config.parse_config(args), reward)
        for step in range(1, count + 1):
            row, others = trainer.step(step)
        return trainer, row, others

    return go


def some_none(text, answer):
    """None or 1 for some completions of some prompts; elsewhere all are equal."""
    return None if text[:1] > "P" else toy_reward(text, answer) * (int(answer) % 2)


def test_a_step_and_its_files(steps):
    """samples.jsonl: of three prompts the first completion, whose weight is its prompt's times its
    own. groups.jsonl: of all groups what `bench ceiling` needs, without the weight of the prompt.
    The history: groups that were rolled out, whole, whatever is dropped."""
    trainer, row, others = steps(count=3, reward=some_none, minibatches=2)
    seen, taught = trainer.now, trainer.now.taught
    assert 0 < seen.keep.sum() < seen.keep.numel()
    weights = sum(one.factor * one.keep for one in seen.updates) / seen.scale  # of both levels
    assert row["weight/max"] == pytest.approx(weights.max().item())
    samples = others["samples"]
    assert len(samples) == 3
    for k, sample in enumerate(samples):
        problem = trainer.train_set[taught.prompts[k]]
        score = some_none(sample["completion"], problem.answer)
        wanted = {
            "step": 3, "prompt": problem.text, "answer": problem.answer,
            "reward": pytest.approx(nan if score is None else score, nan_ok=True),
            "advantage": seen.advantages[k, 0], "kept": seen.keep[k, 0],
            "weight": pytest.approx(weights[k, 0].item()),
        }  # fmt: skip
        assert {name: sample[name] for name in wanted} == wanted

    (groups,) = others["groups"]
    assert (groups["step"], groups["prompts"]) == (3, taught.prompts.tolist())
    assert groups["prompt_weights"] == seen.prompt_weights.tolist() == [2.0] * 4
    assert groups["tokens"] == seen.cost.tolist()
    rewards = log.as_json(groups).split('"rewards": ')[1].split(', "tokens"')[0]
    assert rewards == str(seen.rewards.tolist()).replace("nan", "null")
    energy = seen.updates[0].rollouts.energy
    size = dppo.contribution_size(torch.ones(4, 6), seen.scale, energy, 0.0)
    assert torch.allclose(table(*groups["size_of_1"]), size, rtol=1e-4)

    assert torch.equal(taught.prompts, trainer.candidates(3)[seen.kept])
    assert torch.equal(taught.advantages, seen.advantages)


# ---------------------------------------------------------------------------- the flags


def test_flags_of_the_optimizer(steps, monkeypatch):
    """Catches --grad-clip and --lr that the optimizer never sees, and gradients that take memory
    during the next rollouts."""
    clip, seen = torch.nn.utils.clip_grad_norm_, []
    record = lambda parameters, norm: seen.append(norm) or clip(parameters, norm)
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", record)
    trainer, row, _ = steps(count=1, grad_clip=0.37, lr=0.01, warmup=0)
    (group,) = trainer.optimizer.param_groups
    assert (seen, group["lr"]) == ([0.37], 0.01)
    assert row["learning_rate"] == 0.01
    assert group["betas"] == (0.9, 0.95)
    assert all(parameter.grad is None for parameter in trainer.model.parameters())
