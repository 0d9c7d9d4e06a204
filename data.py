"""
Problems and their prompts: embedded ones, data sets of the Hugging Face hub, or your file.

A file is JSON lines, one JSON array, or parquet. A row has the problem under `problem`, `question`,
`prompt` or `messages`, as text or as a chat, and the reference answer under `answer`,
`final_answer`, `target`, `solution`, `ground_truth` or `reward_model.ground_truth` (verl's). An
optional `source`, `subject` or `type` names its kind. Worked solutions are kept for supervised
training. Bad rows are reported by line number before training starts.
"""

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from decimal import MAX_PREC, Context, Decimal
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import chat_format
import dppo
import rewards
from runtime import InputError, ranks
from tasks import arithmetic, word_problems

PROBLEM_KEYS = ("problem", "question", "prompt", "messages")
ANSWER_KEYS = ("answer", "final_answer", "target", "solution", "ground_truth")
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
    text: str  # of a chat: the last turn of the user
    answer: str
    source: str  # the kind of embedded problem, the row's own source, or else the data's name
    solution: str = ""  # worked out, with the answer in a box; "" if there is none
    instruction: str = ""  # appended to the text in the prompt
    turns: tuple[dict, ...] = ()  # of a chat; () if it has only the text

    def messages(self, instruction: str = "") -> list[dict]:
        """The turns of the prompt, with the instruction after the user's last one."""
        if not self.turns:
            return [{"role": "user", "content": self.text + instruction}]
        turns = list(self.turns)
        last = max(place for place, turn in enumerate(turns) if turn["role"] == "user")
        turns[last] = turns[last] | {"content": self.text + instruction}
        return turns


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


def train_problems(data: str, *, hold_out: bool, own_reward: bool = False) -> list[Problem]:
    """The problems to train on. With hold_out, data that are not embedded lose their last 5 %.

    Problems whose reference answers the default reward cannot read are dropped, unless the user has
    a reward of their own.
    """
    if data in EMBEDDED:
        task, split = EMBEDDED[data].task, EMBEDDED[data].train_split
        if split is None:
            trained = ", ".join(name for name in EMBEDDED if EMBEDDED[name].train_split)
            raise InputError(f"--data {data} is for evaluation only: train on one of {trained}")
        return _computed(task, split, task.TRAIN_PROBLEMS)
    problems = _scorable(data, own_reward)
    return problems[: -_held_out(data, problems)] if hold_out else problems


def eval_problems(
    data: str, limit: int | None, *, of_training_file: bool = False, own_reward: bool = False
) -> list[Problem]:
    """At most `limit` problems to evaluate on: a held-out embedded split, or a whole set.

    With of_training_file, only the last 5 % of the set, which train_problems holds out. Problems
    that cannot be scored are dropped as there.
    """
    if data in EMBEDDED:
        return _computed(EMBEDDED[data].task, EMBEDDED[data].eval_split, limit or EVAL_PROBLEMS)
    problems = _scorable(data, own_reward)
    return (problems[-_held_out(data, problems) :] if of_training_file else problems)[:limit]


def sft_problems(data: str) -> list[Problem]:
    """Problems with worked solutions, for supervised training: those of words, or the rows that
    train_problems trains on and that have a solution."""
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


def _scorable(data: str, own_reward: bool) -> list[Problem]:
    """The problems that the reward can score; says how many others there are.

    Only the default reward can be asked beforehand. One of the user's sees completions only.
    """
    problems = read_problems(data)
    if own_reward:
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
    """For each problem a key of its random numbers: of the problem, and of how often it has
    occurred before. So neither the name of a file nor the order of its rows counts."""
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
    digest = lambda part: hashlib.sha256(repr(part).encode()).hexdigest()[:8]
    return {name: digest(part) for name, part in parts.items()}


# ---------------------------------------------------------------------------- reading


