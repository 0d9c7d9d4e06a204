"""The variance bench on made-up gradients, where the answer is known in closed form, and in small
on real ones."""

import itertools
import json
import re

import pytest
import torch
from torch.utils._pytree import tree_leaves

import bench
import config
import dppo
import sampler
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
    vectors *= 4 ** torch.rand(
        len(vectors), 1, generator=generator
    )  # so that energies only estimate
    nothing = torch.zeros(8, 8, dtype=torch.float64)
    batch = dppo.Completions(nothing, rewards, lengths + 10, nothing)
    found = variance.Gradients(batch, lengths, energy, energy, live, vectors @ vectors.T, 30)
    return found, vectors, variance.variance_rows(found, "dr_grpo", "early", 1000)


def test_errors_agree_with_the_formula(rows):
    """Catches errors that count dead groups, the square of something else, and a share of all
    tokens in place of those that contribute, and an oracle that only knows the energies."""
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
            excess.append(row["rel_bias2"] / row["rel_mse"] * 1000)  # 1 with the draws' noise in it
        if row["rule"] == "cppo, best length" and row["kept"]:
            assert 0 <= row["rel_mse"] <= 1
    assert len(excess) > 12
    assert abs(sum(excess) / len(excess)) < 0.5


def test_what_a_rule_cannot_reach_has_no_row(rows):
    """dppo keeps everything above the mean, so it cannot spend as little as a tenth of the tokens.
    Catches a made-up row."""
    found, _, table = rows
    cells = {(row["rule"], row["tokens"], row["r_o"]): row for row in table}
    assert cells["dppo", 0.1, None]["rel_mse"] is None
    assert cells["pps", 0.1, None]["rel_mse"] > 0
    spent = {row["r_o"]: row for row in table if row["rule"] == "dppo" and row["r_o"]}
    low = dppo.group_advantages(found.batch.rewards, "dr_grpo").abs()
    low = (low < low.mean(dim=1, keepdim=True) - 1e-6)[found.live]
    cost = found.batch.cost[found.live].double()
    for rate, row in spent.items():
        expected = (cost * (1 - rate * low)).sum().item() / cost.sum().item()
        assert row["tokens"] == pytest.approx(expected, abs=1e-4)
        assert row["kept"] == pytest.approx(row["tokens"], abs=0.02)


def test_a_rule_never_stands_in_for_another(rows):
    """The error of a rule without chance is all bias. Catches an unknown rule that draws as pps
    does, as the rivals' did while nothing had imported them."""
    found, _, table = rows
    names = {"cppo", "cppo_batch", "pods", "dppo_floor"}
    biased = [row for row in table if row["rule"] in names and row["kept"]]
    assert {row["rule"] for row in biased} == names
    assert all(row["rel_bias2"] == row["rel_mse"] for row in biased)
    with pytest.raises(KeyError, match="nobody"):
        variance.rule_draws("nobody", 0.5, found, found.batch, {}, found.batch.size, 2)


def test_an_oracle_without_error_has_no_ratio():
    """Both |advantages| of the only group tie, so dppo spends all tokens and the oracle errs in
    nothing. Fails if the bench divides by that."""
    ones, zeros = torch.ones(1, 2, dtype=torch.float64), torch.zeros(1, 2, dtype=torch.float64)
    batch = dppo.Completions(zeros, torch.tensor([[1.0, 0.0]]), 10 * ones, zeros)
    gram = torch.eye(2, dtype=torch.float64)
    found = variance.Gradients(batch, 5 * ones, ones, ones, ones.bool(), gram, 30)
    table = variance.variance_rows(found, "grpo", "early", 20)
    at_all = [row for row in table if row["r_o"] and row["rule"] == "oracle, independent"]
    assert [row["ratio_to_oracle"] for row in at_all] == [None] * 3
    assert {row["rel_mse"] for row in at_all} == {0}
    assert {row["ratio_to_oracle"] for row in table if row["rule"] == "dppo"} == {None}


def test_error_at_the_best_length():
    """Two orthogonal gradients of length 1, one of them kept. Catches the error of another
    constant, and one above 1 where nothing is kept."""
    gram = torch.eye(2, dtype=torch.float64)
    keep = torch.tensor([3.0, 0.0], dtype=torch.float64)
    assert variance.best_length_error(keep, gram) == pytest.approx(0.5)
    assert variance.best_length_error(1 + 0 * keep, gram) == pytest.approx(0.0)
    assert variance.best_length_error(0 * keep, gram) == 1.0


# ---------------------------------------------------------------------------- device and arithmetic


