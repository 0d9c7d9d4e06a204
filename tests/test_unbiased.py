"""The proof: exact by enumeration through the real loss and a real model, and twins that must fail."""

import itertools
import math
import re
from dataclasses import replace

import pytest
import torch
from test_dppo import table

import baselines
import config
import dppo
import proof
import ranks
import sampler
import update

RUN = config.Config(pack_tokens=24, pack_window=4, device="cpu", temperature=0.7)  # several packs of several segments


def make_case(make_policy, make_rollouts, rewards, loss, beta=0.0, *, masked=(), prompt_weights=None, kept=None):
    """proof.Case of a real Qwen3 in float64 through update.accumulate_gradients. Old log-probs are far enough away
    that some tokens are clipped; `masked` completions carry no loss; `kept` prompts are what a prompt draw left."""
    model, _ = make_policy(dtype=torch.float64)
    reference, _ = make_policy(seed=1, dtype=torch.float64)
    rollouts = make_rollouts(model, *rewards.shape, drift=0.3)
    cfg = config.resolve(replace(RUN, loss=loss, beta=beta, eps_low=0.05 if loss == "gspo" else None,
                                 eps_high={"gspo": 0.05, "cispo": 0.2}.get(loss)))  # fmt: skip
    start = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    Q, G = rewards.shape
    kept = list(range(Q)) if kept is None else kept
    weights = torch.ones(Q, dtype=torch.float64) if prompt_weights is None else prompt_weights
    part = type(rollouts)(
        *[value[kept] if isinstance(value, torch.Tensor) else [value[q] for q in kept] for value in
          vars(rollouts).values()]
    )  # fmt: skip

    def gradient(advantages, scale, keep, shift=0.0):
        torch.nn.utils.vector_to_parameters(start + shift, model.parameters())
        model.zero_grad()
        update.accumulate_gradients(model, part, advantages, scale, keep, cfg=cfg, reference=reference)
        ranks.sum_gradients(model)
        return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])

    counts = torch.ones(Q, G, dtype=torch.float64)
    for place in masked:
        counts[place] = 0.0
    counts = (counts * weights[:, None])[kept]
    scale = counts * dppo.loss_scale(
        part.lengths, loss, num_sequences=Q * G, max_new_tokens=6, num_tokens=(counts * part.lengths).sum().item()
    )
    advantages = dppo.group_advantages(rewards, loss)[kept]
    energy = torch.rand(Q, G, generator=torch.Generator().manual_seed(3))[kept] * part.lengths
    size = dppo.contribution_size(advantages, scale, energy, beta)
    prompt_tokens = torch.tensor([[len(ids)] for ids in part.prompt_ids])
    batch = dppo.Completions(advantages, rewards[kept], prompt_tokens + part.lengths, size)
    return proof.Case(gradient, batch, scale, part.lengths, loss)


@pytest.fixture
def make(make_policy, make_rollouts):
    """make_case with the two fixtures filled in."""
    return lambda *words, **options: make_case(make_policy, make_rollouts, *words, **options)


@pytest.mark.parametrize("beta", [0.0, 0.1])
@pytest.mark.parametrize("loss", dppo.LOSSES)
def test_unpruned_is_the_textbook_loss(make_policy, make_rollouts, make, loss, beta):
    """The packed gradient against the obvious one: a loop over sequences with transformers' own attention, and the
    formulas as the papers and TRL's documentation have them. Kills: a wrong sign, clip, ratio, length or denominator
    that both sides of the enumeration share."""
    rewards = table([[1, 0, 0, 0], [1, 1, 0, 1]])
    packed = make(rewards, loss, beta).full()
    model, _ = make_policy(dtype=torch.float64)
    reference, _ = make_policy(seed=1, dtype=torch.float64)
    rollouts = make_rollouts(model, 2, 4, drift=0.3)
    model.set_attn_implementation("sdpa")
    reference.set_attn_implementation("sdpa")
    clipped = 0
    for q, g in itertools.product(range(2), range(4)):
        group, length = rewards[q], int(rollouts.lengths[q, g])
        advantage = group[g] - group.mean()
        if loss != "dr_grpo":
            advantage = advantage / (group.std() + 1e-4)
        ids = rollouts.prompt_ids[q] + rollouts.completion_ids[q, g, :length].tolist()

        def logprobs_of(policy, ids=ids, length=length):
            logits = policy(input_ids=torch.tensor([ids]), use_cache=False).logits[0] / 0.7
            return logits.log_softmax(dim=-1)[torch.arange(len(ids) - 1), ids[1:]][-length:]

        logprobs = logprobs_of(model)
        old, ref = rollouts.logprobs[q, g, :length], logprobs_of(reference).detach()
        ratio = (logprobs - old).exp()
        if loss == "gspo":
            ratio = (logprobs - old).mean().exp().expand(length)
        low, high = {"gspo": (0.95, 1.05), "cispo": (0.0, 1.2), "dapo": (0.8, 1.28)}.get(loss, (0.8, 1.2))
        if loss == "cispo":
            token_loss = -ratio.clamp(low, high).detach() * advantage * logprobs
        else:
            token_loss = -torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)
        clipped += int(((ratio < low) | (ratio > high)).sum())
        token_loss = token_loss + beta * ((ref - logprobs).exp() - (ref - logprobs) - 1)
        if loss in ("grpo", "gspo"):
            total = token_loss.mean() / 8
        else:
            total = token_loss.sum() / (8 * 6 if loss == "dr_grpo" else int(rollouts.lengths.sum()))
        total.backward()
    plain = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    assert clipped > 2
    assert proof.relative_error(packed, plain) < 1e-10


