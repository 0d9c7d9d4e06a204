"""Data: a file is read whole or refused by line number; prompts that do not fit are reported."""

import functools
import json
import re
import types
from dataclasses import replace
from decimal import Decimal
from pathlib import Path

import datasets
import pyarrow
import pytest
import torch
from pyarrow import parquet
from tokenizers import processors

import data
import eval as evaluation
import rewards
from flags import EvalConfig, SftConfig
from runtime import InputError, checkpoint, log
from tasks import arithmetic, sft, word_problems

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"


def write(tmp_path, *lines):
    path = tmp_path / "problems.jsonl"
    texts = [line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines]
    path.write_text("".join(texts))
    return str(path)


def test_a_file_is_read_by_any_of_its_keys(tmp_path):
    chat = [{"role": "user", "content": "d?"}]
    rows = {  # the answer that is read: the row
        "1": {"question": "a?", "answer": "1"},
        "2.5": {"problem": "b?", "final_answer": 2.5, "answer": None, "source": "algebra"},
        "1,003": {"prompt": "c?", "solution": "so #### 1,003", "id": 7},
        "x": {"prompt": chat, "target": "$x$"},
        "\\frac{1}{2}": {"problem": "e?", "solution": "\\boxed{3}, no, \\boxed{\\frac{1}{2}}."},
        "27": {"problem": "f?", "answer": 27.0, "solution": "not \\boxed{1}"},
        "2, 3": {"problem": "g?", "final_answer": ["$2$", 3.0]},
        "0.00000015": {"problem": "h?", "answer": 1.5e-7},
        "": {"problem": "i?", "answer": float("nan")},
        # a heading is no answer, unlike the end of the last line; and a box wins over both
        "7": {"problem": "j?", "solution": "#### Sum\nIt is \\boxed{7}.\n#### Check\nIt is odd."},
        "8": {"problem": "k?", "solution": "#### Sum\n3+5 = <<3+5=8>>8\n#### 8\n\n"},
        "#### Sum\nIt is 9.": {"problem": "l?", "answer": "#### Sum\nIt is 9."},
        "59": {"problem": "m?", "solution": "$\\boxed 59$. Remark: $n = 12$ fails."},
        "34": {"problem": "n?", "reward_model": {"style": "rule", "ground_truth": "34"}},
    }
    path = write(tmp_path, "\ufeff", *rows.values())
    problems = data.read_problems(path)
    assert [problem.answer for problem in problems] == [*rows]
    assert [problem.text for problem in problems] == [f"{letter}?" for letter in "abcdefghijklmn"]
    assert [problem.source for problem in problems[:3]] == [path, "algebra", path]


def test_arrays_and_parquet(tmp_path):
    """Fails if an array is read as one line, or a parquet file as text."""
    rows = [{"problem": f"p{n}", "answer": str(n), "subject": "algebra"} for n in range(3)]
    lines = data.read_problems(write(tmp_path, *rows))
    for name in ("a.json", "b.jsonl"):
        (tmp_path / name).write_text(json.dumps(rows, indent=1))
    datasets.Dataset.from_list(rows).to_parquet(str(tmp_path / "a.parquet"))
    for name in ("a.json", "b.jsonl", "a.parquet"):
        assert data.read_problems(str(tmp_path / name)) == lines


LONG = "123456789012345678901234567890123"
COLUMNS = [  # values of a parquet column, its type, and the answers
    ([Decimal(f"{LONG}.00"), Decimal("1000"), None], None, [LONG, "1000", ""]),
    ([7.1, None], "float", ["7.1", ""]),  # not 7.099999904632568
]


def test_numbers_in_parquet(tmp_path):
    """Catches a digit that is lost, and rows of an older file of this name from a cache."""
    for values, kind, answers in COLUMNS:
        column = pyarrow.array(values, kind)
        table = pyarrow.table({"problem": ["p"] * len(values), "answer": column})
        parquet.write_table(table, tmp_path / "a.PARQUET")
        found = data.read_problems(str(tmp_path / "a.PARQUET"))
        assert [problem.answer for problem in found] == answers


