"""The estimator: optimal probabilities, exact draws, and every formula against numbers by hand.

Hypothesis searches for the batch that breaks a property; BY_HAND has the numbers.
"""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import dppo
import proof
from related import rivals

UNBIASED = ("none", "nonzero", "uniform", "dppo", "pps", "adaptive")
DROP_ZEROS = ("nonzero", "pps", "adaptive")  # they never keep a term that is exactly 0
NAN = math.nan
settings.register_profile("repeatable", max_examples=40, deadline=None, derandomize=True)
settings.load_profile("repeatable")


def table(rows):
    return torch.tensor(rows, dtype=torch.float64)


def batch_of(rewards, scale_rewards="group", scale=1.0, beta=0.0):
    """Completions [K, G] from their rewards; costs and energies differ."""
    rewards = table(rewards)
    steps = 1.0 + torch.arange(rewards.numel(), dtype=torch.float64).view(rewards.shape) % 5
    advantages = dppo.group_advantages(rewards, scale_rewards)
    size = dppo.contribution_size(advantages, scale * torch.ones_like(rewards), steps, beta)
    cost = 3 * steps
    return dppo.Completions(advantages, rewards, cost, size)


# ---------------------------------------------------------------------------- properties

SIZES = st.lists(st.sampled_from([0.0, 1e-20, 1e-3, 0.5, 1.0, 3.0, 40.0]), min_size=1, max_size=12)


@given(SIZES, st.floats(0.001, 0.999) | st.just(1.0), st.integers(0, 40))
@example([0.0, 0.0], 1.0, 7)
@example([0.0, 1e20, 0.0], 0.25, 7)
@example([3.0, 0.0, 1e-12], 1.0, 7)
def test_pps_is_optimal(sizes, share, step):
    """The KKT conditions, which are sufficient: the problem is convex. Catches one round of
    saturation, a / c for a / sqrt(c), and a budget that counts terms of size 0."""
    size, cost = table(sizes), 1.0 + step * torch.arange(len(sizes)).double() % 41
    live, everything = size > 0, cost[table(sizes) > 0].sum().item()
    p = dppo.pps_keep_prob(size, cost, share * everything)
    assert torch.equal(p > 0, live)
    assert (p <= 1).all()
    assert (p * cost).sum().item() == pytest.approx(share * everything, rel=1e-9)
    assert share < 1 or torch.equal(p, live.double()), "exactly 1"
    price = (size / p).square()[live] / cost[live]  # variance that one more token would save
    inner = p[live] < 1
    if inner.any():
        assert price[inner].tolist() == pytest.approx([price[inner][0].item()] * int(inner.sum()))
        assert (price[~inner] >= price[inner][0] * (1 - 1e-9)).all()


@pytest.mark.parametrize("rule", UNBIASED)
@given(
    st.lists(st.lists(st.sampled_from([0, 0.5, 1, NAN]), min_size=3, max_size=3), min_size=1,
             max_size=4),
    st.sampled_from([0.0, 0.00005, 0.3, 0.6, 0.9, 0.999]), st.sampled_from([0.0, 0.1]),
)  # fmt: skip
@example([[1, 0, 0], [0, 0, 0], [0, 0, 0]], 0.7, 0.0)  # the budget of pps covers all live terms
@example([[NAN] * 3, [1] * 3], 0.6, 0.0)  # nothing is live
def test_mean_weights_are_1(rule, groups, rate, beta):
    """By enumeration, wherever the term is not exactly 0; what is really drawn is one of the
    outcomes; at rate 0 it is the identity. Catches weights that are not 1 / P(kept), a live term
    that is never kept, NaN for dead or unscorable groups, and rounding in a draw."""
    scale = torch.ones(len(groups), 3)
    scale[0, 2] = 0.0  # masked
    batch = batch_of(groups, scale=scale, beta=beta)
    outcomes = [*proof.outcomes(dppo.COMPLETION_RULES[rule], rate, batch)]
    mean = sum(chance * weights for _, weights, chance in outcomes)
    wanted = batch.live.double() if rule in DROP_ZEROS else torch.ones_like(mean)
    assert (mean - wanted).abs().max() < 1e-9
    keep, weights = dppo.prune_completions(rule, rate, batch, dppo.generator_for(len(groups)))
    if rule != "uniform":  # its order is random, and `outcomes` has one order
        assert any(torch.equal(keep, k) and torch.equal(weights, w) for k, w, _ in outcomes)
    assert torch.equal(weights > 0, keep)
    has_rate = dppo.COMPLETION_RULES[rule].rate is not None
    assert rate > 0 or not has_rate or torch.equal(weights, wanted)


