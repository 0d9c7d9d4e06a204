"""
Which objective each rule ascends: `python -m related.objectives` prints the slope of each rule's
objective, by exact sums over the number of right completions of a group (docs/method.md).

Letters: K prompts, G completions each.
"""

import importlib
import math

import torch

import dppo
import proof

importlib.import_module("related.rivals")  # adds its rules

PASS_RATES = torch.tensor([0.01, 0.1, 0.5, 0.9, 0.97], dtype=torch.float64)
OBJECTIVES = {  # what R - mean is divided by: the objective of every unbiased rule
    "none": "p",
    "group": "2 arcsin(sqrt(p))",
    "variance": "logit(p)",
    "mean": "log(p)",
}
TABLE = (  # rule, divisor, group size, prune rate
    *(("none", divisor, G, 0.0) for divisor in OBJECTIVES for G in (8, 32)),
    ("pods", "none", 8, 1 - 2 / 8), ("pods", "none", 32, 1 - 3 / 32),
    ("pods", "none", 8, 1 - 4 / 8),
    ("cppo", "none", 16, 1 - 3 / 16), ("cppo", "group", 16, 1 - 3 / 16),
    ("cppo", "none", 16, 1 - 8 / 16),
    ("dppo_floor", "none", 16, 0.7),
)  # fmt: skip


def advantages_of(rewards: torch.Tensor, divisor: str) -> torch.Tensor:
    """Advantages [Q, G] of rewards of 0 and 1, [Q, G]: those of --scale-rewards, and with two more
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
            trained = advantages * mean_weights(rule, prune_rate, batch)
            right, wrong = trained[ordered == 1].sum(), -trained[ordered == 0].sum()
            slope += binomial / 2 * (right / p + wrong / (1 - p)) / group_size
    return slope


def mean_weights(name: str, prune_rate: float, batch: dppo.Completions) -> torch.Tensor:
    """The expected weights [K, G] of a completion rule. A rule by rank has fixed weights; those of
    the others are 1 on average, unless the keep probability is 0."""
    rule = dppo.COMPLETION_RULES[name]
    prune_rate = proof.rate_of(rule, prune_rate)
    if isinstance(rule, dppo.BiasedRule):
        return rule.draw(batch, prune_rate, None)[1]
    return (rule.keep_prob(batch, prune_rate) > 0).double()


def objective_of(slope: torch.Tensor, pass_rates: torch.Tensor, group_size: int) -> str | None:
    """The name of an objective whose slope is proportional to this one [n], if there is one. For
    groups of two or three the divisors none, group and variance coincide, and it is "p"."""
    for divisor, objective in OBJECTIVES.items():
        ratio = slope / objective_slope(pass_rates, group_size, divisor)
        if proof.relative_error(ratio, ratio.mean().expand_as(ratio)) < proof.LIMIT:
            return objective
    return None


def main() -> None:
    print(
        "The objective F(p) that each rule ascends, with p a prompt's pass rate, for rewards of 0 "
        "and 1 and\n--loss dr_grpo: F'(p) / F'(0.5), by exact sums over the number of right "
        "completions. Every\nunbiased rule is as none. --scale-rewards has none and group only.\n"
    )
    heads = "".join(f"  p = {p:<5g}" for p in PASS_RATES.tolist())
    print(f"  {'rule':12s} {'rate':5s} {'divided by':10s} {'G':>3s}{heads}  objective")
    for rule, divisor, G, rate in TABLE:
        slope = objective_slope(PASS_RATES, G, divisor, rule, rate)
        cells = "".join(f"{value:10.2f}" for value in (slope / slope[2]).tolist())  # p = 0.5
        name = objective_of(slope, PASS_RATES, G) or "another"
        print(f"  {rule:12s} {rate:<5.2f} {divisor:10s} {G:3d}{cells}    {name}")


if __name__ == "__main__":
    main()
