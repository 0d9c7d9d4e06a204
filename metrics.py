"""
The figures of a step's row in log.jsonl, its groups and sampled completions beside it, and the
console line.

train.py adds step, learning_rate, step_time, time/*, eval/* and history/* (see `history`). Names
are TRL's where it has one. A figure that does not exist in a step is NaN here and null in the file.

Letters: K prompts rolled out, G completions each.
"""

import math
from pathlib import Path

import torch

import config
import dppo
from update import UpdateStats

SOME_NONE = (
    "the reward is None for some completions of a prompt and a number for others. None leaves a "
    "completion out of its group. Return 0.0 for a wrong one"
)


def row(
    cfg: config.Config, *, prompt_weights, rewards, lengths, truncated, entropy, advantages, scale,
    cost, keep, weights, stats: list[UpdateStats], grad_norms: list[float],
) -> dict:  # fmt: skip
    """The figures of a step, from tensors of train.py's step: prompt_weights is [K], all others
    [K, G]. `weights` are those of both levels. stats and grad_norms have an entry for each update.

    Averages weight each prompt by 1 / P(kept), so they estimate what all Q candidates would have
    shown.
    """
    first = stats[0]
    sums = torch.tensor(stats, dtype=torch.float64).sum(dim=0)
    total = UpdateStats(*sums.tolist())
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
        "tokens/generated": int(lengths.sum()),
        "tokens/trained": int(total.tokens),
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


def history(score: torch.Tensor, window: torch.Tensor, kept: torch.Tensor) -> dict:
    """Figures of a sampler.PromptHistory before a step's rollout, from its score [P], and of what
    the step's draw kept [Q] of its window [Q]. A prompt is dull if its last group had equal
    rewards."""
    dull = score[window] == 0  # [Q]
    return {
        "history/never_rolled_out": score.isnan().double().mean().item(),
        "history/dull": (score == 0).double().mean().item(),
        "kept/dull_prompts": ratio((kept & dull).sum().item(), dull.sum().item()),
        "kept/other_prompts": ratio((kept & ~dull).sum().item(), (~dull).sum().item()),
    }


def kept(cfg: config.Config, prompt_weights, advantages, scale, cost, keep, weights) -> dict:
    """How much both prunings kept, and the weights that make up for the rest."""
    live = dppo.contributes(advantages, scale, cfg.beta)  # [K, G]
    num_prompts = cfg.prompts_per_step  # Q
    full_tokens = (prompt_weights[:, None] * cost).sum().item()  # of the un-pruned batch, expected
    return {
        "kept/prompts": len(prompt_weights) / num_prompts,
        "kept/completions": keep.sum().item() / (num_prompts * cfg.group_size),
        "kept/tokens": ratio((keep * cost).sum().item(), full_tokens),
        # prompt and completion tokens of what was rolled out, and of what was kept
        "cost/sampled": cost.sum().item(),
        "cost/kept": (cost * keep).sum().item(),
        "weight/max": weights.max().item() if keep.any() else math.nan,
        "weight/prompt_max": prompt_weights.max().item() if len(prompt_weights) else math.nan,
        "weight/ess": effective_sample_size(weights[live]),
    }


def groups(step: int, prompts, prompt_weights, rewards, cost, scale, energy, weights) -> dict:
    """A step's row for groups.jsonl, from which `bench ceiling` computes what other group sizes and
    other keep probabilities would have done. prompts and prompt_weights are [K], the others [K, G].

    size_of_1  estimated gradient norm of a completion whose |advantage| is 1, without the weight of
               its prompt (dppo.contribution_size); 0 if the completion is masked
    weights    1 / P(the completion was kept), 0 if it was dropped
    """
    size = scale * energy.double().sqrt()
    return {
        "step": step,
        "prompts": prompts.tolist(),
        "prompt_weights": prompt_weights.tolist(),
        "rewards": rewards.tolist(),
        "tokens": cost.tolist(),
        "size_of_1": [[float(f"{value:.5g}") for value in group] for group in size.tolist()],
        "weights": [[float(f"{value:.5g}") for value in group] for group in weights.tolist()],
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


def first_lines(
    cfg: config.Config, policy, world: int, problems: int, held_out: int, step: int
) -> str:
    """What the run is, and notes on what may surprise its user."""
    parameters = sum(parameter.numel() for parameter in policy.parameters()) / 1e6
    prompts = cfg.prompts_per_step
    rest = f"steps {step} to {cfg.steps}" if step <= cfg.steps else "only its last evaluation"
    summary = (
        f"{cfg.model}: {parameters:.1f} M parameters on {world} x {cfg.device}, {cfg.dtype}; "
        f"{cfg.data}: {problems} problems to train on, {held_out} held out; loss {cfg.loss}, "
        f"prompt rule {cfg.prompt_rule}, completion rule {cfg.completion_rule}, {prompts} x "
        f"{cfg.group_size} completions a step; {rest}, in {cfg.out_dir}/"
    )
    notes = config.warnings(cfg)
    if cfg.engine == "compact" and policy.why_not_fast:
        summary += "; transformers decodes tokens"
        notes.append(f"the fast decoder is not used, because {policy.why_not_fast}")
    elif cfg.engine == "compact":
        summary += "; the fast decoder decodes tokens"
    return "\n".join([summary, *(f"note: {note}" for note in notes)])


def nothing_learned(cfg: config.Config, row: dict, steps: int, samples: Path) -> str:
    """A note for a run whose gradient was 0 for some steps, given the figures of the last one."""
    cause = "each problem is too easy or too hard for the model, so its completions earn the same"
    if math.isnan(row["reward"]):
        cause = "no reference answer can be scored"
    elif cfg.mask_truncated and row["completions/clipped_ratio"] == 1:
        cause = "--max-new-tokens cuts off all completions, and --mask-truncated masks these"
    elif row["frac_reward_zero_std"] < 1:
        cause = "no completion that was kept has a loss, although rewards differ in some groups"
    elif row["reward"] == 0:
        cause = "the reward never finds the answer in a completion, or the problems are too hard"
    return (
        f"the gradient was 0 for {steps} steps, so nothing was learned (mean reward "
        f"{row['reward']:.3f}). Likely cause: {cause}. See {samples}"
    )


def console_line(figures: dict, steps: int) -> str:
    """One aligned line for a step. Step 0 has evaluations only."""
    width = len(str(steps))
    scores = " | ".join(
        f"{name} {value:.3f}" for name, value in figures.items() if name.startswith("eval/")
    )
    if figures["step"] == 0:
        return f"step {0:5d} | {scores}"
    entropy = figures["entropy"]
    if math.isnan(entropy):  # vLLM returns none
        entropy = figures["entropy/trained"]
    line = (
        f"step {figures['step']:{width}d}/{steps} | reward {figures['reward']:.3f} | kept "
        f"{figures['kept/completions']:.2f} | w_max {figures['weight/max']:4.1f} | density "
        f"{figures['pack/density']:.2f} | entropy {entropy:.3f} | gnorm "
        f"{figures['grad_norm']:5.2f} | sample {figures['time/rollout']:5.2f}s | train "
        f"{figures['time/train']:5.2f}s"
    )
    return f"{line} | {scores}" if scores else line


def effective_sample_size(weights: torch.Tensor) -> float:
    """(sum w)^2 / sum w^2 of all weights: how many equal weights would be as noisy (Kish 1965)."""
    return (weights.sum().square() / weights.square().sum()).item()
