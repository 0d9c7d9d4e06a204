"""The whole run: GRPO is the special case, the log says what happened, ranks agree."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from toy import assert_same, rows, timeless, toy_reward
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP

import arithmetic
import data
import dppo
import rollout
import sampler
import train
from data import InputError

ROOT = Path(__file__).resolve().parents[1]
SHARED = ROOT.parent / "shared" / "data"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
ONE_THREAD = os.environ | {"OMP_NUM_THREADS": "1"}


def test_without_rates_dppo_is_grpo_bit_for_bit(run, tmp_path):
    """Same rewards, losses and weights; with rates, another run. Kills: a section that is not the identity at rate 0,
    draws that depend on the rates."""
    common = {"save_every": 4, "eval_every": 2, "eval_problems": 3}
    for row in run("grpo", method="grpo", **common)[1:]:
        assert (row["weight/max"], row["kept/tokens"]) == (1, 1)
        assert row["weight/ess"] == pytest.approx(24 * (1 - row["frac_reward_zero_std"]) or None)
    run("dppo", method="dppo", prompt_prune_rate=0, completion_prune_rate=0, **common)
    run("pruned", method="dppo", completion_prune_rate=0.5, **common)
    assert_same(timeless(tmp_path / "grpo"), timeless(tmp_path / "dppo"))
    assert timeless(tmp_path / "grpo")[0] != timeless(tmp_path / "pruned")[0]


def test_log_rows(run, tmp_path):
    """The documented names, steps 1..N, evaluation at 0 and at the end, and figures that agree with each other."""
    log = run("run", steps=3, eval_every=2, eval_problems=3, prompt_prune_rate=0.5, completion_prune_rate=0.5)
    assert [row["step"] for row in log] == [0, 1, 2, 3]
    assert set(log[0]) == {"step", "eval/avg@4"}
    assert ["eval/avg@4" in row for row in log] == [True, False, True, True]
    names = [
        "step",
        "loss",
        "reward",
        "reward_std",
        "frac_reward_zero_std",
        "completions/mean_length",
        "completions/clipped_ratio",
        "clip_ratio/region_mean",
        "entropy",
        "entropy/trained",
        "grad_norm",
        "learning_rate",
        "step_time",
        "kept/prompts",
        "kept/completions",
        "kept/tokens",
        "weight/max",
        "weight/ess",
        "pack/density",
        "tokens/generated",
        "tokens/trained",
        "time/rollout",
        "time/score",
        "time/train",
        "sampling/sampling_logp_difference/mean",
        "weight/prompt_max",
        "history/never_rolled_out",
        "history/skipped_this_epoch",
        "history/pass_rates",
        "history/candidates_by_pass_rate",
        "history/kept_by_pass_rate",
    ]
    for row in log[1:]:
        assert set(row) - {"eval/avg@4"} == set(names)
        parts = row["time/rollout"] + row["time/score"] + row["time/train"]
        assert parts < row["step_time"] < parts + 0.1
        assert 0 < row["kept/tokens"] <= 1
        assert 0 < row["kept/completions"] <= row["kept/prompts"] <= 1
        assert row["sampling/sampling_logp_difference/mean"] < 1e-5
        assert row["clip_ratio/region_mean"] == 0, "one update a batch: the ratio is 1"
    assert log[1]["kept/prompts"] == 1, "no history yet"
    assert log[1]["tokens/generated"] == round(log[1]["completions/mean_length"] * 24)
    sample = rows(tmp_path / "run", "samples.jsonl")[0]
    assert set(sample) == {"step", "prompt", "completion", "answer", "reward", "advantage", "kept", "weight"}
    assert sample["reward"] == toy_reward(sample["completion"], "")
    written = json.loads((tmp_path / "run" / "config.json").read_text())
    assert written["config"]["prompt_prune_rate"] == 0.5
    assert written["versions"]["torch"] == torch.__version__
    assert (tmp_path / "run" / "run.png").stat().st_size > 10_000


def test_thirty_steps_raise_the_reward(run):
    """From a quarter by chance. Kills: the sign of the loss, advantages of the wrong rows, an update not applied."""
    log = run("run", steps=30, prompts_per_step=6, group_size=8, max_new_tokens=2, lr=3e-3, prompt_prune_rate=0.3)
    first, last = ([row["reward"] for row in part] for part in (log[:3], log[-3:]))
    assert sum(last) / 3 > sum(first) / 3 + 0.3


def test_the_factor_of_every_sequence(run, monkeypatch):
    """What train.py multiplies each kept sequence by, against 1 / (L Q G p_q p_i) worked out here, over 3 epochs with
    both prunings at work. Kills: what was kept in the denominator, prompt or completion weights left out."""
    accumulate, recorded, drawn = train.accumulate_gradients, [], []
    prune, draw = sampler.PromptHistory.prune, dppo.draw

    def record_prompts(history, rule, rate, window, *words, **options):
        recorded.append([history.score[window].tolist()])
        return prune(history, rule, rate, window, *words, **options)

    def record(model, rollouts, advantages, scale, keep, **options):
        recorded[-1] += [rollouts, advantages, scale, keep]
        return accumulate(model, rollouts, advantages, scale, keep, **options)

    monkeypatch.setattr(sampler.PromptHistory, "prune", record_prompts)
    monkeypatch.setattr(train, "accumulate_gradients", record)
    monkeypatch.setattr(dppo, "draw", lambda *words: drawn.append(draw(*words)) or drawn[-1])
    monkeypatch.setattr(arithmetic, "TRAIN_PROBLEMS", 8)
    run("run", steps=6, prompts_per_step=4, prompt_prune_rate=0.5, completion_prune_rate=0.6)
    prompts_pruned = completions_pruned = 0
    for (scores, rollouts, advantages, scale, keep), kept_prompts in zip(recorded, drawn[::2], strict=True):
        seen = [score for score in scores if not math.isnan(score)]
        mean = sum(seen) / len(seen) if seen else 0
        p_q = [0.5 if score < mean - 1e-6 else 1.0 for score in scores]
        p_q = [p for p, kept in zip(p_q, kept_prompts.tolist(), strict=True) if kept]
        for k, row in enumerate(advantages.abs().tolist()):
            p_i = [0.4 if size < sum(row) / 6 - 1e-6 else 1.0 for size in row]
            for g in range(6):
                factor = 1 / (rollouts.lengths[k, g].item() * 4 * 6 * p_q[k] * p_i[g])
                assert scale[k, g].item() == pytest.approx(factor if keep[k, g] else 0.0, rel=1e-12)
                completions_pruned += p_i[g] < 1 and bool(keep[k, g])
            prompts_pruned += p_q[k] < 1
    assert prompts_pruned > 0
    assert completions_pruned > 0


def test_gradient_checkpointing_is_the_same_run(run, tmp_path, monkeypatch):
    """Bit for bit the same weights, with every layer's work done twice in an update and once in a rollout. Kills: a
    flag that does nothing, as in evaluation mode; recomputing while sampling."""
    calls, forward = [], Qwen3MLP.forward

    def counted(layer, states):
        calls.append((layer.training, torch.is_grad_enabled()))
        return forward(layer, states)

    monkeypatch.setattr(Qwen3MLP, "forward", counted)
    counts = {}
    for name, flag in (("plain", {}), ("checkpointed", {"gradient_checkpointing": True})):
        calls.clear()
        run(name, save_every=4, **flag)
        counts[name] = sum(grad for _, grad in calls)
        in_training = sum(training for training, grad in calls if not grad)
        assert in_training == (2 if flag else 0), (
            "two layers, in the search for dropout; sampling is in evaluation mode"
        )
    assert counts["checkpointed"] == 2 * counts["plain"] > 0
    assert_same(timeless(tmp_path / "plain"), timeless(tmp_path / "checkpointed"))


def test_dropout_and_checkpointing_do_not_meet(policy_folder, run, monkeypatch):
    """Checkpointing needs transformers' training mode, which would switch dropout on."""
    load = rollout.load_policy

    def with_dropout(*words):
        model, tokenizer = load(*words)
        model.model.layers[0].mlp.act_fn = torch.nn.Dropout(0.1)
        return model, tokenizer

    monkeypatch.setattr(rollout, "load_policy", with_dropout)
    with pytest.raises(InputError, match="--gradient-checkpointing: this model has dropout"):
        run("run", gradient_checkpointing=True)


