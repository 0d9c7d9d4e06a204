"""BranchGRPO's trees (related/trees.py) by enumeration of every tree that a small tabular policy
can sample: what is exact, and what is biased. And their race (related/branch.py)."""

from dataclasses import dataclass
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

import dppo
import proof
from related import branch, trees

# ---------------------------------------------------------------------------- every tree


@dataclass
class Case:
    """Every outcome of a tree of two levels, [M] of them, for a policy of P parameters, float64. An
    edge is a choice of V: at depth 2 it depends on the choice above it, and so does the reward."""

    tree: trees.Tree
    chance: torch.Tensor  # [M]
    scores: torch.Tensor  # [M, N, P], of each edge's choice
    rewards: torch.Tensor  # [M, L]
    by_depth: torch.Tensor  # [2, P], the gradient of the expected reward through each level

    def expected(self, factors):
        """The expected gradient [P], if each edge's score is multiplied by factors [M, N]."""
        return torch.einsum("m,mn,mnp->p", self.chance, factors.double(), self.scores)


def enumerate_trees(V, children):
    tree = trees.grow(children)
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(1 + V, V, generator=generator, dtype=torch.float64, requires_grad=True)
    logprobs = logits.log_softmax(dim=1)  # of the first choice, and of the second after each first
    reward = torch.rand(V, V, generator=generator, dtype=torch.float64)
    mean = (logprobs[0].exp()[:, None] * logprobs[1:].exp() * reward).sum()
    (gradient,) = torch.autograd.grad(mean, logits)
    by_depth = torch.stack([F.pad(gradient[:1], (0, 0, 0, V)), F.pad(gradient[1:], (0, 0, 1, 0))])

    edges = len(tree.parent) - 1
    choice = torch.cartesian_prod(*[torch.arange(V)] * edges)  # [M, edges]
    leaves = slice(children[0], edges)
    above = choice[:, tree.parent[1:][leaves] - 1]  # [M, L]
    row = F.pad(above + 1, (children[0], 0))  # [M, edges], of the logits
    logprobs = logprobs.detach()
    scores = torch.zeros(len(choice), edges + 1, 1 + V, V, dtype=torch.float64)
    score = F.one_hot(choice, V) - logprobs[row].exp()  # [M, edges, V]
    scores[:, 1:] = F.one_hot(row, 1 + V)[..., None] * score[:, :, None]
    chance = logprobs[row, choice].sum(dim=1).exp()
    return Case(tree, chance, scores.flatten(2), reward[above, choice[:, leaves]],
                by_depth.flatten(1))  # fmt: skip


@pytest.fixture(scope="module", params=[(2, 2), (3, 1)], ids=str)
def case(request):
    return enumerate_trees(3, request.param)


def close(got, wanted):
    return proof.relative_error(got, wanted) < 1e-12


def off(got, wanted):
    """Whether the direction is another one, by more than a percent."""
    best = (got @ wanted / (got @ got)).clamp(min=0)
    return proof.relative_error(best * got, wanted) > 0.01


def loo_factors(case):
    """(advantages, factors) [M, N] of the exact form."""
    advantages = trees.loo_advantages(case.tree, trees.node_values(case.tree, case.rewards))
    return advantages, advantages * trees.planned_mean(case.tree)


# ---------------------------------------------------------------------------- the gradient


def test_loo_is_exact(case):
    """The expected gradient is that of the expected reward. Catches a baseline with the node
    in it or from another level, and factors that are not those of the plan."""
    advantages, factors = loo_factors(case)
    assert close(case.expected(factors), case.by_depth.sum(dim=0))
    assert not advantages[:, 0].any()


def test_the_published_advantages_are_biased(case):
    """Before the division by the deviation a depth with n nodes has (n - 1) / n of its gradient.
    With the deviation and the mean over edges, not even the direction is right."""
    values = trees.node_values(case.tree, case.rewards)
    advantages = trees.depth_advantages(case.tree, values)
    for level, wanted in zip(case.tree.levels[1:], case.by_depth, strict=True):
        n = level.stop - level.start
        factors = torch.zeros_like(advantages)
        std = values[:, level].std(dim=1, keepdim=True)
        factors[:, level] = advantages[:, level] * (std + 1e-8) / n
        assert close(case.expected(factors), (n - 1) / n * wanted)
    keep = (case.tree.depth > 0).expand(advantages.shape)
    published = case.expected(advantages * trees.kept_mean(keep))
    assert off(published, case.by_depth.sum(dim=0))


