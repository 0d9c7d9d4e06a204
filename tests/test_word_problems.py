"""Word problems: true solutions, a teacher that errs as often as it should, unseen wording."""

import hashlib
import operator
import re
from collections import Counter

import pytest

from tasks import word_problems

SPLITS = ("sft", "train", "heldout")
SIGNS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}


def problems(split, count=3000):
    return [word_problems.problem(split, index) for index in range(count)]


def test_problems_stay_the_same():
    """Those of the committed runs. Before you change the digest, read some."""
    text = str([problems(split, 1000) for split in SPLITS])
    assert hashlib.sha256(text.encode()).hexdigest()[:12] == "b9625fcc8085"


@pytest.mark.parametrize("split", SPLITS)
def test_solutions_are_true(split, monkeypatch):
    """Catches numbers that are told or used only, and plots that prefer few steps."""
    if split == "sft":  # else its teacher errs
        monkeypatch.setattr(word_problems, "CARE_PROB", 1.0)
    steps = Counter()
    for text, answer, source, solution in problems(split):
        *lines, boxed = solution.split("\n")
        told = re.findall(r"\d+", text)
        assert set(told) <= set(re.findall(r"\d+", solution)), (text, solution)
        known = {*told, "2"} if "twice" in text else {*told}
        for line in lines:
            a, sign, b, result = re.fullmatch(r"(\d+)([-+*/])(\d+)=(\d+)", line).groups()
            assert SIGNS[sign](int(a), int(b)) == int(result), solution
            assert {a, b} <= known, (text, solution)
            known.add(result)
        assert answer == result
        assert boxed == f"\\boxed{{{answer}}}"
        steps[source] += 1
    assert all(abs(count / 3000 - 1 / 3) < 0.04 for count in steps.values()), steps
