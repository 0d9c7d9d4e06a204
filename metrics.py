"""
The figures of a step's row in log.jsonl, and the groups and sampled completions beside it.

train.py adds step, learning_rate, step_time, time/* and eval/*.
Names are TRL's where it has one. A figure that does not exist in a step is NaN here and null in the
file.

Letters: K prompts rolled out, G completions each.
"""

import math

import torch

import dppo


def row(
    cfg, *, prompt_weights, rewards, lengths, truncated, entropy, advantages, scale, cost, keep,
    weights, stats: list, grad_norms: list[float],
) -> dict:  # fmt: skip
    """The figures of a step, from tensors of train.py's step: prompt_weights is [K], all others
    [K, G]. `weights` are those of both levels. stats (update.UpdateStats) and grad_norms have an
    entry for each update.

    Averages weight each prompt by 1 / P(kept), so they estimate what all Q candidates would have
    shown.
    """
    first = stats[0]
    sums = torch.tensor(stats, dtype=torch.float64).sum(dim=0)
    total = first._make(sums.tolist())
    figures = {
        "loss": total.loss / len(stats),
        **averages(prompt_weights, rewards, lengths, truncated, entropy),
        "entropy/trained": ratio(first.entropy, first.completion_tokens),
        "clip_ratio/region_mean": ratio(total.clipped, total.completion_tokens),
        # of the first update only, because later ones compare a policy that has moved
        "sampling/sampling_logp_difference/mean": ratio(first.gap, first.completion_tokens),
        "grad_norm": sum(grad_norms) / len(grad_norms),
        **kept(cfg, prompt_weights, advantages, scale, cost, keep, weights),
        "pack/density": ratio(total.tokens, total.slots),
        "tokens/generated": lengths.sum().item(),
    }
    if cfg.importance_cap:
        name = "sampling/importance_sampling_ratio"
        figures[f"{name}/mean"] = ratio(first.importance, first.completion_tokens)
        figures[f"{name}/capped"] = ratio(first.capped, first.completion_tokens)
    if cfg.device == "cuda":  # since the last row
        figures["memory/peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        torch.cuda.reset_peak_memory_stats()
    if cfg.beta:
        # Nats per token, weighted as in the loss. Nothing that was dropped changes the denominator.
        mass = (prompt_weights[:, None] * scale * lengths).sum().item()
        figures["kl"] = ratio(total.kl, mass)
    return figures


def averages(prompt_weights, rewards, lengths, truncated, entropy) -> dict:
    """Averages over prompts, with weights [K], of tables [K, G]."""
    group_std = torch.where(dppo.dead_groups(rewards), 0.0, nan_std(rewards))  # [K]

    def mean(values):  # of [K], NaN left out
        there = ~values.isnan()
        total = prompt_weights[there].sum()
        return ((values * prompt_weights)[there].sum() / total).item()

    return {
        "reward": mean(rewards.nanmean(dim=1)),
        "reward_std": mean(group_std),
        "frac_reward_zero_std": mean((group_std == 0).double()),
        "frac_reward_some_none": mean(some_none(rewards).double()),
        "completions/mean_length": mean(lengths.mean(dim=1)),
        "completions/clipped_ratio": mean(truncated.mean(dim=1)),
        "entropy": ratio(mean(entropy.mean(dim=1)), mean(lengths.mean(dim=1))),
    }


def kept(cfg, prompt_weights, advantages, scale, cost, keep, weights) -> dict:
    """How much both prunings kept, and the weights that make up for the rest."""
    live = dppo.contributes(advantages, scale, cfg.beta)  # [K, G]
    num_prompts = cfg.prompts_per_step  # Q
    full_tokens = (prompt_weights[:, None] * cost).sum().item()  # of the un-pruned batch, expected
    return {
        "kept/prompts": len(prompt_weights) / num_prompts,
        "kept/completions": keep.sum().item() / (num_prompts * cfg.group_size),
        "kept/tokens": ratio((keep * cost).sum().item(), full_tokens),
        "kept/live_tokens": ratio((keep * live * cost).sum().item(), (live * cost).sum().item()),
        # prompt and completion tokens of what was rolled out, and of what was kept
        "cost/sampled": cost.sum().item(),
        "cost/kept": (cost * keep).sum().item(),
        "weight/max": weights.max().item() if keep.any() else math.nan,
        "weight/prompt_max": prompt_weights.max().item() if len(prompt_weights) else math.nan,
    }


def groups(step: int, prompts, prompt_weights, rewards, cost, scale, energy) -> dict:
    """A step's row for groups.jsonl, from which `bench ceiling` computes what other group sizes and
    other keep probabilities would have done. prompts and prompt_weights are [K], the others [K, G].

    size_of_1: the estimated gradient norm of a completion whose |advantage| is 1, without the
    weight of its prompt (dppo.contribution_size); 0 if the completion is masked.
    """
    size = scale * energy.double().sqrt()
    return {
        "step": step,
        "prompts": prompts.tolist(),
        "prompt_weights": prompt_weights.tolist(),
        "rewards": rewards.tolist(),
        "tokens": cost.tolist(),
        "size_of_1": [[float(f"{value:.5g}") for value in group] for group in size.tolist()],
    }


def ratio(part: float, whole: float) -> float:
    """part / whole, or NaN if whole is 0."""
    return part / whole if whole else math.nan


def nan_std(rewards: torch.Tensor) -> torch.Tensor:
    """Sample standard deviation [K] of rewards [K, G] without NaN. NaN if only one is scored, 0 if
    none is."""
    centred = rewards - rewards.nanmean(dim=1, keepdim=True)
    return (centred.square().nansum(dim=1) / ((~rewards.isnan()).sum(dim=1) - 1)).sqrt()


def some_none(rewards: torch.Tensor) -> torch.Tensor:
    """Which groups [K] have both scored and unscorable completions, given their rewards [K, G]."""
    unscorable = rewards.isnan()
    return unscorable.any(dim=1) & ~unscorable.all(dim=1)


def samples(step: int, problems: list, texts, rewards, advantages, keep, weights) -> list[dict]:
    """Rows for samples.jsonl: the first completion of each of this rank's first three prompts.
    Tables are [k, G]."""
    return [
        {
            "step": step,
            "prompt": problem.text,
            "completion": texts[row][0],
            "answer": problem.answer,
            "reward": rewards[row, 0].item(),
            "advantage": advantages[row, 0].item(),
            "kept": keep[row, 0].item(),
            "weight": weights[row, 0].item(),
        }
        for row, problem in enumerate(problems[:3])
    ]
