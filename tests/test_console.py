"""A console that cannot be written, or that lacks characters, is no reason to stop. What a run
says."""

import importlib
import io
import math
import os
import sys
import types
from unittest import mock

import pytest
import toy
from toy import ROOT, flags, in_processes, rows

import train
from runtime import checkpoint, console, plot


def closed(args):
    """train.py ARGS. Python has None for what is closed when it starts."""
    sys.stdout = sys.stderr = None
    train.cli(toy.toy_reward, args=args)


def unread(args):
    """train.py ARGS into a pipe that nobody reads any more, as after `| head`."""
    reader, writer = os.pipe()
    os.close(reader)
    os.dup2(writer, 1)
    os.dup2(writer, 2)
    train.cli(toy.toy_reward, args=args)


@pytest.mark.parametrize("console", [closed, unread])
def test_a_run_goes_on_without_its_console(policy_folder, tmp_path, console):
    """Catches a run that ends at a line that it cannot print, and the error with which Python ends
    if it cannot flush stdout."""
    args = flags(policy_folder, str(tmp_path / "run"), steps=2, save_every=2)
    in_processes(1, console, args)
    assert [row["step"] for row in rows(tmp_path / "run")] == [1, 2]
    assert checkpoint.is_complete(tmp_path / "run" / "checkpoint-000002")


def in_ascii(args):
    sys.stdout.reconfigure(encoding="ascii", errors="strict")
    train.cli(toy.toy_reward, args=args)


def test_characters_that_the_console_lacks(policy_folder, tmp_path):
    """Catches a run that ends because its folder has a name that is not ASCII."""
    args = flags(policy_folder, str(tmp_path / "größe-√2"), steps=1)
    (said,) = in_processes(1, in_ascii, args)
    assert r"gr\xf6\xdfe-\u221a2/log.jsonl" in said


def test_a_run_without_matplotlib(run, pictures, monkeypatch, capsys):
    """As with the MPLBACKEND of a notebook. Catches an import that ends train.py or eval.py before
    it starts."""
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    importlib.reload(plot)
    assert len(run("run", steps=1)) == 1
    assert "note: run.png could not be drawn" in capsys.readouterr().out


def test_a_console_that_is_the_result(monkeypatch):
    """eval.py's: characters are escaped, and `| head` is no error, but a full disk is one, because
    the table is all that there is."""
    said = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", said)
    console.result()
    print("√2", flush=True)
    assert said.buffer.getvalue() == b"\\u221a2\n"
    write = mock.Mock(side_effect=[BrokenPipeError, None, OSError("full")])
    monkeypatch.setattr(sys, "stdout", types.SimpleNamespace(write=write))
    console.result()
    print("x")
    with pytest.raises(OSError, match="full"):
        print("x")


# ---------------------------------------------------------------------------- of a training run

CFG = types.SimpleNamespace(steps=20, prompts_per_step=4, group_size=6)
ROW = {
    "reward": 0.25, "kept/completions": 1 / 24, "weight/max": 12.5, "entropy": math.nan,
    "entropy/trained": 0.5, "grad_norm": 0.0321, "time/rollout": 1.0, "time/train": 2.0,
    "cost/sampled": 1500, "cost/kept": 300, "step_time": 3.4,
}  # fmt: skip
SAMPLES = [{"prompt": "1+1?\n", "completion": "1+1=2", "reward": 1.0}, {"prompt": "never said"}]
SAMPLE = "'1+1?\\n' -> '1+1=2': reward 1.000"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "step  2/20 | reward 0.250 | kept  1/24 | w_max  12.5 | entropy 0.5"),
        ({"reward": math.nan}, "reward - |"),
        ({"eval/avg@4": 0.5}, "| held-out avg@4 0.500\n    a completion: " + SAMPLE),
    ],
)
def test_the_line_of_a_step(changes, said):
    """Catches a share that rounds to 0.00, and a nan."""
    assert said in console.lines(ROW | {"step": 2} | changes, SAMPLES, CFG)


def test_what_a_run_came_to():
    """Of all steps of its log, in which null stands for NaN; `rest` without the first one, which
    warms up. Catches a sum of the last step alone, an estimate that only counts what was kept, and
    a division by 0."""
    seconds = {"time/rollout": 1.0, "time/train": 2.0, "step_time": 3.5}
    rows = [
        {"step": 0, "eval/avg@4": 0.25},
        ROW | {"step": 1},
        *(ROW | {"step": step, "eval/avg@4": None} | seconds for step in (2, 3)),
    ]
    said = console.summary(rows).splitlines()
    assert said[0].startswith(
        "held-out avg@4 from 0.250 to -; 4,500 tokens of prompts and completions"
    )
    assert said[0].endswith("900 (20 %) trained on; 10 s of steps")
    assert said[1] == (
        "updates took 6 s; on every completion they would take about 30 s (an estimate). Rollouts "
        "were 29% of a step"
    )
    elsewhere = "without pruning, 13% of a step would not be training"  # 1.5 s over 10 s + 1.5 s
    assert said[2].startswith(f"rest is 0.15: {elsewhere}. Updates dominate")
    assert console.summary([]).startswith("0 tokens of prompts and completions, 0 (- %)")


def test_advice():
    """Catches other limits than those of the README's table."""
    table = (ROOT / "README.md").read_text()
    assert "`rest` below 0.5" in table
    assert "`rest` above 2" in table
    said = [console.advice(rest).split(",")[0] for rest in (0.49, 0.51, 1.99, 2.01)]
    assert said[0] != said[1] == said[2] != said[3]
