"""The estimator: exact by enumeration through the real loss and a real model, and twins that must fail."""

import itertools
import math
import re
from dataclasses import replace

import pytest
import torch

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


def table(rows):
    return torch.tensor(rows, dtype=torch.float64)


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


# ---------------------------------------------------------------------------- probabilities and draws


def random_instance(generator, n=40):
    """Sizes over four orders of magnitude, some of them 0, costs, and a budget."""
    size = torch.rand(n, generator=generator, dtype=torch.float64).mul(8).sub(6).exp()
    size[torch.rand(n, generator=generator) < 0.1] = 0.0
    cost = torch.randint(5, 60, (n,), generator=generator).double()
    share = 0.02 + 0.96 * torch.rand((), generator=generator).item()
    return size, cost, share * cost[size > 0].sum().item()


def variance(keep_prob, size):
    there = size > 0
    return ((1 / keep_prob[there] - 1) * size[there].square()).sum().item()


def at_cost(keep_prob, cost, live, budget):
    """The same probabilities scaled, and capped at 1, until they cost `budget`."""
    low, high = 1e-12, 1e12
    for _ in range(100):
        middle = math.sqrt(low * high)
        if (keep_prob * middle).clamp(max=1)[live] @ cost[live] < budget:
            low = middle
        else:
            high = middle
    return (keep_prob * low).clamp(max=1)


def test_water_filling_is_optimal():
    """KKT conditions and cost on 1,000 random instances, and no other rule of that cost has less variance. Kills: one
    round of saturation, a / c for a / sqrt(c), a budget of what is not live."""
    generator = torch.Generator().manual_seed(0)
    saturated = compared = 0
    for _ in range(1000):
        size, cost, budget = random_instance(generator)
        live, p = size > 0, dppo.pps_keep_prob(size, cost, budget)
        assert (p[~live] == 0).all()
        assert ((p[live] > 0) & (p[live] <= 1)).all()
        assert (p * cost).sum().item() == pytest.approx(budget, rel=1e-12)
        price = (size / p).square()[live] / cost[live]  # what one more token would save
        inner = p[live] < 1
        saturated += int((~inner).sum())
        level = price[inner].mean()
        assert ((price[inner] - level).abs() / level).max() < 1e-9
        assert (price[~inner] >= level * (1 - 1e-9)).all()
        best = variance(p, size)
        rivals = [
            torch.ones_like(size),
            p * (1 + 0.2 * torch.rand(size.shape, generator=generator, dtype=torch.float64)),
            size / size[live].mean(),
            torch.where(size >= size[live].mean(), 1.0, 0.1).double(),
        ]
        for rival in rivals:
            q = at_cost(rival, cost, live, budget)
            compared += (q[live] @ cost[live]).item() == pytest.approx(budget, rel=1e-6)
            assert best <= variance(q, size) * (1 + 1e-6)
    assert saturated > 1000, "the instances saturate"
    assert compared > 3900, "nearly every rival reaches the cost"


def test_water_filling_with_room_for_all():
    """Kills: a probability above 1, a division by zero where everything is kept or nothing counts."""
    size, cost = table([3.0, 0.0, 1e-12]), table([4.0, 5.0, 6.0])
    assert dppo.pps_keep_prob(size, cost, 10.0).tolist() == [1, 0, 1]
    assert dppo.pps_keep_prob(torch.zeros(3), cost, 0.0).tolist() == [0, 0, 0]


