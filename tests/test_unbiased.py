"""The proof: exact by enumeration through the real loss and model; planted mistakes must fail."""

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
                model, part, advantages, scale, keep, cfg=cfg, reference=reference,
                old_logprobs=None if cfg.importance_cap else part.logprobs,
            )  # fmt: skip
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
    """A toy run in float64, of which one step can be repeated with other draws."""

    def __init__(self, cfg, reward=toy_reward, step=1):
        super().__init__(cfg, reward=reward)
        self.model.double()
        window = self.candidates(step)
        prompts = [self.train_ids[index] for index in window.tolist()]
        options = {"group_size": cfg.group_size, "seed": step}
        rollouts = rollout.sample(self.policy, prompts, self.sampling, **options)
        self.sampling = replace(self.sampling, engine=Stored(rollouts, window))


# ---------------------------------------------------------------------------- the step


class Gradients:
    """Takes step 2 of a trainer with given random numbers, and keeps the gradient of each of its
    updates. The parameters stay what they are."""

    def __init__(self, trainer):
        self.trainer = trainer
        self.found, self.batches = [], []

    def accumulate(self, model, *args, **options):
        sums = update.accumulate_gradients(model, *args, **options)
        trained = [weight for weight in self.trainer.model.parameters() if weight.requires_grad]
        self.found.append(torch.cat([weight.grad.flatten() for weight in trained]))
        return sums

    def of(self, numbers) -> torch.Tensor:
        """[M, P]. `numbers`: what the step's draws get from random(), one after the other."""
        self.found, self.batches = [], []
        generator_for, prune = dppo.generator_for, dppo.prune_completions
        scripted = proof.Scripted(*numbers)

        def generator(*key):
            return scripted if key[-1] == "keep" else generator_for(*key)

        def record(name, rate, batch, generator):
            self.batches.append(batch)
            return prune(name, rate, batch, generator)

        mean_tokens = self.trainer.mean_tokens
        with (
            mock.patch.object(dppo, "generator_for", generator),
            mock.patch.object(dppo, "prune_completions", record),
            mock.patch.object(train, "accumulate_gradients", self.accumulate),
            mock.patch.object(self.trainer.optimizer, "step"),
            mock.patch.object(self.trainer.history, "update"),
        ):
            self.trainer.step(2)
        self.trainer.mean_tokens = mean_tokens
        return torch.stack(self.found)


def middles(rule, rate, batch):
    """(start, probability) for each interval of starts that has an outcome of its own."""
    both_ends = [*proof.random_numbers(rule, rate, batch)]
    for (low, chance), (high, _) in zip(both_ends[::2], both_ends[1::2], strict=True):
        yield (low + high) / 2, 2 * chance


def step_error(folder, loss, prompt_rule, **more):
    """How far the expected gradients of the two updates of a step are from those of the step that
    keeps everything. Truncated completions are masked."""
    settings = {"method": "grpo", "group_size": 3, "loss": loss, "minibatches": 2} | more
    rates = {"prompt_prune_rate": 0.5, "completion_prune_rate": 0.6}
    rules = {"prompt_rule": prompt_rule, "completion_rule": "pps"}
    several_values = lambda completion, _answer: float(sum(map(ord, completion)) % 3)

    def trainer_with(name, **changes):
        args = flags(*folder(name), mask_truncated=True, **settings, **changes)
        trainer = InFloat64(config.parse_config(args), several_values, step=2)
        trainer.sampling.engine.rollouts.truncated = torch.arange(12).view(4, 3) % 5 == 0
        scores = table([[0, 0, 0], [3, -3, 3], [2, -2, 2], [1, 0, -1]])
        trainer.history.update(trainer.candidates(2), scores, torch.ones(4, 3))
        return trainer

    whole = trainer_with("whole")
    full = Gradients(whole).of([0.5] * 4)
    trainer = trainer_with("pruned", **rules, **rates)
    if trainer.needs_mean_tokens:
        rollouts = whole.sampling.engine.rollouts
        trainer.mean_tokens = (rollouts.lengths * ~rollouts.truncated).sum().item()
    assert (full.norm(dim=1) > 0).all()

    gradients = Gradients(trainer)
    expected, chances = torch.zeros_like(full), 0.0
    prompts = sampler.PROMPT_RULES[prompt_rule]
    of_parts = [
        middles(prompts, 0.5, trainer.history.of(part)) for part in trainer.candidates(2).chunk(2)
    ]
    for (first, first_chance), (second, second_chance) in itertools.product(*of_parts):
        chance = first_chance * second_chance
        chances += chance
        gradients.of([first, second, 0.5, 0.5])
        for number, batch in enumerate(gradients.batches):
            # The updates draw separately, and nothing moves the parameters between them here.
            for start, own_chance in middles(PPS, 0.6, batch):
                starts = [start, 0.5] if number == 0 else [0.5, start]
                found = gradients.of([first, second, *starts])
                expected[number] += chance * own_chance * found[number]
    assert chances == pytest.approx(1.0)
    return proof.relative_error(expected, full)


