"""The prompt level: windows, history, and the draw that every rank makes alike."""

import math

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
    window = sampler.candidates(50, 8, seed=3, step=9)
    assert torch.equal(sampler.candidates(50, 8, seed=3, step=9), window)
    assert not torch.equal(sampler.candidates(50, 8, seed=4, step=9), window)


def test_one_candidate_a_step():
    """Q = 1, and an epoch of one step. Catches a position or a share that needs two prompts."""
    windows = [sampler.candidates(3, 1, seed=0, step=step) for step in range(1, 7)]
    assert sorted(torch.cat(windows[:3]).tolist()) == [0, 1, 2]
    assert sorted(torch.cat(windows[3:]).tolist()) == [0, 1, 2]
    assert sampler.candidates(1, 1, seed=0, step=9).tolist() == [0]
    history = sampler.PromptHistory(1)
    for visit in (1, 2):
        for rule in ("none", "uniform", "dppo"):
            generator = dppo.generator_for(visit)
            keep, weights = history.prune(rule, 0.3, torch.tensor([0]), generator)
            assert (keep.tolist(), weights.tolist()) == ([True], [1.0]), rule
        see(history, [0], [[1, 0]])


def test_seeds_depend_on_every_part_of_the_key():
    """Catches a purpose or a rank that is left out, and seeds that torch refuses."""
    keys = [(0, 1, "keep"), (0, 2, "keep"), (1, 1, "keep"), (0, 11, "keep")]
    keys += [(0, 1, "rollout", 0), (0, 1, "rollout", 1)]
    seeds = [dppo.seed_for(*key) for key in keys]
    assert len(set(seeds)) == len(keys)
    assert all(0 <= seed < 2**63 for seed in seeds)
    torch.manual_seed(max(seeds))


def see(history, prompts, rewards, tokens=5):
    """history.update after rolling these prompts out; the advantages are the centred rewards."""
    rewards = torch.tensor(rewards, dtype=torch.float64)
    advantages = dppo.group_advantages(rewards, "none")
    history.update(torch.tensor(prompts), advantages, torch.full(rewards.shape, tokens))


def weights_of(history, window, rate=0.25, rule="dppo"):
    """The weights that each candidate can get, over many draws."""
    generator = dppo.generator_for(0)
    drawn = [history.prune(rule, rate, window, generator) for _ in range(100)]
    assert all(torch.equal(weights > 0, keep) for keep, weights in drawn)
    return [set(column) for column in zip(*(weights.tolist() for _, weights in drawn), strict=True)]


def test_the_history_remembers_the_last_group():
    """Catches an earlier group that stays, a sum in place of a mean, and prompts that are expected
    to be empty."""
    history = sampler.PromptHistory(4)
    assert history.expected_tokens(torch.arange(4)).tolist() == [1.0] * 4, "nothing is known"
    see(history, [0, 2], [[1, 0, 0, 0], [1, 1, 1, 1]], tokens=8)
    see(history, [2], [[2, 0, 2, 0]], tokens=4)
    assert history.past_advantage.nan_to_num(-1).tolist() == [0.375, -1, 1.0, -1]
    advantages = torch.tensor([[0.5, -0.5]])
    history.update(torch.tensor([0]), advantages, torch.tensor([[1, 3]]))
    assert history.past_advantage[0] == 0.5
    assert history.expected_tokens(torch.tensor([2, 1, 0])).tolist() == [4, 3, 2], "1: an average"


# ---------------------------------------------------------------------------- the rules


