"""Draws from categorical distributions."""

import pytest
import torch

from runtime import categorical


@pytest.mark.parametrize(("number", "token"), [(0.0, 1), (0.49, 1), (0.5, 3), (1 - 2**-53, 3)])
def test_a_token_of_probability_0_is_not_drawn(monkeypatch, number, token):
    """For random numbers at the ends of their range and on a token's border, whatever the blocks.
    Fails if a border belongs to the token before it."""
    probs = torch.tensor([[0.0, 0.5, 0.0, 0.5, 0.0]])
    for block in (1, 2, 3, 5, 512):
        monkeypatch.setattr(categorical, "BLOCK", block)
        drawn = categorical.draw(probs, torch.tensor([[number]], dtype=torch.float64))
        assert drawn.tolist() == [[token]], block


@pytest.mark.parametrize("vocabulary", [7, 512, 1024, 1300])
def test_a_draw_inverts_the_cumulative_distribution(vocabulary):
    """Of random probabilities with many zeros, in blocks, against one sum over all of them.
    Catches a block that is off by one, tokens of the last, shorter block that are never drawn, and
    sums in float32."""
    generator = torch.Generator().manual_seed(0)
    probs = torch.rand(4000, vocabulary, generator=generator)
    probs *= torch.rand(4000, vocabulary, generator=generator) < 0.3
    probs[:, -1] += 0.01
    probs /= probs.sum(dim=1, keepdim=True)
    uniform = torch.rand(4000, 1, dtype=torch.float64, generator=generator)
    cumulated = probs.double().cumsum(dim=1)
    exact = torch.searchsorted(cumulated, uniform * cumulated[:, -1:], right=True)
    drawn = categorical.draw(probs, uniform)
    assert torch.equal(drawn, exact)
    assert (drawn == vocabulary - 1).any()


def test_only_entries_above_0_are_drawn(monkeypatch):
    """With random numbers on the borders of entries, where rounding decides, and at both ends.
    Catches a number that rounding moves out of its block, onto an entry of 0."""
    monkeypatch.setattr(categorical, "BLOCK", 7)
    generator = torch.Generator().manual_seed(1)
    probs = torch.rand(20_000, 40, generator=generator) ** 30  # sums of these are not exact
    probs *= torch.rand(20_000, 40, generator=generator) < 0.3
    probs[:, 20] += 0.1
    border = torch.randint(40, (20_000, 1), generator=generator)
    cumulated = probs.double().cumsum(dim=1)
    for uniform in (
        cumulated.gather(1, border) / cumulated[:, -1:] * (1 - 2**-53),
        torch.zeros(20_000, 1, dtype=torch.float64),
        torch.full((20_000, 1), 1 - 2**-53, dtype=torch.float64),
    ):
        assert (probs.gather(1, categorical.draw(probs, uniform)) > 0).all()


def test_sums_are_in_float64():
    """One entry of 1 and 1,500 of 1e-9, of which 40 are looked up. In float32 the small ones add
    nothing. Fails if blocks, or the entries of a block, are summed up in float32."""
    probs = torch.full((40, 1501), 1e-9)
    probs[:, 0] = 1.0
    expected = torch.arange(20, 1500, 37)
    cumulated = probs[0].double().cumsum(dim=0)
    uniform = (cumulated[expected] - 0.5e-9) / cumulated[-1]
    assert categorical.draw(probs, uniform[:, None]).tolist() == expected[:, None].tolist()