SYSTEM = {"role": "system", "content": "Be brief."}
USER, OTHER = {"role": "user", "content": "1+1?"}, {"role": "user", "content": "And 3+4?"}
SAYS = {"role": "assistant", "content": "1+1=2, so \\boxed{2}."}
PARTS = {
    "role": "user",
    "content": [{"type": "text", "text": "1+"}, {"type": "text", "text": "1?"}],
}
CALL = {"role": "assistant", "content": None, "tool_calls": [{"name": "add"}]}
RESULT = {"role": "tool", "content": "2", "name": None}
HALF = {"role": "system", "content": "\ud83d"}
IMAGE = {"role": "user", "content": [{"type": "image"}]}


def user(text):
    return {"role": "user", "content": f"{text}\nBox it."}


SAID = SAYS["content"]
CHATS = {  # a row: the messages of its prompt, with the instruction "Box it.", and its solution
    "system": ({"prompt": [SYSTEM, USER], "answer": "2"}, [SYSTEM, user("1+1?")], ""),
    "messages": (
        {"messages": [USER, SAYS, OTHER], "answer": 2}, [USER, SAYS, user("And 3+4?")], "",
    ),
    "parts": ({"prompt": [SYSTEM, PARTS], "answer": "2"}, [SYSTEM, user("1+1?")], ""),
    "one turn": ({"prompt": [USER], "answer": "2"}, [user("1+1?")], ""),
    "tools": (
        {"prompt": [USER, CALL, RESULT], "answer": "2"},
        [user("1+1?"), CALL | {"content": ""}, {"role": "tool", "content": "2"}], "",
    ),
    "solution": ({"messages": [SYSTEM, USER, SAYS], "answer": None}, [SYSTEM, user("1+1?")], SAID),
    "without a box": ({"messages": [USER, SAYS | {"content": "2"}]}, [user("1+1?")], "2"),
}  # fmt: skip


@pytest.mark.parametrize("name", CHATS)
def test_a_chat_is_used_whole(tmp_path, name):
    """Catches a turn that is lost, an instruction after another turn, and a last turn of the
    assistant that is in the prompt although it gives the answer away."""
    row, messages, solution = CHATS[name]
    (problem,) = data.read_problems(write(tmp_path, row))
    assert problem.messages("Box it.") == messages
    assert (problem.answer, problem.solution) == ("2", solution)


def test_chats_in_parquet(tmp_path):
    """verl's columns; and parquet gives every turn the keys of all turns."""
    rows = [
        {
            "prompt": [SYSTEM | {"name": "s"}, USER],
            "reward_model": {"ground_truth": "2"},
            "ground_truth": None,
        },
        {"prompt": [OTHER], "reward_model": {"ground_truth": None}, "ground_truth": "7"},
    ]
    datasets.Dataset.from_list(rows).to_parquet(str(tmp_path / "a.parquet"))
    first, second = data.read_problems(str(tmp_path / "a.parquet"))
    assert first.messages() == [SYSTEM | {"name": "s"}, USER]
    assert (second.messages(), second.turns) == ([OTHER], ())
    assert [first.answer, second.answer] == ["2", "7"]


