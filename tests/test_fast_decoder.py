"""The lean decoder: transformers' logits, from its weights, for the models that it is made for."""

import copy

import pytest
import torch
import toy
import transformers

import config
import models
import packing
import rollout
import train
from engines import check_decoder, compact, fast_decoder
from run import Run
from runtime import checkpoint, ranks

SMALL = {
    "vocab_size": 258, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.2,
    "sliding_window": None, "tie_word_embeddings": False,
}  # fmt: skip
ROPE = {"rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = ROPE | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
GROUPS = pytest.mark.parametrize("kv_heads", [4, 2, 1])
FAMILIES = pytest.mark.parametrize("family", ["Llama", "Mistral", "Qwen2", "Qwen3"])


def make(family, dtype=torch.float32, **changes):
    """An untrained model whose norms and biases are random, too."""
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
    """How far the two decoders' logits are apart."""
    decoder = fast_decoder.Decoder(model, check_decoder.LENGTH)
    return (check_decoder.logits(model) - check_decoder.logits(model, decoder)).abs().max().item()


@FAMILIES
@GROUPS
@pytest.mark.parametrize("tied", [True, False])
def test_logits_are_transformers(family, kv_heads, tied):
    """Fails if a weight, a bias (Qwen2), a norm (Qwen3), a group of heads, a rotation, or the mask
    of a padded prompt is not transformers'."""
    changes = {"num_key_value_heads": kv_heads, "tie_word_embeddings": tied}
    if family in ("Qwen3", "Mistral"):
        changes["head_dim"] = 16  # not hidden / heads
    model = make(family, **changes)
    check_decoder.compare(model)
    assert model.why_not_fast == ""
    assert gap(model) < 1e-5


@pytest.mark.parametrize("kind", [{"rope_type": "linear"}, LLAMA3, {"rope_type": "yarn"}])
def test_rotations_are_transformers(kind):
    """Fails if a scaling of positions, or yarn's factor of the attention, is left out."""
    model = make("Llama", rope_parameters=ROPE | kind, max_position_embeddings=256)
    check_decoder.compare(model)
    assert model.why_not_fast == ""
    assert gap(model) < 1e-5
    assert model.model.rotary_emb.rope_type == kind["rope_type"]


REFUSED = [
    ("Llama", {"rope_parameters": ROPE | {"rope_type": "dynamic"}}, "dynamic"),
    ("Llama", {"attention_bias": True}, "biases"),
    ("Llama", {"mlp_bias": True}, "biases"),
    ("Llama", {"hidden_act": "gelu"}, "gelu"),
    ("Mistral", {"sliding_window": 4}, "window"),
    ("Gemma", {"head_dim": 8}, "GemmaForCausalLM"),
    ("GPT2", {"n_embd": 32, "n_layer": 2, "n_head": 4}, "GPT2LMHeadModel"),
]


@pytest.mark.parametrize(("family", "changes", "reason"), REFUSED)
def test_other_models_keep_transformers(family, changes, reason):
    """Fails if a model that the decoder is not made for gets it, or cannot be sampled any more."""
    if family == "GPT2":
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=258, **changes))
        model.vocab_size = 258
    else:
        model = make(family, **changes)
    check_decoder.compare(model)
    assert reason in model.why_not_fast
    assert not isinstance(check_decoder.decoder(model, 9), fast_decoder.Decoder)
    sampling = rollout.Sampling(4, [-1], 0)
    found = rollout.sample(model, [[65], [66, 67]], sampling, group_size=3, seed=0)
    assert found.lengths.tolist() == [[4] * 3] * 2


def test_a_model_that_differs_keeps_transformers(monkeypatch):
    """Fails if the logits of a fitting family are not compared, or a NaN passes."""
    for scale in (1.01, torch.nan):
        model = make("Llama")
        norm = model.model.layers[1].mlp.register_forward_hook
        norm(lambda _module, _args, output, scale=scale: output * scale)
        check_decoder.compare(model)
        assert "differ" in model.why_not_fast


def test_a_model_that_was_not_compared_keeps_transformers():
    """Fails if the decoder is the default."""
    assert not isinstance(check_decoder.decoder(make("Llama"), 9), fast_decoder.Decoder)


