"""Every bench that computes on the device, from its command line, at a size that takes seconds."""

import json

import pretend_cuda
import pytest
import torch

import packing
from bench import __main__ as command_line
from bench import replay, shapes, variance

COMMANDS = {
    "step": "step --shape tiny --rounds 1 --steps 2 --skip 1 --methods grpo pps --new-tokens 4",
    "rollout": "rollout --shape tiny --rounds 1 --batches 16 --new-tokens 4",
    "update": "update --shape tiny --rounds 1 --sequences 16 --pack-tokens 512",
    "check": "check --steps 2 --every 1 --draws 4 --methods pps",
    "completions": "variance --seeds 0 --draws 50",
    "prompts": "variance --level prompt --seeds 0 --draws 50",
}
FIGURE = {  # of every row, a number
    "step": "median",
    "rollout": "tokens_per_s",
    "update": "seconds",
    "check": "checks",
}


@pytest.mark.parametrize("name", COMMANDS)
def test_bench(request, kernel, monkeypatch, tmp_path, name):
    """Catches a part that stays on the CPU, or meets what does. The update's bench asserts that
    every layout has the same gradient."""
    if "--shape" not in COMMANDS[name]:
        request.getfixturevalue("small_runs")
    monkeypatch.setitem(shapes.SHAPES, "tiny", (32, 48, 2, 4, 2, 8, 512))
    monkeypatch.setattr(replay, "SETTINGS", ("arithmetic",))
    monkeypatch.setattr(replay, "LOSSES", ("grpo",))
    monkeypatch.setattr(replay, "EPOCHS", 1)
    monkeypatch.setattr(replay.arithmetic, "TRAIN_PROBLEMS", 64)
    monkeypatch.setattr(variance, "STAGES", {"early": 1})
    kernel("torch")
    file = tmp_path / "rows.json"
    command_line.main([*COMMANDS[name].split(), "--json", str(file)])
    found = json.loads(file.read_text())
    if name in FIGURE:
        assert all(row[FIGURE[name]] >= 0 for row in found)
        assert found[0]["machine"] == torch.cuda.get_device_name()
    else:
        assert len(found["rows"]) > 5


def test_gpu(tmp_path, monkeypatch, pretend):
    """A measurement that fails leaves its error, and the others are measured. Catches a bench that
    the code has outgrown."""
    if pretend:
        monkeypatch.setattr(packing, "varlen_attn", pretend_cuda.varlen_attn)
        monkeypatch.setattr(packing, "flash_attn_varlen_func", None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA H200")
    monkeypatch.setitem(shapes.SHAPES, "4b", (32, 48, 2, 4, 3, 8, 512))  # 3 does not divide 4
    file = tmp_path / "rows.json"
    size = "--batches 16 --new-tokens 20 --sequences 16 --median 20"
    command_line.main(
        ["gpu", "--decode", "tiny", "--updates", "4b", "tiny", *size.split(), "--json", str(file)]
    )
    *rollouts, failed, update = json.loads(file.read_text())
    assert len(failed["error"]) > 10
    assert [row["lengths vary"] for row in rollouts] == [False, True, False]
    fixed, varied, _ = rollouts
    assert fixed["tokens"] == 16 * 20
    assert 2 * 16 * 20 * 0.5 < varied["tokens"] < 2 * 16 * 20 * 1.5
    assert all(0 <= row["gap"] < 0.1 and row["peak GiB"] > 0 for row in rollouts)
    assert 0 < update["MFU"] < 1
