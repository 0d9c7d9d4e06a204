"""Rules, losses and updates of a step, through train.py: what each makes of the same batch."""

import itertools
import math

import pytest
import torch
from toy import assert_same, timeless

import arithmetic
import baselines
import config
import dppo
import plot
import rollout
import sampler
import train
from data import InputError
from update import SUMS


def test_packing_by_device(monkeypatch):
    """What is on by default only where it is measured to win."""
    assert config.resolve(config.Config(device="cpu")).share_prompts is True
    assert config.resolve(config.Config(device="cpu", share_prompts=False)).share_prompts is False
    monkeypatch.setattr(rollout, "choose_device", lambda _device: "cuda")
    cfg = config.resolve(config.Config())
    assert (cfg.share_prompts, cfg.gradient_checkpointing, cfg.dtype) == (False, False, "bfloat16")
    assert config.parse_config(["--share-prompts", "True"]).share_prompts is True
    assert {"share_prompts", "gradient_checkpointing", "pack_tokens"} < set(config.FREE_TO_CHANGE), "the same gradient"


def test_method_is_a_choice_of_two_rules():
    """Kills: a preset that overrides a rule that was given, a rate for a rule that has none."""
    for method, rules in config.METHODS.items():
        cfg = config.resolve(config.Config(method=method, device="cpu"))
        assert (cfg.prompt_rule, cfg.completion_rule) == rules
        assert cfg.prompt_prune_rate == {"none": 0.0, "greso": 0.0, "pps": 0.6}.get(rules[0], 0.3)
        assert cfg.prompts_per_step == (64 if method == "pps" else 32)
        assert cfg.completion_prune_rate == (0.0 if rules[1] in ("none", "zero") else 0.7)
    for model, rate in (("tiny", (6e-4, "linear")), ("folder", (1e-6, "constant"))):
        cfg = config.resolve(config.Config(model=model, device="cpu"))
        assert (cfg.method, cfg.lr, cfg.lr_schedule) == ("pps", *rate)
    cfg = config.resolve(config.Config(method="grpo", completion_rule="pps", device="cpu"))
    assert (cfg.prompt_rule, cfg.completion_rule) == ("none", "pps")
    assert config.resolve(cfg) == cfg, "a stored Config stays what it was"


@pytest.mark.parametrize("rule", ["none", *dppo.COMPLETION_RULES[1:], *baselines.COMPLETION_RULES])
def test_every_rule_trains(run, rule):
    """With KL, mini-batches and epochs; what is biased says so. Kills: a rule that the loop cannot call."""
    options = {"completion_rule": rule, "minibatches": 2, "epochs": 2, "beta": 0.05, "check_every": 2}
    log = run("run", method="dppo_floor", prompt_prune_rate=0.3, **options)
    assert len(log) == 4
    for row in log:
        assert math.isfinite(row["loss"])
        assert row["kl"] >= 0
        assert 0 < row["kept/completions"] <= row["kept/prompts"] <= 1
        assert ("check/bias2" in row) == (row["step"] % 2 == 0)


@pytest.mark.parametrize("loss", dppo.LOSSES)
def test_every_loss_raises_the_reward(run, loss):
    """Thirty steps with pps, two mini-batches and two epochs, so that ratios leave 1. Kills: a sign, a loss that the
    update does not know, a clip so wrong that nothing moves."""
    options = {"prompts_per_step": 6, "group_size": 8, "max_new_tokens": 2, "minibatches": 2, "epochs": 2}
    clip = {"eps_low": 0.2, "eps_high": 0.2} if loss == "gspo" else {}  # two tokens are too short for 3e-4
    log = run("run", method="pps", loss=loss, steps=30, lr=2e-3, completion_prune_rate=0.5, **clip, **options)
    first, last = ([row["reward"] for row in part] for part in (log[:3], log[-3:]))
    assert sum(last) / 3 > sum(first) / 3 + 0.25
    assert loss == "cispo" or sum(row["clip_ratio/region_mean"] or 0 for row in log) > 0


