"""vLLM samples from the trainer's policy, update after update.

tests/vllm.sh builds an environment with a vLLM for CPUs and runs these tests in it; without vLLM
they are skipped.
"""

import json
import random
import zlib

import pytest
import torch
from toy import assert_same, flags, rows, timeless
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

import config
import models
import rollout
import train
from engines import vllm_engine
from runtime import InputError
from tasks import arithmetic
from update import trainer_logprobs

vllm = pytest.importorskip("vllm", reason="tests/vllm.sh runs these, with a vLLM for CPUs")
pytestmark = pytest.mark.vllm
CFG = config.resolve(config.Config(device="cpu"))
rng = random.Random(0)
# The long ones fill blocks of the prefix cache.
PROMPTS = [[rng.randrange(256) for _ in range(length)] for length in (5, 140, 300, 301)]


def make_model(folder, *, tied, padding=0):
    """An untrained Qwen3 with confident, prompt-dependent predictions, saved for vLLM. The last
    `padding` rows of its head are not tokens."""
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(arithmetic.BASE)
    shape = Qwen3Config(
        vocab_size=len(tokenizer) + padding, hidden_size=64, intermediate_size=96,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
        max_position_embeddings=512, tie_word_embeddings=tied, initializer_range=0.3,
        eos_token_id=256, pad_token_id=257, bos_token_id=None,
    )  # fmt: skip
    Qwen3ForCausalLM(shape).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return models.load_policy(str(folder), "cpu")[0]


def make_engine(folder):
    sizes = {"vocab_size": 258, "max_tokens": 400, "sequences": 64}
    return vllm_engine.Engine(str(folder), **sizes, dtype="float32", device="cpu", memory=0.3)


@pytest.fixture(scope="module", params=["tied", "untied"])
def pair(request, tmp_path_factory):
    """(model, engine) with the same weights."""
    folder = tmp_path_factory.mktemp(request.param)
    model = make_model(folder, tied=request.param == "tied")
    engine = make_engine(folder)
    yield model, engine
    engine.close()


def headless(llm, method, *, kwargs, real=vllm.LLM.collective_rpc):
    """Sends no head. In vLLM for CPUs, a tied model has a separate copy of it."""
    named = kwargs["weights_iterator"]
    weights = ((name, tensor) for name, tensor in named if name != "lm_head.weight")
    return real(llm, method, kwargs={"weights_iterator": weights})


def sample(model, engine, *, group_size=8, seed=0, **changes):
    options = {"max_new_tokens": 12, "eos_ids": [256, 7], "pad_id": 7, "engine": engine}
    sampling = rollout.Sampling(**options | changes)
    return rollout.sample(model, PROMPTS, sampling, group_size=group_size, seed=seed)


def largest_gap(model, rollouts, cfg=CFG):
    return (trainer_logprobs(model, rollouts, cfg) - rollouts.logprobs).abs().max().item()


def test_rollouts_are_those_of_the_policy(pair):
    """Log-probs, end tokens, cuts and energies; the pad is an end token. Catches log-probs from
    before the temperature, top-k of the model's own generation config, and lengths from token
    values."""
    model, engine = pair
    ends = {"eos_ids": [256, *range(0, 256, 16)], "pad_id": 16}
    got = sample(model, engine, temperature=0.6, group_size=40, **ends)
    cfg = config.resolve(config.Config(device="cpu", temperature=0.6))
    assert largest_gap(model, got, cfg) < 1e-4
    assert got.truncated.any()
    assert not got.truncated.all()
    columns = (got.completion_ids, got.lengths, got.truncated)
    for ids, length, cut in zip(*(column.flatten(0, 1) for column in columns), strict=True):
        inside = [token % 16 == 0 for token in ids[:length].tolist()]
        assert not any(inside[:-1])
        assert inside[-1] != bool(cut)
        assert length == 12 or not cut
    # The exact energies are of other completions of the same policy.
    sampling = rollout.Sampling(12, [256], 257, 0.6)
    exact = rollout.sample(model, PROMPTS, sampling, group_size=40, seed=1)
    assert got.energy.mean() > exact.energy.mean() * 0.9, "a bound from above"
    assert got.entropy.isnan().all()


