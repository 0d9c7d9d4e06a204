"""The compact engine's parts: rows of the batch, and draws from many rows."""

import random

import pytest
import torch

from engines import compact


def test_next_rows():
    """Catches a text in a row that continues another text, completions that change places, and
    rows that are copied without need. Random batches, with a list in place of keys and values."""
    rng = random.Random(0)
    for _ in range(1000):
        # R rows continue as C texts; some texts have several completions; some of these end.
        R = rng.randint(1, 6)
        continued = sorted([*range(R), *rng.choices(range(R), k=rng.randint(0, 6))])
        C = len(continued)
        text_of = [*range(C), *rng.choices(range(C), k=rng.randint(0, 6))]
        rng.shuffle(text_of)
        gone = {text for text in range(C) if rng.random() < 0.4}
        ended = torch.tensor([text in gone for text in text_of])
        if ended.all():
            continue
        rows = compact.next_rows(torch.tensor(continued), torch.tensor(text_of), ended)

        kept = [text for text in range(C) if text not in gone]
        texts, going = rows.text.tolist(), rows.going.tolist()
        assert sorted(texts) == kept
        assert rows.source.tolist() == [continued[text] for text in texts]

        cache = [*range(R), *[None] * C]
        copies = [cache[source] for source in rows.copied_from.tolist()]
        for target, content in zip(rows.copied_to.tolist(), copies, strict=True):
            cache[target] = content
        assert cache[: len(texts)] == rows.source.tolist()
        in_place = {continued[text] for text in kept if continued[text] < len(kept)}
        assert len(copies) == len(kept) - len(in_place)

        assert sorted(going) == (~ended).nonzero()[:, 0].tolist()
        assert (rows.row_of is None) == (len(kept) == len(going))
        row_of = range(len(going)) if rows.row_of is None else rows.row_of.tolist()
        assert [texts[row] for row in row_of] == [text_of[number] for number in going]

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
