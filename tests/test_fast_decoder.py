"""The fast decoder: transformers' logits, from its weights, for the models that it supports."""

import copy

import pytest
import torch
import transformers

import packing
import rollout
from engines import check_decoder, compact, fast_decoder

SMALL = {
    "vocab_size": 258, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.2,
    "sliding_window": None, "tie_word_embeddings": False,
}  # fmt: skip
ROPE = {"rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = ROPE | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def make(family, dtype=torch.float32, **changes):
    """An untrained model. Its norms and biases are random: as 1 and 0 they would hide errors."""
    torch.manual_seed(0)
    options = getattr(transformers, f"{family}Config")(**SMALL | changes)
    model_class = getattr(transformers, f"{family}ForCausalLM")
    model = model_class._from_config(options, attn_implementation=packing.ATTENTION)
    for name, parameter in model.named_parameters():
        if name.endswith("bias") or "norm" in name:
            parameter.data += 0.3 * torch.randn_like(parameter)
    model.vocab_size = options.vocab_size
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def gap(model):
    """The largest difference between the two decoders' logits."""
    decoder = fast_decoder.Decoder(model, check_decoder.LENGTH)
    return (check_decoder.logits(model) - check_decoder.logits(model, decoder)).abs().max().item()


# ------------------------------------------------------------------------- the same logits


SHAPES = [
    *({"num_key_value_heads": heads, "tie_word_embeddings": heads == 2} for heads in (4, 2, 1)),
    *(
        {"rope_parameters": ROPE | rope, "max_position_embeddings": 256}
        for rope in ({"rope_type": "linear"}, LLAMA3, {"rope_type": "yarn"})
    ),
]


@pytest.mark.parametrize("family", check_decoder.FAMILIES)
@pytest.mark.parametrize("changes", SHAPES, ids=str)
def test_logits_are_those_of_transformers(family, changes):
    """Catches a weight, a bias (Qwen2), a norm (Qwen3), a group of heads, a scaled rotation, or the
    mask of a padded prompt that is not transformers'; and a comparison that draws random numbers,
    which would change a run."""
    family = family.removesuffix("ForCausalLM")
    if family in ("Qwen3", "Mistral"):
        changes = changes | {"head_dim": 16}  # not hidden_size / heads
    model = make(family, **changes)
    random_state = torch.get_rng_state()
    check_decoder.compare(model)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert model.why_not_fast == ""
    assert gap(model) < 1e-5


# ------------------------------------------------------------------------- the comparison

REFUSED = [
    ("Llama", {"rope_parameters": ROPE | {"rope_type": "dynamic"}}, "dynamic"),
    ("Llama", {"mlp_bias": True}, "biases"),
    ("Mistral", {"sliding_window": 4}, "window"),
    ("Gemma", {"head_dim": 8}, "GemmaForCausalLM"),
]


@pytest.mark.parametrize(("family", "changes", "reason"), REFUSED)
def test_other_models_keep_transformers(family, changes, reason):
    """Catches an unsupported model that gets the fast decoder, or cannot be sampled any more."""
    model = make(family, **changes)
    check_decoder.compare(model)
    assert reason in model.why_not_fast
    assert not isinstance(check_decoder.decoder(model, 9), fast_decoder.Decoder)
    sampling = rollout.Sampling(4, [-1], 0, engine=compact)
    found = rollout.sample(model, [[65], [66, 67]], sampling, group_size=3, seed=0)
    assert found.lengths.tolist() == [[4] * 3] * 2


def test_a_model_that_differs_keeps_transformers():
    """Catches a supported family that is not compared, a NaN that passes as close, and a fast
    decoder that is the default where no comparison was made."""
    assert not isinstance(check_decoder.decoder(make("Llama"), 9), fast_decoder.Decoder)
    for scale in (1.01, torch.nan):
        model = make("Llama")
        change = lambda _module, _args, output, scale=scale: output * scale
        model.model.layers[1].mlp.register_forward_hook(change)
        check_decoder.compare(model)
        assert "differ" in model.why_not_fast


class Adapted(torch.nn.Linear):
    """An adapter that adds nothing yet."""


def test_an_adapted_model_keeps_transformers():
    """Catches an adapter that passes the comparison, and is lost once it is trained: the fast
    decoder reads the layer's weight alone."""
    model = make("Llama")
    model.model.layers[1].mlp.up_proj.__class__ = Adapted
    check_decoder.compare(model)
    assert "not plain linear layers" in model.why_not_fast


def test_bfloat16_is_as_close_as_transformers(monkeypatch):
    """Catches a bfloat16 model that is held to float32's bound, and one whose decoder is further
    from float32 than transformers is."""
    call = fast_decoder.Decoder.__call__
    noise = 0.05 * torch.randn(258, generator=torch.Generator().manual_seed(0))
    for family in ("Qwen2", "Qwen3"):
        exact = check_decoder.logits(make(family))
        model = make(family, torch.bfloat16)
        check_decoder.compare(model, exact)
        assert model.why_not_fast == ""
        assert gap(model) > check_decoder.CLOSE
        with monkeypatch.context() as patch:
            patch.setattr(fast_decoder.Decoder, "__call__", lambda *args: call(*args) + noise)
            check_decoder.compare(model, exact)
        assert "differ" in model.why_not_fast


# ------------------------------------------------------------------------- joined weights


def test_weights_are_stored_once():
    """Catches a decoder that holds copies of weights, or joins them again for each batch."""
    model = make("Qwen2")
    decoder = fast_decoder.Decoder(model, 4)
    attention, mlp = model.model.layers[0].self_attn, model.model.layers[0].mlp
    for whole, modules in (
        (decoder.layers[0].qkv, (attention.q_proj, attention.k_proj, attention.v_proj)),
        (decoder.layers[0].gate_up, (mlp.gate_proj, mlp.up_proj)),
    ):
        parts = [module.weight for module in modules]
        storages = {part.untyped_storage().data_ptr() for part in parts}
        assert storages == {whole.untyped_storage().data_ptr()}
        assert parts[0].untyped_storage().nbytes() == sum(part.nbytes for part in parts)
        assert torch.equal(whole, torch.cat(parts))
    again = fast_decoder.Decoder(model, 4).layers[0]
    assert again.qkv.data_ptr() == decoder.layers[0].qkv.data_ptr()


@pytest.mark.parametrize("change", ["copy", "replace"])
def test_the_decoder_sees_new_weights(change):
    """Catches samples from old weights after an update of a deep copy, or of a parameter that is
    given other memory, as by a cast."""
    model = make("Qwen3")
    check_decoder.compare(model)
    before = check_decoder.logits(model)
    if change == "copy":
        model = copy.deepcopy(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        pack = packing.build_pack([[65, 66]], [[67, 68, 69]])
        (-packing.packed_logprobs(model, pack)[0].sum()).backward()
        optimizer.step()
    else:
        weight = model.model.layers[1].self_attn.v_proj.weight
        weight.data = weight.data * 2
    assert gap(model) < 1e-5
    assert (check_decoder.logits(model) - before).abs().max() > 0.01
