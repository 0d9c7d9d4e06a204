"""
The next token's logits while rollout.py samples: a cache that grows, and a short forward.

transformers' forward of one token does much beside the model's arithmetic: it makes masks and
rotations anew, copies the cache, and passes arguments through many layers of calls. For a small
model that takes longer than the arithmetic. `Decoder` calls the model's own modules in the model's
own order, and nothing else: the embedded model samples 1.5 to 1.9 times as fast.

Letters: R rows, d hidden width, H query heads, H_kv key heads, D width of a head, n tokens in the
cache, V vocabulary.
"""

import contextlib
import inspect

import torch
import torch.nn.functional as F
from transformers.cache_utils import Cache, DynamicLayer

FAMILIES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
ROOM = 16  # tokens by which the cache is enlarged, at least


def forward_of(model, length: int):
    """forward(token, positions, cache, bias): the logits [R, V] after token [R, 1] at positions
    [R, 1], which are below `length`. bias [R, 1, 1, n] is added to attention's scores. The token's
    keys and values are added to the cache. Models of other families use transformers' forward."""
    if is_known(model):
        return Decoder(model, length)
    name = cache_name(model)

    def transformers_forward(token, positions, cache, bias=None):
        # transformers uses a mask of four dimensions unchanged.
        inputs = {"attention_mask": bias, "position_ids": positions, name: cache}
        return model(token, **inputs).logits[:, -1]

    return transformers_forward


def is_known(model) -> bool:
    """Whether `Decoder` computes this model."""
    has_window = getattr(model.config, "sliding_window", None) is not None
    is_exact = getattr(model, "has_exact_decoder", True)  # see `check`
    return type(model).__name__ in FAMILIES and not has_window and is_exact


class Decoder:
    """The forward of one token, for models of Llama's form; see `forward_of`."""

    def __init__(self, model, length: int):
        self.base, self.head = model.base_model, model.get_output_embeddings()
        # A rotated x is x * cos + (x with its halves exchanged) * sin, if the first half of sin is
        # negated.
        places = torch.arange(length, device=model.device)[None]
        (cos,), (sin,) = self.base.rotary_emb(self.head.weight, places)  # [length, D] each
        first, second = sin.chunk(2, dim=1)
        self.cos, self.sin = cos, torch.cat([-first, second], dim=1)

    def __call__(self, token, positions, cache, bias=None):
        R, D = len(token), self.cos.shape[1]
        cos, sin = self.cos[positions], self.sin[positions]  # [R, 1, D]
        x = self.base.embed_tokens(token[:, 0])  # [R, d]
        for layer, cached in zip(self.base.layers, cache.layers, strict=True):
            attention, normed = layer.self_attn, layer.input_layernorm(x)
            q = attention.q_proj(normed).view(R, -1, D)  # [R, H, D]
            k = attention.k_proj(normed).view(R, -1, D)  # [R, H_kv, D]
            v = attention.v_proj(normed).view(R, -1, D)
            if hasattr(attention, "q_norm"):
                q, k = attention.q_norm(q), attention.k_norm(k)
            q = q * cos + q.roll(D // 2, dims=2) * sin
            k = k * cos + k.roll(D // 2, dims=2) * sin
            keys, values = cached.update(k[:, :, None], v[:, :, None])  # [R, H_kv, n, D]
            q = q.view(R, keys.shape[1], -1, D)  # query heads that share keys are rows of a product
            attended = F.scaled_dot_product_attention(q, keys, values, bias)
            x = x + attention.o_proj(attended.reshape(R, -1))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return self.head(self.base.norm(x))


@torch.no_grad()
def check(model) -> None:
    """Set model.has_exact_decoder: whether `Decoder` has transformers' logits. In float32."""
    model.has_exact_decoder = is_known(model)
    if not model.has_exact_decoder:
        return
    ids = torch.arange(12, device=model.device).view(2, 6) % model.config.vocab_size
    with evaluation_mode(model):
        whole, cache = model(ids).logits[:, -1], new_cache()
        model(ids[:, :5], **{cache_name(model): cache})
        last = torch.full((2, 1), 5, device=model.device)
        try:
            ours = Decoder(model, 6)(ids[:, 5:], last, cache)
        except RuntimeError:  # such as rotations of a part of each head
            ours = torch.full_like(whole, torch.nan)
    model.has_exact_decoder = torch.allclose(ours, whole, rtol=1e-4, atol=1e-4)


class GrowingLayer(DynamicLayer):
    """Keys and values [R, H_kv, n, D] of one layer: views of a buffer [2, R, H_kv, columns, D] with
    room for more tokens. transformers' own layer copies all of them for every token."""

    buffer, length = None, 0

    def update(self, key_states, value_states, *args, **kwargs):
        """Add the keys and values [R, H_kv, new, D] of new tokens; returns those of all tokens."""
        if self.buffer is None:
            self.lazy_initialization(key_states, value_states)
            self.buffer = torch.stack([key_states, value_states])[:, :, :, :0]
        start, self.length = self.length, self.length + key_states.shape[2]
        missing = self.length - self.buffer.shape[3]
        if missing > 0:
            room = max(ROOM, self.length // 8)
            self.buffer = F.pad(self.buffer, (0, 0, 0, missing + room))
        self.buffer[0, :, :, start : self.length] = key_states
        self.buffer[1, :, :, start : self.length] = value_states
        return self._show()

    def select(self, rows) -> None:
        """Go on with these rows [R], in this order; one may be there several times."""
        self.buffer = self.buffer[:, rows]
        self._show()

    def _show(self):
        self.keys, self.values = self.buffer[:, :, :, : self.length]
        return self.keys, self.values


def new_cache() -> Cache:
    return Cache(layer_class_to_replicate=GrowingLayer)


def cache_name(model) -> str:
    """What a model calls its key-value cache: `cache` since transformers 5.24, `past_key_values`
    before. Older models silently ignore an argument that is called `cache`."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


@contextlib.contextmanager
def evaluation_mode(model):
    """No dropout, and transformers' attention, since packing's has no cache; restored on exit. And
    not cuDNN's attention, which makes a plan for each shape: every token brings a new one."""
    was_training, attention = model.training, model.config._attn_implementation
    cudnn = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    model.eval().set_attn_implementation("sdpa")
    try:
        yield
    finally:
        model.train(was_training).set_attn_implementation(attention)
        torch.backends.cuda.enable_cudnn_sdp(cudnn)
