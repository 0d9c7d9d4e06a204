"""The prompt level: windows, history, and the draw that every rank makes alike."""

import math

import pytest
import torch

import dppo
import sampler
from related import rivals, selectors  # noqa: F401 (rivals adds dppo_floor)


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
    history = history_of(1, 1)
    for step in (1, 2):
        for rule in ("none", "uniform", "dppo", "pps"):
            generator = dppo.generator_for(step)
            keep, weights = history.prune(rule, 0.3, torch.tensor([0]), generator, step)
            assert (keep.tolist(), weights.tolist()) == ([True], [1.0]), rule
        see(history, step, [0], [[1, 0]])


def test_seeds_depend_on_every_part_of_the_key():
    """Catches a purpose or a rank that is left out, and seeds that torch refuses."""
    keys = [(0, 1, "keep"), (0, 2, "keep"), (1, 1, "keep"), (0, 11, "keep")]
    keys += [(0, 1, "rollout", 0), (0, 1, "rollout", 1)]
    seeds = [dppo.seed_for(*key) for key in keys]
    assert len(set(seeds)) == len(keys)
    assert all(0 <= seed < 2**63 for seed in seeds)
    torch.manual_seed(max(seeds))


def history_of(num_prompts, prompts_per_step=4, lengths=None, sources=None):
    lengths = torch.full((num_prompts,), 5) if lengths is None else torch.tensor(lengths)
    return sampler.PromptHistory(lengths, sources or ["a"] * num_prompts, prompts_per_step)


def see(history, step, prompts, rewards, square=None, tokens=None, weights=None):
    """history.update after rolling these prompts out; the advantages are the centred rewards."""
    prompts, rewards = torch.tensor(prompts), torch.tensor(rewards, dtype=torch.float64)
    ones = torch.ones(len(prompts), dtype=torch.float64)
    fill = lambda values: ones if values is None else torch.tensor(values, dtype=torch.float64)
    advantages = dppo.group_advantages(rewards, "dr_grpo")
    history.update(step, prompts, fill(weights), rewards, advantages, fill(square), fill(tokens))


def weights_of(history, window, rate=0.25, rule="dppo"):
    """The weights that each candidate can get, over many draws."""
    generator = dppo.generator_for(0)
    drawn = [history.prune(rule, rate, window, generator, 9) for _ in range(100)]
    assert all(torch.equal(weights > 0, keep) for keep, weights in drawn)
    return [set(column) for column in zip(*(weights.tolist() for _, weights in drawn), strict=True)]


# ---------------------------------------------------------------------------- the rules


def test_threshold_rule_by_hand():
    """r_q acts below the mean score of this step's candidates.

    Catches unseen prompts that are dropped or count as 0, the mean of all prompts in place of the
    window's, and dropping above the mean.
    """
    history = history_of(6)
    see(history, 1, [0, 2, 4], [[2.0, 0, 2, 0], [0.6, 0, 0, 0.6], [0, 0, 0, 0]])
    assert history.score.nan_to_num(-1).tolist() == pytest.approx([1.0, -1, 0.3, -1, 0, -1])
    window = torch.tensor([0, 1, 2, 3])  # seen: 1.0 and 0.3, mean 0.65
    assert weights_of(history, window) == [{1.0}, {1.0}, {0.0, 4 / 3}, {1.0}]
    assert weights_of(history, torch.tensor([1, 3, 5])) == [{1.0}] * 3
    assert weights_of(history, window, rule="none") == [{1.0}] * 4
    assert weights_of(history, window, 0.9) == [{1.0}, {1.0}, {0.0, 1 / (1 - 0.9)}, {1.0}]
    lowest = weights_of(history, torch.tensor([0, 2, 4]), 0.5, rule="dppo_floor")
    assert lowest == [{1.0}, {2.0}, {0.0}], "the lowest is dropped"
    see(history, 2, [2], [[6.0, 0, 6, 0]])
    last_visit_counts = [{0.0, 4 / 3}, {1.0}, {1.0}, {1.0}]
    assert weights_of(history, window) == last_visit_counts
    message = "unknown prompt rule 'gresso': choose one of none, uniform, dppo, pps"
    with pytest.raises(ValueError, match=message):
        history.prune("gresso", 0.5, window, dppo.generator_for(0), 1)


