"""
What a run leaves on disk, written so that a kill at any moment damages nothing.

    config.json          every resolved value, the program, versions
    log.jsonl            one row a step, on disk before the step's checkpoint
    samples.jsonl        a few completions a step, with reward, advantage and keep decision
    checkpoint-000020/   after step 20: a Hugging Face folder, trainer.pt (optimizer, prompt
                         history, step) and files.json (the sizes of the files)
    checkpoint           a link to the newest, where the file system has links
    lock                 held by the process that writes all this

There is no random state to save: all randomness is a function of (seed, step, purpose).
"""

import contextlib
import datetime
import fcntl
import functools
import json
import os
import re
import shutil
import sys
from pathlib import Path

import torch
import transformers

from runtime import InputError, log, ranks

NUMBERED = re.compile(r"checkpoint-\d{6,}")
# What a folder may hold: a setting in its config.json that only this kind has.
KINDS = {"a training run": "method", "an evaluation": "weights", "a supervised start": "batch_size"}


@contextlib.contextmanager
def owned(folder: str | None):
    """Make a folder, and keep every other process from writing to it until the end. Only the first
    rank does it. None: there is no folder.

    The kernel frees the lock when the process ends, however it does. InputError if another process
    has it, or if the folder cannot be written. It is removed if nothing was written to it.
    """
    if folder is None or not ranks.is_first():
        yield
        return
    out_dir = Path(folder)
    path = out_dir / "lock"
    try:
        str(out_dir).encode()  # the library that saves tokenizers takes only names that are UTF-8
        out_dir.mkdir(parents=True, exist_ok=True)
        file = open(path, "a")  # noqa: SIM115  open as long as the lock is held
    except (OSError, UnicodeError) as error:
        raise InputError(f"--out-dir {out_dir} cannot be written: {error}") from None
    # A child that outlives this process must not hold the lock. To close twice does no harm.
    os.register_at_fork(after_in_child=file.close)
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(f"--out-dir {out_dir} is in use by another process") from None
        except OSError as error:  # some network file systems have no locks
            print(f"note: {path} cannot be locked ({error}): start only one process there")
        try:
            yield
        finally:
            with contextlib.suppress(OSError):  # somebody else removed it
                if {*out_dir.iterdir()} == {path}:
                    path.unlink()
                    out_dir.rmdir()


def save(
    out_dir: Path, model, weights: dict, tokenizer, state: dict, base=None, *, keep: int = 2
) -> None:
    """Write `weights` as a Hugging Face folder, and in it `state` (with its "step") as trainer.pt
    and `base`, what the run was trained beside (models.Models), as base.json.

    It is written under another name and renamed, so a kill leaves complete checkpoints only. The
    `keep` newest stay.
    """
    final = out_dir / f"checkpoint-{state['step']:06d}"
    unfinished = out_dir / "checkpoint.new"
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        model.save_pretrained(unfinished, state_dict=weights)
        getattr(tokenizer, "as_loaded", tokenizer).save_pretrained(unfinished)
        torch.save(state, unfinished / "trainer.pt")
        if base:
            (unfinished / "base.json").write_text(json.dumps(base) + "\n")
        follow_umask(unfinished)
        paths = [path for path in unfinished.rglob("*") if path.is_file()]
        sizes = {str(path.relative_to(unfinished)): path.stat().st_size for path in paths}
        (unfinished / "files.json").write_text(json.dumps(sizes, indent=1) + "\n")
        for path in [*paths, unfinished / "files.json"]:  # on disk before it gets the final name
            with open(path, "rb+") as file:
                os.fsync(file.fileno())
    except BaseException:  # such as a full disk, which the rest of it would keep full
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    shutil.rmtree(final, ignore_errors=True)  # a damaged one, if the run resumed from before
    unfinished.rename(final)
    _link(out_dir, final)
    paths = _numbered(out_dir)
    for path in paths[: paths.index(final) + 1][:-keep]:
        shutil.rmtree(path, ignore_errors=True)


def _numbered(out_dir):
    """The oldest first; not a user's checkpoint-best."""
    paths = [path for path in out_dir.glob("checkpoint-*") if NUMBERED.fullmatch(path.name)]
    return sorted(paths, key=lambda path: (len(path.name), path.name))


