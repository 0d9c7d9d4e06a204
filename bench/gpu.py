"""
All that a first run on a GPU should measure, in one command: `python -m bench gpu`.

Sections (bench/gpu_sections.py) stand in order of importance. A measurement that fails, running out
of memory included, leaves its error in its row and does not stop the others. The JSON and the page
are rewritten after every row, so a run that is ended early keeps what it has. Models have random
weights, so nothing is downloaded.
"""

import shlex
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from bench import JsonFile, stamped, write_json
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


TINY = Size(
    shape="tiny", update_shapes=("tiny",), group=2, gap_prompts=1, batches=(2, 4), new_tokens=4,
    sequences=4, median=20, steps=2, step_prompts=(("grpo", 2), ("pps", 4)), step_tokens=3,
)  # fmt: skip


# ---------------------------------------------------------------------------- the command


def main(
    tiny: bool = False,
    only: tuple[str, ...] = (),
    json_file: JsonFile = None,
    page: Path | None = None,
) -> None:
    """Measure correctness, speed and memory on this machine's GPU.

    Args:
        tiny: the same measurements on a toy model, to try the command
        only: sections to run, of: attention gap rollouts updates steps profile
        json_file: where to write all rows
        page: where to write a page of tables, in Markdown
    """
    if unknown := set(only) - SECTIONS.keys():
        raise InputError(f"--only {' '.join(sorted(unknown))}: choose from {' '.join(SECTIONS)}")
    if not torch.cuda.is_available():
        raise InputError("python -m bench gpu: this PyTorch sees no CUDA device")
    words = ["python", "-m", "bench", "gpu", *["--tiny"] * tiny, *["--only"] * bool(only), *only]
    packages = ("torch", "transformers", "flash-attn", "vllm")
    results = {
        "command": shlex.join(words),
        "versions": {package: sections.version(package) for package in packages},
        "sections": {},
    }
    with tempfile.TemporaryDirectory() as folder:
        bench = sections.Bench(TINY if tiny else Size(), folder)
        for name in only or SECTIONS:
            rows = results["sections"][name] = []
            for labels, measure in SECTIONS[name].measurements(bench):
                row = labels | attempt(measure)
                rows.append(row)
                print(f"{name}: {row}", flush=True)
                write_json(json_file, results)
                if page:
                    page.write_text(text_of(stamped(results)))
            bench.release()


def attempt(measure: Callable) -> dict:
    """The figures of a measurement or, if it fails, its error."""
    try:
        return measure()
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        return {"error": f"{type(error).__name__}: {lines[0]}"}
    finally:
        sections.free_memory()


# ---------------------------------------------------------------------------- the page


class Section(NamedTuple):
    measurements: Callable  # Bench -> (labels of a row, a function that returns its rest), ...
    columns: str
    reading: str  # how to read the table


SECTIONS = {
    "attention": Section(
        sections.attention,
        "kernel | values | q | k | v",
        "Largest error of the output and of each gradient in bfloat16, of the kernel and, second, "
        "of the masked reference: the two should be about equal.",
    ),
    "gap": Section(
        sections.gap,
        "loss | cap | mean gap | largest gap | clipped",
        "Nats between the sampler's and the trainer's log-prob of a token, and the share of tokens "
        "that the clip acts on before any update, which should be about 0.",
    ),
    "rollouts": Section(
        sections.rollouts,
        "engine | at once | tokens/s | seconds | roofline | share | largest gap",
        "A low share means that launches or copies take the time, not the memory's bandwidth.",
    ),
    "updates": Section(
        sections.updates,
        "shape | tokens/s | MFU | seconds | roofline | share | state GiB | computed state | "
        "peak GiB | computed peak",
        "Forward, backward and AdamW with gradient checkpointing; MFU is of forward and backward.",
    ),
    "steps": Section(
        sections.steps,
        "method | step_time | time/rollout | time/score | time/train | tokens/generated | "
        "tokens/trained | memory/peak_gib",
        "Medians of whole steps of train.py.",
    ),
    "profile": Section(
        sections.profile,
        "work | launches each | device ms | busy",
        "Launches of a decoded token, or of a pack of an update. Where the device is busy for much "
        "less than 1, the host takes the time.",
    ),
}


def cell(value) -> str:
    if isinstance(value, list):
        return ", ".join(map(cell, value))
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return "-" if value is None else str(value).replace("|", "/")


def text_of(results: dict) -> str:
    """The page."""
    versions = ", ".join(f"{name} {found}" for name, found in results["versions"].items())
    made = f"{results['date']}, commit {results['commit']}: {results['machine']}, {versions}."
    lines = ["# Measured on a GPU", "", f"`{results['command']}`, {made}"]
    for name, rows in results["sections"].items():
        columns = SECTIONS[name].columns.split(" | ")
        lines += ["", f"## {name}", "", SECTIONS[name].reading, ""]
        lines += [f"| {SECTIONS[name].columns} |", "|" + "---|" * len(columns)]
        for row in rows:
            cells = [cell(row[column]) if column in row else "" for column in columns]
            if "error" in row:
                cells[cells.index("")] = cell(row["error"])
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"