# Near 0 and near 1, too. Sums are exact in float64, so that an interval's ends are where they seem.
PARTS = st.sampled_from([0.0, 2**-40, 2**-20, 0.25, 0.5, 1 - 2**-20, 1 - 2**-40, 1.0])


@given(st.lists(PARTS, max_size=9), st.integers(0, 2**20 - 1), st.permutations(range(9)))
@example([2**-60, 1.0, 1.0, 0.5], 0, [*range(9)])  # 2^-60 + 1 is 1: no whole unit is left
def test_systematic(parts, start, order):
    """Against exact fractions: i is kept if its interval holds a point start + k. Catches an order
    that is applied twice or not undone, points that miss an interval, and ends that are rounded."""
    order = [i for i in order if i < len(parts)]
    start, wanted, end = Fraction(start, 2**20), [False] * len(parts), Fraction(0)
    for i in order:
        begin, end = end, end + Fraction(parts[i])
        wanted[i] = math.ceil(begin - start) + start < end
    keep = dppo.systematic(table(parts), torch.tensor(order, dtype=torch.long), float(start))
    assert keep.tolist() == wanted


# ---------------------------------------------------------------------------- draws


def test_random_numbers():
    """All 128 bits of Philox's key vary, and uniform is a simple random sample: each pair has its
    probability. Catches keys that collide, and a systematic draw in a fixed order."""
    keys = [dppo.generator_for(0, step, "keep").bit_generator.state for step in range(200)]
    words = np.array([state["state"]["key"] for state in keys])  # [200, 2] of 64 bits
    assert np.bitwise_or.reduce(words).tolist() == [2**64 - 1] * 2
    assert np.bitwise_and.reduce(words).tolist() == [0, 0]
    batch, generator = batch_of([[1, 0, 0, 0, 0]] * 4), dppo.generator_for(0)
    kept = [dppo.prune_completions("uniform", 0.7, batch, generator)[0] for _ in range(400)]
    together = sum(keep.flatten()[:, None].int() * keep.flatten() for keep in kept)
    pair, off = 6 * 5 / (20 * 19), ~torch.eye(20, dtype=torch.bool)
    assert {int(keep.sum()) for keep in kept} == {6}
    assert ((together / 400 - pair).abs()[off] < 5 * math.sqrt(pair * (1 - pair) / 400)).all()


# ---------------------------------------------------------------------------- numbers by hand


def threshold(scores, rate, counted=True):
    scores = table(scores)
    return dppo.threshold_keep_prob(scores, torch.tensor(counted).expand(scores.shape), rate)


def size(beta, energy):
    factor = table([0.5, 0.5, 0.5, 0.0, 0.5])  # the fourth is masked
    return dppo.contribution_size(table([1, -2, 0, 1, 1]), factor, table(energy), beta)


def weights(rule, rate, advantages):
    batch = dppo.Completions(*[table(advantages)] * 3, table(advantages).abs())
    return dppo.prune_completions(rule, rate, batch, dppo.generator_for(0))[1]


def pods(rewards):
    """The advantages [1, 6] that PODS trains on, three of them."""
    advantages = dppo.group_advantages(table([rewards]), "none")
    keep, found = rivals.most_varied(advantages, 3)
    assert int(keep.sum()) == 3
    return found * advantages


papers_rule = lambda *rewards: dppo.COMPLETION_RULES["dppo"].keep_prob(
    batch_of(rewards, "none"), 0.5
)
group = lambda *rewards: dppo.group_advantages(table([rewards]), "group")
scale = lambda loss, lengths, tokens=50.0: dppo.loss_scale(
    table(lengths), loss, num_sequences=8, max_new_tokens=100, num_tokens=tokens
)
A = [[0.1, -0.9, 0.2, 0.3], [2, -1.5, 1.4, 0.4]]
DEAD = [[0.0] * 4, A[1]]
BY_RANK = ("cppo", "cppo_batch", "pods", "dppo_floor")
BATCH = batch_of([[1, 0, 1, 0], [1, 1, 1, 1]])
PPS = dppo.COMPLETION_RULES["pps"]
HALF = 0.5 / (0.5**0.5 + 1e-4)
THIRD = 2 / 3 / (3**-0.5 + 1e-4)

