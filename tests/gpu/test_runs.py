"""Whole runs on a GPU: training with every method and option, resuming, evaluation."""

import gc
import itertools

import pytest
import torch
import toy

import config
import eval as evaluation
import rollout
from runtime import log

RUNS = {  # changes of toy.flags, and the attention kernel
    "grpo": ({}, "torch"),
    "dppo": ({"loss": "dapo", "importance_cap": 2}, "flash"),
    "pps": ({"dtype": "float32", "engine": "hf"}, "flash"),
    "cppo": ({"loss": "cispo"}, "none"),
    "grpo_zero": ({"beta": 0.05, "gradient_checkpointing": True, "loss": "gspo"}, "flash"),
    "dppo_floor": ({"minibatches": 2, "importance_cap": 2}, "none"),
}
RESUMED = {
    "pps": {"lr_schedule": "cosine", "beta": 0.05, "loss": "dr_grpo"},
    "dppo": {"engine": "hf", "mask_truncated": True, "rollout_batch": 6},
}


def without_memory(folder):
    """toy.timeless without the peak of memory, which a process starts over."""
    rows, *rest = toy.timeless(folder)
    return [{key: row[key] for key in row if not key.startswith("memory")} for row in rows], *rest


@pytest.mark.parametrize("method", RUNS)
def test_train(run, kernel, tmp_path, monkeypatch, method):
    """Three steps with evaluations and a checkpoint, the weights on the GPU and every loss finite.
    Catches a tensor on the wrong device anywhere in a run, and a copy that samples on the CPU."""
    changes, attention = RUNS[method]
    sample, devices = rollout.sample, set()
    watched = lambda model, *a, **b: devices.add(model.device.type) or sample(model, *a, **b)
    monkeypatch.setattr(rollout, "sample", watched)
    kernel(attention)
    common = {"device": "cuda", "steps": 3, "eval_every": 2, "eval_problems": 3, "save_every": 2}
    rows = run("run", method=method, **(common | changes))
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert [row["step"] for row in rows if "eval/avg@4" in row] == [0, 2, 3]
    assert all(row["memory/peak_gib"] > 0 for row in rows[1:])
    state = torch.load(tmp_path / "run/checkpoint/trainer.pt", weights_only=True)
    moments = state["optimizer"]["state"].values()
    assert any(moment["exp_avg"].abs().max() > 0 for moment in moments)
    assert devices == {"cuda"}


@pytest.mark.parametrize("method", RESUMED)
def test_resumed(run, kernel, pretend, tmp_path, method):
    """Log, samples and weights as if never stopped, bit for bit on the pretend device; a real GPU
    adds up in no fixed order. Catches an optimizer that is restored on the wrong device, and state
    that is lost."""
    kernel("none")
    common = {"device": "cuda", "method": method, "save_every": 2, **RESUMED[method]}
    run("whole", **common)
    run("part", until=2, **common)
    toy.main(["--out-dir", str(tmp_path / "part"), "--resume"])
    whole, part = (without_memory(tmp_path / name) for name in ("whole", "part"))
    assert [row["step"] for row in part[0]] == [1, 2, 3, 4]
    if pretend:
        toy.assert_same(whole, part)


EVALUATIONS = [
    {}, {"engine": "hf", "temperature": 0.0}, {"dtype": "float32", "batch_size": 2},
    {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.05},
]  # fmt: skip


@pytest.mark.parametrize("options", EVALUATIONS)
def test_evaluation(policy_folder, tmp_path, options):
    """Stored and printed, and sampled on the GPU. Catches a model that stays on the CPU, and a
    tensor that json cannot write."""
    gc.collect()  # what other tests have left would be freed in between
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.max_memory_allocated()
    common = {"model": policy_folder, "problems": 3, "k": 2, "max_new_tokens": 8}
    folder = tmp_path / "evals"
    cfg = evaluation.EvalConfig(device="cuda", out_dir=str(folder), **common, **options)
    (row,) = evaluation.main(cfg)
    stored = log.read_rows(folder / "arithmetic.jsonl")
    lengths = list(itertools.chain(*(each["lengths"] for each in stored)))
    assert len(lengths) == 6
    assert row["mean_length"] == pytest.approx(sum(lengths) / 6)
    assert torch.cuda.max_memory_allocated() > before


def test_one_prompt(policy_folder, capsys):
    """Catches an answer that is decoded from the wrong device, and auto that is not the GPU."""
    assert config.resolve(config.Config()).device == "cuda"
    cfg = evaluation.EvalConfig(model=policy_folder, prompt="7+9+5?", max_new_tokens=4)
    (row,) = evaluation.main(cfg)
    assert row["completion"] in capsys.readouterr().out
