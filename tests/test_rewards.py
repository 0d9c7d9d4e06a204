"""Rewards: right, wrong, unscorable and hostile answers, and the process that compares them."""

import copy
import math
import multiprocessing
import os
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from transformers import AutoTokenizer

import data
import rewards
from runtime import InputError, answers, math_judge
from tasks import arithmetic

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"
needs_problems = pytest.mark.skipif(
    not SHARED.exists(), reason="the real problem files are not part of the repository"
)


REWARDS = [  # a completion, the reference answer, its reward
    ("\\boxed{71} no, \\boxed{72}", "72", 1.0),  # the last box; both together would be a set
    ("\\boxed{48/2+48}", "72", 0.0),  # whoever repeats a sum has not computed it
    ("\\boxed{72}</think> so I say 71", "72", 0.0),  # a box in a thought is not an answer
    ("<think>\\boxed{72}", "72", 0.0),  # thinking never ended
    ("[THINK]\\boxed{71}[/THINK]\\boxed{72}", "72", 1.0),
    ("\\boxed{1267650600228229401496703205377}", "1267650600228229401496703205376", 0.0),
    ("\\boxed{99^{99^{99}}}", "x^{7}+1", 0.0),  # it would take forever
    ("\\boxed{\\frac{x}{2}}", "0.5x", 1.0),  # the next one is judged
    ("\\boxed{3}", "", None),
    ("\\boxed{3}", "\\text{}", None),  # math-verify reads nothing
]


def test_rewards():
    """Fails if the first box is used, one in a thought, or two as a set; if a completion earns 0
    although there is no reference answer; or if a hostile one ends the judging."""
    found = [(text, answer, rewards.math_reward(text, answer)) for text, answer, _ in REWARDS]
    assert found == REWARDS
    assert rewards.arithmetic_reward("7+9=6;16+5=21", "21") == 1.0, "only the answer counts"
    assert rewards.arithmetic_reward("7+9=16;16+5=021", "21") == 0.0
    assert rewards.arithmetic_reward("7+9=16", "sixteen") is None


LONGEST = "1" * answers.LONGEST
BOXES = {  # a text: the content of its last box
    "\\boxed\n {59}": "59",
    "so $\\boxed 59$, not 12": "59",
    "\\[\\boxed -59\\\\\\]": "-59",
    "$\\boxed\\frac{1}{2}$": "\\frac{1}{2}",
    "\\boxed{1} or \\fbox{2}": "2",
    "\\boxed{\\left\\{1, \\frac{1}{2}\\right.}": "\\left\\{1, \\frac{1}{2}\\right.",
    "\\boxed{1 \\\\}": "1 \\\\",
    "\\boxed{5}, in a \\boxed": "5",
    "\\boxed{5} or \\boxed{6": None,
    f"\\boxed{{{LONGEST}}} .": LONGEST,
    f"\\boxed{{{LONGEST}1}} .": None,
}


def test_boxes():
    """Catches a spelling of a box that is overlooked, an escaped brace that counts, and a limit of
    length that is off by one."""
    assert {text: rewards.final_answer(text) for text in BOXES} == BOXES


def rollouts_of(prompts, completions, answer="7"):
    """Rollouts of the same completions for each prompt, their problems, and a tokenizer whose marks
    of thoughts are special tokens: what rewards.score takes."""
    tokenizer = AutoTokenizer.from_pretrained(arithmetic.BASE)
    tokenizer.add_special_tokens({"additional_special_tokens": ["[THINK]", "[/THINK]"]})
    ids = [tokenizer.encode(text) for text in completions]
    padded = [own + [0] * (max(map(len, ids)) - len(own)) for own in ids]
    rollouts = SimpleNamespace(
        prompt_ids=[tokenizer.encode(text) for text in prompts],
        completion_ids=torch.tensor([padded] * len(prompts)),
        lengths=torch.tensor([[*map(len, ids)]] * len(prompts)),
    )
    return rollouts, [data.Problem(text, answer, "file") for text in prompts], tokenizer


PROBLEM = data.Problem("1+6?", "7", "file", row={"level": 3, "source": "book"})


