"""
Files of problems: how a row of JSON lines, of a JSON array or of parquet becomes a problem.

A row has the problem under `problem`, `question`, `prompt` or `messages`, as text or as a chat, and
the reference answer under `answer`, `final_answer`, `target`, `solution`, `ground_truth` or
`reward_model.ground_truth` (verl's). An optional `source`, `subject` or `type` names its kind. Bad
rows are reported by line number.
"""

import json
import math
import re
from dataclasses import dataclass
from decimal import MAX_PREC, Context, Decimal
from pathlib import Path

import rewards
from runtime import InputError

PROBLEM_KEYS = ("problem", "question", "prompt", "messages")
ANSWER_KEYS = ("answer", "final_answer", "target", "solution", "ground_truth")
SOURCE_KEYS = ("source", "subject", "type")
INSTRUCTION = "Please reason step by step, and put your final answer within \\boxed{}."


@dataclass(frozen=True)
class Problem:
    text: str  # of a chat: the last turn of the user
    answer: str
    source: str  # the kind of embedded problem, the row's own source, or else the data's name
    solution: str = ""  # worked out, with the answer in a box; "" if there is none
    instruction: str = ""  # the prompt's last line
    turns: tuple[dict, ...] = ()  # of a chat; () if it has only the text

    def messages(self, instruction: str = "") -> list[dict]:
        """The turns of the prompt, with the instruction after the user's last one."""
        content = f"{self.text}\n{instruction}" if instruction else self.text
        turns = list(self.turns) or [{"role": "user"}]
        last = max(place for place, turn in enumerate(turns) if turn["role"] == "user")
        turns[last] = turns[last] | {"content": content}
        return turns


def read_file(path: str) -> list[Problem]:
    """Every problem of a file; InputError names what cannot be used."""
    if is_lfs_pointer(Path(path)):
        raise InputError(f"{path} is only a Git LFS pointer: run `git lfs pull`")
    if path.lower().endswith(".parquet"):
        rows = numbered(path, _parquet_rows(path))
    else:
        rows = _json_rows(path)
    return [problem_of(row, where, path) for where, row in rows]


def numbered(name: str, rows):
    """(where, row) of each row, as errors name it."""
    return ((f"{name}, row {number}", row) for number, row in enumerate(rows, 1))


def is_lfs_pointer(path: Path) -> bool:
    """Whether Git LFS has put its pointer where a file should be."""
    with open(path, "rb") as file:
        return file.read(50).startswith(b"version https://git-lfs")


def _parquet_rows(path: str):
    """Read without the cache of the library datasets, which may hold the rows of an older file."""
    import pyarrow
    import pyarrow.parquet

    try:
        for batch in pyarrow.parquet.ParquetFile(path).iter_batches():
            columns = {}
            for name, column in zip(batch.schema.names, batch.columns, strict=True):
                if column.type == pyarrow.float32():  # Python would say 7.099999904632568 for 7.1
                    column = column.cast("string").cast("double")  # noqa: PLW2901
                columns[name] = column
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
    if text.lstrip().startswith("["):
        yield from numbered(path, _json(text, path))
        return
    for number, line in enumerate(text.split("\n"), 1):  # splitlines also splits inside strings
        if line.strip():
            yield f"{path}, line {number}", _json(line, f"{path}, line {number}")


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


def problem_of(row: dict, where: str, data: str) -> Problem:
    """The problem of a row of the set `data`; `where` names the row in errors."""
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
    return Problem(text, answer, next(sources, data), solution, INSTRUCTION, turns)


def _check_value(value, key: str, where: str) -> None:
    if not isinstance(value, (str, int, float, Decimal)):
        bad = f"the value of {key!r} must be text or a number, got {value!r}"
        raise InputError(f"{where}: {bad}")


def _question(row: dict, where: str) -> tuple[str, tuple[dict, ...], str | None]:
    """(text, turns, said): what is asked; the chat, or () if it is no more than that; and the
    assistant's last turn if that is the row's solution (OpenAI's format)."""
    key = _first_key(row, PROBLEM_KEYS, where)
    text, said = row[key], None
    turns = _chat(text, f"{where}: the value of {key!r}") if isinstance(text, list) else ()
    if turns and turns[-1]["role"] == "assistant":
        has_answer = any(row.get(name) is not None for name in ANSWER_KEYS)
        if key != "messages" or has_answer:
            ends = f"the chat under {key!r} ends with an assistant turn"
            raise InputError(f"{where}: {ends}, which may give the answer away: remove it")
        *turns, last = turns
        said = last["content"]
    if isinstance(text, list):
        asked = [turn["content"] for turn in turns if turn["role"] == "user"]
        if not asked:
            raise InputError(f"{where}: the chat under {key!r} has no user turn")
        text = asked[-1]
    _check_value(text, key, where)
    text = str(text)
    if not text.strip():
        raise InputError(f"{where}: the value of {key!r} must not be empty, got {row[key]!r}")
    try:
        "".join([text, *(turn["content"] for turn in turns)]).encode()
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