def test_minibatches_and_epochs(run, monkeypatch):
    """Four updates a step: every prompt in one mini-batch of each epoch, planned sizes as denominators, a draw of its
    own for each update. Kills: one mask for both epochs, a mini-batch's kept count, everything in the first one."""
    accumulate, calls = train.accumulate_gradients, []

    def record(model, rollouts, advantages, scale, keep, **options):
        calls.append((rollouts.lengths, scale, keep))
        return accumulate(model, rollouts, advantages, scale, keep, **options)

    monkeypatch.setattr(train, "accumulate_gradients", record)
    run("run", method="dppo", steps=6, minibatches=2, epochs=2, prompt_prune_rate=0, completion_prune_rate=0.6)
    assert len(calls) == 24
    differ = 0
    for step in range(6):
        masks = [keep for _, _, keep in calls[4 * step : 4 * step + 4]]
        assert not any(masks[n][2:].any() for n in (0, 2)), "the first mini-batch holds the first half of the window"
        assert not any(masks[n][:2].any() for n in (1, 3))
        differ += not torch.equal(masks[0], masks[2])
        for lengths, scale, keep in calls[4 * step : 4 * step + 4]:
            ratio = (scale * lengths * 2 * 6)[keep]  # 2 prompts x 6 completions are planned for one update
            assert ((ratio - 1).abs() < 1e-9).logical_or((ratio - 1 / 0.4).abs() < 1e-9).all()
    assert differ >= 3


