"""Pruning inside other trainers is exact: every outcome of a draw, through the library's own loss.

tests/trl.sh, tinker.sh and verl.sh build environments with the libraries and run these tests there.
"""

import importlib
import importlib.util
from unittest import mock

import pytest
import torch
from exact import error, over_completions, over_prompts

import dppo
import sampler
from dppo import RuleError
from related import rivals  # noqa: F401 (adds rules that are biased)

TOYS = [
    importlib.import_module(f"{name}_toy")
    for name in ("trl", "tinker", "verl")
    if name == "tinker" or importlib.util.find_spec(name)
]
PROMPTS = {"prompt_rule": "uniform", "prompt_prune_rate": 0.5}


def each(cases):
    """Parameters (library, case) for all that cases(library) lists."""
    found = [(library, case) for library in TOYS for case in cases(library)]
    names = [f"{library.__name__[:-4]}-{case}".replace(" ", "") for library, case in found]
    return pytest.mark.parametrize(("library", "case"), found, ids=names)


@each(lambda library: library.LOSSES)
def test_completions_are_exact(library, case):
    """The mean gradient over the draw of pps is that of the library without pruning, for any loss,
    with the clip, KL, corrections and masks that the library has. Lengths differ.

    Catches a denominator or an advantage that depends on the draw, a weight that misses a part of
    the loss, a token that is trimmed, and a row that is sent twice or never.
    """
    toy = library.Toy(completion_rule="pps", completion_prune_rate=0.5, **library.LOSSES[case])
    stock = toy.stock()
    assert error(over_completions(toy.gradient), stock) < 1e-12
    assert error(toy.gradient(), stock) > 0.01
    assert toy.figures()["kept_completions"] < 1


@each(lambda library: ["uniform", "dppo"])
def test_other_rules_are_exact(library, case):
    """The paper's rule, too, whose outcomes double with every completion below the mean."""
    toy = library.Toy(completion_rule=case, completion_prune_rate=0.4, **library.FEW)
    stock = toy.stock()
    assert error(over_completions(toy.gradient), stock) < 1e-12
    assert error(toy.gradient(), stock) > 0.01


@each(lambda library: [x for x in library.LOSSES if not x.startswith("dro-")])  # it has a penalty
def test_zero_is_the_librarys(library, case):
    """Catches a completion that is dropped although its term is not 0, and one that is not."""
    toy = library.Toy(completion_rule="zero", **library.LOSSES[case] | library.PLAIN)
    assert error(toy.gradient(), toy.stock()) < 1e-12
    advantages = dppo.group_advantages(toy.tables[0], "none")
    assert toy.figures()["kept_completions"] == (advantages != 0).sum() / 16 < 1


@each(lambda library: library.SCALES)
def test_scales_are_exact(library, case):
    """Both draws. Catches advantages of what was kept, or of another scale than was asked for."""
    options = PROMPTS | {"completion_rule": "pps"} | library.SCALES[case]
    toy = library.Toy(**options)
    found = over_prompts(lambda: over_completions(toy.gradient))
    assert error(found, toy.stock()) < 1e-12


@each(lambda library: [
    (loss, rule)
    for number, loss in enumerate(library.LOSSES)
    for rule in (("uniform", "dppo") if number == 0 else ("uniform",))
    if loss not in library.REFUSED
])  # fmt: skip
def test_prompts_are_exact(library, case):
    """A loss per token divides by a number known before the draw. Catches prompt weights that do
    not reach the loss, a denominator of the kept prompts, and a count that is taken from the draw.
    """
    loss, rule = case
    options = PROMPTS | {"prompt_rule": rule, "completion_rule": "none"}
    toy = library.Toy(**options, **library.LOSSES[loss])
    toy.teach(mean_tokens=64.0)
    wanted = toy.stock()
    if loss in library.PER_TOKEN:
        wanted = wanted * toy.tables[1].sum() / 64
    assert error(over_prompts(toy.gradient), wanted) < 1e-12