def trained_history():
    """64 prompts that were rolled out once, with sizes and costs of their own; step 5 is next."""
    history = history_of(64, 16, lengths=[5 + q % 7 for q in range(64)])
    generator = dppo.generator_for(1)
    for step in range(1, 5):
        square = torch.from_numpy(generator.random(16)).square() * 9
        rewards = torch.from_numpy(generator.random((16, 4)) < 0.5).double()
        window = torch.arange(16 * step - 16, 16 * step)
        tokens = 5.0 + window % 7
        see(history, step, window.tolist(), rewards.tolist(), square.tolist(), tokens.tolist())
    return history, generator


@pytest.mark.parametrize("rule", ["uniform", "pps"])
def test_fixed_size_rules_keep_exactly_the_planned_number(rule):
    """round((1 - r_q) Q) in every draw, of each mini-batch its share; every prompt is kept as often
    as its probability says, over 600 draws and within 4.5 standard errors.

    Catches floor in place of round, draws that favour a place, one draw for all mini-batches, and
    the same random numbers for each of them.
    """
    history, generator = trained_history()
    window = torch.arange(3, 61, 6)  # 10 prompts
    priority = history.priority(window, 5)
    assert rule == "uniform" or priority.max() > 1.01 * priority.min()
    for rate, wanted in ((0.3, [7]), (0.35, [6]), (0.44, [3, 3]), (0.5, [2, 3])):
        minibatches = len(wanted)
        keep_prob = history.keep_prob(rule, rate, window, 5, minibatches)
        assert keep_prob.sum() == pytest.approx(sum(wanted))
        drawn = [history.prune(rule, rate, window, generator, 5, minibatches) for _ in range(600)]
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
            assert ((first.T @ second / len(keep) - both).abs() <= 4.5 * error).all()
    everything = history.keep_prob(rule, 0.0, window, 5)
    assert torch.equal(everything, torch.ones(10, dtype=torch.float64)), "rate 0 keeps all"
    assert history.prune(rule, 0.0, window, generator, 5, 2)[0].all()


def test_pps_draws_by_probability():
    """The less likely half of the candidates gets its share in every draw, to within one.

    Catches a draw that is not ordered by the probability, which keeps the means but adds variance.
    """
    history, generator = trained_history()
    window = torch.arange(64)
    keep_prob = history.keep_prob("pps", 0.5, window, 5)
    low = keep_prob < keep_prob.median()
    share = keep_prob[low].sum()
    assert 5 < share < low.sum() / 2
    for _ in range(100):
        keep, _ = history.prune("pps", 0.5, window, generator, 5)
        assert (keep[low].sum() - share).abs() < 1


def test_uniform_is_a_simple_random_sample():
    """Every pair is as likely as every other. Catches a systematic draw in a fixed order, which
    never keeps neighbours."""
    history, generator = history_of(6), dppo.generator_for(0)
    window = torch.arange(6)
    drawn = [history.prune("uniform", 0.5, window, generator, 1)[0] for _ in range(4000)]
    keep = torch.stack(drawn).double()
    together = (keep.T @ keep / len(keep))[torch.triu_indices(6, 6, 1).unbind()]
    assert ((together - 0.2).abs() < 0.03).all(), "3 of 6: a pair has 3 / 6 x 2 / 5"


# ---------------------------------------------------------------------------- what pps learns