def test_several_updates_of_a_pruned_window(run, monkeypatch):
    """Two mini-batches, two epochs, both levels, DAPO, KL and the running check: rows by place in the window, factors
    and the row of the log, each worked out from what was passed. Kills: mini-batches by place among the kept
    prompts (which is biased), sizes that look at other mini-batches, tokens of the kept, sums logged as means, a check
    without prompt draws of its own, or of the run's own rollouts."""
    events, sizes, norms = [], [], []
    accumulate, prune = train.accumulate_gradients, sampler.PromptHistory.prune
    contribution_size, clip = dppo.contribution_size, torch.nn.utils.clip_grad_norm_

    def record_prompts(history, *words, **options):
        events.append(prune(history, *words, **options))
        return events[-1]

    def record(model, rollouts, advantages, scale, keep, **options):
        sums = accumulate(model, rollouts, advantages, scale, keep, **options)
        events.append((rollouts, advantages, scale, keep, sums))
        return sums

    monkeypatch.setattr(sampler.PromptHistory, "prune", record_prompts)
    monkeypatch.setattr(train, "accumulate_gradients", record)
    monkeypatch.setattr(dppo, "contribution_size", lambda *words: sizes.append(words) or contribution_size(*words))
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", lambda *words: norms.append(clip(*words)) or norms[-1])
    monkeypatch.setattr(train, "CHECK_DRAWS", 2)
    monkeypatch.setattr(arithmetic, "TRAIN_PROBLEMS", 8)
    log = run("run", method="dppo", loss="dapo", beta=0.1, steps=8, minibatches=2, epochs=2, check_every=1,
              prompt_prune_rate=0.6, completion_prune_rate=0.6)  # fmt: skip
    assert len(events) == 8 * 10
    different_draws = 0

    def completion_weights(call, prompt_weights, minibatch):
        """[K, G] of one pruned gradient, from its factors; checked to be what the rule may give in that mini-batch."""
        rollouts, advantages, scale, keep, _ = call
        w_q = prompt_weights[:, None]
        there = w_q.expand_as(scale) > 0
        count = (w_q * rollouts.lengths).sum() / 2  # of the un-pruned batch, as far as known; half an update
        weights = torch.where(there, scale * count / torch.where(there, w_q, 1.0), 0.0)
        low = advantages.abs() < advantages.abs().mean(dim=1, keepdim=True) - 1e-6
        assert torch.allclose(weights, torch.where(keep, torch.where(low, 2.5, 1.0), 0.0).double(), rtol=1e-9)
        assert not keep[minibatch != 0].any() or not keep[minibatch != 1].any()
        assert not (keep & ~there).any(), "a dropped prompt"
        return weights

    for step, row in enumerate(log):
        full, one, one_pruned, other, other_pruned, (prompt_keep, prompt_weights), *updates = events[10 * step :][:10]
        window_half = torch.arange(4) // 2
        assert len(full[0].prompt_ids) == 4, "the check rolls out the whole window"
        assert torch.equal(full[3], (window_half == 0)[:, None].expand(4, 6))
        assert torch.allclose(full[2], full[3].double() * 2 / full[0].lengths.sum())
        for draw, call in ((one, one_pruned), (other, other_pruned)):
            completion_weights(call, draw[1], window_half)
            assert not call[3][window_half == 1].any()
        different_draws += not torch.equal(one[0], other[0])
        assert full[0] is not updates[0][0]

        half = prompt_keep.nonzero().squeeze(1) // 2  # of the window of 4
        w_q = prompt_weights[prompt_keep]
        rollouts = updates[0][0]
        ess, kept, mass = [], 0, 0.0
        for place, call in zip((0, 1, 0, 1), updates, strict=True):
            assert not call[3][half != place].any()
            ess.append(completion_weights(call, w_q, half))
            kept += int(call[3].sum())
            mass += (call[2] * rollouts.lengths).sum().item()
        rows_seen = [len(size[0]) for size in sizes[10 * step + 5 :][:5]]  # one to learn from, four to prune by
        assert rows_seen == [len(half), *(int((half == place).sum()) for place in (0, 1, 0, 1))]
        sums = torch.stack([update[4] for update in updates])
        first, total = (dict(zip(SUMS, part.tolist(), strict=True)) for part in (sums[0], sums.sum(dim=0)))
        ess = torch.stack(ess)
        assert row["loss"] == pytest.approx(total["loss"] / 4, rel=1e-9)
        assert row["kl"] == pytest.approx(total["kl"] / mass, rel=1e-9)
        assert row["kept/completions"] == pytest.approx(kept / 2 / 24)
        assert row["tokens/trained"] == total["tokens"]
        assert row["pack/density"] == total["tokens"] / total["slots"]
        cost = torch.tensor([[len(ids)] for ids in rollouts.prompt_ids]) + rollouts.lengths
        kept_cost = sum((cost * call[3]).sum() for call in updates)
        assert row["kept/tokens"] == pytest.approx((kept_cost / (2 * (w_q[:, None] * cost).sum())).item())
        both = ess * w_q[:, None]
        assert row["weight/ess"] == pytest.approx((both.sum() ** 2 / both.square().sum() / 2).item())
        assert row["weight/max"] == pytest.approx(both.max().item())
        assert row["weight/prompt_max"] == w_q.max()
        mean = lambda key, first=first: first[key] / first["completion_tokens"] if first["completion_tokens"] else None
        assert row["sampling/sampling_logp_difference/mean"] == pytest.approx(mean("gap"))
        assert row["entropy/trained"] == pytest.approx(mean("entropy"))
        assert row["grad_norm"] == pytest.approx(torch.stack(norms[4 * step : 4 * step + 4]).mean().item())
    assert different_draws > 1
    assert any(row["kept/prompts"] < 1 for row in log)


