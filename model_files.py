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
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

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
    # transformers ignores a generation config that it cannot read, and with it the end tokens.
    if problem := _about_place(name, folder) or _about_file(folder / "generation_config.json"):
        raise InputError(f"--model {name} cannot be loaded: {problem}")
    options = {"trust_remote_code": False}
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # it would print a table of the names of missing weights
    try:
        _check_kind(AutoConfig.from_pretrained(name, **options))
        model, names = AutoModelForCausalLM.from_pretrained(
            name, dtype=torch.float32, attn_implementation=packing.ATTENTION,
            output_loading_info=True, ignore_mismatched_sizes=True, **options,
        )  # fmt: skip
        tokenizer = AutoTokenizer.from_pretrained(name, **options)
        # For checkpoints. A call changes the tokenizer's padding and truncation settings.
        tokenizer.as_loaded = copy.deepcopy(tokenizer)
    except Exception as error:  # transformers, safetensors and tokenizers raise errors of any kind
        files = sorted(path for name in FILES for path in folder.glob(name))
        reason = next(filter(None, map(_about_file, files)), "") or _in_one_line(error)
        raise InputError(f"--model {name} cannot be loaded: {reason}") from None
    finally:
        logging.set_verbosity(verbosity)

    if names["mismatched_keys"]:
        key, of_file, of_config = sorted(names["mismatched_keys"])[0]
        shapes = f"{key} has the shape {[*of_file]} in the file, but {[*of_config]} in config.json"
        raise InputError(f"--model {name} cannot be loaded: {shapes}: the file is another model's")
    missing, unexpected = sorted(names["missing_keys"]), sorted(names["unexpected_keys"])
    if missing:
        raise InputError(f"--model {name}: {_about_names(missing, unexpected)}")
    if unexpected:
        ranks.say(f"note: --model {name} has weights that it does not use, such as {unexpected[0]}")
    return model, tokenizer


def _about_place(name: str, folder: Path) -> str:
    """Why no model can be there; "" if one can be, also on the hub."""
    if folder.is_file():
        return "it is a file; name the folder that it is in"
    if not folder.is_dir() and not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name):
        return "there is no such folder"
    if (folder / "adapter_config.json").exists() and not (folder / "config.json").exists():
        return "it is an adapter; merge it into its model with merge_and_unload(), and save that"
    return ""


def _check_kind(model_config) -> None:
    """ValueError unless the config is that of a text-only language model."""
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
