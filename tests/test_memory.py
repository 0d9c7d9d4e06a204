"""The memory plan: its parts by hand, its activations measured, and what it advises."""

import re
import types

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, Qwen3Config

import config
import lora
import models
import packing
from engines import memory, vllm_engine
from runtime import InputError, device

GIB = 2**30
SHAPES = {  # Qwen3's: hidden, feed-forward, layers, heads, key-value heads, head width, vocabulary
    "tiny": (128, 384, 4, 4, 2, 32, 2048),
    "0.6b": (1024, 3072, 28, 16, 8, 128, 151_936),
    "1.7b": (2048, 6144, 28, 16, 8, 128, 151_936),
    "4b": (2560, 9728, 36, 32, 8, 128, 151_936),
    "8b": (4096, 12_288, 36, 32, 8, 128, 151_936),
}


def qwen3(shape):
    hidden, inner, layers, heads, kv_heads, width, vocabulary = SHAPES[shape]
    return Qwen3Config(
        hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=width,
        vocab_size=vocabulary, tie_word_embeddings=shape != "8b",
    )  # fmt: skip


def resolved(**changes):
    options = {"device": "cpu", "dtype": "bfloat16", "pack_tokens": 8192, "max_new_tokens": 1024}
    options |= {"prompts_per_step": 32, "group_size": 16}
    return config.resolve(config.Config(model="x", data="gsm8k", **options | changes))


def meta(shape):
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(qwen3(shape))


@pytest.fixture(scope="module")
def model_4b():
    return meta("4b")


TABLE = [  # flags, GPUs, {part: GiB}; 4B has 4.022e9 parameters
    ({}, 1, {"weights": 15.0, "gradients": 15.0, "optimizer": 30.0, "reference": 0,
             "sampling copy": 7.5, "logits": 2.0}),
    ({"shard": "fsdp", "beta": 0.1}, 8, {"weights": 1.87, "optimizer": 3.75, "reference": 1.87,
             "sampling copy": 7.5}),
    ({"engine": "vllm"}, 8, {"weights": 15.0, "sampling copy": 0}),
    ({"lora": 8, "beta": 0.1}, 1, {  # 57,344 a layer and rank in adapters
             "weights": 7.49 + 0.062, "gradients": 0.0615, "optimizer": 0.123, "reference": 0,
             "sampling copy": 7.5}),
    ({"dtype": "float32", "pack_tokens": 256}, 1, {
             "sampling copy": 0, "logits": 256 * 151_936 * 16 / GIB}),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "world", "wanted"), TABLE)
def test_parts_by_hand(model_4b, changes, world, wanted):
    """Catches a part that is not divided by the ranks, or that is, and bytes of another type."""
    parts = memory.plan(model_4b, resolved(**changes), world)
    found = {name: parts[name] / GIB for name in wanted}
    assert found == pytest.approx(wanted, rel=0.005)


class FusedNorm(torch.autograd.Function):
    """Keeps what CUDA's kernel keeps: its input."""

    @staticmethod
    def forward(ctx, x, shape, weight, eps):
        ctx.save_for_backward(x)
        return F.rms_norm(x, shape, weight, eps)


def kept(model, cfg, tokens):
    """Bytes that a forward keeps for its backward pass, beside the weights."""
    weights = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    stored = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            stored[storage.data_ptr()] = storage
        return tensor

    pack_of_one = packing.build_pack([[1]], [[2] * tokens])
    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    inputs = {"position_ids": pack_of_one.position_ids, "segments": pack_of_one.segments}
    with hooks, device.autocast(cfg):
        model.base_model(pack_of_one.input_ids, use_cache=False, **inputs)
    return sum(storage.nbytes() for storage in stored.values())


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(("rank", "error"), [(0, 0.01), (4, 0.03)])
def test_activations_are_those_of_a_forward(monkeypatch, dtype, checkpointing, rank, error):
    """Two more layers keep what the plan says, to 1 % (with --lora 3 %). Catches a tensor that is
    not counted, and a cast of the weights that counts for each token. On the CPU, the attention's
    output is copied; adapters copy it themselves if they cast it."""
    norm = types.SimpleNamespace(rms_norm=FusedNorm.apply)
    monkeypatch.setattr(device, "F", norm)
    cfg = resolved(dtype=dtype, gradient_checkpointing=checkpointing, pack_tokens=300, lora=rank)
    measured, planned = [], []
    for layers in (2, 4):
        shape = qwen3("tiny")
        shape.num_hidden_layers = layers
        model = AutoModelForCausalLM.from_config(shape, attn_implementation=packing.ATTENTION)
        device.fuse_norms(model)
        if checkpointing:
            models.checkpoint_layers(model)
        if rank:
            device.cast_weights(model, dtype)
            lora.inject(model, rank, 0)
        measured.append(kept(model, cfg, 300))
        planned.append(memory.plan(model, cfg, 1)["activations"])
    width = shape.num_attention_heads * shape.head_dim * getattr(torch, dtype).itemsize
    casts = rank and dtype == "bfloat16"
    copied = 0 if checkpointing or casts else 2 * 300 * width
    found = measured[1] - measured[0] - copied
    assert found == pytest.approx(planned[1] - planned[0], rel=error)


FIT = [  # shape, GiB of the GPU: what is said of a batch without checkpointing
    ("0.6b", 79, "an update needs .* weights 2.2, gradients 2.2, .*[0-9]$"),
    ("4b", 130, "note: an update needs 121.. GiB .* --pack-tokens 2048 it fits"),
    ("4b", 79, "--model x: an update needs 121.. GiB of the GPU's 79.0: .* it fits"),
    ("4b", 47, "--model x: .* or a smaller model"),
]


@pytest.mark.parametrize(("shape", "gib", "wanted"), FIT)
def test_what_fits(shape, gib, wanted):
    """Refused if an update is larger than the GPU, else noted. Catches advice that does not help,
    and a run that dies unwarned."""
    try:
        said = memory.check(meta(shape), resolved(), 1, gib * GIB)
    except InputError as refusal:
        said = str(refusal)
    assert re.match(wanted, said)


def test_vllm_gets_what_training_leaves(model_4b):
    """Catches a share that starves a large model, or that the state of training does not fit
    beside: of 80 GB, 4B leaves 0.71 if eight GPUs share it."""
    shares = []
    for world, total in ((1, 140), (8, 79), (1, 40)):
        cfg = resolved(engine="vllm", shard="fsdp" if world > 1 else "none")
        parts = memory.plan(model_4b, cfg, world)
        shares.append(memory.vllm_share(parts, total * GIB))
    assert shares == [0.47, 0.71, 0.05]


def test_moved_weights_come_back(make_policy):
    """Catches weights that move by another share of their norm, that are not exact afterwards, or
    that vLLM's check copies to the host."""
    model, _ = make_policy()
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    layers = [name for name in before if "layers" in name]
    far = lambda *names: torch.cat([(weight[name] - before[name]).flatten() for name in names])
    with vllm_engine.moved_weights(model):
        weight = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    whole = torch.cat([before[name].flatten() for name in layers]).norm().item()
    assert far(*layers).norm().item() == pytest.approx(0.1 * whole, rel=0.5)
    embedding = "model.embed_tokens.weight"
    moved = (far(embedding).norm() / before[embedding].norm()).item()
    assert moved == pytest.approx(1.0, rel=0.1)
    assert all(torch.equal(weight, before[name]) for name, weight in model.named_parameters())
