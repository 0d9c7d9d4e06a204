"""Trees of rollouts: counts as published, and the exact forms by enumeration of every tree that a
small tabular language model can sample. Biased twins must fail."""

import functools
import itertools
import json
import math
from dataclasses import dataclass

import pytest
import torch

import dppo
import proof
from bench import branch as world
from related import branch
from runtime import InputError

PUBLISHED = branch.grow(branch.schedule())


# ---------------------------------------------------------------------------- every tree


@dataclass
class Case:
    """Every outcome of a tree of two levels: [M] of them, N nodes, P parameters, float64.

    Its texts have a segment of one token and one of up to two; token 0 ends a text.
    """

    tree: branch.Tree
    chance: torch.Tensor  # [M]
    scores: torch.Tensor  # [M, N, P], of each edge's segment
    logprobs: torch.Tensor  # [M, N]
    rewards: torch.Tensor  # [M, L]
    first: torch.Tensor  # [M, N]: the token of depth 1 on each node's path
    by_depth: torch.Tensor  # [2, P], the gradient of the expected reward through each level

    def expected(self, factors):
        """The expected gradient [P], if each edge's score is multiplied by factors [M, N]."""
        return torch.einsum("m,mn,mnp->p", self.chance, factors.double(), self.scores)


@functools.cache
def enumerate_trees(V, children):
    generator = torch.Generator().manual_seed(0)
    states = [(), *itertools.product(range(1, V)), *itertools.product(range(1, V), repeat=2)]
    logits = torch.randn(len(states), V, generator=generator, dtype=torch.float64)
    rows = logits.log_softmax(dim=-1)

    def segment(prefix, tokens):  # (log-prob, score [P])
        score = torch.zeros(len(states), V, dtype=torch.float64)
        total = 0.0
        for place, token in enumerate(tokens):
            row = states.index(prefix + tokens[:place])
            total += rows[row, token].item()
            score[row] -= rows[row].exp()
            score[row, token] += 1
        return total, score.flatten()

    ends = {a: [(b, c) for b in range(1, V) for c in range(V)] + [(0,)] for a in range(1, V)}
    ends[0] = [()]
    texts = [(a, end) for a in range(V) for end in ends[a]]
    reward = dict(zip(texts, torch.rand(len(texts), generator=generator).tolist(), strict=True))
    found = {text: (segment((), text[:1]), segment(text[:1], text[1])) for text in texts}
    chances = [math.exp(found[text][0][0] + found[text][1][0]) for text in texts]
    by_depth = torch.stack([
        sum(p * reward[text] * found[text][d][1] for p, text in zip(chances, texts, strict=True))
        for d in (0, 1)
    ])  # fmt: skip
    b1, b2 = children
    subtrees = [(a, below) for a in range(V) for below in itertools.product(ends[a], repeat=b2)]
    outcomes = list(itertools.product(subtrees, repeat=b1))
    pieces = [
        [segment((), (a,)) for a, _ in tops] + [found[a, e][1] for a, ends in tops for e in ends]
        for tops in outcomes
    ]
    root = torch.zeros(len(outcomes), 1, dtype=torch.float64)
    logprobs = torch.tensor([[piece[0] for piece in row] for row in pieces], dtype=torch.float64)
    scores = torch.stack([torch.stack([piece[1] for piece in row]) for row in pieces])
    paths = [[a for a, _ in tops] + [a for a, e in tops for _ in e] for tops in outcomes]
    rewards = [[reward[a, e] for a, below in tops for e in below] for tops in outcomes]
    return Case(
        branch.grow(children),
        logprobs.sum(dim=1).exp(),
        torch.cat([root[..., None].expand(-1, 1, scores.shape[-1]), scores], dim=1),
        torch.cat([root, logprobs], dim=1),
        torch.tensor(rewards, dtype=torch.float64),
        torch.cat([root, torch.tensor(paths)], dim=1),
        by_depth,
    )


@pytest.fixture(scope="module", params=[(2, 2), (3, 1)], ids=str)
def case(request):
    found = enumerate_trees(3, request.param)
    assert found.chance.sum() == pytest.approx(1, abs=1e-12)
    return found


