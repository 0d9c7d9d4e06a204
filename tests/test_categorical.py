"""Draws from categorical distributions, against one cumulative sum in float64."""

import numpy as np
import pytest
import torch

import dppo
import rollout
from engines import categorical


@pytest.mark.parametrize("vocabulary", [7, 512, 1024, 1300])
def test_a_draw_inverts_the_cumulative_sum(vocabulary):
    """Catches a block that is off by one, tokens of the last, shorter block that are never drawn,
    sums in float32, and draws that share a row but use the blocks of another row."""
    generator = torch.Generator().manual_seed(0)
    probs = torch.rand(50, vocabulary, generator=generator)
    probs *= torch.rand(50, vocabulary, generator=generator) < 0.3
    probs[:, -1] += 0.01
    row = torch.randint(50, (4000,), generator=generator)
    uniform = torch.rand(4000, 1, dtype=torch.float64, generator=generator)

    ends = probs.double().cumsum(dim=1)[row]
    exact = torch.searchsorted(ends, uniform * ends[:, -1:], right=True)

    assert (exact == vocabulary - 1).any()
    assert torch.equal(categorical.draw(probs, uniform, row), exact)
    assert torch.equal(categorical.draw(probs[row], uniform), exact)


@pytest.mark.parametrize("others", [400, 1500])
def test_unlikely_tokens_keep_their_shares(others):
    """Catches sums in float32, to which unlikely tokens add nothing, and a block whose rounding
    goes to one of its tokens.

    One token has probability 1, the others have 1e-9. The random numbers are 1e-10 apart, so each
    of the others gets 10 of them.
    """
    probs = torch.full((1, 1 + others), 1e-9)
    probs[:, 0] = 1.0
    draws = 10 * others + 1000
    uniform = 1 - (torch.arange(draws, dtype=torch.float64) + 0.5) * 1e-10
    drawn = categorical.draw(probs.expand(draws, -1), uniform[:, None])
    counts = torch.bincount(drawn.flatten(), minlength=1 + others)
    assert counts[1:].min() >= 9
    assert counts[1:].max() <= 11


@pytest.mark.parametrize(("number", "token"), [(0.0, 1), (0.49, 1), (0.5, 3), (1 - 2**-53, 3)])
def test_the_borders_of_a_token(monkeypatch, number, token):
    """Catches a border that belongs to the token before it, and the least and largest random number
    when they reach a token of probability 0."""
    probs = torch.tensor([[0.0, 0.5, 0.0, 0.5, 0.0]])
    for block in (1, 2, 3, 5, 512):
        monkeypatch.setattr(categorical, "BLOCK", block)
        drawn = categorical.draw(probs, torch.tensor([[number]], dtype=torch.float64))
        assert drawn.tolist() == [[token]], block


def test_a_token_of_probability_0_is_never_drawn(monkeypatch):
    """Catches a random number that rounding moves out of its block, onto an entry of 0. All of them
    lie where rounding decides: just below a token's border, or at the ends of the range."""
    monkeypatch.setattr(categorical, "BLOCK", 7)
    generator = torch.Generator().manual_seed(1)
    probs = torch.rand(20_000, 40, generator=generator) ** 30  # sums of these are not exact
    probs *= torch.rand(20_000, 40, generator=generator) < 0.3
    probs[:, 20] += 0.1
    border = torch.randint(40, (20_000, 1), generator=generator)
    ends = probs.double().cumsum(dim=1)
    below_border = ends.gather(1, border) / ends[:, -1:] * (1 - 2**-53)
    lowest = torch.zeros_like(below_border)
    highest = torch.full_like(below_border, categorical.BELOW_1)
    for uniform in (below_border, lowest, highest):
        drawn = categorical.draw(probs, uniform)
        assert (probs.gather(1, drawn) > 0).all()


def test_a_completions_random_numbers_can_be_drawn_alone():
    """Catches numbers of one completion that depend on the others of its group, or repeat theirs,
    and prompts that exchange theirs."""
    uniforms = rollout.random_numbers(3, ["other", "group"], 2, 8, 11)
    alone = dppo.generator_for(3, "group")
    alone.bit_generator.advance(5 * 2**64)
    assert (alone.random(11) == uniforms[1, 5].numpy()).all()
    assert len(np.unique(uniforms)) == uniforms.numel()


def test_a_row_of_nan_gives_some_token():
    """Catches an index beyond the vocabulary: it would end the run before the check for NaN, which
    names the fault, is reached."""
    for vocabulary in (7, 1300):
        drawn = categorical.draw(torch.full((1, vocabulary), torch.nan), torch.tensor([[0.5]]))
        assert drawn < vocabulary
