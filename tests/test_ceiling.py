"""The least time x variance, and what is read from the log of a run, where it is known by hand."""

import json
import math
import shlex
import shutil
from dataclasses import asdict
from pathlib import Path

import pyarrow.parquet
import pytest
import torch

import config
import dppo
from bench import ceiling
from bench.ceiling import Run, figures, time_and_noise
from runtime import InputError


def terms(n: int, seed: int, dead: int = 0):
    """Sizes and costs [n] of n terms, some of which are 0; sizes have a heavy tail."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.rand(n, generator=generator, dtype=torch.float64) ** 3 + 1e-4
    cost = 1 + 9 * torch.rand(n, generator=generator, dtype=torch.float64)
    size[:dead] = 0.0
    return size, cost


@pytest.mark.parametrize("rest", [0.01, 0.1, 2.0])
@pytest.mark.parametrize(("n", "seed", "dead"), [(1, 0, 0), (3, 1, 1), (300, 3, 50)])
def test_no_other_probabilities_are_better(n, seed, dead, rest):
    """Neither more nor less of all, nor changes at random. Catches a wrong number of certain terms,
    T without the rest, V without the certain terms."""
    size, cost = terms(n, seed, dead)
    keep_prob = dppo.adaptive_keep_prob(size, cost, rest)
    product = math.prod(time_and_noise(keep_prob, size, cost, rest))
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(50, n, generator=generator, dtype=torch.float64)
    for change in (0.99, 1.01, *(1 + 0.01 * noise), *(1 + 0.3 * noise)):
        other = (keep_prob * change).clamp(1e-9, 1) * (size > 0)
        assert math.prod(time_and_noise(other, size, cost, rest)) >= product - 1e-12


def test_terms_of_no_cost_or_of_strange_sizes():
    """Other trainers give what is not theirs the size and the cost 0. Catches 0 / 0, and squares
    that leave float64."""
    size = torch.tensor([[1.0, 2.0, 0.5, 3.0], [0.0] * 4], dtype=torch.float64)
    cost = torch.tensor([[10.0, 10.0, 12.0, 9.0], [0.0] * 4], dtype=torch.float64)
    keep_prob = dppo.adaptive_keep_prob(size, cost, 0.1)
    alone = dppo.adaptive_keep_prob(size[:1], cost[:1], 0.1)
    assert torch.equal(keep_prob, torch.cat([alone, 0 * alone]))
    assert 0 < alone.min() < 1
    for unit in (1e-160, 1e160):
        assert torch.allclose(dppo.adaptive_keep_prob(unit * size, cost, 0.1), keep_prob)
    one = torch.ones(1, 1)
    assert dppo.adaptive_keep_prob(one, one, 1e-9).tolist() == [[1.0]]


def test_the_adaptive_rule():
    """It keeps by the batch's own sizes, tokens and rest. Catches a rest that is ignored."""
    size, cost = (values.view(5, 8) for values in terms(40, 6, dead=10))
    rule = dppo.COMPLETION_RULES["adaptive"].keep_prob
    for rest in (0.01, 2.0, 1e12):
        batch = dppo.Completions(size, size, cost, size, rest)
        expected = dppo.adaptive_keep_prob(size, cost, rest)
        assert torch.equal(rule(batch, 0.0), expected)
    assert torch.equal(expected, (size > 0).double()), "the cheaper training is, the more is kept"
    nothing = dppo.Completions(0 * size, size, cost, 0 * size)  # an update without prompts has none
    assert (rule(nothing, 0.0) == 0).all()
    usual = dppo.Completions(size, size, cost, size)
    assert torch.equal(rule(usual, 0.0), dppo.adaptive_keep_prob(size, cost, dppo.REST))


# ---------------------------------------------------------------------------- groups of a run

SETTINGS = {"scale_rewards": "none", "beta": 0.0}
TRL, VERL = (Path(__file__).parent / "rollouts" / name for name in ("trl.parquet", "verl.jsonl"))


def made_up_step(rewards, *, tokens=1.0, size=1.0, prompt_weights=None):
    """One number stands for a whole table."""
    K, G = len(rewards), len(rewards[0])
    full = lambda x: x if isinstance(x, list) else [[x] * G] * K
    row = {"rewards": rewards, "tokens": full(tokens), "size_of_1": full(size)}
    return ceiling.as_step(row | {"prompt_weights": prompt_weights or [1.0] * K})