@pytest.mark.parametrize("loss", ["grpo", "dapo"])
def test_masked_truncation(run, monkeypatch, loss):
    """Completions cut off carry no loss and no token in DAPO's count; GRPO still divides by all sequences. Kills: a
    mask after the count, a mask that also changes the advantages."""
    accumulate, seen = train.accumulate_gradients, []

    def record(model, rollouts, advantages, scale, keep, **options):
        seen.append((rollouts, advantages, scale, keep))
        return accumulate(model, rollouts, advantages, scale, keep, **options)

    monkeypatch.setattr(train, "accumulate_gradients", record)
    sample = train.rollout.sample

    def cut(*words, **options):
        rollouts = sample(*words, **options)
        rollouts.truncated = torch.arange(6).expand(4, 6) % 3 == 0
        return rollouts

    monkeypatch.setattr(train.rollout, "sample", cut)
    run("run", method="grpo_zero", loss=loss, mask_truncated=True, steps=2)
    for rollouts, advantages, scale, keep in seen:
        assert (scale[rollouts.truncated] == 0).all()
        assert not keep[rollouts.truncated].any()
        assert (advantages.sum(dim=1).abs() < 1e-6).all()
        tokens = rollouts.lengths[~rollouts.truncated].sum().item()
        factor = 1 / (rollouts.lengths * 24) if loss == "grpo" else torch.full((4, 6), 1 / tokens)
        assert torch.allclose(scale[keep], factor[keep].double())


def test_kl_reference_is_the_first_model(policy_folder, run, tmp_path):
    """KL is 0 before the first update and grows; after --resume the reference is not the checkpoint. Kills: a reference
    that trains, or that is loaded from the checkpoint."""
    common = {"method": "grpo", "beta": 0.5, "lr": 3e-3, "save_every": 3}
    whole = run("whole", steps=6, **common)
    run("part", steps=3, **common)
    out = ["--out-dir", str(tmp_path / "part"), "--resume", "--steps", "6"]
    train.main(config.parse_config(out))
    assert whole[0]["kl"] == pytest.approx(0, abs=1e-9)
    assert whole[5]["kl"] > 1e-4
    assert_same(timeless(tmp_path / "whole"), timeless(tmp_path / "part"))
    model, _ = train.rollout.load_policy(policy_folder, "cpu")
    with torch.no_grad():
        model.model.norm.weight.mul_(1.1)
    model.save_pretrained(policy_folder)
    with pytest.raises(InputError, match=r"is not what the run in .* began with: --beta needs it"):
        train.main(config.parse_config([*out[:-1], "8"]))


def test_cppo_allocation_fills_the_update(run):
    """Three kept of six: twice the prompts, one un-pruned update's completions. Kills: a flag that does nothing."""
    for row in run("run", method="cppo", completion_prune_rate=0.5, cppo_allocation=True, steps=2):
        assert row["kept/completions"] == 0.5
        assert row["tokens/generated"] == round(row["completions/mean_length"] * 8 * 6)


def test_what_is_not_exact_is_said(run, capsys):
    """Kills: a pair that dppo.py calls inexact and the run does not mention."""
    number = itertools.count()
    for changes, words in (
        ({"method": "cppo", "completion_prune_rate": 0.5}, "cppo is biased"),
        ({"method": "dppo_floor"}, "--prompt-rule dppo_floor is biased"),
        ({"loss": "dapo"}, "--loss dapo estimates the un-pruned batch's tokens"),
        ({"loss": "gspo", "dtype": "bfloat16"}, "--loss gspo clips at 0.0004"),
        ({"epochs": 2}, "--epochs above 1 with pruned prompts is inexact"),
        ({"method": "greso"}, "--prompt-rule greso is biased"),
        ({"method": "dppo"}, "--prompt-rule dppo drops nothing in the first 128 steps, an epoch"),
        ({"method": "grpo_zero", "beta": 0.1}, "zero drops nothing with --beta above 0"),
    ):
        run(f"run{next(number)}", steps=1, **changes)
        assert any(words in line for line in capsys.readouterr().out.splitlines() if line.startswith("note: ")), words
    run("exact", steps=1, method="pps", prompt_rule="none", loss="dapo", epochs=2, beta=0.1)
    run("both levels", steps=1, method="pps", minibatches=2, beta=0.1)
    run("all kept", steps=1, method="cppo", completion_prune_rate=0, loss="gspo")
    assert "note:" not in capsys.readouterr().out


