"""The prompt level: windows, history, and the draw every rank makes alike."""

import math

import pytest
import torch

import dppo
import sampler


def test_an_epoch_shows_each_prompt_once():
    """Kills: windows that overlap or straddle epochs, one order for all epochs, steps counted from 0."""
    first = torch.cat([sampler.candidates(50, 8, seed=3, step=step) for step in range(1, 7)])
    second = torch.cat([sampler.candidates(50, 8, seed=3, step=step) for step in range(7, 13)])
    assert len(set(first.tolist())) == len(set(second.tolist())) == 48
    assert first.tolist() != second.tolist()
    assert torch.equal(sampler.candidates(50, 8, seed=3, step=9), sampler.candidates(50, 8, seed=3, step=9))
    assert not torch.equal(sampler.candidates(50, 8, seed=3, step=1), sampler.candidates(50, 8, seed=4, step=1))


def test_seeds_depend_on_every_part_of_the_key():
    """Kills: a purpose or a rank that is left out, and seeds that torch refuses."""
    keys = [(0, 1, "keep"), (0, 2, "keep"), (1, 1, "keep"), (0, 1, "rollout", 0), (0, 1, "rollout", 1), (0, 11, "keep")]
    seeds = [sampler.seed_for(*key) for key in keys]
    assert len(set(seeds)) == len(keys)
    assert all(0 <= seed < 2**63 for seed in seeds)
    torch.manual_seed(max(seeds))


def weights_of(history, window, rate=0.25, rule="dppo"):
    """The weights that each candidate can get, over many draws."""
    generator = torch.Generator().manual_seed(0)
    drawn = [history.prune(rule, rate, window, generator) for _ in range(100)]
    assert all(torch.equal(weights > 0, keep) for keep, weights in drawn)
    return [set(column) for column in zip(*(weights.tolist() for _, weights in drawn), strict=True)]


def test_history_rule_by_hand():
    """r_q acts below the mean of the seen candidates of this step. Kills: unseen ones dropped or counted as 0,
    the mean of all prompts instead of the window's, dropping above the mean."""
    history = sampler.PromptHistory(6)
    history.update(torch.tensor([0, 2, 4]), torch.tensor([[1.0, -1.0], [0.2, -0.4], [0.0, 0.0]]))
    assert history.score.nan_to_num(-1).tolist()[::2] == [1.0, 0.30000001192092896, 0.0]
    window = torch.tensor([0, 1, 2, 3])  # seen: 1.0 and 0.3, mean 0.65
    assert weights_of(history, window) == [{1.0}, {1.0}, {0.0, 4 / 3}, {1.0}]
    assert weights_of(history, torch.tensor([1, 3, 5])) == [{1.0}] * 3
    assert weights_of(history, window, rule="none") == [{1.0}] * 4
    assert weights_of(history, window, 0.9) == [{1.0}, {1.0}, {0.0, 1 / (1 - 0.9)}, {1.0}]
    assert weights_of(history, torch.tensor([0, 2, 4]), 0.5, rule="dppo_floor") == [{1.0}, {2.0}, {0.0}], "the lowest"
    history.update(torch.tensor([2]), torch.tensor([[3.0, -3.0]]))
    assert weights_of(history, window) == [{0.0, 4 / 3}, {1.0}, {1.0}, {1.0}], "the last visit counts"
    with pytest.raises(ValueError, match="unknown prompt rule 'greso'"):
        history.prune("greso", 0.5, window, torch.Generator())


def test_average_over_many_steps_is_the_unpruned_mean():
    """A pass rate that drifts, history that decides who is rolled out: the weighted mean of each step is unbiased.

    5,000 steps of 20 candidates; the bound is 3 standard errors of the paired difference. Kills: weights left
    out (the sum is then off by 20 standard errors), a keep probability that peeks at this step's outcome."""
    history, generator = sampler.PromptHistory(200), torch.Generator().manual_seed(0)
    differences, unweighted = [], []
    for step in range(1, 5001):
        pass_rate = (torch.arange(200) / 200 + step / 3000) % 1.0
        window = sampler.candidates(200, 20, seed=0, step=step)
        keep, weights = history.prune("dppo", 0.6, window, sampler.generator_for(0, step, "keep"))
        rewards = (torch.rand(20, 4, generator=generator) < pass_rate[window, None]).double()
        advantages = dppo.group_advantages(rewards, "dr_grpo")
        history.update(window[keep], advantages[keep])
        signal = advantages.square().sum(dim=1)
        differences.append(((weights * signal).sum() - signal.sum()).item())
        unweighted.append(((keep * signal).sum() - signal.sum()).item())
    differences, unweighted = torch.tensor(differences), torch.tensor(unweighted)
    error = differences.std() / math.sqrt(len(differences))
    assert differences.mean().abs() < 3 * error
    assert unweighted.mean().abs() > 20 * error
