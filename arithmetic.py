"""
The embedded task: chains of additions, worked out step by step, and a base model that does them badly.

    prompt      7+9+5?
    completion  7+9=16;16+5=21        then the end token; the answer is the number after the last "="

The base model is trained on an imperfect teacher that forgets the carry with some probability and then goes
on from the wrong total. So it nearly always solves problems without carries, fails most long ones, and reinforcement
learning has to amplify the right habit, first on short chains and then on long ones: groups that are dead
(all right or all wrong) come alive and die again.

Nothing is stored: a problem is a function of (split, index), and the tokenizer and the base model are made
on the spot (the model once, then cached beside this file).
"""

import hashlib
import os
import random
import shutil
import zlib
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tqdm import tqdm
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

import packing

# the base model's recipe; the cache is keyed by the text of this file
CARRY_PROB = 0.42  # the teacher's chance of remembering a carry
BASE_STEPS, BASE_BATCH, BASE_LR = 1000, 32, 3e-3
CHAIN = (2, 8)  # shortest and longest chain the base and the default splits hold
LONGER = (9, 12)  # longer than any trained on
UNSOLVED = (13, 18)  # of the realistic mix: the base never solves these
TRIVIAL = (2, 5)  # and nearly always solves these: no carry anywhere

TRAIN_PROBLEMS = 512
CACHE = Path(__file__).resolve().parent / ".cache"  # holds the base model
SPLITS = ("train", "heldout", "longer", "mixed", "mixed-heldout", "base")


# ---------------------------------------------------------------------------- problems


def problem(split: str, index: int) -> tuple[str, str, str]:
    """(prompt, answer, source) number `index` of a split; source names the kind of chain.

    train          chains of 2 to 8, never a held-out one
    heldout        chains of 2 to 8 that no training split holds (a fifth of all chains, by checksum)
    longer         chains of 9 to 12
    mixed          35 % trivial chains without carries, 30 % chains of 13 to 18, 35 % like `train`
    mixed-heldout  the same mix, held out
    base           what the base model learns from: like `train`, but every fourth chain starts from a two-digit
                   number. Totals grow slowly where carries are forgotten; without these chains the base would give
                   a carry past 40 a chance of 0.02 and less, and there would be nothing to amplify.
    """
    if split not in SPLITS:
        raise ValueError(f"unknown split {split!r}: choose one of {', '.join(SPLITS)}")
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
        count, numbers = rng.randint(*TRIVIAL), []
        for left in reversed(range(count)):  # numbers still to come, each at least 1; the total never passes 9
            numbers.append(rng.randint(1, 9 - left - sum(numbers)))
        return numbers, "trivial"
    if kind < 0.65:
        span, source = UNSOLVED, "unsolved"
    else:
        span, source = (LONGER, "longer") if split == "longer" else (CHAIN, "chain")
    count = rng.randint(*span)
    if split == "base":  # long chains need the most practice, or their last links are never right
        count = max(count, rng.randint(*span))
    numbers = [rng.randint(1, 9) for _ in range(count)]
    if split == "base" and rng.random() < 0.25:
        numbers[0] = rng.randint(10, 69)
    return numbers, source


def worked_answer(prompt: str, carry_prob: float = 1.0, rng: random.Random | None = None) -> str:
    """The completion a teacher writes; with carry_prob < 1 it forgets carries (16+5=11) and goes on.

    >>> worked_answer("7+9+5?")
    '7+9=16;16+5=21'
    """
    total, *rest = map(int, prompt.rstrip("?").split("+"))
    steps = []
    for number in rest:
        forgets = total % 10 + number > 9 and carry_prob < 1.0 and rng.random() >= carry_prob
        result = total + number - 10 * forgets
        steps.append(f"{total}+{number}={result}")
        total = result
    return ";".join(steps)


def longest_completion(data: str) -> int:
    """Room for the longest right answer of a data name, end token included, in tokens (= characters)."""
    numbers = {"arithmetic": CHAIN, "arithmetic-longer": LONGER, "arithmetic-mixed": UNSOLVED}[data][1]
    return len(worked_answer("+".join(["9"] * numbers) + "?")) + 1


# ---------------------------------------------------------------------------- tokenizer and base model


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level: one token a byte, so any text encodes and decodes; then pad and end."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({char: index for index, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|pad|>",
        eos_token="<|end|>",
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def make_model(tokenizer: PreTrainedTokenizerFast, *, seed: int) -> Qwen3ForCausalLM:
    """An untrained Qwen3 of about 0.8 M parameters that takes 8,192 positions."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        initializer_range=0.05,  # the default 0.02 learns much slower in so narrow a model
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


def train_base(steps: int) -> tuple[Qwen3ForCausalLM, PreTrainedTokenizerFast]:
    """Supervised training on what the imperfect teacher writes for the base split."""
    tokenizer = make_tokenizer()
    model = make_model(tokenizer, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=BASE_LR, weight_decay=0.0, betas=(0.9, 0.98))
    for step in tqdm(range(steps), desc="base model", unit="step", leave=False, disable=None):
        rng = random.Random(f"teacher/{step}")
        prompts = [problem("base", step * BASE_BATCH + i)[0] for i in range(BASE_BATCH)]
        answers = [worked_answer(prompt, CARRY_PROB, rng) for prompt in prompts]
        completions = [[*tokenizer.encode(answer), tokenizer.eos_token_id] for answer in answers]
        pack = packing.build_pack([tokenizer.encode(prompt) for prompt in prompts], completions)
        for group in optimizer.param_groups:
            group["lr"] = BASE_LR * min(1.0, (step + 1) / 20) * (1 - step / steps)
        loss = -packing.packed_logprobs(model, pack)[0].mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return model, tokenizer


def base_folder() -> Path:
    """Path of the cached base model, a Hugging Face folder; made at the first call (about a minute).

    Keyed by the text of this file and the versions of the libraries, so a changed recipe makes a new base; written
    beside and renamed, so a kill leaves nothing half-made.
    """
    recipe = Path(__file__).read_text() + torch.__version__ + transformers.__version__
    key = hashlib.sha256(recipe.encode()).hexdigest()[:12]
    folder = CACHE / f"base-{key}"
    if not folder.exists():
        print("making the base model of the embedded task, once; about a minute on 2 cores", flush=True)
        model, tokenizer = train_base(BASE_STEPS)
        unfinished = folder.with_name(f"{folder.name}.{os.getpid()}")
        model.save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)
        try:
            unfinished.rename(folder)
        except OSError:  # another process was first
            shutil.rmtree(unfinished)
    return folder
