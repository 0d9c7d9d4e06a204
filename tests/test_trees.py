"""BranchGRPO's trees (related/trees.py) by enumeration of every tree that a small tabular language
model can sample: what is exact, and what is biased. And their race (related/branch.py)."""

import functools
import itertools
import json
import math
from dataclasses import dataclass

import pytest
import torch

import dppo
import proof
from related import branch, trees

PUBLISHED = trees.grow(trees.schedule())


# ---------------------------------------------------------------------------- every tree


@dataclass
class Case:
    """Every outcome of a tree of two levels: [M] of them, N nodes, P parameters, float64.

    Its texts have a segment of one token and one of up to two; token 0 ends a text.
    """

    tree: trees.Tree
    chance: torch.Tensor  # [M]
    scores: torch.Tensor  # [M, N, P], of each edge's segment
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
        trees.grow(children),
        logprobs.sum(dim=1).exp(),
        torch.cat([root[..., None].expand(-1, 1, scores.shape[-1]), scores], dim=1),
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


def loo_factors(case):
    """(advantages, factors) [M, N] of the exact form."""
    advantages = trees.loo_advantages(case.tree, trees.node_values(case.tree, case.rewards))
    return advantages, advantages * trees.planned_mean(case.tree)


# ---------------------------------------------------------------------------- the gradient


def test_loo_is_exact(case):
    """The expected gradient is that of the expected reward. Catches a baseline with the node's own
    leaves in it, one from another level, and factors that are not those of the plan."""
    advantages, factors = loo_factors(case)
    assert close(case.expected(factors), case.by_depth.sum(dim=0))
    assert not advantages[:, 0].any()


def test_an_only_child_has_its_parents_baseline():
    """By hand. Catches a chain whose edges lose their baseline, which would still be unbiased."""
    tree = trees.grow([2, 1, 1])
    values = trees.node_values(tree, torch.tensor([1.0, 4.0]))
    assert trees.loo_advantages(tree, values).tolist() == [0, -3, 3, -3, 3, -3, 3]


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


def test_published_prunings():
    """Each leaves 138 of 218 edges. The width rule keeps the first half of every chain, because its
    advantages tie."""
    rewards = torch.rand(2, 16, dtype=torch.float64)
    advantages = trees.depth_advantages(PUBLISHED, trees.node_values(PUBLISHED, rewards))
    half = trees.width_keep(PUBLISHED, advantages, 10)
    assert half.equal(((PUBLISHED.depth > 0) & (PUBLISHED.depth <= 15)).expand(2, -1))
    first = [trees.slide(step, 20, 5) for step in (0, 29, 30, 59, 60, 180, 209, 210, 9999)]
    assert first == [16, 16, 15, 15, 14, 10, 10, 9, 9]
    depth = trees.depth_keep(PUBLISHED, 12, 3)
    assert sorted({*range(21)} - {*PUBLISHED.depth[depth].tolist()}) == [0, 12, 13, 14]


def test_the_best_edges_of_each_chain():
    """By hand: two chains of two edges below the split. Catches the worst ones, and a ranking over
    chains."""
    tree = trees.grow([2, 1, 1])
    advantages = torch.tensor([0.0, 1.0, 1.0, 5.0, 1.0, 4.0, 2.0])
    keep = trees.width_keep(tree, advantages, 1)
    assert keep.tolist() == [False, True, True, True, False, False, True]


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


@pytest.mark.parametrize(
    ("method", "sampled", "trained"),
    [("grpo", 305, 320), ("tree", 203, 218), ("tree, half", 203, 138), ("tree, depth", 203, 138),
     ("exact, edges", 203, 138)],
)  # fmt: skip
def test_a_step_of_each_method(method, sampled, trained):
    """Evaluations as planned, and the gradient of the log-probs of the states that were sampled,
    times the factors. Catches noise whose deviation is not that of the log-prob."""
    run = branch.Run(method, 0, Shift())
    run.optimizer = torch.optim.SGD(run.net.parameters(), lr=1.0)
    before = run.net.by.detach().clone()
    seen = {}
    roll_out, update = run.roll_out, run.update
    run.roll_out = lambda: seen.setdefault("rollout", roll_out())
    run.update = lambda states, factors: update(states, seen.setdefault("factors", factors))
    run.advance()
    assert abs(run.evaluations - (sampled + trained) * branch.TREES) <= 1
    noise, factors = seen["rollout"][1][:, 1:], seen["factors"][:, 1:]
    sigma = 1 - (run.tree.depth[1:, None] - 1) / branch.DEPTHS
    slope = -(1 + 0.5 * branch.NOISE**2 * (1 - sigma) / sigma) / branch.DEPTHS  # d mean / d by
    step = (factors[..., None] * noise / branch.STD * slope).sum(dim=(0, 1)) / branch.TREES
    torch.testing.assert_close(run.net.by.detach() - before, step, atol=1e-4, rtol=1e-4)


def test_the_race(tmp_path, capsys, monkeypatch):
    """Fails if a method or a seed is missing, if runs share a model, or if what was spent is not
    that on the line to the target."""
    for name, value in {"SEEDS": (1, 2), "STEPS": 2, "PRETRAINING": 5}.items():
        monkeypatch.setattr(branch, name, value)
    branch.main(json_file=tmp_path / "rows.json")
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [row["method"] for row in rows] == [*branch.METHODS] * 2
    assert all(math.isnan(row["steps"]) for row in rows)  # far from the target
    # At first the published prunings drop the same edges.
    assert len({row["last_reward"] for row in rows}) == 8
    shown = capsys.readouterr().out
    assert all(f"\n{method} " in shown for method in branch.METHODS)
    curve = [(0, 0.0, 0, 0.5), (2, 1.0, 40, 0.7), (4, 2.0, 80, 1.1)]
    assert branch.spent(curve) == pytest.approx({"steps": 3, "seconds": 1.5, "evaluations": 60})
