"""
What a run leaves on disk, written so that a kill at any moment loses nothing.

    config.json          every resolved value, versions, commit
    log.jsonl            one row a step, on disk before the step's checkpoint
    samples.jsonl        a few completions a step, with reward, advantage and keep decision
    checkpoint-000020/   after step 20: a Hugging Face folder, trainer.pt (optimizer, prompt
                         history, step) and files.json (size and checksum of each file)
    checkpoint           a link to the newest

There is no random state to save: all randomness is a function of (seed, step, purpose).
"""

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
import torch.distributed as dist
import transformers
from safetensors import SafetensorError

from runtime import InputError, log, ranks


def save(out_dir: Path, model, weights: dict, tokenizer, state: dict, *, keep: int) -> None:
    """Write a Hugging Face folder of `weights` and `state` (with its "step") as trainer.pt.

    It is written under another name and renamed, so a kill leaves complete checkpoints only. The
    `keep` newest stay.
    """
    final = out_dir / f"checkpoint-{state['step']:06d}"
    unfinished = out_dir / "checkpoint.new"
    shutil.rmtree(unfinished, ignore_errors=True)
    with log.nothing_lost_if_full(unfinished, (OSError, RuntimeError, SafetensorError)):
        model.save_pretrained(unfinished, state_dict=weights)
        tokenizer.save_pretrained(unfinished)
        torch.save(state, unfinished / "trainer.pt")
        files = {path.name: _size_and_checksum(path) for path in unfinished.iterdir()}
        (unfinished / "files.json").write_text(json.dumps(files, indent=1) + "\n")
        for path in unfinished.iterdir():  # on disk before it gets the final name
            with open(path, "rb+") as file:
                os.fsync(file.fileno())
        shutil.rmtree(final, ignore_errors=True)  # a damaged one, if the run went back beyond it
        unfinished.rename(final)
        _link(out_dir, final)
    paths = _numbered(out_dir)
    place = paths.index(final)
    damaged = paths[place + 1 :]  # later than this one, so the run has gone back beyond them
    for path in paths[: max(0, place + 1 - keep)] + damaged:
        shutil.rmtree(path, ignore_errors=True)


def _numbered(out_dir):
    return sorted(out_dir.glob("checkpoint-" + 6 * "[0-9]"))  # not a user's checkpoint-best


def _link(out_dir, final):
    if not (out_dir / "checkpoint").is_symlink():  # a real folder, if a copy followed the link
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


def fingerprint(model) -> float:
    """A number that identifies the weights: the KL term's reference must not change on resume."""
    parameters = (ranks.whole(parameter.detach()) for parameter in model.parameters())
    return sum(parameter.double().abs().sum().item() for parameter in parameters)


def is_complete(path: Path) -> bool:
    """Whether every file of a checkpoint has the size and checksum that were written."""
    try:
        files = json.loads((path / "files.json").read_text())
        return all(_size_and_checksum(path / name) == value for name, value in files.items())
    except (OSError, ValueError):
        return False


def find(out_dir: Path) -> Path | None:
    """The newest complete checkpoint, or None if there is none at all; reports damaged ones."""
    paths = _numbered(out_dir)[::-1]
    found = next((path for path in paths if is_complete(path)), None)
    for path in itertools.takewhile(lambda path: path != found, paths):
        instead = f"resuming from {found.name}" if found else "there is no other"
        print(f"{path} is damaged: its files are not what was written; {instead}")
    if found:
        _link(out_dir, found)
    elif paths:
        raise InputError(
            f"--resume: {out_dir} has no complete checkpoint: remove the folder to start over"
        )
    elif (out_dir / "checkpoint").exists():
        raise InputError(
            f"--resume: {out_dir / 'checkpoint'} is from another version: use another --out-dir"
        )
    return found


def load_state(folder: Path) -> dict:
    """The state that `save` was given, on the CPU."""
    return torch.load(folder / "trainer.pt", map_location="cpu", weights_only=True)


