"""The notebooks run, top to bottom, and their last cell asserts what they claim."""

import nbformat
import pytest
from nbclient import NotebookClient
from toy import HANG, ROOT

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_notebook(path):
    """Catches a renamed function, a claim that no longer holds, and a notebook that was committed
    without its pictures."""
    notebook = nbformat.read(path, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.execution_count for cell in code), "committed with outputs"
    assert "assert" in code[-1].source
    outputs = [output for cell in code for output in cell.outputs]
    pictures = sum("image/png" in output.get("data", {}) for output in outputs)
    assert pictures >= max(1, sum("plt.show()" in cell.source for cell in code))
    limits = {"timeout": HANG, "startup_timeout": HANG}  # a cell takes 30 s on an idle machine
    resources = {"metadata": {"path": path.parent}}
    NotebookClient(notebook, resources=resources, **limits).execute()
