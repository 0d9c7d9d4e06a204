"""The proof: exact by enumeration through the real loss and model; planted mistakes must fail."""

import functools
import itertools
import math
import re
from dataclasses import replace
from unittest import mock

import pytest
import torch
from test_dppo import table
from toy import Stored, flags, toy_reward

import config
import dppo
import proof
import rollout
import sampler
import train
import update
from runtime import ranks

PPS = dppo.COMPLETION_RULES["pps"]

# several packs of several segments
RUN = config.Config(pack_tokens=24, device="cpu", temperature=0.7)


UNBIASED = ("zero", "uniform", "dppo", "pps", "adaptive")
BIASED = ("cppo", "cppo_batch", "pods", "dppo_floor")


def configured(loss, beta, **changes):
    """RUN with this loss, and with a clip so narrow that it acts on some tokens."""
    eps_low = 0.05 if loss == "gspo" else None
    eps_high = {"gspo": 0.05, "cispo": 0.2}.get(loss)
    changes |= {"loss": loss, "beta": beta, "eps_low": eps_low, "eps_high": eps_high}
    return config.resolve(replace(RUN, **changes))


@pytest.fixture
def make(make_policy, make_rollouts):
    """Build a proof.Case of a real Qwen3 in float64 through update.accumulate_gradients.

    Old log-probs are far enough away that some tokens are clipped. `masked` completions carry no
    loss; `kept` prompts are those that a prompt draw left; dapo and cispo divide by `tokens`, by
    default this batch's; `seed` is that of the rollouts.
    """

    def make(
        rewards, loss, beta=0.0, *, masked=(), prompt_weights=None, kept=None, tokens=None, seed=0,
        shift=0.0, **changes,
    ):  # fmt: skip
        model, _ = make_policy(dtype=torch.float64)
        reference, _ = make_policy(seed=1, dtype=torch.float64)
        Q, G = rewards.shape
        rollouts = make_rollouts(model, Q, G, drift=0.3, seed=seed)
        cfg = configured(loss, beta, **changes)
        start = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
        torch.nn.utils.vector_to_parameters(start + shift, model.parameters())
        kept = list(range(Q)) if kept is None else kept
        pick = lambda value: value[kept] if torch.is_tensor(value) else [value[q] for q in kept]
        part = type(rollouts)(*map(pick, vars(rollouts).values()))

        def gradient(advantages, scale, keep):
            model.zero_grad()
            update.accumulate_gradients(
                model, part, advantages, scale, keep, cfg=cfg, reference=reference
            )
            ranks.sum_gradients(model)
            return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])

        counts = torch.ones(Q, G, dtype=torch.float64)
        for place in masked:
            counts[place] = 0.0
        if prompt_weights is not None:
            counts = counts * prompt_weights[:, None]
        counts = counts[kept]
        tokens = tokens or (counts * part.lengths).sum().item()
        scale = counts * dppo.loss_scale(
            part.lengths, loss, num_sequences=Q * G, max_new_tokens=6, num_tokens=tokens
        )
        advantages = dppo.group_advantages(rewards, dppo.LOSSES[loss].scale_rewards)[kept]
        per_token = torch.rand(Q, G, generator=torch.Generator().manual_seed(3))[kept]
        size = dppo.contribution_size(advantages, scale, per_token * part.lengths, beta)
        prompt_tokens = torch.tensor([[len(ids)] for ids in part.prompt_ids])
        cost = prompt_tokens + part.lengths
        rest = 0.3 * cost.sum().item()
        batch = dppo.Completions(advantages, rewards[kept], cost, size, rest)
        return proof.Case(gradient, batch, scale)

    return make


