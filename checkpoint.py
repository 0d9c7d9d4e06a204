"""
What a run leaves on disk, written so that a kill at any moment loses nothing.

    config.json    every resolved value, versions, commit
    log.jsonl      one row a step, on disk before the step's checkpoint
    samples.jsonl  a few completions a step, with reward, advantage and keep decision
    checkpoint/    a Hugging Face folder, and trainer.pt: optimizer, prompt history, step

There is no random state to save: all randomness is a function of (seed, step, purpose).
"""

import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import transformers


def save(out_dir: Path, model, tokenizer, optimizer, history, step: int, greso=None, reference=None) -> None:
    """A Hugging Face folder plus trainer.pt, written beside and renamed: a kill at any moment leaves a whole one."""
    final, beside, old = (out_dir / name for name in ("checkpoint", "checkpoint.new", "checkpoint.old"))
    shutil.rmtree(beside, ignore_errors=True)
    model.save_pretrained(beside)
    tokenizer.save_pretrained(beside)
    state = {"optimizer": optimizer.state_dict(), "history": vars(history), "step": step}
    state |= {"greso": vars(greso) if greso else None, "reference": fingerprint(reference) if reference else None}
    torch.save(state, beside / "trainer.pt")
    for path in (path for path in beside.rglob("*") if path.is_file()):  # on disk before it takes the good one's name
        with open(path, "rb+") as file:
            os.fsync(file.fileno())
    if final.exists():
        final.rename(old)
    beside.rename(final)
    shutil.rmtree(old, ignore_errors=True)


def fingerprint(model) -> float:
    """A number that other weights do not share: the reference of the KL term must be the same when a run goes on."""
    return sum(parameter.detach().double().abs().sum().item() for parameter in model.parameters())


def find(out_dir: Path, rank: int) -> Path | None:
    """The last whole checkpoint, or None. Killed between the two renames, it is the one set aside: put it back."""
    final, old = out_dir / "checkpoint", out_dir / "checkpoint.old"
    if rank == 0 and old.exists():
        shutil.rmtree(old) if final.exists() else old.rename(final)
    if dist.is_initialized():
        dist.barrier()
    return final if final.exists() else None


def read_rows(path: Path) -> list[dict]:
    """The rows of a JSONL file; a half-written last line is none, nor is anything in a file that is not there."""
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]] if path.exists() else []


def cut_rows(path: Path, keep) -> list[dict]:
    """Drop the rows of a JSONL file of which keep(row) is false, and a half-written last line; returns the others."""
    rows = [row for row in read_rows(path) if keep(row)]
    if path.exists():
        path.with_suffix(".new").write_text("".join(json.dumps(row) + "\n" for row in rows))
        path.with_suffix(".new").replace(path)
    return rows


def append_rows(path: Path, rows: list[dict]) -> None:
    """Append rows to a JSONL file, on disk when this returns; NaN and infinities become null."""

    def plain(value):
        return None if isinstance(value, float) and not math.isfinite(value) else value

    with open(path, "a") as file:
        file.writelines(json.dumps({key: plain(value) for key, value in row.items()}) + "\n" for row in rows)
        file.flush()
        os.fsync(file.fileno())


def stored_ranks(out_dir: Path) -> int:
    """How many ranks the run in out_dir had last."""
    return json.loads((out_dir / "config.json").read_text())["ranks"]


def write_config(out_dir: Path, config: dict, ranks: int) -> None:
    """config.json: every resolved value, the versions and the commit that ran."""

    def git(*words):
        try:
            command = ["git", "-C", str(Path(__file__).parent), *words]
            answer = subprocess.run(command, capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError):  # no git, or no checkout
            return None
        return answer.stdout.strip()

    versions = {"python": sys.version.split()[0], "torch": torch.__version__, "transformers": transformers.__version__}
    written = {
        "config": config,
        "versions": versions,
        "ranks": ranks,
        "threads": torch.get_num_threads(),
        "commit": git("rev-parse", "HEAD"),
        "changed_files": (git("status", "--porcelain", "--untracked-files=no") or "").splitlines(),
    }
    (out_dir / "config.new").write_text(json.dumps(written, indent=2) + "\n")
    (out_dir / "config.new").replace(out_dir / "config.json")
