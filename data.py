"""
Sets of problems and their prompts: embedded ones, data sets of the Hugging Face hub, or your file.

problem_files.py reads a file. What cannot be used is reported before training starts.
"""

import datetime
import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import chat_format
import dppo
import problem_files
import rewards
from problem_files import Problem
from runtime import InputError, ranks
from tasks import arithmetic, word_problems

HUB = {  # data name -> id, configuration and split on the hub
    "gsm8k": ("openai/gsm8k", "main", "train"),
    "math": ("DigitalLearningGmbH/MATH-lighteval", "default", "train"),
    "dapo": ("haizhongzheng/DAPO-Math-17K-cleaned", None, "train"),
    "gsm8k-test": ("openai/gsm8k", "main", "test"),
    "math500": ("HuggingFaceH4/MATH-500", None, "test"),
    "aime24": ("HuggingFaceH4/aime_2024", None, "train"),
    "amc23": ("math-ai/amc23", None, "test"),
    "minerva": ("math-ai/minervamath", None, "test"),
    "olympiadbench": ("math-ai/olympiadbench", None, "test"),
    "gaokao2023en": ("MARIO-Math-Reasoning/Gaokao2023-Math-En", None, "train"),
}
EVAL_PROBLEMS = 300  # default number of evaluation problems of an embedded split
FILE_TOKENS = 1024  # default --max-new-tokens for data that are not embedded
HELD_OUT_SHARE = 0.05  # of data that are not embedded: the last rows


class Embedded(NamedTuple):
    """A set of problems that a task computes."""

    # Its problem(split, index) is (text, answer, source), then a solution if any. Problems of
    # train_split have the indices 0 to TRAIN_PROBLEMS - 1.
    task: ModuleType
    train_split: str | None  # None: for evaluation only
    eval_split: str
    reward: Callable
    longest_completion: int  # tokens; the default --max-new-tokens


EMBEDDED = {  # data name -> its task. A new one needs a module in tasks/ and a row here.
    "arithmetic": Embedded(
        arithmetic, "train", "heldout",
        rewards.arithmetic_reward, arithmetic.longest_completion(arithmetic.CHAIN),
    ),
    "arithmetic-mixed": Embedded(
        arithmetic, "mixed", "mixed-heldout",
        rewards.arithmetic_reward, arithmetic.longest_completion(arithmetic.UNSOLVED),
    ),
    "arithmetic-longer": Embedded(
        arithmetic, None, "longer",
        rewards.arithmetic_reward, arithmetic.longest_completion(arithmetic.LONGER),
    ),
    "words": Embedded(
        word_problems, "train", "heldout",
        rewards.math_reward, word_problems.LONGEST_COMPLETION,
    ),
}  # fmt: skip


# ---------------------------------------------------------------------------- problems


def train_problems(data: str, *, hold_out: bool, reward=None) -> list[Problem]:
    """The problems to train on. With hold_out, data that are not embedded lose their last 5 %.

    Problems whose reference answers the default reward cannot read are dropped, unless `reward` is
    one of the user's.
    """
    if data in EMBEDDED:
        task, split = EMBEDDED[data].task, EMBEDDED[data].train_split
        if split is None:
            trained = ", ".join(name for name in EMBEDDED if EMBEDDED[name].train_split)
            raise InputError(f"--data {data} is for evaluation only: train on one of {trained}")
        return _computed(task, split, task.TRAIN_PROBLEMS)
    problems = _scorable(data, reward)
    return problems[: -_held_out(data, problems)] if hold_out else problems


def eval_problems(
    data: str, limit: int | None, *, of_training_file: bool = False, reward=None
) -> list[Problem]:
    """At most `limit` problems to evaluate on: a held-out embedded split, or a whole set.

    With of_training_file, only the last 5 % of the set, which train_problems holds out. Problems
    that cannot be scored are dropped as in train_problems.
    """
    if data in EMBEDDED:
        return _computed(EMBEDDED[data].task, EMBEDDED[data].eval_split, limit or EVAL_PROBLEMS)
    problems = _scorable(data, reward)
    return (problems[-_held_out(data, problems) :] if of_training_file else problems)[:limit]


def sft_problems(data: str) -> list[Problem]:
    """Problems with worked solutions, for supervised training: those of the data set `words`, or
    the rows of train_problems that have a solution."""
    if data == "words":
        return _computed(word_problems, "sft", word_problems.SFT_PROBLEMS)
    problems = train_problems(data, hold_out=True)
    worked = [problem for problem in problems if problem.solution]
    if 0 < len(worked) < len(problems):
        without = len(problems) - len(worked)
        ranks.say(f"left out {without} of {len(problems)} problems: they have no worked solution")
    if not worked:
        none = f"--data {data}: none of its {len(problems)} problems has a worked solution"
        raise InputError(
            f"{none} with its answer in a box; use words, gsm8k, math, or another file"
        )
    return worked


def reward_function(data: str) -> Callable:
    """The default reward of a data name: (completion, answer) -> 1.0, 0.0 or None."""
    return EMBEDDED[data].reward if data in EMBEDDED else rewards.math_reward


