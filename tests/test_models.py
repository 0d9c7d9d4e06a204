"""Loading: weights, files and rotations that are not what they seem are refused in one line."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import config
import models
import packing
from runtime import InputError, checkpoint


@pytest.fixture
def folder(make_policy, tmp_path):
    """A healthy folder, whose head is not tied to the embedding."""
    model, tokenizer = make_policy()
    model.config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def rename(folder, new_name):
    """Rewrite the names of the weights; without a new name they are dropped."""
    path = folder / "model.safetensors"
    renamed = {new_name(name): weight for name, weight in load_file(path).items()}
    save_file({name: w for name, w in renamed.items() if name}, path, metadata={"format": "pt"})


def prefixed(prefix):
    return lambda folder: rename(folder, lambda name: prefix + name)


def without_head(folder):
    rename(folder, lambda name: None if name == "lm_head.weight" else name)


def cut(name):
    def change(folder):
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[: len(content) // 2])

    return change


def pointer(name):
    text = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 7\n"
    return lambda folder: (folder / name).write_text(text)


def of_kind(kind, **parts):
    def change(folder):
        getattr(transformers, f"{kind}Config")(**parts).save_pretrained(folder)

    return change


def gemma(folder):
    small = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 258}
    config = transformers.Gemma3TextConfig(**small, **heads)
    transformers.Gemma3ForCausalLM(config).save_pretrained(folder)


def with_weight(name):
    def change(folder):
        weights = load_file(folder / "model.safetensors") | {name: torch.ones(1, 32)}
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})

    return change


def one_nan(folder):
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][3, 3] = torch.nan
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def set_config(**changes):
    def change(folder):
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def tied_with_bias(folder):
    set_config(tie_word_embeddings=True)(folder)
    without_head(folder)
    with_weight("lm_head.bias")(folder)


REFUSED = {  # a case: what is done to the folder, and what the message says
    "compiled": (
        prefixed("_orig_mod."), "such as lm_head.weight; it has _orig_mod.lm_head.weight inst",
    ),
    "adapter": (
        prefixed("base_model.model."), "has base_model.model.lm_head.weight .*merge an",
    ),
    "other prefix": (
        prefixed("x."), "it has x.lm_head.weight instead",
    ),
    "no head": (without_head, "1 of its weights are missing, such as lm_head.weight. Save the"),
    "one NaN": (one_nan, "such as model.layers.1.mlp.up_proj.weight, hold NaN or infinity"),
    "cut weights": (cut("model.safetensors"), "model.safetensors cannot be read: .*not fully"),
    "cut tokenizer": (cut("tokenizer.json"), "model/tokenizer.json cannot be read: "),
    "cut config": (cut("config.json"), "model/config.json cannot be read: JSONDecodeError"),
    "pointer": (
        pointer("model.safetensors"), "safetensors cannot be read: .*Git LFS pointer.*git lfs pull",
    ),
    "pointer of tokenizer": (pointer("tokenizer.json"), "tokenizer.json .* Git LFS pointer"),
    "Qwen2-VL": (of_kind("Qwen2VL"), "it is a vision-language or audio model; only text"),
    "Gemma 3": (of_kind("Gemma3"), "it is a vision-language or audio model"),
    "audio": (of_kind("Qwen2Audio"), "it is a vision-language or audio model"),
    "T5": (of_kind("T5"), "it is an encoder-decoder model"),
    "Gemma 3 of text": (gemma, "with a window of 4096 tokens, cannot be packed exactly"),
    "Falcon": (of_kind("Falcon", num_hidden_layers=1), "KeyError: 'packed'"),
    "other shapes": (set_config(intermediate_size=64), r"has the shape \[32, 48\] in the file"),
    "an adapter": (
        lambda folder: (folder / "config.json").rename(folder / "adapter_config.json"),
        "it has an adapter; merge it",
    ),
    "an adapter beside": (
        lambda folder: (folder / "adapter_config.json").write_text("{}"),
        "it has an adapter; merge it",
    ),
    "an adapter inside": (
        with_weight("model.layers.1.mlp.up_proj.lora_A.weight"), "does not use .*up_proj.lora_A",
    ),
    "a bias": (with_weight("lm_head.bias"), "does not use lm_head.bias, which changes one of its"),
    "a bias of a tied head": (tied_with_bias, "does not use lm_head.bias"),
    "codes and scales": (
        with_weight("model.layers.1.mlp.up_proj.weight_scale"), "does not use .*full weights",
    ),
    **{
        f"quantized: {method}": (
            set_config(quantization_config=method and {"quant_method": method}),
            r"it is quantized \(.*use the bfloat16 or float32 model",
        )
        for method in ("modelopt", "gptq", {})
    },
    "cut ends": (
        lambda folder: (folder / "generation_config.json").write_text("{"),
        "generation_config.json cannot be read: JSON",
    ),
    "own code": (
        set_config(model_type="new", auto_map={"AutoConfig": "c.C"}), "contains custom code",
    ),
    "one window": (
        set_config(layer_types=["full_attention", "sliding_attention"]), "with layers of kinds",
    ),
    "windows": (
        set_config(
            sliding_window=64, use_sliding_window=True, max_window_layers=0, layer_types=None
        ),
        "with a window of 64 tokens, cannot be packed exactly: that needs",
    ),
    "nothing there": (shutil.rmtree, r"\(there is no such folder\): .*Repo id"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(folder, case, monkeypatch):
    """Catches a traceback, weights that transformers makes up, and its question whether to run a
    folder's own code."""
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("it asks"))
    change, message = REFUSED[case]
    change(folder)
    with pytest.raises(InputError, match=f"--model {folder}.*{message}") as caught:
        models.load_policy(str(folder), "cpu")
    assert "\n" not in str(caught.value)


