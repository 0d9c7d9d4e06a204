"""The memory plan: as measured, and what it advises."""

import re

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

import config
from engines import memory, vllm_engine
from runtime import InputError

GIB = 2**30
SHAPES = {  # Qwen3's: hidden, feed-forward, layers, heads, key-value heads, head width, vocabulary
    "0.6b": (1024, 3072, 28, 16, 8, 128, 151_936),
    "1.7b": (2048, 6144, 28, 16, 8, 128, 151_936),
    "4b": (2560, 9728, 36, 32, 8, 128, 151_936),
    "8b": (4096, 12_288, 36, 32, 8, 128, 151_936),
}


def resolved(**changes):
    options = {"device": "cpu", "dtype": "bfloat16", "pack_tokens": 8192, "max_new_tokens": 1024}
    options |= {"prompts_per_step": 32, "group_size": 16}
    return config.resolve(config.Config(model="x", data="gsm8k", **options | changes))


def meta(name):
    hidden, inner, layers, heads, kv_heads, width, vocabulary = SHAPES[name]
    shape = Qwen3Config(
        hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=width,
        vocab_size=vocabulary, tie_word_embeddings=name != "8b",
    )  # fmt: skip
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(shape)


@pytest.fixture(scope="module")
def model_4b():
    return meta("4b")


def test_the_plan_is_what_was_measured():
    """Of updates on an H200, in GiB, to 2 %."""
    for name, measured in (("0.6b", 12.3), ("1.7b", 30.9), ("4b", 66.9)):
        parts = memory.plan(meta(name), resolved(gradient_checkpointing=True), 1)
        del parts["sampling copy"]
        assert sum(parts.values()) / GIB == pytest.approx(measured, rel=0.02), name


FIT = [  # GiB of the GPU: what is said of a batch without checkpointing, which needs 121 GiB
    (140, "an update needs 121.. GiB .*: weights 15.0, gradients 15.0"),
    (130, "note: an update needs 121.. GiB .* --pack-tokens 2048 it fits"),
    (79, "--model x: .* it fits"),
    (47, "--model x: .* or a smaller model"),
]


def test_what_fits(model_4b):
    """Refused if an update is larger than the GPU, else noted. Catches advice that does not help,
    and a run that dies unwarned."""
    for gib, wanted in FIT:
        try:
            said = memory.check(model_4b, resolved(), 1, gib * GIB)
        except InputError as refusal:
            said = str(refusal)
        assert re.match(wanted, said)


def test_vllm_gets_what_training_leaves(model_4b):
    """Catches a share that starves a large model, or that the state of training does not fit
    beside: of 80 GB, 4B leaves 0.71 if eight GPUs share it."""
    shares = []
    for world, total in ((1, 140), (8, 79), (1, 40)):
        cfg = resolved(engine="vllm", shard="fsdp" if world > 1 else "none")
        shares.append(memory.vllm_share(memory.plan(model_4b, cfg, world), total * GIB))
    assert shares == [0.47, 0.71, 0.05]


def test_moved_weights_come_back(make_policy):
    """Catches a check of vLLM that moves nothing, and weights that it leaves moved."""
    model, _ = make_policy()
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    same = lambda: {name for name, x in model.named_parameters() if torch.equal(x, before[name])}
    with vllm_engine.moved_weights(model):
        assert len(same()) < len(before) / 2, "norms are too small to move"
    assert same() == before.keys()
