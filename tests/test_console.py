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
from matplotlib.figure import Figure
from toy import flags, in_processes, rows

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


def test_a_run_without_matplotlib(run, pictures, monkeypatch, capsys):
    """As with the MPLBACKEND of a notebook. Catches an import that ends train.py or eval.py before
    it starts."""
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    importlib.reload(plot)
    assert len(run("run", steps=1)) == 1
    assert "note: run.png could not be drawn" in capsys.readouterr().out


@pytest.mark.parametrize("block", [console.go_on, console.result])
def test_a_console_is_as_before(monkeypatch, block):
    """In the block, characters that it lacks are escaped. Catches a traceback for a folder with a
    name that is not ASCII, and a notebook whose stdout is wrapped once more by each run."""
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="replace")
    monkeypatch.setattr(sys, "stdout", stream)
    with block():
        print("√2")
    assert stream.buffer.getvalue() == b"\\u221a2\n"
    assert sys.stdout is stream
    assert stream.errors == "replace"


def test_a_console_that_is_the_result(monkeypatch):
    """eval.py's: `| head` is no error, but a full disk is one, because the table is all that there
    is."""
    write = mock.Mock(side_effect=[BrokenPipeError, None, OSError("full")])
    monkeypatch.setattr(sys, "stdout", types.SimpleNamespace(write=write))
    with console.result():
        print("x")
        with pytest.raises(OSError, match="full"):
            print("x")


# ---------------------------------------------------------------------------- of a training run

CFG = types.SimpleNamespace(steps=20, prompts_per_step=4, group_size=6)
ROW = {
    "reward": 0.25, "kept/completions": 1 / 24, "weight/max": 12.5, "grad_norm": 0.0321,
    "time/rollout": 1.0, "time/train": 2.0,
    "cost/sampled": 1500, "cost/kept": 300, "step_time": 3.4, "frac_reward_zero_std": 0.5,
}  # fmt: skip
SAMPLE = {"prompt": "1+1?\n", "completion": "1+1=2", "reward": 1.0, "answer": "2", "kept": False}
WRONG = {"completion": "3", "reward": 0.25, "kept": True, "weight": 2.5}
NONE = {"reward": math.nan}  # it cannot be scored


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "step  2/20 | reward 0.250 | kept  1/24 | w_max  12.5 | gnorm 0.032 | rollout"),
        ({"reward": math.nan}, "reward - |"),
        ({"eval/avg@4": 0.5}, "| held-out avg@4 0.500\n    a completion: '1+1?\\n' -> '3': reward "
         "0.250, kept with weight 2.5; the reference answer is '2'"),
    ],
)  # fmt: skip
def test_the_line_of_a_step(changes, said):
    """And of its samples the worst. Catches a nan."""
    samples = [SAMPLE | NONE, SAMPLE, SAMPLE | WRONG]
    assert said in console.lines(ROW | {"step": 2} | changes, samples, CFG)
    assert "-> '1+1=2': reward 1.000, dropped" in console.example(samples[:2])


def test_what_a_run_came_to():
    """Of all steps of its log, in which null stands for NaN; `rest` without the first one, which
    warms up. Catches a sum of the last step alone, an estimate that only counts what was kept, a
    division by 0, and the accuracy of one reward compared with that of another."""
    seconds = {"time/rollout": 1.0, "time/train": 2.0, "step_time": 3.5}
    scores = {"eval/avg@4": None, "eval/accuracy": 0.5}
    rows = [
        {"step": 0, "eval/avg@4": 0.25, "eval/accuracy": 0.125},
        ROW | {"step": 1},
        *(ROW | {"step": step} | scores | seconds for step in (2, 3)),
    ]
    assert console.summary(rows).splitlines() == [
        "held-out avg@4 from 0.250 to -; held-out accuracy from 0.125 to 0.500; 4,500 tokens of "
        "prompts and completions, 900 (20 %) trained on; 10 s of steps",
        "updates took 6 s; on every completion they would take about 30 s (an estimate)",
        # 1.5 s over 10 s, and 10 s of 11.5 s
        'rest 0.15: without pruning, updates would be 87 % of a step (README.md, "Does it pay")',
    ]
    assert console.summary([]).startswith("0 tokens of prompts and completions, 0 (- %)")


def test_two_runs_in_one_picture(run, pictures, tmp_path, capsys):
    """Catches a second run that is drawn like the first, and a name that is read as mathematics."""
    run("one", steps=2, method="pps", eval_every=1, eval_problems=1)
    run("two", steps=1, method="grpo")
    settings = tmp_path / "two" / "config.json"
    settings.write_text(settings.read_text().replace('"method": "grpo"', '"method": "q$_{w$3"'))
    plot.main(str(tmp_path / "one"), str(tmp_path / "two"))
    (rows, _), axis = plot.read_run(tmp_path / "one"), Figure().subplots()
    assert (tmp_path / "one" / "compare.png").stat().st_size > 10_000
    assert rows[-1]["train on all"] > rows[-1]["time/train"]
    assert rows[-1]["seconds of steps"] == rows[1]["step_time"] + rows[2]["step_time"]
    plot.draw_panel(axis, [rows, rows[:]], "step", "reward", {"reward": "train"})
    assert [line.get_linestyle() for line in axis.lines] == ["-", "--"]
    with pytest.raises(SystemExit):
        plot.main(str(tmp_path))
    assert f"{tmp_path} not drawn (FileNotFoundError" in capsys.readouterr().err
