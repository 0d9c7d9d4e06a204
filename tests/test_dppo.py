"""The estimator by hand: keep probabilities, draws, advantages, losses, the running check."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import dppo
import metrics
import proof
from related import rivals

UNBIASED = ("none", "zero", "uniform", "dppo", "pps", "adaptive")


def table(rows):
    return torch.tensor(rows, dtype=torch.float64)


# ---------------------------------------------------------------------------- keep probabilities


def random_instance(generator, n=40):
    """Sizes over four orders of magnitude, some of them 0, costs, and a budget."""
    size = torch.rand(n, generator=generator, dtype=torch.float64).mul(8).sub(6).exp()
    size[torch.rand(n, generator=generator) < 0.1] = 0.0
    cost = torch.randint(5, 60, (n,), generator=generator).double()
    share = 0.02 + 0.96 * torch.rand((), generator=generator).item()
    return size, cost, share * cost[size > 0].sum().item()


def variance(keep_prob, size):
    live = size > 0
    return ((1 / keep_prob[live] - 1) * size[live].square()).sum().item()


def at_cost(keep_prob, cost, live, budget):
    """The same probabilities scaled, and capped at 1, until they cost `budget`."""
    low, high = 1e-12, 1e12
    for _ in range(50):
        middle = math.sqrt(low * high)
        if (keep_prob * middle).clamp(max=1)[live] @ cost[live] < budget:
            low = middle
        else:
            high = middle
    return (keep_prob * low).clamp(max=1)


def test_water_filling_is_optimal():
    """KKT conditions and cost on 100 random instances; no other rule of that cost varies less.

    Catches a single round of saturation, a / c in place of a / sqrt(c), and a budget that counts
    terms of size 0.
    """
    generator = torch.Generator().manual_seed(0)
    saturated = compared = 0
    for _ in range(100):
        size, cost, budget = random_instance(generator)
        live, p = size > 0, dppo.pps_keep_prob(size, cost, budget)
        assert (p[~live] == 0).all()
        assert ((p[live] > 0) & (p[live] <= 1)).all()
        assert (p * cost).sum().item() == pytest.approx(budget, rel=1e-12)
        price = (size / p).square()[live] / cost[live]  # what one more token would save
        inner = p[live] < 1
        saturated += int((~inner).sum())
        level = price[inner].mean()
        assert ((price[inner] - level).abs() / level).max() < 1e-9
        assert (price[~inner] >= level * (1 - 1e-9)).all()
        best = variance(p, size)
        noise = torch.rand(size.shape, generator=generator, dtype=torch.float64)
        others = [
            torch.ones_like(size),
            p * (1 + 0.2 * noise),
            size / size[live].mean(),
            torch.where(size >= size[live].mean(), 1.0, 0.1).double(),
        ]
        for other in others:
            q = at_cost(other, cost, live, budget)
            compared += (q[live] @ cost[live]).item() == pytest.approx(budget, rel=1e-6)
            assert best <= variance(q, size) * (1 + 1e-6)
    assert saturated > 100, "the instances saturate"
    assert compared > 390, "nearly every other rule reaches the cost"


def test_water_filling_with_room_for_all():
    """Catches a probability above 1, and a division by zero if all or none are kept.

    A budget of exactly the whole cost keeps everything with probability exactly 1.
    """
    size, cost = table([3.0, 0.0, 1e-12]), table([4.0, 5.0, 6.0])
    assert dppo.pps_keep_prob(size, cost, 10.0).tolist() == [1, 0, 1]
    assert dppo.pps_keep_prob(torch.zeros(3), cost, 0.0).tolist() == [0, 0, 0]
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        size, cost, _ = random_instance(generator)
        p = dppo.pps_keep_prob(size, cost, cost[size > 0].sum().item())
        assert torch.equal(p, (size > 0).double())


def test_one_live_completion():
    """Its probability is the budget over its cost, and 1 from there on. The dead ones cost nothing.

    Catches a probability that depends on the only size, and a live completion that is never kept.
    """
    for size in (1e-20, 1.0, 1e20):
        sizes, cost = table([0.0, size, 0.0]), table([10.0, 8.0, 10.0])
        assert dppo.pps_keep_prob(sizes, cost, 2.0).tolist() == pytest.approx([0, 0.25, 0])
        assert dppo.pps_keep_prob(sizes, cost, 7.999).tolist()[1] == pytest.approx(7.999 / 8)
        assert dppo.pps_keep_prob(sizes, cost, 8.0).tolist() == [0, 1, 0]


def test_threshold_margin():
    """Scores that tie up to rounding are kept; scores 2e-6 below the mean are not ties.

    Catches no margin, a margin of 1e-5 or 1e-7, and a margin on the wrong side.
    """
    rewards = table([[1.0, 0, 1, 0, 0, 1]])  # at pass rate 1/2 all |A| are equal up to rounding
    advantages = dppo.group_advantages(rewards, "group") * (1 + 1e-15 * torch.arange(6))
    assert (dppo.threshold_keep_prob(advantages.abs(), ~rewards.isnan(), 0.9) == 1).all()
    for below, keep_prob in ((0.4e-6, 1.0), (2e-6, 0.75)):
        scores = table([1 - below, 1 + below])  # of mean 1
        found = dppo.threshold_keep_prob(scores, torch.ones(2, dtype=torch.bool), 0.25)
        assert found.tolist() == [keep_prob, 1.0]


def test_mean_is_of_the_group_and_of_scorable_completions():
    """Catches a batch-wide mean, and unscorable completions (|A| = 0) that lower the mean."""
    nan = math.nan
    rewards = table([[1.0, 0, 0, nan, nan, nan], [0, 0, 0, 0, 0, 1], [nan] * 6])
    advantages = dppo.group_advantages(rewards, "none")
    batch = dppo.Completions(advantages, rewards, *[torch.ones(3, 6)] * 2)
    keep_prob = dppo.COMPLETION_RULES["dppo"].keep_prob(batch, 0.5)
    # group 0: |A| is 2/3, 1/3, 1/3 and 0; the mean of three is 4/9, of six 2/9, of the batch 1/4
    assert keep_prob[:2].tolist() == [[1, 0.5, 0.5, 0.5, 0.5, 0.5], [0.5] * 5 + [1]]
    assert keep_prob[2].tolist() == [1.0] * 6, "nothing is below a mean of nothing"


def test_contribution_size():
    """Catches a missing length or prompt factor, an underflow that drops for good, a dead group
    dropped although it has a KL term, and a masked completion that is kept."""
    advantages, scale = table([[1.0, -2, 0, 1, 1]]), table([[0.5, 0.5, 0.5, 0.0, 0.5]])
    energy = table([[4.0, 1, 9, 1, 0]])
    size = dppo.contribution_size(advantages, scale, energy, 0.0)
    assert size[0, :4].tolist() == pytest.approx([1, 1, 0, 0])
    assert size[0, 4].item() == pytest.approx(dppo.SIZE_FLOOR * 2 / 3), "floored, not dropped"
    with_kl = dppo.contribution_size(advantages, scale, energy, 0.1)
    assert with_kl[0, :4].tolist() == pytest.approx([1.1, 1.05, 0.15, 0])
    peaked = dppo.contribution_size(advantages, scale, torch.zeros(1, 5), 0.0)
    assert ((peaked > 0) == (scale * advantages != 0)).all(), "not even if all of them underflow"
    assert (dppo.contribution_size(torch.zeros(1, 5), scale, energy, 0.0) == 0).all()


def test_size_floor():
    """A size just below 3 % of the mean is raised to it, one just above is not changed.

    Catches a floor that is missing, that applies to masked completions, or whose value changed: it
    bounds the weights.
    """
    energy = table([[1.0] * 97 + [0.028**2, 0.032**2, 1.0]])
    scale = torch.ones(1, 100, dtype=torch.float64)
    scale[0, 99] = 0.0
    size = dppo.contribution_size(torch.ones(1, 100), scale, energy, 0.0)
    mean = (97 + 0.06) / 99
    assert size[0, 97:].tolist() == pytest.approx([0.03 * mean, 0.032, 0.0])
    keep_prob = dppo.pps_keep_prob(size, torch.ones(1, 100), 50.0)
    assert (1 / keep_prob[size > 0]).max() < 2 / 0.029


@pytest.mark.parametrize("rule", UNBIASED)
@pytest.mark.parametrize("rewards", [[[1.0, 0.0]], [[0.0, math.nan]], [[math.nan, math.nan]]])
def test_one_prompt_with_two_completions(rule, rewards):
    """Groups of two, also with unscorable completions: the mean weight is 1 if the term is not 0.

    Catches NaN probabilities, a division by a count of zero, and a rule that drops a live pair.
    """
    rewards = table(rewards)
    advantages = dppo.group_advantages(rewards, "group")
    assert advantages.isfinite().all()
    scale, cost = torch.ones(1, 2, dtype=torch.float64), table([[1.0, 6.0]])
    size = dppo.contribution_size(advantages, scale, table([[0.5, 3.0]]), 0.0)
    batch = dppo.Completions(advantages, rewards, cost, size, rest=1.0)
    outcomes = proof.outcomes(dppo.COMPLETION_RULES[rule], 0.6, batch)
    mean = sum(chance * weights for _, weights, chance in outcomes)
    drops_zeros = rule in ("zero", "pps", "adaptive")
    wanted = torch.where(size > 0, 1.0, 0.0) if drops_zeros else torch.ones(1, 2)
    assert mean.flatten().tolist() == pytest.approx(wanted.flatten().tolist())
    for seed in range(20):
        generator = dppo.generator_for(seed)
        keep, weights = dppo.prune_completions(rule, 0.6, batch, generator)
        assert weights.isfinite().all()
        assert torch.equal(weights > 0, keep)


# ---------------------------------------------------------------------------- draws and weights


def test_draws_have_their_probabilities():
    """Independent, within 4 standard errors. Catches probabilities that are off by 0.02, and a
    single uniform number for all."""
    keep_prob = table([1.0, 0.7, 0.3, 0.05])
    draws = 20_000
    kept = dppo.independent(keep_prob.expand(draws, 4), dppo.generator_for(0)).double()
    error = (keep_prob * (1 - keep_prob) / draws).sqrt()
    assert ((kept.mean(0) - keep_prob).abs() <= 4 * error).all()
    assert (kept[:, 0] == 1).all()
    assert torch.corrcoef(kept[:, 1:3].T)[0, 1].abs() < 0.03, "draws are independent"


def test_a_generators_key_has_128_bits():
    """Each bit of Philox's key is 0 for some of a run's keys and 1 for others. Fails if fewer bits
    count, so that two keys of a long run would share all their random numbers."""
    keys = [dppo.generator_for(0, step, "keep").bit_generator.state for step in range(200)]
    words = np.array([state["state"]["key"] for state in keys])  # [200, 2] of 64 bits
    assert np.bitwise_or.reduce(words).tolist() == [2**64 - 1] * 2
    assert np.bitwise_and.reduce(words).tolist() == [0, 0]


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1 - 2**-53])
def test_draw_at_the_ends(monkeypatch, uniform):
    """Probability 0 is never kept and 1 always, at both ends of the generator's range.

    Catches <= in place of <, whose weight would be 1 / 0, a float32 uniform number, which can round
    up to 1, and probabilities next to 0 or 1 that are treated as 0 or 1.
    """

    generator = SimpleNamespace(random=lambda shape: np.full(shape, uniform))
    near = [0.0, 1e-12, 1 - 1e-12, 1.0]
    kept = dppo.independent(table(near), generator).tolist()
    assert kept == [uniform < p for p in near]


def test_systematic_draw():
    """Inclusion within 4 standard errors, size constant if the sum is an integer, exact by
    enumeration.

    Catches an order that is applied twice or not undone, and points that miss the first interval.
    """
    generator = torch.Generator().manual_seed(1)
    p = torch.rand(2, 10, generator=generator, dtype=torch.float64)
    p[0, 3], p[1, 4], p[1, 5] = 1.0, 0.0, 1.0
    p[0, 0] = 0.0
    p[0, 0] = 1 - p.sum() % 1
    size = round(p.sum().item())
    assert p.sum().item() == pytest.approx(size, abs=1e-12)
    order = torch.randperm(20, generator=generator)
    starts = torch.rand(5_000, generator=generator, dtype=torch.float64).tolist()
    kept = torch.stack([dppo.systematic(p, order, start) for start in starts]).double()
    assert ((kept.mean(0) - p).abs() <= 4 * (p * (1 - p) / len(starts)).sqrt()).all()
    assert (kept.sum(dim=(1, 2)) == size).all()
    exact = sum(chance * keep.double() for keep, chance in proof.systematic_outcomes(p, order))
    assert (exact - p).abs().max() < 1e-12
    stretch = kept.flatten(1)[:, order[5:12]].sum(dim=1)
    share = p.flatten()[order[5:12]].sum()
    assert ((stretch - share).abs() < 1).all(), "each stretch gets its share, to within one"
    half = dppo.systematic(table([0.5, 0.5, 0.25, 0.5]), torch.arange(4), 0.0)
    assert half.tolist() == [True, False, True, False], "[0, 0.5) holds 0 and [1, 1.25) holds 1"


@pytest.mark.parametrize("order", [[0, 1, 2, 3, 4, 5, 6], [4, 2, 6, 0, 5, 1, 3]])
def test_systematic_draw_next_to_zero_and_one(order):
    """Probabilities next to 0 and 1 are exact, too: neither end is rounded.

    Catches a keep probability of 0.9995 that counts as 1 (at a weight of 1.0005), and a tiny one
    that is dropped for good.
    """
    p = table([0.9995, 1.0, 1e-6, 1 - 1e-9, 0.5, 0.0, 1e-9])
    outcomes = list(proof.systematic_outcomes(p, torch.tensor(order)))
    exact = sum(chance * keep.double() for keep, chance in outcomes)
    assert (exact - p).abs().max() < 1e-15
    for keep, chance in outcomes:
        assert keep[1], "probability 1"
        assert not keep[5] or chance == 0, "probability 0"


def test_systematic_draw_keeps_the_sure_ones():
    """Catches a probability of 1 that takes part in the sum, where rounding can lose it: between
    1e-17 and 1 + 1e-17 there is no whole unit left."""
    keep = dppo.systematic(table([1e-17, 1.0, 1.0, 0.5]), torch.arange(4), 0.0)
    assert keep.tolist() == [True, True, True, False]


def test_pps_draws_are_fresh_and_ordered():
    """pps is the systematic draw with the generator's number, by prompt and by size.

    Catches the same number for every draw, and an order that mixes prompts.
    """
    batch = dppo.Completions(
        advantages=table([[-1, 1, -1], [1, -1, -1]]),
        rewards=table([[0, 1, 0], [1, 0, 0]]),
        cost=torch.full((2, 3), 4),
        size=table([[3, 2, 0], [4, 6, 5]]),
    )
    assert dppo.strata_order(batch).tolist() == [2, 1, 0, 3, 5, 4]
    generator = dppo.generator_for(0)
    draws = [dppo.prune_completions("pps", 0.5, batch, generator) for _ in range(50)]
    drawn = {tuple(keep.flatten().tolist()) for keep, _ in draws}
    outcomes = proof.outcomes(dppo.COMPLETION_RULES["pps"], 0.5, batch)
    assert drawn == {tuple(keep.flatten().tolist()) for keep, _, p in outcomes if p > 1e-9}
    assert len(drawn) > 3
    keep, weights = draws[-1]
    keep_prob = dppo.COMPLETION_RULES["pps"].keep_prob(batch, 0.5)
    assert torch.equal(weights, torch.where(keep, 1 / keep_prob, 0.0))
    cost = (keep_prob * batch.cost).sum().item()
    assert cost == pytest.approx(12.0), "1 - r_o of all tokens, those of size 0 included"


def test_pps_drops_terms_of_zero_first():
    """If the budget is 30 % of the tokens and 25 % are live, these are all kept, at weight 1.

    Catches a budget that is a share of the live tokens.
    """
    size = torch.zeros(4, 4, dtype=torch.float64)
    size[1] = table([1, 2, 3, 40])
    batch = dppo.Completions(size, size, torch.full((4, 4), 7), size)
    keep, weights = dppo.prune_completions("pps", 0.7, batch, dppo.generator_for(0))
    assert torch.equal(keep, size > 0)
    assert torch.equal(weights, (size > 0).double())


@pytest.mark.parametrize("size", [2, 3, 5, 7])
@pytest.mark.parametrize("rate", [0.3, 0.5, 0.9])
def test_small_groups_have_exact_probabilities(size, rate):
    """Groups so small that floor(r n) is far from r n: the mean weight of each completion is 1.

    Catches rounding in the draw.
    """
    draws = 4000
    rewards = table([[1.0] + [0.0] * (size - 1)]).expand(draws, size)
    advantages = dppo.group_advantages(rewards, "group")
    batch = dppo.Completions(advantages, rewards, torch.ones(draws, size), advantages.abs())
    _, weights = dppo.prune_completions("dppo", rate, batch, dppo.generator_for(0))
    assert (weights[:, 0] == 1).all()
    error = math.sqrt(rate / (1 - rate) / draws)  # of a mean of weights, each 0 or 1 / (1 - r)
    if size > 2:  # in a group of two, both |A| equal the mean
        assert ((weights.mean(dim=0) - 1).abs()[1:] < 4 * error).all()
        assert (weights[:, 1:] != 1).all()
    else:
        assert (weights == 1).all()


def test_prune_rate_zero_is_the_identity():
    """Catches a threshold that drops at rate 0, and weights that are almost 1."""
    generator = torch.Generator().manual_seed(0)
    advantages = torch.randn(5, 7, generator=generator, dtype=torch.float64)
    batch = dppo.Completions(advantages, advantages, torch.ones(5, 7), advantages.abs())
    for rule in (rule for rule in UNBIASED if rule != "adaptive"):  # it has no rate
        keep, weights = dppo.prune_completions(rule, 0.0, batch, dppo.generator_for(0))
        assert keep.all()
        assert torch.equal(weights, torch.ones(5, 7, dtype=torch.float64))


# ---------------------------------------------------------------------------- baselines


def test_uniform_removes_the_share():
    """A simple random sample: each completion, and each pair, with its own probability.

    Catches an independent draw, and a systematic one in a fixed order.
    """
    batch = dppo.Completions(*[torch.ones(4, 5, dtype=torch.float64)] * 4)
    kept, together = torch.zeros(4, 5), torch.zeros(20, 20)
    for seed in range(2000):
        generator = dppo.generator_for(seed)
        keep, weights = dppo.prune_completions("uniform", 0.7, batch, generator)
        assert keep.sum() == 6
        assert weights[keep].tolist() == pytest.approx([1 / 0.3] * 6)
        kept += keep
        together += keep.flatten()[:, None] & keep.flatten()
    assert ((kept / 2000 - 0.3).abs() < 4 * math.sqrt(0.3 * 0.7 / 2000)).all()
    pair = 6 * 5 / (20 * 19)
    off = ~torch.eye(20, dtype=torch.bool)
    assert ((together / 2000 - pair).abs()[off] < 5 * math.sqrt(pair * (1 - pair) / 2000)).all()


def test_baselines_by_hand():
    """CPPO keeps floor(G (1 - P)) of a group and takes their mean; its code ranks the whole batch;
    the floor form drops floor(r n_low).

    Catches a rounding that keeps none of 10 at rate 0.9, and ranks within the wrong scope.
    """
    advantages = table([[0.1, -0.9, 0.2, 0.3], [2.0, -1.5, 1.4, 0.4]])
    batch = dppo.Completions(advantages, torch.zeros(2, 4), torch.ones(2, 4), advantages.abs())
    prune = lambda rule, rate: dppo.prune_completions(rule, rate, batch, dppo.generator_for(0))
    keep, weights = prune("cppo", 0.5)
    assert keep.tolist() == [[False, True, False, True], [True, True, False, False]]
    assert weights[keep].tolist() == [2.0] * 4
    keep, weights = prune("cppo_batch", 0.6)
    assert keep.tolist() == [[False] * 4, [True, True, True, False]]
    assert weights[keep].tolist() == pytest.approx([8 / 3] * 3)
    keep, weights = prune("dppo_floor", 0.7)
    # below the means 0.375 and 1.325 are three and one: floor(2.1) and floor(0.7) are dropped
    assert keep.tolist() == [[False, True, False, True], [True, True, True, True]]
    assert weights[0].tolist() == pytest.approx([0, 1, 0, 1 / 0.3])
    assert weights[1].tolist() == pytest.approx([1, 1, 1, 1 / 0.3])
    advantages[0] = 0.0
    batch = dppo.Completions(advantages, torch.zeros(2, 4), torch.ones(2, 4), advantages.abs())
    for rule in ("cppo", "cppo_batch", "pods", "dppo_floor"):
        keep, weights = prune(rule, 0.25)
        assert not keep[0].any(), "a dead group costs no update"
        assert (weights[0] == 0).all()
        assert keep[1].sum() >= 3
    with pytest.raises(ValueError, match="unknown completion rule 'topk': choose one of none, ze"):
        dppo.prune_completions("topk", 0.5, batch, dppo.generator_for(0))


def test_counts_of_the_baselines():
    """Catches counts that rounding makes one too small, ties that do not keep their order, and a
    rate at which nothing is ever trained on."""
    assert rivals.kept_count(10, 0.9) == 1
    with pytest.raises(dppo.RuleError, match=r"-rate 0\.9 keeps 0 of 6 completions, .* 1 or more"):
        rivals.kept_count(6, 0.9)
    keep, weights = rivals.top(torch.ones(2, 50), 20)
    assert keep[:, :20].all()
    assert keep.sum() == 40
    assert weights[keep].tolist() == [2.5] * 40
    for num_low, rate, dropped in ((100, 0.29, 29), (300, 0.21, 63)):  # in float32: 62
        low = torch.cat([torch.zeros(num_low), torch.ones(50)])
        counted = torch.ones(num_low + 50, dtype=torch.bool)
        keep, weights = rivals.floor_of_low(low, counted, rate)
        assert not keep[:dropped].any()
        assert keep[dropped:].all()
        assert weights[[dropped, -1]].tolist() == pytest.approx([1 / (1 - rate), 1])


def test_pods_by_hand():
    """Rewards 1 0 0 0 1 0, 0.2 0.9 0.1 1 and two dead groups. PODS keeps the best i and the worst
    of the rest, as varied as they can be, and normalizes these again. Catches a subset of another
    size, the top alone, the whole group's mean, and a weight that is not the mean over the kept."""
    rewards = torch.tensor([[1.0, 0, 0, 0, 1, 0], [0.2, 0.9, 0.1, 1, 0.5, 0.6], [1] * 6, [0] * 6])
    advantages = dppo.group_advantages(rewards, "group")
    keep, weights = rivals.most_varied(advantages, 3)
    assert keep.sum(dim=1).tolist() == [3] * 4
    assert keep[1].tolist() == [True, False, True, True, False, False]
    assert sorted(rewards[0][keep[0]].tolist()) in ([0, 0, 1], [0, 1, 1])
    for row in (0, 1):
        subset = rewards[row][keep[row]]
        wanted = (subset - subset.mean()) / (subset.std() + 1e-4) * 6 / 3
        got = (weights * advantages)[row][keep[row]]
        assert got.tolist() == pytest.approx(wanted.tolist(), rel=2e-3)
    assert (weights[2:] == 0).all()
    assert (weights[~keep] == 0).all()
    batch = dppo.Completions(advantages, rewards, rewards, advantages.abs())
    with pytest.raises(dppo.RuleError, match=r"keeps 1 of 6 completions, .* 2 or more"):
        rivals.pods(batch, 0.7)  # one reward does not vary


