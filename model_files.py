"""
Folders of models: transformers reads one, and what is wrong with it is said in one line.

It also refuses what would otherwise show only after days of training: missing weights, which
transformers makes up, and weights of wrong shapes.
"""

import copy
import json
import re
import zipfile
from pathlib import Path

import torch
from huggingface_hub import file_exists, try_to_load_from_cache
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import find_adapter_config_file, logging

import packing
from problem_files import is_lfs_pointer
from runtime import InputError, ranks

# What transformers reads of a folder.
FILES = ("config.json", "tokenizer*.json", "model*.safetensors*", "pytorch_model*.bin*")
# What other programs put before the names of weights, and how to save them without it.
PREFIXES = {
    "_orig_mod.": "save the model before torch.compile, model._orig_mod",
    "module.": "save the model inside the wrapper, model.module",
    "base_model.model.": "merge the adapter with merge_and_unload() and save the result",
}


def read(name: str):
    """(model, tokenizer) by transformers, in float32. InputError if it cannot read them, or if it
    would make up weights."""
    folder = Path(name).expanduser()
    name = str(folder) if folder.is_dir() else name
    options = {"trust_remote_code": False}
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # it would print a table of the names of missing weights
    try:
        _check_place(name, folder)
        model_config = AutoConfig.from_pretrained(name, **options)
        _check_kind(model_config)
        model, names = AutoModelForCausalLM.from_pretrained(
            name, config=model_config, dtype=torch.float32, output_loading_info=True,
            attn_implementation=packing.ATTENTION, ignore_mismatched_sizes=True, **options,
        )  # fmt: skip
        tokenizer = AutoTokenizer.from_pretrained(name, **options)
        # For checkpoints. A call changes the tokenizer's padding and truncation settings.
        tokenizer.as_loaded = copy.deepcopy(tokenizer)
    except Exception as error:  # transformers, safetensors and tokenizers raise errors of any kind
        files = sorted(path for name in FILES for path in folder.glob(name))
        reason = next(filter(None, map(_about_file, files)), "") or _in_one_line(error)
        where = "" if folder.is_dir() else " (there is no such folder)"
        raise InputError(f"--model {name} cannot be loaded{where}: {reason}") from None
    finally:
        logging.set_verbosity(verbosity)

    if names["mismatched_keys"]:
        key, of_file, of_config = sorted(names["mismatched_keys"])[0]
        shapes = f"{key} has the shape {[*of_file]} in the file, but {[*of_config]} in config.json"
        raise InputError(f"--model {name} cannot be loaded: {shapes}: the file is another model's")
    missing, unexpected = sorted(names["missing_keys"]), sorted(names["unexpected_keys"])
    if missing:
        raise InputError(f"--model {name}: {_about_names(missing, unexpected)}")
    layers = {key.rpartition(".")[0] for key, _ in model.named_parameters(remove_duplicate=False)}
    for key in unexpected:
        if layers & {key[:dot] for dot, character in enumerate(key) if character == "."}:
            problem = f"transformers has no use for {key}, which changes one of its layers"
            remedy = "use full weights, not quantized ones or an adapter's"
            raise InputError(f"--model {name}: {problem}: {remedy}")
    if own_code := getattr(model_config, "auto_map", None) or tokenizer.init_kwargs.get("auto_map"):
        ranks.say(f"note: --model {name} names code of its own, which is not run: {own_code}")
    if unexpected:
        ranks.say(f"note: --model {name} has weights that it does not use, such as {unexpected[0]}")
    return model, tokenizer


def _check_place(name: str, folder: Path) -> None:
    """An error if there is no model, or an adapter. The hub is asked once: transformers would ask
    an unreachable one for half a minute."""
    here = folder.is_dir() or try_to_load_from_cache(name, "config.json")
    if not here and not file_exists(name, "config.json"):
        raise ValueError("the hub has no config.json of this name")
    if find_adapter_config_file(name):
        raise ValueError("it has an adapter; merge it with merge_and_unload(), and save the result")
    # transformers ignores a generation config that it cannot read, and with it the end tokens.
    if problem := _about_file(folder / "generation_config.json"):
        raise ValueError(problem)


def _check_kind(model_config) -> None:
    """ValueError unless the config is that of a text-only language model with full weights."""
    quantization = getattr(model_config, "quantization_config", None)
    if quantization and quantization.get("quant_method") == "fp8":
        quantization["dequantize"] = True  # exact; a GPU would compute with the codes
    elif quantization is not None:
        kind = quantization.get("quant_method", "it does not say how")
        raise ValueError(
            f"it is quantized ({kind}), and only full weights can be trained: use the bfloat16 or "
            f"float32 model that it was made from"
        )
    senses = {"vision_config", "audio_config"} & {*model_config.sub_configs}
    if "vision_config" in senses:
        raise ValueError("it is a vision-language model, and only text models can be trained")
    if senses:
        raise ValueError("it is a multimodal model, and only text models can be trained")
    if model_config.is_encoder_decoder:
        raise ValueError("it is an encoder-decoder model; only decoders can be trained")


def _in_one_line(error: Exception) -> str:
    """The reason for which transformers cannot load a model."""
    said = " ".join(str(error).split())[:400]
    if kind := re.search("model type `(pruned_[a-z0-9]+)`", said):
        return f"its type {kind[1]} needs `python -m related.pruned PROGRAM FLAGS`"
    if error.args == (packing.ATTENTION,):  # KeyError: its attention table has no "packed"
        return "it has attention of its own, which cannot be packed"
    return said if isinstance(error, (OSError, ValueError)) else f"{type(error).__name__}: {said}"


def _about_names(missing: list[str], unexpected: list[str]) -> str:
    """What is wrong with the names of a model's weights, and how to mend it."""
    found = f"{len(missing)} of its weights are missing, such as {missing[0]}"
    for name in missing:
        for other in unexpected:
            if other.endswith(name):
                prefix = other.removesuffix(name)
                remedy = PREFIXES.get(prefix, "save it under the names of the model's own weights")
                return f"{found}; its names begin with {prefix!r} ({other}): {remedy}"
    instead = f"; it has {unexpected[0]} instead" if unexpected else ""
    return f"{found}{instead}: save the whole model with save_pretrained"


def _about_file(path: Path) -> str:
    """What is wrong with a file of a model's folder; "" if it can be opened, or is not there."""
    if not path.is_file():
        return ""
    if is_lfs_pointer(path):
        return f"{path} is only a Git LFS pointer: run `git lfs pull`"
    try:
        if path.suffix == ".json":
            json.loads(path.read_text(encoding="utf-8"))
        elif path.suffix == ".safetensors":
            with safe_open(path, "pt"):
                pass
        elif path.suffix == ".bin" and not zipfile.is_zipfile(path):
            raise ValueError("it is no file of torch.save")
    except (OSError, ValueError, SafetensorError) as error:
        reason = str(error).splitlines()[0]
        return f"{path} is not whole ({reason}): copy or download it again"
    return ""
