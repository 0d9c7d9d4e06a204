"""The most that pruning can gain: the least time x variance, and what is read from the groups of a
run, where it is known by hand."""

import itertools
import json
import math

import pytest
import torch

import dppo
from bench import ceiling
from bench.ceiling import figures, time_variance
from runtime import InputError


def terms(n: int, seed: int, dead: int = 0):
    """Sizes and costs [n] of n terms, some of which are 0; sizes have a heavy tail."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.rand(n, generator=generator, dtype=torch.float64) ** 3 + 1e-4
    cost = 1 + 9 * torch.rand(n, generator=generator, dtype=torch.float64)
    size[:dead] = 0.0
    return size, cost


@pytest.mark.parametrize("rest_tokens", [0.01, 10.0, 300.0])
@pytest.mark.parametrize(("n", "seed", "dead"), [(1, 0, 0), (3, 1, 1), (300, 3, 50)])
def test_no_other_probabilities_are_better(n, seed, dead, rest_tokens):
    """Brute force on a grid of three, and random changes. Catches a wrong number of certain terms,
    T without the rest, V without the certain terms."""
    size, cost = terms(n, seed, dead)
    keep_prob = dppo.adaptive_keep_prob(size, cost, rest_tokens)
    product = time_variance(keep_prob, size, cost, rest_tokens)
    generator = torch.Generator().manual_seed(seed)
    for spread in (0.01, 0.3):
        for _ in range(50):
            change = 1 + spread * torch.randn(n, generator=generator, dtype=torch.float64)
            other = (keep_prob * change).clamp(1e-9, 1) * (size > 0)
            assert time_variance(other, size, cost, rest_tokens) >= product * (1 - 1e-12)
    if n == 3:
        grid = [step / 60 for step in range(1, 61)]
        found = min(
            time_variance(torch.tensor([0, p, q]).double(), size, cost, rest_tokens)
            for p, q in itertools.product(grid, grid)
        )
        assert product * (1 - 1e-12) <= found < product * 1.01


def test_terms_of_no_cost_or_of_strange_sizes():
    """Other trainers give what is not theirs the size and the cost 0. Catches 0 / 0, and squares
    that leave float64."""
    size = torch.tensor([[1.0, 2.0, 0.5, 3.0], [0.0] * 4], dtype=torch.float64)
    cost = torch.tensor([[10.0, 10.0, 12.0, 9.0], [0.0] * 4], dtype=torch.float64)
    keep_prob = dppo.adaptive_keep_prob(size, cost, 4.0)
    alone = dppo.adaptive_keep_prob(size[:1], cost[:1], 4.0)
    assert torch.equal(keep_prob, torch.cat([alone, 0 * alone]))
    assert 0 < alone.min() < 1
    for unit in (1e-160, 1e160):
        assert torch.allclose(dppo.adaptive_keep_prob(unit * size, cost, 4.0), keep_prob)
    one = torch.ones(1, 1)
    assert dppo.adaptive_keep_prob(one, one, 1e-9).tolist() == [[1.0]]


def test_the_adaptive_rule():
    """It keeps by the batch's own sizes, tokens and rest. Catches a rest that is ignored."""
    size, cost = (values.view(5, 8) for values in terms(40, 6, dead=10))
    rule = dppo.COMPLETION_RULES["adaptive"].keep_prob
    for rest_tokens in (0.1, 50.0, 1e14):
        batch = dppo.Completions(size, size, cost, size, rest_tokens)
        expected = dppo.adaptive_keep_prob(size, cost, rest_tokens)
        assert torch.equal(rule(batch, 0.0), expected)
    assert torch.equal(expected, (size > 0).double()), "the cheaper training is, the more is kept"
    nothing = dppo.Completions(0 * size, size, cost, 0 * size)  # an update without prompts has none
    assert (rule(nothing, 0.0) == 0).all()
    with pytest.raises(dppo.RuleError, match="needs rest_tokens above 0, not 0"):
        rule(dppo.Completions(size, size, cost, size), 0.0)


# ---------------------------------------------------------------------------- groups of a run

SETTINGS = {"scale_rewards": "none", "beta": 0.0}


def made_up_row(step: int, m: float = 0.5) -> dict:
    """A row of log.jsonl, in which the rest of a step takes m times as long as training."""
    row = {"step": step, "cost/sampled": 1000.0, "cost/kept": 1000.0, "frac_reward_zero_std": 0.25}
    return row | {"time/train": 2.0, "step_time": 2.0 + 2.0 * m}


