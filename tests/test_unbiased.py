"""The proof: exact by enumeration through the real loss and model; planted mistakes must fail."""

import itertools
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

PPS = dppo.COMPLETION_RULES["pps"]

UNBIASED = ("nonzero", "uniform", "dppo", "pps", "adaptive")
BIASED = ("cppo", "cppo_batch", "pods", "dppo_floor")


@pytest.fixture
def make(make_policy, make_rollouts):
    """Build a proof.Case of a real Qwen3 in float64 through update.accumulate_gradients.

    Old log-probs are far enough away, and clips so narrow, that some tokens are clipped. `masked`
    completions carry no loss.
    """

    def make(rewards, loss, beta=0.0, *, masked=(), **changes):
        model, _ = make_policy(dtype=torch.float64)
        reference, _ = make_policy(seed=1, dtype=torch.float64)
        Q, G = rewards.shape
        rollouts = make_rollouts(model, Q, G, drift=0.3)
        changes |= {"eps_low": 0.05 if loss == "gspo" else None}
        changes |= {"eps_high": {"gspo": 0.05, "cispo": 0.2}.get(loss)}
        changes |= {"pack_tokens": 24}  # several packs of several segments
        cfg = config.resolve(config.Config(loss=loss, beta=beta, device="cpu", **changes))

        def gradient(advantages, scale, keep):
            model.zero_grad()
            update.accumulate_gradients(
                model, rollouts, advantages, scale, keep, cfg=cfg, reference=reference,
                old_logprobs=None if cfg.importance_cap else rollouts.logprobs,
            )  # fmt: skip
            return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])

        counts = torch.ones(Q, G, dtype=torch.float64)
        for place in masked:
            counts[place] = 0.0
        lengths = rollouts.lengths
        scale = counts * dppo.loss_scale(
            lengths, loss, num_sequences=Q * G, max_new_tokens=6,
            num_tokens=(counts * lengths).sum().item(),
        )  # fmt: skip
        advantages = dppo.group_advantages(rewards, dppo.LOSSES[loss].scale_rewards)
        per_token = torch.rand(Q, G, generator=torch.Generator().manual_seed(3))
        size = dppo.contribution_size(advantages, scale, per_token * lengths, beta)
        prompt_tokens = torch.tensor([[len(ids)] for ids in rollouts.prompt_ids])
        cost = prompt_tokens + lengths
        batch = dppo.Completions(advantages, rewards, cost, size)
        return proof.Case(gradient, batch, scale)

    return make


# ---------------------------------------------------------------------------- the proof


@pytest.mark.parametrize(
    ("loss", "beta", "cap"),
    [*itertools.product(dppo.LOSSES, (0.0, 0.1), (0.0,)), ("grpo", 0.1, 1.1), ("dapo", 0.1, 1.1)],
)
def test_completion_rules_are_unbiased(make, loss, beta, cap):
    """Every outcome of every unbiased rule, with a dead group and a masked completion, and with
    corrections of which some are above the cap.

    The packed gradient is first shown to be linear in the weights, by real backward passes. Catches
    a size of 0 although the term has a KL part or a reward, a strata order that loses a completion,
    points that miss an interval, weights that are not 1 / probability, and a ratio that depends on
    which other completions are kept.
    """
    rewards = table([[1, 0, 0], [0, 0, 0], [1, 1, 0.5]])
    case = make(rewards, loss, beta, masked=[(0, 2)], importance_cap=cap)
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
    full = case.full()
    for rule in UNBIASED:
        pruned = proof.expected_gradient(case, rule, 0.6, each=each)
        assert proof.relative_error(pruned, full) <= 1e-10, rule


# ---------------------------------------------------------------------------- the step


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
        trainer.history.update(trainer.candidates(2), scores)
        return trainer

    whole = trainer_with("whole")
    full = Gradients(whole).of([0.5] * 4)
    trainer = trainer_with("pruned", **rules, **rates)
    if trainer.needs_mean_tokens:
        rollouts = whole.sampling.engine.rollouts
        trainer.mean_tokens = (rollouts.lengths * ~rollouts.truncated).sum().item()
    assert (full.norm(dim=1) > 0).all()

    # The expectation of each update given the draws of the other, because that one may have moved
    # the parameters. (Nothing moves them here.)
    gradients = Gradients(trainer)
    expected = torch.zeros_like(full)
    for number, part in enumerate(trainer.candidates(2).chunk(2)):
        chances = 0.0
        prompts = middles(sampler.PROMPT_RULES[prompt_rule], 0.5, trainer.history.of(part))
        for start, prompt_chance in prompts:
            numbers = [0.5] * 4  # for the prompts of both updates, then for their completions
            numbers[number] = start
            gradients.of(numbers)
            for own, chance in middles(PPS, 0.6, gradients.batches[number]):
                numbers[2 + number] = own
                expected[number] += prompt_chance * chance * gradients.of(numbers)[number]
                chances += prompt_chance * chance
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


