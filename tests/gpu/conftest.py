"""
The tests that need a GPU: the machine's, or else the pretend one of pretend_cuda.py.

    pytest tests/gpu

A pretend device cannot be taken back, so `pytest` alone leaves this folder out; .ci/run has it.
"""

from unittest import mock

import pretend_cuda
import pytest
import torch

import models
import packing
import rollout
from engines import check_decoder
from runtime.device import cast_weights, fuse_norms

KERNELS = {"flash": "flash_attn_varlen_func", "torch": "varlen_attn"}
PRETEND = not torch.cuda.is_available()
if PRETEND:
    pretend_cuda.install()


@pytest.fixture(scope="session")
def pretend():
    """Whether draws and rounding are the CPU's."""
    return PRETEND


@pytest.fixture
def policy(make_policy):
    """The two-layer model on a device, untrained."""

    def make(device="cuda", seed=0, dtype="float32"):
        model, _ = make_policy(seed=seed)
        model.vocab_size = model.config.vocab_size
        fuse_norms(model)
        model = model.to(device)
        check_decoder.compare(model)
        assert not model.why_not_fast
        cast_weights(model, dtype)
        return model

    return make


@pytest.fixture
def sample():
    """Rollouts of prompts of 1 to 5 tokens, with ends that a twentieth of the tokens are."""

    def go(model, *, prompts=4, group_size=4, engine="compact", **changes):
        options = {"max_new_tokens": 12, "eos_ids": [256, *range(0, 240, 20)], "pad_id": 257}
        prompt_ids = [list(range(65 + n, 66 + n + n % 5)) for n in range(prompts)]
        sampling = rollout.Sampling(**options | changes, engine=models.ENGINES[engine])
        return rollout.sample(model, prompt_ids, sampling, group_size=group_size, seed=5)

    return go


@pytest.fixture
def kernel(monkeypatch):
    """Choose packing's kernel: flash-attn's, PyTorch's, or none; returns a mock that knows whether
    it was called. Skips a kernel that a real GPU's machine does not have."""

    def use(name):
        chosen = mock.Mock(called=False)
        for one, attribute in KERNELS.items():
            function = getattr(pretend_cuda if PRETEND else packing, attribute)
            monkeypatch.setattr(packing, attribute, None)
            if one == name:
                if function is None:
                    pytest.skip(f"no {attribute} is installed")
                # autospec keeps the signature, which packing.py looks at
                chosen = mock.create_autospec(function, side_effect=function)
                monkeypatch.setattr(packing, attribute, chosen)
        return chosen

    return use
