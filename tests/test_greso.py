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
from runtime import InputError
from tasks import arithmetic

EASY, HARD, LIVE = [1.0] * 8, [0.1] * 8, [1.0] * 4 + [0.0] * 4  # groups


def round_of(prompts, rewards):
    """A Round whose completions are of one token each."""
    ids = prompts[:, None, None].expand(*rewards.shape, 1)
    table = torch.zeros(rewards.shape)
    columns = (ids, -ids / 10, table, table, table.long() + 1, table.bool())
    rollouts = rollout.Rollouts([[prompt] for prompt in prompts.tolist()], *columns)
    return greso.Round(prompts, rollouts, rewards)


def test_streaks_by_hand():
    """The published thresholds and floor. Catches a streak that survives its end, a bound that is
    off (dead groups of mean 0.97 or 0.12 have no streak), and live groups beyond the bounds that
    have one."""
    live_and_easy, live_and_hard = [1.0] * 7 + [0.9], [0.0] * 7 + [0.5]
    groups = [EASY, HARD, LIVE, [0.97] * 8, [0.12] * 8, live_and_easy, live_and_hard]
    seen = greso.Greso(7)

    for _visit in range(3):
        seen.update(torch.arange(7), torch.tensor(groups))
    seen.p_hard = 0.25
    assert seen.keep_prob(torch.arange(7)).tolist() == [0.5**3, 0.25**3, 1, 1, 1, 1, 1]

    for _visit in range(17):
        seen.update(torch.tensor([0, 1]), torch.tensor([EASY, HARD]))
    assert seen.keep_prob(torch.tensor([0, 1])).tolist() == [0.01, 0.01], "explored at 1 %"

    seen.update(torch.tensor([0, 1]), torch.tensor([LIVE, LIVE]))
    assert seen.keep_prob(torch.arange(7)).tolist() == [1.0] * 7, "a live group ends the streak"


def test_exploration_by_hand():
    """The published steps and clamps: of twelve groups, one is easy, and so exactly on its target
    of 1/12, and one is hard. Catches targets that are swapped."""
    seen = greso.Greso(4)
    rewards = torch.tensor([EASY] + [HARD] + [LIVE] * 10)
    seen.adjust(rewards)
    assert (seen.p_easy, seen.p_hard) == pytest.approx((0.49, 0.51))
    for _step in range(200):
        seen.adjust(rewards)
    assert (seen.p_easy, seen.p_hard) == (0.05, 0.95)


def collect(seen, target, live_of):
    """(batch, weights, sizes of the rounds) of a step; live_of(prompts, number) are live groups."""
    sizes = []

    def roll_out(prompts, number):
        sizes.append(len(prompts))
        rewards = torch.zeros(len(prompts), 4)
        rewards[live_of(prompts, number), 0] = 1.0
        return round_of(prompts, rewards)

    def order(_epoch):
        return torch.arange(1000)

    batch, weights = seen.collect(roll_out, target, order, dppo.generator_for(0))
    return batch, weights, sizes


def two_of_five(prompts, _number):
    return torch.arange(len(prompts)) % 5 < 2


def test_rounds_until_enough_groups_are_live():
    """Surplus groups have weight 0. Catches prompts that are visited twice, training on dead
    groups, and an adjustment in the first epoch."""
    seen = greso.Greso(1000)
    batch, weights, sizes = collect(seen, 64, two_of_five)
    assert batch.prompts.tolist() == list(range(seen.cursor)), "in the epoch's order, none twice"
    assert sizes == [96, 76], "39 live groups, then 1.25 x 25 / (39 / 96)"
    alive = ~dppo.dead_groups(batch.rewards)
    assert torch.equal((weights > 0).nonzero(), alive.nonzero()[:64])
    assert weights.sum() == pytest.approx(64)
    assert (seen.p_easy, seen.p_hard) == (0.5, 0.5), "the first epoch only watches"

    seen.cursor = 2000
    collect(seen, 64, two_of_five)
    assert (seen.p_easy, seen.p_hard) != (0.5, 0.5)


@pytest.mark.parametrize(("live", "sizes"), [(0, [24] * 20), (15, [24, 4]), (16, [24])])
def test_live_groups_share_the_update(live, sizes):
    """Of the first round `live` groups are live, of the second none; sixteen are wanted. Catches a
    round more than needed if exactly enough are live, one that is smaller than a quarter of the
    target, a step that never ends, and weights that do not sum to the target."""
    first = lambda prompts, number: slice(0, live if number == 0 else 0)
    _, weights, rounds = collect(greso.Greso(1000), 16, first)
    used = min(live, 16)
    assert rounds == sizes
    assert (used * weights[:used]).tolist() == pytest.approx([16] * used)
    assert not weights[used:].any()


