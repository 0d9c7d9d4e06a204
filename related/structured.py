"""
Structured pruning: take neurons, attentions or whole blocks out of a language model for good.

    python -m related.structured --model smollm2 --sparsity 0.25 --method 2ssp --out-dir out-2ssp

2ssp (arXiv:2501.17771) narrows every FFN to the same number of neurons, then removes attentions one
by one. The depth metrics (arXiv:2407.16286) score each block once, on the whole model, and the
blocks with the lowest scores go:

    cosine, l2   how far the block moves the hidden state: 1 - cosine, |f(h)| / |h|
    loss         the loss if this block alone is gone

What is removed adds nothing to the residual stream, or with --recovery what recovery.py fits.

DPPO's weights keep the expected gradient what it was. Here nothing does: a pruned model is another
function, which only training mends. The scores are means over a little text, and scores on the
whole model do not see what else goes.

Letters: N sequences of T tokens, d hidden size, V vocabulary, L blocks, n neurons of an FFN.
"""

import itertools
import math
import statistics
import sys
from pathlib import Path
from pydoc_data.topics import topics
from typing import Literal

import torch
import torch.nn.functional as F
import tyro

import models
from related import pruned, stream
from related.recovery import recover
from runtime import InputError
from runtime.device import choose_device

RANK = 32  # of what --recovery puts in place of a removed sub-layer
ALPHA = 1.5  # of 2ssp, as published; with more, more attentions and fewer neurons go
SAMPLES, LENGTH = 16, 256  # windows of text to calibrate on, as many to evaluate on; their tokens


# ------------------------------------------------------------------------- depth: one-shot scores


@torch.no_grad()
def importance(model, sequences, metric: str) -> torch.Tensor:
    """The score [L] of each block, on average over sequences [N, T]."""
    names = stream.all_names(model)
    scores = torch.zeros(len(names) // 2)
    for ids in sequences.split(1):
        hidden = stream.states(model, stream.embed(model, ids), names)[::2]  # around each block
        for block, (before, after) in enumerate(itertools.pairwise(hidden)):
            if metric == "cosine":
                score = (1 - F.cosine_similarity(before, after, dim=-1)).mean().item()
            elif metric == "l2":
                score = ((after - before).norm(dim=-1) / before.norm(dim=-1)).mean().item()
            else:
                last = stream.states(model, before, names[2 * block + 2 :])[-1]
                score = stream.loss(stream.logits(model, last), ids)
            scores[block] += score
    return scores / len(sequences)


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
    names = stream.all_names(model)
    scores = torch.zeros(len(names) // 2, model.config.intermediate_size)
    for ids in sequences.split(1):
        states = stream.states(model, stream.embed(model, ids), names)
        for block, h in enumerate(states[1::2]):  # before each FFN
            mlp, norm = stream.parts(model, f"{block}.mlp")
            outputs = mlp.act_fn(mlp.gate_proj(norm(h))) * mlp.up_proj(norm(h))  # [1, T, n]
            scores[block] += outputs[0].norm(dim=0).cpu()
    return scores


@torch.no_grad()
def cheapest_attentions(model, ids, count: int) -> list[str]:
    """Attentions in the order of their removal: each time the one without which the perplexity on
    ids [1, T] is lowest."""
    removed = []
    while len(removed) < count:
        names = [name for name in stream.all_names(model) if name not in removed]
        states = stream.states(model, stream.embed(model, ids), names)
        losses = {}
        for place, name in enumerate(names):
            if name.endswith("self_attn"):
                last = stream.states(model, states[place], names[place + 1 :])[-1]
                losses[name] = stream.loss(stream.logits(model, last), ids)
        removed.append(min(losses, key=losses.get))
    return removed


def two_stage(model, sequences, sparsity: float) -> list[str]:
    """2ssp: narrow the FFNs of the model, in place; returns the attentions to remove."""
    blocks, width = len(model.base_model.layers), model.config.intermediate_size
    attention, ffn = (stream.size(stream.parts(model, f"0.{kind}")[0]) for kind in pruned.NORMS)
    main = stream.size(model.base_model.layers)
    removed, kept = two_stage_counts(sparsity, blocks, width, attention, ffn, main)
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
    if model.config.model_type not in pruned.FAMILIES:
        families = ", ".join(pruned.FAMILIES)
        raise InputError(f"--model is of type {model.config.model_type}: use one of {families}")
    if not 0 < sparsity < 1:
        raise InputError(f"--sparsity {sparsity}: must be above 0 and below 1")
    if method == "2ssp":
        removed = two_stage(model, sequences, sparsity)
    else:
        removed = least_important(importance(model, sequences, method), sparsity)
    if not recovery:
        return pruned.rebuild(model, removed)
    return pruned.rebuild(model, removed, RANK, recover(model, sequences, removed, RANK))


@torch.no_grad()
def sizes_and_perplexity(model, sequences) -> list[float]:
    losses = [stream.loss(model(ids, use_cache=False).logits, ids) for ids in sequences.split(1)]
    blocks = model.base_model.layers
    return [stream.size(model), stream.size(blocks), math.exp(statistics.mean(losses))]


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
    before = sizes_and_perplexity(whole, held_out)
    smaller = prune(whole, calibration, method, sparsity, recovery).to(device)
    smaller.save_pretrained(out_dir)
    tokenizer.save_pretrained(out_dir)
    print(f"{'':20}{'before':>14}{'after':>14}{'ratio':>8}")
    names = ("parameters", "of the blocks", "held-out perplexity")
    for name, old, new in zip(names, before, sizes_and_perplexity(smaller, held_out), strict=True):
        print(f"{name:20}{old:14,.6g}{new:14,.6g}{new / old:8.3f}")
    print(f"{out_dir} is of type {smaller.config.model_type}")


if __name__ == "__main__":
    try:
        tyro.cli(main)
    except InputError as problem:
        sys.exit(f"error: {problem}")
