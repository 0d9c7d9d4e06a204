"""The plan places every sequence once, densely and nearly in order; packing changes no log-prob and
no gradient. tests/gpu has the kernels of a GPU."""

import random
from functools import partial

import pytest
import torch

import packing

# ------------------------------------------------------------------------- the plan


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("seed", range(5))
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


def test_an_empty_prompt_is_refused():
    """Catches a first token that no position predicts."""
    for share in (False, True):
        with pytest.raises(ValueError, match="sequence 1 has an empty prompt"):
            packing.build_pack([[1], []], [[2], [3]], share_prompts=share)


# ------------------------------------------------------------------------- one slot


def test_pack_layout_with_shared_prompts_by_hand():
    """Two prompts with two and three completions of 0 to 3 tokens; targets keep the caller's order.
    Catches a branch that sees another branch or the other prompt, positions that restart in a
    branch, and a first token that is not predicted by the end of its prompt."""
    prompts = [[20], [10, 11], [10, 11], [10, 11], [20]]
    completions = [[21], [12, 13, 14], [15, 16], [], [22, 23, 24]]
    pack = packing.build_pack(prompts, completions, share_prompts=True)
    assert pack.input_ids.tolist() == [[10, 11, 20, 12, 13, 15, 22, 23]]
    assert pack.position_ids.tolist() == [[0, 1, 0, 2, 3, 2, 1, 2]]
    assert pack.segments.runs == ((1, 2, 2), (1, 1, 1), (1, 2, 4), (1, 1, 3), (1, 2, 3))
    assert pack.segments.key_index.tolist() == [0, 1, 2, 0, 1, 3, 4, 0, 1, 5, 2, 6, 7]
    assert pack.segments.cu_queries.tolist() == [0, 2, 3, 5, 6, 8]
    assert pack.segments.cu_keys.tolist() == [0, 2, 3, 7, 10, 13]
    assert pack.predictors.tolist() == [2, 1, 3, 4, 1, 5, 2, 6, 7]
    assert pack.targets.tolist() == [21, 12, 13, 14, 15, 16, 22, 23, 24]
    assert pack.owner.tolist() == [0, 1, 1, 1, 2, 2, 4, 4, 4]


# ------------------------------------------------------------------------- packed against plain


def plain_logprobs(model, prompt, completion, temperature=1.0):
    """The obvious way: one sequence, transformers' own attention, the whole logits tensor."""
    model.set_attn_implementation("sdpa")  # "eager" rounds its softmax to float32
    logits = model(input_ids=torch.tensor([prompt + completion]), use_cache=False).logits[0]
    logits = logits / temperature
    model.set_attn_implementation(packing.ATTENTION)
    each = torch.log_softmax(logits, dim=-1)[len(prompt) - 1 : -1]
    logprobs = each.gather(1, torch.tensor(completion)[:, None]).squeeze(1)
    return logprobs, -(each.exp() * each).sum(dim=1)


def flat_grad(model):
    return torch.cat([(0 * p if p.grad is None else p.grad).flatten() for p in model.parameters()])


@pytest.fixture(scope="module")
def sequences():
    """30 pairs of a prompt, each used several times, and a completion of 0, 1 or more tokens."""
    rng = random.Random(1)
    prompts = [[rng.randrange(256) for _ in range(length)] for length in (1, 1, 2, 3, 5, 9)]
    lengths = [0, 1, 1, 2, 3, 3, 3, 8, 17, 30]

    def sequence():
        prompt = rng.choice(prompts)
        return prompt, [rng.randrange(256) for _ in range(rng.choice(lengths))]

    return [sequence() for _ in range(30)]


@pytest.mark.parametrize("share", [False, True])
def test_random_sets_equal_one_by_one(make_policy, sequences, share):
    """Log-probs, entropies and gradients of random sets, in float64, for slots of one to all of the
    sequences and several windows. Catches attention across segments, positions that do not restart,
    key and value heads in the wrong order, runs split in the wrong place, a branch's mask that is
    off by one, and a layer's own scale that is dropped."""
    model, _ = make_policy(dtype=torch.float64)
    model.model.layers[1].self_attn.scaling = 0.1
    plain, gradients = [], []
    for prompt, completion in sequences:
        model.zero_grad()
        logprobs, entropy = plain_logprobs(model, prompt, completion, 0.7)
        logprobs.sum().backward()
        plain.append((logprobs.detach(), entropy.detach()))
        gradients.append(flat_grad(model))
    rng = random.Random(2)
    for size in (1, 2, 5, 12, 30) * 6:
        members = rng.sample(range(30), size)
        prompts, completions = zip(*(sequences[m] for m in members), strict=True)
        coefficients = torch.randn(size, dtype=torch.float64)
        lengths = [len(p) + max(0, len(c) - 1) for p, c in zip(prompts, completions, strict=True)]
        sharing = (list(map(str, prompts)), list(map(len, prompts))) if share else ()
        model.zero_grad()
        for slot in packing.plan_packs(lengths, 40, rng.choice([1, 4, 64]), *sharing):
            some = [prompts[place] for place in slot], [completions[place] for place in slot]
            pack = packing.build_pack(*some, share_prompts=share)
            assert pack.input_ids.shape[1] <= 40 or len(slot) == 1
            logprobs, entropy = packing.packed_logprobs(model, pack, temperature=0.7)
            (logprobs * coefficients[torch.tensor(slot)[pack.owner]]).sum().backward()
            for owner, place in enumerate(slot):
                own, (wanted, wanted_entropy) = pack.owner == owner, plain[members[place]]
                assert torch.allclose(logprobs[own], wanted, atol=1e-10)
                assert torch.allclose(entropy[own], wanted_entropy, atol=1e-10)
        wanted = sum(c * gradients[m] for c, m in zip(coefficients, members, strict=True))
        assert (flat_grad(model) - wanted).abs().max() < 1e-10 * max(1.0, wanted.abs().max())


def test_attention_that_cannot_be_packed_is_refused(make_policy):
    """Catches attention with a window, a cap or sinks that is silently computed without them, and
    dropout, with which the trained policy would not be the one that sampled."""
    states = torch.zeros(1, 2, 3, 8)
    for name in ("sliding_window", "softcap", "s_aux"):
        with pytest.raises(NotImplementedError, match=name):
            packing.packed_attention(None, states, states, states, None, **{name: 4})
    pack = packing.build_pack([[1, 2]], [[3]])
    model, _ = make_policy()
    model.model.layers[1].self_attn.attention_dropout = 0.1
    packing.packed_logprobs(model.eval(), pack)
    with pytest.raises(NotImplementedError, match="no dropout"):
        packing.packed_logprobs(model.train(), pack)
