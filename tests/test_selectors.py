"""Rivals that select prompts by what they see: how they choose, and whole runs."""

import functools
import math
import random
import runpy
import sys
from unittest import mock

import pytest
import torch
import toy

import config
import dppo
import metrics
import rollout
import train
from related import selectors
from runtime import InputError
from tasks import arithmetic


def round_of(prompts, rewards):
    """A Round whose completions are of one token each."""
    ids = prompts[:, None, None].expand(*rewards.shape, 1)
    table = torch.zeros(rewards.shape)
    columns = (ids, -ids / 10, table, table, table.long() + 1, table.bool())
    rollouts = rollout.Rollouts([[prompt] for prompt in prompts.tolist()], *columns)
    return selectors.Round(prompts, rollouts, rewards)


def test_greso_streaks_by_hand():
    """The published thresholds and floor. Catches a streak that survives its end, a bound that is
    off (dead groups of mean 0.97 or 0.12 have no streak), and live groups beyond the bounds that
    have one."""
    live = [1.0] * 4 + [0.0] * 4
    groups = [[1.0] * 8, [0.1] * 8, live, [1.0] * 7 + [0.8], [0.97] * 8, [0.12] * 8]
    groups += [[1.0] * 7 + [0.9], [0.0] * 7 + [0.5]]  # live, of mean 0.9875 and 0.0625
    greso = selectors.Greso(8)
    for _visit in range(3):
        greso.update(torch.arange(8), torch.tensor(groups))
    assert greso.easy.tolist() == [3] + [0] * 7
    assert greso.hard.tolist() == [0, 3] + [0] * 6
    greso.p_hard = 0.25
    assert greso.keep_prob(torch.arange(8)).tolist() == [0.5**3, 0.25**3] + [1.0] * 6
    for _visit in range(17):
        greso.update(torch.tensor([0, 1]), torch.tensor(groups[:2]))
    assert greso.keep_prob(torch.tensor([0, 1])).tolist() == [0.01, 0.01], "explored at 1 %"
    greso.update(torch.tensor([0, 1]), torch.tensor([live, live]))
    assert greso.keep_prob(torch.arange(8)).tolist() == [1.0] * 8, "a live group ends the streak"


def test_greso_exploration_by_hand():
    """The published steps, clamps and batch formula. Catches targets that are swapped, and a last
    round that is not declared."""
    easy, hard, live = [1.0] * 8, [0.1] * 8, [1.0] * 4 + [0.0] * 4
    few, many = torch.tensor([live] * 10), torch.tensor([easy, *[live] * 7, hard, hard])
    greso = selectors.Greso(4)
    greso.adjust(many)  # a tenth is easy, a fifth hard: both above their targets of 1/12 and 1/6
    assert (greso.p_easy, greso.p_hard) == pytest.approx((0.49, 0.49))
    greso.adjust(few)
    assert (greso.p_easy, greso.p_hard) == pytest.approx((0.5, 0.5))
    greso.adjust(torch.tensor([easy, hard, hard, *[live] * 9]))  # exactly on both targets
    assert (greso.p_easy, greso.p_hard) == pytest.approx((0.49, 0.49))
    greso.adjust(torch.tensor([easy, hard, *[live] * 8]))  # a tenth each
    assert (greso.p_easy, greso.p_hard) == pytest.approx((0.48, 0.5))
    for rewards, limit in ((few, 0.95), (many, 0.05)):
        for _step in range(200):
            greso.adjust(rewards)
        assert (greso.p_easy, greso.p_hard) == (limit, limit)

    assert greso.next_batch(100, 0.5, 384, 64) == (250, True)
    assert greso.next_batch(10, 0.5, 384, 64) == (64, True)
    assert greso.next_batch(192, 0.375, 384, 64) == (384, True), "exactly the default"
    assert greso.next_batch(193, 0.375, 384, 64) == (384, False)
    assert greso.next_batch(200, 1.0, 384, 64) == (384, False), "no group was live"


def collect(greso, target, live_of):
    """(batch, weights, sizes of the rounds) of a step; live_of(prompts, number) are live groups."""
    sizes, order = [], lambda _epoch: torch.arange(1000)

    def roll_out(prompts, number):
        sizes.append(len(prompts))
        rewards = torch.zeros(len(prompts), 4)
        rewards[live_of(prompts, number), 0] = 1.0
        return round_of(prompts, rewards)

    return *greso.collect(roll_out, target, order, dppo.generator_for(0)), sizes


