"""Loading: weights, files and rotations that are not what they seem are refused in one line."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import models
from runtime import InputError


@pytest.fixture
def folder(make_policy, tmp_path):
    """A healthy folder, whose head is not tied to the embedding."""
    model, tokenizer = make_policy()
    model.config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def weights(change):
    """Rewrite the file of weights: `change` gets and returns {name: weight}."""

    def rewrite(folder):
        path = folder / "model.safetensors"
        save_file(change(load_file(path)), path, metadata={"format": "pt"})

    return rewrite


def with_weight(name, weight):
    return weights(lambda loaded: loaded | {name: weight})


def set_config(name="config.json", **changes):
    def change(folder):
        content = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(content | changes))

    return change


def text(name, content):
    return lambda folder: (folder / name).write_text(content)


COMPILED = weights(lambda loaded: {f"_orig_mod.{name}": weight for name, weight in loaded.items()})
UP = "model.layers.1.mlp.up_proj.weight"  # [48, 32]
INSIDE = "model.layers.1.mlp.up_proj.lora_A.weight"
LONG = {
    "rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [8.0] * 4, "factor": 4.0,
    "original_max_position_embeddings": 128, "rope_theta": 1e4,
}  # fmt: skip
WINDOW = {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 0}
REFUSED = {  # a case: what is done to the folder, and what the message says
    "compiled": (COMPILED, "25 weights are missing, such as lm_head.weight: save the whole"),
    "other shapes": (set_config(intermediate_size=64), r"6 weights are mismatched, .*mlp.*48.*64"),
    "an adapter inside": (with_weight(INSIDE, torch.ones(4, 32)), "unexpected, such as .*lora_A"),
    "an adapter": (text("adapter_model.bin", ""), "it has an adapter beside a model: give"),
    "codes": (with_weight(UP, torch.ones(48, 32, dtype=torch.int8)), r"quantized \(\['I8"),
    "one NaN": (with_weight(UP, torch.full((48, 32), torch.nan)), f"{UP} holds NaN or infinity"),
    "quantized": (set_config(quantization_config={"quant_method": "fp8"}), "quantized .*fp8.*use"),
    "cut ends": (text("generation_config.json", '{"eos'), "generation_config.json is not what was"),
    "windows": (set_config(layer_types=None, **WINDOW), "packing would .*'sliding_window': 64"),
    "rotations that change": (set_config(rope_parameters=LONG), "packing would .*'longrope'"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(folder, case):
    """Catches weights that transformers makes up or leaves out, codes that are trained, and a model
    that would not be packed exactly."""
    change, message = REFUSED[case]
    change(folder)
    with pytest.raises(InputError, match=f"{folder}.*{message}") as caught:
        models.load_policy(str(folder), "cpu")
    assert "\n" not in str(caught.value)


def test_fingerprints(make_policy):
    """Catches a change of one bit that passes for the same model, and a sum of one type only."""
    model, _ = make_policy()
    of = lambda model: models.fingerprint(model.parameters())
    before = of(model)
    assert of(make_policy()[0]) == before
    weight = model.model.norm.weight.data
    weight[0] = torch.nextafter(weight[0], torch.tensor(9.0))
    assert of(model) != before
    for dtype in (torch.bfloat16, torch.float64):
        assert of(model.to(dtype)) not in (0, before)


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
