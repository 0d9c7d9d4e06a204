"""A console that cannot be written, or that lacks characters, is no reason to stop."""

import contextlib
import io
import os
import pty
import subprocess
import sys

import pytest
import toy
from toy import HANG, ROOT, flags, in_processes, rows

import train
from runtime import checkpoint, console


def pipe_without_reader():
    reader, writer = os.pipe()
    os.close(reader)
    return writer


def closed_terminal():
    ours, theirs = pty.openpty()
    os.close(ours)
    return theirs


def full_disk():
    return os.open("/dev/full", os.O_WRONLY)


def with_console(opened, args):
    """train.py ARGS whose stdout and stderr lead to what `opened` returns. Python has None for what
    is closed when it starts."""
    sys.stdout = sys.stderr = opened and os.fdopen(opened(), "w")
    print("of a program before it calls us")
    train.cli(toy.toy_reward, args=args)


@pytest.mark.parametrize("opened", [pipe_without_reader, closed_terminal, full_disk, None])
def test_a_run_goes_on_without_its_console(policy_folder, tmp_path, opened):
    """Catches a run that ends at a line that it cannot print."""
    args = flags(policy_folder, str(tmp_path / "run"), steps=2, save_every=2, eval_every=2)
    in_processes(1, with_console, opened, [*args, "--eval-problems", "2"])
    assert [row["step"] for row in rows(tmp_path / "run")] == [0, 1, 2]
    assert checkpoint.is_complete(tmp_path / "run" / "checkpoint-000002")


def test_head(policy_folder, tmp_path):
    """Catches status 120, with which Python ends if it cannot flush stdout."""
    writer = pipe_without_reader()
    command = [sys.executable, "train.py", *flags(policy_folder, str(tmp_path / "run"), steps=1)]
    done = subprocess.run(command, cwd=ROOT, stdout=writer, timeout=HANG, check=False)
    os.close(writer)
    assert done.returncode == 0
    assert len(rows(tmp_path / "run")) == 1


def in_ascii(args):
    sys.stdout.reconfigure(encoding="ascii", errors="strict")
    train.cli(toy.toy_reward, args=args)


def test_characters_that_the_console_lacks(policy_folder, tmp_path):
    """Catches a run that ends because its folder has a name that is not ASCII."""
    args = flags(policy_folder, str(tmp_path / "größe-√2"), steps=1)
    (said,) = in_processes(1, in_ascii, args)
    assert r"gr\xf6\xdfe-\u221a2/log.jsonl" in said


def test_a_console_that_is_the_result(monkeypatch):
    """eval.py's: characters are escaped, but a full disk is an error, because the table is all that
    there is."""
    with open("/dev/full", "w", encoding="ascii") as full:
        said = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
        monkeypatch.setattr(sys, "stdout", said)
        monkeypatch.setattr(sys, "stderr", full)
        console.escape()
        print("√2")
        said.flush()
        assert said.buffer.getvalue() == b"\\u221a2\n"
        with pytest.raises(OSError, match="No space left"):
            print("x", file=sys.stderr, flush=True)
        with contextlib.suppress(OSError):
            full.close()
