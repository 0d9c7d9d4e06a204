"""Which objective a rule ascends: the slopes of related/objectives.py, against the gradient of
every group that a policy can sample; limits of real-valued rewards; unscorable completions."""

import itertools
import json
import math
import re

import pytest
import torch

import dppo
import proof
from related import objectives
from runtime import InputError

PASS_RATES = torch.tensor([0.003, 0.1, 0.4, 0.5, 0.9, 0.98], dtype=torch.float64)
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
        batch = dppo.Completions(advantages, rewards, torch.ones_like(rewards), size, rest=0.5)
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


@pytest.mark.parametrize("G", [2, 4, 16, 33])
def test_slopes_in_closed_form(G):
    """Catches the sample variance, an epsilon beside it, and a mean over G where one of the class
    belongs."""
    p = PASS_RATES
    slope = lambda scale: objectives.objective_slope(p, G, scale)
    expected = {
        "none": torch.full_like(p, (G - 1) / G),
        "variance": (1 - p**G - (1 - p) ** G) / (p * (1 - p)),
        "mean": (1 - (1 - p) ** (G - 1)) / p,
    }
    for scale, wanted in expected.items():
        assert ((slope(scale) / wanted - 1).abs() < 1e-12).all(), scale
    # With many completions, group's is 1 / std.
    many = objectives.objective_slope(torch.tensor([0.3]), 200, "group") * math.sqrt(0.3 * 0.7)
    assert many.item() == pytest.approx(1, abs=0.01)


@pytest.mark.parametrize(("G", "kept"), [(8, 2), (32, 3), (16, 3), (5, 2)])
def test_pods_ascends_the_logit(G, kept):
    """From R - mean, to 1e-12. Keeping four is another objective, and so is keeping two from
    advantages over std + 1e-4, a little. Catches PODS with its weights of another size."""
    logit = objectives.objective_slope(PASS_RATES, G, "variance")

    def spread(scale, kept):  # how far the ratio of the two slopes is from a constant
        got = objectives.objective_slope(PASS_RATES, G, scale, "pods", 1 - kept / G)
        ratio = got / logit
        return (ratio.max() / ratio.min() - 1).item()

    assert spread("none", kept) < 1e-12
    assert 1e-6 < spread("group", kept) < 1e-3, "+ 1e-4 beside the standard deviation"
    if G > 5:
        assert spread("none", 4) > 1e-3
    found = objectives.objective_slope(PASS_RATES, G, "none", "pods", 1 - kept / G)
    assert objectives.objective_of(found, PASS_RATES, G) == "variance"
    assert objectives.objective_of(found * PASS_RATES, PASS_RATES, G) is None


@pytest.mark.parametrize("scored", [2, 3, 7, 8])
def test_unscorable_completions(scored):
    """The logit's advantages stay those of class means, G / k and -G / (n - k), and its slope is
    that of n completions. Catches a missing G / n, and G where the n that were scored belong."""
    G, p = 8, PASS_RATES
    rewards = torch.full((1, G), torch.nan, dtype=torch.float64)
    rewards[0, :scored] = 0.0
    rewards[0, 0] = 1.0
    advantages = dppo.group_advantages(rewards, "variance")[0]
    assert advantages[0].item() == pytest.approx(G)
    assert advantages[1:scored].tolist() == pytest.approx([-G / (scored - 1)] * (scored - 1))
    assert advantages[scored:].tolist() == [0.0] * (G - scored)
    slope = objectives.objective_slope(p, G, "variance", scored=scored)
    wanted = (1 - p**scored - (1 - p) ** scored) / (p * (1 - p))
    assert ((slope / wanted - 1).abs() < 1e-12).all()
    for scale, wanted in (
        ("none", torch.full_like(p, (scored - 1) / G)),
        ("mean", scored / G * (1 - (1 - p) ** (scored - 1)) / p),
    ):
        slope = objectives.objective_slope(p, G, scale, scored=scored)
        assert ((slope / wanted - 1).abs() < 1e-12).all(), scale


def test_real_valued_rewards_have_a_floor():
    """Catches no floor (advantages of 1e3 for rewards that hardly differ), one that rewards of 0
    and 1 meet, and one that ignores the range."""
    G = 8
    close = torch.full((1, G), 0.5, dtype=torch.float64)
    close[0, 0] = 0.501
    for scale, largest in (("variance", (G - 1) / G**2), ("mean", 1 / G)):
        one_right = torch.zeros(1, G, dtype=torch.float64)
        one_right[0, 0] = 1.0
        limit = dppo.group_advantages(one_right, scale)[0, 0].item()
        assert limit == pytest.approx((1 - 1 / G) / largest)
        # the floor does not act on 0 and 1, whatever the number of right ones
        for right in range(1, G):
            rewards = (torch.arange(G) < right).double()[None]
            free = dppo.group_advantages(rewards, scale, reward_range=1e-6)
            assert torch.allclose(dppo.group_advantages(rewards, scale), free, rtol=1e-12)
        # all rewards and their range times 0.1: the floor scales with them
        for rewards in (one_right, close / 10):
            small = dppo.group_advantages(rewards / 10, scale, reward_range=0.1)
            scaled = 10 if scale == "variance" else 1
            expected = dppo.group_advantages(rewards, scale) * scaled
            assert torch.allclose(small, expected, rtol=1e-12)
    with pytest.raises(dppo.RuleError, match="'mean' needs rewards of 0 or more, not -1"):
        dppo.group_advantages(close - 1.5, "mean")
    advantages = dppo.group_advantages(close, "variance")
    assert advantages[0, 0].item() == pytest.approx(0.001 * (1 - 1 / G) / ((G - 1) / G**2))
    low = dppo.group_advantages(close / 10, "mean")
    assert low[0, 0].item() == pytest.approx(0.0001 * (1 - 1 / G) * G), "the mean is below 1 / G"
    assert not torch.allclose(low, dppo.group_advantages(close / 10, "mean", reward_range=0.1))


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


