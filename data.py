"""
Problems: from a row of a file, of the Hugging Face hub, or of a task.

A row has the problem under `problem`, `question`, `prompt` or `messages`, as text or as a chat, and
the reference answer under `answer`, `final_answer`, `target`, `solution`, `ground_truth` or
`reward_model.ground_truth` (verl's). An optional `source`, `subject` or `type` names its kind.
InputError names the row that cannot be used, before training starts.
"""

import hashlib
import importlib
import itertools
import json
import math
import re
from collections import Counter, namedtuple
from collections.abc import Callable
from dataclasses import dataclass, field
from decimal import MAX_PREC, Context, Decimal

import dppo
import rewards
from chat_format import encode_prompts, fix_date  # noqa: F401  what becomes of problems
from runtime import InputError, in_words, ranks
from runtime.answers import OR, equal

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
PROBLEM_KEYS = ("problem", "question", "prompt", "messages")
ANSWER_KEYS = ("answer", "final_answer", "target", "solution", "ground_truth")
SOURCE_KEYS = ("source", "subject", "type")
READ = {*ANSWER_KEYS, *SOURCE_KEYS, "reward_model"}
# What data have where no answer was found: small letters and digits, without what is between them.
PLACEHOLDERS = {
    "", "proof", "notfound", "none", "null", "nan", "na", "unknown", "noanswer", "todo", "tbd",
}  # fmt: skip
INSTRUCTION = "Please reason step by step, and put your final answer within \\boxed{}."
EVAL_PROBLEMS = 300  # default number of evaluation problems of an embedded split
FILE_TOKENS = 1024  # default --max-new-tokens for data that are not embedded
HELD_OUT_SHARE = 0.05  # of data that are not embedded: the last rows

# A set of problems that a task computes, a module of tasks/: its problem(split, index) is (text,
# answer, source and perhaps a solution). One to train on has the indices 0 to TRAIN_PROBLEMS - 1.
# Without a reward here, the task has its own. `room` is the default --max-new-tokens: the longest
# right answer and its end token.
Embedded = namedtuple("Embedded", "task train_split eval_split reward room")
sums = rewards.arithmetic_reward
EMBEDDED = {  # data name -> its task. A new one needs a module in tasks/ and a row here.
    "arithmetic": Embedded("arithmetic", "train", "heldout", sums, 55),
    "arithmetic-mixed": Embedded("arithmetic", "mixed", "mixed-heldout", sums, 148),
    "arithmetic-longer": Embedded("arithmetic", None, "longer", sums, 88),  # for evaluation only
    # The longest solution of 20,000 has 44 characters; a tokenizer may take more.
    "words": Embedded("word_problems", "train", "heldout", rewards.math_reward, 60),
}


@dataclass(frozen=True)
class Problem:
    text: str  # of a chat: the last turn of the user
    answer: str
    source: str  # the kind of embedded problem, the row's own source, or else the data's name
    solution: str = ""  # worked out, with the answer in a box; "" if there is none
    instruction: str = ""  # the prompt's last line
    turns: tuple[dict, ...] = ()  # of a chat; () if it has only the text
    row: dict = field(default_factory=dict, compare=False)  # as read, for a reward that asks for it

    def messages(self, instruction: str = "") -> list[dict]:
        """The turns of the prompt, with the instruction after the user's last one."""
        content = f"{self.text}\n{instruction}" if instruction else self.text
        turns = list(self.turns) or [{"role": "user"}]
        last = max(place for place, turn in enumerate(turns) if turn["role"] == "user")
        turns[last] = turns[last] | {"content": content}
        return turns


# ---------------------------------------------------------------------------- sets


