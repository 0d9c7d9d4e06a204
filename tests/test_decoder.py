"""The short forward of one token: transformers' logits, for the models that it knows."""

import pytest
import torch
import transformers

import decoder
import packing
import rollout

SMALL = {
    "vocab_size": 258, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.2,
    "sliding_window": None, "tie_word_embeddings": False,
}  # fmt: skip
ROPE = {"rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = ROPE | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SHAPES = [
    *({"num_key_value_heads": heads, "tie_word_embeddings": heads == 2} for heads in (4, 2, 1)),
    *(
        {"rope_parameters": ROPE | rope, "max_position_embeddings": 256}
        for rope in ({"rope_type": "linear"}, LLAMA3, {"rope_type": "yarn"})
    ),
]


def make(family, **changes):
    """An untrained model. Its norms and biases are random: as 1 and 0 they would hide errors."""
    torch.manual_seed(0)
    options = getattr(transformers, f"{family}Config")(**SMALL | changes)
    model_class = getattr(transformers, f"{family}ForCausalLM")
    model = model_class._from_config(options, attn_implementation=packing.ATTENTION)
    for name, parameter in model.named_parameters():
        if name.endswith("bias") or "norm" in name:
            parameter.data += 0.3 * torch.randn_like(parameter)
    model.vocab_size = options.vocab_size
    return model


@pytest.mark.parametrize("family", decoder.FAMILIES)
@pytest.mark.parametrize("changes", SHAPES, ids=str)
def test_logits_are_those_of_transformers(monkeypatch, family, changes):
    """Of prompts of unequal lengths. Catches a bias (Qwen2), a norm (Qwen3), a group of heads or a
    scaled rotation that is left out, and the mask of a padded prompt."""
    family = family.removesuffix("ForCausalLM")
    if family in ("Qwen3", "Mistral"):
        changes = changes | {"head_dim": 16}  # not hidden_size / heads
    model = make(family, **changes)
    decoder.check(model)
    assert decoder.is_known(model)

    def sampled():
        how = rollout.Sampling(4, [-1], 0)
        return rollout.sample(model, [[65, 66, 67], [68]], how, group_size=2, seed=0).logprobs

    ours = sampled()
    monkeypatch.setattr(decoder, "is_known", lambda model: False)
    assert torch.allclose(ours, sampled(), atol=1e-5)


@pytest.mark.parametrize("scale", [1.01, torch.nan])
def test_a_model_that_differs_is_found(scale):
    """Catches a check that passes what transformers does not compute, or NaN, and one whose result
    is not used."""
    model = make("Llama")
    layer = model.model.layers[0]
    forward = layer.forward
    layer.forward = lambda *args, **options: forward(*args, **options) * scale
    assert isinstance(decoder.forward_of(model, 9), decoder.Decoder)
    decoder.check(model)
    assert not isinstance(decoder.forward_of(model, 9), decoder.Decoder)


@pytest.mark.parametrize("family", ["Mistral", "Gemma"])
def test_other_models_use_transformers_forward(family):
    """Catches a model with a window, or of another family, that is decoded as Llama is, or cannot
    be sampled."""
    model = make(family, sliding_window=4, head_dim=8)
    decoder.check(model)
    assert not isinstance(decoder.forward_of(model, 9), decoder.Decoder)
    sampling = rollout.Sampling(4, [-1], 0)
    found = rollout.sample(model, [[65], [66, 67]], sampling, group_size=3, seed=0)
    assert found.lengths.tolist() == [[4] * 3] * 2
