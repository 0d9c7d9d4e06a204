"""
Rewards: 1.0 for a right answer, 0.0 for a wrong one, None if the problem cannot be scored.

A reward is a function of (completion, answer) or of (completion, answer, row): the model's text,
the reference answer, and a dict of the problem, its answer, its source and all columns of its row.
Each call gets its own copy. The text keeps the marks of thoughts, and begins with one if the prompt
opened a thought.

None leaves a completion out of its group's mean and standard deviation and gives it advantage 0. It
is for reference answers that are missing or cannot be read. A completion that cannot be read is
wrong: 0.0.
"""

import copy
import inspect
import math
import re
from collections import namedtuple

import torch

import chat_format
from runtime import InputError, math_judge, ranks
from runtime.answers import LONGEST, equal, has_value

JUDGE_SECONDS = 60.0  # of CPU time, for the comparisons of a batch
LARGEST = 1e30  # of a reward's absolute value: squares must be finite
BOX = re.compile(r"\\(?:boxed|fbox)(?![a-zA-Z])\s*")
BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # an escaped one is text
BARE = re.compile(rf"[^\s$]{{0,{LONGEST}}}")  # content without braces, and what follows it
AFTER = re.compile(r"(?:\\[)\]\\]|[*,;:.])+$")  # \) \] \\ and punctuation are not part of it


def arithmetic_reward(completion: str, answer: str) -> float | None:
    """Exact: the text after the last "=" must equal the reference answer digit for digit."""
    return float(completion.rpartition("=")[2] == answer) if answer.isdigit() else None


def math_reward(completion: str, answer: str) -> float | None:
    """Whether the last box after the last thought equals the reference answer."""
    if not has_value(answer):
        return None
    given = final_answer(completion)
    return float(given is not None and equal(answer, given))


def final_answer(completion: str) -> str | None:
    """The content of the last box after the last thought. None if there is no box, if it is too
    long or never closed, or if a thought never ended."""
    for opening, closing in chat_format.THOUGHTS:
        completion = completion.rpartition(closing)[2]
        if opening in completion:
            return None
    box = last_box(completion)
    return box and box.content


# A box in a text: text[start:end] is all of it. Its content is None if it was never closed.
Box = namedtuple("Box", "content start end")


def last_box(text: str) -> Box | None:
    """The last \\boxed{...} or \\fbox{...} of a text, with balanced braces.

    Space may precede the brace. Without one, the box ends at white space or a dollar sign. It must
    then hold a digit, a command or one letter: "a \\boxed answer" is no box.
    """
    for opening in reversed([*BOX.finditer(text)]):
        start, inside = opening.span()
        if text[inside : inside + 1] != "{":
            content = AFTER.sub("", BARE.match(text, inside)[0])
            if re.search(r"[\d\\]|^[a-zA-Z]$", content):
                return Box(content, start, inside + len(content))
            continue
        depth = 0
        for brace in BRACE.finditer(text, inside, inside + LONGEST + 2):
            depth += {"{": 1, "}": -1}.get(brace[0], 0)
            if depth == 0:
                return Box(text[inside + 1 : brace.start()], start, brace.end())
        return Box(None, start, len(text))
    return None


def takes_row(reward) -> bool:
    """Whether a reward has a third parameter, `row`. InputError if it cannot be called."""
    try:
        signature = inspect.signature(reward)
        row = {"row": {}} if "row" in [*signature.parameters][2:] else {}
        takes_keywords = any(one.kind is one.VAR_KEYWORD for one in signature.parameters.values())
        if takes_keywords and not row:
            raise TypeError("columns come in row, not as keywords")
        signature.bind("", "", **row)
        return bool(row)
    except (TypeError, ValueError) as error:  # ValueError: a function of C may have no signature
        name = getattr(reward, "__qualname__", repr(reward))
        wanted = "it must accept (completion, answer) or (completion, answer, row)"
        raise InputError(f"the reward {name} cannot be called ({error}): {wanted}") from None


def seen(rollouts, tokenizer) -> list[list[str]]:
    """What a reward sees of G completions for each of K prompts, [K][G]: with the marks of
    thoughts, also of one that the prompt opens."""
    texts = []
    opened = chat_format.open_thoughts(tokenizer, rollouts.prompt_ids)  # K
    rows = zip(opened, rollouts.completion_ids.tolist(), rollouts.lengths.tolist(), strict=True)
    for opening, group, lengths in rows:
        completions = [ids[:length] for ids, length in zip(group, lengths, strict=True)]
        decoded = chat_format.decode(tokenizer, completions)
        texts.append([opening + text for text in decoded])
    return texts


def score(rollouts, problems, tokenizer, reward) -> tuple[list[list[str]], torch.Tensor]:
    """(texts, rewards) of G completions for each of K problems: lists [K][G], float64 [K, G].

    The texts are what the reward sees. What cannot be scored has reward NaN.
    """
    texts = seen(rollouts, tokenizer)
    rewards = torch.tensor(of_texts(texts, problems, reward), dtype=torch.float64)
    return texts, rewards.view(rollouts.lengths.shape)


def of_texts(texts: list[list[str]], problems, reward) -> list[list[float]]:
    """The rewards [K][G] of a batch of texts, whose comparing takes at most JUDGE_SECONDS."""
    pairs = zip(problems, texts, strict=True)
    with math_judge.budget(JUDGE_SECONDS) as is_spent:
        found = [[reward_of(text, problem, reward) for text in group] for problem, group in pairs]
        if is_spent():
            ranks.say(f"note: after {JUDGE_SECONDS:g} s of comparing, formulas count as wrong")
    return found


def reward_of(completion: str, problem, reward) -> float:
    """What a reward returns, as a number; None becomes NaN."""
    answer = problem.answer
    which = f"the completion {completion[:80]!r}, with the reference answer {answer[:80]!r}"
    optional = {}
    if takes_row(reward):  # a copy, because what one call changes would reach the next
        known = {"problem": problem.text, "answer": answer, "source": problem.source}
        optional["row"] = known | copy.deepcopy(problem.row)
    value = reward(completion, answer, **optional)
    if value is None:
        return math.nan
    number = float(value) if hasattr(value, "__float__") else math.nan  # a text is no number
    if not abs(number) <= LARGEST:  # or NaN
        wanted = f"return a number of at most {LARGEST:g}, or None if the answer cannot be scored"
        raise InputError(f"the reward is {value!r:.80} for {which}: {wanted}")
    return number