def problem_sets(
    data: str, eval_data: str | None, limit: int | None, reward=None
) -> tuple[list[Problem], list[Problem]]:
    """(problems to train on, at most `limit` problems to evaluate on).

    Without eval_data these are the held-out split of an embedded task, or the last 5 % of other
    data, which are then not trained on. Says how many problems are in both.
    """
    train = train_problems(data, reward)
    if eval_data is None and data not in EMBEDDED:
        end = len(train) - max(1, round(HELD_OUT_SHARE * len(train)))
        train, evaluated = train[:end], train[end:][:limit]
    else:
        evaluated = [] if limit == 0 else eval_problems(eval_data or data, limit, reward)
    if limit != 0 and not evaluated:
        raise InputError(f"--eval-data {eval_data or data} has no problem to evaluate on")
    asked = {identity(problem) for problem in evaluated}
    trained = asked.intersection(map(identity, train))
    if common := sum(identity(problem) in trained for problem in evaluated):
        ranks.say(f"note: {common} of {len(evaluated)} problems to evaluate on are also trained on")
    return train, evaluated


def train_problems(data: str, reward=None) -> list[Problem]:
    """All problems to train on: an embedded split, or a whole set."""
    if data not in EMBEDDED:
        return _scorable(data, reward)
    task, split = _task(data), EMBEDDED[data].train_split
    if split is None:
        raise InputError(f"--data {data} is for evaluation only: train on another set")
    return [Problem(*task.problem(split, index)) for index in range(task.TRAIN_PROBLEMS)]


def eval_problems(data: str, limit: int | None = None, reward=None) -> list[Problem]:
    """At most `limit` problems to evaluate on: of a held-out embedded split, or of a whole set."""
    if data in EMBEDDED:
        task, split, count = _task(data), EMBEDDED[data].eval_split, limit or EVAL_PROBLEMS
        return [Problem(*task.problem(split, index)) for index in range(count)]
    return _scorable(data, reward)[:limit]


def reward_function(data: str) -> Callable:
    """The default reward of a data name: (completion, answer) -> 1.0, 0.0 or None."""
    if data not in EMBEDDED:
        return rewards.math_reward
    return EMBEDDED[data].reward or _task(data).reward


def is_file(data: str) -> bool:
    """Whether the value of --data is a path rather than a name of ours."""
    return data not in EMBEDDED and data not in HUB


def max_new_tokens(data: str) -> int:
    """Default room for a completion."""
    return EMBEDDED[data].room if data in EMBEDDED else FILE_TOKENS


def _task(data: str):
    return importlib.import_module(f"tasks.{EMBEDDED[data].task}")


def _scorable(data: str, reward) -> list[Problem]:
    """The problems whose reference answers the default reward can read; says what the others look
    like. A reward of the user's gets all problems."""
    problems = read_problems(data)
    if reward not in (None, reward_function(data)):
        return problems
    kept, dropped = [], []
    for problem in problems:
        is_placeholder = re.sub(r"[\W_]", "", problem.answer.lower()) in PLACEHOLDERS
        good = rewards.has_value(problem.answer) and not is_placeholder
        (kept if good else dropped).append(problem)
    if dropped:
        pairs = "; ".join(f"{one.answer[:50]!r} to {one.text[:50]!r}" for one in dropped[:3])
        said = f"{len(dropped)} of {len(problems)} reference answers of {data} cannot be scored"
        ranks.say(f"note: {said}, and their problems are dropped: {pairs}")
    return kept


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


def content_hash(problems: list[Problem]) -> str:
    """A hash of a set's prompts and of its reference answers, in 16 hexadecimal digits."""
    return digest([*map(identity, problems)]) + digest([problem.answer for problem in problems])


def digest(value) -> str:
    """A hash of what a value looks like, in 8 hexadecimal digits."""
    return hashlib.sha256(repr(value).encode()).hexdigest()[:8]


# ---------------------------------------------------------------------------- rows


