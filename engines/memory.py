"""
What an update takes of a GPU's memory, computed before the first step. A rollout takes turns with
it, and samples as many sequences at once as there is room for. Updates of Qwen3 at 0.6B, 1.7B and
4B with --gradient-checkpointing took 12.3, 30.9 and 66.9 GiB on an H200; planned: 12.3, 30.3, 66.2.
"""

from dataclasses import replace

import torch

import packing
from runtime import InputError

STATE = ("weights", "gradients", "optimizer", "reference", "sampling copy")
SPARE = 0.1  # of the GPU's memory: CUDA itself, fragments


def samples_apart(cfg) -> bool:
    """Whether a copy samples: the trained weights are sharded, of another type, or adapters."""
    other = cfg.dtype == "bfloat16" or cfg.lora
    return cfg.shard == "fsdp" or (bool(other) and cfg.engine != "vllm")


def plan(model, cfg, world: int) -> dict[str, int]:
    """Bytes by part on each of `world` GPUs. The model may be on the meta device."""
    dtype = getattr(torch, cfg.dtype)
    parameters = sum(w.numel() for name, w in model.named_parameters() if ".lora_" not in name)
    share = parameters // world if cfg.shard == "fsdp" else parameters
    frozen = 0
    if cfg.lora:  # adapters of a matrix have `rank` of its rows and columns
        embedding, names = model.get_input_embeddings().weight, model.base_model.named_parameters()
        ours = [w for name, w in names if ".lora_" not in name and w is not embedding]
        share = cfg.lora * sum(sum(w.shape) for w in ours if w.dim() == 2)
        frozen = parameters
    chunk = min(packing.HEAD_LOGITS, cfg.pack_tokens * model.config.vocab_size)
    return {
        "weights": 4 * share + dtype.itemsize * frozen,
        "gradients": 4 * share,
        "optimizer": 8 * share,
        "reference": 4 * share if cfg.beta and not cfg.lora else 0,
        "sampling copy": dtype.itemsize * parameters if samples_apart(cfg) else 0,
        "logits": 4 * 4 * chunk,  # four copies are live at once
        "activations": activations(model.config, cfg, parameters),
    }


def activations(config, cfg, parameters: int) -> int:
    """Bytes that a pack's forward keeps for its backward pass, with fused norms and attention.
    The residual stream is float32. Under autocast each product keeps a copy of its input and of its
    weight in bfloat16, and Qwen3's norms keep float32 copies of queries and keys. With --lora the
    stream and the weights are bfloat16, and each adapter has a copy of its input. With gradient
    checkpointing, only the layers' inputs stay, and what one layer keeps."""
    layers, d, inner = config.num_hidden_layers, config.hidden_size, config.intermediate_size
    heads = config.num_attention_heads + config.num_key_value_heads
    width = getattr(config, "head_dim", None) or d // config.num_attention_heads
    tables = config.vocab_size * d * (1 if config.tie_word_embeddings else 2)
    # Bytes: casts of copied weights; a token of a layer's input, and of all that a layer keeps.
    casts = 0
    residual = 4
    if cfg.dtype == "float32":
        layer = 16 * d + 12 * heads * width + 16 * inner
    elif cfg.lora:
        residual = 2
        layer = 14 * d + 8 * heads * width + 8 * inner
    else:
        casts = 2 * (parameters - tables)
        layer = 18 * d + 8 * heads * width + 8 * inner
    if cfg.gradient_checkpointing:
        return cfg.pack_tokens * (residual * d * layers + layer) + casts // layers
    return cfg.pack_tokens * layer * layers + casts


def vllm_share(parts: dict[str, int], total: int) -> float:
    """The share of a GPU's `total` bytes that vLLM may use, beside the state of training."""
    return round(max(0.05, 1 - SPARE - sum(parts[name] for name in STATE) / total), 2)


def check(model, cfg, world: int, total: int) -> str:
    """The plan in GiB for a GPU of `total` bytes, and what helps if it may not fit. InputError if
    it cannot."""
    parts, limit = plan(model, cfg, world), (1 - SPARE) * total
    size = sum(parts.values())
    shown = ", ".join(f"{name} {bytes / 2**30:.1f}" for name, bytes in parts.items() if bytes)
    text = f"an update needs {size / 2**30:.1f} GiB of the GPU's {total / 2**30:.1f}: {shown}"
    if size <= limit:
        return text
    way_out = "use --lora, --shard fsdp on more GPUs, or a smaller model"
    smaller = plan(model, replace(cfg, gradient_checkpointing=True, pack_tokens=2048), world)
    if sum(smaller.values()) <= limit:
        way_out = "with --gradient-checkpointing --pack-tokens 2048 it fits"
    if size > total:
        raise InputError(f"--model {cfg.model}: {text}; {way_out}")
    return f"note: {text}; {way_out}"
