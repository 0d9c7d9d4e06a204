"""dppo_verl.py without Ray: exact by enumeration through verl's own methods and losses.

tests/verl.sh builds an environment with verl and runs these tests in it; without verl they are
skipped.
"""

import copy
import itertools
from unittest import mock

import numpy as np
import pytest
import torch

import dppo
import proof
import sampler
from related import rivals  # noqa: F401 (adds rules that are biased)

pytest.importorskip("verl", reason="tests/verl.sh runs these, with verl")
import verl_toy as toy
from verl.trainer.ppo import core_algos
from verl_toy import (
    ACTOR,
    LOSS,
    MODE,
    PLAIN,
    PROMPT_RATE,
    PROMPT_RULE,
    RATE,
    RULE,
    UPDATE,
    Toy,
    dppo_verl,
    error,
    tokens_of,
)

# ---------------------------------------------------------------------------- completions


@pytest.mark.parametrize("mode", dppo_verl.MODES)
@pytest.mark.parametrize("loss", dppo_verl.LOSSES)
def test_completions_are_exact(loss, mode):
    """Every outcome of the draw, through verl's methods and its ppo_loss with a KL loss, an entropy
    bonus, clip and rollout correction, on two ranks with dynamic micro-batches and verl's padding:
    the mean gradient is verl's.

    Catches a denominator or an advantage that depends on the draw, and a weight that misses a part
    of the loss.
    """
    options = {LOSS: loss, MODE: mode}
    pruned = Toy(**options, **{RULE: "uniform", RATE: 0.4})
    stock = toy.stock(**options)
    assert error(toy.over_completions(pruned), stock) < 1e-12
    assert error(pruned.gradients[0], stock) > 0.01
    assert "dppo/kept_completions" in pruned.metrics
    assert pruned.padded, "else verl's padding was not tried"


@pytest.mark.parametrize("rule", ["zero", "dppo", "pps"])
@pytest.mark.parametrize("kind", ["grpo", "grpo_variance", "grpo_mean", "rloo"])
def test_rules_are_exact(rule, kind):
    """Every outcome of every rule. Catches a keep probability of 0 for a term that is not 0."""
    options = {"algorithm__adv_estimator": kind, "prompts": ("bb", "ccc")}
    if rule == "zero":  # with a KL loss or an entropy bonus it would drop nothing
        options |= PLAIN
    pruned = Toy(**options, **{RULE: rule, RATE: 0.5, UPDATE: 2})
    stock = toy.stock(**options, **{UPDATE: 2})
    assert error(toy.over_completions(pruned), stock) < 1e-12
    assert rule == "zero" or error(pruned.gradients[0], stock) > 0.01


@pytest.mark.parametrize(
    ("scale", "one_right", "one_wrong"),
    [("variance", (4, -4 / 3), (4 / 3, -4)), ("mean", (3, -1), (1 / 3, -1))],
)
def test_own_estimators(scale, one_right, one_wrong):
    """Two groups of four, whose rows alternate, with one right and with one wrong completion.
    Catches another group, another scale, and tokens without loss that get an advantage."""
    estimator = core_algos.get_adv_estimator_fn(f"grpo_{scale}")
    rewards = torch.tensor([[0, 1.0], [0, 0], [0, 0], [1, 0], [0, 0], [1, 0], [0, 0], [1, 0]])
    mask = torch.tensor([[1, 1], [1, 0]] * 4)
    index = np.array(["a", "b"] * 4)
    found, _ = estimator(token_level_rewards=rewards, response_mask=mask, index=index, config=None)
    (right, wrong), (other_right, other_wrong) = one_right, one_wrong
    groups = [[right, wrong, wrong, wrong], [other_wrong, other_right, other_right, other_right]]
    wanted = torch.tensor(groups).T.flatten()[:, None] * mask
    torch.testing.assert_close(found, wanted, check_dtype=False)


@pytest.mark.parametrize("kind", ["kl", "abs", "mse", "low_var_kl"])
def test_kl_losses_are_exact(kind):
    """Each of verl's estimates of KL. Catches one whose gradient the factor misses."""
    options = {f"{ACTOR}kl_loss_type": kind, "prompts": ("bb", "ccc"), UPDATE: 2}
    pruned = Toy(**options, **{RULE: "pps", RATE: 0.5})
    assert error(toy.over_completions(pruned), toy.stock(**options)) < 1e-12


