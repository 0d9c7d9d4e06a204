"""Stopping a run loses nothing: signals at many moments, a dead rank."""

import os
import re
import signal
import subprocess
import sys
import time

import pytest
import torch
import toy
from toy import HANG, ROOT, assert_same, flags, in_processes, rows, timeless

import metrics
import rollout
from runtime import checkpoint, log, ranks
from runtime.stop import SIGNALS, Stop
from tasks import arithmetic

TOY = str(ROOT / "tests" / "toy.py")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
SAVED = {0: (), 1: (1,), 2: (2,), 3: (2, 3), 5: (4, 5)}  # after each step: the newest two
COMMON = {"steps": 5, "save_every": 3, "eval_every": 2, "eval_problems": 3, "lr": 3e-3}


# ---------------------------------------------------------------------------- signals


def signal_at(monkeypatch, owner, name, call, number):
    """Send this process the signal `number` at the n-th call of owner.name within the run."""
    real, calls, sent = getattr(owner, name), [], []

    def signalled(*args, **kwargs):
        if signal.getsignal(signal.SIGUSR1) != signal.SIG_DFL:  # the run listens
            calls.append(1)
        if len(calls) == call and not sent:
            sent.append(1)
            signal.raise_signal(number)
        return real(*args, **kwargs)

    monkeypatch.setattr(owner, name, signalled)


@pytest.mark.parametrize(
    ("moment", "last"),
    [
        ((log, "append_rows", 1, signal.SIGTERM), 0),  # the evaluation before the first step
        ((rollout, "sample", 2, signal.SIGINT), 1),  # after that of the evaluation
        ((torch.optim.AdamW, "step", 3, signal.SIGUSR1), 2),  # of two updates a step
        ((metrics, "row", 5, signal.SIGHUP), 5),
        (None, 3),  # `until`, as if by a signal
    ],
    ids=["evaluation", "rollout", "update", "last step", "until"],
)
def test_stopped_and_resumed(run, ends_like_the_whole, tmp_path, monkeypatch, capsys, moment, last):
    """A signal at this moment, then --resume: the step is finished, logged and saved, and the run
    is the one that never stopped. Catches half a step in the log, a request that is ignored, a stop
    that does not save, a schedule that ends with `until`, and scores of prompts or a mean token
    count that are lost."""
    monkeypatch.setattr(arithmetic, "TRAIN_PROBLEMS", 12)  # epochs end within a step
    options = COMMON | {"method": "pps", "minibatches": 2, "prompts_per_step": 8, "loss": "dapo"}
    options |= {"prompt_rule": "uniform", "lr_schedule": "cosine", "save_every": 2}
    with monkeypatch.context() as patched:
        if moment:
            signal_at(patched, *moment)
        run("part", until=None if moment else last, **options)
    folder, printed = tmp_path / "part", capsys.readouterr().out
    assert rows(folder)[-1]["step"] == last
    saved = sorted(path.name for path in folder.glob("checkpoint-*"))
    assert saved == [f"checkpoint-00000{step}" for step in SAVED[last]]
    if last < 5:
        again = f"the same program with --resume --out-dir {folder}"
        assert f"stopped after step {last}; to continue: {again}\n" in printed
    ends_like_the_whole(**options)


def test_more_signals_do_not_interrupt_the_save(run, tmp_path, monkeypatch, capsys):
    """A scheduler sends USR1, then TERM. Catches a save after the handlers are restored."""
    signal_at(monkeypatch, metrics, "row", 1, signal.SIGUSR1)
    signal_at(monkeypatch, os, "fsync", 5, signal.SIGTERM)
    run("run", steps=5, save_every=0)
    assert "stopped after step 1" in capsys.readouterr().out
    assert checkpoint.is_complete(tmp_path / "run" / "checkpoint-000001")


def test_only_the_second_interrupt_ends_at_once():
    """A second signal other than Ctrl-C changes nothing, because schedulers send two. Catches a
    Ctrl-C that nobody can repeat, a scheduler's second signal that ends a run without a save, and
    handlers that stay after the run."""
    before = [signal.getsignal(number) for number in SIGNALS]
    heard = [number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN]  # nohup
    for first in heard:
        stop = Stop()
        with stop.listening():
            signal.raise_signal(first)
            assert stop.agreed()
            for other in set(SIGNALS) - {signal.SIGINT}:
                signal.raise_signal(other)
            if first == signal.SIGINT:
                with pytest.raises(KeyboardInterrupt):
                    signal.raise_signal(signal.SIGINT)
    assert [signal.getsignal(number) for number in SIGNALS] == before


def test_what_was_ignored_stays_ignored(monkeypatch):
    """Catches a run under nohup that ends when its terminal does."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        stop = Stop()
        with stop.listening():
            signal.raise_signal(signal.SIGHUP)
            assert not stop.agreed()
    finally:
        signal.signal(signal.SIGHUP, before)


def ask_the_second_rank():
    rank, _ = ranks.start("cpu")
    stop = Stop()
    stop.requested = rank == 1
    print(stop.agreed(), flush=True)


def test_a_request_on_one_rank_stops_all():
    """Catches a rank without a request that goes on, alone, to the next collective."""
    assert [text.split() for text in in_processes(2, ask_the_second_rank)] == [["True"], ["True"]]


# ---------------------------------------------------------------------------- programs


def start(command, folder, wanted):
    """A program, running, whose log in `folder` has at least `wanted` lines, or that has ended."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(command, text=True, **pipes)
    path, deadline = folder / "log.jsonl", time.monotonic() + HANG
    reached = lambda: path.exists() and path.read_text().count("\n") >= wanted
    while process.poll() is None and not reached():
        if time.monotonic() > deadline:
            process.kill()
        time.sleep(0.005)
    return process


def test_two_ranks_killed_and_stopped(policy_folder, tmp_path):
    """kill -9 of one rank, then SIGTERM to torchrun, then to the end: the run that was never
    stopped. (torchrun's own exit status is 1.) The first two have no last step, so that they cannot
    end before they are stopped. Catches a rank that waits for one that has left, and ranks that
    stop at different steps."""
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
    assert re.search(r"stopped after step \d+; to continue: the same program with --res", printed)

    steps = rows(tmp_path / "broken")[-1]["step"] + 3
    in_processes(2, toy.main, [*endless, "--resume", "--steps", str(steps)])
    whole = flags(policy_folder, str(tmp_path / "whole"), **(COMMON | {"steps": steps}))
    in_processes(2, toy.main, whole)
    assert_same(timeless(tmp_path / "whole"), timeless(tmp_path / "broken"))
