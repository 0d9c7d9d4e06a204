"""
DPPO, Dynamic Pruning Policy Optimization (arXiv:2603.04135), as pure functions on tensors.

It is GRPO with three changes:
    1. whole prompts are dropped before rollout, at random, by their history      (sampler.py)
    2. single completions are dropped after reward, at random                     (completion_keep_prob)
    3. what is kept is multiplied by 1 / (probability of keeping it)              (ht_weights)

Why the expected gradient is exactly that of the full batch (Horvitz and Thompson 1952): the full-batch loss
is a sum over sequences, sum_i l_i. If sequence i is kept with probability p_i > 0, then
E[sum_i (kept_i / p_i) l_i] = sum_i l_i for any parameters, whatever is inside l_i: clipping, a sequence's ratio, KL.
`python dppo.py` enumerates every outcome of a small case and prints the error. What would break it:
    - a denominator or an advantage that depends on what was kept: both come from the full batch here
    - a keep probability of zero where l_i is not zero: rates are below 1, and estimates of size have a floor
    - a wrong keep probability, such as floor(r n) dropped but 1 / (1 - r) applied
    - parameters that depend on the draw: every (mini-batch, epoch) has a draw of its own

Which pairs are exact, for the gradient of one update before it is clipped by norm:
    completions  none, zero, dppo, pps (here) and uniform (baselines.py): every loss, any --beta, mini-batches, epochs
    prompts      uniform, dppo, pps (sampler.py) with grpo, dr_grpo, gspo, any mini-batches. With dapo and cispo only
                 consistent: the un-pruned batch's token count is unknown, its weighted estimate makes a ratio.
                 With --epochs > 1 inexact: later epochs see parameters that come from the one prompt draw of the step
    never        cppo, cppo_batch, dppo_floor: probabilities of 0 and 1; greso: no weights, refills (baselines.py)
Adam and the clip by norm are not linear, and nothing here claims that they are.

Public summaries say that the paper prunes a deterministic fraction; the random form here is our reconstruction. The
rule pps, minimum variance for a given number of tokens, is ours.

Letters: Q prompts of a step, K of them rolled out, G completions each, N completion tokens, n completions in any shape.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

ADVANTAGE_EPS = 1e-4  # added to the group's standard deviation, as TRL has it
THRESHOLD_MARGIN = 1e-6  # below the mean means below by more than this: at pass rate 1/2 all |advantages| tie
SIZE_FLOOR = 0.03  # of the mean size: below it an estimate is not believed, and no weight grows without bound

LOSSES = ("grpo", "dr_grpo", "dapo", "gspo", "cispo")
COMPLETION_RULES = ("none", "zero", "dppo", "pps")


def _check(kind: str, name: str, known: tuple[str, ...]) -> None:
    if name not in known:
        raise ValueError(f"unknown {kind} {name!r}: choose one of {', '.join(known)}")


# ---------------------------------------------------------------------------- advantages


def group_advantages(rewards: torch.Tensor, loss: str) -> torch.Tensor:
    """Advantages [Q, G] of rewards [Q, G], from each prompt's full group, before anything is dropped.

    (R - mean) / (sample standard deviation + 1e-4), as TRL; dr_grpo: R - mean (arXiv:2503.20783). An unscorable
    completion (reward NaN) counts neither in mean nor deviation and gets 0. A group whose rewards are all
    equal gets exact zeros, not rounding errors blown up by 1e-4.
    """
    _check("loss", loss, LOSSES)
    scored = ~rewards.isnan()
    count = scored.sum(dim=1, keepdim=True)  # [Q, 1]
    filled = torch.where(scored, rewards, 0.0)
    mean = filled.sum(dim=1, keepdim=True) / count.clamp(min=1)  # [Q, 1]
    centred = torch.where(scored, rewards - mean, 0.0)  # [Q, G]
    dead = dead_groups(rewards)[:, None]  # [Q, 1]
    if loss != "dr_grpo":
        std = (centred.square().sum(dim=1, keepdim=True) / (count - 1).clamp(min=1)).sqrt()  # [Q, 1]
        centred = centred / (std + ADVANTAGE_EPS)
    return torch.where(dead, 0.0, centred)


def dead_groups(rewards: torch.Tensor) -> torch.Tensor:
    """Which groups [Q] carry no signal: all scorable rewards [Q, G] of the group are equal (or there is none)."""
    scored = ~rewards.isnan()
    highest = torch.where(scored, rewards, -torch.inf).amax(dim=1)
    lowest = torch.where(scored, rewards, torch.inf).amin(dim=1)
    return highest <= lowest


# ---------------------------------------------------------------------------- what a rule looks at


@dataclass
class Completions:
    """What a completion rule may look at: the groups of one mini-batch, [K, G] each, known before any log-prob is
    computed again. Of other mini-batches it sees nothing: theirs is another update, at other parameters."""

    advantages: torch.Tensor
    rewards: torch.Tensor  # NaN: unscorable
    cost: torch.Tensor  # tokens that training forwards: prompt + completion
    size: torch.Tensor  # contribution_size: how much it is expected to move the gradient


def energy_bound(logprobs: torch.Tensor) -> torch.Tensor:
    """Upper bound, per token, of the logit-gradient energy |onehot(y) - softmax|^2 from the sampled token's
    log-prob alone: 2 (1 - p)^2. For engines that return no more; rollout.py sums the exact one."""
    return 2.0 * torch.expm1(logprobs).square()


def contributes(advantages: torch.Tensor, scale: torch.Tensor, beta: float) -> torch.Tensor:
    """Which completions' terms are not exactly 0, bool of their shape: not masked (scale 0), and an advantage or a KL
    term to carry."""
    return (scale > 0) & ((advantages != 0) | (beta > 0))


def contribution_size(advantages: torch.Tensor, scale: torch.Tensor, energy: torch.Tensor, beta: float) -> torch.Tensor:
    """Estimated gradient norm of each completion's term, float64 [K, G]: scale (|A| + beta) sqrt(energy).

    `scale` is everything that multiplies its tokens (prompt weight over denominator; 0: masked), `energy` the sum over
    its tokens of |onehot - softmax|^2. The gradient passes through the logits, and scores of different tokens
    are uncorrelated, so its square is about proportional to the energy; beta stands for the KL term's part.
    Exactly 0 where the term is exactly 0; elsewhere never below SIZE_FLOOR of the mean, so an estimate that
    underflows never drops anything for good.
    """
    live = contributes(advantages, scale, beta)
    size = scale.double() * (advantages.double().abs() + beta) * energy.double().sqrt()
    floor = SIZE_FLOOR * size[live].mean() if live.any() else 0.0
    return torch.where(live, size.clamp(min=max(float(floor), 1e-30)), 0.0)


# ---------------------------------------------------------------------------- keep probabilities


def threshold_keep_prob(scores: torch.Tensor, counted: torch.Tensor, prune_rate: float) -> torch.Tensor:
    """Keep probabilities, float64 of the scores' shape [..., n]: 1 - prune_rate below the mean, else 1.

    The mean is over the `counted` [..., n] entries of the last dimension; NaN scores (a prompt never seen)
    are always kept. The paper's threshold (from secondary sources) at both levels: |advantage| against its group's mean
    with r_o, historical |advantage| against the step's mean with r_q; the random form is ours.
    """
    scores = scores.double()
    total = torch.where(counted, scores, 0.0).sum(dim=-1, keepdim=True)
    mean = total / counted.sum(dim=-1, keepdim=True)  # [..., 1]; NaN where nothing counts: nothing is below
    below = scores < mean - THRESHOLD_MARGIN  # False where either is NaN
    return 1.0 - prune_rate * below.double()


def pps_keep_prob(size: torch.Tensor, cost: torch.Tensor, budget: float) -> torch.Tensor:
    """Keep probabilities, float64 of size's shape, of least variance among all whose expected cost is `budget`.

    Independent keeps of terms of norm a_i and cost c_i have variance sum_i (1/p_i - 1) a_i^2. Under
    sum_i p_i c_i = budget the least of it is at p_i = min(1, tau a_i / sqrt(c_i)) (Cauchy-Schwarz on those below 1).
    tau by water-filling: whoever would pass 1 is kept for sure, and the others share the rest of the budget.
    Size 0 is dropped for free; a budget that covers everything else keeps it.
    """
    size, cost = size.double(), cost.double()
    sure, open_ = torch.zeros_like(size, dtype=torch.bool), size > 0
    if budget >= cost[open_].sum():
        return open_.double()
    while True:
        tau = (budget - cost[sure].sum()) / (size * cost.sqrt())[open_].sum()
        keep_prob = tau * size / cost.sqrt()
        over = open_ & (keep_prob >= 1.0)
        if not over.any():
            return torch.where(open_, keep_prob, sure.double())
        sure, open_ = sure | over, open_ & ~over


def completion_keep_prob(rule: str, prune_rate: float, batch: Completions) -> torch.Tensor:
    """Keep probabilities, float64 [K, G], of the unbiased completion rules. prune_rate is r_o.

    none  everything
    zero  everything but what contributes exactly 0: equal rewards, unscorable or masked completions. No rate
    dppo  the paper's threshold, randomised by us: r_o is the chance of dropping a completion whose |advantage| is below
          its group's mean. (A summary speaks of the intra-group advantage; the paper's scope is not known.)
    pps   ours: minimum variance for an expected 1 - r_o of the mini-batch's tokens, spent on what contributes. What is
          exactly 0 goes first, so where groups are mostly dead nothing else has to
    """
    _check("completion rule", rule, COMPLETION_RULES)
    live = batch.size > 0
    if rule == "zero":
        return live.double()
    if rule == "dppo":
        return threshold_keep_prob(batch.advantages.abs(), ~batch.rewards.isnan(), prune_rate)
    if rule == "pps":
        return pps_keep_prob(batch.size, batch.cost, (1.0 - prune_rate) * batch.cost.sum().item())
    return torch.ones_like(batch.size, dtype=torch.float64)


# ---------------------------------------------------------------------------- the draw and the weights


def draw(keep_prob: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Keep or drop, bool of keep_prob's shape: independent draws with exactly these probabilities, on the CPU."""
    uniform = torch.rand(keep_prob.shape, dtype=torch.float64, generator=generator)  # [0, 1): 1.0 is always kept
    return uniform < keep_prob


