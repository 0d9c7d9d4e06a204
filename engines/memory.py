"""
What a run takes of a GPU's memory, computed before its first step.

`plan` counts bytes by part. Weights, their copies and the optimizer stay for the whole run. An
update (gradients, logits, activations) and a rollout (keys and values) take turns with the rest.
Measured on an H200 with --gradient-checkpointing and no sampling copy, updates of Qwen3 at 0.6B,
1.7B and 4B took 12.3, 30.9 and 66.9 GiB; the plan has 12.3, 30.3 and 66.2.
"""

from dataclasses import replace

import torch

import lora
import packing
import rollout
from runtime import InputError

STATE = ("weights", "gradients", "optimizer", "reference", "sampling copy")
LOGITS = 4  # copies of a chunk's logits that are live at once
SPARE = 0.1  # of the GPU's memory: CUDA itself, fragments


def samples_apart(cfg) -> bool:
    """Whether a copy of the weights samples: the trained ones are sharded, of another type, or
    adapters."""
    other = cfg.dtype == "bfloat16" or cfg.lora
    return cfg.shard == "fsdp" or (bool(other) and cfg.engine != "vllm")


def plan(model, cfg, prompt: int, world: int) -> dict[str, int]:
    """Bytes on each of `world` GPUs, if the longest prompt has so many tokens. Of the model, which
    may be on the meta device, only the config and the number of parameters matter."""
    config, dtype = model.config, getattr(torch, cfg.dtype)
    parameters = sum(w.numel() for name, w in model.named_parameters() if ".lora_" not in name)
    share = parameters // world if cfg.shard == "fsdp" else parameters
    frozen = 0
    if cfg.lora:  # adapters of a matrix have `rank` of its rows and columns
        embedding, names = model.get_input_embeddings().weight, model.base_model.named_parameters()
        ours = [w for name, w in names if ".lora_" not in name and w is not embedding]
        share, frozen = cfg.lora * sum(sum(w.shape) for w in ours if w.dim() == 2), parameters
    sequences = min(cfg.rollout_batch, -(-cfg.prompts_per_step * cfg.group_size // world))
    cached = sequences * rollout.cache_bytes(config, dtype)  # for a token of each sequence
    engines = dtype.itemsize * parameters if cfg.engine == "vllm" else 0  # it has its own weights
    chunk = min(packing.HEAD_LOGITS, cfg.pack_tokens * config.vocab_size)
    return {
        "weights": 4 * share + dtype.itemsize * frozen,
        "gradients": 4 * share,
        "optimizer": 8 * share,
        "reference": 4 * share if cfg.beta and not cfg.lora else 0,
        "sampling copy": dtype.itemsize * parameters if samples_apart(cfg) else 0,
        "logits": 4 * LOGITS * chunk,
        "activations": activations(config, cfg, parameters),
        "keys and values": cached * (prompt + cfg.max_new_tokens),
        "one group": engines + cached * (prompt + cfg.max_new_tokens) * cfg.group_size // sequences,
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
    casts, residual = 0, 4  # bytes
    layer = 16 * d + 12 * heads * width + 16 * inner  # bytes a token
    if cfg.dtype == "bfloat16":
        casts = 2 * (parameters - tables)
        layer = 18 * d + 8 * heads * width + 8 * inner
    if cfg.dtype == "bfloat16" and cfg.lora:
        casts, residual = 0, 2
        layer = 14 * d + 8 * heads * width + 8 * inner
    if cfg.gradient_checkpointing:
        return cfg.pack_tokens * (residual * d * layers + layer) + casts // layers
    return cfg.pack_tokens * layer * layers + casts


def state(parts: dict[str, int]) -> int:
    return sum(parts[name] for name in STATE)


def peak(parts: dict[str, int]) -> int:
    """Bytes that a run needs at least: rollouts take fewer sequences at once where they must, and
    there are no gradients meanwhile."""
    update = parts["logits"] + parts["activations"]
    return state(parts) + max(update, parts["one group"] - parts["gradients"])


def vllm_share(parts: dict[str, int], total: int) -> float:
    """The share of a GPU's `total` bytes that vLLM may use, beside the state of training."""
    return round(max(0.05, 1 - SPARE - state(parts) / total), 2)


def report(model, cfg, prompt: int, world: int, total: int) -> str:
    """The plan in GiB, for a GPU of `total` bytes."""
    parts = plan(model, cfg, prompt, world)
    gib = lambda size: f"{size / 2**30:.1f}"
    shown = ", ".join(f"{name} {gib(parts[name])}" for name in STATE if parts[name])
    return (
        f"memory of a GPU of {gib(total)} GiB: {shown}; an update: logits {gib(parts['logits'])}, "
        f"activations {gib(parts['activations'])}; a rollout: keys and values at most "
        f"{gib(parts['keys and values'])}"
    )


def as_flags(changes: dict, cfg) -> str:
    """The flags that change a Config so, each after a space."""
    text = ""
    for name, value in changes.items():
        if getattr(cfg, name) != value:
            text += f" --{name.replace('_', '-')}"
            text += "" if value is True else f" {value}"
    return text


def check(model, cfg, world: int, total: int, command: str) -> str:
    """A note if a step may not fit into the GPU's `total` bytes, else "". It has the command that
    fits: `command` and more flags. InputError if no update can fit."""
    parts = plan(model, cfg, 0, world)
    if peak(parts) <= (1 - SPARE) * total:
        return ""
    layers = {"gradient_checkpointing": True}
    packs = layers | {"pack_tokens": min(2048, cfg.pack_tokens)}
    tries = [layers, packs, layers | {"max_new_tokens": cfg.max_new_tokens // 2}]  # best first
    if not cfg.lora and world > 1:
        tries.append(layers | {"shard": "fsdp"})
    if not cfg.lora:
        adapters = {"lora": 16, "lr": lora.learning_rate(cfg.lr), "shard": "none"}
        tries += [layers | adapters, packs | adapters]
    way_out = "use a smaller model, or more GPUs"
    for changes in tries:
        if peak(plan(model, replace(cfg, **changes), 0, world)) <= (1 - SPARE) * total:
            way_out = f"this fits: {command}{as_flags(changes, cfg)}"
            break
    needed = state(parts) + parts["logits"] + parts["activations"]
    text = f"a step needs {peak(parts) / 2**30:.1f} GiB of the GPU's {total / 2**30:.1f}; {way_out}"
    if needed > total:
        raise InputError(f"--model {cfg.model}: {text}")
    return f"note: {text}"