# ---------------------------------------------------------------------------- advantages


def test_advantages_by_hand():
    """Catches the population deviation, the epsilon inside the root, dead groups with rounding
    noise, and an unscorable completion that counts as 0."""
    nan = math.nan
    rewards = table([[1.0, 0, 0, 0], [0.1] * 4, [1, nan, 0, nan], [nan] * 4, [nan, 1, nan, nan]])
    before = rewards.clone()
    got = dppo.group_advantages(rewards, "group")
    assert got[0].tolist() == pytest.approx([0.75 / 0.5001] + [-0.25 / 0.5001] * 3)
    assert got[1].tolist() == [0.0] * 4
    half = 0.5 / (math.sqrt(0.5) + 1e-4)
    assert got[2].tolist() == pytest.approx([half, 0, -half, 0])
    assert got[3].tolist() == [0.0] * 4
    assert got[4].tolist() == [0.0] * 4
    assert dppo.group_advantages(rewards, "none")[0].tolist() == [0.75, -0.25, -0.25, -0.25]
    for loss, entry in dppo.LOSSES.items():
        assert entry.scale_rewards == ("none" if loss == "dr_grpo" else "group")
    assert dppo.dead_groups(rewards).tolist() == [False, True, False, True, True]
    ties = torch.full((1, 6), 0.7, dtype=torch.float64)
    assert ((ties - ties.mean()) != 0).any(), "the mean rounds, so the differences are not 0"
    assert (dppo.group_advantages(ties, "group") == 0).all()
    assert torch.equal(rewards.nan_to_num(9), before.nan_to_num(9)), "arguments are not changed"


