"""
What depends on the device.

On CUDA the host queues work and goes on. It waits wherever it reads a value back (`.item()`,
`nonzero`), and wherever it copies from memory that is not pinned. Code that runs once per token or
per pack must do neither.
"""

import functools

import torch
import torch.nn.functional as F

from runtime import InputError

# transformers' classes that compute weight * x / sqrt(mean(x^2) + variance_epsilon)
FUSED = ("Qwen3RMSNorm", "Qwen2RMSNorm", "LlamaRMSNorm", "MistralRMSNorm")


def choose_device(device: str) -> str:
    """Resolve `auto` to cuda if it is available, else cpu; InputError for an unavailable cuda."""
    available = torch.cuda.is_available()
    if device == "cuda" and not available:
        raise InputError("--device cuda: this PyTorch sees no CUDA device; use --device cpu")
    return ("cuda" if available else "cpu") if device == "auto" else device


def choose_dtype(dtype: str, device: str) -> str:
    """Resolve `auto` to bfloat16 on CUDA, else float32."""
    return ("float32" if device == "cpu" else "bfloat16") if dtype == "auto" else dtype


def autocast(cfg):
    """bfloat16 arithmetic over float32 weights, if the run uses it.

    Without autocast's cache: a weight that is used several times, such as the head over its chunks,
    is cast each time, so that its gradients are added up in float32."""
    enabled = cfg.dtype == "bfloat16"
    return torch.autocast(cfg.device, torch.bfloat16, enabled=enabled, cache_enabled=False)


def send(tensor: torch.Tensor, device) -> torch.Tensor:
    """Copy a CPU tensor to the device without waiting for the copy."""
    if torch.device(device).type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def cast_weights(model, dtype: str) -> None:
    """Give every parameter memory of its own, of this type.

    Loaded weights may be unaligned views of the file, and then the same arithmetic can round
    differently from one load to the next. Buffers keep their type: in bfloat16, one of Qwen3's
    rotary frequencies would be off by a radian after 866 tokens."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(getattr(torch, dtype), copy=True)


def fuse_norms(model) -> None:
    """Let PyTorch's own function compute each RMSNorm: on CUDA it is one kernel, where transformers
    launches six to eight."""
    for norm in model.modules():
        if type(norm).__name__ in FUSED:
            norm.forward = functools.partial(_rms_norm, norm)


def _rms_norm(norm, hidden_states):
    dtype = torch.promote_types(hidden_states.dtype, norm.weight.dtype)  # as transformers returns
    shape = hidden_states.shape[-1:]
    return F.rms_norm(hidden_states.to(dtype), shape, norm.weight, norm.variance_epsilon)