def close(got, wanted):
    return proof.relative_error(got, wanted) < 1e-12


def off(got, wanted):
    """Off by more than a percent, whatever the length: a common factor would not matter."""
    best = (got @ wanted / (got @ got)).clamp(min=0)
    return proof.relative_error(best * got, wanted) > 0.01


# ---------------------------------------------------------------------------- the published tree


def test_counts():
    """As in the paper and its code. Catches evaluations per edge, and a split one step late."""
    found = branch.counts(PUBLISHED)
    assert found == {"nodes": 219, "edges": 218, "leaves": 16, "evaluations": 203}
    assert found["nodes"] / 16 == pytest.approx(13.68, abs=0.01)
    sizes = [level.stop - level.start for level in PUBLISHED.levels]
    assert sizes == [1] + [2] * 3 + [4] * 3 + [8] * 3 + [16] * 11
    independent = branch.counts(branch.grow([16] + [1] * 19))
    assert independent == {"nodes": 321, "edges": 320, "leaves": 16, "evaluations": 305}


def test_index_tensors():
    """By hand. Catches parents of the wrong level, and siblings that are cousins."""
    tree = branch.grow([2, 1, 2])
    assert tree.parent.tolist() == [0, 0, 0, 1, 2, 3, 3, 4, 4]
    assert tree.depth.tolist() == [0, 1, 1, 2, 2, 3, 3, 3, 3]
    assert tree.family.tolist() == [0, 1, 1, 2, 3, 4, 4, 5, 5]


@pytest.mark.parametrize("children", [(), (2, 0), (-1,)])
def test_impossible_trees(children):
    with pytest.raises(InputError, match="at least 1"):
        branch.grow(children)


@pytest.mark.parametrize("splits", [(0, 20), (-1,)])
def test_impossible_splits(splits):
    with pytest.raises(InputError, match="0 to 19"):
        branch.schedule(20, splits)


def test_node_values():
    """Catches a root that is not the mean of its leaves, and a value of another branch."""
    rewards = torch.rand(3, 16, dtype=torch.float64)
    values = branch.node_values(PUBLISHED, rewards)
    torch.testing.assert_close(values[:, 0], rewards.mean(dim=1))
    for depth, number in ((1, 2), (5, 4), (9, 8), (20, 16)):
        means = rewards.view(3, number, -1).mean(dim=2)
        torch.testing.assert_close(values[:, PUBLISHED.levels[depth]], means)


def test_softmax_shares():
    """By hand. Catches a softmax over a depth in place of siblings, and one that overflows."""
    tree = branch.grow([2, 2])
    logprobs = torch.tensor([0, -1.0, -2.0, -900.0, -901.0, 0.0, 0.0])
    shares = branch.softmax_shares(tree, logprobs)
    values = branch.node_values(tree, torch.tensor([1.0, 0.0, 0.0, 0.5]), shares)
    likely = 1 / (1 + math.exp(-1))
    wanted = [likely * likely + (1 - likely) * 0.25, likely, 0.25, 1, 0, 0, 0.5]
    torch.testing.assert_close(values, torch.tensor(wanted))


def test_depth_advantages():
    """Catches sums that are not 0 at a depth, another deviation, and a mean over the whole tree."""
    shares = branch.softmax_shares(PUBLISHED, torch.randn(3, 219, dtype=torch.float64))
    values = branch.node_values(PUBLISHED, torch.rand(3, 16, dtype=torch.float64), shares)
    advantages = branch.depth_advantages(PUBLISHED, values)
    for level in PUBLISHED.levels:
        torch.testing.assert_close(advantages[:, level].sum(dim=1), torch.zeros(3).double())
    level = PUBLISHED.levels[7]
    std, mean = torch.std_mean(values[:, level], dim=1, keepdim=True)
    torch.testing.assert_close(advantages[:, level], (values[:, level] - mean) / (std + 1e-8))
    assert advantages[:, 1:3].abs().allclose(torch.tensor(0.5).sqrt().double(), atol=1e-4)


