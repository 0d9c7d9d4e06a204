"""
DPPO, Dynamic Pruning Policy Optimization (arXiv:2603.04135), as pure functions on tensors.

It is GRPO with three changes; minimal.py has all of it on one page:
    1. whole prompts are dropped before rollout, at random                       (sampler.py)
    2. single completions are dropped after reward, at random                    (prune_completions)
    3. what is kept is multiplied by 1 / (probability of keeping it)             (ht_weights)

Why the expected gradient is exactly that of the full batch (Horvitz and Thompson 1952): the loss of
the full batch is a sum over sequences, sum_i l_i. If sequence i is kept with probability p_i > 0,
then E[sum_i (kept_i / p_i) l_i] = sum_i l_i for any parameters and any l_i: the clip, a sequence's
ratio and the KL term are all inside l_i. `python proof.py` enumerates every outcome of a small case
and prints the error. Four mistakes would break it:
    - a denominator or an advantage that depends on what was kept: here the full batch gives both
    - a keep probability of zero where l_i is not zero: rates stay below 1, and sizes have a floor
    - a weight that does not match the draw: dropping floor(r n) but multiplying by 1 / (1 - r)
    - one draw for two updates: the first moves the parameters, so the second's gradient would
      depend on its own draw; here each update has its own
This is the gradient of one update before it is clipped by norm. Clipping and Adam are not linear.

You may add rules and losses: each is one function and one entry, in COMPLETION_RULES or LOSSES. The
functions of draws and weights keep the estimate exact: do not change those.

docs/method.md says what is the paper's and what is ours.

Energy, here and elsewhere: the squared gradient of a completion's log-probs at the logits, the sum
over its tokens of |onehot - softmax|^2.

Letters: Q prompts of a step, K of them rolled out, G completions each, N completion tokens,
n completions in any shape.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from numpy.random import Generator, Philox

ADVANTAGE_EPS = 1e-4  # added to the group's standard deviation, as in TRL
# A value counts as below the mean only if it is below by more than this. At pass rate 1/2 all
# |advantages| are equal, and rounding would decide.
THRESHOLD_MARGIN = 1e-6
SIZE_FLOOR = 0.03  # lowest size, relative to the mean size, so that no weight is unbounded
# For adaptive: the time of all of a step but training, above all the rollout, over the time of
# training on everything. A constant, so that a run repeats itself: docs/method.md, section 4.
REST = 0.1


class RuleError(ValueError):
    """A rule or a loss cannot be used. The message says why, and the way out."""


def check_known(kind: str, name: str, known) -> None:
    """RuleError for a misspelt name, with the names there are."""
    if name not in known:
        raise RuleError(f"unknown {kind} {name!r}: choose one of {', '.join(known)}")


# ---------------------------------------------------------------------------- advantages


SCALES = ("none", "group")  # what R - mean is divided by in each group; TRL's names


def group_advantages(rewards: torch.Tensor, scale_rewards: str) -> torch.Tensor:
    """Advantages [Q, G] of rewards [Q, G], from each full group, before anything is dropped.

    R - mean (Dr. GRPO, arXiv:2503.20783). With scale_rewards "group" it is divided by the sample
    standard deviation + 1e-4, as in TRL (GRPO, arXiv:2402.03300). The choice sets the objective
    (docs/method.md).

    An unscorable completion (reward NaN) counts in neither mean nor deviation and gets 0. If all
    rewards of a group are equal, it gets exact zeros, not rounding errors divided by 1e-4.
    """
    check_known("scale_rewards", scale_rewards, SCALES)
    scored = ~rewards.isnan()
    count = scored.sum(dim=1, keepdim=True)  # [Q, 1]
    mean = torch.where(scored, rewards, 0.0).sum(dim=1, keepdim=True) / count.clamp(min=1)
    centred = torch.where(scored, rewards - mean, 0.0)  # [Q, G]
    if scale_rewards == "group":
        squares = centred.square().sum(dim=1, keepdim=True)  # [Q, 1]
        std = (squares / (count - 1).clamp(min=1)).sqrt()
        centred = centred / (std + ADVANTAGE_EPS)
    dead = dead_groups(rewards)[:, None]  # [Q, 1]
    return torch.where(dead, 0.0, centred)


def dead_groups(rewards: torch.Tensor) -> torch.Tensor:
    """Which groups [Q] are dead: all scorable rewards [Q, G] are equal, or there is none."""
    scored = ~rewards.isnan()
    highest = torch.where(scored, rewards, -torch.inf).amax(dim=1)
    lowest = torch.where(scored, rewards, torch.inf).amin(dim=1)
    return highest <= lowest


# ---------------------------------------------------------------------------- what a rule looks at


@dataclass
class Completions:
    """What a completion rule may look at: the groups of one mini-batch, [K, G] each.

    All of it is known before the update computes log-probs. A rule does not see other mini-batches:
    they are updates of their own, at other parameters.
    """

    advantages: torch.Tensor
    rewards: torch.Tensor  # NaN: unscorable
    cost: torch.Tensor  # tokens that training forwards: prompt + completion
    size: torch.Tensor  # contribution_size: how much it is expected to move the gradient
    rest: float = REST  # for adaptive

    @property
    def live(self) -> torch.Tensor:
        """Which of them have a loss term that is not exactly 0, bool [K, G]."""
        return self.size > 0


def energy_bound(logprobs: torch.Tensor) -> torch.Tensor:
    """Upper bound 2 (1 - p)^2 of the energy |onehot - softmax|^2 of a token with probability p.
    The token itself gives (1 - p)^2. All others have 1 - p together, so their squares add up to at
    most (1 - p)^2.

    It needs only the sampled token's log-prob, for engines that return nothing else; rollout.py
    computes the exact energy.
    """
    return 2.0 * torch.expm1(logprobs).square()


def contributes(advantages: torch.Tensor, factor: torch.Tensor, beta: float) -> torch.Tensor:
    """Which completions' terms are not exactly 0, bool of their shape: those that are not masked
    (factor 0) and have an advantage or a KL term."""
    return (factor > 0) & ((advantages != 0) | (beta > 0))


def contribution_size(
    advantages: torch.Tensor, factor: torch.Tensor, energy: torch.Tensor, beta: float
) -> torch.Tensor:
    """Estimated gradient norm of each term, float64 [K, G]: factor (|A| + beta) sqrt(energy).

    `factor` is what multiplies the loss of its tokens (prompt weight over denominator; 0: masked),
    because the variance that pruning adds is that of the weighted term. `energy` is the sum over
    its tokens of |onehot - softmax|^2. The gradient passes through the logits, and the gradients
    of different tokens' log-probs are uncorrelated. So the squared norm is roughly proportional to
    the energy. beta accounts for the KL term.

    The size is exactly 0 where the term is exactly 0. Elsewhere it is at least SIZE_FLOOR of the
    mean, so an estimate that underflows never leads to a keep probability of 0.
    """
    live = contributes(advantages, factor, beta)
    size = factor.double() * (advantages.double().abs() + beta) * energy.double().sqrt()
    floor = SIZE_FLOOR * size[live].mean() if live.any() else 0.0
    return torch.where(live, size.clamp(min=max(float(floor), 1e-30)), 0.0)


# ---------------------------------------------------------------------------- keep probabilities


def threshold_keep_prob(
    values: torch.Tensor, counted: torch.Tensor, prune_rate: float
) -> torch.Tensor:
    """Keep probabilities, float64 of values' shape [..., n]: 1 - prune_rate below the mean, else 1.

    The mean is over the `counted` [..., n] entries of the last dimension. NaN (a prompt that was
    never rolled out) is always kept. This is the paper's threshold (from secondary sources) at both
    levels: |advantage| against its group's mean with r_o, historical |advantage| against the step's
    mean with r_q. The random form is ours.
    """
    values = values.double()
    total = torch.where(counted, values, 0.0).sum(dim=-1, keepdim=True)
    mean = total / counted.sum(dim=-1, keepdim=True)  # [..., 1]; NaN if none counts: none is below
    below = values < mean - THRESHOLD_MARGIN  # False where either is NaN
    return 1.0 - prune_rate * below.double()


def pps_keep_prob(size: torch.Tensor, cost: torch.Tensor, budget: float) -> torch.Tensor:
    """Keep probabilities, float64 of size's shape: the least variance at expected cost `budget`.

    Independent draws of terms with norm a_i and cost c_i have variance sum_i (1/p_i - 1) a_i^2. At
    sum_i p_i c_i = budget it is smallest at p_i = min(1, tau a_i / sqrt(c_i)) (Cauchy-Schwarz on
    the terms below 1). Water-filling finds tau: a term that would pass 1 is kept for sure, and the
    rest share what is left of the budget. Size 0 is always dropped; a budget that covers all other
    terms keeps them all.
    """
    size, cost = size.double(), cost.double()
    certain = torch.zeros_like(size, dtype=torch.bool)  # kept with probability 1
    undecided = size > 0
    if budget >= cost[undecided].sum():
        return undecided.double()
    while True:
        tau = (budget - cost[certain].sum()) / (size * cost.sqrt())[undecided].sum()
        keep_prob = tau * size / cost.sqrt()
        over = undecided & (keep_prob >= 1.0)
        if not over.any():
            return torch.where(undecided, keep_prob, certain.double())
        certain, undecided = certain | over, undecided & ~over


def adaptive_keep_prob(size: torch.Tensor, cost: torch.Tensor, rest: float) -> torch.Tensor:
    """Keep probabilities, float64 of size's shape: the least time x variance.

    For terms of norm a_i and cost c_i, a step takes the time T = R + sum_i p_i c_i, of which the
    draw does not change R = rest * sum_i c_i. The noise of its gradient is V = sum_i a_i^2 / p_i,
    of sampling and of independent keeps together. Where noise limits learning, progress in a second
    goes as 1 / (T V).

    T V is least at p_i = min(1, tau a_i / sqrt(c_i)) with tau^2 = T / V. Let S be the terms with
    p_i = 1. Then tau^2 = (R + sum over S of c_i) / (sum over S of a_i^2). S is a prefix of the
    terms sorted by a_i / sqrt(c_i): the shortest one whose tau leaves the next term below 1. Size 0
    is always dropped.
    """
    live = size > 0
    keep_prob = torch.zeros_like(size, dtype=torch.float64)
    if not live.any():
        return keep_prob
    norms = size[live].double()
    norms = norms / norms.max()  # squares of very small or large sizes would leave float64
    costs = cost[live].double()
    priority = norms / costs.sqrt()
    order = priority.argsort(descending=True)
    # tau, if the first 1, 2, ... terms are kept for sure
    time_of_first = rest * cost.sum().item() + costs[order].cumsum(dim=0)
    taus = (time_of_first / norms[order].square().cumsum(dim=0)).sqrt()
    # The next term is kept for sure, too, if its probability would pass 1. Once one would not, no
    # later one would, so counting those that would is enough. (Its c / a^2 is above tau^2. Adding
    # it to S raises tau^2, but not past its own c / a^2, and later terms have a larger one.)
    more = int((taus[:-1] * priority[order][1:] >= 1).sum())
    keep_prob[live] = (taus[more] * priority).clamp(max=1.0)
    return keep_prob


# ---------------------------------------------------------------------------- draws and weights


def seed_for(*key) -> int:
    """A seed for each key, such as (seed, step, purpose): the source of all a run's randomness.

    >>> seed_for(0, 1, "rollout") == seed_for(0, 1, "rollout") != seed_for(0, 2, "rollout")
    True
    """
    return int.from_bytes(hashlib.sha256(repr(key).encode()).digest()[:8], "big") >> 1


def generator_for(*key) -> Generator:
    """A generator of its own for each key: Philox (Salmon et al. 2011), with 128 bits of the key's
    hash. torch's CPU generator uses 32 bits of its seed, so keys of a long run would collide."""
    digest = hashlib.sha256(repr(key).encode()).digest()
    return Generator(Philox(key=int.from_bytes(digest[:16], "big")))


