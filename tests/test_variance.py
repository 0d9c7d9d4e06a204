"""The variance bench: its figures on made-up gradients, where they are known in closed form, and
the command on small real runs."""

import itertools
import json

import pytest
import torch

import bench
import dppo
from bench import __main__ as command_line
from bench import replay, variance


@pytest.fixture(scope="module")
def rows():
    """Eight groups of eight, with gradients in 50 dimensions; norms roughly follow the energies."""
    generator = torch.Generator().manual_seed(0)
    rewards = (torch.rand(8, 8, generator=generator) < 0.3).double()
    rewards[0] = 1.0  # a dead group
    lengths = torch.randint(5, 30, (8, 8), generator=generator)
    energy = torch.rand(8, 8, generator=generator) * lengths / 10
    live = ~dppo.dead_groups(rewards)[:, None].expand(8, 8)
    vectors = torch.randn(int(live.sum()), 50, generator=generator, dtype=torch.float64)
    vectors *= energy[live].sqrt()[:, None]
    vectors *= 4 ** torch.rand(len(vectors), 1, generator=generator)  # energies only estimate
    nothing = torch.zeros(8, 8, dtype=torch.float64)
    batch = dppo.Completions(nothing, rewards, lengths + 10, nothing)
    found = variance.Gradients(batch, lengths, energy, live, vectors @ vectors.T, 30)
    return found, vectors, variance.variance_rows(found, "dr_grpo", "early", 1000)


def test_errors_agree_with_the_formula(rows):
    """The variance of independent draws is sum((1 / p - 1) |term|^2), and unbiased rules have no
    bias. Catches errors that count dead groups, the square of something else, a share of all tokens
    in place of those that contribute, and the noise of the draws in the bias."""
    found, vectors, table = rows
    factors = dppo.group_advantages(found.batch.rewards, "none")[found.live]
    terms = factors[:, None] * vectors
    norms, cost = terms.norm(dim=1), found.batch.cost[found.live].double()
    excess = []
    for row in table:
        if row["rule"] == "oracle, independent":
            p = dppo.pps_keep_prob(norms, cost, row["tokens"] * cost.sum().item())
            exact = ((1 / p - 1) * norms.square()).sum() / terms.sum(dim=0).square().sum()
            assert row["rel_mse"] == pytest.approx(exact.item(), rel=0.1, abs=1e-4)
        if row["rule"] in ("pps", "dppo", "uniform") and row["kept"]:
            assert row["kept"] == pytest.approx(row["tokens"], abs=0.03)
            assert abs(row["rel_bias2"]) < 0.02 * row["rel_mse"] + 1e-9
            excess.append(row["rel_bias2"] / row["rel_mse"] * 1000)  # 1 with the draws' noise in it
    assert len(excess) > 12
    assert abs(sum(excess) / len(excess)) < 0.5
    unreachable = [row for row in table if (row["rule"], row["tokens"]) == ("dppo", 0.1)]
    assert [row["rel_mse"] for row in unreachable] == [None], "it keeps all above the mean"


def test_a_rule_never_stands_in_for_another(rows):
    """The error of a rule without chance is all bias. Catches an unknown rule that draws as pps
    does, as the rivals' did while nothing had imported them."""
    found, _, table = rows
    names = {"cppo", "cppo_batch", "pods", "dppo_floor"}
    biased = [row for row in table if row["rule"] in names and row["kept"]]
    assert {row["rule"] for row in biased} == names
    assert all(row["rel_bias2"] == row["rel_mse"] for row in biased)
    with pytest.raises(KeyError, match="nobody"):
        variance.rule_draws("nobody", 0.5, found, found.batch, found.batch.size, 2)


def test_error_at_the_best_length():
    """Two orthogonal gradients of length 1, one of them kept. Catches the error of another
    constant, and one above 1 where nothing is kept."""
    gram = torch.eye(2, dtype=torch.float64)
    keep = torch.tensor([3.0, 0.0], dtype=torch.float64)
    assert variance.best_length_error(keep, gram) == pytest.approx(0.5)
    assert variance.best_length_error(1 + 0 * keep, gram) == pytest.approx(0.0)
    assert variance.best_length_error(0 * keep, gram) == 1.0