def test_a_thought_that_has_not_ended():
    """Every reward sees it, whether the prompt opened it or its marks are special tokens. Catches a
    box in it that counts, also in a reward that calls math_reward, and a log of another text."""
    prompts = ("1+6?", "1+6?<think>\n")
    completions = ["[THINK]7: \\boxed{7}", "[THINK]7[/THINK]\\boxed{7}", "</think>\\boxed{7}"]
    rollouts = rollouts_of(prompts, completions)
    seen = [completions, [f"<think>{text}" for text in completions]]
    half = lambda text, answer: 0.5 * rewards.math_reward(text, answer)
    for reward in (rewards.math_reward, half):
        texts, found = rewards.score(*rollouts, reward)
        assert texts == seen
        assert (found / found.max()).tolist() == [[0, 1, 1], [0, 0, 1]]


def test_what_a_reward_may_return():
    """Catches text that Python would read as a number, and a NaN that counts as unscorable."""
    of = lambda found: rewards.reward_of("x", PROBLEM, lambda _text, _answer: found)
    for found in (1, True, torch.tensor(1.0)):
        assert of(found) == 1.0
    assert math.isnan(of(None))
    for found in ("11", [1.0], math.inf, math.nan, 1e31):
        with pytest.raises(InputError, match=r"the reward is .* for the completion 'x', with"):
            of(found)


def test_a_reward_may_ask_for_the_row():
    """The problem and all columns, in a copy for each call. Catches a column that is lost, one that
    makes another problem of the same question, and a change that the next call sees."""
    own = {"question": "1+6?", "answer": "so #### 7", "level": 3, "tests": [1, 2]}
    problem = data.problem_of(own, "file")
    seen = []

    def asks(text, answer, row):
        seen.append(copy.deepcopy(row))
        row.pop("tests").pop()
        return 1.0

    keyword = lambda text, answer, *, row: asks(text, answer, row)
    for reward in (asks, keyword):
        assert rewards.reward_of("7", problem, reward) == 1.0
    assert seen == [{"problem": "1+6?", "source": "file"} | own] * 2
    rewards.reward_of("7", PROBLEM, lambda text, answer, row: seen.append(row))
    assert seen[-1] == {"problem": "1+6?", "answer": "7", "source": "book", "level": 3}
    again = data.problem_of(own | {"level": 4}, "file")
    assert (problem, hash(problem)) == (again, hash(again))
    assert data.content_hash([problem]) == data.content_hash([again])


def test_rewards_that_cannot_be_called():
    """Catches one that fails after hours of sampling, and columns that never come."""
    for reward in (lambda completion: 1.0, lambda completion, answer, **columns: 1.0):
        with pytest.raises(InputError, match=r"cannot be called .*\(completion, answer, row\)"):
            rewards.takes_row(reward)
    assert rewards.takes_row(lambda completion, answer, row, **others: 1.0)


# ---------------------------------------------------------------------------- the judge


@pytest.fixture
def use_library(monkeypatch, tmp_path):
    """use_library(source): a new judge has this in place of math-verify."""

    def use(source):
        (tmp_path / "math_verify.py").write_text(source)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        monkeypatch.setattr(math_judge, "_judges", {})

    math_judge.ask.cache_clear()
    yield use
    math_judge.ask.cache_clear()


def judge_process():
    """This process's judge."""
    return math_judge._judges[os.getpid()]


def verify(answer, given):
    """The judge's verdict alone."""
    return math_judge.ask(answers.read(answer).value, answers.read(given).value)


# A math-verify that equates everything, or does what the text says.
FAKE = """
import mmap, os, time

LatexExtractionConfig = dict

def parse(text, config, parsing_timeout):
    print("noise", flush=True)
    started = time.process_time()
    seconds = 8 if "spin" in text else 0
    while time.process_time() < started + seconds: pass
    time.sleep(2.0 if "wait" in text else 0)
    if "memory" in text: mmap.mmap(-1, 2**31)
    if "crash" in text: os._exit(3)
    return [text]

def verify(answer, given, **options):
    return True
"""


def test_limits_of_the_judge(use_library):
    """CPU time, memory and crashes make an answer wrong, and the next answer is still judged.
    Waiting does not: on a busy machine a short computation can take seconds."""
    use_library(FAKE)
    names = ("wait", "memory", "crash", "spin", "1+1")
    found = {name: math_judge.ask("1", name) for name in names}
    assert found == {"wait": True, "memory": False, "crash": False, "spin": False, "1+1": True}