def test_depth_advantages_at_the_edges():
    """Catches a lone node, or equal rewards, that get rounding errors, and a missing limit of 5."""
    tree = branch.grow([1, 40])
    rewards = torch.zeros(40)
    rewards[0] = 1.0
    advantages = branch.depth_advantages(tree, branch.node_values(tree, rewards))
    assert advantages[:3].tolist() == [0, 0, 5]
    same = branch.node_values(PUBLISHED, 0.1 + 1e-8 * torch.rand(16))
    assert not branch.depth_advantages(PUBLISHED, same).any()


# ---------------------------------------------------------------------------- the gradient


@pytest.mark.parametrize("baseline", ["siblings", "others"])
def test_loo_is_exact(case, baseline):
    """The expected gradient is that of the expected reward. Catches a baseline with the node's own
    leaves in it, one from another level, and factors that are not those of the plan."""
    values = branch.node_values(case.tree, case.rewards)
    advantages = branch.loo_advantages(case.tree, values, baseline, scale=0.25)
    factors = 0.25 * advantages * branch.planned_mean(case.tree)
    assert branch.planned_mean(case.tree)[0] == 0
    assert close(case.expected(factors), case.by_depth.sum(dim=0))
    assert not advantages[:, 0].any()


def test_loo_reduces_variance():
    """Catches a baseline that is always 0: exact too, but noisier."""
    case = enumerate_trees(3, (2, 2))
    values = branch.node_values(case.tree, case.rewards + 1)
    advantages = {b: branch.loo_advantages(case.tree, values, b) for b in ("siblings", "others")}
    noise = {name: (case.chance @ a.square()).sum().item() for name, a in advantages.items()}
    assert max(noise.values()) < 0.2 * (case.chance @ values[:, 1:].square()).sum().item()
    assert noise["siblings"] != pytest.approx(noise["others"], rel=0.01)


def test_an_only_child_has_its_parents_baseline():
    """By hand. Catches a chain whose edges lose their baseline."""
    tree = branch.grow([2, 1, 1])
    values = branch.node_values(tree, torch.tensor([1.0, 4.0]))
    for baseline in ("siblings", "others"):
        found = branch.loo_advantages(tree, values, baseline)
        assert found.tolist() == [0, -3, 3, -3, 3, -3, 3]
    lone = branch.grow([1, 2])
    values = branch.node_values(lone, torch.tensor([1.0, 4.0]))
    found = branch.loo_advantages(lone, values, "siblings")
    assert found.tolist() == [0, 2.5, -3, 3]


def test_own_mean_shrinks_each_depth(case):
    """The published baseline, before its division by the deviation: (n - 1) / n of the gradient of
    a depth with n nodes, a hidden weighting of depths. With the deviation and the mean over edges,
    not even the direction is right."""
    values = branch.node_values(case.tree, case.rewards)
    advantages = branch.depth_advantages(case.tree, values)
    for d, wanted in zip((1, 2), case.by_depth, strict=True):
        level = case.tree.levels[d]
        n = level.stop - level.start
        factors = torch.zeros_like(advantages)
        std = values[:, level].std(dim=1, keepdim=True)
        factors[:, level] = advantages[:, level] * (std + 1e-8) / n
        assert close(case.expected(factors), (n - 1) / n * wanted)
    keep = (case.tree.depth > 0).expand(advantages.shape)
    published = case.expected(advantages * branch.kept_mean(keep))
    assert off(published, case.by_depth.sum(dim=0))


def test_softmax_is_biased():
    """Children were drawn by their probability already."""
    case = enumerate_trees(3, (2, 2))
    shares = branch.softmax_shares(case.tree, case.logprobs)
    values = branch.node_values(case.tree, case.rewards, shares)
    advantages = branch.loo_advantages(case.tree, values, "siblings")
    factors = advantages * branch.planned_mean(case.tree)
    assert off(case.expected(factors), case.by_depth.sum(dim=0))


