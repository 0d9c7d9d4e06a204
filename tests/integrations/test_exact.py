"""What every trainer must do: exact by enumeration, the library itself if it is off, refusals.

The proof goes over every outcome of a draw, through the library's own loss. tests/trl.sh and
verl.sh build environments with the libraries and run these tests there.
"""

import importlib
import importlib.util
import types

import pytest
import torch
from exact import NONE, calls_of, over_completions, over_prompts

import dppo
import dppo_shared
from dppo import RuleError
from dppo_shared import sampler
from proof import relative_error

LIBRARIES = filter(importlib.util.find_spec, ("trl", "verl"))
TOYS = [importlib.import_module(f"{name}_toy") for name in LIBRARIES]
PROMPTS = {"prompt_rule": "uniform", "prompt_prune_rate": 0.5}


def name(value):
    return getattr(value, "__name__", None)


def each(cases):
    """Parameters (library, case) for all that cases(library) lists."""
    found = [(library, case) for library in TOYS for case in cases(library)]
    return pytest.mark.parametrize(("library", "case"), found, ids=name)


every = pytest.mark.parametrize("library", TOYS, ids=name)


# ---------------------------------------------------------------------------- completions


@each(lambda library: library.LOSSES)
def test_completions_are_exact(library, case):
    """The mean gradient over the draw of pps is that of the library without pruning. The rule sees
    sizes of the loss's scale, by the engine's log-probs, and costs of all tokens."""
    toy = library.Toy(completion_rule="pps", completion_prune_rate=0.5, **library.LOSSES[case])
    stock = toy.stock()
    assert relative_error(over_completions(toy.gradient), stock) < 1e-12
    with calls_of(dppo, "prune_completions") as calls:
        assert relative_error(toy.gradient(), stock) > 0.01
    (((_rule, _rate, batch, _generator), _drawn),) = calls

    rewards, costs, lengths, energy = toy.tables
    scale = 1 / lengths if case in library.OWN_LENGTH else torch.ones(lengths.shape)
    advantages = dppo.group_advantages(rewards, toy.scale)
    size = dppo.contribution_size(advantages, scale, energy, toy.beta).flatten().sort().values
    found = batch.size.flatten().sort().values
    torch.testing.assert_close(found / found.max(), size / size.max(), rtol=1e-3, atol=1e-6)
    assert torch.equal(batch.cost.flatten().sort().values, costs.flatten().sort().values)


@every
def test_a_batch_that_keeps_nothing(library):
    """Fails if a request or a forward is missing, for which the library waits, or moves weights."""
    toy = library.Toy(completion_rule="nonzero", **library.DULL)
    assert not toy.gradient().any()
    assert toy.figures()["kept_completions"] == 0


@every
def test_none_is_the_library(library):
    """Both rules none, two steps: gradients and the log, bit for bit. Catches a wrapper that does
    something when it is switched off."""
    kind, options = library.STOCK
    none, stock = library.Toy(**options, **NONE), library.Toy(kind, **options)
    for _step in range(2):
        assert torch.equal(none.step(), stock.step())
    assert none.log() == stock.log()


# ---------------------------------------------------------------------------- prompts


@every
def test_both_draws_are_exact(library):
    """Catches a draw of completions that forgets the weights of their prompts, a high rate that
    leaves no prompt, and a loss that waits for a count of tokens without need."""
    rules = {"prompt_rule": "uniform", "prompt_prune_rate": 0.99, "completion_rule": "pps"}
    toy = library.Toy(**rules, **library.LOSSES[library.OWN_LENGTH[0]])
    found = over_prompts(lambda: over_completions(toy.gradient))
    assert relative_error(found, toy.stock()) < 1e-12
    assert toy.figures()["kept_prompts"] == 1 / 4


@each(lambda library: library.LOSSES)
def test_prompts_are_exact(library, case):
    """A loss per token divides by a number known before the draw."""
    toy = library.Toy(**PROMPTS, completion_rule="none", **library.LOSSES[case])
    toy.teach(mean_tokens=64.0)
    wanted = toy.stock()
    if case in library.PER_TOKEN:
        wanted = wanted * toy.tables[2].sum() / 64
    assert relative_error(over_prompts(toy.gradient), wanted) < 1e-12


