"""Whole runs on a GPU: training with every option, resuming, evaluation."""

import pytest
import toy

import config
import eval as evaluation
import rollout
from runtime import log

RUNS = {  # changes of toy.flags
    "dppo": {"engine": "hf", "mask_truncated": True, "rollout_batch": 6},
    "adaptive": {"lora": 4, "beta": 0.05, "gradient_checkpointing": True},
    "pps": {"lr_schedule": "cosine", "beta": 0.05, "loss": "dr_grpo"},
    "dppo_floor": {
        "minibatches": 2, "importance_cap": 2, "gradient_checkpointing": True, "dtype": "float32"
    },
}  # fmt: skip
EVALUATIONS = [
    {"engine": "hf", "dtype": "float32", "batch_size": 2},
    {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
]


@pytest.fixture
def devices(monkeypatch):
    """The devices of the models that sample."""
    sample, seen = rollout.sample, set()
    watched = lambda model, *a, **b: seen.add(model.device.type) or sample(model, *a, **b)
    monkeypatch.setattr(rollout, "sample", watched)
    return seen


def without_memory(folder):
    """toy.timeless without the peak of memory, which a process starts over."""
    rows, *rest = toy.timeless(folder)
    return [{key: row[key] for key in row if not key.startswith("memory")} for row in rows], *rest


@pytest.mark.parametrize("method", RUNS)
def test_train_and_resume(run, kernel, pretend, devices, tmp_path, method):
    """Log, samples and weights as if never stopped, bit for bit on the pretend device; a real GPU
    adds up in no fixed order. Catches a tensor on the wrong device anywhere in a run, a copy that
    samples on the CPU, and an optimizer that is restored on the wrong device."""
    common = {"steps": 2, "eval_every": 2, "eval_problems": 1, "save_every": 1} | RUNS[method]
    rows = run("whole", device="cuda", method=method, **common)
    assert all(row["memory/peak_gib"] > 0 for row in rows[1:])
    run("part", device="cuda", method=method, until=1, **common)
    toy.main(["--out-dir", str(tmp_path / "part"), "--resume"])
    whole, part = (without_memory(tmp_path / name) for name in ("whole", "part"))
    assert [row["step"] for row in part[0]] == [0, 1, 2]
    assert devices == {"cuda"}
    if pretend:
        toy.assert_same(whole, part)


@pytest.mark.parametrize("options", EVALUATIONS)
def test_evaluation(policy_folder, devices, tmp_path, options):
    """Catches a model that stays on the CPU, a tensor that json cannot write, and defaults that are
    not a GPU's."""
    cfg = config.resolve(config.Config())
    assert (cfg.device, cfg.dtype) == ("cuda", "bfloat16")
    common = {"model": policy_folder, "problems": 3, "k": 2, "max_new_tokens": 8}
    (row,) = evaluation.main(evaluation.EvalConfig(out_dir=str(tmp_path), **common, **options))
    stored = log.read_rows(tmp_path / "arithmetic.jsonl")
    assert row["mean_length"] == pytest.approx(sum(sum(each["lengths"]) for each in stored) / 6)
    assert devices == {"cuda"}
