"""Rivals that select prompts by what they see: how they choose, and whole runs."""

import math
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
import toy
from test_sampler import drifting_pass_rate

import config
import dppo
import rollout
import sampler
from related import selectors
from runtime import InputError
from tasks import arithmetic


def rounds_of(alive, generator):
    """A roll_out for Greso.collect whose groups are live with this chance, and its round sizes."""
    sizes = []

    def roll_out(prompts, _number):
        sizes.append(len(prompts))
        rewards = torch.zeros(len(prompts), 4)
        rewards[:, 0] = torch.from_numpy(generator.random(len(prompts)) < alive).float()
        return SimpleNamespace(prompts=prompts, mine=prompts, rewards=rewards)

    return roll_out, sizes


def test_greso_is_biased():
    """The means over the groups that it trains on, and over all that it rolled out, against the
    un-pruned mean: streaks keep revived prompts away, and refilling prefers live ones.

    Fails if GRESO is so mild that the comparison is unfair.
    """
    greso, generator = selectors.Greso(200), dppo.generator_for(0)
    order = lambda epoch: sampler.epoch_order(200, 0, epoch)
    trained, sampled, truth = [], [], []
    for step in range(1, 601):
        pass_rate = drifting_pass_rate(step)

        def roll_out(prompts, _number, pass_rate=pass_rate):
            uniform = torch.from_numpy(generator.random((len(prompts), 4)))
            solved = uniform < pass_rate[prompts, None]
            return SimpleNamespace(prompts=prompts, mine=prompts, rewards=solved.double())

        batch, weights, _ = greso.collect(roll_out, 20, order, generator)
        rewards = batch.rewards
        signal = dppo.group_advantages(rewards, "dr_grpo").square().sum(dim=1)
        trained.append((weights * signal).sum().item() / 20)
        sampled.append(signal.mean().item())
        expected = 4 * pass_rate * (1 - pass_rate) * 3 / 4  # the signal of a group of 4
        truth.append(expected.mean().item())
    for values in (trained, sampled):
        difference = torch.tensor(values) - torch.tensor(truth)
        assert difference.mean().abs() > 10 * difference.std() / math.sqrt(len(difference))


def test_greso_streaks_by_hand():
    """The published thresholds and floor.

    Catches a streak that survives its end, a bound that is off (dead groups of mean 0.97 or 0.12
    have no streak), and live groups beyond the bounds that have one.
    """
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
    for _step in range(100):
        greso.adjust(few)
    assert (greso.p_easy, greso.p_hard) == (0.95, 0.95)
    for _step in range(200):
        greso.adjust(many)
    assert (greso.p_easy, greso.p_hard) == (0.05, 0.05)

    assert greso.next_batch(100, 0.5, 384, 64) == (250, True)
    assert greso.next_batch(10, 0.5, 384, 64) == (64, True)
    assert greso.next_batch(192, 0.375, 384, 64) == (384, True), "exactly the default"
    assert greso.next_batch(193, 0.375, 384, 64) == (384, False)
    assert greso.next_batch(200, 1.0, 384, 64) == (384, False), "no group was live"


def test_greso_collects_in_rounds():
    """Rounds until enough groups are live; surplus ones have weight 0; if all are dead, it ends
    after ROUNDS.

    Catches prompts that are visited twice, training on dead groups, an endless step, and an
    adjustment in the first epoch.
    """
    greso, generator = selectors.Greso(1000), dppo.generator_for(0)
    order = lambda epoch: torch.arange(1000)
    roll_out, sizes = rounds_of(0.3, generator)
    batch, weights, places = greso.collect(roll_out, 64, order, generator)
    alive, prompts = ~dppo.dead_groups(batch.rewards), batch.prompts
    starts = torch.tensor([0, *sizes[:-1]]).cumsum(dim=0).repeat_interleave(torch.tensor(sizes))
    assert torch.equal(batch.mine - starts, prompts), "rows of a later round follow the first's"
    assert prompts.tolist() == list(range(len(prompts))), "in the epoch's order, none twice"
    assert greso.cursor == len(prompts)
    assert sizes[0] == 96
    assert all(16 <= size <= 96 for size in sizes)
    used = weights > 0
    assert torch.equal(used.nonzero(), alive.nonzero()[:64])
    assert places[used].tolist() == list(range(int(used.sum())))
    assert weights.sum() == pytest.approx(64)
    assert (greso.p_easy, greso.p_hard) == (0.5, 0.5), "the first epoch only watches"
    dead, sizes = rounds_of(0.0, generator)
    _, weights, _ = greso.collect(dead, 64, order, generator)
    assert len(sizes) == selectors.Greso.ROUNDS
    assert weights.sum() == 0
    greso.cursor = 2000
    greso.collect(roll_out, 64, order, generator)
    assert (greso.p_easy, greso.p_hard) != (0.5, 0.5)


