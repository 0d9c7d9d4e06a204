"""
Rivals that choose prompts by what they see: GRESO, DAPO's dynamic sampling and MoPPS.

    torchrun -m related.selectors --method greso      skips prompts that were all right or all wrong
                                                      lately (arXiv:2506.02177)
    torchrun -m related.selectors --method dynamic    refills until the batch has live groups
                                                      (DAPO, arXiv:2503.14476)
    torchrun -m related.selectors --method mopps      the prompts whose guessed pass rates are
                                                      nearest 1/2 (arXiv:2507.04632)

Other flags are train.py's; --completion-rule may drop completions as well. All three are biased:
GRESO skips at random but does not weight what it keeps, and it stops once it has enough live
groups. MoPPS's draw is random, too, but nothing divides by the chance of being among the nearest.

Two are left out. SPEED-RL (arXiv:2506.09016) begins its groups in one step and completes them in a
later one, so their token ids and log-probs would have to wait in the checkpoint, and the groups of
a step would differ in size. SPEC-RL (arXiv:2509.23232) reuses old texts leniently, for which it
needs drafts, and these saved no time here (runs/LOG.md).

Letters: P prompts of the data, Q prompts of a step, K of them rolled out, G completions each.
"""

import argparse
import copy
import functools
import itertools
import random
from collections.abc import Callable
from dataclasses import replace

import torch
from numpy.random import Generator

import dppo
import metrics
import sampler
import train
from runtime import InputError

OF_THE_DRAW = (  # columns of the log that a selector, which has no candidates, cannot fill
    "history/skipped_this_epoch", "history/candidates_by_pass_rate", "history/kept_by_pass_rate",
)  # fmt: skip


class SelectorTrainer(train.Trainer):
    """A Trainer whose `selector` decides by rewards which groups to train on, and so rolls out
    before it decides."""

    selector_class = None  # of a subclass

    def __init__(self, cfg, reward=None):
        super().__init__(cfg, reward)
        name = self.selector_class.__name__
        if self.cfg.prompt_rule != "none":
            raise InputError(f"--prompt-rule {self.cfg.prompt_rule}: {name} chooses the prompts")
        fewest, why = self.selector_class.fewest_prompts(self.cfg.prompts_per_step)
        if len(self.train_set) < fewest:
            few = f"{why} prompts of {len(self.train_set)}, too few"
            raise InputError(f"--method {name.lower()}: {few}: lower --prompts-per-step")
        self.selector = self.selector_class(len(self.train_set))

    def prune_prompts(self, window, step, generator):
        """The prompts that the selector has rolled out. It has an order of its own, and draws
        nothing from the window."""
        sample = super().roll_out
        roll_out = lambda prompts, number: sample(prompts, step, "rollout", number)
        order = functools.partial(sampler.epoch_order, len(self.train_set), self.cfg.seed)
        found = self.selector.collect(roll_out, self.cfg.prompts_per_step, order, generator)
        self.batch, weights, position = found
        none = torch.zeros(len(window), dtype=torch.bool)
        return sampler.Selection(self.batch.prompts, weights, position, none)

    def roll_out(self, prompts, step, *purpose):
        return self.batch

    def full_batch(self, batch, chosen):
        full = super().full_batch(batch, chosen)
        unused = chosen.weights == 0  # dead groups, and live ones beyond Q
        return replace(full, minibatch=full.minibatch.masked_fill(unused, -1))  # in no update

    def step(self, step):
        """The log's averages are over all groups that were rolled out, used or not."""
        row, samples = super().step(step)
        row |= metrics.averages(self.batch, torch.ones(len(self.batch.prompts)))
        return {name: row[name] for name in row if name not in OF_THE_DRAW}, samples

    def state(self):
        return super().state() | {self.selector_class.__name__: vars(self.selector)}

    def load_state(self, state):
        super().load_state(state)
        vars(self.selector).update(state[self.selector_class.__name__])


def join(rounds: list):
    """One train.Batch of the Batches of several rounds, as if rolled out together."""
    starts = itertools.accumulate((len(part.prompts) for part in rounds), initial=0)
    shifted = [
        vars(part) | {"mine": part.mine + n} for part, n in zip(rounds, starts, strict=False)
    ]
    return _joined(copy.copy(rounds[0]), shifted)


def _joined(whole, fields: list[dict]):
    """`whole`, each of its fields now those of all parts end to end."""
    for name in fields[0]:
        values = [own[name] for own in fields]
        if torch.is_tensor(values[0]):
            value = torch.cat(values)
        elif hasattr(values[0], "__dict__"):  # Rollouts
            value = _joined(copy.copy(values[0]), [vars(own) for own in values])
        else:
            value = sum(values[1:], start=values[0])  # lists
        setattr(whole, name, value)
    return whole


