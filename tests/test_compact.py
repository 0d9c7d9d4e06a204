"""The compact engine's parts: rows of the batch, and draws from many rows."""

import pytest
import torch

from engines import compact


def test_next_rows():
    """By hand; test_rollout.py shows that rows hold their texts. Row 0 continues as the texts 0 and
    1, and text 2 of row 1 has ended: text 1 gets its row. Two completions have text 3. Catches rows
    that are copied without need."""
    continued, text_of = torch.tensor([0, 0, 1, 2]), torch.tensor([0, 1, 2, 3, 3])
    rows = compact.next_rows(continued, text_of, torch.tensor([False, False, True, False, False]))
    found = [place.tolist() for place in rows]
    assert found == [[0, 1, 3, 4], [0, 1, 3], [0, 0, 2], [1], [0], [0, 1, 2, 2]]

    # Completions that each have a row: the last one moves into the place of one that ended.
    rows = compact.next_rows(None, None, torch.tensor([False, True, False, False, True]))
    assert rows.row_of is None
    assert [place.tolist() for place in rows[:-1]] == [[0, 3, 2], [0, 3, 2], [0, 3, 2], [1], [3]]


# ------------------------------------------------------------------------- draws


@pytest.mark.parametrize("vocabulary", [7, 1024, 1300])
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
    assert torch.equal(compact.draw(probs, uniform, row), exact)
    assert torch.equal(compact.draw(probs[row], uniform), exact)


def test_a_token_of_probability_0_is_never_drawn(monkeypatch):
    """Catches a random number that rounding moves out of its block, onto an entry of 0. All of them
    lie where rounding decides: just below a token's border, or at the ends of the range."""
    monkeypatch.setattr(compact, "BLOCK", 7)
    generator = torch.Generator().manual_seed(1)
    probs = torch.rand(20_000, 40, generator=generator) ** 30  # sums of these are not exact
    probs *= torch.rand(20_000, 40, generator=generator) < 0.3
    probs[:, 20] += 0.1
    border = torch.randint(40, (20_000, 1), generator=generator)
    ends = probs.double().cumsum(dim=1)
    below_border = ends.gather(1, border) / ends[:, -1:] * (1 - 2**-53)
    lowest = torch.zeros_like(below_border)
    highest = torch.full_like(below_border, compact.BELOW_1)
    for uniform in (below_border, lowest, highest):
        drawn = compact.draw(probs, uniform)
        assert (probs.gather(1, drawn) > 0).all()


def test_a_row_of_nan_gives_some_token():
    """Catches an index beyond the vocabulary: it would end the run before the check for NaN, which
    names the fault, is reached."""
    assert compact.draw(torch.full((1, 1300), torch.nan), torch.tensor([[0.5]])) < 1300
