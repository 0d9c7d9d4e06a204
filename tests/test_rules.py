"""Rules, losses and updates of a step, through train.py: what each does with the same batch."""

import math

import pytest
import torch
import toy

import config
import dppo
import rollout
from tasks import arithmetic


def take_steps(trainer):
    """The rows of all steps."""
    return [trainer.step(step)[0] for step in range(1, trainer.cfg.steps + 1)]


@pytest.fixture
def start(policy_folder, tmp_path):
    """Build a Recorder, or another Trainer, with the toy reward."""

    def go(trainer=toy.Recorder, **changes):
        args = toy.flags(policy_folder, str(tmp_path / "run"), **changes)
        return trainer(config.parse_config(args), toy.toy_reward)

    return go


# ---------------------------------------------------------------------------- the config


def test_method_is_a_choice_of_two_rules():
    """Catches a preset that overrides a rule that was given, a rate for a rule without one, and
    another model that gets tiny's learning rate, a thousand times too large; and a correction that
    is off where the sampler rounds differently."""
    for method, rules in (
        ("grpo", ("none", "none")), ("nonzero", ("none", "nonzero")), ("dppo", ("dppo", "dppo")),
        ("pps", ("none", "pps")), ("dppo_floor", ("dppo_floor", "dppo_floor")),
    ):  # fmt: skip
        cfg = config.resolve(config.Config(method=method, model="folder", device="cpu"))
        assert (cfg.prompt_rule, cfg.completion_rule) == rules
        assert cfg.prompt_prune_rate == (0.0 if rules[0] == "none" else 0.3)
        no_rate = rules[1] in ("none", "nonzero")
        assert cfg.completion_prune_rate == (0.0 if no_rate else 0.7)
        assert (cfg.lr, cfg.lr_schedule, cfg.loss) == (1e-6, "constant", "grpo")
    cfg = config.resolve(config.Config(device="cpu"))
    assert (cfg.method, cfg.model, cfg.rest) == ("adaptive", "tiny", dppo.REST)
    assert (cfg.prompts_per_step, cfg.lr, cfg.scale_rewards) == (16, 6e-4, "none")
    assert cfg.importance_cap == 0
    assert config.resolve(config.Config(device="cpu", dtype="bfloat16")).importance_cap == 2
    cfg = config.resolve(config.Config(method="grpo", completion_rule="pps", device="cpu"))
    assert (cfg.prompt_rule, cfg.completion_rule) == ("none", "pps")
    assert config.resolve(cfg) == cfg, "a stored Config stays what it was"


def test_learning_rate_schedules():
    """Fails if a schedule ends early or begins late, or if a run that ends within its warm-up
    decays."""
    cfg = config.Config(steps=14, warmup=5)
    rates = lambda: [config.learning_rate(cfg, step, 2.0) / 2 for step in range(1, cfg.steps + 1)]
    tenths = [n / 10 for n in range(10, 0, -1)]
    cosine = [(1 - math.cos(math.pi * left)) / 2 for left in tenths]
    for schedule, fall in (("constant", [1.0] * 10), ("linear", tenths), ("cosine", cosine)):
        cfg.lr_schedule = schedule
        assert rates() == pytest.approx([0.2, 0.4, 0.6, 0.8, *fall])
    cfg.steps = 4
    assert rates() == pytest.approx([0.2, 0.4, 0.6, 0.8])


def test_only_inexact_runs_say_so(run, capsys):
    """Catches a warning about a run that is exact, and notes that are not printed."""

    def notes_of(**changes):
        cfg = config.parse_config(toy.flags("folder", "out", steps=1, **changes))
        return config.warnings(config.resolve(cfg))

    exact = {"method": "pps", "prompt_rule": "uniform", "beta": 0.1, "minibatches": 2}
    assert not notes_of(**exact, loss="cispo")
    assert not notes_of(method="cppo", completion_prune_rate=0, loss="gspo")
    run("run", steps=1, method="cppo", completion_prune_rate=0.5)
    assert "\nnote: --completion-rule cppo changes the expected gradient" in capsys.readouterr().out


# ---------------------------------------------------------------------------- rules and losses


