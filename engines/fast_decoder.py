"""
A fast decoder: the forward of one token per row, with half of transformers' operations.

When one token is decoded, starting an operation costs more than its arithmetic: microseconds each,
on a CPU and on a GPU. On a GPU, transformers starts 29 operations per layer, this decoder half:
    - queries, keys and values are one matrix product; so are the two halves of the MLP
    - queries and keys share one norm and one rotation
    - a residual sum is part of the product before it
    - query heads that share keys are rows of one product, where transformers copies the keys

It uses the weights of transformers' model. The weights of one product are joined in memory, and
the model's parameters become views of the joined tensor. So nothing is stored twice, and an update
needs no copy. transformers still reads the prompts; it fills the same cache.
engines/check_decoder.py decides which models are decoded here.

Letters: R rows, d hidden width, H query heads, H_kv key heads, D width of a head, n tokens in the
cache, P positions, V vocabulary.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F


class Layer(NamedTuple):
    """The weights of one layer. Matrices are [outputs, inputs], as F.linear takes them."""

    norm: torch.Tensor  # [d]
    qkv: torch.Tensor  # [(H + 2 H_kv) D, d]
    qkv_bias: torch.Tensor | None  # [(H + 2 H_kv) D]
    qk_norm: torch.Tensor | None  # [H + H_kv, D]
    out: torch.Tensor  # [d, H D]
    mlp_norm: torch.Tensor  # [d]
    gate_up: torch.Tensor  # [2 x inner width, d]
    down: torch.Tensor  # [d, inner width]


class Decoder:
    """decoder(token, positions, step, cache, bias) is the logits after one more token of each row.

    It is made again for each batch of a rollout, because the weights may have moved in memory
    since. It knows the rotations of the first `length` positions.
    """

    def __init__(self, model, length: int):
        base, config = model.base_model, model.config
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.width, self.eps = base.layers[0].self_attn.head_dim, config.rms_norm_eps
        self.layers = [self._layer(block, block.self_attn, block.mlp) for block in base.layers]
        self.embedding, self.norm = model.get_input_embeddings().weight, base.norm.weight
        self.head = model.get_output_embeddings().weight
        # A rotated x is x * cos + (x with its halves exchanged) * sin, if the first half of sin is
        # negated.
        places = torch.arange(length, device=self.head.device)[None]
        cos, sin = (table[0, :, None] for table in base.rotary_emb(self.head, places))  # [P, 1, D]
        sin = torch.cat([-sin[..., : self.width // 2], sin[..., self.width // 2 :]], dim=2)
        self.rotations = torch.cat([cos, sin], dim=1)  # [P, 2, D]

    def _layer(self, block, attention, mlp) -> Layer:
        q, k, v = attention.q_proj, attention.k_proj, attention.v_proj
        norms = None
        if hasattr(attention, "q_norm"):
            of_queries = attention.q_norm.weight.expand(self.heads, -1)
            norms = torch.cat([of_queries, attention.k_norm.weight.expand(self.kv_heads, -1)])
        return Layer(
            norm=block.input_layernorm.weight,
            qkv=joined(q.weight, k.weight, v.weight),
            qkv_bias=None if q.bias is None else joined(q.bias, k.bias, v.bias),
            qk_norm=norms,
            out=attention.o_proj.weight,
            mlp_norm=block.post_attention_layernorm.weight,
            gate_up=joined(mlp.gate_proj.weight, mlp.up_proj.weight),
            down=mlp.down_proj.weight,
        )

    def __call__(self, token, positions, step, cache, bias=None):
        """Logits [R, V] after token [R, 1], whose position is positions [R, 1] + step.

        The token's keys and values are added to the cache, whose layers, prefill.GrowingLayer,
        attend. bias [R, 1, 1, n] is 0, and -inf at padding.
        """
        R, H, H_kv, D = len(token), self.heads, self.kv_heads, self.width
        rotation = self.rotations[step:].index_select(0, positions[:, 0])  # [R, 2, D]
        cos, sin = rotation[:, :, None].unbind(dim=1)  # [R, 1, D] each
        x = F.embedding(token[:, 0], self.embedding)  # [R, d]
        for layer, cached in zip(self.layers, cache.layers, strict=True):
            states = F.linear(self._normed(x, layer.norm), layer.qkv, layer.qkv_bias)
            states = states.view(R, -1, D)
            qk = states[:, : H + H_kv]
            if layer.qk_norm is not None:
                qk = F.rms_norm(qk, (D,), eps=self.eps) * layer.qk_norm
            torch.addcmul(qk * cos, qk.roll(D // 2, 2), sin, out=states[:, : H + H_kv])
            queries = states[:, :H].view(R, H_kv, -1, D)  # heads that share keys become rows
            attended = cached.attend(queries, states[:, H:].view(R, 2, H_kv, D), bias)
            x = torch.addmm(x, attended.reshape(R, -1), layer.out.T)
            gate, up = F.linear(self._normed(x, layer.mlp_norm), layer.gate_up).chunk(2, dim=1)
            x = torch.addmm(x, F.silu(gate) * up, layer.down.T)
        return F.linear(self._normed(x, self.norm), self.head)

    def _normed(self, x, weight):
        return F.rms_norm(x, weight.shape, weight, self.eps)


def joined(*parameters):
    """Parameters [n_i, ...] as one tensor [sum of n_i, ...], of which they become views.

    Code that trains, saves or copies the parameters sees no difference. If they already lie one
    after the other, nothing is done. A cast, a move to a device or a deep copy gives them other
    memory; then they are joined again.
    """
    places = [parameter.data_ptr() for parameter in parameters]
    ends = [parameter.data_ptr() + parameter.nbytes for parameter in parameters]
    storages = {parameter.untyped_storage().data_ptr() for parameter in parameters}
    rows = [len(parameter) for parameter in parameters]
    if len(storages) > 1 or places[1:] != ends[:-1]:
        with torch.inference_mode(False), torch.no_grad():
            whole = torch.cat(parameters)
        for parameter, part in zip(parameters, whole.split(rows), strict=True):
            parameter.data = part
    first = parameters[0].detach()
    return first.as_strided((sum(rows), *first.shape[1:]), first.stride())
