"""
The console of a program, which is never a reason to stop: files hold what matters. And what a run
of train.py prints there.
"""

import contextlib
import io
import math
import os
import statistics
import sys

from runtime import timer

COLUMNS = (
    "kept: completions to train on; w_max: the largest of their weights, 1 / P(kept); gnorm: norm "
    "of the gradient before clipping; avg@4: mean reward of 4 completions of each problem"
)
SHOWN = 160  # characters of a sample's prompt and of its completion, the last ones


class Console:
    """stdout or stderr. It drops what cannot be written: after `| head`, a Ctrl-C that also ended
    `tee`, a terminal that closed, on a full disk. ValueError: the stream is closed."""

    def __init__(self, stream, errors=(OSError, ValueError)):
        self.stream = stream or open(os.devnull, "w")  # noqa: SIM115  None: it was closed
        self.errors = errors

    def __getattr__(self, name):
        return getattr(self.stream, name)

    def write(self, text: str) -> None:
        with contextlib.suppress(*self.errors):
            self.stream.write(text)

    def flush(self) -> None:
        with contextlib.suppress(*self.errors):
            self.stream.flush()


def result() -> None:
    """For a program whose result is what it prints: only `| head` may close its console."""
    escape()
    sys.stdout = Console(sys.stdout, errors=[BrokenPipeError])


def escape() -> None:
    """Escape the characters that the console's encoding lacks; Python would raise an error."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # not a notebook's
            stream.reconfigure(errors="backslashreplace")


def go_on() -> None:
    """From here on, a console that cannot be written is no error."""
    with contextlib.suppress(OSError):  # it flushes
        escape()
    sys.stdout, sys.stderr = Console(sys.stdout), Console(sys.stderr)


# ---------------------------------------------------------------------------- of a training run


def lines(row: dict, samples: list[dict] | None, cfg) -> str:
    """An aligned line for a row of log.jsonl. Step 0 has evaluations only. After the first step and
    after each evaluation, a line with the first of the step's samples follows."""
    parts = [f"step {row['step']:{len(str(cfg.steps))}d}/{cfg.steps}"]
    if row["step"] > 0:
        entropy = row["entropy"]
        if math.isnan(entropy):  # vLLM returns none
            entropy = row["entropy/trained"]
        completions = cfg.prompts_per_step * cfg.group_size
        kept = round(row["kept/completions"] * completions)
        parts += [
            f"reward {number(row['reward'], 3)}",
            f"kept {kept:{len(str(completions))}d}/{completions}",
            f"w_max {number(row['weight/max'], 1, width=5)}",
            f"entropy {number(entropy, 3)}",
            f"gnorm {number(row['grad_norm'], 3)}",
            f"rollout {row['time/rollout']:5.2f}s",
            f"train {row['time/train']:5.2f}s",
        ]
    scores = evaluations(row)
    parts += [f"{name} {number(value, 3)}" for name, value in scores]
    text = " | ".join(parts)
    if samples and (scores or row["step"] == 1):
        first = samples[0]
        prompt, completion = first["prompt"][-SHOWN:], first["completion"][-SHOWN:]
        text += f"\n    a completion: {prompt!r} -> {completion!r}"
        text += f": reward {number(first['reward'], 3)}"
    return text


def summary(rows: list[dict]) -> str:
    """What a run has done, from all rows of its log.jsonl."""
    steps = [row for row in rows if row["step"] > 0]
    sampled, kept, seconds = (
        sum(row[name] for row in steps) for name in ("cost/sampled", "cost/kept", "step_time")
    )
    share = number(100 * kept / sampled if sampled else math.nan, 0)
    tokens = f"{sampled:,.0f} tokens of prompts and completions, {kept:,.0f} ({share} %) trained on"
    parts = [tokens, f"{seconds:.0f} s of steps"]
    scores = [score for row in rows for score in evaluations(row)]
    if scores:
        (name, before), (_, after) = scores[0], scores[-1]
        parts.insert(0, f"{name} from {number(before, 3)} to {number(after, 3)}")
    rest = timer.measured_rest(rows)
    if rest is None:
        return "; ".join(parts)
    recent = timer.recent_steps(rows)
    updates = sum(row["time/train"] for row in steps)
    saved = timer.seconds_of_a_token(recent) * (sampled - kept)
    rollouts = statistics.median_low(row["time/rollout"] / row["step_time"] for row in recent)
    elsewhere = rest / (1 + rest)
    return "; ".join(parts) + (
        f"\nupdates took {updates:.0f} s; on every completion they would take about "
        f"{updates + saved:.0f} s (an estimate). Rollouts were {rollouts:.0%} of a step"
        f"\nrest is {rest:.2g}: without pruning, {elsewhere:.0%} of a step would not be training. "
        f'{advice(rest)} (README.md, "Does it pay on your run?")'
    )


def advice(rest: float) -> str:
    """What a run with this `rest` may gain, as the README's table has it."""
    if rest < 0.5:
        return "Updates dominate, and adaptive saves much of them"
    if rest < 2:
        return "adaptive saves little more than leaving out zeros"
    return "Rollouts dominate, and dropping completions saves little"


def evaluations(row: dict) -> list[tuple[str, float]]:
    """(name, value) of the row's evaluations, such as ("avg@4", 0.5)."""
    figures = [(name.split("/")[1], row[name]) for name in row if name.startswith("eval/")]
    return [(f"held-out {name}", value) for name, value in figures]


def number(value: float | None, digits: int, width: int = 0) -> str:
    """The value, or "-" if it does not exist: NaN, or null in a file."""
    exists = value is not None and math.isfinite(value)
    return (f"{value:.{digits}f}" if exists else "-").rjust(width)
