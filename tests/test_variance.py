"""The variance bench: its figures on made-up gradients, where they are known in closed form, and
the command on small real runs."""

import json

import pytest
import torch

import dppo
from bench import __main__ as command_line
from bench import variance


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
    """The variance of independent draws is sum((1 / p - 1) |term|^2), unbiased rules have no bias,
    and the error of a rule without chance is all bias. Catches errors that count dead groups, the
    square of something else, a share of all tokens in place of those that contribute, and the noise
    of the draws in the bias."""
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
        if row["rule"] == "cppo_batch, best length":
            assert 0 < row["kept"] <= row["tokens"] + 1e-3
            assert row["rel_bias2"] == row["rel_mse"] > 0
    assert len(excess) > 10
    assert abs(sum(excess) / len(excess)) < 0.5
    unreachable = [row for row in table if (row["rule"], row["tokens"]) == ("dppo", 0.1)]
    assert [row["rel_mse"] for row in unreachable] == [None], "it keeps all above the mean"


def test_error_at_the_best_length():
    """Two orthogonal gradients of length 1, one of them kept. Catches the error of another
    constant, and one above 1 where nothing is kept."""
    gram = torch.eye(2, dtype=torch.float64)
    keep = torch.tensor([3.0, 0.0], dtype=torch.float64)
    assert variance.best_length_error(keep, gram) == pytest.approx(0.5)
    assert variance.best_length_error(1 + 0 * keep, gram) == pytest.approx(0.0)
    assert variance.best_length_error(0 * keep, gram) == 1.0


def test_the_command(small_runs, monkeypatch, capsys, tmp_path):
    """From the command line to the file that notebook 02 reads, on runs of a few steps. Catches a
    bench that train.py has outgrown, and a stage with another's checkpoint."""
    monkeypatch.setattr(variance, "TASKS", ("arithmetic",))
    monkeypatch.setattr(variance, "STAGES", {"early": 1, "late": 3})
    steps, real = [], variance.real_gradients

    def from_checkpoint(folder, cfg, step):
        steps.append((torch.load(folder / "trainer.pt", weights_only=True)["step"], step))
        return real(folder, cfg, step)

    monkeypatch.setattr(variance, "real_gradients", from_checkpoint)
    file = tmp_path / "rows.json"
    command_line.main(f"variance --seeds 0 --draws 60 --json {file}".split())
    table = json.loads(file.read_text())
    rows = [dict(zip(table["columns"], row, strict=True)) for row in table["rows"]]
    assert {row["rule"] for row in rows} == {*variance.RULES}
    assert {(row["seed"], row["data"]) for row in rows} == {(0, "arithmetic")}
    assert {"commit", "machine", "date"} < {*table}
    assert any(row["rel_mse"] for row in rows if row["rule"] == "pps")
    assert steps == [(1, 1), (3, 3)]
    assert capsys.readouterr().out.count("\narithmetic, dr_grpo, late\n") == 1
