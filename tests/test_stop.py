"""Stopping a run loses nothing: signals at any moment, a dead rank, a full disk."""

import collections
import copy
import itertools
import os
import random
import re
import resource
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import toy
from toy import HANG, ROOT, assert_same, flags, in_processes, rows, timeless, toy_reward
from transformers.models.qwen3.modeling_qwen3 import Qwen3Model

import config
import dppo
import metrics
import rewards
import rollout
import train
from runtime import checkpoint, log, ranks
from runtime.stop import Stop, Stopped

TOY = str(ROOT / "tests" / "toy.py")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
COMMON = {"steps": 5, "save_every": 3, "eval_every": 2, "eval_problems": 3, "lr": 3e-3}
MOMENTS = (
    (Qwen3Model, "forward"), (rollout._Record, "take"), (dppo, "token_loss"),
    (torch.optim.AdamW, "step"), (metrics, "row"), (rewards, "decode"), (log, "append_rows"),
    (checkpoint, "save"), (os, "fsync"),
)  # fmt: skip


def resume(folder):
    toy.main(["--out-dir", str(folder), "--resume"])


# ---------------------------------------------------------------------------- signals


@pytest.mark.parametrize(
    "changes",
    [{"method": "pps"}, {"method": "greso"}, {"minibatches": 2, "epochs": 2, "engine": "hf"}],
    ids=["pps", "greso", "updates"],
)
def test_stopped_anywhere(run, policy_folder, tmp_path, monkeypatch, capsys, changes):
    """SIGTERM within the n-th call of a function, again at a later one, then to the end: the log,
    samples and weights of a run that was never stopped.

    Catches half a step in the log, state of an abandoned step, a lost evaluation, a stop between
    two updates of a step, and a request that is ignored.
    """
    calls, moment = collections.Counter(), None

    def counted(name, real):
        def call(*args, **kwargs):
            calls[name] += 1
            listening = signal.getsignal(signal.SIGTERM) != signal.SIG_DFL  # not during set-up
            if moment == (name, calls[name]) and listening:
                os.kill(os.getpid(), signal.SIGTERM)
            return real(*args, **kwargs)

        return call

    def next_moment():
        calls.clear()
        name = next(names)
        return name, rng.randint(1, total[name])

    for owner, name in MOMENTS:
        monkeypatch.setattr(owner, name, counted(name, getattr(owner, name)))
    run("whole", **COMMON, **changes)
    total, rng, stops = calls.copy(), random.Random(f"{changes} 1"), 0
    names = itertools.cycle(rng.sample([name for _, name in MOMENTS], len(MOMENTS)))
    for number in range(5):
        moment = next_moment()
        folder = tmp_path / f"part{number}"
        toy.main(flags(policy_folder, str(folder), **COMMON, **changes))
        for again in (True, True, False):
            printed = capsys.readouterr().out
            found = re.findall(r"stopped after step (\d+); resume with: (.*)\n", printed)
            if found:
                stops += 1
                last = rows(folder)[-1]["step"] if (folder / "log.jsonl").exists() else 0
                command = f"python {shlex.quote(sys.argv[0])} --resume --out-dir {folder}"
                assert found == [(str(last), command)]
                assert (folder / "checkpoint").exists() == (last > 0)
                moment = next_moment() if again else None
                resume(folder)
            else:
                assert "done: " in printed
                break
        assert_same(timeless(tmp_path / "whole"), timeless(folder))
    assert stops >= 4


def test_a_stop_inside_a_reward(run, capsys):
    """SIGTERM while a reward computes is not the error of a reward that fails."""
    calls = itertools.count()

    def reward(text, gold):
        if next(calls) == 30:  # of 24 in a step
            os.kill(os.getpid(), signal.SIGTERM)
        return toy_reward(text, gold)

    run("run", reward=reward, method="grpo", steps=4)
    assert "stopped after step 1;" in capsys.readouterr().out


def test_a_step_is_finished_once_it_has_changed_the_weights(run, tmp_path, monkeypatch, capsys):
    """SIGTERM in the second of step 2's four updates.

    Catches half a step in the checkpoint of the step before.
    """
    calls, step = [], torch.optim.AdamW.step

    def counted(*args, **kwargs):
        calls.append(1)
        if len(calls) == 6:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(*args, **kwargs)

    monkeypatch.setattr(torch.optim.AdamW, "step", counted)
    log_rows = run("run", steps=5, save_every=3, minibatches=2, epochs=2)
    assert len(calls) == 8
    assert "stopped after step 2" in capsys.readouterr().out
    assert [row["step"] for row in log_rows] == [1, 2]
    assert (tmp_path / "run" / "checkpoint").resolve().name == "checkpoint-000002"


def test_the_second_signal_does_not_interrupt_the_save(run, tmp_path, monkeypatch, capsys):
    """A cluster may signal both torchrun and the ranks.

    Catches a save after the handlers are restored.
    """
    fsync, row = os.fsync, metrics.row

    def signalled(work):
        return lambda *args: os.kill(os.getpid(), signal.SIGTERM) or work(*args)

    monkeypatch.setattr(metrics, "row", signalled(row))
    monkeypatch.setattr(os, "fsync", signalled(fsync))
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


