"""Every bench that computes on the device, from its command line, at a size that takes seconds."""

import json

import pytest
import torch

from bench import __main__ as command_line
from bench import shapes, variance

COMMANDS = {
    "step": "step --shape tiny --rounds 1 --steps 2 --skip 1 --methods grpo pps --new-tokens 4",
    "rollout": "rollout --shape tiny --rounds 1 --batches 16 --new-tokens 4",
    "update": "update --shape tiny --rounds 1 --sequences 16 --pack-tokens 512",
    "check": "check --steps 2 --every 1 --draws 4 --methods pps",
    "variance": "variance --seeds 0 --draws 50",
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
    monkeypatch.setattr(variance, "TASKS", ("arithmetic",))
    monkeypatch.setattr(variance, "LOSSES", ("grpo",))
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
