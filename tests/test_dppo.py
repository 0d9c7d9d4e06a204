"""The estimator: exact by enumeration through the real loss and a real model, and twins that must fail."""

import itertools
import math

import pytest
import torch

import dppo
import sampler
import train
import update

CFG = train.resolve(train.Config(pack_tokens=24, pack_window=4, device="cpu"))  # several packs of several segments
ALL = slice(None)


def gradient(model, rollouts, advantages, scale, keep, rows=ALL):
    """The gradient train.py would apply, as one vector; float64 like the model."""
    model.zero_grad()
    part = type(rollouts)(
        *[value[rows] if isinstance(value, torch.Tensor) else list(itertools.compress(value, rows)) for value in
          vars(rollouts).values()]
    ) if rows is not ALL else rollouts  # fmt: skip
    update.accumulate_gradients(model, part, advantages, scale, keep, cfg=CFG)
    update.sum_gradients(model)
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def patterns(keep_prob):
    """Every keep pattern that can happen, with its probability."""
    flat = keep_prob.flatten().tolist()
    for bits in itertools.product((True, False), repeat=len(flat)):
        probability = math.prod(p if bit else 1 - p for p, bit in zip(flat, bits, strict=True))
        if probability > 0:
            yield torch.tensor(bits).view(keep_prob.shape), probability


def scale_of(rollouts, loss, num_sequences):
    return dppo.loss_scale(rollouts.lengths, loss, num_sequences=num_sequences, max_new_tokens=6)


def relative_error(got, wanted):
    return ((got - wanted).norm() / wanted.norm()).item()


@pytest.fixture(params=["grpo", "dr_grpo"])
def loss(request):
    return request.param


@pytest.fixture
def batch(make_policy, make_rollouts):
    """Two prompts, four completions; old log-probs far enough away that some tokens are clipped."""
    model, _ = make_policy(dtype=torch.float64)
    rollouts = make_rollouts(model, 2, 4, drift=0.3)
    rewards = torch.tensor([[1.0, 0, 0, 0], [1, 1, 0, 1]], dtype=torch.float64)
    return model, rollouts, rewards


def test_unpruned_is_textbook_grpo(batch, loss):
    """The packed gradient against the obvious one: a loop over sequences with transformers' own attention, and the
    formula as TRL's documentation has it. Kills: a wrong sign, clip, length or denominator that both sides share."""
    model, rollouts, rewards = batch
    advantages = dppo.group_advantages(rewards, loss)
    packed = gradient(model, rollouts, advantages, scale_of(rollouts, loss, 8), torch.ones(2, 4, dtype=torch.bool))
    model.zero_grad()
    model.set_attn_implementation("sdpa")
    for q, g in itertools.product(range(2), range(4)):
        group, length = rewards[q], int(rollouts.lengths[q, g])
        advantage = group[g] - group.mean()
        if loss == "grpo":
            advantage = advantage / (group.std() + 1e-4)
        ids = rollouts.prompt_ids[q] + rollouts.completion_ids[q, g, :length].tolist()
        logprobs = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].log_softmax(dim=-1)
        logprobs = logprobs[torch.arange(len(ids) - 1), ids[1:]][-length:]
        ratio = (logprobs - rollouts.logprobs[q, g, :length]).exp()
        surrogate = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        (-(surrogate.mean() / 8 if loss == "grpo" else surrogate.sum() / (8 * 6))).backward()
    plain = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    assert relative_error(packed, plain) < 1e-10


def test_completion_level_is_unbiased(batch, loss):
    """Kills: weights left out, weight 1 - r, r applied above the mean, a denominator of what was kept."""
    model, rollouts, rewards = batch
    advantages = dppo.group_advantages(rewards, loss)
    scale = scale_of(rollouts, loss, 8)
    full = gradient(model, rollouts, advantages, scale, torch.ones(2, 4, dtype=torch.bool))
    keep_prob = dppo.completion_keep_prob(advantages, rewards, 0.6)
    assert (keep_prob < 1).sum() == 6, "the majority outcome of each group lies below its mean"
    expected, total = torch.zeros_like(full), 0.0
    for keep, probability in patterns(keep_prob):
        weights = dppo.ht_weights(keep, keep_prob)
        expected += probability * gradient(model, rollouts, advantages, scale * weights, keep)
        total += probability
    assert total == pytest.approx(1.0, abs=1e-12)
    assert (expected - full).abs().max() <= 1e-10 * full.abs().max()