def test_branching_after_the_fact_is_biased():
    """Two tokens, and a second rollout that leaves the first one at its most surprising token, or
    at a token that was chosen before."""
    generator = torch.Generator().manual_seed(2)
    logits = 2 * torch.randn(4, 3, generator=generator, dtype=torch.float64)  # [], and after each
    p = logits.softmax(dim=-1)
    reward = torch.rand(3, 3, generator=generator, dtype=torch.float64)

    def score(row, token):
        found = torch.zeros(4, 3, dtype=torch.float64)
        found[row] = torch.eye(3, dtype=torch.float64)[token] - p[row]
        return found.flatten()

    tokens = list(itertools.product(range(3), repeat=2))
    whole = [score(0, a) + score(1 + a, b) for a, b in tokens]
    chance = [(p[0, a] * p[1 + a, b]).item() for a, b in tokens]
    full = sum(c * reward[t] * s for c, t, s in zip(chance, tokens, whole, strict=True))
    early, late = branch.grow([2]), branch.grow([1, 2])
    found = {rule: torch.zeros(12).double() for rule in ("first", "second", "surprise")}
    for (one, (a, b)), (two, (c, d)) in itertools.product(enumerate(tokens), repeat=2):
        at_second = {"first": False, "second": True, "surprise": p[1 + a, b] < p[0, a]}
        for rule, second in at_second.items():
            if second and a != c:
                continue  # the second rollout begins with the first one's token
            tree, scores = early, [whole[one], whole[two]]
            probability = chance[one] * chance[two]
            if second:
                tree, scores = late, [score(0, a), score(1 + a, b), score(1 + a, d)]
                probability = chance[one] * p[1 + a, d].item()
            values = branch.node_values(tree, torch.stack([reward[a, b], reward[c, d]]))
            factors = branch.loo_advantages(tree, values, "siblings") * branch.planned_mean(tree)
            found[rule] += probability * (factors[1:] @ torch.stack(scores))
    assert close(found["first"], full)
    assert close(found["second"], full)
    assert off(found["surprise"], full)


# ---------------------------------------------------------------------------- pruning, published


def test_width_prunings():
    """138 edges are left. "half" keeps the first half of every chain, because its advantages tie.
    Catches another order, a rule that reaches above the last split, and quarters of each depth."""
    rewards = torch.rand(2, 16, dtype=torch.float64)
    advantages = branch.depth_advantages(PUBLISHED, branch.node_values(PUBLISHED, rewards))
    late = PUBLISHED.depth > 10
    chains = advantages[:, late].view(2, 10, 16)
    assert (chains == chains[:, :1]).all()
    half = branch.width_keep(PUBLISHED, advantages, 10, "half")
    assert half.sum(dim=1).tolist() == [138, 138]
    wanted = ((PUBLISHED.depth > 0) & (PUBLISHED.depth <= 15)).expand(2, -1)
    assert half.equal(wanted)
    quarters = branch.width_keep(PUBLISHED, advantages, 10, "quarters")
    assert quarters.sum(dim=1).tolist() == [138, 138]
    assert quarters[:, (PUBLISHED.depth > 0) & ~late].all()
    assert not quarters[:, 0].any()
    ranked = rewards.argsort(dim=1)
    wanted = torch.zeros(2, 16, dtype=torch.bool)
    wanted.scatter_(1, torch.cat([ranked[:, :4], ranked[:, 12:]], dim=1), True)
    assert quarters[:, late].view(2, 10, 16).equal(wanted[:, None].expand(2, 10, 16))


def test_width_half_ranks_within_a_chain():
    """On advantages that do not tie, by hand. Catches a rank across chains, and the worst half."""
    tree = branch.grow([2, 1, 1])
    advantages = torch.tensor([0, 0.1, 0.2, 5.0, 1.0, 6.0, 0.5])
    keep = branch.width_keep(tree, advantages, 1, "half")
    assert keep.tolist() == [False, True, True, False, True, True, False]
    with pytest.raises(InputError, match="still splits"):
        branch.width_keep(PUBLISHED, torch.zeros(219), 9, "half")
    with pytest.raises(ValueError, match="quarters"):
        branch.width_keep(PUBLISHED, torch.zeros(219), 10, "thirds")


