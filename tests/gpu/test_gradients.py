"""The update on a GPU: gradients of every loss, layout and attention kernel against the CPU's."""

import pytest
import torch
from test_packing import flat_grad

import config
import models
import packing
import update

VARIANTS = {
    "grpo": {},
    "gspo": {"loss": "gspo"},
    "cispo": {"loss": "cispo"},
    "cap": {"importance_cap": 2.0},
    "old": {"importance_cap": 2.0},
    "chunked": {"temperature": 0.7, "beta": 0.05},
    "all": {"loss": "gspo", "importance_cap": 2.0, "beta": 0.1, "gradient_checkpointing": True},
}  # fmt: skip


@pytest.fixture
def gradient(policy, monkeypatch):
    """(UpdateStats, gradient) of rollouts on a device, for one of the VARIANTS."""

    monkeypatch.setattr(packing, "shares_prompts", lambda _device: False)  # as on every GPU

    def compute(name, rollouts, device="cuda", dtype="float32"):
        if name == "chunked":
            monkeypatch.setattr(packing, "HEAD_LOGITS", 258 * 7)
        options = {"pack_tokens": 60, "dtype": dtype}
        cfg = config.resolve(config.Config(device=device, **options, **VARIANTS[name]))
        model, reference, old = policy(device), policy(device, seed=1), None
        if cfg.gradient_checkpointing:
            models.checkpoint_layers(model)
        if name == "old":
            old = update.trainer_logprobs(reference, rollouts, cfg)
        shape, generator = rollouts.lengths.shape, torch.Generator().manual_seed(3)
        rows = torch.randn(2, *shape, dtype=torch.float64, generator=generator)
        keep = torch.rand(shape, generator=generator) < 0.8
        sums = update.accumulate_gradients(
            model, rollouts, *rows, keep, cfg=cfg, old_logprobs=old,
            reference=reference.requires_grad_(False) if cfg.beta else None,
        )  # fmt: skip
        return torch.tensor(sums, dtype=torch.float64), flat_grad(model).double().cpu()

    return compute


@pytest.mark.parametrize("name", VARIANTS)
def test_gradients_are_the_cpus(policy, sample, kernel, gradient, name):
    """In float32, in several slots. Catches a tensor on the wrong device, and anything that a GPU
    computes otherwise."""
    kernel("none")
    rollouts = sample(policy(), prompts=6)
    ours = gradient(name, rollouts)
    theirs = gradient(name, rollouts, "cpu")
    assert ours[0][-1] > 60, "several slots"
    assert ours[1].abs().max() > 0
    for one, other in zip(ours, theirs, strict=True):
        assert torch.allclose(one, other, rtol=1e-3, atol=1e-4 * other.abs().max())


@pytest.mark.parametrize("attention", ["flash", "torch", "none"])
@pytest.mark.parametrize("name", ["grpo", "chunked", "all"])
def test_kernels_agree(policy, sample, kernel, gradient, name, attention):
    """In bfloat16 each kernel's gradient has the direction of the CPU's. Catches bounds of other
    segments, a causal mask that begins at the wrong end, and a kernel that is not used."""
    rollouts = sample(policy(), dtype="bfloat16", prompts=6)
    called = kernel(attention)
    sums, found = gradient(name, rollouts, dtype="bfloat16")
    assert called() == (attention != "none")
    exact, wanted = gradient(name, rollouts, "cpu", "bfloat16")
    assert torch.cosine_similarity(found, wanted, dim=0) > 0.99
    assert torch.equal(sums[-3:], exact[-3:]), "tokens and slots"


def test_nothing_is_kept(policy, sample, kernel):
    """Catches an update that needs a slot."""
    kernel("none")
    rollouts, model = sample(policy()), policy()
    zeros = torch.zeros(4, 4, dtype=torch.float64)
    cfg = config.resolve(config.Config(device="cuda"))
    assert not any(update.accumulate_gradients(model, rollouts, zeros, zeros, zeros > 0, cfg=cfg))