def systematic(keep_prob: torch.Tensor, order: torch.Tensor, start: float) -> torch.Tensor:
    """Systematic draw, bool of keep_prob's shape: lay the probabilities end to end in `order` [n] and keep whatever
    contains one of start, start + 1, start + 2, ... With `start` uniform in [0, 1) the keep probabilities are exact,
    and the number kept is their sum, rounded down or up (Madow 1949). Neighbours in `order` share a point, so each
    stretch of it gets its fair share.

        >>> systematic(torch.tensor([0.5, 0.25, 0.25, 1.0, 0.5]), torch.arange(5), start=0.6).int().tolist()
        [0, 1, 0, 1, 0]
    """
    laid = keep_prob.double().flatten()[order]
    sure = laid >= 1.0  # a whole unit always holds a point; left out, rounding cannot lose it
    ends = torch.where(sure, 0.0, laid).cumsum(dim=0)
    points = (ends - start).ceil().clamp(min=0)  # how many of start, start + 1, ... lie before each end
    keep = torch.empty_like(sure)
    keep[order] = sure | (points.diff(prepend=points.new_zeros(1)) > 0)
    return keep.view(keep_prob.shape)


def strata_order(size: torch.Tensor) -> torch.Tensor:
    """The order [K * G] of pps's systematic draw over sizes [K, G]: by prompt, then by size, so that every prompt and
    every kind of completion in it gets its fair share."""
    K, G = size.shape
    return (size.argsort(dim=1, stable=True) + G * torch.arange(K)[:, None]).flatten()