def test_depth_pruning():
    """138 edges are left. Catches a window one depth too long, and one that slides down."""
    keep = branch.depth_keep(PUBLISHED, branch.slide(0, 20, 5), 5)
    assert keep.sum() == 138
    assert sorted(set(PUBLISHED.depth[keep].tolist())) == list(range(1, 16))
    first = [branch.slide(step, 20, 5) for step in (0, 29, 30, 59, 60, 180, 209, 210, 9999)]
    assert first == [16, 16, 15, 15, 14, 10, 10, 9, 9]
    assert branch.slide(0, 20, 14) == branch.slide(99, 20, 14) == 7
    assert branch.slide(10, 20, 5, stop=12, interval=2) == 12
    dropped = set(PUBLISHED.depth[~branch.depth_keep(PUBLISHED, 12, 3)].tolist())
    assert dropped == {0, 12, 13, 14}


def test_kept_mean():
    """Catches a mean over all edges, and a tree without any that is divided by 0."""
    keep = torch.tensor([[False, True, True], [False, False, False]])
    assert branch.kept_mean(keep).tolist() == [[0, 0.5, 0.5], [0, 0, 0]]


# ---------------------------------------------------------------------------- pruning, exact


def loo_factors(case):
    values = branch.node_values(case.tree, case.rewards)
    advantages = branch.loo_advantages(case.tree, values, "siblings")
    return advantages, advantages * branch.planned_mean(case.tree)


def test_edges_by_size_are_exact():
    """Every outcome of the draw in every tree. Catches sizes that are 0 where the term is not; the
    twins without weights, and with a mean over what is kept, are biased."""
    case = enumerate_trees(2, (2, 2))
    advantages, factors = loo_factors(case)
    planned = branch.planned_mean(case.tree).expand(factors.shape)
    size = dppo.contribution_size(advantages, planned, case.scores.square().sum(dim=-1), 0.0)
    size = size[:, 1:]
    exact, keeps, means = (torch.zeros_like(factors) for _ in range(3))
    for m, row in enumerate(size):
        one = row[None]
        batch = dppo.Completions(one, one, torch.ones_like(one), one)
        for keep, weights, chance in proof.outcomes("pps", 0.5, batch):
            exact[m, 1:] += chance * factors[m, 1:] * weights[0]
            keeps[m, 1:] += chance * factors[m, 1:] * keep[0]
            means[m, 1:] += chance * advantages[m, 1:] * branch.kept_mean(keep)[0]
    full = case.by_depth.sum(dim=0)
    assert close(case.expected(exact), full)
    assert off(case.expected(keeps), full)
    assert off(case.expected(means), full)


def test_draw():
    """Catches weights that are not 1 / probability, and a rate upside down or of another cost."""
    size = torch.tensor([[1.0, 2.0, 0.0, 9.0], [1.0, 1.0, 3.0, 3.0]]).double()
    cost = torch.tensor([[1.0, 1.0, 1.0, 1.0], [4.0, 1.0, 1.0, 1.0]]).double()
    keep_prob = dppo.pps_keep_prob(size, cost, 0.3 * 11)
    generator = dppo.generator_for(0)
    drawn = [branch.draw(size, cost, 0.7, generator) for _ in range(400)]
    for keep, weights in drawn:
        torch.testing.assert_close(weights, keep / keep_prob.clamp(min=1e-9))
    share = torch.stack([keep for keep, _ in drawn]).double().mean(dim=0)
    torch.testing.assert_close(share, keep_prob, atol=0.12, rtol=0)
    assert (keep_prob * cost).sum().item() == pytest.approx(3.3)


def test_random_window_is_exact(case):
    """Over every start. Twins without weights, and with the published fixed window, are biased."""
    advantages, factors = loo_factors(case)
    drawn = [branch.random_window(case.tree, 0, 1, torch.tensor([s])) for s in (0, 1)]
    full = case.by_depth.sum(dim=0)
    assert close(sum(case.expected(factors * weights) for _, weights in drawn) / 2, full)
    unweighted = sum(case.expected(factors * keep) for keep, _ in drawn) / 2
    assert proof.relative_error(unweighted, full) > 0.4
    published = branch.kept_mean(branch.depth_keep(case.tree, first=2, window=1))
    assert off(case.expected(advantages * published), full)


