"""The whole run: GRPO is the special case, the log says what happened, ranks agree."""

import inspect
import math
import re
import sys
import textwrap
import zlib
from unittest import mock

import pytest
import torch
import toy
from toy import assert_same, in_processes, rows, timeless

import config
import data
import dppo
import models
import rollout
import train
from related import greso
from runtime import InputError
from tasks import arithmetic


def test_grpo_is_the_special_case(policy_folder, run, tmp_path):
    """--method grpo is a run with rates of 0, and one whose step has not the lines between `---
    DPPO` and `---`, although both levels are pruned: bit for bit. With rates the run differs."""
    source = textwrap.dedent(inspect.getsource(train.Trainer.step))
    plain, count = re.subn(r" *# --- DPPO.*?# ---\n", "", source, flags=re.DOTALL)
    assert count == 3
    names = vars(train).copy()
    exec(plain, names)

    class Cut(train.Trainer):
        step = names["step"]

    common = {"save_every": 4, "minibatches": 2, "loss": "dapo", "beta": 0.1}
    both_levels = {"method": "pps", "prompt_rule": "uniform"}
    no_rates = {"method": "dppo", "prompt_prune_rate": 0, "completion_prune_rate": 0}
    for row in run("grpo", method="grpo", **common):
        assert (row["weight/max"], row["kept/tokens"]) == (1, 1)
    run("none", **no_rates, **common)
    run("cut", trainer_class=Cut, **both_levels, **common)
    run("pruned", **both_levels, **common)
    grpo, none, cut, pruned = (
        timeless(tmp_path / name) for name in ("grpo", "none", "cut", "pruned")
    )
    assert_same(grpo, none)
    assert_same(grpo, cut)
    assert grpo[0] != pruned[0]


def test_a_default_run_repeats_itself(tmp_path):
    """`python train.py` twice gives the same rows but for seconds. Catches a draw that depends on
    the clock."""
    for name in ("once", "twice"):
        args = ["--steps", "4", "--save-every", "4", "--eval-every", "0"]
        train.main(config.parse_config([*args, "--out-dir", str(tmp_path / name)]))
    assert_same(timeless(tmp_path / "once"), timeless(tmp_path / "twice"))


def test_log_rows(run):
    """Steps 1 to N, evaluations at 0 and at the end, consistent figures."""
    rates = {"prompt_prune_rate": 0.5, "completion_prune_rate": 0.5}
    log = run("run", steps=3, eval_every=2, eval_problems=3, **rates)
    assert [row["step"] for row in log] == [0, 1, 2, 3]
    assert set(log[0]) == {"step", "eval/avg@4", "eval/accuracy"}
    assert log[0]["eval/accuracy"] == 0 < log[0]["eval/avg@4"], "by the data's own reward"
    assert ["eval/avg@4" in row for row in log] == [True, False, True, True]
    for row in log[1:]:
        assert row["time/rollout"] + row["time/score"] + row["time/train"] < row["step_time"]
        assert row["sampling/sampling_logp_difference/mean"] < 1e-5
        assert row["clip_ratio/region_mean"] == 0, "one update a batch: the ratio is 1"
    assert log[1]["kept/prompts"] == 1, "no history yet"


def test_tracking(run, monkeypatch):
    """Catches a row that the tracker misses, and a run that ends with the service."""
    fake = mock.Mock(**{"log.side_effect": ConnectionError("service unreachable")})
    monkeypatch.setitem(sys.modules, "mytracker", fake)
    log = run("run", steps=2, track="mytracker", eval_every=2, eval_problems=2)
    assert [name for name, *_ in fake.mock_calls] == ["init", "log", "log", "log", "finish"]
    for call, logged in zip(fake.log.call_args_list, log, strict=True):
        numbers = {key: value for key, value in logged.items() if isinstance(value, int | float)}
        assert call.kwargs | call.args[0] == numbers


def test_dropout_and_checkpointing_do_not_meet(make_policy):
    """Checkpointing needs transformers' training mode, which would enable dropout."""
    model, _ = make_policy()
    model.model.layers[0].mlp.act_fn = torch.nn.Dropout(0.1)
    with pytest.raises(InputError, match="--gradient-checkpointing: this model has dropout"):
        models.checkpoint_layers(model)


def test_a_step_that_keeps_nothing(run, monkeypatch):
    """It is still a step. Catches a division by what was kept, and NaN in the log."""
    nothing = lambda keep_prob, *_, **__: torch.zeros(keep_prob.shape, dtype=torch.bool)
    monkeypatch.setattr(dppo, "independent", nothing)  # of completions
    monkeypatch.setattr(dppo, "systematic", nothing)  # of prompts
    for row in run("run", steps=2):
        for name in ("loss", "grad_norm", "kept/prompts", "cost/kept"):
            assert row[name] == 0, name
        for name in ("reward", "entropy", "weight/max", "kept/tokens"):
            assert row[name] is None, name


def test_unscorable_rewards(run):
    """No NaN in the loss if some completions cannot be scored, and null if no group can."""
    some = lambda text, _answer: None if text[:1] < "@" else zlib.crc32(text.encode()) % 2
    for row in run("some", reward=some):
        assert math.isfinite(row["loss"])
        assert row["grad_norm"] > 0
    none = lambda _text, _answer: None
    for row in run("none", reward=none, eval_every=2, eval_problems=2)[1:]:
        assert (row["loss"], row["grad_norm"], row["reward"]) == (0, 0, None)


