"""Word problems: true solutions, a teacher that errs as often as it should, unseen wording."""

import hashlib

from tasks import word_problems

SPLITS = ("sft", "train", "heldout")


def problems(split, count=3000):
    return [word_problems.problem(split, index) for index in range(count)]


def test_problems_stay_the_same():
    """Those of the committed runs. Before you change the digest, read some."""
    text = str([problems(split, 1000) for split in SPLITS])
    assert hashlib.sha256(text.encode()).hexdigest()[:12] == "b9625fcc8085"