def test_random_window_of_the_published_tree():
    """138 edges are left, always, and weights average to 1. Catches a window that does not wrap,
    one that reaches the splits, and a draw that all trees share."""
    keep, weights = branch.random_window(PUBLISHED, 10, 5, torch.arange(10))
    assert keep.sum(dim=1).tolist() == [138] * 10
    torch.testing.assert_close(weights.mean(dim=0)[1:], torch.ones(218).double())
    assert not keep[:, 0].any()
    assert keep[:, 1 : PUBLISHED.levels[11].start].all()
    assert len({tuple(row) for row in keep.tolist()}) == 10
    kept = sorted(set(PUBLISHED.depth[keep[8]].tolist()) - set(range(11)))
    assert kept == [11, 12, 13, 19, 20]
    for window in (0, 11):
        with pytest.raises(InputError, match="1 to 10"):
            branch.random_window(PUBLISHED, 10, window, torch.zeros(1))


def roulette_outcomes(case):
    """Every draw of the roulette at the root and at depth 1, by the tokens so far: (weights [M, N],
    keep [M, N], probability [M])."""
    keep_prob = torch.where(case.tree.depth == 1, 0.3 + 0.25 * case.first, 1.0)
    keep_prob[:, 0] = 0.6
    places = [0, *range(*case.tree.levels[1].indices(99))]
    for bits in itertools.product((0.0, 1.0), repeat=len(places)):
        keep = torch.ones_like(keep_prob)
        keep[:, places] = torch.tensor(bits).double()
        chance = torch.where(keep > 0, keep_prob, 1 - keep_prob)[:, places].prod(dim=1)
        yield keep / keep_prob, keep, chance


@pytest.mark.parametrize("baseline", ["siblings", "others"])
@pytest.mark.parametrize("guessed", [0.0, 1.0])
def test_roulette_is_exact(case, baseline, guessed):
    """Branches that stop before they are rolled out. Catches weights that miss an edge below or a
    value above, and looking at rewards that do not exist. Twins without weights, and with a mean
    over what is left, are biased."""
    guess = guessed * (0.2 + 0.3 * case.first)  # from what was known at the draw
    found = {"exact": 0.0, "no weights": 0.0, "mean over kept": 0.0}
    for weights, keep, chance in roulette_outcomes(case):
        above = branch.branch_weights(case.tree, weights)
        below = (above * weights)[:, case.tree.parent[case.tree.levels[-1]]] > 0
        rewards = torch.where(below, case.rewards, 1e6)
        left = keep.clone()
        level = case.tree.levels[1]
        n = level.stop - level.start
        left[:, level] *= n / keep[:, level].sum(dim=1, keepdim=True).clamp(min=1)
        tries = {"exact": (weights, guess), "no weights": (keep, 0), "mean over kept": (left, 0)}
        for name, (own, thought) in tries.items():
            values = branch.node_values(case.tree, rewards, None, own, thought)
            advantages = branch.loo_advantages(case.tree, values, baseline, own)
            assert not advantages[above == 0].any()
            factors = advantages * branch.planned_mean(case.tree)
            found[name] = found[name] + case.expected(chance[:, None] * factors)
    full = case.by_depth.sum(dim=0)
    assert close(found["exact"], full)
    assert off(found["no weights"], full)
    assert off(found["mean over kept"], full)


def test_a_branch_that_stops_is_worth_its_guess():
    """By hand. Catches a guess that is left out, which is exact too, but far noisier."""
    tree = branch.grow([2, 1])
    weights = torch.tensor([1.0, 0.0, 2.0, 1.0, 1.0])
    guess = torch.tensor([0.0, 0.5, 0.25, 0.0, 0.0])
    values = branch.node_values(tree, torch.tensor([9.0, 1.0]), None, weights, guess)
    assert values[:3].tolist() == [(0.5 + 1.75) / 2, 0.5, 0.25 + 2 * (1 - 0.25)]


# ---------------------------------------------------------------------------- texts


