"""
Rewards: 1.0 for a right answer, 0.0 for a wrong one, None where it cannot be told.

None takes a completion out of its group's mean and deviation and gives it advantage 0; it is for golds that
are missing or have no answer in them, never for a completion that is hard to read (that is wrong: 0.0).

Mathematics is judged by math-verify, in a process of its own. Some answers (10^{10^{10}}, nested powers) would take
for ever or all memory; in a thread nothing could stop them, and a signal handler would wait for the end of one long
multiplication. There the kernel's own timer kills whoever takes too long, and the next one is forked.
"""

import contextlib
import functools
import json
import os
import re
import signal
import subprocess
import sys
import threading
from decimal import Context, Decimal

SECONDS = 1.0  # of computing for one comparison; what takes longer is wrong. A usual one takes half a millisecond
PATIENCE = 1.7  # seconds by the clock, on a machine that is busy
MEMORY = 2**30  # bytes
LONGEST_ANSWER = 2000  # characters; what is longer is no answer
NUMBER = re.compile(r"-?(?:(?:\d+|\d{1,3}(?:,\d{3})+)(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d{1,3})?")
SCIENTIFIC = re.compile(r"(?<![\w.])(\d+\.?\d*|\.\d+)[eE]([+-]?\d+)(?!\w)")
BARE_FRACTION = re.compile(r"\\[dt]?frac\s*(\\[a-zA-Z]+|[^\\{\s])\s*(\\[a-zA-Z]+|[^\\{\s])")
SPELLINGS = re.compile(  # what changes how it looks, and not what it is; between two digits a space may
    r"\\(?:left|right)(?![a-zA-Z])|(?<!\d)(?:\\[!,;: ]|\s)+|(?:\\[!,;: ]|\s)+(?!\d)|(?<=\\)[dt](?=frac)"
)


def arithmetic_reward(completion: str, gold: str) -> float | None:
    """Exact: the text after the last "=" must be the gold number, digit for digit.

    >>> arithmetic_reward("7+9=16;16+5=21", "21"), arithmetic_reward("7+9=16;16+5=11", "21")
    (1.0, 0.0)
    """
    if not gold.isdigit():
        return None
    return float(completion.rpartition("=")[2] == gold)


def math_reward(completion: str, gold: str) -> float | None:
    """The last \\boxed{} after the last </think> equals the gold, by math-verify; None if the gold has no value.

    >>> math_reward("I think \\\\boxed{7}</think> so it is \\\\boxed{\\\\frac{2400}{2}}.", "1,200")
    1.0
    """
    if not has_value(gold):
        return None
    answer = final_answer(completion)
    if answer is None:
        return 0.0
    if normal_form(answer) == normal_form(gold):
        return 1.0
    numbers = _number(gold) is not None and _number(answer) is not None  # then they are two
    return float(not numbers and verify(gold, answer))


def has_value(gold: str) -> bool:
    """Whether math-verify can read a gold at all. What it cannot read would earn every completion the same."""
    return _number(gold) is not None or (0 < len(gold.strip()) <= LONGEST_ANSWER and ask(gold, None))


def normal_form(answer: str) -> str:
    """One spelling of many: what has the same one is the same, what has not may be so yet."""
    number = _number(answer)
    if number is None:
        return SPELLINGS.sub("", answer)
    return f"{number.normalize(Context(prec=len(answer))):f}"  # prec: every digit counts


def verify(gold: str, answer: str) -> bool:
    """Whether math-verify holds an answer for the same as a gold, both without \\boxed; False after SECONDS."""
    return ask(gold, answer)


def final_answer(completion: str) -> str | None:
    """What is in the last \\boxed{} after the last </think>; None if there is none, or thinking never ended."""
    _thought, end, said = completion.rpartition("</think>")
    return None if not end and "<think>" in said else last_boxed(said)


