"""
The rivals' pruning rules, with the call of dppo.prune_completions: what they keep, and what they multiply it by.

    uniform      unbiased  drops a share of all completions blindly; weights 1 / (1 - share)
    cppo         BIASED    the largest |advantage| of each group, as CPPO's paper has it (arXiv:2503.22342)
    cppo_batch   BIASED    the largest |advantage| of the whole mini-batch, as CPPO's code has it (lzhxmu/CPPO)
    dppo_floor   BIASED    the deterministic fraction that secondary sources ascribe to DPPO

Keeping by rank gives keep probabilities of 0 and 1, and no weight can mend a zero. These rules are here to be compared
with.

Letters: K prompts, G completions each.
"""

import torch

import dppo

COMPLETION_RULES = ("uniform", "cppo", "cppo_batch", "dppo_floor")
BIASED = ("cppo", "cppo_batch", "dppo_floor")


def kept_count(size: int, prune_rate: float) -> int:
    """floor(size (1 - prune_rate)), safe from rounding: of 10 at rate 0.9, one is kept."""
    return int(size * (1.0 - prune_rate) + 1e-9)


def allocated_prompts(prompts: int, group_size: int, prune_rate: float) -> int:
    """CPPO's dynamic completion allocation: so many prompts are rolled out that what is kept of their
    completions fills the update of `prompts` un-pruned ones."""
    return prompts * group_size // kept_count(group_size, prune_rate)


def top_completions(scores: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(keep, weights) [..., n]: the `count` highest scores of the last dimension, the first of equals, and weights
    n / count on them: where the denominator counts completions (grpo, dr_grpo, gspo), the mean over what is kept."""
    best = scores.argsort(dim=-1, descending=True, stable=True)[..., :count]
    keep = torch.zeros(scores.shape, dtype=torch.bool).scatter(-1, best, True)
    return keep, keep.double() * (scores.shape[-1] / max(count, 1))


def floor_of_low(scores: torch.Tensor, counted: torch.Tensor, prune_rate: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(keep, weights) [..., n]: of the n_low scores below the mean of the last dimension, the floor(rate n_low) lowest
    go, the first of equals; what is left of them gets 1 / (1 - rate). Also for prompts, by history."""
    low = dppo.threshold_keep_prob(scores, counted, 1.0) == 0  # below the mean
    num_dropped = (low.sum(dim=-1, keepdim=True) * prune_rate + 1e-9).floor()
    rank = torch.where(low, scores, torch.inf).argsort(dim=-1, stable=True).argsort(dim=-1)
    keep = ~(low & (rank < num_dropped))
    return keep, keep.double() * torch.where(low, 1.0 / (1.0 - prune_rate), 1.0)


def prune_completions(
    rule: str, prune_rate: float, batch: dppo.Completions, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """(keep, weights) [K, G] of one of COMPLETION_RULES; prune_rate is the share removed (dppo_floor: of those below
    the mean)."""
    scores = batch.advantages.abs()
    K, G = scores.shape
    if rule == "uniform":
        keep_prob = torch.full((K, G), 1.0 - prune_rate, dtype=torch.float64)
        order = torch.randperm(K * G, generator=generator)  # systematic in random order: a simple random sample
        start = torch.rand((), dtype=torch.float64, generator=generator).item()
        keep = dppo.systematic(keep_prob, order, start)
        return keep, dppo.ht_weights(keep, keep_prob)
    if rule == "cppo":
        return top_completions(scores, kept_count(G, prune_rate))
    if rule == "cppo_batch":
        keep, weights = top_completions(scores.flatten(), kept_count(K * G, prune_rate))
        return keep.view(K, G), weights.view(K, G)
    if rule == "dppo_floor":
        return floor_of_low(scores, ~batch.rewards.isnan(), prune_rate)
    raise ValueError(f"unknown completion rule {rule!r}: choose one of {', '.join(COMPLETION_RULES)}")
