"""
What a run leaves on disk, written so that a kill at any moment loses nothing.

    config.json          every resolved value, versions, commit
    log.jsonl            one row a step, on disk before the step's checkpoint
    samples.jsonl        a few completions a step, with reward, advantage and keep decision
    checkpoint-000020/   after step 20: a Hugging Face folder, trainer.pt (optimizer, prompt history, step), and
                         files.json, the size and checksum of each file
    checkpoint           a link to the newest

There is no random state to save: all randomness is a function of (seed, step, purpose).
"""

import contextlib
import itertools
import json
import math
import os
import shutil
import subprocess
import sys
import zlib
from pathlib import Path

import torch
import transformers
from safetensors import SafetensorError

import ranks
from data import InputError


def save(out_dir: Path, model, weights: dict, tokenizer, state: dict, *, keep: int) -> None:
    """A Hugging Face folder of `weights` plus `state` (with its step) as trainer.pt, written beside and renamed: a kill
    at any moment leaves whole ones. The `keep` newest stay."""
    final, beside = out_dir / f"checkpoint-{state['step']:06d}", out_dir / "checkpoint.new"
    shutil.rmtree(beside, ignore_errors=True)
    with no_loss_if_full(beside):
        model.save_pretrained(beside, state_dict=weights)
        tokenizer.save_pretrained(beside)
        torch.save(state, beside / "trainer.pt")
        files = {path.name: _size_and_checksum(path) for path in beside.iterdir()}
        (beside / "files.json").write_text(json.dumps(files, indent=1) + "\n")
        for path in beside.iterdir():  # on disk before it has a name that is looked for
            with open(path, "rb+") as file:
                os.fsync(file.fileno())
        shutil.rmtree(final, ignore_errors=True)  # there, if it was not whole and the run went back beyond it
        beside.rename(final)
        _link(out_dir, final)
    paths = _numbered(out_dir)
    place = paths.index(final)
    for path in paths[: max(0, place + 1 - keep)] + paths[place + 1 :]:  # later ones were not whole: it went back
        shutil.rmtree(path, ignore_errors=True)


def _numbered(out_dir):
    return sorted(out_dir.glob("checkpoint-" + 6 * "[0-9]"))  # not a checkpoint-best of the user's


def _link(out_dir, final):
    if not (out_dir / "checkpoint").is_symlink():  # a copy, if whoever copied the folder followed it
        shutil.rmtree(out_dir / "checkpoint", ignore_errors=True)
    (out_dir / "checkpoint.link").unlink(missing_ok=True)
    (out_dir / "checkpoint.link").symlink_to(final.name)
    (out_dir / "checkpoint.link").replace(out_dir / "checkpoint")


def _size_and_checksum(path):
    with open(path, "rb") as file:
        checksum = 0
        while block := file.read(2**24):
            checksum = zlib.crc32(block, checksum)
        return [file.tell(), checksum]


@contextlib.contextmanager
def no_loss_if_full(path: Path):
    """Turns what a full disk raises while `path` is written into an InputError; what was saved before stays."""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        raise InputError(
            f"{path} cannot be written ({str(error).splitlines()[0]}): what was saved before is whole. Make room, then "
            f"go on: train.py with --resume, eval.py with the same command"
        ) from None


def fingerprint(model) -> float:
    """A number that other weights do not share: the reference of the KL term must be the same when a run goes on."""
    return sum(ranks.whole(parameter.detach()).double().abs().sum().item() for parameter in model.parameters())


def is_whole(path: Path) -> bool:
    """Whether every file of a checkpoint is there as it was written."""
    try:
        files = json.loads((path / "files.json").read_text())
        return all(_size_and_checksum(path / name) == value for name, value in files.items())
    except (OSError, ValueError):
        return False


def restore(folder: Path, cfg, prompts: int, optimizer, history, greso, reference) -> dict:
    """trainer.pt, put where it belongs; returns it. InputError if model or data are not those of the run."""
    state = torch.load(folder / "trainer.pt", map_location="cpu", weights_only=True)
    if reference and not math.isclose(fingerprint(reference), state["reference"], rel_tol=1e-6):
        raise InputError(f"--model {cfg.model} is not what the run in {cfg.out_dir} began with: --beta needs it")
    if not torch.equal(state["history"]["kind"], history.kind):
        raise InputError(
            f"--data {cfg.data}: {prompts} prompts, but the run in {cfg.out_dir} was started with "
            f"{len(state['history']['kind'])}, or with others: give it the data it had, or use another --out-dir"
        )
    ranks.load_optimizer(optimizer, state["optimizer"])
    vars(history).update(state["history"])
    if greso:
        vars(greso).update(state["greso"])
    return state


def find(out_dir: Path) -> Path | None:
    """The newest whole checkpoint, or None where there is none at all; says which ones are not whole."""
    paths = _numbered(out_dir)[::-1]
    found = next((path for path in paths if is_whole(path)), None)
    for path in itertools.takewhile(lambda path: path != found, paths):
        print(f"{path} is not whole, its files are not what was written: "
              + (f"going on from {found.name}" if found else "there is no other"))  # fmt: skip
    if found:
        _link(out_dir, found)
    elif paths:
        raise InputError(f"--resume: {out_dir} has no whole checkpoint: remove the folder to start anew")
    elif (out_dir / "checkpoint").exists():
        raise InputError(f"--resume: {out_dir / 'checkpoint'} is not of this version: use another --out-dir")
    return found


def read_rows(path: Path) -> list[dict]:
    """The rows of a JSONL file; a half-written last line is none, nor is anything in a file that is not there."""
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]] if path.exists() else []


def cut_rows(path: Path, keep) -> list[dict]:
    """Drop the rows of a JSONL file of which keep(row) is false, and a half-written last line; returns the others."""
    rows = [row for row in read_rows(path) if keep(row)]
    if path.exists():
        write_rows(path, rows)
    return rows


def write_rows(path: Path, rows: list[dict]) -> None:
    """A JSONL file of these rows, all at once: a kill leaves the old one or the new one."""
    path.with_suffix(".new").unlink(missing_ok=True)
    append_rows(path.with_suffix(".new"), rows)
    path.with_suffix(".new").replace(path)


def append_rows(path: Path, rows: list[dict]) -> None:
    """Append rows to a JSONL file, on disk when this returns."""
    with no_loss_if_full(path), open(path, "a") as file:
        file.writelines(as_json(row) + "\n" for row in rows)
        file.flush()
        os.fsync(file.fileno())


def as_json(row: dict) -> str:
    """One line; NaN and infinities become null, in lists as well."""

    def plain(value):
        if isinstance(value, list):
            return [plain(part) for part in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return json.dumps({key: plain(value) for key, value in row.items()})


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
