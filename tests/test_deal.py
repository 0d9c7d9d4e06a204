"""Work is divided evenly among ranks; every kept sequence arrives once, with its own log-probs."""

import pytest
import torch
import toy
from toy import in_processes

import config
from rollout import Rollouts
from runtime import deal, ranks
from train import Trainer


def test_pieces_by_hand():
    """Catches small pieces that come first, a tie that goes to a later rank, and a small group that
    is split although its prompt could be shared.

    Pieces go to the ranks largest first, each to the rank with the least work. The hidden width is
    so large that only tokens count.
    """
    alone = lambda completions, world: deal.deal(
        [*range(len(completions))], [0] * len(completions), completions, world, False, 10**9
    )
    assert alone([2, 3, 7, 2], 2) == [1, 1, 0, 1]
    assert alone([5, 5, 5], 3) == [0, 1, 2]
    assert alone([], 2) == []
    groups = [0, 0, 1, 1, *range(2, 34)]
    together = deal.deal(groups, [9] * 36, [1, 1, 1, 1, *[10] * 32], 2, True, 10**9)
    assert together[0] == together[1]
    assert together[2] == together[3]
    one_group = deal.deal([0] * 16, [9] * 16, [10] * 16, 4, True, 10**9)
    assert sorted(one_group) == sorted([*range(4)] * 4), "a large group is split"


def test_rollouts_by_hand():
    """Catches a largest group that does not come first, a rank with more groups than another, a
    split of another group than the smallest, and a part that is not counted as work."""
    expected = [9.0, 1.0, 5.0, 4.0, 2.0]
    two = deal.rollouts(expected, 4, 2, False)
    assert two.tolist() == [[0] * 4, [0, 0, 1, 1], [1] * 4, [1] * 4, [0] * 4]
    three = deal.rollouts(expected, 4, 3, False)
    assert three.tolist() == [[2] * 4, [1, 1, 2, 2], [1] * 4, [0] * 4, [0, 0, 0, 1]]
    whole = deal.rollouts(expected, 4, 3, True)
    assert whole.tolist() == [[0] * 4, [1] * 4, [1] * 4, [2] * 4, [2] * 4]
    found = deal.rollouts([9.0, 8.0, 7.0, 6.0], 3, 3, False)
    assert found.tolist() == [[0] * 3, [1] * 3, [2] * 3, [0, 1, 2]]
    assert deal.rollouts([1.0] * 5, 2, 1, False).tolist() == [[0, 0]] * 5
    assert deal.rollouts([1.0] * 5, 2, 5, False)[:, 0].tolist() == [0, 1, 2, 3, 4]
    assert deal.rollouts([], 2, 3, False).shape == (0, 2)


@pytest.mark.parametrize("world", [2, 3, 8, 64])
@pytest.mark.parametrize("whole", [False, True])
def test_rollouts_are_even(world, whole):
    """Catches ranks that sample unequal numbers of completions, more split groups than needed, and
    a rank that expects more tokens than the mean and one group."""
    draw = torch.Generator().manual_seed(world)
    expected = torch.randn(205, generator=draw).exp()
    found = deal.rollouts(expected.tolist(), 16, world, whole)
    counts = torch.bincount(found.flatten(), minlength=world)
    parted = int((found != found[:, :1]).any(dim=1).sum())
    assert parted <= (0 if whole else world - 1)
    assert whole or counts.max() - counts.min() <= 1
    loads = torch.bincount(found.flatten(), expected.repeat_interleave(16), minlength=world) / 16
    assert loads.max() <= loads.mean() + expected.max()


def test_rollouts_follow_the_history(policy_folder, tmp_path, monkeypatch):
    """Catches a division that does not use the tokens which the prompt history expects, and groups
    that are parted: engines sample whole ones."""
    flags = toy.flags(policy_folder, str(tmp_path), method="pps", prompts_per_step=8)
    trainer = Trainer(config.parse_config(flags), toy.toy_reward)
    seen, divide = [], deal.rollouts
    monkeypatch.setattr(deal, "rollouts", lambda *args: seen.append(args) or divide(*args))
    for step in range(1, 7):
        prompts = torch.arange(step, step + 4)
        expected = trainer.history.relative_tokens(prompts, step).tolist()
        trainer.roll_out(prompts, step, "test")
        assert seen.pop() == (expected, trainer.cfg.group_size, 1, True)
        trainer.step(step)
        seen.clear()
    assert len(set(expected)) > 1


