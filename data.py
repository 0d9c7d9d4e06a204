"""
Problems and how they become prompts: the embedded arithmetic by name, data sets of the Hugging Face hub by name, or a
file of your own, JSON lines, one JSON array or parquet.

A row has the problem under `problem`, `question` or `prompt` and the gold under `answer`, `final_answer`, `target` or
`solution`; a `source`, `subject` or `type` says what kind it is, for the pruning of prompts. Whatever is wrong with it
is said with its line, before any training.
"""

import json
import math
import os
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path

import arithmetic
import rewards

PROBLEM_KEYS = ("problem", "question", "prompt")
ANSWER_KEYS = ("answer", "final_answer", "target", "solution")
SOURCE_KEYS = ("source", "subject", "type")
EMBEDDED = {  # data name -> its training and its evaluation split
    "arithmetic": ("train", "heldout"),
    "arithmetic-mixed": ("mixed", "mixed-heldout"),
    "arithmetic-longer": (None, "longer"),  # to evaluate on only
}
HUB = {  # data name -> id, configuration and split there
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
EMBEDDED_PROBLEMS = 300  # of an embedded split to evaluate on, where nothing else is asked for
FILE_TOKENS = 1024  # room for an answer to what is not embedded
HELD_OUT_SHARE = 0.05  # of what is not embedded, its last rows
INSTRUCTION = "Please reason step by step, and put your final answer within \\boxed{}."


class InputError(ValueError):
    """The run cannot start or go on; the message names the value and the way out. Shown without a traceback."""


@dataclass(frozen=True)
class Problem:
    text: str
    answer: str
    source: str  # the kind of embedded problem, or what the row says, or the data's name
    instruction: str = ""  # what the model is told besides


def train_problems(data: str, *, hold_out: bool) -> list[Problem]:
    """The problems to train on; with hold_out, the last 5 % of what is not embedded are left to eval_problems."""
    if data in EMBEDDED:
        split = EMBEDDED[data][0]
        if split is None:
            raise InputError(f"--data {data} is for evaluation only: train on arithmetic or arithmetic-mixed")
        return [Problem(*arithmetic.problem(split, index)) for index in range(arithmetic.TRAIN_PROBLEMS)]
    problems = _scorable(data)
    return problems[: -_held_out(data, problems)] if hold_out else problems


def eval_problems(data: str, limit: int | None, *, of_training_file: bool = False) -> list[Problem]:
    """At most `limit` problems to evaluate on: an embedded held-out split, or a set (its last 5 % if trained on)."""
    if data in EMBEDDED:
        return [Problem(*arithmetic.problem(EMBEDDED[data][1], index)) for index in range(limit or EMBEDDED_PROBLEMS)]
    problems = _scorable(data)
    return (problems[-_held_out(data, problems) :] if of_training_file else problems)[:limit]


def _held_out(data: str, problems: list[Problem]) -> int:
    if len(problems) < 2:
        raise InputError(f"{data} holds {len(problems)} problem: too few to hold some out, give --eval-data")
    return max(1, round(HELD_OUT_SHARE * len(problems)))


def _scorable(data: str) -> list[Problem]:
    """What read_problems finds, without golds that the reward cannot tell from anything; says how many."""
    problems, reward = read_problems(data), reward_function(data)
    kept = [problem for problem in problems if reward("", problem.answer) is not None]
    if len(kept) < len(problems) and os.environ.get("RANK", "0") == "0":
        print(
            f"dropped {len(problems) - len(kept)} of {len(problems)} problems of {data}: their golds have no value "
            f"(python eval.py --check-golds --data {data} lists them)"
        )
    if not kept:
        raise InputError(f"{data}: none of its {len(problems)} golds has a value; see eval.py --check-golds")
    return kept


# ---------------------------------------------------------------------------- reading


def read_problems(data: str) -> list[Problem]:
    """Every problem of a set of the hub or of a file; InputError names what cannot be used."""
    if data in HUB:
        rows = ((f"{data}, row {number}", row) for number, row in enumerate(_hub_rows(data), 1))
    elif not Path(data).is_file():
        raise InputError(f"data {data}: no such file, nor one of {', '.join([*EMBEDDED, *HUB])}")
    elif data.endswith(".parquet"):
        rows = ((f"{data}, row {number}", row) for number, row in enumerate(_parquet_rows(data), 1))
    else:
        rows = _json_rows(data)
    problems = [_problem(row, where, data) for where, row in rows]
    if not problems:
        raise InputError(f"{data} is empty: give one JSON object a line, with a problem and an answer")
    return problems


def _hub_rows(name: str):
    import datasets

    hub_id, configuration, split = HUB[name]
    try:
        return datasets.load_dataset(hub_id, configuration, split=split)
    except (OSError, ValueError, RuntimeError) as error:  # what there is not, or not now, comes as any of them
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(f"--data {name}: {hub_id} cannot be loaded ({why}): give a file instead") from None


def _parquet_rows(path: str):
    import datasets

    try:
        return datasets.Dataset.from_parquet(path)
    except Exception as error:  # whatever pyarrow and datasets raise, it is this file
        raise InputError(f"{path} cannot be read as parquet ({str(error).splitlines()[0]})") from None


def _json_rows(path: str):
    """(where, row) of a file of JSON lines, blank ones skipped, or of one JSON array."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path} is not UTF-8 text ({error.reason}): give JSON lines, a JSON array or parquet"
        ) from None
    if text.lstrip().startswith("[") and not path.endswith(".jsonl"):
        for number, row in enumerate(_json(text, path), 1):
            yield f"{path}, row {number}", row
        return
    for number, line in enumerate(text.split("\n"), 1):  # splitlines would cut at characters that JSON allows
        if line.strip():
            yield f"{path}, line {number}", _json(line, f"{path}, line {number}")


def _json(text: str, where: str):
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}" if error.lineno > 1 else f"column {error.colno}"
        raise InputError(f"{where} is not JSON ({error.msg} at {place}): mend or remove it") from None


def _problem(row: dict, where: str, data: str) -> Problem:
    if not isinstance(row, dict):
        raise InputError(f"{where} is not a JSON object but {type(row).__name__}: mend or remove it")
    found = []
    for keys in (PROBLEM_KEYS, ANSWER_KEYS):
        there = [key for key in keys if key in row]
        if not there:
            raise InputError(f"{where} has none of the keys {', '.join(keys)} (it has: {', '.join(row) or 'none'})")
        found.append(next((key for key in there if row[key] is not None), there[0]))
    problem_key, answer_key = found
    text, answer = row[problem_key], "" if row[answer_key] is None else row[answer_key]  # no gold: _scorable counts it
    if isinstance(text, list) and text and isinstance(text[-1], dict):  # a chat: what the user said last
        text = text[-1].get("content")
    answers = answer if isinstance(answer, list) and answer else [answer]
    for key, value in ((problem_key, text), *((answer_key, value) for value in answers)):
        if not isinstance(value, (str, int, float)) or (key == problem_key and value == ""):
            raise InputError(f"{where}: the value of {key!r} must be text or a number, got {value!r}")
    source = next((row[key] for key in SOURCE_KEYS if isinstance(row.get(key), str) and row[key]), data)
    gold = ", ".join(map(gold_answer, answers))
    return Problem(str(text), gold, source, instruction=f"\n{INSTRUCTION}")


def gold_answer(value: str | int | float) -> str:
    """The gold of an answer or solution: after the last ####, in the last \\boxed{}, or all of it; 27.0 is 27.

    >>> gold_answer("24+48=72 #### 72"), gold_answer(27.0), gold_answer("$2x$"), gold_answer("so \\\\boxed{3}.")
    ('72', '27', '2x', '3')
    """
    if isinstance(value, float):
        if not math.isfinite(value):
            return ""
        value = f"{Decimal(repr(value)).normalize():f}"
    _before, mark, text = str(value).rpartition("####")
    if not mark and "\\boxed{" in text:
        text = rewards.last_boxed(text) or ""
    text = text.strip()
    return text[1:-1].strip() if len(text) > 1 and text[0] == text[-1] == "$" and "$" not in text[1:-1] else text


# ---------------------------------------------------------------------------- prompts


def encode_prompts(
    problems: list[Problem], tokenizer, max_prompt_tokens: int, prompt_format: str = "auto", thinking: bool = False
) -> tuple[list[Problem], list[list[int]]]:
    """(the problems that fit, their prompt token ids); says how many were too long. InputError if none is left.

    chat: the problem and its instruction are a user's message in the tokenizer's chat template; plain: they are the
    text that the model goes on with; auto: chat where there is a template.
    """
    if prompt_format == "chat" and not tokenizer.chat_template:
        raise InputError("--prompt-format chat: the tokenizer has no chat template; use plain")
    if tokenizer.chat_template and prompt_format != "plain":
        chats = [[{"role": "user", "content": problem.text + problem.instruction}] for problem in problems]
        texts = tokenizer.apply_chat_template(
            chats, tokenize=False, add_generation_prompt=True, enable_thinking=thinking
        )
        prompt_ids = tokenizer(texts, add_special_tokens=False)["input_ids"]
    else:
        texts = [problem.text + (problem.instruction and problem.instruction + "\n") for problem in problems]
        prompt_ids = tokenizer(texts)["input_ids"]
    fitting = [index for index, ids in enumerate(prompt_ids) if 0 < len(ids) <= max_prompt_tokens]
    if len(fitting) < len(problems) and os.environ.get("RANK", "0") == "0":
        print(
            f"dropped {len(problems) - len(fitting)} of {len(problems)} prompts: longer than {max_prompt_tokens} tokens"
        )
    if not fitting:
        raise InputError(
            f"all {len(problems)} prompts are longer than {max_prompt_tokens} tokens: lower --max-new-tokens"
        )
    return [problems[index] for index in fitting], [prompt_ids[index] for index in fitting]


def reward_function(data: str):
    """The reward for a data name: (completion text, gold) -> 1.0, 0.0, or None for a gold without a value."""
    return rewards.arithmetic_reward if data in EMBEDDED else rewards.math_reward


def final_answer(data: str, completion: str) -> str | None:
    """What a completion answers, as far as a majority is concerned; None: nothing."""
    return completion.rpartition("=")[2] if data in EMBEDDED else rewards.final_answer(completion)


def max_new_tokens(data: str) -> int:
    """Room for an answer: the longest right one of the embedded data, 1,024 tokens for others."""
    return arithmetic.longest_completion(data) if data in EMBEDDED else FILE_TOKENS
