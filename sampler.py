"""
Which prompts a step rolls out: the epoch's order, the history of each prompt, and the prompt draw.

Everything here is a function of (seed, step) and of the history, which is the same on every rank.
So all ranks agree without communication, and there is no random state to save. A rule uses only
what was known before the step began, so the weights 1 / (keep probability) make the expected
gradient of each step that of all its candidates.

A rule is one function and one entry, in PROMPT_RULES below.

Letters: P prompts of the data, Q candidates of a step, K of them rolled out, G completions each.
"""

import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch
from numpy.random import Generator

import dppo

# pps: its strata, and how far their moments are trusted; chosen on runs with seed 100 (runs/LOG.md)
PASS_RATES = (0.25, 0.5, 0.75)  # edges of the live groups' bins; all wrong and all right are extra
UNSEEN, ALL_WRONG, ALL_RIGHT = 0, 1, len(PASS_RATES) + 3  # bins of the last pass rate
SOURCES = 32  # the most frequent ones; the rest share one
LENGTHS = 6  # quantiles of the prompts' lengths
AGES = 3  # last rolled out 1, 2, or more epochs ago
PRIOR = 48.0  # a coarser stratum counts as this many groups of average tokens
MEMORY = 64  # steps with a live group after which an observation counts 1/e
FLOOR = 0.25  # smallest priority, relative to the average


@functools.lru_cache(maxsize=2)
def epoch_order(num_prompts: int, seed: int, epoch: int) -> torch.Tensor:
    """The shuffle [P] of an epoch (0, 1, ...)."""
    return torch.from_numpy(dppo.generator_for(seed, epoch, "epoch").permutation(num_prompts))


def candidates(num_prompts: int, prompts_per_step: int, seed: int, step: int) -> torch.Tensor:
    """The window [Q] of prompt indices that step (1, 2, ...) considers.

    Each epoch shuffles the data and cuts it into windows of exactly Q; the remainder waits for the
    next shuffle. So a prompt that was considered and dropped does not come back within the epoch.
    If it did, its keep probability would not be what the weights assume.
    """
    steps_per_epoch = num_prompts // prompts_per_step
    epoch, position = divmod(step - 1, steps_per_epoch)
    order = epoch_order(num_prompts, seed, epoch)
    return order[position * prompts_per_step : (position + 1) * prompts_per_step]


def kept_prompts(num_candidates: int, prune_rate: float) -> int:
    """How many of Q candidates a rule with priorities rolls out: exactly round((1 - r_q) Q)."""
    return round((1.0 - prune_rate) * num_candidates)


