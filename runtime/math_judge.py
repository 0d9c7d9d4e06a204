"""
The process that compares mathematical answers with math-verify, and `ask`, which queries it.

Some answers (10^{10^{10}}) would take forever or exhaust the memory. A thread cannot be stopped,
and a Python signal handler waits until one long multiplication ends. So a child process compares.
The kernel kills it at its limits, and the next question starts another. It imports nothing of ours.
"""

import contextlib
import functools
import json
import math
import os
import resource
import signal
import sys
import threading
from subprocess import PIPE, Popen

SECONDS = 1.0  # CPU time of one comparison, after which the answer is wrong; most take 3 ms
DIGITS = 3000  # of an exact comparison

_left = math.inf  # CPU seconds that comparisons may still take
_judges = {}  # process id: its judge. A fork needs its own: two would read each other's verdicts.
_turn = threading.Lock()  # one question at a time; a fork waits until nobody asks
os.register_at_fork(before=_turn.acquire, after_in_parent=_turn.release)
os.register_at_fork(after_in_child=_turn.release)


@contextlib.contextmanager
def budget(seconds: float):
    """In this context, comparisons take so much CPU time in all; `ask` then raises TimeoutError.
    Yields a function that says whether the budget is spent."""
    global _left  # noqa: PLW0603, one for all threads, as the judge is
    _left = seconds
    try:
        yield lambda: _left <= 0
    finally:
        _left = math.inf


@functools.lru_cache(maxsize=2**17)
def ask(answer: str, given: str) -> bool:
    """Whether a given answer equals the reference answer. What cannot be read equals nothing.

    Thread-safe. TimeoutError (not cached): the budget is spent. RuntimeError: no judge can start.
    """
    global _left  # noqa: PLW0603
    with _turn:
        if _left <= 0 and given != answer:
            raise TimeoutError
        judge = _judges.pop(os.getpid(), None)  # if this is interrupted, nobody reads its verdict
        if not judge or judge.poll() is not None:
            judge = _start()
        judge.stdin.write(json.dumps([answer, given]).encode() + b"\n")
        judge.stdin.flush()
        if line := judge.stdout.readline():
            _judges[os.getpid()] = judge
        # A judge that was killed took its time, and the next one takes about as long to start.
        verdict, seconds = json.loads(line or f"[false, {2 * SECONDS}]")
        _left -= seconds
        return verdict


def _start() -> Popen:
    """A new judge. It ends with its input, at the latest when this process ends."""
    # -P keeps this file's folder off sys.path. The session is new so that Ctrl-C reaches only the
    # trainer, which may still have completions to score.
    command = [sys.executable, "-P", __file__]
    process = Popen(command, stdin=PIPE, stdout=PIPE, start_new_session=True)
    if process.stdout.readline() != b"ready\n":
        raise RuntimeError("the process that judges mathematics cannot start: its error is above")
    return process


def judge() -> None:
    """The child: it reads lines [answer, given] and writes [verdict, CPU seconds] for each."""
    # What the library says is not a verdict.
    verdicts, sys.stdout = sys.stdout, open(os.devnull, "w")  # noqa: SIM115

    from math_verify import LatexExtractionConfig, parse, verify

    sys.stderr = sys.stdout  # math-verify warns that its own timeouts are off
    whole = [LatexExtractionConfig(try_extract_without_anchor=False)]  # or else a part would do

    @functools.lru_cache
    def read(text):
        # the space \, keeps it from taking a last letter for a unit, so that 3s would equal 3t
        return parse(f"\\boxed{{{text}\\,}}", whole, parsing_timeout=None)

    def compare(answer, given):
        first, second = read(answer), read(given)  # lists: what was read, and from which text
        exact = "." not in answer + given
        values = first[0], second[0]
        if all(getattr(value, "is_number", False) and value.is_real for value in values):
            # Two real numbers must agree in these digits: math-verify equates tiny ones.
            gap = abs((first[0] - second[0]).evalf(2, maxn=DIGITS))
            largest = max(abs(value.evalf(2)) for value in values)
            if gap * 10 ** (DIGITS - 10 if exact else 3) > largest:
                return False
        digits = DIGITS if exact else 15
        return verify(first, second, numeric_precision=digits, timeout_seconds=None)

    compare("1", "1")  # triggers whatever the library initializes lazily
    print("ready", file=verdicts, flush=True)
    resource.setrlimit(resource.RLIMIT_AS, (2**30, 2**30))  # bytes
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, SECONDS)  # without a handler, its signal kills
        verdict = False
        with contextlib.suppress(Exception):
            verdict = compare(*json.loads(line))
        left, _every = signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps([verdict, SECONDS - left]), file=verdicts, flush=True)


if __name__ == "__main__":
    judge()
