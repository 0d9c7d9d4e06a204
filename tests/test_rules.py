"""Rules, losses and updates of a step, through train.py: what each does with the same batch."""

import math
from typing import NamedTuple

import pytest
import torch
import toy
from toy import assert_same, timeless

import config
import dppo
import models
import rollout
import sampler
import train
import update
from runtime import InputError, plot
from tasks import arithmetic

COMPLETION_RULES = (
    "none", "zero", "uniform", "dppo", "pps", "cppo", "cppo_batch", "pods", "dppo_floor",
)  # fmt: skip


class Backward(NamedTuple):
    """A backward pass: its arguments, its sums, and the norm of its gradient."""

    full: train.FullBatch
    keep: torch.Tensor
    weights: torch.Tensor
    sums: update.UpdateStats
    norm: float


class Recorder(train.Trainer):
    """Records prompt draws and backward passes, in order."""

    def __init__(self, *args):
        super().__init__(*args)
        self.events = []

    def prune_prompts(self, *args):
        self.events.append(super().prune_prompts(*args))
        return self.events[-1]

    def backward(self, full, keep, weights, *args):
        sums = super().backward(full, keep, weights, *args)
        gradient = [parameter.grad.flatten() for parameter in self.model.parameters()]
        norm = torch.cat(gradient).norm().item()
        self.events.append(Backward(full, keep, weights, sums, norm))
        return sums


def take_steps(trainer):
    """The rows of all steps."""
    return [trainer.step(step)[0] for step in range(1, trainer.cfg.steps + 1)]


@pytest.fixture
def start(policy_folder, tmp_path):
    """Build a Recorder, or another Trainer, with the toy reward."""

    def go(trainer=Recorder, **changes):
        args = toy.flags(policy_folder, str(tmp_path / "run"), **changes)
        return trainer(config.parse_config(args), toy.toy_reward)

    return go


# ---------------------------------------------------------------------------- the config


def test_method_is_a_choice_of_two_rules():
    """Catches a preset that overrides a rule that was given, and a rate for a rule without one."""
    for method, rules in (
        ("grpo", ("none", "none")), ("grpo_zero", ("none", "zero")), ("dppo", ("dppo", "dppo")),
        ("uniform", ("uniform", "uniform")), ("pps", ("pps", "pps")), ("cppo", ("none", "cppo")),
        ("dppo_floor", ("dppo_floor", "dppo_floor")), ("pods", ("none", "pods")),
    ):  # fmt: skip
        cfg = config.resolve(config.Config(method=method, model="folder", device="cpu"))
        assert (cfg.prompt_rule, cfg.completion_rule) == rules
        assert (cfg.group_size, cfg.loss, cfg.adam_beta2) == (16, "grpo", 0.999)
        rates = {"pps": 0.6, "dppo": 0.3, "uniform": 0.3, "dppo_floor": 0.3}
        assert cfg.prompt_prune_rate == rates.get(rules[0], 0.0)
        assert cfg.prompts_per_step == (64 if method == "pps" else 32)
        assert cfg.completion_prune_rate == (0.0 if rules[1] in ("none", "zero") else 0.7)
        assert (cfg.lr, cfg.lr_schedule) == (1e-6, "constant")
    assert config.resolve(config.Config(device="cpu")).method == "pps"
    cfg = config.resolve(config.Config(method="grpo", completion_rule="pps", device="cpu"))
    assert (cfg.prompt_rule, cfg.completion_rule) == ("none", "pps")
    assert config.resolve(cfg) == cfg, "a stored Config stays what it was"


def notes_of(**changes):
    """What a run with these flags says about itself before its first step."""
    cfg = config.parse_config(toy.flags("folder", "out", steps=1, **changes))
    return config.warnings(config.resolve(cfg))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"method": "cppo", "completion_prune_rate": 0.5}, "cppo is biased"),
        ({"method": "dppo_floor"}, "--prompt-rule dppo_floor is biased"),
        ({"loss": "gspo", "dtype": "bfloat16", "importance_cap": 0}, "--loss gspo clips at 0.0004"),
        ({"method": "pods", "completion_prune_rate": 0.5}, "--completion-rule pods is biased"),
        ({"method": "grpo_zero", "beta": 0.1}, "zero drops nothing with --beta above 0"),
    ],
)
def test_inexact_runs_say_so(changes, text):
    """Catches a pair of flags that dppo.py calls inexact and the run does not mention."""
    assert any(text in note for note in notes_of(**changes))


