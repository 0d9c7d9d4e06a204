"""Models with random weights in the shapes of real ones, for measurements that need no download."""

import json
import random
from pathlib import Path
from typing import Literal

import tokenizers
import torch
import transformers

import packing
from engines import check_decoder
from runtime.device import fuse_norms

Shape = Literal["tiny", "0.6b", "4b"]
SHAPES = {  # Qwen3's: hidden, feed-forward, layers, heads, key-value heads, head width, vocabulary
    "tiny": (128, 384, 4, 4, 2, 32, 2048),
    "0.6b": (1024, 3072, 28, 16, 8, 128, 151_936),
    "4b": (2560, 9728, 36, 32, 8, 128, 151_936),
}


def qwen3(shape: str) -> transformers.Qwen3Config:
    """The configuration of that shape."""
    hidden, inner, layers, heads, kv_heads, width, vocabulary = SHAPES[shape]
    return transformers.Qwen3Config(
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=width,
        vocab_size=vocabulary,
        tie_word_embeddings=True,
    )


def random_model(shape: str, device: str):
    """An untrained Qwen3 of that shape with float32 weights."""
    options = qwen3(shape)
    options._attn_implementation = packing.ATTENTION
    torch.manual_seed(0)
    with torch.device(device):
        model = transformers.Qwen3ForCausalLM(options)
    fuse_norms(model)
    if device != "meta":
        check_decoder.compare(model)
    return model


def random_policy(shape: str, folder: str) -> None:
    """Write a folder for --model: such a model, a tokenizer of its vocabulary, and problems.jsonl.

    The problems are 256 random prompts of 20 to 200 tokens.
    """
    vocabulary, rng = SHAPES[shape][-1], random.Random(0)
    numbers = {f"t{number}": number for number in range(vocabulary)}
    vocabulary_only = tokenizers.Tokenizer(tokenizers.models.WordLevel(numbers, unk_token="t0"))
    vocabulary_only.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    special = {"eos_token": "t1", "pad_token": "t2"}
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=vocabulary_only, **special)
    tokenizer.save_pretrained(folder)
    model = random_model(shape, "cpu")
    model.generation_config = transformers.GenerationConfig(eos_token_id=1, pad_token_id=2)
    model.save_pretrained(folder)
    with open(Path(folder, "problems.jsonl"), "w") as file:
        for _ in range(256):
            length = rng.randint(20, 200)
            problem = " ".join(f"t{rng.randrange(vocabulary)}" for _ in range(length))
            file.write(json.dumps({"problem": problem, "answer": "1"}) + "\n")