def newest(out_dir: Path) -> Path | None:
    """The link to the newest checkpoint, or its folder where there are no links; None if there is
    no checkpoint."""
    link = out_dir / "checkpoint"
    return link if link.is_dir() else next(iter(_numbered(out_dir)[::-1]), None)


def _link(out_dir, final):
    link, new = out_dir / "checkpoint", out_dir / "checkpoint.link"
    if not link.is_symlink():  # a real folder, if a copy followed the link
        shutil.rmtree(link, ignore_errors=True)
    try:
        new.unlink(missing_ok=True)
        new.symlink_to(final.name)
        new.replace(link)
    except OSError:  # Google Drive, exFAT and SMB have no links; one to an older checkpoint must go
        with contextlib.suppress(OSError):
            link.unlink(missing_ok=True)


def follow_umask(folder: Path) -> None:
    """Let whoever may read the tokenizer read the weights: safetensors gives them mode 600."""
    for path in folder.glob("*.safetensors"):
        path.chmod((folder / "tokenizer_config.json").stat().st_mode)


def is_complete(path: Path) -> bool:
    """Whether a checkpoint has all of its files, with their sizes. OSError if they cannot be read:
    then they are not damaged, and must not be replaced."""
    try:
        sizes = json.loads((path / "files.json").read_text())
        return all((path / name).stat().st_size == size for name, size in sizes.items())
    except (FileNotFoundError, ValueError, AttributeError):  # AttributeError: no dictionary
        return False


def find(out_dir: Path) -> Path | None:
    """The newest complete checkpoint, or None if there is none at all; reports damaged ones."""
    paths = _numbered(out_dir)[::-1]
    for path in paths:
        if is_complete(path):
            _link(out_dir, path)
            return path
        print(f"{path} is damaged: a file is missing, or has another size than was written")
    if paths:
        raise InputError(f"--resume: no checkpoint in {out_dir} is complete: use another --out-dir")
    return None


def load_state(folder: Path) -> dict:
    """The state that `save` was given, on the CPU."""
    return torch.load(folder / "trainer.pt", map_location="cpu", weights_only=True)


def stored_config(folder: Path, kind: str = "a training run") -> dict:
    """The settings in config.json of a folder. InputError if it is not of this kind."""
    path = folder / "config.json"
    stored = log.read_json(path) if path.exists() else {}
    settings = stored.get("config", stored)
    if KINDS[kind] not in settings:
        raise InputError(f"{folder} does not hold {kind}: give another folder")
    return settings


def first_date(out_dir: str | None) -> str:
    """The day on which the run or the evaluation in a folder began: today if it begins now."""
    path = Path(out_dir or "") / "config.json"
    stored = log.read_json(path) if out_dir and path.exists() else {}
    return stored.get("date") or str(datetime.date.today())


def name_of(thing) -> str:
    """module.name of a class or of something that can be called. What a program defines is in
    __main__, so it gets the name of the program's file instead."""
    while isinstance(thing, functools.partial):
        thing = thing.func
    thing = thing if hasattr(thing, "__qualname__") else type(thing)
    main = getattr(sys.modules["__main__"], "__file__", None) or "__main__"
    module = Path(main).stem if thing.__module__ == "__main__" else thing.__module__
    return f"{module}.{thing.__qualname__}"


def check_parts(folder: Path, parts: dict) -> None:
    """InputError if the run in a folder has another trainer or reward than `parts` names."""
    stored = log.read_json(folder / "config.json")
    for part, now in parts.items():
        then = stored.get("parts", {}).get(part)
        if now != then:
            raise InputError(
                f"--resume: the run in {folder} has the {part} {then}, not {now}: resume it with "
                f"the program that started it, {stored.get('program')}"
            )


def write_config(out_dir: Path, config: dict, ranks: int, date: str | None, parts=None) -> None:
    """config.json: every resolved value, the program, its parts, the date of the prompts, and the
    versions."""
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    written = {
        "config": config, "program": sys.argv[0], "parts": parts or {}, "date": date,
        "versions": {"python": sys.version.split()[0], **versions},
        "ranks": ranks, "threads": torch.get_num_threads(),
    }  # fmt: skip
    log.write_text(out_dir / "config.json", json.dumps(written, indent=2) + "\n")
