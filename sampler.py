"""
Which prompts a step rolls out: the epoch's order, what is remembered of each prompt, and the prompt-level draw.

Everything here is a function of (seed, step) and of the history, which every rank keeps alike: no rank has a
view of its own, and there is no random state to save.

Letters: Q candidates of a step, G completions per prompt.
"""

import hashlib

import torch

import baselines
import dppo


def seed_for(*key) -> int:
    """A seed from what it is for, such as (seed, step, purpose): the source of all randomness of a run.

    >>> seed_for(0, 1, "rollout") == seed_for(0, 1, "rollout"), seed_for(0, 1, "rollout") == seed_for(0, 2, "rollout")
    (True, False)
    """
    return int.from_bytes(hashlib.sha256(repr(key).encode()).digest()[:8], "big") >> 1


def generator_for(*key) -> torch.Generator:
    """A CPU generator seeded by seed_for(*key)."""
    return torch.Generator().manual_seed(seed_for(*key))


def candidates(num_prompts: int, prompts_per_step: int, seed: int, step: int) -> torch.Tensor:
    """The window [Q] of prompt indices that step (1, 2, ...) considers.

    Each epoch shuffles the data and is cut into windows of exactly Q; the remainder waits for the next
    shuffle. So a prompt that was considered and not picked does not come back before the epoch ends, without
    which its keep probability would not be what the weights assume.
    """
    steps_per_epoch = num_prompts // prompts_per_step
    epoch, position = divmod(step - 1, steps_per_epoch)
    order = torch.randperm(num_prompts, generator=generator_for(seed, epoch, "epoch"))
    return order[position * prompts_per_step : (position + 1) * prompts_per_step]


class PromptHistory:
    """The mean |advantage| of each prompt's group at its last rollout; NaN until it had one."""

    def __init__(self, num_prompts: int):
        self.score = torch.full((num_prompts,), torch.nan, dtype=torch.float64)  # [num_prompts]

    def prune(
        self, rule: str, prune_rate: float, prompts: torch.Tensor, generator: torch.Generator
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(keep, weights) [Q] of the step's candidates.

        none: all are kept. dppo: prune_rate (r_q) is the chance of dropping one whose score is below the mean of the
        seen candidates; one that was never rolled out is always kept. dppo_floor: its deterministic form, baselines.py.
        """
        score = self.score[prompts]
        seen = ~score.isnan()
        if rule == "dppo_floor":
            return baselines.floor_of_low(score, seen, prune_rate)
        if rule not in ("none", "dppo"):
            raise ValueError(f"unknown prompt rule {rule!r}: choose one of none, dppo, dppo_floor")
        return dppo.prune(dppo.threshold_keep_prob(score, seen, prune_rate if rule == "dppo" else 0.0), generator)

    def update(self, prompts: torch.Tensor, advantages: torch.Tensor) -> None:
        """Remember the full groups' advantages [K, G] of the K prompts that were rolled out."""
        self.score[prompts] = advantages.abs().mean(dim=1).double()
