"""
The update: the gradient of what was kept, pack by pack, summed over ranks.

Every sequence carries its own factor (weight over denominator), fixed before this file sees it.
So the sum does not depend on how sequences are packed, or on which rank holds them.

Letters: K prompts and G completions of this rank, T max_new_tokens, N completion tokens of a pack.
"""

import itertools
import math
from typing import NamedTuple

import torch
from tqdm import tqdm

import dppo
import packing
from runtime import ranks
from runtime.device import autocast, send


class UpdateStats(NamedTuple):
    """Sums over the completion tokens of one update. `tokens` and `slots` also count prompts and
    padding."""

    loss: float  # with the full batch's denominator, the KL term included
    kl: float  # the KL term alone, before beta
    clipped: float  # tokens on which the clip acts
    gap: float  # |trainer's log-prob - sampler's|, nats
    importance: float  # importance ratios, before the cap
    capped: float  # tokens whose ratio is above it
    entropy: float  # nats
    completion_tokens: float
    tokens: float  # forwarded, prompts included
    slots: float  # room in the slots, in tokens


def accumulate_gradients(
    model, rollouts, advantages, factor, keep, *, cfg, old_logprobs=None, reference=None,
    show_progress=False,
) -> UpdateStats:  # fmt: skip
    """Add the gradient of every kept sequence of this rank to .grad; returns this rank's sums.

    advantages, factor and keep are [K, G], of these rollouts. The loss of each token is multiplied
    by its sequence's factor, which is weight over denominator, and by nothing that depends on the
    pack, so any layout gives the same gradient. With cfg.beta, `reference` is the frozen model of
    the KL term.

    By default the old log-probs are the sampler's, which need no extra forward. With
    cfg.importance_cap they are the trainer's: `old_logprobs` [K, G, T], or the current ones if
    None. Each token is then also multiplied by its importance ratio, see `importance_ratio`.
    """
    T = rollouts.logprobs.shape[2]
    trainers = rollouts.logprobs if old_logprobs is None else old_logprobs
    of_tokens = torch.stack([rollouts.logprobs, trainers]).flatten(1)  # [2, K * G * T]
    of_sequences = torch.stack([advantages, factor]).flatten(1).double()  # [2, K * G]

    measured, counts = [], []
    for pack, index in _packs(rollouts, keep, cfg, model.device, show_progress):
        per_token = torch.cat([of_tokens[:, index].double(), of_sequences[:, index // T]])  # [4, N]
        per_token = send(per_token, model.device)
        logprobs, entropy = _logprobs(model, pack, cfg)  # [N], [N]
        now = logprobs.detach()
        sampled, before, advantage, token_factor = per_token.to(now.dtype)  # [N] each
        old = sampled  # [N]
        importance = (now - sampled).exp()  # [N]
        if cap := cfg.importance_cap:
            old = now if old_logprobs is None else before
            importance = importance_ratio(old - sampled)
            token_factor = token_factor * importance.clamp(max=cap)
        loss, clipped = dppo.token_loss(
            logprobs, old, advantage, pack.owner, loss=cfg.loss, eps_low=cfg.eps_low,
            eps_high=cfg.eps_high, num_sequences=pack.num_sequences,
        )  # [N], [N]  # fmt: skip
        kl = torch.zeros_like(loss)  # [N]
        if cfg.beta:
            with torch.no_grad():
                ref_logprobs, _ = _logprobs(reference, pack, cfg)  # [N]
            kl = dppo.kl_k3(logprobs, ref_logprobs)
        total = ((loss + cfg.beta * kl) * token_factor).sum()  # after the clip
        total.backward()
        if not len(index):  # a dummy pack, which FSDP needs
            continue
        capped = (importance > (cap or math.inf)).sum()
        gap = (now - sampled).abs().sum()
        row = [total, (kl * token_factor).sum(), clipped.sum(), gap, importance.sum(), capped]
        row = torch.stack([*row, entropy.sum()]).detach()
        measured.append(row)  # read after the loop; here the host would wait
        tokens = pack.input_ids.shape[1]
        counts.append([len(index), tokens, max(cfg.pack_tokens, tokens)])
    if not counts:
        return UpdateStats(*[0.0] * len(UpdateStats._fields))
    parts = (torch.stack(measured).cpu().double(), torch.tensor(counts, dtype=torch.float64))
    return UpdateStats(*torch.cat(parts, dim=1).sum(dim=0).tolist())


def importance_ratio(log_ratio):
    """Trainer's probability / sampler's of each token, [N], given the logarithms."""
    return log_ratio.clamp(max=20.0).exp()  # above any cap, but the logged mean stays finite


@torch.no_grad()
def trainer_logprobs(model, rollouts, cfg, keep=None) -> torch.Tensor:
    """The sampled tokens' log-probs [K, G, T] in the trainer's arithmetic; 0 past the end, and of
    completions that are not in keep [K, G]."""
    found, order = [], []
    keep = torch.ones_like(rollouts.truncated) if keep is None else keep
    for pack, index in _packs(rollouts, keep, cfg, model.device):
        found.append(_logprobs(model, pack, cfg)[0])
        order.append(index)
    table = rollouts.logprobs.new_zeros(rollouts.logprobs.shape)
    if found:
        table.view(-1)[torch.cat(order)] = torch.cat(found).to(table)
    return table


def _logprobs(model, pack, cfg):
    with autocast(cfg):
        if ranks.is_sharded(model):  # a method, which gathers the weights: see models.shard
            return model.packed_logprobs(pack, temperature=cfg.temperature)
        return packing.packed_logprobs(model, pack, temperature=cfg.temperature)


def _packs(rollouts, keep, cfg, device, show_progress=False):
    """Yield (pack, index) for each slot: its tensors on the device, and on the CPU the indices [N]
    of its completion tokens in a flat table [K, G, T].

    Under FSDP every forward is a collective, so every rank must run as many. A rank that runs out
    of completions yields dummy packs without targets.
    """
    _, G, T = rollouts.logprobs.shape
    kept = keep.flatten().nonzero().squeeze(1).tolist()
    lengths = rollouts.lengths.flatten().tolist()
    completion_ids = rollouts.completion_ids.flatten(0, 1).tolist()
    prompts = [rollouts.prompt_ids[row // G] for row in kept]
    completions = [completion_ids[row][: lengths[row]] for row in kept]
    pairs = zip(prompts, completions, strict=True)
    totals = [len(prompt) + max(0, len(completion) - 1) for prompt, completion in pairs]
    shared = ()
    if share := packing.shares_prompts(device):
        shared = ([id(prompt) for prompt in prompts], [len(prompt) for prompt in prompts])
    packs = packing.plan_packs(totals, cfg.pack_tokens, packing.WINDOW, *shared)
    if cfg.shard == "fsdp":
        most = ranks.all_reduce(torch.tensor(len(packs)), ranks.MAX).item()
        packs += [[]] * (most - len(packs))
    bar = {"desc": "update", "unit": "pack", "delay": 3, "leave": False}
    for members in tqdm(packs, **bar, disable=not show_progress):
        texts = [prompts[m] for m in members] or [[0]], [completions[m] for m in members] or [[]]
        pack = packing.build_pack(*texts, device, share_prompts=share)
        index = [range(kept[m] * T, kept[m] * T + lengths[kept[m]]) for m in members]
        yield pack, torch.tensor([*itertools.chain(*index)], dtype=torch.long)
