"""
Which prompts a step rolls out: the epoch's order, the history of each prompt, and the prompt draw.

Everything here is a function of (seed, step) and of the history, which is the same on every rank.
So all ranks agree without communication, and there is no random state to save. A rule uses only
what was known before the step began, so the weights 1 / (keep probability) make the expected
gradient of each step that of all its candidates.

Letters: P prompts of the data, Q candidates of a step, K of them rolled out, G completions each.
"""

import functools
import hashlib
import itertools
import math
from collections import Counter

import torch

import baselines
import dppo

PROMPT_RULES = ("none", "uniform", "dppo", "pps")
FIXED_SIZE = ("uniform", "pps")  # keep exactly kept_prompts; the others draw independently

# pps: its strata, and how far their moments are trusted; chosen on runs with seed 100 (runs/LOG.md)
PASS_RATES = (0.25, 0.5, 0.75)  # edges of the live groups' bins; all wrong and all right are extra
UNSEEN, ALL_WRONG, ALL_RIGHT = 0, 1, len(PASS_RATES) + 3  # bins of the last pass rate
SOURCES = 32  # the most frequent ones; the rest share one
LENGTHS = 6  # quantiles of the prompts' lengths
AGES = 3  # last rolled out 1, 2, or more epochs ago
PRIOR = 48.0  # groups: a coarser stratum weighs as much as this many groups of the finer one
MEMORY = 64  # steps with a live group after which an observation counts 1/e
FLOOR = 0.25  # smallest priority, relative to the average


def seed_for(*key) -> int:
    """A seed from its purpose, such as (seed, step, purpose): the source of all a run's randomness.

    >>> seed_for(0, 1, "rollout") == seed_for(0, 1, "rollout") != seed_for(0, 2, "rollout")
    True
    """
    return int.from_bytes(hashlib.sha256(repr(key).encode()).digest()[:8], "big") >> 1


def generator_for(*key) -> torch.Generator:
    """A CPU generator seeded by seed_for(*key)."""
    return torch.Generator().manual_seed(seed_for(*key))


