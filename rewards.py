"""
Rewards: 1.0 for a right answer, 0.0 for a wrong one, None if the problem cannot be scored.

A reward is a function of (completion, answer): the model's text, and the problem's reference
answer. What the model answers is called `given`.

None leaves a completion out of its group's mean and standard deviation and gives it advantage 0. It
is for problems whose reference answer is missing, or cannot be read. A completion that cannot be
read is wrong: 0.0.

runtime/answers.py says which answers are equal.
"""

import math
import re
from typing import NamedTuple

import torch

import chat_format
from runtime import InputError, answers, math_judge

LONGEST_ANSWER = 2000  # characters; anything longer is not an answer
LARGEST = 1e30  # of a reward's absolute value: squares must be finite
BOX = re.compile(r"\\(?:boxed|fbox)(?![a-zA-Z])\s*")
BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # an escaped one is text
BARE = re.compile(rf"[^\s$]{{0,{LONGEST_ANSWER}}}")  # content without braces, and what follows it
AFTER = re.compile(r"(?:\\[)\]\\]|[*,;:.])+$")  # \) \] \\ and punctuation are not part of it


def arithmetic_reward(completion: str, answer: str) -> float | None:
    """Exact: the text after the last "=" must equal the reference answer digit for digit.

    >>> arithmetic_reward("7+9=16;16+5=21", "21"), arithmetic_reward("7+9=16;16+5=11", "21")
    (1.0, 0.0)
    """
    if not answer.isdigit():
        return None
    return float(completion.rpartition("=")[2] == answer)


def math_reward(completion: str, answer: str) -> float | None:
    """Whether the last box after the last thought equals the reference answer.

    >>> math_reward("I think \\\\boxed{7}</think> so it is \\\\boxed{\\\\frac{2400}{2}}.", "1,200")
    1.0
    """
    if not has_value(answer):
        return None
    given = final_answer(completion)
    if given is None:
        return 0.0
    return float(answers.equal(answer, given))


def has_value(answer: str) -> bool:
    """Whether a reference answer can be read. If not, all completions would earn the same."""
    return 0 < len(answer.strip()) <= LONGEST_ANSWER and answers.is_readable(answer)


def verify(answer: str, given: str) -> bool:
    """Whether math-verify finds the values of two answers equal; False on a timeout."""
    return math_judge.ask(answers.read(answer).value, answers.read(given).value)


def final_answer(completion: str) -> str | None:
    """The content of the last box after the last thought. None if there is no box, if it is too
    long or never closed, or if a thought never ended."""
    for opening, closing in chat_format.THOUGHTS:
        completion = completion.rpartition(closing)[2]
        if opening in completion:
            return None
    box = last_box(completion)
    return box and box.content


class Box(NamedTuple):
    """A box in a text: text[start:end] is all of it. Its content is None if it was never closed."""

    content: str | None
    start: int
    end: int


def last_box(text: str) -> Box | None:
    """The last \\boxed{...} or \\fbox{...} of a text, with balanced braces.

    Space may precede the brace. Without one, the box ends at white space or a dollar sign. It must
    then hold a digit, a command or one letter: "a \\boxed answer" is no box.

    >>> last_box("$\\\\boxed {59}$").content, last_box("so $\\\\boxed 59$").content
    ('59', '59')
    """
    for opening in reversed([*BOX.finditer(text)]):
        start, inside = opening.span()
        if text[inside : inside + 1] != "{":
            content = AFTER.sub("", BARE.match(text, inside)[0])
            if re.search(r"[\d\\]|^[a-zA-Z]$", content):
                return Box(content, start, inside + len(content))
            continue
        depth = 0
        for brace in BRACE.finditer(text, inside, inside + LONGEST_ANSWER + 2):
            depth += {"{": 1, "}": -1}.get(brace[0], 0)
            if depth == 0:
                return Box(text[inside + 1 : brace.start()], start, brace.end())
        return Box(None, start, len(text))
    return None


# ---------------------------------------------------------------------------- of a batch


def seen(rollouts, tokenizer) -> list[list[str]]:
    """What a reward sees of G completions for each of K prompts, [K][G]: with the marks of
    thoughts, also of one that the prompt opens."""
    texts = []
    opened = chat_format.open_thoughts(tokenizer, rollouts.prompt_ids)  # K
    rows = zip(opened, rollouts.completion_ids.tolist(), rollouts.lengths.tolist(), strict=True)
    for opening, group, lengths in rows:
        completions = [ids[:length] for ids, length in zip(group, lengths, strict=True)]
        decoded = chat_format.decode(tokenizer, completions, keep_thoughts=True)
        texts.append([opening + text for text in decoded])
    return texts


def score(rollouts, problems, tokenizer, reward) -> tuple[list[list[str]], torch.Tensor]:
    """(texts, rewards) of G completions for each of K problems: lists [K][G], float64 [K, G].

    Texts have no special tokens. A reward is NaN if the completion cannot be scored, or was not
    sampled.
    """
    G = rollouts.lengths.shape[1]
    rows = zip(
        rollouts.completion_ids.flatten(0, 1).tolist(), rollouts.lengths.flatten().tolist(),
        strict=True,
    )  # fmt: skip
    completions = [ids[:length] for ids, length in rows]  # K * G
    texts = texts_seen = chat_format.decode(tokenizer, completions)
    if reward is math_reward:  # it must see whether a thought has ended
        texts_seen = [text for group in seen(rollouts, tokenizer) for text in group]
    rewards = [
        reward_of(text, problems[number // G].answer, reward) if completions[number] else math.nan
        for number, text in enumerate(texts_seen)
    ]
    texts = [texts[k * G : (k + 1) * G] for k in range(len(problems))]
    return texts, torch.tensor(rewards, dtype=torch.float64).view(len(problems), G)


def reward_of(completion: str, answer: str, reward) -> float:
    """What a reward returns, as a number; None becomes NaN."""
    which = f"the completion {completion[:80]!r}, with the reference answer {answer[:80]!r}"
    try:
        value = reward(completion, answer)
    except Exception as error:
        error.add_note(f"The reward raised this for {which}.")
        raise
    if value is None:
        return math.nan
    try:
        number = float(value) if hasattr(value, "__float__") else math.nan
    except (OverflowError, RuntimeError, TypeError, ValueError):  # 10**400, or several numbers
        number = math.nan
    if not abs(number) <= LARGEST:  # or NaN
        said = "a number that is too large" if isinstance(value, int) else f"{value!r}"[:80]
        wanted = f"return a number of at most {LARGEST:g}, or None if the answer cannot be scored"
        raise InputError(f"the reward is {said} for {which}: {wanted}")
    return number
