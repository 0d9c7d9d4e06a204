"""The least time x variance, and what is read from the log of a run, where it is known by hand."""

import json
import math
import shutil
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import torch

import dppo
from bench import ceiling
from bench.ceiling import LogError, Run, figures


@pytest.mark.parametrize("rest", [0.01, 0.1, 2.0])
@pytest.mark.parametrize(("n", "seed", "dead"), [(1, 0, 0), (3, 1, 1), (300, 3, 50)])
def test_no_other_probabilities_are_better(n, seed, dead, rest):
    """Neither more nor less of all, nor changes at random. Catches a wrong number of certain terms,
    T without the rest, V without the certain terms."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.rand(n, generator=generator, dtype=torch.float64) ** 3 + 1e-4  # a heavy tail
    cost = 1 + 9 * torch.rand(n, generator=generator, dtype=torch.float64)
    size[:dead] = 0.0
    batch = dppo.Completions(size, size, cost, size, rest)
    keep_prob = dppo.COMPLETION_RULES["adaptive"].keep_prob(batch, 0.0)

    def time_x_noise(p):
        noise = (size[size > 0].square() / p[size > 0]).sum()
        return (rest * cost.sum() + (p * cost).sum()) * noise

    least = time_x_noise(keep_prob)
    noise = torch.randn(50, n, generator=generator, dtype=torch.float64)
    for change in (0.99, 1.01, *(1 + 0.01 * noise), *(1 + 0.3 * noise)):
        other = (keep_prob * change).clamp(1e-9, 1) * (size > 0)
        assert time_x_noise(other) >= least - 1e-12


def test_terms_of_no_cost_or_of_strange_sizes():
    """Other trainers give what is not theirs the size and the cost 0. Catches 0 / 0, and squares
    that leave float64."""
    size = torch.tensor([[1.0, 2.0, 0.5, 3.0], [0.0] * 4], dtype=torch.float64)
    cost = torch.tensor([[10.0, 10.0, 12.0, 9.0], [0.0] * 4], dtype=torch.float64)
    keep_prob = dppo.adaptive_keep_prob(size, cost, 0.1)
    alone = dppo.adaptive_keep_prob(size[:1], cost[:1], 0.1)
    assert torch.equal(keep_prob, torch.cat([alone, 0 * alone]))
    for unit in (1e-160, 1e160):
        assert torch.allclose(dppo.adaptive_keep_prob(unit * size, cost, 0.1), keep_prob)


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
def test_figures_by_hand(monkeypatch, place, rho):
    """In closed form: without pruning T V is (rest + n) (sum a^2 + (G - 1) rho sum a^2), and the
    least T sum a^2 / p is (a_1 sqrt(rest + 1) + a_2 + ..)^2, if only the first has p = 1. Sizes
    here are a_1 = 1 and 1/4, three of them for pairs, seven for fours. Catches completions of a
    prompt that are independent, sums of the wrong steps, and a rule that believes the run's
    rest."""
    monkeypatch.setattr(dppo, "REST", REST)
    p = 0.25 * 5**0.5  # of the small ones: tau is sqrt(rest + 1)

    def adaptive(n, G, signal):
        time, noise = 4 + 1 + n * p, 1 + n / 16 / p
        assert time * noise == pytest.approx((5**0.5 + n / 4) ** 2)
        return signal**2 / (time * (noise + (G - 1) * rho * (1 + n / 16)))

    zero2 = 1 / ((4 + 4) * (1 + 3 / 16) * (1 + rho))
    zero4 = 2**2 / ((4 + 8) * (1 + 7 / 16) * (1 + 3 * rho))
    found = figures(known_run(), "made up")
    speeds = [speed[place] for of_rule in found["speed"] for speed in of_rule[0]]
    wanted = (zero2, zero4, adaptive(3, 2, 1), adaptive(7, 4, 2))
    assert speeds == pytest.approx([speed / zero4 for speed in wanted])
    trained, noise = 1 + 7 * p, (1 + 7 / 16 / p) / (1 + 7 / 16)
    assert found["trained"] == pytest.approx([1, trained / 8])
    assert found["noise"] == pytest.approx([1, noise])
    assert found["faster"] == [pytest.approx([1]), pytest.approx([12 / (4 + trained)])]


def test_a_prompt_of_weight_2_is_two_prompts():
    """A draw of prompts leaves 1 / P(kept) of them. Catches weights that are left out of the time,
    the noise, the signal, or the count of groups."""
    draw = torch.Generator().manual_seed(0)
    rand = lambda: torch.rand(8, 6, generator=draw)
    weighted, twice = [], []
    for _ in range(6):
        rewards = (rand() < torch.tensor([[0.1], [0.6]] * 4)).double().tolist()
        step = made_up_step(rewards, tokens=(9 + 30 * rand()).tolist(), size=rand().tolist())
        weighted.append(step._replace(prompt_weights=torch.tensor([1.0, 2.0] * 4).double()))
        places = [place for place in range(8) for _ in range(1 + place % 2)]
        twice.append(ceiling.Step(*(table[places] for table in step)))
    one, two = (figures(Run(steps, SETTINGS, 0.5), "") for steps in (weighted, twice))
    for name in ("live_groups", "trained", "noise"):
        assert one[name] == pytest.approx(two[name], rel=1e-5)
    uncorrelated = [x["speed"][1][0][1][0] for x in (one, two)]
    assert uncorrelated[0] == pytest.approx(uncorrelated[1], rel=1e-5)


def test_what_there_is_no_figure_for():
    """Runs with too little, and rewards that say nothing of other group sizes."""
    steps = known_run().steps
    with pytest.raises(LogError, match=r"run: rewards differ in 18 of 18 groups, and 20 are ne"):
        figures(Run(steps[1:], SETTINGS, REST), "run")
    partial = [made_up_step([[0.5, 0, 1, 0], [None, 1, 0, 0]])] * 10
    for scale_rewards, nothing in (("none", False), ("group", True)):
        run = Run(partial, SETTINGS | {"scale_rewards": scale_rewards}, REST)
        said = ceiling.report(figures(run, "run"), run, "run")
        assert ("Nothing can be said of other group sizes." in said) == nothing


# ---------------------------------------------------------------------------- logs


def test_what_trl_wrote(tmp_path):
    """A file of TRL 1.16.0, somewhere in a folder. Catches rewards of another column, and a zero
    that float32 has hidden."""
    (tmp_path / "completions").mkdir()
    shutil.copy(TRL, tmp_path / "completions")
    run = ceiling.read(tmp_path)
    rows = pyarrow.parquet.ParquetFile(TRL).read().to_pylist()  # those of a prompt are together
    right = torch.tensor([row["right"] for row in rows], dtype=torch.float64).view(6, 8)
    found, expected = (dppo.group_advantages(x, "group") for x in (run.steps[0].rewards, right))
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=0)
    third = torch.tensor([[1.0, 0.5, 0.0, 0.25, 0.75, 0.5]])
    advantages = dppo.group_advantages(third / 3, "group").float().double() + 1e-8
    ones = torch.ones(1, 6).double()
    step = ceiling.Step(advantages, ones, ones, torch.ones(1).double())
    size, _signal = ceiling.sizes(step, 6, {"scale_rewards": "group", "beta": 0.0})
    assert (size == 0).tolist() == [False, True, False, False, False, True]


def test_what_verl_wrote(monkeypatch):
    """A file of verl 0.9.1. Two of its six groups of 4 are live, with 179 of 1111 characters."""
    monkeypatch.setattr(ceiling, "ENOUGH", 2)
    found = figures(ceiling.read(VERL)._replace(rest=2.3), "")
    assert (found["steps"], found["prompts"], found["group_sizes"]) == (1, 6, [2, 4])
    assert found["live_groups"] == pytest.approx(2 / 6)
    assert found["faster"][0] == pytest.approx([3.3 / (2.3 + 179 / 1111)])


def logged(folder, number, rows):
    """A file as verl's, of rows (input, output, score, and what else there is)."""
    folder.mkdir(parents=True, exist_ok=True)
    row = lambda asked, output, score, others=None: {
        "input": asked, "output": output, "score": score, "step": 1
    } | (others or {})  # fmt: skip
    text = "".join(json.dumps(row(*values)) + "\n" for values in rows)
    (folder / f"{number}.jsonl").write_text(text)


