"""The loop for GPUs, eagerly on the CPU; tests/gpu has its graphs."""

import pytest
import torch
from test_compact import CASES, ENDS
from test_rollout import ENGINES, assert_same_rollouts
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

import rollout
from engines import compact, hf, prefill, slots

PROMPTS = [[65 + k] * (1 + 3 * k % 7) + [70] for k in range(7)]


@pytest.fixture
def sample(make_policy, forwards):
    """sample(engine, ...): rollouts of a float64 model, and how many rows each step decoded."""
    model, _ = make_policy(dtype=torch.float64)
    seen = forwards(model)

    def go(engine=ENGINES["slots"], group_size=3, **changes):
        options = {"max_new_tokens": 14, "eos_ids": ENDS, "pad_id": 257, "engine": engine}
        seen.clear()
        sampling = rollout.Sampling(**options | changes)
        found = rollout.sample(model, PROMPTS, sampling, group_size=group_size, seed=3)
        return found, [len(tokens) for tokens, _, _ in seen if tokens.shape[1] == 1]

    return go


@pytest.mark.parametrize("batch_size", [1, 5, 64])
@pytest.mark.parametrize("options", CASES, ids=str)
def test_slots_change_nothing(sample, options, batch_size):
    """Catches a slot that begins with the last completion's position, tokens, keys or logits, a
    position that is another slot's, a completion that is cut early or goes on past its end, a
    penalty of another text, and what is lost when slots move. One slot is refilled 20 times. The
    reference is the plain loop, or hf where there is more than a temperature."""
    options = options | {"batch_size": batch_size}
    found, _ = sample(**options)
    simple = hf if {"top_k", "top_p", "repetition_penalty"} & set(options) else None
    wanted, _ = sample(simple, **options)
    close = {"rtol": 1e-5, "atol": 1e-5} if simple else {"rtol": 1e-6, "atol": 1e-8}
    assert_same_rollouts(found, wanted, **close)


@pytest.mark.parametrize(
    ("changes", "most"),
    [({}, 21), ({"batch_size": 8}, 8), ({"cache_tokens": 520}, 7), ({"cache_tokens": 1}, 1)],
)
def test_the_batch_fits_and_shrinks(sample, changes, most):
    """Catches a budget or a batch size that is ignored, slots that wait although completions do,
    and a batch that stays large for the last ones. A slot has 8 + 60 + 4 = 72 columns."""
    found, rows = sample(max_new_tokens=60, **changes)
    assert rows[0] == most
    assert rows == sorted(rows, reverse=True), "smaller at the end"
    assert rows[-1] <= max(1, most // 4)
    sampled = found.lengths.sum().item()
    assert sampled <= sum(rows) < 2.5 * sampled


@pytest.mark.parametrize("engine", [None, compact, hf])
def test_batches_fit_the_cache(sample, engine):
    """Catches an engine that ignores the budget, a group that is left out because it does not fit,
    and samples that depend on the budget."""
    wanted, _ = sample(engine)
    for tokens, most in ((1, 3), (3 * 22, 3), (6 * 22, 6), (7 * 22, 6)):
        found, rows = sample(engine, cache_tokens=tokens)
        assert max(rows) == most
        assert_same_rollouts(found, wanted)


def test_cache_bytes(make_policy):
    """Catches a budget in tokens of another size."""
    model, _ = make_policy(dtype=torch.float64)
    with torch.inference_mode(), prefill.decoding(model):
        *_, cache = prefill.prefill(model, [[65] * 5], 0)
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert rollout.cache_bytes(model.config, model.dtype) == held / 5


WARPED = {"temperature": 0.6, "top_k": 5, "top_p": 0.9, "repetition_penalty": 1.1}


@pytest.mark.parametrize("options", [{}, {"temperature": 0}, WARPED])
def test_a_step_reads_nothing(make_policy, options):
    """Catches a value that the host reads, which no graph can do. Here tensors have no values. A
    planted read is found."""
    model, _ = make_policy()
    sampling = rollout.Sampling(3, [-1], 257, **options)
    record = compact.Record(sampling, torch.rand(2, 3, 3 + slots.EVERY).double(), model)
    with torch.inference_mode(), prefill.decoding(model):
        own = slots.Slots(model, PROMPTS[:2], 3, record)
        own.refill()
        with FakeTensorMode(allow_non_fake_inputs=True):
            own.step()
            draw = record.draw
            record.draw = lambda *args: draw(*args) if args[3].isfinite().all() else None
            with pytest.raises(DataDependentOutputException):
                own.step()
