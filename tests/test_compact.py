"""Rows of a batch that serve several completions: nothing changes but the number of rows."""

import itertools
import random

import pytest
import torch

import packing
import rollout
from engines import compact
from engines.fast_decoder import Decoder

ENDS = [256, *range(0, 256, 16)]
PROMPTS = [[65, 66, 67], [68], [65, 66, 67], [71] * 5]  # ragged, and one of them twice


@pytest.fixture
def sample(make_policy, forwards, monkeypatch):
    """Rollouts of a float64 model, and the rows of each token that the loop forwards. The model is
    sure enough of its tokens for completions to part at very different times."""
    model, _ = make_policy(dtype=torch.float64)
    with torch.no_grad():
        model.model.norm.weight *= 2
    seen = forwards(model)

    def go(prompts, shared=True, group_size=8, **changes):
        monkeypatch.setitem(rollout.CHECK_EVERY, "cpu", 1 if shared else 2)
        options = {"max_new_tokens": 14, "eos_ids": ENDS, "pad_id": 257} | changes
        sampling = rollout.Sampling(**options)
        seen.clear()
        found = rollout.sample(model, prompts, sampling, group_size=group_size, seed=3)
        return found, [len(tokens) for tokens, _, _ in seen[1:]]

    go.model = model
    return go


def texts_of(found, step):
    """The distinct texts, (prompt's number, ids), of the completions that go on after a token."""
    K, G, T = found.completion_ids.shape
    return {
        (k, *found.completion_ids[k, g, : step + 1].tolist())
        for k, g in itertools.product(range(K), range(G))
        if found.lengths[k, g] - 1 + int(found.truncated[k, g]) > step and step + 1 < T
    }


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


@pytest.mark.parametrize("room", [1, 64])
@pytest.mark.parametrize("options", CASES, ids=str)
def test_shared_rows_change_nothing(sample, monkeypatch, options, room):
    """Against a loop in which each completion has a row of its own. Catches a completion that
    stands on another's row, a row that takes the keys, mask, position or penalty of another, a draw
    with another completion's random number, and statistics of a sibling's token."""
    monkeypatch.setattr(compact, "ROOM", room)
    found, rows = sample(PROMPTS, **options)
    wanted, own = sample(PROMPTS, shared=False, **options)
    inside = torch.arange(14) < wanted.lengths[..., None]
    assert torch.equal(found.lengths, wanted.lengths)
    assert torch.equal(found.truncated, wanted.truncated)
    assert torch.equal(found.completion_ids[inside], wanted.completion_ids[inside])
    for name in ("logprobs", "entropy", "energy"):  # recorded in float32
        one, other = getattr(found, name), getattr(wanted, name)
        assert torch.allclose(one, other, rtol=1e-6, atol=1e-12), name
    assert sum(rows) < sum(own) or options.get("group_size") == 1 or "temperature" in options


def test_a_row_for_each_text(sample):
    """Rows of every forward, next to the distinct texts of completions that go on; some texts part
    after others have ended. Catches equal texts in two rows, rows of texts that have ended, and
    rows that are shared by different prompts' completions."""
    found, rows = sample(PROMPTS[:1] + PROMPTS[3:], group_size=32, temperature=0.7)
    texts = [texts_of(found, step) for step in range(14)]
    assert rows == [len(some) for some in texts if some]
    late = [
        step
        for step in range(1, 13)
        if len({text[:-1] for text in texts[step]}) < len(texts[step])
        and (found.lengths < step).any()
    ]
    assert late, "a row splits after others have ended"
    assert max(rows) > rows[0], "and the batch grows"


@pytest.mark.parametrize(("sharpness", "rows"), [(100.0, 2), (1e-4, 16)])
def test_extremes(sample, monkeypatch, sharpness, rows):
    """A model that is sure of each token never splits a row. Where all tokens are equally likely,
    all completions part at the first, and from then on no texts are compared. Catches a row a
    completion, and work that goes on where nothing is shared."""
    with torch.no_grad():
        sample.model.model.norm.weight *= sharpness
    compared, unique = [], torch.unique
    monkeypatch.setattr(torch, "unique", lambda *a, **b: compared.append(1) or unique(*a, **b))
    _, forwarded = sample([[65, 66], [67]], eos_ids=[-1])
    assert forwarded == [rows] * 13
    assert len(compared) == (14 if rows == 2 else 2), "or at the first draw and its split"
    compared.clear()
    sample([[65, 66], [67]], group_size=1, eos_ids=[-1])
    assert not compared, "or never, if there are no siblings"


def test_keys_and_values_are_those_of_the_texts(sample, monkeypatch):
    """Of every row, after every token. Catches a new row that is copied from the wrong one, and
    one whose older columns are not copied."""
    cached, decode = [None], Decoder.__call__

    def spy(decoder, token, positions, step, cache, bias=None):
        logits = decode(decoder, token, positions, step, cache, bias)
        cached.append([(layer.keys.clone(), layer.values.clone()) for layer in cache.layers])
        return logits

    monkeypatch.setattr(Decoder, "__call__", spy)
    prompts = [[65, 66, 67], [68, 69, 70]]
    found, _ = sample(prompts, temperature=0.7)
    sample.model.set_attn_implementation("sdpa")
    for step, layers in enumerate(cached[1:]):
        texts = sorted(texts_of(found, step))
        ids = torch.tensor([[*prompts[k], *text] for k, *text in texts])
        with torch.no_grad():
            fresh = sample.model(ids, use_cache=True).past_key_values.layers
        for (keys, values), layer in zip(layers, fresh, strict=True):
            for own, expected in ((keys, layer.keys), (values, layer.values)):
                gaps = (own[:, None] - expected).abs().amax(dim=(2, 3, 4))  # [rows, texts]
                assert gaps.argmin(dim=1).sort().values.tolist() == [*range(len(texts))]
                assert gaps.amin(dim=1).max() < 1e-12
    sample.model.set_attn_implementation(packing.ATTENTION)