def test_uniform_error_is_that_of_every_sample():
    """Against all samples of 3 of 7 groups with a common direction. Catches the formula of
    independent keeps."""
    vectors = torch.randn(7, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 1
    samples = [list(kept) for kept in itertools.combinations(range(7), 3)]
    full = vectors.sum(dim=0)
    errors = [(vectors[kept].sum(dim=0) * 7 / 3 - full).square().sum() for kept in samples]
    exact = (sum(errors) / len(errors)).item()
    assert replay.uniform_error(vectors @ vectors.T, 3) == pytest.approx(exact)
    assert replay.uniform_error(vectors @ vectors.T, 7) == pytest.approx(0, abs=1e-9)


def test_a_recorded_run(small_runs):
    """Every step's inner products add up to the gradient that the step has, recorded or not.
    Catches a record of another step, and one group's gradient that is all of them."""
    args = ["--method", "grpo", "--steps", "2", "--device", "cpu"]  # bfloat16 rounds at 4e-3
    trainer, _ = bench.run(args, replay.GroupByGroup)
    _, plain = bench.run(args)
    for step, row in zip(trainer.recorded, plain, strict=True):
        assert step.step == row["step"]
        assert step.gram.diagonal().count_nonzero() > 1
        assert step.gram.sum().item() ** 0.5 == pytest.approx(row["grad_norm"], rel=1e-4)
        assert step.lengths.sum() == row["tokens/generated"]
        dead = (step.advantages == 0).all(dim=1).double().mean()
        assert dead == pytest.approx(row["frac_reward_zero_std"])


@pytest.mark.parametrize("level", ["completion", "prompt"])
def test_the_command(small_runs, monkeypatch, capsys, tmp_path, level):
    """From the command line to the table and the file that notebook 02 reads, on runs of a few
    steps. Catches a bench that train.py has outgrown, and a stage with another's checkpoint."""
    monkeypatch.setattr(replay, "SETTINGS", ("arithmetic",))
    monkeypatch.setattr(variance, "STAGES", {"early": 1, "late": 3})
    monkeypatch.setattr(replay, "EPOCHS", 1)
    monkeypatch.setattr(replay.arithmetic, "TRAIN_PROBLEMS", 64)
    steps, real = [], variance.real_gradients

    def from_checkpoint(folder, cfg, step):
        steps.append((torch.load(folder / "trainer.pt", weights_only=True)["step"], step))
        return real(folder, cfg, step)

    monkeypatch.setattr(variance, "real_gradients", from_checkpoint)
    file = tmp_path / "rows.json"
    command_line.main(f"variance --level {level} --seeds 0 --draws 60 --json {file}".split())
    table = json.loads(file.read_text())
    found = [dict(zip(table["columns"], row, strict=True)) for row in table["rows"]]
    rules = {row["rule"] for row in found}
    assert rules >= {*(variance.RULES if level == "completion" else replay.PROMPT_RULES)}
    assert {"commit", "machine", "date"} < {*table}
    rule = {"completion": "pps", "prompt": "uniform, coins"}[level]
    assert any(row["rel_mse"] for row in found if row["rule"] == rule)
    assert steps == ([(1, 1), (3, 3)] if level == "completion" else [])
    head = {"completion": "late: medians", "prompt": "r_q 0.6: error over"}[level]
    assert f"arithmetic, dr_grpo, {head}" in capsys.readouterr().out


def test_a_batch_of_a_model(small_runs, capsys, tmp_path):
    """With --flags, one batch of that model and data. Catches flags without effect."""
    file = tmp_path / "rows.json"
    args = ["variance", "--draws", "60", "--json", str(file)]
    command_line.main([*args, "--flags=--data words --prompt-format plain --seed 5"])
    table = json.loads(file.read_text())
    rows = [dict(zip(table["columns"], row, strict=True)) for row in table["rows"]]
    assert {(row["data"], row["seed"], row["stage"]) for row in rows} == {("words", 5, "start")}
    assert "with sqrt(energy)" in capsys.readouterr().out