def test_a_batch_of_hostile_answers(use_library, monkeypatch, capsys):
    """After some CPU time the judge computes no more for a batch, whose other answers that need it
    count as wrong. Catches a step that takes half an hour, verdicts that stay wrong afterwards, a
    bound outside of batches, and answers that need no judge, or have a verdict, and count."""
    use_library(FAKE)
    monkeypatch.setattr(rewards, "JUDGE_SECONDS", 0.3)
    hostile = [f"\\boxed{{spin{number}}}" for number in range(9)]
    known, late = "\\boxed{2+x}", "\\boxed{3+x}"

    def score(*texts):
        _, found = rewards.score(*rollouts_of(["?"], texts, "x+1"), rewards.math_reward)
        return found[0].tolist()

    assert score(known) == [1]
    assert score(*hostile, known, late, "\\boxed{x+1}") == [0] * 9 + [1, 0, 1]
    assert "note: after 0.3 s of comparing, formulas" in capsys.readouterr().out
    assert score(late) == [1]
    texts = [["\\boxed{1+spin}", "\\boxed{2+spin}"], [known]]
    problems = [data.Problem("?", answer, "") for answer in ("x+1", "x+2")]
    assert rewards.of_texts(texts, problems, rewards.math_reward) == [[0, 0], [0]], "not None"
    assert rewards.math_reward("\\boxed{4+x}", "x+1") == 1.0


def judge_of(number):
    """The judge's verdict, and which process gave it. Runs in a forked process."""
    return verify(f"x+{number}", f"{number}+x"), judge_process().pid


def test_a_forked_process_has_its_own_judge():
    """Catches processes that read each other's verdicts, and a lock that stays locked."""
    assert verify("x+1", "1+x")
    ours = judge_process().pid
    with multiprocessing.get_context("fork").Pool(2) as pool:
        found = pool.map_async(judge_of, range(2, 10)).get(timeout=60)
    assert all(verdict for verdict, _judge in found)
    assert ours not in {judge for _verdict, judge in found}
    assert not math_judge._turn.locked()
    assert judge_of(10) == (True, ours)


def test_without_math_verify(use_library, capfd):
    """Numbers need no judge. Catches a silent reward of 0 for every formula."""
    use_library("raise ImportError('no such library')")
    assert rewards.math_reward("\\boxed{3}", "3.0") == 1.0
    with pytest.raises(RuntimeError, match="cannot start: its error is above"):
        rewards.math_reward("\\boxed{x}", "y")
    assert "no such library" in capfd.readouterr().err


def test_an_interrupted_query_leaves_no_verdict_behind():
    """Fails if the next query reads the verdict of the interrupted one."""
    math_judge.ask.cache_clear()
    assert not verify("\\frac{1}{9}", "\\frac{2}{9}")
    pipe = judge_process().stdout  # the question is sent, its verdict is not read
    interrupted = mock.Mock(side_effect=KeyboardInterrupt)
    with mock.patch.object(pipe, "readline", interrupted), pytest.raises(KeyboardInterrupt):
        verify("\\frac{3}{9}", "\\frac{1}{3}")
    assert not verify("\\frac{1}{9}", "\\frac{4}{9}")


# ---------------------------------------------------------------------------- real problems


@needs_problems
@pytest.mark.parametrize(
    ("name", "number"),
    [("math500.jsonl", 500), ("aime24.jsonl", 30), ("amc23.jsonl", 40), ("gsm8k_test.jsonl", 1319)],
)
def test_real_answers(name, number):
    """Every reference answer equals itself, by math-verify alone too; another problem's, two rows
    above, is right only if it is the same. Catches a judge that is too strict or too lenient."""
    golds = [problem.answer for problem in data.read_problems(str(SHARED / name))]
    assert len(golds) == number
    for answer, other in zip(golds, golds[-2:] + golds[:-2], strict=True):
        assert rewards.math_reward(f"\\boxed{{{answer}}}", answer) == 1.0
        assert name == "gsm8k_test.jsonl" or verify(answer, answer)
        reward = rewards.math_reward(f"\\boxed{{{other}}}", answer)
        assert reward == float(answer == other), (answer, other)