def test_other_files_get_no_blame(folder):
    """Catches a note of the user's that is named instead of what is wrong."""
    (folder / "a-notes.json").write_text("")
    without_head(folder)
    set_config(model_type="new")(folder)
    with pytest.raises(InputError, match="does not recognize this architecture"):
        models.load_policy(str(folder), "cpu")


def test_a_rotation_that_cannot_be_checked(folder, monkeypatch):
    """Catches a traceback of a rotary embedding that needs more than positions."""
    needs_more = lambda _self, x, position_ids, layer_type: None
    kind = transformers.models.qwen3.modeling_qwen3.Qwen3RotaryEmbedding
    monkeypatch.setattr(kind, "forward", needs_more)
    with pytest.raises(InputError, match=r"cannot be packed exactly: TypeError: .*layer_type"):
        models.load_policy(str(folder), "cpu")


def own_tokenizer(folder):
    path = folder / "tokenizer_config.json"
    path.write_text(
        json.dumps(json.loads(path.read_text()) | {"auto_map": {"AutoTokenizer": ["c.T", None]}})
    )


NOTED = [  # what is done to the folder, and the note
    (with_weight("v_head.weight"), "has weights that it does not use, such as v_head.weight"),
    (set_config(auto_map={"AutoModelForCausalLM": "c.C"}), "names code of its own, .*c.C"),
    (own_tokenizer, "names code of its own, which is not run: {'AutoTokenizer'"),
    (lambda folder: None, "^$"),
]


@pytest.mark.parametrize(("change", "note"), NOTED)
def test_what_is_only_noted(folder, capsys, change, note):
    """Catches a healthy model that is refused, and a change of its weights."""
    before = load_file(folder / "model.safetensors")
    change(folder)
    model, _ = models.load_policy(str(folder), "cpu")
    assert re.search(note, capsys.readouterr().out)
    assert model.state_dict().keys() == before.keys()
    assert all(torch.equal(model.state_dict()[name], before[name]) for name in before)


