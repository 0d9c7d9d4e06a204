"""Data: a file is read whole or refused by line number; prompts that do not fit are reported."""

import itertools
import json
from pathlib import Path

import datasets
import pytest

import data
import rewards
from runtime import InputError
from tasks import arithmetic, word_problems

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"


def write(tmp_path, *lines):
    path = tmp_path / "problems.jsonl"
    texts = [line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines]
    path.write_text("".join(texts))
    return str(path)


def test_a_file_is_read_by_any_of_its_keys(tmp_path):
    path = write(
        tmp_path,
        {"question": "a?", "answer": "1"},
        "\n",
        {"problem": "b?", "final_answer": 2.5, "answer": None},
        {"prompt": "c?", "solution": "so #### 1,003", "id": 7},
        {"prompt": [{"role": "user", "content": "d?"}], "target": "$x$"},
        {"problem": "e?", "solution": "It is \\boxed{3}, no, \\boxed{\\frac{1}{2}}."},
        {"problem": "f?", "answer": 27.0, "solution": "not \\boxed{1}"},
        {"problem": "g?", "final_answer": ["$2$", 3.0]},
        {"problem": "h?", "answer": None},
        {"problem": "i?", "answer": 1.5e-7},
        {"problem": "j?", "answer": float("nan")},
    )
    assert [(problem.text, problem.answer) for problem in data.read_problems(path)] == [
        ("a?", "1"),
        ("b?", "2.5"),
        ("c?", "1,003"),
        ("d?", "x"),
        ("e?", "\\frac{1}{2}"),
        ("f?", "27"),
        ("g?", "2, 3"),
        ("h?", ""),
        ("i?", "0.00000015"),
        ("j?", ""),
    ]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (['{"question": "a", "answer": "1"}\n', "{oops}\n"], "line 2 is not JSON"),
        (["[1]\n"], "line 1 is not a JSON object but list"),
        ([{"question": "a", "label": "1"}], "line 1 has none of the keys answer, final_answer"),
        ([{"answer": "1"}], "line 1 has none of the keys problem, question, prompt"),
        ([{"question": "a", "answer": {"x": 1}}], "line 1: the value of 'answer' must be text or"),
        ([{"question": "", "answer": "1"}], "line 1: the value of 'question' must be text"),
        ([], "is empty"),
        (["\n"], "is empty"),
    ],
)
def test_bad_rows_are_reported_by_line(tmp_path, lines, message):
    with pytest.raises(InputError) as caught:
        data.read_problems(write(tmp_path, *lines))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_missing_or_not_text(tmp_path):
    with pytest.raises(InputError, match=r"nothing\.jsonl: no such file, nor one of arithmetic"):
        data.read_problems("nothing.jsonl")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="not UTF-8"):
        data.read_problems(str(tmp_path / "binary"))


def test_sources_of_a_file(tmp_path):
    """The row's own source, else the file's name. Fails if the file's name replaces the row's."""
    first = {"problem": "1", "answer": "1", "source": "algebra"}
    path = write(tmp_path, first, {"problem": "2", "answer": "2"})
    assert [problem.source for problem in data.read_problems(path)] == ["algebra", path]


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
    with pytest.raises(InputError, match="too few"):
        data.train_problems(write(tmp_path, {"question": "q", "answer": "1"}), hold_out=True)


