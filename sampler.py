"""
Which prompts a step rolls out: the epoch's order, what is remembered of each prompt, and the prompt-level draw.

Everything here is a function of (seed, step) and of the history, which every rank keeps alike: no rank has a
view of its own, and there is no random state to save. What a rule looks at was known before the step began, so
1 / (probability of being kept) makes each step's expected gradient the one of all its candidates.

Letters: P prompts of the data, Q candidates of a step, K of them rolled out, G completions per prompt.
"""

import functools
import hashlib
import math
from collections import Counter

import torch

import baselines
import dppo

PROMPT_RULES = ("none", "uniform", "dppo", "pps")
FIXED_SIZE = ("uniform", "pps")  # exactly kept_prompts of the candidates; the others draw each prompt by itself

# pps: its strata, and how much of their moments is believed; chosen on runs with seed 100 (runs/LOG.md)
PASS_RATES = (0.25, 0.5, 0.75)  # edges between the bins of live groups; all wrong and all right have bins of their own
UNSEEN, ALL_WRONG, ALL_RIGHT = 0, 1, len(PASS_RATES) + 3  # bins of the last pass rate
SOURCES = 32  # the most frequent ones; others share one
LENGTHS = 6  # quantiles of the prompts' lengths
AGES = 3  # last rolled out 1, 2, more epochs ago
PRIOR = 48.0  # groups: so many in a stratum are believed as much as the coarser stratum
MEMORY = 64  # steps with a live group after which an observation counts 1/e
FLOOR = 0.25  # of the average


def seed_for(*key) -> int:
    """A seed from what it is for, such as (seed, step, purpose): the source of all randomness of a run.

    >>> seed_for(0, 1, "rollout") == seed_for(0, 1, "rollout"), seed_for(0, 1, "rollout") == seed_for(0, 2, "rollout")
    (True, False)
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

    Each epoch shuffles the data and is cut into windows of exactly Q; the remainder waits for the next
    shuffle. So a prompt that was considered and not picked does not come back before the epoch ends, without
    which its keep probability would not be what the weights assume.
    """
    steps_per_epoch = num_prompts // prompts_per_step
    epoch, position = divmod(step - 1, steps_per_epoch)
    order = epoch_order(num_prompts, seed, epoch)
    return order[position * prompts_per_step : (position + 1) * prompts_per_step]


def kept_prompts(num_candidates: int, prune_rate: float) -> int:
    """How many of Q candidates uniform and pps roll out: exactly round((1 - r_q) Q)."""
    return round((1.0 - prune_rate) * num_candidates)


