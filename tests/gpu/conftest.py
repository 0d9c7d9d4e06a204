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
from runtime.device import cast_weights, fuse_norms

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
        cast_weights(model, dtype)
        return model

    return make


@pytest.fixture
def sample():
    """Rollouts of prompts of 1 to 5 tokens, with ends that a twentieth of the tokens are."""

    def go(model, *, prompts=4, group_size=4, engine="loop", **changes):
        options = {"max_new_tokens": 12, "eos_ids": [256, *range(0, 240, 20)], "pad_id": 257}
        prompt_ids = [list(range(65 + n, 66 + n + n % 5)) for n in range(prompts)]
        sampling = rollout.Sampling(**options | changes, engine=models.ENGINES[engine])
        return rollout.sample(model, prompt_ids, sampling, group_size=group_size, seed=5)

    return go


@pytest.fixture
def kernel(monkeypatch):
    """packing's kernel, as a mock that counts its calls."""
    function = (pretend_cuda if PRETEND else packing).varlen_attn
    monkeypatch.setattr(packing, "varlen_attn", mock.Mock(side_effect=function))
    return packing.varlen_attn