@pytest.mark.parametrize(("scale_rewards", "beta"), [("none", 0.0), ("group", 0.1)])
def test_sizes_of_smaller_groups(scale_rewards, beta):
    """As pairs, of prompts of weight 1 and 4. Each pair is a group: its own mean, its own zeros.
    Catches blocks of different prompts, advantages of the whole group, and a masked or unscorable
    completion with a size."""
    rewards = [[1, 0, 0, 0, 1, 0], [1, None, 1, 1, 0, 1]]
    of_1 = [[1.0, 2.0, 3.0, 4.0, 0.0, 6.0], [7.0, 8.0, 9.0, 10.0, 11.0, 12.0]]  # 0: masked
    step = made_up_step(rewards, size=of_1, prompt_weights=[1.0, 4.0])
    settings = {"scale_rewards": scale_rewards, "beta": beta}
    size, signal = ceiling.sizes(step, 2, settings)
    live = torch.tensor([[1, 1, 0, 0, 1, 1], [0, 0, 0, 0, 1, 1]])
    advantage = 0.5 if scale_rewards == "none" else 0.5 / (0.5**0.5 + 1e-4)
    wanted = (advantage * live + beta) * step.size_of_1 * torch.tensor([[1], [2]])
    torch.testing.assert_close(size.view(2, 6), wanted)
    assert signal.item() == pytest.approx(advantage * 0.5 * (3 + 4 * 2))


REST = 0.5


def known_run() -> Run:
    """Groups of four, one of which is dead as two pairs. With 8 tokens a step the rest is 4. All
    |advantages| are 1/2; one completion is four times as large as each of the others."""
    rewards, size = [[1, 0, 1, 0], [1, 1, 0, 0]], [[2.0, 0.5, 0.5, 0.5], [0.5] * 4]
    return Run([made_up_step(rewards, size=size)] * 10, SETTINGS, REST)


@pytest.mark.parametrize(("place", "rho"), [*enumerate(ceiling.CORRELATIONS)])
def test_figures_by_hand(place, rho):
    """In closed form: without pruning T V is (rest + n) (sum a^2 + (G - 1) rho sum a^2), and the
    least T sum a^2 / p is (a_1 sqrt(rest + 1) + a_2 + ..)^2, if only the first has p = 1. Sizes
    here are a_1 = 1 and 1/4, three of them for pairs, seven for fours. Catches completions of a
    prompt that are independent, and sums of the wrong steps."""
    p = 0.25 * 5**0.5  # of the small ones: tau is sqrt(rest + 1)

    def adaptive(n, G, signal):
        time, noise = 4 + 1 + n * p, 1 + n / 16 / p
        assert time * noise == pytest.approx((5**0.5 + n / 4) ** 2)
        return signal**2 / (time * (noise + (G - 1) * rho * (1 + n / 16)))

    zero2 = 1 / ((4 + 4) * (1 + 3 / 16) * (1 + rho))
    zero4 = 2**2 / ((4 + 8) * (1 + 7 / 16) * (1 + 3 * rho))
    found = figures(known_run(), "made up")
    assert [found[rule].pop("fastest") for rule in ceiling.RULES] == [[4], [4]]
    speeds = [speed[place] for rule in ceiling.RULES for speed in found[rule].pop("speed")]
    wanted = (zero2, zero4, adaptive(3, 2, 1), adaptive(7, 4, 2))
    assert speeds == pytest.approx([speed / zero4 for speed in wanted])
    assert found["zero"] == pytest.approx({"trained": 1, "faster": 1, "noise": 1})
    time, noise = 5 + 7 * p, (1 + 7 / 16 / p) / (1 + 7 / 16)
    wanted = {"trained": time / 8 - REST, "faster": 12 / time, "noise": noise}
    assert found["adaptive"] == pytest.approx(wanted)
    assert found["seconds"] == pytest.approx([8 / 12, 1])
    other = figures(known_run(), "made up", rest=3.0)
    assert other["rest"] == 3.0
    assert other["adaptive"]["trained"] > found["adaptive"]["trained"]


