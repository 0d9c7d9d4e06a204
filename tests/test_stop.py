"""Stopping a run loses nothing: signals at many moments, a dead rank, a full disk."""

import os
import re
import shlex
import signal
import subprocess
import sys
import time
import types

import pytest
import torch
import toy
from toy import HANG, ROOT, assert_same, flags, in_processes, rows, timeless

import metrics
import rollout
from runtime import checkpoint, log, ranks
from runtime.stop import SIGNALS, TORCHRUN_SIGNALS, Stop, about_torchrun, resume_command

TOY = str(ROOT / "tests" / "toy.py")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
COMMON = {"steps": 5, "save_every": 3, "eval_every": 2, "eval_problems": 3, "lr": 3e-3}


def resume(folder):
    toy.main(["--out-dir", str(folder), "--resume"])


# ---------------------------------------------------------------------------- signals


def signal_at(monkeypatch, owner, name, call, number):
    """Send this process the signal `number` at the n-th call of owner.name within the run."""
    real, calls, sent = getattr(owner, name), [], []

    def signalled(*args, **kwargs):
        if signal.getsignal(signal.SIGUSR1) != signal.SIG_DFL:  # the run listens
            calls.append(1)
        if len(calls) == call and not sent:
            sent.append(1)
            os.kill(os.getpid(), number)
        return real(*args, **kwargs)

    monkeypatch.setattr(owner, name, signalled)


@pytest.mark.parametrize(
    ("moment", "last"),
    [
        ((log, "append_rows", 1, signal.SIGTERM), 0),  # the evaluation before the first step
        ((rollout, "sample", 2, signal.SIGINT), 1),  # after that of the evaluation
        ((torch.optim.AdamW, "step", 3, signal.SIGUSR1), 2),  # of two updates a step
        ((metrics, "row", 5, signal.SIGHUP), 5),
    ],
    ids=["evaluation", "rollout", "update", "last step"],
)
def test_stopped_and_resumed(run, tmp_path, monkeypatch, capsys, moment, last):
    """A signal at this moment, then --resume: the step is finished, logged and saved, and the log,
    samples and weights are those of a run that was never stopped.

    Catches half a step in the log, a request that is ignored, and a stop that does not save.
    """
    options = COMMON | {"method": "pps", "minibatches": 2, "prompts_per_step": 8}
    run("whole", **options)
    capsys.readouterr()
    with monkeypatch.context() as patched:
        signal_at(patched, *moment)
        run("part", **options)
    folder, printed = tmp_path / "part", capsys.readouterr().out
    assert rows(folder)[-1]["step"] == last
    if last < 5:
        command = resume_command(str(folder))
        assert f"stopped after step {last}; resume with: {command}\n" in printed
        assert (folder / "checkpoint").exists() == (last > 0)
        resume(folder)
    assert_same(timeless(tmp_path / "whole"), timeless(folder))


@pytest.mark.parametrize("has_file", [True, False])
def test_the_command_that_resumes(monkeypatch, has_file):
    """Catches the name of a notebook's kernel."""
    main = types.ModuleType("__main__")
    if has_file:
        main.__file__ = "mine.py"
    monkeypatch.setitem(sys.modules, "__main__", main)
    monkeypatch.setattr(sys, "argv", ["mine.py", "--steps", "3"])
    expected = (
        "python mine.py --resume --out-dir 'an out'" if has_file else "the same command or cell"
    )
    assert resume_command("an out").startswith(expected)


def test_more_signals_do_not_interrupt_the_save(run, tmp_path, monkeypatch, capsys):
    """A scheduler sends USR1, then TERM; and a cluster may signal both torchrun and the ranks.

    Catches a save after the handlers are restored.
    """
    signal_at(monkeypatch, metrics, "row", 1, signal.SIGUSR1)
    signal_at(monkeypatch, os, "fsync", 5, signal.SIGTERM)
    run("run", steps=5, save_every=0)
    assert "stopped after step 1" in capsys.readouterr().out
    assert checkpoint.is_complete(tmp_path / "run" / "checkpoint-000001")


def test_until_and_resumed_is_the_whole_run(run, tmp_path, capsys):
    """A stop after step 3 of 6 changes nothing, neither does one at the end; schedules still end at
    step 6.

    Catches a schedule that ends with `until`, one step too many, and a lost last checkpoint.
    """
    common = {"lr_schedule": "cosine", "eval_every": 2, "eval_problems": 3}
    run("whole", until=6, steps=6, save_every=6, **common)
    assert "done: " in capsys.readouterr().out
    run("part", until=3, steps=6, save_every=2, **common)
    assert "stopped after step 3" in capsys.readouterr().out
    saved = sorted(path.name for path in (tmp_path / "part").glob("checkpoint-*"))
    assert saved == ["checkpoint-000002", "checkpoint-000003"]
    resume(tmp_path / "part")
    assert_same(timeless(tmp_path / "whole"), timeless(tmp_path / "part"))


def test_only_the_second_interrupt_ends_at_once():
    """A second signal other than Ctrl-C changes nothing, because schedulers send two.

    Catches a Ctrl-C that nobody can repeat, a scheduler's second signal that ends a run without a
    save, and handlers that stay after the run.
    """
    before = [signal.getsignal(number) for number in SIGNALS]
    for first in SIGNALS:
        stop = Stop()
        with stop.listening():
            os.kill(os.getpid(), first)
            assert stop.agreed()
            for other in set(SIGNALS) - {signal.SIGINT}:
                os.kill(os.getpid(), other)
            if first == signal.SIGINT:
                with pytest.raises(KeyboardInterrupt):
                    os.kill(os.getpid(), signal.SIGINT)
    assert [signal.getsignal(number) for number in SIGNALS] == before