def test_exact_runs_have_no_notes(run, capsys):
    """Catches a warning about a run that is exact, and notes that are not printed."""
    exact = {"method": "pps", "beta": 0.1}
    assert not notes_of(**exact, prompt_rule="none", loss="dapo")
    assert not notes_of(**exact, minibatches=2)
    assert not notes_of(**exact, loss="cispo")
    assert not notes_of(method="cppo", completion_prune_rate=0, loss="gspo")
    run("run", steps=1, method="cppo", completion_prune_rate=0.5)
    assert "\nnote: --completion-rule cppo is biased" in capsys.readouterr().out


# ---------------------------------------------------------------------------- rules and losses


@pytest.mark.parametrize("rule", COMPLETION_RULES)
def test_every_rule_trains(run, rule):
    """With KL and mini-batches. Catches a rule that the loop cannot call."""
    options = {"completion_rule": rule, "minibatches": 2, "beta": 0.05}
    options |= {"completion_prune_rate": 0.5} if rule == "pods" else {}
    log = run("run", method="dppo_floor", prompt_prune_rate=0.3, **options)
    assert len(log) == 4
    for row in log:
        assert math.isfinite(row["loss"])
        assert row["kl"] >= 0
        assert 0 < row["kept/completions"] <= row["kept/prompts"] <= 1


@pytest.mark.parametrize("loss", dppo.LOSSES)
def test_every_loss_raises_the_reward(run, loss):
    """Thirty steps with pps, and three mini-batches, so that ratios leave 1.

    Catches a wrong sign, a loss that the update does not know, and a clip so wrong that nothing
    moves.
    """
    options = {"prompts_per_step": 12, "group_size": 8, "max_new_tokens": 2, "steps": 30}
    options |= {"minibatches": 3, "completion_prune_rate": 0.5, "lr": 2e-3}
    if loss == "gspo":  # two tokens are too short for 3e-4
        options |= {"eps_low": 0.2, "eps_high": 0.2}
    log = run("run", method="pps", loss=loss, **options)
    first, last = ([row["reward"] for row in part] for part in (log[:3], log[-3:]))
    assert sum(last) / 3 > sum(first) / 3 + 0.25
    assert loss == "cispo" or sum(row["clip_ratio/region_mean"] or 0 for row in log) > 0


def test_kl_reference_is_the_first_model(policy_folder, run, tmp_path):
    """KL is 0 before the first update and grows; after --resume the reference is not the
    checkpoint. Catches a reference that trains, or that is loaded from the checkpoint."""
    common = {"method": "grpo", "beta": 0.5, "lr": 3e-3, "save_every": 3}
    whole = run("whole", steps=6, **common)
    run("part", steps=3, **common)
    out = ["--out-dir", str(tmp_path / "part"), "--resume", "--steps"]
    toy.main([*out, "6"])
    assert whole[0]["kl"] == pytest.approx(0, abs=1e-9)
    assert whole[5]["kl"] > 1e-4
    assert_same(timeless(tmp_path / "whole"), timeless(tmp_path / "part"))
    model, _ = models.load_policy(policy_folder, "cpu")
    with torch.no_grad():
        model.model.norm.weight.mul_(1.1)
    model.save_pretrained(policy_folder)
    with pytest.raises(InputError, match=r"is not the model that the run in .* began with"):
        toy.main([*out, "8"])


class Truncating(Recorder):
    """Calls every third completion truncated."""

    def roll_out(self, *args, **limit):
        batch = super().roll_out(*args, **limit)
        batch.truncated = (torch.arange(6).expand(4, 6) % 3 == 0).double()
        return batch


@pytest.mark.parametrize("loss", ["grpo", "dapo"])
def test_masked_truncation(start, loss):
    """Truncated completions carry no loss and no token in DAPO's count; GRPO still divides by all
    sequences. Catches a mask after the count, and one that also changes the advantages."""
    trainer = start(Truncating, method="grpo_zero", loss=loss, mask_truncated=True, steps=2)
    take_steps(trainer)
    calls = [event for event in trainer.events if isinstance(event, Backward)]
    assert len(calls) == 2
    for full, keep, *_ in calls:
        masked = full.batch.truncated > 0
        assert (full.factor[masked] == 0).all()
        assert not keep[masked].any()
        assert (full.advantages.sum(dim=1).abs() < 1e-6).all()
        lengths = full.batch.lengths
        tokens = lengths[~masked].sum().item()
        factor = 1 / (lengths * 24) if loss == "grpo" else torch.full((4, 6), 1 / tokens).double()
        assert torch.allclose(full.factor[keep], factor[keep])