class OtherDevice(torch.Tensor):
    """A tensor that behaves as if it were on a GPU: it refuses plain ones, and .cpu() is plain."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        mixed = [t for t in tensors if not isinstance(t, cls) and t.dim()]
        assert not mixed, f"{function.__name__} of tensors on two devices"
        result = super().__torch_function__(function, types, args, kwargs)
        return result.as_subclass(torch.Tensor) if function is torch.Tensor.cpu else result


@pytest.fixture
def short(small_runs, policy_folder, tmp_path):
    """(folder of a policy, Config, step) for real_gradients."""

    def make(**changes):
        args = ["--method", "grpo", "--device", "cpu", "--out-dir", str(tmp_path / "run")]
        args += [str(part) for pair in changes.items() for part in pair]
        return policy_folder, config.resolve(config.parse_config(args)), 1

    return make


def test_results_are_on_the_cpu(short, monkeypatch):
    """Gradients stay on the device, and what is made of them does not mix with it. Fails if a
    tensor of the device meets one of the CPU, as CUDA does."""

    def random_gradients(model, *_args, **_options):
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter).as_subclass(OtherDevice)

    monkeypatch.setattr(variance, "accumulate_gradients", random_gradients)
    found = variance.real_gradients(*short())
    tensors = [*vars(found).values(), *vars(found.batch).values()]
    assert not [value for value in tensors if isinstance(value, OtherDevice)]
    assert found.gram.dtype == torch.float64
    assert len(found.gram) == found.live.sum() > 1
    gram = bench.inner_products([torch.ones(3).as_subclass(OtherDevice)] * 2)
    assert type(gram) is torch.Tensor
    assert gram.tolist() == [[3, 3], [3, 3]]


def test_everything_is_in_the_runs_arithmetic(short, monkeypatch):
    """Fails if the bench samples, or computes gradients, in float32."""
    dtypes, load = [], variance.loading.load_policy

    def load_policy(*args):
        model, tokenizer = load(*args)
        watch = lambda _layer, _inputs, output: dtypes.append(
            (torch.is_grad_enabled(), output.dtype)
        )
        model.model.layers[0].self_attn.q_proj.register_forward_hook(watch)
        return model, tokenizer

    monkeypatch.setattr(variance.loading, "load_policy", load_policy)
    variance.real_gradients(*short(**{"--dtype": "bfloat16"}))
    assert set(dtypes) == {(False, torch.bfloat16), (True, torch.bfloat16)}


# ---------------------------------------------------------------------------- prompts


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
    Catches a record of another step, one group's gradient that is all of them, and a history that
    is not empty."""
    args = ["--method", "grpo", "--steps", "2", "--device", "cpu"]  # bfloat16 rounds at 4e-3
    trainer, rows = bench.run(args, replay.GroupByGroup)
    _, plain = bench.run(args)
    steps = trainer.recorded
    assert [step.step for step in steps] == [1, 2]
    assert [step.window.tolist() for step in steps] == [
        trainer.candidates(number).tolist() for number in (1, 2)
    ]
    lengths = [step.gram.sum().item() ** 0.5 for step in steps]
    assert lengths == pytest.approx([row["grad_norm"] for row in rows], rel=1e-4)
    assert lengths == pytest.approx([row["grad_norm"] for row in plain], rel=1e-4)
    assert rows[1]["tokens/trained"] == plain[1]["tokens/trained"]
    for step, row in zip(steps, plain, strict=True):
        assert step.gram.diagonal().count_nonzero() > 1
        assert step.tokens.sum() == row["tokens/generated"]
        assert step.rewards.mean() == pytest.approx(row["reward"])
    assert trainer.empty.sums.sum() == 0
    assert (trainer.empty.bin == sampler.UNSEEN).all()
    assert trainer.history.sums.sum() > 0


def test_both_levels_run(small_runs, monkeypatch, capsys, tmp_path):
    """From the command line to the table, on runs of a few steps. Catches a bench that train.py has
    outgrown, and a stage with the checkpoint of another."""
    monkeypatch.setattr(replay, "SETTINGS", ("arithmetic",))
    monkeypatch.setattr(variance, "STAGES", {"early": 1, "late": 3})
    monkeypatch.setattr(replay, "EPOCHS", 1)
    monkeypatch.setattr(replay.arithmetic, "TRAIN_PROBLEMS", 64)
    steps, real = [], variance.real_gradients

    def from_checkpoint(folder, cfg, step):
        saved = torch.load(folder / "trainer.pt", weights_only=True)["step"]
        steps.append((saved, step))
        return real(folder, cfg, step)

    monkeypatch.setattr(variance, "real_gradients", from_checkpoint)
    rules = {}
    for level in ("completion", "prompt"):
        file = tmp_path / level
        args = f"variance --level {level} --seeds 0 --draws 60 --json {file}"
        command_line.main(args.split())
        table = json.loads(file.read_text())
        rules[level] = {row[table["columns"].index("rule")] for row in table["rows"]}
    assert steps == [(1, 1), (3, 3)]
    assert rules["completion"] >= {*variance.RULES}
    assert rules["prompt"] == {*replay.PROMPT_RULES}
    shown = capsys.readouterr().out
    assert "arithmetic, dr_grpo, late: medians" in shown
    assert "arithmetic, dr_grpo, r_q 0.6: error over" in shown