def test_systematic_draw():
    """Inclusion within 4 standard errors, size constant where the sum is an integer, exact by enumeration. Kills: an
    order applied twice or not undone, a sure one lost by rounding, points that miss the first interval."""
    generator = torch.Generator().manual_seed(1)
    p = torch.rand(2, 10, generator=generator, dtype=torch.float64)
    p[0, 3], p[1, 4], p[1, 5] = 1.0, 0.0, 1.0
    p[0, 0] = 0.0
    p[0, 0] = 1 - p.sum() % 1
    size = round(p.sum().item())
    assert p.sum().item() == pytest.approx(size, abs=1e-12)
    order = torch.randperm(20, generator=generator)
    starts = torch.rand(20_000, generator=generator, dtype=torch.float64).tolist()
    kept = torch.stack([dppo.systematic(p, order, start) for start in starts]).double()
    assert ((kept.mean(0) - p).abs() <= 4 * (p * (1 - p) / len(starts)).sqrt()).all()
    assert (kept.sum(dim=(1, 2)) == size).all()
    exact = sum(chance * keep.double() for keep, chance in proof.systematic_outcomes(p, order))
    assert (exact - p).abs().max() < 1e-12
    stretch = kept.flatten(1)[:, order[5:12]].sum(dim=1)
    share = p.flatten()[order[5:12]].sum()
    assert ((stretch - share).abs() < 1).all(), "each stretch of the order gets its share, to within one"
    half = dppo.systematic(table([0.5, 0.5, 0.25, 0.5]), torch.arange(4), 0.0)
    assert half.tolist() == [True, False, True, False], "[0, 0.5) holds 0 and [1, 1.25) holds 1"


def test_pps_draws_are_fresh_and_ordered():
    """pps is the systematic draw with this generator's number, by prompt and size. Kills: one number every time, an
    order that mixes prompts."""
    batch = dppo.Completions(
        advantages=table([[-1, 1, -1], [1, -1, -1]]), rewards=table([[0, 1, 0], [1, 0, 0]]),
        cost=torch.full((2, 3), 4), size=table([[3, 2, 0], [4, 6, 5]]),
    )  # fmt: skip
    assert dppo.strata_order(batch.size).tolist() == [2, 1, 0, 3, 5, 4]
    generator = torch.Generator().manual_seed(0)
    drawn = {tuple(dppo.prune_completions("pps", 0.5, batch, generator)[0].flatten().tolist()) for _ in range(50)}
    expected = {tuple(keep.flatten().tolist()) for keep, _, p in proof.outcomes("pps", 0.5, batch) if p > 1e-9}
    assert drawn == expected
    assert len(drawn) > 3
    keep, weights = dppo.prune_completions("pps", 0.5, batch, generator)
    keep_prob = dppo.completion_keep_prob("pps", 0.5, batch)
    assert torch.equal(weights, torch.where(keep, 1 / keep_prob, 0.0))
    assert (keep_prob * batch.cost).sum().item() == pytest.approx(12.0), "1 - r_o of all tokens, the dead one's too"


def test_pps_drops_what_is_zero_first():
    """A budget of 30 % of the tokens, of which 25 % are live: these are all kept, at weight 1. Kills: a share of the
    live tokens."""
    size = torch.zeros(4, 4, dtype=torch.float64)
    size[1] = table([1, 2, 3, 40])
    batch = dppo.Completions(size, size, torch.full((4, 4), 7), size)
    keep, weights = dppo.prune_completions("pps", 0.7, batch, torch.Generator().manual_seed(0))
    assert torch.equal(keep, size > 0)
    assert torch.equal(weights, (size > 0).double())


def test_uniform_removes_the_share():
    """A simple random sample: each with its chance, and each pair with its own. Kills: an independent draw, a
    systematic one in a fixed order."""
    batch = dppo.Completions(*[torch.ones(4, 5, dtype=torch.float64)] * 4)
    kept, together = torch.zeros(4, 5), torch.zeros(20, 20)
    for seed in range(2000):
        keep, weights = baselines.prune_completions("uniform", 0.7, batch, torch.Generator().manual_seed(seed))
        assert keep.sum() == 6
        assert weights[keep].tolist() == pytest.approx([1 / 0.3] * 6)
        kept += keep
        together += keep.flatten()[:, None] & keep.flatten()
    assert ((kept / 2000 - 0.3).abs() < 4 * math.sqrt(0.3 * 0.7 / 2000)).all()
    pair = 6 * 5 / (20 * 19)
    off = ~torch.eye(20, dtype=torch.bool)
    assert ((together / 2000 - pair).abs()[off] < 5 * math.sqrt(pair * (1 - pair) / 2000)).all()