def test_greedy_tokens_and_cut_tails_are_those_of_the_loop(pair):
    """Groups of equal completions. Catches a flag of eval.py that is not passed to vLLM."""
    model, engine = pair
    greedy = {"temperature": 0.0}
    for changes in (greedy, {"top_k": 1}, {"top_p": 1e-6}):
        ours, theirs = (sample(model, one, group_size=3, **changes) for one in (None, engine))
        assert torch.equal(ours.lengths, theirs.lengths)
        inside = torch.arange(12) < ours.lengths[..., None]
        assert torch.equal(ours.completion_ids * inside, theirs.completion_ids * inside), changes


def test_the_check_finds_what_was_forgotten(pair, monkeypatch):
    """The check passes and leaves the weights unchanged. It fails without the prefix reset, without
    the tied head, and with weights that are never sent. Catches a check that compares once only, or
    with weights that did not move."""
    model, engine = pair
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    sampling = rollout.Sampling(12, [256], 257, engine=engine)

    def check():
        logprobs = lambda rollouts: trainer_logprobs(model, rollouts, CFG)
        engine.check(model, PROMPTS, sampling, logprobs)

    def assert_found(owner, name, forgetful):
        complaint = r"nats a token from the trainer's .* it samples another policy"
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, forgetful)
            with pytest.raises(InputError, match=complaint):
                check()

    check()
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert_found(engine.llm, "reset_prefix_cache", lambda: None)
    engine.llm.reset_prefix_cache()
    if model.config.tie_word_embeddings:
        assert_found(vllm.LLM, "collective_rpc", headless)
    assert_found(engine.llm, "collective_rpc", lambda *args, **options: None)
    check()


def test_the_vocabularys_padding_is_never_sampled(tmp_path):
    """Catches a vocabulary whose size is the config's: 62 rows of the head are not tokens, but as
    likely as the others."""
    model = make_model(tmp_path, tied=True, padding=62)
    engine = make_engine(tmp_path)
    try:
        assert model.vocab_size == 258
        got = sample(model, engine, group_size=100)
        assert got.completion_ids.max() < 258
        assert largest_gap(model, got) < 1e-4
    finally:
        engine.close()


def coin(completion, _answer):
    """0 or 1 by a checksum, so that the first groups have unequal rewards and move the weights."""
    return float(zlib.crc32(completion.encode()) % 2)


@pytest.fixture
def train_with_vllm(tmp_path):
    """Train ten steps on prompts of 300 tokens; returns the log's rows."""
    make_model(tmp_path / "policy", tied=True)
    problems = [{"problem": "x" * (300 + n % 8) + str(n), "answer": "0"} for n in range(9)]
    file = tmp_path / "problems.jsonl"  # the last one is held out
    file.write_text("\n".join(map(json.dumps, problems)))
    options = {"engine": "vllm", "data": file, "prompt_format": "plain", "steps": 10, "lr": 1e-2}
    options |= {"pack_tokens": 1024, "max_new_tokens": 8}

    def go(name, **changes):
        policy, folder = str(tmp_path / "policy"), str(tmp_path / name)
        args = flags(policy, folder, **options | changes)
        train.main(config.parse_config(args), reward=coin)
        return rows(tmp_path / name)

    return go


@pytest.mark.parametrize("lora", [0, 4])
def test_training(train_with_vllm, lora):
    """Catches stale weights, a stale head or prefix in the training loop, and adapters that are not
    merged. At each of ten steps vLLM's log-probs are the trainer's, and the correction for a
    difference has nothing to do."""
    log = train_with_vllm("run", method="grpo", lora=lora)
    gaps = [row["sampling/sampling_logp_difference/mean"] for row in log]
    assert max(gaps) < 1e-4
    ratios = [row["sampling/importance_sampling_ratio/mean"] for row in log]
    assert ratios == pytest.approx([1.0] * len(ratios), abs=1e-4)
    assert all(row["entropy"] is None and row["entropy/trained"] > 0 for row in log)
    assert any(row["grad_norm"] > 0 for row in log)


def test_resume_is_bit_for_bit(train_with_vllm, tmp_path):
    """Catches samples that depend on what the engine did before the checkpoint."""
    options = {"method": "pps", "prompt_rule": "uniform", "save_every": 2}
    train_with_vllm("whole", steps=4, **options)
    train_with_vllm("part", steps=2, **options)
    train_with_vllm("part", steps=4, resume=True, **options)
    assert_same(timeless(tmp_path / "whole"), timeless(tmp_path / "part"))