def test_group_sizes_that_may_be_the_fastest():
    """Each is near the best at some correlation. Catches one that is near at none of them."""
    speeds = torch.tensor([[0.5, 2.0], [0.8, 1.8], [1.0, 1.0], [0.9, 1.0]])
    assert ceiling.fastest([2, 4, 8, 16], speeds) == [2, 4, 8, 16]
    speeds[1] = torch.tensor([0.85, 1.7])
    assert ceiling.fastest([2, 4, 8, 16], speeds) == [2, 8, 16]


def test_a_prompt_of_weight_2_is_two_prompts():
    """A draw of prompts leaves 1 / P(kept) of them. Catches weights that are left out of the time,
    the noise, the signal, or the count of groups."""
    draw = torch.Generator().manual_seed(0)
    rand = lambda: torch.rand(8, 6, generator=draw)
    weighted, twice, ignored = [], [], []
    for _ in range(6):
        rewards = (rand() < torch.tensor([[0.1], [0.6]] * 4)).double().tolist()
        step = made_up_step(rewards, tokens=(9 + 30 * rand()).tolist(), size=rand().tolist())
        weighted.append(step._replace(prompt_weights=torch.tensor([1.0, 2.0] * 4).double()))
        places = [place for place in range(8) for _ in range(1 + place % 2)]
        twice.append(ceiling.Step(*(table[places] for table in step)))
        ignored.append(step)
    one, two, other = (figures(Run(x, SETTINGS), "", 0.5) for x in (weighted, twice, ignored))
    parts = [
        (x["live_groups"], x["zero"]["trained"], x["adaptive"]["noise"], x["zero"]["speed"][0][0],
         x["adaptive"]["speed"][1][0])
        for x in (one, two, other)
    ]  # fmt: skip
    assert parts[0] == pytest.approx(parts[1], rel=1e-5)
    assert not any(a == pytest.approx(b, rel=1e-3) for a, b in zip(parts[0], parts[2], strict=True))


def test_what_there_is_no_figure_for(tmp_path):
    """Runs with too little, and rewards that say nothing of other group sizes. Catches a null that
    ends the command."""
    steps = known_run().steps
    with pytest.raises(InputError, match=r"run: rewards differ in 18 of 18 groups, and 20 are ne"):
        figures(Run(steps[1:], SETTINGS, REST), "run")
    for rest in (None, 0.0, -1.0):
        with pytest.raises(InputError, match=r"run: give --rest above 0, .*other-trainers\.md"):
            figures(Run(steps, SETTINGS), "run", rest)
    partial = [made_up_step([[0.5, 0, 1, 0], [None, 1, 0, 0]])] * 10
    for scale_rewards, nothing in (("none", False), ("group", True)):
        run = Run(partial, SETTINGS | {"scale_rewards": scale_rewards}, REST)
        said = ceiling.report(figures(run, "run"), run)
        assert ("Nothing can be said of other group sizes." in said) == nothing
    (tmp_path / "log.jsonl").write_text('{"step": 0}\n')
    for nowhere in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(InputError, match=r"no step is logged here\. There is neither"):
            ceiling.read(nowhere)


# ---------------------------------------------------------------------------- logs


def test_what_trl_wrote(tmp_path):
    """A file of TRL 1.16.0, somewhere in a folder. Catches rewards of another column."""
    (tmp_path / "completions").mkdir()
    shutil.copy(TRL, tmp_path / "completions")
    run = ceiling.read(tmp_path)
    rows = pyarrow.parquet.ParquetFile(TRL).read().to_pylist()  # those of a prompt are together
    right = torch.tensor([row["right"] for row in rows], dtype=torch.float64).view(6, 8)
    found, expected = (dppo.group_advantages(x, "group") for x in (run.steps[0].rewards, right))
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=0)
    assert run.trainer == "TRL"


