"""
All that a first run on a GPU should measure, in one command: `python -m bench gpu`.

Sections (bench/gpu_sections.py) stand in order of importance and share one time limit. A
measurement that fails, running out of memory included, leaves its error in its row and does not
stop the others. The JSON and the page are rewritten after every row. Models have random weights, so
nothing is downloaded.
"""

import datetime
import shlex
import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from bench import JsonFile, write_json
from bench import gpu_sections as sections
from runtime import InputError


@dataclass
class Size:
    """How much is measured."""

    shape: str = "0.6b"
    update_shapes: tuple[str, ...] = ("0.6b", "1.7b", "4b")
    group: int = 8  # completions of each prompt
    gap_prompts: int = 8
    batches: tuple[int, ...] = (64, 256)  # sequences sampled at once
    new_tokens: int = 256  # of each completion, in rollouts
    sequences: int = 64  # of an update
    median: int = 600  # of their log-normal lengths
    steps: int = 10  # of a run; the first two warm up
    step_prompts: tuple[tuple[str, int], ...] = (("grpo", 32), ("pps", 64))  # train.py's
    step_tokens: int = 128


TINY = Size("tiny", ("tiny",), 2, 1, (2, 4), 4, 4, 20, 2, (("grpo", 2), ("pps", 4)), 3)


class OutOfTime(BaseException):  # no library catches it
    """The time limit of the whole command ended a measurement."""


# ---------------------------------------------------------------------------- the command


def main(
    tiny: bool = False,
    only: tuple[str, ...] = (),
    minutes: float = 9.0,
    json_file: JsonFile = None,
    page: Path | None = None,
) -> None:
    """Measure correctness, speed and memory on this machine's GPU.

    Args:
        tiny: the same measurements on a toy model, to try the command
        only: sections to run, of: machine tests attention gap rollouts updates steps profile
        minutes: time limit; what no longer fits is skipped, and its row says so
        json_file: where to write all rows
        page: where to write a page of tables, in Markdown
    """
    if unknown := set(only) - SECTIONS.keys():
        raise InputError(f"--only {' '.join(sorted(unknown))}: choose from {' '.join(SECTIONS)}")
    if not torch.cuda.is_available():
        problem = "this PyTorch sees no CUDA device"
        raise InputError(f"python -m bench gpu: {problem}; python -m bench roofline needs none")
    deadline = time.monotonic() + 60 * minutes
    words = ["python", "-m", "bench", "gpu", *["--tiny"] * tiny, *["--only"] * bool(only), *only]
    results = {
        "command": f"{shlex.join(words)} --minutes {minutes:g}",
        "date": f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC",
        "device": f"{torch.cuda.get_device_name()}, torch {torch.__version__}, transformers "
        f"{sections.version('transformers')}",
        "sections": {},
    }
    with tempfile.TemporaryDirectory() as folder:
        bench = sections.Bench(TINY if tiny else Size(), folder)
        for name in only or SECTIONS:
            section, rows = SECTIONS[name], []
            results["sections"][name] = rows
            for labels, measure in section.measurements(bench):
                needed = min(0, section.seconds) if tiny else section.seconds
                found = attempt(measure, deadline - time.monotonic(), needed)
                rows += [labels | row for row in found]
                print(*(f"{name}: {labels | row}" for row in found), sep="\n", flush=True)
                write_json(json_file, results)
                if page:
                    page.write_text(text_of(results))
            bench.release()


def attempt(measure: Callable, left: float, needed: float) -> list[dict]:
    """The rows of a measurement; instead of them, its error, or why it was skipped."""
    if left <= needed:
        return [{"skipped": f"needs about {needed} s, and --minutes leaves {max(0, left):.0f} s"}]
    started = time.monotonic()
    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, max(1.0, left), 5.0)  # repeated, in case one is swallowed
    try:
        found = measure()
    except sections.Skipped as reason:
        found = {"skipped": str(reason)}
    except (Exception, OutOfTime) as error:
        lines = str(error).strip().splitlines() or [""]
        found = {"error": f"{type(error).__name__}: {sections.without_paths(lines[0])}"}
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    sections.free_memory()
    found = found if isinstance(found, list) else [found]
    found[0]["took"] = round(time.monotonic() - started, 1)
    return found


def ring(*_):
    raise OutOfTime("the time of --minutes is over")


# ---------------------------------------------------------------------------- the page


class Section(NamedTuple):
    measurements: Callable  # Bench -> (labels of a row, a function that returns its rest), ...
    seconds: float  # a measurement is skipped if less is left; a guess
    columns: str
    reading: str  # how to read the table


SECTIONS = {
    "machine": Section(
        sections.machine, -1e9, "name | value", "What the measurements were made on."
    ),
    "tests": Section(
        sections.tests, 20, "tests | passed | failed | not run | seconds | ending",
        "Any failure is a fault of the code on a GPU; the JSON has the end of the output.",
    ),
    "attention": Section(
        sections.attention, 2, "kernel | prompts | values | q | k | v",
        "Largest error of the output and of each gradient in bfloat16, of the kernel and, second, "
        "of the masked reference: the two should be about equal.",
    ),
    "gap": Section(
        sections.gap, 10,
        "loss | mean gap | largest gap | clipped, train.py's cap | clipped, no cap",
        "Nats between the sampler's and the trainer's log-prob of a token, and the share of tokens "
        "that the clip acts on before any update, which should be about 0.",
    ),
    "rollouts": Section(
        sections.rollouts, 15,
        "engine | at once | tokens/s | seconds, roofline, share | largest gap",
        "A low share means that launches or copies take the time, not the memory's bandwidth.",
    ),
    "updates": Section(
        sections.updates, 20,
        "shape | tokens/s | MFU | seconds, roofline, share | state GiB, computed | peak GiB, "
        "computed",
        "Forward, backward and AdamW with gradient checkpointing; MFU is of forward and backward. "
        "Computed memory is that of docs/real-models.md.",
    ),
    "steps": Section(
        sections.steps, 45,
        "method | seconds: rollout, score, train, all | roofline: rollout, train | tokens "
        "generated, trained | peak GiB | of grpo",
        "Medians of whole steps of train.py; the last column is the step's time over grpo's.",
    ),
    "profile": Section(
        sections.profile, 15, "work | kernel | launches each | device ms | of device time | busy",
        "Launches of a decoded token, or of a pack of an update. Where the device is busy for much "
        "less than 1, the host takes the time.",
    ),
}  # fmt: skip


def cell(value) -> str:
    if isinstance(value, list):
        return ", ".join(map(cell, value))
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return "-" if value is None else str(value).replace("|", "/")


def text_of(results: dict) -> str:
    """The page."""
    lines = ["# Measured on a GPU", "", f"`{results['command']}`, {results['date']}: "]
    lines[-1] += results["device"] + "."
    for name, rows in results["sections"].items():
        columns = SECTIONS[name].columns.split(" | ")
        lines += ["", f"## {name}", "", SECTIONS[name].reading, ""]
        lines += [f"| {SECTIONS[name].columns} |", "|" + "---|" * len(columns)]
        for row in rows:
            cells = [cell(row[column]) if column in row else "" for column in columns]
            reason = row.get("error") or row.get("skipped")
            if reason:
                cells[cells.index("")] = cell(reason)
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"
