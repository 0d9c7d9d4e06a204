"""
Problems and their prompts: embedded ones, data sets of the Hugging Face hub, or your file.

A file is JSON lines, one JSON array, or parquet. A row has the problem under `problem`, `question`
or `prompt` and the reference answer under `answer`, `final_answer`, `target` or `solution`. An
optional `source`, `subject` or `type` names its kind, for the pruning of prompts. Worked solutions
are kept for supervised training. Bad rows are reported by line number before training starts.
"""

import json
import math
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import rewards
from runtime import InputError
from tasks import arithmetic, word_problems

PROBLEM_KEYS = ("problem", "question", "prompt")
ANSWER_KEYS = ("answer", "final_answer", "target", "solution")
SOURCE_KEYS = ("source", "subject", "type")
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
INSTRUCTION = "Please reason step by step, and put your final answer within \\boxed{}."


@dataclass(frozen=True)
class Problem:
    text: str
    answer: str
    source: str  # the kind of embedded problem, the row's own source, or else the data's name
    solution: str = ""  # worked out, with the answer in \boxed{}; "" if there is none
    instruction: str = ""  # appended to the text in the prompt


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

    Problems that `reward` (default: the data's own) cannot score are dropped.
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
    that `reward` (default: the data's own) cannot score are dropped.
    """
    if data in EMBEDDED:
        return _computed(EMBEDDED[data].task, EMBEDDED[data].eval_split, limit or EVAL_PROBLEMS)
    problems = _scorable(data, reward)
    return (problems[-_held_out(data, problems) :] if of_training_file else problems)[:limit]


def sft_problems(data: str) -> list[Problem]:
    """Problems with worked solutions, for supervised training: those of words, or the rows that
    train_problems trains on and that have a solution."""
    if data == "words":
        return _computed(word_problems, "sft", word_problems.SFT_PROBLEMS)
    problems = train_problems(data, hold_out=True)
    worked = [problem for problem in problems if problem.solution]
    if not worked:
        none = f"--data {data}: none of its {len(problems)} problems has a worked solution"
        raise InputError(f"{none}; use words, gsm8k, math, or a file with solutions")
    return worked


def reward_function(data: str) -> Callable:
    """The default reward of a data name: (completion, answer) -> 1.0, 0.0 or None."""
    return EMBEDDED[data].reward if data in EMBEDDED else rewards.math_reward


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
    """The problems that the reward can score; prints how many others there are."""
    problems = read_problems(data)
    default = reward in (None, reward_function(data))
    reward = reward or reward_function(data)
    kept = [problem for problem in problems if reward("", problem.answer) is not None]
    if len(kept) < len(problems) and os.environ.get("RANK", "0") == "0":
        hint = f" (python eval.py --check-golds --data {data} lists them)" if default else ""
        dropped = f"dropped {len(problems) - len(kept)} of {len(problems)} problems of {data}"
        print(f"{dropped}: their reference answers cannot be scored{hint}")
    if not kept:
        none = f"{data}: none of its {len(problems)} reference answers can be scored"
        raise InputError(f"{none}; see eval.py --check-golds")
    return kept


# ---------------------------------------------------------------------------- reading


def read_problems(data: str) -> list[Problem]:
    """Every problem of a hub set or a file; InputError names what cannot be used."""
    if data in HUB:
        rows = _numbered(data, _hub_rows(data))
    elif not Path(data).is_file():
        raise InputError(f"data {data}: no such file, nor one of {', '.join([*EMBEDDED, *HUB])}")
    elif data.endswith(".parquet"):
        rows = _numbered(data, _parquet_rows(data))
    else:
        rows = _json_rows(data)
    problems = [_problem(row, where, data) for where, row in rows]
    if not problems:
        hint = "give one JSON object a line, with a problem and an answer"
        raise InputError(f"{data} is empty: {hint}")
    return problems


def _numbered(data: str, rows):
    return ((f"{data}, row {number}", row) for number, row in enumerate(rows, 1))


def _hub_rows(name: str):
    import datasets

    hub_id, configuration, split = HUB[name]
    try:
        return datasets.load_dataset(hub_id, configuration, split=split)
    except (OSError, ValueError, RuntimeError) as error:  # a missing set or network raises any
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        message = f"--data {name}: {hub_id} cannot be loaded ({why}): give a file instead"
        raise InputError(message) from None


def _parquet_rows(path: str):
    import datasets

    try:
        return datasets.Dataset.from_parquet(path)
    except Exception as error:  # pyarrow and datasets raise many kinds for a bad file
        why = str(error).splitlines()[0]
        raise InputError(f"{path} cannot be read as parquet ({why})") from None


def _json_rows(path: str):
    """(where, row) for every row of a JSON-lines file, blank lines skipped, or of a JSON array."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        hint = "give JSON lines, a JSON array or parquet"
        raise InputError(f"{path} is not UTF-8 text ({error.reason}): {hint}") from None
    if text.lstrip().startswith("[") and not path.endswith(".jsonl"):
        yield from _numbered(path, _json(text, path))
        return
    for number, line in enumerate(text.split("\n"), 1):  # splitlines also splits inside strings
        if line.strip():
            yield f"{path}, line {number}", _json(line, f"{path}, line {number}")


def _json(text: str, where: str):
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        line = f"line {error.lineno}, " if error.lineno > 1 else ""
        place = f"{error.msg} at {line}column {error.colno}"
        raise InputError(f"{where} is not JSON ({place}): correct or remove it") from None


def _problem(row: dict, where: str, data: str) -> Problem:
    if not isinstance(row, dict):
        kind = type(row).__name__
        raise InputError(f"{where} is not a JSON object but {kind}: correct or remove it")
    problem_key = _first_key(row, PROBLEM_KEYS, where)
    answer_key = _first_key(row, ANSWER_KEYS, where)
    text, found = row[problem_key], row[answer_key]
    if isinstance(text, list) and text and isinstance(text[-1], dict):  # a chat: its last message
        text = text[-1].get("content")
    if found is None:
        found = ""  # _scorable drops such rows, and counts them
    answers = found if isinstance(found, list) and found else [found]
    for key, value in ((problem_key, text), *((answer_key, value) for value in answers)):
        if not isinstance(value, (str, int, float)) or (key == problem_key and value == ""):
            bad = f"the value of {key!r} must be text or a number, got {value!r}"
            raise InputError(f"{where}: {bad}")
    sources = (row[key] for key in SOURCE_KEYS if isinstance(row.get(key), str) and row[key])
    answer = ", ".join(map(reference_answer, answers))
    texts = (worked_solution(row[key]) for key in ANSWER_KEYS if isinstance(row.get(key), str))
    solution = next(filter(None, texts), "")
    return Problem(str(text), answer, next(sources, data), solution, f"\n{INSTRUCTION}")


def _first_key(row: dict, keys: tuple[str, ...], where: str) -> str:
    """The first of `keys` that the row has, preferably with a value that is not null."""
    present = [key for key in keys if key in row]
    if not present:
        has = f"it has: {', '.join(row) or 'none'}"
        raise InputError(f"{where} has none of the keys {', '.join(keys)} ({has})")
    return next((key for key in present if row[key] is not None), present[0])


def reference_answer(value: str | int | float) -> str:
    """The reference answer in a value: what follows the last ####, or the last box, or all of it.

    >>> reference_answer("24+48=72 #### 72"), reference_answer(27.0), reference_answer("$2x$")
    ('72', '27', '2x')
    >>> reference_answer("so \\\\boxed{3}.")
    '3'
    """
    if isinstance(value, float):
        if not math.isfinite(value):
            return ""
        value = f"{Decimal(repr(value)).normalize():f}"
    _before, mark, text = str(value).rpartition("####")
    if not mark and "\\boxed{" in text:
        text = rewards.last_boxed(text) or ""
    text = text.strip()
    dollars = len(text) > 1 and text[0] == text[-1] == "$" and "$" not in text[1:-1]
    return text[1:-1].strip() if dollars else text


def worked_solution(text: str) -> str:
    """A row's own solution, with the answer in \\boxed{} and no calculator marks; "" for an answer.

    >>> worked_solution("So 24+48 = <<24+48=72>>72 clips.\\n#### 72")
    'So 24+48 = 72 clips.\\n\\\\boxed{72}'
    >>> worked_solution("so $x=\\\\boxed{3}$."), worked_solution("72"), worked_solution("#### 72")
    ('so $x=\\\\boxed{3}$.', '', '')
    """
    steps, mark, answer = re.sub(r"<<.*?>>", "", text).rpartition("####")
    if mark:
        return f"{steps.rstrip()}\n\\boxed{{{answer.strip()}}}" if steps.strip() else ""
    boxed = rewards.last_boxed(text)
    return text if boxed and text.strip() != f"\\boxed{{{boxed}}}" else ""


# ---------------------------------------------------------------------------- prompts


def encode_prompts(
    problems: list[Problem],
    tokenizer,
    max_prompt_tokens: int,
    prompt_format: str = "auto",
    thinking: bool = False,
) -> tuple[list[Problem], list[list[int]]]:
    """The problems that fit and their prompt token ids; prints how many were too long.

    chat   problem and instruction are a user message in the tokenizer's chat template
    plain  problem and instruction are text that the model continues
    auto   chat if the tokenizer has a template

    Raises InputError if no problem fits.
    """
    if prompt_format == "chat" and not tokenizer.chat_template:
        raise InputError("--prompt-format chat: the tokenizer has no chat template; use plain")
    if tokenizer.chat_template and prompt_format != "plain":
        contents = [problem.text + problem.instruction for problem in problems]
        texts = tokenizer.apply_chat_template(
            [[{"role": "user", "content": content}] for content in contents],
            tokenize=False, add_generation_prompt=True, enable_thinking=thinking,
        )  # fmt: skip
        prompt_ids = tokenizer(texts, add_special_tokens=False)["input_ids"]
    else:
        endings = [problem.instruction and problem.instruction + "\n" for problem in problems]
        texts = [problem.text + end for problem, end in zip(problems, endings, strict=True)]
        prompt_ids = tokenizer(texts)["input_ids"]
    fits = [index for index, ids in enumerate(prompt_ids) if 0 < len(ids) <= max_prompt_tokens]
    too_long = f"longer than {max_prompt_tokens} tokens"
    if len(fits) < len(problems) and os.environ.get("RANK", "0") == "0":
        print(f"dropped {len(problems) - len(fits)} of {len(problems)} prompts: {too_long}")
    if not fits:
        hint = "lower --max-new-tokens"
        raise InputError(f"all {len(problems)} prompts are {too_long}: {hint}")
    return [problems[index] for index in fits], [prompt_ids[index] for index in fits]
