"""
DPPO, Dynamic Pruning Policy Optimization (arXiv:2603.04135), as pure functions on tensors.

It is GRPO with three changes:
    1. whole prompts are dropped before rollout, at random, by their history      (sampler.py)
    2. single completions are dropped after reward, at random, by |advantage|     (threshold_keep_prob)
    3. what is kept is multiplied by 1 / (probability of keeping it)              (ht_weights)

Why the expected gradient is exactly that of the full batch (Horvitz and Thompson 1952): the full-batch loss
is a sum over sequences, sum_i l_i. If sequence i is kept with probability p_i > 0, then
E[sum_i (kept_i / p_i) l_i] = sum_i l_i for any parameters, whatever is inside l_i, clipping included. Only
three things can break it, and the code below stays away from them:
    - a denominator or an advantage that depends on what was kept: both come from the full batch here
    - a keep probability of zero where l_i is not zero: pruning rates are below 1
    - a wrong keep probability, such as floor(r n) dropped but 1 / (1 - r) applied: keeps are drawn one by one

The proof is about one batch and the gradient before clipping by norm; Adam and the clip are not linear.
Public summaries say that the paper prunes a deterministic fraction; the random form here is our reconstruction.

Letters: Q prompts of a step, G completions per prompt, N completion tokens.
"""

import torch

ADVANTAGE_EPS = 1e-4  # added to the group's standard deviation, as TRL has it
THRESHOLD_MARGIN = 1e-6  # below the mean means below by more than this: at pass rate 1/2 all |advantages| tie

LOSSES = ("grpo", "dr_grpo")


def _check_loss(loss: str) -> None:
    if loss not in LOSSES:
        raise ValueError(f"unknown loss {loss!r}: choose one of {', '.join(LOSSES)}")


def group_advantages(rewards: torch.Tensor, loss: str) -> torch.Tensor:
    """Advantages [Q, G] of rewards [Q, G], from each prompt's full group, before anything is dropped.

    grpo: (R - mean) / (sample standard deviation + 1e-4), as TRL; dr_grpo: R - mean (arXiv:2503.20783). An unscorable
    completion (reward NaN) counts neither in mean nor deviation and gets 0. A group whose rewards are all
    equal gets exact zeros, not rounding errors blown up by 1e-4.
    """
    _check_loss(loss)
    scored = ~rewards.isnan()
    count = scored.sum(dim=1, keepdim=True)  # [Q, 1]
    filled = torch.where(scored, rewards, 0.0)
    mean = filled.sum(dim=1, keepdim=True) / count.clamp(min=1)  # [Q, 1]
    centred = torch.where(scored, rewards - mean, 0.0)  # [Q, G]
    dead = dead_groups(rewards)[:, None]  # [Q, 1]
    if loss == "grpo":
        std = (centred.square().sum(dim=1, keepdim=True) / (count - 1).clamp(min=1)).sqrt()  # [Q, 1]
        centred = centred / (std + ADVANTAGE_EPS)
    return torch.where(dead, 0.0, centred)


def dead_groups(rewards: torch.Tensor) -> torch.Tensor:
    """Which groups [Q] carry no signal: all scorable rewards [Q, G] of the group are equal (or there is none)."""
    scored = ~rewards.isnan()
    highest = torch.where(scored, rewards, -torch.inf).amax(dim=1)
    lowest = torch.where(scored, rewards, torch.inf).amin(dim=1)
    return highest <= lowest


def threshold_keep_prob(scores: torch.Tensor, counted: torch.Tensor, prune_rate: float) -> torch.Tensor:
    """Keep probabilities, float64 of the scores' shape [..., n]: 1 - prune_rate below the mean, else 1.

    The mean is over the `counted` [..., n] entries of the last dimension; NaN scores (a prompt never seen)
    are always kept. The paper's rule at both levels: |advantage| against its group's mean with r_o,
    historical |advantage| against the step's mean with r_q.
    """
    scores = scores.double()
    total = torch.where(counted, scores, 0.0).sum(dim=-1, keepdim=True)
    mean = total / counted.sum(dim=-1, keepdim=True)  # [..., 1]; NaN where nothing counts: nothing is below
    below = scores < mean - THRESHOLD_MARGIN  # False where either is NaN
    return 1.0 - prune_rate * below.double()


def completion_keep_prob(advantages: torch.Tensor, rewards: torch.Tensor, prune_rate: float) -> torch.Tensor:
    """Keep probabilities [Q, G] of completions: prune_rate (r_o) is the chance of dropping one whose |advantage|
    is below its group's mean. One reading: a summary of the paper speaks of the intra-group advantage."""
    return threshold_keep_prob(advantages.abs(), ~rewards.isnan(), prune_rate)


def draw(keep_prob: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Keep or drop, bool of keep_prob's shape: independent draws with exactly these probabilities, on the CPU."""
    uniform = torch.rand(keep_prob.shape, dtype=torch.float64, generator=generator)  # [0, 1): 1.0 is always kept
    return uniform < keep_prob


def ht_weights(keep: torch.Tensor, keep_prob: torch.Tensor) -> torch.Tensor:
    """Horvitz-Thompson weights, float64 of keep's shape: 1 / keep_prob where kept, 0 where dropped."""
    return torch.where(keep, 1.0 / keep_prob, 0.0)


def prune(keep_prob: torch.Tensor, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw and weigh: (keep, weights), both of keep_prob's shape. Probability 1 everywhere: all kept, weights 1."""
    keep = draw(keep_prob, generator)
    return keep, ht_weights(keep, keep_prob)


def loss_scale(lengths: torch.Tensor, loss: str, *, num_sequences: int, max_new_tokens: int) -> torch.Tensor:
    """What multiplies each token's loss in a full batch, float64 of lengths' shape: the one denominator.

    num_sequences is Q * G of the step's candidates, counted before anything was pruned.
    grpo: 1 / (length * Q * G), a mean over sequences of token means. dr_grpo: 1 / (Q * G * max_new_tokens).
    """
    _check_loss(loss)
    if loss == "grpo":
        return 1.0 / (lengths.double().clamp(min=1) * num_sequences)
    return torch.full_like(lengths, 1.0 / (num_sequences * max_new_tokens), dtype=torch.float64)


def policy_loss(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    scale: torch.Tensor,
    *,
    eps_low: float,
    eps_high: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The clipped surrogate, summed: (loss, number of clipped tokens), both scalars.

    All inputs are per completion token, [N]; `scale` is loss_scale times the sequence's weight and stays outside
    the min(), so it can neither move the clip nor meet the ratio.
    """
    ratio = torch.exp(logprobs - old_logprobs)
    clipped_ratio = ratio.clamp(1.0 - eps_low, 1.0 + eps_high)
    token_loss = -torch.minimum(ratio * advantages, clipped_ratio * advantages)
    clipped = ((ratio < 1.0 - eps_low) & (advantages < 0)) | ((ratio > 1.0 + eps_high) & (advantages > 0))
    return (token_loss * scale).sum(), clipped.sum()


def effective_sample_size(weights: torch.Tensor) -> float:
    """(sum w)^2 / sum w^2 of the weights [any shape]: how many equal weights would have this spread (Kish 1965)."""
    return (weights.sum().square() / weights.square().sum()).item()