def test_a_step_that_keeps_nothing(run, tmp_path, monkeypatch):
    """Still a step: gradient 0, nulls in the row. Kills: a division by what was kept, an empty pack, NaN in the log."""
    monkeypatch.setattr(dppo, "draw", lambda keep_prob, generator: torch.zeros(keep_prob.shape, dtype=torch.bool))
    before = load_file(tmp_path / "policy" / "model.safetensors")
    log = run("run", steps=2, save_every=2)
    for row in log:
        assert (row["loss"], row["grad_norm"], row["kept/prompts"], row["tokens/trained"]) == (0, 0, 0, 0)
        nothing = ("reward", "entropy", "weight/max", "weight/ess", "pack/density", "kept/tokens")
        assert [row[name] for name in nothing] == [None] * 6
    after = load_file(tmp_path / "run" / "checkpoint" / "model.safetensors")
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_unscorable_rewards(run, monkeypatch):
    """Some completions, then whole groups, that cannot be scored: no NaN in the loss, null where nothing is left."""
    monkeypatch.setattr(
        data, "reward_function", lambda _: lambda text, _gold: None if text[:1] < "@" else len(text) % 2
    )
    for row in run("some"):
        assert math.isfinite(row["loss"])
        assert row["grad_norm"] > 0
    monkeypatch.setattr(data, "reward_function", lambda _: lambda _text, _gold: None)
    for row in run("none", eval_every=2, eval_problems=2)[1:]:
        assert (row["loss"], row["grad_norm"], row["reward"]) == (0, 0, None)