def test_a_stopped_step_changes_nothing_that_is_saved(policy_folder, tmp_path, monkeypatch):
    """A request in the middle of a step of greso, after its rollouts.

    Catches streaks or a cursor that move with the rollouts, so that the resumed run skips prompts.
    """

    class Interrupted(train.Trainer):
        def backward(self, *args):
            self.stop.requested = self.interrupts
            return super().backward(*args)

    args = flags(policy_folder, str(tmp_path / "run"), method="greso", group_size=2)
    trainer = Interrupted(config.parse_config(args), toy_reward)

    def state():
        parts = (vars(trainer.selector), vars(trainer.history), trainer.model.state_dict())
        return copy.deepcopy(parts)

    trainer.interrupts = False
    trainer.step(1)
    trainer.stop.held = False
    before = state()
    trainer.interrupts = True
    with pytest.raises(Stopped):
        trainer.step(2)
    torch.testing.assert_close(state(), before, rtol=0, atol=0, equal_nan=True)
    trainer.interrupts = trainer.stop.requested = False
    trainer.step(2)
    assert trainer.selector.cursor > before[0]["cursor"] > 0


# ---------------------------------------------------------------------------- Stop.run


class Counted(Stop):
    """Counts how often the ranks would have compared their requests."""

    compared = 0

    def agree(self):
        self.compared += 1
        return super().agree()


@pytest.mark.parametrize("collective", [False, True])
def test_a_signal_at_any_line_of_run(collective):
    """SIGTERM before each line of Stop.run and of its work, and before they return: the ranks
    compare their requests exactly once, and the request counts then or the next time.

    Fails if a signal after the work's return skips the comparison, for which other ranks wait, if
    collective work is interrupted, or if a request is lost.
    """
    outcomes = collections.Counter()
    for moment in itertools.count():
        stop, done, left = Counted(), [], itertools.count(-moment)

        def work(done=done):
            done.append("first half")
            done.append("second half")
            return "result"

        def trace(frame, event, _arg, codes=(Stop.run.__code__, work.__code__), left=left):
            if frame.f_code in codes and event in ("line", "return") and next(left) == 0:
                os.kill(os.getpid(), signal.SIGTERM)
            return trace

        with stop.listening():
            sys.settrace(trace)
            try:
                outcome = stop.run(work, collective=collective)
            except Stopped:
                outcome = "stopped"
            finally:
                sys.settrace(None)
            assert stop.compared == 1
            if not stop.requested:
                break  # no moment is left
            assert (outcome == "stopped") == stop.agreed
            assert len(done) == 2 or (outcome == "stopped" and not collective)
            assert stop.agree()
            os.kill(os.getpid(), signal.SIGTERM)  # raises nothing outside of `run`
        outcomes[outcome, len(done)] += 1
    assert outcomes["result", 2] > 0
    assert outcomes["stopped", 2] > 0
    assert (outcomes["stopped", 0] > 0) == (outcomes["stopped", 1] > 0) == (not collective)


def test_what_is_interrupted():
    """Nothing while a step must be finished; the second Ctrl-C is Python's own.

    Catches handlers that stay after the run.
    """
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = [signal.getsignal(number) for number in numbers]
    stop, begun = Stop(), []
    with stop.listening():
        stop.held = True
        signalled = lambda: os.kill(os.getpid(), signal.SIGINT) or "finished"
        assert stop.run(signalled) == "finished"
        assert not stop.agree()
        stop.held = False
        with pytest.raises(Stopped):
            stop.run(begun.append, 1)
        assert not begun
        assert stop.agree()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert [signal.getsignal(number) for number in numbers] == before


def signal_one_rank():
    """On two ranks, of which only the second gets a signal, within its work."""
    rank, _ = ranks.start("cpu")
    for collective in (False, True):
        stop, done = Stop(), []

        def work(done=done):
            if rank == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            done.append("finished")

        with stop.listening():
            try:
                stop.run(work, collective=collective)
            except Stopped:
                print(*done, "stopped,", stop.requested, flush=True)


def test_a_request_on_one_rank_stops_all():
    """Fails if a rank without a request goes on, alone, to the next collective."""
    first, second = in_processes(2, signal_one_rank)
    assert first.splitlines() == ["finished stopped, False"] * 2
    assert second.splitlines() == ["stopped, True", "finished stopped, True"]


# ---------------------------------------------------------------------------- programs


def wait_until(condition, process):
    """Wait until a program has come so far, or has ended."""
    deadline = time.monotonic() + HANG
    while process.poll() is None and not condition():
        if time.monotonic() > deadline:
            process.kill()
        time.sleep(0.005)


def cpu_seconds(pid):
    """CPU time of a running process, which does not depend on what else the machine does."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


def test_a_program_exits_with_0(policy_folder, tmp_path):
    """SIGTERM in the middle of a rollout of minutes: the program ends within 20 s of CPU time.

    Catches a stop that waits for the end of the step.
    """
    sizes = {"max_new_tokens": 400, "group_size": 64, "prompts_per_step": 99}
    command = [sys.executable, TOY, *flags(policy_folder, str(tmp_path / "run"), **sizes)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    wait_until((tmp_path / "run" / "config.json").exists, process)
    begun = cpu_seconds(process.pid)
    wait_until(lambda: cpu_seconds(process.pid) > begun + 2, process)
    limit = int(cpu_seconds(process.pid)) + 20
    resource.prlimit(process.pid, resource.RLIMIT_CPU, (limit, limit))  # the kernel's kill beyond
    process.send_signal(signal.SIGTERM)
    printed, _ = process.communicate(timeout=HANG)
    assert process.returncode == 0
    command = f"python {TOY} --resume --out-dir {tmp_path / 'run'}"
    assert f"stopped after step 0; resume with: {command}\n" in printed


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