CHAT = {"messages": [USER, SAYS], "answer": "2"}
LINES = {  # a line of a.jsonl: what is wrong with row 1 of a.jsonl
    "{oops}": "JSONDecodeError: Expecting property name",
    f'{{"question": "a", "answer": {"1" * 5000}}}': "Exceeds the limit",
    '{"question": "a", "label": "1"}': "it has none of the keys answer, final_answer",
    '{"answer": "1"}': "problem, question, prompt, messages (it has: answer)",
    '{"question": "a", "answer": ["1", null]}': "'answer' must be text or a number, got None",
    '{"question": " ", "answer": "1"}': "nothing is asked under 'question'",
    '{"question": null, "answer": "1"}': "text or a number, got None",
    json.dumps({"prompt": [USER, SAYS]}): "chat under 'prompt' ends with an",
    json.dumps(CHAT): "chat under 'messages' ends with",
    json.dumps(CHAT | {"messages": [HALF, USER]}): "surrogates not allowed",
    json.dumps(CHAT | {"messages": [SYSTEM]}): "nothing is asked under 'messages'",
    json.dumps(CHAT | {"messages": []}): "nothing is asked under 'messages'",
    json.dumps(CHAT | {"messages": [IMAGE]}): "KeyError: 'text'",
}
FILES = {  # name and text of a file: what is wrong with it
    ("a.jsonl", "[" * 10**5): "RecursionError",
    ("a.jsonl", '\n{"question": "a", "answer": "1"}\n{oops}\n'): "row 3 of .*: JSONDecodeError",
    ("a.jsonl", "\n"): "is empty",
    ("a.jsonl", b"\xff\xfe\x00"): "can't decode byte",
    ("a.json", '[{"problem": "p", "answer": "1"}, 7]'): "row 2 of .* not a JSON object but int",
    ("a.parquet", "no"): "Parquet file size is 2 bytes",
    ("a.txt", None): "No such file .*give a file of JSON or parquet, or one of arith",
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        *((*file, message) for file, message in FILES.items()),
        *(
            ("a.jsonl", line, f"row 1 of .*: .*{re.escape(why)}.*: cor")
            for line, why in LINES.items()
        ),
    ],
)
def test_what_cannot_be_read_is_refused(tmp_path, name, text, message):
    """In one line, which names the file and the row. Catches a traceback, and a row that is read as
    a problem that nobody asked."""
    path = tmp_path / name
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(InputError, match=message) as caught:
        data.read_problems(str(path))
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_last_twentieth_is_held_out(tmp_path):
    """Fails if training problems are evaluated on, or if nothing of a small file is held out."""
    path = write(tmp_path, *[{"question": f"q{i}", "answer": str(i)} for i in range(40)])
    train = data.train_problems(path, hold_out=True)
    held_out = data.eval_problems(path, 300, of_training_file=True)
    assert [problem.text for problem in train + held_out] == [f"q{i}" for i in range(40)]
    assert len(held_out) == 2
    assert data.eval_problems(path, 1, of_training_file=True) == held_out[:1]
    assert len(data.train_problems(path, hold_out=False)) == 40
    assert len(data.eval_problems(path, 3)) == 3
    problems = [data.Problem("p", "1", "file")]
    shares = [data._held_out("FILE", count * problems) for count in (2, 45, 51)]
    assert shares == [1, 2, 3], "rounded to the nearest number, but at least 1"
    with pytest.raises(InputError, match="too few"):
        data.train_problems(write(tmp_path, {"question": "q", "answer": "1"}), hold_out=True)


SOURCES = {
    "arithmetic": {"chain"},
    "arithmetic-mixed": {"trivial", "unsolved", "chain"},
    "arithmetic-longer": {"longer"},
    "words": {"1 step", "2 steps", "3 steps"},
}


@pytest.mark.parametrize("name", SOURCES)
def test_embedded_data(name):
    """Catches problems of another task or split, training problems that are evaluated on, a reward
    or a room for another task's right answers, and text and solution in each other's place."""
    task, train_split, eval_split, _reward, _room = data.EMBEDDED[name]
    found = data.eval_problems(name, None)
    assert len(found) == data.EVAL_PROBLEMS
    assert {problem.source for problem in found} == SOURCES[name]
    assert found[:5] == data.eval_problems(name, 5)
    text, answer, source, *solution = task.problem(eval_split, 8)
    assert found[8] == data.Problem(text, answer, source, *solution)
    for problem in found:
        right = problem.solution or arithmetic.worked_answer(problem.text)
        assert data.reward_function(name)(right, problem.answer) == 1.0
        assert len(right) < data.max_new_tokens(name) < data.max_new_tokens("file.jsonl")

    if train_split is None:
        with pytest.raises(InputError, match="evaluation only: train on one of arithmetic, arith"):
            data.train_problems(name, hold_out=True)
        return
    train = data.train_problems(name, hold_out=True)
    assert len(train) == task.TRAIN_PROBLEMS == 512
    assert {problem.source for problem in train} == SOURCES[name]
    assert not {problem.text for problem in train} & {problem.text for problem in found}


