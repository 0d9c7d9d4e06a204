"""
The proof by enumeration: every outcome that a pruning rule can have, with its probability.

    python proof.py          prints the table for a toy policy of 36 parameters

Gradients are linear in the weights (the tests show it with real backward passes). So the expected
gradient is the sum over outcomes of probability x weights, times the per-sequence gradients.
Nothing is sampled: an unbiased rule is off by rounding (1e-16) and nothing else. The tests use the
same functions on a Qwen3 model.

Letters: K prompts, G completions each, P parameters, N completion tokens, V vocabulary.
"""

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

import baselines
import dppo

UNBIASED = ("zero", "dppo", "pps", "uniform")
TWINS = ("no weights", "kept count", "kept tokens", "advantages again")  # popular biased mistakes


@dataclass
class Case:
    """One batch, and a function that takes its gradient.

    gradient(advantages [K, G], scale [K, G], keep [K, G], shift=0.0) -> [P]; `shift` [P] moves the
    parameters first.
    """

    gradient: Callable
    batch: dppo.Completions
    scale: torch.Tensor  # [K, G], of the full batch: prompt weight over denominator
    lengths: torch.Tensor  # [K, G], tokens of each completion
    loss: str

    def full(self, shift=0.0) -> torch.Tensor:
        """The un-pruned gradient [P]."""
        return self.gradient(self.batch.advantages, self.scale, self.scale > 0, shift)

    def of_each(self, shift=0.0) -> torch.Tensor:
        """What each sequence adds to the full gradient, [K * G, P]: one backward pass each."""
        advantages, scale = self.batch.advantages, self.scale
        alone = torch.eye(scale.numel(), dtype=torch.bool).view(-1, *scale.shape)
        return torch.stack([self.gradient(advantages, scale * one, one, shift) for one in alone])


# ---------------------------------------------------------------------------- every outcome


def independent_outcomes(keep_prob: torch.Tensor) -> Iterator[tuple[torch.Tensor, float]]:
    """Every (keep, probability) of dppo.draw."""
    flat = keep_prob.flatten().tolist()
    choices = [(True,) if p == 1 else (False,) if p == 0 else (True, False) for p in flat]
    for bits in itertools.product(*choices):
        chance = math.prod(p if bit else 1 - p for p, bit in zip(flat, bits, strict=True))
        yield torch.tensor(bits).view(keep_prob.shape), chance


def systematic_outcomes(
    keep_prob: torch.Tensor, order: torch.Tensor
) -> Iterator[tuple[torch.Tensor, float]]:
    """Every (keep, probability) of dppo.systematic, which changes only where the start passes the
    end of an interval."""
    laid = keep_prob.flatten()[order]
    ends = torch.where(laid >= 1, 0.0, laid).cumsum(dim=0) % 1.0
    edges = sorted({0.0, *ends.tolist(), 1.0})
    for low, high in itertools.pairwise(edges):
        yield dppo.systematic(keep_prob, order, (low + high) / 2), high - low


def uniform_outcomes(
    keep_prob: torch.Tensor, prune_rate: float
) -> Iterator[tuple[torch.Tensor, float]]:
    """Every (keep, probability) of a simple random sample of n (1 - rate) completions, rounded down
    or up. The tests show that uniform's draw is one."""
    n = keep_prob.numel()
    whole, part = divmod(n * (1 - prune_rate), 1)
    for size, chance in ((int(whole), 1 - part), (int(whole) + 1, part)):
        for kept in itertools.combinations(range(n), size):
            keep = torch.zeros(n, dtype=torch.bool)
            keep[list(kept)] = True
            yield keep.view(keep_prob.shape), chance / math.comb(n, size)


def outcomes(
    rule: str, prune_rate: float, batch: dppo.Completions
) -> Iterator[tuple[torch.Tensor, torch.Tensor, float]]:
    """Every (keep, weights, probability) of a completion rule on a batch."""
    if rule in baselines.BIASED:
        yield *baselines.prune_completions(rule, prune_rate, batch, torch.Generator()), 1.0
        return
    if rule == "uniform":
        keep_prob = torch.full(batch.size.shape, 1 - prune_rate, dtype=torch.float64)
        draws = uniform_outcomes(keep_prob, prune_rate)
    else:
        keep_prob = dppo.completion_keep_prob(rule, prune_rate, batch)
        if rule == "pps":
            draws = systematic_outcomes(keep_prob, dppo.strata_order(batch.size))
        else:
            draws = independent_outcomes(keep_prob)
    for keep, chance in draws:
        yield keep, dppo.ht_weights(keep, keep_prob), chance