@every
def test_lessons_figures_and_draws(library):
    """Three steps, of which the first is whole, because its tokens are counted. Catches one seed
    for every draw, weights that are not the draw's, and a figure of something else."""
    options = PROMPTS | library.LOSSES[library.PER_TOKEN[0]]
    toy = library.Toy(completion_prune_rate=0.5, **options)
    with (
        calls_of(dppo, "generator_for") as keys,
        calls_of(sampler, "prune_prompts") as prompts,
        calls_of(dppo, "prune_completions") as drawn,
    ):
        for number in range(3):
            mean = toy.trainer.mean_tokens
            toy.step()
            (_rule, _rate, _history, candidates, *_others), (keep, weights) = prompts[number]
            _arguments, (kept, own) = drawn[number]
            rows, w = candidates[keep], weights[keep, None]
            rewards, costs, lengths, _energy = (table[rows] for table in toy.tables)
            assert len(rows) == (2 if number else 4)
            learned = toy.trainer.history.past_advantage[rows]
            scores = dppo.group_advantages(rewards, "group").abs().mean(dim=1)
            torch.testing.assert_close(learned, scores.float(), atol=1e-4, rtol=1e-3)
            estimate = (w * lengths).sum().item()
            mean = mean or estimate
            mean += (estimate - mean) / dppo_shared.MEMORY
            assert toy.trainer.mean_tokens == pytest.approx(mean)
            wanted = {
                "kept_prompts": len(rows) / 4,
                "kept_completions": kept.sum().item() / 16,
                "kept_tokens": (costs[kept].sum() / (w * costs).sum()).item(),
                "weight_max": (w * own * kept).max().item(),
                "reward": (w * rewards).sum().item() / 16,
            }
            assert {x: toy.figures()[x] for x in wanted} == pytest.approx(wanted)
    keys = [key for key, _generator in keys]
    assert len(keys) == len(set(keys)) >= 3


# ---------------------------------------------------------------------------- refusals


@every
def test_refusals(library):
    """What would not be exact is refused by the option's name; without pruning, the library's own
    options are its business."""
    for options in ({"completion_rule": "cppo"}, {"prompt_prune_rate": -0.1}, *library.INEXACT):
        option, *_others = options
        with pytest.raises(RuleError, match=option):
            library.make(**options)
        if options in library.INEXACT:
            library.make(**options | NONE)


# ---------------------------------------------------------------------------- what they share


def test_equal_and_missing_rewards():
    """Fails if the history takes the rounding error of a library's advantage for an advantage, if
    a batch without tokens leaves a mean of 0, or if a missing reward makes the mean reward NaN."""
    trainer = types.SimpleNamespace(history=sampler.PromptHistory(3), mean_tokens=None)
    rewards = torch.tensor([[0.1, 0.1, 0.1], [0.0, 1.0, 1.0]])
    advantages = torch.tensor([[1e-4, 1e-4, 1e-4], [-2.0, 1.0, 1.0]])
    prompts, weights = torch.tensor([0, 2]), torch.ones(2)
    dppo_shared.learn(trainer, prompts, weights, rewards, advantages, torch.zeros(2, 3))
    assert trainer.history.past_advantage[0] == 0
    assert trainer.mean_tokens is None
    rewards[0], rewards[1, 0] = torch.nan, torch.nan
    assert dppo_shared.mean_reward(rewards, weights, prompts_per_step=2) == 1 / 2


def test_energies():
    """Padding and a NaN of vLLM's are no surprise. What has no token with loss has no size."""
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    logprobs = torch.tensor([[-1.0, torch.nan, -9.0], [-2.0, -9.0, torch.nan]])
    bound = dppo.energy_bound(torch.tensor([-1.0, -2.0]))
    torch.testing.assert_close(dppo_shared.energy_of(logprobs, mask), bound)
    ones = torch.ones(1, 2)
    sizes = dppo_shared.size_of(ones, torch.tensor([[0, 3]]), ones, True, beta=0.1)
    assert (sizes > 0).tolist() == [[False, True]]
