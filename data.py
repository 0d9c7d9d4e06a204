"""
Problems and how they become prompts: the embedded arithmetic by name, or a JSONL file of your own.

A file has one JSON object a line, with the problem under `problem`, `question` or `prompt` and the gold under
`answer`, `final_answer` or `solution`; a `source` says what kind it is, for the pruning of prompts. Whatever is wrong
with it is said with its line, before any training.
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path

import arithmetic
import rewards

PROBLEM_KEYS = ("problem", "question", "prompt")
ANSWER_KEYS = ("answer", "final_answer", "solution")
EMBEDDED = {  # data name -> its training and its evaluation split
    "arithmetic": ("train", "heldout"),
    "arithmetic-mixed": ("mixed", "mixed-heldout"),
    "arithmetic-longer": (None, "longer"),  # to evaluate on only
}
FILE_TOKENS = 1024  # room for an answer to a file's problem
HELD_OUT_SHARE = 0.05  # of a file, its last lines
INSTRUCTION = "Please reason step by step, and put your final answer within \\boxed{}."  # for chat models, on files


class InputError(ValueError):
    """The run cannot start or go on; the message names the value and the way out. Shown without a traceback."""


@dataclass(frozen=True)
class Problem:
    text: str
    answer: str
    source: str  # the kind of embedded problem, or what the file says, or the file
    instruction: str = ""  # what a chat model is told besides


def train_problems(data: str, *, hold_out: bool) -> list[Problem]:
    """The problems to train on; with hold_out, a file's last 5 % are left to eval_problems."""
    if data in EMBEDDED:
        split = EMBEDDED[data][0]
        if split is None:
            raise InputError(f"--data {data} is for evaluation only: train on arithmetic or arithmetic-mixed")
        return [Problem(*arithmetic.problem(split, index)) for index in range(arithmetic.TRAIN_PROBLEMS)]
    problems = read_jsonl(data)
    return problems[: -_held_out(data, problems)] if hold_out else problems


def eval_problems(data: str, limit: int, *, of_training_file: bool = False) -> list[Problem]:
    """At most `limit` problems to evaluate on: an embedded held-out split, or a file (its last 5 % if trained on)."""
    if data in EMBEDDED:
        return [Problem(*arithmetic.problem(EMBEDDED[data][1], index)) for index in range(limit)]
    problems = read_jsonl(data)
    return (problems[-_held_out(data, problems) :] if of_training_file else problems)[:limit]


def _held_out(path: str, problems: list[Problem]) -> int:
    if len(problems) < 2:
        raise InputError(f"{path} holds {len(problems)} problem: too few to hold some out, give --eval-data a file")
    return max(1, round(HELD_OUT_SHARE * len(problems)))


def read_jsonl(path: str) -> list[Problem]:
    """Every problem of a JSONL file; InputError names the line that cannot be used. Blank lines are skipped."""
    if not Path(path).is_file():
        raise InputError(f"data {path}: no such file, nor one of {', '.join(EMBEDDED)}")
    problems = []
    with open(path, encoding="utf-8") as file:
        try:
            for number, line in enumerate(file, 1):
                if line.strip():
                    problems.append(_read_line(line, f"{path}, line {number}", path))
        except UnicodeDecodeError as error:
            raise InputError(f"{path} is not UTF-8 text ({error.reason}): give a JSONL file") from None
    if not problems:
        raise InputError(f"{path} is empty: give one JSON object a line, with a problem and an answer")
    return problems


def _read_line(line: str, where: str, path: str) -> Problem:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise InputError(
            f"{where} is not JSON ({error.msg} at column {error.colno}): mend or remove the line"
        ) from None
    if not isinstance(row, dict):
        raise InputError(f"{where} is not a JSON object but {type(row).__name__}: mend or remove the line")
    values = []
    for keys in (PROBLEM_KEYS, ANSWER_KEYS):
        key = next((key for key in keys if row.get(key) is not None), None)
        if key is None:
            raise InputError(f"{where} has none of the keys {', '.join(keys)} (it has: {', '.join(row) or 'none'})")
        if not isinstance(row[key], (str, int, float)) or row[key] == "":
            raise InputError(f"{where}: the value of {key!r} must be text or a number, got {row[key]!r}")
        values.append(str(row[key]))
    return Problem(*values, source=str(row.get("source") or path), instruction=f"\n{INSTRUCTION}")


def encode_prompts(problems: list[Problem], tokenizer, max_prompt_tokens: int) -> tuple[list[Problem], list[list[int]]]:
    """(the problems that fit, their prompt token ids); says how many were too long. InputError if none is left.

    A tokenizer with a chat template gets the problem as a user's message; others get its text as it stands.
    """
    if tokenizer.chat_template:
        chats = [[{"role": "user", "content": problem.text + problem.instruction}] for problem in problems]
        texts = tokenizer.apply_chat_template(chats, tokenize=False, add_generation_prompt=True)
        prompt_ids = tokenizer(texts, add_special_tokens=False)["input_ids"]
    else:
        prompt_ids = tokenizer([problem.text for problem in problems])["input_ids"]
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
    """The reward for a data name: (completion text, gold) -> 1.0, 0.0 or None."""
    return rewards.arithmetic_reward if data in EMBEDDED else rewards.number_reward


def max_new_tokens(data: str) -> int:
    """Room for an answer: the longest right one of the embedded data, 1,024 tokens for files."""
    return arithmetic.longest_completion(data) if data in EMBEDDED else FILE_TOKENS