# ---------------------------------------------------------------------------- the proof


@pytest.mark.parametrize("beta", [0.0, 0.1])
@pytest.mark.parametrize("loss", dppo.LOSSES)
def test_completion_rules_are_unbiased(make, loss, beta):
    """Every outcome of every unbiased rule, with a dead group and a masked completion. First by real backwards: the
    packed gradient is linear in the weights. Kills: a size of 0 where the KL of a dead group or a reward matters, a
    strata order that loses somebody, points that miss an interval, weights that are not one over the probability."""
    case = make(table([[1, 0, 0], [0, 0, 0], [1, 1, 0.5]])[:, :3], loss, beta, masked=[(0, 2)])
    each = case.of_each()
    assert (case.batch.size.flatten() == 0).tolist() == [
        (beta == 0 and q == 1) or (q, g) == (0, 2) for q, g in itertools.product(range(3), range(3))
    ], "exactly what contributes nothing has size 0"
    generator = torch.Generator().manual_seed(5)
    for _ in range(3):
        weights = torch.rand(3, 3, generator=generator, dtype=torch.float64) * 3
        keep = torch.rand(3, 3, generator=generator) < 0.6
        real = case.gradient(case.batch.advantages, case.scale * weights, keep)
        assert proof.relative_error(real, (weights * keep).flatten() @ each) < 1e-10
    full = case.full()
    for rule in proof.UNBIASED:
        assert proof.relative_error(proof.expected_gradient(case, rule, 0.6, each=each), full) <= 1e-10, rule


@pytest.mark.parametrize("prompt_rule", ["uniform", "dppo", "pps"])
@pytest.mark.parametrize("rule", ["none", "dppo", "pps"])
@pytest.mark.parametrize("loss", ["grpo", "gspo"])
def test_prompt_level_and_both_are_unbiased(make, loss, rule, prompt_rule):
    """Completion probabilities anew for each prompt pattern, with the real prompt draw's weights (what train.py makes
    of them: test_rules.py). Kills: prompt weights that are not one over the probability, a size of 0 by weighting."""
    rewards, beta = table([[1, 0, 0], [0, 1, 1], [1, 1, 0]]), 0.1
    history, window = sampler.PromptHistory(torch.tensor([3, 9, 9]), ["a"] * 3, 3), torch.arange(3)
    ones, sizes = torch.ones(3, dtype=torch.float64), torch.tensor([[0.2, 0.2, 0.2], [3.0, -3, 3], [2, -2, 2]])
    for _visit in range(20):
        history.update(1, window, ones, rewards, sizes, torch.tensor([1.0, 60, 60], dtype=torch.float64), ones)
    keep_prob = history.keep_prob(prompt_rule, 0.4, window, 2)
    patterns = {}
    for number in range(300):  # the real draw, for its patterns and weights
        keep, weights = history.prune(prompt_rule, 0.4, window, torch.Generator().manual_seed(number), 2)
        patterns[tuple(keep.tolist())] = weights
    if prompt_rule == "dppo":
        chances = [
            math.prod(p if k else 1 - p for k, p in zip(keep, keep_prob.tolist(), strict=True)) for keep in patterns
        ]
    else:  # two of three: the one that is missing tells the pattern
        chances = [sum((1 - p) for k, p in zip(keep, keep_prob.tolist(), strict=True) if not k) for keep in patterns]
        assert all(sum(keep) == 2 for keep in patterns)
    assert sum(chances) == pytest.approx(1.0)
    full = make(rewards, loss, beta).full()
    total = torch.zeros_like(full)
    for chance, (keep, weights) in zip(chances, patterns.items(), strict=True):
        case = make(rewards, loss, beta, prompt_weights=weights, kept=[q for q in range(3) if keep[q]])
        total += chance * proof.expected_gradient(case, rule, 0.5)
    assert proof.relative_error(total, full) <= 1e-10
    if prompt_rule == "pps":
        assert keep_prob.max() > 1.05 * keep_prob.min()


