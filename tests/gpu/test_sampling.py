"""Rollouts on a GPU: the policy's draws, and on the pretend device those of the CPU."""

import pytest
import torch

LONG = {"max_new_tokens": 20, "temperature": 0.7, "batch_size": 4}  # the loop looks after 16
WARPED = LONG | {"top_k": 5, "top_p": 0.9}
SAME = [("loop", LONG), ("loop", WARPED), ("loop", {"temperature": 0}), ("hf", WARPED)]


def test_the_device_is_one():
    """Catches a pretend device that takes the CPU's tensors, too."""
    cuda, cpu = torch.ones(4, device="cuda"), torch.ones(4)
    index = torch.tensor([0, 1], device="cuda")
    for mixed in (lambda: cuda + cpu, lambda: torch.cat([cuda, cpu]), lambda: cpu[index]):
        with pytest.raises(RuntimeError, match="same device"):
            mixed()


@pytest.mark.parametrize(("engine", "options"), SAME)
def test_rollouts_are_the_cpus(policy, sample, engine, options):
    """In float32 with the same random numbers, though rows leave the batch at other tokens. Catches
    a tensor on the wrong device, a result that is not on the CPU, an option that acts on one device
    only, and random numbers that depend on the rows in a batch."""
    found = sample(policy(), engine=engine, **options)
    wanted = sample(policy("cpu"), **options)
    inside = torch.arange(wanted.logprobs.shape[2]) < wanted.lengths[..., None]
    assert torch.equal(found.lengths, wanted.lengths)
    assert torch.equal(found.truncated, wanted.truncated)
    assert torch.equal(found.completion_ids[inside], wanted.completion_ids[inside])
    for name in ("logprobs", "entropy", "energy"):
        assert torch.allclose(getattr(found, name), getattr(wanted, name), atol=1e-4), name