def test_token_edges():
    """Training every text with weight 1 / L is training every edge once. Catches a cut one token
    off, and another leaf's path."""
    tree = branch.grow([2, 1, 2])
    edges = branch.token_edges(tree, (2, 3), 5)
    assert edges.tolist() == [
        [1, 1, 3, 5, 5], [1, 1, 3, 6, 6], [2, 2, 4, 7, 7], [2, 2, 4, 8, 8],
    ]  # fmt: skip
    advantages = torch.rand(9, dtype=torch.float64)
    lengths = torch.tensor([0, 2, 2, 1, 1, 2, 2, 2, 2])
    by_edge = (branch.planned_mean(tree) * lengths * advantages).sum()
    torch.testing.assert_close(advantages[edges].sum() / 4, by_edge)
    assert branch.token_edges(branch.grow([4]), (), 2).tolist() == [[1, 1], [2, 2], [3, 3], [4, 4]]


@pytest.mark.parametrize("cuts", [(2,), (3, 2), (0, 2), (2, 2), (1, 2, 3)])
def test_impossible_cuts(cuts):
    with pytest.raises(InputError, match="need 2 rising"):
        branch.token_edges(branch.grow([2, 1, 2]), cuts, 5)


# ---------------------------------------------------------------------------- two dimensions


class Shift(torch.nn.Module):
    """A velocity of two parameters, the same everywhere."""

    def __init__(self):
        super().__init__()
        self.by = torch.nn.Parameter(torch.tensor([0.3, -0.2]))

    def forward(self, inputs):
        return self.by.expand(len(inputs), 2)


@pytest.mark.parametrize(
    ("method", "sampled", "trained"),
    [("grpo", 305, 320), ("tree", 203, 218), ("tree, half", 203, 138), ("tree, quarters", 203, 138),
     ("tree, depth", 203, 138), ("exact", 203, 218), ("exact, window", 203, 138),
     ("exact, edges", 203, 138), ("grpo, edges", 305, 138), ("exact, roulette", 131, 138)],
)  # fmt: skip
def test_a_step_of_each_method(method, sampled, trained):
    """Evaluations as planned, noise of the log-prob's own deviation at every edge, and the gradient
    of the log-probs of the states that were sampled, times the factors."""
    run = world.Run(method, 0, Shift())
    run.optimizer = torch.optim.SGD(run.net.parameters(), lr=1.0)
    before = run.net.by.detach().clone()
    parts = {}
    roll_out, factors = run.roll_out, run.factors
    run.roll_out = lambda: parts.setdefault("rollout", roll_out())
    run.factors = lambda *rollout: parts.setdefault("factors", factors(*rollout))
    run.advance()
    assert run.sampled == sampled * world.TREES
    assert abs(run.trained - trained * world.TREES) <= 1
    states, noise, weights, _ = parts["rollout"]
    tree, factor = run.tree, parts["factors"].float()
    sigma = 1 - (tree.depth[1:, None] - 1) / world.DEPTHS
    mean = world.next_mean(states[:, tree.parent[1:]], before, sigma)
    rolled_out = branch.branch_weights(tree, weights)[:, 1:] > 0
    moved = (states[:, 1:] - mean)[rolled_out]
    torch.testing.assert_close(moved, world.STD * noise[:, 1:][rolled_out], atol=1e-5, rtol=0)
    slope = -(1 + 0.5 * world.NOISE**2 * (1 - sigma) / sigma) / world.DEPTHS  # d mean / d velocity
    step = (factor[:, 1:, None] * noise[:, 1:] / world.STD * slope).sum(dim=(0, 1)) / world.TREES
    torch.testing.assert_close(run.net.by.detach() - before, step, atol=1e-4, rtol=1e-4)
    assert not factor[:, 1:][~rolled_out].any()