def test_what_was_ignored_stays_ignored(monkeypatch):
    """Catches a run under nohup that ends when its terminal does."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        stop = Stop()
        with stop.listening():
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stop.agreed()
    finally:
        signal.signal(signal.SIGHUP, before)


def test_torchrun_must_be_told(monkeypatch):
    """The note names torchrun's limit and, if SIGUSR1 is missing, its list of signals. Catches a
    note without torchrun, and one that remains after it was told."""
    monkeypatch.delenv(TORCHRUN_SIGNALS, raising=False)
    monkeypatch.setenv("RANK", "0")
    assert about_torchrun() == ""
    monkeypatch.setenv(TORCHRUN_SIGNALS, "SIGTERM,SIGINT,SIGHUP,SIGQUIT")
    assert "--shutdown-timeout SECONDS" in about_torchrun()
    assert "--signals-to-handle SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1" in about_torchrun()
    monkeypatch.setenv(TORCHRUN_SIGNALS, "SIGTERM,SIGUSR1")
    assert "--shutdown-timeout SECONDS" in about_torchrun()
    assert "--signals-to-handle" not in about_torchrun()
    monkeypatch.delenv("RANK")
    assert about_torchrun() == "", "the variable was only exported"


def ask_the_second_rank():
    rank, _ = ranks.start("cpu")
    stop = Stop()
    stop.requested = rank == 1
    print(stop.agreed(), flush=True)


def test_a_request_on_one_rank_stops_all():
    """Catches a rank without a request that goes on, alone, to the next collective."""
    assert [text.split() for text in in_processes(2, ask_the_second_rank)] == [["True"], ["True"]]


# ---------------------------------------------------------------------------- programs


def wait_until(condition, process):
    """Wait until a program has come so far, or has ended."""
    deadline = time.monotonic() + HANG
    while process.poll() is None and not condition():
        if time.monotonic() > deadline:
            process.kill()
        time.sleep(0.005)


def start(command, folder, wanted):
    """A program, running, whose log in `folder` has at least `wanted` lines."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(command, text=True, **pipes)
    path = folder / "log.jsonl"
    wait_until(lambda: path.exists() and path.read_text().count("\n") >= wanted, process)
    return process


def test_two_ranks_killed_and_stopped(policy_folder, tmp_path):
    """kill -9 of one rank, then SIGTERM to torchrun, then to the end: the run that was never
    stopped. (torchrun's own exit status is 1.)

    The first two have no last step, so that they cannot end before they are stopped. Catches a rank
    that waits for one that has left, and ranks that stop at different steps.
    """
    endless = flags(policy_folder, str(tmp_path / "broken"), **(COMMON | {"steps": 10**6}))
    command = [*TORCHRUN, TOY, *endless]
    process = start(command, tmp_path / "broken", 6)
    children = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, check=True)
    os.kill(int(children.stdout.split()[0]), signal.SIGKILL)
    _, errors = process.communicate(timeout=HANG)
    assert process.returncode == 1
    assert "SIGKILL" in errors

    last = len(rows(tmp_path / "broken"))
    process = start([*command, "--resume"], tmp_path / "broken", last + 3)
    process.send_signal(signal.SIGTERM)
    printed, _ = process.communicate(timeout=HANG)
    assert process.returncode != 0, "torchrun's own status"
    line = r"stopped after step \d+; resume with: torchrun --nproc-per-node 2 \S+toy.py --resume"
    assert re.search(line, printed)

    steps = rows(tmp_path / "broken")[-1]["step"] + 3
    in_processes(2, toy.main, [*endless, "--resume", "--steps", str(steps)])
    whole = flags(policy_folder, str(tmp_path / "whole"), **(COMMON | {"steps": steps}))
    in_processes(2, toy.main, whole)
    assert_same(timeless(tmp_path / "whole"), timeless(tmp_path / "broken"))


FULL_DISK = """
import subprocess, sys
sys.path.insert(0, {tests!r})
import toy
try:
    toy.main({args!r})
except toy.InputError as problem:
    print("error:", problem)
subprocess.run(["mount", "-o", "remount,size={room}", {disk!r}], check=True)
toy.main(["--resume", "--out-dir", {disk!r} + "/run"])
"""


def test_full_disk(policy_folder, tmp_path):
    """The second checkpoint does not fit on the disk: one line says so. With more room the run is
    resumed, and ends like one that had room from the start.

    Catches a broken checkpoint under the name of a complete one.
    """
    common = COMMON | {"eval_every": 0, "save_every": 1}
    in_processes(1, toy.main, flags(policy_folder, str(tmp_path / "whole"), **common))
    one = sum(path.stat().st_size for path in (tmp_path / "whole" / "checkpoint").iterdir())
    disk = str(tmp_path / "disk")
    args = flags(policy_folder, f"{disk}/run", **common)
    tests = str(ROOT / "tests")
    program = FULL_DISK.format(tests=tests, args=args, disk=disk, room=9 * one)
    script = f"""mkdir {disk}; mount -t tmpfs -o size={3 * one // 2} none {disk} || exit 77
        {sys.executable} -c {shlex.quote(program)} || exit 1
        cp -rL {disk}/run {tmp_path}/broken"""
    command = ["unshare", "-Urm", "sh", "-c", script]
    options = {"capture_output": True, "text": True, "timeout": HANG}
    done = subprocess.run(command, check=False, **options)
    if done.returncode == 77 or "unshare" in done.stderr:
        pytest.skip("this machine lets no user mount a tmpfs")
    assert done.returncode == 0, done.stdout + done.stderr
    message = r"error: .*/run/checkpoint.new cannot be written \(.*\): everything saved before is "
    assert len(re.findall(message + "intact", done.stdout)) == 1
    assert_same(timeless(tmp_path / "whole"), timeless(tmp_path / "broken"))