@pytest.mark.parametrize("trainer_class", [train.Trainer, greso.GresoTrainer])
def test_the_copy_that_samples_has_the_trained_weights(run, monkeypatch, trainer_class):
    """In bfloat16 the trained weights are in float32, and a copy samples. Catches a rollout or an
    evaluation of weights that are an update old."""
    trainers, sampled, sample = [], [], rollout.sample

    def make_trainer(cfg, reward):
        trainers.append(trainer_class(cfg, reward))
        return trainers[0]

    def watched(policy, *args, **options):
        pairs = zip(policy.parameters(), trainers[0].model.parameters(), strict=True)
        for copied, trained in pairs:
            assert trained.dtype == torch.float32
            assert torch.equal(copied, trained.bfloat16())
        sampled.append(policy)
        return sample(policy, *args, **options)

    monkeypatch.setattr(rollout, "sample", watched)
    options = {"method": "grpo", "dtype": "bfloat16", "lr": 0.02, "steps": 2}
    run("run", trainer_class=make_trainer, eval_every=2, eval_problems=2, **options)
    assert len(sampled) >= 4, "two rollouts, and evaluations before the first and after the last"


def test_an_evaluation_has_its_own_reward(run, monkeypatch):
    """That of --eval-data. Catches the reward of the training data."""
    reward_of = {"arithmetic": lambda _text, _answer: 0.25, "words": lambda _text, _answer: 0.75}
    monkeypatch.setattr(data, "reward_function", reward_of.get)
    options = {"data": "arithmetic", "eval_data": "words", "eval_every": 1, "eval_problems": 2}
    before, step = run("run", reward=None, steps=1, **options)
    assert step["reward"] == 0.25
    assert before["eval/avg@4"] == step["eval/avg@4"] == 0.75


# ---------------------------------------------------------------------------- seeds


def test_no_two_purposes_share_a_seed(run, monkeypatch):
    """Every key of a run begins with --seed and is used once, but those of shuffles, which a step
    may look up again. Fails if two rollouts, evaluations or draws use one seed."""
    keys = []

    def watch(use):
        def watched(*key):
            keys.append(key)
            return use(*key)

        return watched

    monkeypatch.setattr(dppo, "seed_for", watch(dppo.seed_for))
    monkeypatch.setattr(dppo, "generator_for", watch(dppo.generator_for))
    monkeypatch.setattr(arithmetic, "TRAIN_PROBLEMS", 8)  # so that prompts return
    options = {"method": "pps", "prompt_rule": "uniform", "minibatches": 2, "seed": 7}
    run("run", steps=6, eval_every=2, eval_problems=4, **options)
    used = [key for key in keys if key[-1] != "epoch"]
    assert {key[2] for key in used if len(key) == 3} == {"rollout", "eval", "keep"}
    assert {key[0] for key in keys if len(key) == 3} == {7}
    assert len({dppo.seed_for(*key) for key in used}) == len(used)


# ---------------------------------------------------------------------------- several ranks


def test_several_ranks_are_one(make_policy, policy_folder, tmp_path):
    """The same rollouts on one rank, on 4, and on 2 with a share of the model each, give the same
    draws and, to 5e-6, the same gradients; also if a rank has no prompt, or trains adapters.
    Catches a rank in a draw's seed, a rank's own denominator, and sequences that are lost."""
    model, tokenizer = make_policy()
    model.config.tie_word_embeddings = False
    type(model)(model.config).save_pretrained(f"{policy_folder}-untied")
    tokenizer.save_pretrained(f"{policy_folder}-untied")
    one = tmp_path / "one"
    in_processes(1, toy.record_runs, one, policy_folder)
    for world, kind in ((4, "none"), (2, "fsdp")):
        several = tmp_path / kind
        in_processes(world, toy.record_runs, several, policy_folder, "--shard", kind)
        for name in toy.RUNS.keys() - ({"adapters"} if kind == "fsdp" else set()):
            assert_same_run(one, several, name, world)


def assert_same_run(one, several, name, world):
    """The records of all ranks, and the log, of one of toy.RUNS."""
    whole = torch.load(one / f"{name}-rank0.pt")
    assert any(gradient.norm() > 0 for *_, gradient in whole)
    for rank in range(world):
        together = torch.load(several / f"{name}-rank{rank}.pt")
        for here, there in zip(whole, together, strict=True):
            prompts, weights, keep, gradient = here
            assert torch.equal(prompts, there[0])
            assert torch.allclose(weights, there[1], rtol=1e-6)
            assert torch.equal(keep, there[2])
            assert (gradient - there[3]).norm() < 5e-6 * max(1.0, gradient.norm())
    for here, there in zip(rows(one / name), rows(several / name), strict=True):
        for key in here.keys() - {"step_time", "pack/density"}:
            if not key.startswith("time/"):
                close = pytest.approx(there[key] or 0, rel=1e-5, abs=1e-6)  # or null
                assert (here[key] or 0) == close, key
