"""The prompt level: windows, history, and the draw every rank makes alike."""

import math
from types import SimpleNamespace

import pytest
import torch

import baselines
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


def history_of(num_prompts, prompts_per_step=4, lengths=None, sources=None):
    lengths = torch.full((num_prompts,), 5) if lengths is None else torch.tensor(lengths)
    return sampler.PromptHistory(lengths, sources or ["a"] * num_prompts, prompts_per_step)


def see(history, step, prompts, rewards, square=None, tokens=None, weights=None):
    """history.update after rolling these prompts out, with advantages that are the centred rewards."""
    prompts, rewards = torch.tensor(prompts), torch.tensor(rewards, dtype=torch.float64)
    ones = torch.ones(len(prompts), dtype=torch.float64)
    fill = lambda values: ones if values is None else torch.tensor(values, dtype=torch.float64)
    advantages = dppo.group_advantages(rewards, "dr_grpo")
    history.update(step, prompts, fill(weights), rewards, advantages, fill(square), fill(tokens))


def weights_of(history, window, rate=0.25, rule="dppo"):
    """The weights that each candidate can get, over many draws."""
    generator = torch.Generator().manual_seed(0)
    drawn = [history.prune(rule, rate, window, generator, 9) for _ in range(100)]
    assert all(torch.equal(weights > 0, keep) for keep, weights in drawn)
    return [set(column) for column in zip(*(weights.tolist() for _, weights in drawn), strict=True)]


# ---------------------------------------------------------------------------- the rules


def test_threshold_rule_by_hand():
    """r_q acts below the mean of the seen candidates of this step. Kills: unseen ones dropped or counted as 0,
    the mean of all prompts instead of the window's, dropping above the mean."""
    history = history_of(6)
    see(history, 1, [0, 2, 4], [[2.0, 0, 2, 0], [0.6, 0, 0, 0.6], [0, 0, 0, 0]])
    assert history.score.nan_to_num(-1).tolist() == pytest.approx([1.0, -1, 0.3, -1, 0, -1])
    window = torch.tensor([0, 1, 2, 3])  # seen: 1.0 and 0.3, mean 0.65
    assert weights_of(history, window) == [{1.0}, {1.0}, {0.0, 4 / 3}, {1.0}]
    assert weights_of(history, torch.tensor([1, 3, 5])) == [{1.0}] * 3
    assert weights_of(history, window, rule="none") == [{1.0}] * 4
    assert weights_of(history, window, 0.9) == [{1.0}, {1.0}, {0.0, 1 / (1 - 0.9)}, {1.0}]
    assert weights_of(history, torch.tensor([0, 2, 4]), 0.5, rule="dppo_floor") == [{1.0}, {2.0}, {0.0}], "the lowest"
    see(history, 2, [2], [[6.0, 0, 6, 0]])
    assert weights_of(history, window) == [{0.0, 4 / 3}, {1.0}, {1.0}, {1.0}], "the last visit counts"
    with pytest.raises(ValueError, match="unknown prompt rule 'greso'"):
        history.prune("greso", 0.5, window, torch.Generator(), 1)


