"""
Everything that measures, one file per command: `python -m bench` lists them.

Variants alternate within one call; the output is medians and ratios.

May import: anything. Only tests, notebooks and runs/*.sh import bench.
"""

import datetime
import functools
import json
import platform
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Annotated

import torch
import tyro

import config
import train
from runtime import console, log
from train import Trainer

JsonFile = Annotated[Path | None, tyro.conf.arg(name="json")]  # a parameter that is the flag --json


COLORS = {  # of rules, in notebooks; safe for colour-blind readers (Okabe and Ito)
    "none": "#000000", "zero": "#999999", "uniform": "#56B4E9", "dppo": "#0072B2",
    "pps": "#009E73", "cppo": "#D55E00", "pods": "#999933", "cppo_batch": "#E69F00",
    "dppo_floor": "#CC79A7",
}  # fmt: skip
SHARED = "--group-size 16 --loss grpo --adam-beta2 0.999 --lr 6e-4"
PPS = "--prompts-per-step 64 --prompt-rule uniform --prompt-prune-rate 0.6"
PPS += " --completion-prune-rate 0.7"


def sized(method: str) -> list[str]:
    """Flags of train.py for runs whose steps are compared: 32 prompts x 16 completions, or with pps
    26 of 64 x 16. A record keeps its meaning when the defaults of tiny change."""
    sizes = PPS if method == "pps" else "--prompts-per-step 32"
    return f"--method {method} {sizes} {SHARED}".split()


def run(
    args: list[str], trainer_class: type[Trainer] = Trainer, reward=None
) -> tuple[Trainer, list[dict]]:
    """Train in a temporary folder, without evaluations, checkpoints or run.png.

    args are flags of train.py; the class may be a subclass that records or breaks something.
    Returns the trainer and the rows of its log.
    """
    with tempfile.TemporaryDirectory() as folder:
        fixed = ["--out-dir", folder, "--eval-every", "0", "--save-every", "0"]
        trainer = trainer_class(config.parse_config([*args, *fixed]), reward)
        logger = train.start_log(trainer, 0)
        for step in range(1, trainer.cfg.steps + 1):
            row, others = trainer.step(step)
            logger.write(row, others, console.lines(row, None, trainer.cfg))
        return trainer, log.read_rows(Path(folder, "log.jsonl"))


def write_json(path: Path | None, content) -> None:
    """Write a record to the file of --json, if there is one, with who made it (see stamped)."""
    if path:
        path.write_text(json.dumps(stamped(content), indent=1) + "\n")


def stamped(content: dict | list[dict]) -> dict | list[dict]:
    """The record with commit, machine and date added: to the dictionary, or to the first row."""
    if isinstance(content, dict):
        return content | made_by()
    first, *rest = content
    return [first | made_by(), *rest]


def keep_log(run_log: str, record: str) -> None:
    """Copy the log.jsonl of a run to a record."""
    log.write_rows(Path(record), stamped(log.read_rows(Path(run_log))))


def made_by() -> dict[str, str]:
    """The commit that is checked out, this machine and the date."""
    date = f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}"
    return {"commit": commit(), "machine": machine(), "date": date}


@functools.cache
def commit() -> str:
    """The commit that was checked out when this process first asked; unknown without git."""
    command = ["git", "rev-parse", "--short=10", "HEAD"]
    folder = Path(__file__).parent
    try:
        answer = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return answer.stdout.strip()


@functools.cache
def machine() -> str:
    """The name of the GPU, or else of the processor. Seconds compare only within one machine."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    info = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*: (.*)", info.read_text()) if info.exists() else []
    return names[0] if names else platform.processor() or platform.machine()


def gradient(model) -> torch.Tensor:
    """The gradient [P] of a model, on the model's device."""
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def inner_products(gradients: list[torch.Tensor]) -> torch.Tensor:
    """Inner products of n gradients [P] with each other: [n, n] float64, on the CPU."""
    parts = zip(*(gradient.split(50_000) for gradient in gradients), strict=True)
    parts = (torch.stack(part).double() for part in parts)  # in pieces: float64 takes memory
    return sum(part @ part.T for part in parts).cpu()
