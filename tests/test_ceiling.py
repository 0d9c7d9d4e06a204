"""The most that pruning can gain: the least time x variance, against other keep probabilities and
against draws; and what is read from the groups of a run, where it is known by hand."""

import itertools
import json
import math
import statistics

import pytest
import torch

import dppo
from bench import ceiling
from bench.ceiling import figures, time_variance
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
        weights = dppo.ht_weights(dppo.independent(keep_prob, generator), keep_prob)
        independent.append((weights @ directions).square().sum().item())
        keep = dppo.systematic(keep_prob, order, generator.random())
        weights = dppo.ht_weights(keep, keep_prob)
        systematic.append((weights @ directions).square().sum().item())
    assert sum(independent) / 4000 == pytest.approx(predicted, rel=0.1)
    # with independent directions, the two draws differ in nothing; terms that are alike gain
    assert sum(systematic) / 4000 == pytest.approx(predicted, rel=0.1)
    kinds = ([], [])  # of draws: independent, systematic
    for generator in map(dppo.generator_for, range(2000)):
        weights = dppo.ht_weights(dppo.independent(keep_prob, generator), keep_prob)
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
    """p = min(1, tau size / sqrt(tokens)) with tau^2 = T / V, where T is the rest and what is
    trained on. A rest of m times all tokens is the rate 1 / (1 + m) of older versions. Catches a
    rest that counts live tokens only, and one that is ignored."""
    size, cost = (values.view(5, 8) for values in terms(40, 6, dead=10))
    live = size > 0
    kept = []
    for m in (0.001, 0.25, 2.0, 1e12):
        batch = dppo.Completions(size, size, cost, size, rest_tokens=m * cost.sum().item())
        keep_prob = dppo.COMPLETION_RULES["adaptive"].keep_prob(batch, 0.0)
        old_rate = 1 / (1 + m)
        old = dppo.adaptive_keep_prob(size, cost, (1 / old_rate - 1) * cost.sum().item())
        assert torch.allclose(keep_prob, old, rtol=1e-4)
        time = m * cost.sum() + (keep_prob * cost).sum()
        variance = (size[live].square() / keep_prob[live]).sum()
        fixed = (size / cost.sqrt() * (time / variance).sqrt()).clamp(max=1)
        assert torch.allclose(keep_prob, fixed, rtol=1e-9)
        kept.append(keep_prob.sum().item())
    assert kept == sorted(kept)
    assert kept[0] < 0.6 * kept[-1], "the dearer training is, the more is dropped"
    assert torch.equal(keep_prob, live.double())
    nothing = dppo.Completions(0 * size, size, cost, 0 * size)  # an update without prompts has none
    assert (dppo.COMPLETION_RULES["adaptive"].keep_prob(nothing, 0.0) == 0).all()
    unknown = dppo.Completions(size, size, cost, size)
    with pytest.raises(dppo.RuleError, match="needs rest_tokens above 0, not 0"):
        dppo.COMPLETION_RULES["adaptive"].keep_prob(unknown, 0.0)


# ---------------------------------------------------------------------------- groups of a run

NAN = math.nan
SETTINGS = {"scale_rewards": "none", "beta": 0.0, "completion_rule": "pps"}


def made_up_row(step: int, m: float = 0.5) -> dict:
    """A row of log.jsonl, in which the rest of a step takes m times as long as training."""
    row = {"step": step, "cost/sampled": 1000.0, "cost/kept": 1000.0, "frac_reward_zero_std": 0.25}
    return row | {"time/train": 2.0, "step_time": 2.0 + 2.0 * m}


def made_up_group(step: int, rewards, *, tokens=1.0, size=1.0, weights=1.0, prompt_weights=None):
    """A row of groups.jsonl as it is read from the file. One number stands for a whole table."""
    K, G = len(rewards), len(rewards[0])
    full = lambda x: x if isinstance(x, list) else [[x] * G] * K
    row = {"step": step, "prompts": [*range(K)], "rewards": rewards, "tokens": full(tokens)}
    row |= {"prompt_weights": prompt_weights or [1.0] * K}
    return row | {"size_of_1": full(size), "weights": full(weights)}


def random_groups(K: int, G: int, steps: int = 6, seed: int = 0) -> list[dict]:
    """Groups whose completions differ in everything; every fourth problem is too hard."""
    draw = torch.Generator().manual_seed(seed)
    rand = lambda: torch.rand(K, G, generator=draw)
    groups = []
    for step in range(2, 2 + steps):
        pass_rates = 0.8 * rand()[:, :1]
        pass_rates[1::4] = 0.0
        rewards = (rand() < pass_rates).double().tolist()
        tables = {"tokens": (9 + 30 * rand()).tolist(), "size": (0.5 + rand()).tolist()}
        weights = torch.where(rand() < 0.6, 1 / 0.6, 0.0).tolist()
        groups.append(made_up_group(step, rewards, weights=weights, **tables))
    return groups