@pytest.mark.parametrize(
    ("live", "sizes"), [(1, [24, 24]), (5, [24, 24]), (15, [24, 4]), (16, [24]), (20, [24])]
)
def test_greso_shares_the_update(live, sizes):
    """Of the first round `live` groups are live, of the second none; sixteen are wanted.

    Catches a round more than needed if exactly enough are live, one that is smaller than a quarter
    of the target, weights that do not sum to the target, and places that leave a mini-batch empty.
    """
    greso, found = selectors.Greso(100), []

    def roll_out(prompts, number):
        found.append(len(prompts))
        rewards = torch.zeros(len(prompts), 2)
        rewards[: live if number == 0 else 0, 0] = 1.0
        return SimpleNamespace(prompts=prompts, mine=prompts, rewards=rewards)

    order = lambda epoch: torch.arange(100)
    _, weights, places = greso.collect(roll_out, 16, order, dppo.generator_for(0))
    assert found[:2] == sizes
    used = min(live, 16)
    assert weights[:24].tolist() == pytest.approx([16 / used] * used + [0.0] * (24 - used))
    assert not weights[24:].any()
    assert places[:used].tolist() == [16 * rank // used for rank in range(used)]


def test_joined_rounds_are_in_order():
    """Two prompts and one, as if they had been rolled out together. Catches columns that change
    places, rows of this rank that are not moved, and rollouts that are not joined."""
    table = lambda *rows: torch.tensor(rows, dtype=torch.float64)

    def batch(ids, mine, rows, texts):
        rollouts = SimpleNamespace(prompt_ids=ids, logprobs=table(*rows) / 10)
        columns = {"rewards": table(*rows), "texts": texts}
        prompts, mine = torch.tensor([one[0] for one in ids]), torch.tensor(mine)
        return SimpleNamespace(prompts=prompts, mine=mine, rollouts=rollouts, **columns)

    first = batch([[65], [66, 67]], [0, 1], [[1, 0], [2, 0]], [["a", "b"], ["c", "d"]])
    second = batch([[68]], [0], [[3, 0]], [["e", "f"]])
    whole = selectors.join([first, second])
    assert whole.prompts.tolist() == [65, 66, 68]
    assert whole.mine.tolist() == [0, 1, 2]
    assert whole.rewards.tolist() == [[1, 0], [2, 0], [3, 0]]
    assert whole.texts == [["a", "b"], ["c", "d"], ["e", "f"]]
    assert whole.rollouts.prompt_ids == [[65], [66, 67], [68]]
    assert whole.rollouts.logprobs.tolist() == [[0.1, 0], [0.2, 0], [0.3, 0]]
    assert (first.mine.tolist(), first.texts) == ([0, 1], [["a", "b"], ["c", "d"]]), "untouched"


def mopps_step(mopps, rewards_of, target=2, seed=0, order=torch.arange):
    """A step of `target` prompts; rewards_of(prompts) are their groups' rewards [K, G]."""
    calls = []

    def roll_out(prompts, number):
        calls.append((prompts.tolist(), number))
        return SimpleNamespace(prompts=prompts, mine=prompts, rewards=rewards_of(prompts))

    shuffle = lambda _epoch: order(mopps.posterior.shape[1])
    found = mopps.collect(roll_out, target, shuffle, dppo.generator_for(seed))
    ((prompts, number),) = calls
    assert number == 0
    return prompts, *found


def test_mopps_posterior_by_hand():
    """Half of what was known, half a prior, and the group. Catches a decay of prompts that were not
    rolled out, one after the counts, right and wrong exchanged, and rewards of NaN that count."""
    mopps = selectors.Mopps(8)
    mopps.posterior[:, 5] = torch.tensor([1e6, 1e6])  # surely the nearest
    mopps.posterior[:, 2] = torch.tensor([8.0, 2.0])
    (first,), *_ = mopps_step(mopps, lambda _: torch.tensor([[1.0, 1, 1, 0]]), target=1)
    expected = torch.ones(2, 8, dtype=torch.float64)
    expected[:, 2] = torch.tensor([8.0, 2.0])
    expected[:, 5] = torch.tensor([5e5 + 0.5 + 3, 5e5 + 0.5 + 1])
    assert (first, mopps.posterior.tolist()) == (5, expected.tolist())
    mopps_step(mopps, lambda _: torch.tensor([[0.0, 0, math.nan, 2]]), target=1)
    again = [0.5 * (5e5 + 3.5) + 0.5 + 1, 0.5 * (5e5 + 1.5) + 0.5 + 2]
    assert mopps.posterior[:, 5].tolist() == again


def test_mopps_takes_the_nearest_to_a_half():
    """Of each pool of 8 Q prompts in turn, of all of an epoch's before the next shuffle.

    Catches the farthest, a mean in place of a draw, a pool that is not the next one, the remainder
    of an epoch, and prompts that are not in the order of the pool.
    """
    rates = torch.tensor([0.9, 0.45, 0.1, 0.6, 0.2, 0.8, 0.95, 0.3] * 5)[:35]
    rates[9::16] = 0.48
    groups = lambda prompts: torch.zeros(len(prompts), 4, dtype=torch.float64)
    mopps = selectors.Mopps(35)
    for step in range(5):  # two pools of 16 in an epoch
        mopps.posterior[:] = 1e7 * torch.stack([rates, 1 - rates])
        prompts, batch, weights, places = mopps_step(mopps, groups)
        assert prompts == batch.prompts.tolist() == [[1, 9], [17, 25]][step % 2]
        assert (weights.tolist(), places.tolist()) == ([1, 1], [0, 1])
    mopps.posterior[:] = 1.0  # nothing is known: any two
    drawn = {tuple(mopps_step(mopps, groups, seed=seed)[0]) for seed in range(20)}
    assert len(drawn) > 10


def test_mopps_is_biased():
    """The mean signal over what it trains on, against the un-pruned mean. Fails if MoPPS is so mild
    that the comparison is unfair."""
    mopps, generator = selectors.Mopps(200), dppo.generator_for(0)
    order = lambda epoch: sampler.epoch_order(200, 0, epoch)
    trained, truth = [], []
    for step in range(1, 301):
        pass_rate = drifting_pass_rate(step)

        def roll_out(prompts, _number, pass_rate=pass_rate):
            uniform = torch.from_numpy(generator.random((len(prompts), 4)))
            solved = uniform < pass_rate[prompts, None]
            return SimpleNamespace(prompts=prompts, mine=prompts, rewards=solved.double())

        part, weights, _ = mopps.collect(roll_out, 10, order, generator)
        signal = dppo.group_advantages(part.rewards, "dr_grpo").square().sum(dim=1)
        trained.append((weights * signal).sum().item() / 10)
        truth.append((4 * pass_rate * (1 - pass_rate) * 3 / 4).mean().item())
    difference = torch.tensor(trained) - torch.tensor(truth)
    assert difference.mean() > 10 * difference.std() / math.sqrt(len(difference))


# ---------------------------------------------------------------------------- whole runs


def trainer_of(policy_folder, folder, method, **changes):
    args = toy.flags(policy_folder, str(folder), **({"method": "grpo", "group_size": 3} | changes))
    return selectors.METHODS[method](config.parse_config(args), toy.toy_reward)


@pytest.mark.parametrize("method", ["greso", "dynamic"])
def test_refilling_rules_train_on_live_groups(policy_folder, tmp_path, monkeypatch, method):
    """Without weights, from several rounds: Q live groups, or as many as the last round left.

    Catches training on dead groups, a surplus that counts, rounds that roll out alike, and a rule
    that skips prompts although it should not, or the reverse.
    """
    monkeypatch.setattr(arithmetic, "TRAIN_PROBLEMS", 64)
    options = {"steps": 20, "lr": 3e-3, "minibatches": 2, "loss": "dr_grpo"}
    trainer, updates = trainer_of(policy_folder, tmp_path, method, **options), []
    backward = trainer.backward
    trainer.backward = lambda *args: updates.append(args) or backward(*args)
    sample, seeds = rollout.sample, []
    record = lambda *args, **options: seeds.append(options["seed"]) or sample(*args, **options)
    monkeypatch.setattr(rollout, "sample", record)
    rows = [trainer.step(step)[0] for step in range(1, 21)]
    assert len(set(seeds)) == len(seeds) > 20, "each round has random numbers of its own"
    for row, first, second in zip(rows, updates[::2], updates[1::2], strict=True):
        full, (one, other) = first[0], (first[1], second[1])
        trained = (one | other).any(dim=1)
        alive = full.advantages.abs().sum(dim=1) > 0
        assert torch.equal(trained.nonzero().squeeze(1), alive.nonzero().squeeze(1)[:4])
        assert row["kept/prompts"] == len(full.batch.prompts) / 4 >= 1.5
        assert row["reward"] == pytest.approx(full.batch.rewards.mean().item()), "of all groups"
        weight = 4 / int(trained.sum())
        assert row["weight/prompt_max"] == row["weight/max"] == pytest.approx(weight)
        factor = weight / (2 * 3 * 6)  # half of Q groups, of 3, of 6 tokens
        expected = torch.full_like(full.factor, factor)[trained]
        assert torch.allclose(full.factor[trained], expected)
        assert {"history/pass_rates", "history/never_rolled_out"} < row.keys()
        assert not set(selectors.OF_THE_DRAW) & row.keys()
    assert len({row["kept/prompts"] for row in rows}) > 1, "rounds"
    rolled_out = sum(round(4 * row["kept/prompts"]) for row in rows)
    assert (trainer.selector.cursor > rolled_out) == (method == "greso")


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


@pytest.mark.parametrize("method", ["greso", "mopps"])
def test_resumed(policy_folder, tmp_path, monkeypatch, method):
    """Log, samples and weights as if never stopped. Catches streaks, probabilities, the cursor or
    MoPPS's counts that are lost, and a run that goes on as one of another method."""
    monkeypatch.setattr(arithmetic, "TRAIN_PROBLEMS", 32)

    def go(name, steps, *more, kind=selectors.METHODS[method]):
        args = toy.flags(policy_folder, str(tmp_path / name), method="grpo", group_size=3)
        args += ["--lr", "3e-3", "--steps", str(steps), "--save-every", "5", *more]
        toy.train.main(config.parse_config(args), reward=toy.toy_reward, trainer_class=kind)
        return toy.timeless(tmp_path / name)

    whole = go("whole", 20)
    go("part", 15)
    for other in (toy.train.Trainer, selectors.DynamicTrainer):
        with pytest.raises(InputError, match="another program than this one trained the run"):
            go("part", 20, "--resume", kind=other)
    toy.assert_same(whole, go("part", 20, "--resume"))


def test_the_command(policy_folder, tmp_path):
    """As a program. Catches flags that do not reach train.py, too few prompts, and a prompt rule
    that would be ignored."""
    args = toy.flags(policy_folder, str(tmp_path / "run"), method="dynamic", steps=1)
    command = [sys.executable, "-m", "related.selectors", *args]
    done = subprocess.run(command, cwd=toy.ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "done: " in done.stdout
    with pytest.raises(InputError, match=r"--method mopps: its pool is 8 x 65 prompts of 512, too"):
        trainer_of(policy_folder, tmp_path, "mopps", prompts_per_step=65)
    with pytest.raises(InputError, match=r"--method greso: its first round is 1.5 x 257 prompts"):
        trainer_of(policy_folder, tmp_path, "greso", prompts_per_step=257)
    with pytest.raises(InputError, match="--prompt-rule pps: Greso chooses the prompts"):
        trainer_of(policy_folder, tmp_path, "greso", prompt_rule="pps")
