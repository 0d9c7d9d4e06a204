"""
Rewards: 1.0 for a right answer, 0.0 for a wrong one, None if the problem cannot be scored.

A reward is a function of (completion, answer): the model's text, and the problem's reference
answer. What the model answers is called `given`.

None leaves a completion out of its group's mean and standard deviation and gives it advantage 0. It
is for problems whose reference answer is missing, or cannot be read. A completion that cannot be
read is wrong: 0.0.

Plain numbers are compared here. Other answers go to math-verify, in a process of its own: see
runtime/math_judge.py.
"""

import math
import re
from decimal import Context, Decimal

import torch

from runtime import InputError, math_judge

LONGEST_ANSWER = 2000  # characters; anything longer is not an answer
NUMBER = re.compile(r"-?(?:(?:\d+|\d{1,3}(?:,\d{3})+)(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d{1,3})?")
# Differences in spelling that never change the value. A space between two digits can change it.
SPELLINGS = re.compile(
    r"\\(?:left|right)(?![a-zA-Z])|(?<=\\)[dt](?=frac)"
    r"|(?<!\d)(?:\\[!,;: ]|\s)+|(?:\\[!,;: ]|\s)+(?!\d)"
)


def arithmetic_reward(completion: str, answer: str) -> float | None:
    """Exact: the text after the last "=" must equal the reference answer digit for digit.

    >>> arithmetic_reward("7+9=16;16+5=21", "21"), arithmetic_reward("7+9=16;16+5=11", "21")
    (1.0, 0.0)
    """
    if not answer.isdigit():
        return None
    return float(completion.rpartition("=")[2] == answer)


def math_reward(completion: str, answer: str) -> float | None:
    """Whether the last \\boxed{} after the last </think> equals the reference answer.

    >>> math_reward("I think \\\\boxed{7}</think> so it is \\\\boxed{\\\\frac{2400}{2}}.", "1,200")
    1.0
    """
    if not has_value(answer):
        return None
    given = final_answer(completion)
    if given is None:
        return 0.0
    if normal_form(given) == normal_form(answer):
        return 1.0
    if _number(given) is not None and _number(answer) is not None:
        return 0.0  # two numbers that differ
    return float(verify(answer, given))


def has_value(answer: str) -> bool:
    """Whether a reference answer can be read. If not, all completions would earn the same."""
    if _number(answer) is not None:
        return True
    return 0 < len(answer.strip()) <= LONGEST_ANSWER and math_judge.ask(answer, None)


def normal_form(answer: str) -> str:
    """Equal normal forms mean equal answers; different ones prove nothing."""
    number = _number(answer)
    if number is None:
        return SPELLINGS.sub("", answer)
    return f"{number.normalize(Context(prec=len(answer))):f}"  # prec: keep every digit


def verify(answer: str, given: str) -> bool:
    """Whether math-verify finds two answers, both unboxed, equal; False on a timeout."""
    return math_judge.ask(answer, given)


def final_answer(completion: str) -> str | None:
    """The last \\boxed{} after the last </think>; None without one, or if thinking never ended."""
    _thought, end, text = completion.rpartition("</think>")
    return None if not end and "<think>" in text else last_boxed(text)


def last_boxed(text: str) -> str | None:
    """The content of the last \\boxed{...}, with balanced braces.

    None if there is no box, or if the last one is too long or never closed.
    """
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    start += len("\\boxed{")
    depth = 1
    for brace in re.finditer(r"[{}]", text[start : start + LONGEST_ANSWER + 1]):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return text[start : start + brace.start()]
    return None


def _number(text: str) -> Decimal | None:
    """The value of a plain number, which may have thousands commas and dollar signs; else None."""
    text = text.strip().strip("$").strip()
    return Decimal(text.replace(",", "")) if NUMBER.fullmatch(text) else None


# ---------------------------------------------------------------------------- of a batch


def decode(completion_ids: torch.Tensor, lengths: torch.Tensor, tokenizer) -> list[str]:
    """Texts of completions [..., T] with lengths [...], flattened, without special tokens."""
    rows = zip(completion_ids.flatten(0, -2).tolist(), lengths.flatten().tolist(), strict=True)
    return [tokenizer.decode(ids[:length], skip_special_tokens=True) for ids, length in rows]


def score(rollouts, problems, tokenizer, reward) -> tuple[list[list[str]], torch.Tensor]:
    """(texts, rewards) of G completions for each of K problems: lists [K][G], float64 [K, G].

    A reward is NaN if the completion cannot be scored, or was not sampled.
    """
    flat = decode(rollouts.completion_ids, rollouts.lengths, tokenizer)
    G = rollouts.lengths.shape[1]
    texts = [flat[k * G : (k + 1) * G] for k in range(len(problems))]
    sampled = (rollouts.lengths > 0).flatten().tolist()
    rewards = [
        reward_of(text, problems[number // G].answer, reward) if sampled[number] else math.nan
        for number, text in enumerate(flat)
    ]
    return texts, torch.tensor(rewards, dtype=torch.float64).view(len(problems), G)


def reward_of(completion: str, answer: str, reward) -> float:
    """What a reward returns, as a number; None becomes NaN."""
    which = f"the completion {completion[:80]!r}, with the reference answer {answer[:80]!r}"
    try:
        found = reward(completion, answer)
    except Exception as error:
        error.add_note(f"The reward raised this for {which}.")
        raise
    if found is None:
        return math.nan
    if not hasattr(found, "__float__") or not math.isfinite(found):
        wanted = "return a finite number, or None if the reference answer cannot be scored"
        raise InputError(f"the reward is {found!r} for {which}: {wanted}")
    return float(found)
