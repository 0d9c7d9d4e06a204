"""Padded updates equal packed ones, and the bench measures what it says."""

from dataclasses import replace

import pytest
import torch
from test_packing import flat_grad

import bench
import config
from bench import masked, shapes, update
from bench import packing as bench_packing
from update import accumulate_gradients

VARIANTS = [
    "padded, arrival", "padded, sorted", "packed", "packed, shared prompts", "packed, masked SDPA"
]  # fmt: skip


@pytest.fixture
def work(make_policy, make_rollouts):
    """(model, Work): 20 of 30 ragged completions of five prompts, some of them clipped."""
    model, _ = make_policy(dtype=torch.float64)
    generator = torch.Generator().manual_seed(1)
    advantages, scale = torch.randn(2, 5, 6, dtype=torch.float64, generator=generator)
    keep = torch.arange(30).view(5, 6) % 3 > 0
    rollouts = make_rollouts(model, 5, 6, drift=0.3)
    return model, update.Work(rollouts, advantages, scale.abs(), keep)


def configured(**changes):
    return config.resolve(config.Config(pack_tokens=32, device="cpu", **changes))


def test_padded_is_the_same_update(work):
    """Both orders and several micro-batch sizes against the packed gradient; padding counts as
    tokens. Catches predictors in the wrong row, and training on pad tokens or dropped sequences."""
    model, some = work
    model.zero_grad()
    real = update.packed_update(model, some, configured(share_prompts=False))
    wanted = flat_grad(model)
    assert real == sum(prompt + length - 1 for prompt, length in some.sequences().values())
    for budget in (1, 24, 9999):
        counts = []
        for in_order in (False, True):
            model.zero_grad()
            counts.append(update.padded_update(model, some, configured(), budget, in_order))
            # factors are float32 here and float64 there
            assert (flat_grad(model) - wanted).abs().max() < 1e-6 * wanted.abs().max()
        if budget == 1:
            assert counts == [real, real]
        else:
            assert real < counts[1] <= counts[0]
    model.zero_grad()
    assert update.packed_update(model, some, configured(share_prompts=True), masked.MASKED) < real
    assert (flat_grad(model) - wanted).abs().max() < 1e-10 * wanted.abs().max()


def test_micro_batches_by_hand():
    """Catches the shortest length in place of the longest, one sequence too many, and the longest
    length of the micro-batch before."""
    lengths = dict(enumerate([3, 5, 2, 9, 4]))
    assert update.micro_batches([0, 1, 2, 3, 4], lengths, 15) == [[0, 1, 2], [3], [4]]
    assert update.micro_batches([2, 0, 4, 1, 3], lengths, 12) == [[2, 0, 4], [1], [3]]
    assert update.micro_batches([3, 0, 2], lengths, 10) == [[3], [0, 2]], "the longest of this one"
    assert update.micro_batches([3, 0], lengths, 5) == [[3], [0]], "too long: alone"


def test_plan_counts_forwarded_tokens(work):
    """Catches a plan that is not the update's."""
    model, some = work
    for share in (False, True):
        slots = some.plan(32, 64, share)
        model.zero_grad()
        args = (model, some.rollouts, some.advantages, some.scale, some.keep)
        sums = accumulate_gradients(*args, cfg=configured(share_prompts=share))
        assert (sums.tokens, sums.slots) == (sum(slots), 32 * len(slots))
        assert max(slots) <= 32


def test_recorded_works(small_runs):
    """Every update of a run, with what it kept. Catches a record of all completions, and updates
    that are missing."""
    args = ["--method", "dppo", "--steps", "3", "--minibatches", "2"]
    trainer, rows = bench.run(args, update.Recorder)
    cfg = trainer.cfg
    slots = [
        work.plan(cfg.pack_tokens, cfg.pack_window, cfg.share_prompts) for work in trainer.works
    ]
    tokens = [sum(slots[2 * step] + slots[2 * step + 1]) for step in range(3)]
    assert tokens == [row["tokens/trained"] for row in rows]
    assert len(update.recorded_works("grpo", 1)) == 1


