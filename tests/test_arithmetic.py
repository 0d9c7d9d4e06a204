"""The embedded task: problems are functions of (split, index)."""

import hashlib

import toy

import data
from tasks import arithmetic

SPLITS = ("train", "heldout", "longer", "mixed", "mixed-heldout")


def chains(split):
    return [arithmetic.problem(split, index) for index in range(400)]


def test_problems_stay_the_same():
    """Those of the committed runs."""
    text = str([chains(split) for split in SPLITS])
    assert hashlib.sha256(text.encode()).hexdigest()[:12] == "1d27d9349a0e"


def test_longest_answers_fit():
    """Catches a limit on tokens that cuts the longest right answer or its end token."""
    for name, longest in (("", 8), ("-longer", 12), ("-mixed", 18)):
        worked = toy.worked("+".join("9" * longest) + "?")
        assert data.max_new_tokens(f"arithmetic{name}") == len(worked) + 1
