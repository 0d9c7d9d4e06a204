"""The notebooks run, top to bottom, and their last cell asserts what they claim."""

import os

import matplotlib
import nbformat
import pytest
from toy import ROOT, in_processes

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def run_cells(path, cells):
    """In a process that has imported torch, which a kernel would have to do anew."""
    matplotlib.use("agg")
    os.chdir(path.parent)
    names = {"__name__": "__main__"}
    for number, source in enumerate(cells):
        exec(compile(source, f"{path.name}, cell {number}", "exec"), names)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_notebook(path):
    """Catches a renamed function, and a claim that no longer holds."""
    notebook = nbformat.read(path, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert "assert" in code[-1].source
    in_processes(1, run_cells, path, [cell.source for cell in code])