def look(cfg) -> Path | None:
    """The checkpoint that a run resumes from, if any. InputError if a run would be overwritten, if
    there is none to resume, or if --shard fsdp has no ranks to share the weights."""
    folder = Path(cfg.out_dir)
    holds_run = (folder / "config.json").exists()
    has_steps = any(row["step"] > 0 for row in log.read_rows(folder / "log.jsonl"))
    if holds_run and has_steps and not cfg.resume:
        raise InputError(
            f"--out-dir {cfg.out_dir} holds a run: give --resume to continue it, or another "
            f"--out-dir"
        )
    if cfg.resume and not holds_run:
        raise InputError(
            f"--resume: {cfg.out_dir} holds no run: give the --out-dir of a run, or leave --resume "
            f"out to start one there"
        )
    if cfg.shard == "fsdp" and not dist.is_initialized():
        raise InputError("--shard fsdp: no ranks share the weights; start train.py with torchrun")
    ranks.barrier()  # every rank has looked before rank 0 writes
    return ranks.broadcast(find, folder) if cfg.resume else None


def save_run(trainer, step: int) -> None:
    """A checkpoint of a train.Trainer after a step. All ranks contribute to that of a sharded
    model."""
    cfg = trainer.cfg
    if not trainer.is_main and cfg.shard == "none":
        return
    state = {
        "step": step,
        "optimizer": ranks.gather(trainer.optimizer.state_dict()),
        "reference": fingerprint(trainer.reference) if trainer.reference else None,
        "trainer": trainer.state(),
    }
    weights = ranks.weights(trainer.model)
    if trainer.is_main:
        folder, keep = Path(cfg.out_dir), cfg.keep_checkpoints
        save(folder, trainer.model, weights, trainer.tokenizer, state, keep=keep)


def restore(trainer) -> int:
    """Give a train.Trainer what its checkpoint holds besides the weights; returns the step."""
    cfg = trainer.cfg
    state = load_state(trainer.saved)
    if trainer.reference:
        found = fingerprint(trainer.reference)
        if not math.isclose(found, state["reference"], rel_tol=1e-6):
            raise InputError(
                f"--model {cfg.model} is not the model that the run in {cfg.out_dir} began with, "
                f"which --beta needs"
            )
    saved = state["trainer"]
    if saved.keys() != trainer.state().keys():
        raise InputError(
            f"--resume: another program than this one trained the run in {cfg.out_dir}: resume it "
            f"with the command that started it"
        )
    if saved["prompts"] != trainer.state()["prompts"]:
        before = len(saved["history"]["score"])
        raise InputError(
            f"--data {cfg.data}: {len(trainer.train_set)} prompts, but the run in {cfg.out_dir} "
            f"was started with {before}, or with others: give it the data it had, or use another "
            f"--out-dir"
        )
    ranks.load_optimizer(trainer.optimizer, state["optimizer"])
    trainer.load_state(saved)
    return state["step"]


def stored_ranks(out_dir: Path) -> int:
    """The number of ranks of the run's last start."""
    return json.loads((out_dir / "config.json").read_text())["ranks"]


def write_config(out_dir: Path, config: dict, ranks: int) -> None:
    """config.json: every resolved value, the versions, and the commit."""

    def git(*args):
        try:
            command = ["git", "-C", str(Path(__file__).parent), *args]
            answer = subprocess.run(command, capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError):  # no git, or no checkout
            return None
        return answer.stdout.strip()

    written = {
        "config": config,
        "versions": {
            "python": sys.version.split()[0],
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "ranks": ranks,
        "threads": torch.get_num_threads(),
        "commit": git("rev-parse", "HEAD"),
        "changed_files": (git("status", "--porcelain", "--untracked-files=no") or "").splitlines(),
    }
    (out_dir / "config.new").write_text(json.dumps(written, indent=2) + "\n")
    (out_dir / "config.new").replace(out_dir / "config.json")