@each(lambda library: [*library.MISTAKES, "no weights"])
def test_mistakes_are_found(library, case):
    """Fails if the enumeration cannot tell a planted mistake, or that weights are missing."""
    no_weights = mock.patch.object(dppo, "ht_weights", lambda keep, keep_prob: keep.double())
    mistakes = library.MISTAKES | {"no weights": (no_weights, library.FEW)}
    mistake, options = mistakes[case]
    with mistake:
        toy = library.Toy(completion_rule="pps", completion_prune_rate=0.5, **options)
        found = over_completions(toy.gradient)
    stock = toy.stock()
    along = (found * stock).sum() / (found * found).sum()
    assert error(along * found, stock) > 1e-3, "whatever its length"


@each(lambda library: [library.PER_TOKEN[0]])
def test_lessons_figures_and_draws(library, case, monkeypatch):
    """Three steps. The first batch is whole, because its tokens are counted. The history learns the
    groups of the prompts that were drawn; the mean of tokens follows the weighted tokens; figures
    are of this batch. Each draw has random numbers of its own.

    Catches one seed for every draw, another table in place of the advantages, weights that are not
    the draw's, a mean of what was kept, and a figure of something else.
    """
    keys, lessons, prompts, drawn = [], [], [], []

    def spy(owner, name, see):
        real = getattr(owner, name)

        def call(*args, **options):
            found = real(*args, **options)
            see(args, found)
            return found

        monkeypatch.setattr(owner, name, call)

    toy = library.Toy(**PROMPTS, completion_prune_rate=0.5, **library.LOSSES[case])
    spy(dppo, "generator_for", lambda args, _: keys.append(args))
    spy(sampler.PromptHistory, "update", lambda args, _: lessons.append(args[1:]))
    spy(sampler.PromptHistory, "prune", lambda args, found: prompts.append((args[3], *found)))
    spy(dppo, "prune_completions", lambda args, found: drawn.append((args[2], *found)))
    for number in range(3):
        before = toy.mean_tokens
        toy.step()
        (candidates, keep, weights), (batch, kept, own) = prompts[number], drawn[number]
        rows, w = candidates[keep], weights[keep, None]
        rewards, lengths, costs = (table[rows] for table in toy.tables)
        assert len(rows) == (2 if number else 4)
        learned, advantages, tokens = lessons[number]
        assert torch.equal(learned, rows)
        wanted = dppo.group_advantages(rewards, "group")
        torch.testing.assert_close(advantages.double(), wanted, atol=1e-4, rtol=1e-3)
        assert torch.equal(tokens.long(), lengths)
        assert torch.equal(batch.cost.long(), costs)
        estimate = (w * lengths).sum().item()
        mean = before or estimate
        assert toy.mean_tokens == pytest.approx(mean + (estimate - mean) / library.MEMORY)
        total, live = w * own * kept, (w * own)[(batch.size > 0) & kept]
        wanted = {
            "kept_prompts": len(rows) / 4,
            "kept_completions": kept.sum().item() / 16,
            "kept_tokens": ((kept * costs).sum() / (w * costs).sum()).item(),
            "weight_max": total.max().item(),
            "effective_sample_size": (live.sum() ** 2 / live.square().sum()).item(),
            "reward": ((w * rewards.nanmean(dim=1, keepdim=True)).sum() / 4).item(),
        }
        found = toy.figures()
        assert len(found.keys() & wanted.keys()) >= 5
        assert {name: found[name] for name in wanted if name in found} == pytest.approx(
            {name: wanted[name] for name in wanted if name in found}
        )
    assert estimate != lengths.sum().item()
    assert len(keys) == len(set(keys)) >= 3


@each(lambda library: range(6))
def test_rules_are_checked(library, case):
    options, message = (
        ({"completion_rule": "psp"}, "unknown completion_rule 'psp'.*none, zero, uniform, dppo, p"),
        ({"completion_rule": "cppo"}, "unknown completion_rule 'cppo'.*none, zero, uniform, dppo"),
        ({"prompt_rule": "ppz"}, "unknown prompt_rule 'ppz'.*none, uniform, dppo"),
        ({"completion_prune_rate": 1.0}, "completion_prune_rate=1.0: .* below 1"),
        ({"prompt_prune_rate": -0.1}, "prompt_prune_rate=-0.1: .* from 0"),
        ({"rest": 0.0}, "rest=0.0: choose a value above 0"),
    )[case]
    with pytest.raises(RuleError, match=message):
        library.Toy(**options)