@pytest.mark.parametrize(
    ("answer", "solution"),
    [
        ("1+1 = <<1+1=2>>2.\n<<2*2=4>>4 <<4>>4\n#### 4", "1+1 = 2.\n4 4\n\\boxed{4}"),
        ("a << b, so \\boxed{2} >> 1", "a << b, so \\boxed{2} >> 1"),
        *((answer, "") for answer in ("72", 72, "#### 72", "\\boxed{72}", "by 72", None)),
    ],
)
def test_worked_solutions(tmp_path, answer, solution):
    """Catches calculator marks that stay, an answer that is not boxed, a bare answer taken for a
    solution, and a solution overlooked beside the answer."""
    row = {"question": "q", "answer": answer}
    beside = {"question": "q", "answer": "2", "solution": answer}
    problems = data.read_problems(write(tmp_path, row, beside))
    assert [problem.solution for problem in problems] == [solution, solution]
    assert problems[0].instruction


def test_sft_problems(tmp_path):
    """Catches held-out rows or rows without a solution that would be learned."""
    words = data.sft_problems("words")
    assert len(words) == word_problems.SFT_PROBLEMS
    assert words[8] == data.Problem(*word_problems.problem("sft", 8))
    rows = [{"question": f"q{n}", "answer": f"so #### {n}" if n % 2 else n} for n in range(40)]
    found = data.sft_problems(write(tmp_path, *rows))
    assert [problem.text for problem in found] == [f"q{n}" for n in range(1, 38, 2)]
    assert [one.solution for one in found[:2]] == ["so\n\\boxed{1}", "so\n\\boxed{3}"]
    with pytest.raises(InputError, match="19 of 19 problems have no worked solution; use"):
        data.sft_problems(write(tmp_path, *rows[::2]))


def test_prompts_that_do_not_fit_are_counted(capsys):
    texts = ("short", "x" * 50, "")
    problems = [data.Problem(text, "1", "file") for text in texts]
    tokenizer = arithmetic.make_tokenizer()

    def fitting(limit):
        kept, prompt_ids = data.encode_prompts(problems, tokenizer, limit)
        assert [len(problem.text) for problem in kept] == [len(ids) for ids in prompt_ids]
        return [len(ids) for ids in prompt_ids]

    assert fitting(50) == [5, 50], "nothing predicts the first token after no prompt"
    assert fitting(49) == [5]
    assert "dropped 2 of 3 prompts: longer than 49 tokens" in capsys.readouterr().out
    with pytest.raises(InputError, match="all 3 prompts are longer than 2 tokens"):
        fitting(2)


def prompts_of(problems, tokenizer, *args, **options):
    found = data.encode_prompts(problems, tokenizer, 200, *args, **options)[1]
    return [tokenizer.decode(ids) for ids in found]


def test_prompt_formats():
    """Catches a template without --thinking, a base model without an instruction, and an empty
    instruction that is read as the default."""
    tokenizer = arithmetic.make_tokenizer()
    boxed = data.Problem("1+1", "2", "file", instruction="Box it.")
    texts = functools.partial(prompts_of, [boxed, data.Problem("1+1?", "2", "chain")], tokenizer)
    plain = ["1+1\nBox it.\n", "1+1?"]
    assert texts() == texts("plain") == plain
    assert texts(instruction="Go.") == ["1+1\nGo.\n", "1+1?\nGo.\n"]
    assert texts(instruction="") == ["1+1", "1+1?"]
    with pytest.raises(InputError, match="--prompt-format chat: the tokenizer has no chat templ"):
        texts("chat")
    tokenizer.chat_template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
        "{% if not enable_thinking %}<think></think>{% endif %}"
    )
    users = ["<user>1+1\nBox it.<assistant>", "<user>1+1?<assistant>"]
    assert texts() == [user + "<think></think>" for user in users]
    assert texts("chat", True) == users
    assert texts("plain", True) == plain
    assert texts("chat", True, "Go.")[1] == "<user>1+1?\nGo.<assistant>"


