"""The embedded task: problems are functions of (split, index), the teacher errs only at carries."""

import hashlib
import random
import re

import data
from tasks import arithmetic

SPLITS = ("train", "heldout", "longer", "mixed", "mixed-heldout", "base")


def chains(split):
    return [arithmetic.problem(split, index) for index in range(400)]


def test_problems_stay_the_same():
    """Those of the committed runs."""
    text = str([chains(split) for split in SPLITS])
    assert hashlib.sha256(text.encode()).hexdigest()[:12] == "3bc124046b24"


def test_teacher_forgets_carries_and_nothing_else():
    """Catches errors without a carry, and workings that do not add up."""
    rng = random.Random(0)
    carries = forgotten = 0
    for prompt, answer, _ in chains("train"):
        assert arithmetic.worked_answer(prompt).rpartition("=")[2] == answer
        worked = arithmetic.worked_answer(prompt, 0.45, rng)
        for left, right, result in re.findall(r"(\d+)\+(\d+)=(\d+)", worked):
            wrong = int(result) != int(left) + int(right)
            carry = int(left) % 10 + int(right) > 9
            assert carry or not wrong
            assert not wrong or int(result) == int(left) + int(right) - 10
            carries += carry
            forgotten += wrong
    assert abs(forgotten / carries - 0.55) < 4 * (0.55 * 0.45 / carries) ** 0.5


def test_longest_answers_fit():
    """Catches a limit on tokens that cuts the longest right answer or its end token."""
    for name, longest in (("", 8), ("-longer", 12), ("-mixed", 18)):
        worked = arithmetic.worked_answer("+".join("9" * longest) + "?")
        assert data.max_new_tokens(f"arithmetic{name}") == len(worked) + 1
