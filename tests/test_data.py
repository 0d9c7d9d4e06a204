"""Data: files are read whole or refused with the line that is wrong; prompts that do not fit are counted out loud."""

import json
from itertools import pairwise
from pathlib import Path

import pytest

import arithmetic
import data
from data import InputError

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"


def write(tmp_path, *lines):
    path = tmp_path / "problems.jsonl"
    path.write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines))
    return str(path)


def test_a_file_is_read_by_any_of_its_keys(tmp_path):
    path = write(
        tmp_path,
        {"question": "a?", "answer": "1"},
        "\n",
        {"problem": "b?", "final_answer": 2.5, "answer": None},
        {"prompt": "c?", "solution": "#### 3", "id": 7},
    )
    assert [(problem.text, problem.answer) for problem in data.read_jsonl(path)] == [
        ("a?", "1"),
        ("b?", "2.5"),
        ("c?", "#### 3"),
    ]


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (['{"question": "a", "answer": "1"}\n', "{oops}\n"], "problems.jsonl, line 2 is not JSON"),
        (["[1]\n"], "line 1 is not a JSON object but list"),
        ([{"question": "a", "gold": "1"}], "line 1 has none of the keys answer, final_answer, solution"),
        ([{"answer": "1"}], "line 1 has none of the keys problem, question, prompt"),
        ([{"question": "a", "answer": {"x": 1}}], "line 1: the value of 'answer' must be text or a number"),
        ([{"question": "", "answer": "1"}], "line 1: the value of 'question' must be text"),
        ([], "is empty"),
        (["\n"], "is empty"),
    ],
)
def test_bad_files_are_named_with_their_line(tmp_path, lines, words):
    with pytest.raises(InputError) as caught:
        data.read_jsonl(write(tmp_path, *lines))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there_or_not_text(tmp_path):
    with pytest.raises(InputError, match=r"nothing\.jsonl: no such file, nor one of arithmetic"):
        data.read_jsonl("nothing.jsonl")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="not UTF-8"):
        data.read_jsonl(str(tmp_path / "binary"))


def test_sources_of_a_file(tmp_path):
    """What a line says, else the file. Kills: strata by path where the data know better."""
    path = write(tmp_path, {"problem": "1", "answer": "1", "source": "algebra"}, {"problem": "2", "answer": "2"})
    assert [problem.source for problem in data.read_jsonl(path)] == ["algebra", path]


def test_the_last_twentieth_is_held_out(tmp_path):
    """Kills: evaluating on what is trained on, holding out nothing of a small file."""
    path = write(tmp_path, *[{"question": f"q{i}", "answer": str(i)} for i in range(40)])
    train = data.train_problems(path, hold_out=True)
    held_out = data.eval_problems(path, 300, of_training_file=True)
    assert [problem.text for problem in train + held_out] == [f"q{i}" for i in range(40)]
    assert len(held_out) == 2
    assert len(data.train_problems(path, hold_out=False)) == 40
    assert len(data.eval_problems(path, 3)) == 3
    with pytest.raises(InputError, match="too few"):
        data.train_problems(write(tmp_path, {"question": "q", "answer": "1"}), hold_out=True)


def test_embedded_splits():
    assert len(data.train_problems("arithmetic", hold_out=True)) == arithmetic.TRAIN_PROBLEMS == 512
    assert data.eval_problems("arithmetic", 5)[0].text == arithmetic.problem("heldout", 0)[0]
    assert {problem.source for problem in data.train_problems("arithmetic-mixed", hold_out=True)} == {
        "trivial",
        "unsolved",
        "chain",
    }
    with pytest.raises(InputError, match="evaluation only"):
        data.train_problems("arithmetic-longer", hold_out=True)


def test_prompts_that_do_not_fit_are_counted(capsys):
    problems = [data.Problem(text, "1", "file") for text in ("short", "x" * 50, "also short")]
    kept, ids = data.encode_prompts(problems, arithmetic.make_tokenizer(), 20)
    assert [problem.text for problem in kept] == ["short", "also short"]
    assert [len(each) for each in ids] == [5, 10]
    assert "dropped 1 of 3 prompts: longer than 20 tokens" in capsys.readouterr().out
    with pytest.raises(InputError, match="all 3 prompts are longer than 2 tokens"):
        data.encode_prompts(problems, arithmetic.make_tokenizer(), 2)


def test_chat_models_get_a_chat():
    tokenizer = arithmetic.make_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
    problems = [data.Problem("1+1", "2", "file", instruction="\nBox it."), data.Problem("1+1?", "2", "chain")]
    _, ids = data.encode_prompts(problems, tokenizer, 100)
    assert [tokenizer.decode(each) for each in ids] == ["<user>1+1\nBox it.<assistant>", "<user>1+1?<assistant>"]


@pytest.mark.skipif(not SHARED.exists(), reason="real problem files are not part of the repository")
def test_real_gsm8k():
    problems = data.read_jsonl(str(SHARED / "gsm8k_train.jsonl"))
    assert len(problems) == 7473
    reward = data.reward_function("gsm8k_train.jsonl")
    assert all(reward(problem.answer, problem.answer) == 1.0 for problem in problems)
    wrong = [reward(problem.answer, other.answer) for problem, other in pairwise(problems)]
    assert sum(wrong) / len(wrong) < 0.05