def tokens(groups, prompts, completions, ranks, world: int, share: bool) -> list[int]:
    """Tokens that each rank forwards; with `share`, a prompt once for all of its completions."""
    found, seen = [0] * world, set()
    for group, prompt, completion, rank in zip(groups, prompts, completions, ranks, strict=True):
        found[rank] += completion - 1
        if not share or (rank, group) not in seen:
            found[rank] += prompt
        seen.add((rank, group))
    return found


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("world", [2, 8, 64])
def test_work_is_even(world, share):
    """Catches a rank that gets more work than the mean and one sequence, and groups that are split
    so much that sharing prompts saves nothing."""
    draw = torch.Generator().manual_seed(world)
    groups = torch.arange(100).repeat_interleave(torch.randint(1, 9, (100,), generator=draw))
    prompts = torch.randint(5, 40, (100,), generator=draw)[groups]
    lengths = torch.randint(1, 60, groups.shape, generator=draw)
    args = (groups.tolist(), prompts.tolist(), lengths.tolist())
    rank_of = torch.tensor(deal.deal(*args, world, share, 10**9))

    work = torch.bincount(rank_of, lengths, minlength=world)  # tokens that each rank forwards
    if share:
        forwarded = torch.stack([rank_of, groups, prompts]).unique(dim=1)  # once on each rank
    else:
        forwarded = torch.stack([rank_of, groups, prompts])
    work += torch.bincount(forwarded[0], forwarded[2], minlength=world)
    assert work.max() <= work.mean() + (prompts + lengths).max()
    if share and world == 2:
        of_one_rank = lengths.sum() + torch.stack([groups, prompts]).unique(dim=1)[1].sum()
        assert work.sum() < 1.05 * of_one_rank


def test_long_sequences_cost_more_than_their_tokens():
    """Catches work that is counted in tokens only. At a hidden width of 50, attention makes the
    sequence of 1,000 tokens more work than the three others together."""
    rank_of = lambda d: deal.deal([0, 1, 2, 3], [0] * 4, [1000, 700, 400, 200], 2, False, d)
    assert rank_of(10**9) == [0, 1, 1, 0]
    assert rank_of(50) == [0, 1, 1, 1]


def exchanged(with_old):
    """On each rank: groups 0, 1, .. are sampled by turns, and the fourth by all. Checks what each
    rank receives."""
    rank, world = ranks.start("cpu")
    K, G, T = 5, 4, 6
    draw = torch.Generator().manual_seed(3)
    lengths = torch.randint(0, T + 1, (K, G), generator=draw)
    keep = torch.rand(K, G, generator=draw) < 0.6
    keep[1] = False
    prompt_ids = [[100 + k] * (k + 1) for k in range(K)]
    sampled_by = (torch.arange(K) % world)[:, None].repeat(1, G)
    sampled_by[3] = torch.arange(G) * world // G
    mine = (sampled_by == rank).any(dim=1).nonzero()[:, 0]
    # a token's id says whose it is; its log-probs follow from it
    ids = torch.arange(K * G * T).view(K, G, T)
    inside = torch.arange(T) < lengths[..., None]
    own = ids[mine]
    rollouts = Rollouts(
        [prompt_ids[k] for k in mine.tolist()], own, (-own / 1000.0) * inside[mine],
        torch.zeros(own.shape[:2]), torch.zeros(own.shape[:2]), lengths[mine],
        torch.zeros(own.shape[:2], dtype=torch.bool),
    )  # fmt: skip
    old = 2 * rollouts.logprobs if with_old else None
    received, places, before = deal.exchange(
        rollouts, sampled_by, keep, lengths, prompt_ids, True, 64, old
    )
    assert torch.equal(received.lengths[:, 0], lengths.flatten()[places])
    assert received.prompt_ids == [prompt_ids[place // G] for place in places.tolist()]
    assert places.tolist() == sorted(places.tolist())
    inside = torch.arange(T) < received.lengths[:, :, None]  # [n, 1, T]
    expected = ids.flatten(0, 1)[places][:, None]
    assert torch.equal(received.completion_ids[inside], expected[inside])
    torch.testing.assert_close(received.logprobs, -expected / 1000.0 * inside)
    assert (before is None) == (not with_old)
    if with_old:
        assert torch.equal(before, 2 * received.logprobs)
    print(places.tolist(), keep.flatten().nonzero()[:, 0].tolist(), sep=";")


@pytest.mark.parametrize(("world", "with_old"), [(3, False), (6, True)])
def test_sequences_arrive_whole_and_once(world, with_old):
    """Catches a sequence that is lost, that arrives twice, or with another's tokens or log-probs.
    Of 6 ranks, the last one has sampled nothing."""
    printed = [line.split(";") for line in in_processes(world, exchanged, with_old)]
    got = sorted(place for places, _ in printed for place in eval(places))
    assert got == eval(printed[0][1])