def test_a_batch_of_a_model(small_runs, monkeypatch, capsys, tmp_path):
    """With --flags, one batch of that model and data. Catches flags without effect, and a
    correlation with something else than the square roots of energies and lengths."""
    file, real = tmp_path / "rows.json", variance.real_gradients

    def planted(*args):
        found = real(*args)
        found.lengths[found.live] = torch.arange(len(found.gram)).flip(0)
        found.gram.diagonal().copy_(torch.arange(len(found.gram)).flip(0).square())
        found.energy[found.live] = found.gram.diagonal().float()
        return found

    monkeypatch.setattr(variance, "real_gradients", planted)
    args = ["variance", "--draws", "60", "--json", str(file)]
    command_line.main([*args, "--flags=--data words --prompt-format plain --seed 5"])
    table = json.loads(file.read_text())
    rows = [dict(zip(table["columns"], row, strict=True)) for row in table["rows"]]
    assert {(row["data"], row["seed"], row["stage"]) for row in rows} == {("words", 5, "start")}
    assert {row["rule"] for row in rows} >= {*variance.RULES}
    shown = capsys.readouterr().out
    energy, length = (float(x) for x in re.findall(r"with sqrt\(\w+\): (\S+)", shown))
    assert energy == pytest.approx(1.0)
    assert 0.9 < length < 0.99, "norms rise in proportion to the length"
    assert "dr_grpo: relative squared error" in shown


def made_up_run(steps=45, spread=10.0):
    """A history and the steps of 64 prompts, 16 a step; the gradients of the longer half are
    `spread` times as large."""
    generator = torch.Generator().manual_seed(1)
    empty = sampler.PromptHistory(torch.tensor([3, 9] * 32), ["a"] * 64, 16)
    recorded = []
    for step in range(1, steps + 1):
        window = sampler.candidates(64, 16, 0, step)
        sizes = 1 + (spread - 1) * (window % 2)
        vectors = torch.randn(16, 50, generator=generator, dtype=torch.float64) * sizes[:, None]
        rewards = (torch.rand(16, 4, generator=generator) < 0.5).double()
        advantages = dppo.group_advantages(rewards, "dr_grpo")
        square = vectors.square().sum(dim=1)
        tokens = torch.full((16,), 40.0, dtype=torch.float64)
        seen = (window, rewards, advantages, square, tokens)
        recorded.append(replay.Step(step, *seen, vectors @ vectors.T))
    return empty, recorded


def test_replay_of_prompt_rules():
    """uniform is 1 by definition, coins a little more, and pps is near its oracle if the strata
    explain the sizes. Catches errors over those of another budget, and a replay that learns
    nothing."""
    empty, recorded = made_up_run()

    def over_uniform(rule, recorded=recorded):
        rows = replay.replay(rule, 0.5, empty, recorded, 100, 0)[15:]
        assert all(row["tokens"] == pytest.approx(0.5, abs=0.06) for row in rows)
        return sum(row["error"] for row in rows) / sum(row["uniform"] for row in rows)

    assert over_uniform("uniform") == pytest.approx(1.0, abs=0.05)
    assert over_uniform("uniform, coins") == pytest.approx(1.0, abs=0.1)
    assert over_uniform("oracle") < 0.3
    assert over_uniform("pps") < 0.65
    assert empty.sums.sum() == 0, "a replay has a history of its own"
    even = made_up_run(spread=1.0)[1]
    assert over_uniform("pps", even) == pytest.approx(1.0, abs=0.1), "nothing to learn"


def test_a_replay_learns_only_from_what_it_rolled_out(monkeypatch):
    """Catches a replay that learns from dropped prompts."""
    empty, recorded = made_up_run(steps=8)
    counts, update = [], sampler.PromptHistory.update

    def counted(history, step, prompts, *seen):
        counts.append(len(prompts))
        update(history, step, prompts, *seen)

    monkeypatch.setattr(sampler.PromptHistory, "update", counted)
    replay.replay("pps", 0.5, empty, recorded, 2, 0)
    assert counts == [8] * 8


def test_rows_in_a_file(monkeypatch, tmp_path):
    """As the notebook reads them. Catches values under another's name, and a level that runs the
    other one."""
    rows = [{"seed": 0, "rule": "pps", "rel_mse": 0.123456}]
    rows += [{"seed": 1, "rule": "dppo", "rel_mse": None}]
    of_seeds = lambda seeds, draws: [row for row in rows if row["seed"] in seeds]
    monkeypatch.setattr(replay, "prompt_variance", of_seeds)
    variance.main(level="prompt", seeds=(0, 1), json_file=tmp_path / "rows.json")
    table = json.loads((tmp_path / "rows.json").read_text())
    found = [dict(zip(table["columns"], row, strict=True)) for row in table["rows"]]
    assert found == [rows[0] | {"rel_mse": 0.1235}, rows[1]]