def test_what_verl_wrote(monkeypatch, capsys, tmp_path):
    """A file of verl 0.9.1. Two of its six groups of 4 are live, with 179 of 1111 characters."""
    monkeypatch.setattr(ceiling, "ENOUGH", 2)
    ceiling.main(VERL, rest=2.3, json_file=tmp_path / "found.json")
    found = json.loads((tmp_path / "found.json").read_text())
    assert (found["steps"], found["prompts"], found["group_sizes"]) == (1, 6, [2, 4])
    assert found["live_groups"] == pytest.approx(2 / 6)
    assert found["zero"]["faster"] == pytest.approx(3.3 / (2.3 + 179 / 1111))
    assert "an objective of its own" in " ".join(capsys.readouterr().out.split())
    ceiling.main(VERL, rest=2.3, scale_rewards="none")
    assert "an objective of its own" not in " ".join(capsys.readouterr().out.split())


def test_rows_of_other_trainers(tmp_path):
    """A prompt that was drawn twice, one that lost a completion, a chat, and a reward that is
    missing. Catches a group of two steps, and rows that are out of order."""
    chat = [{"role": "user", "content": "abc"}]
    twice = [(1, "ab", "x" * length, length) for length in (1, 2, 3, 4)]
    rows = [(1, chat, "", None), *twice, (1, chat, "xx", 5.0), (1, "lost", "x", 0.0)]
    first, second = ceiling.as_steps([*rows, (2, "ab", "", 7.0), (2, "ab", "", 8.0)])
    assert first.rewards.nan_to_num(9).tolist() == [[9, 5], [1, 2], [3, 4]]
    assert first.cost.tolist() == [[3, 5], [3, 4], [5, 6]]
    assert first.size_of_1.square().round().tolist() == [[0, 2], [1, 2], [3, 4]]
    assert second.rewards.tolist() == [[7, 8]]
    (tmp_path / "1.jsonl").write_text('{"step": 1, "input": "a"}\n')
    with pytest.raises(InputError, match=r"1\.jsonl is no log with .*score \(KeyError\('output'\)"):
        ceiling.read(tmp_path)
    (tmp_path / "half.parquet").write_bytes(TRL.read_bytes()[:1000])
    with pytest.raises(InputError, match=r"half\.parquet is no log with the columns step, prom"):
        ceiling.read(tmp_path / "half.parquet")


# ---------------------------------------------------------------------------- the command

CHANGES = {
    "TRL": "one with num_generations=4, and all else",
    "verl": "rollout.n=4 data.train_batch_size=4 and 2 times its",
    "train.py": "--steps 46 --prompts-per-step 4 --group-size 4 --out-dir out-4x4",
}


@pytest.mark.parametrize("trainer", CHANGES)
def test_two_runs_that_would_settle_it(trainer):
    """Not with groups of 2, of which it warns. Catches a batch of fewer completions."""
    rewards = [[1, 0, 0, 0, 0, 0, 0, 0], [1, 1, 0, 0, 1, 0, 1, 0]]
    run = Run([made_up_step(rewards)] * 10, SETTINGS | {"prompts_per_step": 2}, 1.0, trainer)
    said = " ".join(ceiling.report(figures(run, "run"), run).split())
    assert CHANGES[trainer] in said
    assert "Beware of groups of 2: one of five" in said


def test_the_command(run, tmp_path, capsys):
    """From a run's files. Catches columns under other names than the reader's, and a proposed run
    with another setting than this one."""
    rates = {"completion_prune_rate": 0.8, "prompt_rule": "uniform", "prompt_prune_rate": 0.25}
    batch = {"steps": 8, "prompts_per_step": 8, "mask_truncated": True}
    run("run", method="pps", loss="dr_grpo", **batch, **rates)
    ceiling.main(tmp_path / "run")
    said = " ".join(capsys.readouterr().out.split())
    assert "8 steps of 6 prompts x 6 completions of train.py. " in said
    assert "(measured in this run)." in said
    settings = ceiling.read(tmp_path / "run").settings
    proposed = shlex.split(ceiling.command(settings, group_size=3, prompts=16, steps=50))
    again = asdict(config.resolve(config.parse_config(proposed[2:])))
    wanted = {"method": "nonzero", "completion_rule": "nonzero", "prompt_rule": "none"}
    wanted |= {"group_size": 3, "prompts_per_step": 16, "steps": 50, "out_dir": "out-16x3"}
    unused = ("completion_prune_rate", "prompt_prune_rate", "rest", "eval_every")
    assert {**again, **dict.fromkeys(unused)} == {**settings, **wanted, **dict.fromkeys(unused)}
