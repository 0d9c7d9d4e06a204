"""What packing is compared with is the same update, and is measured as it says."""

import time
from dataclasses import replace

import pytest
import torch
from test_packing import flat_grad

import config
import packing
import padding
import update


@pytest.fixture
def work(make_policy, make_rollouts):
    """(model, Work): 20 of 30 ragged completions of five prompts, with clipping at work."""
    model, _ = make_policy(dtype=torch.float64)
    advantages, scale = torch.randn(2, 5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    keep = torch.arange(30).view(5, 6) % 3 > 0
    return model, padding.Work(make_rollouts(model, 5, 6, drift=0.3), advantages, scale.abs(), keep)


def configured(**changes):
    return config.resolve(config.Config(pack_tokens=32, device="cpu", **changes))


def test_padded_is_the_same_update(work):
    """Gradients of both orders and several micro-batch sizes against the packed one; tokens are counted with padding.
    Kills: predictors of the wrong row, a pad token that is trained on, what was not kept."""
    model, some = work
    model.zero_grad()
    real = padding.packed_update(model, some, configured(share_prompts=False))
    wanted = flat_grad(model)
    assert real == sum(prompt + completion - 1 for prompt, completion in some.sequences().values())
    for budget in (1, 24, 9999):
        counts = []
        for in_order in (False, True):
            model.zero_grad()
            counts.append(padding.padded_update(model, some, configured(), budget, in_order))
            # factors are float32 here and float64 there
            assert (flat_grad(model) - wanted).abs().max() < 1e-6 * wanted.abs().max()
        if budget == 1:
            assert counts == [real, real]
        else:
            assert real < counts[1] <= counts[0]
    model.zero_grad()
    assert padding.packed_update(model, some, configured(share_prompts=True), packing.MASKED) < real
    assert (flat_grad(model) - wanted).abs().max() < 1e-10 * wanted.abs().max()


def test_micro_batches_by_hand():
    """Kills: the shortest for the longest, one too many, the longest of the one before."""
    lengths = dict(enumerate([3, 5, 2, 9, 4]))
    assert padding.micro_batches([0, 1, 2, 3, 4], lengths, 15) == [[0, 1, 2], [3], [4]]
    assert padding.micro_batches([2, 0, 4, 1, 3], lengths, 12) == [[2, 0, 4], [1], [3]]
    assert padding.micro_batches([3, 0, 2], lengths, 10) == [[3], [0, 2]], "the longest of this one"
    assert padding.micro_batches([3, 0], lengths, 5) == [[3], [0]], "what is too long stands alone"


def test_plan_counts_what_is_forwarded(work):
    model, some = work
    for share in (False, True):
        slots = some.plan(32, 64, share)
        cfg = configured(share_prompts=share)
        model.zero_grad()
        row = update.accumulate_gradients(
            model, some.rollouts, some.advantages, some.scale, some.keep, cfg=cfg
        ).tolist()  # fmt: skip
        sums = dict(zip(update.SUMS, row, strict=True))
        assert (sums["tokens"], sums["slots"]) == (sum(slots), 32 * len(slots))
        assert max(slots) <= 32


def test_log_normal_lengths_spread_tenfold():
    """From the median over the root of ten to the median times it, symmetric in the logarithm."""
    work = padding.log_normal_work(200, 16, 120, 24, 258, "cpu")
    lengths = work.rollouts.lengths.double()
    assert lengths.min() == int(120 / 10**0.5)
    assert lengths.max() == int(120 * 10**0.5)
    assert lengths.median().item() == pytest.approx(120, abs=5)
    assert lengths.log10().std().item() == pytest.approx(0.25, abs=0.03)
    assert {len(ids) for ids in work.rollouts.prompt_ids} == set(range(12, 37))


def test_model_flops_by_hand():
    """Two layers of the 0.8 M-parameter shape. Kills: a forward only, attention without its square, the embedding."""
    model = padding.random_model("tiny", "cpu")
    weights = sum(p.numel() for name, p in model.named_parameters() if "proj" in name)
    flops = padding.model_flops(model.config, [(10, 30), (5, 5)])
    assert flops == 6 * (weights * 50 + 2048 * 128 * 35 + 4 * 4 * 32 * (40**2 + 10**2))


def test_rows_of_a_measurement(work, monkeypatch):
    """Every variant is there, padded ones with their best micro-batch. Kills: the worst or the first one."""
    model, some = work
    plain = padding.padded_update

    def slow(model, work, cfg, tokens, in_order):
        time.sleep(0.0 if tokens == 20 else 0.05)
        return plain(model, work, cfg, tokens, in_order)

    monkeypatch.setattr(padding, "MICRO_BATCHES", (10, 20, 40, 4000))

    monkeypatch.setattr(padding, "padded_update", slow)
    rows = padding.time_updates(model.float(), "name", some, configured(), rounds=1)
    assert [row["variant"] for row in rows] == [
        "padded, arrival", "padded, sorted", "packed", "packed, shared prompts", "packed, masked SDPA"
    ]  # fmt: skip
    assert all(row.keys() >= {"lengths", "variant", "tokens", "seconds", "ratio"} for row in rows)
    assert rows[0]["ratio"] == 1
    assert [row["micro_batch"] for row in rows] == [20, 20, None, None, None]
    assert rows[2]["tokens"] > rows[3]["tokens"], "shared prompts"
    for row in rows:
        assert row["ratio"] == pytest.approx(rows[0]["seconds"] / row["seconds"])
    densities = padding.density_rows("name", [some, some], 32)
    assert [round(row["density"], 9) for row in densities if row["variant"] == "density, window 64"] == [
        round(packing.pack_density(some.plan(32, 64, False)[:-1], 32), 9)
    ]


def test_a_variant_that_computes_something_else_is_caught(work, monkeypatch):
    model, some = work
    plain, all_of_it = padding.padded_update, replace(some, keep=torch.ones_like(some.keep))

    def wrong(model, work, cfg, tokens, in_order):
        return plain(model, all_of_it if in_order else work, cfg, tokens, in_order)

    monkeypatch.setattr(padding, "MICRO_BATCHES", (32,))
    monkeypatch.setattr(padding, "padded_update", wrong)
    with pytest.raises(AssertionError, match=r"padded, sorted.*the gradient is off"):
        padding.time_updates(model.float(), "name", some, configured(), rounds=1)