def made_up_group(step: int, rewards, *, tokens=1.0, size=1.0, prompt_weights=None):
    """A row of groups.jsonl as it is read from the file. One number stands for a whole table."""
    K, G = len(rewards), len(rewards[0])
    full = lambda x: x if isinstance(x, list) else [[x] * G] * K
    row = {"step": step, "prompts": [*range(K)], "rewards": rewards, "tokens": full(tokens)}
    return row | {"prompt_weights": prompt_weights or [1.0] * K, "size_of_1": full(size)}


def rows_of(groups: list[dict]) -> list[dict]:
    return [made_up_row(group["step"]) for group in groups]


@pytest.mark.parametrize(("scale_rewards", "beta"), [("none", 0.0), ("group", 0.1)])
@pytest.mark.parametrize("size", [2, 3, 6])
def test_sizes_of_smaller_groups(scale_rewards, beta, size):
    """Each block of a group is a group: its own mean, its own zeros. Catches blocks of different
    prompts, advantages of the whole group, and a masked or unscorable completion with a size."""
    rewards = [[1, 0, 0, 0, 1, 1], [0, 0, 0, 1, 1, 1], [0, 0, 0, 0, 0, 0.5]]
    rewards.append([1, None, 1, 1, 0, None])
    of_1 = torch.arange(1.0, 25).view(4, 6).double()
    of_1[0, 4] = 0.0  # masked
    weights = [1.0, 4.0, 2.0, 1.0]
    row = made_up_group(2, rewards, size=of_1.tolist(), prompt_weights=weights)
    settings = {"scale_rewards": scale_rewards, "beta": beta}
    found, signal = ceiling.sizes(ceiling.as_step(row), size, settings)
    total, expected = 0.0, torch.zeros(4, 6, dtype=torch.float64)
    for k, g in itertools.product(range(4), range(0, 6, size)):
        block = [math.nan if reward is None else reward for reward in rewards[k][g : g + size]]
        block = torch.tensor([block], dtype=torch.float64)
        advantage = dppo.group_advantages(block, scale_rewards)[0].abs()
        expected[k, g : g + size] = (advantage + beta) * of_1[k, g : g + size] * weights[k] ** 0.5
        trained = of_1[k, g : g + size] > 0  # a masked completion carries no signal
        total += weights[k] * (advantage * trained).sum().item()
    assert torch.allclose(found.view(4, 6), expected, rtol=1e-12)
    assert signal == pytest.approx(total / (8 * 6))
    assert found[4] == 0
    if beta == 0:
        assert found[19] == found[23] == 0, "unscorable"
        assert (found.view(4, 6)[1, :3] == 0).all() == (size == 3)


M = 0.5  # rest over training
C = 0.2  # correlation of a prompt's completions


def known_steps() -> list[dict]:
    """Groups of four, one of which is dead as two pairs. With 8 tokens a step the rest is 4. All
    |advantages| are 1/2; one completion is four times as large as each of the others."""
    rewards, size = [[1, 0, 1, 0], [1, 1, 0, 0]], [[2.0, 0.5, 0.5, 0.5], [0.5] * 4]
    return [made_up_group(number, rewards, size=size) for number in range(2, 12)]


def known_figures() -> dict:
    """In closed form: without pruning T V is (rest + n) (sum a^2 + (G - 1) c sum a^2), and the
    least T sum a^2 / p is (a_1 sqrt(rest + 1) + a_2 + ..)^2, if only the first has p = 1. Sizes
    here are a_1 = 1 and 1/4, three of them for pairs, seven for fours."""
    zero2 = 0.25**2 / ((4 + 4) * (1 + 3 / 16) * (1 + C))
    zero4 = 0.5**2 / ((4 + 8) * (1 + 7 / 16) * (1 + 3 * C))

    def adaptive(n, G, signal):
        p = 0.25 * 5**0.5  # of the small ones: tau is sqrt(rest + 1)
        time, noise = 4 + 1 + n * p, 1 + n / 16 / p
        assert time * noise == pytest.approx((5**0.5 + n / 4) ** 2)
        return signal**2 / (time * (noise + (G - 1) * C * (1 + n / 16)))

    return {
        "zero/2": zero2 / zero4,
        "zero/4": 1.0,
        "adaptive/2": adaptive(3, 2, 0.25) / zero4,
        "adaptive/4": adaptive(7, 4, 0.5) / zero4,
        "ceiling/completions": adaptive(7, 4, 0.5) / zero4,
        "rest": M,
        "live_groups": 0.75,
        "steps": 11,
        "used": 10,
    }


