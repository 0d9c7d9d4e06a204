"""Each file of tests/gpu in a process of its own: a pretend device cannot be taken back."""

import subprocess
import sys

import pytest
from toy import ROOT

FILES = sorted(path.name for path in (ROOT / "tests" / "gpu").glob("test_*.py"))


@pytest.mark.parametrize("file", FILES)
def test_gpu_tier(file):
    """On a GPU if there is one, else on the pretend one. Fails if a test of the file does."""
    command = [sys.executable, "-m", "pytest", "-n", "0", "-q", "-rs", f"tests/gpu/{file}"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    said = ended.stdout + ended.stderr
    assert ended.returncode == 0, said
    if " passed" not in said:
        pytest.skip(said[said.index("SKIPPED") :])