def test_strata_by_hand():
    """Catches bins that ignore that a group is dead, ages in steps, lengths that are cut into equal
    ranges, and epochs that do not start at 0."""
    lengths = [1, 2, 3, 4, 5, 100, 1, 2, 3, 4, 5, 100]
    history = history_of(12, 4, lengths=lengths, sources=["b", "a"] * 6)
    source, length, seen, age = history.strata(torch.arange(12), 1)
    assert source.tolist() == [0, 1] * 6
    assert length.tolist() == [0, 1, 2, 3, 4, 5] * 2, "six quantiles"
    assert not seen.any()
    assert not age.any()
    many = history_of(200, sources=[f"{q % 100 if q < 150 else 7}" for q in range(200)])
    assert many.sums.shape[1] == sampler.SOURCES + 1
    kinds = many.strata(torch.arange(200), 1)[0]
    assert kinds[7] == kinds[150] == 0
    assert kinds.max() == sampler.SOURCES
    assert len(set(kinds.tolist())) == sampler.SOURCES + 1, "rare sources share a stratum"

    nan = math.nan
    see(history, 2, [0, 1, 2], [[1] * 4, [0] * 4, [1, 0, 0, 0]])  # epoch 0: steps 1 to 3
    epoch_1 = [[1, 1, 0, 0], [1, 1, 1, 0], [nan, 1, 1, 1], [nan, nan, nan, nan]]
    see(history, 5, [3, 4, 5, 6], epoch_1)
    _, _, seen, age = history.strata(torch.arange(8), 7)  # epoch 2
    right, wrong = sampler.ALL_RIGHT, sampler.ALL_WRONG
    bins = [right, wrong, wrong + 1, wrong + 2, wrong + 3, right, wrong, sampler.UNSEEN]
    assert seen.tolist() == bins
    assert age.tolist() == [1, 1, 1, 0, 0, 0, 0, 0]
    assert history.strata(torch.tensor([0, 3]), 31)[3].tolist() == [2, 2], "the last bin is open"
    assert history.strata(torch.tensor([3]), 5)[3].tolist() == [0]
    see(history, 6, [7], [[1, 0, 0, 0]])  # the last step of epoch 1
    ages = [history.strata(torch.tensor([7]), step)[3].item() for step in (7, 9, 10, 12, 13)]
    assert ages == [0, 0, 1, 1, 2]


def test_bins_at_their_edges():
    """Catches moved edges: a dead group of mean 1/2 is all right, and 3/4 is in the third bin."""
    history = history_of(4)
    rewards = [[0.5, 0.5, 0.5, 0.5], [0.49] * 4, [1, 1, 1, 0], [1, 1, 1, 0.01]]
    see(history, 1, [0, 1, 2, 3], rewards)
    wrong = sampler.ALL_WRONG
    assert history.bin.tolist() == [sampler.ALL_RIGHT, wrong, wrong + 3, wrong + 4]


def test_pps_is_uniform_until_the_data_say_otherwise():
    """Catches a prior that is not flat, learning from steps without live groups, and moments that
    scale with the gradient."""
    history = history_of(8, lengths=[1, 2] * 4)
    window = torch.arange(8)
    assert history.keep_prob("pps", 0.5, window, 1).tolist() == [0.5] * 8
    see(history, 1, [0, 1, 2, 3], [[0, 0, 0, 0]] * 4, [0.0] * 4)
    unseen = history.keep_prob("pps", 0.5, torch.arange(4, 8), 2)
    assert unseen.tolist() == [0.5] * 4, "no group was alive"
    for step in range(2, 30):
        see(history, step, [4, 5, 6, 7], [[0, 1, 1, 0]] * 4, [1e-9, 4e-9, 1e-9, 4e-9])
    again = history_of(8, lengths=[1, 2] * 4)
    for step in range(2, 30):
        see(again, step, [4, 5, 6, 7], [[0, 1, 1, 0]] * 4, [1.0, 4.0, 1.0, 4.0])
    found, expected = (one.priority(window, 30) for one in (history, again))
    assert torch.allclose(found[4:], expected[4:]), "only ratios count"
    assert expected[5] > 1.1 * expected[4]


