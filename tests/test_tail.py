"""tail.py: the coin of a step, the groups that it drops, and that the gradient stays unbiased."""

import math
from collections import Counter

import pytest
import torch
from test_dppo import table
from test_unbiased import make  # noqa: F401  a fixture
from toy import assert_same, flags, timeless, toy_reward

import config
import dppo
import proof
import sampler
import train
from related import tail
from runtime import InputError

TAIL = {"rollout_checkpoint": 5, "rollout_prune_rate": 0.4}


@pytest.fixture
def start(policy_folder, tmp_path):
    """Build a Trainer with the toy reward; 24 prompts of 4 completions, of at most 6 tokens."""

    def go(kind=train.Trainer, **changes):
        changes = {"prompts_per_step": 24, "group_size": 4} | changes
        args = flags(policy_folder, str(tmp_path / "run"), **changes)
        return kind(config.parse_config(args), toy_reward)

    return go


class Coin:
    """A generator that draws this number, and is asked for a coin only."""

    def __init__(self, number):
        self.random = lambda: number


@pytest.mark.parametrize("engine", ["compact", "hf"])
def test_a_stopped_step_samples_the_same_beginnings(start, engine):
    """With a checkpoint, a rollout is the beginning of the one without, and both know the groups
    beyond it. Catches a limit that changes the random numbers, an end right at the checkpoint that
    counts as beyond, and an engine that ignores the limit."""
    trainer = start(engine=engine, **TAIL)
    trainer.sampling.eos_ids = [*range(85)]  # a third of the vocabulary
    prompts = trainer.candidates(1)
    whole = trainer.roll_out(prompts, 1, "rollout")
    short = trainer.roll_out(prompts, 1, "rollout", limit=5)
    beyond = (whole.lengths > 5).any(dim=1)
    assert 3 < beyond.sum() < 21
    assert (whole.lengths[~beyond] == 5).any(), "ends right at the checkpoint"
    assert torch.equal(tail.beyond(whole, trainer.cfg), beyond)
    assert torch.equal(tail.beyond(short, trainer.cfg), beyond)
    assert torch.equal(short.lengths, whole.lengths.clamp(max=5))
    assert torch.equal(short.rewards[~beyond], whole.rewards[~beyond])
    same = whole.rollouts.completion_ids[~beyond, :, :5] == short.rollouts.completion_ids[~beyond]
    inside = torch.arange(5) < whole.lengths[~beyond][..., None]
    assert same[inside].all()


def test_the_coin(start):
    """Its chance, limits and weights; none without a checkpoint. Catches a weight of 1 / r."""
    trainer = start(**TAIL)
    generator = dppo.generator_for(0)
    counts = Counter(tail.toss(trainer, generator) for _ in range(2000))
    stopped, other = tail.Toss(5, 0.0), tail.Toss(6, 1 / 0.6)
    assert set(counts) == {stopped, other}
    assert abs(counts[stopped] / 2000 - 0.4) < 0.04
    trainer.cfg = config.resolve(config.Config(device="cpu", max_new_tokens=6))
    assert tail.toss(trainer, None) == (6, 1.0)


@pytest.mark.parametrize("own_tokens", [False, True], ids=["exact", "twin"])
@pytest.mark.parametrize("rule", ["none", "pps"])
@pytest.mark.parametrize("loss", dppo.LOSSES)
def test_the_coin_is_unbiased(make, start, loss, rule, own_tokens):  # noqa: F811
    """Both outcomes of the coin, and all of pps after each, through a real Qwen3 with a KL term.
    dapo and cispo divide by tokens that were known before; by those of what is left they are
    biased. Catches weights that are not 1 / (1 - r), and groups that are dropped in part."""
    rewards = table([[1, 0, 0], [0, 1, 1], [1, 1, 0]])
    options = {"tokens": None if own_tokens else 20.0, "seed": 4}
    full = make(rewards, loss, 0.1, **options)
    trainer, r = start(**TAIL), TAIL["rollout_prune_rate"]
    batch = train.Batch(*[None] * 6, full.lengths, torch.zeros(3, 3), None, None, 0.0)
    everything = sampler.Selection(*[torch.ones(3, dtype=torch.float64)] * 3)
    assert tail.beyond(batch, trainer.cfg).tolist() == [False, True, True]
    expected = 0.0
    for number, chance in ((0.0, r), (0.99, 1 - r)):
        weight = tail.toss(trainer, Coin(number)).weight
        weights = tail.weigh(everything, batch, trainer.cfg, weight).weights
        case = make(rewards, loss, 0.1, prompt_weights=weights, **options)
        expected = expected + chance * proof.expected_gradient(case, rule, 0.5)
    error = proof.relative_error(expected, full.full())
    biased = own_tokens and dppo.LOSSES[loss].denominator == "batch tokens"
    assert (error > 1e-3) if biased else (error < 1e-10)