def test_next_rows():
    """3,000 random batches, on a list in place of keys and values. Catches a text in a row that
    continues another, completions that change places, and rows that are copied without need."""
    rng = random.Random(0)
    for _ in range(3000):
        R = rng.randint(1, 6)
        parent = sorted([*range(R), *rng.choices(range(R), k=rng.randint(0, 6))])
        text = [*range(len(parent)), *rng.choices(range(len(parent)), k=rng.randint(0, 6))]
        rng.shuffle(text)
        gone = {number for number in range(len(parent)) if rng.random() < 0.4}
        ended = torch.tensor([number in gone for number in text])
        if ended.all():
            continue
        *places, row = compact.next_rows(torch.tensor(parent), torch.tensor(text), ended)
        going, texts, sources, gaps, movers = (place.tolist() for place in places)
        kept = [number for number in range(len(parent)) if number not in gone]
        assert sorted(texts) == kept
        assert sources == [parent[number] for number in texts]
        batch = [*range(R), *[None] * len(parent)]
        for gap, old in zip(gaps, [batch[mover] for mover in movers], strict=True):
            batch[gap] = old
        assert batch[: len(texts)] == sources
        in_place = {parent[number] for number in kept if parent[number] < len(kept)}
        assert len(gaps) == len(kept) - len(in_place)
        row = [*range(len(going))] if row is None else row.tolist()
        assert (row == sorted(set(row))) == (len(kept) == len(going))
        assert sorted(going) == (~ended).nonzero()[:, 0].tolist()
        assert [texts[place] for place in row] == [text[number] for number in going]


def test_completions_in_rows_of_their_own():
    """Catches rows that move although one that ended is last, or that need the texts."""
    *places, row = compact.next_rows(None, None, torch.tensor([False, True, False, False, True]))
    assert row is None
    assert [place.tolist() for place in places] == [[0, 3, 2], [0, 3, 2], [0, 3, 2], [1], [3]]


def test_buffers_grow_by_doubling():
    """A batch that gains one row at a time. Catches a copy of all keys and values for every row,
    more rows than completions, and rows whose content is lost as the buffers grow."""
    layer = compact.GrowingLayer()
    states = torch.arange(6.0).view(1, 1, 3, 2)
    layer.update(states, -states)
    moved = set()
    for count in range(2, 41):
        layer.keep(count, torch.tensor([count - 1]), torch.tensor([count - 2]), most=40)
        moved.add(layer.buffer.data_ptr())
        assert layer.buffer.shape[1] <= 40
        assert torch.equal(layer.keys, states.expand(count, -1, -1, -1))
        assert torch.equal(layer.values, -layer.keys)
    assert len(moved) <= 5, "4, 10, 22 and 40 rows"


def test_common_beginning(monkeypatch):
    """Fails if the last token of a prompt is counted, which predicts the first sampled one, if
    short beginnings or single prompts are read apart, or if prompts differ in it."""
    monkeypatch.setattr(compact, "SHARED", 2)
    assert compact.common_beginning([[1, 2, 3, 4], [1, 2, 3, 5, 6], [1, 2, 3, 4, 7]]) == [1, 2, 3]
    assert compact.common_beginning([[1, 2, 3], [1, 2, 3, 4]]) == [1, 2]
    assert compact.common_beginning([[1, 2, 3], [1, 2, 3]]) == [1, 2]
    assert compact.common_beginning([[1, 2, 3], [1, 9, 3]]) == []
    assert compact.common_beginning([[1, 2, 3]]) == []
    assert compact.common_beginning([[1], [1, 2]]) == []


@pytest.mark.parametrize(
    ("prompts", "first"),  # and the shapes of the first forward without sharing, and with it
    [
        ([[7] * 4 + [1], [7] * 4 + [2, 3, 4]], {100: (2, 7), 3: (1, 4)}),
        ([[7] * 4 + [1, 2]] * 3, {100: (3, 6), 3: (1, 5)}),
    ],
)
def test_a_shared_beginning_is_read_once(make_policy, monkeypatch, prompts, first):
    """Ragged prompts, and equal ones: the same logits, positions and completions as without
    sharing. Fails if the rest of a prompt does not see the beginning, or has its positions."""
    model, _ = make_policy(dtype=torch.float64)
    shapes, forward = [], model.forward
    record = lambda ids, **inputs: shapes.append(ids.shape) or forward(ids, **inputs)
    monkeypatch.setattr(model, "forward", record)
    sampling = rollout.Sampling(8, [256], 257, repetition_penalty=1.3)
    found = {}
    for shared in (100, 3):
        monkeypatch.setattr(compact, "SHARED", shared)
        shapes.clear()
        with torch.inference_mode(), compact.plain_generation(model):
            logits, _, positions, *_ = compact.prefill(model, prompts, 8)
        got = rollout.sample(model, prompts, sampling, group_size=4, seed=1)
        found[shared] = (logits, positions, got.completion_ids, got.logprobs)
        assert shapes[0] == first[shared]
    torch.testing.assert_close(found[3], found[100], rtol=1e-6, atol=1e-6)
