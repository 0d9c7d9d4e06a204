"""
The proof by enumeration: every outcome that a pruning rule can have, with its probability.

    python proof.py          prints the table for a toy policy of 36 parameters
    python proof.py FILE     imports a Python file first, to prove the rules and losses that it adds

Gradients are linear in the weights (the tests show it with real backward passes). So the expected
gradient is the sum over outcomes of probability x weights, times the per-sequence gradients.
Nothing is sampled: an unbiased rule is off by rounding (1e-16) and nothing else. The tests use the
same functions on a Qwen3 model.

Letters: K prompts, G completions each, P parameters, N completion tokens, V vocabulary.
"""

import importlib
import importlib.util
import itertools
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

import dppo
import sampler

importlib.import_module("related.rivals")  # adds its rules

MISTAKES = ("no weights", "kept count")  # common ones, made on purpose: they must be found
LIMIT = 1e-9  # rounding stays far below, a bias far above
BETAS = (0.0, 0.1)  # without and with a KL term; tables show the larger error
KNOWN_TOKENS = 30.0  # what dapo and cispo divide by where prompts are pruned: earlier batches' mean


def rules(table: dict, *, biased: bool) -> list[str]:
    """The rules of a table that claim to be unbiased, or those that do not; without `none`."""
    return [name for name, rule in table.items() if bool(rule.biased) == biased and name != "none"]


def rate_of(rule, prune_rate: float) -> float:
    """prune_rate, or 0 for an entry without a rate."""
    return 0.0 if rule.rate is None else prune_rate


@dataclass
class Case:
    """One batch, and a function that takes its gradient.

    gradient(advantages [K, G], factor [K, G], keep [K, G]) -> [P].
    """

    gradient: Callable
    batch: dppo.Completions
    factor: torch.Tensor  # [K, G], prompt weight over denominator of the full batch

    def full(self) -> torch.Tensor:
        """The un-pruned gradient [P]."""
        return self.gradient(self.batch.advantages, self.factor, self.factor > 0)

    def of_each(self) -> torch.Tensor:
        """What each sequence adds to the full gradient, [K * G, P]: one backward pass each."""
        advantages, factor = self.batch.advantages, self.factor
        alone = torch.eye(factor.numel(), dtype=torch.bool).view(-1, *factor.shape)
        return torch.stack([self.gradient(advantages, factor * keep, keep) for keep in alone])


# ---------------------------------------------------------------------------- every outcome


def independent_outcomes(keep_prob: torch.Tensor) -> Iterator[tuple[torch.Tensor, float]]:
    """Every (keep, probability) of dppo.independent."""
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


def outcomes(
    rule: dppo.Rule, prune_rate: float, batch: dppo.Completions | sampler.Prompts
) -> Iterator[tuple[torch.Tensor, torch.Tensor, float]]:
    """Every (keep, weights, probability) of a rule on a batch. If the order is random, one is
    enumerated: a systematic draw is exact in every order."""
    prune_rate = rate_of(rule, prune_rate)
    if not rule.keep_prob:  # by rank: no chance
        yield *rule.draw(batch, prune_rate, None), 1.0
        return
    keep_prob = rule.keep_prob(batch, prune_rate)
    draws = independent_outcomes(keep_prob)
    if rule.order:
        order = rule.order(batch, dppo.generator_for(0))
        draws = systematic_outcomes(keep_prob, order)
    for keep, chance in draws:
        yield keep, dppo.ht_weights(keep, keep_prob), chance


# ---------------------------------------------------------------------------- expectations


