"""
The update: gradients of what was kept, pack by pack, summed over ranks.

Every sequence carries its own factor (weight over denominator), fixed before this file sees it. So the sum does not
depend on how sequences are packed, or on which rank holds them.

Letters: K prompts and G completions of this rank, N completion tokens of a pack.
"""

import functools
import math

import torch
from tqdm import tqdm

import dppo
import packing
import ranks
from data import InputError

SUMS = (  # of accumulate_gradients
    "loss", "kl", "clipped", "gap", "importance", "capped", "entropy", "completion_tokens", "tokens", "slots",
)  # fmt: skip


def accumulate_gradients(
    model, rollouts, advantages, scale, keep, *, cfg, old_logprobs=None, reference=None, show_progress=False
) -> torch.Tensor:
    """Add the gradient of every kept sequence of this rank to .grad, pack by pack.

    advantages, scale and keep are [K, G], this rank's rows. A sequence's tokens carry its scale and nothing
    that depends on the pack, so any layout gives the same sum. With cfg.beta, `reference` is the frozen model of
    the KL term. The old log-probs are those that were sampled at: no forward of their own. With cfg.importance_cap they
    are the trainer's, `old_logprobs` [K, G, T] or, if None, those of now, and each token carries min(cap, trainer's
    probability / sampler's) as well (gspo: each sequence the mean of that over its tokens). Returns float64 sums, by
    name in SUMS: loss and the KL in it, with the full batch's denominator; clipped tokens, |trainer - sampler| log-prob
    gap, ratio of their probabilities, tokens above the cap, and entropy (nats) of the completion tokens; their number,
    that of tokens forwarded, the slots' room.
    """
    device = model.device
    sampled_logprobs, lengths = rollouts.logprobs.flatten(0, 1), rollouts.lengths.flatten().tolist()
    advantages, scale = advantages.flatten().to(device), scale.flatten().to(device)  # [K * G]

    measured, counts = [], []
    for rows, pack in _packed(rollouts, keep, cfg, device, show_progress):
        owner = torch.tensor(rows, dtype=torch.long, device=device)[pack.owner]  # [N] into K * G
        sampled = _tokens(sampled_logprobs, rows, lengths)  # [N]
        logprobs, entropy = _logprobs(model, pack, cfg)  # [N], [N]
        weight = scale[owner].to(logprobs.dtype)  # [N]; multiplies the finished loss of each token
        sampled, now = sampled.to(logprobs.dtype), logprobs.detach()
        old, importance = sampled, (now - sampled).exp()  # [N], [N]
        if cfg.importance_cap:
            old = now if old_logprobs is None else _tokens(old_logprobs.flatten(0, 1), rows, lengths).to(now.dtype)
            importance = (old - sampled).exp()
            weight = weight * importance.clamp(max=cfg.importance_cap)
        loss, clipped = dppo.token_loss(
            logprobs,
            old,
            advantages[owner].to(logprobs.dtype),
            owner,
            loss=cfg.loss,
            eps_low=cfg.eps_low,
            eps_high=cfg.eps_high,
        )  # [N], [N]
        kl = torch.zeros_like(loss)  # [N]
        if cfg.beta:
            with torch.no_grad():
                ref_logprobs, _ = _logprobs(reference, pack, cfg)  # [N]
            kl = dppo.kl_k3(logprobs, ref_logprobs)
        total = ((loss + cfg.beta * kl) * weight).sum()
        total.backward()
        if not rows:
            continue
        row = [total, (kl * weight).sum(), clipped.sum(), (now - sampled).abs().sum(), importance.sum()]
        row += [(importance > (cfg.importance_cap or math.inf)).sum(), entropy.sum()]
        measured.append(torch.stack(row).detach())  # read after the loop: here it would wait for the device
        counts.append([len(old), pack.input_ids.shape[1], max(cfg.pack_tokens, pack.input_ids.shape[1])])
    if not counts:
        return torch.zeros(len(SUMS), dtype=torch.float64)
    parts = (torch.stack(measured).cpu().double(), torch.tensor(counts, dtype=torch.float64))
    return torch.cat(parts, dim=1).sum(dim=0)


@torch.no_grad()
def trainer_logprobs(model, rollouts, cfg) -> torch.Tensor:
    """Log-probs [K, G, T] of the sampled tokens by the trainer's own arithmetic; 0 beyond a completion's end."""
    found, lengths = torch.zeros_like(rollouts.logprobs), rollouts.lengths.flatten().tolist()
    for rows, pack in _packed(rollouts, torch.ones_like(rollouts.truncated), cfg, model.device):
        logprobs, _ = _logprobs(model, pack, cfg)
        for row, part in zip(rows, logprobs.split([lengths[row] for row in rows]), strict=True):
            found.flatten(0, 1)[row, : len(part)] = part
    return found


def _logprobs(model, pack, cfg):
    compute = model.packed_logprobs if ranks.is_sharded(model) else functools.partial(packing.packed_logprobs, model)
    with autocast(cfg, cache=False):
        return compute(pack, temperature=cfg.temperature)


def _tokens(table, rows, lengths):
    """What the table [K * G, T] has for the tokens of some completions, [N]."""
    return torch.cat([table[:0].flatten(), *(table[row, : lengths[row]] for row in rows)])


def _packed(rollouts, keep, cfg, device, show_progress=False):
    """The kept completions, slot by slot: (which of K * G they are, in the pack's order, and the pack). Where weights
    are sharded, a rank with fewer packs than another goes on with empty ones: a token that nothing is asked of."""
    G = keep.shape[1]
    kept = keep.flatten().nonzero().squeeze(1).tolist()
    lengths, completion_ids = rollouts.lengths.flatten().tolist(), rollouts.completion_ids.flatten(0, 1).tolist()
    prompts = [rollouts.prompt_ids[row // G] for row in kept]
    completions = [completion_ids[row][: lengths[row]] for row in kept]
    totals = [
        len(prompt) + max(0, len(completion) - 1) for prompt, completion in zip(prompts, completions, strict=True)
    ]
    shared = ([row // G for row in kept], [len(prompt) for prompt in prompts]) if cfg.share_prompts else ()
    packs = packing.plan_packs(totals, cfg.pack_tokens, cfg.pack_window, *shared)
    if cfg.shard == "fsdp":
        most = ranks.all_reduce(torch.tensor(len(packs)), ranks.MAX).item()
        packs += [[]] * (most - len(packs))
    for members in tqdm(packs, desc="update", unit="pack", delay=3, leave=False, disable=not show_progress):
        texts = [prompts[m] for m in members] or [[0]], [completions[m] for m in members] or [[]]
        pack = packing.build_pack(*texts, device, share_prompts=cfg.share_prompts)
        yield [kept[m] for m in members], pack


def checkpoint_layers(model) -> None:
    """Keep no layer's inner activations: they are computed again in the backward pass. InputError for dropout."""
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})  # transformers 5.23 renamed it
    model.train()  # transformers checkpoints in this mode only; sampling leaves it and comes back
    if not packing.packs_exactly(model):
        raise InputError("--gradient-checkpointing: this model has dropout, and transformers would switch it on")


def autocast(cfg, cache: bool = True):
    """bfloat16 arithmetic over float32 weights, if the run asks for it. With the cache a weight that is used several
    times, as the head's is by its chunks, has one cast, and its gradients are added up in bfloat16."""
    return torch.autocast(cfg.device, torch.bfloat16, enabled=cfg.dtype == "bfloat16", cache_enabled=cache)
