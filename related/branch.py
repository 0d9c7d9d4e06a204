"""
BranchGRPO (arXiv:2509.06040, code Fredreic1849/BranchGRPO): trees of rollouts, and their pruning.

A prompt is rolled out as a tree: at a split every node gets several children, elsewhere one. Only
leaves have a reward. Values of nodes are fused from their leaves, and every edge is trained with an
advantage of its own. An edge is a denoising step of a diffusion model, or a segment of tokens.

    node_values       exact   a node's value: the mean reward of the leaves below it
    softmax_shares    BIASED  weights children by their probability, by which they were drawn anyway
    depth_advantages  BIASED  the mean of a depth's n nodes contains the node itself: (n - 1) / n of
                              the depth's gradient; and one standard deviation per depth
    loo_advantages    exact   ours: the mean of nodes that do not descend from it, one scale a tree
    kept_mean         BIASED  weighs depths by their nodes, edges by how many others are kept
    planned_mean      exact   ours: a mean over each depth's planned nodes, summed over depths
    width_keep        BIASED  keeps the best edges, or the best and the worst: probabilities 0 and 1
    depth_keep        BIASED  never trains some depths
    random_window     exact   ours: trains a random window of depths
    draw              exact   ours: edges at random by size, or branches before they are rolled out

"Exact": with loo_advantages and planned_mean, all of these together have the expected gradient of
the expected reward (tests/test_branch.py enumerates it). Three things break it. The number of
children must not depend on what is drawn below (TreeRL, arXiv:2506.11902, branches at the most
surprising tokens of finished texts). Children must not share noise. Log-probs must be those of what
was sampled: the published code multiplies the noise at splits by 4 but not the deviation in the
log-prob, so scores there are 16 times the true ones.

Letters: N nodes, L leaves, D depths, B trees of one shape; `...` is nothing or B. Edges have the
number of the node that they lead to: the root, node 0, is never kept.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from numpy.random import Generator

import dppo
from runtime import InputError


@dataclass(frozen=True)
class Tree:
    """Nodes in breadth-first order: the root is node 0, the L leaves are the last ones."""

    parent: torch.Tensor  # [N]; the root is its own
    depth: torch.Tensor  # [N]
    family: torch.Tensor  # [N], the same number for siblings
    levels: list[slice]  # [D + 1], the nodes of each depth


def schedule(steps: int = 20, splits: Sequence[int] = (0, 3, 6, 9), children: int = 2) -> list[int]:
    """Children per node at each step: `children` at splits, else 1. The defaults are published."""
    if not all(0 <= split < steps for split in splits):
        raise InputError(f"splits {list(splits)}: each must be a step, 0 to {steps - 1}")
    return [children if step in splits else 1 for step in range(steps)]


def grow(children: Sequence[int]) -> Tree:
    """The tree whose nodes of depth d have children[d] children each; G independent rollouts are
    [G, 1, 1, ...]. It is a plan, fixed before anything is sampled: a text that ends early keeps its
    planned descendants, with empty edges and its own reward."""
    if not children or min(children) < 1:
        raise InputError(f"children {list(children)}: each depth needs at least 1")
    parent, depth, ends = [torch.zeros(1, dtype=torch.long)], [0], [0, 1]
    for d, number in enumerate(children, 1):
        parent.append(torch.arange(*ends[-2:]).repeat_interleave(number))
        depth += [d] * len(parent[-1])
        ends.append(len(depth))
    parent, depth = torch.cat(parent), torch.tensor(depth)
    levels = [slice(*pair) for pair in itertools.pairwise(ends)]
    return Tree(parent, depth, torch.where(depth > 0, parent + 1, 0), levels)


def counts(tree: Tree) -> dict[str, int]:
    """Nodes, edges, leaves, and evaluations of the model: one per node that has children."""
    nodes, leaves = len(tree.parent), len(tree.parent[tree.levels[-1]])
    inner = nodes - leaves
    return {"nodes": nodes, "edges": nodes - 1, "leaves": leaves, "evaluations": inner}


def _totals(values, group):
    """The sum of values [..., N] over each node's group [N], in values' shape."""
    sums = values.new_zeros(*values.shape[:-1], int(group.max()) + 1)
    return sums.index_add(-1, group, values)[..., group]


def _sizes(group):
    """How many nodes [N], float64, each node's group has."""
    return _totals(torch.ones(len(group), dtype=torch.float64), group)


