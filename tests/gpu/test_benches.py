"""Every bench that computes on the device, from its command line, at a size that takes seconds."""

import json

import pytest
import torch

import packing
from bench import __main__ as command_line
from bench import check, replay, shapes, update, variance


@pytest.fixture
def command(tmp_path, kernel):
    """Run a command line, and return the content of its --json."""

    def go(line):
        kernel("torch")
        command_line.main([*line.split(), "--json", str(tmp_path / "rows.json")])
        return json.loads((tmp_path / "rows.json").read_text())

    return go


def test_step(small_runs, command):
    """Catches a part that is not measured on a GPU."""
    rows = command("step --rounds 1 --steps 2 --skip 1 --methods grpo pps")
    assert {row["method"] for row in rows} == {"grpo", "pps"}
    assert all(row["median"] > 0 for row in rows if row["part"].startswith("memory"))
    assert sum(row["part"] == "memory/peak_gib" for row in rows) == 2


def test_step_of_random_weights(command, monkeypatch):
    """With gradient checkpointing. Catches a shape that does not reach the device."""
    monkeypatch.setitem(shapes.SHAPES, "tiny", (32, 48, 2, 4, 2, 8, 512))
    rows = command("step --shape tiny --rounds 1 --steps 1 --skip 0 --methods grpo --new-tokens 4")
    found = {row["part"]: row["median"] for row in rows}
    assert found["tokens/generated"] <= 32 * 8 * 4


def test_rollout(command, monkeypatch):
    """Catches random weights that stay on the CPU, and log-probs of another row."""
    monkeypatch.setitem(shapes.SHAPES, "tiny", (32, 48, 2, 4, 2, 8, 512))
    rows = command("rollout --rounds 1 --batches 16 --shape tiny --new-tokens 4")
    assert [(row["engine"], row["tokens"]) for row in rows[:2]] == [("hf", 64), ("compact", 64)]
    assert all(row["max_logprob_gap"] < 0.1 for row in rows)


def test_update(command, monkeypatch):
    """The bench asserts that every layout has the same gradient. Catches a padded layout with a
    tensor on the wrong device."""
    monkeypatch.setattr(update, "head_rows", lambda _device: [])
    monkeypatch.setitem(shapes.SHAPES, "tiny", (32, 48, 2, 4, 2, 8, 512))
    rows = command("update --shape tiny --rounds 1 --sequences 16 --pack-tokens 512")
    timed = [row for row in rows if row["seconds"]]
    assert len(timed) == 5
    assert all(row["peak_gib"] > 0 and row["tokens_per_s"] > 0 for row in timed)


def test_head():
    """Chunks take less memory than all logits at once. Catches a measurement on the CPU, and the
    peak of what ran before."""
    torch.ones(2**28, device="cuda")
    _, whole = update.measure_head(256, 2**62, "cuda")
    _, chunked = update.measure_head(256, packing.HEAD_LOGITS // 128, "cuda")
    assert 0 < chunked < whole / 2


def test_check(small_runs, command, monkeypatch):
    """Catches a full and a pruned gradient on two devices."""
    monkeypatch.setattr(check, "RUNS", check.RUNS[2:5])
    rows = command("check --steps 2 --every 1 --draws 8")
    assert {row["checks"] for row in rows} == {2}


@pytest.mark.parametrize("level", ["completion", "prompt"])
def test_variance(small_runs, command, monkeypatch, level):
    """Catches gradients of the device that meet the CPU's keep decisions."""
    monkeypatch.setattr(replay, "SETTINGS", ("arithmetic",))
    monkeypatch.setattr(variance, "STAGES", {"early": 1})
    monkeypatch.setattr(replay, "LOSSES", ("grpo",))
    monkeypatch.setattr(replay, "EPOCHS", 1)
    monkeypatch.setattr(replay.arithmetic, "TRAIN_PROBLEMS", 64)
    found = command(f"variance --level {level} --seeds 0 --draws 50")
    assert len(found["rows"]) > 5
