"""The estimator's parts by hand: keep probabilities, draws, advantages, losses, the running check."""

import math

import pytest
import torch

import baselines
import dppo
import proof


def table(rows):
    return torch.tensor(rows, dtype=torch.float64)


# ---------------------------------------------------------------------------- probabilities and draws


def random_instance(generator, n=40):
    """Sizes over four orders of magnitude, some of them 0, costs, and a budget."""
    size = torch.rand(n, generator=generator, dtype=torch.float64).mul(8).sub(6).exp()
    size[torch.rand(n, generator=generator) < 0.1] = 0.0
    cost = torch.randint(5, 60, (n,), generator=generator).double()
    share = 0.02 + 0.96 * torch.rand((), generator=generator).item()
    return size, cost, share * cost[size > 0].sum().item()


def variance(keep_prob, size):
    there = size > 0
    return ((1 / keep_prob[there] - 1) * size[there].square()).sum().item()


def at_cost(keep_prob, cost, live, budget):
    """The same probabilities scaled, and capped at 1, until they cost `budget`."""
    low, high = 1e-12, 1e12
    for _ in range(100):
        middle = math.sqrt(low * high)
        if (keep_prob * middle).clamp(max=1)[live] @ cost[live] < budget:
            low = middle
        else:
            high = middle
    return (keep_prob * low).clamp(max=1)


def test_water_filling_is_optimal():
    """KKT conditions and cost on 1,000 random instances, and no other rule of that cost has less variance. Kills: one
    round of saturation, a / c for a / sqrt(c), a budget of what is not live."""
    generator = torch.Generator().manual_seed(0)
    saturated = compared = 0
    for _ in range(1000):
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
        rivals = [
            torch.ones_like(size),
            p * (1 + 0.2 * torch.rand(size.shape, generator=generator, dtype=torch.float64)),
            size / size[live].mean(),
            torch.where(size >= size[live].mean(), 1.0, 0.1).double(),
        ]
        for rival in rivals:
            q = at_cost(rival, cost, live, budget)
            compared += (q[live] @ cost[live]).item() == pytest.approx(budget, rel=1e-6)
            assert best <= variance(q, size) * (1 + 1e-6)
    assert saturated > 1000, "the instances saturate"
    assert compared > 3900, "nearly every rival reaches the cost"


def test_water_filling_with_room_for_all():
    """Kills: a probability above 1, a division by zero where everything is kept or nothing counts."""
    size, cost = table([3.0, 0.0, 1e-12]), table([4.0, 5.0, 6.0])
    assert dppo.pps_keep_prob(size, cost, 10.0).tolist() == [1, 0, 1]
    assert dppo.pps_keep_prob(torch.zeros(3), cost, 0.0).tolist() == [0, 0, 0]


def test_systematic_draw():
    """Inclusion within 4 standard errors, size constant where the sum is an integer, exact by enumeration. Kills: an
    order applied twice or not undone, a sure one lost by rounding, points that miss the first interval."""
    generator = torch.Generator().manual_seed(1)
    p = torch.rand(2, 10, generator=generator, dtype=torch.float64)
    p[0, 3], p[1, 4], p[1, 5] = 1.0, 0.0, 1.0
    p[0, 0] = 0.0
    p[0, 0] = 1 - p.sum() % 1
    size = round(p.sum().item())
    assert p.sum().item() == pytest.approx(size, abs=1e-12)
    order = torch.randperm(20, generator=generator)
    starts = torch.rand(20_000, generator=generator, dtype=torch.float64).tolist()
    kept = torch.stack([dppo.systematic(p, order, start) for start in starts]).double()
    assert ((kept.mean(0) - p).abs() <= 4 * (p * (1 - p) / len(starts)).sqrt()).all()
    assert (kept.sum(dim=(1, 2)) == size).all()
    exact = sum(chance * keep.double() for keep, chance in proof.systematic_outcomes(p, order))
    assert (exact - p).abs().max() < 1e-12
    stretch = kept.flatten(1)[:, order[5:12]].sum(dim=1)
    share = p.flatten()[order[5:12]].sum()
    assert ((stretch - share).abs() < 1).all(), "each stretch of the order gets its share, to within one"
    half = dppo.systematic(table([0.5, 0.5, 0.25, 0.5]), torch.arange(4), 0.0)
    assert half.tolist() == [True, False, True, False], "[0, 0.5) holds 0 and [1, 1.25) holds 1"