def rows_of(groups: list[dict]) -> list[dict]:
    return [made_up_row(group["step"]) for group in groups]


@pytest.mark.parametrize(("scale_rewards", "beta"), [("none", 0.0), ("none", 0.1), ("group", 0.0)])
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
        block = [NAN if reward is None else reward for reward in rewards[k][g : g + size]]
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
    steps = []
    for number in range(2, 12):
        rewards = [[1, 0, 1, 0], [1, 1, 0, 0]]
        size = [[2.0, 0.5, 0.5, 0.5], [0.5] * 4]
        kept = [[1, 3.5, 0, 0], [3.5, 0, 0, 0]] if number % 2 else [[1, 7, 0, 0], [0] * 4]
        steps.append(made_up_group(number, rewards, size=size, weights=kept))
    return steps


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

    noise = statistics.mean([(1 + 2 * (3.5 / 4) ** 2) / (23 / 16), (1 + (7 / 4) ** 2) / (23 / 16)])
    saved = math.sqrt(12 / (4 + 3) * 12 / (4 + 2))
    return {
        "zero/2": zero2 / zero4,
        "zero/4": 1.0,
        "adaptive/2": adaptive(3, 2, 0.25) / zero4,
        "adaptive/4": adaptive(7, 4, 0.5) / zero4,
        "ceiling/completions": adaptive(7, 4, 0.5) / zero4,
        "rest_over_training": M,
        "live_groups": 0.75,
        "variance": noise,
        "reached": saved / noise,
        "steps": 10,
        "used": 10,
    }


def test_figures_by_hand():
    """Steps that are known in closed form, after a first one that must not count. Catches a
    prompt's completions that are independent, a rest of what was kept, and a mean of the noise's
    logarithm."""
    steps = known_steps()
    first = made_up_group(1, [[1, 0, 0, 0]], size=9.0)
    rows = [made_up_row(1, m=50.0), *rows_of(steps)]
    found = figures(rows, [first, *steps], SETTINGS, "made up", C)
    for name, value in known_figures().items():
        got = found[name][0] if "/" in name and isinstance(found[name], list) else found[name]
        assert got == pytest.approx(value), name
    assert found["zero/2"][1] == pytest.approx(0, abs=1e-6), "all steps are alike"
    others = [made_up_row(row["step"], m=9.0) for row in rows]
    assert figures(others, [first, *steps], SETTINGS, "made up", C, rest=M) == found, "--rest"
    printed = ceiling.report(found)
    assert "10 of them used: those in which every group size has unequal rewards. " in printed
    assert "Rewards differ in 0.75 of the groups." in printed
    assert "GRPO without zeros is predicted to learn fastest with groups of 4." in printed
    gain = f"{known_figures()['adaptive/4']:.2f} times as fast"
    assert f"adaptive with groups of 4 is predicted to be {gain}." in printed
    assert "This run was " in printed


def test_a_step_without_prompts_is_left_out():
    """A rule may drop all of them, and then the log has null for their figures. Catches a null that
    ends the command, and a rest of that step."""
    steps = known_steps()
    nothing = {name: [] for name in steps[0]} | {"step": 12}
    without = made_up_row(12, m=9.0) | {"frac_reward_zero_std": None, "cost/kept": 0.0}
    found = figures([*rows_of(steps), without], [*steps, nothing], SETTINGS, "", C)
    expected = figures(rows_of(steps), steps, SETTINGS, "", C)
    same = ("zero/2", "adaptive/4", "rest_over_training", "live_groups", "reached", "used")
    assert {name: found[name] for name in same} == {name: expected[name] for name in same}


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


def test_a_run_of_larger_groups_says_the_same():
    """Groups of 32, and each cut into four groups of 8: whatever both can say about sizes 2, 4 and
    8 is equal. Catches a figure that depends on the size that was sampled."""
    large = random_groups(K=6, G=32)
    small = [
        group | {name: torch.tensor(group[name]).view(24, 8).tolist() for name in
                 ("rewards", "tokens", "size_of_1", "weights")}
        | {"prompts": [*range(24)], "prompt_weights": [1.0] * 24}
        for group in large
    ]  # fmt: skip
    found = [figures(rows_of(large), groups, SETTINGS, "", 0.3) for groups in (large, small)]
    assert found[0]["adaptive/16"][0] > 0
    for rule, size in itertools.product(("zero", "adaptive"), (2, 4, 8)):
        assert found[0][f"{rule}/{size}"] == found[1][f"{rule}/{size}"]
    assert max(found[0][f"zero/{size}"][0] for size in (16, 32)) < 1, "else relative to these"


