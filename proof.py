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

import argparse
import importlib
import itertools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy
import torch
from numpy.random import Generator, Philox

import dppo
import sampler

importlib.import_module("related.rivals")  # adds its rules

LIMIT = 1e-9  # rounding stays far below, a bias far above
BETAS = (0.0, 0.1)  # without and with a KL term; tables show the larger error
DRAWS = 200  # of a biased rule
KNOWN_TOKENS = 30.0  # what dapo and cispo divide by where prompts are pruned: earlier batches' mean


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


class Scripted(Generator):
    """A generator whose random() returns these numbers, one a call. Permutations are always the
    same one: a systematic draw is exact in every order."""

    def __init__(self, *numbers):
        super().__init__(Philox(key=0))
        self.numbers = [*numbers]

    def random(self, size=None):
        if size is not None and isinstance(self.numbers[0], float):
            return super().random(size)  # for a rule's order; the start comes after it
        number = self.numbers.pop(0)
        assert size in (None, numpy.shape(number))
        return number

    def permutation(self, n):
        return dppo.generator_for(n).permutation(n)


def random_numbers(
    rule: dppo.Rule, prune_rate: float, batch: dppo.Completions | sampler.Prompts
) -> Iterator[tuple[float | numpy.ndarray, float]]:
    """(number, probability) of each case of what a rule's draw gets from random(): the start of a
    systematic draw, or an array for an independent one.

    Outcomes change only where a number passes an edge, which follows from the keep probabilities.
    The numbers lie close to both sides of each edge, so a draw with other edges is off.
    """
    p = rule.keep_prob(batch, prune_rate)
    if rule.order:
        laid = p.flatten()[rule.order(batch, Scripted(0.0))]
        ends = torch.where(laid >= 1, 0.0, laid).cumsum(dim=0) % 1.0
        for low, high in itertools.pairwise(sorted({0.0, *ends.tolist(), 1.0})):
            margin = 1e-6 * (high - low)
            yield low + margin, (high - low) / 2
            yield high - margin, (high - low) / 2
        return
    choices = [(True,) if x == 1 else (False,) if x == 0 else (True, False) for x in p.flatten()]
    for bits in itertools.product(*choices):
        keep = torch.tensor(bits).view(p.shape)
        below = p.nextafter(torch.zeros_like(p))  # random() < p keeps
        chance = torch.where(keep, p, 1.0 - p).prod().item()
        yield torch.where(keep, below, p).numpy(), chance


def outcomes(
    rule: dppo.Rule | dppo.BiasedRule, prune_rate: float, batch: dppo.Completions | sampler.Prompts
) -> list[tuple[torch.Tensor, torch.Tensor, float]]:
    """Every (keep, weights, probability) of a rule's own draw on a batch. Of a biased rule, which
    may draw as it likes, DRAWS draws."""
    if isinstance(rule, dppo.BiasedRule):
        sources = [(dppo.generator_for(seed), 1 / DRAWS) for seed in range(DRAWS)]
    else:
        numbers = random_numbers(rule, prune_rate, batch)
        sources = [(Scripted(number), chance) for number, chance in numbers]
    different = {}  # so that equal outcomes are one
    for generator, chance in sources:
        keep, weights = rule.draw(batch, prune_rate, generator)
        key = (*keep.flatten().tolist(), *weights.flatten().tolist())
        outcome = different.setdefault(key, [keep, weights, 0.0])
        outcome[2] += chance
    assert abs(sum(chance for *_, chance in different.values()) - 1.0) < 1e-9
    return [*different.values()]


# ---------------------------------------------------------------------------- expectations


def expected_gradient(case: Case, rule: str, prune_rate: float, *, each=None) -> torch.Tensor:
    """The pruned gradient [P], summed over every outcome times its probability.

    `each` saves computing case.of_each() again.
    """
    each = case.of_each() if each is None else each  # [K * G, P]
    drawn = outcomes(dppo.COMPLETION_RULES[rule], prune_rate, case.batch)
    return sum(chance * ((weights * keep).flatten() @ each) for keep, weights, chance in drawn)


