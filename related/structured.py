"""
Structured pruning: take neurons, attentions or whole blocks out of a language model for good.

    python -m related.structured --model smollm2 --sparsity 0.25 --method 2ssp --out-dir out-2ssp

2ssp (arXiv:2501.17771) narrows every FFN to the same number of neurons, then removes attentions one
by one. The depth metrics (arXiv:2407.16286) score each block once, on the whole model, and the
blocks with the lowest scores go:

    cosine, l2   how far the block moves the hidden state: 1 - cosine, |change| / |hidden state|
    loss         the loss if this block alone is gone

What is removed adds nothing to the residual stream, or with --recovery what recovery.py fits.

DPPO's weights keep the expected gradient what it was. Here nothing does: a pruned model is another
function, which only training mends. The scores are means over a little text, and scores on the
whole model do not see what else goes.

A sub-layer is named by its block and its kind: "3.self_attn", "3.mlp". Letters: N sequences of T
tokens, L blocks, n neurons of an FFN.
"""

import math
import sys
from pathlib import Path
from pydoc_data.topics import topics
from typing import Literal

import torch
import torch.nn.functional as F
import tyro

import models
from related import pruned
from related.recovery import recover
from runtime import InputError
from runtime.device import choose_device

RANK = 32  # of what --recovery puts in place of a removed sub-layer
ALPHA = 1.5  # of 2ssp, as published; with more, more attentions and fewer neurons go
SAMPLES, LENGTH = 16, 256  # windows of text to calibrate on, as many to evaluate on; their tokens


def without(model, names: list[str]):
    """A context in which these sub-layers add nothing."""

    def nothing(_sublayer, _inputs, output):
        if isinstance(output, tuple):  # of an attention: (output, its weights)
            return torch.zeros_like(output[0]), *output[1:]
        return torch.zeros_like(output)

    return pruned.hooked([pruned.sublayer(model, name) for name in names], nothing)


@torch.no_grad()
def loss(model, sequences) -> float:
    """Mean -log p of the tokens after the first, in nats; exp of it is the perplexity."""
    losses = [model(ids, labels=ids, use_cache=False).loss for ids in sequences.split(1)]
    return torch.stack(losses).mean().item()


def size(module) -> int:
    return sum(weight.numel() for weight in module.parameters())


# ------------------------------------------------------------------------- depth: one-shot scores


@torch.no_grad()
def importance(model, sequences, metric: str) -> torch.Tensor:
    """The score [L] of each block, on average over sequences [N, T]."""
    blocks = model.base_model.layers
    scores = []
    if metric == "loss":
        for block in range(len(blocks)):
            with without(model, [f"{block}.{kind}" for kind in pruned.NORMS]):
                scores.append(loss(model, sequences))
        return torch.tensor(scores)

    def see(_block, inputs, after):
        before = inputs[0]  # [N, T, d]
        if metric == "cosine":
            score = 1 - F.cosine_similarity(before, after, dim=-1)
        else:
            score = (after - before).norm(dim=-1) / before.norm(dim=-1)
        scores.append(score.mean().item())

    with pruned.hooked(blocks, see):
        model.base_model(sequences, use_cache=False)
    return torch.tensor(scores)


def least_important(scores: torch.Tensor, sparsity: float) -> list[str]:
    """The sub-layers of the blocks with the lowest scores [L], as many as come nearest to this
    share of all blocks."""
    count = round(sparsity * len(scores))
    lowest = scores.argsort(stable=True)[:count].tolist()
    return [f"{block}.{kind}" for block in lowest for kind in pruned.NORMS]


# ------------------------------------------------------------------------- 2ssp: width, then depth


def two_stage_counts(sparsity: float, blocks: int, width: int, attention: int, ffn: int, main: int):
    """(attentions to remove, neurons to keep in each FFN): the balance of the two stages.

    attention and ffn are the parameters of one of them, main those of all blocks."""
    removed = round(blocks * sparsity ** (ffn / attention / ALPHA))
    by_width = round(sparsity * main) - removed * attention  # parameters left to remove
    fewer = round(by_width / blocks)  # of each FFN
    return removed, round(width * (1 - fewer / ffn))


@torch.no_grad()
def neuron_scores(model, sequences) -> torch.Tensor:
    """[L, n]: the L2 norm of each neuron's outputs over the tokens of a sequence, summed over
    sequences."""
    scores = []

    def see(_projection, inputs, _output):
        scores.append(inputs[0].norm(dim=1).sum(dim=0))  # of [N, T, n]

    with pruned.hooked([block.mlp.down_proj for block in model.base_model.layers], see):
        model.base_model(sequences, use_cache=False)
    return torch.stack(scores)