@pytest.mark.parametrize("replacement", [True, False])
def test_dead_groups_removed(replacement):
    """What docs/method.md says of filters: three prompts are drawn, and the gradient is divided
    by the number of live groups. Drawn independently, each prompt's part of the expected gradient
    is the full one's, times one factor. Without replacement from four prompts it is not."""
    G = 3
    p = torch.tensor([0.02, 0.3, 0.6, 0.9], dtype=torch.float64)
    numbers = range(G + 1)  # of right completions
    groups = torch.tensor([[float(i < k) for i in range(G)] for k in numbers], dtype=torch.float64)
    right = (dppo.group_advantages(groups, "none") * groups).sum(dim=1)  # [G + 1]
    # what a group of prompt q with k right adds, in units of grad p of its prompt
    part = [[(right[k] / q + right[k] / (1 - q)).item() / G for k in numbers] for q in p]
    chance = [[math.comb(G, k) * (q**k * (1 - q) ** (G - k)).item() for k in numbers] for q in p]

    draws = list(itertools.permutations(range(4), 3))
    if replacement:
        draws = list(itertools.product(range(4), repeat=3))
    expected = torch.zeros(4, dtype=torch.float64)
    for prompts in draws:
        for found in itertools.product(numbers, repeat=3):
            live = sum(0 < k < G for k in found)
            pairs = list(zip(prompts, found, strict=True))
            probability = math.prod(chance[q][k] for q, k in pairs) / len(draws)
            for q, k in pairs:
                expected[q] += probability * part[q][k] / max(1, live)  # a dead part is 0
    factor = expected / objectives.objective_slope(p, G, "none")
    spread = (factor.max() / factor.min() - 1).item()
    if replacement:
        assert spread < 1e-12
    else:
        assert spread > 0.1


@pytest.mark.parametrize(
    ("scale_rewards", "live"),
    [
        ("none", lambda k, G: (1 - k / G, -k / G)),
        ("variance", lambda k, G: (G / k, -G / (G - k))),
        ("mean", lambda k, G: (G / k - 1, -1.0)),
    ],
)
def test_a_run_takes_the_flag(run, tmp_path, scale_rewards, live):
    """With another loss than the one whose default it is. Catches a step that asks the loss."""
    run("run", loss="grpo", scale_rewards=scale_rewards, steps=3)
    rows = [json.loads(row) for row in (tmp_path / "run/samples.jsonl").read_text().splitlines()]
    possible = {0.0, *itertools.chain(*(live(k, 6) for k in range(1, 6)))}
    found = [row["advantage"] for row in rows]
    assert any(found)
    assert all(min(abs(one - value) for value in possible) < 1e-9 for one in found), found
    stored = json.loads((tmp_path / "run/config.json").read_text())["config"]
    assert stored["scale_rewards"] == scale_rewards


def test_a_run_takes_the_range(run, tmp_path):
    """A range of 10 floors every variance. Catches a step that leaves it out."""
    run("run", scale_rewards="variance", reward_range=10, steps=3)
    rows = [json.loads(row) for row in (tmp_path / "run/samples.jsonl").read_text().splitlines()]
    floor = 5 / 36 * 100  # G = 6
    assert 0 < max(abs(row["advantage"]) for row in rows) < 1 / floor


def test_bad_flags(run):
    """Before anything is loaded. Catches a range of 0, which makes the floor no floor."""
    with pytest.raises(InputError, match=r"--reward-range 0\.0: must be above 0 and finite"):
        run("run", reward_range=0)
    with pytest.raises(InputError, match="scale-rewards"):
        run("run", scale_rewards="std")
    dppo.LOSSES["mine"] = dppo.Loss(dppo.clipped_ratio, "constant", scale_rewards="std")
    try:
        with pytest.raises(ValueError, match=r"scale_rewards \(loss 'mine'\) 'std': choose one of"):
            run("run", loss="mine")
    finally:
        del dppo.LOSSES["mine"]


def test_the_printed_table(capsys):
    objectives.main()
    table = capsys.readouterr().out.split("\n\n")[1].strip().splitlines()
    cells = [re.split(r"  +", line.strip()) for line in table[1:]]
    objective_of = {(rule, scale): objective for rule, scale, *_, objective in cells}
    for scale, objective in dppo.SCALES.items():
        assert objective_of["unbiased", scale] == objective
    assert objective_of["pods, 2 kept", "none"] == "logit(p)"
    assert objective_of["pods, 3 kept", "none"] == "logit(p)"
    assert objective_of["pods, 4 kept", "none"] == "its own"
    assert objective_of["cppo, 3 kept", "group"] == "its own"