def independent(keep_prob: torch.Tensor, generator: Generator) -> torch.Tensor:
    """Independent draw, bool of keep_prob's shape."""
    uniform = torch.as_tensor(generator.random(keep_prob.shape))  # float64 in [0, 1)
    return uniform < keep_prob  # 1.0 is always kept, 0.0 never


def systematic(keep_prob: torch.Tensor, order: torch.Tensor, start: float) -> torch.Tensor:
    """Systematic draw, bool of keep_prob's shape (Madow 1949).

    Lay the probabilities end to end in `order` [n] and keep each one that contains a point of
    start, start + 1, start + 2, ... With `start` uniform in [0, 1) the keep probabilities are
    exact, and the number kept is their sum, rounded down or up. Neighbours in `order` compete for
    the same point, so every stretch of it gets its fair share.

        >>> keep_prob = torch.tensor([0.5, 0.25, 0.25, 1.0, 0.5])
        >>> systematic(keep_prob, torch.arange(5), start=0.6).int().tolist()
        [0, 1, 0, 1, 0]
    """
    if order.sort().values.tolist() != [*range(keep_prob.numel())]:
        raise RuleError(f"a systematic draw needs each of {keep_prob.numel()} places once in order")
    laid_out = keep_prob.double().flatten()[order]
    certain = laid_out >= 1.0  # a whole unit always holds a point, which rounding could lose
    ends = torch.where(certain, 0.0, laid_out).cumsum(dim=0)
    begins = torch.cat([ends.new_zeros(1), ends])[:-1]
    keep = torch.empty_like(certain)
    # Of the points, ceil(x - start) lie before x.
    keep[order] = certain | ((ends - start).ceil() > (begins - start).ceil())
    return keep.view(keep_prob.shape)