class Greso:
    """GRESO's selection of prompts, as in its code (Infini-AI-Lab/GRESO: presampling_selector.py,
    ray_trainer.py).

    A prompt that was all right (mean reward at least EASY) on each of its last z visits is rolled
    out with probability p_easy^z, at least FLOOR; all wrong (at most HARD): p_hard^z. Both
    probabilities follow the share of such groups in each step, towards ALPHA_EASY and ALPHA_HARD. A
    step rolls out until about Q groups are live, and trains on these without weights. The original
    uses groups of 8, where a mean beyond these bounds implies a dead group; here groups have any
    size, so both are required.
    """

    skips = True

    EASY, HARD, FLOOR = 0.98, 0.11, 0.01
    ALPHA_EASY, ALPHA_HARD = 0.25 / 3, 2 * 0.25 / 3  # of a target of 0.25 dead groups
    CHANGE, LEAST, MOST = 0.01, 0.05, 0.95  # step size and bounds of p_easy and p_hard
    LOADER = 32  # prompts loaded together
    ROUNDS = 20  # of rollouts in a step; ours: without live groups the original never stops

    def __init__(self, num_prompts: int):
        self.easy, self.hard = torch.zeros(2, num_prompts, dtype=torch.int16)  # streaks [P]
        self.p_easy = self.p_hard = 0.5
        self.cursor = 0  # prompts visited since the run began, over all epochs

    def keep_prob(self, prompts: torch.Tensor) -> torch.Tensor:
        """Chance [K] of each prompt to be rolled out."""
        if not self.skips:
            return torch.ones(len(prompts), dtype=torch.float64)
        easy = (self.p_easy ** self.easy[prompts].double()).clamp(min=self.FLOOR)
        return easy * (self.p_hard ** self.hard[prompts].double()).clamp(min=self.FLOOR)

    def select(self, count: int, order: Callable, generator: Generator) -> torch.Tensor:
        """The next `count` prompts that are not skipped; order(epoch) is the shuffle [P]."""
        chosen = torch.zeros(0, dtype=torch.int64)
        while len(chosen) < count:
            epoch, position = divmod(self.cursor, len(self.easy))
            loaded = order(epoch)[position : position + self.LOADER]
            keep = dppo.draw(self.keep_prob(loaded), generator)
            keep &= ~torch.isin(loaded, chosen)  # where an epoch ends in the middle of a round
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
        self, roll_out: Callable, target: int, order: Callable, generator: Generator
    ) -> tuple:
        """(batch, weights [K], places [K]): roll out until `target` groups are live, or until the
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
        return join(rounds), used.double() * target / count, rank * target // count

    @staticmethod
    def fewest_prompts(target: int) -> tuple[int, str]:
        """How many prompts the data must have to select `target` a step, and why."""
        return 2 * target, f"its first round is 1.5 x {target}"


class Dynamic(Greso):
    """DAPO's dynamic sampling with GRESO's sizes of rounds: no prompt is skipped."""

    skips = False


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

    def collect(
        self, roll_out: Callable, target: int, order: Callable, generator: Generator
    ) -> tuple:
        """(batch, weights [Q], places [Q]) as Greso.collect, with one round of Q = `target`."""
        epoch, place = divmod(self.cursor, self.posterior.shape[1] // (self.POOL * target))
        pool = order(epoch)[self.POOL * target * place :][: self.POOL * target]
        draw = random.Random(int(generator.integers(2**62)))
        known = self.posterior[:, pool].T.tolist()
        rates = torch.tensor([draw.betavariate(right, wrong) for right, wrong in known])
        nearest = (rates - 0.5).abs().argsort(stable=True)[:target].sort().values  # as in the pool
        part = roll_out(pool[nearest], 0)
        rewards = part.rewards.clamp(0, 1)
        counts = torch.stack([rewards.nansum(dim=1), (1 - rewards).nansum(dim=1)])  # [2, Q]
        known = self.posterior[:, part.prompts]
        self.posterior[:, part.prompts] = self.DECAY * known + (1 - self.DECAY) + counts
        self.cursor += 1
        return part, torch.ones(target, dtype=torch.float64), torch.arange(target)

    @staticmethod
    def fewest_prompts(target: int) -> tuple[int, str]:
        """As Greso.fewest_prompts."""
        return Mopps.POOL * target, f"its pool is {Mopps.POOL} x {target}"


# ---------------------------------------------------------------------------- the command


class GresoTrainer(SelectorTrainer):
    selector_class = Greso


class DynamicTrainer(SelectorTrainer):
    selector_class = Dynamic


class MoppsTrainer(SelectorTrainer):
    selector_class = Mopps


METHODS = {"greso": GresoTrainer, "dynamic": DynamicTrainer, "mopps": MoppsTrainer}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--method", choices=METHODS, required=True)
    own, rest = parser.parse_known_args()
    train.cli(trainer_class=METHODS[own.method], args=["--method", "grpo", *rest])
