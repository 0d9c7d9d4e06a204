"""Data: a file is read whole or refused by line number; prompts that do not fit are reported."""

import functools
import json
import types
from dataclasses import replace
from decimal import Decimal
from pathlib import Path

import datasets
import pyarrow
import pytest
import toy
from pyarrow import parquet
from tokenizers import normalizers, processors
from transformers import AutoTokenizer

import chat_format
import data
import eval as evaluation
from eval import EvalConfig
from runtime import InputError, checkpoint, log
from tasks import arithmetic


def write(folder, *rows):
    log.write_rows(folder / "problems.jsonl", rows)
    return str(folder / "problems.jsonl")


# ---------------------------------------------------------------------------- rows

BOX = "\\boxed{3}, no, \\boxed{\\frac{1}{2}}."
MARKS = "1+1 = <<1+1=2>>2.\n<<2*2=4>>4 <<4>>4\n#### 4"
SHIFT = "a << b, so \\boxed{2} >> 1"
HEADINGS = "#### Sum\nIt is \\boxed{7}.\n#### Check\nIt is odd."
VERL = {"style": "rule", "ground_truth": "34"}
ROWS = [  # what a row has beside its problem: the answer, the worked solution
    ({"final_answer": 2.5, "answer": None}, "2.5", ""),
    ({"solution": "so #### 1,003", "id": 7}, "1,003", "so\n\\boxed{1,003}"),
    ({"solution": BOX}, "\\frac{1}{2}", BOX),
    ({"answer": 27.0, "solution": "not \\boxed{1}"}, "27", "not \\boxed{1}"),
    ({"final_answer": ["$2$", 3.0], "solution": ["three"]}, "2, 3", ""),
    ({"answer": float("nan")}, "", ""),
    # a heading is no answer, unlike the end of the last line; and a box wins over both
    ({"solution": HEADINGS}, "7", HEADINGS),
    ({"reward_model": VERL, "ground_truth": "7"}, "7", ""),
    ({"answer": "2", "solution": MARKS}, "2", "1+1 = 2.\n4 4\n\\boxed{4}"),
    ({"answer": SHIFT}, "2", SHIFT),
    ({"answer": None}, "", ""),
]


@pytest.mark.parametrize(("row", "answer", "solution"), ROWS)
def test_a_row_is_read_by_any_of_its_keys(row, answer, solution):
    """Catches headings as answers, marks that stay, and bare answers as solutions."""
    for key in ("problem", "question", "prompt"):
        problem = data.problem_of({key: "q?"} | row, "FILE")
        assert problem == data.Problem("q?", answer, "FILE", solution, data.INSTRUCTION)
    assert data.problem_of({"problem": "q?", "subject": "Al"} | row, "FILE").source == "Al"


def user(text):
    return {"role": "user", "content": text}


SYSTEM, TOOL = {"role": "system", "content": "Be brief."}, {"role": "tool", "content": "2"}
NAMELESS = TOOL | {"name": None}
USER, OTHER, BOXED = user("1+1?"), user("And 3+4?"), user("1+1?\nBox it.")
SAYS = {"role": "assistant", "content": "1+1=2, so \\boxed{2}."}
PARTS = user([{"type": "text", "text": "1+"}, {"type": "text", "text": "1?"}])
CALL = {"role": "assistant", "content": None, "tool_calls": [{"name": "add"}]}
TALK_BOXED = [USER, SAYS, user("And 3+4?\nBox it."), CALL | {"content": ""}, TOOL]
CHATS = [  # a row, the messages of its prompt with the instruction "Box it.", its solution
    ({"prompt": [SYSTEM, PARTS], "answer": "2"}, [SYSTEM, BOXED], ""),
    ({"prompt": [USER], "answer": "2"}, [BOXED], ""),
    ({"messages": [USER, SAYS, OTHER, CALL, NAMELESS], "answer": 2}, TALK_BOXED, ""),
    ({"messages": [SYSTEM, USER, SAYS], "answer": None}, [SYSTEM, BOXED], SAYS["content"]),
]


@pytest.mark.parametrize(("row", "messages", "solution"), CHATS)
def test_a_chat_is_used_whole(row, messages, solution):
    """Catches a lost turn, and a last one of the assistant that gives the answer away."""
    problem = data.problem_of(row, "FILE")
    assert problem.messages("Box it.") == messages
    assert (problem.answer, problem.solution) == ("2", solution)


# ---------------------------------------------------------------------------- files