def test_pps_draws_are_fresh_and_ordered():
    """pps is the systematic draw with this generator's number, by prompt and size. Kills: one number every time, an
    order that mixes prompts."""
    batch = dppo.Completions(
        advantages=table([[-1, 1, -1], [1, -1, -1]]), rewards=table([[0, 1, 0], [1, 0, 0]]),
        cost=torch.full((2, 3), 4), size=table([[3, 2, 0], [4, 6, 5]]),
    )  # fmt: skip
    assert dppo.strata_order(batch.size).tolist() == [2, 1, 0, 3, 5, 4]
    generator = torch.Generator().manual_seed(0)
    drawn = {tuple(dppo.prune_completions("pps", 0.5, batch, generator)[0].flatten().tolist()) for _ in range(50)}
    expected = {tuple(keep.flatten().tolist()) for keep, _, p in proof.outcomes("pps", 0.5, batch) if p > 1e-9}
    assert drawn == expected
    assert len(drawn) > 3
    keep, weights = dppo.prune_completions("pps", 0.5, batch, generator)
    keep_prob = dppo.completion_keep_prob("pps", 0.5, batch)
    assert torch.equal(weights, torch.where(keep, 1 / keep_prob, 0.0))
    assert (keep_prob * batch.cost).sum().item() == pytest.approx(12.0), "1 - r_o of all tokens, the dead one's too"


def test_pps_drops_what_is_zero_first():
    """A budget of 30 % of the tokens, of which 25 % are live: these are all kept, at weight 1. Kills: a share of the
    live tokens."""
    size = torch.zeros(4, 4, dtype=torch.float64)
    size[1] = table([1, 2, 3, 40])
    batch = dppo.Completions(size, size, torch.full((4, 4), 7), size)
    keep, weights = dppo.prune_completions("pps", 0.7, batch, torch.Generator().manual_seed(0))
    assert torch.equal(keep, size > 0)
    assert torch.equal(weights, (size > 0).double())


def test_uniform_removes_the_share():
    """A simple random sample: each with its chance, and each pair with its own. Kills: an independent draw, a
    systematic one in a fixed order."""
    batch = dppo.Completions(*[torch.ones(4, 5, dtype=torch.float64)] * 4)
    kept, together = torch.zeros(4, 5), torch.zeros(20, 20)
    for seed in range(2000):
        keep, weights = baselines.prune_completions("uniform", 0.7, batch, torch.Generator().manual_seed(seed))
        assert keep.sum() == 6
        assert weights[keep].tolist() == pytest.approx([1 / 0.3] * 6)
        kept += keep
        together += keep.flatten()[:, None] & keep.flatten()
    assert ((kept / 2000 - 0.3).abs() < 4 * math.sqrt(0.3 * 0.7 / 2000)).all()
    pair = 6 * 5 / (20 * 19)
    off = ~torch.eye(20, dtype=torch.bool)
    assert ((together / 2000 - pair).abs()[off] < 5 * math.sqrt(pair * (1 - pair) / 2000)).all()


def test_contribution_size():
    """Kills: the length's or the prompt's factor left out, an underflow that drops for good, a dead group dropped with
    KL, a masked one kept."""
    advantages, scale = table([[1.0, -2, 0, 1, 1]]), table([[0.5, 0.5, 0.5, 0.0, 0.5]])
    energy = table([[4.0, 1, 9, 1, 0]])
    size = dppo.contribution_size(advantages, scale, energy, 0.0)
    assert size[0, :4].tolist() == pytest.approx([1, 1, 0, 0])
    assert size[0, 4].item() == pytest.approx(dppo.SIZE_FLOOR * 2 / 3), "floored, not dropped"
    with_kl = dppo.contribution_size(advantages, scale, energy, 0.1)
    assert with_kl[0, :4].tolist() == pytest.approx([1.1, 1.05, 0.15, 0])
    peaked = dppo.contribution_size(advantages, scale, torch.zeros(1, 5), 0.0)
    assert ((peaked > 0) == (scale * advantages != 0)).all(), "not even where all of them underflow"
    assert (dppo.contribution_size(torch.zeros(1, 5), scale, energy, 0.0) == 0).all()


