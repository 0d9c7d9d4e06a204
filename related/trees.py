"""
BranchGRPO (arXiv:2509.06040, code Fredreic1849/BranchGRPO): trees of rollouts, and their pruning.

A prompt is rolled out as a tree. At a split every node gets several children, elsewhere one. Only
the leaves have rewards. A node's value is the mean reward of the leaves below it, and every edge is
trained with the advantage of the node that it leads to. In related/branch.py an edge is a denoising
step of a diffusion model; it could as well be a segment of tokens.

The published forms (depth_advantages, kept_mean, width_keep) are biased, and ours (loo_advantages,
planned_mean) are exact: the expected gradient is that of the expected reward, also if edges are
drawn by their size, as related/branch.py does; tests/test_trees.py enumerates it. It needs
advantages that are divided by one scale that is known before the rollout, numbers of children that
do not depend on what is drawn below, and children with noise of their own, whose log-probs are
those of the distribution that was sampled. (The published code multiplies the noise at splits by 4,
but not the deviation in the log-prob, so scores there are 16 times the true ones.)

Letters: N nodes, L leaves, B trees of one shape; `...` is nothing or B. An edge has the number of
the node that it leads to, so the root, node 0, is never trained.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

PUBLISHED = [2 if step in (0, 3, 6, 9) else 1 for step in range(20)]  # children of a node, by depth


@dataclass(frozen=True)
class Tree:
    """Nodes in breadth-first order: the root is node 0, and the leaves are the last L nodes."""

    parent: torch.Tensor  # [N]; the root is its own parent
    depth: torch.Tensor  # [N]
    family: torch.Tensor  # [N], the same number for siblings
    levels: list[slice]  # the nodes of each depth; the last are the leaves


def grow(children: Sequence[int]) -> Tree:
    """The tree whose nodes of depth d have children[d] children each. [G, 1, 1, ...] is a group of
    G independent rollouts. The tree is a plan that is fixed before anything is sampled."""
    parents, levels = [torch.zeros(1, dtype=torch.long)], [slice(0, 1)]
    for number in children:
        above = torch.arange(levels[-1].start, levels[-1].stop)
        parents.append(above.repeat_interleave(number))
        levels.append(slice(levels[-1].stop, levels[-1].stop + len(parents[-1])))
    parent = torch.cat(parents)
    sizes = torch.tensor([len(nodes) for nodes in parents])
    depth = torch.arange(len(levels)).repeat_interleave(sizes)
    family = torch.where(depth > 0, parent + 1, 0)
    return Tree(parent, depth, family, levels)


def group_sums(values: torch.Tensor, group: torch.Tensor) -> torch.Tensor:
    """For each node the sum of values [..., N] over its group [N], in values' shape."""
    sums = values.new_zeros(*values.shape[:-1], int(group.max()) + 1)
    return sums.index_add(-1, group, values)[..., group]


def group_sizes(group: torch.Tensor) -> torch.Tensor:
    """For each node the number of nodes in its group [N], float64."""
    return group_sums(torch.ones(len(group), dtype=torch.float64), group)


# ---------------------------------------------------------------------------- values and advantages


def node_values(tree: Tree, rewards: torch.Tensor) -> torch.Tensor:
    """Values [..., N]: a leaf's is its reward, of [..., L], and another node's is the mean of its
    children's."""
    values = rewards.new_zeros(*rewards.shape[:-1], len(tree.parent))
    values[..., tree.levels[-1]] = rewards
    share = (1 / group_sizes(tree.family)).to(values.dtype)
    for level in reversed(tree.levels[1:]):
        values.index_add_(-1, tree.parent[level], share[level] * values[..., level])
    return values


def depth_advantages(tree: Tree, values: torch.Tensor) -> torch.Tensor:
    """As published, [..., N] of values [..., N]: (value - mean) / (std + 1e-8) over the nodes of
    each depth. It is 0 for a lone node, or if the deviation is below 1e-6. Biased: the mean of n
    nodes contains the node itself, so a depth's gradient shrinks to (n - 1) / n, and each depth is
    divided by another deviation."""
    count = group_sizes(tree.depth).to(values.dtype)
    centred = values - group_sums(values, tree.depth) / count
    variance = group_sums(centred.square(), tree.depth) / (count - 1).clamp(min=1)
    std = variance.sqrt()
    return torch.where(std < 1e-6, 0.0, centred / (std + 1e-8))


def loo_advantages(tree: Tree, values: torch.Tensor) -> torch.Tensor:
    """Leave-one-out advantages [..., N] of values [..., N]: value - baseline.

    The baseline is the mean value of the parent's other children. An only child has its parent's
    baseline, which is allowed because what does not descend from the parent does not descend from
    the child.
    """
    others = (group_sizes(tree.family) - 1).clamp(min=1)
    baseline = (group_sums(values, tree.family) - values) / others
    lone = group_sizes(tree.family) == 1
    for level in tree.levels[1:]:
        if lone[level.start]:
            baseline[..., level] = baseline[..., tree.parent[level]]
    return torch.where(tree.depth > 0, values - baseline, 0.0)


# ---------------------------------------------------------------------------- denominators


def planned_mean(tree: Tree) -> torch.Tensor:
    """The factor of each edge, float64 [N]: 1 / planned nodes of its depth."""
    return 1 / group_sizes(tree.depth)


def kept_mean(keep: torch.Tensor) -> torch.Tensor:
    """As published: 1 / kept edges of the tree, float64 [..., N], 0 for what is dropped. Biased:
    depths count by their number of nodes, and an edge by how many others are kept."""
    return keep.double() / keep.sum(dim=-1, keepdim=True).clamp(min=1)


# ---------------------------------------------------------------------------- the published pruning


def width_keep(tree: Tree, after: int) -> torch.Tensor:
    """Which edges [N] are trained, as published. All are up to depth `after`, that of the last
    split's children. Below it each leaf has a chain of edges, and the half of each chain with the
    largest advantages is trained. But all of a chain are equal, because every depth has the same
    rewards, and the published code's sort keeps the first half."""
    chain = int(tree.depth[-1]) - after
    return (tree.depth > 0) & (tree.depth <= after + chain // 2)
