"""
The most that unbiased pruning of completions can gain on a model, its data and a machine.

    python -m bench ceiling out-grpo        from the log of a run, such as 20 steps of GRPO

Where noise limits learning, in batches below the critical size, progress in a second goes as
1 / (T V): T is the time of a step, and V the noise of its gradient. Pruning makes T smaller and V
larger. Term i has gradient norm a_i and cost c_i, and is kept with probability p_i:

    T = rest + sum_i p_i c_i        V = sum_i a_i^2 / p_i

`rest` is what a step costs beside training on its completions: above all the rollout. V is the
noise of sampling and of independent keeps together. The ceiling is T V of training on all terms
that are not exactly 0, over the least T V of all p. Systematic draws, such as those of pps and
adaptive, have less noise than independent ones, so they may exceed it. In batches above the
critical size V does not matter, and a smaller batch gains as much as any pruning.

Each step of train.py logs its ceilings for some values of `rest`. bench/ceiling.py finds the run's
own value from its seconds. It also estimates the ceiling of pruning prompts, from the run's groups.
"""

import torch

import dppo

# `rest` over the cost of training on every completion that was rolled out. On a GPU with 0.6 B
# parameters it was 0.7.
RATIOS = torch.tensor([0.0625, 0.125, 0.25, 0.5, 1.0, 2.0, 4.0], dtype=torch.float64)


def of_completions(size: torch.Tensor, cost: torch.Tensor) -> torch.Tensor:
    """The ceilings of pruning the completions [K, G] that were rolled out, at each of RATIOS."""
    rest = RATIOS * cost.sum().item()
    everything = (rest + (cost * (size > 0)).sum()) * size.square().sum()
    return everything / dppo.least_time_variance(size, cost, rest)[1]