def test_a_round_has_no_prompt_twice():
    """Where an epoch ends within a round, a prompt may come up again: of ten, five are mostly
    skipped, and six are wanted. Catches two equal groups of a prompt."""
    seen = greso.Greso(10)
    seen.easy[5:] = 100
    chosen = seen.select(6, lambda _epoch: torch.arange(10), dppo.generator_for(0)).tolist()
    assert chosen[:5] == [0, 1, 2, 3, 4]
    assert chosen[5] >= 5
    assert seen.cursor > 10
    assert seen.cursor % 10 == chosen[5] + 1, "the next round goes on behind the last one chosen"


# ---------------------------------------------------------------------------- whole runs


def trainer_of(policy_folder, folder, **changes):
    options = {"method": "grpo", "group_size": 3} | changes
    args = toy.flags(policy_folder, str(folder), **options)
    return greso.GresoTrainer(config.parse_config(args), toy.toy_reward)


def test_it_trains_on_live_groups(policy_folder, tmp_path, monkeypatch):
    """Without weights, from several rounds: Q live groups, or as many as the last round left.
    Catches training on dead groups, a surplus that counts, a group with another's rollouts, rounds
    that roll out alike, and a rule that skips nothing."""
    monkeypatch.setattr(arithmetic, "TRAIN_PROBLEMS", 64)
    trainer = trainer_of(policy_folder, tmp_path, lr=3e-3, loss="dr_grpo")
    accumulate = mock.Mock(wraps=train.accumulate_gradients)
    sample = mock.Mock(wraps=rollout.sample)
    monkeypatch.setattr(train, "accumulate_gradients", accumulate)
    monkeypatch.setattr(rollout, "sample", sample)
    engine, rolled_out = trainer.sampling.engine, []
    for step in range(1, 21):
        row, _ = trainer.step(step)
        every = trainer.every
        _model, rollouts, _advantages, factor, keep = accumulate.call_args.args
        live = (~dppo.dead_groups(every.rewards)).nonzero()[:, 0]
        used = live[:4]
        prompts = [trainer.train_ids[index] for index in every.prompts[used].tolist()]
        assert rollouts.prompt_ids == prompts, "the first live groups, and no dead one"
        assert torch.equal(rollouts.logprobs, every.rollouts.logprobs[used])
        assert keep.all()
        weight = 4 / len(used)
        expected = torch.full_like(factor, weight / (4 * 3 * 6))  # Q groups, of 3, of 6 tokens
        assert torch.allclose(factor, expected)
        assert row["weight/max"] == pytest.approx(weight)
        assert row["kept/prompts"] == len(every.prompts) / 4 >= 1.5
        assert row["tokens/generated"] == every.rollouts.lengths.sum()
        assert row["reward"] == pytest.approx(every.rewards.mean().item()), "of all groups"
        assert not any(name.startswith(greso.OF_THE_DRAW) for name in row)
        rolled_out.append(len(every.prompts))
    assert len(set(rolled_out)) > 1, "rounds"
    assert trainer.greso.cursor > sum(rolled_out), "some were skipped"
    calls = sample.call_args_list
    seeds = [call.kwargs["seed"] for call in calls if call.args[2].engine is engine]
    assert len(set(seeds)) == len(seeds) > 20, "each round has other random numbers"


def test_resumed(run, tmp_path, monkeypatch):
    """Log, samples and weights as if never stopped. Catches streaks, probabilities or the cursor
    that are lost, and a run that another program continues."""
    monkeypatch.setattr(arithmetic, "TRAIN_PROBLEMS", 32)
    options = {"method": "grpo", "group_size": 3, "lr": 3e-3, "steps": 8, "save_every": 2}
    run("whole", trainer_class=greso.GresoTrainer, **options)
    run("stopped", trainer_class=greso.GresoTrainer, until=6, **options)
    with pytest.raises(
        InputError, match=r"has the trainer .*greso.GresoTrainer, not train.Trainer"
    ):
        run("stopped", resume=True, **options)
    run("stopped", trainer_class=greso.GresoTrainer, resume=True, **options)
    toy.assert_same(toy.timeless(tmp_path / "whole"), toy.timeless(tmp_path / "stopped"))


def test_too_few_prompts(policy_folder, tmp_path):
    """Catches a first round that never finds enough of them."""
    with pytest.raises(InputError, match="GRESO needs 514 prompts, and the data have 512"):
        trainer_of(policy_folder, tmp_path, prompts_per_step=257)
