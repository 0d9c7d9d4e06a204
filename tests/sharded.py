"""What test_ranks.py starts under torchrun: the same updates of a whole model and of a sharded one, side by side.

sharded.py TIED UNTIED        two folders of models; every rank ends with an assertion or prints "same"
"""

import itertools
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import config
import packing
import ranks
import rollout
import update

K, G, T = 4, 3, 6


def make_rollouts(rank, seed):
    """K prompts with G completions; the last rank has no prompt in the second update. Log-probs of no model."""
    generator = torch.Generator().manual_seed(100 * seed + rank)
    prompts = K if rank == 0 or seed != 1 else 0
    draw = lambda *shape, low=0, high=256: torch.randint(low, high, shape, generator=generator)
    ids = [draw(int(draw(1, low=1, high=5))).tolist() for _ in range(prompts)]
    nothing = torch.zeros(prompts, G)
    logprobs = -3 - torch.rand(prompts, G, T, generator=generator)
    lengths = draw(prompts, G, low=1, high=T + 1)
    return rollout.Rollouts(ids, draw(prompts, G, T), logprobs, nothing, nothing, lengths, nothing.bool())


def compare(name, one, other, bound=1e-6):
    gap = (one - other).norm().item() / max(1e-9, one.norm().item())
    assert gap < bound, f"{name}: {gap:.1e}"
    return gap


def updates(folder, checkpointing, head_logits, loss):
    rank = dist.get_rank()
    packing.HEAD_LOGITS = head_logits
    words = ["--device", "cpu", "--pack-tokens", "24", "--beta", "0.1", "--loss", loss, "--importance-cap", "2"]
    settings = {kind: config.resolve(config.parse_config([*words, "--shard", kind])) for kind in ("none", "fsdp")}
    models, optimizers, found = {}, {}, {}
    references = {kind: rollout.load_policy(folder, "cpu")[0].requires_grad_(False) for kind in settings}
    for kind in settings:
        models[kind] = rollout.load_policy(folder, "cpu")[0]
        if checkpointing:
            update.checkpoint_layers(models[kind])
    for model in (models["fsdp"], references["fsdp"]):
        ranks.shard(model, "cpu")
    for kind, model in models.items():
        optimizers[kind] = torch.optim.AdamW(model.parameters(), lr=1e-3)
    copy = rollout.load_policy(folder, "cpu")[0].requires_grad_(False)
    elements = sum(parameter.to_local().numel() for parameter in models["fsdp"].parameters())
    assert elements < 0.7 * sum(parameter.numel() for parameter in copy.parameters()), "a share, not all"

    worst = 0.0
    for seed in range(3):
        rollouts = make_rollouts(rank, seed)
        generator = torch.Generator().manual_seed(seed)
        keep = torch.rand(len(rollouts.prompt_ids), G, generator=generator) < (0.9 if rank == 0 else 0.5)
        if seed == 2 and rank > 0:
            keep[:] = False  # prompts, but nothing kept
        advantages = torch.randn(len(rollouts.prompt_ids), G, generator=generator)
        scale = torch.rand(len(rollouts.prompt_ids), G, generator=generator) / K / G
        for kind, model in models.items():
            old = update.trainer_logprobs(model, rollouts, settings[kind])
            optimizers[kind].zero_grad()
            sums = update.accumulate_gradients(
                model, rollouts, advantages, scale, keep,
                cfg=settings[kind], old_logprobs=old, reference=references[kind],
            )  # fmt: skip
            ranks.sum_gradients(model)
            sums = ranks.all_reduce(sums)
            grads = [ranks.whole(parameter.grad).clone() for parameter in model.parameters()]
            norm = ranks.whole(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1))
            optimizers[kind].step()
            after = torch.cat([ranks.whole(parameter.detach()).flatten() for parameter in model.parameters()])
            found[kind] = [old, sums, *grads, norm, after]
        ranks.refresh(copy, models["fsdp"])
        assert torch.equal(torch.cat([parameter.flatten() for parameter in copy.parameters()]), found["fsdp"][-1])
        names = ["log-probs", "sums", *(name for name, _ in copy.named_parameters()), "norm", "after"]
        for name, one, other in zip(names, found["none"], found["fsdp"], strict=True):
            if one.numel():
                worst = max(worst, compare(name, one, other, 1e-5))
    return worst


if __name__ == "__main__":
    transformers.utils.logging.disable_progress_bar()
    dist.init_process_group("gloo")
    cases = itertools.product(sys.argv[1:], (False, True), (2**27, 1024), ("grpo", "gspo"))
    for case in cases:
        worst = updates(*case)
        if dist.get_rank() == 0:
            print("same", os.path.basename(case[0]), *case[1:], f"{worst:.1e}", flush=True)
    time.sleep(0.2)  # as train.py does, and for its reason
    dist.destroy_process_group()
