"""The tables and pictures of the pages, as they are committed."""

from pathlib import Path

from matplotlib.figure import Figure

from bench import results


def test_committed_tables():
    """Every table of a page is one that `bench results` prints, and the law's prediction is the one
    that was committed before its runs. Catches a figure that outlived its rows, a difference
    that is not paired, normal quantiles, and a run that never arrives but does not count."""
    pages = Path("docs/results.md").read_text() + Path("docs/method.md").read_text()
    for name, table in results.tables().items():
        assert table in pages, name
    first = results.predictions("Before the runs", "arithmetic")
    assert first[0.1, "zero"] == [1.0, 0.81, 0.68, 0.6, 0.55]


def test_pictures(monkeypatch, capsys):
    """All four are drawn; the first points of the law's are GRPO without zeros, whose best size at
    m = 0.1 is 2. Catches a picture of the progress, not of the time."""
    drawn = {}
    save = lambda figure, path: drawn.update({path: figure})
    monkeypatch.setattr(Figure, "savefig", save)
    results.main()
    assert "race, default task\n\n| seconds | 5 | 20 | 80 |" in capsys.readouterr().out
    names = ("savings", "race", "law-arithmetic", "law-arithmetic-mixed")
    assert list(drawn) == [Path(f"runs/{name}.png") for name in names]
    points = drawn[Path("runs/law-arithmetic.png")].axes[0].containers[0].lines[0]
    sizes, times = points.get_data()
    assert list(sizes) == [2, 4, 8, 16, 32]
    assert times[0] == 1
    assert min(times[1:]) > 1
