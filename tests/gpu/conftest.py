"""
The tests that need a GPU: the machine's, or else the pretend one of pretend_cuda.py.

    pytest tests/gpu

A pretend device cannot be taken back, so `pytest` alone leaves this folder out; .ci/run has it.
"""

import copy
import gc
import warnings
from unittest import mock

import pretend_cuda
import pytest
import torch

import models
import packing
import rollout
from engines import check_decoder, slots
from runtime.device import cast_weights, fuse_norms

KERNELS = {"flash": "flash_attn_varlen_func", "torch": "varlen_attn"}
PRETEND = not torch.cuda.is_available()
REASON = pretend_cuda.unavailable() if PRETEND else None
if PRETEND and not REASON:
    pretend_cuda.install()
    slots.varlen_attn = pretend_cuda.varlen_attn
gc.freeze()  # a collection would take 0.4 s for what was imported, and the benches collect often


@pytest.fixture(autouse=True, scope="session")
def device():
    if REASON:
        pytest.skip(REASON)


@pytest.fixture(scope="session")
def pretend():
    """Whether draws and rounding are the CPU's."""
    return PRETEND


@pytest.fixture
def policy(make_policy):
    """The two-layer model on a device, untrained."""

    def make(device="cuda", seed=0):
        model, _ = make_policy(seed=seed)
        model.vocab_size = model.config.vocab_size
        fuse_norms(model)
        model = model.to(device)
        check_decoder.compare(model)
        assert not model.why_not_fast
        return model

    return make


@pytest.fixture
def sample():
    """Rollouts of prompts of 1 to 5 tokens, with ends that a twentieth of the tokens are."""

    def go(model, *, dtype="float32", prompts=4, group_size=4, engine="compact", **changes):
        options = {"max_new_tokens": 12, "eos_ids": [256, *range(0, 240, 20)], "pad_id": 257}
        prompt_ids = [list(range(65 + n, 66 + n + n % 5)) for n in range(prompts)]
        sampling = rollout.Sampling(**options | changes, engine=models.ENGINES[engine])
        own = copy.deepcopy(model)
        cast_weights(own, dtype)
        return rollout.sample(own, prompt_ids, sampling, group_size=group_size, seed=5)

    return go


@pytest.fixture
def kernel(monkeypatch):
    """Choose packing's kernel: flash-attn's, PyTorch's, or none; returns a function that tells
    whether it was called. Skips a kernel that a real GPU's machine does not have."""
    installed = {name: getattr(packing, name) for name in KERNELS.values()}

    def use(name):
        for one, attribute in KERNELS.items():
            own = getattr(pretend_cuda, attribute) if PRETEND else installed[attribute]
            if one == name and own is None:
                pytest.skip(f"no {attribute} is installed")
            # autospec keeps the signature, which packing.py looks at
            called = mock.create_autospec(own, side_effect=own) if one == name else None
            monkeypatch.setattr(packing, attribute, called)
        return lambda: name != "none" and getattr(packing, KERNELS[name]).called

    return use


@pytest.fixture
def waits():
    """How often the host waits for the device during a call."""

    def count(work, *args, **options):
        if PRETEND:
            with pretend_cuda.counting() as seen:
                work(*args, **options)
            print({key: count for key, count in seen.items() if key[0] in pretend_cuda.WAITS})
            return pretend_cuda.total(seen, *pretend_cuda.WAITS)
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                work(*args, **options)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return sum("synchronizing CUDA operation" in str(one.message) for one in caught)

    return count