def textbook_loss(loss, beta, advantage, logprobs, old, ref, sequences, tokens):
    """(the term of one sequence, how many tokens are clipped), as the papers and TRL have it."""
    ratio = (logprobs - old).exp()
    if loss == "gspo":
        ratio = (logprobs - old).mean().exp().expand(len(old))
    clips = {"gspo": (0.95, 1.05), "cispo": (0.0, 1.2), "dapo": (0.8, 1.28)}
    low, high = clips.get(loss, (0.8, 1.2))
    if loss == "cispo":
        per_token = -ratio.clamp(low, high).detach() * advantage * logprobs
    else:
        per_token = -torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)
    per_token = per_token + beta * ((ref - logprobs).exp() - (ref - logprobs) - 1)
    clipped = int(((ratio < low) | (ratio > high)).sum())
    if loss in ("grpo", "gspo"):
        return per_token.mean() / sequences, clipped
    return per_token.sum() / (sequences * 6 if loss == "dr_grpo" else tokens), clipped


@pytest.mark.parametrize("beta", [0.0, 0.1])
@pytest.mark.parametrize("loss", dppo.LOSSES)
def test_unpruned_is_the_textbook_loss(make_policy, make_rollouts, make, loss, beta):
    """The packed gradient against a loop over sequences with transformers' own attention.

    Catches a wrong sign, clip, ratio, length or denominator, which both sides of the enumeration
    would share. Lengths are 1 to 6 = T.
    """
    rewards = table([[1, 0, 0, 0], [1, 1, 0, 1]])
    packed = make(rewards, loss, beta, seed=1).full()
    model, _ = make_policy(dtype=torch.float64)
    reference, _ = make_policy(seed=1, dtype=torch.float64)
    rollouts = make_rollouts(model, 2, 4, drift=0.3, seed=1)
    assert {1, 6} <= set(rollouts.lengths.flatten().tolist())
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

        old, ref = rollouts.logprobs[q, g, :length], logprobs_of(reference).detach()
        counts = (8, int(rollouts.lengths.sum()))
        term, acts = textbook_loss(loss, beta, advantage, logprobs_of(model), old, ref, *counts)
        term.backward()
        clipped += acts
    plain = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    assert clipped > 2
    assert proof.relative_error(packed, plain) < 1e-10


# ---------------------------------------------------------------------------- the proof


def assert_unbiased(case, rate, each):
    """Every unbiased rule, by enumeration."""
    full = case.full()
    for rule in UNBIASED:
        pruned = proof.expected_gradient(case, rule, rate, each=each)
        assert proof.relative_error(pruned, full) <= 1e-10, rule


@pytest.mark.parametrize("beta", [0.0, 0.1])
@pytest.mark.parametrize("loss", dppo.LOSSES)
def test_completion_rules_are_unbiased(make, loss, beta):
    """Every outcome of every unbiased rule, with a dead group and a masked completion.

    The packed gradient is first shown to be linear in the weights, by real backward passes. Catches
    a size of 0 although the term has a KL part or a reward, a strata order that loses a completion,
    points that miss an interval, and weights that are not 1 / probability.
    """
    case = make(table([[1, 0, 0], [0, 0, 0], [1, 1, 0.5]]), loss, beta, masked=[(0, 2)])
    each = case.of_each()
    dead = [
        (beta == 0 and q == 1) or (q, g) == (0, 2) for q, g in itertools.product(range(3), range(3))
    ]
    assert (case.batch.size.flatten() == 0).tolist() == dead, "size 0 exactly if the term is 0"
    generator = torch.Generator().manual_seed(5)
    for _ in range(3):
        weights = torch.rand(3, 3, generator=generator, dtype=torch.float64) * 3
        keep = torch.rand(3, 3, generator=generator) < 0.6
        real = case.gradient(case.batch.advantages, case.factor * weights, keep)
        assert proof.relative_error(real, (weights * keep).flatten() @ each) < 1e-10
    assert_unbiased(case, 0.6, each)


