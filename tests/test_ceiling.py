"""The most that pruning can gain: the least time x variance, against other keep probabilities and
against draws; and what is read from a run's log."""

import itertools
import json
import math

import pytest
import torch

import dppo
import metrics
from bench import ceiling as report
from bench.ceiling import figures
from metrics import time_variance
from related import rivals  # noqa: F401 (adds its rules)
from runtime import InputError


def terms(n: int, seed: int, dead: int = 0):
    """Sizes and costs [n] of n terms, some of which are 0; sizes have a heavy tail."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.rand(n, generator=generator, dtype=torch.float64) ** 3 + 1e-4
    cost = 1 + 9 * torch.rand(n, generator=generator, dtype=torch.float64)
    size[:dead] = 0.0
    return size, cost


@pytest.mark.parametrize("rest", [0.01, 1.0, 10.0, 300.0])
@pytest.mark.parametrize(("n", "seed", "dead"), [(1, 0, 0), (3, 1, 1), (12, 2, 3), (300, 3, 50)])
def test_no_other_probabilities_are_better(n, seed, dead, rest):
    """Brute force on a grid of three, and random changes. Catches a wrong number of certain terms,
    T without the rest, V without the certain terms."""
    size, cost = terms(n, seed, dead)
    keep_prob = dppo.adaptive_keep_prob(size, cost, rest)
    product = time_variance(keep_prob, size, cost, rest)
    generator = torch.Generator().manual_seed(seed)
    for spread in (0.01, 0.3):
        for _ in range(50):
            change = 1 + spread * torch.randn(n, generator=generator, dtype=torch.float64)
            other = (keep_prob * change).clamp(1e-9, 1) * (size > 0)
            assert time_variance(other, size, cost, rest) >= product * (1 - 1e-12)
    if n == 3:
        grid = [step / 60 for step in range(1, 61)]
        pairs = itertools.product(grid, grid)
        found = min(
            time_variance(torch.tensor([0, p, q]).double(), size, cost, rest) for p, q in pairs
        )
        assert product * (1 - 1e-12) <= found < product * 1.01


def test_variance_of_draws():
    """V by 4,000 draws of sampled gradients, within 10 %: each term is a vector of the size's norm
    in a random direction. The systematic draw of pps has less. Catches a V that leaves sampling or
    pruning out."""
    torch.manual_seed(0)
    size, cost = terms(60, 4)
    keep_prob = dppo.adaptive_keep_prob(size, cost, rest=20.0)
    predicted = (size.square() / keep_prob).sum().item()
    assert predicted > 1.2 * size.square().sum().item()
    order = size.argsort()
    independent, systematic = [], []
    for number in range(4000):
        directions = torch.randn(60, 16, dtype=torch.float64)
        directions *= (size / directions.norm(dim=1))[:, None]
        generator = dppo.generator_for(0, number)
        _, weights = dppo.prune(keep_prob, generator)
        independent.append((weights @ directions).square().sum().item())
        keep = dppo.systematic(keep_prob, order, generator.random())
        weights = dppo.ht_weights(keep, keep_prob)
        systematic.append((weights @ directions).square().sum().item())
    assert sum(independent) / 4000 == pytest.approx(predicted, rel=0.1)
    # with independent directions, the two draws differ in nothing; terms that are alike gain
    assert sum(systematic) / 4000 == pytest.approx(predicted, rel=0.1)
    kinds = ([], [])  # of draws: independent, systematic
    for generator in map(dppo.generator_for, range(2000)):
        _, weights = dppo.prune(keep_prob, generator)
        kinds[0].append((weights @ size).item())
        keep = dppo.systematic(keep_prob, order, generator.random())
        kinds[1].append((dppo.ht_weights(keep, keep_prob) @ size).item())
    spread = torch.tensor(kinds).var(dim=1)
    assert spread[1] < 0.5 * spread[0]


def test_terms_of_no_cost_or_of_strange_sizes():
    """Other trainers give what is not theirs the size and the cost 0. Catches 0 / 0, and squares
    that leave float64."""
    size = torch.tensor([[1.0, 2.0, 0.5, 3.0], [0.0] * 4], dtype=torch.float64)
    cost = torch.tensor([[10.0, 10.0, 12.0, 9.0], [0.0] * 4], dtype=torch.float64)
    keep_prob = dppo.adaptive_keep_prob(size, cost, rest=4.0)
    alone = dppo.adaptive_keep_prob(size[:1], cost[:1], rest=4.0)
    assert torch.equal(keep_prob, torch.cat([alone, 0 * alone]))
    assert 0 < alone.min() < 1
    for unit in (1e-160, 1e160):
        assert torch.allclose(dppo.adaptive_keep_prob(unit * size, cost, rest=4.0), keep_prob)
    one = torch.ones(1, 1)
    assert dppo.adaptive_keep_prob(one, one, rest=1e-9).tolist() == [[1.0]]


def test_the_adaptive_rule():
    """p = min(1, tau size / sqrt(tokens)) with tau^2 = T / V, where training on everything takes
    the share r_o of T. Catches a rest that counts live tokens only, and r_o for 1 / r_o."""
    size, cost = (values.view(5, 8) for values in terms(40, 6, dead=10))
    batch = dppo.Completions(size, size, cost, size)
    live = size > 0
    kept = []
    for rate in (0.999, 0.8, 0.3, 1e-12):
        keep_prob = dppo.completion_keep_prob("adaptive", rate, batch)
        rest = cost.sum() * (1 - rate) / rate
        time = rest + (keep_prob * cost).sum()
        variance = (size[live].square() / keep_prob[live]).sum()
        fixed = (size / cost.sqrt() * (time / variance).sqrt()).clamp(max=1)
        assert torch.allclose(keep_prob, fixed, rtol=1e-9)
        kept.append(keep_prob.sum().item())
    assert kept == sorted(kept)
    assert kept[0] < 0.6 * kept[-1], "the dearer training is, the more is dropped"
    assert torch.equal(keep_prob, live.double())
    assert torch.equal(dppo.completion_keep_prob("adaptive", 0.0, batch), live.double())
    nothing = dppo.Completions(0 * size, size, cost, 0 * size)
    assert (dppo.completion_keep_prob("adaptive", 0.8, nothing) == 0).all()


# ---------------------------------------------------------------------------- a run's log


def made_up_rows(rest: float, second: float, fixed: float, steps: int = 20) -> list[dict]:
    """A log whose update takes `fixed` seconds and `second` for each of 100 to 400 tokens; all else
    of a step takes `rest` seconds."""
    rows = []
    for step in range(1, steps + 1):
        kept = 100 + 15 * step
        train = fixed + second * kept
        row = {"step": step, "cost/sampled": 1000.0, "cost/live": 500.0, "cost/kept": float(kept)}
        row |= {"time/train": train, "step_time": rest + train, "groups_by_right": [5, 20, 7]}
        row |= {"frac_reward_zero_std": 0.25, "kept/variance": 1.0 + step % 2}
        for number, known in enumerate(metrics.REST_RATIOS):
            row[f"ceiling/{known:g}"] = 2.0 - 0.1 * number
        rows.append(row)
    return rows


def test_figures_of_a_log():
    """Catches the fixed time of an update that counts as training, a rest that leaves it out, the
    neighbor of a logged value, and a mean of the noise's logarithm."""
    rows = made_up_rows(rest=0.3, second=0.001, fixed=0.2)
    found = figures(rows, "made up", "none")
    assert found["rest_over_training"] == pytest.approx(0.5)  # 500 tokens of 1000
    assert found["ceiling/completions"] == pytest.approx(1.7)
    assert found["live_groups"] == pytest.approx(0.75)
    assert found["variance"] == pytest.approx(28 / 19)
    saved = [(500 + 500) / (500 + 100 + 15 * step) for step in range(2, 21)]
    expected = math.exp(sum(map(math.log, saved)) / 19) / (28 / 19)
    assert found["reached"] == pytest.approx(expected)
    rows = made_up_rows(rest=0.5 * 2**0.5, second=0.001, fixed=0.0)
    expected = 1.7 - 0.1 * 0.5
    assert figures(rows, "made up", "none")["ceiling/completions"] == pytest.approx(expected)
    for row in rows:  # equal tokens: no line can be drawn, so training has no fixed time
        row |= {"cost/kept": 1000.0, "time/train": 1.0, "step_time": 1.25}
    assert figures(rows, "made up", "none")["rest_over_training"] == pytest.approx(0.25)