def ht_weights(keep: torch.Tensor, keep_prob: torch.Tensor) -> torch.Tensor:
    """Horvitz-Thompson weights, float64 of keep's shape: 1 / keep_prob if kept, 0 if dropped."""
    return torch.where(keep, 1.0 / keep_prob, 0.0)


# ---------------------------------------------------------------------------- rules


# What a rule draws: (keep, weights), bool and float64 of the shape of batch.live.
Drawn = tuple[torch.Tensor, torch.Tensor]


def any_order(batch, generator: Generator) -> torch.Tensor:
    """At random: then a systematic draw of equal probabilities is a simple random sample."""
    return torch.from_numpy(generator.permutation(batch.live.numel()))


def whose_rule(batch) -> str:
    """Which of a run's two rules looks at this batch."""
    return f"the rule of {'prompts' if batch.live.dim() == 1 else 'completions'}"


@dataclass(frozen=True)
class Rule:
    """Keeps at random, and weights by 1 / P(kept): an entry of COMPLETION_RULES or PROMPT_RULES.

    chance(batch, prune_rate) -> the probabilities of keeping, of the shape of batch.live: [K, G]
    for the Completions of a mini-batch, [n] for its sampler.Prompts. They must be above 0 where
    batch.live is True, because no weight can make up for what is never kept.

    order(batch, generator) -> a permutation of the batch's places, for a systematic draw, which
    keeps as many as the probabilities add up to, rounded up or down. None: an independent draw.

    The weights are not the user's to choose: they make the estimate exact.
    """

    chance: Callable
    rate: float | None  # the default; at 0 nothing is dropped. None: the rule has no rate
    order: Callable | None = any_order

    def __init_subclass__(cls):
        raise RuleError(f"{cls.__name__}: a dppo.Rule makes its weights; use dppo.BiasedRule")

    def keep_prob(self, batch, prune_rate: float) -> torch.Tensor:
        """The probabilities, float64, checked."""
        p = self.chance(batch, prune_rate)
        whose = whose_rule(batch)
        if p.shape != batch.live.shape:
            wanted = list(batch.live.shape)
            found = list(p.shape)
            raise RuleError(f"{whose} must return probabilities of shape {wanted}, not {found}")
        valid = (p >= 0) & (p <= 1) & ((p > 0) | ~batch.live)  # NaN is not
        if not valid.all():
            raise RuleError(
                f"{whose} must return probabilities from 0 to 1, and above 0 wherever batch.live "
                f"is True, not {p[~valid][0].item():g}. A dppo.BiasedRule may have 0"
            )
        if prune_rate == 0 and self.rate is not None and (p[batch.live] < 1).any():
            raise RuleError(f"{whose} must keep all that is live at rate 0, or say rate=None")
        return p.double()

    def draw(self, batch, prune_rate: float, generator: Generator) -> Drawn:
        p = self.keep_prob(batch, prune_rate)
        if self.order:
            keep = systematic(p, self.order(batch, generator), start=generator.random())
        else:
            keep = independent(p, generator)
        return keep, ht_weights(keep, p)