def test_threshold_rule_by_hand():
    """r_q acts below the mean score of this step's candidates.

    Catches unseen prompts that are dropped or count as 0, the mean of all prompts in place of the
    window's, and dropping above the mean.
    """
    history = sampler.PromptHistory(6)
    see(history, [0, 2, 4], [[2.0, 0, 2, 0], [0.6, 0, 0, 0.6], [0, 0, 0, 0]])
    assert history.past_advantage.nan_to_num(-1).tolist() == pytest.approx(
        [1.0, -1, 0.3, -1, 0, -1]
    )
    window = torch.tensor([0, 1, 2, 3])  # seen: 1.0 and 0.3, mean 0.65
    assert weights_of(history, window) == [{1.0}, {1.0}, {0.0, 4 / 3}, {1.0}]
    assert weights_of(history, torch.tensor([1, 3, 5])) == [{1.0}] * 3
    assert weights_of(history, window, rule="none") == [{1.0}] * 4
    assert weights_of(history, window, 0.9) == [{1.0}, {1.0}, {0.0, 1 / (1 - 0.9)}, {1.0}]
    lowest = weights_of(history, torch.tensor([0, 2, 4]), 0.5, rule="dppo_floor")
    assert lowest == [{1.0}, {2.0}, {0.0}], "the lowest is dropped"
    see(history, [2], [[6.0, 0, 6, 0]])
    last_visit_counts = [{0.0, 4 / 3}, {1.0}, {1.0}, {1.0}]
    assert weights_of(history, window) == last_visit_counts
    message = "unknown prompt rule 'gresso': choose one of none, uniform, dppo"
    with pytest.raises(ValueError, match=message):
        history.prune("gresso", 0.5, window, dppo.generator_for(0))


def trained_history():
    """64 prompts: of every three one was dull and four times as long when it was rolled out. Eight
    never were."""
    history = sampler.PromptHistory(64)
    long = torch.arange(56) % 3 == 0
    rewards = torch.where(long, 0.0, 1.0)[:, None] * torch.tensor([1.0, 0, 0, 1])
    advantages = dppo.group_advantages(rewards.double(), "none")
    lengths = torch.where(long, 80, 20)[:, None].expand(56, 4)
    history.update(torch.arange(56), advantages, lengths)
    return history, dppo.generator_for(1)


def test_a_restored_history_is_whole():
    """Catches a part of the history that a resumed run has lost, and one of an older version, whose
    prompts would all count as new."""
    history, _ = trained_history()
    other = sampler.PromptHistory(64)
    other.restore(vars(history))
    for name, value in vars(history).items():
        assert torch.equal(value.nan_to_num(-1), vars(other)[name].nan_to_num(-1)), name
    with pytest.raises(KeyError, match="past_advantage"):
        other.restore({"score": history.past_advantage, "tokens": history.tokens})


def test_fixed_size_rules_keep_exactly_the_planned_number():
    """round((1 - r_q) n) in every draw of each mini-batch; every prompt is kept as often as its
    probability says, over 600 draws and within 4.5 standard errors.

    Catches floor in place of round, draws that favour a place, one draw for all mini-batches, and
    the same random numbers for each of them.
    """
    history, generator = trained_history()
    window = torch.tensor([3, 4, 8, 10, 61, 6, 14, 15, 20, 60])  # in each half two were dull
    for rate, wanted in ((0.3, [7]), (0.35, [6]), (0.44, [3, 3]), (0.5, [2, 2])):
        minibatches = len(wanted)
        uniform = sampler.PROMPT_RULES["uniform"]
        parts = [uniform.keep_prob(history.of(x), rate) for x in window.chunk(minibatches)]
        keep_prob = torch.cat(parts)
        assert keep_prob.sum() == pytest.approx(sum(wanted))
        given = ("uniform", rate, window, generator, minibatches)
        drawn = [history.prune(*given) for _ in range(600)]
        keep = torch.stack([keep for keep, _ in drawn])
        for part, count in zip(keep.chunk(minibatches, dim=1), wanted, strict=True):
            assert (part.sum(dim=1) == count).all()
        error = (keep_prob * (1 - keep_prob) / len(keep)).sqrt()
        assert ((keep.double().mean(dim=0) - keep_prob).abs() <= 4.5 * error + 1e-12).all()
        weights = torch.stack([weights for _, weights in drawn])
        assert torch.equal(weights, keep / keep_prob)
        if minibatches == 2:  # prompts of different mini-batches are independent
            first, second = keep.double().chunk(2, dim=1)
            both = torch.outer(*keep_prob.chunk(2))
            error = (both * (1 - both) / len(keep)).sqrt()
            assert ((first.T @ second / len(keep) - both).abs() <= 4.5 * error + 1e-12).all()
    assert history.prune("uniform", 0.0, window, generator, 2)[0].all(), "rate 0 keeps all"