@pytest.mark.parametrize(("count", "held_out"), [(2, 1), (45, 2), (50, 2), (51, 3), (70, 4)])
def test_the_held_out_share_is_rounded(count, held_out):
    """To the nearest number, at a half to the even one; at least 1. Catches rounding up or down."""
    problems = [data.Problem("p", "1", "file")] * count
    assert data._held_out("FILE", problems) == held_out


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
    ("row", "solution"),
    [
        (
            {"answer": "1+1 = <<1+1=2>>2.\n2*2=<<2*2=4>>4, <<4>>4\n#### 4"},
            "1+1 = 2.\n2*2=4, 4\n\\boxed{4}",
        ),
        ({"answer": "2", "solution": "So $x=\\boxed{2}$."}, "So $x=\\boxed{2}$."),
        ({"answer": "so \\boxed{2}", "solution": "no \\boxed{3}"}, "so \\boxed{2}"),
        ({"answer": "a << b, so \\boxed{2} >> 1"}, "a << b, so \\boxed{2} >> 1"),
        *(({"answer": one}, "") for one in ("72", 72, "#### 72", "\\boxed{72}", "by 72", None)),
        ({"answer": "2", "solution": ["three"]}, ""),
    ],
)
def test_worked_solutions(tmp_path, row, solution):
    """Catches calculator marks that stay, an answer that is not boxed, a bare answer taken for a
    solution, and a solution overlooked beside the answer."""
    (problem,) = data.read_problems(write(tmp_path, {"question": "q", **row}))
    assert problem.solution == solution
    assert problem.instruction


def test_sft_problems(tmp_path):
    """Catches held-out rows or rows without a solution that would be learned."""
    words = data.sft_problems("words")
    assert len(words) == word_problems.SFT_PROBLEMS
    assert words[8] == data.Problem(*word_problems.problem("sft", 8))
    rows = [{"question": f"q{n}", "answer": f"so #### {n}" if n % 2 else n} for n in range(40)]
    found = data.sft_problems(write(tmp_path, *rows))
    assert [problem.text for problem in found] == [f"q{n}" for n in range(1, 38, 2)]
    assert [one.solution for one in found[:2]] == ["so\n\\boxed{1}", "so\n\\boxed{3}"]
    with pytest.raises(InputError, match="none of its 19 problems has a worked solution"):
        data.sft_problems(write(tmp_path, *rows[::2]))


def test_prompts_that_do_not_fit_are_counted(capsys):
    problems = [data.Problem(text, "1", "file") for text in ("short", "x" * 50, "also short")]
    kept, ids = data.encode_prompts(problems, arithmetic.make_tokenizer(), 20)
    assert [problem.text for problem in kept] == ["short", "also short"]
    assert [len(each) for each in ids] == [5, 10]
    assert "dropped 1 of 3 prompts: longer than 20 tokens" in capsys.readouterr().out
    fitting = lambda limit: len(
        data.encode_prompts(problems, arithmetic.make_tokenizer(), limit)[0]
    )
    assert (fitting(50), fitting(49)) == (3, 2), "50 tokens just fit"
    problems.append(data.Problem("", "1", "file"))
    assert fitting(50) == 3, "nothing predicts the first token after no prompt"
    problems.pop()
    with pytest.raises(InputError, match="all 3 prompts are longer than 2 tokens"):
        data.encode_prompts(problems, arithmetic.make_tokenizer(), 2)


def test_prompt_formats():
    """Fails if the template does not get --thinking, or if base models get no instruction."""
    tokenizer = arithmetic.make_tokenizer()
    boxed = data.Problem("1+1", "2", "file", instruction="\nBox it.")
    problems = [boxed, data.Problem("1+1?", "2", "chain")]

    def texts(*args):
        _, prompt_ids = data.encode_prompts(problems, tokenizer, 100, *args)
        return [tokenizer.decode(ids) for ids in prompt_ids]

    assert texts() == texts("plain") == ["1+1\nBox it.\n", "1+1?"]
    with pytest.raises(InputError, match="--prompt-format chat: the tokenizer has no chat templ"):
        texts("chat")
    tokenizer.chat_template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
        "{% if not enable_thinking %}<think></think>{% endif %}"
    )
    users = ["<user>1+1\nBox it.<assistant>", "<user>1+1?<assistant>"]
    assert texts() == [user + "<think></think>" for user in users]
    assert texts("chat", True) == users
    assert texts("plain", True) == ["1+1\nBox it.\n", "1+1?"]