@dataclass(frozen=True)
class BiasedRule:
    """Any other rule: one that keeps by rank, or clips its weights. Nothing can check its weights,
    so it must say what it does to the expected gradient.

    select(batch, prune_rate, generator) -> (keep, weights), both of the shape of batch.live. Terms
    that are exactly 0 are left out whatever it says: the same update, for less.
    """

    select: Callable
    rate: float | None  # as of a Rule
    biased: str  # the reason, printed in the run's first lines

    def draw(self, batch, prune_rate: float, generator: Generator) -> Drawn:
        keep, weights = self.select(batch, prune_rate, generator)
        if not keep.shape == weights.shape == batch.live.shape:
            wanted = list(batch.live.shape)
            raise RuleError(
                f"{whose_rule(batch)} must return (keep, weights), both of shape {wanted}"
            )
        keep = keep.bool() & batch.live
        return keep, torch.where(keep, weights.double(), 0.0)


# ---------------------------------------------------------------------------- completion rules


def prune_completions(
    name: str, prune_rate: float, batch: Completions, generator: Generator
) -> Drawn:
    """(keep, weights) [K, G] of one of COMPLETION_RULES. Each draw serves exactly one update."""
    return COMPLETION_RULES[name].draw(batch, prune_rate, generator)


def everything(batch, prune_rate: float) -> torch.Tensor:
    return torch.ones(batch.live.shape)


