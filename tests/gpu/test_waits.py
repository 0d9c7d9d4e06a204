"""How often the host waits for the GPU, which then has nothing to do: goals, not measurements."""

from dataclasses import fields

import pytest
import torch

import config
import rollout
import update

TOKENS = 16  # decoded between two looks at what has ended


def test_the_device_is_one(waits, pretend):
    """Catches a pretend device that no longer refuses tensors of the CPU, or counts nothing."""
    cuda, cpu = torch.ones(4, device="cuda"), torch.ones(4)
    index = torch.tensor([0, 1], device="cuda")
    for mixed in (lambda: cuda + cpu, lambda: torch.cat([cuda, cpu]), lambda: cpu[index]):
        with pytest.raises(RuntimeError, match="same device"):
            mixed()
    pinned = cpu.pin_memory()
    for work, count in (
        (lambda: (cuda[None] @ cuda[:, None]).exp().sort(), 0),
        (lambda: pinned.to("cuda", non_blocking=True), 0),
        (lambda: cuda.masked_fill_(cuda > 2, 1.0), 0),
        (lambda: cpu.to("cuda"), 1),
        # may wait; PyTorch's debug mode does not say so
        (lambda: cpu.to("cuda", non_blocking=True), int(pretend)),
        (lambda: torch.tensor([1, 2], device="cuda"), 1),
        (cuda.cpu, 1),
        (lambda: cuda.sum().item(), 1),
        (cuda.nonzero, 1),
        (lambda: cuda[cuda > 0], 1),
    ):
        assert waits(work) == count


def test_decoding(policy, sample, waits):
    """The waits of 64 more tokens. Catches a check of the ends after every token, and one of logits
    that waits."""
    model = policy(dtype="bfloat16")
    options = {"prompts": 6, "group_size": 8, "eos_ids": [256, 17, 99, 180], "batch_size": 48}
    lengths = sample(model, max_new_tokens=96, **options).lengths
    assert lengths.min() < lengths.max() == 96
    few, many = (waits(sample, model, max_new_tokens=count, **options) for count in (32, 96))
    assert many - few <= (96 - 32) / TOKENS


@pytest.mark.parametrize("options", [{}, {"loss": "gspo", "importance_cap": 2.0, "beta": 0.1}])
def test_update(policy, sample, kernel, waits, options):
    """Many packs wait as often as few. Catches a pack whose tensors are copied one by
    one, and a loss that reads a number back."""
    kernel("torch")
    cfg = config.resolve(config.Config(device="cuda", pack_tokens=60, **options))
    model, reference = policy(), policy(seed=1).requires_grad_(False)
    everything, packs = sample(policy(dtype="bfloat16"), prompts=16), []

    def accumulate(prompts):
        some = (getattr(everything, field.name)[:prompts] for field in fields(everything))
        ones = torch.ones(prompts, 4, dtype=torch.float64)
        keep, own = ones > 0, rollout.Rollouts(*some)
        sums = update.accumulate_gradients(
            model, own, ones, ones, keep, cfg=cfg, reference=reference
        )
        packs.append(int(sums.slots) // cfg.pack_tokens)

    accumulate(4)  # makes .grad
    few, many = waits(accumulate, 4), waits(accumulate, 16)
    assert packs[2] > 2 * packs[1] > 2
    assert many == few
