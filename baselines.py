"""
The baselines' pruning rules: what they keep, and what they multiply it by.

    uniform     unbiased  drops a fixed share of all completions blindly; weights 1 / (1 - share)
    cppo        BIASED    the largest |advantage| of each group: CPPO's paper (arXiv:2503.22342)
    cppo_batch  BIASED    the largest |advantage| of the whole mini-batch: CPPO's code (lzhxmu/CPPO)
    pods        BIASED    the m rewards of each group with the largest variance, and advantages
                          within these (PODS, arXiv:2504.13818, YixuanEvenXu/pods)
    dppo_floor  BIASED    the deterministic fraction that secondary sources ascribe to DPPO
    greso       BIASED    skips prompts all right or all wrong lately, refills (arXiv:2506.02177)
    dynamic     BIASED    DAPO's dynamic sampling (arXiv:2503.14476): refills, skips no prompt
    mopps       BIASED    the prompts whose guessed pass rates are nearest 1/2 (arXiv:2507.04632)

Keeping by rank gives keep probabilities of 0 and 1, and no weight can correct for a zero. PODS also
takes the mean and standard deviation of what it keeps. GRESO skips at random but does not weight
what it keeps, and it stops once it has enough live groups, which is a bias of its own. MoPPS's draw
is random, too, but nothing divides by the chance of being among the nearest. These rules are here
for comparison.

Two are left out. SPEED-RL (arXiv:2506.09016) begins its groups in one step and completes them in a
later one, so their token ids and log-probs would have to wait in the checkpoint, and the groups of
a step would differ in size. SPEC-RL (arXiv:2509.23232) reuses old texts leniently, for which it
needs drafts, and these saved no time here (runs/LOG.md).

Letters: P prompts of the data, Q prompts of a step, K of them rolled out, G completions each.
"""

import copy
import random
from collections.abc import Callable

import torch

import dppo

COMPLETION_RULES = ("uniform", "cppo", "cppo_batch", "pods", "dppo_floor")
BIASED = ("cppo", "cppo_batch", "pods", "dppo_floor")
SELECTORS = ("greso", "dynamic", "mopps")  # prompt rules with a state, and without a window


def kept_count(size: int, prune_rate: float) -> int:
    """floor(size (1 - prune_rate)), safe from rounding: of 10 at rate 0.9, one is kept."""
    return int(size * (1.0 - prune_rate) + 1e-9)


def allocated_prompts(prompts: int, group_size: int, prune_rate: float) -> int:
    """CPPO's dynamic completion allocation: how many prompts to roll out so that their kept
    completions fill the update of `prompts` un-pruned ones."""
    return prompts * group_size // kept_count(group_size, prune_rate)