def terms_not_zero(batch: Completions, prune_rate: float) -> torch.Tensor:
    """All but terms that are exactly 0: of a dead group, unscorable or masked."""
    return batch.live.double()


def blindly(batch: Completions, prune_rate: float) -> torch.Tensor:
    """All with the same probability."""
    return torch.full(batch.live.shape, 1.0 - prune_rate, dtype=torch.float64)


def low_advantages(batch: Completions, prune_rate: float) -> torch.Tensor:
    """The paper's threshold, randomised by us: r_o is the chance of dropping a completion whose
    |advantage| is below its group's mean. (A summary speaks of the intra-group advantage; the
    paper's scope is not known.)"""
    return threshold_keep_prob(batch.advantages.abs(), ~batch.rewards.isnan(), prune_rate)


def proportional_to_size(batch: Completions, prune_rate: float) -> torch.Tensor:
    """Ours: minimum variance at an expected 1 - r_o of the mini-batch's tokens. Terms that are 0
    are dropped first. If the budget suffices for all others, they are kept with weight 1."""
    return pps_keep_prob(batch.size, batch.cost, (1.0 - prune_rate) * batch.cost.sum().item())


def adaptive(batch: Completions, prune_rate: float) -> torch.Tensor:
    """Ours: the least time x variance, at batch.rest. It keeps a large share of the terms that are
    not 0 where these are few or alike, and a small one where a few of many carry the gradient."""
    return adaptive_keep_prob(batch.size, batch.cost, batch.rest)


def strata_order(batch: Completions, generator=None) -> torch.Tensor:
    """By prompt, then by size: every prompt, and every range of sizes within it, gets its fair
    share of a systematic draw."""
    K, G = batch.size.shape
    return (batch.size.argsort(dim=1, stable=True) + G * torch.arange(K)[:, None]).flatten()


COMPLETION_RULES = {
    "none": Rule(everything, rate=None),
    "nonzero": Rule(terms_not_zero, rate=None),
    "uniform": Rule(blindly, rate=0.7),
    "dppo": Rule(low_advantages, rate=0.7, order=None),
    "pps": Rule(proportional_to_size, rate=0.7, order=strata_order),
    "adaptive": Rule(adaptive, rate=None, order=strata_order),
}


# ---------------------------------------------------------------------------- losses


@dataclass(frozen=True)
class Loss:
    """What is minimized: an entry of LOSSES.

    surrogate(ratio, logprobs, advantages, eps_low, eps_high) -> (loss, clipped) of N tokens, [N]
    each; `clipped` is True where the clip acts. A token's loss may depend on its own sequence only.
    """

    surrogate: Callable
    denominator: str  # of the sum over tokens: own length, constant or batch tokens (loss_scale)
    clip: tuple[float, float] = (0.2, 0.2)  # default --eps-low and --eps-high
    sequence_ratio: bool = False  # the geometric mean of a sequence's ratios, for all its tokens
    scale_rewards: str = "group"  # default --scale-rewards, one of SCALES