def test_rivals_by_hand():
    """CPPO keeps floor(G (1 - P)) of a group and takes the mean over them; its code ranks the whole batch; the floor
    form drops floor(r n_low). Kills: a rounding that keeps none of 10 at 0.9, ranks within the wrong scope."""
    advantages = table([[0.1, -0.9, 0.2, 0.3], [2.0, -1.5, 1.4, 0.4]])
    batch = dppo.Completions(advantages, torch.zeros(2, 4), torch.ones(2, 4), advantages.abs())
    results = {
        rule: baselines.prune_completions(rule, rate, batch, torch.Generator())
        for rule, rate in (("cppo", 0.5), ("cppo_batch", 0.6), ("dppo_floor", 0.7))
    }
    keep, weights = results["cppo"]
    assert keep.tolist() == [[False, True, False, True], [True, True, False, False]]
    assert weights[keep].tolist() == [2.0] * 4
    keep, weights = results["cppo_batch"]
    assert keep.tolist() == [[False] * 4, [True, True, True, False]]
    assert weights[keep].tolist() == pytest.approx([8 / 3] * 3)
    keep, weights = results[
        "dppo_floor"
    ]  # below the means 0.375 and 1.325: three and one; floor(2.1) and floor(0.7) go
    assert keep.tolist() == [[False, True, False, True], [True, True, True, True]]
    assert weights[0].tolist() == pytest.approx([0, 1, 0, 1 / 0.3])
    assert weights[1].tolist() == pytest.approx([1, 1, 1, 1 / 0.3])
    assert baselines.kept_count(10, 0.9) == 1
    assert baselines.allocated_prompts(32, 16, 0.75) == 128
    assert baselines.allocated_prompts(32, 16, 0.7) == 128, "4 of 16 are kept"
    with pytest.raises(ValueError, match="unknown completion rule 'topk'"):
        baselines.prune_completions("topk", 0.5, batch, torch.Generator())
    with pytest.raises(ValueError, match="unknown completion rule 'topk': choose one of none, zero, dppo, pps"):
        dppo.prune_completions("topk", 0.5, batch, torch.Generator())


@pytest.mark.parametrize("size", [3, 4, 5, 7])
@pytest.mark.parametrize("rate", [0.3, 0.5, 0.9])
def test_small_groups_have_exact_probabilities(size, rate):
    """Groups of 5 and their like, where floor(r n) of 3 is far from r: what is kept of a group, times its weight,
    averages to the group. Kills: rounding in the draw."""
    rewards = table([[1.0] + [0.0] * (size - 1)])
    advantages = dppo.group_advantages(rewards, "grpo")
    batch = dppo.Completions(advantages, rewards, torch.ones(1, size), advantages.abs())
    generator, draws = torch.Generator().manual_seed(0), 4000
    total = torch.zeros(1, size, dtype=torch.float64)
    for _ in range(draws):
        total += dppo.prune_completions("dppo", rate, batch, generator)[1]
    error = math.sqrt(rate / (1 - rate) / draws)  # of a mean of weights, each 0 or 1 / (1 - r)
    assert total[0, 0] == draws
    assert ((total / draws - 1).abs()[0, 1:] < 4 * error).all()


def test_draws_have_their_probabilities():
    """Within 4 standard errors, independent. Kills: probabilities that are off by 0.02, one number for all."""
    keep_prob = torch.tensor([1.0, 0.7, 0.3, 0.05], dtype=torch.float64)
    draws = 20_000
    kept = dppo.draw(keep_prob.expand(draws, 4), torch.Generator().manual_seed(0)).double()
    error = (keep_prob * (1 - keep_prob) / draws).sqrt()
    assert ((kept.mean(0) - keep_prob).abs() <= 4 * error).all()
    assert (kept[:, 0] == 1).all()
    assert torch.corrcoef(kept[:, 1:3].T)[0, 1].abs() < 0.03, "draws are independent"