def read_problems(data: str) -> list[Problem]:
    """Every problem of a hub set or a file; InputError names what cannot be used."""
    if data in HUB:
        rows = _numbered(data, _hub_rows(data))
    elif not Path(data).is_file():
        raise InputError(f"data {data}: no such file, nor one of {', '.join([*EMBEDDED, *HUB])}")
    elif is_lfs_pointer(Path(data)):
        raise InputError(f"{data} is the pointer of Git LFS to a file: run `git lfs pull`")
    elif data.lower().endswith(".parquet"):
        rows = _numbered(data, _parquet_rows(data))
    else:
        rows = _json_rows(data)
    problems = [_problem(row, where, data) for where, row in rows]
    if not problems:
        hint = "give one JSON object a line, with a problem and an answer"
        raise InputError(f"{data} is empty: {hint}")
    return problems


def is_lfs_pointer(path: Path) -> bool:
    """Whether Git LFS has put its pointer where a file should be."""
    with open(path, "rb") as file:
        return file.read(50).startswith(b"version https://git-lfs")


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
    """Read without the cache of the library datasets, which may hold the rows of an older file."""
    import pyarrow
    import pyarrow.parquet

    try:
        for batch in pyarrow.parquet.ParquetFile(path).iter_batches():
            columns = {
                name: column.cast("string").cast("double")  # 7.1, and not 7.099999904632568
                if column.type == pyarrow.float32()
                else column
                for name, column in zip(batch.schema.names, batch.columns, strict=True)
            }
            yield from pyarrow.table(columns).to_pylist()
    except (OSError, pyarrow.ArrowException) as error:
        why = str(error).splitlines()[0]
        raise InputError(f"{path} cannot be read as parquet ({why})") from None


