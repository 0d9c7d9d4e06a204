"""`bench speed` on the device, from its command line, in seconds."""

import json

import torch

from bench import __main__ as command_line


def test_speed(kernel, policy_folder, tmp_path):
    """Catches a part that stays on the CPU, or meets what does. The command itself asserts that
    every layout has the same gradient."""
    kernel("torch")
    flags = f"--model {policy_folder} --prompts-per-step 4 --group-size 4 --max-new-tokens 6"
    file = tmp_path / "rows.json"
    command_line.main(["speed", "--rounds", "1", f"--flags={flags}", "--json", str(file)])
    record = json.loads(file.read_text())
    assert all(row["tokens_per_s"] > 0 for row in record["rows"])
    assert record["machine"] == torch.cuda.get_device_name()
