"""Every bench but the race and variance, from its command line to its rows, at a size at which it
takes seconds; and the check of unbiasedness, because its figures are a proof."""

import json
import shlex

import pytest
import torch

import bench
from bench import __main__ as command_line
from bench import check, shapes
from runtime import InputError
from tasks import arithmetic


@pytest.fixture
def command(tmp_path):
    """Run a command line, and return the content of its --json."""

    def go(line):
        command_line.main([*shlex.split(line), "--json", str(tmp_path / "rows.json")])
        return json.loads((tmp_path / "rows.json").read_text())

    return go


def test_a_record_says_who_made_it(tmp_path):
    """Fails if a record's first row, or its table, lacks commit, machine or date, or if a log that
    is kept loses a row."""
    (tmp_path / "log.jsonl").write_text('{"step": 0}\n{"step": 1, "loss": 2.0}\n')
    bench.keep_log(tmp_path / "log.jsonl", tmp_path / "kept.jsonl")
    first, second = (tmp_path / "kept.jsonl").read_text().splitlines()
    bench.write_json(tmp_path / "table.json", {"rows": [1]})
    for row in (json.loads(first), json.loads((tmp_path / "table.json").read_text())):
        assert {"commit", "machine", "date"} < {*row}
        assert all(row[name] for name in ("commit", "machine", "date"))
    assert json.loads(first)["step"] == 0
    assert json.loads(second) == {"step": 1, "loss": 2.0}


def test_step(command):
    """Catches a bench that train.py has outgrown, and a method that is not passed on."""
    rows = command("step --shape tiny --steps 1 --skip 0 --new-tokens 4")
    found = {(row["method"], row["part"]): row["median"] for row in rows}
    assert 0 < found["pps", "tokens/trained"] < 0.9 * found["grpo", "tokens/trained"]
    assert found["grpo", "step_time"] > found["grpo", "time/train"] > 0


@pytest.mark.parametrize(
    ("flags", "sequences", "lengths"),
    [("--shape tiny --new-tokens 4 --batches 32", 32, (4, 4)), ("--batches 16 32", 32, (3, 54))],
)
def test_rollout(command, flags, sequences, lengths):
    """Catches an engine that another one's tokens are counted for, completions that never end, and
    a batch that is not all of the prompts."""
    rows = command(f"rollout --rounds 1 {flags}")
    assert [row["engine"] for row in rows][:3] == ["hf", "compact", "plain"]
    for row in rows:
        assert lengths[0] <= row["tokens"] / sequences <= lengths[1]
        assert row["tokens"] == pytest.approx(rows[0]["tokens"], rel=0.1), "the same prompts"
        assert row["tokens_per_s"] == pytest.approx(row["tokens"] / row["seconds"])
        assert row["max_logprob_gap"] < 0.1


def test_update(command):
    """The bench asserts that every layout has the first one's gradient, so this compares padded
    updates with packed ones."""
    rows = command("update --shape tiny --rounds 1 --sequences 16 --pack-tokens 512")
    tokens = {row["variant"]: row["tokens"] for row in rows if row["seconds"] > 0}
    assert tokens["packed, shared prompts"] < tokens["packed"]
    assert tokens["packed"] < min(tokens["padded, sorted"], tokens["padded, arrival"])


@pytest.mark.parametrize(("shape", "count"), [("0.6b", 596_049_920), ("4b", 4_022_468_096)])
def test_parameters_of_qwen3(shape, count):
    """The published numbers. Catches a dimension that is not Qwen3's."""
    model = shapes.random_model(shape, "meta")
    assert sum(parameter.numel() for parameter in model.parameters()) == count


# ---------------------------------------------------------------------------- the check


def test_comparison_by_hand():
    """Two pruned gradients of two parameters: errors (1, 0) and (1, 2), whose product is 1.

    Catches n^2 in place of n (n - 1), and a norm that is not the full gradient's.
    """
    found = check.compare(torch.tensor([3.0, 4]), iter(torch.tensor([[4.0, 4], [4, 6]])))
    assert found == {
        "check/bias2": pytest.approx(1 / 25),
        "check/variance": pytest.approx(2 / 25),  # around their mean: (0, -1) and (0, 1)
        "check/scale": pytest.approx((3 + 3 + 8) / 2 / 25),
        "check/norm": pytest.approx(5.0),
    }


def test_check_weights_steps_by_their_gradient():
    """Catches a plain mean, which steps with hardly a gradient would decide."""
    mean, error = check.mean_and_error([9.0, 1.0], [1.0, 7.0])
    assert mean == 2.0
    assert error == 1.75, "((7 x 1)^2 + (1 x 7)^2) x 2 / 1, its root over 8"


def test_check(small_runs, command, monkeypatch):
    """pps is within three standard errors of 0, and the planted mistake is not. Catches one draw
    for both estimates, a full gradient that is pruned, a check that draws no prompts, and runs that
    end without one."""
    with pytest.raises(InputError, match="--steps 5 --every 6: no check; give more steps"):
        check.main(steps=5)
    monkeypatch.setattr(arithmetic, "TRAIN_PROBLEMS", 24)
    monkeypatch.setattr(check, "RUNS", [row for row in check.RUNS if row[1] in ("dppo", "pps")])
    on_cpu = lambda method: [*bench.sized(method), "--device", "cpu"]  # bfloat16 rounds at 4e-3
    monkeypatch.setattr(check, "sized", on_cpu)
    rows = command("check --steps 20 --every 1 --draws 8")
    found = {(row["rule"], row["key"]): (row["mean"], row["error"]) for row in rows}
    assert {row["checks"] for row in rows} == {20}
    for rule in ("dppo", "pps"):
        for key in ("check/bias2", "check/scale"):
            mean, error = found[rule, key]
            assert abs(mean) < 3 * error, (rule, key)
        assert found[rule, "check/variance"][0] > 0
    mean, error = found["pps, weights x 0.9", "check/scale"]
    assert mean < -3 * error


def test_the_planted_mistake_is_at_both_levels(small_runs):
    """Pruned gradients are 0.9 x 0.9 times as long as those of the same draws without any. Catches
    a check that sees one level."""

    def scale(kind):
        checked = lambda *args: kind(*args, every=1, draws=8)
        _, (row,) = bench.run([*bench.sized("pps"), "--steps", "1", "--device", "cpu"], checked)
        return 1 + row["check/scale"]

    assert scale(check.Underweighted) == pytest.approx(0.81 * scale(check.Checked), rel=1e-4)


def test_a_check_changes_nothing(small_runs):
    """Catches a check that disturbs the run's draws, history or weights."""
    checked = lambda *args: check.Checked(*args, every=1, draws=2)
    args = [*bench.sized("pps"), "--steps", "4", "--device", "cpu"]
    one, rows = bench.run(args, checked)
    other, plain = bench.run(args)
    unchecked = [{k: v for k, v in row.items() if not k.startswith("check/")} for row in rows]
    assert [len(row) for row in rows] == [len(row) + 4 for row in unchecked]
    times = lambda row: {k: v for k, v in row.items() if "time" not in k}
    assert list(map(times, unchecked)) == list(map(times, plain))
    pairs = zip(one.model.parameters(), other.model.parameters(), strict=True)
    assert all(torch.equal(*pair) for pair in pairs)
    assert torch.equal(
        one.history.past_advantage.nan_to_num(-1), other.history.past_advantage.nan_to_num(-1)
    )