def _json_rows(path: str):
    """(where, row) for every row of a JSON-lines file, blank lines skipped, or of a JSON array."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")  # Windows programs put a mark in front
    except UnicodeDecodeError as error:
        hint = "give JSON lines, a JSON array or parquet"
        raise InputError(f"{path} is not UTF-8 text ({error.reason}): {hint}") from None
    if text.lstrip().startswith("[") and not path.endswith(".jsonl"):
        yield from _numbered(path, _json(text, path))
        return
    for number, line in enumerate(text.split("\n"), 1):  # splitlines also splits inside strings
        if line.strip():
            where = f"{path}, line {number}"
            yield where, _json(line.lstrip("\ufeff"), where)  # of a file that was appended


def _json(text: str, where: str):
    try:
        return json.loads(text)
    except RecursionError:
        raise InputError(f"{where} is nested too deeply: correct or remove it") from None
    except ValueError as error:
        if not isinstance(error, json.JSONDecodeError):  # a number of thousands of digits
            raise InputError(f"{where} cannot be read ({error}): correct or remove it") from None
        line = f"line {error.lineno}, " if error.lineno > 1 else ""
        place = f"{error.msg} at {line}column {error.colno}"
        raise InputError(f"{where} is not JSON ({place}): correct or remove it") from None


def _problem(row: dict, where: str, data: str) -> Problem:
    if not isinstance(row, dict):
        kind = type(row).__name__
        raise InputError(f"{where} is not a JSON object but {kind}: correct or remove it")
    of_verl = row.get("reward_model")
    if isinstance(of_verl, dict) and row.get("ground_truth") is None:
        row = row | {"ground_truth": of_verl.get("ground_truth")}
    text, turns, said = _question(row, where)
    if said is not None:
        answers, solution = [said], said
    else:
        key = _first_key(row, ANSWER_KEYS, where)
        found = "" if row[key] is None else row[key]  # _scorable drops such rows, and counts them
        answers = found if isinstance(found, list) and found else [found]
        for value in answers:
            _check_value(value, key, where)
        texts = (worked_solution(row[key]) for key in ANSWER_KEYS if isinstance(row.get(key), str))
        solution = next(filter(None, texts), "")
    answer = ", ".join(map(reference_answer, answers))
    sources = (row[key] for key in SOURCE_KEYS if isinstance(row.get(key), str) and row[key])
    return Problem(text, answer, next(sources, data), solution, f"\n{INSTRUCTION}", turns)


def _check_value(value, key: str, where: str) -> None:
    if not isinstance(value, (str, int, float, Decimal)):
        bad = f"the value of {key!r} must be text or a number, got {value!r}"
        raise InputError(f"{where}: {bad}")


def _question(row: dict, where: str) -> tuple[str, tuple[dict, ...], str | None]:
    """(text, turns, said): what is asked, all turns if it is a chat, and the assistant's last turn
    if it is the row's solution (OpenAI's format)."""
    key = _first_key(row, PROBLEM_KEYS, where)
    text, said = row[key], None
    if isinstance(text, str) and text.startswith('[{"role"'):  # a chat as JSON in a table
        text = _json(text, where)
    turns = _chat(text, f"{where}: the value of {key!r}") if isinstance(text, list) else ()
    if turns and turns[-1]["role"] == "assistant":
        has_answer = any(row.get(name) is not None for name in ANSWER_KEYS)
        if key != "messages" or has_answer:
            ends = f"the chat under {key!r} ends with a turn of the assistant"
            raise InputError(f"{where}: {ends}, which may give the answer away: remove it")
        *turns, last = turns
        said = last["content"]
    if isinstance(text, list):
        asked = [turn["content"] for turn in turns if turn["role"] == "user"]
        if not asked:
            raise InputError(f"{where}: the chat under {key!r} has no turn of the user")
        text = asked[-1]
    _check_value(text, key, where)
    text = str(text)
    if not text.strip():
        raise InputError(f"{where}: the value of {key!r} must not be empty, got {row[key]!r}")
    try:
        f"{text}{turns}".encode()
    except UnicodeEncodeError as error:
        raise InputError(f"{where}: the value of {key!r} is not valid text ({error})") from None
    is_plain = len(turns) == 1 and turns[0].keys() == {"role", "content"}
    return text, () if is_plain else tuple(turns), said


def _chat(value: list, where: str) -> tuple[dict, ...]:
    """The turns of a chat, each with the role and the content as text."""
    turns = []
    for turn in value:
        if not isinstance(turn, dict) or not isinstance(turn.get("role"), str):
            wanted = 'turns such as {"role": "user", "content": ".."}'
            raise InputError(f"{where} must be text or a chat of {wanted}, got {turn!r}")
        content = turn.get("content")
        if isinstance(content, list):  # OpenAI's parts of a message
            parts = [part.get("text") if isinstance(part, dict) else part for part in content]
            content = "".join(parts) if all(isinstance(part, str) for part in parts) else None
        elif content is None and turn.get("tool_calls"):
            content = ""
        if not isinstance(content, str):
            raise InputError(f"{where}: the content of a turn must be text, got {turn!r}")
        given = {name: part for name, part in turn.items() if part is not None}  # parquet has None
        turns.append(given | {"content": content})
    return tuple(turns)


def _first_key(row: dict, keys: tuple[str, ...], where: str) -> str:
    """The first of `keys` that the row has, preferably with a value that is not null."""
    present = [key for key in keys if key in row]
    if not present:
        has = f"it has: {', '.join(row) or 'none'}"
        raise InputError(f"{where} has none of the keys {', '.join(keys)} ({has})")
    return next((key for key in present if row[key] is not None), present[0])


def reference_answer(value: str | int | float | Decimal) -> str:
    """The reference answer in a value: the last box, or else what follows #### in the last line, or
    else all of it.

    >>> reference_answer("24+48=72 #### 72"), reference_answer(27.0), reference_answer("$2x$")
    ('72', '27', '2x')
    >>> reference_answer("#### Step 2\\nso \\\\boxed{3}.")
    '3'
    """
    if isinstance(value, (float, Decimal)):
        if not math.isfinite(value):
            return ""
        value = f"{Decimal(str(value)).normalize(Context(prec=MAX_PREC)):f}"
    text = str(value)
    if box := rewards.last_box(text):
        text = box.content or ""
    else:
        last_line = text.strip().rpartition("\n")[2]
        _before, mark, after = last_line.rpartition("####")
        text = after if mark else text
    text = text.strip()
    dollars = len(text) > 1 and text[0] == text[-1] == "$" and "$" not in text[1:-1]
    return text[1:-1].strip() if dollars else text


def worked_solution(text: str) -> str:
    """A row's own solution, with the answer in a box and no calculator marks; "" for an answer.

    >>> worked_solution("So 24+48 = <<24+48=72>>72 clips.\\n#### 72")
    'So 24+48 = 72 clips.\\n\\\\boxed{72}'
    >>> worked_solution("so $x=\\\\boxed{3}$."), worked_solution("72"), worked_solution("#### 72")
    ('so $x=\\\\boxed{3}$.', '', '')
    """
    if box := rewards.last_box(text):
        return text if box.content and text.strip() != text[box.start : box.end] else ""
    lines, _newline, last_line = text.strip().rpartition("\n")
    before, mark, answer = last_line.rpartition("####")
    steps = re.sub(r"<<.*?>>", "", f"{lines}\n{before}").strip()
    return f"{steps}\n\\boxed{{{answer.strip()}}}" if mark and steps else ""


# ---------------------------------------------------------------------------- prompts


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
    added = instruction and f"\n{instruction}"
    instructions = [problem.instruction if added is None else added for problem in problems]
    if tokenizer.chat_template and prompt_format != "plain":
        texts = [
            _in_template(problem, own, tokenizer, thinking)
            for problem, own in zip(problems, instructions, strict=True)
        ]
        prompt_ids = tokenizer(texts, add_special_tokens=False)["input_ids"]
        if _without_end(prompt_ids, tokenizer, model) != prompt_ids:
            raise InputError(
                f"the chat template ends a prompt with an end token, after which nothing follows: "
                f"...{texts[0][-60:]!r}; use --prompt-format plain"
            )
    else:
        if chats := [problem for problem in problems if len(problem.turns) > 1]:
            raise InputError(
                f"{len(chats)} problems are chats of several turns, one of which ends with "
                f"{chats[0].text[-60:]!r}. Only a chat template can join turns: use a model that "
                f"has one, and not --prompt-format plain"
            )
        endings = [own and own + "\n" for own in instructions]
        texts = [problem.text + end for problem, end in zip(problems, endings, strict=True)]
        with_ends = tokenizer(texts)["input_ids"]
        prompt_ids = _without_end(with_ends, tokenizer, model)
        if prompt_ids != with_ends:
            ranks.say("note: the tokenizer ends each text with an end token; prompts go without it")
    check_vocabulary(prompt_ids, texts, tokenizer, model)
    fits = [index for index, ids in enumerate(prompt_ids) if 0 < len(ids) <= max_prompt_tokens]
    too_long = f"longer than {max_prompt_tokens} tokens"
    if len(fits) < len(problems):
        ranks.say(f"dropped {len(problems) - len(fits)} of {len(problems)} prompts: {too_long}")
    if not fits:
        hint = "lower --max-new-tokens"
        raise InputError(f"all {len(problems)} prompts are {too_long}: {hint}")
    return [problems[index] for index in fits], [prompt_ids[index] for index in fits]


def _in_template(problem: Problem, instruction: str, tokenizer, thinking: bool) -> str:
    """The prompt of a problem in the chat template. InputError if the template refuses it, or
    leaves out what somebody else than the assistant says."""
    messages = problem.messages(instruction)
    only_one = len(messages) == 1
    remedy = f"change the model or the data{', or use --prompt-format plain' * only_one}"
    try:
        text = chat_format.prompt_text(tokenizer, messages, thinking)
    except ValueError as error:
        raise InputError(f"{error}: {remedy}") from None
    for turn in messages:
        if turn["role"] != "assistant" and turn["content"].strip() not in text:
            left_out = f"the turn of the {turn['role']} that begins {turn['content'][:60]!r}"
            raise InputError(f"the chat template leaves out {left_out}: {remedy}")
    return text


def _without_end(prompt_ids: list[list[int]], tokenizer, model) -> list[list[int]]:
    """The prompts without end tokens at their ends. After one, a model writes something else."""
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