def top_completions(scores: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(keep, weights) [..., n]: the `count` highest scores of the last dimension; ties keep order.

    Their weights are n / count: if the denominator counts completions (grpo, dr_grpo, gspo), the
    result is the mean over what is kept.
    """
    best = scores.argsort(dim=-1, descending=True, stable=True)[..., :count]
    keep = torch.zeros(scores.shape, dtype=torch.bool).scatter(-1, best, True)
    return keep, keep.double() * (scores.shape[-1] / max(count, 1))


def floor_of_low(
    scores: torch.Tensor, counted: torch.Tensor, prune_rate: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(keep, weights) [..., n], for completions by |advantage| and for prompts by history.

    Of the n_low scores below the mean of the last dimension, the floor(rate n_low) lowest are
    dropped, and ties keep order; the rest of them gets weight 1 / (1 - rate).
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

    PODS normalizes the subset's rewards anew. Within a group advantages are rewards, shifted and
    scaled, so this normalizes advantages [K, G]. A weight turns the given advantage into the new
    one. An advantage of exactly 0 stays 0; rewards of 0 and 1 have none in a live group.
    """
    K, G = advantages.shape
    weights = torch.zeros(K, G, dtype=torch.float64)
    if count < 2:  # one reward does not vary
        return top_completions(advantages, count)[0], weights
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


def prune_completions(
    rule: str, prune_rate: float, batch: dppo.Completions, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """(keep, weights) [K, G] of one of COMPLETION_RULES.

    prune_rate is the share removed (dppo_floor: of those below the mean).
    """
    dppo.check_known("completion rule", rule, COMPLETION_RULES)
    scores = batch.advantages.abs()
    K, G = scores.shape
    if rule == "uniform":
        keep_prob = torch.full((K, G), 1.0 - prune_rate, dtype=torch.float64)
        order = torch.randperm(K * G, generator=generator)  # makes it a simple random sample
        start = torch.rand((), dtype=torch.float64, generator=generator).item()
        keep = dppo.systematic(keep_prob, order, start)
        return keep, dppo.ht_weights(keep, keep_prob)
    if rule == "cppo":
        return top_completions(scores, kept_count(G, prune_rate))
    if rule == "cppo_batch":
        keep, weights = top_completions(scores.flatten(), kept_count(K * G, prune_rate))
        return keep.view(K, G), weights.view(K, G)
    if rule == "pods":
        return most_varied(batch.advantages, kept_count(G, prune_rate))
    return floor_of_low(scores, ~batch.rewards.isnan(), prune_rate)


# ---------------------------------------------------------------------------- GRESO (prompt level)


class Greso:
    """GRESO's selection of prompts, as in its code (Infini-AI-Lab/GRESO: presampling_selector.py,
    ray_trainer.py).

    A prompt that was all right (mean reward at least EASY) on each of its last z visits is rolled
    out with probability p_easy^z, at least FLOOR; all wrong (at most HARD): p_hard^z. Both
    probabilities follow the share of such groups in each step, towards ALPHA_EASY and ALPHA_HARD. A
    step rolls out until about Q groups are live, and trains on these without weights. The original
    uses groups of 8, where a mean beyond these bounds implies a dead group; here groups have any
    size, so both are required. Without `skips` no prompt is skipped, which is DAPO's dynamic
    sampling with GRESO's sizes of rounds.
    """

    EASY, HARD, FLOOR = 0.98, 0.11, 0.01
    ALPHA_EASY, ALPHA_HARD = 0.25 / 3, 2 * 0.25 / 3  # of a target of 0.25 dead groups
    CHANGE, LEAST, MOST = 0.01, 0.05, 0.95  # step size and bounds of p_easy and p_hard
    LOADER = 32  # prompts loaded together
    ROUNDS = 20  # of rollouts in a step; ours: without live groups the original never stops

    def __init__(self, num_prompts: int, skips: bool = True):
        self.skips = skips
        self.easy, self.hard = torch.zeros(2, num_prompts, dtype=torch.int16)  # streaks [P]
        self.p_easy = self.p_hard = 0.5
        self.cursor = 0  # prompts visited since the run began, over all epochs

    def copy(self) -> "Greso":
        """The same state in tensors of its own. A step collects with a copy and keeps it only
        after its updates, so an interrupted step leaves no trace."""
        twin = copy.copy(self)
        twin.easy, twin.hard = self.easy.clone(), self.hard.clone()
        return twin

    def keep_prob(self, prompts: torch.Tensor) -> torch.Tensor:
        """Chance [K] of each prompt to be rolled out."""
        if not self.skips:
            return torch.ones(len(prompts), dtype=torch.float64)
        easy = (self.p_easy ** self.easy[prompts].double()).clamp(min=self.FLOOR)
        return easy * (self.p_hard ** self.hard[prompts].double()).clamp(min=self.FLOOR)

    def select(self, count: int, order: Callable, generator: torch.Generator) -> torch.Tensor:
        """The next `count` prompts that are not skipped; order(epoch) is the shuffle [P]."""
        chosen = torch.zeros(0, dtype=torch.int64)
        while len(chosen) < count:
            epoch, position = divmod(self.cursor, len(self.easy))
            loaded = order(epoch)[position : position + self.LOADER]
            keep = dppo.draw(self.keep_prob(loaded), generator)
            before = keep.cumsum(dim=0) - keep.long()  # kept prompts ahead of each
            used = int((before < count - len(chosen)).sum())  # the rest stays for the next call
            chosen = torch.cat([chosen, loaded[:used][keep[:used]]])
            self.cursor += used
        return chosen

    def update(self, prompts: torch.Tensor, rewards: torch.Tensor) -> None:
        """Streaks of the prompts [K] from their groups' rewards [K, G]."""
        for streak, found in zip((self.easy, self.hard), self._easy_and_hard(rewards), strict=True):
            streak[prompts] = torch.where(found, streak[prompts] + 1, 0).to(torch.int16)

    def _easy_and_hard(self, rewards):
        dead, mean = dppo.dead_groups(rewards), rewards.nanmean(dim=1)
        return dead & (mean >= self.EASY), dead & (mean <= self.HARD)

    def adjust(self, rewards: torch.Tensor) -> None:
        """Move p_easy and p_hard, once a step, by all groups rolled out in it [K, G]."""
        easy, hard = (found.double().mean() for found in self._easy_and_hard(rewards))
        self.p_easy = self._moved(self.p_easy, easy >= self.ALPHA_EASY)
        self.p_hard = self._moved(self.p_hard, hard >= self.ALPHA_HARD)

    def _moved(self, chance, too_many):
        change = -self.CHANGE if too_many else self.CHANGE
        return min(max(chance + change, self.LEAST), self.MOST)

    def next_batch(
        self, missing: int, dead_share: float, default: int, least: int
    ) -> tuple[int, bool]:
        """(prompts of the next round, whether it is the last), with `missing` live groups to go."""
        estimate = int(1.25 * missing / (1 - dead_share)) if dead_share < 1 else default + 1
        return max(min(estimate, default), least), estimate <= default

    def collect(
        self, roll_out: Callable, target: int, order: Callable, generator: torch.Generator
    ) -> tuple[list, torch.Tensor, torch.Tensor]:
        """(rounds, weights [K], places [K]): roll out until `target` groups are live, or until the
        round that was expected to suffice.

        roll_out(prompts, number) returns a round, with .prompts [k] and .rewards [k, G]. The first
        `target` live groups of all K share the update: their weights are target / their number, and
        their places are spread over the target. Dead and surplus groups get weight 0. The first
        round is 1.5 times the target; later ones are between that and a quarter of it, like the
        original's 384 and 64 of 256.
        """
        first_epoch = self.cursor < len(self.easy)
        rounds, alive = [], torch.zeros(0, dtype=torch.bool)
        size = default = 3 * target // 2
        last = False
        while len(rounds) < self.ROUNDS:
            rounds.append(roll_out(self.select(size, order, generator), len(rounds)))
            self.update(rounds[-1].prompts, rounds[-1].rewards)
            now = ~dppo.dead_groups(rounds[-1].rewards)
            alive = torch.cat([alive, now])
            missing = target - int(alive.sum())
            if missing <= 0 or last:
                break
            dead_share = 1 - now.double().mean().item()
            size, last = self.next_batch(missing, dead_share, default, max(1, target // 4))
        if not first_epoch:
            self.adjust(torch.cat([part.rewards for part in rounds]))
        rank = alive.cumsum(dim=0) - 1  # [K], among the live
        used = alive & (rank < target)
        count = max(1, int(used.sum()))
        return rounds, used.double() * target / count, rank * target // count


# ---------------------------------------------------------------------------- MoPPS (prompt level)


class Mopps:
    """MoPPS's selection of prompts, as in its code (thu-rllab/MoPPS: mopps.py, the scripts' topk).

    Each prompt has a Beta distribution of its pass rate. A step draws one rate for each prompt of a
    pool of POOL Q, rolls out the Q nearest to 1/2, and trains on them without weights. An observed
    group adds its right and wrong completions; before that, what was known is decayed by half
    towards the prior Beta(1, 1).
    """

    POOL = 8  # times Q
    DECAY = 0.5

    def __init__(self, num_prompts: int):
        self.posterior = torch.ones(2, num_prompts, dtype=torch.float64)  # right, wrong
        self.cursor = 0  # pools since the run began

    def copy(self) -> "Mopps":
        """The same state in a tensor of its own; see Greso.copy."""
        return copy.deepcopy(self)

    def collect(
        self, roll_out: Callable, target: int, order: Callable, generator: torch.Generator
    ) -> tuple[list, torch.Tensor, torch.Tensor]:
        """(rounds, weights [Q], places [Q]) as Greso.collect, with one round of Q = `target`."""
        epoch, place = divmod(self.cursor, self.posterior.shape[1] // (self.POOL * target))
        pool = order(epoch)[self.POOL * target * place :][: self.POOL * target]
        draw = random.Random(int(torch.randint(2**62, (), generator=generator)))
        known = self.posterior[:, pool].T.tolist()
        rates = torch.tensor([draw.betavariate(right, wrong) for right, wrong in known])
        nearest = (rates - 0.5).abs().argsort(stable=True)[:target].sort().values  # as in the pool
        part = roll_out(pool[nearest], 0)
        rewards = part.rewards.clamp(0, 1)
        counts = torch.stack([rewards.nansum(dim=1), (1 - rewards).nansum(dim=1)])  # [2, Q]
        known = self.posterior[:, part.prompts]
        self.posterior[:, part.prompts] = self.DECAY * known + (1 - self.DECAY) + counts
        self.cursor += 1
        return [part], torch.ones(target, dtype=torch.float64), torch.arange(target)


def selector(rule: str, num_prompts: int) -> Greso | Mopps:
    """The state of one of SELECTORS when a run begins."""
    return Mopps(num_prompts) if rule == "mopps" else Greso(num_prompts, skips=rule == "greso")


def fewest_prompts(rule: str, target: int) -> tuple[int, str]:
    """How many prompts of the data one of SELECTORS needs to select `target` a step, and why."""
    if rule == "mopps":
        return Mopps.POOL * target, f"its pool is {Mopps.POOL} x {target}"
    return 2 * target, f"its first round is 1.5 x {target}"
