"""LoRA: exact gradients and merges, small checkpoints that peft reads."""

import copy
import json
import shutil
from dataclasses import replace
from pathlib import Path

import peft
import pytest
import torch
import toy
import transformers
from safetensors.torch import load_file, save_file
from test_memory import resolved
from test_unbiased import step_error
from transformers import AutoModelForCausalLM

import eval as evaluation
import lora
import models
import update
from runtime import InputError

FILES = {"adapter_config.json", "adapter_model.safetensors", "trainer.pt", "tokenizer.json"}


@pytest.fixture
def adapted(make_policy):
    """(a model in float64 with adapters that have moved, its base)."""
    model, _ = make_policy(dtype=torch.float64)
    bias = torch.linspace(-1, 1, 32, dtype=torch.float64)  # as Qwen2 has
    model.model.layers[0].self_attn.q_proj.bias = torch.nn.Parameter(bias)
    base = copy.deepcopy(model)
    toy.inject_moved(model, 4, 0)
    return model.double(), base


# ---------------------------------------------------------------------------- exact


def test_the_step_is_unbiased(policy_folder, tmp_path, monkeypatch):
    """Every outcome of both draws through train.py's own step, in float64. Catches adapters that
    are not the trained ones, and gradients that are lost."""
    monkeypatch.setattr(lora, "inject", toy.inject_moved)
    folder = lambda name: (policy_folder, str(tmp_path / name))
    assert step_error(folder, "grpo", "uniform", lora=4) <= 1e-10


def test_the_plain_copy_is_the_model(adapted, make_rollouts, policy_folder):
    """The copy that samples, and what is sent to vLLM. Catches a delta that is left out or counted
    twice, weights of another layer, and names that vLLM does not know."""
    model, base = adapted
    rollouts, cfg = make_rollouts(model, 3, 4), resolved(dtype="float32")
    logprobs = lambda model: update.trainer_logprobs(model, rollouts, cfg)
    copied, before = copy.deepcopy(base), logprobs(base)
    for _ in range(2):
        lora.refresh(copied, model)
    assert (logprobs(copied) - logprobs(model)).abs().max() < 1e-12
    assert (before - logprobs(model)).abs().max() > 0.01
    with lora.base_alone(model):
        assert torch.equal(logprobs(model), before)
    assert (logprobs(copied) - logprobs(model)).abs().max() < 1e-12
    assert dict(lora.plain_state(model)).keys() == copied.state_dict().keys()


def test_what_is_injected(policy_folder):
    """Catches a frozen model of twice the size, adapters whose small steps are lost, adapters that
    begin alike whatever --seed is, and another factor than 32 / rank, which the rate is for."""
    cfg = replace(resolved(lora=4), model=policy_folder)
    first, again, other = (models.load_models(replace(cfg, seed=seed), None) for seed in (0, 0, 1))
    of = lambda model: {(w.dtype, w.requires_grad) for w in model.parameters()}
    assert of(first.model) == {(torch.bfloat16, False), (torch.float32, True)}
    assert of(first.policy) == {(torch.bfloat16, False)}
    layers = [loaded.model.model.layers[1].mlp.up_proj for loaded in (first, again, other)]
    a, same, different = (layer.lora_A["default"].weight for layer in layers)
    assert torch.equal(a, same)
    assert not torch.equal(a, different)
    b = layers[0].lora_B["default"].weight.data.normal_()
    delta = layers[0].get_delta_weight("default")
    torch.testing.assert_close(delta, 32 / 4 * b @ a)


# ---------------------------------------------------------------------------- checkpoints


def train_on(model, out_dir, **changes):
    toy.main(toy.flags(str(model), str(out_dir), **changes))


def test_a_run(run, policy_folder, tmp_path, capsys):
    """Resumed bit for bit. Its small checkpoint is read by peft and eval.py, as one model. Catches
    a base that is trained, an optimizer or an adapter that starts over, and a checkpoint of the
    whole model."""
    options = {"lora": 4, "beta": 0.1, "save_every": 2, "lr": 1e-2, "gradient_checkpointing": True}
    rows = run("whole", **options)
    gaps = [row["sampling/sampling_logp_difference/mean"] for row in rows]
    assert max(gaps) < 1e-5, "it samples from what it trains"
    assert rows[0]["kl"] == 0 < rows[-1]["kl"], "the reference does not move"
    run("part", until=2, **options)
    run("part", resume=True, **options)
    toy.assert_same(toy.timeless(tmp_path / "whole"), toy.timeless(tmp_path / "part"))

    saved = tmp_path / "whole" / "checkpoint"
    names = {path.name for path in saved.iterdir()}
    assert names >= FILES
    assert not {"config.json", "model.safetensors"} & names
    with pytest.raises(InputError, match=r"--lora 4: --model .* is an adapter: save the merged"):
        train_on(saved, tmp_path / "again", lora=4)

    merged, _ = models.read(str(saved))
    base, _ = models.read(policy_folder)
    theirs = peft.PeftModel.from_pretrained(copy.deepcopy(base), saved)
    ids = torch.arange(60, 90)[None]
    expected = toy.plain_logits(theirs.get_base_model(), ids)
    assert torch.allclose(toy.plain_logits(merged, ids), expected, atol=1e-4)
    assert (toy.plain_logits(base, ids) - expected).abs().max() > 0.01
    args = {"problems": 2, "k": 1, "max_new_tokens": 4, "device": "cpu"}
    evaluation.main(evaluation.EvalConfig(model=str(tmp_path / "whole" / "checkpoint"), **args))


