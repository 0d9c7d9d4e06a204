"""
A race of GRPO, BranchGRPO and prunings of its trees in two dimensions: `python -m related.branch`.

The model is a small flow-matching sampler of six Gaussians on a circle, pre-trained in seconds. The
reward is how close a sample is to two of them. A step draws 8 starting points, samples 16 leaves
from each, as independent trajectories or as a tree, and makes one update. There is one update per
rollout, so ratios are 1 and no clip acts. Every edge's noise is independent of its siblings' and
has the standard deviation that its log-prob has.

All runs take turns, a step each, so that a busy machine slows all of them alike. Printed are the
CPU seconds of one thread until the mean reward is TARGET; NaN if it is never reached. Evaluations
are not timed. runs/branch.json also has the steps, the model's evaluations, and six methods that
are no longer here.

Letters: N nodes, L leaves, B trees of one shape.
"""

import copy
import itertools
import math
import statistics
import time

import torch
import torch.nn.functional as F

import dppo
from related import trees

SEEDS, STEPS, PRETRAINING = (3, 4, 5), 50, 1000
TARGET = 0.9  # the reward that is raced to
DEPTHS, TREES = 20, 8  # of each tree; trees in a step
LAST_SPLIT = 10  # the depth of the last split's children
KEPT_EDGES = 138  # of 218: what the published pruning leaves
NOISE = 0.7  # of the sampler, eta
STD = NOISE * DEPTHS**-0.5  # of the noise of one step
ANGLES = torch.arange(6) * torch.pi / 3
MODES = 2 * torch.stack([ANGLES.cos(), ANGLES.sin()], dim=1)  # [6, 2]
LIKED = MODES[:2]
INDEPENDENT = trees.grow([16] + [1] * (DEPTHS - 1))
CHAIN = trees.grow([1] * DEPTHS)
TREE = trees.grow(trees.PUBLISHED)
METHODS = {  # tree, and what is trained of it; "edges" has the exact advantages, too
    "grpo": (INDEPENDENT, "all"),
    "tree": (TREE, "all"),
    "tree, half": (TREE, "half"),
    "exact, edges": (TREE, "edges"),
}


# ---------------------------------------------------------------------------- the world


def reward(x: torch.Tensor) -> torch.Tensor:
    """[...], 1 at a liked mode: exp(-distance² / 2) of x [..., 2] to the nearest."""
    distance = torch.cdist(x, LIKED).amin(dim=-1)
    return (-distance.square() / 2).exp()


