"""Every measurement that has no test elsewhere, from its command to its rows, at a size at which it takes seconds."""

import json
import re

import pytest

import bench
import dppo
import padding


def test_step(tmp_path):
    """Kills: a bench that train.py has outgrown, rows under another method's name."""
    bench.step(rounds=2, steps=2, skip=1, shape="tiny", new_tokens=4, methods=("grpo", "pps"), json_file=tmp_path / "a")
    rows = json.loads((tmp_path / "a").read_text())
    assert [(row["method"], row["round"]) for row in rows if row["part"] == "step_time"] == [
        ("grpo", 0), ("pps", 0), ("grpo", 1), ("pps", 1)
    ]  # fmt: skip
    trained = {(row["method"], row["round"]): row["median"] for row in rows if row["part"] == "tokens/trained"}
    assert trained["pps", 0] < 0.8 * trained["grpo", 0]
    sampled = [row["median"] for row in rows if row["part"] == "tokens/generated" and row["method"] == "grpo"]
    assert all(1000 < tokens <= 32 * 8 * 4 for tokens in sampled)


def test_check(small_runs, monkeypatch, tmp_path):
    """The twin has its fault, and nobody after it. Kills: a fault that is not planted, one that stays."""
    honest, real, told = dppo.ht_weights, dppo.check_unbiased, []
    monkeypatch.setattr(dppo, "check_unbiased", lambda *vectors: told.append(real(*vectors)) or told[-1])
    bench.check(steps=2, json_file=tmp_path / "rows.json")
    assert dppo.ht_weights is honest
    rows = json.loads((tmp_path / "rows.json").read_text())
    rules = ["grpo_zero", "dppo", "pps", "pps, weights x 0.9", "dppo_floor", "cppo"]
    assert [row["rule"] for row in rows[::3]] == rules
    scale = {row["rule"]: row["mean"] for row in rows if row["key"] == "check/scale"}
    assert abs(scale["grpo_zero"]) < 1e-6
    pps, twin = (1 + told[2 * rules.index(rule)]["check/scale"] for rule in ("pps", "pps, weights x 0.9"))
    assert twin == pytest.approx(0.81 * pps, rel=1e-4), "the first step's draws are the same"
    assert {row["checks"] for row in rows} == {2}


def test_check_sums_over_steps(small_runs, monkeypatch, tmp_path):
    """A step counts as its |full|. Kills: a mean of ratios, which steps with hardly a gradient decide."""
    found = iter(range(100))

    def told(*_vectors):
        number = next(found) % 2
        return {f"check/{key}": (9.0, 1.0)[number] for key in ("bias2", "variance", "scale")} | {
            "check/norm": (1.0, 7.0)[number]
        }

    monkeypatch.setattr(dppo, "check_unbiased", told)
    bench.check(steps=2, json_file=tmp_path / "rows.json")
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert {row["mean"] for row in rows} == {2.0}
    assert {row["error"] for row in rows} == {1.75}, "((7 x 1)^2 + (1 x 7)^2) x 2 / 1, its root over 8"


def test_prompts(capsys):
    """Kills: a bench that the history has outgrown."""
    bench.prompts(count=2000, candidates=64)
    shown = capsys.readouterr().out
    assert "2000 prompts, 64 candidates a step" in shown
    assert re.search(r"a step: median \d+\.\d ms", shown)
    assert re.search(r"history 0\.\d MB in memory", shown)


def test_update(monkeypatch, tmp_path):
    """Every layout has the first one's gradient, which the bench asserts. Kills: a layout that fell behind."""
    monkeypatch.setattr(padding, "head_rows", lambda _device: [])  # 16,384 tokens of Qwen3's vocabulary
    padding.main(shape="tiny", rounds=1, sequences=16, json_file=tmp_path / "rows.json")
    rows = json.loads((tmp_path / "rows.json").read_text())
    timed = {row["variant"] for row in rows if row["seconds"]}
    assert timed == {"padded, arrival", "padded, sorted", "packed", "packed, shared prompts", "packed, masked SDPA"}