def test_a_model_that_is_not_there_is_asked_for_once(monkeypatch):
    """Catches half a minute of retries for the folder of a run, if the hub cannot be reached."""
    asked = []

    def unreachable(name, file):
        asked.append(name)
        raise OSError("Name or service not known")

    monkeypatch.setattr(models, "file_exists", unreachable)
    with pytest.raises(
        InputError, match=r"out/checkpoint .*no such folder\): OSError: Name or service"
    ):
        models.load_policy("out/checkpoint", "cpu")
    monkeypatch.setattr(models, "file_exists", lambda name, file: asked.append(name))
    with pytest.raises(InputError, match=r"no such folder\): the hub has no config.json of this"):
        models.load_policy("out/checkpoint", "cpu")
    assert asked == ["out/checkpoint"] * 2


def test_a_mixture_of_experts_has_no_router_loss(make_policy, tmp_path, capsys):
    dense, tokenizer = make_policy()
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    settings = transformers.Qwen3MoeConfig(
        **dense.config.to_dict() | experts | {"mlp_only_layers": []}
    )
    for part in (transformers.Qwen3MoeForCausalLM(settings), tokenizer):
        part.save_pretrained(tmp_path / "experts")
    for name, noted in ((tmp_path / "experts", True), ("tiny", False)):
        cfg = config.resolve(config.Config(model=str(name), out_dir=str(tmp_path / "out")))
        models.load_models(cfg, None)
        assert ("no loss balances its routers" in capsys.readouterr().out) == noted