@pytest.mark.parametrize("needs", [{"lora": 4}, {"beta": 0.1}])
def test_the_base_is_the_one_of_the_run(run, policy_folder, make_policy, tmp_path, needs):
    """Catches adapters on a base, or a KL term of a reference, whose weights or whose prompts
    became others; and a base that may not move."""
    options = {"save_every": 1, "until": 1, "lr_schedule": "constant"} | needs
    run("run", **options)
    saved, moved = tmp_path / "run" / "checkpoint", str(tmp_path / "moved")
    assert json.loads((saved / "base.json").read_text())["model"] == policy_folder
    Path(policy_folder).rename(moved)
    if "lora" in needs:  # adapter_config.json has a path, base.json the user's name, such as tiny
        elsewhere = shutil.copytree(saved, tmp_path / "copy")
        fingerprint = json.loads((elsewhere / "base.json").read_text())["fingerprint"]
        named = {"model": moved, "fingerprint": fingerprint}
        (elsewhere / "base.json").write_text(json.dumps(named))
        assert models.read(str(elsewhere))[0].fingerprint != fingerprint
    again = ["--resume", "--out-dir", str(tmp_path / "run"), "--model", moved, "--steps", "2"]
    toy.main(again)
    assert len(toy.rows(tmp_path / "run")) == 2
    if "lora" in needs:  # whose tokenizer is the base's
        template = Path(moved, "chat_template.jinja")
        template.write_text("{% for m in messages %}9+{{ m.content }}{% endfor %}")
        with pytest.raises(
            InputError, match="not the problems, or the prompts, that the run began"
        ):
            toy.main([*again[:-1], "3"])
    other, _ = make_policy(seed=1)
    other.save_pretrained(moved)
    with pytest.raises(InputError, match=f"trained beside other weights than {moved} now has"):
        toy.main([*again[:-1], "3"])
    if "lora" in needs:
        with pytest.raises(InputError, match="trained beside other weights than"):
            models.read(str(saved))


@pytest.fixture
def adapter(policy_folder, tmp_path):
    """Somebody's adapter in bfloat16, for two of the layers, without a tokenizer."""
    base = AutoModelForCausalLM.from_pretrained(policy_folder, dtype=torch.bfloat16)
    shape = peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False, use_rslora=True)
    peft.get_peft_model(base, shape).save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


def test_all_weights_from_an_adapter(adapter, tmp_path):
    """Catches weights that stay frozen after the merge, and a checkpoint of the adapter alone."""
    before = models.read(str(adapter))[0].state_dict()
    train_on(adapter, tmp_path / "run", steps=2, save_every=2)
    after = load_file(tmp_path / "run" / "checkpoint" / "model.safetensors")
    assert all(not torch.equal(after[name], before[name]) for name in after)


def edit(folder, **changes):
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def began_at_random(folder):
    edit(folder, init_lora_weights="pissa_niter_4")


def without_a_weight(folder):
    weights = load_file(folder / "adapter_model.safetensors")
    weights.popitem()
    save_file(weights, folder / "adapter_model.safetensors")


def of_the_head(folder):
    """Also adapts the head, which is the embedding's matrix."""
    base = AutoModelForCausalLM.from_pretrained(folder.parent / "policy")
    shape = peft.LoraConfig(target_modules=["q_proj", "lm_head"], init_lora_weights=False)
    peft.get_peft_model(base, shape).save_pretrained(folder)


REFUSED = [
    (of_the_head, "its logits are off by"),
    (began_at_random, "began with random vectors"),
    (without_a_weight, "other weights than its config: .*q_proj.lora_"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED)
def test_adapters_that_are_refused(adapter, change, message):
    """Catches a merged model that is not the adapted one."""
    change(adapter)
    with pytest.raises(InputError, match=f"--model {adapter}.*{message}"):
        models.read(str(adapter))


def test_an_adapter_that_changes_nothing(adapter, capsys):
    """Catches a folder of adapters that is its base."""
    models.read(str(adapter))
    assert "note" not in capsys.readouterr().out
    edit(adapter, lora_alpha=0)
    models.read(str(adapter))
    assert "changes nothing: the model equals its base" in capsys.readouterr().out


def test_experts_have_no_adapters():
    """Catches a KeyError in the first step, and experts that stay as they were."""
    shape = transformers.Qwen3MoeConfig(
        vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, head_dim=4,
        num_key_value_heads=2, num_experts=2, num_experts_per_tok=1, moe_intermediate_size=4,
        decoder_sparse_step=1,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(shape)
    with pytest.raises(InputError, match=r"--lora 4: .*experts.* is no linear layer: train all"):
        lora.inject(model, 4, 0)
