"""
The update: the gradient of what was kept, pack by pack, summed over ranks.

Every sequence carries its own multiplier (weight over denominator), fixed before this file sees it.
So the sum does not depend on how sequences are packed, or on which rank holds them.

Letters: K prompts of all ranks, k of them sampled by this rank, G completions each, T
max_new_tokens, N completion tokens of a pack.
"""

import itertools
import math
from typing import NamedTuple

import torch
from tqdm import tqdm

import dppo
import lora
import packing
from runtime import ranks
from runtime.device import autocast, send


class Sequence(NamedTuple):
    """A kept completion with its prompt. It may travel to another rank."""

    group: int  # of its prompt, among the K, or the k of this rank
    place: int  # in the flattened tables: [K * G], or [k * G] of this rank
    prompt: list[int]
    completion: list[int]
    logprobs: torch.Tensor  # [tokens of the completion], the engine's
    old_logprobs: torch.Tensor  # likewise, what its ratios compare with


class UpdateStats(NamedTuple):
    """Sums over an update, of completion tokens where nothing else is said. To add one, name it
    here and in accumulate_gradients, in its place."""

    loss: float  # with the full batch's denominator, the KL term included
    kl: float  # the KL term alone, before beta
    clipped: float  # tokens on which the clip acts
    gap: float  # |trainer's log-prob - engine's|, nats
    importance: float  # importance ratios, before the cap
    capped: float  # tokens whose ratio is above it
    entropy: float  # nats
    completion_tokens: float
    tokens: float  # forwarded, prompts included
    slots: float  # room in the slots, in tokens, padding included


def accumulate_gradients(
    model, rollouts, advantages, multiplier, keep, *, cfg, old_logprobs, mine=None, reference=None
) -> UpdateStats:
    """Add the gradient of every kept sequence of all ranks to .grad; returns the sums of all ranks.

    advantages, multiplier and keep are [K, G] and the same on every rank. `rollouts` hold the
    groups `mine` [k], by default all. The loss of each token is multiplied by its sequence's
    multiplier, weights over denominator, and by nothing that depends on the pack, so any layout
    gives the same gradient. With cfg.beta, `reference` is the frozen model of the KL term.

    Ratios compare with `old_logprobs` [k, G, T], or with the current ones if None. With
    cfg.importance_cap each token is also multiplied by its importance ratio: its probability under
    the trainer over the engine's.
    """
    mine = torch.arange(len(keep)) if mine is None else mine
    sequences = share_out(kept_sequences(rollouts, keep, mine, old_logprobs))
    advantages, multiplier = advantages.double().flatten(), multiplier.double().flatten()  # [K * G]

    measured = []  # of each pack, on the device
    for pack, members in packs(sequences, cfg, model.device):
        lengths = torch.tensor([len(sequence.completion) for sequence in members], dtype=torch.long)
        place = torch.tensor([sequence.place for sequence in members], dtype=torch.long)
        place = place.repeat_interleave(lengths)  # [N]
        columns = [
            torch.cat([sequence.logprobs for sequence in members] or [torch.zeros(0)]).double(),
            torch.cat([sequence.old_logprobs for sequence in members] or [torch.zeros(0)]).double(),
            advantages[place],
            multiplier[place],
        ]
        per_token = send(torch.stack(columns), model.device)  # [4, N]

        logprobs, entropy = packed_logprobs(model, pack, cfg)  # [N], [N]
        now = logprobs.detach()
        per_token = per_token.to(now.dtype)
        engine_logprobs, old, advantage, token_multiplier = per_token  # [N] each
        if old_logprobs is None:
            old = now
        importance = torch.ones_like(now)  # [N]
        if cap := cfg.importance_cap:
            # At most e^20: above any cap, but the logged mean stays finite.
            importance = (old - engine_logprobs).clamp(max=20.0).exp()
            token_multiplier = token_multiplier * importance.clamp(max=cap)
        loss, clipped = dppo.token_loss(
            logprobs, old, advantage, pack.owner, loss=cfg.loss, eps_low=cfg.eps_low,
            eps_high=cfg.eps_high, num_sequences=pack.num_sequences,
        )  # [N], [N]  # fmt: skip
        kl = torch.zeros_like(loss)  # [N]
        if cfg.beta:
            with torch.no_grad(), lora.base_alone(reference):
                ref_logprobs, _ = packed_logprobs(reference, pack, cfg)  # [N]
            kl = dppo.kl_k3(logprobs, ref_logprobs)
        # It multiplies after the clip, so it cannot move the clip.
        total = ((loss + cfg.beta * kl) * token_multiplier).sum()
        total.backward()

        if not members:  # a dummy pack, which FSDP needs
            continue
        tokens = pack.input_ids.shape[1]
        figures = [  # in the order of UpdateStats
            total, (kl * token_multiplier).sum(), clipped.sum(),
            (now - engine_logprobs).abs().sum(), importance.sum(),
            (importance > (cap or math.inf)).sum(), entropy.sum(), torch.ones_like(now).sum(),
            now.new_full((), tokens), now.new_full((), max(tokens, cfg.pack_tokens)),
        ]  # fmt: skip
        measured.append(torch.stack([figure.detach() for figure in figures]))

    ranks.sum_gradients(model)
    sums = torch.zeros(len(UpdateStats._fields), dtype=torch.float64)
    if measured:
        # Read only now: in the loop, the host would wait for the device.
        sums = torch.stack(measured).cpu().double().sum(dim=0)  # of [packs, figures]
    return UpdateStats(*ranks.all_reduce(sums).tolist())