def test_running_check(run, tmp_path, monkeypatch):
    """It changes nothing of the run; with both levels pruned, bias stays within 3 standard errors of 0 for dppo and
    pps, and weights times 0.9 are caught at either level. Kills: a check that disturbs the draws, one draw for both
    estimates, a full gradient that is not, prompts that the check does not draw."""
    monkeypatch.setattr(arithmetic, "TRAIN_PROBLEMS", 24)
    common = {"steps": 40, "prompts_per_step": 4, "completion_prune_rate": 0.4, "prompt_prune_rate": 0.4, "lr": 1e-4}
    honest, found = dppo.ht_weights, {}
    for name, method, prompts, completions in (
        ("dppo", "dppo", 1, 1), ("pps", "pps", 1, 1), ("twin of prompts", "pps", 0.9, 1), ("twin", "pps", 1, 0.9)
    ):  # fmt: skip

        def planted(keep, keep_prob, prompts=prompts, completions=completions):
            return honest(keep, keep_prob) * (prompts if keep.dim() == 1 else completions)

        monkeypatch.setattr(dppo, "ht_weights", planted)
        log = run(name, method=method, check_every=1, save_every=40, **common)
        for key in ("check/bias2", "check/scale"):
            values = torch.tensor([row[key] for row in log if row[key] is not None])
            assert len(values) > 30
            found[name, key] = values.mean().item() / (values.std().item() / len(values) ** 0.5)
        assert sum(row["check/variance"] or 0 for row in log) > 1
    for name in ("dppo", "pps"):
        assert abs(found[name, "check/bias2"]) < 3
        assert abs(found[name, "check/scale"]) < 3
    assert found["twin", "check/scale"] < -3
    assert found["twin of prompts", "check/scale"] < -3
    monkeypatch.setattr(dppo, "ht_weights", honest)
    run("unchecked", method="pps", save_every=40, **common)
    plain = lambda folder: [{k: row[k] for k in row if not k.startswith("check/")} for row in timeless(folder)[0]]
    assert plain(tmp_path / "pps") == plain(tmp_path / "unchecked")
    for row in run("nothing", method="grpo", steps=3, check_every=1):
        assert {row[key] for key in ("check/bias2", "check/variance", "check/scale")} <= {0, None}


# ---------------------------------------------------------------------------- the prompt level


