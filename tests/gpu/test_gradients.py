"""The update on a GPU: gradients of every loss, layout and attention kernel against the CPU's."""

import pytest
import torch
from test_packing import flat_grad

import config
import models
import packing
import update

ALL = {"loss": "gspo", "importance_cap": 2.0, "beta": 0.1, "gradient_checkpointing": True}
CHUNKED = {"loss": "cispo", "temperature": 0.7, "beta": 0.05}
OLD = {"importance_cap": 2.0}
CASES = [  # changes of the config, dtype
    (OLD, "float32"), (ALL, "float32"), (ALL, "bfloat16"), (CHUNKED, "bfloat16"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "dtype"), CASES)
def test_gradients_are_the_cpus(policy, sample, kernel, monkeypatch, changes, dtype):
    """In several slots; in bfloat16 the kernel's gradient has the direction of the CPU's. Catches
    a tensor on the wrong device, anything that a GPU computes otherwise, bounds of other segments,
    and a kernel that is not used, or that gets float32 or what is on the CPU. OLD alone has slots
    as on every GPU, and the others share prompts, so that keys have bounds of their own."""
    monkeypatch.setattr(packing, "shares_prompts", lambda _device: changes is not OLD)
    if changes is CHUNKED:
        monkeypatch.setattr(packing, "HEAD_LOGITS", 258 * 7)
    rollouts = sample(policy(dtype=dtype), prompts=6)
    generator = torch.Generator().manual_seed(3)
    rows = torch.randn(2, 6, 4, dtype=torch.float64, generator=generator)
    keep = torch.rand(6, 4, generator=generator) < 0.8

    def compute(device):
        cfg = config.Config(device=device, pack_tokens=60, dtype=dtype, **changes)
        cfg = config.resolve(cfg)
        model, reference = policy(device), policy(device, seed=1).requires_grad_(False)
        model.model.layers[1].self_attn.scaling = 0.1  # not the kernels' default
        if cfg.gradient_checkpointing:
            models.checkpoint_layers(model)
        old = None if cfg.importance_cap else rollouts.logprobs
        if changes is OLD:
            old = update.trainer_logprobs(reference, rollouts, cfg)
        sums = update.accumulate_gradients(
            model, rollouts, *rows, keep, cfg=cfg, old_logprobs=old, reference=reference
        )
        return torch.tensor(sums, dtype=torch.float64), flat_grad(model).double().cpu()

    sums, gradient = compute("cuda")
    calls = kernel.call_count
    assert (calls > 0) == (dtype == "bfloat16")
    wanted_sums, wanted = compute("cpu")
    assert kernel.call_count == calls
    assert sums[-1] > 60, "several slots"
    assert torch.equal(sums[-3:], wanted_sums[-3:]), "tokens and slots"
    assert torch.cosine_similarity(gradient, wanted, dim=0) > 0.99
    if dtype == "float32":
        for one, other in ((sums, wanted_sums), (gradient, wanted)):
            assert torch.allclose(one, other, rtol=1e-3, atol=1e-4 * other.abs().max())