def test_formats(tmp_path):
    """Catches an array read as a line, a mark in front, and keys that parquet adds as null."""
    rows = [
        {"prompt": [SYSTEM | {"name": "s"}, USER], "answer": "2", "subject": "algebra"},
        {"prompt": [OTHER], "answer": None, "subject": None},
    ]
    lines = "\ufeff" + "\n".join(map(json.dumps, rows))
    (tmp_path / "a.jsonl").write_text(lines)
    (tmp_path / "a.json").write_text(json.dumps(rows, indent=1))
    datasets.Dataset.from_list(rows).to_parquet(str(tmp_path / "a.parquet"))
    for name in ("a.jsonl", "a.json", "a.parquet"):
        first, second = data.read_problems(str(tmp_path / name))
        assert first.messages() == [SYSTEM | {"name": "s"}, USER]
        assert (second.messages(), second.turns) == ([OTHER], ())
        assert [first.source, second.source] == ["algebra", str(tmp_path / name)]


LONG = "123456789012345678901234567890123"
SINGLE = pyarrow.float32()
VERLS = pyarrow.struct([("ground_truth", SINGLE)])
NUMBERS = [  # a column, how it is read
    ("answer", pyarrow.array([Decimal(f"{LONG}.00")]), LONG),
    ("answer", pyarrow.array([[12345.6, 0.1]], pyarrow.large_list(SINGLE)), "12345.6, 0.1"),
    ("reward_model", pyarrow.array([{"ground_truth": 12345.6}], VERLS), "12345.6"),
]


@pytest.mark.parametrize(("name", "column", "answer"), NUMBERS)
def test_numbers_in_parquet(tmp_path, name, column, answer):
    """Catches lost digits, and noise at any depth: float32's 12345.6 is 12345.599609375."""
    parquet.write_table(pyarrow.table({"problem": ["p"], name: column}), tmp_path / "a.PARQUET")
    (problem,) = data.read_problems(str(tmp_path / "a.PARQUET"))
    assert problem.answer == answer


CHAT = {"messages": [USER, SAYS], "answer": "2"}
REFUSED_ROWS = {  # lines of a file: what is wrong with them
    '{"question": "a", "answer": ["1", null]}': "row 1 .*the value of 'answer' must be text or a",
    '{"question": " ", "answer": "1"}': "row 1 .*nothing is asked under 'question'",
    '\n{"question": "a", "answer": "1"}\n{oops}\n': "row 3 .*JSONDecodeError",
    json.dumps({"prompt": [USER, SAYS]}): "row 1 .*the chat under 'prompt' ends with an",
    json.dumps(CHAT): "row 1 .*the chat under 'messages' ends with an",
}


@pytest.mark.parametrize("lines", REFUSED_ROWS)
def test_what_cannot_be_read_is_refused(tmp_path, lines):
    """In one line, which names the row."""
    (tmp_path / "a.jsonl").write_text(lines)
    with pytest.raises(InputError, match=REFUSED_ROWS[lines]) as caught:
        data.read_problems(str(tmp_path / "a.jsonl"))
    assert "\n" not in str(caught.value)


# ---------------------------------------------------------------------------- sets


def test_the_last_twentieth_is_held_out(tmp_path, capsys):
    """Catches training problems that are evaluated on, and a small file that holds nothing out."""
    path = write(tmp_path, *[{"question": f"q{i}", "answer": str(i)} for i in range(40)])
    every = data.read_problems(path)
    assert data.problem_sets(path, None, 300) == (every[:38], every[38:])
    assert data.problem_sets(path, None, 1) == (every[:38], every[38:39])
    assert data.problem_sets(path, None, 0) == (every[:38], [])
    assert capsys.readouterr().out == ""
    assert data.problem_sets(path, path, 3) == (every, every[:3])
    said = "note: 3 of 3 problems to evaluate on are also trained on\n"
    assert capsys.readouterr().out == said
    assert data.problem_sets(path, "nowhere", 0) == (every, []), "no evaluation: it is not read"
    for count, share in ((2, 1), (45, 2), (51, 3)):  # rounded to the nearest number, but at least 1
        path = write(tmp_path, *count * [{"question": "q", "answer": "1"}])
        assert len(data.problem_sets(path, None, 300)[1]) == share


