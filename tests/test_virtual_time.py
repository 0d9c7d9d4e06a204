"""bench law: virtual times by hand, the correlation of groups, and the page's tables."""

import json
import math
from pathlib import Path

import pytest
import torch

from bench import law, runs
from runtime import log


def row(curve, **changes):
    """A run of `law` whose curve has these accuracies: 100 tokens sampled and 10 trained a step."""
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
        assert law.time_to_target(row(curve), m) == pytest.approx(steps * (100 * m + 10))


def test_monotone():
    """The nearest increasing sequence. Catches pools that do not merge backwards."""
    assert law.monotone([1.0, 3.0, 2.0, 0.0, 5.0]) == [1.0, 5 / 3, 5 / 3, 5 / 3, 5.0]
    assert law.monotone([0.1, 0.2]) == [0.1, 0.2]


def test_each_arm_has_its_own_learning_rate():
    """The rate of the tuning seeds; fresh seeds at other rates do not count. Catches a rate that is
    chosen on the seeds that are reported, and a failed run that looks fast."""
    slow, fast = [0.25, 0.3, 0.3, 0.85], [0.25, 0.85]
    tuned = [(2e-4, slow, slow), (3e-4, slow, fast), (4.5e-4, fast, [0.25, 0.1])]
    rows = [
        row(curve, lr=lr, seed=seed)
        for lr, *curves in tuned
        for seed, curve in zip(law.TUNING_SEEDS, curves, strict=True)
    ]
    rows += [row(slow, lr=3e-4, seed=0), row(fast, lr=2e-4, seed=0)]
    arm = ("arithmetic", "zero", 0.0, 4)
    assert law.best_rate(rows, arm, 0.1) == 3e-4
    found = law.measured(rows, "arithmetic", "zero", 0.1, 4)
    assert found == {0: law.time_to_target(row(slow), 0.1)}


@pytest.mark.parametrize("correlation", [0.0, 0.3])
def test_design_effects(correlation):
    """Gradients whose correlation within a prompt is known, from 60 prompts x 32: the noise of a
    group is 1 + (G - 1) rho times that of as many independent completions. Catches the signal that
    is left in."""
    generator = torch.Generator().manual_seed(0)
    K, G, P = 60, 32, 400
    normal = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)
    # Scores are such that A times score has a part in common within a prompt, and a mean of all.
    rewards = (torch.arange(G) % 2).double().repeat(K, 1)  # right and wrong in turns: |A| is 1 / 2
    sign = (2 * rewards - 1)[:, :, None]
    common = normal(K, 1, P) * correlation**0.5
    scores = sign * (normal(K, G, P) * (1 - correlation) ** 0.5 + common + 0.1)
    flat = scores.reshape(K * G, P)
    found = law.effects_of(flat @ flat.T, rewards)
    for size in law.GROUP_SIZES:
        assert found[str(size)] == pytest.approx(1 + (size - 1) * correlation, rel=0.15)


def test_committed_rows_and_tables():
    """docs/method.md has the tables of the committed rows, and the prediction is the one that was
    committed before them. Catches a figure that outlived its rows."""
    rows = log.read_rows(law.ROWS)
    page = Path("docs/method.md").read_text()
    for task in law.TARGETS:
        assert law.gains(rows, task) in page
        assert law.agreement(rows, task) in page
    first = law.predictions("Before the runs")
    assert first["arithmetic", 0.1, "zero"] == [1.0, 0.81, 0.68, 0.6, 0.55]
    assert len(first) == len(law.predictions("With the correlation of groups")) == 16


def test_a_run(small_runs, tmp_path, monkeypatch):
    """The whole path with a tiny model: rows are stored, and not made again."""
    monkeypatch.setitem(law.STEPS, "arithmetic", 2)
    for name, value in {"EVERY": 1, "PROBLEMS": 2}.items():
        monkeypatch.setattr(law, name, value)
    run = law.Run("arithmetic", "adaptive", 0.3, 4, 3e-4, 0)
    made = law.make_one(run)
    assert [point[0] for point in made["curve"]] == [0, 1, 2]
    assert run.is_row(json.loads(json.dumps(made)))
    assert made["curve"][2][1] > made["curve"][1][1] > 0, "tokens add up"
    file = tmp_path / "law.jsonl"
    log.append_rows(file, [made])
    assert runs.make([run], file, workers=1) == [made]