# ---------------------------------------------------------------------------- several updates


def test_backward_multiplies_weight_and_scale(start):
    """The gradient is update.accumulate_gradients' of scale x weights, for what is kept.

    Catches a factor that is left out, and gradients of an earlier update that are added.
    """
    trainer = start(method="pps", beta=0.1, prompt_prune_rate=0, completion_prune_rate=0.6)
    trainer.step(1)
    full, keep, weights, _, norm = trainer.events[-1]
    assert len(set(weights[keep].tolist())) > 2
    model = trainer.model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def gradient():
        return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])

    for _twice in range(2):
        sums = trainer.backward(full, keep, weights)
    found = gradient()
    optimizer.zero_grad()
    factor = (full.advantages, full.factor * weights, keep)
    options = {"cfg": trainer.cfg, "reference": trainer.reference}
    expected = update.accumulate_gradients(model, full.batch.rollouts, *factor, **options)
    assert torch.equal(gradient(), found)
    assert sums == expected
    assert norm > 0


def test_a_draw_sees_only_its_own_minibatch(start):
    """What one mini-batch keeps does not depend on the sizes and rewards of the other one.

    Catches sizes whose floor, or a budget, that counts completions of other mini-batches, whose
    update is at other parameters.
    """
    trainer = start(method="pps", prompt_prune_rate=0, minibatches=2, completion_prune_rate=0.6)
    trainer.step(1)
    full = next(event.full for event in trainer.events if isinstance(event, Backward))
    draw = lambda: trainer.prune_completions(full, 0, dppo.generator_for("draw"))
    keep, weights = draw()
    assert 0 < keep.sum() < 12
    other = full.minibatch == 1
    assert other.tolist() == [False, False, True, True]
    full.batch.energy[other] *= 1e6
    full.advantages[other] = 5.0
    full.cost[other] *= 10
    again = draw()
    assert torch.equal(again[0], keep)
    assert torch.equal(again[1], weights)
    assert not keep[other].any()


def test_minibatches(start):
    """Two updates a step: every prompt in one mini-batch, planned sizes as denominators, a draw of
    its own for each update.

    Catches a mini-batch's kept count, and everything in the first one.
    """
    rates = {"prompt_prune_rate": 0, "completion_prune_rate": 0.6}
    trainer = start(method="dppo", steps=6, minibatches=2, **rates)
    take_steps(trainer)
    calls = [event for event in trainer.events if isinstance(event, Backward)]
    assert len(calls) == 12
    for first, second in zip(calls[::2], calls[1::2], strict=True):
        assert not first.keep[2:].any(), "the first half of the window comes first"
        assert not second.keep[:2].any()
        for full, keep, weights, *_ in (first, second):
            planned = full.factor * full.batch.lengths * 2 * 6  # 2 prompts x 6 completions
            assert ((planned - 1).abs() < 1e-9).all()
            kept = weights[keep]
            assert ((kept == 1) | ((kept - 1 / 0.4).abs() < 1e-9)).all()


def assert_drawn(call, prompt_weights, minibatch, tokens):
    """Check a pruned gradient's factors: those that the rules may give in this half of the window.

    prompt_weights [K] are 0 for prompts that the draw dropped; minibatch [K] is 0 if a prompt may
    be kept here. `tokens` is the count for both halves that was known before the draw.
    """
    full, keep, weights, *_ = call
    w_q = prompt_weights[:, None]
    assert torch.allclose(full.factor, (2 * w_q / tokens).expand_as(full.factor), rtol=1e-9)
    mean = full.advantages.abs().mean(dim=1, keepdim=True)
    low = full.advantages.abs() < mean - 1e-6
    expected = torch.where(keep, torch.where(low, 2.5, 1.0), 0.0).double()
    assert torch.allclose(weights, expected, rtol=1e-9)
    assert not keep[minibatch != 0].any()
    assert not keep[prompt_weights == 0].any(), "a dropped prompt"


