"""
GRESO (arXiv:2506.02177), a rival that skips prompts which were all right or all wrong lately.

    python -m related.greso --out-dir out-greso

Other flags are train.py's; --completion-rule may drop completions as well. It needs one process.

It is biased: it skips at random, but does not weight what it keeps, and it stops once it has enough
live groups.

Letters: P prompts of the data, Q prompts of a step, K of them rolled out, G completions each.
"""

import functools
import itertools
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from unittest import mock

import torch
from numpy.random import Generator

import dppo
import lora
import metrics
import rollout
import sampler
import train
from rewards import score
from runtime import InputError

OF_THE_DRAW = ("history/", "kept/dead", "kept/other")  # columns; GRESO draws in another way


@dataclass
class Round:
    """The groups that were rolled out at once."""

    prompts: torch.Tensor  # [k], indices into the data
    rollouts: rollout.Rollouts
    rewards: torch.Tensor  # [k, G]


class GresoTrainer(train.Trainer):
    """A Trainer that decides by rewards which groups to train on, and so rolls out before it
    decides. One process and one update a step."""

    def __init__(self, cfg, reward=None):
        super().__init__(cfg, reward)
        Q, prompts = self.cfg.prompts_per_step, len(self.train_set)
        if self.cfg.prompt_rule != "none":
            raise InputError(f"--prompt-rule {self.cfg.prompt_rule}: GRESO chooses the prompts")
        if self.world > 1 or self.cfg.minibatches > 1:
            raise InputError("GRESO needs one process, and --minibatches 1")
        if prompts < 2 * Q:  # the first round takes 1.5 Q, and more may follow
            few = f"GRESO needs {2 * Q} prompts, and the data have {prompts}"
            raise InputError(f"--prompts-per-step {Q}: {few}")
        self.greso = Greso(prompts)

    def step(self, step):
        """Trainer.step for the groups that GRESO uses. The log's averages are over all groups that
        it has rolled out."""
        sampling = self.sampling

        def known_weights(*_args):
            return torch.ones(len(self.weights), dtype=torch.bool), self.weights

        with mock.patch.object(sampler, "prune_prompts", known_weights):
            row, others = super().step(step)
        self.sampling = sampling  # `candidates` has replaced it
        every = self.every.rollouts
        row |= metrics.averages(
            torch.ones(len(every.lengths), dtype=torch.float64), self.every.rewards.double(),
            every.lengths.double(), every.truncated.double(), every.entropy.double(),
        )  # fmt: skip
        row["kept/prompts"] = len(every.lengths) / self.cfg.prompts_per_step
        row["tokens/generated"] = int(every.lengths.sum())
        return {name: row[name] for name in row if not name.startswith(OF_THE_DRAW)}, others

    def candidates(self, step):
        """Roll out until GRESO has what it wants; returns the prompts that it uses. The step gets
        their completions and weights from here, and rewards them again."""
        order = functools.partial(sampler.epoch_order, len(self.train_set), self.cfg.seed)
        generator = dppo.generator_for(self.cfg.seed, step, "select")
        roll_out = functools.partial(self.roll_out, step)
        Q = self.cfg.prompts_per_step
        self.every, weights = self.greso.collect(roll_out, Q, order, generator)
        places = (weights > 0).nonzero()[:, 0]
        used = gather([self.every], places)

        def known_rollouts(*_args, **_options):
            return used.rollouts

        self.sampling = replace(self.sampling, engine=types.SimpleNamespace(sample=known_rollouts))
        self.weights = weights[places]
        return used.prompts

    def roll_out(self, step: int, prompts: torch.Tensor, number: int) -> Round:
        """Round `number` of a step; each has other random numbers."""
        indices = prompts.tolist()
        with self.timer.measure("rollout"):
            lora.refresh(self.policy, self.model)
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
        return super().state() | {"greso": vars(self.greso)}

    def load_state(self, state):
        super().load_state(state)
        vars(self.greso).update(state["greso"])


def gather(rounds: list[Round], places: torch.Tensor | None = None) -> Round:
    """The groups of these rounds, as if rolled out together: all, or those at `places` [K]."""
    prompts = torch.cat([part.prompts for part in rounds])
    places = torch.arange(len(prompts)) if places is None else places
    columns = {}
    for field in fields(rollout.Rollouts):
        values = [getattr(part.rollouts, field.name) for part in rounds]
        if isinstance(values[0], list):  # token ids
            every = [*itertools.chain(*values)]
            columns[field.name] = [every[k] for k in places.tolist()]
        else:
            columns[field.name] = torch.cat(values)[places]
    rewards = torch.cat([part.rewards for part in rounds])
    return Round(prompts[places], rollout.Rollouts(**columns), rewards[places])


# ---------------------------------------------------------------------------- GRESO


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
        for streak, goes_on in zip((self.easy, self.hard), self._dead(rewards), strict=True):
            streak[prompts] = torch.where(goes_on, streak[prompts] + 1, 0).to(torch.int16)

    def _dead(self, rewards):
        """(easy, hard) [K], of groups' rewards [K, G]."""
        dead, mean = dppo.dead_groups(rewards), rewards.nanmean(dim=1)
        return dead & (mean >= self.EASY), dead & (mean <= self.HARD)

    def adjust(self, rewards: torch.Tensor) -> None:
        """Move p_easy and p_hard, once a step, by all groups rolled out in it [K, G]."""
        easy, hard = (groups.double().mean() for groups in self._dead(rewards))
        self.p_easy = self._moved(self.p_easy, easy >= self.ALPHA_EASY)
        self.p_hard = self._moved(self.p_hard, hard >= self.ALPHA_HARD)

    def _moved(self, chance, too_many):
        change = -self.CHANGE if too_many else self.CHANGE
        return min(max(chance + change, self.LEAST), self.MOST)

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
            live_share = now.double().mean().item()
            estimate = int(1.25 * missing / live_share) if live_share else default + 1
            size, last = max(min(estimate, default), target // 4, 1), estimate <= default
        if not first_epoch:
            self.adjust(torch.cat([part.rewards for part in rounds]))
        rank = alive.cumsum(dim=0) - 1  # [K], among the live
        used = alive & (rank < target)
        count = max(1, int(used.sum()))
        return gather(rounds), used.double() * target / count


if __name__ == "__main__":
    train.cli(trainer_class=GresoTrainer, args=["--method", "grpo", *sys.argv[1:]])
