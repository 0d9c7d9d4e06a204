"""The variance bench on made-up gradients, where the answer is known in closed form."""

import itertools
import json

import pytest
import torch

import dppo
import sampler
import variance


@pytest.fixture(scope="module")
def rows():
    """Eight groups of eight, gradients in 50 dimensions whose norms follow the root of the energy."""
    generator = torch.Generator().manual_seed(0)
    rewards = (torch.rand(8, 8, generator=generator) < 0.3).double()
    rewards[0] = 1.0  # a dead group
    lengths = torch.randint(5, 30, (8, 8), generator=generator)
    energy = torch.rand(8, 8, generator=generator) * lengths / 10
    live = ~dppo.dead_groups(rewards)[:, None].expand(8, 8)
    vectors = torch.randn(int(live.sum()), 50, generator=generator, dtype=torch.float64)
    vectors *= energy[live].sqrt()[:, None]
    nothing = torch.zeros(8, 8, dtype=torch.float64)
    batch = dppo.Completions(nothing, rewards, lengths + 10, nothing)
    found = variance.Gradients(batch, lengths, energy, energy, live, vectors @ vectors.T, 30)
    return found, vectors, variance.variance_rows(found, "dr_grpo", "early", 3000)


def test_variance_bench_agrees_with_the_formula(rows):
    """Kills: errors of the dead counted, the square of something else, a share of all tokens instead of the live."""
    found, vectors, table = rows
    factors = dppo.group_advantages(found.batch.rewards, "dr_grpo")[found.live]
    terms = factors[:, None] * vectors
    excess = []
    norms, cost = terms.norm(dim=1), found.batch.cost[found.live].double()
    for row in table:
        if row["rule"] == "oracle, independent":
            p = dppo.pps_keep_prob(norms, cost, row["tokens"] * cost.sum().item())
            exact = ((1 / p - 1) * norms.square()).sum() / terms.sum(dim=0).square().sum()
            assert row["rel_mse"] == pytest.approx(exact.item(), rel=0.1, abs=1e-4)
        if row["rule"] in ("pps", "dppo", "uniform") and row["kept"]:
            assert row["kept"] == pytest.approx(row["tokens"], abs=0.03)
            assert abs(row["rel_bias2"]) < 0.02 * row["rel_mse"] + 1e-9
            excess.append(row["rel_bias2"] / row["rel_mse"] * 3000)  # 1 on average, were the draws' noise left in
        if row["rule"] == "cppo, best length" and row["kept"]:
            assert 0 <= row["rel_mse"] <= 1
    assert len(excess) > 12
    assert abs(sum(excess) / len(excess)) < 0.5


def test_variance_bench_says_what_is_out_of_reach(rows):
    """dppo keeps all above the mean, so a tenth of the tokens is out of its reach. Kills: a row made up."""
    found, _, table = rows
    cells = {(row["rule"], row["tokens"], row["r_o"]): row for row in table}
    assert cells["dppo", 0.1, None]["rel_mse"] is None
    assert cells["pps", 0.1, None]["rel_mse"] > 0
    spent = {row["r_o"]: row for row in table if row["rule"] == "dppo" and row["r_o"]}
    low = dppo.group_advantages(found.batch.rewards, "dr_grpo").abs()
    low = (low < low.mean(dim=1, keepdim=True) - 1e-6)[found.live]
    cost = found.batch.cost[found.live].double()
    for rate, row in spent.items():
        assert row["tokens"] == pytest.approx((cost * (1 - rate * low)).sum().item() / cost.sum().item(), abs=1e-4)
        assert row["kept"] == pytest.approx(row["tokens"], abs=0.02)


# ---------------------------------------------------------------------------- prompts