def test_contribution_size():
    """Kills: the length's or the prompt's factor left out, an underflow that drops for good, a dead group dropped with
    KL, a masked one kept."""
    advantages, scale = table([[1.0, -2, 0, 1, 1]]), table([[0.5, 0.5, 0.5, 0.0, 0.5]])
    energy = table([[4.0, 1, 9, 1, 0]])
    size = dppo.contribution_size(advantages, scale, energy, 0.0)
    assert size[0, :4].tolist() == pytest.approx([1, 1, 0, 0])
    assert size[0, 4].item() == pytest.approx(dppo.SIZE_FLOOR * 2 / 3), "floored, not dropped"
    with_kl = dppo.contribution_size(advantages, scale, energy, 0.1)
    assert with_kl[0, :4].tolist() == pytest.approx([1.1, 1.05, 0.15, 0])
    peaked = dppo.contribution_size(advantages, scale, torch.zeros(1, 5), 0.0)
    assert ((peaked > 0) == (scale * advantages != 0)).all(), "not even where all of them underflow"
    assert (dppo.contribution_size(torch.zeros(1, 5), scale, energy, 0.0) == 0).all()


def test_rivals_by_hand():
    """CPPO keeps floor(G (1 - P)) of a group and takes the mean over them; its code ranks the whole batch; the floor
    form drops floor(r n_low). Kills: a rounding that keeps none of 10 at 0.9, ranks within the wrong scope."""
    advantages = table([[0.1, -0.9, 0.2, 0.3], [2.0, -1.5, 1.4, 0.4]])
    batch = dppo.Completions(advantages, torch.zeros(2, 4), torch.ones(2, 4), advantages.abs())
    results = {
        rule: baselines.prune_completions(rule, rate, batch, torch.Generator())
        for rule, rate in (("cppo", 0.5), ("cppo_batch", 0.6), ("dppo_floor", 0.7))
    }
    keep, weights = results["cppo"]
    assert keep.tolist() == [[False, True, False, True], [True, True, False, False]]
    assert weights[keep].tolist() == [2.0] * 4
    keep, weights = results["cppo_batch"]
    assert keep.tolist() == [[False] * 4, [True, True, True, False]]
    assert weights[keep].tolist() == pytest.approx([8 / 3] * 3)
    keep, weights = results[
        "dppo_floor"
    ]  # below the means 0.375 and 1.325: three and one; floor(2.1) and floor(0.7) go
    assert keep.tolist() == [[False, True, False, True], [True, True, True, True]]
    assert weights[0].tolist() == pytest.approx([0, 1, 0, 1 / 0.3])
    assert weights[1].tolist() == pytest.approx([1, 1, 1, 1 / 0.3])
    assert baselines.kept_count(10, 0.9) == 1
    assert baselines.allocated_prompts(32, 16, 0.75) == 128
    assert baselines.allocated_prompts(32, 16, 0.7) == 128, "4 of 16 are kept"
    with pytest.raises(ValueError, match="unknown completion rule 'topk'"):
        baselines.prune_completions("topk", 0.5, batch, torch.Generator())
    with pytest.raises(ValueError, match="unknown completion rule 'topk': choose one of none, zero, dppo, pps"):
        dppo.prune_completions("topk", 0.5, batch, torch.Generator())