@pytest.fixture
def folder(policy_folder, tmp_path):
    return lambda name: (policy_folder, str(tmp_path / name))


@pytest.mark.parametrize("prompt_rule", ["dppo", "uniform"])
@pytest.mark.parametrize("loss", ["grpo", "dapo"])
def test_the_step_is_unbiased(folder, loss, prompt_rule):
    """train.py's own step with two updates and its own draws, averaged over every outcome of both
    levels, is GRPO's step.

    Catches a mini-batch that depends on which prompts are kept, a denominator of the kept, and
    weights that one of the updates leaves out or takes from another.
    """
    assert step_error(folder, loss, prompt_rule) <= 1e-10


HT_WEIGHTS, SYSTEMATIC, INDEPENDENT = dppo.ht_weights, dppo.systematic, dppo.independent
FAULTS = {  # what is wrong, and the function of dppo.py in which it is
    "no weights": ("ht_weights", lambda keep, p: keep.double()),
    "clipped": ("ht_weights", lambda keep, p: HT_WEIGHTS(keep, p).clamp(max=1.5)),
    "kept count": (
        "ht_weights", lambda keep, p: HT_WEIGHTS(keep, p) * keep.numel() / max(1, keep.sum())
    ),
    "constant start": ("systematic", lambda p, order, start: SYSTEMATIC(p, order, 0.5)),
    "short range": ("systematic", lambda p, order, start: SYSTEMATIC(p, order, 0.95 * start)),
    "kept too often": (
        "independent", lambda p, generator: INDEPENDENT((1.05 * p).clamp(max=1), generator)
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", ["no weights", "clipped", "constant start"])
def test_the_step_shows_faults_of_the_draw(folder, monkeypatch, fault):
    monkeypatch.setattr(dppo, *FAULTS[fault])
    assert step_error(folder, "grpo", "uniform") > 1e-3


def test_the_step_shows_weights_of_another_minibatch(folder, monkeypatch):
    prune, others = dppo.prune_completions, []

    def swapped(name, rate, batch, generator):
        keep, weights = prune(name, rate, batch, generator)
        others.append(weights)
        fits = len(others) > 1 and others[-2].shape == weights.shape
        return keep, others[-2] if fits else weights

    monkeypatch.setattr(dppo, "prune_completions", swapped)
    assert step_error(folder, "grpo", "uniform") > 1e-3


# ---------------------------------------------------------------------------- both levels


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
    """Each prompt pattern has its own completion probabilities. Catches prompt weights that are not
    1 / probability, and a size that the weights make 0."""
    rewards, beta = table([[1, 0, 0], [0, 1, 1], [1, 1, 0]]), 0.1
    history, window = learned_history()
    known = {"tokens": 30.0}  # before the draw
    full = make(rewards, loss, beta, **known).full()
    total = torch.zeros_like(full)
    entry = sampler.PROMPT_RULES[prompt_rule]
    for keep, weights, chance in proof.outcomes(entry, 0.4, history.of(window)):
        kept = keep.nonzero()[:, 0].tolist()
        if kept:
            case = make(rewards, loss, beta, prompt_weights=weights, kept=kept, **known)
            total += chance * proof.expected_gradient(case, rule, 0.5)
    assert proof.relative_error(total, full) <= 1e-10


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_of_the_draw_are_found(make, monkeypatch, fault):
    """Fails if the enumeration runs anything but the draw that trains."""
    case = make(table([[1, 0, 0, 0], [1, 1, 0, 1]]), "grpo")
    full = case.full()
    monkeypatch.setattr(dppo, *FAULTS[fault])
    errors = [
        proof.relative_error(proof.expected_gradient(case, rule, 0.5), full)
        for rule in ("dppo", "pps")  # an independent draw and a systematic one
    ]
    assert max(errors) > 1e-3


@pytest.mark.parametrize("beta", [0.0, 0.1])
@pytest.mark.parametrize("rule", BIASED)
def test_biased_rules_are_found(make, rule, beta):
    case = make(table([[1, 0, 0, 0], [1, 1, 0, 1]]), "grpo", beta)
    pruned = proof.expected_gradient(case, rule, 0.5)
    assert proof.relative_error(pruned, case.full()) > 1e-3


@pytest.mark.parametrize("fault", ["no weights", "clipped", "constant start"])
def test_the_proof_ends_with_an_error(monkeypatch, fault):
    monkeypatch.setattr(dppo, *FAULTS[fault])
    monkeypatch.setattr(dppo, "LOSSES", {"grpo": dppo.LOSSES["grpo"]})
    with pytest.raises(SystemExit, match=r"NOT unbiased: completions: .*prompts: "):
        proof.main()


def test_the_printed_table(capsys):
    """Catches a table that is not computed: each error agrees with the heading above it; and a rule
    that is in no section, or in the wrong one."""
    proof.main()
    printed = capsys.readouterr().out
    exact, biased = re.split(r"\n(?:Claimed to be .*|Biased, .*\n.*)\n", printed)[1:]
    biased, verdict = biased.strip().split("\n\n")
    assert verdict == "Everything that claims to be unbiased is, within 1e-09."
    rows = lambda part: [re.split(r"  +", line.strip()) for line in part.strip().splitlines()]
    names = [f"completions: {rule}" for rule in UNBIASED]
    assert [row[0] for row in rows(exact)] == [*names, "prompts: uniform", "prompts: dppo"]
    errors = [float(word) for row in rows(exact) for word in row[1:]]
    assert len(errors) == 7 * 5
    assert max(errors) < 1e-10

    names = [f"completions: {rule}" for rule in BIASED]
    assert all(re.search(rf"{name} +0\.\d\d \d\d° .*\n", biased) for name in names)
    own = re.search(r"prompts: uniform, own tokens(.*)", biased)[1]
    assert re.findall(r"(\d\.\d\d) +\d+°", own)[2] == "0.05"  # dapo; grpo's is 0
    assert re.findall(r"(\d\.\d\d) +\d+°", own)[0] == "0.00"


def test_the_angle_and_the_error_after_rescaling():
    """cppo's gradient may be twice as long as the full one: Adam does not see that."""
    full = torch.tensor([1.0, 1.0], dtype=torch.float64)
    assert proof.direction([(3.0 * full, full)]) == "0.00 0°"
    # (2, 0) is best halved: (1, 0), which is off by 1
    assert proof.direction([(torch.tensor([2.0, 0.0], dtype=torch.float64), full)]) == "1.00 45°"


def test_the_proofs_batches_are_like_those_of_a_run(folder):
    """Types and devices. Catches a rule that trains and crashes the proof, or the other way."""
    trainer = InFloat64(config.parse_config(flags(*folder("run"), method="pps")), step=2)
    gradients = Gradients(trainer)
    gradients.of([0.5] * 2)
    prompts = trainer.history.of(trainer.candidates(2))
    toys = (proof.toy_case().batch, proof.toy_prompts())
    for toy, real in zip(toys, (gradients.batches[0], prompts), strict=True):
        for name, value in vars(real).items():
            other = vars(toy)[name]
            assert type(other) is type(value), name
            if torch.is_tensor(value):
                assert (other.dtype, other.device) == (value.dtype, value.device), name
