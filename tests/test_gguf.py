"""GGUF files: the converted folder is the same model, and what would become another is refused."""

from unittest import mock

import pytest
import torch
import toy
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.integrations import GGUF_CONFIG_MAPPING

import models
from tasks import gguf as ours

gguf = pytest.importorskip("gguf")
pytest.importorskip("accelerate")

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["Ċ Ċ", "Ġ Ġ", "h e", "Ġ t", "Ġt he"]
TOKENS = [*CONTROL, *bytes_to_unicode().values(), *(merge.replace(" ", "") for merge in MERGES)]
HEADS, KEY_HEADS = 4, 2


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    """A cache of the test's own."""
    monkeypatch.setattr(ours, "CACHE", tmp_path / "new" / "cache")
    return ours.CACHE


def write(path, changes=(), other_weights=(), quantized=False):
    """Write an untrained Llama as llama.cpp's converter does, and return it.

    Its settings are nobody's defaults. `changes` of the metadata are {method of gguf's writer:
    value, or None to leave it out}, other weights {GGUF name: tensor}.
    """
    torch.manual_seed(0)
    settings = {
        "vocab_size": len(TOKENS), "hidden_size": 64, "intermediate_size": 96,
        "num_hidden_layers": 2, "num_attention_heads": HEADS, "num_key_value_heads": KEY_HEADS,
        "max_position_embeddings": 768, "rms_norm_eps": 3e-4, "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 54321.0},
    }  # fmt: skip
    model = AutoModelForCausalLM.from_config(LlamaConfig(**settings))
    for parameter in model.parameters():  # a norm of 1 would hide that it is lost
        torch.nn.init.normal_(parameter, mean=0.1, std=0.2)

    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2)
    weights = {}
    for name, weight in model.named_parameters():
        stored = weight.detach()
        heads = HEADS * ("q_proj" in name) + KEY_HEADS * ("k_proj" in name)
        if heads:  # llama.cpp's rotary embedding exchanges neighbours
            halves = stored.unflatten(0, (heads, 2, -1))
            stored = halves.transpose(1, 2).reshape(weight.shape)
        weights[names.get_name(name, try_suffixes=(".weight",))] = stored
    entries = {
        "context_length": 768, "embedding_length": 64, "block_count": 2, "feed_forward_length": 96,
        "head_count": HEADS, "head_count_kv": KEY_HEADS, "rope_freq_base": 54321.0,
        "layer_norm_rms_eps": 3e-4, "vocab_size": len(TOKENS), "rope_dimension_count": 16,
        "tokenizer_model": "gpt2", "tokenizer_pre": "smollm",
        "token_list": TOKENS, "token_merges": MERGES,
        "token_types": [3] * len(CONTROL) + [1] * (len(TOKENS) - len(CONTROL)),
        "eos_token_id": 0, "add_bos_token": False, "chat_template": TEMPLATE,
    }  # fmt: skip
    writer = gguf.GGUFWriter(path, "llama")
    for name, value in (entries | dict(changes)).items():
        if value is not None:
            getattr(writer, f"add_{name}")(value)
    for name, weight in (weights | dict(other_weights)).items():
        data, raw = weight.numpy(), None
        if quantized and data.ndim == 2:
            raw = gguf.GGMLQuantizationType.Q8_0
            data = gguf.quants.quantize(data, raw)
        writer.add_tensor(name, data, raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model.eval()


@pytest.fixture
def tiny(tmp_path):
    """The path of a GGUF file that can be converted."""
    write(tmp_path / "tiny.gguf")
    return str(tmp_path / "tiny.gguf")


@pytest.mark.parametrize("quantized", [False, True])
def test_the_folder_is_the_same_model(quantized, tmp_path):
    """Catches queries in llama.cpp's order, and weights that stay quantized."""
    model = write(tmp_path / "m.gguf", quantized=quantized)
    folder = ours.model_folder(str(tmp_path / "m.gguf"))
    found, tokenizer = models.load_policy(folder, "cpu")
    stored, expected = load_file(f"{folder}/model.safetensors"), dict(model.named_parameters())
    assert stored.keys() == expected.keys()
    for name, weight in expected.items():
        rounding = 0.6 / 127 if quantized and weight.dim() == 2 else 0.0  # half a step of 8 bits
        assert stored[name].dtype == torch.float32
        assert (stored[name] - weight).abs().max() <= rounding * weight.abs().max(), name
    if not quantized:
        ids = torch.tensor([tokenizer.encode("the 12 of them, 3\n\n4")])
        logits = [toy.plain_logits(one, ids).log_softmax(dim=-1) for one in (model, found)]
        torch.testing.assert_close(*logits, rtol=1e-5, atol=1e-5)


def test_tokens_and_ends(tiny):
    """Catches GPT-2's rule, and a chat model that never stops."""
    tokenizer = AutoTokenizer.from_pretrained(ours.model_folder(tiny))
    for text, tokens in {
        "12\n\n7  8": ["1", "2", "ĊĊ", "7", "ĠĠ", "8"],
        "a  the": ["a", "Ġ", "Ġthe"],
        "<|im_start|>é": ["<|im_start|>", "Ã", "©"],
    }.items():
        assert tokenizer.encode(text) == [TOKENS.index(token) for token in tokens]
    for changes, ends in (({}, [0, 2]), ({"chat_template": None, "pad_token_id": 2}, [0])):
        write(tiny, changes)
        model, _ = models.load_policy(ours.model_folder(tiny), "cpu")
        assert model.generation_config.eos_token_id == ends
        assert model.get_input_embeddings().padding_idx is None


NO_LETTER = ["[gone]" if token == "T" else token for token in TOKENS]
REFUSED = {  # a part of the message: changes of the entries, changes of the weights
    "the tokenizer changes text": ({"token_list": NO_LETTER}, {}),
    "tokenizer somebody's splits text": ({"tokenizer_pre": "somebody's"}, {}),
    "its rope is scaled": ({"rope_scaling_type": gguf.RopeScalingType.YARN}, {}),
    "it has [0-9]+ weights": ({}, {"rope_freqs.weight": torch.ones(8)}),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_other_models_are_refused(reason, tmp_path, cache):
    """Catches a file that transformers would load as another model without a word."""
    write(tmp_path / "m.gguf", *REFUSED[reason])
    with pytest.raises(ValueError, match=reason):
        ours.model_folder(str(tmp_path / "m.gguf"))
    assert not list(cache.iterdir()), "no folder is left behind"


def test_a_setting_that_transformers_ignores(tiny, monkeypatch):
    monkeypatch.delitem(GGUF_CONFIG_MAPPING["llama"], "rope.freq_base")
    with pytest.raises(ValueError, match=r"its rope\.freq_base is 54321"):
        ours.model_folder(tiny)


def test_the_cache(tiny, cache, monkeypatch):
    """Catches half a conversion that is taken for a whole one, a second one, and a folder of
    another file."""
    convert = ours.convert
    monkeypatch.setattr(ours, "convert", mock.Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        ours.model_folder(tiny)
    assert not list(cache.iterdir())
    monkeypatch.setattr(ours, "convert", mock.Mock(wraps=convert))
    first = ours.model_folder(tiny)
    assert ours.model_folder(tiny) == first
    assert ours.convert.call_count == 1
    write(tiny, other_weights={"output_norm.weight": torch.ones(64)})
    assert ours.model_folder(tiny) != first