@pytest.mark.parametrize("size", [3, 4, 5, 7])
@pytest.mark.parametrize("rate", [0.3, 0.5, 0.9])
def test_small_groups_have_exact_probabilities(size, rate):
    """Groups of 5 and their like, where floor(r n) of 3 is far from r: what is kept of a group, times its weight,
    averages to the group. Kills: rounding in the draw."""
    rewards = table([[1.0] + [0.0] * (size - 1)])
    advantages = dppo.group_advantages(rewards, "grpo")
    batch = dppo.Completions(advantages, rewards, torch.ones(1, size), advantages.abs())
    generator, draws = torch.Generator().manual_seed(0), 4000
    total = torch.zeros(1, size, dtype=torch.float64)
    for _ in range(draws):
        total += dppo.prune_completions("dppo", rate, batch, generator)[1]
    error = math.sqrt(rate / (1 - rate) / draws)  # of a mean of weights, each 0 or 1 / (1 - r)
    assert total[0, 0] == draws
    assert ((total / draws - 1).abs()[0, 1:] < 4 * error).all()


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
    batch = dppo.Completions(advantages, advantages, torch.ones(5, 7), advantages.abs())
    for rule in dppo.COMPLETION_RULES:
        keep, weights = dppo.prune_completions(rule, 0.0, batch, torch.Generator().manual_seed(0))
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
    assert (dppo.threshold_keep_prob(advantages.abs(), ~rewards.isnan(), 0.9) == 1).all()


def test_mean_is_of_the_group_and_of_scorable_completions():
    """Kills: a batch-wide mean, unscorable completions (|A| = 0) pulling the mean down."""
    nan = math.nan
    rewards = torch.tensor([[1.0, 0, 0, nan, nan, nan], [0, 0, 0, 0, 0, 1]], dtype=torch.float64)
    advantages = dppo.group_advantages(rewards, "dr_grpo")
    keep_prob = dppo.completion_keep_prob("dppo", 0.5, dppo.Completions(advantages, rewards, *[torch.ones(2, 6)] * 2))
    # group 0: |A| 2/3, 1/3, 1/3 and zeros; the mean of the three is 4/9, of all six 2/9, of the batch 1/4
    assert keep_prob.tolist() == [[1, 0.5, 0.5, 0.5, 0.5, 0.5], [0.5] * 5 + [1]]


def test_token_loss_by_hand():
    """Kills: max for min, the clip on one side only, a sum for GSPO's mean, a CISPO that loses clipped gradients."""
    ratio = torch.tensor([1.5, 0.5, 1.5, 0.5, 1.1])
    advantages = torch.tensor([2.0, 2.0, -2.0, -2.0, 1.0])
    owner, old = torch.tensor([0, 0, 1, 1, 1]), torch.full((5,), -1.0)

    def of(loss, eps_low=0.2, eps_high=0.3):
        logprobs = (old + ratio.log()).requires_grad_()
        values, clipped = dppo.token_loss(
            logprobs, old, advantages, owner, loss=loss, eps_low=eps_low, eps_high=eps_high
        )
        values.sum().backward()
        return values.tolist(), clipped.tolist(), logprobs.grad.tolist()

    values, clipped, gradient = of("dapo")
    assert values == pytest.approx([-2.6, -1.0, 3.0, 1.6, -1.1])
    assert clipped == [True, False, False, True, False]
    assert gradient == pytest.approx([0, -1, 3, 0, -1.1])
    values, clipped, gradient = of("cispo")
    assert values == pytest.approx([-1.3 * 2 * x for x in (-1 + math.log(1.5),)] + [-0.8 * 2 * (-1 + math.log(0.5)),
        1.3 * 2 * (-1 + math.log(1.5)), 0.8 * 2 * (-1 + math.log(0.5)), -1.1 * (-1 + math.log(1.1))])  # fmt: skip
    assert clipped == [True, True, True, True, False]
    assert gradient == pytest.approx([-2.6, -1.6, 2.6, 1.6, -1.1]), "clipped, and still a gradient"
    first, second = math.sqrt(0.75), (1.5 * 0.5 * 1.1) ** (1 / 3)
    values, clipped, gradient = of("gspo", 0.1, 0.1)
    assert values == pytest.approx([-2 * first, -2 * first, 2 * second, 2 * second, -second], rel=1e-5)
    assert clipped == [False, False, False, False, False]
    assert gradient == pytest.approx([-2 * first] * 2 + [second] * 3, rel=1e-5), "each token moves the whole sequence"