@pytest.mark.parametrize(
    ("rewards", "masked", "rate"),
    [
        pytest.param([[1, 0]], [], 0.6, id="one prompt, a group of two"),
        pytest.param([[1, 0], [math.nan] * 2], [], 0.6, id="nothing scorable in a group"),
        pytest.param([[1, 0, math.nan]], [(0, 1)], 0.9, id="one live completion"),
        pytest.param([[1, 0, 0, 0]], [], 0.999, id="almost everything dropped"),
        pytest.param([[1, 0, 0, 0]], [], 0.00005, id="almost everything kept"),
    ],
)
@pytest.mark.parametrize("loss", ["grpo", "gspo"])
def test_edges_are_unbiased(make, loss, rewards, masked, rate):
    """The smallest batches and the extreme rates, by enumeration.

    Catches a keep probability next to 1 that counts as 1, one next to 0 that counts as 0, and a
    statistic that is undefined for so few completions.
    """
    case = make(table(rewards), loss, masked=masked, seed=8)
    assert_unbiased(case, rate, case.of_each())


@pytest.mark.parametrize("loss", ["grpo", "dapo"])
def test_a_corrected_batch_is_unbiased(make, loss):
    """The corrections of sampler and trainer, of which some are above the cap: pruning weights
    multiply them. Catches a ratio that depends on which other completions are kept."""
    case = make(table([[1, 0, 0], [1, 1, 0]]), loss, 0.1, importance_cap=1.1)
    plain = make(table([[1, 0, 0], [1, 1, 0]]), loss, 0.1)
    assert proof.relative_error(case.full(), plain.full()) > 0.01, "the correction acts"
    each = case.of_each()
    keep = torch.tensor([[True, False, True], [False, True, True]])
    real = case.gradient(case.batch.advantages, case.factor * 2.0, keep)
    assert proof.relative_error(real, 2.0 * keep.double().flatten() @ each) < 1e-10
    assert_unbiased(case, 0.6, each)


class InFloat64(train.Trainer):
    """A toy run of which one step can be repeated with another draw, from any parameters."""

    def __init__(self, cfg, reward=toy_reward, step=1):
        super().__init__(cfg, reward=reward)
        self.model.double()
        window = self.candidates(step)
        prompt_ids = [self.train_ids[q] for q in window.tolist()]
        options = {"group_size": self.cfg.group_size, "seed": dppo.seed_for(self.cfg.seed, step)}
        rollouts = rollout.sample(self.policy, prompt_ids, self.sampling, **options)
        self.sampling = replace(self.sampling, engine=Stored(rollouts, window))

    def parameters(self):
        return torch.nn.utils.parameters_to_vector(self.model.parameters()).detach().clone()

    def updated(self, outcome, start, make_optimizer):
        """The parameters after one update from the parameters `start` and a used optimizer.
        outcome: (keep, weights) [K, G], what the rule draws."""
        self.optimizer = make_optimizer(self.model.parameters(), lr=self.cfg.lr)
        everything = torch.ones_like(outcome[0])
        for drawn in ((everything, everything.double()), outcome):  # the first fills moments
            torch.nn.utils.vector_to_parameters(start.clone(), self.model.parameters())
            with mock.patch.object(dppo, "prune_completions", lambda *_, drawn=drawn: drawn):
                self.step(1)
        return self.parameters()


@pytest.mark.parametrize(
    ("make_optimizer", "grad_clip", "exact"),
    [
        (torch.optim.SGD, 0, True),
        (functools.partial(torch.optim.SGD, momentum=0.9, weight_decay=0.1), 0, True),
        (torch.optim.SGD, 1e-3, False),
        (torch.optim.AdamW, 0, False),
    ],
    ids=["sgd", "momentum", "clipped", "adamw"],
)
def test_sgd_updates_are_unbiased(policy_folder, tmp_path, make_optimizer, grad_clip, exact):
    """The parameters after one real update, averaged over every outcome of pps: without a clip by
    norm, SGD's are the full batch's; AdamW's, and those of clipped gradients, are not. Catches a
    norm clip that --grad-clip 0 leaves on."""
    changes = {"method": "pps", "lr": 0.1, "warmup": 0}
    args = flags(policy_folder, str(tmp_path / "run"), grad_clip=grad_clip, **changes)
    trainer = InFloat64(config.parse_config(args))
    start, seen = trainer.parameters(), []
    prune = dppo.prune_completions
    record = lambda *args: seen.append(args[2]) or prune(*args)
    with mock.patch.object(dppo, "prune_completions", record):
        trainer.step(1)
    everything = torch.ones_like(seen[0].size, dtype=torch.bool)
    updated = functools.partial(trainer.updated, start=start, make_optimizer=make_optimizer)
    whole = updated((everything, everything.double()))
    drawn = [*proof.outcomes(PPS, 0.7, seen[0])]
    assert len(drawn) > 5
    mean = sum(p * (updated((keep, w)) - start) for keep, w, p in drawn)
    error = proof.relative_error(mean, whole - start)
    assert (error < 1e-10) if exact else (error > 1e-3)


