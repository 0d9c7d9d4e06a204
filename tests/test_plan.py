"""The plan places every sequence once, densely and nearly in order."""

import random
from functools import partial

import pytest

import packing


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_each_sequence_is_placed_once_within_capacity(seed, shared):
    """About five sequences a prompt, some over-long. Catches a sequence that is lost at the end of
    the window, an over-full slot, the newest opening a slot, and a window wider than requested."""
    rng = random.Random(seed)
    count, window = rng.randint(0, 60), rng.randint(1, 12)
    of_prompt = [rng.randint(1, 9) for _ in range(12)]
    prompts = [rng.randrange(12) for _ in range(count)]
    prompt_lengths = [of_prompt[prompt] for prompt in prompts]
    lengths = [length + min(31, int(rng.lognormvariate(2, 0.8))) for length in prompt_lengths]
    sharing = (prompts, prompt_lengths) if shared else (None, None)

    packs = packing.plan_packs(lengths, 32, window, *sharing)

    order = [index for pack in packs for index in pack]
    assert sorted(order) == list(range(count))
    for pack in packs:
        tokens = sum(lengths[index] for index in pack)
        if shared:  # a prompt counts once
            tokens -= sum(prompt_lengths[index] for index in pack)
            tokens += sum({prompts[index]: prompt_lengths[index] for index in pack}.values())
        assert tokens <= 32 or len(pack) == 1
    if window < count:
        waiting = list(range(count))
        for pack in packs:
            assert pack[0] == waiting[0], "the oldest opens a slot"
            waiting = [index for index in waiting if index not in pack]
        assert all(place > index - window for place, index in enumerate(order)), "nearly in order"


def test_plan_is_the_window_rule():
    """By hand. Fails if the window is refilled only when a slot closes, if the shortest or the
    oldest that fits is chosen, or if a wide window is not first-fit-decreasing."""
    plan = partial(packing.plan_packs, pack_tokens=10)
    assert plan([5, 3, 4, 2, 6], window=3) == [[0, 2], [1, 4], [3]]
    assert plan([5, 1, 1, 3], window=2) == [[0, 1, 3, 2]]
    assert plan([4, 4, 6], window=1) == [[0, 1], [2]]
    assert plan([4, 4, 6], window=2) == [[0, 2], [1]]
    assert plan([4, 6, 4, 6], window=4) == [[1, 0], [3, 2]]
    assert plan([99, 1, 2], window=2) == [[0], [1, 2]]
    assert plan([], window=8) == []


def test_plan_shares_prompts():
    """By hand, with prompts of 3 tokens. Another sequence of a prompt in the slot costs 3 less, and
    is placed before longer sequences of other prompts. Fails if a prompt is counted twice or never,
    if siblings are not preferred, or only those of the first prompt, and if a prompt is remembered
    beyond its slot."""
    plan = partial(packing.plan_packs, pack_tokens=10, prompt_lengths=[3] * 5)
    assert plan([5, 9, 4, 5, 5], window=3, prompts=[7, 8, 7, 7, 8]) == [[0, 3, 2], [1], [4]]
    assert plan([5, 5, 4, 4, 4], window=1, prompts=[7, 8, 7, 7, 8]) == [[0, 1], [2, 3, 4]]
    assert plan([5, 5, 4, 4, 4], window=4, prompts=[7, 8, 7, 7, 8]) == [[0, 2, 3], [1, 4]]
    # With 0 and 2, both prompts are in the slot, and siblings of both wait: 1 costs 4, 4 costs 2.
    longest_first = plan([4, 7, 9, 30, 5], pack_tokens=18, window=3, prompts=[7, 8, 8, 9, 7])
    assert longest_first == [[0, 2, 1], [3], [4]]


def test_an_empty_prompt_is_refused():
    """Catches a first token that no position predicts."""
    for share in (False, True):
        with pytest.raises(ValueError, match="sequence 1 has an empty prompt"):
            packing.build_pack([[1], []], [[2], [3]], share_prompts=share)