def assert_logged(row, updates, prompt_weights):
    """Work out a step's row again, from its two updates and the weights [K] of its prompts."""
    full = updates[0].full
    lengths, w_q = full.batch.lengths, prompt_weights[:, None]
    first = updates[0].sums
    sums = torch.tensor([call.sums for call in updates], dtype=torch.float64)
    total = update.UpdateStats(*sums.sum(dim=0).tolist())
    mass = sum((full.factor * call.weights * lengths).sum().item() for call in updates)
    assert row["loss"] == pytest.approx(total.loss / 2, rel=1e-9)
    assert row["kl"] == pytest.approx(total.kl / mass, rel=1e-9)
    assert row["clip_ratio/region_mean"] == pytest.approx(total.clipped / total.completion_tokens)
    assert row["tokens/trained"] == total.tokens
    assert row["pack/density"] == total.tokens / total.slots
    kept = sum(int(call.keep.sum()) for call in updates)
    assert row["kept/completions"] == pytest.approx(kept / 24)
    prompts = torch.tensor([[len(ids)] for ids in full.batch.rollouts.prompt_ids])
    cost = prompts + lengths
    kept_cost = sum((cost * call.keep).sum() for call in updates)
    assert row["kept/tokens"] == pytest.approx((kept_cost / (w_q * cost).sum()).item())
    both = torch.stack([call.weights for call in updates]) * w_q
    assert row["weight/ess"] == pytest.approx((both.sum() ** 2 / both.square().sum()).item())
    assert row["weight/max"] == pytest.approx(both.max().item())
    assert row["weight/prompt_max"] == w_q.max()
    if first.completion_tokens:
        gap = row["sampling/sampling_logp_difference/mean"]
        assert gap == pytest.approx(first.gap / first.completion_tokens)
        assert row["entropy/trained"] == pytest.approx(first.entropy / first.completion_tokens)
    assert row["grad_norm"] == pytest.approx(sum(call.norm for call in updates) / 2, rel=1e-5)


def test_several_updates_of_a_pruned_window(start, monkeypatch):
    """Two mini-batches, both levels, DAPO and KL: rows by place in the window, factors and the row
    of the log, each worked out again.

    Catches mini-batches by place among the kept prompts (which is biased), a token count that this
    step's draw decided, and sums logged as means.
    """
    monkeypatch.setattr(arithmetic, "TRAIN_PROBLEMS", 8)
    options = {"steps": 8, "minibatches": 2, "beta": 0.1}
    rates = {"prompt_prune_rate": 0.6, "completion_prune_rate": 0.6}
    trainer = start(method="dppo", loss="dapo", **options, **rates)
    rows, known = take_steps(trainer), None
    for step, row in enumerate(rows):
        drawn, one, two = trainer.events[3 * step :][:3]
        half, w_q = drawn.position // 2, drawn.weights  # of the window of 4
        found = (w_q[:, None] * one.full.batch.lengths).sum().item()
        tokens = known or found
        for place, call in enumerate((one, two)):
            assert_drawn(call, w_q, (half != place).int(), tokens)
        assert drawn.kept.all() or known, "the first step counts the un-pruned batch"
        known = tokens + (found - tokens) / 10
        assert_logged(row, (one, two), w_q)
    assert any(row["kept/prompts"] < 1 for row in rows)


@pytest.mark.parametrize(("loss", "first"), [("dapo", 1.0), ("cispo", 1.0), ("grpo", 0.5)])
def test_the_first_step_counts_tokens(start, loss, first):
    """It rolls out all prompts where later steps divide by a count; others prune at once. Catches a
    first denominator that its own draw decided."""
    rows = take_steps(start(method="pps", loss=loss, prompt_prune_rate=0.5, steps=3))
    assert [row["kept/prompts"] for row in rows] == [first, 0.5, 0.5]


def test_a_count_of_zero_tokens_is_not_known(start):
    """All completions of the first step may be masked. Catches a mean of 0 for which the next step
    takes its own estimate, although it prunes prompts."""
    trainer = start(method="pps", loss="dapo", steps=1)
    take_steps(trainer)
    full = trainer.events[-1].full
    trainer.mean_tokens, full.num_tokens = None, 0.0
    trainer.update_history(2, full)
    assert trainer.prune_prompts(torch.arange(4), 3, dppo.generator_for(0)).kept.all()


def test_unpruned_batches_divide_by_their_own_tokens(start):
    """Fails if a mean over steps, which lags, takes the place of a count that is exact."""
    trainer = start(method="grpo", loss="dapo", steps=1)
    take_steps(trainer)
    full = trainer.events[-1].full
    full.num_tokens *= 100
    trainer.update_history(2, full)
    assert torch.equal(trainer.full_batch(full.batch, full.chosen).factor, full.factor)