def gradients(trainer, prompts, completions):
    """The gradients [M, P] of the M updates of step 2, all at the same parameters.

    prompts: (kept, weights) [Q]. completions: a list of M (keep, weights), one for each update, or
    None, which draws and returns (gradients, what each update draws from)."""
    found, batches = [], []
    draw = dppo.prune_completions
    mean_tokens = trainer.mean_tokens

    def accumulate(model, *args, **options):
        sums = update.accumulate_gradients(model, *args, **options)
        found.append(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]))
        return sums

    def prune_completions(*args):
        batches.append(args[2])
        return draw(*args) if completions is None else completions[len(batches) - 1]

    with (
        mock.patch.object(train, "accumulate_gradients", accumulate),
        mock.patch.object(trainer.optimizer, "step"),
        mock.patch.object(trainer.history, "prune", return_value=prompts),
        mock.patch.object(trainer.history, "update"),
        mock.patch.object(dppo, "prune_completions", prune_completions),
    ):
        trainer.step(2)
    trainer.mean_tokens = mean_tokens
    return (torch.stack(found), batches) if completions is None else torch.stack(found)


@pytest.mark.parametrize("prompt_rule", ["dppo", "uniform"])
@pytest.mark.parametrize("loss", ["grpo", "dapo"])
def test_the_step_is_unbiased(policy_folder, tmp_path, loss, prompt_rule):
    """train.py's own step with two updates, averaged over every outcome of both levels, is the
    step that keeps everything. Truncated completions are masked.

    Catches a mini-batch that depends on which prompts are kept, a denominator of the kept, and a
    weight that one of the updates leaves out.
    """
    settings = {"method": "grpo", "prompt_rule": prompt_rule, "completion_rule": "pps"}
    settings |= {"prompt_prune_rate": 0.5, "completion_prune_rate": 0.6, "group_size": 3}
    settings |= {"loss": loss, "minibatches": 2, "mask_truncated": True}
    args = flags(policy_folder, str(tmp_path / "run"), **settings)
    several_values = lambda completion, _answer: float(sum(map(ord, completion)) % 3)
    trainer = InFloat64(config.parse_config(args), several_values, step=2)
    trainer.sampling.engine.rollouts.truncated = torch.arange(12).view(4, 3) % 5 == 0
    trainer.mean_tokens = 40.0 if trainer.needs_mean_tokens else None
    window = trainer.candidates(2)  # [4]
    scores = table([[0, 0, 0], [3, -3, 3], [2, -2, 2], [1, 0, -1]])
    trainer.history.update(window, scores, torch.ones(4, 3))

    everything = torch.ones(2, 3, dtype=torch.bool), torch.ones(2, 3, dtype=torch.float64)
    all_prompts = torch.ones(4, dtype=torch.bool), torch.ones(4, dtype=torch.float64)
    full = gradients(trainer, all_prompts, [everything, everything])
    assert (full.norm(dim=1) > 0).all()

    expected, chances = torch.zeros_like(full), 0.0
    of_parts = [
        proof.outcomes(sampler.PROMPT_RULES[prompt_rule], 0.5, trainer.history.of(part))
        for part in window.chunk(2)
    ]
    for outcomes in itertools.product(*of_parts):
        keeps, weights, own_chances = zip(*outcomes, strict=True)
        kept, prompt_weights, chance = torch.cat(keeps), torch.cat(weights), math.prod(own_chances)
        chances += chance
        _, batches = gradients(trainer, (kept, prompt_weights), None)
        all_kept = [(torch.ones_like(one.size) > 0, torch.ones_like(one.size)) for one in batches]
        for number, batch in enumerate(batches):
            # The updates draw separately, and nothing moves the parameters between them here.
            for keep, weights, own_chance in proof.outcomes(PPS, 0.6, batch):
                drawn = all_kept.copy()
                drawn[number] = (keep, weights)
                found = gradients(trainer, (kept, prompt_weights), drawn)
                expected[number] += chance * own_chance * found[number]
    assert chances == pytest.approx(1.0)
    assert proof.relative_error(expected, full) <= 1e-10