def test_groups_of_rows(tmp_path):
    """A prompt that was drawn twice, one that lost a completion, chats, a reward that is missing,
    and verl's uid. Catches a group of two files, rows that are out of order, a chat of which only
    the last turn counts, and parts of a turn that count as Python prints them."""
    turn = lambda content: {"role": "user", "content": content}
    chat = [turn("ab"), turn([{"type": "text", "text": "c"}, {"type": "image", "text": None}])]
    twice = [("ab", "x" * length, length) for length in (1, 2, 3, 4)]
    rows = [(chat, "", None), *twice, (chat, [turn("x"), turn("x")], 5.0), ("lost", "x", 0.0)]
    logged(tmp_path, 9, rows)
    logged(tmp_path, 10, [("ab", "", 7.0), ("ab", "", 8.0)])
    rows = [
        ("ab", "xyz", float(uid[0] == "a"), {"uid": uid}) for uid in ("a_0_0", "b_0_0", "b_1_0")
    ]
    logged(tmp_path, 11, [*rows, ("ab", "xyz", 1.0, {"uid": "a_1_0"})])
    first, second, third = ceiling.read(tmp_path).steps
    assert first.rewards.nan_to_num(9).tolist() == [[9, 5], [1, 2], [3, 4]]
    assert first.cost.tolist() == [[3, 5], [3, 4], [5, 6]]
    assert first.size_of_1.square().round().tolist() == [[0, 2], [1, 2], [3, 4]]
    assert second.rewards.tolist() == [[7, 8]]
    assert third.rewards.tolist() == [[1, 1], [0, 0]]


