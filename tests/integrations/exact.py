"""Every outcome of a draw inside another library's trainer.

trl_toy.py and verl_toy.py each have a Toy around a trainer of four prompts, of G completions each,
which are the same in every step, at parameters that do not move. They also have
    make        makes a trainer of some options, or refuses them
    LOSSES      {name: options} of all losses that are exact
    PER_TOKEN   those of them that divide by the tokens of a batch
    OWN_LENGTH  those of them that are a mean over each completion's tokens
    DULL        options with which all completions of a prompt have one reward, and no other term
    STOCK       the library's trainer, and options with which a Toy equals it bit for bit
    INEXACT     [options] that are refused unless both rules are none, for the first of each
"""

import contextlib
import copy
import itertools
import math
import zlib
from unittest import mock

import torch

import dppo
import proof
from dppo_shared import sampler

G = 4
RULES = ("completion_rule", "completion_prune_rate", "prompt_rule", "prompt_prune_rate", "rest")
NONE = {"completion_rule": "none", "prompt_rule": "none"}


class Toy:
    """Toy(**options) has the options of pruning by the names in RULES, and the library's own.

    step() -> gradient [..., P] of an update; stock() -> that of the library without pruning;
    figures() -> {name: value} of the last step. `tables` has the tables of the completions;
    `scale`, what advantages are divided by; `beta`, the strength of terms that need no advantage.
    """

    scale, beta = "group", 0.0

    def gradient(self):
        """Of a step of which the trainer learns nothing."""
        known = {x: copy.deepcopy(vars(self.trainer).get(x)) for x in ("history", "mean_tokens")}
        found = self.step()
        vars(self.trainer).update(known)
        return found

    def teach(self, mean_tokens=None):
        """The history has seen different scores, by which rules draw."""
        scores = torch.tensor([0.0, 0.3, 0.5, 0.7], dtype=torch.float64)[:, None].expand(4, G)
        self.trainer.history.update(torch.arange(4), scores)
        self.trainer.mean_tokens = mean_tokens


def number(*key):
    """A large whole number, always the same for a key."""
    return zlib.crc32("".join(map(str, key)).encode())


def noise(*key):
    """A number from -1 to 1, always the same for a key."""
    return number(key) % 2001 / 1000 - 1


def completion(prompt, g, end=None):
    """(tokens, log-probs) of a prompt's g-th completion, 1 to 6 tokens from 1 to 6. All but the
    longest have an end, if there is one. The log-probs are of no policy."""
    length = 1 + number(prompt, g) % 6
    tokens = [1 + number(prompt, g, t) % 6 for t in range(length)]
    if end is not None and length < 6:
        tokens[-1] = end
    return tokens, [-1.5 + noise(prompt, g, t) for t in range(length)]


def tables(prompts, row):
    """The tables [Q, G] of rewards, all tokens, tokens with loss, and energies. row(prompt, g) is
    (reward, number of all tokens, log-probs of those with loss)."""
    rows = [row(prompt, g) for prompt in prompts for g in range(G)]
    rewards, costs, logprobs = zip(*rows, strict=True)
    energy = [dppo.energy_bound(torch.tensor(x)).sum() for x in logprobs]
    found = [torch.tensor(x) for x in (rewards, costs, list(map(len, logprobs)), energy)]
    return [x.double().view(-1, G) for x in found]


def assert_same_history(one, other):
    """Both histories know the same, and know something."""
    assert not one.past_advantage.isnan().all()
    torch.testing.assert_close(vars(one), vars(other), rtol=0, atol=0, equal_nan=True)


@contextlib.contextmanager
def calls_of(owner, name):
    """A list that gets (arguments, result) of each call of the function owner.name."""
    real, calls = getattr(owner, name), []

    def call(*args, **options):
        result = real(*args, **options)
        calls.append((args, result))
        return result

    with mock.patch.object(owner, name, call):
        yield calls


def expectation(gradient, owner, name, outcomes, part=None):
    """The mean of gradient() over the outcomes(*args) = [(keep, weights, chance)] of the part-th
    call of the function owner.name, while other calls keep everything; without a part, of every
    call."""
    cases = []  # known from the first draw on

    def term(i):
        calls = itertools.count()

        def draw(*args):
            if next(calls) != part is not None:
                ones = torch.ones_like(args[2].size)
                return ones > 0, ones
            cases[:] = cases or outcomes(*args)
            return cases[i][:2]

        with mock.patch.object(owner, name, draw):
            found = gradient()
        return cases[i][2] * found

    total = term(0)
    total += sum(term(i) for i in range(1, len(cases)))
    assert abs(sum(chance for _keep, _weights, chance in cases) - 1) < 1e-9
    return total


def over_completions(gradient, part=0):
    """The expectation over the part-th draw of completions."""

    def outcomes(rule, rate, batch, _generator):
        return proof.outcomes(dppo.COMPLETION_RULES[rule], rate, batch)

    return expectation(gradient, dppo, "prune_completions", outcomes, part)


def over_prompts(gradient):
    """The expectation over the draw of prompts, in which every update has its own candidates."""

    def outcomes(rule, rate, history, prompts, _generator, updates=1):
        entry = sampler.PROMPT_RULES[rule]
        parts = [proof.outcomes(entry, rate, history.of(x)) for x in prompts.chunk(updates)]
        for drawn in itertools.product(*parts):
            keeps, weights, chances = zip(*drawn, strict=True)
            yield torch.cat(keeps), torch.cat(weights), math.prod(chances)

    return expectation(gradient, sampler, "prune_prompts", outcomes)
