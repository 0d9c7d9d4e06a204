"""The prompt level: windows, history, and the draw that every rank makes alike."""

import pytest
import torch

import dppo
import sampler
from related import rivals  # noqa: F401 (adds dppo_floor)


def test_an_epoch_shows_each_prompt_once():
    """Catches windows that overlap or straddle epochs, one order for all epochs, and steps that are
    counted from 0."""
    first = torch.cat([sampler.candidates(50, 8, seed=3, step=step) for step in range(1, 7)])
    second = torch.cat([sampler.candidates(50, 8, seed=3, step=step) for step in range(7, 13)])
    assert len(set(first.tolist())) == len(set(second.tolist())) == 48
    assert first.tolist() != second.tolist()


def see(history, prompts, rewards):
    """history.update after rolling these prompts out; the advantages are the centred rewards."""
    rewards = torch.tensor(rewards, dtype=torch.float64)
    advantages = dppo.group_advantages(rewards, "none")
    history.update(torch.tensor(prompts), advantages)


def weights_of(history, window, rate=0.25, rule="dppo"):
    """The weights that each candidate can get, over many draws."""
    generator = dppo.generator_for(0)
    drawn = [sampler.prune_prompts(rule, rate, history, window, generator) for _ in range(100)]
    assert all(torch.equal(weights > 0, keep) for keep, weights in drawn)
    return [set(column) for column in zip(*(weights.tolist() for _, weights in drawn), strict=True)]


def test_the_history_remembers_the_last_group():
    """Catches an earlier group that stays, and a sum in place of a mean."""
    history = sampler.PromptHistory(4)
    see(history, [0, 2], [[1, 0, 0, 0], [1, 1, 1, 1]])
    see(history, [2], [[2, 0, 2, 0]])
    assert history.past_advantage.nan_to_num(-1).tolist() == [0.375, -1, 1.0, -1]
    advantages = torch.tensor([[0.5, -0.5]])
    history.update(torch.tensor([0]), advantages)
    assert history.past_advantage[0] == 0.5


# ---------------------------------------------------------------------------- the rules


def test_threshold_rule_by_hand():
    """r_q acts below the mean score of this step's candidates. Catches unseen prompts that are
    dropped or count as 0, and the mean of all prompts in place of the window's."""
    history = sampler.PromptHistory(6)
    see(history, [0, 2, 4], [[2.0, 0, 2, 0], [0.6, 0, 0, 0.6], [0, 0, 0, 0]])
    window = torch.tensor([0, 1, 2, 3])  # seen: 1.0 and 0.3, mean 0.65
    assert weights_of(history, window) == [{1.0}, {1.0}, {0.0, 4 / 3}, {1.0}]
    assert weights_of(history, window, 0.9) == [{1.0}, {1.0}, {0.0, 1 / (1 - 0.9)}, {1.0}]
    assert weights_of(history, window, rule="none") == [{1.0}] * 4
    assert weights_of(history, torch.tensor([1, 3, 5])) == [{1.0}] * 3
    lowest = weights_of(history, torch.tensor([0, 2, 4]), 0.5, rule="dppo_floor")
    assert lowest == [{1.0}, {2.0}, {0.0}], "the lowest is dropped"

    see(history, [2], [[6.0, 0, 6, 0]])
    assert weights_of(history, window) == [{0.0, 4 / 3}, {1.0}, {1.0}, {1.0}], "the last visit"


@pytest.mark.parametrize(("rate", "minibatches", "wanted"), [(0.35, 1, 6), (0.44, 2, 3), (0, 2, 5)])
def test_a_blind_draw_keeps_exactly_the_planned_number(rate, minibatches, wanted):
    """round((1 - r_q) n) of each mini-batch in every draw, each prompt as often as another. Catches
    floor in place of round, draws that favour a place, and one draw for all mini-batches."""
    history, generator = sampler.PromptHistory(10), dppo.generator_for(1)
    window = torch.arange(10)
    drawn = [
        sampler.prune_prompts("uniform", rate, history, window, generator, minibatches)
        for _ in range(400)
    ]
    keep = torch.stack([keep for keep, _ in drawn])
    share = wanted / (10 // minibatches)
    for part in keep.chunk(minibatches, dim=1):
        assert (part.sum(dim=1) == wanted).all()
    assert torch.equal(torch.stack([weights for _, weights in drawn]), keep.double() / share)
    error = (share * (1 - share) / len(keep)) ** 0.5
    assert ((keep.double().mean(dim=0) - share).abs() <= 4.5 * error).all()
