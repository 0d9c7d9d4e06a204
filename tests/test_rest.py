"""The measured rest: the time of everything but training over that of training on everything."""

import pytest

from runtime import timer


def made_up_rows(kept):
    """Steps of 1000 tokens: 0.3 s beside the update, which takes 1 ms a token and a fixed time. The
    first one of the run takes long."""
    rows = []
    for step, tokens in enumerate([100, *kept], 1):
        train = 0.2 + 0.001 * tokens + 50 * (step == 1)
        seconds = {"time/train": train, "step_time": 0.3 + train}
        rows.append({"step": step, "cost/sampled": 1000, "cost/kept": tokens} | seconds)
    return [{"step": 0, "eval/avg@4": 0.5}, *rows]


VARIED = [*range(100, 500, 20)]


@pytest.mark.parametrize(
    ("rows", "rest"),
    [
        (made_up_rows(VARIED), 0.5),  # 500 tokens' time of 1000
        (made_up_rows([250] * 8), 0.3 / 1.8),  # equal tokens say nothing of a fixed time
        (made_up_rows([250]), 0.3 / 1.8),  # nor does a single step
        (made_up_rows([900] * 99 + VARIED), 0.5),  # lengths have changed
        (made_up_rows([0, 0]), None),
        ([], None),
    ],
)
def test_measured_rest(rows, rest):
    """Catches a fixed time that counts as training, a rest that leaves it out, a mean over all of
    the run, and steps that kept nothing."""
    found = timer.measured_rest(rows)
    assert found == (rest and pytest.approx(rest))


@pytest.mark.parametrize("step", [2, 9, 21])
def test_one_slow_step_changes_little(step):
    """An update that was suspended, a rollout that waited, or the first step after a resume: the
    report moves by less than a fifth. Catches a mean, of the seconds or of the slope."""
    rows = made_up_rows(VARIED)
    for name in ("time/train", "step_time"):
        rows[step][name] += 1000
    assert timer.measured_rest(rows) == pytest.approx(0.5, rel=0.2)