def model_of(rows, ends=None):
    """What encode_prompts asks a model for."""
    return types.SimpleNamespace(
        config=None,
        generation_config=types.SimpleNamespace(eos_token_id=ends),
        get_input_embeddings=lambda: torch.nn.Embedding(rows, 1),
    )


def test_prompts_that_no_model_can_continue():
    """Catches an end token that the tokenizer adds, or the template; turns that nothing joins; a
    template's own words that are lost; and a token that the model has no embedding for."""
    tokenizer = arithmetic.make_tokenizer()
    problem = data.Problem("1+1?", "2", "file")
    chat = data.Problem("1+1?", "2", "file", turns=(SYSTEM, USER))
    with pytest.raises(
        InputError, match=r"a chat of several turns, which ends with '1\+1\?', needs a"
    ):
        data.encode_prompts([problem, chat], tokenizer, 100)
    data.encode_prompts([problem], tokenizer, 100, model=model_of(64))
    with pytest.raises(InputError, match=r"gives '\?' the id 30, but the model's embedding has 30"):
        data.encode_prompts([problem], tokenizer, 100, model=model_of(30))
    of_generation = tokenizer.encode("1?")  # ends that only the model names
    assert prompts_of([problem], tokenizer, model=model_of(64, of_generation)) == ["1+"]

    end = ("<|end|>", tokenizer.eos_token_id)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="$A <|end|>", special_tokens=[end]
    )
    assert prompts_of([problem], tokenizer) == ["1+1?"]

    for after in ("", "\n", " \n\n", "\t", "\u00a0", "<|end|>\n"):
        tokenizer.chat_template = f"{{{{ messages[0].content }}}}{{{{ eos_token }}}}{after}"
        with pytest.raises(
            InputError,
            match=r"chat of user \(the assistant's turn never begins.*use --prompt-format",
        ):
            data.encode_prompts([problem], tokenizer, 100)
    tokenizer.chat_template += "Say: "
    assert prompts_of([problem], tokenizer)[0].endswith("Say: ")
    for content in (
        "{% if m.role == 'user' %}{{ m.content }}{% endif %}",
        "{{ m.content[0].text }}",
    ):
        tokenizer.chat_template = f"{{% for m in messages %}}{content}{{% endfor %}}Say: "
        with pytest.raises(
            InputError, match=r"system, user .it leaves out what the system says, 'Be"
        ):
            data.encode_prompts([chat], tokenizer, 100)
    tokenizer.chat_template = "{{ raise_exception('no chats') }}"
    with pytest.raises(
        InputError, match=r"chat of user \(TemplateError: no chats\).*--prompt-format plain"
    ):
        data.encode_prompts([problem], tokenizer, 100)


def test_control_tokens_in_problems_are_noted(capsys):
    tokenizer = arithmetic.make_tokenizer()
    texts = ("1+1?", "Is <|end|> an end, or <|pad|>?", "Is < |end|> one?")
    data.encode_prompts([data.Problem(text, "2", "file") for text in texts], tokenizer, 100)
    assert re.search(r"control tokens, such as '<.*'; 2 in all", capsys.readouterr().out)
    data.encode_prompts([data.Problem(texts[2], "2", "file")], tokenizer, 100)
    assert capsys.readouterr().out == ""


DATES = {  # what a chat template says: what it says on the day of the run; None: no date
    "{{ strftime_now('%d %b %Y') }}": "28 Nov 2026",
    '{% set day = strftime_now( "%Y-%m-%d" ) %}{{ day }}': "2026-11-28",
    '{{ strftime_now(format="%H:%M") }}': "00:00",
    "{{ strftime_now('%d')|int + 1 }}": "29",
    "{% if strftime_now is defined %}today{% endif %}": None,
    None: None,
}