def test_a_prompt_of_weight_2_is_two_prompts():
    """A draw of prompts leaves 1 / P(kept) of them. Catches weights that are left out of the time,
    the noise, the signal, or the count of groups."""
    groups = random_groups(K=8, G=6)
    twice = []
    for group in groups:
        group["prompt_weights"] = [1.0, 2.0] * 4
        rows = [place for place in range(8) for _ in range(1 + place % 2)]
        tables = {name: [group[name][row] for row in rows] for name in group if name != "step"}
        twice.append({"step": group["step"]} | tables | {"prompt_weights": [1.0] * 12})
    rows = rows_of(groups)
    one, two = (figures(rows, found, SETTINGS, "") for found in (groups, twice))
    alike = [group | {"prompt_weights": [1.0] * 8} for group in groups]
    ignored = figures(rows, alike, SETTINGS, "")
    assert one.keys() == two.keys()
    for name in one.keys() - {"run", "scale_rewards"}:
        assert one[name] == pytest.approx(two[name], rel=1e-5), name
    for name in ("zero/2", "adaptive/6", "ceiling/prompts", "reached", "variance"):
        assert one[name] != pytest.approx(ignored[name], rel=1e-3), name


def test_what_there_is_no_figure_for():
    """Rewards that are not 0 and 1, rules by rank or of the user's, and runs with too little.
    Catches a null that ends the command, and noise from weights that are not 1 / p."""
    groups, rows = known_steps(), rows_of(known_steps())
    partial = [group | {"rewards": [[0.5, 0, 1, 0], [None, 1, 0, 0]]} for group in groups]
    found = figures(rows, partial, SETTINGS, "")
    assert math.isnan(found["ceiling/prompts"])
    assert "   -  if each prompt's pass rate were known" in ceiling.report(found)
    for rule in ("pods", "mine"):
        printed = ceiling.report(figures(rows, groups, SETTINGS | {"completion_rule": rule}, ""))
        assert "This run was" not in printed
        assert "an objective of its own" not in printed
    other = figures(rows, groups, SETTINGS | {"scale_rewards": "group"}, "")
    assert "--scale-rewards group each group size has an objective of" in ceiling.report(other)
    assert figures(rows[:3], groups, SETTINGS, "")["used"] == 3
    pairs_are_dead = [group | {"rewards": [[1, 1, 0, 0]] * 2} for group in groups]
    dead = [group | {"rewards": [[1] * 4] * 2} for group in groups]
    for few, name in ((groups[:2], "2 steps"), (pairs_are_dead, "0 steps"), (dead, "0 steps")):
        with pytest.raises(InputError, match=f"run: {name} after the first one had live groups of"):
            figures(rows, few, SETTINGS, "run")
    with pytest.raises(InputError, match="run: no step after the first one rolled out a prompt"):
        figures(rows, [made_up_group(1, [[1, 0]])], SETTINGS, "run")


def test_rest_over_training():
    """Seconds of 100 to 400 tokens of 1000, of which an update takes 0.2 s whatever it keeps.
    Catches a fixed time that counts as training, a rest that leaves it out, and a step that waited
    for another program."""
    rows = []
    for step in range(2, 21):
        kept = 100.0 + 15 * step
        train = 0.2 + 0.001 * kept
        row = {"cost/sampled": 1000.0, "cost/kept": kept, "time/train": train}
        rows.append(row | {"step_time": 0.3 + train})
    rows[3]["step_time"] = 99.0
    assert ceiling.rest_over_training(rows) == pytest.approx(0.5)  # 500 tokens of 1000
    for row in rows:  # equal tokens: no line can be drawn, so training has no fixed time
        row |= {"cost/kept": 1000.0, "time/train": 1.0, "step_time": 1.25}
    assert ceiling.rest_over_training(rows) == pytest.approx(0.25)


@pytest.mark.parametrize("slope", [-0.001, 0.003])
def test_a_line_that_no_update_follows(slope):
    """Seconds that fall with the tokens, or that leave a fixed time below 0: all of the time is
    taken to grow with them."""
    kept = torch.tensor([100.0, 200.0, 300.0, 400.0, 500.0], dtype=torch.float64)
    seconds = 0.6 + slope * (kept - 300)
    expected = (seconds / kept).median().item()
    assert ceiling.seconds_of_a_token(kept, seconds) == expected


# ---------------------------------------------------------------------------- prompts


def expected_step(G: int, chance: torch.Tensor) -> ceiling.Step:
    """One step with the groups of 0, 1, .., G right, weighted by their chances [G + 1]."""
    rewards = (torch.arange(G) < torch.arange(G + 1)[:, None]).double()
    return ceiling.Step(rewards, rewards, rewards, rewards, prompt_weights=1e6 * chance)


