"""
What a run leaves on disk, written so that a kill at any moment damages nothing.

    config.json          every resolved value, versions, commit
    log.jsonl            one row a step, on disk before the step's checkpoint
    samples.jsonl        a few completions a step, with reward, advantage and keep decision
    checkpoint-000020/   after step 20: a Hugging Face folder, trainer.pt (optimizer, prompt
                         history, step) and files.json (size and checksum of each file)
    checkpoint           a link to the newest
    lock                 held by the process that writes all this

There is no random state to save: all randomness is a function of (seed, step, purpose).
"""

import contextlib
import datetime
import fcntl
import itertools
import json
import os
import shutil
import socket
import subprocess
import sys
import zlib
from pathlib import Path

import torch
import torch.distributed as dist
import transformers
from safetensors import SafetensorError

from runtime import InputError, log, ranks


@contextlib.contextmanager
def owned(folder: str | None):
    """Make a folder, and keep every other process from writing to it until the end. Only the first
    rank does it. None: there is no folder.

    The kernel frees the lock when the process ends, however it does. InputError if another process
    has it, or if the folder cannot be written. A new folder is removed again if nothing was
    written to it.
    """
    if folder is None or not ranks.is_first():
        yield
        return
    out_dir = Path(folder)
    new = [place for place in (out_dir, *out_dir.parents) if not place.exists()]
    path = out_dir / "lock"
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
        file = open(path, "a+")  # noqa: SIM115  open as long as the lock is held
    except OSError as error:
        reason = error.strerror or error
        problem = f"--out-dir {out_dir} cannot be written ({reason})"
        raise InputError(f"{problem}: choose another folder") from None
    # A child that outlives this process must not hold the lock. To close twice does no harm.
    os.register_at_fork(after_in_child=file.close)
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise InputError(
                f"--out-dir {out_dir} is in use by {file.read() or 'another process'}: wait for it "
                f"to end, or choose another folder"
            ) from None
        except OSError as error:  # some network file systems have no locks
            print(f"note: {path} cannot be locked ({error}): start only one process there")
        with contextlib.suppress(OSError):  # a full disk
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}")
            file.flush()
        try:
            yield
        finally:
            with contextlib.suppress(OSError):  # others are in it, or somebody removed it
                if {*out_dir.iterdir()} == {path}:
                    path.unlink()
                for place in new:
                    place.rmdir()


def save(out_dir: Path, model, weights: dict, tokenizer, state: dict, *, keep: int) -> None:
    """Write `weights` as a Hugging Face folder, and in it `state` (with its "step") as trainer.pt.

    It is written under another name and renamed, so a kill leaves complete checkpoints only. The
    `keep` newest stay.
    """
    final = out_dir / f"checkpoint-{state['step']:06d}"
    unfinished = out_dir / "checkpoint.new"
    shutil.rmtree(unfinished, ignore_errors=True)
    with log.nothing_lost_if_full(unfinished, (OSError, RuntimeError, SafetensorError)):
        model.save_pretrained(unfinished, state_dict=weights)
        try:
            getattr(tokenizer, "as_loaded", tokenizer).save_pretrained(unfinished)
        except Exception as error:  # the library tokenizers raises plain Exception
            raise OSError(str(error)) from error
        torch.save(state, unfinished / "trainer.pt")
        paths = [path for path in unfinished.rglob("*") if path.is_file()]
        files = {str(path.relative_to(unfinished)): _size_and_checksum(path) for path in paths}
        (unfinished / "files.json").write_text(json.dumps(files, indent=1) + "\n")
        for path in [*paths, unfinished / "files.json"]:  # on disk before it gets the final name
            with open(path, "rb+") as file:
                os.fsync(file.fileno())
        shutil.rmtree(final, ignore_errors=True)  # a damaged one, if the run resumed from before
        unfinished.rename(final)
        _link(out_dir, final)
    until_now = [path for path in _numbered(out_dir) if path <= final]
    for path in until_now[:-keep]:
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