# ---------------------------------------------------------------------------- mistakes in the step

ACCUMULATE, COMPLETIONS, PROMPTS = (
    update.accumulate_gradients, dppo.prune_completions, sampler.prune_prompts
)  # fmt: skip


def advantages_of_the_kept(model, rollouts, advantages, factor, keep, **options):
    """Centred once more, by the mean of what was kept."""
    mean = (advantages * keep).sum(dim=1) / keep.sum(dim=1).clamp(min=1)
    return ACCUMULATE(model, rollouts, advantages - mean[:, None], factor, keep, **options)


def denominator_of_the_kept(model, rollouts, advantages, factor, keep, **options):
    """Each update has 2 of the step's 4 prompts, with 3 completions each."""
    return ACCUMULATE(model, rollouts, advantages, factor * 6 / keep.sum(), keep, **options)


def one_draw_of_completions():
    """The second update gets the random number of the first."""
    first = []

    def prune(name, rate, batch, generator):
        if len(generator.numbers) == 2:
            first.append(generator.numbers[0])
        else:
            generator = proof.Scripted(first.pop())
        return COMPLETIONS(name, rate, batch, generator)

    return prune


def one_draw_of_prompts(name, rate, history, prompts, generator, minibatches):
    generator.numbers[1] = generator.numbers[0]
    return PROMPTS(name, rate, history, prompts, generator, minibatches)


def weights_of_the_other_update():
    drawn = []

    def prune(name, rate, batch, generator):
        keep, weights = COMPLETIONS(name, rate, batch, generator)
        drawn.append(weights)
        fits = len(drawn) > 1 and drawn[-2].shape == weights.shape
        return keep, drawn[-2] if fits else weights

    return prune


MISTAKES = {
    "advantages of the kept": (update, "accumulate_gradients", advantages_of_the_kept),
    "denominator of the kept": (update, "accumulate_gradients", denominator_of_the_kept),
    "one draw of completions": (dppo, "prune_completions", one_draw_of_completions()),
    "one draw of prompts": (sampler, "prune_prompts", one_draw_of_prompts),
    "weights of the other": (dppo, "prune_completions", weights_of_the_other_update()),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_in_the_step_are_found(folder, monkeypatch, mistake):
    monkeypatch.setattr(*MISTAKES[mistake])
    assert step_error(folder, "grpo", "uniform") > 1e-3


# ---------------------------------------------------------------------------- faults of the draw

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


def test_the_proof_ends_with_an_error(monkeypatch):
    monkeypatch.setattr(dppo, *FAULTS["no weights"])
    monkeypatch.setattr(dppo, "LOSSES", {"grpo": dppo.LOSSES["grpo"]})
    with pytest.raises(SystemExit, match=r"NOT unbiased: completions: .*prompts: "):
        proof.main()


def test_the_printed_table(monkeypatch, capsys):
    """Catches a table that is not computed: each error agrees with the heading above it; and a rule
    that is in no section, or in the wrong one."""
    some = {loss: dppo.LOSSES[loss] for loss in ("grpo", "dapo")}
    monkeypatch.setattr(dppo, "LOSSES", some)
    proof.main()
    printed = capsys.readouterr().out
    exact, biased = re.split(r"\n(?:Claimed to be .*|Biased, .*\n.*)\n", printed)[1:]
    biased, verdict = biased.strip().split("\n\n")
    assert verdict == "Everything that claims to be unbiased is, within 1e-09."
    rows = lambda part: [re.split(r"  +", line.strip()) for line in part.strip().splitlines()]
    names = [f"completions: {rule}" for rule in UNBIASED]
    assert [row[0] for row in rows(exact)] == [*names, "prompts: uniform", "prompts: dppo"]
    errors = [float(word) for row in rows(exact) for word in row[1:]]
    assert len(errors) == 7 * 2
    assert max(errors) < 1e-10

    names = [f"completions: {rule}" for rule in BIASED]
    assert all(re.search(rf"{name} +0\.\d\d \d\d° .*\n", biased) for name in names)
