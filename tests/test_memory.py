"""The memory plan, as measured; and the check of vLLM, which moves weights."""

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

import config
from engines import memory, vllm_engine


def resolved(**changes):
    options = {"device": "cpu", "dtype": "bfloat16", "pack_tokens": 8192, "max_new_tokens": 1024}
    options |= {"prompts_per_step": 32, "group_size": 16}
    return config.resolve(config.Config(model="x", data="gsm8k", **options | changes))


MEASURED = {  # hidden, feed-forward, layers, heads of Qwen3: GiB of an update on an H200
    (1024, 3072, 28, 16): 12.3,
    (2048, 6144, 28, 16): 30.9,
    (2560, 9728, 36, 32): 66.9,
}


@pytest.mark.parametrize("sizes", MEASURED)
def test_the_plan_is_what_was_measured(sizes):
    """To 2 %."""
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    shape = Qwen3Config(
        **dict(zip(names, sizes, strict=True)), num_key_value_heads=8, head_dim=128,
        vocab_size=151_936, tie_word_embeddings=True,
    )  # fmt: skip
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(shape)
    parts = memory.plan(model, resolved(gradient_checkpointing=True), 1)
    del parts["sampling copy"]
    assert sum(parts.values()) / 2**30 == pytest.approx(MEASURED[sizes], rel=0.02)


def test_moved_weights_come_back(make_policy):
    """Catches a check of vLLM that moves nothing, and weights that it leaves moved."""
    model, _ = make_policy()
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    same = lambda: {name for name, x in model.named_parameters() if torch.equal(x, before[name])}
    with vllm_engine.moved_weights(model):
        assert len(same()) < len(before) / 2, "norms are too small to move"
    assert same() == before.keys()