def fingerprint(model) -> int:
    """A number that identifies the weights: the sum of their bits, read as integers, which does not
    depend on the order of the sum."""
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    total = 0
    for parameter in model.parameters():
        weights = parameter.detach().contiguous()
        total += weights.view(integers[weights.itemsize]).sum(dtype=torch.int64).item()
    return total


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
        instead = f"resuming from {found.name}" if found else "no older one is complete"
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
    if holds_run:
        stored_config(folder)  # InputError if it is no run of training
    has_steps = any(row["step"] > 0 for row in log.read_rows(folder / "log.jsonl"))
    if (has_steps or _numbered(folder)) and not cfg.resume:
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
        "fingerprint": trainer.fingerprint,
        "trainer": trainer.state(),
    }
    weights = ranks.weights(trainer.model)
    if trainer.is_main:
        folder, keep = Path(cfg.out_dir), cfg.keep_checkpoints
        save(folder, trainer.model, weights, trainer.tokenizer, state, keep=keep)


def restore(trainer) -> int:
    """Give a train.Trainer what its checkpoint holds besides the weights; returns the step.

    InputError if the run began with another model, or with other problems. Their files may have
    moved: only their contents count.
    """
    cfg = trainer.cfg
    state = load_state(trainer.saved)
    saved, of_run = state["trainer"], f"the run in {cfg.out_dir}"
    if not isinstance(saved.get("content", {}).get("train"), str):
        raise InputError(f"--resume: {of_run} is from an older version: use another --out-dir")
    if saved.keys() != trainer.state().keys():
        raise InputError(
            f"--resume: another program than this one trained {of_run}: resume it with the command "
            f"that started it"
        )
    if trainer.fingerprint not in (None, state["fingerprint"]):
        raise InputError(
            f"--model {cfg.model} is not the model that {of_run} began with: name that one, or use "
            f"another --out-dir"
        )
    trainer.fingerprint = state["fingerprint"]
    _compare_content(trainer.content, saved["content"], of_run)
    ranks.load_optimizer(trainer.optimizer, state["optimizer"])
    trainer.load_state(saved)
    return state["step"]


def _compare_content(now: dict, before: dict, of_run: str) -> None:
    """InputError if a run continues with other problems than it began with. If one
    side is empty (a run without evaluation), nothing is compared, and `now` gets the other's."""
    for use, flag in (("train", "--data"), ("evaluate", "--eval-data")):
        now[use], before[use] = now[use] or before[use], before[use] or now[use]
        if now[use] != before[use]:
            raise InputError(
                f"{flag}: the problems to {use} on have other prompts or reference answers than "
                f"when {of_run} began: give it the data that it had, or use another --out-dir"
            )


def stored_config(out_dir: Path) -> dict:
    """The settings of the latest start of the run in a folder. InputError if it holds no run."""
    path = out_dir / "config.json"
    stored = log.read_json(path)
    if "config" not in stored:
        raise InputError(f"--out-dir {out_dir} holds an evaluation ({path}): use another folder")
    return stored["config"]


def stored_ranks(out_dir: Path) -> int:
    """The number of ranks of the run's last start."""
    return log.read_json(out_dir / "config.json")["ranks"]


def first_date(out_dir: str | None) -> str:
    """The day on which the run or the evaluation in a folder began: today if it begins now."""
    path = Path(out_dir or "") / "config.json"
    stored = log.read_json(path) if out_dir and path.exists() else {}
    return stored.get("date") or str(datetime.date.today())


def write_config(out_dir: Path, config: dict, ranks: int, date: str | None) -> None:
    """config.json: every resolved value, the date of the prompts, the versions, and the commit."""

    def git(*args):
        try:
            command = ["git", "-C", str(Path(__file__).parent), *args]
            answer = subprocess.run(command, capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError):  # no git, or no checkout
            return None
        return answer.stdout.strip()

    written = {
        "config": config,
        "date": date,
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
    log.write_text(out_dir / "config.json", json.dumps(written, indent=2) + "\n")
