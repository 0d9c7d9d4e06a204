"""The tables of the pages, by hand and as they are committed."""

from pathlib import Path

from matplotlib.figure import Figure

from bench import results


def rows_of(method, accuracies):
    same = {"setting": "arithmetic", "method": method, "budget": 10, "flags": ""}
    return [same | {"seed": n, "accuracy": value} for n, value in enumerate(accuracies)]


def test_the_race_table():
    """By hand: adaptive 0.7, 0.8, 0.9 and GRPO 0.5, 0.7, 0.6, differences 0.2, 0.1, 0.3.

    Catches unpaired differences, and normal quantiles.
    """
    rows = rows_of("adaptive", (0.7, 0.8, 0.9))
    rows += rows_of("grpo", (0.5, 0.7, 0.6))
    assert results.race_table(rows, "arithmetic").splitlines()[2:] == [
        "| GRPO, tuned | 0.600 ± 0.248 |",  # 4.30 x 0.1 / sqrt(3)
        "| adaptive, tuned | 0.800 ± 0.248 |",
        "| adaptive - GRPO | +0.200 ± 0.248 |",
    ]


# ---------------------------------------------------------------------------- the pages


def test_committed_tables():
    """Every table of a page is one that `bench results` prints, and the law's prediction is the one
    that was committed before its runs. Catches a figure that outlived the rows that it came from.
    """
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


def test_seconds_to_an_accuracy():
    """Medians over all seeds, a run that never arrives among them; speeds over those in which both
    arrive. Catches seconds of the last evaluation, and a failure that is left out."""

    def row(method, seed, *seconds):
        curve = [[10 * step, 0.9 + 0.05 * step, s] for step, s in enumerate(seconds)]
        return {
            "setting": "arithmetic",
            "method": method,
            "seed": seed,
            "flags": "-",
            "curve": curve,
        }

    rows = [
        row("nonzero", 1, 5.0, 20.0),
        row("nonzero", 2, 5.0, 40.0),
        row("nonzero", 3, 7.0, 30.0),
    ]
    rows += [row("adaptive", 1, 4.0, 10.0), row("adaptive", 2, 4.0, 20.0), row("adaptive", 3, 4.0)]
    table = results.reach_table(rows, "arithmetic").splitlines()
    assert table[2].startswith("| nonzero | 3 | 30 (20 to 40) | 1.00 (1.00 to 1.00) | inf")
    assert table[3].startswith("| adaptive | 3 | 20 (10 to inf) | 2.00 (2.00 to 2.00) |")