@functools.lru_cache(maxsize=2)
def epoch_order(num_prompts: int, seed: int, epoch: int) -> torch.Tensor:
    """The shuffle [P] of an epoch (0, 1, ...)."""
    return torch.randperm(num_prompts, generator=generator_for(seed, epoch, "epoch"))


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
    """How many of Q candidates uniform and pps roll out: exactly round((1 - r_q) Q)."""
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
        self, rule: str, prune_rate: float, prompts: torch.Tensor, step: int, minibatches: int = 1
    ) -> torch.Tensor:
        """Probabilities [Q] that the step's candidates are rolled out, float64; prune_rate is r_q.

        none     1
        uniform  equal, so that exactly round((1 - r_q) Q) are kept
        dppo     1 - r_q if its score is below the mean score of the candidates, else 1; also 1 if
                 it was never rolled out. (A summary speaks of low historical advantage; the mean
                 as the threshold is ours.)
        pps      ours: proportional to `priority`; keeps as many as uniform
        """
        dppo.check_known("prompt rule", rule, PROMPT_RULES)
        equal = torch.ones(len(prompts), dtype=torch.float64)
        if rule == "none":
            return equal
        if rule == "dppo":
            score = self.score[prompts]
            return dppo.threshold_keep_prob(score, ~score.isnan(), prune_rate)
        priority = self.priority(prompts, step) if rule == "pps" else equal
        kept = kept_prompts(len(prompts), prune_rate)
        ends = [kept * part // minibatches for part in range(minibatches + 1)]
        counts = [end - start for start, end in itertools.pairwise(ends)]
        parts = (priority.chunk(minibatches), equal.chunk(minibatches), counts)
        return torch.cat([dppo.pps_keep_prob(*part) for part in zip(*parts, strict=True)])

    def prune(
        self,
        rule: str,
        prune_rate: float,
        prompts: torch.Tensor,
        generator: torch.Generator,
        step: int,
        minibatches: int = 1,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(keep, weights) [Q] of the step's candidates; one of PROMPT_RULES, or dppo_floor.

        uniform and pps draw systematically, ordered by probability and at random among equals, so
        uniform is a simple random sample; dppo draws independently. Each mini-batch has its own
        fixed-size draw. With a single draw, the number kept for the first update would determine
        the number left for the second, whose parameters depend on the first.
        """
        if rule == "dppo_floor":
            score = self.score[prompts]
            return baselines.floor_of_low(score, ~score.isnan(), prune_rate)
        keep_prob = self.keep_prob(rule, prune_rate, prompts, step, minibatches)
        if rule not in FIXED_SIZE:
            return dppo.prune(keep_prob, generator)
        kept = []
        for part in keep_prob.chunk(minibatches):
            order = torch.randperm(len(part), generator=generator)
            order = order[part[order].argsort(stable=True)]
            start = torch.rand((), dtype=torch.float64, generator=generator).item()
            kept.append(dppo.systematic(part, order, start))
        keep = torch.cat(kept)
        return keep, dppo.ht_weights(keep, keep_prob)

    def strata(self, prompts: torch.Tensor, step: int) -> tuple[torch.Tensor, ...]:
        """(source, length, bin, age) of prompts [K] before `step` rolls them out; indices [K]."""
        kind = self.kind[prompts].long()
        last = self.epoch[prompts].long()
        age = ((step - 1) // self.steps_per_epoch - last).clamp(1, AGES) - 1
        age = torch.where(last < 0, 0, age)
        return kind // LENGTHS, kind % LENGTHS, self.bin[prompts].long(), age

    def priority(self, prompts: torch.Tensor, step: int) -> torch.Tensor:
        """What pps's keep probabilities are proportional to, float64 [K]; 1 is the average.

        Neyman's allocation for a stratum is the root mean square of its group sizes over the root
        of its mean cost: the root of r, summed squares over summed cost. Strata are nested: source,
        length, pass rate, age. The coarser stratum's r counts like PRIOR groups of the finer one,
        so the draw is uniform until the data say otherwise. No priority is below FLOOR, so no
        prompt is forgotten and weights stay bounded.
        """
        whole = self.sums.sum(dim=(1, 2, 3, 4), keepdim=True)  # [3, 1, 1, 1, 1]
        if whole[1] <= 0:  # no live group yet
            return torch.ones(len(prompts), dtype=torch.float64)
        count, square, cost = whole + 1e-9
        prior = PRIOR * cost / count
        r = square / cost
        for finest in range(1, 5):  # the source; with the length; with the bin; with the age
            finer = tuple(range(finest + 1, 5))
            _, square, cost = self.sums.sum(dim=finer, keepdim=True) if finer else self.sums
            r = (square + prior * r) / (cost + prior)
        relative = (r * whole[2] / whole[1]).sqrt().clamp(min=FLOOR)  # [S, L, B, A]
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

    def summary(self, step: int, window: torch.Tensor, keep: torch.Tensor | None) -> dict:
        """What the log says about the history before a step rolls out, and about the draw from it.

        keep [Q] is of the window, or None for a rule without one. Lists count prompts by the bin of
        their last pass rate, UNSEEN to ALL_RIGHT.
        """
        counts = lambda bins: torch.bincount(bins.long(), minlength=ALL_RIGHT + 1).tolist()
        known = counts(self.bin)
        unseen = known[UNSEEN] / len(self.bin)
        row = {"history/never_rolled_out": unseen, "history/pass_rates": known}
        if keep is None:
            return row
        epoch, position = divmod(step - 1, self.steps_per_epoch)
        before = position * len(window)  # candidates of this epoch's earlier steps
        skipped = before - (self.epoch == epoch).sum().item()
        bins = self.bin[window]
        return row | {
            "history/skipped_this_epoch": skipped / before if before else math.nan,
            "history/candidates_by_pass_rate": counts(bins),
            "history/kept_by_pass_rate": counts(bins[keep]),
        }