# ---------------------------------------------------------------------------- pruning


def test_two_chains_by_hand():
    """An only child has its parent's baseline, and below the split the first half of each chain
    is kept. Catches a chain whose edges lose their baseline, which would still be unbiased."""
    tree = trees.grow([2, 1, 1])
    values = trees.node_values(tree, torch.tensor([1.0, 4.0]))
    assert trees.loo_advantages(tree, values).tolist() == [0, -3, 3, -3, 3, -3, 3]
    assert trees.width_keep(tree, 1).tolist() == [False] + [True] * 4 + [False] * 2


def test_edges_by_size_are_exact():
    """Every outcome of the draw in every tree. Catches sizes that are 0 where the term is not.
    Without weights, or with a mean over what is kept, it is biased."""
    case = enumerate_trees(2, (2, 2))
    advantages, factors = loo_factors(case)
    planned = trees.planned_mean(case.tree).expand(factors.shape)
    size = dppo.contribution_size(advantages, planned, case.scores.square().sum(dim=-1), 0.0)
    exact, unweighted, over_kept = (torch.zeros_like(factors) for _ in range(3))
    for m, row in enumerate(size[:, None, 1:]):
        batch = dppo.Completions(row, row, torch.ones_like(row), row)
        for keep, weights, chance in proof.outcomes(dppo.COMPLETION_RULES["pps"], 0.5, batch):
            exact[m, 1:] += chance * factors[m, 1:] * weights[0]
            unweighted[m, 1:] += chance * factors[m, 1:] * keep[0]
            over_kept[m, 1:] += chance * advantages[m, 1:] * trees.kept_mean(keep)[0]
    full = case.by_depth.sum(dim=0)
    assert close(case.expected(exact), full)
    assert off(case.expected(unweighted), full)
    assert off(case.expected(over_kept), full)


# ---------------------------------------------------------------------------- the race


class Shift(torch.nn.Module):
    """A velocity of two parameters, the same everywhere."""

    def __init__(self):
        super().__init__()
        self.by = torch.nn.Parameter(torch.tensor([0.3, -0.2]))

    def forward(self, inputs):
        return self.by.expand(len(inputs), 2)


TRAINED = {"grpo": 320, "tree": 218, "tree, half": 138, "exact, edges": 138}


@pytest.mark.parametrize("method", TRAINED)
def test_a_step_of_each_method(method, monkeypatch):
    """So many edges of each tree, and the gradient of the log-probs of the states that were
    sampled, times the factors. Catches noise whose deviation is not that of the log-prob."""
    run = branch.Run(method, 0, Shift())
    run.optimizer = torch.optim.SGD(run.net.parameters(), lr=1.0)
    before = run.net.by.detach().clone()
    update = mock.Mock(wraps=run.update)
    monkeypatch.setattr(run, "update", update)
    run.advance()
    states, factors = update.call_args.args
    assert abs(factors.count_nonzero() - TRAINED[method] * branch.TREES) <= 1
    parent = run.tree.parent
    x, sigma = states[:, parent], 1 - run.tree.depth[parent][:, None] / branch.DEPTHS
    noise = states - branch.next_mean(x, before.expand_as(x), sigma)  # [B, N, 2]
    assert noise[:, 1:].std().item() == pytest.approx(branch.STD, rel=0.05)
    slope = -(1 + 0.5 * branch.NOISE**2 * (1 - sigma) / sigma) / branch.DEPTHS  # d mean / d by
    step = (factors[..., None] * noise / branch.STD**2 * slope).sum(dim=(0, 1)) / branch.TREES
    torch.testing.assert_close(run.net.by.detach() - before, step, atol=1e-4, rtol=1e-3)
