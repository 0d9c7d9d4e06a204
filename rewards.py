"""
Rewards: 1.0 for a right answer, 0.0 for a wrong one, None where it cannot be told.

None takes a completion out of its group's mean and deviation and gives it advantage 0; it is for golds that
are missing or have no answer in them, never for a completion that is hard to read (that is wrong: 0.0).
"""

import re
from decimal import Decimal

NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?|-?\.\d+")


def arithmetic_reward(completion: str, gold: str) -> float | None:
    """Exact: the text after the last "=" must be the gold number, digit for digit.

    >>> arithmetic_reward("7+9=16;16+5=21", "21"), arithmetic_reward("7+9=16;16+5=11", "21")
    (1.0, 0.0)
    """
    if not gold.isdigit():
        return None
    return float(completion.rpartition("=")[2] == gold)


def number_reward(completion: str, gold: str) -> float | None:
    """The last number of the last \\boxed{} (or, without one, of the completion) equals the gold's last number.

    >>> number_reward("It is \\\\boxed{1,200.0}, I think 7.", "5 * 240 = 1200 #### 1200")
    1.0
    """
    wanted, given = last_number(gold), last_number(last_boxed(completion) or completion)
    if wanted is None:
        return None
    return float(given == wanted)


def last_number(text: str) -> Decimal | None:
    """The last number written in a text, thousands commas allowed; None if there is none."""
    found = NUMBER.findall(text)
    return Decimal(found[-1].replace(",", "")) if found else None


def last_boxed(text: str) -> str | None:
    """The content of the last \\boxed{...}, braces balanced; None if there is none or it is never closed."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    start, depth = start + len("\\boxed{"), 1
    for position in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return text[start:position]
    return None