def relative_error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """Largest difference over the largest entry."""
    return ((got - wanted).abs().max() / wanted.abs().max()).item()


# ---------------------------------------------------------------------------- a toy policy


def toy_case(
    loss: str = "grpo",
    *,
    beta: float = 0.0,
    prompts=(0, 1, 2),
    prompt_weights=None,
    num_tokens: float | None = None,
) -> Case:
    """Four completions of up to 5 tokens per prompt, under a table of next-token logits [V, V].

    Everything is float64. The old log-probs are so far from the policy's that some tokens are
    clipped; one completion is masked. `prompts` are the places that a prompt-level draw kept, among
    three; prompt_weights [len(prompts)] are theirs. dapo and cispo divide by `num_tokens`, by
    default this batch's weighted tokens.
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
    old_logprobs, ref_logprobs = policy_logprobs + 0.3 * noise, policy_logprobs + ref_noise

    def gradient(advantages, factor, keep):
        here = table.clone().requires_grad_()
        mask = keep[..., None] & sampled[rows]  # [K, G, 5]
        tokens_of = lambda values: values[rows][mask]  # [N]
        spread = lambda values: values[..., None].expand_as(mask)[mask]  # [N]
        logprobs, ref = tokens_of(logprobs_of(here)), tokens_of(ref_logprobs)  # [N]
        losses, _ = dppo.token_loss(
            logprobs, tokens_of(old_logprobs), spread(advantages), tokens_of(owner), loss=loss,
            eps_low=eps_low, eps_high=eps_high, num_sequences=Q * G,
        )  # fmt: skip
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
        lengths, loss, num_sequences=Q * G, max_new_tokens=5,
        num_tokens=num_tokens or (multiplier * lengths).sum().item(),
    )  # fmt: skip
    advantages = dppo.group_advantages(rewards, dppo.LOSSES[loss].scale_rewards)[rows]
    size = dppo.contribution_size(advantages, factor, (energy * sampled).sum(dim=-1)[rows], beta)
    cost = lengths.double() + 1  # the prompt is one token
    batch = dppo.Completions(advantages, rewards[rows], cost, size)
    return Case(gradient, batch, factor)


# ---------------------------------------------------------------------------- the table


def import_file(file: str) -> list[str]:
    """Import a Python file that adds rules or losses, as modules beside it are; returns their
    names."""
    tables = (dppo.COMPLETION_RULES, sampler.PROMPT_RULES, dppo.LOSSES)
    before = [entry for table in tables for entry in table.values()]
    path = Path(file)
    sys.path.insert(0, str(path.resolve().parent))
    importlib.import_module(path.stem)
    added = [name for table in tables for name, entry in table.items() if entry not in before]
    if not added:
        raise SystemExit(f"error: {file} adds no rule and no loss to the tables")
    return added


def of_completion_rule(rule: str, loss: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Gradients [P], expected and full, of a completion rule at r_o 0.5, for each of BETAS."""
    cases = [toy_case(loss, beta=beta) for beta in BETAS]
    return [(expected_gradient(case, rule, 0.5), case.full()) for case in cases]


