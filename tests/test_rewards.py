"""Rewards: a table of answers, right and wrong, None for what cannot be told, and answers that mean harm."""

import concurrent.futures
import os
import random
import signal
import subprocess
import time
from pathlib import Path

import pytest

import data
import faults
import rewards

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"


@pytest.mark.parametrize(
    ("completion", "gold", "reward"),
    [
        ("7+9=16;16+5=21", "21", 1.0),
        ("7+9=16;16+5=11", "21", 0.0),
        ("7+9=6;16+5=21", "21", 1.0),  # only the answer counts
        ("21", "21", 1.0),  # no working shown: the text after no "=" is all of it
        ("7+9=16;16+5=021", "21", 0.0),
        ("7+9=16;16+5=21;", "21", 0.0),
        ("7+9=16;16+5=2", "21", 0.0),  # cut off
        ("", "21", 0.0),
        ("=", "21", 0.0),
        ("7+9=16", "", None),
        ("7+9=16", "sixteen", None),
    ],
)
def test_arithmetic_reward(completion, gold, reward):
    assert rewards.arithmetic_reward(completion, gold) == reward


@pytest.mark.parametrize(
    ("completion", "gold", "reward"),
    [
        ("so it is \\boxed{72}", "72", 1.0),
        ("so it is 72.", "72", 0.0),  # no box, no answer
        ("\\boxed{71} and not 72", "72", 0.0),
        ("\\boxed{71} no, \\boxed{72}", "72", 1.0),  # the last box; both together would be a set
        ("\\boxed{72} no, \\boxed{71}", "72", 0.0),
        ("\\boxed{72", "72", 0.0),  # never closed
        ("\\boxed{72}</think> so I say 71", "72", 0.0),  # a thought is no answer
        ("\\boxed{71}</think>\\boxed{72}", "72", 1.0),
        ("<think>\\boxed{72}", "72", 0.0),  # it never stopped thinking
        ("<think></think>\\boxed{72}", "72", 1.0),
        ("\\boxed{1,234}", "1234", 1.0),
        ("\\boxed{27}", "27.0", 1.0),
        ("\\boxed{$27$}", "27", 1.0),
        ("\\boxed{-3}", "3", 0.0),
        ("\\boxed{0.5}", "\\frac{1}{2}", 1.0),
        ("\\boxed{\\dfrac12}", "\\frac{1}{2}", 1.0),
        ("\\boxed{\\frac{2}{4}}", "0.5", 1.0),
        ("\\boxed{0.333}", "\\frac{1}{3}", 0.0),
        ("\\boxed{\\left( 3, \\frac{\\pi}{2} \\right)}", "(3, \\frac{\\pi}{2})", 1.0),
        ("\\boxed{(3, \\frac{\\pi}{3})}", "\\left( 3, \\frac{\\pi}{2} \\right)", 0.0),
        ("\\boxed{3}", "\\left( 3, \\frac{\\pi}{2} \\right)", 0.0),
        ("\\boxed{x+1}", "1+x", 1.0),
        ("\\boxed{1267650600228229401496703205377}", "1267650600228229401496703205376", 0.0),
        ("\\boxed{1 1/2}", "11/2", 0.0),
        ("\\boxed{31\\frac{1}{2}}", "3 1\\frac{1}{2}", 0.0),
        ("\\boxed{3 \\frac{1}{2}}", "3\\frac{1}{2}", 1.0),
        ("\\boxed{\\leftarrow}", "\\rightarrow", 0.0),
        ("\\boxed{5.}", "5", 1.0),
        ("\\boxed{1e-3}", "0.001", 1.0),
        ("\\boxed{4.5\\times 10^{33}}", "4.5e33", 1.0),
        ("\\boxed{4.5\\times 10^{32}}", "4.5e33", 0.0),
        ("\\boxed{1.6\\times 10^{-19}}", "1.6e-19", 1.0),
        ("\\boxed{1.7\\times 10^{-19}}", "1.6e-19", 0.0),
        ("\\boxed{\\frac{1}{1500}}", "\\frac{1}{1501}", 0.0),
        ("\\boxed{0}", "0", 1.0),
        ("\\boxed{2, 1}", "1, 2", 1.0),
        ("\\boxed{1}", "1, 2", 0.0),
        ("\\boxed{Evelyn}", "\\text{Evelyn}", 1.0),
        ("\\boxed{}", "3", 0.0),
        ("", "3", 0.0),
        ("\\boxed{3}", "", None),
        ("\\boxed{3}", "  ", None),
        ("", "", None),
    ],
)
def test_math_reward(completion, gold, reward):
    """Kills: the first box, a box in a thought, sets of two boxes, a gold that is not boxed, 0 for what has no gold."""
    assert rewards.math_reward(completion, gold) == reward


def test_long_texts_are_quick():
    """No judge sees them. Kills: a scan of the whole text after the box, a number of a million digits."""
    started = time.perf_counter()
    for text in ("{" * 10_000_000, "\\boxed{" * 100_000, "\\boxed{" + "{" * 10_000_000, "\\boxed{" + "9" * 10_000_000):
        assert rewards.math_reward(text + "}", "3") == 0.0
    assert time.perf_counter() - started < 2