def last_boxed(text: str) -> str | None:
    """The content of the last \\boxed{...}, braces balanced; None if there is none, it is never closed or too long."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    start, depth = start + len("\\boxed{"), 1
    for brace in re.finditer(r"[{}]", text[start : start + LONGEST_ANSWER + 1]):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return text[start : start + brace.start()]
    return None


def _number(text: str) -> Decimal | None:
    """A plain number, thousands commas and dollars around it allowed; None for anything else."""
    text = text.strip().strip("$").strip()
    return Decimal(text.replace(",", "")) if NUMBER.fullmatch(text) else None


# ---------------------------------------------------------------------------- the process that judges

_judge, _turn = None, threading.Lock()


@functools.lru_cache(maxsize=2**17)
def ask(gold: str, answer: str | None) -> bool:
    """One verdict: answer equals gold; or, of None, gold can be read. From any thread; RuntimeError without a judge."""
    global _judge  # noqa: PLW0603, one for the whole process
    with _turn:
        for _attempt in range(2):
            try:
                _judge = _judge or _start_judge()
                _judge.stdin.write(json.dumps([gold, answer]).encode() + b"\n")
                _judge.stdin.flush()
                if verdict := _judge.stdout.readline():
                    return verdict == b"1\n"
            except BrokenPipeError:
                pass
            except BaseException:  # stopped before the verdict came: the next one to ask would take it for its own
                _judge = _end_judge(_judge)
                raise
            _judge = _end_judge(_judge)  # it died, by no fault of this pair perhaps: once more
    raise RuntimeError("the process that judges mathematics was killed twice")


def _start_judge():
    process = subprocess.Popen(
        [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C is for the trainer, which may want to score what it has
    )  # fmt: skip
    try:
        if process.stdout.readline() == b"ready\n":
            return process
        complaint = process.stderr.read().decode(errors="replace").strip().splitlines() or ["it says nothing"]
        raise RuntimeError(f"the process that judges mathematics cannot start: {complaint[-1]}")
    except BaseException:
        _end_judge(process)
        raise


def _end_judge(process) -> None:
    """With whoever works for it, who would go on answering."""
    if process:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def judge() -> None:
    """A line [gold, answer] comes in, 1 or 0 goes out. A child does the work under limits that the kernel sees to; this
    process only waits, says 0 when the child was killed, and forks the next. Ends with its input."""
    import logging
    import resource

    from math_verify import parse, verify

    logging.disable()  # the library warns that it does not watch the time

    @functools.lru_cache
    def read(text):
        text = SCIENTIFIC.sub(r"\1\\times10^{\2}", text)
        text = BARE_FRACTION.sub(r"\\frac{\1}{\2}", text)  # of 1 + \frac\pi 2 it would read no more than the 2
        return parse(f"\\boxed{{{text}}}", parsing_timeout=None)

    def compare(gold, answer):
        golds = read(gold)
        if answer is None or not golds:
            return bool(golds)
        answers = read(answer)
        return verify(golds, answers, timeout_seconds=None) and not differ(golds[:1] + answers[:1])

    def differ(pair):
        """Two numbers that math-verify, which rounds to six decimals, cannot tell apart."""
        if not all(getattr(value, "is_number", False) and value.is_real for value in pair):
            return False
        one, other = (abs(float(value)) for value in pair)
        return one < 1e-3 and other < 1e-3 and abs(one - other) > 1e-3 * max(one, other)

    verdicts = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what the library prints is no verdict
    requests = os.fdopen(0, "rb", buffering=0)  # nothing that a killed child has read is lost with it
    compare("1", "1")  # whatever the library puts off until it is used
    os.write(verdicts, b"ready\n")
    os.dup2(1, 2)  # nobody reads what the library complains of
    while (child := os.fork()) > 0:
        _, status = os.waitpid(child, 0)
        if status == 0:
            return
        os.write(verdicts, b"0\n")
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    while line := requests.readline():
        signal.setitimer(signal.ITIMER_PROF, SECONDS)  # its signals have no handler: the end
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
