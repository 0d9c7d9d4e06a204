"""
Trees of rollouts in a world of two dimensions: `python -m bench branch`.

The model is a small flow-matching sampler of six Gaussians on a circle, pre-trained in seconds. The
reward is how close a sample is to two of them. A step draws 8 starting points, samples 16 leaves
from each, as independent trajectories or as a tree, and makes one update. There is one update per
rollout, so ratios are 1 and no clip acts. Every edge's noise is independent of its siblings' and
has the standard deviation that its log-prob has.
"""

import copy
import itertools
import json
import math
import statistics
import time

import torch
import torch.nn.functional as F

import dppo
from bench import JsonFile
from bench.code import stamped
from dppo import generator_for, seed_for
from related import branch

DEPTHS, TREES = 20, 8
LAST_SPLIT = 10  # the depth of the last split's children
DROPPED = 5  # depths that depth pruning drops, as published: 138 of 218 edges are left
KEPT_EDGES = 138  # of each group, for every pruned method
INTERVAL = 5  # steps between moves of the sliding window; published: 30, of 300
NOISE = 0.7  # of the sampler, eta; a step's standard deviation is NOISE sqrt(1 / DEPTHS)
STD = NOISE * DEPTHS**-0.5
ANGLES = torch.arange(6) * torch.pi / 3
MODES = 2 * torch.stack([ANGLES.cos(), ANGLES.sin()], dim=1)  # [6, 2]
LIKED = MODES[:2]
TARGET = 0.9  # the reward that is raced to
SHOWN = ("before", "grpo", "tree, depth", "exact, roulette")  # whose samples are in the picture
INDEPENDENT = branch.grow([16] + [1] * (DEPTHS - 1))
TREE = branch.grow(branch.schedule(DEPTHS))
METHODS = {  # tree, advantages and denominators, pruning
    "grpo": (INDEPENDENT, "published", None),
    "grpo, edges": (INDEPENDENT, "exact", "edges"),
    "tree": (TREE, "published", None),
    "tree, half": (TREE, "published", "half"),
    "tree, quarters": (TREE, "published", "quarters"),
    "tree, depth": (TREE, "published", "depth"),
    "exact": (TREE, "exact", None),
    "exact, window": (TREE, "exact", "window"),
    "exact, edges": (TREE, "exact", "edges"),
    "exact, roulette": (TREE, "exact", "roulette"),
}


# ---------------------------------------------------------------------------- the world


def reward(x: torch.Tensor) -> torch.Tensor:
    """[...], 1 at a liked mode: exp(-distance² / 2) of x [..., 2] to the nearest."""
    return (-torch.cdist(x, LIKED).amin(dim=-1).square() / 2).exp()


