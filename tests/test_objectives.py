"""Which objective a rule ascends: the slopes of related/objectives.py, against the gradient of
every group that a policy can sample; and the advantages of each --scale-rewards."""

import itertools
import json
import math
import re

import pytest
import torch

import dppo
import proof
from related import objectives

RULES = (  # of dppo.COMPLETION_RULES, and a prune rate
    ("none", 0.0), ("zero", 0.0), ("uniform", 0.5), ("dppo", 0.5), ("pps", 0.5),
    ("adaptive", 0.0),
    ("pods", 0.5), ("cppo", 0.5), ("dppo_floor", 0.6),
)  # fmt: skip


def sampled_gradient(scale_rewards: str, rule: str, rate: float, G: int = 4):
    """(expected gradient [3], pass rate, its gradient [3]) of a policy that has three texts, of
    which the last is right: over every group of G texts, and every outcome of the rule's draw."""
    logits = torch.tensor([0.3, -0.4, -0.9], dtype=torch.float64)
    probs = logits.softmax(dim=0)
    scores = torch.eye(3, dtype=torch.float64) - probs  # [text, logit]: grad log-probability
    energy = scores.square().sum(dim=1)
    total = torch.zeros(3, dtype=torch.float64)
    for group in itertools.product(range(3), repeat=G):
        texts = torch.tensor(group)
        rewards = (texts == 2).double()[None]
        advantages = dppo.group_advantages(rewards, scale_rewards)
        size = dppo.contribution_size(
            advantages, torch.ones_like(rewards), energy[texts][None], beta=0.0
        )
        batch = dppo.Completions(
            advantages, rewards, torch.ones_like(rewards), size, rest_tokens=0.5
        )
        for _keep, weights, chance in proof.outcomes(dppo.COMPLETION_RULES[rule], rate, batch):
            terms = (weights * advantages)[0, :, None] * scores[texts]  # [G, 3]
            total += chance * probs[texts].prod() * terms.sum(dim=0) / G
    return total, probs[2], probs[2] * scores[2]


@pytest.mark.parametrize("scale_rewards", dppo.SCALES)
@pytest.mark.parametrize(("rule", "rate"), RULES)
def test_slopes_by_enumeration(scale_rewards, rule, rate):
    """Within 1e-12. Catches a slope without the division by p, a binomial of the wrong class, and
    weights of the wrong side."""
    got, p, gradient = sampled_gradient(scale_rewards, rule, rate)
    slope = objectives.objective_slope(p[None], 4, scale_rewards, rule, rate)
    assert (got - slope * gradient).abs().max() < 1e-12
    unbiased = objectives.objective_slope(p[None], 4, scale_rewards)
    same = abs(slope / unbiased - 1) < 1e-12
    # keeping 2 of 4, PODS gives each live group the same weight, as the logit does
    assert same == (not dppo.COMPLETION_RULES[rule].biased), (slope, unbiased)


NAN = math.nan
CLOSE = [0.501] + [0.5] * 7  # real-valued rewards that hardly differ
TENTH = [reward / 10 for reward in CLOSE]
FLOOR = 7 / 64  # the variance of eight rewards of which one is 1 and the others are 0
SMALL = FLOOR * 0.1**2
ADVANTAGES = [  # scale_rewards, range, rewards, advantages
    ("variance", 1, [1, 0, 0, 0], [4, -4 / 3, -4 / 3, -4 / 3]),
    ("variance", 1, [1, 0, 0, NAN, NAN, NAN], [6, -3, -3, 0, 0, 0]),  # G / k, -G / (n - k)
    ("variance", 1, CLOSE, [0.001 * 7 / 8 / FLOOR] + [-0.001 / 8 / FLOOR] * 7),
    ("variance", 0.1, TENTH, [0.0001 * 7 / 8 / SMALL] + [-0.0001 / 8 / SMALL] * 7),
    ("mean", 1, [1, 0, 0, 0], [3, -1, -1, -1]),
    ("mean", 1, [1, 0, NAN, NAN], [1, -1, 0, 0]),
    ("mean", 1, TENTH, [0.0001 * 7 / 8 * 8] + [-0.0001 / 8 * 8] * 7),  # the mean is below 1 / G
    ("mean", 0.1, TENTH, [0.0001 * 7 / 8 / 0.0500125] + [-0.0001 / 8 / 0.0500125] * 7),
]


@pytest.mark.parametrize(("scale_rewards", "reward_range", "rewards", "wanted"), ADVANTAGES)
def test_advantages_by_hand(scale_rewards, reward_range, rewards, wanted):
    """Catches no floor, one that rewards of 0 and 1 meet, one that ignores the range, a missing
    G / n, and G where the n that were scored belong."""
    table = torch.tensor([rewards], dtype=torch.float64)
    advantages = dppo.group_advantages(table, scale_rewards, reward_range)
    assert advantages[0].tolist() == pytest.approx(wanted)


def test_the_mean_needs_rewards_of_0_or_more():
    with pytest.raises(dppo.RuleError, match="'mean' needs rewards of 0 or more, not -1"):
        dppo.group_advantages(torch.tensor([[-1.0, 0.0]]), "mean")


@pytest.mark.parametrize("loss", dppo.LOSSES)
@pytest.mark.parametrize("scale_rewards", dppo.SCALES)
def test_pruning_keeps_every_objective(loss, scale_rewards):
    """Every outcome of every unbiased rule, for each objective and loss, within 1e-12; the planted
    mistakes are off by more than 1e-3. Catches sizes of other advantages than the trained ones."""
    case = proof.toy_case(loss, prompts=range(3), num_prompts=3, scale_rewards=scale_rewards)
    each, full = case.of_each(), case.full()
    for rule in proof.rules(dppo.COMPLETION_RULES, biased=False):
        got = proof.expected_gradient(case, rule, 0.5, each=each)
        assert proof.relative_error(got, full) < 1e-12, rule
        if rule != "zero":  # it drops nothing that a weight could be forgotten for
            for mistake in proof.MISTAKES:
                wrong = proof.expected_gradient(case, rule, 0.5, each=each, mistake=mistake)
                assert proof.relative_error(wrong, full) > 1e-3, (rule, mistake)


def test_a_run_takes_the_flags(run, tmp_path):
    """With another scale than the loss has by default, and a range of 10, which raises every
    variance. Catches a step that asks the loss, or leaves the range out."""
    run("run", loss="grpo", scale_rewards="variance", reward_range=10, steps=3)
    rows = [json.loads(row) for row in (tmp_path / "run/samples.jsonl").read_text().splitlines()]
    floor, G = 5 / 36 * 100, 6
    possible = [(right - k / G) / floor for k in range(1, G) for right in (0, 1)]
    advantages = [row["advantage"] for row in rows if row["advantage"]]
    assert advantages
    assert all(min(abs(each - value) for value in possible) < 1e-9 for each in advantages)


def test_the_printed_table(capsys):
    objectives.main()
    table = capsys.readouterr().out.split("\n\n")[1].strip().splitlines()
    cells = [re.split(r"  +", line.strip()) for line in table[1:]]
    for (rule, scale, *_), (*_, objective) in zip(objectives.TABLE, cells, strict=True):
        if rule == "none":
            assert objective == dppo.SCALES[scale]
    assert cells[-1][:2] == ["dppo_floor", "0.70"]
    assert cells[-1][4:] == ["0.97", "0.98", "1.00", "0.98", "0.97", "another"]
    assert [row[-1] for row in cells if row[0] == "pods"] == ["logit(p)", "logit(p)", "another"]