def test_the_number_of_dull_prompts_is_fixed():
    """To within one, in every draw. Catches an independent draw, which adds variance."""
    history, generator = trained_history()
    window = torch.arange(64)
    keep_prob = sampler.PROMPT_RULES["dppo"].keep_prob(history.of(window), 0.5)
    low = keep_prob <= keep_prob.min() + 1e-9
    share = keep_prob[low].sum()
    assert 2 < share <= low.sum() / 2
    for _ in range(100):
        keep, _ = history.prune("dppo", 0.5, window, generator)
        assert (keep[low].sum() - share).abs() < 1


def test_uniform_is_a_simple_random_sample():
    """Every pair is as likely as every other. Catches a systematic draw in a fixed order, which
    never keeps neighbours."""
    history, generator = sampler.PromptHistory(6), dppo.generator_for(0)
    window = torch.arange(6)
    drawn = [history.prune("uniform", 0.5, window, generator)[0] for _ in range(4000)]
    keep = torch.stack(drawn).double()
    together = (keep.T @ keep / len(keep))[torch.triu_indices(6, 6, 1).unbind()]
    assert ((together - 0.2).abs() < 0.03).all(), "3 of 6: a pair has 3 / 6 x 2 / 5"


def test_draws_start_anywhere(monkeypatch):
    """In 0 to 1, at both levels: else the keep probabilities would not be exact. Catches a start
    that never comes near 1."""
    starts, systematic = [], dppo.systematic

    def record(keep_prob, order, start):
        starts.append(start)
        return systematic(keep_prob, order, start)

    monkeypatch.setattr(dppo, "systematic", record)
    history, generator = sampler.PromptHistory(4), dppo.generator_for(0)
    ones = torch.ones(1, 2, dtype=torch.float64)
    batch = dppo.Completions(ones, ones, ones, ones)
    for prune in (
        lambda: history.prune("uniform", 0.5, torch.arange(4), generator),
        lambda: dppo.prune_completions("pps", 0.5, batch, generator),
    ):
        starts.clear()
        for _ in range(1000):
            prune()
        counts = torch.histc(torch.tensor(starts), bins=50, min=0.0, max=1.0)
        assert counts.sum() == 1000
        assert 4 <= counts.min() <= counts.max() <= 45, "20 expected"


# ---------------------------------------------------------------------------- over many steps


@pytest.mark.parametrize("rule", ["none", "uniform", "dppo"])
def test_average_over_many_steps_is_the_unpruned_mean(rule):
    """A pass rate that drifts, and a history that decides what is rolled out: the weighted sum of
    each step is unbiased.

    1,000 steps of 20 candidates; the bound is 2 standard errors of the paired difference. Catches
    missing weights (the sum is then off by 20 standard errors), and a keep probability that uses
    this step's outcome.
    """
    differences, unweighted = drifting_run(rule)
    error = differences.std() / math.sqrt(len(differences))
    assert differences.mean().abs() <= 2 * error
    if rule != "none":
        assert unweighted.mean().abs() > 20 * error


def drifting_run(rule, steps=1000):
    """Each step's sum of a prompt's signal, minus the un-pruned one: weighted, and unweighted."""
    history = sampler.PromptHistory(200)
    generator = torch.Generator().manual_seed(0)
    differences, unweighted = [], []
    for step in range(1, steps + 1):
        pass_rate = drifting_pass_rate(step)
        window = sampler.candidates(200, 20, seed=0, step=step)
        draws = dppo.generator_for(0, step, "keep")
        keep, weights = history.prune(rule, 0.6, window, draws)
        rewards = (torch.rand(20, 4, generator=generator) < pass_rate[window, None]).double()
        advantages = dppo.group_advantages(rewards, "none")
        signal = advantages.square().sum(dim=1)
        history.update(window[keep], advantages[keep], torch.full_like(rewards, 40.0)[keep])
        differences.append(((weights * signal).sum() - signal.sum()).item())
        unweighted.append(((keep * signal).sum() - signal.sum()).item())
    return torch.tensor(differences), torch.tensor(unweighted)


def drifting_pass_rate(step):
    """[200] of prompts that wander between never and always solved."""
    return ((torch.arange(200) / 200 + step / 3000) % 1.0 * 1.5 - 0.25).clamp(0, 1)
