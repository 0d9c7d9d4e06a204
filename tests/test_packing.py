"""Packing: the plan loses nothing, and a packed model is the model."""

import random

import pytest
import torch
import torch.nn.functional as F

import packing


def random_lengths(seed):
    rng = random.Random(seed)
    return [min(40, int(rng.lognormvariate(2, 0.8)) + 1) for _ in range(rng.randint(0, 60))], rng.randint(1, 12)


@pytest.mark.parametrize("seed", range(200))
def test_plan_holds_each_sequence_once_within_capacity(seed):
    """Kills: a sequence lost at the end of the window, an over-full slot, the newest opening a slot."""
    lengths, window = random_lengths(seed)
    packs = packing.plan_packs(lengths, 32, window)
    assert sorted(index for pack in packs for index in pack) == list(range(len(lengths)))
    assert all(sum(lengths[index] for index in pack) <= 32 or len(pack) == 1 for pack in packs)
    placed = set()
    for pack in packs:
        assert pack[0] == min(set(range(len(lengths))) - placed), "the oldest opens a slot"
        placed |= set(pack)
    assert packs == packing.plan_packs(lengths, 32, window)


def test_plan_is_the_window_rule():
    """By hand. Kills: refilling only when a slot closes, the shortest or the oldest that fits for the longest."""
    assert packing.plan_packs([5, 3, 4, 2, 6], pack_tokens=10, window=3) == [[0, 2], [1, 4], [3]]
    assert packing.plan_packs([5, 1, 1, 3], pack_tokens=10, window=2) == [[0, 1, 3, 2]]
    assert packing.plan_packs([4, 4, 6], pack_tokens=10, window=1) == [[0, 1], [2]]
    assert packing.plan_packs([4, 4, 6], pack_tokens=10, window=2) == [[0, 2], [1]]
    assert packing.plan_packs([99, 1], pack_tokens=10, window=8) == [[0], [1]]
    assert packing.plan_packs([], pack_tokens=10, window=8) == []


def test_density_of_real_lengths():
    """A wide window fills slots; the share counts an over-long slot as its own length."""
    rng = random.Random(0)
    lengths = [int(10 * 10 ** rng.random()) for _ in range(2000)]
    packs = packing.plan_packs(lengths, 1024, 64)
    assert packing.pack_density(lengths, packs[:-1], 1024) > 0.97
    assert packing.pack_density([20, 5], [[0], [1]], 10) == pytest.approx(25 / 30)


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match="at least 1, got 0"):
        packing.plan_packs([1], 0, 4)
    with pytest.raises(ValueError, match="empty prompt"):
        packing.build_pack([[1], []], [[2], [3]])


def test_pack_layout_by_hand():
    """The docstring's example. Kills: predictors off by one, positions that run on, owners mixed up."""
    pack = packing.build_pack([[10, 11], [20]], [[12, 13], [21]])
    assert pack.input_ids.tolist() == [[10, 11, 12, 13, 20, 21]]
    assert pack.position_ids.tolist() == [[0, 1, 2, 3, 0, 1]]
    assert pack.bounds == (0, 4, 6)
    assert pack.predictors.tolist() == [1, 2, 4]
    assert pack.targets.tolist() == [12, 13, 21]
    assert pack.owner.tolist() == [0, 0, 1]