def test_the_size_of_an_edge_is_its_gradient(monkeypatch):
    """With respect to the velocity. Catches an energy that leaves out what the step multiplies it
    by, five times as much at the end as at the beginning."""
    run = world.Run("exact, edges", 0, Shift())
    sizes = []
    draw = branch.draw
    monkeypatch.setattr(branch, "draw", lambda size, *rest: sizes.append(size) or draw(size, *rest))
    states, noise, weights, guess = run.roll_out()
    run.factors(states, noise, weights, guess)
    values = branch.node_values(run.tree, world.reward(states[:, run.tree.levels[-1]]))
    advantages = branch.loo_advantages(run.tree, values, "siblings")
    sigma = 1 - (run.tree.depth - 1) / world.DEPTHS
    v = torch.zeros(world.TREES, 219, 2, requires_grad=True)
    mean = world.next_mean(torch.zeros_like(noise), v, sigma[:, None])
    terms = advantages * branch.planned_mean(run.tree) * (noise * mean).sum(dim=-1)
    (gradient,) = torch.autograd.grad(terms.sum(), v)
    norm = gradient.norm(dim=-1)[:, 1:]
    ratio = (sizes[0] / norm)[norm > 0.2 * norm.mean()]  # above the floor
    torch.testing.assert_close(ratio, ratio[:1].expand_as(ratio), rtol=1e-4, atol=0)


def test_roulette_of_a_rollout():
    """Catches a guess on another scale than the values, and a mean over what was not rolled out."""
    run = world.Run("exact, roulette", 0, Shift())
    run.mean = 0.5
    states, noise, weights, guess = run.roll_out()
    level = run.tree.levels[world.LAST_SPLIT]
    clean = states[:, level] - 0.5 * run.net.by.detach()
    torch.testing.assert_close(guess[:, level], world.reward(clean) - 0.5)
    assert weights[:, level].unique().tolist() == [0, 2]
    run.factors(states, noise, weights, guess)
    rolled_out = branch.branch_weights(run.tree, weights)[:, run.tree.levels[-1]] > 0
    rewards = world.reward(states[:, run.tree.levels[-1]])[rolled_out]
    assert (run.mean, run.std) == pytest.approx((rewards.mean().item(), rewards.std().item()))


def test_the_sampler_keeps_the_flows_marginals():
    """On Gaussian data the velocity is known: a stochastic step leaves the same spread as the
    flow's. Catches a drift with the wrong sign or strength."""
    spread = lambda sigma: (1 - sigma) ** 2 + sigma**2  # variance at noise level sigma
    for depth in (0, 7, 18):
        sigma = torch.tensor(1 - depth / world.DEPTHS, dtype=torch.float64)
        x = torch.tensor([[1.0, -2.0]], dtype=torch.float64)
        v = x * (2 * sigma - 1) / spread(sigma)
        score = -x / spread(sigma)
        wanted = x + (0.5 * world.NOISE**2 * score - v) / world.DEPTHS
        torch.testing.assert_close(world.next_mean(x, v, sigma), wanted)


def test_the_race(tmp_path, capsys, monkeypatch):
    """Two steps. Catches runs of one seed that share a model, and a column of another method."""
    monkeypatch.setattr(world, "samples", functools.partial(world.samples, number=64))
    world.main(steps=2, seeds=(1, 2), pretraining=5, json_file=tmp_path / "rows.json")
    content = json.loads((tmp_path / "rows.json").read_text())
    assert [row["method"] for row in content["curves"]] == [*world.METHODS] * 2
    assert all([point[0] for point in row["curve"]] == [0, 2] for row in content["curves"])
    assert len({row["curve"][0][-1] for row in content["curves"]}) == 1
    assert len({row["curve"][1][-1] for row in content["curves"]}) > 15
    assert len(content["tree"][0]) == 219
    shown = capsys.readouterr().out
    assert all(method in shown for method in world.METHODS)


def test_table():
    """On made-up curves. Catches a ratio upside down, and evaluations that leave out training."""
    curve = lambda slow: [[0, 0.0, 0, 0, 0.5], [2, slow, 30, 10, 0.7], [4, 2 * slow, 60, 20, 1.1]]
    assert world.spent(curve(1.0)) == pytest.approx((3, 1.5, 60))
    assert math.isnan(world.spent(curve(1.0)[:2])[0])
    rows = [{"method": m, "curve": curve(2.0 if m == "grpo" else 1.0)} for m in world.METHODS]
    lines = world.table(rows).splitlines()
    assert " ".join(lines[-1].split()[2:]) == (
        "3.0 1.50 (0.50, 0.50 to 0.50) 60 (1.00, 1.00 to 1.00) 1.100 (1.100 to 1.100)"
    )