def learned_history():
    """A prompt history whose three prompts have different scores and lengths."""
    history, window = sampler.PromptHistory(3), torch.arange(3)
    advantages = table([[0, 0, 0], [3, -3, 3], [2, -2, 2]])
    history.update(window, advantages, torch.tensor([[9], [2], [2]]).expand(3, 3))
    return history, window


@pytest.mark.parametrize("prompt_rule", ["uniform", "dppo"])
@pytest.mark.parametrize("rule", ["none", "dppo", "pps", "adaptive"])
@pytest.mark.parametrize("loss", ["grpo", "gspo", "dapo", "cispo"])
def test_prompt_level_and_both_are_unbiased(make, loss, rule, prompt_rule):
    """Each prompt pattern has its own completion probabilities, from the real draw's weights.

    test_rules.py shows that train.py uses them. Catches prompt weights that are not
    1 / probability, and a size that the weights make 0.
    """
    rewards, beta = table([[1, 0, 0], [0, 1, 1], [1, 1, 0]]), 0.1
    history, window = learned_history()
    keep_prob = sampler.PROMPT_RULES[prompt_rule].keep_prob(history.of(window), 0.4)
    patterns = {}
    for number in range(100):  # the real draw, for its patterns and weights
        generator = dppo.generator_for(number)
        keep, weights = history.prune(prompt_rule, 0.4, window, generator)
        patterns[tuple(keep.tolist())] = weights

    def chance_of(pattern):
        odds = [p if kept else 1 - p for kept, p in zip(pattern, keep_prob.tolist(), strict=True)]
        if prompt_rule == "dppo":
            return math.prod(odds)
        assert sum(pattern) == 2  # so the one that is missing determines the pattern
        return odds[pattern.index(False)]

    chances = {pattern: chance_of(pattern) for pattern in patterns}
    assert sum(chances.values()) == pytest.approx(1.0)
    known = {"tokens": 30.0}  # before the draw
    full = make(rewards, loss, beta, **known).full()
    total = torch.zeros_like(full)
    for keep, weights in patterns.items():
        kept = [q for q in range(3) if keep[q]]
        case = make(rewards, loss, beta, prompt_weights=weights, kept=kept, **known)
        total += chances[keep] * proof.expected_gradient(case, rule, 0.5)
    assert proof.relative_error(total, full) <= 1e-10
    if prompt_rule == "dppo":
        assert keep_prob.max() > 1.05 * keep_prob.min()