def test_uniform_error_is_that_of_every_sample():
    """Against all samples of 3 of 7, with a common direction in the groups. Kills: the formula of independent keeps."""
    vectors = torch.randn(7, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 1
    samples = [list(kept) for kept in itertools.combinations(range(7), 3)]
    errors = [(vectors[kept].sum(dim=0) * 7 / 3 - vectors.sum(dim=0)).square().sum() for kept in samples]
    exact = (sum(errors) / len(errors)).item()
    assert variance.uniform_error(vectors @ vectors.T, 3) == pytest.approx(exact)
    assert variance.uniform_error(vectors @ vectors.T, 7) == pytest.approx(0, abs=1e-9)


def test_a_recorded_run(small_runs, monkeypatch, tmp_path):
    """Every step's inner products belong to what the history was told in it, and add up to the gradient that the step
    has when nobody records. Kills: a record of another step, a group that is all of them, a history not empty."""
    clip, norms = torch.nn.utils.clip_grad_norm_, []
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", lambda *words: norms.append(clip(*words)) or norms[-1])
    empty, recorded = variance.recorded_run("arithmetic", "grpo", 0, 2)
    assert [record["told"][0] for record in recorded] == [1, 2]
    words = ["--method", "grpo", "--steps", "2", "--eval-every", "0", "--out-dir", str(tmp_path / "plain")]
    variance.train.main(variance.config.parse_config(words))
    lengths = [record["gram"].sum().item() ** 0.5 for record in recorded]
    assert lengths == pytest.approx([*map(float, norms[:2])], rel=1e-4)
    assert lengths == pytest.approx([*map(float, norms[2:])], rel=1e-4)
    assert all(record["gram"].diagonal().count_nonzero() > 1 for record in recorded)
    assert empty.sums.sum() == 0
    assert (empty.bin == sampler.UNSEEN).all()


def test_both_levels_run(small_runs, monkeypatch, capsys, tmp_path):
    """From the command to the table, on runs of a few steps. Kills: a bench that train.py has outgrown, a stage whose
    checkpoint is another's."""
    monkeypatch.setattr(variance, "SETTINGS", ("arithmetic",))
    monkeypatch.setattr(variance, "STAGES", {"early": 1, "late": 3})
    monkeypatch.setattr(variance, "EPOCHS", 1)
    asked, real = [], variance.real_gradients

    def from_checkpoint(folder, cfg, step):
        asked.append((torch.load(folder / "trainer.pt", weights_only=True)["step"], step))
        return real(folder, cfg, step)

    monkeypatch.setattr(variance, "real_gradients", from_checkpoint)
    rules = {}
    for level in ("completion", "prompt"):
        variance.main(level=level, seeds=(0,), draws=200, json_file=tmp_path / level)
        table = json.loads((tmp_path / level).read_text())
        rules[level] = {row[table["columns"].index("rule")] for row in table["rows"]}
    assert asked == [(1, 1), (3, 3)]
    assert rules["completion"] >= {*variance.RULES}
    assert rules["prompt"] == {*variance.PROMPT_RULES}
    shown = capsys.readouterr().out
    assert "arithmetic, dr_grpo, late: medians" in shown
    assert "arithmetic, dr_grpo, r_q 0.6: error over" in shown


def made_up_run(steps=60, spread=10.0):
    """A history and a record of 64 prompts, 16 a step: the longer half's groups are `spread` times as large."""
    generator = torch.Generator().manual_seed(1)
    empty = sampler.PromptHistory(torch.tensor([3, 9] * 32), ["a"] * 64, 16)
    recorded = []
    for step in range(1, steps + 1):
        window = sampler.candidates(64, 16, 0, step)
        vectors = (
            torch.randn(16, 50, generator=generator, dtype=torch.float64) * (1 + (spread - 1) * (window % 2))[:, None]
        )
        rewards = (torch.rand(16, 4, generator=generator) < 0.5).double()
        advantages = dppo.group_advantages(rewards, "dr_grpo")
        told = (step, window, torch.ones(16, dtype=torch.float64), rewards, advantages, vectors.square().sum(dim=1),
                torch.full((16,), 40.0, dtype=torch.float64))  # fmt: skip
        recorded.append({"told": told, "gram": vectors @ vectors.T})
    return empty, recorded


def test_replay_of_prompt_rules():
    """uniform is 1 by definition, coins a little more, pps near its oracle where strata tell all. Kills: errors over
    another budget's, a replay that learns nothing, one that learns from what it did not roll out."""
    empty, recorded = made_up_run()

    def over_uniform(rule, recorded=recorded):
        rows = variance.replay(rule, 0.5, empty, recorded, 300, 0)[20:]
        assert all(row["tokens"] == pytest.approx(0.5, abs=0.06) for row in rows)
        return sum(row["error"] for row in rows) / sum(row["uniform"] for row in rows)

    assert over_uniform("uniform") == pytest.approx(1.0, abs=0.05)
    assert over_uniform("uniform, coins") == pytest.approx(1.0, abs=0.1)
    assert over_uniform("oracle") < 0.3
    assert over_uniform("pps") < 0.65
    assert empty.sums.sum() == 0, "a replay has a history of its own"
    even = made_up_run(spread=1.0)[1]
    assert over_uniform("pps", even) == pytest.approx(1.0, abs=0.1), "nothing to learn, nothing lost"

    seen = []
    update = sampler.PromptHistory.update
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampler.PromptHistory, "update", lambda history, step, prompts, *told: seen.append(len(prompts))
                      or update(history, step, prompts, *told))  # fmt: skip
        variance.replay("pps", 0.5, empty, recorded, 2, 0)
    assert set(seen) == {8}


def test_rows_in_a_file(monkeypatch, tmp_path):
    """As the notebook reads them. Kills: values under another's name, a level that runs the other one."""
    rows = [{"seed": 0, "rule": "pps", "rel_mse": 0.123456}, {"seed": 1, "rule": "dppo", "rel_mse": None}]
    monkeypatch.setattr(variance, "prompt_variance", lambda seeds, draws: [row for row in rows if row["seed"] in seeds])
    variance.main(level="prompt", seeds=(0, 1), json_file=tmp_path / "rows.json")
    table = json.loads((tmp_path / "rows.json").read_text())
    found = [dict(zip(table["columns"], row, strict=True)) for row in table["rows"]]
    assert found == [rows[0] | {"rel_mse": 0.1235}, rows[1]]
