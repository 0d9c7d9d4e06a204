"""
Everything that measures, one file per command: `python -m bench` lists them.

May import: anything. Only tests, notebooks and runs/*.sh import bench.
"""

import datetime
import functools
import platform
import re
import subprocess
from pathlib import Path
from typing import Annotated

import torch
import tyro

JsonFile = Annotated[Path | None, tyro.conf.arg(name="json")]  # a parameter that is the flag --json

COLORS = {  # of rules, in notebooks; safe for colour-blind readers (Okabe and Ito)
    "none": "#000000", "nonzero": "#777777", "adaptive": "#009E73", "pps": "#56B4E9",
    "uniform": "#CC79A7", "dppo": "#0072B2", "cppo": "#D55E00", "pods": "#999933",
    "cppo_batch": "#E69F00", "dppo_floor": "#882255",
}  # fmt: skip


def made_by() -> dict[str, str]:
    """What a record has to say: the commit that is checked out, this machine and the date."""
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
