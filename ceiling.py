"""
The most that unbiased pruning can gain on a model, its data and a machine.

    python -m bench ceiling out-grpo        from the log of a run, such as 20 steps of GRPO

Where noise limits learning, in batches below the critical size, progress in a second goes as
1 / (T V): T is the time of a step, and V the variance of its gradient. Pruning makes T smaller and
V larger. With term i kept with probability p_i, at the cost c_i, and of the gradient norm a_i,

    T = rest + sum_i p_i c_i        V = sum_i a_i^2 / p_i

`rest` is what a step costs beside training on its completions: above all the rollout. V is the
variance of sampling and of independent keeps together. The ceiling is T V of training on all terms
that are not exactly 0, over the least T V of all p. A systematic draw, such as that of pps, has
less variance than independent keeps, so it may exceed the ceiling a little. In batches above the
critical size V does not matter, and a smaller batch gains as much as any pruning.

Each step of train.py logs its ceilings for some values of `rest`, and what its own rule reached.
Which value is the run's own follows from its seconds (bench/ceiling.py).

Letters: K prompts rolled out, G completions each, n terms.
"""

import torch

import dppo

# `rest` over the cost of training on every completion that was rolled out. On a GPU with 0.6 B
# parameters it was 0.7.
RATIOS = torch.tensor([0.125, 0.25, 0.5, 1.0, 2.0, 4.0], dtype=torch.float64)


def of_completions(size: torch.Tensor, cost: torch.Tensor) -> torch.Tensor:
    """The ceilings of pruning the completions [K, G] that were rolled out, at each of RATIOS."""
    rest = RATIOS * cost.sum().item()
    everything = (rest + (cost * (size > 0)).sum()) * size.square().sum()
    return everything / dppo.least_time_variance(size, cost, rest)[1]


def of_prompts(rewards: torch.Tensor, cost: torch.Tensor, scale_rewards: str) -> torch.Tensor:
    """The ceilings of pruning the K prompts before rollout, if each one's pass rate were known, at
    each of RATIOS.

    rewards [K, G] are 0 and 1. A prompt with k of G right is taken to have the pass rate
    (k + 1/2) / (G + 1). The squared size of a prompt is then the expected sum of the squared
    advantages of its next group. What it costs is its rollout, and training on it if it is live.
    """
    G = rewards.shape[1]
    pass_rate = (rewards.double().sum(dim=1) + 0.5) / (G + 1)  # [K]
    right = torch.arange(G + 1)  # of the next group
    groups = (torch.arange(G) < right[:, None]).double()  # [G + 1, G]
    squares = dppo.group_advantages(groups, scale_rewards).square().sum(dim=1)  # [G + 1]
    chance = torch.distributions.Binomial(G, pass_rate[:, None]).log_prob(right.double()).exp()
    size = (chance @ squares).sqrt()  # [K]
    live = 1 - chance[:, 0] - chance[:, -1]  # [K]
    tokens = cost.double().sum(dim=1)  # [K]
    gains = []
    for ratio in RATIOS.tolist():
        each = (ratio + live) * tokens  # nothing is left that does not depend on the prompts kept
        best = (size * each.sqrt()).sum().square()  # p in proportion to size / sqrt(cost)
        gains.append(each.sum() * size.square().sum() / best)
    return torch.stack(gains)