def test_prompt_level_and_both_are_unbiased(make_policy, make_rollouts, loss):
    """Kills: prompt weights left out, the kept prompts as denominator, completion weights of the wrong prompt."""
    model, _ = make_policy(dtype=torch.float64)
    rollouts = make_rollouts(model, 3, 3, drift=0.3)
    rewards = torch.tensor([[1.0, 0, 0], [0, 1, 1], [0, 0, 1]], dtype=torch.float64)
    advantages = dppo.group_advantages(rewards, loss)
    history = sampler.PromptHistory(5)
    history.score[:4] = torch.tensor([0.1, 0.9, 0.8, 0.2])
    window = torch.tensor([0, 1, 3])
    prompt_prob = history.keep_prob(window, 0.3)
    assert prompt_prob.tolist() == [0.7, 1.0, 0.7]

    scale = scale_of(rollouts, loss, 9)
    everything = torch.ones(3, 3, dtype=torch.bool)
    full = gradient(model, rollouts, advantages, scale, everything)
    prompts_only, both = torch.zeros_like(full), torch.zeros_like(full)
    for prompt_keep, prompt_chance in patterns(prompt_prob):
        rows, weights = prompt_keep, dppo.ht_weights(prompt_keep, prompt_prob)[prompt_keep][:, None]
        kept = (advantages[rows], scale[rows])
        prompts_only += prompt_chance * gradient(
            model, rollouts, kept[0], kept[1] * weights, everything[rows], rows.tolist()
        )
        keep_prob = dppo.completion_keep_prob(kept[0], rewards[rows], 0.5)  # anew for each prompt pattern
        for keep, chance in patterns(keep_prob):
            weighted = kept[1] * weights * dppo.ht_weights(keep, keep_prob)
            both += prompt_chance * chance * gradient(model, rollouts, kept[0], weighted, keep, rows.tolist())
    assert (prompts_only - full).abs().max() <= 1e-10 * full.abs().max()
    assert (both - full).abs().max() <= 1e-10 * full.abs().max()


@pytest.mark.parametrize("twin", ["no weights", "kept count", "floor"])
def test_biased_twins_fail(batch, twin):
    """The enumeration can tell: each of these popular mistakes is off by more than 1e-3."""
    model, rollouts, rewards = batch
    advantages = dppo.group_advantages(rewards, "grpo")
    scale = scale_of(rollouts, "grpo", 8)
    everything = torch.ones(2, 4, dtype=torch.bool)
    full = gradient(model, rollouts, advantages, scale, everything)
    rate = 0.6
    keep_prob = dppo.completion_keep_prob(advantages, rewards, rate)
    expected = torch.zeros_like(full)
    if twin == "floor":  # the floor(r n) lowest of each stratum go, the first of equals; its survivors get 1 / (1 - r)
        keep, weights = everything.clone(), torch.ones(2, 4, dtype=torch.float64)
        for q in range(2):
            low = (keep_prob[q] < 1).nonzero().squeeze(1)
            weights[q, low] = 1 / (1 - rate)
            keep[q, low[: math.floor(rate * len(low))]] = False
        expected = gradient(model, rollouts, advantages, scale * weights * keep, keep)
    else:
        for keep, probability in patterns(keep_prob):
            weights = dppo.ht_weights(keep, keep_prob) if twin == "kept count" else keep.double()
            factor = 8 / keep.sum() if twin == "kept count" else 1.0
            expected += probability * gradient(model, rollouts, advantages, factor * scale * weights, keep)
    assert relative_error(expected, full) > 1e-3


@pytest.mark.parametrize("twin", ["no weights", "kept count"])
def test_biased_twins_fail_at_the_prompt_level(make_policy, make_rollouts, twin):
    """The same for whole prompts: without weights, or with weights over the prompts that were kept."""
    model, _ = make_policy(dtype=torch.float64)
    rollouts = make_rollouts(model, 3, 3, drift=0.3)
    rewards = torch.tensor([[1.0, 0, 0], [0, 1, 1], [0, 0, 1]], dtype=torch.float64)
    advantages = dppo.group_advantages(rewards, "grpo")
    scale, everything = scale_of(rollouts, "grpo", 9), torch.ones(3, 3, dtype=torch.bool)
    full = gradient(model, rollouts, advantages, scale, everything)
    keep_prob = torch.tensor([0.7, 1.0, 0.7], dtype=torch.float64)
    expected = torch.zeros_like(full)
    for keep, chance in patterns(keep_prob):
        weights = dppo.ht_weights(keep, keep_prob) * 3 / keep.sum() if twin == "kept count" else keep.double()
        kept = keep.tolist()
        expected += chance * gradient(
            model, rollouts, advantages[keep], (scale * weights[:, None])[keep], everything[keep], kept
        )
    assert relative_error(expected, full) > 1e-3


def test_draws_have_their_probabilities():
    """Within 4 standard errors, independent. Kills: probabilities that are off by 0.02, one number for all."""
    keep_prob = torch.tensor([1.0, 0.7, 0.3, 0.05], dtype=torch.float64)
    draws = 20_000
    kept = dppo.draw(keep_prob.expand(draws, 4), torch.Generator().manual_seed(0)).double()
    error = (keep_prob * (1 - keep_prob) / draws).sqrt()
    assert ((kept.mean(0) - keep_prob).abs() <= 4 * error).all()
    assert (kept[:, 0] == 1).all()
    assert torch.corrcoef(kept[:, 1:3].T)[0, 1].abs() < 0.03, "draws are independent"