def read_problems(data: str) -> list[Problem]:
    """Every problem of a hub set or a file. InputError names the row that cannot be used."""
    problems, unread = [], set()
    place = f"--data {data}"
    try:
        for number, line in ranks.progress(_rows(data), data, "row"):
            place = f"row {number} of {data}"
            row = json.loads(line) if isinstance(line, str) else line
            problems.append(problem_of(row, data))
            given = {name for name, value in row.items() if value not in (None, "")}
            unread |= given - READ - {_first_key(row, PROBLEM_KEYS)}
    except Exception as error:  # of the system, json, pyarrow or datasets, or ours
        raise InputError(f"{place} cannot be read ({in_words(error)})") from None
    if unread:
        ranks.say(f"note: prompts leave out these columns of {data}: {', '.join(sorted(unread))}")
    return problems


def _rows(data: str):
    """(number, row) of each row of a hub set, a parquet file or a JSON array; or (number, text) of
    each line of JSON lines. One at a time, so that only what becomes a problem is held."""
    if data in HUB:
        import datasets

        hub_id, configuration, split = HUB[data]
        yield from enumerate(datasets.load_dataset(hub_id, configuration, split=split), 1)
    elif data.lower().endswith(".parquet"):
        # datasets would have a cache, with rows of an older file of this name.
        import pyarrow.parquet

        file = pyarrow.parquet.ParquetFile(data)
        kind = pyarrow.struct(file.schema_arrow)
        rows = (row for batch in file.iter_batches() for row in batch.to_pylist())
        yield from enumerate((as_written(row, kind) for row in rows), 1)
    else:
        # utf-8-sig: Windows programs put a mark in front. newline: only this one ends a row.
        with open(data, encoding="utf-8-sig", newline="\n") as file:
            for number, line in enumerate(file, 1):
                if line.lstrip().startswith("["):  # an array, where a row would be an object
                    yield from enumerate(json.loads(line + file.read()), 1)
                elif line.strip():
                    yield number, line


def as_written(value, kind):
    """A value of an Arrow type with all digits of its numbers, and no more: as a Python number, the
    float32 of 7.1 is 7.099999904632568."""
    if isinstance(value, dict):
        return {field.name: as_written(value[field.name], field.type) for field in kind}
    if isinstance(value, list):
        return [as_written(part, kind.field(0).type) for part in value]
    return float(str(kind.to_pandas_dtype()(value))) if isinstance(value, float) else value


def problem_of(row: dict, data: str) -> Problem:
    """The problem of a row of the set `data`. An exception says what is wrong with the row."""
    turns = _turns(row)
    answers, solution = _answers(row, turns)
    asked = [turn["content"] for turn in turns if turn["role"] == "user"]
    if not "".join(asked[-1:]).strip():
        raise ValueError(f"nothing is asked under {_first_key(row, PROBLEM_KEYS)!r}")
    sources = (row[name] for name in SOURCE_KEYS if isinstance(row.get(name), str) and row[name])
    is_plain = len(turns) == 1 and turns[0].keys() == {"role", "content"}
    answer = together([*map(reference_answer, answers)])
    chat = () if is_plain else tuple(turns)
    return Problem(asked[-1], answer, next(sources, data), solution, INSTRUCTION, chat, row)


def _turns(row: dict) -> list[dict]:
    """The chat of a row, each turn with its content as text."""
    key = _first_key(row, PROBLEM_KEYS)
    if not isinstance(row[key], list):
        return [{"role": "user", "content": str(_text_or_number(row[key], key))}]
    turns = []
    for turn in row[key]:
        content = turn.get("content") or ""  # a call of a tool has none
        if isinstance(content, list):  # OpenAI's parts of a message
            content = "".join(part if isinstance(part, str) else part["text"] for part in content)
        given = {name: part for name, part in turn.items() if part is not None}  # as in parquet
        turns.append(given | {"role": turn["role"], "content": content})
    return turns


