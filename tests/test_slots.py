"""The loop for GPUs, eagerly on the CPU; tests/gpu has its graphs."""

import pytest
import torch
from test_rollout import InSlots
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

import rollout
from engines import compact, prefill, slots

PROMPTS = [[65 + k] * (1 + 3 * k % 7) + [70] for k in range(7)]


@pytest.fixture
def sample(make_policy, forwards):
    """sample(...): rollouts of a float64 model, and how many rows each step decoded."""
    model, _ = make_policy(dtype=torch.float64)
    seen = forwards(model)

    def go(**changes):
        options = {"max_new_tokens": 60, "eos_ids": [256, *range(0, 256, 16)], "pad_id": 257}
        sampling = rollout.Sampling(**options | changes, engine=InSlots)
        found = rollout.sample(model, PROMPTS, sampling, group_size=3, seed=3)
        return found, [len(tokens) for tokens, _, _ in seen if tokens.shape[1] == 1]

    return go


@pytest.mark.parametrize(
    ("changes", "most"),
    [({}, 21), ({"batch_size": 8}, 8), ({"cache_tokens": 520}, 7), ({"cache_tokens": 1}, 1)],
)
def test_the_batch_fits_and_shrinks(sample, changes, most):
    """Catches a budget or a batch size that is ignored, slots that wait although completions do,
    and a batch that stays large for the last ones. A slot has 8 + 60 + 4 = 72 columns."""
    found, rows = sample(**changes)
    assert rows[0] == most
    assert rows == sorted(rows, reverse=True), "smaller at the end"
    assert rows[-1] <= max(1, most // 4)
    sampled = found.lengths.sum().item()
    assert sampled <= sum(rows) < 2.5 * sampled


WARPED = {"temperature": 0.6, "top_k": 5, "top_p": 0.9}


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
