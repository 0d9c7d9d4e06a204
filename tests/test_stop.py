"""Stopping a run loses nothing: signals at any moment, a dead rank, a full disk."""

import collections
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from toy import assert_same, flags, rows, timeless

import checkpoint
import config
import log
import rollout
import stop
import train
import update

ROOT = Path(__file__).resolve().parents[1]
TOY = str(ROOT / "tests" / "toy.py")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
ONE_THREAD = os.environ | {"OMP_NUM_THREADS": "1"}
COMMON = {"steps": 5, "save_every": 3, "eval_every": 2, "eval_problems": 3, "lr": 3e-3}
MOMENTS = (
    (rollout._Record, "take"), (update, "_logprobs"), (torch.optim.AdamW, "step"), (log, "row"),
    (train.evaluation, "decode"), (checkpoint, "append_rows"), (checkpoint, "save"), (checkpoint.os, "fsync"),
)  # fmt: skip


@pytest.mark.parametrize(
    "changes",
    [{"method": "pps"}, {"method": "greso"}, {"method": "dppo", "minibatches": 2, "epochs": 2, "engine": "hf"}],
    ids=["pps", "greso", "updates"],
)
def test_stopped_anywhere(run, policy_folder, tmp_path, monkeypatch, capsys, changes):
    """SIGTERM within the n-th call of whatever a run calls; then again at a later one; then to the end: log, samples
    and weights of a run that was never stopped. Kills: half a step in the log, memory of a step that was given up, an
    evaluation that is lost, a stop between two updates of a step, a stop that is not heard."""
    calls, moment = collections.Counter(), None

    def count(name, real):
        def counted(*words, **options):
            calls[name] += 1
            if moment == (name, calls[name]) and signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:  # not in the setup
                os.kill(os.getpid(), signal.SIGTERM)
            return real(*words, **options)

        return counted

    def next_moment():
        calls.clear()
        name = rng.choice(MOMENTS)[1]
        return name, rng.randint(1, total[name])

    for owner, name in MOMENTS:
        monkeypatch.setattr(owner, name, count(name, getattr(owner, name)))
    run("whole", **COMMON, **changes)
    total, rng, stops = calls.copy(), random.Random(str(changes)), 0
    for number in range(5):
        moment = next_moment()
        folder = tmp_path / f"part{number}"
        train.main(config.parse_config(flags(policy_folder, str(folder), **COMMON, **changes)))
        for _ in range(2):
            said = re.findall(r"stopped after step (\d+); go on with: (.*)\n", capsys.readouterr().out)
            log_rows = rows(folder) if (folder / "log.jsonl").exists() else [{"step": 0}]
            if said:
                stops += 1
                command = f"python {shlex.quote(sys.argv[0])} --resume --out-dir {folder}"
                assert said == [(str(log_rows[-1]["step"]), command)]
                assert (folder / "checkpoint").exists() == (said[0][0] != "0")
            moment = next_moment()
            train.main(config.parse_config(["--out-dir", str(folder), "--resume"]))
        moment = None
        train.main(config.parse_config(["--out-dir", str(folder), "--resume"]))
        assert "done: " in capsys.readouterr().out
        assert_same(timeless(tmp_path / "whole"), timeless(folder))
    assert stops >= 4


def test_a_step_is_finished_once_it_has_changed_the_weights(run, tmp_path, monkeypatch, capsys):
    """SIGTERM in the second of step 2's four updates. Kills: half a step in the checkpoint of the one before."""
    calls, step = [], torch.optim.AdamW.step

    def counted(*words, **options):
        calls.append(1)
        if len(calls) == 6:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(*words, **options)

    monkeypatch.setattr(torch.optim.AdamW, "step", counted)
    log_rows = run("run", steps=5, save_every=3, minibatches=2, epochs=2)
    assert len(calls) == 8
    assert "stopped after step 2" in capsys.readouterr().out
    assert [row["step"] for row in log_rows] == [1, 2]
    assert (tmp_path / "run" / "checkpoint").resolve().name == "checkpoint-000002"


def test_the_second_signal_does_not_cut_the_save(run, tmp_path, monkeypatch, capsys):
    """A cluster that tells torchrun and the ranks. Kills: a save when the handlers are gone."""
    fsync = os.fsync

    def signalled(*words):
        os.kill(os.getpid(), signal.SIGTERM)
        return fsync(*words)

    stop_after = lambda *words, **options: os.kill(os.getpid(), signal.SIGTERM) or row(*words, **options)
    row = log.row
    monkeypatch.setattr(log, "row", stop_after)
    monkeypatch.setattr(checkpoint.os, "fsync", signalled)
    run("run", steps=5, save_every=0)
    assert "stopped after step 1" in capsys.readouterr().out
    assert checkpoint.is_whole(tmp_path / "run" / "checkpoint-000001")