class PromptHistory:
    """What is remembered of each prompt, and what pps has learned of the strata they fall into.

    score  [P] float32, mean |advantage| of its group at its last rollout; NaN before the first
    bin    [P] uint8, its pass rate then: UNSEEN, ALL_WRONG, the bins between PASS_RATES, ALL_RIGHT
    epoch  [P] int16, of its last rollout; -1 before the first
    kind   [P] int16, fixed: its source and the quantile of its length
    sums   [3, sources, lengths, bins, ages] float64, for the groups that were in each stratum when
           they were rolled out: their number, their squared sizes (relative to the step's mean) and
           their sampled tokens. Weighted as the prompts are, to stand for all candidates; decaying
    """

    def __init__(self, lengths: torch.Tensor, sources: list[str], prompts_per_step: int):
        """lengths [P] in tokens and sources of all prompts; prompts_per_step is Q."""
        common = [name for name, _ in Counter(sources).most_common(SOURCES)]
        number = {name: index for index, name in enumerate(common)}
        edges = lengths.sort().values[torch.arange(1, LENGTHS) * len(lengths) // LENGTHS].unique()
        source = torch.tensor([number.get(name, len(common)) for name in sources])
        self.kind = (source * LENGTHS + torch.bucketize(lengths, edges, right=True)).to(torch.int16)
        self.score = torch.full((len(lengths),), torch.nan)
        self.bin = torch.zeros(len(lengths), dtype=torch.uint8)
        self.epoch = torch.full((len(lengths),), -1, dtype=torch.int16)
        strata = (len(common) + 1, LENGTHS, ALL_RIGHT + 1, AGES)
        self.sums = torch.zeros(3, *strata, dtype=torch.float64)
        self.steps_per_epoch = max(1, len(lengths) // prompts_per_step)

    def keep_prob(
        self, name: str, prune_rate: float, prompts: torch.Tensor, step: int, minibatches: int = 1
    ) -> torch.Tensor:
        """Probabilities [Q] that the step's candidates are rolled out by one of PROMPT_RULES,
        float64, checked; prune_rate is r_q."""
        dppo.check_known("prompt rule", name, PROMPT_RULES)
        kind, rule = "prompt rule", PROMPT_RULES[name]
        with dppo.named(kind, name):
            if rule.priority:
                priority = rule.priority(self, prompts, step)
                keep_prob = _fixed_size(priority, prune_rate, minibatches)
            else:
                keep_prob = rule.keep_prob(self, prompts, prune_rate, step)
        everything = torch.ones(len(prompts), dtype=torch.bool)
        dppo.check_keep_prob(kind, name, rule, prune_rate, keep_prob, everything)
        return keep_prob.double()

    def prune(
        self,
        name: str,
        prune_rate: float,
        prompts: torch.Tensor,
        generator: Generator,
        step: int,
        minibatches: int = 1,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(keep, weights) [Q] of the step's candidates, by one of PROMPT_RULES.

        Rules with priorities draw systematically, ordered by probability and at random among
        equals, so uniform is a simple random sample; others draw independently. Each mini-batch has
        its own fixed-size draw. With a single draw, the number kept for the first update would
        determine the number left for the second, whose parameters depend on the first.
        """
        dppo.check_known("prompt rule", name, PROMPT_RULES)
        rule = PROMPT_RULES[name]
        if rule.select:
            return rule.select(self, prompts, prune_rate)
        keep_prob = self.keep_prob(name, prune_rate, prompts, step, minibatches)
        if not rule.priority:
            return dppo.prune(keep_prob, generator)
        kept = []
        for part in keep_prob.chunk(minibatches):
            order = torch.from_numpy(generator.permutation(len(part)))
            order = order[part[order].argsort(stable=True)]
            kept.append(dppo.systematic(part, order, start=generator.random()))
        keep = torch.cat(kept)
        return keep, dppo.ht_weights(keep, keep_prob)

    def strata(self, prompts: torch.Tensor, step: int) -> tuple[torch.Tensor, ...]:
        """(source, length, bin, age) of prompts [n] before `step` rolls them out; indices [n]."""
        kind = self.kind[prompts].long()
        last = self.epoch[prompts].long()
        age = ((step - 1) // self.steps_per_epoch - last).clamp(1, AGES) - 1
        age = torch.where(last < 0, 0, age)
        return kind // LENGTHS, kind % LENGTHS, self.bin[prompts].long(), age

    def priority(self, prompts: torch.Tensor, step: int) -> torch.Tensor:
        """Priorities, float64 [Q]; pps keeps the candidates in proportion to them.

        At a given cost the variance is least if each stratum is drawn in proportion to the root of
        mean squared group size / mean tokens (Neyman 1934). Where that ratio is the one of all
        prompts, the priority is 1. Strata are nested: source, length, pass rate, age. Each takes in
        the next coarser estimate as PRIOR groups of average tokens, so the draw starts uniform.
        FLOOR keeps every prompt in play and bounds the weights.

        Two sources with squared group sizes 3 and 1, equal tokens, and so much data that PRIOR
        hardly counts. The mean is 2, so the priorities are the roots of 3 / 2 and 1 / 2:

            >>> history = PromptHistory(torch.tensor([5, 5]), ["a", "b"], prompts_per_step=2)
            >>> both, many = torch.arange(2), torch.full((2,), 1e6).double()
            >>> rewards, squares, tokens = torch.tensor([[1, 0], [1, 0.0]]), [3, 1], many
            >>> seen = (rewards, rewards, torch.tensor(squares), tokens)
            >>> history.update(1, both, many, *seen)
            >>> history.priority(both, step=2).numpy().round(2).tolist()
            [1.22, 0.71]
        """
        return self._relative(1, 2, prompts, step).sqrt().clamp(min=FLOOR)

    def relative_tokens(self, prompts: torch.Tensor, step: int) -> torch.Tensor:
        """Tokens that a group of each prompt is expected to sample, over the mean; float64 [Q]."""
        return self._relative(2, 0, prompts, step)

    def _relative(self, over: int, under: int, prompts, step: int) -> torch.Tensor:
        """Of each prompt's stratum, sums[over] / sums[under], relative to that of all prompts."""
        whole = self.sums.sum(dim=(1, 2, 3, 4), keepdim=True)  # [3, 1, 1, 1, 1]
        if whole[1] <= 0:  # no live group yet
            return torch.ones(len(prompts), dtype=torch.float64)
        known = whole + 1e-9
        prior = PRIOR * known[under] / known[0]
        ratio = known[over] / known[under]  # of all prompts, then of ever finer strata
        for level in range(1, 5):  # the source; with the length; with the bin; with the age
            summed = tuple(range(level + 1, 5))  # finer levels; () would sum over everything
            sums = self.sums.sum(dim=summed, keepdim=True) if summed else self.sums
            ratio = (sums[over] + prior * ratio) / (sums[under] + prior)
        relative = ratio * whole[under] / whole[over]  # [S, L, B, A]
        return relative[self.strata(prompts, step)]

    def update(
        self,
        step: int,
        prompts: torch.Tensor,
        weights: torch.Tensor,
        rewards: torch.Tensor,
        advantages: torch.Tensor,
        square: torch.Tensor,
        tokens: torch.Tensor,
    ) -> None:
        """Learn from the K prompts that were rolled out: their weights [K], rewards and advantages
        of the full groups [K, G], squared group sizes [K] and sampled tokens [K]."""
        mean = (weights * square).sum() / weights.sum()  # of the step, as if nothing were pruned
        if mean > 0:
            self.sums *= math.exp(-1 / MEMORY)
            observed = (weights, weights * square / mean, weights * tokens)
            for total, values in zip(self.sums, observed, strict=True):
                total.index_put_(self.strata(prompts, step), values, accumulate=True)
        self.score[prompts] = advantages.abs().mean(dim=1).float()
        self.epoch[prompts] = (step - 1) // self.steps_per_epoch
        rate = rewards.nanmean(dim=1).nan_to_num(0.0)
        live_bin = ALL_WRONG + 1 + torch.bucketize(rate, torch.tensor(PASS_RATES))
        dead_bin = torch.where(rate < 0.5, ALL_WRONG, ALL_RIGHT)
        bins = torch.where(dppo.dead_groups(rewards), dead_bin, live_bin)
        self.bin[prompts] = bins.to(torch.uint8)


# ---------------------------------------------------------------------------- prompt rules


@dataclass(frozen=True)
class PromptRule:
    """How prompts are dropped before rollout: an entry of PROMPT_RULES. It has either
    keep_prob(history, prompts, prune_rate, step) -> [Q], above 0, for independent draws, or
    priority(history, prompts, step) -> [Q], above 0: round((1 - r_q) Q) are kept, in proportion.
    """

    keep_prob: Callable | None = None
    priority: Callable | None = None
    rate: float | None = 0.3  # default r_q; config.METHODS has others. 0 keeps all. None: no rate
    biased: str = ""  # why, as the run's first lines say it
    select: Callable | None = None  # (history, prompts, prune_rate) -> (keep, weights)


def _fixed_size(priority: torch.Tensor, prune_rate: float, minibatches: int) -> torch.Tensor:
    """Keep probabilities [Q] proportional to priority [Q] in each mini-batch, whose sums are whole
    numbers and together kept_prompts(Q, prune_rate)."""
    kept = kept_prompts(len(priority), prune_rate)
    ends = [kept * part // minibatches for part in range(minibatches + 1)]
    counts = [end - start for start, end in itertools.pairwise(ends)]
    parts = zip(priority.chunk(minibatches), counts, strict=True)
    return torch.cat([dppo.pps_keep_prob(part, torch.ones_like(part), n) for part, n in parts])


def equal(history: PromptHistory, prompts: torch.Tensor, *_) -> torch.Tensor:
    """1 for each prompt: as probabilities, all are kept; as priorities, none is preferred."""
    return torch.ones(len(prompts), dtype=torch.float64)


def low_scores(history: PromptHistory, prompts, prune_rate: float, step: int) -> torch.Tensor:
    """1 - r_q if a prompt's score is below the mean score of the candidates, else 1; also 1 if it
    was never rolled out. (A summary speaks of low historical advantage; the mean as the threshold
    is ours.)"""
    score = history.score[prompts]
    return dppo.threshold_keep_prob(score, ~score.isnan(), prune_rate)


PROMPT_RULES = {
    "none": PromptRule(equal, rate=None),
    "uniform": PromptRule(priority=equal),
    "dppo": PromptRule(low_scores),
    "pps": PromptRule(priority=PromptHistory.priority, rate=0.6),
}