@pytest.mark.parametrize(
    "options",
    [
        {LOSS: "dro", **PLAIN},
        {f"{ACTOR}use_kl_loss": True, f"{ACTOR}entropy_coeff": 0},
        {f"{ACTOR}use_kl_loss": False, f"{ACTOR}entropy_coeff": 0.02},
    ],
)
def test_terms_without_advantages(options):
    """A group of equal rewards has a gradient if there is a KL loss, an entropy bonus or dro's
    penalty. Catches a term that is dropped for sure because its advantage is 0."""
    options = options | {"prompts": ("bb", "dddd")}
    pruned, stock = Toy(**options, **{RULE: "zero", UPDATE: 2}), toy.stock(**options)
    assert error(toy.over_completions(pruned), stock) < 1e-12


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("ranks", [1, 2])
def test_each_update_is_exact(size, ranks):
    """Updates of 2 or 1 of 4 prompts: the expected gradient of each is verl's for its prompts.

    Catches rows that move to another update, another update's denominator, and a budget that
    several of them share.
    """
    options = {MODE: "token-mean", UPDATE: size}
    pruned = Toy(**options, **{RULE: "pps", RATE: 0.5}, ranks=ranks)
    for part in range(4 // size):
        prompts = Toy.PROMPTS[part * size : (part + 1) * size]
        stock = toy.stock(prompts, **options)
        assert error(toy.over_completions(pruned, part), stock) < 1e-12
        assert len(pruned.gradients) == 4 // size
        assert len(set(pruned.sizes)) == 1, "updates of unequal size"


class SameStart:
    """A mistake: systematic draws of both updates from one random number. Its start is given."""

    def __init__(self, *starts):
        self.starts, self.calls = starts, 0

    def __call__(self, rule, rate, batch, _generator):
        start = self.starts[self.calls % len(self.starts)]
        self.calls += 1
        keep_prob = dppo.completion_keep_prob(rule, rate, batch)
        keep = dppo.systematic(keep_prob, dppo.strata_order(batch), start)
        return keep, dppo.ht_weights(keep, keep_prob)


def starts_of(pruned):
    """For each update, the (start, chance) of each outcome of its systematic draw."""
    found = []
    for part in range(2):
        seen = []
        prune = lambda rule, rate, batch, _, seen=seen: seen.append(batch) or (
            batch.size >= 0, torch.ones_like(batch.size)
        )  # fmt: skip
        with mock.patch.object(dppo, "prune_completions", prune):
            pruned.step()
        keep_prob = dppo.completion_keep_prob("pps", 0.5, seen[part])
        laid = keep_prob.flatten()[dppo.strata_order(seen[part])]
        ends = torch.where(laid >= 1, 0.0, laid).cumsum(dim=0) % 1.0
        edges = sorted({0.0, *ends.tolist(), 1.0})
        found.append([((low + high) / 2, high - low) for low, high in itertools.pairwise(edges)])
    return found


def test_an_update_does_not_know_the_draw_before_it():
    """Two updates, the second at parameters that the first has moved. Whatever the first draw kept,
    the expected gradient of the second is verl's there. With one random number for both it is not.
    """
    options = {MODE: "token-mean", UPDATE: 2}
    pruned = Toy(**options, **{RULE: "pps", RATE: 0.5})
    one, two = starts_of(pruned)
    pruned.lr = 3.0
    worst, biased = 0.0, 0.0
    for first, _ in one:
        total = same = chances = 0.0
        for second, chance in two:
            with mock.patch.object(dppo, "prune_completions", SameStart(first, second)):
                found = pruned.step()[1]
            total = total + chance * found
            if abs(first - second) < 0.2:
                same, chances = same + chance * found, chances + chance
        with torch.no_grad():
            pruned.policy.logits += pruned.lr * pruned.policy.logits.grad  # before the second
        stock = toy.stock(Toy.PROMPTS[2:], pruned.policy, **options)
        worst = max(worst, error(total, stock))
        biased = max(biased, error(same / chances, stock) if chances else 0.0)
    assert worst < 1e-12
    assert biased > 1e-3


def test_every_draw_has_random_numbers_of_its_own(monkeypatch):
    """Three steps of two updates. Catches a seed that updates or steps share."""
    keys, generator_for = [], dppo.generator_for
    monkeypatch.setattr(dppo, "generator_for", lambda *key: keys.append(key) or generator_for(*key))
    pruned = Toy(**{UPDATE: 2, PROMPT_RULE: "uniform", MODE: "token-sum", "data__seed": 7})
    for step in (1, 2, 3):
        pruned.trainer.global_steps = step
        pruned.step()
    assert len(keys) == len(set(keys)) == 3 * (1 + 2)
    assert {key[0] for key in keys} == {7}


# ---------------------------------------------------------------------------- prompts


def over_prompts(pruned, measure, updates=1):
    """The expectation of measure() over every outcome of the prompt draw; with several updates, of
    draws that keep one prompt of two."""
    history, size = pruned.trainer.history, 4 // updates
    total = chances = 0.0
    rule, rate = pruned.trainer.prompt_rule, pruned.trainer.prompt_prune_rate
    prompts = torch.arange(4)
    if updates == 1:
        outcomes = proof.prompt_outcomes(rule, rate, history, prompts).values()
    else:
        keep_prob = history.keep_prob(rule, rate, prompts, updates)
        outcomes = []
        for kept in itertools.product(range(size), repeat=updates):
            keep = torch.zeros(4, dtype=torch.bool)
            keep[[part * size + k for part, k in enumerate(kept)]] = True
            outcomes.append((dppo.ht_weights(keep, keep_prob), keep_prob[keep].prod().item()))
    for weights, chance in outcomes:
        drawn = lambda *_, weights=weights: (weights > 0, weights)
        with mock.patch.object(sampler.PromptHistory, "prune", drawn):
            total = total + chance * measure()
        chances += chance
    assert abs(chances - 1) < 1e-9
    return total


def taught(mean_tokens=None, **options):
    """A toy whose prompt history has seen groups of different scores and lengths."""
    pruned = Toy(**options)
    scores = torch.tensor([0.0, 0.3, 0.5, 0.7], dtype=torch.float64)
    lengths = torch.tensor([6, 12, 4, 9])
    groups = scores[:, None].expand(4, toy.G), lengths[:, None].expand(4, toy.G)
    pruned.trainer.history.update(torch.arange(4), *groups)
    pruned.saved = copy.deepcopy(pruned.trainer.history)
    pruned.mean_tokens = mean_tokens
    return pruned


def from_the_same_past(pruned):
    """A step that starts with the history it was taught."""
    pruned.trainer.history = copy.deepcopy(pruned.saved)
    pruned.trainer.mean_tokens = pruned.mean_tokens
    return pruned.step()


@pytest.mark.parametrize("mode", dppo_verl.MODES)
@pytest.mark.parametrize("rule", ["uniform", "dppo", "pps"])
def test_prompts_are_exact(rule, mode):
    """Every outcome of the prompt draw. token-mean divides by a number known before it.

    Catches prompt weights that do not reach the loss, a denominator of the kept prompts, and a
    count that is taken from the draw.
    """
    options = {MODE: mode, PROMPT_RULE: rule, PROMPT_RATE: 0.3, RULE: "none"}
    pruned = taught(50.0, **options)
    found = over_prompts(pruned, lambda: from_the_same_past(pruned)[0])
    wanted = toy.stock(**{MODE: mode})
    if mode == "token-mean":
        wanted *= tokens_of(Toy.PROMPTS) / 50
    assert error(found, wanted) < 1e-12


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
def test_prompts_of_several_updates_are_exact(mode):
    """Two updates of two candidates, of which one is rolled out. Catches prompts that are given to
    updates after the draw."""
    options = {MODE: mode, PROMPT_RULE: "pps", PROMPT_RATE: 0.5, RULE: "none", UPDATE: 2}
    pruned = taught(60.0, **options)
    for part in range(2):
        measure = lambda part=part: from_the_same_past(pruned)[part]
        found = over_prompts(pruned, measure, updates=2)
        prompts = Toy.PROMPTS[2 * part : 2 * part + 2]
        wanted = toy.stock(prompts, **{MODE: mode, UPDATE: 2})
        if mode == "token-mean":
            wanted *= tokens_of(prompts) / 30
        assert error(found, wanted) < 1e-12


def test_both_levels_are_exact():
    """Every outcome of the completion draw for every outcome of the prompt draw. Catches a prompt
    weight that counts twice or never."""
    options = {PROMPT_RULE: "pps", PROMPT_RATE: 0.5, RULE: "pps", RATE: 0.5, MODE: "token-sum"}
    pruned = taught(**options)
    outcome = lambda number: toy.Outcome(0, number)
    measure = lambda: from_the_same_past(pruned)[0]
    found = over_prompts(pruned, lambda: toy.expectation(outcome, measure))
    assert error(found, toy.stock(**{MODE: "token-sum"})) < 1e-12


# ---------------------------------------------------------------------------- mistakes


def kept_tokens(config, model_output, data, dp_group=None):
    """Divides by the tokens of what is kept, as verl counts them."""
    with mock.patch.object(dppo_verl.tu, "assign_non_tensor"):
        return PRUNED_LOSS(config, model_output, data, dp_group)


def weighted_advantages(config, model_output, data, dp_group=None):
    """Multiplies advantages instead of gradients."""
    factor = data["dppo"].values().view(-1, 2)[:, :1]
    rows = [a * f for a, f in zip(data["advantages"].unbind(), factor, strict=True)]
    data["advantages"] = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
    data["dppo"] = torch.cat([torch.ones_like(factor), data["dppo"].values().view(-1, 2)[:, 1:]], 1)
    return PRUNED_LOSS(config, model_output, data, dp_group)


PRUNED_LOSS = dppo_verl.pruned_loss


@pytest.mark.parametrize(
    ("mistake", "options"),
    [
        (kept_tokens, {MODE: "token-mean", **PLAIN}),
        (weighted_advantages, {f"{ACTOR}entropy_coeff": 0}),
        (weighted_advantages, {f"{ACTOR}use_kl_loss": False, f"{ACTOR}entropy_coeff": 0.1}),
        (weighted_advantages, {LOSS: "dro", **PLAIN}),
    ],
)
def test_biased_losses_fail(monkeypatch, mistake, options):
    """Fails if the enumeration cannot tell a mistake in the training processes."""
    options = {"prompts": ("bb", "ccc"), UPDATE: 2} | options
    monkeypatch.setattr(dppo_verl, "pruned_loss", mistake)
    pruned = Toy(**options, **{RULE: "uniform", RATE: 0.4})
    assert error(toy.over_completions(pruned), toy.stock(**options)) > 1e-3


def test_weights_on_padding_fail(monkeypatch):
    """Rows that pad have factor 0, even if their tokens had losses; with the factor of the row that
    they copy, the gradient is biased."""
    from verl.trainer.ppo import padding_utils

    copy = lambda row, tag, eos: (dict(row), tag | {"is_padding": True})
    monkeypatch.setattr(padding_utils, "construct_minimal_padding_template", copy)
    options = {"prompts": ("bb", "ccc"), UPDATE: 2, MODE: "token-sum"}
    pruned, stock = Toy(**options, **{RULE: "uniform", RATE: 0.4}), toy.stock(**options)
    assert error(toy.over_completions(pruned), stock) < 1e-12
    put = pruned.queue.put

    def with_weights(keys, partition_id=None, fields=None, tags=None):
        if fields is not None and "dppo" in fields:
            table = fields["dppo"]
            pad = torch.tensor([key.startswith("pad") for key in keys])
            table[pad, 0] = table[~pad, 0][0]
        return put(keys, partition_id, fields, tags)

    pruned.queue.put = with_weights
    assert error(toy.over_completions(pruned), stock) > 1e-3


def test_advantages_after_pruning_fail(monkeypatch):
    """Fails if the enumeration cannot tell advantages of partial groups."""
    options = {"prompts": ("bb", "ccc"), UPDATE: 2, **PLAIN}
    pruned = Toy(**options, **{RULE: "uniform", RATE: 0.4})
    partial = toy.PPOTrainerSync._compute_advantage
    monkeypatch.setattr(dppo_verl.DPPOTrainer, "_compute_advantage", partial)
    assert error(toy.over_completions(pruned), toy.stock(**options)) > 1e-3