def test_figures_by_hand():
    """Steps that are known in closed form. Neither a first one nor one of which all prompts were
    dropped must count. Catches a prompt's completions that are independent."""
    empty = made_up_row(12, m=9.0) | {"frac_reward_zero_std": None, "cost/kept": 0.0}
    rows = [made_up_row(1, m=50.0), *rows_of(known_steps()), empty]
    first = made_up_group(1, [[1, 0, 0, 0]], size=9.0)
    groups = [first, *known_steps(), {name: [] for name in first} | {"step": 12}]
    found = figures(rows, groups, SETTINGS, "made up", C)
    for name, value in known_figures().items():
        got = found[name][0] if isinstance(found[name], list) else found[name]
        assert got == pytest.approx(value), name
    assert found["zero/2"][1] == pytest.approx(0, abs=1e-6), "all steps are alike"
    others = [row | {"step_time": 99.0} for row in rows]
    assert figures(others, groups, SETTINGS, "made up", C, rest=M) == found, "--rest"
    printed = ceiling.report(found)
    assert "10 of them used: those in which every group size has unequal rewards. " in printed
    assert "Rewards differ in 0.75 of the groups." in printed
    assert "GRPO without zeros is predicted to learn fastest with groups of 4." in printed
    gain = f"{known_figures()['adaptive/4']:.2f} times as fast"
    assert f"adaptive with groups of 4 is predicted to be {gain}." in printed


def test_intervals_are_of_pairs_of_steps():
    """All group sizes are of the same steps, so their common noise cancels. 400 steps, within
    15 %. Catches steps that are drawn anew for each size, and a deviation without the 1.96."""
    draw = torch.Generator().manual_seed(1)
    common, own = torch.randn(2, 400, generator=draw, dtype=torch.float64)
    same = torch.full((400,), 0.5, dtype=torch.float64)
    columns = {("zero", 2): torch.stack([same, common])}
    columns["zero", 4] = torch.stack([same, common + 0.1 * own + 1])
    found = ceiling.relative_progress(columns)
    assert found["zero/2"] == [1.0, 0.0]
    value, half = found["zero/4"]
    assert value == pytest.approx(math.exp(-1 - 0.1 * own.mean().item()))
    assert half == pytest.approx(1.96 * value * 0.1 * own.std().item() / 20, rel=0.15)


def test_a_prompt_of_weight_2_is_two_prompts():
    """A draw of prompts leaves 1 / P(kept) of them. Catches weights that are left out of the time,
    the noise, the signal, or the count of groups."""
    draw = torch.Generator().manual_seed(0)
    rand = lambda: torch.rand(8, 6, generator=draw)
    groups, twice = [], []
    for step in range(2, 8):
        rewards = (rand() < torch.tensor([[0.1], [0.6]] * 4)).double().tolist()
        tokens, size = (9 + 30 * rand()).tolist(), (0.5 + rand()).tolist()
        group = made_up_group(step, rewards, tokens=tokens, size=size)
        groups.append(group | {"prompt_weights": [1.0, 2.0] * 4})
        rows = [place for place in range(8) for _ in range(1 + place % 2)]
        tables = {name: [group[name][row] for row in rows] for name in group if name != "step"}
        twice.append({"step": step} | tables)
    rows = rows_of(groups)
    one, two = (figures(rows, found, SETTINGS, "") for found in (groups, twice))
    alike = [group | {"prompt_weights": [1.0] * 8} for group in groups]
    ignored = figures(rows, alike, SETTINGS, "")
    for name in one.keys() - {"run", "scale_rewards"}:
        assert one[name] == pytest.approx(two[name], rel=1e-5), name
    for name in ("zero/2", "adaptive/6", "ceiling/prompts"):
        assert one[name] != pytest.approx(ignored[name], rel=1e-3), name


