"""
Rivals that choose prompts by what they see: GRESO, DAPO's dynamic sampling and MoPPS.

    python -m related.selectors --method greso        skips prompts that were all right or all wrong
                                                      lately (arXiv:2506.02177)
    python -m related.selectors --method dynamic      refills until the batch has live groups
                                                      (DAPO, arXiv:2503.14476)
    python -m related.selectors --method mopps        the prompts whose guessed pass rates are
                                                      nearest 1/2 (arXiv:2507.04632)

Other flags are train.py's; --completion-rule may drop completions as well. They need one process.

All three are biased. GRESO skips at random, but it does not weight what it keeps, and it stops once
it has enough live groups. Dynamic sampling gives its live groups the weight of all groups. MoPPS's
draw is random, too, but nothing divides by the chance of being among the nearest.

Two are left out. SPEED-RL (arXiv:2506.09016) begins its groups in one step and completes them in a
later one, so their token ids and log-probs would have to wait in the checkpoint, and the groups of
a step would differ in size. SPEC-RL (arXiv:2509.23232) reuses old texts leniently, for which it
needs drafts, and these saved no time here (runs/LOG.md).

Letters: P prompts of the data, Q prompts of a step, K of them rolled out, G completions each.
"""

import argparse
import functools
import itertools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import torch
from numpy.random import Generator

import dppo
import metrics
import rollout
import sampler
import train
from rewards import score
from runtime import InputError, ranks

OF_THE_DRAW = ("kept/dull_prompts", "kept/other_prompts")  # a selector draws in another way


@dataclass
class Round:
    """The groups that a selector has rolled out at once."""

    prompts: torch.Tensor  # [k], indices into the data
    rollouts: rollout.Rollouts
    rewards: torch.Tensor  # [k, G]


class Stored:
    """An engine that returns the rollouts of K prompts that were sampled before."""

    def __init__(self, rollouts: rollout.Rollouts):
        self.rollouts = rollouts

    def sample(self, model, prompt_ids, sampling, **options) -> rollout.Rollouts:
        return self.rollouts