def is_file(data: str) -> bool:
    """Whether the value of --data is a path rather than a name of ours."""
    return data not in EMBEDDED and data not in HUB


def max_new_tokens(data: str) -> int:
    """Default room for a completion."""
    return EMBEDDED[data].longest_completion if data in EMBEDDED else FILE_TOKENS


def _computed(task: ModuleType, split: str, count: int) -> list[Problem]:
    return [Problem(*task.problem(split, index)) for index in range(count)]


def _held_out(data: str, problems: list[Problem]) -> int:
    if len(problems) < 2:
        found = f"{data} has {len(problems)} problem"
        raise InputError(f"{found}: too few to hold some out, give --eval-data")
    return max(1, round(HELD_OUT_SHARE * len(problems)))


def _scorable(data: str, reward) -> list[Problem]:
    """The problems that the reward can score; says how many others there are.

    Only the default reward can be asked beforehand. One of the user's sees completions only.
    """
    problems = read_problems(data)
    if reward not in (None, reward_function(data)):
        return problems
    kept = [problem for problem in problems if rewards.has_value(problem.answer)]
    if len(kept) < len(problems):
        ranks.say(
            f"dropped {len(problems) - len(kept)} of {len(problems)} problems of {data}: their "
            f"reference answers cannot be scored (python eval.py --check-golds --data {data} lists "
            f"them)"
        )
    if not kept:
        none = f"{data}: none of its {len(problems)} reference answers can be scored"
        raise InputError(f"{none}; see eval.py --check-golds")
    return kept


def say_common(train: list[Problem], evaluated: list[Problem]) -> None:
    """Say how many of the problems to evaluate on are trained on, too."""
    trained = {identity(problem) for problem in train}
    common = sum(identity(problem) in trained for problem in evaluated)
    if common:
        ranks.say(
            f"note: {common} of the {len(evaluated)} problems to evaluate on are also trained on"
        )


def identity(problem: Problem) -> str:
    """What makes two problems the same one: all that is asked, whatever file it is in."""
    return json.dumps(problem.messages(), default=str)


def draw_keys(problems: list[Problem]) -> list[int]:
    """The key of each problem's random numbers. It follows from the problem and from how often it
    occurred before, so neither the name of a file nor the order of its rows matters."""
    occurred, keys = Counter(), []
    for problem in map(identity, problems):
        keys.append(dppo.seed_for(problem, occurred[problem]))
        occurred[problem] += 1
    return keys


def content_hash(problems: list[Problem], prompt_ids: list[list[int]] | None = None) -> dict:
    """Two hashes of the contents of a set: of its prompts (their token ids if these are given), and
    of its reference answers."""
    parts = {
        "prompts": prompt_ids or [*map(identity, problems)],
        "reference answers": [problem.answer for problem in problems],
    }
    return {name: digest(part) for name, part in parts.items()}


def digest(value) -> str:
    """A hash of what a value looks like, in 8 hexadecimal digits."""
    return hashlib.sha256(repr(value).encode()).hexdigest()[:8]


def read_problems(data: str) -> list[Problem]:
    """Every problem of a hub set or a file; InputError names what cannot be used."""
    if data in HUB:
        rows = problem_files.numbered(data, _hub_rows(data))
        problems = [problem_files.problem_of(row, where, data) for where, row in rows]
    elif not Path(data).is_file():
        what = "a folder: name a file in it" if Path(data).is_dir() else "no such file"
        raise InputError(f"data {data}: {what}, nor one of {', '.join([*EMBEDDED, *HUB])}")
    else:
        problems = problem_files.read_file(data)
    if not problems:
        hint = "give one JSON object a line, with a problem and an answer"
        raise InputError(f"{data} is empty: {hint}")
    return problems


def _hub_rows(name: str):
    import datasets

    hub_id, configuration, split = HUB[name]
    try:
        return datasets.load_dataset(hub_id, configuration, split=split)
    except (OSError, ValueError, RuntimeError) as error:  # for a missing set or network
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        message = f"--data {name}: {hub_id} cannot be loaded ({why}): give a file instead"
        raise InputError(message) from None


# ---------------------------------------------------------------------------- prompts


# What a template calls for today's date, such as strftime_now("%d %B %Y").
TODAY = re.compile(r"strftime_now\((?:\s*format\s*=)?\s*(['\"])(.*?)\1\s*\)")


def fix_date(tokenizer, date: str) -> None:
    """Let the chat template always say this date (2026-11-28), because the prompts of a run must
    not change. `tokenizer.date` is then the date, or None if the template asks for none."""
    tokenizer.date = None
    if tokenizer.chat_template and TODAY.search(template := tokenizer.get_chat_template()):
        tokenizer.date, day = date, datetime.date.fromisoformat(date)
        tokenizer.chat_template = TODAY.sub(lambda call: repr(day.strftime(call[2])), template)