def clipped_ratio(ratio, logprobs, advantages, eps_low, eps_high):
    """-min(r A, clip(r) A) (arXiv:2402.03300)."""
    inside = ratio.clamp(1.0 - eps_low, 1.0 + eps_high)
    too_low = (ratio < 1.0 - eps_low) & (advantages < 0)
    too_high = (ratio > 1.0 + eps_high) & (advantages > 0)
    return -torch.minimum(ratio * advantages, inside * advantages), too_low | too_high


def clipped_weight(ratio, logprobs, advantages, eps_low, eps_high):
    """-stopgrad(clip(r)) A logprob (arXiv:2506.13585): no token loses its gradient, and the clip
    acts whatever the sign of A."""
    inside = ratio.clamp(1.0 - eps_low, 1.0 + eps_high)
    return -inside.detach() * advantages * logprobs, ratio != inside


LOSSES = {  # clips are the papers'; cispo's is from 0 (no lower bound) to 5 (TRL's)
    "grpo": Loss(clipped_ratio, "own length"),
    "dr_grpo": Loss(clipped_ratio, "constant", scale_rewards="none"),  # arXiv:2503.20783
    "dapo": Loss(clipped_ratio, "batch tokens", clip=(0.2, 0.28)),  # arXiv:2503.14476
    "gspo": Loss(clipped_ratio, "own length", (3e-4, 4e-4), sequence_ratio=True),  # 2507.18071
    "cispo": Loss(clipped_weight, "batch tokens", clip=(1.0, 4.0)),  # arXiv:2506.13585
}


def loss_scale(
    lengths: torch.Tensor, loss: str, *, num_sequences: int, max_new_tokens: int, num_tokens: float
) -> torch.Tensor:
    """1 / denominator, which multiplies each token's loss in a full batch: float64, lengths' shape.

    The counts are of the full batch, fixed before anything is pruned: num_sequences = Q x G, and
    num_tokens its completion tokens. With M updates a step, both are divided by M; verl divides by
    each mini-batch's own tokens.
        own length    length x num_sequences: a mean over sequences of token means
        constant      num_sequences x max_new_tokens
        batch tokens  num_tokens
    """
    kind = LOSSES[loss].denominator
    if kind == "own length":
        return 1.0 / (lengths.double().clamp(min=1) * num_sequences)
    denominator = {"constant": num_sequences * max_new_tokens, "batch tokens": num_tokens}[kind]
    return torch.full_like(lengths, 1.0 / max(denominator, 1.0), dtype=torch.float64)


def token_loss(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    owner: torch.Tensor,
    *,
    loss: str,
    eps_low: float,
    eps_high: float,
    num_sequences: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The surrogate of each completion token, [N], and whether the clip acts on it, bool [N].

    `owner` [N] numbers the sequences from 0. The multiplier (weights / denominator) multiplies
    the result afterwards, so it cannot move the clip.
    """
    log_ratio = logprobs - old_logprobs
    if LOSSES[loss].sequence_ratio:
        zeros = log_ratio.new_zeros(num_sequences)
        lengths = zeros.index_add(0, owner, torch.ones_like(log_ratio)).clamp(min=1)
        log_ratio = (zeros.index_add(0, owner, log_ratio) / lengths)[owner]
    terms, clipped = LOSSES[loss].surrogate(
        log_ratio.exp(), logprobs, advantages, eps_low, eps_high
    )
    if not terms.shape == clipped.shape == logprobs.shape:
        wanted = list(logprobs.shape)
        raise RuleError(f"--loss {loss} must return (loss, clipped), two tensors of shape {wanted}")
    return terms, clipped


def kl_k3(logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    """Estimate [N] of KL(policy | reference) at each sampled token: e^d - d - 1, d = ref - policy.

    It is never negative (Schulman 2020, "k3").
    """
    difference = ref_logprobs - logprobs
    return difference.expm1() - difference
