"""A run that is killed again and again, and one that is not: `python -m bench kills`."""

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from safetensors.torch import load_file

from bench import JsonFile, write_json
from runtime import log
from tasks import arithmetic


def main(count: int = 20, steps: int = 90, seed: int = 0, json_file: JsonFile = None) -> None:
    """Kill a run of the embedded task at random moments, resume it each time, and compare it with
    one that was left alone.

    Args:
        count: kills
        steps: steps of the run, which saves every third
        seed: of the moments, 3 to 13 s after Python starts; the first step takes some 5 s
        json_file: where to write the rows {killed, after_s, logged, resumed_from}
    """
    arithmetic.base_folder()
    rng, rows = random.Random(seed), []
    with tempfile.TemporaryDirectory() as folder:
        whole, killed = Path(folder, "whole"), Path(folder, "killed")

        def command(out_dir, *more):
            args = ["--steps", str(steps), "--save-every", "3", "--eval-every", "10"]
            args += ["--eval-problems", "60", "--method", "pps", "--out-dir", str(out_dir)]
            return [sys.executable, "train.py", *args, *more]

        fixed = {"stdout": subprocess.DEVNULL, "env": os.environ | {"OMP_NUM_THREADS": "1"}}
        subprocess.run(command(whole), check=True, **fixed)
        while sum(row["killed"] for row in rows) < count:
            before = sorted(killed.glob("checkpoint-*"))
            process = subprocess.Popen(command(killed, *resume(killed)), **fixed)
            wait = rng.uniform(3, 13)
            try:
                process.wait(wait)
            except subprocess.TimeoutExpired:
                process.kill()
            was_killed = process.wait() == -signal.SIGKILL
            if not was_killed:
                check(process, killed, steps)
            steps_logged = [row["step"] for row in log.read_rows(killed / "log.jsonl")]
            row = {
                "killed": was_killed,
                "after_s": wait,
                "logged": steps_logged[-1] if steps_logged else 0,
                "resumed_from": int(before[-1].name[-6:]) if before else 0,
            }
            rows.append(row)
            print(json.dumps(row), flush=True)
            if not was_killed:  # it has ended: the next kills are of another run
                compare(whole, killed, steps)
                killed = Path(folder, f"killed{len(rows)}")
        if killed.exists():
            process = subprocess.run(command(killed, *resume(killed)), check=False, **fixed)
            check(process, killed, steps)
            compare(whole, killed, steps)
    print(f"{count} kills: logs, samples and weights equal the uninterrupted run's")
    write_json(json_file, rows)


def resume(folder: Path) -> list[str]:
    """The flag with which a run goes on, if it was not killed before it had begun."""
    return ["--resume"] if (folder / "config.json").exists() else []


def check(process, folder: Path, steps: int) -> None:
    """CalledProcessError if a run failed. If it had ended before a kill, --resume is refused."""
    if process.returncode and not (folder / f"checkpoint-{steps:06d}").exists():
        raise subprocess.CalledProcessError(process.returncode, process.args)


def compare(one: Path, other: Path, steps: int) -> None:
    """AssertionError unless two runs have the same log (except times), samples and weights."""
    for name in ("log.jsonl", "samples.jsonl"):
        logs = [[_without_times(row) for row in log.read_rows(run / name)] for run in (one, other)]
        assert logs[0] == logs[1], name
        assert logs[0][-1]["step"] == steps
    weights = [load_file(run / "checkpoint" / "model.safetensors") for run in (one, other)]
    assert all(weights[0][name].equal(weights[1][name]) for name in weights[0])


def _without_times(row: dict) -> dict:
    return {key: row[key] for key in row if not key.startswith(("time/", "step_time"))}