def test_log_normal_lengths_spread_tenfold():
    """From the median over the root of ten to the median times it, symmetric in the logarithm."""
    work = update.log_normal_work(200, 16, 120, 24, 258)
    lengths = work.rollouts.lengths.double()
    assert lengths.min() == int(120 / 10**0.5)
    assert lengths.max() == int(120 * 10**0.5)
    assert lengths.median().item() == pytest.approx(120, abs=5)
    assert lengths.log10().std().item() == pytest.approx(0.25, abs=0.03)
    assert {len(ids) for ids in work.rollouts.prompt_ids} == set(range(12, 37))


def test_model_flops_by_hand():
    """The tiny shape. Catches a count of the forward pass alone, attention that is not quadratic,
    and an embedding that counts as a multiplication."""
    model = shapes.random_model("tiny", "cpu")
    weights = sum(p.numel() for name, p in model.named_parameters() if "proj" in name)
    flops = shapes.model_flops(model.config, [(10, 30), (5, 5)])
    assert flops == 6 * (weights * 50 + 2048 * 128 * 35 + 4 * 4 * 32 * (40**2 + 10**2))


def test_rows_of_a_measurement(work, monkeypatch):
    """All variants are there, padded ones with their best micro-batch; the clock counts calls.
    Catches the worst or the first micro-batch, and a ratio upside down."""
    model, some = work
    plain, now = {name: getattr(update, name) for name in ("padded_update", "packed_update")}, [0]

    def clock(_device):
        now[0] += 1
        return now[0]

    def padded(model, work, cfg, tokens, in_order):
        now[0] += 0 if tokens == 20 else 5
        return plain["padded_update"](model, work, cfg, tokens, in_order)

    def packed(*args):
        now[0] += 1
        return plain["packed_update"](*args)

    monkeypatch.setattr(update, "MICRO_BATCHES", (10, 20, 40, 4000))
    monkeypatch.setattr(update, "clock", clock)
    monkeypatch.setattr(update, "padded_update", padded)
    monkeypatch.setattr(update, "packed_update", packed)
    rows = update.time_updates(model.float(), "name", some, configured(), rounds=1)
    assert [row["variant"] for row in rows] == VARIANTS
    assert all(row.keys() >= {"lengths", "variant", "tokens", "seconds", "ratio"} for row in rows)
    assert [row["micro_batch"] for row in rows] == [20, 20, None, None, None]
    assert [row["seconds"] for row in rows] == [1, 1, 2, 2, 2]
    assert [row["ratio"] for row in rows] == [1, 1, 0.5, 0.5, 0.5]
    assert rows[2]["tokens"] > rows[3]["tokens"], "shared prompts"


def test_density(work):
    """Catches a density that counts the last slot, and one of another window."""
    _, some = work
    found = {row["variant"]: row["density"] for row in update.density_rows("name", [some] * 2, 32)}
    wanted = bench_packing.pack_density(some.plan(32, 64, False)[:-1], 32)
    assert found["density, window 64"] == pytest.approx(wanted)


def test_a_variant_with_another_gradient_is_caught(work, monkeypatch):
    """The bench refuses to time an update that computes something else."""
    model, some = work
    plain, everything = update.padded_update, replace(some, keep=torch.ones_like(some.keep))

    def wrong(model, work, cfg, tokens, in_order):
        return plain(model, everything if in_order else work, cfg, tokens, in_order)

    monkeypatch.setattr(update, "MICRO_BATCHES", (32,))
    monkeypatch.setattr(update, "padded_update", wrong)
    with pytest.raises(AssertionError, match=r"padded, sorted.*the gradient is off"):
        update.time_updates(model.float(), "name", some, configured(), rounds=1)
