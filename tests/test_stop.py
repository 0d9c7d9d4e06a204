"""Stopping a run loses nothing: signals at many moments, a rank that fails."""

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
import train
from runtime import checkpoint, log
from runtime.stop import SIGNALS, Stop
from tasks import arithmetic

TOY = str(ROOT / "tests" / "toy.py")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
SAVED = {0: (), 1: (1,), 2: (1, 2), 3: (2, 3), 5: (4, 5)}  # after each step: the newest two
COMMON = {"steps": 5, "save_every": 3, "eval_every": 2, "eval_problems": 3, "lr": 3e-3}


# ---------------------------------------------------------------------------- signals


@pytest.fixture(autouse=True)
def in_the_foreground():
    """A shell ignores Ctrl-C for what it starts in the background, such as `pytest &`."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


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


MOMENTS = [  # of a run that is resumed after each, and the last step that has ended
    ((log, "append_rows", 1, signal.SIGTERM), 0),  # the evaluation before the first step
    ((rollout, "sample", 2, signal.SIGINT), 1),  # after that of the evaluation
    ((torch.optim.AdamW, "step", 1, signal.SIGUSR1), 2),  # of two updates a step
    (None, 3),  # `until`, as if by a signal
    ((metrics, "row", 2, signal.SIGHUP), 5),
]


def test_stopped_and_resumed(run, tmp_path, monkeypatch, capsys):
    """A signal at each of these moments, then --resume: the step is finished, logged and saved, and
    the run is the one that never stopped. Catches half a step in the log, a schedule that ends with
    `until`, scores of prompts that are lost, and a KL reference from the checkpoint."""
    monkeypatch.setattr(arithmetic, "TRAIN_PROBLEMS", 12)  # epochs end within a step
    options = COMMON | {"method": "pps", "minibatches": 2, "prompts_per_step": 8, "loss": "dapo"}
    options |= {"prompt_rule": "uniform", "lr_schedule": "cosine", "save_every": 2, "beta": 0.1}
    folder = tmp_path / "part"
    for moment, last in MOMENTS:
        with monkeypatch.context() as patched:
            if moment:
                signal_at(patched, *moment)
            run("part", until=None if moment else last, resume=True, **options)
        assert rows(folder)[-1]["step"] == last
        saved = sorted(path.name for path in folder.glob("checkpoint-*"))
        assert saved == [f"checkpoint-00000{step}" for step in SAVED[last]]
        again = f"python {sys.argv[0]} --resume --out-dir {folder}"
        said = f"stopped after step {last}; to continue: {again}\n"
        assert (said in capsys.readouterr().out) == (last < 5)
    assert run("whole", **options)[-1]["kl"] > 1e-4
    assert_same(timeless(tmp_path / "whole"), timeless(folder))


def test_more_signals_do_not_interrupt_the_save(run, tmp_path, monkeypatch, capsys):
    """A scheduler sends USR1, then TERM. Catches a save after the handlers are restored."""
    signal_at(monkeypatch, metrics, "row", 1, signal.SIGUSR1)
    signal_at(monkeypatch, os, "fsync", 5, signal.SIGTERM)
    run("run", steps=5, save_every=0)
    assert "stopped after step 1" in capsys.readouterr().out
    assert checkpoint.is_complete(tmp_path / "run" / "checkpoint-000001")


def test_only_the_second_interrupt_ends_at_once():
    """Catches a Ctrl-C that nobody can repeat, a scheduler's second signal that ends a run without
    a save, handlers that stay after the run, and a run under nohup that ends with its terminal."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        for first in SIGNALS:
            stop = Stop()
            with stop.listening():
                signal.raise_signal(first)
                assert stop.agreed() == (first != signal.SIGHUP)
                for other in set(SIGNALS) - {signal.SIGINT}:
                    signal.raise_signal(other)
                if first == signal.SIGINT:
                    with pytest.raises(KeyboardInterrupt):
                        signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    finally:
        signal.signal(signal.SIGHUP, before)


# ---------------------------------------------------------------------------- programs


def unread(args):
    """train.py ARGS into a pipe that nobody reads any more, as after `| head`."""
    reader, writer = os.pipe()
    os.close(reader)
    os.dup2(writer, 1)
    os.dup2(writer, 2)
    train.cli(toy.toy_reward, args=args)


def test_a_run_goes_on_without_its_console(policy_folder, tmp_path):
    """Catches a run that ends at a line that it cannot print, and the error with which Python ends
    if it cannot flush stdout."""
    args = flags(policy_folder, str(tmp_path / "run"), steps=2, save_every=2)
    in_processes(1, unread, args)
    assert [row["step"] for row in rows(tmp_path / "run")] == [1, 2]
    assert checkpoint.is_complete(tmp_path / "run" / "checkpoint-000002")


def leave(args):
    """The second rank fails in step 5."""
    real = train.Trainer.step

    def fails(trainer, step):
        if trainer.rank == 1 and step == 5:
            raise ConnectionError("judge away")
        return real(trainer, step)

    train.Trainer.step = fails
    toy.main(args)


def test_two_ranks_broken_and_stopped(policy_folder, tmp_path):
    """One of two ranks fails, then torchrun gets SIGTERM, then the run goes to its end, and is the
    run that was never stopped. Catches a rank that waits for one that has left, finished steps that
    are lost with it, and ranks that stop at different steps."""
    folder = tmp_path / "broken"
    endless = flags(policy_folder, str(folder), **(COMMON | {"steps": 10**6}))
    _, second = in_processes(2, leave, endless, codes=[1, 1])
    assert "ConnectionError: judge away" in second
    assert rows(folder)[-1]["step"] == 4
    assert checkpoint.is_complete(folder / "checkpoint-000004")

    command = [*TORCHRUN, TOY, *endless, "--resume"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(command, text=True, **pipes)
    deadline = time.monotonic() + HANG
    while process.poll() is None and rows(folder)[-1]["step"] < 7:
        if time.monotonic() > deadline:
            process.kill()
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    printed, _ = process.communicate(timeout=HANG)
    assert process.returncode != 0, "torchrun's own status"
    assert re.search(r"stopped after step \d+; to continue: torchrun --nproc-per-node 2 ", printed)

    steps = rows(folder)[-1]["step"] + 3
    in_processes(2, toy.main, [*endless, "--resume", "--steps", str(steps)])
    whole = flags(policy_folder, str(tmp_path / "whole"), **(COMMON | {"steps": steps}))
    in_processes(2, toy.main, whole)
    assert_same(timeless(tmp_path / "whole"), timeless(folder))