def ht_weights(keep: torch.Tensor, keep_prob: torch.Tensor) -> torch.Tensor:
    """Horvitz-Thompson weights, float64 of keep's shape: 1 / keep_prob where kept, 0 where dropped."""
    return torch.where(keep, 1.0 / keep_prob, 0.0)


def prune(keep_prob: torch.Tensor, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw independently and weigh: (keep, weights), both of keep_prob's shape. Probability 1 everywhere: all kept,
    weights 1."""
    keep = draw(keep_prob, generator)
    return keep, ht_weights(keep, keep_prob)


def prune_completions(
    rule: str, prune_rate: float, batch: Completions, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """(keep, weights) [K, G] of one of COMPLETION_RULES: one draw, good for one update and no more."""
    keep_prob = completion_keep_prob(rule, prune_rate, batch)
    if rule != "pps":
        return prune(keep_prob, generator)
    start = torch.rand((), dtype=torch.float64, generator=generator).item()
    keep = systematic(keep_prob, strata_order(batch.size), start)
    return keep, ht_weights(keep, keep_prob)


# ---------------------------------------------------------------------------- the loss


def loss_scale(
    lengths: torch.Tensor, loss: str, *, num_sequences: int, max_new_tokens: int, num_tokens: float
) -> torch.Tensor:
    """What multiplies each token's loss in a full batch, float64 of lengths' shape: one over the denominator.

    All three counts are of the full batch, fixed before anything is pruned: num_sequences = Q x G, num_tokens their
    completion tokens. grpo, gspo: 1 / (length x num_sequences), a mean over sequences of token means. dr_grpo:
    1 / (num_sequences x max_new_tokens). dapo, cispo: 1 / num_tokens.
    """
    _check("loss", loss, LOSSES)
    if loss in ("grpo", "gspo"):
        return 1.0 / (lengths.double().clamp(min=1) * num_sequences)
    denominator = {"dr_grpo": num_sequences * max_new_tokens, "dapo": num_tokens, "cispo": num_tokens}[loss]
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
) -> tuple[torch.Tensor, torch.Tensor]:
    """The surrogate of each completion token, [N], and whether the clip acts on it, bool [N]. Neither weights nor
    denominators come in here, so they can neither move the clip nor meet the ratio.

    grpo, dr_grpo, dapo: -min(r A, clip(r) A) with the token's ratio r (arXiv:2402.03300; dapo, arXiv:2503.14476, has
    a higher eps_high). gspo: the same with r the geometric mean of its sequence's ratios (arXiv:2507.18071); `owner`
    [N] numbers the sequences. cispo: -stopgrad(clip(r)) A logprob, so no token loses its gradient and the clip acts
    whatever the sign of A (arXiv:2506.13585).
    """
    _check("loss", loss, LOSSES)
    log_ratio = logprobs - old_logprobs
    if loss == "gspo":
        sequences = int(owner.max()) + 1 if len(owner) else 0
        lengths = torch.bincount(owner, minlength=sequences).clamp(min=1)
        log_ratio = (log_ratio.new_zeros(sequences).index_add(0, owner, log_ratio) / lengths)[owner]
    ratio = log_ratio.exp()
    inside = ratio.clamp(1.0 - eps_low, 1.0 + eps_high)
    if loss == "cispo":
        return -inside.detach() * advantages * logprobs, ratio != inside
    clipped = ((ratio < 1.0 - eps_low) & (advantages < 0)) | ((ratio > 1.0 + eps_high) & (advantages > 0))
    return -torch.minimum(ratio * advantages, inside * advantages), clipped


def kl_k3(logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    """Estimate [N] of KL(policy | reference) at each sampled token: e^d - d - 1, d = ref - policy. Never negative
    (Schulman 2020, "k3")."""
    difference = ref_logprobs - logprobs
    return difference.expm1() - difference


# ---------------------------------------------------------------------------- what to watch


def effective_sample_size(weights: torch.Tensor) -> float:
    """(sum w)^2 / sum w^2 of the weights [any shape]: how many equal weights would have this spread (Kish 1965)."""
    return (weights.sum().square() / weights.square().sum()).item()


def check_unbiased(full: torch.Tensor, pruned: Iterable[torch.Tensor]) -> dict[str, float]:
    """The running check, from the full gradient [P] and n independent pruned ones of the same batch, one at a time.

    bias2: its mean over many batches is the squared relative bias. variance: of one pruned gradient, relative to
    |full|^2. scale: its mean is the relative error of the length along the full gradient. norm: |full|. Where the
    pruning is unbiased, bias2 and scale average to 0, also if a batch counts as its norm, which no draw changes.
    """
    n, total, squares, square = 0, torch.zeros_like(full), 0.0, full.square().sum()
    for gradient in pruned:
        error = gradient - full
        n, squares = n + 1, squares + error.square().sum()
        total += error
    between = total.square().sum() - squares  # n (n - 1) times the mean product of two errors
    return {
        "check/bias2": (between / (n * (n - 1) * square)).item(),
        "check/variance": ((squares - between / (n - 1)) / (n * square)).item(),
        "check/scale": ((total * full).sum() / (n * square)).item(),
        "check/norm": square.sqrt().item(),
    }


if __name__ == "__main__":
    import proof

    proof.main()
