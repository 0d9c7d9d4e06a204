"""
The process that compares mathematical answers with math-verify, and `ask`, which queries it.

Some answers (10^{10^{10}}, nested powers) would take forever or exhaust the memory. A thread cannot
be stopped, and a Python signal handler would have to wait for one long multiplication to end. So a
child process does the comparing; a kernel timer kills it if it takes too long; another is forked.

This file imports neither torch nor anything of the repository: the child runs under a 1 GiB limit.
"""

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import threading

SECONDS = 1.0  # CPU time of one comparison, after which the answer is wrong; most take 3 ms
MEMORY = 2**30  # bytes
DIGITS = 3000  # of an exact comparison

budget = float("inf")  # CPU seconds that comparisons may still take; set by rewards.of_texts
_judge = None  # the running process, shared by all threads
_turn = threading.Lock()


@functools.lru_cache(maxsize=2**17)
def ask(answer: str, given: str | None) -> bool:
    """Whether a given answer equals the reference answer, or, if `given` is None, whether the
    reference answer can be read.

    Thread-safe. Raises TimeoutError, which is not cached, if the budget is spent, and RuntimeError
    if the judge cannot run.
    """
    global _judge, budget  # noqa: PLW0603, one for the whole process
    with _turn:
        if given and budget <= 0:
            raise TimeoutError
        for _attempt in range(2):  # a judge that died did not die of this pair, as a rule
            judge, _judge = _judge or _start_judge(), None
            with contextlib.suppress(BrokenPipeError):
                judge.stdin.write(json.dumps([answer, given]).encode() + b"\n")
                judge.stdin.flush()
                if line := judge.stdout.readline():
                    _judge = judge  # not if interrupted: the next caller would read this verdict
                    verdict, seconds = json.loads(line)
                    budget -= seconds
                    return verdict
    raise RuntimeError("the process that judges mathematics was killed twice")


def _start_judge():
    """A new judge. It ends with its input, at the latest when this process ends."""
    # -P keeps this file's folder off sys.path. The session is new so that Ctrl-C reaches only the
    # trainer, which may still have completions to score.
    command = [sys.executable, "-P", __file__]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    process = subprocess.Popen(command, **pipes, start_new_session=True)
    if process.stdout.readline() != b"ready\n":
        complaint = process.stderr.read().decode(errors="replace").strip().rpartition("\n")[2]
        raise RuntimeError(f"the process that judges mathematics cannot start: {complaint}")
    return process


def _forget() -> None:
    """In a forked process, which starts its own judge: two would read each other's verdicts."""
    global _judge  # noqa: PLW0603
    _judge = None
    _turn.release()


# A fork waits until nobody asks.
os.register_at_fork(before=_turn.acquire, after_in_parent=_turn.release, after_in_child=_forget)

# ---------------------------------------------------------------------------- in the judge


def judge() -> None:
    """Read lines [answer, given] and write [verdict, CPU seconds] for each, until the input ends.

    A forked child does the work under limits that the kernel enforces. This process only waits: if
    the child was killed, it answers for it and forks another.
    """
    import logging
    import resource

    from math_verify import LatexExtractionConfig, parse, verify

    logging.disable()  # math-verify warns that its own timeouts are off

    whole = [LatexExtractionConfig(try_extract_without_anchor=False)]  # or else a part would do

    @functools.lru_cache
    def read(text):
        # the space \, keeps it from taking a last letter for a unit, so that 3s would equal 3t
        return parse(f"\\boxed{{{text}\\,}}", whole, parsing_timeout=None)

    def compare(answer, given):
        # math-verify returns a list: what it read, and the text that it read it from
        wanted = read(answer)
        if given is None or not wanted:
            return bool(wanted)
        read_given = read(given)
        exact = "." not in answer + given
        if differ(wanted[0], read_given[0], DIGITS - 10 if exact else 3):
            return False
        digits = DIGITS if exact else 15
        return verify(wanted, read_given, numeric_precision=digits, timeout_seconds=None)

    def differ(first, second, digits):
        """Whether two real numbers differ in their first digits: math-verify equates tiny ones."""
        values = (first, second)
        if not all(getattr(value, "is_number", False) and value.is_real for value in values):
            return False
        gap = abs((first - second).evalf(2, maxn=DIGITS))
        return gap * 10**digits > max(abs(first.evalf(2)), abs(second.evalf(2)))

    verdicts = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the library's own output is not a verdict
    requests = os.fdopen(0, "rb", buffering=0)  # a killed child must not take buffered lines along
    compare("1", "1")  # triggers whatever the library initializes lazily, before the fork
    os.write(verdicts, b"ready\n")
    os.dup2(1, 2)  # from here on nobody reads stderr
    while True:
        child = os.fork()
        if child == 0:  # the child does the work below
            break
        _, status = os.waitpid(child, 0)
        if status == 0:
            return
        os.write(verdicts, b"[false, %f]\n" % SECONDS)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    while line := requests.readline():
        signal.setitimer(signal.ITIMER_PROF, SECONDS)  # without a handler, its signal kills
        try:
            verdict = compare(*json.loads(line))
        except Exception:
            verdict = False
        left, _every = signal.setitimer(signal.ITIMER_PROF, 0)
        os.write(verdicts, json.dumps([verdict, max(0, SECONDS - left)]).encode() + b"\n")
    os._exit(0)


if __name__ == "__main__":
    judge()