# ---------------------------------------------------------------------------- the loss


def surrogate(loss, ratio, advantages, owner, eps_low, eps_high):
    """(values, clipped, gradient), as lists, of token_loss at these ratios."""
    old = torch.full_like(ratio, -1.0)
    logprobs = (old + ratio.log()).requires_grad_()
    options = {"eps_low": eps_low, "eps_high": eps_high, "num_sequences": 9}
    values, clipped = dppo.token_loss(logprobs, old, advantages, owner, loss=loss, **options)
    values.sum().backward()
    return values.tolist(), clipped.tolist(), logprobs.grad.tolist()


def test_token_loss_by_hand():
    """Catches max in place of min, a clip on one side only, a sum in place of GSPO's mean, and a
    CISPO that loses the gradients of clipped tokens."""
    ratio = torch.tensor([1.5, 0.5, 1.5, 0.5, 1.1])
    advantages = torch.tensor([2.0, 2.0, -2.0, -2.0, 1.0])
    batch = (ratio, advantages, torch.tensor([0, 0, 1, 1, 1]))

    values, clipped, gradient = surrogate("dapo", *batch, 0.2, 0.3)
    assert values == pytest.approx([-2.6, -1.0, 3.0, 1.6, -1.1])
    assert clipped == [True, False, False, True, False]
    assert gradient == pytest.approx([0, -1, 3, 0, -1.1])
    values, clipped, gradient = surrogate("cispo", *batch, 0.2, 0.3)
    factors = [-2.6, -1.6, 2.6, 1.6, -1.1]
    logprobs = (ratio.log() - 1).tolist()
    assert values == pytest.approx([f * x for f, x in zip(factors, logprobs, strict=True)])
    assert clipped == [True, True, True, True, False]
    assert gradient == pytest.approx(factors), "clipped, and still a gradient"
    first, second = math.sqrt(0.75), (1.5 * 0.5 * 1.1) ** (1 / 3)
    values, clipped, gradient = surrogate("gspo", *batch, 0.1, 0.1)
    expected = [-2 * first, -2 * first, 2 * second, 2 * second, -second]
    assert values == pytest.approx(expected, rel=1e-5)
    assert clipped == [False, False, False, False, False]
    expected = [-2 * first] * 2 + [second] * 3
    assert gradient == pytest.approx(expected, rel=1e-5), "each token moves the whole sequence"