def test_what_may_be_cut():
    """Nothing while a step has to be finished; the second Ctrl-C is Python's own. Kills: a handler that stays."""
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    asked = stop.Stop()
    with asked.listening():
        asked.held = True
        assert asked.unless_asked(lambda: os.kill(os.getpid(), signal.SIGINT) or "finished") == "finished"
        assert not asked.agreed()
        asked.held = False
        assert asked.unless_asked(lambda: "begun") is None
        assert asked.agreed()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before


def start(command, folder, wanted):
    """A run in a process of its own, once its log has that many rows."""
    process = subprocess.Popen(command, env=ONE_THREAD, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    path = folder / "log.jsonl"
    while process.poll() is None and not (path.exists() and len(path.read_text().splitlines()) >= wanted):
        time.sleep(0.005)
    return process


def test_a_program_exits_with_0(policy_folder, tmp_path):
    """SIGTERM in the middle of a rollout of minutes: out in 20 s. Kills: a stop that waits for the step's end."""
    words = flags(policy_folder, str(tmp_path / "run"), max_new_tokens=400, group_size=64, prompts_per_step=99)
    process = subprocess.Popen([sys.executable, TOY, *words], env=ONE_THREAD, stdout=subprocess.PIPE, text=True)
    while not (tmp_path / "run" / "config.json").exists():
        time.sleep(0.01)
    time.sleep(2)
    started = time.perf_counter()
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=60)
    assert time.perf_counter() - started < 20
    assert process.returncode == 0
    assert f"stopped after step 0; go on with: python {TOY} --resume --out-dir {tmp_path / 'run'}\n" in said


def test_two_ranks_killed_and_stopped(policy_folder, tmp_path):
    """kill -9 of one rank, then SIGTERM to torchrun, then to the end: the run that was never stopped. torchrun says 1
    for its own sake. Kills: a rank that waits for one that left, ranks that stop at different steps."""
    words = {
        name: [*TORCHRUN, TOY, *flags(policy_folder, str(tmp_path / name), **(COMMON | {"steps": 20}))]
        for name in ("whole", "broken")
    }
    subprocess.run(words["whole"], check=True, env=ONE_THREAD, timeout=200, capture_output=True)

    process = start(words["broken"], tmp_path / "broken", 6)
    child = next(
        int(pid) for pid in subprocess.run(
            ["pgrep", "-P", str(process.pid)], capture_output=True, text=True, check=True
        ).stdout.split()
    )  # fmt: skip
    os.kill(child, signal.SIGKILL)
    _, errors = process.communicate(timeout=100)
    assert process.returncode == 1
    assert "SIGKILL" in errors

    last = len(rows(tmp_path / "broken"))
    process = start([*words["broken"], "--resume"], tmp_path / "broken", last + 3)
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=100)
    assert process.returncode != 0, "torchrun's own status"
    assert re.search(r"stopped after step \d+; go on with: torchrun --nproc-per-node 2 \S+toy.py --resume", said)
    subprocess.run([*words["broken"], "--resume"], check=True, env=ONE_THREAD, timeout=200, capture_output=True)
    assert_same(timeless(tmp_path / "whole"), timeless(tmp_path / "broken"))


def test_full_disk(policy_folder, tmp_path):
    """A small disk that the second checkpoint does not fit on: one line, and with room again the run goes on to
    the end of one that was never short. Kills: a broken checkpoint with a whole one's name."""
    common = COMMON | {"eval_every": 0, "save_every": 1}
    subprocess.run(
        [sys.executable, TOY, *flags(policy_folder, str(tmp_path / "whole"), **common)],
        check=True, env=ONE_THREAD, timeout=100, capture_output=True,
    )  # fmt: skip
    one = sum(path.stat().st_size for path in (tmp_path / "whole" / "checkpoint").iterdir())
    disk = tmp_path / "disk"
    disk.mkdir()
    words = " ".join(flags(policy_folder, str(disk / "run"), **common))
    script = f"""mount -t tmpfs -o size={3 * one // 2} none {disk} || exit 77
        {sys.executable} {TOY} {words}; echo "status $?"; mount -o remount,size={9 * one} {disk}
        {sys.executable} {TOY} --resume --out-dir {disk}/run; echo "status $?"; cp -rL {disk}/run {tmp_path}/broken"""
    done = subprocess.run(
        ["unshare", "-Urm", "sh", "-c", script],
        env=ONE_THREAD,
        timeout=100,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode == 77 or "unshare" in done.stderr:
        pytest.skip("this machine lets no user mount a tmpfs")
    assert re.findall(r"status (\d+)", done.stdout) == ["1", "0"], done.stdout + done.stderr
    assert re.search(
        r"error: .*/run/checkpoint.new cannot be written \(.*\): what was saved before is whole", done.stderr
    )
    assert "Traceback" not in done.stderr
    assert_same(timeless(tmp_path / "whole"), timeless(tmp_path / "broken"))