def test_logs_with_gaps():
    """Steps without a live group, rewards that are not 0 and 1, rules by rank, and logs that are
    too short or too old. Catches a null that ends the command."""
    rows = made_up_rows(rest=0.3, second=0.001, fixed=0.0)
    rows[4] |= {f"ceiling/{known:g}": None for known in metrics.REST_RATIOS}
    rows[4] |= {"kept/variance": None, "frac_reward_zero_std": 1.0}
    rows[5] |= {"cost/kept": 0.0, "groups_by_right": []}
    found = figures(rows, "gaps", "none")
    assert found["ceiling/completions"] == pytest.approx(figures(rows[6:], "", "none")[
        "ceiling/completions"], rel=0.1)  # fmt: skip
    assert math.isnan(found["ceiling/prompts"])
    assert "   -  pruning prompts" in report.report(found)
    by_rank = [row | {"kept/variance": None} for row in rows]
    assert "   -  what this run did" in report.report(figures(by_rank, "rank", "none"))
    with pytest.raises(InputError, match="short: 2 steps after the first one were trained"):
        figures(rows[:3], "short", "none")
    with pytest.raises(InputError, match="old: its log is of an older version"):
        figures([{"step": 2}], "old", "none")


@pytest.mark.parametrize("scale_rewards", ["none", "variance"])
@pytest.mark.parametrize(
    "pass_rates", [[0.0] * 9 + [0.5], [0.5], [0.97], [0.1, 0.5, 0.9, 0.9], [0.0, 0.1, 1.0, 0.4]]
)
def test_prompts_with_known_pass_rates(pass_rates, scale_rewards):
    """The ceiling from expected counts of groups, against the one from the pass rates themselves.
    Catches sizes of the groups that were seen, of which the dead ones would be free, and pass rates
    that are drawn towards the middle."""
    G = 16
    ratio = 0.5
    right = torch.arange(G + 1)
    chance = torch.tensor(
        [[math.comb(G, k) * q**k * (1 - q) ** (G - k) for k in right.tolist()] for q in pass_rates]
    ).double()
    weight = (G - right) / G if scale_rewards == "none" else 1 / right  # of a right completion
    against = right / G if scale_rewards == "none" else 1 / (G - right)
    if scale_rewards == "variance":
        weight, against = weight * G, against * G
    squares = right * weight**2 + (G - right) * against**2
    squares[0] = squares[-1] = 0.0
    size = (chance @ squares.double()).sqrt()
    cost = ratio + 1 - chance[:, 0] - chance[:, -1]
    expected = cost.mean() * size.square().mean() / (size * cost.sqrt()).mean() ** 2
    counts = 1e6 * chance.mean(dim=0)
    got = report.ceiling_of_prompts(counts, ratio, scale_rewards)
    assert got == pytest.approx(expected.item(), rel=0.03)
    if len(set(pass_rates)) == 1:
        assert got == pytest.approx(1.0, abs=0.01)