def test_prune_rate_zero_is_the_identity():
    """Kills: a threshold that drops at rate 0, weights that are almost 1."""
    advantages = torch.randn(5, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    batch = dppo.Completions(advantages, advantages, torch.ones(5, 7), advantages.abs())
    for rule in dppo.COMPLETION_RULES:
        keep, weights = dppo.prune_completions(rule, 0.0, batch, torch.Generator().manual_seed(0))
        assert keep.all()
        assert torch.equal(weights, torch.ones(5, 7, dtype=torch.float64))


def test_advantages_by_hand():
    """Kills: the population deviation, the epsilon inside the root, dead groups with rounding noise, None as 0."""
    nan = math.nan
    rewards = torch.tensor([[1.0, 0, 0, 0], [0.1, 0.1, 0.1, 0.1], [1, nan, 0, nan], [nan] * 4], dtype=torch.float64)
    before = rewards.clone()
    got = dppo.group_advantages(rewards, "grpo")
    assert got[0].tolist() == pytest.approx([0.75 / 0.5001, -0.25 / 0.5001, -0.25 / 0.5001, -0.25 / 0.5001])
    assert got[1].tolist() == [0.0] * 4
    half = 0.5 / (math.sqrt(0.5) + 1e-4)
    assert got[2].tolist() == pytest.approx([half, 0, -half, 0])
    assert got[3].tolist() == [0.0] * 4
    assert dppo.group_advantages(rewards, "dr_grpo")[0].tolist() == [0.75, -0.25, -0.25, -0.25]
    assert dppo.dead_groups(rewards).tolist() == [False, True, False, True]
    ties = torch.full((1, 6), 0.7, dtype=torch.float64)
    assert ((ties - ties.mean()) != 0).any(), "the mean rounds, so the differences are not 0"
    assert (dppo.group_advantages(ties, "grpo") == 0).all()
    assert torch.equal(rewards.nan_to_num(9), before.nan_to_num(9)), "arguments are not written to"


def test_ties_at_the_mean_are_kept():
    """At pass rate 1/2 all |A| are equal up to rounding: nothing is below the mean. Kills: no margin."""
    rewards = torch.tensor([[1.0, 0, 1, 0, 0, 1]], dtype=torch.float64)
    advantages = dppo.group_advantages(rewards, "grpo") * (1 + 1e-15 * torch.arange(6, dtype=torch.float64))
    assert (dppo.threshold_keep_prob(advantages.abs(), ~rewards.isnan(), 0.9) == 1).all()


def test_mean_is_of_the_group_and_of_scorable_completions():
    """Kills: a batch-wide mean, unscorable completions (|A| = 0) pulling the mean down."""
    nan = math.nan
    rewards = torch.tensor([[1.0, 0, 0, nan, nan, nan], [0, 0, 0, 0, 0, 1]], dtype=torch.float64)
    advantages = dppo.group_advantages(rewards, "dr_grpo")
    keep_prob = dppo.completion_keep_prob("dppo", 0.5, dppo.Completions(advantages, rewards, *[torch.ones(2, 6)] * 2))
    # group 0: |A| 2/3, 1/3, 1/3 and zeros; the mean of the three is 4/9, of all six 2/9, of the batch 1/4
    assert keep_prob.tolist() == [[1, 0.5, 0.5, 0.5, 0.5, 0.5], [0.5] * 5 + [1]]


def test_token_loss_by_hand():
    """Kills: max for min, the clip on one side only, a sum for GSPO's mean, a CISPO that loses clipped gradients."""
    ratio = torch.tensor([1.5, 0.5, 1.5, 0.5, 1.1])
    advantages = torch.tensor([2.0, 2.0, -2.0, -2.0, 1.0])
    owner, old = torch.tensor([0, 0, 1, 1, 1]), torch.full((5,), -1.0)

    def of(loss, eps_low=0.2, eps_high=0.3):
        logprobs = (old + ratio.log()).requires_grad_()
        values, clipped = dppo.token_loss(
            logprobs, old, advantages, owner, loss=loss, eps_low=eps_low, eps_high=eps_high
        )
        values.sum().backward()
        return values.tolist(), clipped.tolist(), logprobs.grad.tolist()

    values, clipped, gradient = of("dapo")
    assert values == pytest.approx([-2.6, -1.0, 3.0, 1.6, -1.1])
    assert clipped == [True, False, False, True, False]
    assert gradient == pytest.approx([0, -1, 3, 0, -1.1])
    values, clipped, gradient = of("cispo")
    assert values == pytest.approx([-1.3 * 2 * x for x in (-1 + math.log(1.5),)] + [-0.8 * 2 * (-1 + math.log(0.5)),
        1.3 * 2 * (-1 + math.log(1.5)), 0.8 * 2 * (-1 + math.log(0.5)), -1.1 * (-1 + math.log(1.1))])  # fmt: skip
    assert clipped == [True, True, True, True, False]
    assert gradient == pytest.approx([-2.6, -1.6, 2.6, 1.6, -1.1]), "clipped, and still a gradient"
    first, second = math.sqrt(0.75), (1.5 * 0.5 * 1.1) ** (1 / 3)
    values, clipped, gradient = of("gspo", 0.1, 0.1)
    assert values == pytest.approx([-2 * first, -2 * first, 2 * second, 2 * second, -second], rel=1e-5)
    assert clipped == [False, False, False, False, False]
    assert gradient == pytest.approx([-2 * first] * 2 + [second] * 3, rel=1e-5), "each token moves the whole sequence"


def test_kl_by_hand():
    """Never negative, also where the two nearly agree. Kills: the difference the other way round."""
    logprobs, ref = torch.tensor([-1.0, -1.0, -3.0]), torch.tensor([-1.0, -1.00001, -1.0])
    kl = dppo.kl_k3(logprobs, ref)
    assert kl.tolist() == pytest.approx([0, 5e-11, math.e**2 - 3], rel=1e-4)
    assert (kl >= 0).all()


def test_energy_bound():
    """Above the exact energy for any softmax, equal to it where all the rest is on one token."""
    logits = torch.randn(200, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 3
    probs = logits.softmax(dim=-1)
    exact = (torch.nn.functional.one_hot(torch.arange(200) % 7, 7) - probs).square().sum(dim=-1)
    sampled = probs[torch.arange(200), torch.arange(200) % 7]
    assert (dppo.energy_bound(sampled.log()) >= exact - 1e-12).all()
    assert dppo.energy_bound(torch.tensor(0.25).log()).item() == pytest.approx(2 * 0.75**2)


def test_loss_scale_by_hand():
    """Kills: the denominators swapped, max_new_tokens in grpo."""
    counts = {"num_sequences": 8, "max_new_tokens": 100, "num_tokens": 50.0}
    wanted = {"grpo": [1 / 16, 1 / 32], "gspo": [1 / 16, 1 / 32], "dr_grpo": [1 / 800] * 2, "dapo": [1 / 50] * 2,
              "cispo": [1 / 50] * 2}  # fmt: skip
    for loss in dppo.LOSSES:
        assert dppo.loss_scale(torch.tensor([[2.0, 4.0]]), loss, **counts).tolist() == [wanted[loss]]


def test_running_check_formula():
    """Unbiased estimates leave bias2 and scale at 0 on average, weights times 0.9 do not. Kills: a square that holds
    the variance, a variance that holds the square, a sum over the draws for their mean."""
    generator = torch.Generator().manual_seed(0)
    full = torch.randn(500, generator=generator)
    rows = {1.0: [], 0.9: []}
    for _ in range(400):
        some = [full + torch.randn(500, generator=generator) for _ in range(3)]
        for factor, found in rows.items():
            check = dppo.check_unbiased(full, (factor * one for one in some))
            found.append([check["check/bias2"], check["check/variance"], check["check/scale"]])
    right, twin = (torch.tensor(rows[factor]) for factor in (1.0, 0.9))
    error = right.std(dim=0) / 20
    assert (right.mean(dim=0)[[0, 2]].abs() < 3 * error[[0, 2]]).all()
    assert right.mean(dim=0)[1].item() == pytest.approx(500 / full.square().sum().item(), rel=0.05)
    assert torch.allclose(twin[:, 1], 0.81 * right[:, 1], rtol=1e-3), "a bias is no variance"
    assert twin.mean(dim=0)[0].item() == pytest.approx(0.01, abs=4 * error[0].item())
    assert twin.mean(dim=0)[2].item() == pytest.approx(-0.1, abs=4 * error[2].item())


def test_unknown_loss_is_named():
    """Kills: a misspelt loss that is silently the other one."""
    with pytest.raises(ValueError, match="unknown loss 'drgrpo': choose one of grpo, dr_grpo"):
        dppo.group_advantages(torch.zeros(1, 2), "drgrpo")
    with pytest.raises(ValueError, match="unknown loss 'drgrpo'"):
        dppo.loss_scale(torch.ones(1, 2), "drgrpo", num_sequences=2, max_new_tokens=4, num_tokens=2.0)


def test_effective_sample_size():
    assert dppo.effective_sample_size(torch.tensor([2.0, 2, 0, 0])) == 2
    assert dppo.effective_sample_size(torch.tensor([3.0, 1])) == pytest.approx(1.6)