def cheapest_attentions(model, ids, count: int) -> list[str]:
    """Attentions in the order of their removal: each time the one without which the perplexity on
    ids [1, T] is lowest."""
    left = [f"{block}.self_attn" for block in range(len(model.base_model.layers))]
    removed = []
    for _ in range(count):
        losses = {}
        for name in left:
            with without(model, [*removed, name]):
                losses[name] = loss(model, ids)
        cheapest = min(losses, key=losses.get)
        left.remove(cheapest)
        removed.append(cheapest)
    return removed


def two_stage(model, sequences, sparsity: float) -> list[str]:
    """2ssp: narrow the FFNs of the model, in place; returns the attentions to remove."""
    blocks, width = model.base_model.layers, model.config.intermediate_size
    attention, ffn = size(blocks[0].self_attn), size(blocks[0].mlp)
    removed, kept = two_stage_counts(sparsity, len(blocks), width, attention, ffn, size(blocks))
    best = neuron_scores(model, sequences).topk(kept).indices
    pruned.keep_neurons(model, best.sort().values)
    return cheapest_attentions(model, sequences[:1], removed)


# ------------------------------------------------------------------------- the command


def windows(tokenizer) -> torch.Tensor:
    """[2, SAMPLES, LENGTH] tokens of Python's reference, 0.4 MB of technical English that comes
    with Python: windows spread over its first nine tenths, to calibrate on, and over its last
    tenth, held out."""
    paragraphs = "\n\n".join(topics.values()).split("\n\n")
    text = "\n\n".join(dict.fromkeys(paragraphs))  # each once, so none is in both parts
    tokens = torch.tensor(tokenizer(text)["input_ids"])
    parts = tokens[: len(tokens) * 9 // 10], tokens[len(tokens) * 9 // 10 :]
    starts = [(part, number * len(part) // SAMPLES) for part in parts for number in range(SAMPLES)]
    chosen = [part[start : start + LENGTH] for part, start in starts]
    return torch.stack(chosen).view(2, SAMPLES, LENGTH)


def prune(model, sequences, method: str, sparsity: float, recovery: bool = False):
    """A new, smaller model, calibrated on sequences [N, T]. 2ssp narrows the given one, too."""
    if method == "2ssp":
        removed = two_stage(model, sequences, sparsity)
    else:
        removed = least_important(importance(model, sequences, method), sparsity)
    if not recovery:
        return pruned.rebuild(model, removed)
    return pruned.rebuild(model, removed, RANK, recover(model, sequences, removed, RANK))


def main(
    model: str = "smollm2", sparsity: float = 0.25,
    method: Literal["2ssp", "cosine", "l2", "loss"] = "2ssp", recovery: bool = False,
    out_dir: Path = Path("out/pruned"),
) -> None:  # fmt: skip
    """Prune a model, save it, and print what it lost.

    Args:
        model: smollm2, a .gguf file, a folder, or a hub id
        sparsity: share of the parameters of the blocks to remove
        method: what to remove
        recovery: put a bias and a matrix of rank 32 in place of each removed sub-layer
        out_dir: the new folder
    """
    if out_dir.exists():
        raise InputError(f"--out-dir {out_dir} exists: give another")
    device = choose_device("auto")
    whole, tokenizer = models.load_policy(models.model_folder(model), device)
    whole.set_attn_implementation("sdpa")
    calibration, held_out = windows(tokenizer).to(device)

    def measure(model):
        return size(model), size(model.base_model.layers), math.exp(loss(model, held_out))

    before = measure(whole)
    smaller = prune(whole, calibration, method, sparsity, recovery).to(device)
    smaller.save_pretrained(out_dir)
    tokenizer.save_pretrained(out_dir)
    print(f"{'':20}{'before':>14}{'after':>14}{'ratio':>8}")
    names = ("parameters", "of the blocks", "held-out perplexity")
    for name, old, new in zip(names, before, measure(smaller), strict=True):
        print(f"{name:20}{old:14,.6g}{new:14,.6g}{new / old:8.3f}")
    print(f"{out_dir} is of type {smaller.config.model_type}")


if __name__ == "__main__":
    try:
        tyro.cli(main)
    except InputError as problem:
        sys.exit(f"error: {problem}")
