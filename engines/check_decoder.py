"""
Which models the fast decoder samples from.

It supports Llama, Mistral, Qwen2 and Qwen3. When such a model is loaded, the decoder's logits are
compared with transformers'. If they differ, or for any other model, transformers decodes.
"""

import torch
from torch import nn

import rollout
from engines import prefill
from engines.fast_decoder import Decoder

FAMILIES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
ROPES = ("default", "linear", "llama3", "yarn")  # here a position's rotation never changes
CLOSE = 1e-4  # the largest difference of logits that is accepted in float32
# In 16 bits both decoders are inexact. The fast one's error may be this many times transformers';
# in tiny models the ratio is 0.8 to 1.16 by chance.
NOISE = 1.25
LENGTH = 11  # tokens that are compared: a prompt of 8, then 3


def decoder(model, length: int):
    """The function decode(token, positions, step, cache, bias) for positions below `length`.

    It is the fast decoder if `compare` has accepted the model, else transformers.
    """
    why_not_fast = getattr(model, "why_not_fast", "it was not compared")
    return _transformers(model) if why_not_fast else Decoder(model, length)


def compare(model, exact=None) -> None:
    """Set model.why_not_fast: the reason why the fast decoder must not be used, or "".

    For weights in 16 bits, `exact` holds the `logits` that the model had in float32. The fast
    decoder may then be no further from them than transformers is. The random state stays as it is.
    """
    model.why_not_fast = _unfit(model)
    if model.why_not_fast:
        return
    theirs = logits(model).cpu()
    ours = logits(model, Decoder(model, LENGTH)).cpu()
    if exact is None:
        error, allowed = (ours - theirs).abs().max().item(), CLOSE
    else:
        error = (ours - exact.cpu()).norm().item()
        allowed = NOISE * (theirs - exact.cpu()).norm().item()
    if not error <= allowed:  # also if the error is NaN
        model.why_not_fast = f"the fast decoder's logits differ by {error:.1e} > {allowed:.1e}"


def _unfit(model) -> str:
    """Why the decoder does not support this model, by its config and layers; "" if it does."""
    if type(model).__name__ not in FAMILIES:
        return f"{type(model).__name__} is none of {', '.join(FAMILIES)}"
    config, rope = model.config, model.base_model.rotary_emb.rope_type
    layers = model.base_model.layers
    weights = [module for module in layers.modules() if getattr(module, "weight", None) is not None]
    products = [module for module in weights if module.weight.dim() > 1]
    outputs = [
        module for layer in layers for module in (layer.self_attn.o_proj, *layer.mlp.children())
    ]
    reasons = {
        f"its rotary embedding is {rope}": rope not in ROPES,
        "its attention has a window": getattr(config, "sliding_window", None) is not None,
        "its products are not plain linear layers": any(type(m) is not nn.Linear for m in products),
        "its outputs have biases": any(getattr(m, "bias", None) is not None for m in outputs),
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


@torch.no_grad()
def logits(model, decode=None) -> torch.Tensor:
    """Logits [3, 4, V] after each of 3 tokens that follow random prompts of 3, 8, 8 and 8 tokens.

    They are computed by transformers, or by another decode(token, positions, step, cache, bias).
    """
    decode = decode or _transformers(model)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(model.config.vocab_size, (4, LENGTH), generator=generator)
    prompts = [row[:width].tolist() for row, width in zip(ids, (3, 8, 8, 8), strict=True)]
    after = []
    with prefill.decoding(model):
        _, _, positions, bias, cache = prefill.prefill(model, prompts, 3)
        for step, token in enumerate(ids[:, 8:].to(model.device).split(1, dim=1)):
            after.append(decode(token, positions, step + 1, cache, bias[..., : 9 + step]))
    return torch.stack(after).float()


def _transformers(model):
    """decode(token, positions, step, cache, bias) by transformers, for any model."""

    def decode(token, positions, step, cache, bias=None):
        inputs = {
            "position_ids": positions + step,
            rollout.cache_name(model): cache,
            "attention_mask": bias,
        }
        return model(token, **inputs).logits[:, -1]

    return decode
