"""The tables of the pages, by hand and as they are committed."""

import math
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from bench import results


def rows_of(method, accuracies, **more):
    same = {"setting": "arithmetic", "method": method, "budget": 0, "made": 40, "prompts": 1280}
    same |= {"flags": "--prompts-per-step 32", "trained": 1000.0, "seconds": 80.0} | more
    return [same | {"seed": n, "accuracy": value} for n, value in enumerate(accuracies)]


def test_the_race_table():
    """By hand: adaptive 0.7, 0.8, 0.9 and GRPO 0.5, 0.7, 0.6, differences 0.2, 0.1, 0.3.

    Catches unpaired differences, normal quantiles, and a mean where the lowest belongs.
    """
    rows = rows_of("adaptive", (0.7, 0.8, 0.9), budget=10)
    rows += rows_of("grpo", (0.5, 0.7, 0.6), budget=10)
    assert results.race_table(rows, "arithmetic").splitlines()[2:] == [
        "| GRPO, tuned | 0.600 ± 0.248 |",  # 4.30 x 0.1 / sqrt(3)
        "| adaptive, tuned | 0.800 ± 0.248 |",
        "| adaptive - GRPO | +0.200 ± 0.248 |",
        "| lowest run of adaptive | 0.700 |",
    ]


def test_the_savings_table():
    """By hand: dppo rolls out 24 of 32, trains on half, and takes 0.3, 0.5 and 0.7 of GRPO's
    seconds. Catches a ratio of means where the median of pairs belongs."""
    rows = rows_of("grpo", (0.5, 0.7, 0.6))
    for seed, seconds in enumerate((24.0, 40.0, 56.0)):
        own = rows_of("dppo", (0.6, 0.7, 0.5), prompts=960, trained=500.0, seconds=seconds)
        rows.append(own[seed])
    assert results.savings_table(rows, "arithmetic").splitlines()[2:] == [
        "| GRPO | 32 of 32 | 1.00 | 0.600 ± 0.248 | 2.00 s a step |",
        "| dppo | 24 of 32 | 0.50 | +0.000 ± 0.248 | 0.50 |",
    ]
    words = [row | {"setting": "words"} for row in rows]
    words += [row | {"method": "nonzero", "seconds": 40.0} for row in words[:3]]
    grpo, zeros, dppo = results.savings_table(words[1:], "words").splitlines()[2:]
    assert grpo == "| GRPO | 32 of 32 | 1.00 | +0.000 ± 0.000 | 2.00 |", "of the seeds that it has"
    assert zeros.endswith("| 0.600 ± 0.248 | 1.00 s a step |")
    assert dppo.endswith("| +0.000 ± 0.248 | 1.00 |")


# ---------------------------------------------------------------------------- the law


def run_of(curve, **changes):
    """A run whose curve has these accuracies: 100 tokens sampled and 10 trained a step."""
    run = {"task": "arithmetic", "rule": "zero", "ratio": 0.0, "group_size": 4, "lr": 3e-4}
    points = [[step, 100 * step, 10 * step, value] for step, value in enumerate(curve)]
    return run | {"seed": 0, "curve": points} | changes


@pytest.mark.parametrize(
    ("curve", "steps"),
    [
        ([0.25, 0.85], 1),
        ([0.25, 0.65, 0.95], 1 + 2 / 3),
        ([0.25, 0.95, 0.65, 0.9], 2 + 0.5),  # 0.95 and 0.65 are pooled: 0.8, 0.8, 0.9
        ([0.25, 0.9, 0.3], math.inf),  # it fell
        ([0.25, 0.5], math.inf),
    ],
)
def test_time_to_the_target(curve, steps):
    """By hand, at m = 0.1 and 3. Catches the first evaluation above the target by luck, a time
    between evaluations that is not interpolated, and m at the wrong term."""
    for m in (0.1, 3):
        assert results.time_to_target(run_of(curve), m) == pytest.approx(steps * (100 * m + 10))


def test_monotone():
    """The nearest increasing sequence. Catches pools that do not merge backwards."""
    assert results.monotone([1.0, 3.0, 2.0, 0.0, 5.0]) == [1.0, 5 / 3, 5 / 3, 5 / 3, 5.0]


def test_each_arm_has_its_own_learning_rate(monkeypatch):
    """The rate of the tuning seeds; fresh seeds at other rates do not count. Catches a rate that is
    chosen on the seeds that are reported, and a failed run that looks fast."""
    slow, fast = [0.25, 0.3, 0.3, 0.85], [0.25, 0.85]
    tuned = [(2e-4, slow, slow), (3e-4, slow, fast), (4.5e-4, fast, [0.25, 0.1])]
    rows = [
        run_of(curve, lr=lr, seed=seed)
        for lr, *curves in tuned
        for seed, curve in zip(results.TUNING_SEEDS, curves, strict=True)
    ]
    rows += [run_of(slow, lr=3e-4, seed=0), run_of(fast, lr=2e-4, seed=0)]
    monkeypatch.setattr(results, "RULES", {"zero": "nonzero"})
    monkeypatch.setattr(results, "GROUP_SIZES", (4,))
    runs = results.times_of_arms(rows)
    assert runs["zero", 0.1, 4] == {0: results.time_to_target(run_of(slow), 0.1)}


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
