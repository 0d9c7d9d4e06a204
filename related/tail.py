"""
The tail of a rollout: in some steps, groups that need many tokens are not finished.

A rollout takes as long as its longest completion. With --rollout-checkpoint c and
--rollout-prune-rate r, a step tosses a coin before it samples:
    with probability r   completions may have c tokens only. A group with one that has not ended by
                         then is dropped whole, so that advantages stay those of full groups
    otherwise            all groups are finished, and those dropped above weigh 1 / (1 - r)
A group's expected weight is 1 whatever its completions are, so the expected gradient is exactly
that of steps without a checkpoint. Without the weights, gradients would favour short completions.

All groups share the coin. With a coin each, some long group would go on in almost every step, and
the step would wait for it. The price is noise that more prompts do not average out: r / (1 - r)
times the squared mean gradient of the groups beyond the checkpoint. So the checkpoint should be one
that few groups pass. `python -m bench tail` weighs that noise against the time.

Letters: K prompts rolled out, G completions each.
"""

from typing import NamedTuple

import torch
from numpy.random import Generator


class Toss(NamedTuple):
    """What a step has drawn."""

    limit: int  # tokens of its longest completion
    weight: float  # of groups beyond the checkpoint: 0 or 1 / (1 - r); 1 if no coin was tossed


def toss(trainer, generator: Generator) -> Toss:
    """The coin of a step of a train.Trainer. A first step that counts tokens does not stop."""
    cfg, counts = trainer.cfg, trainer.needs_mean_tokens and trainer.mean_tokens is None
    if not cfg.rollout_checkpoint or counts:
        return Toss(cfg.max_new_tokens, 1.0)
    if generator.random() < cfg.rollout_prune_rate:
        return Toss(cfg.rollout_checkpoint, 0.0)
    return Toss(cfg.max_new_tokens, 1.0 / (1.0 - cfg.rollout_prune_rate))


def beyond(batch, cfg) -> torch.Tensor:
    """Which groups [K] of a train.Batch pass the checkpoint, or would have if the step had not
    stopped there. A completion that ends right at the checkpoint does not pass it."""
    if not cfg.rollout_checkpoint:
        return torch.zeros(len(batch.lengths), dtype=torch.bool)
    return ((batch.truncated > 0) | (batch.lengths > cfg.rollout_checkpoint)).any(dim=1)


def weigh(chosen, batch, cfg, weight: float):
    """The sampler.Selection with the weights of groups beyond the checkpoint times `weight`."""
    factor = 1.0 + (weight - 1.0) * beyond(batch, cfg).double()  # [K]
    shares = chosen.weights if weight else torch.full_like(chosen.weights, torch.nan)
    return chosen._replace(weights=chosen.weights * factor, shares=shares)


def shares(chosen) -> torch.Tensor:
    """For how many of the Q candidates each of K prompts stands, [K], in means and in what is
    learned of strata and tokens: its weight without the coin, and NaN in a step that stopped. Other
    steps have finished all groups, so their means need no coin, and the coin knows no group."""
    return chosen.weights if chosen.shares is None else chosen.shares