def node_values(
    tree: Tree, rewards: torch.Tensor, shares: torch.Tensor | None = None, weights=None, guess=0.0
) -> torch.Tensor:
    """Values [..., N] of all nodes from the leaves' rewards [..., L]: as published, the sum of the
    children's values times their `shares` [..., N], by default equal.

    After a Russian roulette, weights [..., N] are 1 / probability for a node that went on, 0 for
    one that did not, 1 where there was no draw, and guess [..., N] is what the node seemed worth at
    its draw. Its value becomes guess + weight (value - guess), so rewards below a node that did not
    go on count for nothing; they must be finite.
    """
    values = rewards.new_zeros(*rewards.shape[:-1], len(tree.parent))
    values[..., tree.levels[-1]] = rewards
    shares = (1 / _sizes(tree.family) if shares is None else shares).to(values.dtype)
    guess = torch.as_tensor(guess, dtype=values.dtype).expand(values.shape)
    for level in reversed(tree.levels):
        if weights is not None:
            surprise = values[..., level] - guess[..., level]
            values[..., level] = guess[..., level] + weights[..., level] * surprise
        if level.start > 0:
            part = shares[..., level] * values[..., level]
            values.index_add_(-1, tree.parent[level], part)
    return values


def softmax_shares(tree: Tree, logprobs: torch.Tensor) -> torch.Tensor:
    """The published option, [..., N]: the softmax among siblings of edges' log-probs [..., N]."""
    shares = torch.ones_like(logprobs)
    for above, level in itertools.pairwise(tree.levels):
        families = logprobs[..., level].unflatten(-1, (len(tree.parent[above]), -1))
        shares[..., level] = families.softmax(dim=-1).flatten(-2)
    return shares


def depth_advantages(tree: Tree, values: torch.Tensor) -> torch.Tensor:
    """As published, [..., N] of values [..., N]: (value - mean) / (std + 1e-8) over the nodes of
    each depth, clamped to 5; 0 for a lone node, or if the standard deviation is below 1e-6."""
    count = _sizes(tree.depth).to(values.dtype)
    centred = values - _totals(values, tree.depth) / count
    std = (_totals(centred.square(), tree.depth) / (count - 1).clamp(min=1)).sqrt()
    return torch.where(std < 1e-6, 0.0, centred / (std + 1e-8)).clamp(-5, 5)


def loo_advantages(
    tree: Tree, values: torch.Tensor, baseline: str, weights: torch.Tensor | None = None, scale=1.0
) -> torch.Tensor:
    """Advantages [..., N]: (value - baseline) / scale, times the roulette's `branch_weights`.

    The baseline is the mean value of the parent's other children ("siblings") or of all other nodes
    of the depth ("others"). An only child has its parent's: what does not descend from the parent
    does not descend from it. Without any other node it is 0. `scale` must be known before the
    rollout, for example from earlier steps; the tree's own deviation is biased, as in GRPO.
    """
    dppo.check_known("baseline", baseline, ("siblings", "others"))
    above = torch.ones_like(values) if weights is None else branch_weights(tree, weights)
    group = tree.family if baseline == "siblings" else tree.depth
    compared = values if baseline == "siblings" else above * values  # siblings share what is above
    mean = (_totals(compared, group) - compared) / (_sizes(group) - 1).clamp(min=1)
    lone = _sizes(tree.family) == 1
    for level in tree.levels[1:]:
        if lone[level.start]:
            mean[..., level] = mean[..., tree.parent[level]]
    return torch.where(tree.depth > 0, above * (values - mean) / scale, 0.0)


def branch_weights(tree: Tree, weights: torch.Tensor) -> torch.Tensor:
    """What edges stand for after a roulette, [..., N]: the product of the weights above them."""
    above = torch.ones_like(weights)
    for level in tree.levels[1:]:
        above[..., level] = (above * weights)[..., tree.parent[level]]
    return above


def planned_mean(tree: Tree) -> torch.Tensor:
    """The factor of each edge, float64 [N]: 1 / planned nodes of its depth, 0 for the root."""
    return torch.where(tree.depth > 0, 1 / _sizes(tree.depth), 0.0)