def test_fixed_size_draw_over_two_minibatches(make):
    """Two updates, each a mini-batch of two prompts, one of each kept: the second one's gradient is the full one's mean
    over all outcomes, at the parameters the first one led to. One fixed-size draw over all four is not: it tells the
    second update what moved the first. Kills: the draw of each mini-batch its own given up."""
    rewards = table([[1, 0, 0], [0, 1, 1], [1, 1, 0], [0, 0, 1]])
    cases = [make(rewards, "grpo", 0.0, kept=rows) for rows in ([0, 1], [2, 3])]

    def second(patterns):
        """Expected second gradients, pruned and full, over patterns of the four prompts, all equally likely."""
        pruned, full = 0.0, 0.0
        for keep in patterns:
            weights = torch.tensor(keep, dtype=torch.float64)[:, None].expand(4, 3) * 2
            each = cases[0].of_each()
            there = cases[1].of_each(-0.5 * (weights[:2].flatten() @ each))
            pruned = pruned + weights[2:].flatten() @ there / len(patterns)
            full = full + there.sum(dim=0) / len(patterns)
        return proof.relative_error(pruned, full)

    history, window = sampler.PromptHistory(torch.ones(4, dtype=torch.int64), ["a"] * 4, 4), torch.arange(4)
    drawn = {
        parts: {
            tuple(history.prune("pps", 0.5, window, torch.Generator().manual_seed(n), 1, parts)[0].tolist())
            for n in range(300)
        }
        for parts in (1, 2)
    }
    assert len(drawn[2]) == 4
    assert len(drawn[1]) == 6
    assert second(sorted(drawn[2])) <= 1e-10
    assert second(sorted(drawn[1])) > 1e-3


@pytest.mark.parametrize("rule", ["dppo", "pps"])
def test_second_update_has_a_draw_of_its_own(make, rule):
    """Two optimizer steps on one batch, every outcome of the first times every outcome of the second; the first one's
    mask again must fail. Kills: one draw for all epochs."""
    case = make(table([[1, 0, 0, 0]]), "grpo", 0.1)
    pruned, full = proof.second_step(case, rule, 0.6, lr=0.3, fresh=True)
    assert proof.relative_error(pruned, full) <= 1e-10
    pruned, full = proof.second_step(case, rule, 0.6, lr=0.3, fresh=False)
    assert proof.relative_error(pruned, full) > 1e-3


@pytest.mark.parametrize("beta", [0.0, 0.1])
@pytest.mark.parametrize("twin", [*proof.TWINS, *baselines.BIASED])
def test_biased_twins_fail(make, twin, beta):
    """The enumeration can tell: each of these popular mistakes, and each rival, is off by more than 1e-3."""
    case = make(table([[1, 0, 0, 0], [1, 1, 0, 1]]), "grpo", beta)
    rule, mistake = (twin, None) if twin in baselines.BIASED else ("dppo", twin)
    assert proof.relative_error(proof.expected_gradient(case, rule, 0.6, twin=mistake), case.full()) > 1e-3


@pytest.mark.parametrize("twin", ["no weights", "kept count"])
def test_biased_twins_fail_at_the_prompt_level(make, twin):
    """The same for whole prompts: without weights, or with weights over the prompts that were kept."""
    rewards, total = table([[1, 0, 0], [0, 1, 1]]), 0.0
    full = make(rewards, "grpo").full()
    for kept in ([0, 1], [0], [1]):
        weight = 1.0 if twin == "no weights" else 2.0 * 2 / len(kept)
        case = make(rewards, "grpo", prompt_weights=torch.full((2,), weight, dtype=torch.float64), kept=kept)
        total = total + 0.25 * case.full()
    assert proof.relative_error(total, full) > 1e-3


def test_the_printed_table(capsys):
    """What `python dppo.py` prints holds what its headings say. Kills: a table that is not computed."""
    proof.main()
    sections = re.split(r"\n(?=unbiased|prompts pruned|biased)", capsys.readouterr().out)[1:]
    numbers = [[float(word) for word in re.findall(r"\de[+-]\d\d", section)] for section in sections]
    assert [len(section) for section in numbers] == [
        5 * (len(proof.UNBIASED) + 1),
        15,
        5 * (len(baselines.BIASED) + len(proof.TWINS) + 1),
    ]
    assert max(numbers[0]) < 1e-10
    exact = [number for place, number in enumerate(numbers[1]) if place % 5 not in (2, 4)]
    assert max(exact) < 1e-10
    assert min(number for place, number in enumerate(numbers[1]) if place % 5 in (2, 4)) > 1e-3, "dapo and cispo"
    assert min(numbers[2]) > 1e-3