@pytest.mark.parametrize("scale_rewards", dppo.SCALES)
@pytest.mark.parametrize(
    "pass_rates",
    [
        [0.0] * 9 + [0.5], [0.5], [0.97], [0.1, 0.5, 0.9, 0.9], [0.0, 0.1, 1.0, 0.4],
        [0.0005], [0.9997],
    ],
)  # fmt: skip
def test_prompts_with_known_pass_rates(pass_rates, scale_rewards):
    """The ceiling from expected counts of groups, against the one from the pass rates themselves.
    Catches sizes of the groups that were seen, of which the dead ones would be free, pass rates
    that are drawn towards the middle, a grid that is coarse near 0 and 1, and one class for groups
    that are all wrong and all right."""
    G = 16
    ratio = 0.5
    right = torch.arange(G + 1)
    chance = torch.tensor(
        [[math.comb(G, k) * q**k * (1 - q) ** (G - k) for k in right.tolist()] for q in pass_rates]
    ).double()
    squares = right * (G - right) / G  # of R - mean
    if scale_rewards == "group":
        squares = (G - 1.0) * (squares > 0)
    size2 = chance @ squares.double()
    cost = ratio + 1 - chance[:, 0] - chance[:, -1]
    blind = cost.mean() * size2.mean()
    known = blind / (size2 * cost).sqrt().mean() ** 2
    classes = [chance[:, 0], chance[:, -1], 1 - chance[:, 0] - chance[:, -1]]  # [pass rates] each
    of_class = [((of * size2).mean() * (of * cost).mean()).sqrt() for of in classes]
    last_group = blind / sum(of_class) ** 2
    step = expected_step(G, chance.mean(dim=0))
    found = ceiling.ceilings_of_prompts([step], ratio, scale_rewards)
    assert found == pytest.approx((known.item(), last_group.item()), rel=0.03)
    if len(set(pass_rates)) == 1:
        assert found == pytest.approx((1.0, 1.0), abs=0.03)


def test_prompts_by_the_class_of_their_last_group():
    """Pass rates of a Beta(0.9, 0.35), groups of 16, and a rest as long as training: from 200,000
    prompts, about 1.18 if they are known and 1.08 by class. Catches classes by the rate and not by
    a group, and a keep probability that is not of the class's means."""
    G, m = 16, 1.0
    torch.manual_seed(0)
    rates = torch.distributions.Beta(0.9, 0.35).sample((200_000,)).double()
    dead = torch.stack([(1 - rates) ** G, rates**G, torch.zeros_like(rates)], dim=1)
    dead[:, 2] = 1 - dead[:, 0] - dead[:, 1]  # none right, all, some
    size2 = (G - 1) * rates * (1 - rates)
    cost = m + dead[:, 2]
    blind = size2.mean() * cost.mean()
    known = blind / (size2 * cost).sqrt().mean() ** 2
    last = torch.multinomial(dead, 1)[:, 0]  # the result of one group
    by_class = sum(
        (last == of).double().mean() * (size2[last == of].mean() * cost[last == of].mean()).sqrt()
        for of in range(3)
    )
    right = torch.distributions.Binomial(G, rates).sample().long()
    chance = torch.bincount(right, minlength=G + 1).double() / len(rates)
    found = ceiling.ceilings_of_prompts([expected_step(G, chance)], m, "none")
    assert found == pytest.approx((known.item(), (blind / by_class**2).item()), abs=0.02)


# ---------------------------------------------------------------------------- the command


@pytest.mark.parametrize("method", ["grpo", "pps"])
def test_the_command(run, tmp_path, capsys, method):
    """From a run's files. GRPO keeps everything, so its noise is that of sampling; pps adds some.
    Catches columns under other names than the reader's."""
    options = {"completion_prune_rate": 0.8, "prompt_rule": "uniform", "prompt_prune_rate": 0.25}
    options = options if method == "pps" else {}
    run("run", method=method, steps=8, loss="dr_grpo", prompts_per_step=8, **options)
    ceiling.main(tmp_path / "run", json_file=tmp_path / "c.json")
    found = json.loads((tmp_path / "c.json").read_text())
    assert found["group_size"] == 6
    assert {f"{rule}/{size}" for rule in ("zero", "adaptive") for size in (2, 3, 6)} <= {*found}
    if method == "grpo":
        assert found["variance"] == pytest.approx(1.0)
        assert found["reached"] <= 1.0 <= found["ceiling/completions"]
    else:
        assert found["variance"] > 1.05
    assert found["ceiling/prompts"] + 1e-9 >= found["ceiling/last_group"] >= 1.0 - 1e-9
    assert "Dropping prompts before the rollout" in capsys.readouterr().out
    (tmp_path / "run" / "groups.jsonl").unlink()
    with pytest.raises(InputError, match="run: its log is of an older version"):
        ceiling.main(tmp_path / "run")
    with pytest.raises(InputError, match=r"there is no log\.jsonl"):
        ceiling.main(tmp_path / "nowhere")