def test_token_loss_of_short_sequences():
    """In sequences of one token GSPO is GRPO; a pack without tokens has no loss.

    Catches a length of at least 2 in GSPO's mean, and a zero advantage that counts as clipped.
    """
    ratio, advantages = torch.tensor([1.5, 0.5, 1.1]), torch.tensor([2.0, 2.0, 0.0])
    batch = (ratio, advantages, torch.tensor([4, 0, 2]))
    values, clipped, gradient = surrogate("gspo", *batch, 0.2, 0.3)
    assert values == pytest.approx([-2.6, -1.0, 0.0])
    assert clipped == [True, False, False]
    assert gradient == pytest.approx([0, -1, 0])
    for ratio in (0.5, 1.5):
        batch = (torch.tensor([ratio]), torch.zeros(1), torch.tensor([0]))
        assert surrogate("grpo", *batch, 0.2, 0.2)[1] == [False], "an advantage of 0"
    empty = (torch.zeros(0), torch.zeros(0), torch.zeros(0, dtype=torch.long))
    for loss in dppo.LOSSES:
        assert surrogate(loss, *empty, 0.2, 0.3) == ([], [], [])


def test_kl_by_hand():
    """Never negative, even if the two nearly agree. Catches the difference with swapped sign."""
    logprobs, ref = torch.tensor([-1.0, -1.0, -3.0]), torch.tensor([-1.0, -1.00001, -1.0])
    kl = dppo.kl_k3(logprobs, ref)
    assert kl.tolist() == pytest.approx([0, 5e-11, math.e**2 - 3], rel=1e-4)
    assert (kl >= 0).all()


