"""The same updates of a whole model and of a sharded one, side by side, on the ranks of a group."""

import copy
import itertools

import torch
import torch.distributed as dist

import config
import models
import packing
import rollout
import update
from runtime import ranks

K, G, T = 4, 3, 6


def make_rollouts(rank, seed):
    """A rank's share of at most K prompts with G completions, and log-probs of no model; in the
    second update only the first rank has prompts."""
    generator = torch.Generator().manual_seed(100 * seed + rank)
    prompts = K if rank == 0 or seed != 1 else 0
    draw = lambda *shape, low=0, high=256: torch.randint(low, high, shape, generator=generator)
    prompt_ids = [draw(int(draw(1, low=1, high=5))).tolist() for _ in range(prompts)]
    nothing = torch.zeros(prompts, G)
    logprobs = -3 - torch.rand(prompts, G, T, generator=generator)
    lengths = draw(prompts, G, low=1, high=T + 1)
    completion_ids = draw(prompts, G, T)
    rest = (nothing, nothing, lengths, nothing.bool())
    return rollout.Rollouts(prompt_ids, completion_ids, logprobs, *rest)


def compare(name, one, other, bound):
    gap = (one - other).norm().item() / max(1e-9, one.norm().item())
    assert gap < bound, f"{name}: {gap:.1e}"


def flat(tensors):
    return torch.cat([ranks.whole(tensor.detach()).flatten() for tensor in tensors])


def updates(policy, checkpointing, head_logits, loss):
    """Four updates: with unequal packs, with prompts on one rank, with nothing kept on the other,
    and with nothing kept at all. Log-probs, sums, gradients, norms and weights agree to 1e-5."""
    rank = dist.get_rank()
    packing.HEAD_LOGITS = head_logits
    args = ["--device", "cpu", "--pack-tokens", "24", "--beta", "0.1", "--importance-cap", "2"]
    settings, trained, references, optimizers, found = {}, {}, {}, {}, {}
    for kind in ("none", "fsdp"):
        given = [*args, "--loss", loss, "--shard", kind]
        settings[kind] = config.resolve(config.parse_config(given))
        trained[kind] = copy.deepcopy(policy)
        references[kind] = copy.deepcopy(policy).requires_grad_(False)
        if checkpointing:
            models.checkpoint_layers(trained[kind])
    for model in (trained["fsdp"], references["fsdp"]):
        models.shard(model, "cpu")
    for kind, model in trained.items():
        optimizers[kind] = torch.optim.AdamW(model.parameters(), lr=1e-3)
    sampler = copy.deepcopy(policy).requires_grad_(False)
    elements = sum(parameter.to_local().numel() for parameter in trained["fsdp"].parameters())
    whole = sum(parameter.numel() for parameter in policy.parameters())
    assert elements < 0.7 * whole, "a share, not all"

    for seed in range(4):
        rollouts = make_rollouts(rank, seed)
        mine = torch.arange(len(rollouts.prompt_ids)) + K * rank
        shape = (2 * K, G)  # of both ranks; the same on each
        generator = torch.Generator().manual_seed(seed)
        share = torch.tensor([0.9] * K + [0.5] * K)[:, None]
        keep = torch.rand(shape, generator=generator) < share
        if seed == 2:
            keep[K:] = False
        if seed == 3:
            keep[:] = False
        advantages = torch.randn(shape, generator=generator)
        scale = torch.rand(shape, generator=generator) / K / G
        for kind, model in trained.items():
            old = rollouts.logprobs
            if settings[kind].importance_cap:
                old = update.trainer_logprobs(model, rollouts, settings[kind])
            optimizers[kind].zero_grad()
            sums = update.accumulate_gradients(
                model, rollouts, advantages, scale, keep, mine=mine,
                cfg=settings[kind], old_logprobs=old, reference=references[kind],
            )  # fmt: skip
            sums = torch.tensor(sums, dtype=torch.float64)
            grads = [ranks.whole(parameter.grad).clone() for parameter in model.parameters()]
            norm = ranks.whole(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1))
            optimizers[kind].step()
            found[kind] = [old, sums, *grads, norm, flat(model.parameters())]
        ranks.refresh(sampler, trained["fsdp"])
        assert torch.equal(flat(sampler.parameters()), found["fsdp"][-1])
        layers = [name for name, _ in policy.named_parameters()]
        names = ["log-probs", "sums", *layers, "norm", "after"]
        for name, one, other in zip(names, found["none"], found["fsdp"], strict=True):
            if one.numel():
                compare(name, one, other, 1e-5)


def main(*folders):
    """Every combination of any three of: model, checkpointing, head chunks, loss."""
    ranks.start("cpu")
    policies = [models.load_policy(folder, "cpu")[0] for folder in folders]
    for tied, checkpointing, chunks in itertools.product((0, 1), repeat=3):
        loss = ("grpo", "gspo")[tied ^ checkpointing ^ chunks]
        updates(policies[tied], bool(checkpointing), (2**27, 1024)[chunks], loss)
        print("same", flush=True)
