"""
Structured pruning: take neurons, attentions, FFNs or blocks out of a language model for good.

    python -m related.structured --model smollm2 --sparsity 0.25 --method 2ssp --out-dir out/2ssp

2ssp (arXiv:2501.17771) narrows every FFN to the same number of neurons, then removes attentions one
by one. The depth metrics (arXiv:2407.16286) score blocks, attentions or FFNs once, on the whole
model, and those with the lowest scores go:

    cosine, l1, l2   how far the unit moves the hidden state: 1 - cosine, |f(h)| / |h|
    logit, loss      how far the logits (L2) and the loss move if this unit alone is gone
    shapley          what the unit takes off the loss of random halves of all units, on average
    random           no metric, to compare with

A removed sub-layer adds nothing to the residual stream, or with --recovery what recovery.py fits.

DPPO's weights keep the expected gradient what it was. Here nothing does: a pruned model is another
function, which only training mends. The scores are means over a little text, and one-shot scores do
not see what else goes.

Letters: N sequences of T tokens, d hidden size, L blocks, U units (tuples of names of sub-layers),
n neurons of an FFN.
"""

import copy
import math
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
import tyro

import models
from related import pruned, stream, text
from related.recovery import recover
from runtime import InputError
from runtime.device import choose_device
from runtime.timer import clock
from tasks import gguf

DISTANCES = ("cosine", "l1", "l2")
METHODS = ("2ssp", *DISTANCES, "logit", "loss", "shapley", "random")
UNITS = {"blocks": ("self_attn", "mlp"), "attention": ("self_attn",), "ffn": ("mlp",)}
RECOVERIES = ("none", "bias", "lowrank")
ALPHA = 1.5  # of 2ssp, as published; with more, more attentions and fewer neurons go
SUBNETWORKS = 10  # of shapley, as published


# ------------------------------------------------------------------------- depth: one-shot scores


def units_of(model, kind: str) -> list[tuple[str, ...]]:
    """What is removed as one: [U] tuples of sub-layers; kind is one of UNITS."""
    blocks = range(len(model.base_model.layers))
    return [tuple(f"{block}.{part}" for part in UNITS[kind]) for block in blocks]


@torch.no_grad()
def importance(model, sequences, units, metric: str, seed: int = 0) -> torch.Tensor:
    """The scores [U] of units on sequences [N, T]; metric is one of METHODS, but not 2ssp."""
    generator = torch.Generator().manual_seed(seed)
    if metric == "random":
        return torch.rand(len(units), generator=generator)
    if metric == "shapley":
        return shapley(model, sequences, units, generator)
    names, scores = stream.all_names(model), torch.zeros(len(units), device=model.device)
    for ids in sequences.split(1):
        states = stream.states(model, stream.embed(model, ids), names)
        whole = None if metric in DISTANCES else stream.logits(model, states[-1])
        for u, unit in enumerate(units):
            start, end = names.index(unit[0]), names.index(unit[-1]) + 1
            before, after = states[start], states[end]
            if metric == "cosine":
                scores[u] += 1 - F.cosine_similarity(before, after, dim=-1).mean()
            elif metric in DISTANCES:
                p = int(metric[1])
                scores[u] += ((after - before).norm(p, -1) / before.norm(p, -1)).mean()
            else:
                without = stream.logits(model, stream.states(model, before, names[end:])[-1])
                if metric == "logit":
                    scores[u] += (without - whole).norm(dim=-1).mean()
                else:
                    scores[u] += stream.loss(without, ids) - stream.loss(whole, ids)
    return scores.cpu() / len(sequences)