@pytest.mark.parametrize("gpu", [False, True])
def test_fp8_of_transformers_is_read_exactly(folder, tmp_path, monkeypatch, gpu):
    """Catches codes that are trained without their scales, and a config of a saved model that still
    names the quantization. Where there is a GPU, transformers would keep the codes."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    path, name = folder / "model.safetensors", "model.layers.1.mlp.up_proj.weight"
    weights = load_file(path)
    codes, scale = weights[name].mul(8).to(torch.float8_e4m3fn), torch.full((1, 1), 0.125)
    more = {name: codes, f"{name}_scale_inv": scale}
    save_file(weights | more, path, metadata={"format": "pt"})
    others = [layer for layer in weights if layer != name]
    fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": others}
    set_config(quantization_config=fp8)(folder)
    model, _ = models.load_policy(str(folder), "cpu")
    assert torch.equal(model.state_dict()[name], codes.float() / 8)
    model.save_pretrained(tmp_path / "saved")
    assert "quantization_config" not in json.loads((tmp_path / "saved/config.json").read_text())
    assert load_file(tmp_path / "saved/model.safetensors")[name].dtype == torch.float32


# ---------------------------------------------------------------------------- long sequences


def with_rope(make_policy, rope, longest=512):
    """The small policy with another rotary embedding."""
    _, tokenizer = make_policy()
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=longest, initializer_range=0.3,
        rope_parameters={"rope_theta": 1e4} | rope,
    )  # fmt: skip
    config._attn_implementation = packing.ATTENTION
    model = transformers.LlamaForCausalLM(config)
    model.vocab_size = len(tokenizer)
    return model, tokenizer


LONG = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [8.0] * 4, "factor": 4.0}
ROPES = [  # a rotary embedding, and how long a sequence may be
    ({"rope_type": "default"}, 512),
    (LONG | {"original_max_position_embeddings": 128}, 128),
    (LONG | {"original_max_position_embeddings": 100}, 100),
    (LONG | {"original_max_position_embeddings": 512}, 512),
    ({"rope_type": "dynamic", "factor": 2.0}, 512),  # it changes beyond
    ({"rope_type": "linear", "factor": 2.0}, 512),
    ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}, 512),
    (
        {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 128,
        },
        512,
    ),
]  # fmt: skip


@pytest.mark.parametrize(("rope", "longest"), ROPES, ids=lambda value: str(value)[:40])
def test_rotations_never_change_up_to_the_longest_sequence(make_policy, rope, longest):
    """Its log-probs, packed beside a sequence of that length, are those that it has alone; and one
    token more changes them, if the limit is below max_position_embeddings.

    Catches a limit that is off by one, and one for a rotation that is always the same.
    """
    model, _ = with_rope(make_policy, rope)
    assert models.longest_sequence(model) == longest

    def short(other):
        """The log-probs of a sequence of 9 tokens, in a slot with another one."""
        prompts = [[number % 250] for number in range(2)]
        completions = [[*range(1, 9)], [token % 250 for token in range(1, other)]]
        logprobs, _ = packing.packed_logprobs(model, packing.build_pack(prompts, completions))
        owner = packing.build_pack(prompts, completions).owner
        return logprobs[owner == 0]

    with torch.no_grad():
        alone = short(9)
        # the last token of a sequence predicts nothing, so it is not in the slot
        assert (short(longest + 1) - alone).abs().max() < 1e-5
        if longest < 512:
            assert (short(longest + 2) - alone).abs().max() > 1e-3


def test_a_limit_of_the_rotation_bounds_prompts(make_policy, tmp_path, capsys):
    """Catches a limit that is not said, or that prompts ignore."""
    rope = LONG | {"original_max_position_embeddings": 100}
    for part in with_rope(make_policy, rope):
        part.save_pretrained(tmp_path)
    model, _ = models.load_policy(str(tmp_path), "cpu")
    assert model.longest == 100
    said = capsys.readouterr().out
    assert re.search(
        "rotary embedding .rope. .* changes in sequences of more than 100 tokens", said
    )


def test_the_check_looks_at_the_last_positions(make_policy, monkeypatch):
    """Catches a check of the first positions only."""
    model, _ = make_policy()
    assert models.packs_exactly(model, 512)
    rotary = model.model.rotary_emb
    forward = rotary.forward

    def wrong_far_away(x, position_ids):
        cos, sin = forward(x, position_ids)
        together = position_ids.shape[1] > 3  # as in a slot
        return cos, torch.where((position_ids > 500)[..., None] & together, sin + 0.5, sin)

    monkeypatch.setattr(rotary, "forward", wrong_far_away)
    assert models.packs_exactly(model, 400)
    assert not models.packs_exactly(model, 512)


# ---------------------------------------------------------------------------- what is saved


def test_the_tokenizer_is_saved_as_it_was(policy_folder, run, tmp_path):
    """Catches another pad token, padding side or template in a checkpoint. A supervised run would
    mask every end token if it were the pad token, too."""
    before = transformers.AutoTokenizer.from_pretrained(policy_folder)
    before.pad_token, before.padding_side = None, "right"
    before.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    before.backend_tokenizer.enable_truncation(400)  # a use of the tokenizer resets these two
    before.backend_tokenizer.enable_padding(length=8)
    before.save_pretrained(policy_folder)
    file = json.loads((Path(policy_folder) / "tokenizer.json").read_text())
    run("run", steps=1, save_every=1)
    saved = transformers.AutoTokenizer.from_pretrained(tmp_path / "run" / "checkpoint")
    for name in ("pad_token", "eos_token", "padding_side", "chat_template"):
        assert getattr(saved, name) == getattr(before, name), name
    assert json.loads((tmp_path / "run" / "checkpoint" / "tokenizer.json").read_text()) == file


def test_the_fingerprint_is_of_the_weights(policy_folder):
    """Catches weights that were trained a little and pass for the same."""
    model, _ = models.load_policy(policy_folder, "cpu")
    before = checkpoint.fingerprint(model)
    assert before == checkpoint.fingerprint(models.load_policy(policy_folder, "cpu")[0])
    with torch.no_grad():
        model.model.norm.weight[0] += 1e-3
    assert before != checkpoint.fingerprint(model)
