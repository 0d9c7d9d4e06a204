"""
The embedded task: chains of additions, worked out step by step, and a base model that often fails.

    prompt      7+9+5?
    completion  7+9=16;16+5=21      then the end token; the answer is the number after the last "="

The base model imitates an imperfect teacher, which forgets 58 % of the carries (16+5=11) and
continues from the wrong total. It therefore solves nearly all problems without carries and fails
most long ones. Reinforcement learning has to amplify the right habit, first on short chains, then
on long ones, so groups that are dead (all right or all wrong) come alive and die again.

A problem is a function of (split, index), so no data is stored. The base model is stored, in the
folder BASE: a Qwen3 of 0.8 M parameters in float16. Its tokenizer has a token for each byte. The
program that trained it, in two minutes, is `git show dd2709c:tasks/arithmetic.py`.
"""

import random
import zlib
from pathlib import Path

BASE = Path(__file__).resolve().parent / "arithmetic-base"  # a Hugging Face folder
CHAIN = (2, 8)  # shortest and longest chain in the default splits
LONGER = (9, 12)  # longer than any chain in train; mixed has even longer ones
UNSOLVED = (13, 18)  # in the mixed splits; the base model never solves these
TRIVIAL = (2, 5)  # in the mixed splits; no carries, so the base model nearly always solves these

TRAIN_PROBLEMS = 512


# ---------------------------------------------------------------------------- problems


def problem(split: str, index: int) -> tuple[str, str, str]:
    """Problem number `index` of a split, as (prompt, answer, source); source is the kind of chain.

    train          chains of 2 to 8 numbers, none of them held out
    heldout        chains of 2 to 8 that no training split contains (a fifth of all, by checksum)
    longer         chains of 9 to 12, held out
    mixed          35 % trivial chains without carries, 30 % chains of 13 to 18, 35 % like `train`
    mixed-heldout  the same mix, held out
    """
    rng = random.Random(f"{split}/{index}")
    while True:
        numbers, source = _chain(split, rng)
        prompt = "+".join(map(str, numbers)) + "?"
        held_out = zlib.crc32(prompt.encode()) % 5 == 0
        if held_out == (split in ("heldout", "longer", "mixed-heldout")):
            return prompt, str(sum(numbers)), source


def _chain(split: str, rng: random.Random) -> tuple[list[int], str]:
    kind = rng.random() if split.startswith("mixed") else 1.0
    if kind < 0.35:
        numbers = []
        for left in reversed(range(rng.randint(*TRIVIAL))):
            # Each of the `left` numbers still to come is at least 1, and the total stays below 10.
            numbers.append(rng.randint(1, 9 - left - sum(numbers)))
        return numbers, "trivial"
    if kind < 0.65:
        span, source = UNSOLVED, "unsolved"
    else:
        span, source = (LONGER, "longer") if split == "longer" else (CHAIN, "chain")
    count = rng.randint(*span)
    return [rng.randint(1, 9) for _ in range(count)], source