@pytest.mark.parametrize("name", data.EMBEDDED)
def test_embedded_data(name):
    """Catches another task's reward or room, and problems in both splits."""
    held_out = data.eval_problems(name)
    assert len(held_out) == data.EVAL_PROBLEMS
    for problem in held_out:
        right = problem.solution or toy.worked(problem.text)
        assert data.reward_function(name)(right, problem.answer) == 1.0
        assert len(right) < data.max_new_tokens(name) < data.max_new_tokens("file.jsonl")
    if name == "arithmetic-longer":  # for evaluation only
        return
    train, evaluated = data.problem_sets(name, None, 5)
    assert evaluated == held_out[:5]
    assert len(train) == 512
    assert not {problem.text for problem in train} & {problem.text for problem in held_out}


def test_reference_answers_that_cannot_be_scored_are_dropped(tmp_path, capsys):
    """Catches placeholders that count as right answers, columns that are left out in silence, and
    problems that are dropped although the user has another reward."""
    answers = {"p": "1", "q": "", "r": None, "s": "x+1", "t": "Not found", "u": "proof", "v": "-"}
    rows = [{"problem": text, "answer": answer} for text, answer in answers.items()]
    rows[0] |= {"choices": ["7", "8"], "question": "q", "subject": "s", "level": 0, "input": ""}
    path = write(tmp_path, *rows)
    train = data.train_problems(path)
    said = capsys.readouterr().out.splitlines()
    assert [problem.text for problem in train] == ["p", "s"]
    assert data.eval_problems(path) == train
    assert said == [
        f"note: prompts leave out these columns of {path}: choices, level, question",
        f"note: 5 of 7 reference answers of {path} cannot be scored, and their problems are "
        "dropped: '' to 'q'; '' to 'r'; 'Not found' to 't'",
    ]
    assert len(data.train_problems(path, len)) == len(data.eval_problems(path, reward=len)) == 7


# ---------------------------------------------------------------------------- prompts


PROBLEM = data.Problem("1+1?", "2", "file")
TALK = replace(PROBLEM, turns=(SYSTEM, USER))


@pytest.fixture
def prompts(make_policy):
    """prompts(problems, ...) by encode_prompts, as text; `.tokenizer` has one token a character."""
    model, tokenizer = make_policy()

    def encode(problems, limit=200, **options):
        _, ids = chat_format.encode_prompts(problems, tokenizer, limit, model=model, **options)
        return [tokenizer.decode(one) for one in ids]

    encode.model, encode.tokenizer = model, tokenizer
    return encode


def test_prompts_that_do_not_fit_are_counted(prompts, capsys, monkeypatch):
    """Of all portions. Catches one that is lost, and one that is encoded with another's."""
    monkeypatch.setattr(chat_format, "PORTION", 2)
    problems = [replace(PROBLEM, text=text) for text in ("short", "x" * 50, "", "b", "c")]
    assert prompts([*problems[:2], *problems[3:]], 50) == ["short", "x" * 50, "b", "c"]
    assert capsys.readouterr().out == ""
    kept, _ = chat_format.encode_prompts(problems, prompts.tokenizer, 49)
    assert kept == [problems[0], *problems[3:]], 'nothing predicts the first token after ""'
    said = "dropped 2 of 5 prompts: they are empty, or longer than the 49 tokens that --max-new"
    assert capsys.readouterr().out.startswith(said)
    with pytest.raises(InputError, match=r"dropped 1 of 1 prompts: .*; none is left"):
        prompts(problems[2:3])


def test_characters_that_tokens_lose_are_noted(prompts, capsys):
    """12*7 and 127 become one prompt."""
    prompts.tokenizer.backend_tokenizer.normalizer = normalizers.Replace("*", "")
    problems = [replace(PROBLEM, text=text) for text in ("127", "12*7")]
    assert prompts(problems[:1]) == ["127"]
    assert capsys.readouterr().out == ""
    assert prompts(problems) == ["127", "127"]
    said = "note: these characters are lost, because no token holds them: '*'\n"
    assert capsys.readouterr().out == said


def test_prompt_formats(prompts, capsys):
    """Catches an empty instruction that is read as the default."""
    texts = functools.partial(prompts, [replace(PROBLEM, instruction="Box it."), PROBLEM])
    plain = ["1+1?\nBox it.\n", "1+1?"]
    assert texts() == texts(prompt_format="plain") == plain
    assert texts(instruction="Go.") == ["1+1?\nGo.\n"] * 2
    assert texts(instruction="") == ["1+1?"] * 2
    prompts.tokenizer.chat_template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
        "{% if not enable_thinking %}<think></think>{% endif %}"
    )
    users = ["<user>1+1?\nBox it.<assistant>", "<user>1+1?<assistant>"]
    assert texts() == [user + "<think></think>" for user in users]
    assert texts(prompt_format="chat", thinking=True) == users
    assert texts(prompt_format="plain", thinking=True) == plain
    assert texts(thinking=True, instruction="Go.") == ["<user>1+1?\nGo.<assistant>"] * 2
    assert capsys.readouterr().out.count("--thinking changes no prompt") == 1, "where it is plain"


