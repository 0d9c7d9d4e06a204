"""
Which prompts a step rolls out: the epoch's order, the history of each prompt, and the prompt draw.

Everything here is a function of (seed, step) and of the history, which is the same on every rank.
So all ranks agree without communication, and there is no random state to save. A rule uses only
what was known before the step began. That makes the weights 1 / P(kept) exact: the expected
gradient of each step is that of all its candidates.

A rule is one function of the candidates' scores, and one entry in PROMPT_RULES. You may add rules.
`candidates` and `PromptHistory.prune` keep the estimate exact: do not change those.

Letters: P prompts of the data, Q candidates of a step, K of them rolled out, G completions each.
"""

import functools
import math
from collections.abc import Callable
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


class PromptHistory:
    """What is remembered of each prompt's group at its last rollout.

    score   [P] float32, mean |advantage|: 0 if all rewards were equal; NaN before the first rollout
    tokens  [P] float32, mean tokens of a completion; NaN before the first rollout
    """

    def __init__(self, num_prompts: int):
        self.score = torch.full((num_prompts,), torch.nan)
        self.tokens = torch.full((num_prompts,), torch.nan)

    def update(
        self, prompts: torch.Tensor, advantages: torch.Tensor, lengths: torch.Tensor
    ) -> None:
        """Remember the full groups of the K prompts that were rolled out: advantages and lengths
        [K, G]."""
        self.score[prompts] = advantages.abs().mean(dim=1).float()
        self.tokens[prompts] = lengths.double().mean(dim=1).float()

    def expected_tokens(self, prompts: torch.Tensor) -> torch.Tensor:
        """Tokens [n] that a completion of each prompt is expected to have: the mean of its last
        group, or of all known groups."""
        known = self.tokens[~self.tokens.isnan()].tolist()
        average = 1.0  # any number: only ratios count
        if known:  # fsum, because ranks with different thread counts must agree
            average = math.fsum(known) / len(known)
        return self.tokens[prompts].nan_to_num(average)

    def keep_prob(
        self, name: str, prune_rate: float, prompts: torch.Tensor, minibatches: int = 1
    ) -> torch.Tensor:
        """Probabilities [Q] that the candidates are rolled out, by one of PROMPT_RULES at this rate
        (r_q in docs/); float64, checked."""
        dppo.check_known("prompt rule", name, PROMPT_RULES)
        rule, parts = PROMPT_RULES[name], []
        for score in self.score[prompts].chunk(minibatches):
            with dppo.named("prompt rule", name):
                keep_prob = rule.keep_prob(score, prune_rate)
            live = torch.ones_like(score, dtype=torch.bool)  # any prompt may have a gradient
            dppo.check_keep_prob("prompt rule", name, rule, prune_rate, keep_prob, live)
            parts.append(keep_prob.double())
        return torch.cat(parts)

    def prune(
        self,
        name: str,
        prune_rate: float,
        prompts: torch.Tensor,
        generator: Generator,
        minibatches: int = 1,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(keep, weights) [Q] of the candidates, by one of PROMPT_RULES.

        The draw is systematic: it keeps as many as the probabilities add up to, rounded up or down.
        Its order is by probability and at random among equals, so uniform is a simple random
        sample. Each mini-batch has its own draw. With a single draw, the number kept for the first
        update would determine the number left for the second, whose parameters depend on the first.
        """
        dppo.check_known("prompt rule", name, PROMPT_RULES)
        rule = PROMPT_RULES[name]
        if rule.select:
            selected = []
            for score in self.score[prompts].chunk(minibatches):
                with dppo.named("prompt rule", name):
                    pair = rule.select(score, prune_rate)
                selected.append(dppo.check_selection("prompt rule", name, pair, score.shape))
            keep, weights = zip(*selected, strict=True)
            return torch.cat(keep), torch.cat(weights)
        keep_prob = self.keep_prob(name, prune_rate, prompts, minibatches)
        kept = []
        for part in keep_prob.chunk(minibatches):
            order = torch.from_numpy(generator.permutation(len(part)))
            order = order[part[order].argsort(stable=True)]
            kept.append(dppo.systematic(part, order, start=generator.random()))
        keep = torch.cat(kept)
        return keep, dppo.ht_weights(keep, keep_prob)


# ---------------------------------------------------------------------------- prompt rules


@dataclass(frozen=True)
class PromptRule:
    """How prompts are dropped before rollout: an entry of PROMPT_RULES.

    keep_prob(score, prune_rate) -> [n], above 0, of the n candidates of one mini-batch. score [n]
    is PromptHistory's, and NaN if a prompt was never rolled out.
    """

    keep_prob: Callable | None  # None: the rule has `select`
    rate: float | None = 0.3  # default r_q; config.METHODS has others. 0 keeps all. None: no rate
    fixed_size: bool = False  # the probabilities always add up to kept_prompts(n, r_q)
    biased: str | None = None  # the reason, printed in the run's first lines
    select: Callable | None = None  # (score, prune_rate) -> (keep, weights)


def kept_prompts(num_candidates: int, prune_rate: float) -> int:
    """How many of n candidates a rule of fixed size rolls out: exactly round((1 - r_q) n)."""
    return round((1.0 - prune_rate) * num_candidates)


def everything(score: torch.Tensor, prune_rate: float) -> torch.Tensor:
    return torch.ones_like(score)


def blindly(score: torch.Tensor, prune_rate: float) -> torch.Tensor:
    """A fixed number, all with the same probability."""
    return torch.full_like(score.double(), kept_prompts(len(score), prune_rate) / len(score))


def low_scores(score: torch.Tensor, prune_rate: float) -> torch.Tensor:
    """The paper's: 1 - r_q if a prompt's score is below the mean score of the candidates, else 1;
    also 1 if it was never rolled out. (A summary speaks of low historical advantage; the mean as
    the threshold is ours.)"""
    return dppo.threshold_keep_prob(score, ~score.isnan(), prune_rate)


PROMPT_RULES = {
    "none": PromptRule(everything, rate=None),
    "uniform": PromptRule(blindly, fixed_size=True),
    "dppo": PromptRule(low_scores),
}