def test_kl_by_hand():
    """Never negative, also where the two nearly agree. Kills: the difference the other way round."""
    logprobs, ref = torch.tensor([-1.0, -1.0, -3.0]), torch.tensor([-1.0, -1.00001, -1.0])
    kl = dppo.kl_k3(logprobs, ref)
    assert kl.tolist() == pytest.approx([0, 5e-11, math.e**2 - 3], rel=1e-4)
    assert (kl >= 0).all()


def test_energy_bound():
    """Above the exact energy for any softmax, equal to it where all the rest is on one token."""
    logits = torch.randn(200, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 3
    probs = logits.softmax(dim=-1)
    exact = (torch.nn.functional.one_hot(torch.arange(200) % 7, 7) - probs).square().sum(dim=-1)
    sampled = probs[torch.arange(200), torch.arange(200) % 7]
    assert (dppo.energy_bound(sampled.log()) >= exact - 1e-12).all()
    assert dppo.energy_bound(torch.tensor(0.25).log()).item() == pytest.approx(2 * 0.75**2)


def test_loss_scale_by_hand():
    """Kills: the denominators swapped, max_new_tokens in grpo."""
    counts = {"num_sequences": 8, "max_new_tokens": 100, "num_tokens": 50.0}
    wanted = {"grpo": [1 / 16, 1 / 32], "gspo": [1 / 16, 1 / 32], "dr_grpo": [1 / 800] * 2, "dapo": [1 / 50] * 2,
              "cispo": [1 / 50] * 2}  # fmt: skip
    for loss in dppo.LOSSES:
        assert dppo.loss_scale(torch.tensor([[2.0, 4.0]]), loss, **counts).tolist() == [wanted[loss]]


def test_running_check_formula():
    """Unbiased estimates leave bias2 and scale at 0 on average, weights times 0.9 do not. Kills: a square that holds
    the variance, the difference of the two for the bias."""
    generator = torch.Generator().manual_seed(0)
    full = torch.randn(500, generator=generator)
    rows = {1.0: [], 0.9: []}
    for _ in range(400):
        one, other = (full + torch.randn(500, generator=generator) for _ in range(2))
        for factor, found in rows.items():
            check = dppo.check_unbiased(full, factor * one, factor * other)
            found.append([check["check/bias2"], check["check/variance"], check["check/scale"]])
    right, twin = (torch.tensor(rows[factor]) for factor in (1.0, 0.9))
    error = right.std(dim=0) / 20
    assert (right.mean(dim=0)[[0, 2]].abs() < 3 * error[[0, 2]]).all()
    assert right.mean(dim=0)[1].item() == pytest.approx(500 / full.square().sum().item(), rel=0.05)
    assert twin.mean(dim=0)[0].item() == pytest.approx(0.01, abs=4 * error[0].item())
    assert twin.mean(dim=0)[2].item() == pytest.approx(-0.1, abs=4 * error[2].item())


def test_unknown_loss_is_named():
    """Kills: a misspelt loss that is silently the other one."""
    with pytest.raises(ValueError, match="unknown loss 'drgrpo': choose one of grpo, dr_grpo"):
        dppo.group_advantages(torch.zeros(1, 2), "drgrpo")
    with pytest.raises(ValueError, match="unknown loss 'drgrpo'"):
        dppo.loss_scale(torch.ones(1, 2), "drgrpo", num_sequences=2, max_new_tokens=4, num_tokens=2.0)


def test_effective_sample_size():
    assert dppo.effective_sample_size(torch.tensor([2.0, 2, 0, 0])) == 2
    assert dppo.effective_sample_size(torch.tensor([3.0, 1])) == pytest.approx(1.6)