BY_HAND = {  # what it says: the call, what it must give; an exact 0 must be exact
    "a tie up to rounding is kept": (lambda: threshold([1 - 4e-7, 1 + 4e-7], 0.25), [1, 1]),
    "2e-6 is no tie": (lambda: threshold([1 - 2e-6, 1 + 2e-6], 0.25), [0.75, 1]),
    "the mean is of what counts": (
        lambda: threshold([0.6, 0.3, 0.4, 0], 0.5, [True] * 3 + [False]), [1, 0.5, 0.5, 0.5]),
    "the mean is of the group, not of the batch or the unscorable": (
        lambda: papers_rule([1, 0, 0, NAN, NAN, NAN], [0, 0, 0, 0, 0, 1], [NAN] * 6),
        [1] + [0.5] * 10 + [1] + [1] * 6),
    "sizes have length, energy, a floor": (
        lambda: size(0.0, [4, 1, 9, 1, 0]), [1, 1, 0, 0, 0.03 * 2 / 3]),
    "sizes have beta": (
        lambda: size(0.1, [4, 1, 9, 1, 0]), [1.1, 1.05, 0.15, 0, 0.03 * 2.3 / 4]),
    "sizes never underflow": (lambda: size(0.0, [0] * 5), [1e-30, 1e-30, 0, 0, 1e-30]),
    "pps spends its share of all tokens, dead ones included": (
        lambda: [(PPS.keep_prob(BATCH, 0.6) * BATCH.cost).sum()], [63 * 0.4]),
    "strata: by prompt, then by size": (
        lambda: dppo.strata_order(dppo.Completions(*[table([[3, 2, 0], [4, 6, 5]])] * 4)),
        [2, 1, 0, 3, 5, 4]),
    "cppo": (lambda: weights("cppo", 0.5, A), [0, 2, 0, 2, 2, 2, 0, 0]),
    "cppo_batch": (lambda: weights("cppo_batch", 0.6, A), [0] * 4 + [8 / 3] * 3 + [0]),
    # below the means 0.375 and 1.325 are three and one: floor(2.1) and floor(0.7) are dropped
    "dppo_floor": (
        lambda: weights("dppo_floor", 0.7, A), [0, 1, 0, 1 / 0.3, 1, 1, 1, 1 / 0.3]),
    "a dead group costs no update": (
        lambda: [weights(rule, 0.25, DEAD)[0].sum() for rule in BY_RANK], [0] * 4),
    "ties keep their order": (
        lambda: rivals.top(torch.ones(2, 5), 2)[1], [2.5, 2.5, 0, 0, 0] * 2),
    "of 10 at rate 0.9 one is kept": (lambda: [rivals.kept_count(10, 0.9)], [1]),
    "pods: one right, two wrong": (
        lambda: pods([1, 0, 0, 0, 1, 0]).sort()[0], [-THIRD, -THIRD, 0, 0, 0, 2 * THIRD]),
    "pods: a dead group": (lambda: pods([1] * 6), [0] * 6),
    "advantages: sample deviation + 1e-4": (
        lambda: group(1, 0, 0, 0), [0.75 / 0.5001] + [-0.25 / 0.5001] * 3),
    "advantages: unscorable ones do not count": (
        lambda: group(1, NAN, 0, NAN), [HALF, 0, -HALF, 0]),
    "advantages: dead groups, whose means round": (
        lambda: [*group(*[0.1] * 6)[0], *group(*[0.7] * 6, NAN)[0]], [0] * 13),
    "advantages: one is scored, or none": (
        lambda: [*group(NAN, 1, NAN)[0], *group(NAN, NAN)[0]], [0] * 5),
    "advantages: none": (lambda: dppo.group_advantages(table([[1, 0]]), "none"), [0.5, -0.5]),
    "advantages: only dr_grpo's are not divided": (
        lambda: [one.scale_rewards == "group" for one in dppo.LOSSES.values()], [1, 0, 1, 1, 1]),
    "clips are the papers'": (
        lambda: [one.clip for one in dppo.LOSSES.values()],
        [0.2, 0.2, 0.2, 0.2, 0.2, 0.28, 3e-4, 4e-4, 1, 4]),
    "energies: their bound": (lambda: dppo.energy_bound(table([0.25, 1]).log()), [1.125, 0]),
    "kl is never negative": (
        lambda: dppo.kl_k3(table([-1, -1, -3]), table([-1, -1.00001, -1])),
        [0, 5e-11, math.e**2 - 3]),
    "scales by own length": (
        lambda: [*scale("grpo", [1, 2, 0]), *scale("gspo", [4])], [1 / 8, 1 / 16, 1 / 8, 1 / 32]),
    "scales of a constant": (lambda: scale("dr_grpo", [1, 2]), [1 / 800] * 2),
    "scales by tokens": (
        lambda: [*scale("dapo", [1, 2]), *scale("cispo", [1, 0])], [1 / 50] * 4),
    "no token, one token": (lambda: [*scale("dapo", [1], 0), *scale("cispo", [1], 1)], [1, 1]),
}  # fmt: skip