@pytest.mark.parametrize("rule", ["uniform", "pps"])
def test_fixed_size_rules_keep_exactly_the_planned_number(rule):
    """round((1 - r_q) Q) in every draw, of each mini-batch its share; every prompt as often as its probability says,
    over 4,000 draws within 4.5 standard errors. Kills: floor for round, draws that favour a place, one draw for all."""
    history = history_of(64, 16, lengths=[5 + q % 7 for q in range(64)])
    generator = torch.Generator().manual_seed(1)
    for step in range(1, 5):
        square = torch.rand(16, generator=generator, dtype=torch.float64).square() * 9
        rewards = (torch.rand(16, 4, generator=generator) < 0.5).double()
        window = torch.arange(16 * step - 16, 16 * step)
        see(history, step, window.tolist(), rewards.tolist(), square.tolist(), (5.0 + window % 7).tolist())
    window = torch.arange(3, 61, 6)  # 10 of them
    assert rule == "uniform" or history.priority(window, 5).max() > 1.01 * history.priority(window, 5).min()
    for rate, minibatches, wanted in ((0.3, 1, [7]), (0.35, 1, [6]), (0.44, 2, [3, 3]), (0.5, 2, [2, 3])):
        keep_prob = history.keep_prob(rule, rate, window, 5, minibatches)
        assert keep_prob.sum() == pytest.approx(sum(wanted))
        drawn = [history.prune(rule, rate, window, generator, 5, minibatches) for _ in range(4000)]
        keep = torch.stack([keep for keep, _ in drawn])
        for part, count in zip(keep.chunk(minibatches, dim=1), wanted, strict=True):
            assert (part.sum(dim=1) == count).all()
        error = (keep_prob * (1 - keep_prob) / len(keep)).sqrt()
        assert ((keep.double().mean(dim=0) - keep_prob).abs() <= 4.5 * error + 1e-12).all()
        weights = torch.stack([weights for _, weights in drawn])
        assert torch.equal(weights, keep / keep_prob)
        if minibatches == 2 and rule == "uniform":  # of different mini-batches: independent
            both = (keep[:, 0] & keep[:, 9]).double().mean()
            assert both == pytest.approx((keep_prob[0] * keep_prob[9]).item(), abs=0.03)
    assert torch.equal(history.keep_prob(rule, 0.0, window, 5), torch.ones(10, dtype=torch.float64)), "rate 0: all"
    assert history.prune(rule, 0.0, window, generator, 5, 2)[0].all()


def test_uniform_is_a_simple_random_sample():
    """Every pair as often as every other. Kills: a systematic draw in a fixed order, which never keeps neighbours."""
    history, generator = history_of(6), torch.Generator().manual_seed(0)
    keep = torch.stack([history.prune("uniform", 0.5, torch.arange(6), generator, 1)[0] for _ in range(6000)]).double()
    together = (keep.T @ keep / len(keep))[torch.triu_indices(6, 6, 1).unbind()]
    assert ((together - 0.2).abs() < 0.03).all(), "3 of 6: a pair has 3 / 6 x 2 / 5"


# ---------------------------------------------------------------------------- what pps learns


def test_strata_by_hand():
    """Kills: bins that ignore the group's being dead, ages in steps, lengths cut into equal ranges, epochs from 0."""
    lengths = [1, 2, 3, 4, 5, 100, 1, 2, 3, 4, 5, 100]
    history = history_of(12, 4, lengths=lengths, sources=["b", "a"] * 6)
    source, length, seen, age = history.strata(torch.arange(12), 1)
    assert source.tolist() == [0, 1] * 6
    many = history_of(200, sources=[f"{q % 100 if q < 150 else 7}" for q in range(200)])
    assert many.sums.shape[1] == sampler.SOURCES + 1
    kinds = many.strata(torch.arange(200), 1)[0]
    assert kinds[7] == kinds[150] == 0
    assert kinds.max() == sampler.SOURCES
    assert len(set(kinds.tolist())) == sampler.SOURCES + 1, "what is rare shares a stratum"
    assert length.tolist() == [0, 1, 2, 3, 4, 5] * 2, "six quantiles"
    assert not seen.any()
    assert not age.any()
    nan = math.nan
    see(history, 2, [0, 1, 2], [[1, 1, 1, 1], [0, 0, 0, 0], [1, 0, 0, 0]])  # epoch 0: steps 1 to 3
    see(history, 5, [3, 4, 5, 6], [[1, 1, 0, 0], [1, 1, 1, 0], [nan, 1, 1, 1], [nan, nan, nan, nan]])  # epoch 1
    _, _, seen, age = history.strata(torch.arange(8), 7)  # epoch 2
    right, wrong = sampler.ALL_RIGHT, sampler.ALL_WRONG
    assert seen.tolist() == [right, wrong, wrong + 1, wrong + 2, wrong + 3, right, wrong, sampler.UNSEEN]
    assert age.tolist() == [1, 1, 1, 0, 0, 0, 0, 0]
    assert history.strata(torch.tensor([0, 3]), 31)[3].tolist() == [2, 2], "the last bin is open"
    assert history.strata(torch.tensor([3]), 5)[3].tolist() == [0]
    see(history, 6, [7], [[1, 0, 0, 0]])  # the last step of epoch 1
    assert [history.strata(torch.tensor([7]), step)[3].item() for step in (7, 9, 10, 12, 13)] == [0, 0, 1, 1, 2]