def test_greso_collects_in_rounds():
    """Until enough groups are live, or to the end of ROUNDS; surplus groups have weight 0. Catches
    prompts that are visited twice, training on dead groups, an endless step, and an adjustment in
    the first epoch."""
    greso = selectors.Greso(1000)
    two_of_five = lambda prompts, _number: torch.arange(len(prompts)) % 5 < 2
    batch, weights, sizes = collect(greso, 64, two_of_five)
    assert batch.prompts.tolist() == list(range(greso.cursor)), "in the epoch's order, none twice"
    assert sizes == [96, 76], "39 live groups, then 1.25 x 25 / (39 / 96)"
    alive = ~dppo.dead_groups(batch.rewards)
    assert torch.equal((weights > 0).nonzero(), alive.nonzero()[:64])
    assert weights.sum() == pytest.approx(64)
    _, weights, sizes = collect(greso, 64, lambda prompts, _number: prompts < 0)
    assert len(sizes) == selectors.Greso.ROUNDS
    assert weights.sum() == 0
    assert (greso.p_easy, greso.p_hard) == (0.5, 0.5), "the first epoch only watches"
    greso.cursor = 2000
    collect(greso, 64, two_of_five)
    assert (greso.p_easy, greso.p_hard) != (0.5, 0.5)


@pytest.mark.parametrize(
    ("live", "sizes"), [(1, [24, 24]), (5, [24, 24]), (15, [24, 4]), (16, [24]), (20, [24])]
)
def test_greso_shares_the_update(live, sizes):
    """Of the first round `live` groups are live, of the second none; sixteen are wanted. Catches a
    round more than needed if exactly enough are live, one that is smaller than a quarter of the
    target, and weights that do not sum to the target."""
    first = lambda prompts, number: slice(0, live if number == 0 else 0)
    _, weights, rounds = collect(selectors.Greso(1000), 16, first)
    assert rounds[:2] == sizes
    used = min(live, 16)
    assert weights[:used].tolist() == pytest.approx([16 / used] * used)
    assert not weights[used:].any()


def test_a_round_has_no_prompt_twice():
    """Where an epoch ends within a round, a prompt may come up again: of ten, five are mostly
    skipped, and six are wanted. Catches two equal groups of a prompt."""
    greso, order = selectors.Greso(10), lambda epoch: torch.arange(10)
    greso.easy[5:] = 100
    chosen = greso.select(6, order, dppo.generator_for(0)).tolist()
    assert chosen[:5] == [0, 1, 2, 3, 4]
    assert chosen[5] >= 5
    assert greso.cursor > 10
    assert greso.cursor % 10 == chosen[5] + 1, "the next round goes on behind the last one chosen"


def test_gathered_rounds_are_in_order():
    """Two prompts and one, as if they had been rolled out together, then in another order. Catches
    columns that change places, and rollouts that are not joined or not moved."""
    first = round_of(torch.tensor([65, 66]), torch.tensor([[1, 0], [2, 0]]))
    second = round_of(torch.tensor([68]), torch.tensor([[3, 0]]))
    whole = selectors.gather([first, second])
    part = selectors.gather([first, second], torch.tensor([2, 0]))
    for batch, prompts, rewards in ((whole, [65, 66, 68], [1, 2, 3]), (part, [68, 65], [3, 1])):
        assert batch.prompts.tolist() == prompts
        assert batch.rewards[:, 0].tolist() == rewards
        assert batch.rollouts.prompt_ids == [[prompt] for prompt in prompts]
        assert batch.rollouts.completion_ids[:, 1, 0].tolist() == prompts
        assert torch.equal(batch.rollouts.logprobs, -batch.rollouts.completion_ids / 10)


def mopps_step(mopps, rewards_of, target=2, seed=0):
    """A step of `target` prompts; rewards_of(prompts) are their groups' rewards [K, G]."""
    roll_out = mock.Mock(side_effect=lambda prompts, _: round_of(prompts, rewards_of(prompts)))
    shuffle = lambda _epoch: torch.arange(mopps.posterior.shape[1])
    batch, weights = mopps.collect(roll_out, target, shuffle, dppo.generator_for(seed))
    roll_out.assert_called_once_with(mock.ANY, 0)
    return batch.prompts.tolist(), weights


