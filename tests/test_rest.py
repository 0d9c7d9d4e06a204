"""--rest auto: the time of everything but training over that of training on everything."""

import math

import pytest
import torch
import toy

from runtime import timer


def made_up_row(step, kept, fixed=0.2):
    """A step of 1000 tokens: 0.3 s beside the update, which takes 1 ms a token and a fixed time."""
    train = fixed + 0.001 * kept
    seconds = {"time/train": train, "step_time": 0.3 + train}
    return {"step": step, "cost/sampled": 1000.0, "cost/kept": float(kept)} | seconds


def test_measured_rest():
    """Catches a fixed time that counts as training, a rest that leaves it out, and a step that
    waited for another program."""
    rows = [made_up_row(step, kept=100 + 15 * step) for step in range(2, 21)]
    rows[3]["step_time"] = 99.0
    assert timer.measured_rest(rows) == pytest.approx(0.5)  # 500 tokens of 1000


def test_it_is_never_below_0():
    """Updates took less than the line says: what took the rest of the step still counts."""
    rows = [made_up_row(step, kept=800, fixed=0) for step in range(2, 6)]
    rows[2:] = [row | {"time/train": 0.1, "step_time": 0.15} for row in rows[2:]]
    second = (2 * 0.8 + 2 * 0.1) / 3200
    assert timer.measured_rest(rows) == pytest.approx(0.05 / second / 1000)


@pytest.mark.parametrize("slope", [-0.001, 0.003, 0.0015])
def test_seconds_of_a_token(slope):
    """Seconds that fall with the tokens, that leave a fixed time below 0, or that are of equal
    tokens: all of the time is taken to grow with them."""
    kept = torch.tensor([100.0, 200.0, 300.0, 400.0, 500.0], dtype=torch.float64)
    kept = kept if slope != 0.0015 else 200 + kept / 10
    seconds = 0.6 + slope * (kept - 300)
    rows = [{"cost/kept": n, "time/train": s} for n, s in zip(kept, seconds, strict=True)]
    assert timer.seconds_of_a_token(rows) == (seconds.sum() / kept.sum()).item()


def test_when_it_is_measured():
    """At first everything is kept; the first step warms up; then twice as many steps each time.

    Catches a value that each small change of the times moves, one that lengths never change, and
    the time of rollouts that have long become longer.
    """
    rest = timer.Rest("auto")
    values = {}
    for step in range(1, 34):
        values[step] = rest.value  # what the step uses
        row = made_up_row(step, kept=800 if step <= 4 else 300)
        if step == 1:
            row["time/train"] += 50.0
            row["step_time"] += 50.0
        elif step >= 17:
            row["step_time"] += 0.8
        elif step >= 9:
            row["step_time"] += 0.6
        rest.add(step, row)
    assert [values[step] for step in (1, 4)] == [math.inf, math.inf]
    # Equal tokens say nothing of the fixed time: 0.3 / 1.25, rounded.
    assert values[5] == values[8] == pytest.approx(1.4**-4)
    assert values[9] == values[16] == pytest.approx(1.4**-2)  # (0.3 + 0.2) / 1
    assert values[17] == values[32] == pytest.approx(1)  # (0.9 + 0.2) / 1
    assert values[33] == pytest.approx(1), "1.3 is less than a factor of 1.4 away"


def test_a_number_stays():
    rest = timer.Rest(0.3)
    for step in range(1, 9):
        rest.add(step, made_up_row(step, kept=500))
    assert (rest.value, rest.rows) == (0.3, [])


@pytest.mark.parametrize("world", [1, 2])
def test_a_run_measures_it(policy_folder, tmp_path, world):
    """Ranks agree on it, a checkpoint has it, and until it is known all that is not 0 is kept.

    Catches ranks that draw by their own seconds, and a resumed run that begins anew.
    """
    options = {"method": "adaptive", "rest": "auto", "save_every": 1}
    flags = toy.flags(policy_folder, str(tmp_path), steps=5, **options)
    toy.in_processes(world, toy.main, flags)
    toy.in_processes(world, toy.main, [*flags, "--steps", "7", "--resume"])
    log = toy.rows(tmp_path)
    assert [row["rest"] for row in log[:4]] == [None] * 4
    assert all(row["kept/live_tokens"] in (1, None) for row in log[:4])
    measured = {row["rest"] for row in log[4:]}
    assert len(measured) == 1
    assert measured.pop() > 0
    state = torch.load(tmp_path / "checkpoint" / "trainer.pt", weights_only=True)
    assert len(state["trainer"]["rest"]["rows"]) == 6, "the first step left out"


def test_steps_without_a_sample():
    """All prompts were pruned lately. Catches a rest that is infinite or not a number."""
    rest = timer.Rest("auto")
    rest.add(2, made_up_row(2, kept=500))
    for step in (3, 4):
        rest.add(step, made_up_row(step, kept=0) | {"cost/sampled": 0.0})
    assert rest.value == math.inf, "not measured yet"
