"""
Which models the fast decoder samples from.

It supports Llama, Mistral, Qwen2 and Qwen3. When such a model is loaded, the decoder's logits are
compared with transformers'. If they differ, or for any other model, transformers decodes.
"""

import torch
from torch import nn

from engines import compact
from engines.fast_decoder import Decoder

FAMILIES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
ROPES = ("default", "linear", "llama3", "yarn")  # they rotate a position always in the same way
CLOSE = 1e-4  # the largest difference of logits
NOISE = (
    1.25  # in 16 bits, the largest error over transformers'; 0.8 to 1.16 by chance in tiny models
)
LENGTH = 11  # tokens that are compared: a prompt of 8, then 3


def decoder(model, length: int):
    """decode(token, positions, step, cache, bias) for the first `length` positions: a lean.Decoder
    if `compare` has accepted the model, else transformers."""
    needs = getattr(model, "why_not_fast", "it was not compared")
    return _transformers(model) if needs else Decoder(model, length)


def compare(model, exact=None) -> None:
    """Set model.why_not_fast: why the lean decoder must not sample from this model, or "".

    exact: for weights in 16 bits, the `logits` that the model had in float32. There the decoder may
    be no further from these than transformers is. Leaves the random state as it is."""
    model.why_not_fast = _unfit(model)
    if model.why_not_fast:
        return
    theirs, ours = logits(model).cpu(), logits(model, Decoder(model, LENGTH)).cpu()
    gap, most = (ours - theirs).abs().max().item(), CLOSE
    if exact is not None:
        gap, most = ((some - exact.cpu()).norm().item() for some in (ours, theirs))
        most *= NOISE
    if not gap <= most:
        model.why_not_fast = f"the lean decoder's logits differ by {gap:.1e} > {most:.1e}"


def _unfit(model) -> str:
    config, rotary = model.config, getattr(model.base_model, "rotary_emb", None)
    if type(model).__name__ not in FAMILIES:
        return f"{type(model).__name__} is none of {', '.join(FAMILIES)}"
    layers = model.base_model.layers
    weights = [module for module in layers.modules() if getattr(module, "weight", None) is not None]
    products = [module for module in weights if module.weight.dim() > 1]
    outputs = [
        module for layer in layers for module in (layer.self_attn.o_proj, *layer.mlp.children())
    ]
    for problem, found in {
        f"its rotations are of the kind {rotary.rope_type}": rotary.rope_type not in ROPES,
        f"its activation is {config.hidden_act}": config.hidden_act != "silu",
        "its attention has a window": getattr(config, "sliding_window", None) is not None,
        "its products are not plain ones": any(type(m) is not nn.Linear for m in products),
        "its outputs have biases": any(getattr(m, "bias", None) is not None for m in outputs),
    }.items():
        if found:
            return problem
    return ""


@torch.no_grad()
def logits(model, decode=None) -> torch.Tensor:
    """Logits [3, 4, V] of three tokens after prompts of 3 and 8 tokens, all random, by transformers
    or by another decode(token, positions, step, cache, bias)."""
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(model.config.vocab_size, (4, LENGTH), generator=draw)
    prompts = [row[:width].tolist() for row, width in zip(ids, (3, 8, 8, 8), strict=True)]
    found = []
    with compact.plain_generation(model):
        _, _, positions, bias, cache = compact.prefill(model, prompts, 3)
        for step, token in enumerate(ids[:, 8:].to(model.device).split(1, dim=1)):
            inputs = (token, positions, step + 1, cache, bias[..., : 9 + step])
            found.append((decode or _transformers(model))(*inputs))
    return torch.stack(found).float()


def _transformers(model):
    """decode(token, positions, step, cache, bias) of any model."""

    def decode(token, positions, step, cache, bias=None):
        inputs = {
            "position_ids": positions + step,
            "past_key_values": cache,
            "attention_mask": bias,
        }
        return model(token, **inputs).logits[:, -1]

    return decode