def test_mopps_posterior_by_hand():
    """Half of what was known, half a prior, and the group. Catches a decay of prompts that were not
    rolled out, one after the counts, right and wrong exchanged, and rewards of NaN that count."""
    mopps = selectors.Mopps(8)
    mopps.posterior[:, 5] = torch.tensor([1e6, 1e6])  # surely the nearest
    mopps.posterior[:, 2] = torch.tensor([8.0, 2.0])
    (first,), _ = mopps_step(mopps, lambda _: torch.tensor([[1.0, 1, 1, 0]]), target=1)
    expected = torch.ones(2, 8, dtype=torch.float64)
    expected[:, 2] = torch.tensor([8.0, 2.0])
    expected[:, 5] = torch.tensor([5e5 + 0.5 + 3, 5e5 + 0.5 + 1])
    assert (first, mopps.posterior.tolist()) == (5, expected.tolist())
    mopps_step(mopps, lambda _: torch.tensor([[0.0, 0, math.nan, 2]]), target=1)
    again = [0.5 * (5e5 + 3.5) + 0.5 + 1, 0.5 * (5e5 + 1.5) + 0.5 + 2]
    assert mopps.posterior[:, 5].tolist() == again


def test_mopps_takes_the_nearest_to_a_half():
    """Of each pool of 8 Q prompts in turn, of all of an epoch's before the next shuffle. Catches
    the farthest, a mean in place of a draw, a pool that is not the next one, the remainder of an
    epoch, and prompts that are not in the order of the pool."""
    rates = torch.tensor([0.9, 0.45, 0.1, 0.6, 0.2, 0.8, 0.95, 0.3] * 5)[:35]
    rates[9::16] = 0.48
    groups = lambda prompts: torch.zeros(len(prompts), 4, dtype=torch.float64)
    mopps = selectors.Mopps(35)
    for step in range(5):  # two pools of 16 in an epoch
        mopps.posterior[:] = 1e7 * torch.stack([rates, 1 - rates])
        prompts, weights = mopps_step(mopps, groups)
        assert prompts == [[1, 9], [17, 25]][step % 2]
        assert weights.tolist() == [1, 1]
    mopps.posterior[:] = 1.0  # nothing is known: any two
    drawn = {tuple(mopps_step(mopps, groups, seed=seed)[0]) for seed in range(20)}
    assert len(drawn) > 10


# ---------------------------------------------------------------------------- whole runs


def trainer_of(policy_folder, folder, method, **changes):
    args = toy.flags(policy_folder, str(folder), **({"method": "grpo", "group_size": 3} | changes))
    kind = selectors.METHODS[method]
    return selectors.SelectorTrainer(kind, config.parse_config(args), toy.toy_reward)


@pytest.mark.parametrize("method", ["greso", "dynamic"])
def test_refilling_rules_train_on_live_groups(policy_folder, tmp_path, monkeypatch, method):
    """Without weights, from several rounds: Q live groups, or as many as the last round left.
    Catches training on dead groups, a surplus that counts, rounds that roll out alike, and a rule
    that skips prompts although it should not, or the reverse."""
    monkeypatch.setattr(arithmetic, "TRAIN_PROBLEMS", 64)
    options = {"steps": 20, "lr": 3e-3, "loss": "dr_grpo"}
    trainer = trainer_of(policy_folder, tmp_path, method, **options)
    accumulate = mock.Mock(wraps=train.accumulate_gradients)
    sample = mock.Mock(wraps=rollout.sample)
    monkeypatch.setattr(train, "accumulate_gradients", accumulate)
    monkeypatch.setattr(rollout, "sample", sample)
    engine, rolled_out, prompts = trainer.sampling.engine, [], 0
    for step in range(1, 21):
        row, _ = trainer.step(step)
        every, (_model, _, advantages, factor, keep) = trainer.every, accumulate.call_args.args
        live = ~dppo.dead_groups(every.rewards)
        first = dppo.group_advantages(every.rewards[live][:4], "none")
        assert torch.equal(advantages, first), "the first live groups, and no dead one"
        assert keep.all()
        assert row["kept/prompts"] == len(live) / 4 >= 1.5
        assert row["kept/completions"] == len(keep) / 4
        assert row["tokens/generated"] == every.rollouts.lengths.sum()
        assert row["reward"] == pytest.approx(every.rewards.mean().item()), "of all groups"
        weight = 4 / len(keep)
        assert row["weight/prompt_max"] == row["weight/max"] == pytest.approx(weight)
        expected = torch.full_like(factor, weight / (4 * 3 * 6))  # Q groups, of 3, of 6 tokens
        assert torch.allclose(factor, expected)
        assert not any(name.startswith(selectors.OF_THE_DRAW) for name in row)
        prompts += len(live)
        rolled_out.append(len(live))
    assert len(set(rolled_out)) > 1, "rounds"
    assert (trainer.selector.cursor > sum(rolled_out)) == (method == "greso")
    calls = sample.call_args_list
    seeds = [call.kwargs["seed"] for call in calls if call.args[2].engine is engine]
    assert len(set(seeds)) == len(seeds) > 20, "each round has other random numbers"


