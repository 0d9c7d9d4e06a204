"""
Structured pruning: take neurons, attentions or whole blocks out of a language model for good.

    python -m related.structured --model smollm2 --sparsity 0.25 --method 2ssp --out-dir out/2ssp

2ssp (arXiv:2501.17771) narrows every FFN to the same number of neurons, then removes attentions one
by one. The depth metrics (arXiv:2407.16286) score each block once, on the whole model, and the
blocks with the lowest scores go:

    cosine, l1, l2   how far the block moves the hidden state: 1 - cosine, |f(h)| / |h|
    logit, loss      how far the logits (L2) and the loss move if this block alone is gone
    shapley          what the block takes off the loss of random halves of all blocks, on average
    random           no metric, to compare with

What is removed adds nothing to the residual stream, or with --recovery what recovery.py fits.

DPPO's weights keep the expected gradient what it was. Here nothing does: a pruned model is another
function, which only training mends. The scores are means over a little text, and scores on the
whole model do not see what else goes.

Letters: N sequences of T tokens, d hidden size, V vocabulary, L blocks, n neurons of an FFN.
"""

import copy
import math
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
from runtime.timer import clock
from tasks import gguf

DISTANCES = ("cosine", "l1", "l2")
METHODS = ("2ssp", *DISTANCES, "logit", "loss", "shapley", "random")
RANKS = {"none": None, "bias": 0, "lowrank": 32}  # of --recovery: what stands in, see pruned.py
ALPHA = 1.5  # of 2ssp, as published; with more, more attentions and fewer neurons go
SUBNETWORKS = 10  # of shapley, as published


# ------------------------------------------------------------------------- depth: one-shot scores


@torch.no_grad()
def importance(model, sequences, metric: str) -> torch.Tensor:
    """The score [L] of each block on sequences [N, T]; metric is one of METHODS, but not 2ssp."""
    blocks = len(model.base_model.layers)
    generator = torch.Generator().manual_seed(0)
    if metric == "random":
        return torch.rand(blocks, generator=generator)
    if metric == "shapley":
        return shapley(model, sequences, generator)
    names = stream.all_names(model)
    scores = torch.zeros(blocks)
    for ids in sequences.split(1):
        states = stream.states(model, stream.embed(model, ids), names)
        hidden = states[::2]  # before each block, and after the last one
        whole = stream.logits(model, hidden[-1])
        for block in range(blocks):
            if metric in DISTANCES:
                score = distance(metric, hidden[block], hidden[block + 1])
            else:
                left = names[2 * block + 2 :]  # the sub-layers of the blocks that follow
                last = stream.states(model, hidden[block], left)[-1]
                score = damage(metric, whole, stream.logits(model, last), ids)
            scores[block] += score
    return scores / len(sequences)


def distance(metric: str, before: torch.Tensor, after: torch.Tensor) -> float:
    """How far a block moves hidden states [1, T, d], on average over tokens."""
    if metric == "cosine":
        return (1 - F.cosine_similarity(before, after, dim=-1)).mean().item()
    p = int(metric[1])  # of l1 and l2
    return ((after - before).norm(p, dim=-1) / before.norm(p, dim=-1)).mean().item()


def damage(metric: str, whole: torch.Tensor, without: torch.Tensor, ids) -> float:
    """How far the logits [1, T, V] or the loss are off without a block."""
    if metric == "logit":
        return (without - whole).norm(dim=-1).mean().item()
    return stream.loss(without, ids) - stream.loss(whole, ids)