def kept_mean(keep: torch.Tensor) -> torch.Tensor:
    """As published: 1 / kept edges of the tree, float64 [..., N], 0 for what is dropped."""
    return keep.double() / keep.sum(dim=-1, keepdim=True).clamp(min=1)


def width_keep(tree: Tree, advantages: torch.Tensor, after: int, rule: str) -> torch.Tensor:
    """Which edges [..., N] are trained, as published: all up to depth `after`, that of the last
    split's children, and half of those below.

    half      of each leaf's chain the edges with the largest advantages. These are all equal, as
              every depth has the same rewards, so a stable sort keeps the first half of the chain
    quarters  the quarter with the tree's largest advantages, and the one with the smallest
    """
    dppo.check_known("width rule", rule, ("half", "quarters"))
    half, leaves = rule == "half", counts(tree)["leaves"]
    if len(tree.parent[tree.levels[after]]) != leaves:
        raise InputError(f"after {after}: the tree still splits below that depth")
    late = tree.depth > after
    scores = advantages[..., late].unflatten(-1, (-1, leaves if half else 1))  # [..., n, chains]
    rank = scores.argsort(dim=-2, descending=True, stable=True).argsort(dim=-2)
    n, quarter = rank.shape[-2], rank.shape[-2] // 4
    chosen = rank < n // 2 if half else (rank < quarter) | (rank >= n - quarter)
    keep = (tree.depth > 0).repeat(*advantages.shape[:-1], 1)
    keep[..., late] = chosen.flatten(-2)
    return keep


def depth_keep(tree: Tree, first: int, window: int) -> torch.Tensor:
    """Which edges [N] are trained, as published: all but those of `window` depths from `first`."""
    return (tree.depth > 0) & ((tree.depth < first) | (tree.depth >= first + window))


def slide(step: int, depths: int, window: int, *, stop: int = 9, interval: int = 30) -> int:
    """The first of the depths that step (0, 1, ...) drops: at first the deepest `window`, then one
    shallower every `interval` steps, down to depth `stop`."""
    deepest = depths - window + 1
    return max(min(stop, deepest), deepest - step // interval)


def random_window(
    tree: Tree, after: int, window: int, start: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(keep, weights) [B, N]: all edges up to depth `after`, and of the depths below a window that
    wraps around. start [B] is uniform in 0 ... D - after - 1."""
    number = len(tree.levels) - 1 - after
    if not 1 <= window <= number:
        raise InputError(f"window {window}: below depth {after} there are 1 to {number} depths")
    late, place = tree.depth > after, (tree.depth - after - 1 - start[:, None]) % number
    keep = (tree.depth > 0) & (~late | (place < window))
    return keep, dppo.ht_weights(keep, torch.where(late, window / number, 1.0).double())


def draw(
    size: torch.Tensor, cost: torch.Tensor, prune_rate: float, generator: Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """(keep, weights) [B, n] at an average 1 - prune_rate of the cost: dppo.py's rule pps.

    Edges, after the rollout: their size [B, N - 1] is dppo.contribution_size(advantages,
    planned_mean, energy, 0), and the weights multiply their terms. Branches, before they are rolled
    out (Russian roulette): any guess above 0, and the weights go to node_values, loo_advantages.
    """
    batch = dppo.Completions(advantages=size, rewards=size, cost=cost, size=size)
    return dppo.prune_completions("pps", prune_rate, batch, generator)


def token_edges(tree: Tree, cuts: Sequence[int], tokens: int) -> torch.Tensor:
    """The edge [L, tokens] of each token of each leaf's text; edges of depth 1 begin at token 0,
    those of depth d + 1 at cuts[d - 1].

    Shared tokens occur in several texts, so a mean over texts, each token with its edge's
    advantage, is planned_mean over edges.
    """
    if len(cuts) != len(tree.levels) - 2 or sorted({0, *cuts}) != [0, *cuts]:
        raise InputError(f"cuts {list(cuts)}: need {len(tree.levels) - 2} rising numbers above 0")
    path = [torch.arange(len(tree.parent))[tree.levels[-1]]]
    for _ in cuts:
        path.append(tree.parent[path[-1]])
    at = torch.bucketize(torch.arange(tokens), torch.tensor(cuts, dtype=torch.long), right=True)
    return torch.stack(path[::-1], dim=1)[:, at]