class Watched(train.Trainer):
    """Has many end tokens, and records each step's full batch."""

    def __init__(self, *args):
        super().__init__(*args)
        self.sampling.eos_ids = [*range(85)]
        self.fulls, self.seen = [], []
        update = self.history.update
        self.history.update = lambda *args: self.seen.append(args) or update(*args)

    def full_batch(self, *args):
        self.fulls.append(super().full_batch(*args))
        return self.fulls[-1]


@pytest.mark.parametrize(("method", "loss"), [("pps", "grpo"), ("pps", "dapo"), ("grpo", "dapo")])
def test_steps(start, method, loss):
    """Steps of both kinds: limits, weights, what the update and the history see, and the log.
    Catches a history that learns from unfinished groups, or forgets those of other steps, a coin
    in dapo's first step, which counts tokens, and a step that samples on."""
    trainer = start(Watched, method=method, loss=loss, steps=6, **TAIL)
    rows = [trainer.step(step)[0] for step in range(1, 7)]
    kinds = set()
    for number, (row, full, seen) in enumerate(
        zip(rows, trainer.fulls, trainer.seen, strict=True), 1
    ):
        beyond = tail.beyond(full.batch, trainer.cfg)
        assert 0 < beyond.sum() < len(beyond)
        stopped = bool((full.chosen.weights == 0).any())
        kinds.add(stopped)
        assert row["rollout/stopped"] == (beyond.double().mean().item() if stopped else 0.0)
        assert (full.batch.lengths <= (5 if stopped else 6)).all()
        assert torch.equal(full.chosen.weights == 0, beyond & stopped)
        assert (full.factor[beyond & stopped] == 0).all()
        learned = full.batch.prompts[~beyond] if stopped else full.batch.prompts
        assert torch.equal(seen[1], learned)
        assert seen[2].isnan().all() if stopped else (seen[2] == tail.shares(full.chosen)).all()
        assert row["tokens/generated"] == full.batch.lengths.sum()
        first = loss == "dapo" and number == 1
        assert loss == "grpo" or trainer.needs_mean_tokens
        if not stopped:
            ratio = full.chosen.weights[beyond].min() / full.chosen.weights[~beyond].min()
            assert first or ratio > 1.01
            assert not first or (full.chosen.weights == 1).all()
    assert kinds == {False, True}


def test_figures_of_the_log(start):
    """A policy that hardly moves: a step that finishes its groups logs what it would without a
    coin, and a step that stopped logs no means and teaches nothing of tokens. Catches means that
    count long groups twice, or leave them out, which would show too high rewards."""
    options = {"method": "grpo", "loss": "dapo", "steps": 6, "lr": 1e-12}
    plain, tossed = start(Watched, **options), start(Watched, **options, **TAIL)
    stopped, mean = 0, None
    for step in range(1, 7):
        expected, row = plain.step(step)[0], tossed.step(step)[0]
        names = ("reward", "reward_std", "completions/mean_length", "completions/clipped_ratio")
        if row["rollout/stopped"]:
            stopped += 1
            assert all(math.isnan(row[name]) for name in (*names, "kept/tokens"))
            assert tossed.mean_tokens == mean
        else:
            assert [row[name] for name in names] == [expected[name] for name in names]
            assert tossed.mean_tokens != mean
        mean = tossed.mean_tokens
    assert 0 < stopped < 5


def test_the_running_check_tosses(run):
    """With a coin and nothing else the pruned gradients of a check differ; without it they do not.
    Catches a check that forgets the coin."""
    options = {"method": "grpo", "steps": 3, "check_every": 1, "prompts_per_step": 8}
    variance = [row["check/variance"] for row in run("coin", **options, **TAIL)]
    assert max(variance) > 0.1
    assert all(row["check/variance"] < 1e-9 for row in run("none", **options))


def test_resume_repeats_the_coins(run, tmp_path):
    """A run that stops after its second step and goes on equals one that does not. Catches a coin
    that is not a function of the step."""
    options = {"method": "pps", "loss": "cispo", "steps": 5, "save_every": 1} | TAIL
    run("whole", **options)
    run("parts", **options, until=2)
    run("parts", **options, resume=True)
    assert_same(timeless(tmp_path / "whole"), timeless(tmp_path / "parts"))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rollout_checkpoint": 6}, "--rollout-checkpoint 6: must be at least 1 and below --max-"),
        ({"rollout_checkpoint": -1}, "--rollout-checkpoint -1: must be at least 1"),
        ({"rollout_prune_rate": 1.0}, "--rollout-prune-rate 1.0: must be 0 to below 1"),
        ({"rollout_prune_rate": -0.1}, "--rollout-prune-rate -0.1: must be 0"),
        ({"minibatches": 2}, "must be 0 with --minibatches 2 and --epochs 1: a step has one coin"),
        ({"epochs": 2}, "must be 0 with --minibatches 1 and --epochs 2: a step has one coin"),
        ({"method": "dynamic"}, "must be 0 with --prompt-rule dynamic, which chooses by"),
    ],
)
def test_refusals(start, changes, said):
    """Fails if a setting that biases, or that has no effect, is accepted."""
    with pytest.raises(InputError) as refused:
        start(**(TAIL | changes))
    assert said in str(refused.value)