@pytest.mark.parametrize("name", BY_HAND)
def test_by_hand(name):
    call, wanted = BY_HAND[name]
    found = torch.as_tensor(call()).flatten().tolist()
    assert found == pytest.approx(wanted, rel=1e-5, abs=0)


ROOT, CUBE = math.sqrt(0.75), (1.5 * 0.5 * 1.1) ** (1 / 3)  # GSPO's ratios of the two sequences
RATIOS, SIGNS, OWNER = [1.5, 0.5, 1.5, 0.5, 1.1], [2.0, 2, -2, -2, 1], [0, 0, 1, 1, 1]
CISPO = [-2.6, -1.6, 2.6, 1.6, -1.1]
LOSSES = [  # loss, ratios, advantages, owners, clip; values, clipped, gradients by log-prob
    ("dapo", RATIOS, SIGNS, OWNER, (0.2, 0.3),
     [-2.6, -1, 3, 1.6, -1.1], [1, 0, 0, 1, 0], [0, -1, 3, 0, -1.1]),
    ("cispo", RATIOS, SIGNS, OWNER, (0.2, 0.3),
     [f * (math.log(r) - 1) for f, r in zip(CISPO, RATIOS, strict=True)], [1, 1, 1, 1, 0], CISPO),
    ("gspo", RATIOS, SIGNS, OWNER, (0.1, 0.1),
     [-2 * ROOT] * 2 + [2 * CUBE] * 2 + [-CUBE], [0] * 5, [-2 * ROOT] * 2 + [CUBE] * 3),
    ("gspo", [1.5, 0.5, 1.1], [2, 2, 0], [4, 0, 2], (0.2, 0.3),  # of one token: GRPO
     [-2.6, -1, 0], [1, 0, 0], [0, -1, 0]),
    ("grpo", [0.5, 1.5], [0, 0], [0, 1], (0.2, 0.2), [0, 0], [0, 0], [0, 0]),
    *((loss, [], [], [], (0.2, 0.3), [], [], []) for loss in dppo.LOSSES),
]  # fmt: skip


@pytest.mark.parametrize(
    ("loss", "ratio", "advantages", "owner", "clip", "values", "clipped", "gradient"), LOSSES
)
def test_token_loss(loss, ratio, advantages, owner, clip, values, clipped, gradient):
    """Catches max for min, a clip on one side only, a sum for GSPO's mean, and a CISPO that loses
    the gradients of clipped tokens."""
    old = torch.full((len(ratio),), -1.0, dtype=torch.float64)
    logprobs = (old + table(ratio).log()).requires_grad_()
    clips = {"eps_low": clip[0], "eps_high": clip[1], "num_sequences": 9}
    owner = torch.tensor(owner, dtype=torch.long)
    losses, acts = dppo.token_loss(logprobs, old, table(advantages), owner, loss=loss, **clips)
    losses.sum().backward()
    assert losses.tolist() == pytest.approx(values)
    assert acts.int().tolist() == clipped
    assert logprobs.grad.tolist() == pytest.approx(gradient)


def test_an_order_is_a_permutation():
    """Catches a draw in which a place is missing."""
    with pytest.raises(dppo.RuleError, match="needs each of 3 places once in order"):
        dppo.systematic(torch.ones(3), torch.tensor([0, 1, 1]), 0.5)