def test_each_completion_is_rewarded_once(policy_folder, tmp_path, monkeypatch):
    """By a reward that would answer differently the second time, or with None, and an empty
    completion is not rewarded. Catches groups that are live for the selector and dead for the
    update, and rewards that are handed to the next completion."""
    monkeypatch.setattr(arithmetic, "TRAIN_PROBLEMS", 64)
    draw, asked, sample, row_of, tables = random.Random(0), [], rollout.sample, metrics.row, []

    def reward(text, _answer):
        asked.append(text)
        return draw.choice([0.0, 1.0, None])

    def with_an_empty_one(model, prompt_ids, sampling, **options):
        rollouts = sample(model, prompt_ids, sampling, **options)
        rollouts.lengths[0, 0] = 0
        return rollouts

    monkeypatch.setattr(rollout, "sample", with_an_empty_one)
    record = lambda cfg, **given: tables.append(given["rewards"]) or row_of(cfg, **given)
    monkeypatch.setattr(metrics, "row", record)
    trainer = trainer_of(policy_folder, tmp_path, "mopps")
    trainer.reward = reward
    for step in range(1, 6):
        asked.clear()
        trainer.step(step)
        rewards = trainer.every.rewards
        assert len(asked) == rewards.numel() - 1
        assert rewards[0, 0].isnan()
        assert torch.equal(tables[-1].nan_to_num(-1), rewards.nan_to_num(-1))


@pytest.mark.parametrize("method", ["greso", "mopps"])
def test_resumed(run, tmp_path, monkeypatch, method):
    """Log, samples and weights as if never stopped. Catches streaks, probabilities, the cursor or
    MoPPS's counts that are lost, and a run that another method continues."""
    monkeypatch.setattr(arithmetic, "TRAIN_PROBLEMS", 32)
    kind = lambda name: functools.partial(selectors.SelectorTrainer, selectors.METHODS[name])
    options = {"method": "grpo", "group_size": 3, "lr": 3e-3, "steps": 20, "save_every": 5}
    go = functools.partial(run, **options)
    go("whole", trainer_class=kind(method))
    go("stopped", until=15, trainer_class=kind(method))
    for other in (train.Trainer, kind("dynamic")):
        with pytest.raises(InputError, match="another program or version than this one trained"):
            go("stopped", resume=True, trainer_class=other)
    go("stopped", resume=True, trainer_class=kind(method))
    toy.assert_same(toy.timeless(tmp_path / "whole"), toy.timeless(tmp_path / "stopped"))


def test_the_command(policy_folder, tmp_path, monkeypatch, capsys):
    """As a program. Catches flags that do not reach train.py."""
    flags = toy.flags(policy_folder, str(tmp_path / "run"), method="dynamic", steps=1)
    monkeypatch.setattr(sys, "argv", ["selectors.py", *flags])
    monkeypatch.delitem(sys.modules, "related.selectors")
    runpy.run_module("related.selectors", run_name="__main__")
    assert "done: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("method", "changes", "complaint"),
    [
        ("mopps", {"prompts_per_step": 65}, "Mopps needs 520 prompts, and the data have 512"),
        ("greso", {"prompts_per_step": 257}, "Greso needs 514 prompts, and the data have 512"),
        ("mopps", {"minibatches": 2}, "Mopps needs one process, and --minibatches 1"),
        ("greso", {"prompt_rule": "uniform"}, "--prompt-rule uniform: Greso chooses the prompts"),
    ],
)
def test_refused(policy_folder, tmp_path, method, changes, complaint):
    with pytest.raises(InputError, match=complaint):
        trainer_of(policy_folder, tmp_path, method, **changes)
