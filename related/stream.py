"""
A language model as a residual stream to which sub-layers add, one after another: h + f(h).

So that any of them can be left out of a forward, or looked at. For Llama, Qwen2 and Qwen3, with
attn_implementation "sdpa". A sub-layer is named by its block and its kind: "3.self_attn", "3.mlp".

Letters: N sequences of T tokens, d hidden size, V vocabulary, L blocks.
"""

import torch
import torch.nn.functional as F

from related.pruned import NORMS


def all_names(model) -> list[str]:
    """The 2 L sub-layers in their order: "0.self_attn", "0.mlp", "1.self_attn" and so on."""
    return [f"{block}.{kind}" for block in range(len(model.base_model.layers)) for kind in NORMS]


def parts(model, name: str):
    """A sub-layer, and the norm of its input."""
    number, kind = name.split(".")
    block = model.base_model.layers[int(number)]
    return getattr(block, kind), getattr(block, NORMS[kind])


def size(module) -> int:
    return sum(weight.numel() for weight in module.parameters())


def update(model, name: str, h):
    """(x, f(x)) [N, T, d]: the normed input of a sub-layer, and what it adds to the stream h."""
    sublayer, norm = parts(model, name)
    x = norm(h)
    if name.endswith("mlp"):
        return x, sublayer(x)
    rope = model.base_model.rotary_emb(h, torch.arange(h.shape[1], device=h.device)[None])
    return x, sublayer(hidden_states=x, position_embeddings=rope, attention_mask=None)[0]


def states(model, h, names: list[str]) -> list[torch.Tensor]:
    """The hidden states [N, T, d] before each of these sub-layers, and after the last one."""
    hidden = [h]
    for name in names:
        hidden.append(hidden[-1] + update(model, name, hidden[-1])[1])
    return hidden


def embed(model, ids):
    return model.get_input_embeddings()(ids)  # [N, T, d]


def logits(model, h):
    return model.get_output_embeddings()(model.base_model.norm(h))  # [N, T, V]


def loss(logits, ids) -> float:
    """Mean -log p of the tokens after the first, in nats; exp of it is the perplexity."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).item()