@pytest.mark.parametrize("template", DATES)
def test_the_date_of_a_template(template):
    """Catches a prompt that is another one on the next day."""
    tokenizer = arithmetic.make_tokenizer()
    expected = DATES[template]
    for of_tokenizer in (template, {"default": template or "", "tool_use": ""}):
        tokenizer.chat_template = of_tokenizer
        data.fix_date(tokenizer, "2026-11-28")
        assert tokenizer.date == (expected and "2026-11-28")
        assert not expected or tokenizer.apply_chat_template([USER], tokenize=False) == expected


@pytest.fixture
def on(monkeypatch):
    """Set today's date."""

    def set_date(date):
        today = types.SimpleNamespace(today=lambda: date)
        monkeypatch.setattr(checkpoint, "datetime", types.SimpleNamespace(date=today))

    return set_date


def test_a_run_keeps_its_date(on, run, policy_folder, tmp_path, monkeypatch, capsys):
    """A run, an evaluation and a supervised start, which all go on the next day. Catches prompts of
    two days in one folder, a checkpoint whose template is of one day, and two evaluations of
    different days that are compared without a word."""
    template = "{{ strftime_now('%d') }}{% for m in messages %}{{ m.content }}{% endfor %}>"
    (Path(policy_folder) / "chat_template.jinja").write_text(template)
    more = Path(policy_folder) / "additional_chat_templates" / "tool_use.jinja"
    more.parent.mkdir()
    more.write_text("x")
    evals = EvalConfig(policy_folder, problems=4, k=2, batch_size=4, max_new_tokens=9)
    sums = [{"problem": f"{n}+1?", "answer": f"so #### {n + 1}"} for n in range(4)]
    supervised = SftConfig(policy_folder, (write(tmp_path, *sums),), steps=2, batch_size=2)
    supervised = replace(supervised, out_dir=str(tmp_path / "sft"))

    def evaluate(name):
        evaluation.main(replace(evals, out_dir=str(tmp_path / name)))
        return (tmp_path / name / "arithmetic.jsonl").read_text()

    on("2026-11-28")
    run("run", steps=2, until=1)
    whole = evaluate("first")
    with monkeypatch.context() as patched:
        patched.setattr(sft.Stop, "agreed", lambda _stop: True)
        sft.main(supervised)
    on("2026-11-29")
    assert len(run("run", steps=2, resume=True)) == 2
    sft.main(replace(supervised, resume=True))
    assert len(log.read_rows(tmp_path / "sft" / "log.jsonl")) == 2
    saved = tmp_path / "run" / "checkpoint"
    assert (saved / "chat_template.jinja").read_text() == template
    assert checkpoint.is_complete(saved)
    (tmp_path / "first" / "arithmetic.jsonl").write_text("".join(whole.splitlines(True)[:2]))
    assert evaluate("first") == whole != evaluate("second")
    assert log.read_json(tmp_path / "run" / "config.json")["date"] == "2026-11-28"
    evaluation.compare(*(str(tmp_path / name) for name in ("first", "second")))
    assert "note: the folders differ in date: 2026-11-28, 2026-11-29\n" in capsys.readouterr().out


def test_what_makes_a_problem_the_same(capsys):
    """Its chat, but not its file, its place or its answer. Catches equal keys of two occurrences,
    and a problem in both parts of the data that is not counted."""
    one, other = data.Problem("a", "1", "x"), data.Problem("b", "2", "x")
    chat = data.Problem("a", "1", "x", turns=(SYSTEM, {"role": "user", "content": "a"}))
    keys = data.draw_keys([one, other, one, chat])
    assert len(set(keys)) == 4
    assert data.draw_keys([other, data.Problem("a", "3", "y")]) == [keys[1], keys[0]]
    data.say_common([one, chat], [other, one, one])
    data.say_common([one], [other, chat])
    said = "note: 2 of the 3 problems to evaluate on are also trained on\n"
    assert capsys.readouterr().out == said


