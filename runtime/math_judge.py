"""
The process that compares mathematical answers with math-verify, and `ask`, which queries it.

Some answers (10^{10^{10}}, nested powers) would take forever or exhaust the memory. A thread cannot
be stopped, and a Python signal handler would have to wait for one long multiplication to end. So a
child process does the comparing, kernel timers kill it if it takes too long, and another is forked.

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
PATIENCE = 20.0  # wall time; far above SECONDS, so that a busy machine does not change rewards
MEMORY = 2**30  # bytes
DIGITS = 3000  # of an exact comparison

_judge = None  # the running process, shared by all threads
_turn = threading.Lock()


@functools.lru_cache(maxsize=2**17)
def ask(answer: str, given: str | None) -> bool:
    """Whether a given answer equals the reference answer, or, if `given` is None, whether the
    reference answer can be read.

    Thread-safe. Raises RuntimeError if the judge cannot run.
    """
    global _judge  # noqa: PLW0603, one for the whole process
    with _turn:
        for _attempt in range(2):
            try:
                _judge = _judge or _start_judge()
                _judge.stdin.write(json.dumps([answer, given]).encode() + b"\n")
                _judge.stdin.flush()
                if verdict := _judge.stdout.readline():
                    return verdict == b"1\n"
            except BrokenPipeError:
                pass
            except BaseException:  # interrupted: the next caller must not read this pair's verdict
                _judge = _end_judge(_judge)
                raise
            _judge = _end_judge(_judge)  # it died, perhaps not because of this pair: try once more
    raise RuntimeError("the process that judges mathematics was killed twice")


def _start_judge():
    # -P keeps this file's folder off sys.path. The session is new so that Ctrl-C reaches only the
    # trainer, which may still have completions to score.
    command = [sys.executable, "-P", __file__]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    process = subprocess.Popen(command, **pipes, start_new_session=True)
    try:
        if process.stdout.readline() == b"ready\n":
            return process
        lines = process.stderr.read().decode(errors="replace").strip().splitlines()
        complaint = lines[-1] if lines else "no error message"
        raise RuntimeError(f"the process that judges mathematics cannot start: {complaint}")
    except BaseException:
        _end_judge(process)
        raise


def _end_judge(process) -> None:
    """Kill the judge and its child, which would otherwise go on answering."""
    if process:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


# ---------------------------------------------------------------------------- in the judge


def judge() -> None:
    """Read lines [answer, given] and write 1 or 0 for each, until the input ends.

    A forked child does the work under limits that the kernel enforces. This process only waits: if
    the child was killed, it answers 0 and forks another.
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
        """Whether two real numbers differ in their first digits. For math-verify, tiny ones are
        equal."""
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
        os.write(verdicts, b"0\n")
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    while line := requests.readline():
        signal.setitimer(signal.ITIMER_PROF, SECONDS)  # without a handler, its signal kills
        signal.setitimer(signal.ITIMER_REAL, PATIENCE)
        try:
            verdict = compare(*json.loads(line))
        except (Exception, RecursionError):
            verdict = False
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        os.write(verdicts, b"1\n" if verdict else b"0\n")
    os._exit(0)


if __name__ == "__main__":
    judge()