def test_bfloat16_is_as_close_as_transformers(monkeypatch):
    """Fails if a copy of 16 bits is held to float32's bound, or may be further from float32 than
    transformers is."""
    call = fast_decoder.Decoder.__call__
    noise = 0.05 * torch.randn(258, generator=torch.Generator().manual_seed(0))
    for family in ("Llama", "Qwen2", "Qwen3"):
        exact = check_decoder.logits(make(family))
        model = make(family, torch.bfloat16)
        check_decoder.compare(model, exact)
        assert model.why_not_fast == ""
        assert gap(model) > check_decoder.CLOSE
        with monkeypatch.context() as patch:
            patch.setattr(fast_decoder.Decoder, "__call__", lambda *args: call(*args) + noise)
            check_decoder.compare(model, exact)
        assert "differ" in model.why_not_fast


def test_the_comparison_leaves_the_random_state():
    """Fails if loading a model changes what a run draws."""
    before = torch.get_rng_state()
    model = make("Qwen3")
    state = torch.get_rng_state()
    check_decoder.compare(model)
    assert torch.equal(torch.get_rng_state(), state)
    torch.set_rng_state(before)


# ------------------------------------------------------------------------- joined weights


def joined_parts(model):
    attention, mlp = model.model.layers[0].self_attn, model.model.layers[0].mlp
    qkv = [attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]
    return qkv, [mlp.gate_proj.weight, mlp.up_proj.weight]


def test_weights_are_stored_once():
    """Fails if the decoder holds copies of products' weights, or joins them again each time."""
    model = make("Qwen2")
    decoder = fast_decoder.Decoder(model, 4)
    wholes = decoder.layers[0].qkv, decoder.layers[0].gate_up
    for parts, whole in zip(joined_parts(model), wholes, strict=True):
        storages = {part.untyped_storage().data_ptr() for part in parts}
        assert storages == {whole.untyped_storage().data_ptr()}
        assert parts[0].untyped_storage().nbytes() == sum(part.nbytes for part in parts)
        assert torch.equal(whole, torch.cat(parts))
    again = fast_decoder.Decoder(model, 4)
    for one, other in zip(decoder.layers, again.layers, strict=True):
        for name in ("norm", "qkv", "qkv_bias", "out", "mlp_norm", "gate_up", "down"):
            assert getattr(one, name).data_ptr() == getattr(other, name).data_ptr(), name


@pytest.mark.parametrize("change", ["train", "copy", "load", "cast", "replace"])
def test_the_decoder_sees_new_weights(change):
    """Fails if it samples from weights of before an update, a deep copy, load_state_dict, a cast or
    an exchange of one parameter's memory."""
    model = make("Qwen3")
    check_decoder.compare(model)
    before = check_decoder.logits(model)
    if change == "copy":
        model = copy.deepcopy(model)
    if change in ("train", "copy"):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        pack = packing.build_pack([[65, 66]], [[67, 68, 69]])
        (-packing.packed_logprobs(model, pack)[0].sum()).backward()
        optimizer.step()
    if change == "load":
        model.load_state_dict({k: 1.1 * v for k, v in model.state_dict().items()})
    if change == "cast":
        model.double()
    if change == "replace":
        weight = model.model.layers[1].self_attn.v_proj.weight
        weight.data = weight.data * 2
    assert gap(model) < 1e-5
    assert change == "cast" or (check_decoder.logits(model) - before).abs().max() > 0.01


def test_neighbours_in_memory_are_not_joined():
    """Fails if parameters that follow each other, but in another order or storage, are taken for
    joined ones."""
    memory = torch.randn(6, 3)
    for rows in ([0, 4, 2], [2, 0, 4], [0, 2, 4]):
        parts = [torch.nn.Parameter(memory[row : row + 2]) for row in rows]
        wanted = torch.cat([part.detach().clone() for part in parts])
        assert torch.equal(fast_decoder.joined(*parts), wanted)
        assert torch.equal(torch.cat(parts), wanted)


def test_a_model_trains_after_inference_mode():
    """Fails if a model that a rollout joins gets weights or samples that autograd refuses."""
    model = make("Qwen3")
    model.why_not_fast = ""
    sampling = rollout.Sampling(3, [-1], 0)
    found = rollout.sample(model, [[65, 66]], sampling, group_size=2, seed=0)
    pack = packing.build_pack([[65, 66]], [found.completion_ids[0, 0].tolist()])
    logprobs = packing.packed_logprobs(model, pack)[0]
    (logprobs * found.logprobs[0, 0]).sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
    assert not found.completion_ids.is_inference()