@torch.no_grad()
def trainer_logprobs(model, rollouts, cfg, keep=None) -> torch.Tensor:
    """The sampled tokens' log-probs [k, G, T] in the trainer's arithmetic; 0 past the end, and for
    completions that keep [k, G] leaves out."""
    keep = torch.ones_like(rollouts.truncated) if keep is None else keep
    sequences = kept_sequences(rollouts, keep, torch.arange(len(keep)))
    table = rollouts.logprobs.new_zeros(rollouts.logprobs.shape)
    for pack, members in packs(sequences, cfg, model.device):
        logprobs = packed_logprobs(model, pack, cfg)[0].to(table)  # [N]
        lengths = [len(sequence.completion) for sequence in members]
        # A dummy pack has log-probs of no member.
        for sequence, part in zip(members, logprobs.split(lengths), strict=False):
            table.view(-1, table.shape[2])[sequence.place, : len(part)] = part
    return table


def packed_logprobs(model, pack, cfg):
    """(log-probs, entropies) [N] of a pack's completion tokens, in the run's arithmetic."""
    with autocast(cfg):
        if ranks.is_sharded(model):  # a method, which gathers the weights: see models.shard
            return model.packed_logprobs(pack, temperature=cfg.temperature)
        return packing.packed_logprobs(model, pack, temperature=cfg.temperature)


def kept_sequences(rollouts, keep, mine, old_logprobs=None) -> list[Sequence]:
    """What is kept of the groups `mine` [k] of this rank, in their order; keep [K, G]."""
    old_logprobs = rollouts.logprobs if old_logprobs is None else old_logprobs
    G = keep.shape[1]
    sequences = []
    for row, g in keep[mine].nonzero().tolist():
        length = rollouts.lengths[row, g].item()
        sequences.append(
            Sequence(
                group=mine[row].item(),
                place=mine[row].item() * G + g,
                prompt=rollouts.prompt_ids[row],
                completion=rollouts.completion_ids[row, g, :length].tolist(),
                logprobs=rollouts.logprobs[row, g, :length].clone(),  # a view pickles the table
                old_logprobs=old_logprobs[row, g, :length].clone(),
            )
        )
    return sequences


def share_out(sequences: list[Sequence]) -> list[Sequence]:
    """This rank's share of the sequences of all ranks, so that all forward about as many tokens.

    Pruning keeps more of what one rank has sampled than of another's, and an update waits for the
    busiest rank. All ranks call this."""
    of_ranks = ranks.all_gather(sequences)
    if len(of_ranks) == 1:
        return sequences
    everything = sorted(itertools.chain(*of_ranks), key=lambda sequence: sequence.place)
    rank_of = ranks.largest_first([work(sequence) for sequence in everything], len(of_ranks))
    rank = ranks.rank()
    return [sequence for sequence, owner in zip(everything, rank_of, strict=True) if owner == rank]


def work(sequence: Sequence) -> int:
    """The tokens that are forwarded for a sequence. Its last one predicts nothing."""
    return len(sequence.prompt) + max(0, len(sequence.completion) - 1)


def packs(sequences: list[Sequence], cfg, device):
    """Yield (pack, its sequences) for each slot.

    Under FSDP every forward is a collective, so every rank must run as many as every other. A rank
    that runs out of sequences yields dummy packs without targets.
    """
    share = packing.shares_prompts(device)
    shared = ()
    if share:
        shared = ([each.group for each in sequences], [len(each.prompt) for each in sequences])
    tokens = [work(sequence) for sequence in sequences]
    plan = packing.plan_packs(tokens, cfg.pack_tokens, packing.WINDOW, *shared)
    if cfg.shard == "fsdp":
        most = ranks.all_reduce(torch.tensor(len(plan)), ranks.MAX).item()
        plan += [[]] * (most - len(plan))
    quiet = None if ranks.is_first() else True  # None: unless this is a terminal
    bar = {"desc": "update", "unit": "pack", "delay": 3, "leave": False, "disable": quiet}
    for slot in tqdm(plan, **bar):
        members = [sequences[index] for index in slot]
        prompts = [sequence.prompt for sequence in members] or [[0]]
        completions = [sequence.completion for sequence in members] or [[]]
        yield packing.build_pack(prompts, completions, device, share_prompts=share), members