def shapley(model, sequences, generator) -> torch.Tensor:
    """[L]: the mean loss of subnetworks without a block, minus that of those with it.

    Each is a random half of the blocks. They come in pairs of complements (ours), so that every
    block is in as many as it is not in."""
    blocks = len(model.base_model.layers)
    scores = torch.zeros(blocks)
    for _ in range(SUBNETWORKS // 2):
        half = torch.rand(blocks, generator=generator).argsort() < blocks // 2
        for present in (half, ~half):
            names = [name for name in stream.all_names(model) if present[int(name.split(".")[0])]]
            loss = stream.mean_loss(model, sequences, names)
            scores += torch.where(present, -loss, loss)
    return scores / (SUBNETWORKS // 2)


def least_important(scores: torch.Tensor, sparsity: float) -> list[str]:
    """The sub-layers of the blocks with the lowest scores [L], as many as come nearest to this
    share of all blocks."""
    blocks = len(scores)
    count = round(sparsity * blocks)
    if not 0 < count < blocks:
        raise InputError(f"--sparsity {sparsity}: of {blocks} blocks, 1 to {blocks - 1} can go")
    lowest = scores.argsort(stable=True)[:count].tolist()
    return [f"{block}.{kind}" for block in lowest for kind in pruned.NORMS]


# ------------------------------------------------------------------------- 2ssp: width, then depth


def two_stage_counts(sparsity: float, blocks: int, width: int, attention: int, ffn: int, main: int):
    """(attentions to remove, neurons to keep in each FFN): the balance of the two stages.

    attention and ffn are the parameters of one of them, main those of all blocks."""
    removed = round(blocks * sparsity ** (ffn / attention / ALPHA))
    by_width = round(sparsity * main) - removed * attention  # parameters left to remove
    fewer = round(by_width / blocks)  # of each FFN
    kept = round(width * (1 - fewer / ffn))
    if removed >= blocks or not 0 < kept <= width:
        left = f"{blocks - removed} of {blocks} attentions and {kept} of {width} neurons"
        raise InputError(f"--sparsity {sparsity}: 2ssp would keep {left}")
    return removed, kept


@torch.no_grad()
def neuron_scores(model, sequences) -> torch.Tensor:
    """[L, n]: the L2 norm of each neuron's outputs over the tokens of a sequence, on average."""
    names = stream.all_names(model)
    scores = torch.zeros(len(names) // 2, model.config.intermediate_size)
    for ids in sequences.split(1):
        states = stream.states(model, stream.embed(model, ids), names)
        for block, h in enumerate(states[1::2]):  # before each FFN
            mlp, norm = stream.parts(model, f"{block}.mlp")
            outputs = mlp.act_fn(mlp.gate_proj(norm(h))) * mlp.up_proj(norm(h))  # [1, T, n]
            scores[block] += outputs[0].norm(dim=0).cpu()
    return scores / len(sequences)


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


def windows(file: Path | None, tokenizer, samples: int, length: int) -> torch.Tensor:
    """[2, samples, length] tokens: windows spread over the first nine tenths of a text, to
    calibrate on, and over its last tenth, held out. Without a file, the text is Python's own
    reference, 0.4 MB of technical English that comes with Python."""
    text = file.read_text(encoding="utf-8") if file else "\n\n".join(topics.values())
    paragraphs = dict.fromkeys(text.split("\n\n"))  # each once, so none is in both parts
    tokens = torch.tensor(tokenizer("\n\n".join(paragraphs))["input_ids"])
    parts = tokens[: len(tokens) * 9 // 10], tokens[len(tokens) * 9 // 10 :]
    if len(parts[1]) < samples * length:
        problem = f"{samples} windows of {length} tokens do not fit: {len(parts[1])} are held out"
        raise InputError(f"--data {file}: {problem}")
    starts = [(part, number * len(part) // samples) for part in parts for number in range(samples)]
    found = [part[start : start + length] for part, start in starts]
    return torch.stack(found).view(2, samples, length)


def prune(model, sequences, method: str, sparsity: float, rank: int | None = None):
    """A new, smaller model, calibrated on sequences [N, T]. Rank is that of what stands in for a
    removed sub-layer, see pruned.py."""
    if model.config.model_type not in pruned.FAMILIES:
        families = ", ".join(pruned.FAMILIES)
        raise InputError(f"--model is of type {model.config.model_type}: use one of {families}")
    if not 0 < sparsity < 1:
        raise InputError(f"--sparsity {sparsity}: must be above 0 and below 1")
    if method == "2ssp":
        model = copy.deepcopy(model)  # it is narrowed in place
        removed = two_stage(model, sequences, sparsity)
    else:
        removed = least_important(importance(model, sequences, method), sparsity)
    tensors = {} if rank is None else recover(model, sequences, removed, rank)
    return pruned.rebuild(model, removed, rank, tensors)


def main(
    model: str = "smollm2", sparsity: float = 0.25, method: Literal[METHODS] = "2ssp",
    recovery: Literal[tuple(RANKS)] = "none", data: Path | None = None, samples: int = 16,
    tokens: int = 256, out_dir: Path = Path("out/pruned"),
) -> None:  # fmt: skip
    """Prune a model, save it, and print what it lost.

    Args:
        model: smollm2, a .gguf file, a folder, or a hub id
        sparsity: share of the parameters of the blocks to remove
        method: what to remove
        recovery: what stands in for a removed sub-layer
        data: a text file, of which a tenth is held out to evaluate on; default: Python's reference
        samples: sequences to calibrate on, and to evaluate on
        tokens: of a sequence
        out_dir: the new folder
    """
    if out_dir.exists():
        raise InputError(f"--out-dir {out_dir} exists: give another")
    device = choose_device("auto")
    whole, tokenizer = models.load_policy(gguf.model_folder(model), device)
    whole.set_attn_implementation("sdpa")
    calibration, held_out = windows(data, tokenizer, samples, tokens).to(device)
    started = clock(device)
    smaller = prune(whole, calibration, method, sparsity, RANKS[recovery]).to(device)
    seconds = clock(device) - started
    smaller.save_pretrained(out_dir)
    tokenizer.save_pretrained(out_dir)
    print(f"{'':20}{'before':>14}{'after':>14}{'ratio':>8}")
    for name, measure in (
        ("parameters", stream.size),
        ("of the blocks", lambda one: stream.size(one.base_model.layers)),
        ("held-out perplexity", lambda one: math.exp(stream.mean_loss(one, held_out))),
    ):
        before, after = measure(whole), measure(smaller)
        print(f"{name:20}{before:14,.6g}{after:14,.6g}{after / before:8.3f}")
    print(f"{seconds:.1f} s of pruning; {out_dir} is of type {smaller.config.model_type}")


if __name__ == "__main__":
    try:
        tyro.cli(main)
    except InputError as problem:
        print(f"error: {problem}", file=sys.stderr)
        sys.exit(2)
