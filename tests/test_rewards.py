"""Rewards: right, wrong, unscorable and hostile answers, and the process that compares them."""

import concurrent.futures
import contextlib
import os
import random
import resource
import signal
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import data
import rewards
from runtime import math_judge

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"
needs_problems = pytest.mark.skipif(
    not SHARED.exists(), reason="the real problem files are not part of the repository"
)


@pytest.mark.parametrize(
    ("completion", "gold", "reward"),
    [
        ("7+9=16;16+5=21", "21", 1.0),
        ("7+9=16;16+5=11", "21", 0.0),
        ("7+9=6;16+5=21", "21", 1.0),  # only the answer counts
        ("21", "21", 1.0),  # without an "=" the whole text is the answer
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
        ("\\boxed{72}</think> so I say 71", "72", 0.0),  # a box in a thought is not an answer
        ("\\boxed{71}</think>\\boxed{72}", "72", 1.0),
        ("<think>\\boxed{72}", "72", 0.0),  # thinking never ended
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
    """Fails if the first box is used, one in a thought, two as a set, or the gold is not boxed; or
    if a completion without a gold earns 0."""
    assert rewards.math_reward(completion, gold) == reward


def test_what_was_not_sampled_is_not_scored():
    """Completions without a token are those of other ranks. Fails if the reward sees them, or if a
    completion meets another prompt's gold."""
    seen = []
    reward = lambda text, gold: seen.append((text, gold)) or len(seen)
    ids = torch.tensor([[[1, 2], [3, 4]], [[5, 6], [7, 8]]])
    rollouts = SimpleNamespace(completion_ids=ids, lengths=torch.tensor([[2, 1], [0, 1]]))
    tokenizer = SimpleNamespace(decode=lambda ids, **_: str(ids))
    problems = [SimpleNamespace(answer="a"), SimpleNamespace(answer="b")]
    texts, found = rewards.score(rollouts, problems, tokenizer, reward)
    assert seen == [("[1, 2]", "a"), ("[3]", "a"), ("[7]", "b")]
    assert texts == [["[1, 2]", "[3]"], ["[]", "[7]"]]
    assert found.isnan().tolist() == [[False, False], [True, False]]
    assert (found[0, 0], found[1, 1]) == (1, 3)


def test_the_longest_answer():
    """Exactly LONGEST_ANSWER characters in a box are an answer; one more is none. Catches a limit
    that is off by one."""
    longest = "1" * rewards.LONGEST_ANSWER
    assert rewards.last_boxed(f"\\boxed{{{longest}}} .") == longest
    assert rewards.last_boxed(f"\\boxed{{{longest}1}} .") is None


def test_long_texts_are_quick():
    """The judge never sees these texts.

    Fails if all the text after the box is scanned, or a number of ten million digits is converted.
    """
    before = time.process_time()
    texts = ("{" * 10_000_000, "\\boxed{" * 100_000, "\\boxed{" + "{" * 10_000_000)
    for text in (*texts, "\\boxed{" + "9" * 10_000_000):
        assert rewards.math_reward(text + "}", "3") == 0.0
    assert time.process_time() - before < 2


# ---------------------------------------------------------------------------- the judge


@contextlib.contextmanager
def fresh_judge():
    """A new judge; afterwards the list has the CPU seconds that it and its children used."""
    math_judge.ask.cache_clear()
    math_judge._judge = math_judge._end_judge(math_judge._judge)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = []
    try:
        yield spent
        math_judge.stop()
    finally:
        math_judge._judge = math_judge._end_judge(math_judge._judge)
        math_judge.ask.cache_clear()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)


@contextlib.contextmanager
def changed_judge(monkeypatch, tmp_path, old, new):
    """A judge in whose source `new` replaces `old`."""
    source = Path(math_judge.__file__).read_text()
    assert old in source
    (tmp_path / "judge.py").write_text(source.replace(old, new))
    math_judge.ask.cache_clear()
    monkeypatch.setattr(math_judge, "_judge", None)
    monkeypatch.setattr(math_judge, "__file__", str(tmp_path / "judge.py"))
    try:
        yield
    finally:
        math_judge._end_judge(math_judge._judge)
        math_judge.ask.cache_clear()


HOSTILE = [  # wrong answers, made to hang or crash the judge, and reference answers
    ("99^{99^{99}}", "x^{7}+1"),
    ("x^{x^{x}}", "7"),
    ("100000!", "x^{7}+1"),
    ("\\log{10^{10^{10}}}", "7"),
    ("\\sum_{i=1}^{10^{100}} i^{i}", "x^{7}+1"),
    ("\\sqrt{" * 150 + "2" + "}" * 150, "7"),
    ("|" * 900 + "2" + "|" * 900, "x^{7}+1"),
    ("1/" * 900 + "0", "7"),
    (" ", "x^{7}+1"),
    ("lambda: 0", "7"),
]
HOSTILE_IN_A_THREAD = [("10^{10^{10}}", "7"), ("3" + "!" * 9, "7"), ("x>10^{10^{10^{10}}}", "7")]


@pytest.mark.parametrize("thread", [False, True])
def test_hostile_answers(thread):
    """Hostile answers get 0 after about a second of CPU time each, and the next answer is judged.

    Catches math-verify's own timer, which runs in the main thread only and not within one
    multiplication: then some of these would run until PATIENCE ends.
    """
    pairs = HOSTILE_IN_A_THREAD if thread else HOSTILE
    with fresh_judge() as spent, concurrent.futures.ThreadPoolExecutor() as pool:
        for number, (wrong, answer) in enumerate(pairs):
            right = (f"\\boxed{{\\frac{{{number}}}{{2}}}}", f"{number / 2}")
            for args, reward in (((f"\\boxed{{{wrong}}}", answer), 0.0), (right, 1.0)):
                if thread:
                    found = pool.submit(rewards.math_reward, *args).result()
                else:
                    found = rewards.math_reward(*args)
                assert found == reward, args[0][:80]
    assert spent[0] < math_judge.SECONDS * len(pairs) + 5, "it takes 1.5 s to start"


FAKE = """
import mmap, os, time

def parse(text, parsing_timeout):
    started = time.process_time()
    while "spin" in text and time.process_time() < started + 8: pass
    time.sleep({"wait": 2.0, "hang": 60}.get(text[7:-1], 0))
    if "memory" in text: mmap.mmap(-1, 2**31)
    if "crash" in text: os._exit(3)
    return [text]

def verify(gold, answer, timeout_seconds):
    return True
"""


def test_limits_of_the_judge(monkeypatch, tmp_path):
    """CPU time, memory and crashes make an answer wrong, and the next answer is still judged.

    Waiting does not: on a busy machine a short computation can take seconds. Fails if a comparison
    that sleeps for two seconds is wrong, and if CPU time or memory is not limited.
    """
    (tmp_path / "math_verify.py").write_text(FAKE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with fresh_judge() as spent:
        found = {
            name: math_judge.ask("1", name) for name in ("wait", "memory", "crash", "spin", "1+1")
        }
    assert found == {"wait": True, "memory": False, "crash": False, "spin": False, "1+1": True}
    assert spent[0] < 2 * math_judge.SECONDS


def test_patience_of_the_judge(monkeypatch, tmp_path):
    """Catches a judge that waits forever for a comparison that neither computes nor returns."""
    (tmp_path / "math_verify.py").write_text(FAKE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with changed_judge(monkeypatch, tmp_path, "PATIENCE = 20.0", "PATIENCE = 0.2"):
        assert not math_judge.ask("1", "hang")
        assert math_judge.ask("1", "1+1")


def test_many_threads_ask_one_judge():
    """Fails if a thread reads another's verdict."""
    math_judge.ask.cache_clear()
    rng = random.Random(0)
    golds = [f"\\frac{{{n}}}{{7}}" for n in range(100)]
    pairs = [(gold, rng.choice((gold, "\\frac{1}{9}"))) for gold in golds]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        verdicts = list(pool.map(lambda pair: rewards.verify(*pair), pairs))
    assert verdicts == [gold == answer for gold, answer in pairs]


def test_a_killed_judge_is_replaced():
    assert rewards.verify("\\frac{1}{3}", "\\frac{2}{6}")
    os.killpg(math_judge._judge.pid, signal.SIGKILL)
    math_judge._judge.wait()
    assert rewards.verify("\\frac{1}{3}", "\\frac{3}{9}")


def test_verdicts_are_cached(monkeypatch):
    math_judge.ask.cache_clear()
    assert rewards.math_reward("\\boxed{\\frac{5}{15}}", "\\frac{1}{3}") == 1.0
    monkeypatch.setattr(math_judge, "_turn", None)  # any query now fails
    assert rewards.math_reward("then \\boxed{\\frac{5}{15}}", "\\frac{1}{3}") == 1.0


def test_without_math_verify(monkeypatch, tmp_path):
    """Numbers need no judge; for others the error names what is missing.

    Catches a silent reward of 0 for every formula.
    """
    missing = "from math_verify_that_is_not_there"
    with changed_judge(monkeypatch, tmp_path, "from math_verify", missing):
        assert rewards.math_reward("\\boxed{3}", "3.0") == 1.0
        message = "cannot start: ModuleNotFoundError: No module named 'math_verify_that"
        with pytest.raises(RuntimeError, match=message):
            rewards.math_reward("\\boxed{x}", "y")


def test_an_interrupted_query_leaves_no_verdict_behind(monkeypatch):
    """Fails if the next query reads the verdict of the interrupted one."""
    math_judge.ask.cache_clear()
    assert not rewards.verify("\\frac{1}{9}", "\\frac{2}{9}")

    def interrupted(real=math_judge._judge.stdin.flush):
        real()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(math_judge._judge.stdin, "flush", interrupted)
        with pytest.raises(KeyboardInterrupt):
            rewards.verify("\\frac{3}{9}", "\\frac{1}{3}")
    assert not rewards.verify("\\frac{1}{9}", "\\frac{4}{9}")


def test_an_interrupt_while_the_judge_starts(monkeypatch):
    """Ctrl-C in a notebook, after which the user continues. Fails if "ready" becomes a verdict."""
    math_judge.ask.cache_clear()
    math_judge._end_judge(math_judge._judge)
    monkeypatch.setattr(math_judge, "_judge", None)
    real = subprocess.Popen

    def interrupted():
        raise KeyboardInterrupt

    def popen(*args, **options):
        process = real(*args, **options)
        monkeypatch.setattr(process.stdout, "readline", interrupted)
        return process

    with monkeypatch.context() as patch:
        patch.setattr(math_judge.subprocess, "Popen", popen)
        with pytest.raises(KeyboardInterrupt):
            rewards.verify("\\frac{1}{2}", "\\frac{2}{4}")
    assert rewards.verify("\\frac{1}{2}", "\\frac{2}{4}")
    assert not rewards.verify("\\frac{2}{7}", "\\frac{1}{3}")


# ---------------------------------------------------------------------------- real problems


@needs_problems
@pytest.mark.parametrize(
    ("name", "number"),
    [("math500.jsonl", 500), ("aime24.jsonl", 30), ("amc23.jsonl", 40), ("gsm8k_test.jsonl", 1319)],
)
def test_real_golds(name, number):
    """Every gold equals itself, by math-verify alone too; another problem's gold, two rows above,
    is right only if it is the same. Catches a judge that is too strict or too lenient."""
    golds = [problem.answer for problem in data.read_problems(str(SHARED / name))]
    assert len(golds) == number
    for gold, other in zip(golds, golds[-2:] + golds[:-2], strict=True):
        assert rewards.math_reward(f"\\boxed{{{gold}}}", gold) == 1.0
        assert name == "gsm8k_test.jsonl" or rewards.verify(gold, gold)
        reward = rewards.math_reward(f"\\boxed{{{other}}}", gold)
        assert reward == float(gold == other), (gold, other)