def test_energy_bound():
    """Catches a bound below the exact energy of some softmax. It is tight if all the remaining
    probability is on one token."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(200, 7, generator=generator, dtype=torch.float64) * 3
    probs = logits.softmax(dim=-1)
    onehot = torch.nn.functional.one_hot(torch.arange(200) % 7, 7)
    exact = (onehot - probs).square().sum(dim=-1)
    sampled = probs[torch.arange(200), torch.arange(200) % 7]
    assert (dppo.energy_bound(sampled.log()) >= exact - 1e-12).all()
    assert dppo.energy_bound(torch.tensor(0.25).log()).item() == pytest.approx(2 * 0.75**2)


def test_loss_scale_by_hand():
    """Lengths 1 and T included. Catches swapped denominators, max_new_tokens in grpo, and a
    completion of one token (the end token alone) that gets half its term."""
    counts = {"num_sequences": 8, "max_new_tokens": 100, "num_tokens": 50.0}
    by_length = [1 / 8, 1 / 16, 1 / 32, 1 / 800]
    expected = {
        "grpo": by_length,
        "gspo": by_length,
        "dr_grpo": [1 / 800] * 4,
        "dapo": [1 / 50] * 4,
        "cispo": [1 / 50] * 4,
    }
    for loss in dppo.LOSSES:
        scale = dppo.loss_scale(torch.tensor([[1.0, 2.0, 4.0, 100.0]]), loss, **counts)
        assert scale.tolist() == [expected[loss]]


def test_loss_scale_of_nothing():
    """Catches a division by zero if every completion is masked, or has no token, and a token count
    of 1 that is raised."""
    for loss in ("dapo", "cispo"):
        for num_tokens in (0.0, 1.0):
            counts = {"num_sequences": 2, "max_new_tokens": 4, "num_tokens": num_tokens}
            assert dppo.loss_scale(torch.ones(1, 2), loss, **counts).tolist() == [[1.0, 1.0]]
    counts = {"num_sequences": 2, "max_new_tokens": 4, "num_tokens": 1.0}
    assert dppo.loss_scale(torch.zeros(1, 1), "grpo", **counts).tolist() == [[0.5]]


def test_unknown_loss_is_named():
    """Catches a misspelt loss that silently becomes another one."""
    one = torch.zeros(1)
    counts = {"num_sequences": 2, "max_new_tokens": 4, "num_tokens": 2.0}
    with pytest.raises(ValueError, match="unknown loss 'drgrpo': choose one of grpo, dr_grpo"):
        dppo.loss_scale(torch.ones(1, 2), "drgrpo", num_sequences=2, max_new_tokens=4, num_tokens=1)
    with pytest.raises(ValueError, match="unknown scale_rewards 'std': choose one of none, group"):
        dppo.group_advantages(torch.zeros(1, 2), "std")
    with pytest.raises(ValueError, match="unknown loss 'drgrpo'"):
        dppo.loss_scale(torch.ones(1, 2), "drgrpo", **counts)
    options = {"eps_low": 0.2, "eps_high": 0.2, "num_sequences": 1}
    with pytest.raises(ValueError, match="unknown loss 'drgrpo'"):
        dppo.token_loss(one, one, one, one.long(), loss="drgrpo", **options)


# ---------------------------------------------------------------------------- what to watch


def test_effective_sample_size():
    """Catches a count of the nonzero weights, which ignores their spread."""
    assert metrics.effective_sample_size(torch.tensor([2.0, 2, 0, 0])) == 2
    assert metrics.effective_sample_size(torch.tensor([3.0, 1])) == pytest.approx(1.6)