def test_ends_of_prompts(prompts):
    """A prompt ends with no end token; but a template may open the turn in words."""
    tokenizer = prompts.tokenizer
    end = ("<|end|>", tokenizer.eos_token_id)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="$A <|end|>", special_tokens=[end]
    )
    assert prompts([PROBLEM]) == ["1+1?"]
    prompts.model.generation_config.eos_token_id = tokenizer.encode("1?")
    assert prompts([PROBLEM]) == ["1+"]
    tokenizer.chat_template = "{{ messages[0].content }}{{ eos_token }}\nSay: "
    assert prompts([PROBLEM]) == ["1+1?<|end|>\nSay: "]


NEVER = r"chat of user \(the assistant's turn never begins.*use --prompt-format"
LOST = r"system, user .it leaves out what the system says, 'Be"
ONLY_USERS = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
)
REFUSED = [  # a chat template, a problem, a part of the message
    (None, TALK, r"a chat of several turns, which ends with '1\+1\?', needs a"),
    ("{{ messages[0].content }}{{ eos_token }} \n\n", PROBLEM, NEVER),
    (f"{ONLY_USERS}Say: ", TALK, LOST),
    ("{{ raise_exception('no chats') }}", PROBLEM, r"\(TemplateError: no chats\).*-format plain"),
]


@pytest.mark.parametrize(("template", "problem", "message"), REFUSED)
def test_prompts_that_no_model_can_continue(prompts, template, problem, message):
    """Catches turns that nothing joins, and a template that loses what somebody says."""
    prompts.tokenizer.chat_template = template
    with pytest.raises(InputError, match=message):
        prompts([problem])


def test_the_tokenizer_is_the_models(prompts):
    """The id of '?' is 30. Catches an index that is beyond the embedding in the first forward."""
    prompts.model.resize_token_embeddings(31)
    assert prompts([PROBLEM]) == ["1+1?"]
    prompts.model.resize_token_embeddings(30)
    with pytest.raises(InputError, match=r"gives '\?' the id 30, but the model's embedding has 30"):
        prompts([PROBLEM])


# ---------------------------------------------------------------------------- a whole run


def test_the_date_of_a_template():
    """Catches a prompt that is another one on the next day."""
    tokenizer = AutoTokenizer.from_pretrained(arithmetic.BASE)
    tokenizer.chat_template = '{% set day = strftime_now( "%Y-%m-%d" ) %}{{ day }}'
    chat_format.fix_date(tokenizer, "2026-11-20")
    assert tokenizer.apply_chat_template([USER], tokenize=False) == "2026-11-20"


def test_a_run_keeps_its_date(run, policy_folder, tmp_path, monkeypatch):
    """Catches prompts of two days in one folder, and a checkpoint whose template has a date."""
    template = (
        '{{ strftime_now( format="%d" ) }}{% for m in messages %}{{ m.content }}{% endfor %}>'
    )
    (Path(policy_folder) / "chat_template.jinja").write_text(template)
    folder = str(tmp_path / "evals")
    cfg = EvalConfig(policy_folder, problems=1, k=1, max_new_tokens=9, out_dir=folder)
    today = types.SimpleNamespace(today=lambda: "2026-11-28")
    monkeypatch.setattr(checkpoint, "datetime", types.SimpleNamespace(date=today))
    run("run", steps=2, until=1)
    evaluation.main(cfg)
    today.today = lambda: "2026-11-29"
    assert len(run("run", steps=2, resume=True)) == 2
    assert (tmp_path / "run" / "checkpoint" / "chat_template.jinja").read_text() == template
    evaluation.main(cfg)  # goes on with the prompts of the day before


def test_nothing_to_evaluate_on_is_found_at_the_start(tmp_path):
    """Catches a run whose evaluations are all NaN."""
    (tmp_path / "empty.jsonl").write_text('{"problem": "7+9?", "answer": ""}\n')
    with pytest.raises(InputError, match=r"--eval-data .*empty.jsonl has no problem to evaluate"):
        data.problem_sets("arithmetic", str(tmp_path / "empty.jsonl"), 9)
