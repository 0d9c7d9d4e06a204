"""vLLM's policy is the trainer's, update after update. Needs vLLM: tests/vllm.sh builds an environment with one for
CPUs and runs these there; elsewhere they are skipped."""

import collections
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from toy import assert_same, flags, plain_logits, rows, timeless, toy_reward
from transformers import Qwen3Config, Qwen3ForCausalLM

import arithmetic
import config
import data
import packing
import rollout
import train
import vllm_engine
from data import InputError
from update import trainer_logprobs

vllm = pytest.importorskip("vllm", reason="tests/vllm.sh runs these, with a vLLM for CPUs")
pytestmark = pytest.mark.vllm
CFG = config.resolve(config.Config(device="cpu"))
rng = random.Random(0)
PROMPTS = [[rng.randrange(256) for _ in range(length)] for length in (5, 140, 300, 301)]  # some fill a block of cache


def make_model(folder, *, tied, padding=0):
    """An untrained Qwen3 with confident, prompt-dependent predictions, saved for vLLM; the last `padding` rows of its
    head are no tokens."""
    torch.manual_seed(0)
    tokenizer = arithmetic.make_tokenizer()
    shape = Qwen3Config(
        vocab_size=len(tokenizer) + padding, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, max_position_embeddings=512,
        tie_word_embeddings=tied, initializer_range=0.3, eos_token_id=256, pad_token_id=257, bos_token_id=None,
    )  # fmt: skip
    Qwen3ForCausalLM(shape).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return rollout.load_policy(str(folder), "cpu")[0]


def make_engine(folder):
    return vllm_engine.Engine(
        str(folder), vocab_size=258, max_tokens=400, sequences=64, dtype="float32", device="cpu", memory=0.3
    )


@pytest.fixture(scope="module", params=["tied", "untied"])
def pair(request, tmp_path_factory):
    """(model, engine) of the same weights."""
    folder = tmp_path_factory.mktemp(request.param)
    model = make_model(folder, tied=request.param == "tied")
    engine = make_engine(folder)
    yield model, engine
    engine.close()


def headless(llm, method, *, kwargs, real=vllm.LLM.collective_rpc):
    """Weights without the head of their own that a tied model has in vLLM for CPUs."""
    weights = ((name, tensor) for name, tensor in kwargs["weights_iterator"] if name != "lm_head.weight")
    return real(llm, method, kwargs={"weights_iterator": weights})


def sample(model, engine, *, seed=0, group_size=8, **changes):
    sampling = rollout.Sampling(**{"max_new_tokens": 12, "eos_ids": [256, 7], "pad_id": 7, "engine": engine} | changes)
    return rollout.sample(model, PROMPTS, sampling, group_size=group_size, seed=seed)


def largest_gap(model, rollouts, cfg=CFG):
    return (trainer_logprobs(model, rollouts, cfg) - rollouts.logprobs).abs().max().item()


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_rollouts_are_those_of_the_policy(pair, temperature):
    """Log-probs, ends, cuts and energies; a pad that is an end. Kills: raw log-probs, lengths from token values."""
    model, engine = pair
    got = sample(model, engine, temperature=temperature, group_size=40, eos_ids=[256, *range(0, 256, 16)], pad_id=16)
    cfg = config.resolve(config.Config(device="cpu", temperature=temperature))
    assert largest_gap(model, got, cfg) < 1e-4
    assert got.truncated.any()
    assert not got.truncated.all()
    for ids, length, cut in zip(
        got.completion_ids.flatten(0, 1), got.lengths.flatten(), got.truncated.flatten(), strict=True
    ):
        ends = [token % 16 == 0 for token in ids[:length].tolist()]
        assert not any(ends[:-1])
        assert ends[-1] != bool(cut)
        assert length == 12 or not cut
    exact = rollout.sample(
        model, PROMPTS, rollout.Sampling(12, [256], 257, temperature), group_size=40, seed=1
    )  # its energies are of other completions, of the same policy
    assert got.energy.mean() > exact.energy.mean() * 0.9, "a bound from above"
    assert got.entropy.isnan().all()


