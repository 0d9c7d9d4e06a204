"""
Which objective each rule ascends: the slope of its objective, by exact sums over the number of
right completions of a group. notebooks/05_objectives.ipynb has the theorem and the pictures.

Letters: K prompts, G completions each.
"""

import importlib
import math

import torch

import dppo

importlib.import_module("related.rivals")  # adds its rules


def advantages_of(rewards: torch.Tensor, divisor: str) -> torch.Tensor:
    """Advantages [K, G] of rewards of 0 and 1, [K, G]: those of --scale-rewards, and with two more
    divisors, which no run has."""
    if divisor in dppo.SCALES:
        return dppo.group_advantages(rewards, divisor)
    mean = rewards.mean(dim=1, keepdim=True)  # [Q, 1]
    variance = mean * (1 - mean)
    divided = (rewards - mean) / (mean if divisor == "mean" else variance)
    return torch.where(variance > 0, divided, 0.0)


def objective_slope(
    pass_rates: torch.Tensor,
    group_size: int,
    divisor: str,
    rule: str = "none",
    prune_rate: float = 0.0,
) -> torch.Tensor:
    """F is the objective that a rule ascends, a function of a prompt's pass rate p. Returns F'(p)
    [n] at pass_rates [n], float64: the expected gradient of the prompt's group is F'(p) grad p.

    Rewards are 0 and 1. Valid for rules that look at the rewards of a group alone, on policy, and
    with a denominator of group_size that does not depend on lengths (--loss dr_grpo).

    Let s be the gradient of a completion's log-probability. Then E[s | right] = grad log p, and
    E[s | wrong] = grad log(1 - p). So a rule that gives right completions a total of `right`, and
    wrong ones a total of -`wrong`, has F'(p) = E[right / p + wrong / (1 - p)] / group_size, over
    the number of right completions, which is binomial. A rule by rank may break ties between right
    and wrong completions by order. The mean over the two extreme orders is the mean over all, if
    the total that the right (or wrong) completions get is linear in how many of them are kept.
    """
    entry = dppo.COMPLETION_RULES[rule]
    p = pass_rates.double()
    slope = torch.zeros_like(p)
    for k in range(group_size + 1):
        rewards = (torch.arange(group_size) < k).double()[None]
        binomial = float(math.comb(group_size, k)) * p**k * (1 - p) ** (group_size - k)
        for ordered in (rewards, rewards.flip(1)):  # a rule by rank breaks ties by order
            advantages = advantages_of(ordered, divisor)
            ones = torch.ones_like(advantages)
            size = dppo.contribution_size(advantages, ones, ones, beta=0.0)
            batch = dppo.Completions(advantages, ordered, ones, size, rest=0.3)
            if isinstance(entry, dppo.BiasedRule):  # by rank, so its weights are fixed
                _keep, weights = entry.draw(batch, prune_rate, None)
            else:  # 1 on average, unless the keep probability is 0
                weights = entry.keep_prob(batch, prune_rate) > 0
            trained = advantages * weights
            right, wrong = trained[ordered == 1].sum(), -trained[ordered == 0].sum()
            slope += binomial / 2 * (right / p + wrong / (1 - p)) / group_size
    return slope
