"""The compact engine: rows that serve several completions change no sample."""

import random

import pytest
import torch
from test_rollout import assert_same_rollouts

import rollout
from engines import compact, hf, prefill

ENDS = [256, *range(0, 256, 16)]
PROMPTS = [[65, 66, 67], [68], [65, 66, 67], [71] * 5]  # of unequal lengths, and one of them twice


@pytest.fixture
def sample(make_policy, forwards):
    """sample(prompts, ...): rollouts of a float64 model, and how many rows were decoded.

    The model's predictions are sharpened, so that completions of a prompt stay equal for a while.
    The engine is compact, unless another one is given.
    """
    model, _ = make_policy(dtype=torch.float64)
    with torch.no_grad():
        model.model.norm.weight *= 2
    seen = forwards(model)

    def go(prompts, group_size=8, **changes):
        options = {"max_new_tokens": 14, "eos_ids": ENDS, "pad_id": 257, "engine": compact}
        sampling = rollout.Sampling(**options | changes)
        seen.clear()
        found = rollout.sample(model, prompts, sampling, group_size=group_size, seed=3)
        return found, sum(len(tokens) for tokens, _, _ in seen[1:])

    return go


CASES = [
    {},
    {"group_size": 1},
    {"group_size": 2, "temperature": 0.6},
    {"group_size": 5, "batch_size": 10},
    {"batch_size": 8, "temperature": 0.5, "repetition_penalty": 1.5},
    {"batch_size": 24, "top_k": 2},
    {"top_p": 0.4, "repetition_penalty": 1.2},
    {"group_size": 3, "temperature": 0.0},
    {"eos_ids": [-1], "temperature": 0.7},
]


@pytest.mark.parametrize("room", [1, 4, 64])
@pytest.mark.parametrize("options", CASES, ids=str)
def test_shared_rows_change_nothing(sample, monkeypatch, options, room):
    """Catches a row that gets the keys, mask, position or penalty of another row, a draw with
    another completion's random number, statistics of another completion's token, and a completion
    that depends on the size of its batch or goes on past its end. The reference is the plain loop,
    or hf where there is more than a temperature."""
    monkeypatch.setattr(prefill, "ROOM", room)
    found, rows = sample(PROMPTS, **options)
    simple = hf if {"top_k", "top_p", "repetition_penalty"} & set(options) else None
    wanted, _ = sample(PROMPTS, engine=simple, **options)
    close = {"rtol": 1e-5, "atol": 1e-5} if simple else {"rtol": 1e-6, "atol": 1e-8}
    assert_same_rollouts(found, wanted, **close)  # recorded in float32; hf makes logits float32
    if options.get("group_size", 8) > 2 and options.get("temperature") != 0:
        assert rows < found.lengths.sum() - found.lengths.numel()


def test_next_rows():
    """Catches a text in a row that continues another text, completions that change places, and
    rows that are copied without need. Random batches, with a list in place of keys and values."""
    rng = random.Random(0)
    for _ in range(3000):
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


def test_the_cache_grows_by_doubling():
    """Catches a cache that copies all keys and values for every new row or token, takes more rows
    than there are completions, or loses what it held. The batch gains one row at a time."""
    layer = prefill.GrowingLayer()
    states = torch.arange(6.0).view(1, 1, 3, 2)
    layer.update(states, -states)
    buffers = set()
    for count in range(2, 41):
        layer.keep(count, torch.tensor([count - 1]), torch.tensor([count - 2]), most=40)
        buffers.add(layer.buffer.data_ptr())
        assert layer.buffer.shape[1] <= 40
        assert torch.equal(layer.keys, states.expand(count, -1, -1, -1))
        assert torch.equal(layer.values, -layer.keys)
    assert len(buffers) <= 5, "4, 10, 22 and 40 rows"
    widths = set()
    for _ in range(1000):
        layer.update(*torch.zeros(2, 40, 1, 1, 2))
        widths.add(layer.buffer.shape[3])
    assert len(widths) <= 6
    assert torch.equal(layer.keys[:, :, :3], states.expand(40, -1, -1, -1))


def test_common_beginning(monkeypatch):
    """Catches a beginning that includes a prompt's last token, which predicts the first sampled
    one, and a beginning that some prompts do not have."""
    monkeypatch.setattr(prefill, "SHARED", 2)
    assert prefill.common_beginning([[1, 2, 3, 4], [1, 2, 3, 5, 6], [1, 2, 3, 4, 7]]) == [1, 2, 3]
    assert prefill.common_beginning([[1, 2, 3], [1, 2, 3, 4]]) == [1, 2]
    assert prefill.common_beginning([[1, 2, 3], [1, 9, 3]]) == [], "too short"
    assert prefill.common_beginning([[1, 2, 3]]) == [], "one prompt"


@pytest.mark.parametrize(
    ("prompts", "first"),  # and the shape of the first forward without sharing, and with it
    [
        ([[7] * 4 + [1], [7] * 4 + [2, 3, 4]], {100: (2, 7), 3: (1, 4)}),
        ([[7] * 4 + [1, 2]] * 3, {100: (3, 6), 3: (1, 5)}),
    ],
)
def test_a_shared_beginning_changes_nothing(make_policy, monkeypatch, prompts, first):
    """Catches the rest of a prompt that does not see the shared beginning, or has its positions."""
    model, _ = make_policy(dtype=torch.float64)
    shapes, forward = [], model.forward
    record = lambda ids, **inputs: shapes.append(ids.shape) or forward(ids, **inputs)
    monkeypatch.setattr(model, "forward", record)
    sampling = rollout.Sampling(8, [256], 257, engine=compact, repetition_penalty=1.3)
    found = {}
    for shared in (100, 3):
        monkeypatch.setattr(prefill, "SHARED", shared)
        shapes.clear()
        with torch.inference_mode(), prefill.decoding(model):
            logits, _, positions, *_ = prefill.prefill(model, prompts, 8)
        got = rollout.sample(model, prompts, sampling, group_size=4, seed=1)
        found[shared] = (logits, positions, got.completion_ids, got.logprobs)
        assert shapes[0] == first[shared]
    torch.testing.assert_close(found[3], found[100], rtol=1e-6, atol=1e-6)


def test_masks_suit_the_kernels(make_policy, forwards):
    """Catches a query that sees nothing, for which some kernels give NaN, and a mask that a kernel
    would convert or copy in every layer: one of another type, or whose rows do not begin at a
    multiple of 16 bytes. For prompts of one length there is no mask."""
    model, _ = make_policy(dtype=torch.bfloat16)
    model.why_not_fast = ""
    seen = forwards(model)
    sampling = rollout.Sampling(3, [-1], 257, engine=compact)
    rollout.sample(model, [[65], [66] * 4], sampling, group_size=6, seed=0)
    first, *others = (mask for _, mask, _ in seen)
    assert first.any(dim=-1).all()
    assert first[0, 0].tolist() == torch.eye(4, dtype=torch.bool).tolist()
    assert first[1, 0].tolist() == torch.ones(4, 4, dtype=torch.bool).tril().tolist()
    for width, mask in zip((5, 6), others, strict=True):
        assert mask.shape == (12, 1, 1, width)  # all texts differ
        assert mask.dtype == torch.bfloat16
        assert mask.stride(0) % 8 == 0
        assert sorted(mask.isinf().sum(dim=-1).flatten().tolist()) == [0] * 6 + [3] * 6
    seen.clear()
    rollout.sample(model, [[65], [66]], sampling, group_size=6, seed=5)
    assert [mask for _, mask, _ in seen] == [None] * 3
