"""Rules, losses and updates of a step, through train.py: what each does with the same batch."""

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
    another model that gets tiny's learning rate, a thousand times too large."""
    for method, rules in (
        ("grpo", ("none", "none")), ("nonzero", ("none", "nonzero")), ("dppo", ("dppo", "dppo")),
        ("uniform", ("uniform", "uniform")), ("pps", ("none", "pps")),
        ("adaptive", ("none", "adaptive")), ("cppo", ("none", "cppo")),
        ("dppo_floor", ("dppo_floor", "dppo_floor")), ("pods", ("none", "pods")),
    ):  # fmt: skip
        cfg = config.resolve(config.Config(method=method, model="folder", device="cpu"))
        assert (cfg.prompt_rule, cfg.completion_rule) == rules
        assert (cfg.group_size, cfg.loss) == (8, "grpo")
        assert cfg.prompt_prune_rate == (0.0 if rules[0] == "none" else 0.3)
        no_rate = rules[1] in ("none", "nonzero", "adaptive")
        assert cfg.completion_prune_rate == (0.0 if no_rate else 0.7)
        assert (cfg.prompts_per_step, cfg.rest) == (64, dppo.REST)
        assert (cfg.lr, cfg.lr_schedule) == (1e-6, "constant")
        assert (cfg.scale_rewards, cfg.grad_clip) == ("group", 1.0)
    cfg = config.resolve(config.Config(device="cpu"))
    assert (cfg.method, cfg.model, cfg.rest) == ("adaptive", "tiny", dppo.REST)
    assert (cfg.prompts_per_step, cfg.lr, cfg.scale_rewards) == (16, 6e-4, "none")
    cfg = config.resolve(config.Config(method="grpo", completion_rule="pps", device="cpu"))
    assert (cfg.prompt_rule, cfg.completion_rule) == ("none", "pps")
    assert config.resolve(cfg) == cfg, "a stored Config stays what it was"


def notes_of(**changes):
    """What a run with these flags says about itself before its first step."""
    cfg = config.parse_config(toy.flags("folder", "out", steps=1, **changes))
    return config.warnings(config.resolve(cfg))


def test_only_inexact_runs_say_so(run, capsys):
    """Catches a warning about a run that is exact, and notes that are not printed."""
    exact = {"method": "pps", "prompt_rule": "uniform", "beta": 0.1}
    assert not notes_of(**exact | {"prompt_rule": "none"}, loss="dapo")
    assert not notes_of(**exact, minibatches=2)
    assert not notes_of(**exact, loss="cispo")
    assert not notes_of(method="cppo", completion_prune_rate=0, loss="gspo")
    run("run", steps=1, method="cppo", completion_prune_rate=0.5)
    assert "\nnote: --completion-rule cppo changes the expected gradient" in capsys.readouterr().out


# ---------------------------------------------------------------------------- rules and losses


def test_training_raises_the_reward(run):
    """Thirty steps with pps, and three mini-batches, so that ratios leave 1. Catches a step in the
    wrong direction, and a clip so wrong that nothing moves."""
    options = {"prompts_per_step": 12, "group_size": 8, "max_new_tokens": 2, "steps": 30}
    options |= {"minibatches": 3, "completion_prune_rate": 0.5, "lr": 2e-3}
    options |= {"prompt_rule": "uniform", "prompt_prune_rate": 0.6}
    log = run("run", method="pps", loss="grpo", **options)
    first, last = ([row["reward"] for row in part] for part in (log[:3], log[-3:]))
    assert sum(last) / 3 > sum(first) / 3 + 0.25
    assert sum(row["clip_ratio/region_mean"] or 0 for row in log) > 0


@pytest.mark.parametrize(("loss", "minibatches"), [("grpo", 1), ("dapo", 2)])
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


# ---------------------------------------------------------------------------- several updates


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


def test_several_updates_of_a_pruned_window(start, monkeypatch):
    """Two mini-batches, both levels, DAPO and KL. test_unbiased.py shows that the draws are exact;
    here are the count of tokens, and the row of the log, of which test_log.py has the figures.

    Catches a token count that this step's draw decided, or that forgets the steps before, an update
    that begins with the gradient of the one before, and sums logged as means.
    """
    monkeypatch.setattr(arithmetic, "TRAIN_PROBLEMS", 8)
    options = {"steps": 8, "minibatches": 2, "beta": 0.1}
    rates = {"prompt_prune_rate": 0.6, "completion_prune_rate": 0.6}
    trainer = start(method="dppo", loss="dapo", **options, **rates)
    rows, known = take_steps(trainer), None
    for row, seen in zip(rows, trainer.steps, strict=True):
        found = (seen.prompt_weights[:, None] * seen.lengths).sum().item()
        tokens = known or found
        assert torch.allclose(seen.scale, torch.tensor(2 / tokens).double(), rtol=1e-9)
        assert seen.kept.all() or known, "the first step counts the un-pruned batch"
        known = tokens + (found - tokens) / 10

        assert row["loss"] == pytest.approx(sum(one.sums.loss for one in seen.updates) / 2)
        kept = sum(int(one.keep.sum()) for one in seen.updates)
        assert row["kept/completions"] == pytest.approx(kept / 24)
        both = sum(one.factor * one.keep for one in seen.updates) / seen.scale
        assert row["weight/max"] == pytest.approx(both.max().item())
        assert row["weight/prompt_max"] == seen.prompt_weights.max()
        norms = [one.gradient.norm().item() for one in seen.updates]
        assert row["grad_norm"] == pytest.approx(sum(norms) / 2, rel=1e-5)
    assert any(row["kept/prompts"] < 1 for row in rows)


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