@pytest.mark.parametrize("tied", [True, False])
def test_checkpoints_of_joined_weights(tmp_path, make_policy, tied):
    """Fails if safetensors refuses what shares memory, a file holds a weight twice or the whole of
    a joined tensor, or a name is lost."""
    model, tokenizer = make("Qwen2", tie_word_embeddings=tied), make_policy()[1]
    apart = tmp_path / "apart"
    model.save_pretrained(apart)
    fast_decoder.Decoder(model, 4)
    checkpoint.save(tmp_path, model, ranks.weights(model), tokenizer, {"step": 1}, keep=1)
    saved = tmp_path / "checkpoint-000001"
    one, other = ((folder / "model.safetensors").stat().st_size for folder in (apart, saved))
    assert one == other
    loaded = transformers.AutoModelForCausalLM.from_pretrained(saved).state_dict()
    for name, weight in model.state_dict().items():
        assert torch.equal(loaded[name], weight), name


def test_a_run_says_what_decodes(policy_folder, tmp_path, capsys, monkeypatch):
    """Fails if the first lines do not name the decoder, or hide why it is not used."""
    for reason in ("", "it is odd"):
        if reason:
            monkeypatch.setattr(check_decoder, "_unfit", lambda _model: "it is odd")
        args = toy.flags(policy_folder, str(tmp_path / f"run{reason}"), steps=1)
        Run(train.Trainer(config.parse_config(args), toy.toy_reward)).go()
        printed = capsys.readouterr().out
        assert ("the lean decoder decodes tokens" in printed) == (not reason)
        assert ("the lean decoder is not used, because it is odd" in printed) == bool(reason)


def test_what_only_trains_is_not_compared(policy_folder, tmp_path, monkeypatch):
    """Fails if the trained model of a bfloat16 run is joined, or its copy is not compared with
    float32."""
    seen, compare = [], check_decoder.compare
    spy = lambda model, exact=None: (seen.append((model.dtype, exact)), compare(model, exact))
    monkeypatch.setattr(check_decoder, "compare", spy)
    args = [*toy.flags(policy_folder, str(tmp_path)), "--dtype", "bfloat16"]
    loaded = models.load_models(config.resolve(config.parse_config(args)), None)
    ((dtype, exact),) = seen
    assert dtype == torch.bfloat16
    assert torch.allclose(exact, check_decoder.logits(loaded.model), atol=1e-5)
    qkv, _ = joined_parts(loaded.model)
    assert len({part.untyped_storage().data_ptr() for part in qkv}) == 3
    qkv, _ = joined_parts(loaded.policy)
    assert len({part.untyped_storage().data_ptr() for part in qkv}) == 1


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_ids_are_transformers_in_float64(make_policy, temperature):
    """Fails if the lean decoder, its cache or its statistics change a sample: ragged prompts, rows
    that part and leave, both decoders, the same random numbers."""
    model, _ = make_policy(dtype=torch.float64)
    with torch.no_grad():
        model.model.norm.weight *= 2
    sampling = rollout.Sampling(24, [256, *range(0, 256, 16)], 257, temperature=temperature)
    found = []
    for reason in ("", "for comparison"):
        model.why_not_fast = reason
        prompts = [[65, 66, 67], [68], [71] * 5]
        found.append(rollout.sample(model, prompts, sampling, group_size=16, seed=1))
    one, other = found
    inside = torch.arange(24) < one.lengths[..., None]
    assert torch.equal(one.lengths, other.lengths)
    assert torch.equal(one.completion_ids[inside], other.completion_ids[inside])
    for name in ("logprobs", "entropy", "energy"):
        assert torch.allclose(getattr(one, name), getattr(other, name), atol=1e-6), name


def test_one_copy_a_token():
    """Fails if `append` writes other keys and values than `update`."""
    states = torch.randn(3, 2, 4, 8)  # [R, keys and values, H, D]
    layers = [compact.GrowingLayer(), compact.GrowingLayer()]
    for layer in layers:
        layer.update(torch.ones(3, 4, 5, 8), torch.zeros(3, 4, 5, 8))
    got = layers[0].append(states)
    wanted = layers[1].update(states[:, 0, :, None], states[:, 1, :, None])
    assert all(torch.equal(one, other) for one, other in zip(got, wanted, strict=True))
    assert got[0].shape == (3, 4, 6, 8)