def test_what_there_is_no_figure_for():
    """Rewards that are not 0 and 1, and runs with too little. Catches a null that ends the
    command."""
    groups, rows = known_steps(), rows_of(known_steps())
    partial = [group | {"rewards": [[0.5, 0, 1, 0], [None, 1, 0, 0]]} for group in groups]
    found = figures(rows, partial, SETTINGS, "")
    assert math.isnan(found["ceiling/prompts"])
    assert "   -  if each prompt's pass rate were known" in ceiling.report(found)
    other = figures(rows, groups, SETTINGS | {"scale_rewards": "group"}, "")
    assert "--scale-rewards group each group size has an objective of" in ceiling.report(other)
    assert figures(rows[:3], groups, SETTINGS, "")["used"] == 3
    pairs_are_dead = [group | {"rewards": [[1, 1, 0, 0]] * 2} for group in groups]
    for few, count in ((groups[:2], 2), (pairs_are_dead, 0)):
        with pytest.raises(InputError, match=f"run: {count} steps after the first one had live "):
            figures(rows, few, SETTINGS, "run")
    with pytest.raises(InputError, match="run: no step after the first one rolled out a prompt"):
        figures(rows, [made_up_group(1, [[1, 0]])], SETTINGS, "run")


PASS_RATES = [[0.0] * 9 + [0.5], [0.97], [0.1, 0.5, 0.9, 0.9], [0.0, 0.1, 1.0, 0.4], [0.0005]]


@pytest.mark.parametrize("pass_rates", PASS_RATES)
def test_prompts_with_known_pass_rates(pass_rates):
    """The ceiling from expected counts of groups, against the one from the pass rates themselves.
    Catches sizes of the groups that were seen, of which the dead ones would be free, pass rates
    that are drawn towards the middle, a grid that is coarse near 0 and 1, and one class for groups
    that are all wrong and all right."""
    G, rest = 16, 0.5
    right = torch.arange(G + 1)
    rates = torch.tensor(pass_rates, dtype=torch.float64)[:, None]
    chance = torch.distributions.Binomial(G, rates).log_prob(right.double()).exp()
    size2 = chance @ (right * (G - right) / G).double()  # of R - mean, squared and added up
    dead = chance[:, 0] + chance[:, -1]
    cost = rest + 1 - dead
    blind = cost.mean() * size2.mean()
    known = blind / (size2 * cost).sqrt().mean() ** 2
    classes = [chance[:, 0], chance[:, -1], 1 - dead]  # [pass rates] each
    of_class = [((of * size2).mean() * (of * cost).mean()).sqrt() for of in classes]
    last_group = blind / sum(of_class) ** 2
    rewards = (torch.arange(G) < right[:, None]).double()  # the groups with 0, 1, .., G right
    step = ceiling.Step(rewards, rewards, rewards, prompt_weights=1e6 * chance.mean(dim=0))
    found = ceiling.ceilings_of_prompts([step], rest, "none")
    assert found == pytest.approx((known.item(), last_group.item()), rel=0.01)


# ---------------------------------------------------------------------------- the command


def test_the_command(run, tmp_path, capsys):
    """From a run's files. Catches columns under other names than the reader's."""
    options = {"completion_prune_rate": 0.8, "prompt_rule": "uniform", "prompt_prune_rate": 0.25}
    run("run", method="pps", steps=8, loss="dr_grpo", prompts_per_step=8, **options)
    ceiling.main(tmp_path / "run", json_file=tmp_path / "c.json")
    found = json.loads((tmp_path / "c.json").read_text())
    assert found["group_size"] == 6
    assert {f"{rule}/{size}" for rule in ("zero", "adaptive") for size in (2, 3, 6)} <= {*found}
    assert found["ceiling/completions"] >= 1.0
    assert found["ceiling/prompts"] + 1e-6 >= found["ceiling/last_group"] >= 1.0 - 1e-6
    assert "Dropping prompts before the rollout" in capsys.readouterr().out
    (tmp_path / "run" / "groups.jsonl").unlink()
    with pytest.raises(InputError, match=r"run: there is no groups\.jsonl"):
        ceiling.main(tmp_path / "run")
    with pytest.raises(InputError, match="nowhere holds nothing of ours where a training run"):
        ceiling.main(tmp_path / "nowhere")


def test_a_folder_of_another_kind(tmp_path):
    """Catches a KeyError, and the name of a file where the kind of folder is the mistake."""
    (tmp_path / "config.json").write_text('{"weights": 7}')
    with pytest.raises(InputError, match="holds an evaluation where a training run should be"):
        ceiling.main(tmp_path)
