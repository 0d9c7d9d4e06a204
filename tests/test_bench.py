"""The records of a bench, and `bench speed` from its command line to its rows."""

import json
import runpy
import sys

import pytest

import bench
from bench import __main__ as command_line
from bench import peers, speed
from runtime import InputError


def test_a_record_says_who_made_it(tmp_path):
    """Fails if a record lacks commit, machine or date."""
    bench.write_json(tmp_path / "table.json", {"rows": [1]})
    record = json.loads((tmp_path / "table.json").read_text())
    assert all(record[name] for name in ("rows", "commit", "machine", "date"))


def test_speed(policy_folder, tmp_path, capsys):
    """Catches a command that train.py has outgrown, log-probs of another model, and a part that is
    not timed."""
    flags = f"--model {policy_folder} --prompts-per-step 4 --group-size 4 --max-new-tokens 6"
    file = str(tmp_path / "rows.json")
    command_line.main(["speed", "--rounds", "1", f"--flags={flags}", "--json", file])
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [row["part"] for row in rows] == ["rollout"] * 4 + ["update"] * 2
    assert all(row["tokens_per_s"] > 0 for row in rows)
    assert rows[0]["ratio"] == rows[4]["ratio"] == 1
    lines = capsys.readouterr().out.splitlines()
    gaps = [float(line.split()[-1]) for line in lines if "by" in line]
    assert len(gaps) == len(speed.ENGINES)
    assert max(gaps) < 1e-4


def test_turns(monkeypatch):
    """Two variants of 10 tokens that take 1 and 2 s, then 3 and 2, after a round that warms up.
    Catches a first round that counts, and a ratio of medians where the median of pairs belongs."""
    times = iter([0, 9, 0, 9, 0, 1, 0, 2, 0, 3, 0, 2, 0, 1, 0, 4])  # started, ended
    monkeypatch.setattr(speed, "clock", lambda _device: next(times))
    first, second = speed.in_turns("part", dict.fromkeys(("a", "b"), lambda: 10), 3, "cpu")
    assert (first["tokens_per_s"], first["ratio"]) == (10, 1)
    assert second["tokens_per_s"] == 5
    assert (second["ratio"], second["ratio_low"], second["ratio_high"]) == (0.5, 0.25, 1.5)


def test_several_processes_are_refused(monkeypatch):
    """Catches rows of a race that are written by each rank of torchrun."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InputError, match="bench is one process, not 2: start it without torchrun"):
        command_line.main(["ceiling", "nowhere"])


def test_a_bench_without_matplotlib(monkeypatch):
    """As with the MPLBACKEND of a notebook. Catches an import that ends ceiling and race."""
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    runpy.run_path("bench/results.py")


def test_the_clock_of_peers_stands_still_while_it_evaluates(monkeypatch):
    """Ten steps of 3 seconds each, then an evaluation of 100 seconds, twice. Catches seconds of an
    evaluation, and a run that is evaluated after every step."""
    now = 50.0
    monkeypatch.setattr(peers.time, "process_time", lambda: now)

    class Judge:
        def accuracy(self, *_purpose):
            nonlocal now
            now += 100
            return 0.5

    watch = peers.Watch()
    for step in range(21):
        watch.see(step, Judge())
        now += 3
    assert watch.curve == ([10, 0.5, 30.0], [20, 0.5, 60.0])