def test_one_folder_is_one_run(tmp_path):
    """Other folders are other runs, or validations; TRL logs a batch again while it uses it, and
    evaluations, which always have the same prompts, in place of a step. Catches rows that count
    twice, held-out problems, and a half-written file that hides the others."""
    batch = lambda name, *rewards: [(f"{name} {q}", "x", r) for q in "ab" for r in rewards]
    for number, rows in enumerate((batch("p", 0, 1), batch("p", 0, 1), batch("held out", 1, 1),
                                   batch("q", 1, 0), batch("held out", 0, 1))):  # fmt: skip
        logged(tmp_path / "rollouts", number, rows)
    run = ceiling.read(tmp_path)
    assert [step.rewards.tolist() for step in run.steps] == [[[0, 1]] * 2, [[1, 0]] * 2]
    assert "Left out: 3 files that repeat" in run.note
    logged(tmp_path / "val", 1, batch("other", 0, 0))
    with pytest.raises(LogError, match=r"logs of 2 runs: give one of .*rollouts/\*\.jsonl, .*val/"):
        ceiling.read(tmp_path)
    (tmp_path / "rollouts" / ceiling.PRUNED).touch()
    with pytest.raises(LogError, match="this run dropped prompts; log one"):
        ceiling.read(tmp_path / "rollouts")
    for number in (1, 2):
        shutil.copy(TRL, tmp_path / f"completions_{number}.parquet")
    (tmp_path / "completions_2.parquet").write_bytes(TRL.read_bytes()[:1000])
    run = ceiling.read(tmp_path)
    assert len(run.steps) == 1
    assert run.note == "Left out: completions_2.parquet, which is not whole. "


@pytest.mark.parametrize(
    ("column", "value"), [("step", None), ("output", 3), ("score", "1.0"), ("score", -math.inf)]
)
def test_values_that_say_nothing(tmp_path, column, value):
    """Catches a reward of minus infinity, after which all is said to be zero."""
    logged(tmp_path, 1, [("a", "b", 0.5), ("a", "b", 0.5, {column: value})])
    with pytest.raises(LogError, match=rf"1\.jsonl, row 2: {column} is .*cannot be read"):
        ceiling.read(tmp_path)


# ---------------------------------------------------------------------------- rest

VERL_LINE = (
    "(TaskRunner pid=7) step:{step} - timing_s/gen:6.0 - timing_s/old_log_prob:{s} - timing_s/ref:"
    "np.float64({s}) - timing_s/update_actor:{s} - timing_s/step:{whole} - actor/lr:1e-06\n"
)


def test_rest_of_a_file(tmp_path):
    """Of verl's console log, of a tracker's row, and of the dicts that TRL prints. Catches a first
    step that counts although it warms up, one slow step that decides, a part that is left out, and
    a run that pruned, whose training took less."""
    times = [(1.0, 99.0), (1.0, 4.5), (1.0, 900.0), (2.0, 9.0)]
    lines = [VERL_LINE.format(step=i, s=s, whole=whole) for i, (s, whole) in enumerate(times, 1)]
    row = {"timing_s/update_actor": 2.0, "timing_s/old_log_prob": 1.0, "timing_s/step": 4.5}
    trl = [{"loss": "0.1", "dppo/rest": rest} for rest in ("9.0", "0.4", "0.5", "0.6")]
    file = tmp_path / "log"
    for text in ("".join(lines), json.dumps(row, indent=1), "\n".join(map(str, trl))):
        file.write_text("nothing\n" + text)
        assert ceiling.rest_of(str(file)) == pytest.approx(0.5)
    file.write_text(str(trl[0] | {"dppo/kept_tokens": "0.3"}))
    with pytest.raises(LogError, match="this run pruned; give the log of one that did not"):
        ceiling.rest_of(str(file))
    for given in ("0", "inf"):
        with pytest.raises(LogError, match=r"--rest .*: no number above 0\."):
            ceiling.rest_of(given)


def test_the_command(run, tmp_path, capsys, monkeypatch):
    """From a run's files. Catches columns under other names than the reader's, and a rest to which
    the first step counts, which warms up."""
    rates = {"completion_prune_rate": 0.8, "prompt_rule": "uniform", "prompt_prune_rate": 0.25}
    run("run", method="pps", loss="dr_grpo", steps=8, prompts_per_step=8, **rates)
    monkeypatch.setattr("sys.argv", ["dppo-ceiling", str(tmp_path / "run")])
    ceiling.command()
    said = " ".join(capsys.readouterr().out.split())
    assert "8 steps of 6 prompts x 6 completions of train.py. " in said
    log = tmp_path / "run" / "log.jsonl"
    known = ceiling.read(tmp_path / "run").rest
    rows = [line for line in log.read_text().splitlines(True) if '"step": 1,' not in line]
    log.write_text("".join(rows))
    assert len(rows) == 7
    assert ceiling.read(tmp_path / "run").rest == known
