"""The plan places every sequence once, densely and nearly in order; packing changes no log-prob and
no gradient. tests/gpu has the kernels of a GPU."""

import random

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


def test_an_empty_prompt_is_refused():
    """Catches a first token that no position predicts."""
    for share in (False, True):
        with pytest.raises(ValueError, match="sequence 1 has an empty prompt"):
            packing.build_pack([[1], []], [[2], [3]], share_prompts=share)


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
    sequences. Catches attention across segments, positions that do not restart, a branch's mask
    that is off by one, and a layer's own scale that is dropped."""
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