@pytest.mark.parametrize("thread", [False, True])
def test_hostile_answers(thread):
    """Ten of bench.py hostile's, from the main thread and another: 0 in at most 2 s, and the next answer is judged.
    Kills: math-verify's own timer (main thread only, and not within one multiplication), no limit of the memory."""
    rewards.ask.cache_clear()
    pairs = faults.hostile_answers()[:: 11 if thread else 10][-10:]
    with concurrent.futures.ThreadPoolExecutor() as pool:
        call = (lambda *words: pool.submit(rewards.math_reward, *words).result()) if thread else rewards.math_reward
        assert call("\\boxed{\\frac{1}{2}}", "0.5") == 1.0  # the judge is there
        for completion, gold in pairs:
            started = time.perf_counter()
            assert call(completion, gold) == 0.0, completion[:80]
            assert time.perf_counter() - started < 2, completion[:80]
            assert call(f"\\boxed{{\\frac{{{len(completion)}}}{{2}}}}", f"{len(completion) / 2}") == 1.0


def test_many_threads_ask_one_judge():
    """Kills: two threads that read each other's verdicts."""
    rewards.ask.cache_clear()
    rng = random.Random(0)
    pairs = [(f"\\frac{{{n}}}{{7}}", f"\\frac{{{n + rng.randrange(2)}}}{{7}}") for n in range(300)]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        verdicts = list(pool.map(lambda pair: rewards.verify(*pair), pairs))
    assert verdicts == [gold == answer for gold, answer in pairs]


def test_a_killed_judge_is_replaced():
    assert rewards.verify("\\frac{1}{3}", "\\frac{2}{6}")
    os.killpg(rewards._judge.pid, signal.SIGKILL)
    rewards._judge.wait()
    assert rewards.verify("\\frac{1}{3}", "\\frac{3}{9}")


def test_a_verdict_is_asked_for_once(monkeypatch):
    rewards.ask.cache_clear()
    assert rewards.math_reward("\\boxed{\\frac{5}{15}}", "\\frac{1}{3}") == 1.0
    monkeypatch.setattr(rewards, "_turn", None)  # who asks now cannot
    assert rewards.math_reward("then \\boxed{\\frac{5}{15}}", "\\frac{1}{3}") == 1.0


def test_without_math_verify(monkeypatch, tmp_path):
    """Numbers need no judge; others say what is missing. Kills: a silent 0 for every formula."""
    monkeypatch.setattr(rewards, "_judge", None)
    monkeypatch.setattr(rewards, "__file__", str(tmp_path / "rewards.py"))
    source = Path(data.__file__).with_name("rewards.py").read_text()
    (tmp_path / "rewards.py").write_text(source.replace("from math_verify", "from math_verify_that_is_not_there"))
    rewards.ask.cache_clear()
    assert rewards.math_reward("\\boxed{3}", "3.0") == 1.0
    with pytest.raises(RuntimeError, match="cannot start: ModuleNotFoundError: No module named 'math_verify_that"):
        rewards.math_reward("\\boxed{x}", "y")


@pytest.mark.skipif(not SHARED.exists(), reason="real problem files are not part of the repository")
@pytest.mark.parametrize(
    ("name", "verified"),
    [("math500.jsonl", 500), ("aime24.jsonl", 30), ("amc23.jsonl", 40), ("gsm8k_test.jsonl", 1319)],
)
def test_real_golds(name, verified):
    """Each verifies against itself, by math-verify too; another's does where it is the same answer, and only there."""
    golds = [problem.answer for problem in data.read_problems(str(SHARED / name))]
    assert len(golds) == verified
    for gold in golds:
        assert rewards.math_reward(f"\\boxed{{{gold}}}", gold) == 1.0
        assert name == "gsm8k_test.jsonl" or rewards.verify(gold, gold)


@pytest.mark.skipif(not SHARED.exists(), reason="real problem files are not part of the repository")
def test_wrong_answers_to_real_problems():
    """The answer to another problem is accepted where it is the same answer. Kills: a judge that is too kind."""
    for name in ("math500.jsonl", "aime24.jsonl", "amc23.jsonl"):
        golds = [problem.answer for problem in data.read_problems(str(SHARED / name))]
        for gold, other in zip(golds, random.Random(0).sample(golds, len(golds)), strict=True):
            assert rewards.math_reward(f"\\boxed{{{other}}}", gold) == float(gold == other), (gold, other)


def test_whoever_is_stopped_leaves_no_verdict_behind(monkeypatch):
    """Kills: the verdict on one pair that the next one to ask takes for its own."""
    rewards.ask.cache_clear()
    assert not rewards.verify("\\frac{1}{9}", "\\frac{2}{9}")

    def stopped():
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(rewards._judge.stdin, "flush", lambda real=rewards._judge.stdin.flush: real() or stopped())
        with pytest.raises(KeyboardInterrupt):
            rewards.verify("\\frac{3}{9}", "\\frac{1}{3}")
    assert not rewards.verify("\\frac{1}{9}", "\\frac{4}{9}")


def test_interrupted_while_the_judge_starts(monkeypatch):
    """Ctrl-C in a notebook, and on. Kills: the start's "ready" that is read as a verdict."""
    rewards.ask.cache_clear()
    rewards._end_judge(rewards._judge)
    monkeypatch.setattr(rewards, "_judge", None)
    real = subprocess.Popen

    def interrupted(*words, **options):
        process = real(*words, **options)
        monkeypatch.setattr(process.stdout, "readline", lambda: (_ for _ in ()).throw(KeyboardInterrupt()))
        return process

    with monkeypatch.context() as patch:
        patch.setattr(rewards.subprocess, "Popen", interrupted)
        with pytest.raises(KeyboardInterrupt):
            rewards.verify("\\frac{1}{2}", "\\frac{2}{4}")
    assert rewards.verify("\\frac{1}{2}", "\\frac{2}{4}")
    assert not rewards.verify("\\frac{2}{7}", "\\frac{1}{3}")