# ---------------------------------------------------------------------------- expectations


def expected_gradient(
    case: Case, rule: str, prune_rate: float, *, each=None, twin: str | None = None
) -> torch.Tensor:
    """The pruned gradient [P], summed over every outcome times its probability.

    `twin` makes one of the mistakes in TWINS; `each` saves computing case.of_each() again.
    """
    each = case.of_each() if each is None else each  # [K * G, P]
    lengths = case.lengths.double()
    total, chances = torch.zeros_like(each[0]), 0.0
    for keep, weights, chance in outcomes(rule, prune_rate, case.batch):
        factor = weights
        if twin == "no weights":
            factor = keep.double()
        elif twin == "kept count":  # the mean over what is kept
            factor = weights * keep.numel() / max(1, keep.sum().item())
        elif twin == "kept tokens":
            factor = weights * lengths.sum() / max(1.0, (lengths * keep).sum().item())
        if twin == "advantages again":  # from the kept completions only: new gradients each time
            rewards = torch.where(keep, case.batch.rewards, torch.nan)
            again = dppo.group_advantages(rewards, case.loss)
            total += chance * case.gradient(again, case.scale * weights, keep, 0.0)
        else:
            total += chance * (factor.flatten() @ each)
        chances += chance
    assert abs(chances - 1.0) < 1e-9, f"the probabilities of {rule}'s outcomes sum to {chances}"
    return total