def of_prompt_rule(rule: str, loss: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Gradients [P], expected and full, of a prompt rule, and of pps on the prompts that it leaves,
    at rate 0.4, for each of BETAS.

    Two of the three prompts were rolled out before, with different advantages. Lengths differ, so
    the number of tokens rolled out depends on the draw. A loss with "batch tokens" divides by
    KNOWN_TOKENS, fixed before the draw.
    """
    three = sampler.Prompts(torch.tensor([0.2, 0.0, torch.nan]))
    drawn = outcomes(sampler.PROMPT_RULES[rule], 0.4, three)
    pairs = []
    for beta in BETAS:
        options = {"beta": beta, "num_tokens": KNOWN_TOKENS}
        total = torch.zeros(36, dtype=torch.float64)
        for keep, weights, chance in drawn:
            if keep.any():  # else there is no gradient
                prompts = keep.nonzero().flatten().tolist()
                case = toy_case(loss, prompts=prompts, prompt_weights=weights[keep], **options)
                total += chance * expected_gradient(case, "pps", 0.4)
        pairs.append((total, toy_case(loss, **options).full()))
    return pairs


def largest_error(pairs) -> float:
    return max(relative_error(got, wanted) for got, wanted in pairs)


def direction(pairs) -> str:
    """The largest error that is left after the best rescaling, and the largest angle."""
    errors, angles = [], []
    for got, wanted in pairs:
        errors.append(relative_error(got * (got @ wanted) / got.square().sum(), wanted))
        cosine = got @ wanted / (got.norm() * wanted.norm())
        angles.append(cosine.clamp(-1.0, 1.0).acos().rad2deg().item())
    return f"{max(errors):.2f} {max(angles):.0f}\N{DEGREE SIGN}"


def main(file: str | None = None) -> None:
    """Print, for every rule and loss, how far the expected gradient is from the full one.
    SystemExit if one that claims to be unbiased is not."""
    yours = import_file(file) if file else []
    print(
        "The expected gradient over every outcome of the draw, enumerated, against the full one. 8 "
        "to 12 sequences\nof 1 to 5 tokens, rewards of 0 and 1, float64, some tokens clipped; rate "
        "0.5, or 0.4 at both levels where\nprompts are pruned; the worse of beta 0 and 0.1 (KL).\n",
        flush=True,
    )
    # All of it is computed before the table begins, so that an error stands alone.
    unbiased, biased = {}, {}  # name of the row -> {loss: gradients}
    for kind, table, gradients in (
        ("completions", dppo.COMPLETION_RULES, of_completion_rule),
        ("prompts", sampler.PROMPT_RULES, of_prompt_rule),
    ):
        for rule in sorted(table, key=lambda name: name not in yours):  # those of the file first
            if rule == "none":
                continue
            rows = biased if isinstance(table[rule], dppo.BiasedRule) else unbiased
            mark = " (yours)" if rule in yours else ""
            rows[f"{kind}: {rule}{mark}"] = {loss: gradients(rule, loss) for loss in dppo.LOSSES}

    def show(name, cells):
        print(f"  {name:30s}" + "".join(f" {cell:>{max(8, len(cell))}s}" for cell in cells))

    show("", dppo.LOSSES)
    print("Claimed to be unbiased: the largest error, relative to the gradient's largest entry")
    wrong = []
    for name, row in unbiased.items():
        errors = {loss: largest_error(pairs) for loss, pairs in row.items()}
        show(name, [f"{error:.0e}" for error in errors.values()])
        wrong += [f"{name} with {loss}" for loss, error in errors.items() if not error < LIMIT]
    print(
        "Biased, or unbiased for another objective (python -m related.objectives): the error that "
        "is left after the\nbest rescaling, because Adam ignores a gradient's length, and the angle"
    )
    for name, row in biased.items():
        show(name, [direction(pairs) for pairs in row.values()])

    if wrong:
        why = "A loss that is off in every row lets a token's term depend on other sequences"
        raise SystemExit(f"NOT unbiased: {', '.join(wrong)}. {why}")
    print(f"\nEverything that claims to be unbiased is, within {LIMIT:.0e}.")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Enumerate every outcome of every rule.")
    parser.add_argument("file", nargs="?", help="a Python file that adds rules or losses")
    torch.set_num_threads(1)  # beside other programs, more would wait for each other
    try:
        main(parser.parse_args().file)
    except dppo.RuleError as problem:
        raise SystemExit(f"error: {problem}") from None
