"""
Structured pruning: take neurons, attentions or whole blocks out of a language model for good.

    python -m related.structured --model smollm2 --sparsity 0.25 --method 2ssp --out-dir out-2ssp

2ssp (arXiv:2501.17771) narrows every FFN to the same number of neurons, then removes attentions one
by one. depth (arXiv:2407.16286) scores each block once, on the whole model, by the loss if this
block alone is gone, and the blocks with the lowest scores go.

What is removed adds nothing to the residual stream. With --recovery something stands in for it
(after arXiv:2407.16286, whose code is not public): the map of rank r of its normed input, and the
bias, that come nearest to what it added.

DPPO's weights keep the expected gradient what it was. Here nothing does: a pruned model is another
function, which only training mends. The scores are means over a little text, and scores on the
whole model do not see what else goes.

A sub-layer is named by its block and its kind: "3.self_attn", "3.mlp". Letters: N sequences of T
tokens, m in all, L blocks, n neurons of an FFN, d hidden size, r rank.
"""

import math
import sys
from pathlib import Path
from pydoc_data.topics import topics
from typing import Literal

import torch
import tyro

import models
from related import pruned
from runtime import InputError
from runtime.device import choose_device

RANK = 32  # of what --recovery puts in place of a removed sub-layer
RIDGE = 1e-3  # of its fit, relative to the inputs' mean square
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


def block_losses(model, sequences) -> torch.Tensor:
    """The loss [L] on sequences [N, T] without each block."""
    losses = []
    for block in range(len(model.base_model.layers)):
        with without(model, [f"{block}.{kind}" for kind in pruned.NORMS]):
            losses.append(loss(model, sequences))
    return torch.tensor(losses)


# ------------------------------------------------------------------------- 2ssp: width, then depth


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
    removed = round(len(blocks) * sparsity ** (ffn / attention / ALPHA))
    by_width = round(sparsity * size(blocks)) - removed * attention  # parameters left to remove
    fewer = round(by_width / len(blocks))  # of each FFN
    kept = round(width * (1 - fewer / ffn))  # neurons of each FFN
    best = neuron_scores(model, sequences).topk(kept).indices
    pruned.keep_neurons(model, best.sort().values)
    return cheapest_attentions(model, sequences[:1], removed)


# ------------------------------------------------------------------------- recovery


@torch.no_grad()
def recover(model, sequences, removed: list[str], rank: int) -> dict:
    """The tensors of the stand-ins of removed sub-layers, for `pruned.rebuild`.

    One forward of the sequences [N, T] fits them all, and goes on with what each stand-in adds. So
    each is fitted to what its sub-layer would add behind the stand-ins before it."""
    name_of = {pruned.sublayer(model, name): name for name in removed}
    tensors = {}

    def stand_in(sublayer, args, kwargs, output):
        x = args[0] if args else kwargs["hidden_states"]  # [N, T, d]
        is_attention = isinstance(output, tuple)
        change = output[0] if is_attention else output
        bias, down, up = fit(x.flatten(0, 1).double(), change.flatten(0, 1).double(), rank)
        fitted = {"bias": bias, "down.weight": down, "up.weight": up}
        for part, tensor in fitted.items():
            tensors[f"model.layers.{name_of[sublayer]}.{part}"] = tensor.to(x)
        change = (bias + x.double() @ down.T @ up.T).to(x)
        return (change, *output[1:]) if is_attention else change

    with pruned.hooked(name_of, stand_in, with_kwargs=True):
        model.base_model(sequences, use_cache=False)
    return tensors


def fit(x, y, rank: int, ridge: float = RIDGE):
    """(bias [d], down [r, d], up [d, r]) with bias + up down x nearest to y; x, y [m, d].

    Reduced-rank ridge regression: of all maps of this rank, the least squared error plus a penalty
    on the squared norm of up down, whose weight is ridge times the sum of squares of x, over d."""
    center, bias = x.mean(dim=0), y.mean(dim=0)
    x = x - center  # then the mean of y does not matter
    gram = x.T @ x
    cross = x.T @ y
    penalty = ridge * gram.trace() / len(gram)
    full = torch.linalg.solve(gram + penalty * torch.eye(len(gram)).to(gram), cross)  # [d, d]
    # Among maps of rank r, the penalized error falls by the eigenvalues that they keep.
    up = torch.linalg.eigh(cross.T @ full).eigenvectors[:, -rank:]  # ascending
    down = (full @ up).T
    return bias - up @ (down @ center), down, up


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
        scores = block_losses(model, sequences)
        lowest = scores.argsort(stable=True)[: round(sparsity * len(scores))].tolist()
        removed = [f"{block}.{kind}" for block in lowest for kind in pruned.NORMS]
    if not recovery:
        return pruned.rebuild(model, removed)
    return pruned.rebuild(model, removed, RANK, recover(model, sequences, removed, RANK))


def main(
    model: str = "smollm2", sparsity: float = 0.25,
    method: Literal["2ssp", "depth"] = "2ssp", recovery: bool = False,
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
    blocks, before = size(whole.base_model.layers), loss(whole, held_out)
    smaller = prune(whole, calibration, method, sparsity, recovery).to(device)
    smaller.save_pretrained(out_dir)
    tokenizer.save_pretrained(out_dir)
    removed, after = 1 - size(smaller.base_model.layers) / blocks, loss(smaller, held_out)
    print(f"removed {removed:.1%} of the blocks' parameters: type {smaller.config.model_type}")
    print(f"held-out perplexity {math.exp(before):.4g}, then {math.exp(after):.4g}")


if __name__ == "__main__":
    try:
        tyro.cli(main)
    except InputError as problem:
        sys.exit(f"error: {problem}")
