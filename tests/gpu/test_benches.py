"""The benches that compute on the device, from their command lines, in seconds."""

import json

import pytest
import torch

from bench import __main__ as command_line
from bench import shapes

COMMANDS = {  # command, a figure of every row
    "step --steps 2 --skip 1 --methods pps --new-tokens 4": "median",
    "rollout --rounds 1 --batches 16 --new-tokens 4": "tokens_per_s",
    "update --rounds 1 --sequences 8 --pack-tokens 256": "seconds",
}


@pytest.mark.parametrize("command", COMMANDS)
def test_bench(kernel, monkeypatch, tmp_path, command):
    """Catches a part that stays on the CPU, or meets what does. The update's bench asserts that
    every layout has the same gradient."""
    monkeypatch.setitem(shapes.SHAPES, "tiny", (32, 48, 2, 4, 2, 8, 600))
    kernel("torch")
    file = tmp_path / "rows.json"
    command_line.main([*command.split(), "--shape", "tiny", "--json", str(file)])
    rows = json.loads(file.read_text())
    assert all(row[COMMANDS[command]] >= 0 for row in rows)
    assert rows[0]["machine"] == torch.cuda.get_device_name()
