"""
Which prompts a step rolls out: the epoch's order, the history of each prompt, and the prompt draw.

Everything here is a function of (seed, step) and of the history, which is the same on every rank.
So all ranks agree without communication, and there is no random state to save. A rule uses only
what was known before the step began. That makes the weights 1 / P(kept) exact: the expected
gradient of each step is that of all its candidates.

A rule is one function of the candidates' history, and one entry in PROMPT_RULES. You may add rules.
`candidates` and `prune_prompts` keep the estimate exact: do not change those.

Letters: P prompts of the data, Q candidates of a step, K of them rolled out, G completions each.
"""

import functools
from dataclasses import dataclass

import torch
from numpy.random import Generator

import dppo


@functools.lru_cache(maxsize=2)
def epoch_order(num_prompts: int, seed: int, epoch: int) -> torch.Tensor:
    """The shuffle [P] of an epoch (0, 1, ...)."""
    return torch.from_numpy(dppo.generator_for(seed, epoch, "epoch").permutation(num_prompts))


def candidates(num_prompts: int, prompts_per_step: int, seed: int, step: int) -> torch.Tensor:
    """The window [Q] of prompt indices that step (1, 2, ...) considers.

    Each epoch shuffles the data and cuts it into windows of exactly Q; the remainder waits for the
    next shuffle. A dropped prompt is not queued again within the epoch. If it were, dropping would
    make it a candidate more often, and over the epoch it would count too much.
    """
    steps_per_epoch = num_prompts // prompts_per_step
    epoch, position = divmod(step - 1, steps_per_epoch)
    order = epoch_order(num_prompts, seed, epoch)
    return order[position * prompts_per_step : (position + 1) * prompts_per_step]


@dataclass
class Prompts:
    """What a prompt rule may look at: the candidates of one mini-batch, [n]."""

    # float32, mean |advantage| of its group at its last rollout: 0 if all rewards were equal. NaN:
    # it was never rolled out.
    past_advantage: torch.Tensor

    @property
    def live(self) -> torch.Tensor:
        """Which may have a gradient, bool [n]: all of them."""
        return torch.ones_like(self.past_advantage, dtype=torch.bool)


class PromptHistory:
    """What is remembered of all prompts: past_advantage [P], as in Prompts."""

    def __init__(self, num_prompts: int):
        self.past_advantage = torch.full((num_prompts,), torch.nan)

    def restore(self, state: dict) -> None:
        """Take over vars() of another history."""
        self.past_advantage = state["past_advantage"]

    def update(self, prompts: torch.Tensor, advantages: torch.Tensor) -> None:
        """Remember the full groups of the K prompts that were rolled out: advantages [K, G]."""
        self.past_advantage[prompts] = advantages.abs().mean(dim=1).float()

    def of(self, prompts: torch.Tensor) -> Prompts:
        """What is remembered of these prompts [n]."""
        return Prompts(self.past_advantage[prompts])


# ---------------------------------------------------------------------------- prompt rules


def prune_prompts(
    name: str,
    prune_rate: float,
    history: PromptHistory,
    prompts: torch.Tensor,
    generator: Generator,
    minibatches: int = 1,
) -> dppo.Drawn:
    """(keep, weights) [Q] of the candidates `prompts`, by one of PROMPT_RULES.

    Each mini-batch has its own draw. With a single draw, the number kept for the first update would
    determine the number left for the second, whose parameters depend on the first.
    """
    parts = prompts.chunk(minibatches)
    drawn = [PROMPT_RULES[name].draw(history.of(part), prune_rate, generator) for part in parts]
    keep, weights = zip(*drawn, strict=True)
    return torch.cat(keep), torch.cat(weights)


def blindly(batch: Prompts, prune_rate: float) -> torch.Tensor:
    """A fixed number, round((1 - r_q) n), all with the same probability."""
    n = len(batch.past_advantage)
    return torch.full((n,), round((1.0 - prune_rate) * n) / n, dtype=torch.float64)


def low_past_advantages(batch: Prompts, prune_rate: float) -> torch.Tensor:
    """The paper's: 1 - r_q if a prompt's past |advantage| is below the mean of the candidates, else
    1; also 1 if it was never rolled out. (A summary speaks of low historical advantage; the mean as
    the threshold is ours.)"""
    known = ~batch.past_advantage.isnan()
    return dppo.threshold_keep_prob(batch.past_advantage, known, prune_rate)


# The default rate is r_q. Draws are systematic, in random order.
PROMPT_RULES = {
    "none": dppo.Rule(dppo.everything, rate=None),
    "uniform": dppo.Rule(blindly, rate=0.3),
    "dppo": dppo.Rule(low_past_advantages, rate=0.3),
}
