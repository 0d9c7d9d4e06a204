"""
Deal what is kept to the ranks, so that an update gives all of them about the same work.

Pruning keeps more of what one rank has sampled than of what another has, and an update waits for
the busiest rank. Every rank knows the length and the factor of every sequence. So each computes the
same deal, and only token ids and log-probs travel. A sequence's gradient carries its own factor, so
it does not matter which rank computes it.

Letters: K prompts with G completions each, on all ranks; n sequences that an update trains on; T
tokens of the longest completion; C columns that travel with each token; N tokens.
"""

import heapq
from dataclasses import replace

import torch
import torch.distributed as dist

from runtime import ranks

PIECES = 8  # a group is parted if it is more than this share of a rank's work: 1 / PIECES


def exchange(rollouts, sampled_by, keep, lengths, prompt_ids, share: bool, hidden: int, old=None):
    """What this rank trains on: (rollouts [n, 1, T], places [n] in [K * G], old [n, 1, T]).

    rollouts [.., G, T] and old, its old log-probs or None, hold what this rank has sampled; the
    tables [K, G] cover all ranks: the rank that sampled each completion, what is kept, and lengths.
    prompt_ids are those of K prompts. share: whether a rank forwards a prompt once for all of its
    completions. Statistics such as the entropy do not travel; they stay those of the old rollouts.
    """
    G, T = keep.shape[1], rollouts.logprobs.shape[2]
    kept = keep.flatten().nonzero()[:, 0]  # [n of all ranks], places in [K * G]
    lengths, owner = lengths.flatten().long()[kept], sampled_by.flatten().long()[kept]
    prompts = [len(prompt_ids[place // G]) for place in kept.tolist()]
    rank, world = dist.get_rank(), dist.get_world_size()
    target = deal((kept // G).tolist(), prompts, lengths.tolist(), world, share, hidden)
    target = torch.tensor(target, dtype=torch.long)

    # From the rows of this rank to those of all ranks, in the order of the ranks and of `kept`.
    columns = [rollouts.completion_ids, rollouts.logprobs, *([] if old is None else [old])]
    table = torch.stack([column.flatten(0, 1).double() for column in columns], dim=-1)  # [., T, C]
    mine = (sampled_by == rank).any(dim=1)  # [K], the groups that have rows in `table`
    row = (mine.cumsum(dim=0) - 1)[:, None] * G + torch.arange(G)  # [K, G], of each completion
    leaving = (owner == rank).nonzero()[:, 0]
    leaving = leaving[target[leaving].argsort(stable=True)]
    inside = torch.arange(T) < lengths[leaving, None]
    count = lambda some, by: torch.bincount(by[some], lengths[some], world).long().tolist()
    coming = (target == rank).nonzero()[:, 0]
    coming = coming[owner[coming].argsort(stable=True)]
    sent = table[row.flatten()[kept[leaving]]][inside]  # [N, C]
    got = ranks.all_to_all(sent, count(leaving, target), count(coming, owner))

    order = coming.argsort()  # of `kept`, as if this rank had sampled them in this order
    found = torch.zeros(len(coming), T, len(columns), dtype=torch.float64)
    found[torch.arange(T) < lengths[coming, None]] = got
    ids, logprobs, *old = found[order, None].unbind(dim=-1)  # [n, 1, T] each
    places = kept[coming[order]]
    dealt = replace(
        rollouts,
        prompt_ids=[prompt_ids[place // G] for place in places.tolist()],
        completion_ids=ids.long(),
        logprobs=logprobs.to(rollouts.logprobs),
        lengths=lengths[coming[order], None],
    )
    return dealt, places, old[0].to(rollouts.logprobs) if old else None


def rollouts(expected: list[float], group_size: int, world: int, whole: bool) -> torch.Tensor:
    """The rank [K, G] that samples each completion: equally many on each, or as nearly as can be,
    and about as many of the K groups' expected tokens.

    Groups stay whole, but for the K mod R with the fewest tokens, which are laid end to end and cut
    into equal shares. With `whole` these stay whole, too.
    """
    K = len(expected)
    order = sorted(range(K), key=lambda group: -expected[group])
    parted = 0 if whole else K % world
    found = torch.zeros(K, group_size, dtype=torch.long)
    loads = [0.0] * world
    if parted:
        cut = torch.arange(parted * group_size) * world // (parted * group_size)
        found[order[K - parted :]] = cut.view(parted, group_size)
        for group in order[K - parted :]:
            for rank in found[group].tolist():
                loads[rank] += expected[group] / group_size
    most = -(-(K - parted) // world)  # groups of a rank
    least = [(load, rank, most) for rank, load in enumerate(loads)]
    heapq.heapify(least)
    for group in order[: K - parted]:
        load, rank, room = heapq.heappop(least)
        found[group] = rank
        if room > 1:
            heapq.heappush(least, (load + expected[group], rank, room - 1))
    return found


def deal(
    groups: list[int], prompts: list[int], completions: list[int], world: int, share: bool, d: int
) -> list[int]:
    """The rank of each sequence: pieces of work, largest first, each to the rank with the least
    (Graham 1969).

    groups are ascending; prompts and completions are in tokens; d is the hidden width. A piece is a
    sequence, or with `share` as many of a group as keep it below 1 / PIECES of a rank's work. A
    token costs 1 + half its context / 6 d, because attention's products grow with the context.
    """
    work = lambda tokens: tokens * (1.0 + tokens / (12.0 * d))
    sizes = [work(p + c) for p, c in zip(prompts, completions, strict=True)]
    limit = sum(sizes) / (world * PIECES)
    pieces, members = [], []  # the work of each piece, and its sequences
    for number, group in enumerate(groups):
        first = not members or groups[members[-1][-1]] != group
        more = sizes[number] - (0.0 if first else work(prompts[number]))
        if share and not first and pieces[-1] + more <= limit:
            pieces[-1] += more
            members[-1].append(number)
        else:
            pieces.append(sizes[number])
            members.append([number])
    loads = [(0.0, rank) for rank in range(world)]
    found = [0] * len(groups)
    for piece in sorted(range(len(pieces)), key=lambda piece: -pieces[piece]):
        load, rank = loads[0]
        heapq.heapreplace(loads, (load + pieces[piece], rank))
        for number in members[piece]:
            found[number] = rank
    return found
