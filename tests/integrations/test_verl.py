"""dppo_verl.py without Ray: KL losses, several updates, padding. test_exact.py has the proof.

tests/verl.sh builds an environment with verl and runs these tests in it; without verl they are
skipped.
"""

import itertools
from unittest import mock

import numpy as np
import pytest
import torch
from exact import error, over_completions, over_prompts

import dppo

pytest.importorskip("verl", reason="tests/verl.sh runs these, with verl")
import verl_toy as toy
from verl.trainer.ppo import core_algos
from verl_toy import (
    ACTOR,
    ENTROPY,
    FEW,
    KL,
    LOSS,
    MODE,
    NO_TERMS,
    PROMPT_RATE,
    PROMPT_RULE,
    RATE,
    RULE,
    UPDATE,
    Toy,
    tokens_of,
)

# ---------------------------------------------------------------------------- completions


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


@pytest.mark.parametrize(
    ("rule", "options"),
    [
        *(("pps", {f"{ACTOR}kl_loss_type": kind}) for kind in ("kl", "abs", "mse", "low_var_kl")),
        ("zero", {LOSS: "dro", **NO_TERMS, "prompts": ("bb", "dddd")}),
        ("zero", {KL: True, ENTROPY: 0, "prompts": ("bb", "dddd")}),
        ("zero", {KL: False, ENTROPY: 0.02, "prompts": ("bb", "dddd")}),
    ],
)
def test_terms_without_advantages(rule, options):
    """Each of verl's estimates of KL, and zero where no completion of a group is right: it has a
    gradient if there is a KL loss, an entropy bonus or dro's penalty. Catches a gradient that the
    factor misses, and a term that is dropped for sure because its advantage is 0."""
    pruned = Toy(**FEW | options, **{RULE: rule, RATE: 0.5})
    assert error(over_completions(pruned.gradient), pruned.stock()) < 1e-12


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
        found = over_completions(pruned.gradient, part)[part]
        assert error(found, stock) < 1e-12
        assert len(pruned.gradients) == 4 // size
        assert len(set(pruned.sizes)) == 1, "updates of unequal size"


class SameStart:
    """A mistake: systematic draws of both updates from one random number. Its start is given."""

    def __init__(self, *starts):
        self.starts, self.calls = starts, 0

    def __call__(self, rule, rate, batch, _generator):
        start = self.starts[self.calls % len(self.starts)]
        self.calls += 1
        keep_prob = dppo.COMPLETION_RULES[rule].keep_prob(batch, rate)
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
        keep_prob = dppo.COMPLETION_RULES["pps"].keep_prob(seen[part], 0.5)
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
    for _step in range(3):
        pruned.step()
    assert len(keys) == len(set(keys)) == 3 * (1 + 2)
    assert {key[0] for key in keys} == {7}


# ---------------------------------------------------------------------------- prompts


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
def test_prompts_of_several_updates_are_exact(mode):
    """Two updates of two candidates, of which one is rolled out. Catches prompts that are given to
    updates after the draw."""
    options = {MODE: mode, PROMPT_RULE: "uniform", PROMPT_RATE: 0.5, RULE: "none", UPDATE: 2}
    pruned = Toy(**options)
    pruned.teach(mean_tokens=60.0)
    for part, found in enumerate(over_prompts(pruned.gradient)):
        prompts = Toy.PROMPTS[2 * part : 2 * part + 2]
        wanted = toy.stock(prompts, **{MODE: mode, UPDATE: 2})
        if mode == "token-mean":
            wanted *= tokens_of(prompts) / 30
        assert error(found, wanted) < 1e-12


def test_weights_on_padding_fail(monkeypatch):
    """Rows that pad have factor 0, even if their tokens had losses; with the factor of the row that
    they copy, the gradient is biased."""
    from verl.trainer.ppo import padding_utils

    copy = lambda row, tag, eos: (dict(row), tag | {"is_padding": True})
    monkeypatch.setattr(padding_utils, "construct_minimal_padding_template", copy)
    pruned = Toy(**FEW, **{MODE: "token-sum", RULE: "uniform", RATE: 0.4})
    stock = pruned.stock()
    assert error(over_completions(pruned.gradient), stock) < 1e-12
    put = pruned.queue.put

    def with_weights(keys, partition_id=None, fields=None, tags=None):
        if fields is not None and "dppo" in fields:
            table = fields["dppo"]
            pad = torch.tensor([key.startswith("pad") for key in keys])
            table[pad, 0] = table[~pad, 0][0]
        return put(keys, partition_id, fields, tags)

    pruned.queue.put = with_weights
    assert error(over_completions(pruned.gradient), stock) > 1e-3
