"""
LoRA: train two thin matrices beside each linear layer, and none of the model's own weights.

W x becomes W x + ALPHA / rank * B A x. peft adds A and B in place, so the model keeps its class:
packing, losses and pruning do not know of them. The base W is frozen, in the run's dtype; A and B
are float32. Three more things follow from "a base and adapters":
    - a plain copy with the weights W + ALPHA / rank * B A samples, so engines see any other model
    - the reference of the KL term is the base alone, and no second model
    - a checkpoint holds only the adapters, in peft's format, and any such folder can be a --model
"""

import contextlib
import json
import os
from pathlib import Path

import torch
from transformers.utils import find_adapter_config_file

from runtime import InputError, ranks

ALPHA = 32  # divided by the rank, so that one learning rate fits all ranks


def inject(model, rank: int, seed: int) -> None:
    """Add adapters to all linear layers but the head, and freeze everything else. InputError for
    weights of another kind, such as all experts of a layer in one."""
    for name, weight in model.named_parameters():
        if weight.dim() > 2:
            raise InputError(f"--lora {rank}: {name} is no linear layer: train all weights")
    import peft

    shape = peft.LoraConfig(
        r=rank, lora_alpha=ALPHA, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model.add_adapter(shape)
    if os.path.isdir(model.name_or_path):  # a checkpoint names its base, and may be read elsewhere
        shape.base_model_name_or_path = os.path.realpath(model.name_or_path)
    for weight in model.parameters():
        if weight.requires_grad:
            weight.data = weight.data.float()


@torch.no_grad()
def load(model, folder: Path) -> None:
    """Give the adapters the weights of a checkpoint."""
    import peft

    weights = {
        name.removeprefix("base_model.model."): weight
        for name, weight in stored(str(folder)).items()
    }
    found = peft.set_peft_model_state_dict(model, weights)
    assert not found.unexpected_keys, found.unexpected_keys


@torch.no_grad()
def plain_state(model):
    """(name, weight) of each weight of the plain model, one at a time."""
    for name, weight in model.state_dict().items():
        layer, is_base, _ = name.rpartition(".base_layer.weight")
        if is_base:
            delta = model.get_submodule(layer).get_delta_weight("default")
            yield f"{layer}.weight", weight + delta
        elif ".lora_" not in name:
            yield name.replace(".base_layer.bias", ".bias"), weight


@torch.no_grad()
def refresh(policy, model) -> None:
    """Give the copy that samples the current weights. Does nothing if they are one model."""
    if policy is not model:
        copies = policy.state_dict()
        for name, weight in plain_state(model):
            copies[name].copy_(ranks.whole(weight))


@contextlib.contextmanager
def base_alone(model):
    """The model computes without its adapters, if it has any."""
    if not hasattr(model, "peft_config"):
        yield
        return
    model.disable_adapters()
    try:
        yield
    finally:
        model.enable_adapters()


def base_of(name: str) -> str | None:
    """What the folder or hub id of an adapter names as its base. None if it is a whole model."""
    file = find_adapter_config_file(name)
    if not file:
        return None
    base = json.loads(Path(file).read_text(encoding="utf-8")).get("base_model_name_or_path")
    if not base:
        raise ValueError("its adapter_config.json has no base_model_name_or_path")
    return base


def stored(name: str) -> dict:
    """The weights of anybody's adapter, by name."""
    from peft.utils import load_peft_weights

    return load_peft_weights(name, device="cpu")


@torch.no_grad()
def merge(model, name: str):
    """The model with anybody's adapter merged. ValueError unless all of its weights are used, and
    the merged model computes what the adapted one did: of two layers that share a matrix, peft may
    adapt one, and a merge changes both."""
    import peft

    ids = torch.linspace(0, model.config.vocab_size - 1, 32).long()[None]
    logits = lambda model: model.eval()(ids, use_cache=False).logits  # [1, 32, V]
    model.set_attn_implementation("sdpa")
    of_base = logits(model)
    adapted = peft.PeftModel.from_pretrained(model, name)
    begun = getattr(adapted.peft_config["default"], "init_lora_weights", True)
    if str(begun).startswith("pissa_niter"):  # peft draws them anew, and then they do not fit
        raise ValueError(f"it began with random vectors, which were not stored ({begun})")
    if wrong := stored(name).keys() ^ peft.get_peft_model_state_dict(adapted).keys():
        raise ValueError(f"its adapter has other weights than its config: {min(wrong)}")
    expected = logits(adapted)
    if torch.equal(expected, of_base):
        ranks.say(f"note: the adapter {name} changes nothing: the model equals its base")
    merged = adapted.merge_and_unload(safe_merge=True).requires_grad_(True)
    gap = (logits(merged) - expected).abs().max()
    if gap > 1e-3 * expected.abs().max():
        raise ValueError(
            f"merged, its logits are off by {gap:.2g}: it adapts one of two layers that share a "
            f"matrix. Where these are head and embedding, save the base without the tie"
        )
    return merged