def test_a_grpo_run(run, tmp_path, capsys):
    """The whole path: GRPO keeps everything, so its noise is that of sampling. Catches columns
    under other names than the reader's."""
    run("grpo", method="grpo", steps=5, loss="dr_grpo")
    report.main(tmp_path / "grpo", tmp_path / "c.json")
    found = json.loads((tmp_path / "c.json").read_text())
    assert found["variance"] == pytest.approx(1.0)
    assert found["kept"] >= 1.0
    assert found["reached"] <= 1.0 <= found["ceiling/completions"]
    assert found["ceiling/prompts"] >= 1.0 - 1e-9
    assert "pruning completions, at most" in capsys.readouterr().out
    with pytest.raises(InputError, match=r"there is no log\.jsonl"):
        report.main(tmp_path / "nowhere")


def test_groups_by_right():
    rewards = torch.tensor([[1.0, 0, 0], [0, 0, 0], [1, 1, 1], [0, 1, 0]])
    assert metrics.groups_by_right(rewards) == [1, 2, 0, 1]
    assert metrics.groups_by_right(rewards / 2) == []
    assert metrics.groups_by_right(torch.tensor([[1.0, math.nan]])) == []


def test_columns_of_the_log():
    """kept/variance is sum a^2 / p over sum a^2 on average, of completions alone; and the ceilings,
    written out. Catches weights of prompts that count twice, a rest of live tokens only, and a step
    without a live group that ends the run."""
    advantages = torch.tensor([[0.0, -0.5, 0.5, -0.5], [0.25, 0.25, 0.25, -0.75]]).double()
    energy = torch.tensor([[1.0, 4, 9, 2], [3, 1, 2, 5]]).double()
    prompt_weights = torch.tensor([2.0, 5.0]).double()
    scale = torch.full((2, 4), 0.1).double()
    cost = torch.arange(1.0, 9).view(2, 4)
    cfg = type("Config", (), {"beta": 0.0, "completion_rule": "pps"})
    size = dppo.contribution_size(advantages, prompt_weights[:, None] * scale, energy, 0.0)
    keep_prob = dppo.pps_keep_prob(size, cost, 10.0)
    found = []
    for number in range(500):
        keep, weights = dppo.prune(keep_prob, dppo.generator_for(number))
        weights = prompt_weights[:, None] * weights
        figures = metrics.ceilings(
            cfg, prompt_weights, energy, advantages, scale, cost, keep, weights
        )
        found.append(figures["kept/variance"])
        assert figures["cost/kept"] == (cost * keep).sum()
        assert figures["cost/sampled"] == 36
        assert figures["cost/live"] == 35  # all but the first, whose advantage is 0
    live = size > 0
    expected = ((size[live] ** 2 / keep_prob[live]).sum() / (size**2).sum()).item()
    assert expected > 1.5
    assert sum(found) / 500 == pytest.approx(expected, rel=0.15)
    for known in metrics.REST_RATIOS:
        rest = 36 * known
        best = dppo.adaptive_keep_prob(size, cost, rest)
        least = (rest + (best * cost).sum()) * (size[live] ** 2 / best[live]).sum()
        everything = (rest + 35) * (size**2).sum()
        assert figures[f"ceiling/{known:g}"] == pytest.approx((everything / least).item())
    dead = metrics.ceilings(
        cfg, prompt_weights, energy, 0 * advantages, scale, cost, keep, 0 * weights
    )
    assert math.isnan(dead["ceiling/1"])
    cfg.completion_rule = "pods"  # its weights are not 1 / p
    by_rank = metrics.ceilings(cfg, prompt_weights, energy, advantages, scale, cost, keep, weights)
    assert math.isnan(by_rank["kept/variance"])