@pytest.mark.parametrize("rule", ["uniform", "pps"])
def test_fixed_number_of_prompts(run, monkeypatch, rule):
    """Exactly round((1 - r_q) Q) groups in every step, over several epochs and mini-batches; what was rolled out and
    what the log says of it. Kills: a draw over what is left, a history that is not updated, an epoch that repeats."""
    monkeypatch.setattr(arithmetic, "TRAIN_PROBLEMS", 16)
    rolled_out = []
    update = sampler.PromptHistory.update
    monkeypatch.setattr(sampler.PromptHistory, "update",
                        lambda history, step, prompts, *words: rolled_out.append(prompts.tolist())
                        or update(history, step, prompts, *words))  # fmt: skip
    log = run(
        "run", method="grpo", prompt_rule=rule, prompt_prune_rate=0.4, prompts_per_step=4, minibatches=2, steps=12
    )
    assert [row["kept/prompts"] for row in log] == [0.5] * 12
    for step, prompts in enumerate(rolled_out, 1):  # one of each mini-batch
        window = sampler.candidates(16, 4, 0, step).tolist()
        assert sorted(window.index(prompt) // 2 for prompt in prompts) == [0, 1]
    seen = set()
    for number, (row, prompts) in enumerate(zip(log, rolled_out, strict=True)):
        assert row["history/never_rolled_out"] == pytest.approx(1 - len(seen) / 16)
        assert row["history/skipped_this_epoch"] == (0.5 if number % 4 else None)
        assert sum(row["history/pass_rates"]) == 16
        assert row["history/pass_rates"][sampler.UNSEEN] == 16 - len(seen)
        assert sum(row["history/candidates_by_pass_rate"]) == 4
        assert sum(row["history/kept_by_pass_rate"]) == 2
        assert row["history/candidates_by_pass_rate"][0] >= row["history/kept_by_pass_rate"][0]
        assert row["weight/prompt_max"] == 2 if rule == "uniform" else 1 < row["weight/prompt_max"] < 8
        seen |= set(prompts)
    assert len(seen) > 8


def test_picture_of_a_run_that_has_just_begun(run, tmp_path):
    """plot.py at any time, also before the first step, and for a rule without a window. Kills: a step taken for
    granted, a history key of other rules."""
    run("run", method="greso", group_size=3, steps=3, eval_every=3, eval_problems=3)
    (tmp_path / "run" / "run.png").unlink()
    plot.draw_run(tmp_path / "run")
    first = (tmp_path / "run" / "log.jsonl").read_text().splitlines(keepends=True)[0]
    (tmp_path / "run" / "log.jsonl").write_text(first)
    plot.draw_run(tmp_path / "run")
    rows = [{"history/candidates_by_pass_rate": [4, 0, 0, 0, 0, 0, 1], "history/kept_by_pass_rate": [1] + [0] * 6,
             "history/pass_rates": [6, 0, 0, 0, 0, 0, 2]}] * 20  # fmt: skip
    shares = plot.kept_by_pass_rate(rows)
    assert shares[0][1:] == [0.25] * 19
    assert math.isnan(shares[0][0])
    assert shares[6][7:] == [0.0] * 13
    assert plot.pass_rates(rows)[6] == [0.25] * 20


@pytest.mark.parametrize("method", ["pps", "greso"])
def test_every_rollout_has_a_seed_of_its_own(run, monkeypatch, method):
    """Of every step, round and running check. Kills: rounds or checks that sample what was sampled before."""
    sample, seeds = train.rollout.sample, []
    monkeypatch.setattr(train.rollout, "sample", lambda *a, **k: seeds.append(k["seed"]) or sample(*a, **k))
    monkeypatch.setattr(arithmetic, "TRAIN_PROBLEMS", 64)
    run("run", method=method, group_size=3, steps=12, lr=3e-3, check_every=0 if method == "greso" else 1)
    assert len(seeds) > 12 if method == "greso" else len(seeds) == 24
    assert len(set(seeds)) == len(seeds)


def test_greso_trains_on_live_groups_until_it_has_enough(run, monkeypatch):
    """Unweighted, from several rounds, Q live groups or what the last round left of them: a mean over these. Kills:
    dead groups trained on, a surplus that counts, rounds that roll out alike."""
    monkeypatch.setattr(arithmetic, "TRAIN_PROBLEMS", 64)
    accumulate, calls = train.accumulate_gradients, []

    def record(model, rollouts, advantages, scale, keep, **options):
        calls.append((rollouts, advantages, scale, keep))
        return accumulate(model, rollouts, advantages, scale, keep, **options)

    monkeypatch.setattr(train, "accumulate_gradients", record)
    log = run("run", method="greso", group_size=3, steps=20, lr=3e-3, minibatches=2, loss="dr_grpo")
    for row, first, second in zip(log, calls[::2], calls[1::2], strict=True):
        rollouts, advantages, scale, _ = first
        keep = first[3] | second[3]
        trained = keep.any(dim=1)
        alive = advantages.abs().sum(dim=1) > 0
        assert torch.equal(trained.nonzero().squeeze(1), alive.nonzero().squeeze(1)[:4])
        assert row["kept/prompts"] == len(rollouts.prompt_ids) / 4 >= 1.5
        factor = 1 / (2 * 3 * 6) * 4 / int(trained.sum())  # half of Q groups, of 3, of 6 tokens
        assert torch.allclose((scale + second[2])[trained], torch.tensor(factor, dtype=torch.float64))
        texts = rollouts.completion_ids.flatten(1)
        assert len({tuple(text.tolist()) for text in texts}) == len(texts)
    assert len({row["kept/prompts"] for row in log}) > 1, "rounds"