def test_prune_rate_zero_is_the_identity():
    """Kills: a threshold that drops at rate 0, weights that are almost 1."""
    advantages = torch.randn(5, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    keep_prob = dppo.completion_keep_prob(advantages, advantages, 0.0)
    keep, weights = dppo.prune(keep_prob, torch.Generator().manual_seed(0))
    assert keep.all()
    assert torch.equal(weights, torch.ones(5, 7, dtype=torch.float64))


def test_advantages_by_hand():
    """Kills: the population deviation, the epsilon inside the root, dead groups with rounding noise, None as 0."""
    nan = math.nan
    rewards = torch.tensor([[1.0, 0, 0, 0], [0.1, 0.1, 0.1, 0.1], [1, nan, 0, nan], [nan] * 4], dtype=torch.float64)
    before = rewards.clone()
    got = dppo.group_advantages(rewards, "grpo")
    assert got[0].tolist() == pytest.approx([0.75 / 0.5001, -0.25 / 0.5001, -0.25 / 0.5001, -0.25 / 0.5001])
    assert got[1].tolist() == [0.0] * 4
    half = 0.5 / (math.sqrt(0.5) + 1e-4)
    assert got[2].tolist() == pytest.approx([half, 0, -half, 0])
    assert got[3].tolist() == [0.0] * 4
    assert dppo.group_advantages(rewards, "dr_grpo")[0].tolist() == [0.75, -0.25, -0.25, -0.25]
    assert dppo.dead_groups(rewards).tolist() == [False, True, False, True]
    ties = torch.full((1, 6), 0.7, dtype=torch.float64)
    assert ((ties - ties.mean()) != 0).any(), "the mean rounds, so the differences are not 0"
    assert (dppo.group_advantages(ties, "grpo") == 0).all()
    assert torch.equal(rewards.nan_to_num(9), before.nan_to_num(9)), "arguments are not written to"


def test_ties_at_the_mean_are_kept():
    """At pass rate 1/2 all |A| are equal up to rounding: nothing is below the mean. Kills: no margin."""
    rewards = torch.tensor([[1.0, 0, 1, 0, 0, 1]], dtype=torch.float64)
    advantages = dppo.group_advantages(rewards, "grpo") * (1 + 1e-15 * torch.arange(6, dtype=torch.float64))
    assert (dppo.completion_keep_prob(advantages, rewards, 0.9) == 1).all()


def test_mean_is_of_the_group_and_of_scorable_completions():
    """Kills: a batch-wide mean, unscorable completions (|A| = 0) pulling the mean down."""
    nan = math.nan
    rewards = torch.tensor([[1.0, 0, 0, nan, nan, nan], [0, 0, 0, 0, 0, 1]], dtype=torch.float64)
    keep_prob = dppo.completion_keep_prob(dppo.group_advantages(rewards, "dr_grpo"), rewards, 0.5)
    # group 0: |A| 2/3, 1/3, 1/3 and zeros; the mean of the three is 4/9, of all six 2/9, of the batch 1/4
    assert keep_prob.tolist() == [[1, 0.5, 0.5, 0.5, 0.5, 0.5], [0.5] * 5 + [1]]


def test_policy_loss_by_hand():
    """Kills: max for min, the clip on one side only, the scale inside the clip, a mean for the sum."""
    ratio = torch.tensor([1.5, 0.5, 1.5, 0.5, 1.1])
    advantages = torch.tensor([2.0, 2.0, -2.0, -2.0, 1.0])
    scale = torch.tensor([1.0, 1.0, 1.0, 1.0, 10.0])
    old = torch.full((5,), -1.0)
    loss, clipped = dppo.policy_loss(old + ratio.log(), old, advantages, scale, eps_low=0.2, eps_high=0.3)
    assert loss.item() == pytest.approx(-(2 * 1.3) - (2 * 0.5) + 2 * 1.5 + 2 * 0.8 - 11.0)
    assert clipped.item() == 2


def test_loss_scale_by_hand():
    """Kills: the denominators swapped, max_new_tokens in grpo."""
    lengths = torch.tensor([[2.0, 4.0]])
    grpo = dppo.loss_scale(lengths, "grpo", num_sequences=8, max_new_tokens=100)
    assert grpo.tolist() == [[1 / 16, 1 / 32]]
    constant = dppo.loss_scale(lengths, "dr_grpo", num_sequences=8, max_new_tokens=100)
    assert constant.tolist() == [[1 / 800, 1 / 800]]


def test_unknown_loss_is_named():
    """Kills: a misspelt loss that is silently the other one."""
    with pytest.raises(ValueError, match="unknown loss 'drgrpo': choose one of grpo, dr_grpo"):
        dppo.group_advantages(torch.zeros(1, 2), "drgrpo")
    with pytest.raises(ValueError, match="unknown loss 'drgrpo'"):
        dppo.loss_scale(torch.ones(1, 2), "drgrpo", num_sequences=2, max_new_tokens=4)


def test_effective_sample_size():
    assert dppo.effective_sample_size(torch.tensor([2.0, 2, 0, 0])) == 2
    assert dppo.effective_sample_size(torch.tensor([3.0, 1])) == pytest.approx(1.6)
