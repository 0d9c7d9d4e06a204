"""Loading: weights, files and rotations that are not what they seem are refused in one line."""

import json
import re
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


def cut(name, size=200):
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:size])


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
    "an adapter": (text("adapter_model.bin", ""), "it has an adapter beside a model: give"),
    "an adapter inside": (with_weight(INSIDE, torch.ones(4, 32)), "unexpected, such as .*lora_A"),
    "codes": (with_weight(UP, torch.ones(48, 32, dtype=torch.int8)), r"quantized \(\['I8"),
    "one NaN": (with_weight(UP, torch.full((48, 32), torch.nan)), f"{UP} holds NaN or infinity"),
    "quantized": (set_config(quantization_config={"quant_method": "fp8"}), "quantized .*fp8.*use"),
    "cut weights": (cut("model.safetensors"), r"model.safetensors cannot be read \(Safet"),
    "cut ends": (cut("generation_config.json", 20), "generation_config.json is not what was"),
    "windows": (set_config(layer_types=None, **WINDOW), "packing would .*'sliding_window': 64"),
    "rotations that change": (set_config(rope_parameters=LONG), "packing would .*'longrope'"),
    "own code": (set_config(model_type="new", auto_map={"AutoConfig": "c.C"}), "custom code"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(folder, case, monkeypatch):
    """Catches a traceback, weights that transformers makes up, codes that are trained, and its
    question whether to run a folder's own code."""
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("it asks"))
    change, message = REFUSED[case]
    change(folder)
    with pytest.raises(InputError, match=f"{folder}.*{message}") as caught:
        models.load_policy(str(folder), "cpu")
    assert "\n" not in str(caught.value)


NOTED = [  # what is done to the folder, and the note
    (set_config(architectures=["MyModel"]), r"names \['MyModel'\]; it is read as Qwen3ForCausalLM"),
    (set_config("tokenizer_config.json", auto_map={"AutoTokenizer": ["c.T", None]}), "names .*c.T"),
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
