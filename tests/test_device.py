"""What depends on the device, as far as the CPU can tell; tests/gpu has the rest."""

import pytest
import torch
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from runtime import device


@pytest.mark.parametrize("kind", [Qwen3RMSNorm, LlamaRMSNorm, GemmaRMSNorm])
def test_fused_norms_are_the_models_own(kind):
    """Values and gradients, with weights and an epsilon that matter. Catches a norm without its
    weight, another epsilon, and Gemma's norm, which multiplies by 1 + weight."""
    torch.manual_seed(0)
    norm = kind(24, eps=0.1)
    torch.nn.init.normal_(norm.weight)
    x = torch.randn(5, 7, 24, requires_grad=True)
    found = []
    for fuse in (False, True):
        if fuse:
            device.fuse_norms(torch.nn.Sequential(norm))
        out = norm(x)
        found.append((out, *torch.autograd.grad(out.square().sum(), (x, norm.weight))))
    for own, fused in zip(*found, strict=True):
        assert torch.allclose(own, fused, rtol=1e-5, atol=1e-5)
    assert ("forward" in vars(norm)) == (kind is not GemmaRMSNorm)


def test_cast_weights_have_memory_of_their_own():
    """Fails if the same type is not copied: loaded weights may be unaligned views of a file. And if
    buffers, such as rotary frequencies, are rounded."""
    layer = torch.nn.Linear(3, 2)
    layer.register_buffer("frequencies", torch.ones(1) / 3)
    before = layer.weight.data
    device.cast_weights(layer, "float32")
    assert layer.weight.data_ptr() != before.data_ptr()
    assert torch.equal(layer.weight, before)
    device.cast_weights(layer, "bfloat16")
    assert layer.weight.dtype == layer.bias.dtype == torch.bfloat16
    assert layer.frequencies.dtype == torch.float32