def test_arrays_and_parquet(tmp_path):
    """Every kind of file gives the same rows. Fails if an array is read as one line, or a parquet
    file as text."""
    rows = [{"problem": f"p{n}", "answer": str(n), "subject": "algebra"} for n in range(3)]
    (tmp_path / "a.json").write_text(json.dumps(rows, indent=1))
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    datasets.Dataset.from_list(rows).to_parquet(str(tmp_path / "a.parquet"))
    kinds = ("json", "jsonl", "parquet")
    found = [data.read_problems(str(tmp_path / f"a.{kind}")) for kind in kinds]
    assert found[0] == found[1] == found[2]
    read = [(problem.text, problem.source) for problem in found[0]]
    assert read == [(f"p{n}", "algebra") for n in range(3)]
    (tmp_path / "b.json").write_text('[{"problem": "p", "answer": "1"},\n {"problem" "p"}]')
    with pytest.raises(InputError, match=r"b\.json is not JSON .* at line 2, column 13"):
        data.read_problems(str(tmp_path / "b.json"))
    (tmp_path / "c.json").write_text('[{"problem": "p", "answer": "1"}, 7]')
    with pytest.raises(InputError, match=r"c\.json, row 2 is not a JSON object but int"):
        data.read_problems(str(tmp_path / "c.json"))
    (tmp_path / "b.parquet").write_text("no")
    with pytest.raises(InputError, match=r"b\.parquet cannot be read as parquet"):
        data.read_problems(str(tmp_path / "b.parquet"))


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
    message = r"--data gsm8k: openai/gsm8k cannot be loaded \(Couldn't reach the hub\)"
    with pytest.raises(InputError, match=message):
        data.train_problems("gsm8k", hold_out=True)


def test_problems_that_cannot_be_scored_are_dropped(tmp_path, capsys):
    """They are counted, and the reward in use decides. Fails if the default reward decides although
    another one is given, or if the hint names a list that another reward made."""
    rows = [{"problem": "pqrst"[n], "answer": a} for n, a in enumerate(["1", "", None, "x+1", " "])]
    path = write(tmp_path, *rows)

    def reward(_completion, answer):
        return None if answer == "x+1" else 0.0

    def texts(load, **options):
        return "".join(problem.text for problem in load(path, **options))

    assert texts(data.train_problems, hold_out=False) == "ps"
    dropped = f"dropped 3 of 5 problems of {path}: their reference answers cannot be scored"
    hint = f" (python eval.py --check-golds --data {path} lists them)\n"
    assert capsys.readouterr().out == dropped + hint
    assert texts(data.train_problems, hold_out=False, reward=reward) == "pqrt"
    assert texts(data.eval_problems, limit=None, reward=reward) == "pqrt"
    assert "answers cannot be scored\n" in capsys.readouterr().out, "eval.py would list others"
    texts(data.train_problems, hold_out=False, reward=data.reward_function(path))
    assert hint in capsys.readouterr().out
    with pytest.raises(InputError, match="none of its 1 reference answers can be scored"):
        data.eval_problems(write(tmp_path, rows[1]), 3)


@pytest.mark.skipif(not SHARED.exists(), reason="the real problem files are not in the repository")
def test_real_files(capsys):
    """GSM8K and MATH as published. Four answers of MATH are missing: two are null, two are empty.

    math-verify takes milliseconds for an answer of MATH, so only every tenth of them is tried here.
    """
    numbers = itertools.count()

    def reward(completion, answer):
        tried = not answer or next(numbers) % 10 == 0
        return rewards.math_reward(completion, answer) if tried else 0.0

    path = str(SHARED / "gsm8k_train.jsonl")
    problems = data.train_problems(path, hold_out=False)
    assert len(problems) == 7473
    assert all(rewards.last_boxed(one.solution) == one.answer for one in problems)
    assert not any("<<" in one.solution or "####" in one.solution for one in problems)
    assert capsys.readouterr().out == ""
    path = str(SHARED / "math_train.json")
    problems = data.train_problems(path, hold_out=False, reward=reward)
    assert len(problems) == 7470
    assert len({problem.source for problem in problems}) == 7
    assert "dropped 4 of 7474 problems" in capsys.readouterr().out