# ---------------------------------------------------------------------------- several ranks


@pytest.fixture(scope="module")
def on_ranks(make_policy, tmp_path_factory):
    """What toy.on_ranks leaves: the folder of each command, by its name."""
    folder = tmp_path_factory.mktemp("ranks")
    model, tokenizer = make_policy()
    model.save_pretrained(folder / "policy")
    tokenizer.save_pretrained(folder / "policy")
    launch = [*TORCHRUN, "--nproc-per-node", "2"]
    for name, command, words in (
        ("one", [sys.executable], []), ("none", launch, ["--shard", "none"]), ("fsdp", launch, ["--shard", "fsdp"]),
    ):  # fmt: skip
        (folder / name).mkdir()
        program = [
            *command,
            str(ROOT / "tests" / "toy.py"),
            "ranks",
            str(folder / name),
            str(folder / "policy"),
            *words,
        ]
        subprocess.run(program, check=True, env=ONE_THREAD, timeout=200)
    return folder


@pytest.mark.parametrize("kind", ["none", "fsdp"])
def test_two_ranks_are_one(on_ranks, kind):
    """The same rollouts on 1 and 2 gloo ranks, each with the whole model or a share of it: same keep decisions,
    gradients to 5e-6 over several updates; also with a rank that keeps nothing and one without prompts. Kills: a rank
    in the draw's seed, a local denominator, a mean for the sum."""
    for name in ("plain", "dropped", "alone", "updates", "greso"):
        one = torch.load(on_ranks / "one" / f"{name}-rank0.pt")
        for rank in range(2):
            two = torch.load(on_ranks / kind / f"{name}-rank{rank}.pt")
            each = 2 * 3 + 4 * 2 + 5 if name == "updates" else 3  # "updates": mini-batches and the check
            assert len(one) == len(two) >= 3 * each, "three steps, each a prompt draw, then draws and gradients"
            assert any(part.dtype != torch.bool and part.norm() > 0 for part in one)
            for here, there in zip(one, two, strict=True):
                if here.dtype == torch.bool:
                    assert torch.equal(here, there)
                else:
                    assert (here - there).norm() < 5e-6 * max(1.0, here.norm())
        alone, together = rows(on_ranks / "one" / name), rows(on_ranks / kind / name)
        for here, there in zip(alone, together, strict=True):
            for key in here:
                if not key.startswith(("time/", "step_time", "pack/", "tokens/trained")):  # two ranks have other slots
                    rounding = 1e-6 if key.startswith(("sampling/", "loss")) else 1e-7  # these may be rounding alone
                    close = pytest.approx(there[key], rel=1e-5, abs=rounding) if there[key] is not None else None
                    assert here[key] == close, key