def test_greedy_tokens_and_cut_tails_are_those_of_compact(pair):
    """Whole groups of equal completions, penalties and all. Kills: a flag of eval.py that vLLM never hears of."""
    model, engine = pair
    for changes in (
        {"temperature": 0.0},
        {"temperature": 0.0, "repetition_penalty": 1.5},
        {"top_k": 1},
        {"top_p": 1e-6},
    ):
        ours, theirs = (sample(model, one, group_size=3, **changes) for one in ("compact", engine))
        assert torch.equal(ours.lengths, theirs.lengths)
        inside = torch.arange(12) < ours.lengths[..., None]
        assert torch.equal(ours.completion_ids * inside, theirs.completion_ids * inside), changes


def test_seed_decides_everything(pair):
    one, same, other = (sample(*pair, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(one.completion_ids, same.completion_ids)
    assert not torch.equal(one.completion_ids, other.completion_ids)
    assert len({tuple(ids) for ids in one.completion_ids[0].tolist()}) > 1, "a group's completions differ"


def test_first_tokens_are_as_frequent_as_the_policy_says(pair):
    """4,000 draws; 4.5 standard errors. Kills: top-k or a temperature from the model's own generation config."""
    model, engine = pair
    got = sample(model, engine, group_size=1000, max_new_tokens=1)
    for k in (0, 3):
        probs = plain_logits(model, torch.tensor([PROMPTS[k]]))[0, -1].softmax(dim=-1).tolist()
        counts = collections.Counter(got.completion_ids[k].flatten().tolist())
        for token, prob in enumerate(probs):
            assert abs(counts[token] / 1000 - prob) <= 4.5 * (prob * (1 - prob) / 1000) ** 0.5 + 2e-3


def test_ten_updates_arrive(pair):
    """The gap after each of ten AdamW steps that move the policy. Kills: weights sent once, a stale head or prefix."""
    model, engine = pair
    first = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-2)
    gaps, moves = [], []
    for step in range(10):
        rollouts = sample(model, engine, seed=step)
        gaps.append(largest_gap(model, rollouts))
        packs = packing.build_pack([PROMPTS[0]], [rollouts.completion_ids[0, 0, : rollouts.lengths[0, 0]].tolist()])
        loss = packing.packed_logprobs(model, packs)[0].mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        moves.append(largest_gap(model, rollouts))
    print("gaps", " ".join(f"{gap:.0e}" for gap in gaps), "moves", " ".join(f"{move:.1f}" for move in moves))
    model.load_state_dict(first)
    assert max(gaps) < 1e-4
    assert min(moves) > 0.1


def test_the_check_finds_what_was_forgotten(pair, monkeypatch):
    """It passes, and leaves the weights as they were; without the prefix reset, without the tied head, and with weights
    that are never sent it does not. Kills: a check that looks once, or at weights that did not move."""
    model, engine = pair
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    sampling = rollout.Sampling(12, [256], 257, engine=engine)

    def check():
        engine.check(model, PROMPTS, sampling, lambda rollouts: trainer_logprobs(model, rollouts, CFG))

    check()
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    complaint = r"nats a token from the trainer's .* it samples another policy"
    with monkeypatch.context() as patch:
        patch.setattr(engine.llm, "reset_prefix_cache", lambda: None)
        with pytest.raises(InputError, match=complaint) as error:
            check()
        print("no prefix reset:", error.value)
    engine.llm.reset_prefix_cache()
    if model.config.tie_word_embeddings:
        with monkeypatch.context() as patch:
            patch.setattr(vllm.LLM, "collective_rpc", headless)
            with pytest.raises(InputError, match=complaint) as error:
                check()
            print("no tied head:", error.value)
    with monkeypatch.context() as patch:
        patch.setattr(engine.llm, "collective_rpc", lambda *words, **options: None)
        with pytest.raises(InputError, match=complaint):
            check()
    check()


def test_the_vocabularys_padding_is_never_sampled(tmp_path):
    """Sixty rows of the head that are no tokens, as likely as the others. Kills: vLLM's own idea of the vocabulary."""
    model = make_model(tmp_path, tied=True, padding=62)
    engine = make_engine(tmp_path)
    try:
        assert model.vocab_size == 258
        got = sample(model, engine, group_size=100)
        assert got.completion_ids.max() < 258
        assert largest_gap(model, got) < 1e-4
    finally:
        engine.close()


@pytest.fixture
def train_with_vllm(tmp_path, monkeypatch):
    """Train ten steps with prompts of 300 tokens and the toy reward; returns the log's rows."""
    make_model(tmp_path / "policy", tied=True)
    problems = [data.Problem("x" * (300 + n % 8) + str(n), "", "toy") for n in range(8)]
    monkeypatch.setattr(data, "reward_function", lambda _name: toy_reward)
    monkeypatch.setattr(data, "train_problems", lambda _name, hold_out: problems)

    def go(name, **changes):
        words = flags(str(tmp_path / "policy"), str(tmp_path / name), **{"engine": "vllm", "steps": 10, "lr": 1e-2,
                      "pack_tokens": 1024, "max_new_tokens": 8} | changes)  # fmt: skip
        train.main(config.parse_config(words))
        return rows(tmp_path / name)

    return go


@pytest.mark.parametrize("changes", [{"method": "grpo"}, {"method": "dppo", "minibatches": 2, "lr": 1e-3}])
def test_training(train_with_vllm, changes):
    """Ten steps, the gap at each; a correction that has nothing to correct. Kills: stale weights in the loop."""
    log = train_with_vllm("run", **changes)
    log = [row for row in log if row["sampling/sampling_logp_difference/mean"] is not None]  # nothing kept
    gaps = [row["sampling/sampling_logp_difference/mean"] for row in log]
    assert len(gaps) > 5
    print("gaps", " ".join(f"{gap:.0e}" for gap in gaps))
    assert max(gaps) < 1e-4
    assert all(row["sampling/importance_sampling_ratio/mean"] == pytest.approx(1, abs=1e-4) for row in log)
    assert all(row["entropy"] is None and row["entropy/trained"] > 0 for row in log)
    assert any(row["grad_norm"] > 0 for row in log)


@pytest.mark.parametrize("forgotten", ["prefix", "head"])
def test_training_does_not_start_with_something_forgotten(train_with_vllm, monkeypatch, tmp_path, forgotten):
    """The same ten steps; nothing is written. And what the log would show if the check were not there."""
    if forgotten == "prefix":
        monkeypatch.setattr(vllm.LLM, "reset_prefix_cache", lambda self: None)
    else:
        monkeypatch.setattr(vllm.LLM, "collective_rpc", headless)
    with pytest.raises(InputError, match="it samples another policy"):
        train_with_vllm("run")
    assert not (tmp_path / "run").exists()
    monkeypatch.setattr(vllm_engine.Engine, "check", lambda *words: None)
    log = train_with_vllm("unchecked", method="grpo")
    gaps = [row["sampling/sampling_logp_difference/mean"] for row in log]
    print(forgotten, "forgotten: gaps", " ".join(f"{gap:.0e}" for gap in gaps))
    assert max(gaps[1:]) > 1e-3


def test_resume_is_bit_for_bit(train_with_vllm, tmp_path):
    train_with_vllm("whole", steps=4, method="pps", save_every=2)
    train_with_vllm("part", steps=2, method="pps", save_every=2)
    train.main(config.parse_config(["--out-dir", str(tmp_path / "part"), "--resume", "--steps", "4"]))
    assert_same(timeless(tmp_path / "whole"), timeless(tmp_path / "part"))


def test_two_ranks(tmp_path):
    """torchrun, an engine a rank. Kills: an engine that waits for the other rank's."""
    make_model(tmp_path / "policy", tied=True)
    toy = str(Path(__file__).with_name("toy.py"))
    words = flags(str(tmp_path / "policy"), str(tmp_path / "run"), engine="vllm", steps=2, method="grpo")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*torchrun, toy, *words],
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert max(row["sampling/sampling_logp_difference/mean"] for row in rows(tmp_path / "run")) < 1e-4