def test_pps_learns_neymans_allocation():
    """Priorities are the root of mean squares over costs, by source and length, learned from pps's
    own draws.

    Catches means in place of mean squares, a cost that is missing or inverted, no floor, no
    forgetting, strata that are not kept apart, and moments of the kept prompts in place of the
    candidates. Windows are wide because squares count relative to an estimate of their step's mean.
    """
    lengths, sources = [1, 50] * 200, ["a"] * 200 + ["b"] * 200
    history = history_of(400, 200, lengths=lengths, sources=sources)
    generator = dppo.generator_for(0)
    norm = torch.tensor([[2.0, 8.0], [1.0, 0.01]], dtype=torch.float64)  # [source, length]
    cost = torch.tensor([100.0, 400.0], dtype=torch.float64)

    def learn(first, last, norm):
        for step in range(first, last):
            window = sampler.candidates(400, 200, 0, step)
            keep, weights = history.prune("pps", 0.5, window, generator, step)
            prompts = window[keep]
            spread = torch.from_numpy(generator.random(len(prompts)))
            square = norm[prompts // 200, prompts % 2].square() * 2 * spread  # 2 spread has mean 1
            rewards = torch.tensor([[0.0, 1, 1, 0]], dtype=torch.float64).expand(len(prompts), 4)
            learned = (rewards, rewards - 0.5, square, cost[prompts % 2])
            history.update(step, prompts, weights[keep], *learned)

    def wanted(norm):
        ratio = (norm.square() / cost) / (norm.square().mean() / cost.mean())
        return ratio.sqrt().clamp(min=sampler.FLOOR)[[0, 0, 1, 1], [0, 1, 0, 1]]

    learn(1, 400, norm)
    window = torch.tensor([0, 1, 200, 201])
    size = history.priority(window, 400)
    assert size.tolist() == pytest.approx(wanted(norm).tolist(), rel=0.06)
    assert size[3] == sampler.FLOOR < size[2]
    assert torch.allclose(history.keep_prob("pps", 0.75, window, 400), size / size.sum())
    learn(400, 800, norm.flip(0))
    forgotten = history.priority(window, 800).tolist()
    assert forgotten == pytest.approx(wanted(norm.flip(0)).tolist(), rel=0.1), "it forgets"


def test_what_one_step_adds():
    """By hand: weighted counts, squares in units of the step's weighted mean, weighted tokens.

    Catches a mean of the kept prompts, squares that carry no weight, a memory of another length,
    and a step without live groups that makes the history fade.
    """
    history = history_of(4, lengths=[1, 9, 1, 9])
    step_1 = {"square": [6.0, 2.0], "tokens": [10.0, 30.0], "weights": [1.0, 3.0]}
    see(history, 1, [0, 1], [[1, 0, 0, 0], [1, 1, 0, 0]], **step_1)
    short, long = history.kind[:2].long().tolist()
    found = history.sums[:, 0, [short, long], sampler.UNSEEN, 0]
    expected = [[1.0, 3.0], [2.0, 2.0], [10.0, 90.0]]
    assert found.tolist() == expected, "the step's mean is (6 + 3 x 2) / 4 = 3"
    assert history.sums.sum() == found.sum()
    see(history, 2, [2, 3], [[0, 0, 0, 0]] * 2, square=[0.0, 0.0])
    assert history.sums[:, 0, [short, long], sampler.UNSEEN, 0].tolist() == expected
    see(history, 3, [0], [[1, 0, 0, 0]])  # of another stratum: its last pass rate was 1/4
    faded = history.sums[:, 0, [short, long], sampler.UNSEEN, 0]
    assert torch.allclose(faded, math.exp(-1 / 64) * torch.tensor(expected, dtype=torch.float64))


def test_strata_are_nested():
    """A coarser stratum stands in for a finer one without data: source, length, pass rate, age.

    Catches a level that is left out, and levels in another order.
    """
    sources = ["a", "a", "b", "b", "c", "c", "d", "d"]
    history = history_of(8, lengths=[1, 9] * 4, sources=sources)
    sums = history.sums  # [3, source, length, bin, age]
    sums[0, 0, :, 1, 0], sums[2, 0, :, 1, 0] = 1e6, 1e6
    lengths = history.kind[:2].long() % sampler.LENGTHS
    sums[1, 0, lengths[0], 1, 0] = 1e6  # source a: small if short,
    sums[1, 0, lengths[1], 1, 0] = 16e6  # large if long
    known = torch.tensor([1e6, 4e6, 1e6], dtype=torch.float64)
    sums[:, 1, lengths[0], 1, 0] = known  # source b: only short prompts have data
    overall = (sums[1].sum() / sums[2].sum()).item()
    r = history.priority(torch.arange(8), 1) ** 2 * overall  # all unseen: a bin without data
    assert r[4:].tolist() == pytest.approx([overall] * 4, rel=1e-3), "c and d have no data"
    assert r[2:4].tolist() == pytest.approx([4.0] * 2, rel=1e-3)
    assert r[:2].tolist() == pytest.approx([1.0, 16.0], rel=1e-3)
    history.bin[:2] = 3  # a bin without data: like its length
    like_length = history.priority(torch.arange(2), 1).tolist()
    assert like_length == pytest.approx((r[:2] / overall).sqrt().tolist())
    aged = torch.tensor([1e6, 81e6, 1e6], dtype=torch.float64)
    sums[:, 0, lengths[1], 3, 1] = aged
    history.epoch[:2] = 0
    found = history.priority(torch.arange(2), 1)  # no data at age 1: like the bin at another age
    assert found[1] / found[0] == pytest.approx(9, rel=1e-3)


def test_prior_counts_like_groups():
    """With PRIOR groups of its own, a stratum is halfway between its data and the coarser one; with
    many it is its data, and with none the coarser one.

    Catches a prior that is not in groups, and one that applies to only one level.
    """
    history = history_of(4)
    length = int(history.kind[0]) % sampler.LENGTHS
    # groups, summed squares and summed tokens (10 a group) of all-wrong and all-right prompts
    for bin_, groups, r in ((1, 48.0, 0.3), (sampler.ALL_RIGHT, 48e6, 0.1)):
        history.sums[:, 0, length, bin_, 0] = torch.tensor([groups, groups * 10 * r, groups * 10])
    history.bin[:] = torch.tensor([1, sampler.ALL_RIGHT, 3, 1], dtype=torch.uint8)
    history.epoch[:3] = 0
    found = (0.1 * history.priority(torch.arange(3), 2) ** 2).tolist()
    halfway = (0.3 + 0.1) / 2  # of the bin and the length above it
    assert found == pytest.approx([(0.3 + halfway) / 2, 0.1, 0.1], rel=1e-4)


def test_expected_tokens():
    """Of unseen prompts, groups of source a sample 10 tokens and those of b 30, three times as many
    groups; nothing is known before the first live group. Fails if squares count, if the figure is
    not relative to the mean group, or if the prior is in tokens."""
    history = history_of(4, sources=["a", "b", "b", "b"], lengths=[5] * 4)
    assert history.relative_tokens(torch.arange(4), 1).tolist() == [1.0] * 4
    kind = history.kind[0].long() % sampler.LENGTHS
    a, b = history.kind[:2].long() // sampler.LENGTHS
    history.sums[:, a, kind, 0, 0] = torch.tensor([1e7, 7e7, 1e8], dtype=torch.float64)
    history.sums[:, b, kind, 0, 0] = torch.tensor([3e7, 1e7, 9e8], dtype=torch.float64)
    found = history.relative_tokens(torch.arange(4), 1).tolist()
    assert found == pytest.approx([10 / 25, *[30 / 25] * 3], rel=1e-4)
    # 48 groups of a, so each of four levels takes half of the coarser one's: 10 + 15 / 16
    history.sums[:, b, kind, 0, 0] = torch.tensor([144.0, 1, 144 * 30], dtype=torch.float64)
    history.sums[:, a, kind, 0, 0] = torch.tensor([48.0, 1, 480], dtype=torch.float64)
    found = history.relative_tokens(torch.arange(1), 1).item()
    assert found == pytest.approx((10 + 15 / 16) / 25, rel=1e-4)


# ---------------------------------------------------------------------------- unbiased over time


@pytest.mark.parametrize("rule", ["none", "uniform", "dppo", "pps"])
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
    history = history_of(200, 20, lengths=[3 + q // 40 for q in range(200)])
    generator = torch.Generator().manual_seed(0)
    differences, unweighted = [], []
    for step in range(1, steps + 1):
        pass_rate = drifting_pass_rate(step)
        window = sampler.candidates(200, 20, seed=0, step=step)
        draws = dppo.generator_for(0, step, "keep")
        keep, weights = history.prune(rule, 0.6, window, draws, step)
        rewards = (torch.rand(20, 4, generator=generator) < pass_rate[window, None]).double()
        advantages = dppo.group_advantages(rewards, "dr_grpo")
        signal = advantages.square().sum(dim=1)
        tokens = torch.full_like(signal, 40.0)
        learned = [values[keep] for values in (weights, rewards, advantages, signal, tokens)]
        history.update(step, window[keep], *learned)
        differences.append(((weights * signal).sum() - signal.sum()).item())
        unweighted.append(((keep * signal).sum() - signal.sum()).item())
    return torch.tensor(differences), torch.tensor(unweighted)


def drifting_pass_rate(step):
    """[200] of prompts that wander between never and always solved."""
    return ((torch.arange(200) / 200 + step / 3000) % 1.0 * 1.5 - 0.25).clamp(0, 1)
