"""
GRESO (arXiv:2506.02177), a rival that skips prompts which were all right or all wrong lately.

    python -m related.greso --out-dir out-greso

Other flags are train.py's; --completion-rule may drop completions as well. It needs one process.

It is biased: it skips at random, but does not weight what it keeps, and it stops once it has enough
live groups.

Letters: P prompts of the data, Q prompts of a step, K of them rolled out, G completions each.
"""

import functools
import sys
import types
from collections.abc import Callable
from dataclasses import fields, replace

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


class GresoTrainer(train.Trainer):
    """A Trainer that decides by rewards which groups to train on, and so rolls out before it
    decides."""

    def __init__(self, cfg, reward=None):
        super().__init__(cfg, reward)
        if self.cfg.prompt_rule != "none" or self.world > 1:
            raise InputError("GRESO chooses the prompts, in one process: leave out --prompt-rule")
        Q, P = self.cfg.prompts_per_step, len(self.train_set)
        if P < 2 * Q:  # the first round takes 1.5 Q, and more may follow
            raise InputError(f"--prompts-per-step {Q}: GRESO needs {2 * Q} prompts, there are {P}")
        self.greso = Greso(P)

    def step(self, step):
        """Trainer.step for the groups that GRESO uses. The log's averages are over all groups that
        it has rolled out."""
        sampling = self.sampling
        row, others = super().step(step)
        self.sampling = sampling  # `candidates` has replaced it
        _prompts, every, rewards = self.every
        row |= metrics.averages(
            torch.ones(len(rewards), dtype=torch.float64), rewards.double(),
            every.lengths.double(), every.truncated.double(), every.entropy.double(),
        )  # fmt: skip
        row["kept/prompts"] = len(rewards) / self.cfg.prompts_per_step
        row["tokens/generated"] = every.lengths.sum().item()
        return row, others

    def candidates(self, step):
        """Roll out until GRESO has what it wants; returns the prompts that it uses. The step gets
        their completions from here, and rewards them again."""
        rounds = []

        def roll_out(prompts):
            indices = prompts.tolist()
            with self.timer.measure("rollout"):
                lora.refresh(self.policy, self.model)
                rollouts = rollout.sample(
                    self.policy, [self.train_ids[index] for index in indices], self.sampling,
                    group_size=self.cfg.group_size, keys=indices,
                    seed=dppo.seed_for(self.cfg.seed, step, "rollout", len(rounds)),
                )  # fmt: skip
            rounds.append(rollouts)
            with self.timer.measure("score"):
                problems = [self.train_set[index] for index in indices]
                _, rewards = score(rollouts, problems, self.tokenizer, self.reward)
            return rewards

        order = functools.partial(sampler.epoch_order, len(self.train_set), self.cfg.seed)
        generator = dppo.generator_for(self.cfg.seed, step, "select")
        Q = self.cfg.prompts_per_step
        prompts, rewards, used = self.greso.collect(roll_out, Q, order, generator)
        ids = [ids for part in rounds for ids in part.prompt_ids]
        names = [field.name for field in fields(rollout.Rollouts) if field.name != "prompt_ids"]
        every = {name: torch.cat([getattr(part, name) for part in rounds]) for name in names}
        self.every = prompts, rollout.Rollouts(ids, **every), rewards
        of_used = {name: tensor[used] for name, tensor in every.items()}
        found = rollout.Rollouts([ids[k] for k in used], **of_used)
        engine = types.SimpleNamespace(sample=lambda *_args, **_options: found)
        self.sampling = replace(self.sampling, engine=engine)
        return prompts[used]

    def state(self):
        return super().state() | {"greso": vars(self.greso)}

    def load_state(self, state):
        super().load_state(state)
        vars(self.greso).update(state["greso"])


# ---------------------------------------------------------------------------- GRESO


class Greso:
    """GRESO's selection of prompts, as in its code (Infini-AI-Lab/GRESO: presampling_selector.py,
    ray_trainer.py).

    A prompt that was all right (mean reward at least EASY) on each of its last z visits is rolled
    out with probability p_easy^z, at least FLOOR; all wrong (at most HARD): p_hard^z. Both
    probabilities follow the share of such groups in each step, towards ALPHA_EASY and ALPHA_HARD. A
    step rolls out until Q groups are live, and trains on these without weights.

    The original uses groups of 8, where a mean beyond these bounds implies a dead group; here
    groups have any size, so both are required. It also stops after a round that was expected to
    suffice, and trains on what there is; here another round follows.
    """

    EASY, HARD, FLOOR = 0.98, 0.11, 0.01
    ALPHA_EASY, ALPHA_HARD = 0.25 / 3, 2 * 0.25 / 3  # of a target of 0.25 dead groups
    CHANGE, LEAST, MOST = 0.01, 0.05, 0.95  # step size and bounds of p_easy and p_hard
    ROUNDS = 20  # of rollouts in a step; ours: without live groups the original never stops

    def __init__(self, num_prompts: int):
        self.easy, self.hard = torch.zeros(2, num_prompts, dtype=torch.int16)  # streaks [P]
        self.p_easy = self.p_hard = 0.5
        self.cursor = 0  # prompts visited since the run began, over all epochs

    def keep_prob(self, prompt: int) -> float:
        """Chance of a prompt to be rolled out."""
        easy = max(self.p_easy ** self.easy[prompt].item(), self.FLOOR)
        return easy * max(self.p_hard ** self.hard[prompt].item(), self.FLOOR)

    def select(self, count: int, order: Callable, generator: Generator) -> torch.Tensor:
        """The next `count` prompts that are not skipped; order(epoch) is the shuffle [P]."""
        chosen = []
        while len(chosen) < count:
            epoch, position = divmod(self.cursor, len(self.easy))
            prompt = int(order(epoch)[position])
            self.cursor += 1
            # Where an epoch ends within a round, a prompt may come up again.
            if prompt not in chosen and generator.random() < self.keep_prob(prompt):
                chosen.append(prompt)
        return torch.tensor(chosen)

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
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(prompts [K] that were rolled out, their rewards [K, G], the places [n] of those that are
        used): roll out until `target` groups are live, and use the first of these.

        roll_out(prompts) returns their rewards. The first round is 1.5 times the target; later ones
        are between that and a quarter of it, like the original's 384 and 64 of 256.
        """
        first_epoch = self.cursor < len(self.easy)
        prompts, rewards = [], []  # of each round
        num_live = 0
        size = most = 3 * target // 2
        while num_live < target and len(prompts) < self.ROUNDS:
            prompts.append(self.select(size, order, generator))
            rewards.append(roll_out(prompts[-1]))
            self.update(prompts[-1], rewards[-1])
            live = ~dppo.dead_groups(rewards[-1])
            num_live += int(live.sum())
            share = live.double().mean().item()
            expected = 1.25 * (target - num_live) / share if share else most
            size = min(max(int(expected), target // 4, 1), most)
        prompts = torch.cat(prompts)
        rewards = torch.cat(rewards)
        if not first_epoch:
            self.adjust(rewards)
        return prompts, rewards, (~dppo.dead_groups(rewards)).nonzero()[:target, 0]


if __name__ == "__main__":
    train.cli(trainer_class=GresoTrainer, args=["--method", "grpo", *sys.argv[1:]])
