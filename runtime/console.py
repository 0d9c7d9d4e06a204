"""
The console of a program, which is never a reason to stop: files hold what matters. And what a run
of train.py prints there.
"""

import contextlib
import io
import math
import os
import sys

from runtime import timer

COLUMNS = (
    "kept: completions to train on; w_max: the largest of their weights, 1 / P(kept) (100 is "
    "normal); gnorm: norm of the gradient before clipping; avg@4: mean reward of 4 completions of "
    "each problem"
)
SHOWN = 160  # characters of a sample's prompt, completion and answer, the last ones


class Console:
    """stdout or stderr, without what cannot be written: after `| head`, a Ctrl-C that also ended
    `tee`, a terminal that closed, on a full disk. ValueError: the stream is closed."""

    def __init__(self, stream, errors):
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


@contextlib.contextmanager
def go_on(*, errors=(OSError, ValueError)):
    """In this block, a console that cannot be written is no error. The characters that its encoding
    lacks are escaped, where Python would raise an error."""
    before = sys.stdout, sys.stderr
    handlers = {one: one.errors for one in before if isinstance(one, io.TextIOWrapper)}
    with contextlib.suppress(OSError):  # it flushes
        for stream in handlers:
            stream.reconfigure(errors="backslashreplace")
    sys.stdout, sys.stderr = (Console(stream, errors) for stream in before)
    try:
        yield
    finally:
        # If the console is broken it stays as it is, or Python would end in an error.
        with contextlib.suppress(*errors):
            for stream, handler in handlers.items():
                stream.reconfigure(errors=handler)
            sys.stdout, sys.stderr = before


def result():
    """For a program whose result is what it prints: only `| head` may close its console."""
    return go_on(errors=(BrokenPipeError,))


# ---------------------------------------------------------------------------- of a training run


def lines(row: dict, samples: list[dict] | None, cfg) -> str:
    """An aligned line for a row of log.jsonl. Step 0 has evaluations only. After the first step and
    after each evaluation, a line with one of the step's samples follows."""
    parts = [f"step {row['step']:{len(str(cfg.steps))}d}/{cfg.steps}"]
    if row["step"] > 0:
        completions = cfg.prompts_per_step * cfg.group_size
        kept = round(row["kept/completions"] * completions)
        update = (
            f"kept {kept:{len(str(completions))}d}/{completions} | "
            f"w_max {number(row['weight/max'], 1, width=5)} | gnorm {number(row['grad_norm'], 3)}"
        )
        if row["frac_reward_zero_std"] == 1 and row["grad_norm"] == 0:
            update = "all groups equal: nothing to learn".ljust(len(update))
        parts += [
            f"reward {number(row['reward'], 3)}", update,
            f"rollout {row['time/rollout']:5.2f}s", f"train {row['time/train']:5.2f}s",
        ]  # fmt: skip
    scores = evaluations(row)
    parts += [f"held-out {name} {number(value, 3)}" for name, value in scores.items()]
    text = " | ".join(parts)
    if samples and (scores or row["step"] == 1):
        text += "\n    " + example(samples)
    return text


def example(samples: list[dict]) -> str:
    """A line with the sample of the lowest reward: it shows most."""
    shown = min(samples, key=lambda one: math.inf if math.isnan(one["reward"]) else one["reward"])
    asked, said, right = (str(shown[k])[-SHOWN:] for k in ("prompt", "completion", "answer"))
    use = f"kept with weight {shown['weight']:.1f}" if shown["kept"] else "dropped"
    return (
        f"a completion: {asked!r} -> {said!r}: reward {number(shown['reward'], 3)}, {use}; "
        f"the reference answer is {right!r}"
    )


def summary(rows: list[dict]) -> str:
    """What a run has done, from all rows of its log.jsonl."""
    scores = [found for row in rows if (found := evaluations(row))]
    parts = [
        f"held-out {name} from {number(scores[0].get(name), 3)} to {number(after, 3)}"
        for name, after in (scores[-1].items() if scores else ())
    ]
    steps = [row for row in rows if row["step"] > 0]
    sampled, kept, seconds, updates = (
        sum(row[name] for row in steps)
        for name in ("cost/sampled", "cost/kept", "step_time", "time/train")
    )
    share = number(100 * kept / sampled if sampled else math.nan, 0)
    parts += [
        f"{sampled:,.0f} tokens of prompts and completions, {kept:,.0f} ({share} %) trained on",
        f"{seconds:.0f} s of steps",
    ]
    text = "; ".join(parts)
    rest = timer.measured_rest(rows)
    if rest is None:
        return text
    saved = timer.seconds_of_a_token(timer.recent_steps(rows)) * (sampled - kept)
    return (
        f"{text}\nupdates took {updates:.0f} s; on every completion they would take about "
        f"{updates + saved:.0f} s (an estimate)\nrest {rest:.2g}: without pruning, updates would "
        f'be {100 / (1 + rest):.0f} % of a step (README.md, "Does it pay")'
    )


def evaluations(row: dict) -> dict[str, float]:
    """{name: value} of the row's evaluations, such as {"avg@4": 0.5}."""
    return {name[5:]: value for name, value in row.items() if name.startswith("eval/")}


def number(value: float | None, digits: int, width: int = 0) -> str:
    """The value, or "-" if it does not exist: NaN, or null in a file."""
    exists = value is not None and math.isfinite(value)
    return (f"{value:.{digits}f}" if exists else "-").rjust(width)