def expected_gradient(
    case: Case, rule: str, prune_rate: float, *, each=None, mistake: str | None = None
) -> torch.Tensor:
    """The pruned gradient [P], summed over every outcome times its probability.

    `mistake` makes one of MISTAKES; `each` saves computing case.of_each() again.
    """
    each = case.of_each() if each is None else each  # [K * G, P]
    total, chances = torch.zeros_like(each[0]), 0.0
    for keep, weights, chance in outcomes(dppo.COMPLETION_RULES[rule], prune_rate, case.batch):
        factor = weights
        if mistake == "no weights":
            factor = keep.double()
        elif mistake == "kept count":  # the mean over what is kept
            factor = weights * keep.numel() / max(1, keep.sum().item())
        total += chance * (factor.flatten() @ each)
        chances += chance
    if abs(chances - 1.0) > 1e-9:
        raise ArithmeticError(f"the probabilities of {rule}'s outcomes sum to {chances}")
    return total


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
    prompt_weights=None,
    num_prompts: int = 2,
    num_tokens: float | None = None,
) -> Case:
    """Four completions of up to 5 tokens per prompt, under a table of next-token logits [V, V].

    Everything is float64. `drift` moves the old log-probs away from the policy's, so that some
    tokens are clipped; one completion is masked. `prompts` are the places that a prompt-level
    draw kept, among the first num_prompts of three; prompt_weights [len(prompts)] are theirs. dapo
    and cispo divide by `num_tokens`, by default this batch's weighted tokens.
    """
    V, G, Q = 6, 4, 3
    rows = list(prompts)
    generator = torch.Generator().manual_seed(2)
    table = torch.randn(V, V, generator=generator, dtype=torch.float64)
    lengths = torch.tensor([[5, 2, 3, 4], [1, 4, 2, 5], [1, 1, 2, 1]])
    tokens = torch.randint(V, (Q, G, 6), generator=generator)  # the first one is the prompt
    noise, ref_noise = torch.randn(2, Q, G, 5, generator=generator, dtype=torch.float64)
    rewards = torch.tensor([[1.0, 0, 0, 0], [1, 1, 0, 1], [0, 0, 0, 0]], dtype=torch.float64)
    sampled = torch.arange(5) < lengths[..., None]  # [Q, G, 5]
    owner = torch.arange(Q * G).view(Q, G, 1).expand(Q, G, 5)
    eps_low, eps_high = {"gspo": (0.05, 0.05), "cispo": (1.0, 0.2)}.get(loss, (0.2, 0.28))

    def logprobs_of(table):
        return table.log_softmax(dim=-1)[tokens[..., :-1], tokens[..., 1:]]  # [Q, G, 5]

    policy_logprobs = logprobs_of(table)

    def gradient(advantages, factor, keep):
        here = table.clone().requires_grad_()
        mask = keep[..., None] & sampled[rows]  # [K, G, 5]
        tokens_of = lambda values: values[rows][mask]  # [N]
        spread = lambda values: values[..., None].expand_as(mask)[mask]  # [N]
        logprobs, ref = tokens_of(logprobs_of(here)), tokens_of(policy_logprobs + ref_noise)  # [N]
        losses, _ = dppo.token_loss(
            logprobs,
            tokens_of(policy_logprobs + drift * noise),
            spread(advantages),
            tokens_of(owner),
            loss=loss,
            eps_low=eps_low,
            eps_high=eps_high,
            num_sequences=Q * G,
        )
        total = ((losses + beta * dppo.kl_k3(logprobs, ref)) * spread(factor)).sum()
        (gradient,) = torch.autograd.grad(total, here, allow_unused=True, materialize_grads=True)
        return gradient.flatten()

    probs = table.softmax(dim=-1)[tokens[..., :-1]]  # [Q, G, 5, V]
    onehot = torch.nn.functional.one_hot(tokens[..., 1:], V)
    energy = (onehot - probs).square().sum(dim=-1)  # [Q, G, 5]
    multiplier = torch.ones(Q, G, dtype=torch.float64)
    multiplier[0, 3] = 0.0  # masked
    multiplier, lengths = multiplier[rows], lengths[rows]
    if prompt_weights is not None:
        multiplier = multiplier * prompt_weights[:, None]
    factor = multiplier * dppo.loss_scale(
        lengths,
        loss,
        num_sequences=num_prompts * G,
        max_new_tokens=5,
        num_tokens=num_tokens or (multiplier * lengths).sum().item(),
    )
    advantages = dppo.group_advantages(rewards, dppo.LOSSES[loss].scale_rewards)[rows]
    size = dppo.contribution_size(advantages, factor, (energy * sampled).sum(dim=-1)[rows], beta)
    cost = lengths + 1
    rest = 0.3 * cost.sum().item()
    batch = dppo.Completions(advantages, rewards[rows], cost, size, rest)
    return Case(gradient, batch, factor)