class SelectorTrainer(train.Trainer):
    """A Trainer whose `selector` decides by rewards which groups to train on, and so rolls out
    before it decides. One process and one update a step."""

    selector_class = None  # of a subclass

    def __init__(self, cfg, reward=None):
        super().__init__(cfg, reward)
        cfg, name = self.cfg, self.selector_class.__name__
        if cfg.prompt_rule != "none":
            raise InputError(f"--prompt-rule {cfg.prompt_rule}: {name} chooses the prompts")
        if self.world > 1 or cfg.minibatches > 1:
            raise InputError(f"--method {name.lower()} needs one process, and --minibatches 1")
        fewest = self.selector_class.fewest_prompts(cfg.prompts_per_step)
        if len(self.train_set) < fewest:
            few = f"needs {fewest} prompts, and the data have {len(self.train_set)}"
            raise InputError(f"--method {name.lower()} {few}: lower --prompts-per-step")
        self.selector = self.selector_class(len(self.train_set))

    def step(self, step):
        """Trainer.step for the groups that the selector uses. The log's averages are over all
        groups that it has rolled out."""
        sampling, reward = self.sampling, self.reward
        try:
            row, samples = super().step(step)
        finally:  # what `candidates` may have replaced
            self.sampling, self.reward = sampling, reward
            vars(self.history).pop("prune", None)
        every = self.found.rollouts
        advantages = dppo.group_advantages(
            self.found.rewards, self.cfg.scale_rewards, self.cfg.reward_range
        )
        self.history.update(self.found.prompts, advantages, every.lengths)  # also what is not used
        row |= metrics.averages(
            torch.ones(len(every.lengths), dtype=torch.float64), self.found.rewards.double(),
            every.lengths.double(), every.truncated.double(), every.entropy.double(),
        )  # fmt: skip
        row["kept/prompts"] = len(every.lengths) / self.cfg.prompts_per_step
        row["tokens/generated"] = int(every.lengths.sum())
        return {name: row[name] for name in row if name not in OF_THE_DRAW}, samples

    def candidates(self, step):
        """The prompts that the selector uses, after it has rolled out what it wants to see. The
        step gets their completions, rewards and weights from here."""
        Q = self.cfg.prompts_per_step
        order = functools.partial(sampler.epoch_order, len(self.train_set), self.cfg.seed)
        generator = dppo.generator_for(self.cfg.seed, step, "select")
        roll_out = functools.partial(self.roll_out, step)
        self.found, weights = self.selector.collect(roll_out, Q, order, generator)
        places = (weights > 0).nonzero()[:, 0]
        used = chosen(self.found, places)
        everything = torch.ones(len(places), dtype=torch.bool)
        scores = iter(used.rewards[used.rollouts.lengths > 0].tolist())  # `score` skips the others
        self.history.prune = lambda *_: (everything, weights[places])
        self.sampling = replace(self.sampling, engine=Stored(used.rollouts))
        self.reward = lambda *_: None if math.isnan(score := next(scores)) else score
        return used.prompts

    def roll_out(self, step: int, prompts: torch.Tensor, number: int) -> Round:
        """Round `number` of a step, with random numbers of its own."""
        indices = prompts.tolist()
        with self.timer.measure("rollout"):
            ranks.refresh(self.policy, self.model)
            rollouts = rollout.sample(
                self.policy, [self.train_ids[index] for index in indices], self.sampling,
                group_size=self.cfg.group_size, keys=indices,
                seed=dppo.seed_for(self.cfg.seed, step, "rollout", number),
            )  # fmt: skip
        with self.timer.measure("score"):
            problems = [self.train_set[index] for index in indices]
            _, rewards = score(rollouts, problems, self.tokenizer, self.reward)
        return Round(prompts, rollouts, rewards)

    def state(self):
        return super().state() | {self.selector_class.__name__: vars(self.selector)}

    def load_state(self, state):
        super().load_state(state)
        vars(self.selector).update(state[self.selector_class.__name__])


def chosen(found: Round, place: torch.Tensor) -> Round:
    """Some groups of a round: those at `place` [K], in that order."""
    columns = {}
    for field in fields(found.rollouts):
        value = getattr(found.rollouts, field.name)
        ids = isinstance(value, list)
        columns[field.name] = [value[k] for k in place.tolist()] if ids else value[place]
    return Round(found.prompts[place], rollout.Rollouts(**columns), found.rewards[place])


def join(rounds: list[Round]) -> Round:
    """The groups of several rounds, as if rolled out together."""
    columns = {}
    for field in fields(rollout.Rollouts):
        values = [getattr(part.rollouts, field.name) for part in rounds]
        ids = isinstance(values[0], list)
        columns[field.name] = [*itertools.chain(*values)] if ids else torch.cat(values)
    return Round(
        torch.cat([part.prompts for part in rounds]),
        rollout.Rollouts(**columns),
        torch.cat([part.rewards for part in rounds]),
    )


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
            keep = dppo.independent(self.keep_prob(loaded), generator)
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
        """(all rounds, weights [K]): roll out until `target` groups are live, or until the round
        that was expected to suffice.

        roll_out(prompts, number) returns a Round. The first `target` live groups of all K share the
        update: their weights are target / their number. Dead and surplus groups get weight 0. The
        first round is 1.5 times the target; later ones are between that and a quarter of it, like
        the original's 384 and 64 of 256.
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
        return join(rounds), used.double() * target / count

    @staticmethod
    def fewest_prompts(target: int) -> int:
        """How many prompts the data must have to select `target` a step."""
        return 2 * target  # the first round takes 1.5 times the target, and more may follow


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
        """(round, weights [Q]) as Greso.collect, with one round of Q = `target`."""
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
        return part, torch.ones(target, dtype=torch.float64)

    @staticmethod
    def fewest_prompts(target: int) -> int:
        """As Greso.fewest_prompts."""
        return Mopps.POOL * target


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