@pytest.mark.parametrize(("loss", "minibatches"), [("grpo", 2), ("dapo", 2)])
def test_masked_truncation(start, monkeypatch, loss, minibatches):
    """Truncated completions carry no loss and no token in DAPO's count; GRPO still divides by all
    sequences. Catches a mask after the count, one that also changes the advantages, one that only
    one of two updates has, and a mean over steps in place of a count that is exact."""
    sample = rollout.sample

    def truncating(*args, **options):
        rollouts = sample(*args, **options)
        rollouts.truncated = torch.arange(6).expand(4, 6) % 3 == 0
        rollouts.lengths = 1 + rollouts.completion_ids[..., 0] % 6  # each step has another count
        return rollouts

    monkeypatch.setattr(rollout, "sample", truncating)
    options = {"loss": loss, "mask_truncated": True, "minibatches": minibatches}
    trainer = start(method="nonzero", steps=2, **options)
    take_steps(trainer)
    for seen in trainer.steps:
        masked = seen.truncated > 0
        assert (seen.scale[masked] == 0).all()
        assert (seen.advantages.sum(dim=1).abs() < 1e-6).all()
        tokens = seen.lengths[~masked].sum().item()
        scale = minibatches / (seen.lengths * 24)
        if loss == "dapo":
            scale = torch.full((4, 6), minibatches / tokens).double()
        assert len(seen.updates) == minibatches
        for one in seen.updates:
            assert not one.keep[masked].any()
            assert torch.allclose(one.factor[one.keep], scale[one.keep])


def test_a_draw_sees_only_its_own_minibatch(start, monkeypatch):
    """Each gets a batch of its own prompts, whose sizes follow from them alone. A completion's cost
    has its prompt in it, and its size the weight of its prompt, because the noise that is added is
    that of the weighted term.

    Catches a floor of sizes, a budget or a rest that counts completions of other mini-batches,
    whose update is at other parameters, and costs without the prompt's tokens.
    """
    monkeypatch.setattr(arithmetic, "TRAIN_PROBLEMS", 8)
    monkeypatch.setattr(dppo, "SIZE_FLOOR", 0.9)  # so high that it acts
    prune, batches = dppo.prune_completions, []
    record = lambda *args: batches.append(args[2]) or prune(*args)
    monkeypatch.setattr(dppo, "prune_completions", record)
    options = {"prompt_rule": "dppo", "prompt_prune_rate": 0.5, "steps": 8, "loss": "dr_grpo"}
    options |= {"minibatches": 2, "completion_prune_rate": 0.6, "rest": 0.25}
    trainer = start(method="pps", **options)
    take_steps(trainer)
    assert any(len(set(seen.prompt_weights.tolist())) > 1 for seen in trainer.steps)
    assert len(batches) == 2 * len(trainer.steps)
    for number, batch in enumerate(batches):
        seen = trainer.steps[number // 2]
        rows = seen.kept.nonzero()[:, 0] // 2 == number % 2  # halves of the window of 4
        prompts = seen.taught.prompts[rows].tolist()
        tokens = torch.tensor([len(trainer.train_ids[q]) for q in prompts])
        assert torch.equal(batch.rewards, seen.rewards[rows])
        assert torch.equal(batch.advantages, seen.advantages[rows])
        assert torch.equal(batch.cost, tokens[:, None] + seen.lengths[rows])
        energy = seen.updates[0].rollouts.energy[rows]
        factor = (seen.prompt_weights[:, None] * seen.scale)[rows]
        own = dppo.contribution_size(batch.advantages, factor, energy, 0.0)
        torch.testing.assert_close(batch.size, own)
        assert batch.rest == 0.25


def test_a_count_of_zero_tokens_is_not_known(start, monkeypatch):
    """All completions of the first step may be masked. Catches a mean of 0 for which the next step
    takes its own estimate, although it prunes prompts."""
    sample, calls = rollout.sample, []

    def truncating(*args, **options):
        rollouts = sample(*args, **options)
        calls.append(1)
        rollouts.truncated = torch.full_like(rollouts.truncated, len(calls) == 1)
        return rollouts

    monkeypatch.setattr(rollout, "sample", truncating)
    options = {"loss": "dapo", "mask_truncated": True, "prompt_rule": "uniform"}
    rows = take_steps(start(method="pps", steps=3, prompt_prune_rate=0.5, **options))
    assert [row["kept/prompts"] for row in rows] == [1.0, 1.0, 0.5]


def test_the_count_of_tokens_of_pruned_prompts(start, monkeypatch):
    """DAPO's denominator is then a moving average of earlier steps. Catches one that stays what it
    was, and one that counts what was rolled out without the prompts' weights."""
    monkeypatch.setattr(arithmetic, "TRAIN_PROBLEMS", 8)
    rates = {"prompt_prune_rate": 0.6, "completion_prune_rate": 0.6}
    trainer = start(method="dppo", loss="dapo", steps=6, minibatches=2, **rates)
    take_steps(trainer)
    known = None
    for seen in trainer.steps:
        found = (seen.prompt_weights[:, None] * seen.lengths).sum().item()
        tokens = known or found
        assert torch.allclose(seen.scale, torch.tensor(2 / tokens).double(), rtol=1e-9)
        known = tokens + (found - tokens) / 10
    assert any(len(seen.prompt_weights) < 4 for seen in trainer.steps)
