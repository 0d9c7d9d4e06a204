"""
Sampling, gradients and whole runs on a GPU: the machine's, or else the pretend one of
pretend_cuda.py.

    pytest tests/gpu

A pretend device cannot be taken back, so `pytest` alone leaves this folder out; .ci/run has it.
"""

from unittest import mock

import pretend_cuda
import pytest
import torch
import toy
from test_packing import flat_grad

import config
import eval as evaluation
import models
import packing
import rollout
import update
from runtime.device import cast_weights, fuse_norms

PRETEND = not torch.cuda.is_available()
if PRETEND:
    pretend_cuda.install()


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
def kernel(monkeypatch):
    """packing's kernel, as a mock that counts its calls."""
    function = (pretend_cuda if PRETEND else packing).varlen_attn
    monkeypatch.setattr(packing, "varlen_attn", mock.Mock(side_effect=function))
    return packing.varlen_attn


def sample(model, engine="loop", **changes):
    """Rollouts of prompts of 1 to 5 tokens, with ends that a twentieth of the tokens are."""
    options = {"max_new_tokens": 20, "eos_ids": [256, *range(0, 240, 20)], "pad_id": 257}
    prompt_ids = [list(range(65 + n, 66 + n + n % 5)) for n in range(6)]
    sampling = rollout.Sampling(**options | changes, engine=models.ENGINES[engine])
    return rollout.sample(model, prompt_ids, sampling, group_size=4, seed=5)


def test_the_device_is_one():
    """Catches a pretend device that takes the CPU's tensors, too."""
    cuda, cpu = torch.ones(4, device="cuda"), torch.ones(4)
    index = torch.tensor([0, 1], device="cuda")
    for mixed in (lambda: cuda + cpu, lambda: torch.cat([cuda, cpu]), lambda: cpu[index]):
        with pytest.raises(RuntimeError, match="same device"):
            mixed()


@pytest.mark.parametrize("engine", ["loop", "hf"])
def test_rollouts_are_the_cpus(policy, engine):
    """In float32 with the same random numbers, though rows leave the batch at other tokens. Catches
    a tensor on the wrong device, a result that is not on the CPU, an option that acts on one device
    only, and random numbers that depend on the rows in a batch."""
    options = {"temperature": 0.7, "batch_size": 4, "top_k": 5, "top_p": 0.9}
    found, wanted = sample(policy(), engine, **options), sample(policy("cpu"), **options)
    inside = torch.arange(wanted.logprobs.shape[2]) < wanted.lengths[..., None]
    assert torch.equal(found.lengths, wanted.lengths)
    assert torch.equal(found.truncated, wanted.truncated)
    assert torch.equal(found.completion_ids[inside], wanted.completion_ids[inside])
    for name in ("logprobs", "entropy", "energy"):
        assert torch.allclose(getattr(found, name), getattr(wanted, name), atol=1e-4), name


ALL = {"loss": "gspo", "importance_cap": 2.0, "beta": 0.1, "gradient_checkpointing": True}
CHUNKED = {"loss": "cispo", "temperature": 0.7, "beta": 0.05}
CASES = [(ALL, "float32", False), (ALL, "bfloat16", True), (CHUNKED, "bfloat16", False)]


@pytest.mark.parametrize(("changes", "dtype", "shares_prompts"), CASES)
def test_gradients_are_the_cpus(policy, kernel, monkeypatch, changes, dtype, shares_prompts):
    """In several slots; in bfloat16 the kernel's gradient has the direction of the CPU's. Catches
    a tensor on the wrong device, anything that a GPU computes otherwise, bounds of other segments,
    and a kernel that is not used, or that gets float32 or what is on the CPU. If prompts are
    shared, keys have bounds of their own."""
    monkeypatch.setattr(packing, "shares_prompts", lambda _device: shares_prompts)
    if changes is CHUNKED:
        monkeypatch.setattr(packing, "HEAD_LOGITS", 258 * 7)
    rollouts = sample(policy(dtype=dtype), max_new_tokens=12)
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


RUNS = {  # changes of toy.flags
    "adaptive": {"lora": 4, "beta": 0.05, "gradient_checkpointing": True, "engine": "hf"},
    "dppo": {"minibatches": 2, "importance_cap": 2, "beta": 0.05, "dtype": "float32"},
}


@pytest.mark.parametrize("method", RUNS)
def test_train_and_evaluate(run, policy_folder, kernel, monkeypatch, tmp_path, method):
    """Resumed, then evaluated with the defaults of a GPU. Log, samples and weights are as if never
    stopped, bit for bit on the pretend device; a real GPU adds up in no fixed order. Catches a
    tensor on the wrong device anywhere, and a copy that samples on the CPU."""
    real, devices = rollout.sample, set()
    watched = lambda model, *a, **b: devices.add(model.device.type) or real(model, *a, **b)
    monkeypatch.setattr(rollout, "sample", watched)
    options = {"device": "cuda", "method": method, "steps": 2, "save_every": 1} | RUNS[method]
    run("whole", **options)
    run("part", until=1, **options)
    toy.main(["--out-dir", str(tmp_path / "part"), "--resume"])
    (whole, *others), (part, *again) = (toy.timeless(tmp_path / x) for x in ("whole", "part"))
    for row in (*whole, *part):  # a process starts the peak of memory over
        row.pop("memory/peak_gib", None)
    assert len(whole) == len(part)
    if PRETEND:
        toy.assert_same((whole, *others), (part, *again))
    common = {"problems": 3, "k": 2, "max_new_tokens": 8, "out_dir": str(tmp_path)}
    evaluation.main(evaluation.EvalConfig(model=policy_folder, **common))
    assert devices == {"cuda"}