def velocity(net: torch.nn.Module, x: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
    """noise - data [n, 2], as predicted at x [n, 2] and noise level sigma [n, 1] or []."""
    return net(torch.cat([x, sigma.expand(len(x), 1)], dim=1))


def pretrained(steps: int) -> torch.nn.Module:
    """A sampler of the six Gaussians (standard deviation 0.3), trained by flow matching."""
    torch.manual_seed(0)
    first, second, last = (torch.nn.Linear(*sizes) for sizes in ((3, 256), (256, 256), (256, 2)))
    net = torch.nn.Sequential(first, torch.nn.SiLU(), second, torch.nn.SiLU(), last)
    optimizer = torch.optim.Adam(net.parameters(), lr=2e-3)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 2e-3 * (1 - step / steps)
        data = MODES[torch.randint(6, (512,))] + 0.3 * torch.randn(512, 2)
        noise, sigma = torch.randn(512, 2), torch.rand(512, 1)
        found = velocity(net, (1 - sigma) * data + sigma * noise, sigma)
        optimizer.zero_grad()
        (found - (noise - data)).square().mean().backward()
        optimizer.step()
    return net


def next_mean(x: torch.Tensor, v: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
    """Mean of the next state, from x and its velocity v [..., 2]: an Euler step of the stochastic
    sampler whose marginals are those of the flow. The drift -0.5 eta² score undoes the noise."""
    score = -(x + (1 - sigma) * v) / sigma
    return x - (v - 0.5 * NOISE**2 * score) / DEPTHS


@torch.no_grad()
def samples(net: torch.nn.Module, number: int = 1024) -> torch.Tensor:
    """Samples [number, 2], always from the same noise."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(number, 2, generator=generator)
    for depth in range(DEPTHS):
        sigma = torch.tensor(1 - depth / DEPTHS)
        x = next_mean(x, velocity(net, x, sigma), sigma)
        x += STD * torch.randn(number, 2, generator=generator)
    return x


# ---------------------------------------------------------------------------- a method


class Run:
    """One method and seed: its model, and what it has spent."""

    def __init__(self, method: str, seed: int, net: torch.nn.Module):
        self.method, self.seed, self.net = method, seed, copy.deepcopy(net)
        self.tree, self.credit, self.pruning = METHODS[method]
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=5e-4)
        self.draws = generator_for(seed, "branch")
        self.generator = torch.Generator().manual_seed(seed_for(seed, "branch"))
        self.steps, self.seconds, self.sampled, self.trained = 0, 0.0, 0, 0
        self.mean, self.std = 0.0, 1.0  # of the last step's rewards
        self.curve = []

    @torch.no_grad()
    def roll_out(self):
        """States and their noise [B, N, 2], and of the roulette: weights and guesses [B, N]."""
        tree = self.tree
        noise = torch.randn(TREES, len(tree.parent), 2, generator=self.generator)
        states = noise.clone()  # the root is noise
        weights, guess = torch.ones(states.shape[:2]), torch.zeros(states.shape[:2])
        alive = weights > 0
        for depth, (level, below) in enumerate(itertools.pairwise(tree.levels)):
            x, sigma = states[:, level], torch.tensor(1 - depth / DEPTHS)
            live = alive[:, level]
            v = torch.zeros_like(x)
            v[live] = velocity(self.net, x[live], sigma)
            self.sampled += int(live.sum())
            if self.pruning == "roulette" and depth == LAST_SPLIT:  # half of the branches go on
                guess[:, level] = reward(x - sigma * v) - self.mean  # of the expected clean sample
                equal = torch.ones(live.shape)
                weights[:, level] = branch.draw(equal, equal, 0.5, self.draws)[1].float()
            mean = next_mean(x, v, sigma)[:, tree.parent[below] - level.start]
            states[:, below] = mean + STD * noise[:, below]
            alive[:, below] = (alive & (weights > 0))[:, tree.parent[below]]
        return states, noise, weights, guess

    def factors(self, states, noise, weights, guess):
        """What multiplies each edge's log-prob in the objective, [B, N]; 0 is not trained."""
        tree, pruning = self.tree, self.pruning
        rewards = reward(states[:, tree.levels[-1]])
        if self.credit == "published":
            advantages = branch.depth_advantages(tree, branch.node_values(tree, rewards))
            keep = (tree.depth > 0).expand(advantages.shape)
            if pruning == "depth":
                first = branch.slide(self.steps, DEPTHS, DROPPED, interval=INTERVAL)
                keep = branch.depth_keep(tree, first, DROPPED).expand(advantages.shape)
            elif pruning:
                keep = branch.width_keep(tree, advantages, LAST_SPLIT, pruning)
            return advantages * branch.kept_mean(keep)
        roulette = weights if pruning == "roulette" else None
        values = branch.node_values(tree, rewards - self.mean, None, roulette, guess)
        advantages = branch.loo_advantages(tree, values, "siblings", roulette, self.std)
        factors = advantages * branch.planned_mean(tree)
        if pruning == "window":
            late = DEPTHS - LAST_SPLIT
            start = torch.randint(late, (TREES,), generator=self.generator)
            factors *= branch.random_window(tree, LAST_SPLIT, late - DROPPED, start)[1]
        if pruning == "edges":
            sigma = 1 - (tree.depth - 1) / DEPTHS
            gain = 1 + 0.5 * NOISE**2 * (1 - sigma) / sigma  # |d mean / d v| DEPTHS
            energy = noise.square().sum(dim=-1) * gain.square()
            scale = branch.planned_mean(tree).expand(factors.shape)
            size = dppo.contribution_size(advantages, scale, energy, 0.0)[:, 1:]
            rate = 1 - KEPT_EDGES / size.shape[1]
            drawn = branch.draw(size, torch.ones_like(size), rate, self.draws)[1]
            factors *= F.pad(drawn, (1, 0))
        went_on = branch.branch_weights(tree, weights)[:, tree.levels[-1]]
        self.mean = (rewards * went_on).sum().item() / went_on.sum().item()
        self.std = rewards[went_on > 0].std().item()
        return factors

    def advance(self):
        """One step."""
        started = time.process_time()
        states, *rest = self.roll_out()
        factors = self.factors(states, *rest).float()
        tree, edge = factors.nonzero(as_tuple=True)
        parent = self.tree.parent[edge]
        x, sigma = states[tree, parent], 1 - self.tree.depth[parent][:, None] / DEPTHS
        mean = next_mean(x, velocity(self.net, x, sigma), sigma)
        logprobs = -(states[tree, edge] - mean).square().sum(dim=1) / (2 * STD**2)
        self.optimizer.zero_grad()
        (-(factors[tree, edge] * logprobs).sum() / TREES).backward()
        self.optimizer.step()
        self.steps, self.trained = self.steps + 1, self.trained + len(edge)
        self.seconds += time.process_time() - started

    def evaluate(self):
        """Add a point to the curve; not timed."""
        found = reward(samples(self.net)).mean().item()
        spent = (self.steps, round(self.seconds, 4), self.sampled, self.trained)
        self.curve.append([*spent, round(found, 4)])


# ---------------------------------------------------------------------------- the race


def main(
    steps: int = 50,
    seeds: tuple[int, ...] = (3, 4, 5),
    pretraining: int = 1000,
    json_file: JsonFile = None,
) -> None:
    """Race GRPO, BranchGRPO, its prunings and the exact twins to the same reward.

    All runs take turns, a step each, so that a busy machine slows all of them alike. Seconds are
    CPU seconds of one thread, without the evaluations.

    Args:
        steps: of each run
        seeds: of the runs; the model is the same for all
        pretraining: steps of supervised training before
        json_file: where to write {curves, tree, samples}
    """
    torch.set_num_threads(1)
    net = pretrained(pretraining)
    tree = Run("tree", 0, net).roll_out()[0][0]
    runs = [Run(method, seed, net) for seed in seeds for method in METHODS]
    for step in range(steps + 1):
        for run in runs:
            if step % 2 == 0 or step == steps:
                run.evaluate()
            if step < steps:
                run.advance()
    nets = {"before": net} | {run.method: run.net for run in runs}
    rounded = lambda x: [[round(value, 2) for value in row] for row in x.T.tolist()]
    content = {
        "curves": [{"method": run.method, "seed": run.seed, "curve": run.curve} for run in runs],
        "tree": rounded(tree),
        "samples": {name: rounded(samples(nets[name])[:400]) for name in SHOWN},
    }
    print(table(content["curves"]))
    if json_file:  # a line for each curve
        text = json.dumps(stamped(content), separators=(",", ":"))
        json_file.write_text(text.replace("},{", "},\n{") + "\n")


def spent(curve: list[list[float]]) -> tuple[float, float, float]:
    """Steps, seconds and evaluations (sampled + trained) at which the reward reached TARGET, on the
    line between two evaluations; NaN if it did not."""
    for before, after in itertools.pairwise(curve):
        if after[-1] >= TARGET:
            part = (TARGET - before[-1]) / (after[-1] - before[-1])
            steps, seconds, sampled, trained, _ = (
                old + part * (new - old) for old, new in zip(before, after, strict=True)
            )
            return steps, seconds, sampled + trained
    return (math.nan,) * 3


def table(curves: list[dict]) -> str:
    """A line per method: what it spent to reach TARGET, and its last reward."""
    of = lambda method: [row["curve"] for row in curves if row["method"] == method]
    middle = statistics.median
    lines = [
        f"to a reward of {TARGET}: medians of {len(of('grpo'))} seeds; ratios to grpo and range",
        f"{'':16s}{'steps':>6s}{'seconds':>26s}{'evaluations':>29s}{'last reward':>23s}",
    ]
    for method in METHODS:
        own, grpo = ([spent(curve) for curve in of(name)] for name in (method, "grpo"))
        line = f"{method:16s}{middle(steps for steps, _, _ in own):6.1f}"
        for column, digits in ((1, 2), (2, 0)):
            values = [row[column] for row in own]
            ratios = [a / b[column] for a, b in zip(values, grpo, strict=True)]
            spread = f"({middle(ratios):.2f}, {min(ratios):.2f} to {max(ratios):.2f})"
            line += f"{middle(values):9.{digits}f} {spread:20s}"
        last = sorted(curve[-1][-1] for curve in of(method))
        lines.append(f"{line}{middle(last):7.3f} ({last[0]:.3f} to {last[-1]:.3f})")
    return "\n".join(lines)