HUB_COLUMNS = {
    "openai/gsm8k": {"question": "q", "answer": "so 1+1=2 #### 2"},
    "DigitalLearningGmbH/MATH-lighteval": {"problem": "q", "type": "Al", "solution": "\\boxed{2}"},
    "haizhongzheng/DAPO-Math-17K-cleaned": {"prompt": "q", "target": "2"},
    "HuggingFaceH4/MATH-500": {"problem": "q", "solution": "\\boxed{3}", "answer": "2"},
    "HuggingFaceH4/aime_2024": {"problem": "q", "solution": "\\boxed{3}", "answer": "002"},
    "math-ai/amc23": {"question": "q", "answer": 2.0, "url": ""},
    "math-ai/minervamath": {"question": "q", "answer": "2"},
    "math-ai/olympiadbench": {"question": "q", "solution": ["three"], "final_answer": ["$2$"]},
    "MARIO-Math-Reasoning/Gaokao2023-Math-En": {"question": "q", "answer": "$2$"},
}


def test_hub_sets(monkeypatch):
    """Every name is loaded by id, configuration and split, with the columns it has on the hub.

    Catches a wrong split, a column that no key names, and GSM8K's whole solution as the answer.
    """
    loaded = []

    def load_dataset(name, configuration=None, *, split):
        loaded.append((name, configuration, split))
        return datasets.Dataset.from_list([HUB_COLUMNS[name]] * 3)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    for name in data.HUB:
        problems = data.eval_problems(name, None)
        assert [(one.text, one.answer.lstrip("0")) for one in problems] == [("q", "2")] * 3
    assert ("openai/gsm8k", "main", "test") in loaded
    assert {name for name, *_ in loaded} == set(HUB_COLUMNS)
    assert data.train_problems("math", hold_out=True)[0].source == "Al"

    def no_network(*args, **options):
        raise ConnectionError("Couldn't reach the hub")

    monkeypatch.setattr(datasets, "load_dataset", no_network)
    message = r"--data gsm8k cannot be read \(ConnectionError: Couldn't reach the hub\)"
    with pytest.raises(InputError, match=message):
        data.train_problems("gsm8k", hold_out=True)


def test_problems_that_cannot_be_scored_are_dropped(tmp_path, capsys):
    """They are counted. Fails if the default reward drops problems although the user has another
    one, which cannot be asked before a completion is there."""
    answers = {"p": "1", "q": "", "r": None, "s": "x+1", "t": " "}
    rows = [{"problem": text, "answer": answer} for text, answer in answers.items()]
    path = write(tmp_path, *rows)
    dropped = f"note: 3 of 5 reference answers of {path} cannot be scored (python eval.py "
    dropped += f"--check-golds --data {path} lists them); these problems are dropped\n"
    for reward, kept, said in ((None, "ps", 2 * dropped), (len, "pqrst", "")):
        train = data.train_problems(path, hold_out=False, reward=reward)
        assert "".join(problem.text for problem in train) == kept
        assert data.eval_problems(path, None, reward=reward) == train
        assert capsys.readouterr().out == said
    with pytest.raises(InputError, match=r"^1 of 1 reference answers of .* cannot be scored"):
        data.eval_problems(write(tmp_path, rows[1]), 3)


@pytest.mark.skipif(not SHARED.exists(), reason="the real problem files are not in the repository")
def test_real_files():
    """GSM8K and MATH as published. Of MATH two answers are null, and two are empty."""
    problems = data.read_problems(str(SHARED / "gsm8k_train.jsonl"))
    assert len(problems) == 7473
    assert all(rewards.final_answer(one.solution) == one.answer for one in problems)
    assert not any("<<" in one.solution or "####" in one.solution for one in problems)
    problems = data.read_problems(str(SHARED / "math_train.json"))
    assert len(problems) == 7474
    assert sum(not one.answer for one in problems) == 4
    assert len({one.source for one in problems}) == 7
