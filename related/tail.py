"""
The coin for long rollouts: in some steps, groups that need many tokens are not finished.

    torchrun -m related.tail --rollout-checkpoint 512 --rollout-prune-rate 0.5

Other flags are train.py's. A rollout takes as long as its longest completion. With checkpoint c and
rate r, a step tosses a coin before it samples:
    with probability r   completions may have c tokens only. A group with one that has not ended by
                         then is dropped whole, so that advantages stay those of full groups
    otherwise            all groups are finished, and those that would be dropped weigh 1 / (1 - r)
So a group's expected weight is 1, whatever its completions are, and the expected gradient is that
of steps without a checkpoint. The price is noise that more prompts do not average out, because all
groups share the coin (runs/LOG.md).
"""

import argparse
from dataclasses import replace
from functools import partial

import torch

import dppo
import metrics
import train
from runtime import InputError


class CoinTrainer(train.Trainer):
    def __init__(self, cfg, reward=None, *, checkpoint: int, rate: float):
        super().__init__(cfg, reward)
        self.checkpoint, self.rate = checkpoint, rate
        if not (0 < checkpoint < self.cfg.max_new_tokens and 0 <= rate < 1):
            raise InputError(
                f"--rollout-checkpoint {checkpoint} --rollout-prune-rate {rate}: give 1 to "
                f"{self.cfg.max_new_tokens - 1} tokens, and a rate from 0 to below 1"
            )
        divides_by_tokens = dppo.LOSSES[self.cfg.loss].denominator == "batch tokens"
        if self.cfg.minibatches > 1 or divides_by_tokens:
            raise InputError("related.tail needs --minibatches 1, and no --loss dapo or cispo")

    def prune_prompts(self, window, step, generator):
        chosen = super().prune_prompts(window, step, generator)
        self.stops = generator.random() < self.rate
        return chosen

    def roll_out(self, prompts, step, *purpose):
        whole = self.sampling
        if self.stops:
            self.sampling = replace(whole, max_new_tokens=self.checkpoint)
        batch = super().roll_out(prompts, step, *purpose)
        self.sampling = whole
        return batch

    def full_batch(self, batch, chosen):
        """The groups beyond the checkpoint are in no update, or weigh 1 / (1 - r)."""
        beyond = ((batch.truncated > 0) | (batch.lengths > self.checkpoint)).any(dim=1)  # [K]
        coin = torch.where(beyond, 0.0 if self.stops else 1 / (1 - self.rate), 1.0)
        self.batch, self.without_coin = batch, chosen
        full = super().full_batch(batch, chosen._replace(weights=chosen.weights * coin))
        return replace(full, minibatch=full.minibatch.masked_fill(coin == 0, -1))

    def step(self, step):
        """A step that stopped has only seen short groups, so its averages would be biased: NaN. In
        any other step all groups are finished, and averages need no coin."""
        row, samples = super().step(step)
        weights = self.without_coin.weights
        shown = torch.full_like(weights, torch.nan) if self.stops else weights
        return row | metrics.averages(self.batch, shown), samples

    def update_history(self, step, full):
        if not self.stops:  # else it would learn from short groups alone
            super().update_history(step, replace(full, chosen=self.without_coin))

    def state(self):
        return super().state() | {"coin": (self.checkpoint, self.rate)}

    def load_state(self, state):
        super().load_state(state)
        if state["coin"] != (self.checkpoint, self.rate):
            checkpoint, rate = state["coin"]
            raise InputError(
                f"the run in {self.cfg.out_dir} began with --rollout-checkpoint {checkpoint} "
                f"--rollout-prune-rate {rate}: give it the same"
            )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--rollout-checkpoint", type=int, required=True)
    parser.add_argument("--rollout-prune-rate", type=float, default=0.5)
    own, rest = parser.parse_known_args()
    coin = {"checkpoint": own.rollout_checkpoint, "rate": own.rollout_prune_rate}
    train.cli(trainer_class=partial(CoinTrainer, **coin), args=rest)