def test_minibatches_are_by_place_in_the_window(start):
    """Fails if they depend on which prompts were kept: here none of the second half."""
    trainer = start(method="grpo", minibatches=2, steps=1)
    take_steps(trainer)
    full = trainer.events[-1].full
    for places, wanted in (([0, 1, 1, 0], [0, 0, 0, 0]), ([3, 2, 2, 3], [1, 1, 1, 1])):
        chosen = full.chosen._replace(position=torch.tensor(places))
        assert trainer.full_batch(full.batch, chosen).minibatch.tolist() == wanted


# ---------------------------------------------------------------------------- the prompt level


class Learning(train.Trainer):
    """Records which prompts it learned from, by step."""

    def __init__(self, *args):
        super().__init__(*args)
        self.learned = []

    def update_history(self, step, full):
        self.learned.append(full.batch.prompts.tolist())
        super().update_history(step, full)


@pytest.mark.parametrize("rule", ["uniform", "pps"])
def test_fixed_number_of_prompts(start, monkeypatch, rule):
    """Exactly round((1 - r_q) Q) groups in every step, over several epochs and mini-batches; what
    was rolled out, and what the log says about it.

    Catches a draw over what is left, a history that is not updated, and an epoch that repeats.
    """
    monkeypatch.setattr(arithmetic, "TRAIN_PROBLEMS", 16)
    options = {"prompt_prune_rate": 0.4, "prompts_per_step": 4, "minibatches": 2, "steps": 12}
    trainer = start(Learning, method="grpo", prompt_rule=rule, **options)
    rows = take_steps(trainer)
    assert [row["kept/prompts"] for row in rows] == [0.5] * 12
    seen = set()
    for number, (row, prompts) in enumerate(zip(rows, trainer.learned, strict=True)):
        window = sampler.candidates(16, 4, 0, number + 1).tolist()
        halves = sorted(window.index(prompt) // 2 for prompt in prompts)
        assert halves == [0, 1], "one of each mini-batch"
        assert row["history/never_rolled_out"] == pytest.approx(1 - len(seen) / 16)
        skipped = 0.5 if number % 4 else math.nan
        assert row["history/skipped_this_epoch"] == pytest.approx(skipped, nan_ok=True)
        assert sum(row["history/pass_rates"]) == 16
        assert row["history/pass_rates"][sampler.UNSEEN] == 16 - len(seen)
        candidates, kept = (row[f"history/{name}_by_pass_rate"] for name in ("candidates", "kept"))
        assert (sum(candidates), sum(kept)) == (4, 2)
        assert all(few <= all_ for few, all_ in zip(kept, candidates, strict=True))
        largest = row["weight/prompt_max"]
        assert largest == 2 if rule == "uniform" else 1 < largest < 8
        seen |= set(prompts)
    assert rule == "uniform" or any(row["weight/prompt_max"] != 2 for row in rows)
    assert len(seen) > 8


def test_picture_of_a_run_that_has_just_begun(run, tmp_path, pictures):
    """runtime.plot at any time, also before the first step.

    Catches a picture that requires a step.
    """
    run("run", method="pps", group_size=3, steps=3, eval_every=3, eval_problems=3)
    (tmp_path / "run" / "run.png").unlink()
    plot.draw_run(tmp_path / "run")
    log = tmp_path / "run" / "log.jsonl"
    log.write_text(log.read_text().splitlines(keepends=True)[0])
    plot.draw_run(tmp_path / "run")
    row = {
        "history/candidates_by_pass_rate": [4, 0, 0, 0, 0, 0, 1],
        "history/kept_by_pass_rate": [1] + [0] * 6,
        "history/pass_rates": [6, 0, 0, 0, 0, 0, 2],
    }
    shares = plot.kept_by_pass_rate([row] * 20)
    assert shares[0][1:] == [0.25] * 19
    assert math.isnan(shares[0][0])
    assert shares[6][7:] == [0.0] * 13
    assert plot.pass_rates([row] * 20)[6] == [0.25] * 20


def test_every_group_has_random_numbers_of_its_own(start, monkeypatch):
    """In every step. Catches a step that samples again what was sampled before."""
    sample, seeds, keys = rollout.sample, [], []

    def record(*args, **options):
        seeds.append(options["seed"])
        keys.append(options["keys"])
        return sample(*args, **options)

    monkeypatch.setattr(rollout, "sample", record)
    take_steps(start(method="pps", group_size=3, steps=12, lr=3e-3))
    assert len(set(seeds)) == 12
    assert all(len(set(own)) == len(own) for own in keys)