def plain_logprobs(model, prompt, completion, temperature):
    """The obvious twin: one sequence, transformers' own attention, no packing, the whole logits tensor."""
    model.set_attn_implementation("eager")
    logits = model(input_ids=torch.tensor([prompt + completion]), use_cache=False).logits[0] / temperature
    model.set_attn_implementation(packing.ATTENTION)
    each = torch.log_softmax(logits.float(), dim=-1)[len(prompt) - 1 : -1]
    return each.gather(1, torch.tensor(completion)[:, None]).squeeze(1)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_packed_equals_one_by_one(make_policy, temperature):
    """Log-probs and gradients to 1e-5. Kills: attention across segments, positions not restarted, no temperature,
    key and value heads in the wrong order."""
    model, _ = make_policy()
    rng = random.Random(1)
    prompts = [[rng.randrange(256) for _ in range(rng.randint(1, 9))] for _ in range(12)]
    completions = [[rng.randrange(256) for _ in range(rng.randint(1, 30))] for _ in range(12)]
    coefficients = torch.randn(12, generator=torch.Generator().manual_seed(0))

    packed, plain = {}, {}
    model.zero_grad()
    lengths = [len(p) + len(c) for p, c in zip(prompts, completions, strict=True)]
    for members in packing.plan_packs(lengths, 64, 6):
        pack = packing.build_pack([prompts[m] for m in members], [completions[m] for m in members])
        logprobs = packing.packed_logprobs(model, pack, temperature=temperature)
        (logprobs * coefficients[torch.tensor(members)[pack.owner]]).sum().backward()
        packed |= {m: logprobs[pack.owner == place].detach() for place, m in enumerate(members)}
    packed_grad = [parameter.grad.clone() for parameter in model.parameters()]

    model.zero_grad()
    for index in range(12):
        logprobs = plain_logprobs(model, prompts[index], completions[index], temperature)
        (logprobs * coefficients[index]).sum().backward()
        plain[index] = logprobs.detach()
    assert max((packed[i] - plain[i]).abs().max() for i in range(12)) < 1e-5
    for parameter, grad in zip(model.parameters(), packed_grad, strict=True):
        assert (parameter.grad - grad).abs().max() < 1e-5 * max(1.0, parameter.grad.abs().max())


def test_no_leakage_from_neighbours(make_policy):
    """Another neighbour changes nothing, exactly: log-probs of the middle segment, and no gradient to the others."""
    model, _ = make_policy()
    one = packing.build_pack([[1, 2], [3, 4], [5]], [[6, 7], [8, 9, 10], [11]])
    other = packing.build_pack([[99, 98], [3, 4], [97]], [[96, 95], [8, 9, 10], [94]])
    middle = one.owner == 1
    with torch.no_grad():
        change = packing.packed_logprobs(model, one)[middle] - packing.packed_logprobs(model, other)[middle]
    assert change.abs().max() == 0

    seen = {}
    embedding = model.get_input_embeddings()
    hook = embedding.register_forward_hook(lambda _module, _inputs, out: seen.update(out=out) or out.retain_grad())
    packing.packed_logprobs(model, one)[middle].sum().backward()
    hook.remove()
    gradient = seen["out"].grad[0].abs().sum(dim=1)  # [L]
    assert gradient[4:8].min() > 0
    assert gradient[:4].max() == 0
    assert gradient[8:].max() == 0, "nor the segment's last token, which predicts nothing"


def test_transformers_own_packing_is_silently_off(make_policy):
    """The trap this design avoids: position ids alone do not separate segments unless use_cache=False."""
    model, _ = make_policy()
    pack = packing.build_pack([[1, 2], [3]], [[6, 7], [8, 9]])
    wanted = packing.packed_logprobs(model, pack)
    model.set_attn_implementation("eager")
    inputs = {"input_ids": pack.input_ids, "position_ids": pack.position_ids}
    off = -F.cross_entropy(model(**inputs).logits[0][pack.predictors], pack.targets, reduction="none")
    on = -F.cross_entropy(model(**inputs, use_cache=False).logits[0][pack.predictors], pack.targets, reduction="none")
    assert (on - wanted).abs().max() < 1e-5
    assert (off - wanted).abs().max() > 1e-2


def test_attention_that_cannot_be_packed_is_refused(make_policy):
    """A model with a sliding window would be sampled with it and trained without."""
    model, _ = make_policy()
    model.model.layers[1].self_attn.sliding_window = 4
    with pytest.raises(NotImplementedError, match="sliding_window"):
        packing.packed_logprobs(model, packing.build_pack([[1, 2]], [[3]]))