def velocity(net: torch.nn.Module, x: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
    """noise - data [n, 2], as predicted at x [n, 2] and noise level sigma [n, 1] or []."""
    return net(torch.cat([x, sigma.expand(len(x), 1)], dim=1))


def next_mean(x: torch.Tensor, v: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
    """Mean of the next state, from x and its velocity v [..., 2]: an Euler step of the stochastic
    sampler whose marginals are those of the flow. The drift -0.5 eta² score undoes the noise."""
    score = -(x + (1 - sigma) * v) / sigma
    return x - (v - 0.5 * NOISE**2 * score) / DEPTHS


def pretrained() -> torch.nn.Module:
    """A sampler of the six Gaussians (standard deviation 0.3), trained by flow matching."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Linear(3, 256), torch.nn.SiLU(),
        torch.nn.Linear(256, 256), torch.nn.SiLU(),
        torch.nn.Linear(256, 2),
    )  # fmt: skip
    optimizer = torch.optim.Adam(net.parameters(), lr=2e-3)
    for step in range(PRETRAINING):
        optimizer.param_groups[0]["lr"] = 2e-3 * (1 - step / PRETRAINING)
        data = MODES[torch.randint(6, (512,))] + 0.3 * torch.randn(512, 2)
        noise, sigma = torch.randn(512, 2), torch.rand(512, 1)
        predicted = velocity(net, (1 - sigma) * data + sigma * noise, sigma)
        optimizer.zero_grad()
        (predicted - (noise - data)).square().mean().backward()
        optimizer.step()
    return net


@torch.no_grad()
def roll_out(net, tree: trees.Tree, B: int, generator) -> tuple[torch.Tensor, torch.Tensor]:
    """The states of B trees, and the noise that made them, [B, N, 2] each."""
    noise = torch.randn(B, len(tree.parent), 2, generator=generator)
    states = noise.clone()  # the root is noise
    for depth, (level, below) in enumerate(itertools.pairwise(tree.levels)):
        x = states[:, level]
        sigma = torch.tensor(1 - depth / DEPTHS)
        v = velocity(net, x.flatten(0, 1), sigma).view_as(x)
        mean = next_mean(x, v, sigma)[:, tree.parent[below] - level.start]
        states[:, below] = mean + STD * noise[:, below]
    return states, noise


def mean_reward(net: torch.nn.Module) -> float:
    """Of 1,024 samples, always from the same noise."""
    states, _ = roll_out(net, CHAIN, 1024, torch.Generator().manual_seed(0))
    return reward(states[:, -1]).mean().item()


# ---------------------------------------------------------------------------- a method


class Run:
    """One method and seed: its model, and what it has spent."""

    def __init__(self, method: str, seed: int, net: torch.nn.Module):
        self.method, self.seed, self.net = method, seed, copy.deepcopy(net)
        self.tree, self.pruning = METHODS[method]
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=5e-4)
        self.draws = dppo.generator_for(seed, "branch")
        self.generator = torch.Generator().manual_seed(dppo.seed_for(seed, "branch"))
        self.std = 1.0  # of the last step's rewards
        self.seconds = 0.0
        self.is_there = False

    def advance(self) -> None:
        started = time.process_time()
        states, noise = roll_out(self.net, self.tree, TREES, self.generator)
        values = trees.node_values(self.tree, reward(states[:, self.tree.levels[-1]]))  # [B, N]
        if self.pruning == "edges":
            factors = self.exact_factors(values, noise)
        else:
            keep = self.tree.depth > 0
            if self.pruning == "half":
                keep = trees.width_keep(self.tree, LAST_SPLIT)
            factors = trees.depth_advantages(self.tree, values) * trees.kept_mean(keep)
        self.update(states, factors.float())
        self.seconds += time.process_time() - started

    def exact_factors(self, values: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        """Edges are drawn by their estimated gradient norms, with respect to the velocity. Also
        remembers the deviation of the rewards."""
        tree = self.tree
        advantages = trees.loo_advantages(tree, values) / self.std
        self.std = values[:, tree.levels[-1]].std().item()
        sigma = 1 - (tree.depth - 1) / DEPTHS  # where each edge begins
        slope = 1 + 0.5 * NOISE**2 * (1 - sigma) / sigma  # |d mean / d velocity| DEPTHS
        energy = noise.square().sum(dim=-1) * slope.square()
        planned = trees.planned_mean(tree).expand(advantages.shape)
        size = dppo.contribution_size(advantages, planned, energy, beta=0.0)
        size = size[:, 1:]  # the root is no edge
        batch = dppo.Completions(size, size, torch.ones_like(size), size)
        rate = 1 - KEPT_EDGES / size.shape[1]
        _keep, weights = dppo.prune_completions("pps", rate, batch, self.draws)
        return advantages * planned * F.pad(weights, (1, 0))

    def update(self, states: torch.Tensor, factors: torch.Tensor) -> None:
        """Ascend the sum of the edges' log-probs, each times its factor [B, N]."""
        tree, edge = factors.nonzero(as_tuple=True)
        parent = self.tree.parent[edge]
        x, sigma = states[tree, parent], 1 - self.tree.depth[parent][:, None] / DEPTHS
        mean = next_mean(x, velocity(self.net, x, sigma), sigma)
        logprobs = -(states[tree, edge] - mean).square().sum(dim=1) / (2 * STD**2)
        self.optimizer.zero_grad()
        (-(factors[tree, edge] * logprobs).sum() / TREES).backward()
        self.optimizer.step()


# ---------------------------------------------------------------------------- the race


def main() -> None:
    """Print the median seconds of each method, their median ratio to grpo, and its range."""
    torch.set_num_threads(1)
    net = pretrained()
    runs = [Run(method, seed, net) for seed in SEEDS for method in METHODS]
    for _ in range(STEPS):
        for run in runs:
            if not run.is_there:
                run.advance()
                run.is_there = mean_reward(run.net) >= TARGET
    seconds = {
        method: [run.seconds if run.is_there else math.nan for run in runs if run.method == method]
        for method in METHODS
    }
    print(f"to a reward of {TARGET}, {len(SEEDS)} seeds: seconds, and their ratio to grpo's")
    for method, each in seconds.items():
        ratios = [ours / grpo for ours, grpo in zip(each, seconds["grpo"], strict=True)]
        spread = f"({min(ratios):.2f} to {max(ratios):.2f})"
        print(f"{method:12}{statistics.median(each):6.2f}{statistics.median(ratios):6.2f} {spread}")


if __name__ == "__main__":
    main()