def shapley(model, sequences, units, generator) -> torch.Tensor:
    """[U]: the mean loss of subnetworks without a unit, minus that of those with it.

    Each is a random half of the units. They come in pairs of complements (ours), so that every unit
    is in as many as it is not in."""
    losses, signs = [], []
    for _ in range(SUBNETWORKS // 2):
        half = torch.rand(len(units), generator=generator).argsort() < len(units) // 2
        for present in (half, ~half):
            absent = {name for u in (~present).nonzero()[:, 0].tolist() for name in units[u]}
            left = [name for name in stream.all_names(model) if name not in absent]
            losses.append(stream.mean_loss(model, sequences, left))
            signs.append(1 - 2 * present.float())
    return torch.tensor(losses) @ torch.stack(signs) / (SUBNETWORKS // 2)


def least_important(model, units, scores, sparsity: float) -> list[str]:
    """The sub-layers of the units with the lowest scores [U], as many units as come nearest to this
    share of the blocks' parameters."""
    unit = stream.size(*(part for name in units[0] for part in stream.parts(model, name)))
    share = unit / stream.size(model.base_model.layers)
    count = round(sparsity / share)
    if not 0 < count < len(units):
        span = f"{share:.3f} to {share * (len(units) - 1):.3f}"
        raise InputError(f"--sparsity {sparsity}: from {span} of the blocks can go in these units")
    return [name for u in scores.argsort(stable=True)[:count].tolist() for name in units[u]]


# ------------------------------------------------------------------------- 2ssp: width, then depth


def two_stage_counts(sparsity: float, blocks: int, width: int, attention: int, ffn: int, main: int):
    """(attentions to remove, neurons to keep in each FFN): the balance of the two stages.

    attention and ffn are the parameters of one of them, main those of all blocks."""
    removed = round(blocks * sparsity ** (ffn / attention / ALPHA))
    fewer = round((round(sparsity * main) - removed * attention) / blocks)  # parameters of an FFN
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
        states, losses = stream.states(model, stream.embed(model, ids), names), {}
        for place, name in enumerate(names):
            if name.endswith("self_attn"):
                last = stream.states(model, states[place], names[place + 1 :])[-1]
                losses[name] = stream.loss(stream.logits(model, last), ids)
        removed.append(min(losses, key=losses.get))
    return removed


def two_stage(model, sequences, sparsity: float) -> list[str]:
    """2ssp: narrow the FFNs of the model, in place; returns the attentions to remove."""
    blocks, width = len(model.base_model.layers), model.config.intermediate_size
    counts = (stream.size(stream.parts(model, f"0.{kind}")[0]) for kind in ("self_attn", "mlp"))
    main = stream.size(model.base_model.layers)
    attentions, neurons = two_stage_counts(sparsity, blocks, width, *counts, main)
    pruned.keep_neurons(model, neuron_scores(model, sequences).topk(neurons).indices.sort().values)
    return cheapest_attentions(model, sequences[:1], attentions)


# ------------------------------------------------------------------------- the command


def prune(model, sequences, method, sparsity, units="blocks", recovery="none", rank=32, seed=0):
    """A new, smaller model, by the flags of `main`. Raises InputError for bad values."""
    wants = {
        "method": (method, METHODS), "units": (units, UNITS), "recovery": (recovery, RECOVERIES),
        "model of type": (model.config.model_type, pruned.FAMILIES),
    }  # fmt: skip
    for flag, (value, allowed) in wants.items():
        if value not in allowed:
            raise InputError(f"--{flag} {value}: use one of {', '.join(allowed)}")
    if not 0 < sparsity < 1:
        raise InputError(f"--sparsity {sparsity}: must be above 0 and below 1")
    if recovery == "lowrank" and not 0 < rank <= model.config.hidden_size:
        raise InputError(f"--rank {rank}: use 1 to the hidden size, {model.config.hidden_size}")
    if method == "2ssp" and units != "blocks":
        raise InputError(f"--units {units}: 2ssp has its own, neurons and attentions; leave it out")
    if method == "2ssp":
        model = copy.deepcopy(model)
        removed = two_stage(model, sequences, sparsity)
    else:
        candidates = units_of(model, units)
        scores = importance(model, sequences, candidates, method, seed)
        removed = least_important(model, candidates, scores, sparsity)
    rank = {"none": None, "bias": 0, "lowrank": rank}[recovery]
    tensors = {} if rank is None else recover(model, sequences, removed, rank)
    return pruned.rebuild(model, removed, rank, tensors)


def main(
    model: str = "smollm2", sparsity: float = 0.25, method: str = "2ssp", units: str = "blocks",
    recovery: str = "none", rank: int = 32, data: str = "words", samples: int = 16,
    tokens: int = 256, seed: int = 0, out_dir: Path = Path("out/pruned"),
) -> None:  # fmt: skip
    """Prune a model, save it, and print what it lost.

    Args:
        model: smollm2, a .gguf file, a folder, or a hub id
        sparsity: share of the parameters of the blocks to remove
        method: 2ssp, cosine, l1, l2, logit, loss, shapley or random
        units: what all methods but 2ssp remove: blocks, attention or ffn
        recovery: what stands in for a removed sub-layer: none, bias or lowrank
        rank: of lowrank
        data: text to calibrate and to evaluate on: words, python-docs, or others of text.py
        samples: sequences to calibrate on, and to evaluate on
        tokens: of a sequence
        seed: of shapley and random
        out_dir: the new folder
    """
    if out_dir.exists():
        raise InputError(f"--out-dir {out_dir} exists: give another")
    device = choose_device("auto")
    policy, tokenizer = models.load_policy(gguf.model_folder(model), device)
    policy.set_attn_implementation("sdpa")
    calibration, held_out = text.read(data, tokenizer, samples, tokens).to(device)
    started = clock(device)
    smaller = prune(policy, calibration, method, sparsity, units, recovery, rank, seed).to(device)
    seconds = clock(device) - started
    smaller.save_pretrained(out_dir)
    tokenizer.save_pretrained(out_dir)
    print(f"{'':20}{'before':>14}{'after':>14}{'ratio':>8}")
    for name, count in (
        ("parameters", stream.size),
        ("of the blocks", lambda one: stream.size(one.base_model.layers)),
        ("held-out perplexity", lambda one: math.exp(stream.mean_loss(one, held_out))),
    ):
        before, after = count(policy), count(smaller)
        print(f"{name:20}{before:14,.6g}{after:14,.6g}{after / before:8.3f}")
    print(f"{seconds:.1f} s of pruning; {out_dir} is of type {smaller.config.model_type}")


if __name__ == "__main__":
    try:
        tyro.cli(main)
    except InputError as problem:
        print(f"error: {problem}", file=sys.stderr)
        sys.exit(2)