def encode_prompts(
    problems: list[Problem],
    tokenizer,
    max_prompt_tokens: int,
    prompt_format: str = "auto",
    thinking: bool = False,
    instruction: str | None = None,
    model=None,
) -> tuple[list[Problem], list[list[int]]]:
    """The problems that fit and their prompt token ids; prints how many were too long.

    chat   problem and instruction are a user message in the tokenizer's chat template
    plain  problem and instruction are text that the model continues
    auto   chat if the tokenizer has a template

    `instruction` replaces the problems' own. Raises InputError if no problem fits, if the template
    leaves a question out, or if the `model` has no embedding for a token.
    """
    if prompt_format == "chat" and not tokenizer.chat_template:
        raise InputError("--prompt-format chat: the tokenizer has no chat template; use plain")
    instructions = [
        problem.instruction if instruction is None else instruction for problem in problems
    ]
    if tokenizer.chat_template and prompt_format != "plain":
        texts = _chat_texts(problems, instructions, tokenizer, thinking)
        ends = tuple(tokenizer.convert_ids_to_tokens(chat_format.end_tokens(tokenizer)))
        if closed := [text for text in texts if text.rstrip().endswith(ends)]:
            raise InputError(
                f"the chat template ends a prompt with an end token, so the assistant's turn never "
                f"begins: ...{closed[0][-60:]!r}; use --prompt-format plain"
            )
        prompt_ids = tokenizer(texts, add_special_tokens=False)["input_ids"]
    else:
        texts = _plain_texts(problems, instructions)
        with_ends = tokenizer(texts)["input_ids"]
        # After an end token a model starts a new text. Some tokenizers add one to every text.
        prompt_ids = _without_end(with_ends, tokenizer, model)
        if prompt_ids != with_ends:
            ranks.say("note: the tokenizer ends each text with an end token; prompts go without it")
    special = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    asked = ["".join(turn["content"] for turn in problem.messages()) for problem in problems]
    if held := [(token, text) for text in asked for token in special if token in text]:
        count = len({text for _token, text in held})
        ranks.say(f"note: {count} problems contain control tokens, such as {held[0][0]!r}")

    check_vocabulary(prompt_ids, texts, tokenizer, model)
    fits = [index for index, ids in enumerate(prompt_ids) if 0 < len(ids) <= max_prompt_tokens]
    too_long = f"longer than {max_prompt_tokens} tokens"
    if len(fits) < len(problems):
        ranks.say(f"dropped {len(problems) - len(fits)} of {len(problems)} prompts: {too_long}")
    if not fits:
        hint = "lower --max-new-tokens"
        raise InputError(f"all {len(problems)} prompts are {too_long}: {hint}")
    return [problems[index] for index in fits], [prompt_ids[index] for index in fits]


def _plain_texts(problems: list[Problem], instructions: list[str]) -> list[str]:
    """Each problem and its instruction, on lines of their own."""
    if chats := [problem for problem in problems if len(problem.turns) > 1]:
        raise InputError(
            f"{len(chats)} problems are chats of several turns, such as the one that ends with "
            f"{chats[0].text[-60:]!r}. Only a chat template can join turns: use a model that has "
            f"one, and not --prompt-format plain"
        )
    endings = [own and f"\n{own}\n" for own in instructions]
    return [problem.text + end for problem, end in zip(problems, endings, strict=True)]


def _chat_texts(problems: list[Problem], instructions: list[str], tokenizer, thinking) -> list[str]:
    """Each problem and its instruction in the chat template."""
    return [
        _in_template(problem, own, tokenizer, thinking)
        for problem, own in zip(problems, instructions, strict=True)
    ]


def _in_template(problem: Problem, instruction: str, tokenizer, thinking: bool) -> str:
    """The prompt of a problem in the chat template. InputError if the template refuses it, or
    leaves out what the system or the user says."""
    messages = problem.messages(instruction)
    remedy = "use a model whose template has these roles, or change the data"
    if len(messages) == 1:
        remedy += ", or use --prompt-format plain"
    try:
        text = chat_format.prompt_text(tokenizer, messages, thinking)
    except ValueError as error:
        raise InputError(f"{error}: {remedy}") from None
    for turn in messages:
        if turn["role"] in ("system", "user") and turn["content"].strip() not in text:
            left_out = f"the turn of the {turn['role']} that begins {turn['content'][:60]!r}"
            raise InputError(f"the chat template leaves out {left_out}: {remedy}")
    return text


def _without_end(prompt_ids: list[list[int]], tokenizer, model) -> list[list[int]]:
    """The prompts without the end tokens that they end with."""
    ends = chat_format.end_tokens(tokenizer, model)
    cut = []
    for ids in prompt_ids:
        last = max((place for place, token in enumerate(ids) if token not in ends), default=-1)
        cut.append(ids[: last + 1])
    return cut


def check_vocabulary(all_ids: list[list[int]], texts: list[str], tokenizer, model) -> None:
    """InputError if one of the texts has a token that the model's embedding has no row for."""
    rows = model.get_input_embeddings().num_embeddings if model else math.inf
    for ids, text in zip(all_ids, texts, strict=True):
        if (highest := max(ids, default=0)) >= rows:
            raise InputError(
                f"the tokenizer gives {tokenizer.decode([highest])!r} the id {highest}, but the "
                f"model's embedding has {rows} rows: it is not this model's tokenizer. The token "
                f"is in {text[:80]!r}"
            )
