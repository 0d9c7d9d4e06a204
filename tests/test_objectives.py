"""Which objective a rule ascends: the slopes of related/objectives.py, against the gradient of
every group that a policy can sample; and a run's --scale-rewards."""

import itertools
import json

import pytest
import torch

import dppo
import proof
from related import objectives

RULES = (  # of dppo.COMPLETION_RULES, and a prune rate
    ("none", 0.0), ("nonzero", 0.0), ("uniform", 0.5), ("dppo", 0.5), ("pps", 0.5),
    ("adaptive", 0.0),
    ("pods", 0.5), ("cppo", 0.5), ("dppo_floor", 0.6),
)  # fmt: skip


def sampled_gradient(divisor: str, rule: str, rate: float, G: int = 4):
    """(expected gradient [3], pass rate, its gradient [3]) of a policy that has three texts, of
    which the last is right: over every group of G texts, and every outcome of the rule's draw."""
    logits = torch.tensor([0.3, -0.4, -0.9], dtype=torch.float64)
    probs = logits.softmax(dim=0)
    scores = torch.eye(3, dtype=torch.float64) - probs  # [text, logit]: grad log-probability
    energy = scores.square().sum(dim=1)
    total = torch.zeros(3, dtype=torch.float64)
    by_rank = isinstance(dppo.COMPLETION_RULES[rule], dppo.BiasedRule)
    of_batch = {}  # the outcomes of a draw. Rules by rank see rewards alone
    for group in itertools.product(range(3), repeat=G):
        texts = torch.tensor(group)
        rewards = (texts == 2).double()[None]
        advantages = objectives.advantages_of(rewards, divisor)
        size = dppo.contribution_size(
            advantages, torch.ones_like(rewards), energy[texts][None], beta=0.0
        )
        batch = dppo.Completions(advantages, rewards, torch.ones_like(rewards), size)
        seen = tuple((rewards[0] if by_rank else texts).tolist())
        if seen not in of_batch:
            of_batch[seen] = [*proof.outcomes(dppo.COMPLETION_RULES[rule], rate, batch)]
        for _keep, weights, chance in of_batch[seen]:
            terms = (weights * advantages)[0, :, None] * scores[texts]  # [G, 3]
            total += chance * probs[texts].prod() * terms.sum(dim=0) / G
    return total, probs[2], probs[2] * scores[2]


@pytest.mark.parametrize("divisor", [*dppo.SCALES, "variance", "mean"])
@pytest.mark.parametrize(("rule", "rate"), RULES)
def test_slopes_by_enumeration(divisor, rule, rate):
    """Within 1e-12. Catches a slope without the division by p, a binomial of the wrong class, and
    weights of the wrong side."""
    got, p, gradient = sampled_gradient(divisor, rule, rate)
    slope = objectives.objective_slope(p[None], 4, divisor, rule, rate)
    assert (got - slope * gradient).abs().max() < 1e-12
    unbiased = objectives.objective_slope(p[None], 4, divisor)
    same = abs(slope / unbiased - 1) < 1e-12
    # keeping 2 of 4, PODS gives each live group the same weight, as the logit does
    assert same == isinstance(dppo.COMPLETION_RULES[rule], dppo.Rule), (slope, unbiased)


def test_a_run_takes_the_flag(run, tmp_path):
    """With another scale than the loss has by default. Catches a step that asks the loss."""
    run("run", loss="grpo", scale_rewards="none", steps=3)
    rows = [json.loads(row) for row in (tmp_path / "run/samples.jsonl").read_text().splitlines()]
    possible = [right - k / 6 for k in range(1, 6) for right in (0, 1)]
    advantages = [row["advantage"] for row in rows if row["advantage"]]
    assert advantages
    assert all(min(abs(each - value) for value in possible) < 1e-9 for each in advantages)