def test_fixed_size_draw_over_two_minibatches(make):
    """Two updates, each on a mini-batch of two prompts of which one is kept.

    Over all outcomes the second update's gradient averages to the full one's, at the parameters to
    which the first one led. With one fixed-size draw over all four prompts it does not, because the
    first update then says how many are left for the second. Catches such a draw.
    """
    rewards = table([[1, 0, 0], [0, 1, 1], [1, 1, 0], [0, 0, 1]])
    first = make(rewards, "grpo", kept=[0, 1]).of_each()

    def second(patterns):
        """Error of the second gradient, averaged over equally likely patterns of four prompts."""
        pruned, full = 0.0, 0.0
        for keep in patterns:
            weights = torch.tensor(keep, dtype=torch.float64)[:, None].expand(4, 3) * 2
            moved = -0.5 * (weights[:2].flatten() @ first)  # by the first update
            there = make(rewards, "grpo", kept=[2, 3], shift=moved).of_each()
            pruned = pruned + weights[2:].flatten() @ there / len(patterns)
            full = full + there.sum(dim=0) / len(patterns)
        return proof.relative_error(pruned, full)

    history = sampler.PromptHistory(4)

    def drawn(minibatches):
        """Patterns that the real draw makes."""
        generator, window = dppo.generator_for(0), torch.arange(4)
        draws = [history.prune("uniform", 0.5, window, generator, minibatches) for _ in range(200)]
        return sorted({tuple(keep.tolist()) for keep, _ in draws})

    assert len(drawn(2)) == 4
    assert len(drawn(1)) == 6
    assert second(drawn(2)) <= 1e-10
    assert second(drawn(1)) > 1e-3


@pytest.mark.parametrize("beta", [0.0, 0.1])
@pytest.mark.parametrize("planted", [*proof.MISTAKES, *BIASED])
def test_mistakes_are_found(make, planted, beta):
    """Fails if the enumeration cannot tell: each of these popular mistakes, and each biased
    baseline, is off by more than 1e-3."""
    case = make(table([[1, 0, 0, 0], [1, 1, 0, 1]]), "grpo", beta)
    rule, mistake = (planted, None) if planted in BIASED else ("dppo", planted)
    pruned = proof.expected_gradient(case, rule, 0.5, mistake=mistake)
    assert proof.relative_error(pruned, case.full()) > 1e-3


@pytest.mark.parametrize("mistake", proof.MISTAKES)
def test_mistakes_are_found_at_the_prompt_level(make, mistake):
    """The same for whole prompts: without weights, or weighted over the prompts that were kept."""
    rewards, total = table([[1, 0, 0], [0, 1, 1]]), 0.0
    full = make(rewards, "grpo").full()
    for kept in ([0, 1], [0], [1]):
        weight = 1.0 if mistake == "no weights" else 2.0 * 2 / len(kept)
        weights = torch.full((2,), weight, dtype=torch.float64)
        total = total + 0.25 * make(rewards, "grpo", prompt_weights=weights, kept=kept).full()
    assert proof.relative_error(total, full) > 1e-3


def test_the_printed_table(capsys):
    """Catches a table that is not computed: each error agrees with the heading above it; and a rule
    that is in no section, or in the wrong one."""
    proof.main()
    printed = capsys.readouterr().out
    completions, prompts, biased = re.split(r"\n(?:claimed to be .*|biased, .*)\n", printed)[1:]
    biased, verdict = biased.strip().split("\n\n")
    assert verdict == "Everything that claims to be unbiased is, within 1e-09."
    table = lambda part: [re.split(r"  +", line.strip()) for line in part.strip().splitlines()]
    assert [row[0] for row in table(completions)] == [*UNBIASED]
    assert [row[0] for row in table(prompts)] == ["uniform", "dppo"]
    named = ["prompts, own tokens", "prompts, dppo_floor", *BIASED]
    named += [f"dppo, {mistake}" for mistake in proof.MISTAKES]
    assert [row[0] for row in table(biased)] == named
    errors = lambda part: [float(word) for row in table(part) for word in row[1:]]
    assert len(errors(completions)) == 25
    assert max(errors(completions) + errors(prompts)) < 1e-10
    own, *rest = table(biased)
    for error, loss in zip(own[1:], dppo.LOSSES, strict=True):
        assert float(error) > 1e-3 if loss in ("dapo", "cispo") else float(error) < 1e-10
    assert min(float(word) for row in rest for word in row[1:]) > 1e-3