class PromptHistory:
    """What is remembered of each prompt, and what pps has learned of the strata that prompts fall into.

    score  [P] float32, mean |advantage| of its group at its last rollout; NaN until it had one
    bin    [P] uint8, of the pass rate then: UNSEEN, ALL_WRONG, the bins between PASS_RATES, ALL_RIGHT
    epoch  [P] int16, of its last rollout; -1 until it had one
    kind   [P] int16, fixed: its source and the quantile of its length
    sums   [3, sources, lengths, bins, ages] float64: of the groups that were in a stratum when they were rolled out,
           how many, their squared sizes (relative to their step's mean) and sampled tokens, all weighted as the prompts
           are, so that they stand for the candidates; all fading
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
        self.sums = torch.zeros(3, len(common) + 1, LENGTHS, ALL_RIGHT + 1, AGES, dtype=torch.float64)
        self.steps_per_epoch = max(1, len(lengths) // prompts_per_step)

    def keep_prob(
        self, rule: str, prune_rate: float, prompts: torch.Tensor, step: int, minibatches: int = 1
    ) -> torch.Tensor:
        """Probabilities [Q] with which the step's candidates are rolled out, float64; prune_rate is r_q.

        none     1
        uniform  the same for all, so that exactly round((1 - r_q) Q) are kept
        dppo     1 - r_q for one whose score is below the mean of the seen candidates, else 1, also for one that was
                 never rolled out. (A summary speaks of low historical advantage; the mean as threshold is ours.)
        pps      ours: in proportion to `priority`, as many as uniform
        """
        if rule not in PROMPT_RULES:
            raise ValueError(f"unknown prompt rule {rule!r}: choose one of {', '.join(PROMPT_RULES)}")
        equal = torch.ones(len(prompts), dtype=torch.float64)
        if rule == "none":
            return equal
        if rule == "dppo":
            score = self.score[prompts]
            return dppo.threshold_keep_prob(score, ~score.isnan(), prune_rate)
        priority = self.priority(prompts, step) if rule == "pps" else equal
        kept = kept_prompts(len(prompts), prune_rate)
        counts = [kept * (part + 1) // minibatches - kept * part // minibatches for part in range(minibatches)]
        parts = zip(priority.chunk(minibatches), equal.chunk(minibatches), counts, strict=True)
        return torch.cat([dppo.pps_keep_prob(part, one, count) for part, one, count in parts])

    def prune(
        self, rule: str, prune_rate: float, prompts: torch.Tensor, generator: torch.Generator, step: int,
        minibatches: int = 1,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """(keep, weights) [Q] of the step's candidates; PROMPT_RULES, or dppo_floor of baselines.py.

        uniform and pps draw systematically, in order of the probability and by chance among equals, so uniform is a
        simple random sample; dppo draws independently. Each mini-batch has a fixed-size draw of its own: what one draw
        keeps for the first update tells what is left for the second, whose parameters come from the first.
        """
        if rule == "dppo_floor":
            score = self.score[prompts]
            return baselines.floor_of_low(score, ~score.isnan(), prune_rate)
        keep_prob = self.keep_prob(rule, prune_rate, prompts, step, minibatches)
        if rule not in FIXED_SIZE:
            return dppo.prune(keep_prob, generator)
        keep = []
        for part in keep_prob.chunk(minibatches):
            order = torch.randperm(len(part), generator=generator)
            order = order[part[order].argsort(stable=True)]
            keep.append(dppo.systematic(part, order, torch.rand((), dtype=torch.float64, generator=generator).item()))
        keep = torch.cat(keep)
        return keep, dppo.ht_weights(keep, keep_prob)

    def strata(self, prompts: torch.Tensor, step: int) -> tuple[torch.Tensor, ...]:
        """(source, length, bin, age) of prompts [K] before they are rolled out in `step`, each an index [K]."""
        kind, last = self.kind[prompts].long(), self.epoch[prompts].long()
        age = ((step - 1) // self.steps_per_epoch - last).clamp(1, AGES) - 1
        return kind // LENGTHS, kind % LENGTHS, self.bin[prompts].long(), torch.where(last < 0, 0, age)

    def priority(self, prompts: torch.Tensor, step: int) -> torch.Tensor:
        """What pps's keep probabilities are proportional to, float64 [K]; 1 is the average.

        Neyman's allocation is a stratum's root mean square of group sizes over the root of its mean cost: the root of
        r, summed squares over summed cost. Strata are nested: source, length, pass rate, age; the coarser one's r
        counts like PRIOR groups of the finer one, so the draw is uniform until the data say otherwise. None is below
        FLOOR, so no prompt is forgotten and weights stay bounded.
        """
        whole = self.sums.sum(dim=(1, 2, 3, 4), keepdim=True)  # [3, 1, 1, 1, 1]
        count, square, cost = whole + 1e-9
        prior, r = PRIOR * cost / count, square / cost
        for finest in range(1, 5):  # the source; with the length; with the bin; with the age
            _, square, cost = self.sums.sum(dim=tuple(range(finest + 1, 5)), keepdim=True) if finest < 4 else self.sums
            r = (square + prior * r) / (cost + prior)
        relative = (r * whole[2] / whole[1]).sqrt() if whole[1] > 0 else torch.ones_like(r)  # [S, L, B, A]
        return relative.clamp(min=FLOOR)[self.strata(prompts, step)]

    def update(
        self, step: int, prompts: torch.Tensor, weights: torch.Tensor, rewards: torch.Tensor,
        advantages: torch.Tensor, square: torch.Tensor, tokens: torch.Tensor,
    ) -> None:  # fmt: skip
        """Learn from the K prompts that were rolled out, with their weights [K], full groups' rewards and advantages
        [K, G], squared group sizes [K] and tokens sampled [K]."""
        mean = (weights * square).sum() / weights.sum()  # of the step, as if nothing were pruned
        if mean > 0:
            self.sums *= math.exp(-1 / MEMORY)
            for total, seen in zip(self.sums, (weights, weights * square / mean, weights * tokens), strict=True):
                total.index_put_(self.strata(prompts, step), seen, accumulate=True)
        self.score[prompts] = advantages.abs().mean(dim=1).float()
        self.epoch[prompts] = (step - 1) // self.steps_per_epoch
        rate = rewards.nanmean(dim=1).nan_to_num(0.0)
        live_bin = ALL_WRONG + 1 + torch.bucketize(rate, torch.tensor(PASS_RATES))
        dead_bin = torch.where(rate < 0.5, ALL_WRONG, ALL_RIGHT)
        self.bin[prompts] = torch.where(dppo.dead_groups(rewards), dead_bin, live_bin).to(torch.uint8)

    def summary(self, step: int, window: torch.Tensor, keep: torch.Tensor | None) -> dict:
        """What the log says of what is known before a step rolls out, and of what the rule does with it: keep [Q] of
        the window, or None for a rule without one. Lists count by bin of the last pass rate, UNSEEN to ALL_RIGHT."""
        counts = lambda bins: torch.bincount(bins.long(), minlength=ALL_RIGHT + 1).tolist()
        known = counts(self.bin)
        row = {"history/never_rolled_out": known[UNSEEN] / len(self.bin), "history/pass_rates": known}
        if keep is None:
            return row
        epoch, position = divmod(step - 1, self.steps_per_epoch)
        skipped = position * len(window) - (self.epoch == epoch).sum().item()
        bins = self.bin[window]
        return row | {
            "history/skipped_this_epoch": skipped / (position * len(window)) if position else math.nan,
            "history/candidates_by_pass_rate": counts(bins),
            "history/kept_by_pass_rate": counts(bins[keep]),
        }
