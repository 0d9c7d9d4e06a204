"""
A race of GRPO, BranchGRPO and prunings of its trees in two dimensions: `python -m related.branch`.
Rows: runs/branch.json, which also has methods that are no longer here.

The model is a small flow-matching sampler of six Gaussians on a circle, pre-trained in seconds. The
reward is how close a sample is to two of them. A step draws 8 starting points, samples 16 leaves
from each, as independent trajectories or as a tree, and makes one update. There is one update per
rollout, so ratios are 1 and no clip acts. Every edge's noise is independent of its siblings' and
has the standard deviation that its log-prob has.

Letters: N nodes, L leaves, B trees of one shape.
"""

import copy
import itertools
import math
import statistics
import time

import torch
import torch.nn.functional as F
import tyro

import dppo
from bench import JsonFile, write_json
from related import trees

SEEDS, STEPS, PRETRAINING = (3, 4, 5), 50, 1000
TARGET = 0.9  # the reward that is raced to
DEPTHS, TREES = 20, 8  # of each tree; trees in a step
LAST_SPLIT = 10  # the depth of the last split's children
DROPPED = 5  # depths that depth pruning drops, as published
KEPT_EDGES = 138  # of 218: what that leaves, so every other pruning keeps as many
INTERVAL = 5  # steps between moves of the sliding window; published: 30, of 300
NOISE = 0.7  # of the sampler, eta
STD = NOISE * DEPTHS**-0.5  # of the noise of one step
ANGLES = torch.arange(6) * torch.pi / 3
MODES = 2 * torch.stack([ANGLES.cos(), ANGLES.sin()], dim=1)  # [6, 2]
LIKED = MODES[:2]
INDEPENDENT = trees.grow([16] + [1] * (DEPTHS - 1))
TREE = trees.grow(trees.schedule(DEPTHS))
METHODS = {  # tree, advantages and denominators, pruning
    "grpo": (INDEPENDENT, "published", None),
    "tree": (TREE, "published", None),
    "tree, half": (TREE, "published", "half"),
    "tree, depth": (TREE, "published", "depth"),
    "exact, edges": (TREE, "exact", "edges"),
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
def mean_reward(net: torch.nn.Module) -> float:
    """Of 1,024 samples, always from the same noise."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1024, 2, generator=generator)
    for depth in range(DEPTHS):
        sigma = torch.tensor(1 - depth / DEPTHS)
        x = next_mean(x, velocity(net, x, sigma), sigma)
        x += STD * torch.randn(1024, 2, generator=generator)
    return reward(x).mean().item()


# ---------------------------------------------------------------------------- a method


class Run:
    """One method and seed: its model, and what it has spent."""

    def __init__(self, method: str, seed: int, net: torch.nn.Module):
        self.method, self.seed, self.net = method, seed, copy.deepcopy(net)
        self.tree, self.credit, self.pruning = METHODS[method]
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=5e-4)
        self.draws = dppo.generator_for(seed, "branch")
        self.generator = torch.Generator().manual_seed(dppo.seed_for(seed, "branch"))
        self.std = 1.0  # of the last step's rewards
        self.steps, self.seconds = 0, 0.0
        self.evaluations = 0  # of the model, to sample and to train
        self.curve = []  # (steps, seconds, evaluations, reward)

    def advance(self) -> None:
        """One step."""
        started = time.process_time()
        states, noise = self.roll_out()
        if self.credit == "published":
            factors = self.published_factors(states)
        else:
            factors = self.exact_factors(states, noise)
        self.update(states, factors.float())
        self.steps += 1
        self.seconds += time.process_time() - started

    def evaluate(self) -> None:
        """Add a point to the curve; not timed."""
        self.curve.append((self.steps, self.seconds, self.evaluations, mean_reward(self.net)))

    @torch.no_grad()
    def roll_out(self) -> tuple[torch.Tensor, torch.Tensor]:
        """States and their noise, [B, N, 2]."""
        tree = self.tree
        noise = torch.randn(TREES, len(tree.parent), 2, generator=self.generator)
        states = noise.clone()  # the root is noise
        for depth, (level, below) in enumerate(itertools.pairwise(tree.levels)):
            x = states[:, level]
            sigma = torch.tensor(1 - depth / DEPTHS)
            v = velocity(self.net, x.flatten(0, 1), sigma).view_as(x)
            self.evaluations += v[..., 0].numel()
            mean = next_mean(x, v, sigma)[:, tree.parent[below] - level.start]
            states[:, below] = mean + STD * noise[:, below]
        return states, noise

    def published_factors(self, states: torch.Tensor) -> torch.Tensor:
        """What multiplies each edge's log-prob in the objective, [B, N]; 0 is not trained."""
        tree = self.tree
        advantages = trees.depth_advantages(tree, self.values(states))
        keep = tree.depth > 0
        if self.pruning == "half":
            keep = trees.width_keep(tree, advantages, LAST_SPLIT)
        if self.pruning == "depth":
            first = trees.slide(self.steps, DEPTHS, DROPPED, interval=INTERVAL)
            keep = trees.depth_keep(tree, first, DROPPED)
        return advantages * trees.kept_mean(keep)

    def exact_factors(self, states: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        """The same for the exact method. Also remembers the deviation of the rewards."""
        tree, values = self.tree, self.values(states)
        advantages = trees.loo_advantages(tree, values, self.std)
        size = self.edge_sizes(advantages, noise)[:, 1:]  # the root is no edge
        drawn = trees.draw(size, 1 - KEPT_EDGES / size.shape[1], self.draws)[1]
        self.std = values[:, tree.leaves].std().item()
        return advantages * trees.planned_mean(tree) * F.pad(drawn, (1, 0))

    def values(self, states: torch.Tensor) -> torch.Tensor:
        """The values of all nodes [B, N]."""
        return trees.node_values(self.tree, reward(states[:, self.tree.leaves]))

    def edge_sizes(self, advantages: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        """Estimated gradient norms [B, N] of the edges' terms, with respect to the velocity."""
        sigma = 1 - (self.tree.depth - 1) / DEPTHS
        slope = 1 + 0.5 * NOISE**2 * (1 - sigma) / sigma  # |d mean / d velocity| DEPTHS
        energy = noise.square().sum(dim=-1) * slope.square()
        planned = trees.planned_mean(self.tree).expand(advantages.shape)
        return dppo.contribution_size(advantages, planned, energy, 0.0)

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
        self.evaluations += len(edge)


# ---------------------------------------------------------------------------- the race


def main(json_file: JsonFile = None) -> None:
    """Race GRPO, BranchGRPO, its prunings and the exact forms to the same reward.

    All runs take turns, a step each, so that a busy machine slows all of them alike. Seconds are
    CPU seconds of one thread, without the evaluations.

    Args:
        json_file: where to write the rows {method, seed, steps, seconds, evaluations, last_reward}
    """
    torch.set_num_threads(1)
    net = pretrained()
    runs = [Run(method, seed, net) for seed in SEEDS for method in METHODS]
    for step in range(STEPS + 1):
        for run in runs:
            if step % 2 == 0 or step == STEPS:
                run.evaluate()
            if step < STEPS:
                run.advance()
    rows = [
        {"method": run.method, "seed": run.seed}
        | spent(run.curve)
        | {"last_reward": run.curve[-1][-1]}
        for run in runs
    ]
    write_json(json_file, rows)
    print(table(rows))


def spent(curve: list[tuple]) -> dict[str, float]:
    """What a run had spent when its reward reached TARGET, on the line between two evaluations; NaN
    if it did not."""
    names = ("steps", "seconds", "evaluations")
    for before, after in itertools.pairwise(curve):
        if after[-1] >= TARGET:
            part = (TARGET - before[-1]) / (after[-1] - before[-1])
            columns = zip(names, before, after, strict=False)  # all but the reward
            return {name: old + part * (new - old) for name, old, new in columns}
    return dict.fromkeys(names, math.nan)


def table(rows: list[dict]) -> str:
    """A line for each method: medians of what it spent to reach TARGET, and its last reward."""
    lines = [
        f"to a reward of {TARGET}: medians of {len(rows) // len(METHODS)} seeds; "
        "in brackets the ratio to grpo and its range",
        f"{'method':16s}{'steps':>6s}{'seconds':>9s}{'evaluations':>32s}{'last reward':>32s}",
    ]
    grpo = [row for row in rows if row["method"] == "grpo"]
    for method in METHODS:
        own = [row for row in rows if row["method"] == method]
        middle = lambda name, own=own: statistics.median(row[name] for row in own)
        line = f"{method:16s}{middle('steps'):6.1f}"
        for name, digits in (("seconds", 2), ("evaluations", 0)):
            ratios = [ours[name] / theirs[name] for ours, theirs in zip(own, grpo, strict=True)]
            spread = f"({statistics.median(ratios):.2f}, {min(ratios):.2f} to {max(ratios):.2f})"
            line += f"{middle(name):9.{digits}f} {spread:20s}"
        lines.append(line + f"{middle('last_reward'):13.3f}")
    return "\n".join(lines)


if __name__ == "__main__":
    tyro.cli(main)
