"""The notebooks run, top to bottom, and their last cell asserts what they claim."""

import nbformat
import pytest
from nbclient import NotebookClient
from toy import HANG, ROOT

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
SHORT_BASE = """
import sys
from pathlib import Path
sys.path.insert(0, {root!r})
from tasks import arithmetic
arithmetic.CACHE = Path({folder!r})
arithmetic.BASE_STEPS = 20
"""  # in place of 1,000, which a fresh clone would train: no claim depends on the model's accuracy


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_notebook(path, tmp_path):
    """Catches a renamed function, a claim that no longer holds, and a notebook that was committed
    without its pictures."""
    notebook = nbformat.read(path, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.execution_count for cell in code), "committed with outputs"
    assert "assert" in code[-1].source
    outputs = [output for cell in code for output in cell.outputs]
    pictures = sum("image/png" in output.get("data", {}) for output in outputs)
    assert pictures >= sum("plt.show()" in cell.source for cell in code) > 0
    if "import arithmetic" in path.read_text():
        setup = SHORT_BASE.format(root=str(ROOT), folder=str(tmp_path))
        notebook.cells.insert(0, nbformat.v4.new_code_cell(setup))
    limits = {"timeout": HANG, "startup_timeout": HANG}  # a cell takes 30 s on an idle machine
    resources = {"metadata": {"path": path.parent}}
    NotebookClient(notebook, resources=resources, **limits).execute()