def _answers(row: dict, turns: list[dict]) -> tuple[list, str]:
    """(reference answers, worked solution) of a row. A last turn of the assistant is the solution
    in OpenAI's format, which has no answer beside it; it is taken off the chat."""
    of_verl = row.get("reward_model")
    if isinstance(of_verl, dict) and row.get("ground_truth") is None:
        row = row | {"ground_truth": of_verl.get("ground_truth")}
    if turns and turns[-1]["role"] == "assistant":
        key = _first_key(row, PROBLEM_KEYS)
        if key != "messages" or any(row.get(name) is not None for name in ANSWER_KEYS):
            ends = f"the chat under {key!r} ends with an assistant turn"
            raise ValueError(f"{ends}, which may give the answer away")
        solution = turns.pop()["content"]
        return [solution], solution
    name = _first_key(row, ANSWER_KEYS)
    value = "" if row[name] is None else row[name]  # _scorable drops such rows, and counts them
    values = value if isinstance(value, list) and value else [value]
    texts = (row[name] for name in ANSWER_KEYS if isinstance(row.get(name), str))
    solution = next(filter(None, (parts(text)[0] for text in texts)), "")
    return [_text_or_number(value, name) for value in values], solution


def _first_key(row: dict, keys: tuple[str, ...]) -> str:
    """The first of `keys` that the row has, preferably with a value that is not null."""
    present = [key for key in keys if key in row]
    if not present:
        has = ", ".join(row) or "none"
        raise ValueError(f"it has none of the keys {', '.join(keys)} (it has: {has})")
    return next((key for key in present if row[key] is not None), present[0])


def _text_or_number(value, key: str):
    if not isinstance(value, (str, int, float, Decimal)):
        raise ValueError(f"the value of {key!r} must be text or a number, got {value!r}")
    return value


def reference_answer(value: str | int | float | Decimal) -> str:
    """The reference answer in a value.

    >>> reference_answer("24+48=72 #### 72"), reference_answer(0.1 + 0.2), reference_answer("$2x$")
    ('72', '0.3', '2x')
    """
    if isinstance(value, (float, Decimal)):
        if not math.isfinite(value):
            return ""
        value = f"{value:.15g}" if isinstance(value, float) else value  # not 0.1 + 0.2's noise
        value = f"{Decimal(value).normalize(Context(prec=MAX_PREC)):f}"
    text = parts(str(value))[1].strip()
    dollars = len(text) > 1 and text[0] == text[-1] == "$" and "$" not in text[1:-1]
    return text[1:-1].strip() if dollars else text


def together(answers: list[str]) -> str:
    """One reference answer for a list: alternatives, unless all are different numbers.

    >>> together(["8", "eight"]), together(["1/2", "0.5"]), together(["2i", "-2i", "2i"])
    ('8 (or) eight', '1/2 (or) 0.5', '2i, -2i')
    """
    answers = [*dict.fromkeys(answers)]
    numbers = not any(re.search(r"[^\W\d_i]", re.sub(r"\\[a-z]+", "", one)) for one in answers)
    different = not any(equal(*pair) for pair in itertools.combinations(answers, 2))
    return (", " if numbers and different else OR).join(answers)


def parts(text: str) -> tuple[str, str]:
    """(worked solution, answer) of a text. The answer is in the last box, or else after #### in the
    last line, or else it is all. A solution ends in a box, without a calculator's marks.

    >>> parts("So 24+48 = <<24+48=72>>72 clips.\\n#### 72")
    ('So 24+48 = 72 clips.\\n\\\\boxed{72}', '72')
    >>> parts("#### Step 2\\nso $x=\\\\boxed{3}$."), parts("\\\\boxed{3}"), parts("#### 72")
    (('#### Step 2\\nso $x=\\\\boxed{3}$.', '3'), ('', '3'), ('', '72'))
    """
    if box := rewards.last_box(text):
        is_bare = text.strip() == text[box.start : box.end]
        return "" if is_bare or not box.content else text, box.content or ""
    lines, _newline, last_line = text.strip().rpartition("\n")
    before, mark, answer = map(str.strip, last_line.rpartition("####"))
    steps = re.sub(r"<<.*?>>", "", f"{lines}\n{before}").strip()
    solution = f"{steps}\n\\boxed{{{answer}}}" if mark and steps else ""
    return solution, answer if mark else text
