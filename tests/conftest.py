"""A Qwen3 small enough that a test can afford hundreds of backward passes, and a way to make rollouts by hand."""

import os
import zlib
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from toy import flags, plain_logits, rows, toy_reward
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

import arithmetic
import config
import data
import packing
import rollout
import train

if workers := int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "0")):  # else each worker takes all cores
    torch.set_num_threads(max(1, os.cpu_count() // workers))


def pytest_collection_modifyitems(items):
    """The long ones first, so that no worker is left alone with one."""
    long = ("test_notebooks", "test_ranks", "test_stop", "test_train.py::test_two_ranks", "test_resume.py::test_killed")
    items.sort(key=lambda item: not any(name in item.nodeid for name in long))


@pytest.fixture(scope="session")
def make_policy():
    """Build an untrained two-layer Qwen3 with grouped-query attention, and its byte tokenizer."""

    def make(seed=0, dtype=torch.float32):
        torch.manual_seed(seed)
        tokenizer = arithmetic.make_tokenizer()
        config = Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            max_position_embeddings=512,
            tie_word_embeddings=True,
            initializer_range=0.2,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
        config._attn_implementation = packing.ATTENTION
        model = Qwen3ForCausalLM(config).to(dtype)
        if dtype == torch.float64:  # Qwen3's RMSNorm computes in float32 whatever comes in
            for norm in (module for module in model.modules() if isinstance(module, Qwen3RMSNorm)):
                norm.forward = partial(F.rms_norm, normalized_shape=norm.weight.shape, weight=norm.weight, eps=1e-6)
        model.generation_config = GenerationConfig(
            eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
        )
        return model, tokenizer

    return make


@pytest.fixture
def policy_folder(make_policy, tmp_path):
    """The same model as a Hugging Face folder, for --model."""
    model, tokenizer = make_policy()
    model.save_pretrained(tmp_path / "policy")
    tokenizer.save_pretrained(tmp_path / "policy")
    return str(tmp_path / "policy")


@pytest.fixture
def small_runs(policy_folder, monkeypatch):
    """Whatever a bench trains is tiny, and rewarded by chance."""
    small = ["--model", policy_folder, "--prompts-per-step", "4", "--group-size", "4", "--max-new-tokens", "6"]
    parse = config.parse_config
    monkeypatch.setattr(config, "parse_config", lambda words: parse([*words, *small]))
    monkeypatch.setattr(data, "reward_function", lambda _name: lambda text, _gold: float(zlib.crc32(text.encode()) % 2))


@pytest.fixture
def small_world():
    """A Qwen3 of five tokens whose head is padded to eight; the chance of every completion of at most three tokens, by
    a forward of its own: {tokens: probability}, for prompt [1, 2] and two end tokens."""
    torch.manual_seed(3)
    config = Qwen3Config(
        vocab_size=8, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, initializer_range=0.4, tie_word_embeddings=True,
    )  # fmt: skip
    model = Qwen3ForCausalLM._from_config(config, attn_implementation=packing.ATTENTION)
    model.vocab_size = 5
    chances, unfinished = {}, {(): 1.0}
    for length in (1, 2, 3):
        longer = {}
        for begun, chance in unfinished.items():
            probs = plain_logits(model, torch.tensor([[1, 2, *begun]]))[0, -1, :5].double().softmax(dim=0)
            for token, prob in enumerate(probs.tolist()):
                ended = token in (0, 4) or length == 3
                (chances if ended else longer)[*begun, token] = chance * prob
        unfinished = longer
    return model, chances


@pytest.fixture
def make_rollouts():
    """Random prompts and completions of ragged lengths; old log-probs are the model's own, moved by `drift`."""

    def make(model, num_prompts, group_size, *, drift=0.0, seed=0):
        generator = torch.Generator().manual_seed(seed)

        def integers(low, high, *shape):
            return torch.randint(low, high, shape, generator=generator)

        prompts = [integers(0, 256, int(integers(1, 5, 1))).tolist() for _ in range(num_prompts)]
        completion_ids = integers(0, 256, num_prompts, group_size, 6)
        lengths = integers(1, 7, num_prompts, group_size)
        logprobs = torch.zeros(num_prompts, group_size, 6, dtype=model.dtype)
        with torch.no_grad():
            for q in range(num_prompts):
                for g in range(group_size):
                    completion = completion_ids[q, g, : lengths[q, g]].tolist()
                    own, _ = packing.packed_logprobs(model, packing.build_pack([prompts[q]], [completion]))
                    noise = torch.randn(len(completion), generator=generator, dtype=own.dtype)
                    logprobs[q, g, : len(completion)] = own + drift * noise
        nothing = torch.zeros(num_prompts, group_size)
        return rollout.Rollouts(prompts, completion_ids, logprobs, nothing, nothing, lengths, nothing.bool())

    return make


@pytest.fixture
def run(policy_folder, tmp_path, monkeypatch):
    """Train in this process with the toy reward; returns the log's rows."""
    monkeypatch.setattr(data, "reward_function", lambda _name: toy_reward)

    def go(name, **changes):
        train.main(config.parse_config(flags(policy_folder, str(tmp_path / name), **changes)))
        return rows(tmp_path / name)

    return go