def toy_prompts() -> sampler.Prompts:
    """Three prompts. Two were rolled out before, with different advantages and lengths."""
    nan = torch.nan
    return sampler.Prompts(torch.tensor([0.2, 0.0, nan]), torch.tensor([9.0, 2.0, nan]))


def both_levels(
    loss: str, prompt_rule: str, rule: str, prune_rate: float, *, beta=0.0, own_tokens=False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Expected gradients [P], pruned and full, with three prompts pruned by prompt_rule and then
    their completions by `rule`, with keep probabilities computed from the prompts that are left.

    Completion lengths differ between prompts, so the number of tokens rolled out depends on the
    draw. A loss with "batch tokens" divides by KNOWN_TOKENS, fixed before the draw, or with
    own_tokens by the tokens of each outcome, which is biased.
    """
    options = {"beta": beta, "num_prompts": 3, "num_tokens": None if own_tokens else KNOWN_TOKENS}
    total, chances = torch.zeros(36, dtype=torch.float64), 0.0
    draws = outcomes(sampler.PROMPT_RULES[prompt_rule], prune_rate, toy_prompts())
    for keep, weights, chance in draws:
        chances += chance
        if keep.any():  # else there is no gradient
            prompts = keep.nonzero().flatten().tolist()
            case = toy_case(loss, prompts=prompts, prompt_weights=weights[keep], **options)
            total += chance * expected_gradient(case, rule, prune_rate)
    if abs(chances - 1.0) > 1e-9:
        raise ArithmeticError(f"the probabilities of {prompt_rule}'s outcomes sum to {chances}")
    return total, toy_case(loss, prompts=range(3), **options).full()


# ---------------------------------------------------------------------------- the table


def import_file(file: str) -> None:
    """Import a Python file that adds rules or losses; SystemExit with a line if it cannot be."""
    tables = (dppo.COMPLETION_RULES, sampler.PROMPT_RULES, dppo.LOSSES)
    before = sum(map(len, tables))
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    if spec is None or not Path(file).is_file():
        raise SystemExit(f"error: {file} is not a Python file")
    try:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
    except SystemExit:
        guard = 'put train.cli() under if __name__ == "__main__":'
        raise SystemExit(f"error: {file} starts a run when it is imported: {guard}") from None
    if sum(map(len, tables)) == before:
        raise SystemExit(f"error: {file} adds no rule and no loss to the tables")


def completion_rule_error(rule: str, loss: str, mistake: str | None = None) -> float:
    """How far the expected gradient of a completion rule at r_o 0.5 is from the full one."""
    errors = []
    for beta in BETAS:
        case = toy_case(loss, beta=beta, prompts=range(3), num_prompts=3)
        expected = expected_gradient(case, rule, 0.5, mistake=mistake)
        errors.append(relative_error(expected, case.full()))
    return max(errors)


def try_larger_batches(name: str) -> None:
    """RuleError if a completion rule drops for sure what no weight can make up for, in batches that
    are less alike than the enumerated one: up to 1,000 tokens, rewards between 0 and 1, and None.
    """
    rule = dppo.COMPLETION_RULES[name]
    generator = torch.Generator().manual_seed(0)
    for group_size in (2, 4, 16, 32):
        shape = (16, group_size)
        lengths = torch.randint(1, 1000, shape, generator=generator).double()
        rewards = torch.randint(5, shape, generator=generator).double() / 4
        rewards[0] = 1.0  # a dead group
        rewards[1, 0] = torch.nan
        advantages = dppo.group_advantages(rewards, "group")
        size = dppo.contribution_size(advantages, 1 / lengths, energy=lengths, beta=0.0)
        prompt_tokens = 50
        cost = prompt_tokens + lengths
        batch = dppo.Completions(advantages, rewards, cost, size, rest_tokens=cost.sum().item())
        with dppo.named("completion rule", name):
            rule.keep_prob(batch, rate_of(rule, 0.5))


def prompt_rule_error(rule: str, loss: str, own_tokens: bool = False) -> float:
    """How far the expected gradient of a prompt rule, and pps after it, at rate 0.4 is from the
    full one."""
    errors = []
    for beta in BETAS:
        with dppo.named("prompt rule", rule):
            expected, full = both_levels(loss, rule, "pps", 0.4, beta=beta, own_tokens=own_tokens)
        errors.append(relative_error(expected, full))
    return max(errors)


def main(file: str | None = None) -> None:
    """Print, for every rule and loss, how far the expected gradient is from the full one.
    SystemExit if one that claims to be unbiased is not."""
    if file:
        import_file(file)
    print(
        "The expected gradient over every outcome of the draw, enumerated: its largest error, "
        "relative to the\nlargest entry of the full gradient. 8 to 12 sequences of 1 to 5 tokens, "
        "rewards of 0 and 1, float64,\nsome tokens clipped; rate 0.5, or 0.4 at both levels where "
        "prompts are pruned; the worse of beta 0 and 0.1 (KL).\n"
    )
    print(f"{'':32s}" + "".join(f" {loss:>8s}" for loss in dppo.LOSSES))

    wrong = []  # of what claims to be unbiased

    def line(name, error_with):
        errors = [(loss, error_with(loss)) for loss in dppo.LOSSES]
        cells = (f" {error:{max(8, len(loss))}.0e}" for loss, error in errors)
        print(f"  {name:30s}" + "".join(cells), flush=True)
        return [f"{name} with {loss}" for loss, error in errors if not error < LIMIT]

    print("claimed to be unbiased: rules that drop completions")
    for rule in rules(dppo.COMPLETION_RULES, biased=False):
        try_larger_batches(rule)
        wrong += line(rule, lambda loss, rule=rule: completion_rule_error(rule, loss))
    print("claimed to be unbiased: rules that drop prompts, and pps after them")
    for rule in rules(sampler.PROMPT_RULES, biased=False):
        wrong += line(rule, lambda loss, rule=rule: prompt_rule_error(rule, loss))
    print(
        "biased, or unbiased for another objective (python -m related.objectives); own tokens, "
        "kept count: the draw decides the denominator"
    )
    line("prompts, own tokens", lambda loss: prompt_rule_error("uniform", loss, own_tokens=True))
    for rule in rules(sampler.PROMPT_RULES, biased=True):
        line(f"prompts, {rule}", lambda loss, rule=rule: prompt_rule_error(rule, loss))
    for rule in rules(dppo.COMPLETION_RULES, biased=True):
        line(rule, lambda loss, rule=rule: completion_rule_error(rule, loss))
    for mistake in MISTAKES:
        name = f"dppo, {mistake}"
        line(name, lambda loss, mistake=mistake: completion_rule_error("dppo", loss, mistake))
    if wrong:
        why = "A loss that is off in every row lets a token's term depend on other sequences"
        raise SystemExit(f"NOT unbiased: {', '.join(wrong)}. {why}")
    print(f"\nEverything that claims to be unbiased is, within {LIMIT:.0e}.")


if __name__ == "__main__":
    if len(sys.argv) > 2 or "--help" in sys.argv:
        print(__doc__.strip())
        raise SystemExit(0 if "--help" in sys.argv else 2)
    torch.set_num_threads(1)  # beside other programs, more would wait for each other
    try:
        main(*sys.argv[1:])
    except dppo.RuleError as problem:
        raise SystemExit(f"error: {problem}") from None
