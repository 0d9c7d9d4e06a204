"""The tables and pictures of the pages, as they are committed."""

from pathlib import Path

import pytest
from matplotlib.figure import Figure

from bench import results
from runtime import log


def test_committed_tables(monkeypatch, capsys):
    """Every table of a page is one that `bench results` prints, and both pictures are drawn.
    Catches a figure that outlived its rows, a difference that is not paired, and normal
    quantiles."""
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda _figure, path: drawn.append(path))
    results.main()
    assert drawn == [Path("runs/peers.png"), Path("runs/public-steps.png")]
    pages = Path("docs/results.md").read_text() + Path("docs/method.md").read_text()
    printed = capsys.readouterr().out
    for name, table in results.tables().items():
        assert table in pages, name
        assert table in printed


def test_runs_that_never_arrive_count():
    """Three pairs, in one of which nonzero gave up after 30 seconds. Catches a pair that is left
    out, which favours whoever failed, and seconds without an end."""
    run = lambda *curve: {"curve": curve, "seconds": curve[-1][2]}
    ours = [run([10, 0.9, 10.0]), run([10, 0.5, 10.0], [20, 0.9, 40.0]), run([10, 0.9, 5.0])]
    theirs = [run([10, 0.9, 20.0]), run([10, 0.5, 30.0]), run([10, 0.9, 10.0])]
    never, seconds = results.restricted([ours, theirs], 0.9)
    assert never == [0, 1]
    assert seconds == [[10, 30, 5], [20, 30, 10]]
    assert results.speed(*seconds).startswith("1.59 (")  # 4 ** (1 / 3)


def test_public_steps():
    """rest is that of the parts that pruning saves. Catches a row that was edited in part."""
    for row in log.read_rows(Path("runs/public-steps.jsonl")):
        training = sum(row[part] or 0 for part in ("old", "ref", "update"))
        assert row["rest"] == pytest.approx(row["step"] / training - 1, abs=1e-3)
