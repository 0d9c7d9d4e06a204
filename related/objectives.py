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
TABLE = (  # rule, scale_rewards, group size, prune rate
    *(("none", scale, G, 0.0) for scale in dppo.SCALES for G in (8, 32)),
    ("pods", "none", 8, 1 - 2 / 8), ("pods", "none", 32, 1 - 3 / 32),
    ("pods", "none", 8, 1 - 4 / 8),
    ("cppo", "none", 16, 1 - 3 / 16), ("cppo", "group", 16, 1 - 3 / 16),
    ("cppo", "none", 16, 1 - 8 / 16),
    ("dppo_floor", "none", 16, 0.7),
)  # fmt: skip


def objective_slope(
    pass_rates: torch.Tensor,
    group_size: int,
    scale_rewards: str,
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
            advantages = dppo.group_advantages(ordered, scale_rewards)
            ones = torch.ones_like(advantages)
            size = dppo.contribution_size(advantages, ones, ones, beta=0.0)
            batch = dppo.Completions(
                advantages, ordered, ones, size, rest_tokens=0.3 * ones.numel()
            )
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
    """Which of dppo.SCALES has a slope proportional to this one [n], if any has. For groups of two
    or three the scales none, group and variance coincide, and "none" is returned."""
    for name in dppo.SCALES:
        ratio = slope / objective_slope(pass_rates, group_size, name)
        if proof.relative_error(ratio, ratio.mean().expand_as(ratio)) < proof.LIMIT:
            return name
    return None


def main() -> None:
    print(
        "The objective F(p) that each rule ascends, with p a prompt's pass rate, for rewards of 0 "
        "and 1 and\n--loss dr_grpo: F'(p) / F'(0.5), by exact sums over the number of right "
        "completions. Every\nunbiased rule is as none: it has the slope of its --scale-rewards.\n"
    )
    heads = "".join(f"  p = {p:<5g}" for p in PASS_RATES.tolist())
    print(f"  {'rule':12s} {'rate':5s} {'scale_rewards':14s} {'G':>3s}{heads}  objective")
    for rule, scale, G, rate in TABLE:
        slope = objective_slope(PASS_RATES, G, scale, rule, rate)
        cells = "".join(f"{value:10.2f}" for value in (slope / slope[2]).tolist())  # p = 0.5
        name = dppo.SCALES.get(objective_of(slope, PASS_RATES, G), "another")
        print(f"  {rule:12s} {rate:<5.2f} {scale:14s} {G:3d}{cells}    {name}")


if __name__ == "__main__":
    main()