def second_step(
    case: Case, rule: str, prune_rate: float, *, lr: float, fresh: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Expected gradients [P], pruned and full, of the second of two updates on one batch.

    The expectation is over every outcome of the first update's draw. If `fresh`, the second update
    makes its own draw; otherwise it reuses the first one's mask.
    """
    each, pruned, full = case.of_each(), 0.0, 0.0
    for _keep, weights, chance in outcomes(rule, prune_rate, case.batch):
        shift = -lr * (weights.flatten() @ each)  # where this outcome's update leads
        there = case.of_each(shift)
        full = full + chance * there.sum(dim=0)
        if fresh:
            pruned = pruned + chance * expected_gradient(case, rule, prune_rate, each=there)
        else:
            pruned = pruned + chance * (weights.flatten() @ there)
    return pruned, full


def relative_error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """Largest difference over the largest entry."""
    return ((got - wanted).abs().max() / wanted.abs().max()).item()


# ---------------------------------------------------------------------------- a toy policy


def toy_case(
    loss: str = "grpo",
    *,
    beta: float = 0.0,
    drift: float = 0.3,
    prompts=(0, 1),
    prompt_weight: float = 1.0,
    num_tokens: float | None = None,
) -> Case:
    """Four completions of up to 5 tokens per prompt, under a table of next-token logits [V, V].

    Everything is float64. `drift` moves the old log-probs away from the policy's, so that some
    tokens are clipped; one completion is masked. `prompts` are those of the two that a prompt-level
    draw kept, and `prompt_weight` multiplies them. dapo and cispo divide by `num_tokens`, by
    default this batch's weighted tokens.
    """
    V, G = 6, 4
    rows = list(prompts)
    generator = torch.Generator().manual_seed(2)
    table = torch.randn(V, V, generator=generator, dtype=torch.float64)
    lengths = torch.tensor([[5, 2, 3, 4], [1, 4, 2, 5]])
    tokens = torch.randint(V, (2, G, 6), generator=generator)  # the first one stands for the prompt
    noise, ref_noise = torch.randn(2, 2, G, 5, generator=generator, dtype=torch.float64)
    rewards = torch.tensor([[1.0, 0, 0, 0], [1, 1, 0, 1]], dtype=torch.float64)
    sampled = torch.arange(5) < lengths[..., None]  # [2, G, 5]
    owner = torch.arange(2 * G).view(2, G, 1).expand(2, G, 5)
    eps_low, eps_high = {"gspo": (0.05, 0.05), "cispo": (1.0, 0.2)}.get(loss, (0.2, 0.28))

    def logprobs_of(table):
        return table.log_softmax(dim=-1)[tokens[..., :-1], tokens[..., 1:]]  # [2, G, 5]

    own = logprobs_of(table)

    def gradient(advantages, scale, keep, shift=0.0):
        shift = torch.as_tensor(shift, dtype=torch.float64).expand(V * V).view(V, V)
        here = (table + shift).requires_grad_()
        mask = keep[..., None] & sampled[rows]  # [K, G, 5]
        tokens_of = lambda values: values[rows][mask]  # [N]
        spread = lambda values: values[..., None].expand_as(mask)[mask]  # [N]
        logprobs, ref = tokens_of(logprobs_of(here)), tokens_of(own + ref_noise)  # [N]
        losses, _ = dppo.token_loss(
            logprobs,
            tokens_of(own + drift * noise),
            spread(advantages),
            tokens_of(owner),
            loss=loss,
            eps_low=eps_low,
            eps_high=eps_high,
            num_sequences=2 * G,
        )
        total = ((losses + beta * dppo.kl_k3(logprobs, ref)) * spread(scale)).sum()
        (found,) = torch.autograd.grad(total, here, allow_unused=True, materialize_grads=True)
        return found.flatten()

    probs = table.softmax(dim=-1)[tokens[..., :-1]]  # [2, G, 5, V]
    onehot = torch.nn.functional.one_hot(tokens[..., 1:], V)
    energy = (onehot - probs).square().sum(dim=-1)  # [2, G, 5]
    counts = torch.full((2, G), prompt_weight, dtype=torch.float64)
    counts[0, 3] = 0.0  # masked
    counts, lengths = counts[rows], lengths[rows]
    scale = counts * dppo.loss_scale(
        lengths,
        loss,
        num_sequences=2 * G,
        max_new_tokens=5,
        num_tokens=num_tokens or (counts * lengths).sum().item(),
    )
    advantages = dppo.group_advantages(rewards, loss)[rows]
    size = dppo.contribution_size(advantages, scale, (energy * sampled).sum(dim=-1)[rows], beta)
    batch = dppo.Completions(advantages, rewards[rows], lengths + 1, size)
    return Case(gradient, batch, scale, lengths, loss)


def both_levels(
    loss: str, rule: str, prune_rate: float, *, beta: float = 0.0, num_tokens: float | None = 20.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Expected gradients [P], pruned and full, with both levels pruned.

    Each prompt is kept with probability 1/2 and weight 2. Then completions are pruned, with keep
    probabilities computed from the prompts that are left. dapo and cispo divide by a number that
    was known before the draw; num_tokens None: by the tokens of each outcome, which is biased.
    """
    options = {"beta": beta, "num_tokens": num_tokens}
    total = torch.zeros(36, dtype=torch.float64)
    for prompts in ((0, 1), (0,), (1,)):  # no gradient if both are dropped
        case = toy_case(loss, prompts=prompts, prompt_weight=2.0, **options)
        total += 0.25 * expected_gradient(case, rule, prune_rate)
    return total, toy_case(loss, **options).full()


# ---------------------------------------------------------------------------- the table


def main() -> None:
    """Print, for every rule and loss, how far the expected gradient is from the full one."""
    print(
        "The expected gradient over every outcome of the draw, enumerated: its largest error, "
        "relative to the\nlargest entry of the full gradient. 8 sequences, 36 parameters, float64, "
        "some tokens clipped; rate 0.6;\nthe worse of beta 0 and 0.1 (KL).\n"
    )
    print(f"{'':32s}" + "".join(f"{loss:>9s}" for loss in dppo.LOSSES))

    def line(name, expectations):  # of (loss, beta): the expected gradient and the full one
        errors = [
            max(relative_error(*expectations(loss, beta)) for beta in (0.0, 0.1))
            for loss in dppo.LOSSES
        ]
        print(f"  {name:30s}" + "".join(f"{error:9.0e}" for error in errors), flush=True)

    def one(rule, twin=None):
        def expectations(loss, beta):
            case = toy_case(loss, beta=beta)
            return expected_gradient(case, rule, 0.6, twin=twin), case.full()

        return expectations

    def both(rule, **options):
        return lambda loss, beta: both_levels(loss, rule, 0.6, beta=beta, **options)

    def two(fresh):
        return lambda loss, beta: second_step(
            toy_case(loss, beta=beta), "pps", 0.6, lr=2.0, fresh=fresh
        )

    print("unbiased")
    for rule in UNBIASED:
        line(rule, one(rule))
    line("pps, second epoch", two(fresh=True))
    print("prompts pruned too (dapo and cispo then divide by earlier batches' tokens)")
    for rule in ("none", "dppo", "pps"):
        line(rule, both(rule))
    line("pps, tokens of what is kept", both("pps", num_tokens=None))
    print("biased")
    for rule in baselines.BIASED:
        line(rule, one(rule))
    for twin in TWINS:
        line(f"dppo, {twin}", one("dppo", twin))
    line("pps, first epoch's mask again", two(fresh=False))


if __name__ == "__main__":
    main()
