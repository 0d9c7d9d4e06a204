"""Rewards: a table of answers, right and wrong, and None for what cannot be told."""

import time

import pytest

import rewards


@pytest.mark.parametrize(
    ("completion", "gold", "reward"),
    [
        ("7+9=16;16+5=21", "21", 1.0),
        ("7+9=16;16+5=11", "21", 0.0),
        ("7+9=6;16+5=21", "21", 1.0),  # only the answer counts
        ("21", "21", 1.0),  # no working shown: the text after no "=" is all of it
        ("7+9=16;16+5=021", "21", 0.0),
        ("7+9=16;16+5=21;", "21", 0.0),
        ("7+9=16;16+5=2", "21", 0.0),  # cut off
        ("", "21", 0.0),
        ("=", "21", 0.0),
        ("7+9=16", "", None),
        ("7+9=16", "sixteen", None),
    ],
)
def test_arithmetic_reward(completion, gold, reward):
    assert rewards.arithmetic_reward(completion, gold) == reward


@pytest.mark.parametrize(
    ("completion", "gold", "reward"),
    [
        ("so it is \\boxed{72}", "48+24=<<48+24=72>>72 ... #### 72", 1.0),
        ("so it is 72.", "#### 72", 1.0),
        ("\\boxed{71} and not 72", "72", 0.0),  # the box counts, not what follows
        ("\\boxed{71} no, \\boxed{72}", "72", 1.0),  # the last box
        ("\\boxed{\\text{about }{72}}", "72", 1.0),
        ("\\boxed{72", "72", 1.0),  # never closed: the last number of the text
        ("1,234 eggs", "1234", 1.0),
        ("27", "27.0", 1.0),
        ("-3", "3", 0.0),
        ("no number", "3", 0.0),
        ("", "3", 0.0),
        ("3", "no number", None),
    ],
)
def test_number_reward(completion, gold, reward):
    assert rewards.number_reward(completion, gold) == reward


def test_hostile_answers_are_wrong_and_quick():
    started = time.perf_counter()
    for text in ("{" * 10_000_000, "\\boxed{" * 100_000, "9" * 1_000_000, "1," * 1_000_000, "\\boxed{10^{10^{10}}}"):
        assert rewards.number_reward(text, "3") == 0.0
    assert time.perf_counter() - started < 10
