"""
The embedded task: chains of additions, worked out step by step, and a base model that often fails.

    prompt      7+9+5?
    completion  7+9=16;16+5=21      then the end token; the answer is the number after the last "="

The base model imitates an imperfect teacher, which sometimes forgets a carry and continues from the
wrong total. It therefore solves nearly all problems without carries and fails most long ones.
Reinforcement learning has to amplify the right habit, first on short chains, then on long ones, so
groups that are dead (all right or all wrong) come alive and die again.

A problem is a function of (split, index), so no data is stored. The base model is stored, in
the folder BASE, with weights in float16. To make it again from nothing, in two minutes:

    python -m tasks.arithmetic
"""

import random
import zlib
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tqdm import tqdm
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

import packing

BASE = Path(__file__).resolve().parent / "arithmetic-base"  # a Hugging Face folder
CARRY_PROB = 0.42  # the probability that the teacher remembers a carry
BASE_STEPS = 1000
BASE_BATCH = 32
BASE_LR = 3e-3
CHAIN = (2, 8)  # shortest and longest chain in the base split and the default splits
LONGER = (9, 12)  # longer than any chain in train and base; mixed has even longer ones
UNSOLVED = (13, 18)  # in the mixed splits; the base model never solves these
TRIVIAL = (2, 5)  # in the mixed splits; no carries, so the base model nearly always solves these

TRAIN_PROBLEMS = 512


# ---------------------------------------------------------------------------- problems


def problem(split: str, index: int) -> tuple[str, str, str]:
    """Problem number `index` of a split, as (prompt, answer, source); source is the kind of chain.

    train          chains of 2 to 8 numbers, none of them held out
    heldout        chains of 2 to 8 that no training split contains (a fifth of all, by checksum)
    longer         chains of 9 to 12, held out
    mixed          35 % trivial chains without carries, 30 % chains of 13 to 18, 35 % like `train`
    mixed-heldout  the same mix, held out
    base           training data of the base model: like `train`, but long chains are more frequent,
                   and a quarter of the chains start from a two-digit number. Totals grow slowly
                   when carries are forgotten, so without these chains the base model would give a
                   carry past 40 a probability of at most 0.02, which leaves nothing to amplify.
    """
    rng = random.Random(f"{split}/{index}")
    while True:
        numbers, source = _chain(split, rng)
        prompt = "+".join(map(str, numbers)) + "?"
        held_out = zlib.crc32(prompt.encode()) % 5 == 0
        if held_out == (split in ("heldout", "longer", "mixed-heldout")):
            return prompt, str(sum(numbers)), source


def _chain(split: str, rng: random.Random) -> tuple[list[int], str]:
    kind = rng.random() if split.startswith("mixed") else 1.0
    if kind < 0.35:
        numbers = []
        for left in reversed(range(rng.randint(*TRIVIAL))):
            # Each of the `left` numbers still to come is at least 1, and the total stays below 10.
            numbers.append(rng.randint(1, 9 - left - sum(numbers)))
        return numbers, "trivial"
    if kind < 0.65:
        span, source = UNSOLVED, "unsolved"
    else:
        span, source = (LONGER, "longer") if split == "longer" else (CHAIN, "chain")
    count = rng.randint(*span)
    if split == "base":  # without extra practice the last links of long chains are never right
        count = max(count, rng.randint(*span))
    numbers = [rng.randint(1, 9) for _ in range(count)]
    if split == "base" and rng.random() < 0.25:
        numbers[0] = rng.randint(10, 69)
    return numbers, source


def worked_answer(prompt: str, carry_prob: float = 1.0, rng: random.Random | None = None) -> str:
    """The teacher's completion; with carry_prob < 1 it forgets carries (16+5=11) and continues."""
    total, *rest = map(int, prompt.rstrip("?").split("+"))
    steps = []
    for number in rest:
        forgets = total % 10 + number > 9 and carry_prob < 1.0 and rng.random() >= carry_prob
        result = total + number - 10 * forgets
        steps.append(f"{total}+{number}={result}")
        total = result
    return ";".join(steps)


# ---------------------------------------------------------------------------- tokenizer, base model


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level tokenizer: one token per byte, so any text round-trips, then pad and end."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: index for index, char in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|pad|>",
        eos_token="<|end|>",
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def make_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """An untrained Qwen3 with about 0.8 M parameters and 8,192 positions."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        initializer_range=0.05,  # a model this narrow learns much more slowly with 0.02
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    config._attn_implementation = packing.ATTENTION
    model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, do_sample=True
    )
    return model


def make_base() -> None:
    """Train a new model on the imperfect teacher's completions of the base split, and write BASE.
    Weights are rounded to float16, half the size; the configuration says float32, so that
    every library computes in it."""
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    weights = model.parameters()
    optimizer = torch.optim.AdamW(weights, lr=BASE_LR, weight_decay=0.0, betas=(0.9, 0.98))
    for step in tqdm(range(BASE_STEPS), desc="base model", unit="step", leave=False, disable=None):
        rng = random.Random(f"teacher/{step}")
        prompts = [problem("base", step * BASE_BATCH + i)[0] for i in range(BASE_BATCH)]
        answers = [worked_answer(prompt, CARRY_PROB, rng) for prompt in prompts]
        completions = [[*tokenizer.encode(answer), tokenizer.eos_token_id] for answer in answers]
        pack = packing.build_pack([tokenizer.encode(prompt) for prompt in prompts], completions)
        warm_up, fall = min(1.0, (step + 1) / 20), 1 - step / BASE_STEPS
        optimizer.param_groups[0]["lr"] = BASE_LR * warm_up * fall
        loss = -packing.packed_logprobs(model, pack)[0].mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    model.half().save_pretrained(BASE)
    model.config.dtype = "float32"
    model.config.save_pretrained(BASE)
    tokenizer.save_pretrained(BASE)


if __name__ == "__main__":
    torch.set_num_threads(1)  # a model this small gains nothing from more
    make_base()
