"""GRESO (related/greso.py): which prompts it skips, how many rounds it takes, and whole runs."""

from unittest import mock

import pytest
import torch
import toy

import config
import dppo
import rollout
import train
from related import greso
from tasks import arithmetic

EASY, HARD, LIVE = [1.0] * 8, [0.1] * 8, [1.0] * 4 + [0.0] * 4  # groups


def test_streaks_by_hand():
    """The published thresholds and floor. Catches a streak that survives its end, a bound that is
    off (dead groups of mean 0.97 or 0.12 have no streak), and a live group with one."""
    groups = [EASY, HARD, LIVE, [0.97] * 8, [0.12] * 8, [1.0] * 7 + [0.9], [0.0] * 7 + [0.5]]
    seen = greso.Greso(7)
    for _visit in range(3):
        seen.update(torch.arange(7), torch.tensor(groups))
    seen.p_hard = 0.25
    assert [*map(seen.keep_prob, range(7))] == [0.5**3, 0.25**3, 1, 1, 1, 1, 1]
    for _visit in range(17):
        seen.update(torch.tensor([0, 1]), torch.tensor([EASY, HARD]))
    assert [*map(seen.keep_prob, range(2))] == [0.01, 0.01], "explored at 1 %"
    seen.update(torch.tensor([0, 1]), torch.tensor([LIVE, LIVE]))
    assert [*map(seen.keep_prob, range(7))] == [1] * 7, "a live group ends the streak"


def test_exploration_by_hand():
    """The published steps and clamps: of twelve groups, one is easy, and so exactly on its target
    of 1/12, and one is hard. Catches targets that are swapped."""
    seen, rewards = greso.Greso(4), torch.tensor([EASY] + [HARD] + [LIVE] * 10)
    seen.adjust(rewards)
    assert (seen.p_easy, seen.p_hard) == pytest.approx((0.49, 0.51))
    for _step in range(200):
        seen.adjust(rewards)
    assert (seen.p_easy, seen.p_hard) == (0.05, 0.95)


def collect(seen, target, num_live):
    """(prompts, places of the used groups, sizes of the rounds) of a step. In its rounds, so many
    groups are live, the last ones."""
    sizes = []

    def roll_out(prompts):
        rewards = torch.zeros(len(prompts), 4)
        rewards[len(prompts) - num_live[len(sizes)] :, 0] = 1.0
        sizes.append(len(prompts))
        return rewards

    order = lambda _epoch: torch.arange(1000)
    prompts, _rewards, used = seen.collect(roll_out, target, order, dppo.generator_for(0))
    return prompts, used, sizes


def test_rounds_until_enough_groups_are_live():
    """Catches prompts that are visited twice, dead or surplus groups that are used, and an
    adjustment in the first epoch."""
    seen = greso.Greso(1000)
    prompts, used, sizes = collect(seen, 64, [48, 20])
    assert prompts.tolist() == list(range(seen.cursor)), "in the epoch's order, none twice"
    assert sizes == [96, 40], "48 live groups, then 1.25 x 16 / (48 / 96)"
    assert used.tolist() == [*range(48, 96), *range(96 + 20, 96 + 36)]
    assert (seen.p_easy, seen.p_hard) == (0.5, 0.5), "the first epoch only watches"
    seen.cursor = 2000
    collect(seen, 64, [48, 20])
    assert (seen.p_easy, seen.p_hard) != (0.5, 0.5)


def test_a_round_has_no_prompt_twice():
    """Where an epoch ends within a round, a prompt may come up again: of ten, five are mostly
    skipped, and six are wanted. Catches two equal groups of a prompt."""
    seen = greso.Greso(10)
    seen.easy[5:] = 100
    chosen = seen.select(6, lambda _epoch: torch.arange(10), dppo.generator_for(0)).tolist()
    assert chosen[:5] == [0, 1, 2, 3, 4]
    assert chosen[5] >= 5
    assert seen.cursor % 10 == chosen[5] + 1, "the next round goes on behind the last one chosen"


# ---------------------------------------------------------------------------- whole runs


def trainer_of(policy_folder, folder, **changes):
    options = {"method": "grpo", "group_size": 3} | changes
    args = toy.flags(policy_folder, str(folder), **options)
    return greso.GresoTrainer(config.parse_config(args), toy.toy_reward)


def test_it_trains_on_live_groups(policy_folder, tmp_path, monkeypatch):
    """Without weights, from several rounds. Catches training on dead groups, a surplus that counts,
    a group with another's rollouts, rounds that roll out alike, and figures of the used groups."""
    monkeypatch.setattr(arithmetic, "TRAIN_PROBLEMS", 64)
    trainer = trainer_of(policy_folder, tmp_path, lr=3e-3, loss="dr_grpo")
    accumulate = mock.Mock(wraps=train.accumulate_gradients)
    sample = mock.Mock(wraps=rollout.sample)
    monkeypatch.setattr(train, "accumulate_gradients", accumulate)
    monkeypatch.setattr(rollout, "sample", sample)
    engine, rolled_out = trainer.sampling.engine, 0
    for step in range(1, 17):
        row, _ = trainer.step(step)
        seen, every, rewards = trainer.every
        _model, rollouts, _advantages, factor, keep = accumulate.call_args.args
        used = (~dppo.dead_groups(rewards)).nonzero()[:4, 0]
        assert torch.equal(rollouts.logprobs, every.logprobs[used])
        prompts = [trainer.train_ids[index] for index in seen[used].tolist()]
        assert rollouts.prompt_ids == prompts
        assert keep.all()
        assert torch.allclose(factor, torch.full_like(factor, 1 / (4 * 3 * 6)))  # Q x G x tokens
        assert row["kept/prompts"] == len(seen) / 4 >= 1.5
        assert row["reward"] == pytest.approx(rewards.mean().item()), "of all groups"
        assert row["tokens/generated"] == every.lengths.sum()
        rolled_out += len(seen)
    assert trainer.greso.cursor > rolled_out, "some were skipped"
    calls = [call for call in sample.call_args_list if call.args[2].engine is engine]
    seeds = {call.kwargs["seed"] for call in calls}
    assert len(seeds) == len(calls) > 16, "each round has other random numbers"


def test_resumed(run, tmp_path, monkeypatch):
    """Log, samples and weights as if never stopped. Catches streaks, probabilities or the cursor
    that are lost."""
    monkeypatch.setattr(arithmetic, "TRAIN_PROBLEMS", 32)
    options = {"method": "grpo", "group_size": 3, "lr": 3e-3, "steps": 8, "save_every": 2}
    run("whole", trainer_class=greso.GresoTrainer, **options)
    run("stopped", trainer_class=greso.GresoTrainer, until=6, **options)
    run("stopped", trainer_class=greso.GresoTrainer, resume=True, **options)
    toy.assert_same(toy.timeless(tmp_path / "whole"), toy.timeless(tmp_path / "stopped"))
