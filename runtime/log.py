"""
JSON-lines files that survive a kill, and the log that a run writes with them.

A row is on disk when `append_rows` returns. A half-written last line, which a kill may leave, is
never read. `write_rows` replaces the whole file at once.
"""

import contextlib
import importlib
import json
import math
import os
import uuid
from pathlib import Path

from runtime import InputError


def read_rows(path: Path) -> list[dict]:
    """The complete rows of a JSON-lines file; none if there is no file."""
    if not path.exists():
        return []
    lines = path.read_text(errors="replace").split("\n")[:-1]
    return [_parse(line, f"{path}, line {number}") for number, line in enumerate(lines, 1)]


def read_json(path: Path) -> dict:
    """The object in a small file of ours."""
    return _parse(path.read_text(errors="replace"), path)


def _parse(text: str, where) -> dict:
    with contextlib.suppress(ValueError):
        if isinstance(content := json.loads(text), dict):
            return content
    raise InputError(f"{where} is not what was written there: remove it, or use another folder")


def cut_rows(path: Path, keep) -> list[dict]:
    """Remove the rows for which keep(row) is false, and a half-written line; returns the rest."""
    rows = [row for row in read_rows(path) if keep(row)]
    if path.exists():
        write_rows(path, rows)
    return rows


def write_rows(path: Path, rows: list[dict]) -> None:
    """Replace a JSON-lines file."""
    write_text(path, "".join(as_json(row) + "\n" for row in rows))


def append_rows(path: Path, rows: list[dict]) -> None:
    """Append rows to a JSON-lines file. They are on disk when this returns."""
    with open(path, "a") as file:
        file.writelines(as_json(row) + "\n" for row in rows)
        file.flush()
        os.fsync(file.fileno())


def write_text(path: Path, text: str) -> None:
    """Replace a small file. A kill, or a full disk, leaves either the old file or the new one."""
    new = path.with_suffix(".new")
    with open(new, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)


def as_json(row: dict) -> str:
    """One line of JSON; NaN and infinities become null."""
    return json.dumps(json.loads(json.dumps(row), parse_constant=lambda _: None))


# ---------------------------------------------------------------------------- a run's log


class Log:
    """The log of a run: console, log.jsonl, the files beside it, and a tracker if there is one."""

    def __init__(self, out_dir: Path):
        self.out_dir = out_dir
        self.path = out_dir / "log.jsonl"
        self.tracker = None
        self.notes = set()  # that were printed

    def open(self, done: int) -> None:
        """Make the folder, and remove the rows of steps after `done`, which no checkpoint holds."""
        self.out_dir.mkdir(parents=True, exist_ok=True)
        lost = sum(row["step"] > done for row in read_rows(self.path))
        if lost:
            print(f"removing {lost} rows of log.jsonl, of steps that no checkpoint holds")
        for name in ("log", "samples", "groups"):
            cut_rows(self.out_dir / f"{name}.jsonl", lambda row: done > 0 and row["step"] <= done)

    def start_tracker(self, name: str, config: dict) -> None:
        """Import and initialise wandb, or a module with its init, log and finish, such as trackio.

        A resumed run continues the same run there. log.jsonl stays the record.
        """
        tracker = importlib.import_module(name)
        path = self.out_dir / "track-id"
        if not path.exists():
            write_text(path, f"{self.out_dir.name}-{uuid.uuid4().hex[:8]}")
        run = path.read_text()
        options = {"id": run} if name == "wandb" else {}  # the others identify a run by its name
        with self.only_noted(f"--track {name} cannot start, so the run is only in {self.path}"):
            tracker.init(project="nanodppo", name=run, config=config, resume="allow", **options)
            self.tracker = tracker

    def write(self, row: dict, others: dict[str, list[dict]], line: str) -> None:
        """Print the line of a step, store its row and those of other files, and send its finite
        numbers to the tracker."""
        print(line, flush=True)
        for name, rows in {"log": [row], **others}.items():
            append_rows(self.out_dir / f"{name}.jsonl", rows)
        if self.tracker:
            numbers = {k: v for k, v in row.items() if math.isfinite(v)}
            with self.only_noted(f"the tracker misses steps, which {self.path} has"):
                self.tracker.log(numbers, step=numbers.pop("step"))

    def note(self, text: str, why: str = "") -> None:
        """Print a note, once in a run."""
        if text not in self.notes:
            self.notes.add(text)
            print(f"note: {text}{why}")

    @contextlib.contextmanager
    def only_noted(self, consequence: str):
        """What fails here is only noted: a tracker out of reach, or a picture."""
        try:
            yield
        except Exception as error:
            self.note(consequence, f" ({type(error).__name__}: {error})")

    def close(self) -> None:
        """Draw run.png, and end the tracker's run."""
        if self.path.exists():  # not if the run was stopped before its first row
            again = f"python -m runtime.plot {self.out_dir}"
            with self.only_noted(f"run.png could not be drawn; to try again: {again}"):
                from runtime import plot

                plot.draw_run(self.out_dir)
        if self.tracker:
            with self.only_noted("the tracker did not end its run"):
                self.tracker.finish()
