"""Every bench that computes on the device, from its command line, at a size that takes seconds."""

import json

import pretend_cuda
import pytest
import torch

import packing
from bench import __main__ as command_line
from bench import gpu, replay, shapes, variance

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
    """All sections on a toy model. Catches a section that the code has outgrown, a share upside
    down, and a column of the page that no row has."""
    if pretend:
        for kernel in ("flash_attn_varlen_func", "varlen_attn"):
            monkeypatch.setattr(packing, kernel, getattr(pretend_cuda, kernel))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA H200")
    file, page = tmp_path / "rows.json", tmp_path / "page.md"
    gpu.main(tiny=True, json_file=file, page=page)
    rows = json.loads(file.read_text())["sections"]
    assert list(rows) == list(gpu.SECTIONS)
    for name, found in rows.items():
        columns = gpu.SECTIONS[name].columns.split(" | ")
        for row in found:
            if pretend and name == "profile":
                assert "no kernel" in row["error"] or "Legacy CUDA" in row["error"]
            else:
                assert all(column in row for column in columns), row
    for row in rows["attention"]:
        errors = [row[name] for name in ("values", "q", "k", "v")]
        assert all(0 <= own < 5 * masked < 0.1 for own, masked in errors)
    assert all(0 <= row["mean gap"] <= row["largest gap"] < 0.1 for row in rows["gap"])
    for row in rows["rollouts"] + rows["updates"]:
        assert row["share"] == row["roofline"] / row["seconds"] < 1
    (update,) = rows["updates"]
    workspaces = 0.0 if pretend else 0.5  # cuBLAS's
    assert 0.95 < update["state GiB"] / update["computed state"] < 1.05 + workspaces
    assert page.read_text().count("\n## ") == len(rows)


def test_a_section_that_fails(tmp_path, monkeypatch):
    """Catches an error that stops the command, or that the page does not show."""

    def broken():
        raise torch.OutOfMemoryError("80 GiB | are not enough\nmore")

    def made_up(_bench):
        yield {"shape": "a"}, broken
        yield {"shape": "b"}, lambda: {"tokens/s": 1234.0}

    section = gpu.SECTIONS["updates"]._replace(measurements=made_up)
    monkeypatch.setattr(gpu, "SECTIONS", {"updates": section})
    gpu.main(tiny=True, json_file=tmp_path / "rows.json", page=tmp_path / "page.md")
    (failed, worked) = json.loads((tmp_path / "rows.json").read_text())["sections"]["updates"]
    assert failed["error"] == "OutOfMemoryError: 80 GiB | are not enough"
    assert worked["tokens/s"] == 1234
    shown = (tmp_path / "page.md").read_text()
    assert "| a | OutOfMemoryError: 80 GiB / are not enough |" in shown
    assert "| b | 1,234 |" in shown
