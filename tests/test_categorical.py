"""Draws from categorical distributions."""

import numpy as np
import pytest
import torch

import dppo
from engines import categorical


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


def test_unlikely_entries_keep_their_shares():
    """One entry of 1, and 1,500 of 1e-9 that each get 10 of the random numbers 1 - 1e-10,
    1 - 2e-10, ... In float32 they add nothing to a sum. Fails if a block's entries, or the blocks,
    are summed up in float32, and if what rounding adds to a block goes to one of its entries."""
    probs = torch.full((1, 1501), 1e-9)
    probs[:, 0] = 1.0
    uniform = 1 - (torch.arange(16_000, dtype=torch.float64) + 0.5) * 1e-10
    drawn = categorical.draw(probs.expand(16_000, -1), uniform[:, None])
    counts = torch.bincount(drawn.flatten(), minlength=1501)
    assert counts[1:].min() >= 9
    assert counts[1:].max() <= 11


@pytest.mark.parametrize("vocabulary", [7, 1024, 1300])
def test_draws_that_share_a_row(vocabulary):
    """Catches a draw with the blocks of another row than its entries, and work that is not that of
    a row of its own."""
    generator = torch.Generator().manual_seed(2)
    probs = torch.rand(5, vocabulary, generator=generator)
    row = torch.randint(5, (3000,), generator=generator)
    uniform = torch.rand(3000, 1, dtype=torch.float64, generator=generator)
    shared = categorical.draw(probs, uniform, row)
    assert torch.equal(shared, categorical.draw(probs[row], uniform))
    assert not torch.equal(shared, categorical.draw(probs[row.flip(0)], uniform))


def test_the_largest_share_is_inside():
    """Fails if it rounds to the total, behind which only entries of 0 follow."""
    random = torch.rand(20_000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    totals = torch.cat([random + 0.5, 2.0 ** torch.arange(-40, 4, dtype=torch.float64)])
    ends = totals[:, None] * torch.tensor([[0.5, 1.0, 1.0]], dtype=torch.float64)
    share = torch.full_like(totals[:, None], categorical.BELOW_1)
    assert (categorical._place(ends, share) == 1).all()


@pytest.mark.parametrize("size", [500, 1100])
def test_entries_of_0_are_not_drawn(size):
    """Fails if the rounding of a block's share, or the least and largest numbers, reach an entry of
    0 before or behind the others."""
    probs = torch.rand(500, size, generator=torch.Generator().manual_seed(0))
    probs[:, :40] = probs[:, size - 40 :] = 0
    for share in (0.0, 2**-53, 0.5, categorical.BELOW_1):
        token = categorical.draw(probs, torch.full((500, 1), share, dtype=torch.float64))
        assert (probs.gather(1, token) > 0).all()


def test_a_completions_random_numbers_can_be_drawn_alone():
    """Those of completion 5 of a group, from the generator's counter alone: then a rank that holds
    part of a group draws what it needs. Fails if they depend on other completions, or repeat."""
    uniforms = torch.empty(8, 11, dtype=torch.float64)
    categorical.fill(uniforms, dppo.generator_for("group"))
    alone = dppo.generator_for("group")
    alone.bit_generator.advance(5 * 2**64)
    assert (alone.random(11) == uniforms[5].numpy()).all()
    assert len(np.unique(uniforms)) == uniforms.numel()
