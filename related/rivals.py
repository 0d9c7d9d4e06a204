"""
The rivals' pruning rules: what they keep, and what they multiply it by. None has the expected
gradient of the full batch; some ascend another objective (docs/method.md). Importing this file
adds them to dppo.COMPLETION_RULES and sampler.PROMPT_RULES; config.py imports it when a run names a
rule that the core does not have.

    cppo        the largest |advantage| of each group: CPPO's paper (arXiv:2503.22342)
    cppo_batch  the largest |advantage| of the whole mini-batch: CPPO's code (lzhxmu/CPPO)
    pods        the subset of m rewards of each group that has the largest variance, and advantages
                within it (PODS, arXiv:2504.13818, YixuanEvenXu/pods)
    dppo_floor  the deterministic fraction that secondary sources ascribe to DPPO, at both levels

Keeping by rank gives keep probabilities of 0 and 1, and no weight can correct for a zero.

Letters: Q prompts of a step, K of them rolled out, G completions each, n completions.
"""

import torch

import dppo
import sampler


def kept_count(size: int, prune_rate: float, least: int = 1) -> int:
    """floor(size (1 - prune_rate)), safe from rounding: of 10 at rate 0.9, one is kept. RuleError
    if it is below `least`, so that no update would ever have a gradient."""
    count = int(size * (1.0 - prune_rate) + 1e-9)
    if count < least:
        raise dppo.RuleError(
            f"--completion-prune-rate {prune_rate:g} keeps {count} of {size} completions, but this "
            f"rule needs {least} or more: lower the rate"
        )
    return count


def top(scores: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(keep, weights) [..., n]: the `count` highest scores of the last dimension; ties keep order.

    Their weights are n / count: if the denominator counts completions (grpo, dr_grpo, gspo), the
    result is the mean over what is kept.
    """
    best = scores.argsort(dim=-1, descending=True, stable=True)[..., :count]
    keep = torch.zeros(scores.shape, dtype=torch.bool).scatter(-1, best, True)
    return keep, keep.double() * (scores.shape[-1] / count)


def floor_of_low(
    scores: torch.Tensor, counted: torch.Tensor, prune_rate: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(keep, weights) [..., n], for completions by |advantage| and for prompts by history.

    Of the n_low scores below the mean of the last dimension, the floor(rate n_low) lowest are
    dropped, and ties keep order; the other low scores get weight 1 / (1 - rate).
    """
    low = dppo.threshold_keep_prob(scores, counted, 1.0) == 0  # below the mean
    num_low = low.sum(dim=-1, keepdim=True).double()
    num_dropped = (num_low * prune_rate + 1e-9).floor()
    rank = torch.where(low, scores, torch.inf).argsort(dim=-1, stable=True).argsort(dim=-1)
    keep = ~(low & (rank < num_dropped))
    return keep, keep.double() * torch.where(low, 1.0 / (1.0 - prune_rate), 1.0)


def most_varied(advantages: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(keep, weights) [K, G]: PODS. Of each group, the `count` completions with the largest
    variance: the best i and the worst of the rest, for one i.

    PODS normalizes the subset's rewards again. Within a group advantages are rewards, shifted and
    scaled, so this normalizes advantages [K, G]. Advantage times weight is the new advantage. One
    of exactly 0 stays 0; with rewards of 0 and 1 no live group has any.
    """
    K, G = advantages.shape
    weights = torch.zeros(K, G, dtype=torch.float64)
    ranked, order = advantages.sort(dim=1, descending=True, stable=True)
    place = torch.arange(G)
    choices = torch.stack([(place < i) | (place >= G - count + i) for i in range(count + 1)])
    subsets = torch.stack([ranked[:, choice] for choice in choices], dim=1)  # [K, choices, count]
    best = subsets.var(dim=2, correction=0).argmax(dim=1)  # the first of equal ones
    keep = torch.zeros(K, G, dtype=torch.bool).scatter(1, order, choices[best])
    kept = advantages[keep].view(K, count)
    std = kept.std(dim=1, keepdim=True)
    new = (kept - kept.mean(dim=1, keepdim=True)) / (std + dppo.ADVANTAGE_EPS)
    weights[keep] = (new / kept).nan_to_num(0.0, 0.0, 0.0).flatten().double() * G / count
    return keep, weights


# ---------------------------------------------------------------------------- the entries


def cppo(
    batch: dppo.Completions, prune_rate: float, generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """(keep, weights) [K, G], as of the other rules; prune_rate is the share removed."""
    sizes = batch.advantages.abs()
    return top(sizes, kept_count(sizes.shape[1], prune_rate))


def cppo_batch(batch, prune_rate, generator):
    sizes = batch.advantages.abs()
    keep, weights = top(sizes.flatten(), kept_count(sizes.numel(), prune_rate))
    return keep.view(sizes.shape), weights.view(sizes.shape)


def pods(batch, prune_rate, generator):
    count = kept_count(batch.advantages.shape[1], prune_rate, least=2)  # one reward does not vary
    return most_varied(batch.advantages, count)


def low_completions(batch, prune_rate, generator):
    return floor_of_low(batch.advantages.abs(), ~batch.rewards.isnan(), prune_rate)


def low_prompts(batch: sampler.Prompts, prune_rate: float, generator):
    """(keep, weights) [Q]."""
    return floor_of_low(batch.past_advantage, ~batch.past_advantage.isnan(), prune_rate)


OTHER_OBJECTIVE = (
    "it keeps by rank. With 0/1 rewards and a constant denominator (--loss dr_grpo) it can be "
    "unbiased for another objective; docs/method.md says when"
)
BY_RANK = "it keeps by rank, not at random"
dppo.COMPLETION_RULES |= {
    "cppo": dppo.BiasedRule(cppo, 0.7, OTHER_OBJECTIVE),
    "cppo_batch": dppo.BiasedRule(cppo_batch, 0.7, BY_RANK),
    "pods": dppo.BiasedRule(pods, 0.7, OTHER_OBJECTIVE),
    "dppo_floor": dppo.BiasedRule(low_completions, 0.7, OTHER_OBJECTIVE),
}
sampler.PROMPT_RULES |= {"dppo_floor": dppo.BiasedRule(low_prompts, 0.3, BY_RANK)}