def test_pps_is_uniform_until_the_data_say_otherwise():
    """Kills: sizes from a prior that is not flat, dead steps that teach, moments that scale with the gradient."""
    history = history_of(8, lengths=[1, 2] * 4)
    window = torch.arange(8)
    assert history.keep_prob("pps", 0.5, window, 1).tolist() == [0.5] * 8
    see(history, 1, [0, 1, 2, 3], [[0, 0, 0, 0]] * 4, [0.0] * 4)
    assert history.keep_prob("pps", 0.5, torch.arange(4, 8), 2).tolist() == [0.5] * 4, "no group was alive"
    for step in range(2, 30):
        see(history, step, [4, 5, 6, 7], [[0, 1, 1, 0]] * 4, [1e-9, 4e-9, 1e-9, 4e-9])
    again = history_of(8, lengths=[1, 2] * 4)
    for step in range(2, 30):
        see(again, step, [4, 5, 6, 7], [[0, 1, 1, 0]] * 4, [1.0, 4.0, 1.0, 4.0])
    assert torch.allclose(history.priority(window[4:], 30), again.priority(window[4:], 30)), "only ratios count"
    assert again.priority(window, 30)[5] > 1.1 * again.priority(window, 30)[4]


def test_pps_learns_neymans_allocation():
    """Priorities are the root of mean squares over costs, by source and length, learned from pps's own draws; what
    is small stays at the floor; newer observations count more. Kills: means instead of mean squares, cost left out or
    the wrong way up, no floor, no forgetting, strata not kept apart, moments of the kept instead of the candidates.
    Windows are wide, for squares count relative to their step's mean, which is an estimate, too."""
    history = history_of(400, 200, lengths=[1, 50] * 200, sources=["a"] * 200 + ["b"] * 200)
    generator = torch.Generator().manual_seed(0)
    norm = torch.tensor([[2.0, 8.0], [1.0, 0.01]], dtype=torch.float64)  # [source, length]
    cost = torch.tensor([100.0, 400.0], dtype=torch.float64)

    def learn(first, last, norm):
        for step in range(first, last):
            window = sampler.candidates(400, 200, 0, step)
            keep, weights = history.prune("pps", 0.5, window, generator, step)
            prompts = window[keep]
            spread = torch.rand(len(prompts), generator=generator, dtype=torch.float64) * 2  # mean 1
            square = norm[prompts // 200, prompts % 2].square() * spread
            rewards = torch.tensor([[0.0, 1, 1, 0]], dtype=torch.float64).expand(len(prompts), 4)
            history.update(step, prompts, weights[keep], rewards, rewards - 0.5, square, cost[prompts % 2])

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
    assert history.priority(window, 800).tolist() == pytest.approx(wanted(norm.flip(0)).tolist(), rel=0.1), "it forgets"


def test_what_one_step_adds():
    """By hand: weighted counts, squares in units of the step's weighted mean, weighted tokens. Kills: a mean of the
    kept, squares that carry no weight."""
    history = history_of(4, lengths=[1, 9, 1, 9])
    see(history, 1, [0, 1], [[1, 0, 0, 0], [1, 1, 0, 0]], square=[6.0, 2.0], tokens=[10.0, 30.0], weights=[1.0, 3.0])
    short, long = history.kind[:2].long().tolist()
    found = history.sums[:, 0, [short, long], sampler.UNSEEN, 0]
    assert found.tolist() == [[1.0, 3.0], [2.0, 2.0], [10.0, 90.0]], "the step's mean is (6 + 3 x 2) / 4 = 3"
    assert history.sums.sum() == found.sum()


def test_strata_are_nested():
    """What is known of a coarser stratum stands in for a finer one that was never seen: source, then length, then pass
    rate, then age. Kills: a level left out, levels in another order."""
    history = history_of(8, lengths=[1, 9] * 4, sources=["a", "a", "b", "b", "c", "c", "d", "d"])
    sums = history.sums  # [3, source, length, bin, age]
    sums[0, 0, :, 1, 0], sums[2, 0, :, 1, 0] = 1e6, 1e6
    lengths = history.kind[:2].long() % sampler.LENGTHS
    sums[1, 0, lengths[0], 1, 0], sums[1, 0, lengths[1], 1, 0] = 1e6, 16e6  # source a: large where long
    known = torch.tensor([1e6, 4e6, 1e6], dtype=torch.float64)
    sums[:, 1, lengths[0], 1, 0] = known  # source b: only of the short ones anything is known
    overall = (sums[1].sum() / sums[2].sum()).item()
    r = history.priority(torch.arange(8), 1) ** 2 * overall  # all unseen: a bin without data
    assert r[4:].tolist() == pytest.approx([overall] * 4, rel=1e-3), "nothing is known of c and d"
    assert r[2:4].tolist() == pytest.approx([4.0] * 2, rel=1e-3)
    assert r[:2].tolist() == pytest.approx([1.0, 16.0], rel=1e-3)
    history.bin[:2] = 3  # a bin without data: as its length
    assert history.priority(torch.arange(2), 1).tolist() == pytest.approx((r[:2] / overall).sqrt().tolist())
    sums[:, 0, lengths[1], 3, 1] = torch.tensor([1e6, 81e6, 1e6], dtype=torch.float64)
    history.epoch[:2] = 0
    aged = history.priority(torch.arange(2), 1)  # of age 1 nothing is known: as the bin, at another age
    assert aged[1] / aged[0] == pytest.approx(9, rel=1e-3)


# ---------------------------------------------------------------------------- unbiased over time


@pytest.mark.parametrize("rule", ["none", "uniform", "dppo", "pps"])
def test_average_over_many_steps_is_the_unpruned_mean(rule):
    """A pass rate that drifts, history that decides who is rolled out: the weighted mean of each step is unbiased.

    5,000 steps of 20 candidates; the bound is 2 standard errors of the paired difference. Kills: weights left
    out (the sum is then off by 20 standard errors), a keep probability that peeks at this step's outcome."""
    differences, unweighted = drifting_run(rule)
    error = differences.std() / math.sqrt(len(differences))
    assert differences.mean().abs() <= 2 * error
    if rule != "none":
        assert unweighted.mean().abs() > 20 * error


def drifting_run(rule, steps=5000):
    """Of each step, sum of a prompt's signal: pruned and weighted minus un-pruned; and without the weights."""
    history, generator = (
        history_of(200, 20, lengths=[3 + q // 40 for q in range(200)]),
        torch.Generator().manual_seed(0),
    )
    differences, unweighted = [], []
    for step in range(1, steps + 1):
        pass_rate = drifting_pass_rate(step)
        window = sampler.candidates(200, 20, seed=0, step=step)
        keep, weights = history.prune(rule, 0.6, window, sampler.generator_for(0, step, "keep"), step)
        rewards = (torch.rand(20, 4, generator=generator) < pass_rate[window, None]).double()
        advantages = dppo.group_advantages(rewards, "dr_grpo")
        signal = advantages.square().sum(dim=1)
        told = (rewards[keep], advantages[keep], signal[keep], torch.full_like(signal[keep], 40.0))
        history.update(step, window[keep], weights[keep], *told)
        differences.append(((weights * signal).sum() - signal.sum()).item())
        unweighted.append(((keep * signal).sum() - signal.sum()).item())
    return torch.tensor(differences), torch.tensor(unweighted)


def drifting_pass_rate(step):
    """[200] of prompts that wander between never and always solved."""
    return ((torch.arange(200) / 200 + step / 3000) % 1.0 * 1.5 - 0.25).clamp(0, 1)


def test_greso_is_biased():
    """Its own mean over the groups it trains on, and over all it rolled out, against the un-pruned mean: streaks keep
    revived prompts away, and refilling takes the live ones. Kills: a GRESO so mild that the comparison is unfair."""
    greso, generator = baselines.Greso(200), torch.Generator().manual_seed(0)
    order = lambda epoch: sampler.epoch_order(200, 0, epoch)
    trained, sampled, truth = [], [], []
    for step in range(1, 3001):
        pass_rate = drifting_pass_rate(step)

        def roll_out(prompts, _number, pass_rate=pass_rate):
            rewards = (torch.rand(len(prompts), 4, generator=generator) < pass_rate[prompts, None]).double()
            return SimpleNamespace(prompts=prompts, rewards=rewards)

        rounds, weights, _ = greso.collect(roll_out, 20, order, generator)
        rewards = torch.cat([part.rewards for part in rounds])
        signal = dppo.group_advantages(rewards, "dr_grpo").square().sum(dim=1)
        trained.append((weights * signal).sum().item() / 20)
        sampled.append(signal.mean().item())
        truth.append((4 * pass_rate * (1 - pass_rate) * 3 / 4).mean().item())  # the expected signal of a group of 4
    for values in (trained, sampled):
        difference = torch.tensor(values) - torch.tensor(truth)
        assert difference.mean().abs() > 10 * difference.std() / math.sqrt(len(difference))


def test_greso_streaks_and_exploration_by_hand():
    """The published thresholds, floor, steps, clamps and batch formula. Kills: a streak that survives its end, targets
    the wrong way round, an adjustment in the first epoch, a last round that is not declared."""
    greso = baselines.Greso(4)
    groups = {0: [1.0] * 8, 1: [0.1] * 8, 2: [1.0] * 4 + [0.0] * 4, 3: [1.0] * 7 + [0.8]}  # 3: mean 0.975
    for _visit in range(3):
        greso.update(torch.arange(4), torch.tensor([groups[q] for q in range(4)]))
    assert (greso.easy.tolist(), greso.hard.tolist()) == ([3, 0, 0, 0], [0, 3, 0, 0])
    assert greso.keep_prob(torch.arange(4)).tolist() == [0.125, 0.125, 1.0, 1.0]
    for _visit in range(17):
        greso.update(torch.tensor([0]), torch.tensor([groups[0]]))
    assert greso.keep_prob(torch.tensor([0])).tolist() == [0.01], "explored at 1 % at least"
    greso.update(torch.tensor([0, 1]), torch.tensor([groups[2], groups[2]]))
    assert greso.keep_prob(torch.arange(4)).tolist() == [1.0] * 4, "a live group ends the streak"

    few, many = torch.tensor([groups[2]] * 10), torch.tensor([groups[0], *[groups[2]] * 7, groups[1], groups[1]])
    greso.adjust(many)  # a tenth easy, a fifth hard: both above their targets of 1/12 and 1/6
    assert (greso.p_easy, greso.p_hard) == pytest.approx((0.49, 0.49))
    greso.adjust(few)
    assert (greso.p_easy, greso.p_hard) == pytest.approx((0.5, 0.5))
    for _step in range(100):
        greso.adjust(few)
    assert (greso.p_easy, greso.p_hard) == (0.95, 0.95)
    for _step in range(200):
        greso.adjust(many)
    assert (greso.p_easy, greso.p_hard) == (0.05, 0.05)

    assert greso.next_batch(100, 0.5, 384, 64) == (250, True)
    assert greso.next_batch(10, 0.5, 384, 64) == (64, True)
    assert greso.next_batch(200, 0.5, 384, 64) == (384, False)
    assert greso.next_batch(200, 1.0, 384, 64) == (384, False), "nothing was alive"


def test_greso_collects_in_rounds():
    """Rounds until enough groups are alive; the surplus has weight 0; everything dead ends after ROUNDS. Kills: prompts
    looked at twice, dead groups trained on, an endless step."""
    greso, generator = baselines.Greso(1000), torch.Generator().manual_seed(0)
    asked = []

    def roll_out(prompts, number, alive=0.3):
        asked.append(len(prompts))
        rewards = torch.zeros(len(prompts), 4)
        rewards[:, 0] = (torch.rand(len(prompts), generator=generator) < alive).float()
        return SimpleNamespace(prompts=prompts, rewards=rewards)

    rounds, weights, places = greso.collect(roll_out, 64, lambda epoch: torch.arange(1000), generator)
    rewards = torch.cat([part.rewards for part in rounds])
    alive = ~dppo.dead_groups(rewards)
    prompts = torch.cat([part.prompts for part in rounds])
    assert prompts.tolist() == list(range(len(prompts))), "in the epoch's order, none twice"
    assert greso.cursor == len(prompts)
    assert asked[0] == 96
    assert all(16 <= size <= 96 for size in asked)
    used = weights > 0
    assert torch.equal(used.nonzero(), alive.nonzero()[:64])
    assert places[used].tolist() == list(range(int(used.sum())))
    assert weights.sum() == pytest.approx(64)
    assert (greso.p_easy, greso.p_hard) == (0.5, 0.5), "the first epoch only watches"
    dead = lambda prompts, number: roll_out(prompts, number, alive=0.0)
    rounds, weights, _ = greso.collect(dead, 64, lambda epoch: torch.arange(1000), generator)
    assert len(rounds) == baselines.Greso.ROUNDS
    assert weights.sum() == 0
    greso.cursor = 2000
    greso.collect(roll_out, 64, lambda epoch: torch.arange(1000), generator)
    assert (greso.p_easy, greso.p_hard) != (0.5, 0.5)


def test_refilling_until_full_is_biased():
    """Roll out until 8 are kept at 0.4 each, weigh by 1 / 0.4 and divide by how many were looked at: 7.6 % too much.
    With a fixed window of 20, of which exactly 8 are kept: nothing. Kills: the window replaced by a refill."""
    values = torch.rand(40_000, 120, generator=torch.Generator().manual_seed(0), dtype=torch.float64)  # of mean 1/2
    generator = torch.Generator().manual_seed(1)
    keep, weights = dppo.prune(torch.full_like(values, 0.4), generator)
    last = (keep.cumsum(dim=1) >= 8).int().argmax(dim=1)  # where the eighth stands
    looked_at = torch.arange(120) <= last[:, None]
    refilled = (weights * values * looked_at).sum(dim=1) / (last + 1)
    history, window = history_of(20), torch.arange(20)
    drawn = [history.prune("uniform", 0.6, window, generator, 1) for _ in range(4000)]
    fixed = (torch.stack([weights for _, weights in drawn]) * values[:4000, :20]).mean(dim=1)
    assert refilled.mean() / 0.5 == pytest.approx(1.076, abs=0.008)
    assert fixed.mean() / 0.5 == pytest.approx(1.0, abs=3 * 2 * (fixed.std() / 4000**0.5).item())
    assert all(keep.sum() == 8 for keep, _ in drawn)
