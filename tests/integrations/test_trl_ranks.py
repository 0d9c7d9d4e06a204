"""dppo_trl.py on several processes: exact by enumeration, rows that change ranks, DDP, FSDP2 and
DeepSpeed. tests/trl.sh builds an environment with TRL and DeepSpeed and runs these tests in it."""

import importlib
import json

import pytest
import torch
import transformers
from toy import in_processes

pytest.importorskip("trl", reason="tests/trl.sh runs these, with TRL")
trl_toy = importlib.import_module("trl_toy")  # after the line above: it needs TRL, too
trl_ranks = importlib.import_module("trl_ranks")


def test_two_ranks_are_exact():
    """The same with DistributedDataParallel: every loss, groups that straddle the ranks, and the
    mistake of weighted fillers, which no single rank can tell."""
    assert in_processes(2, trl_ranks.check_ranks)[0].splitlines()[-1] == "exact"


@pytest.mark.parametrize("world", [2, 4])
def test_rows_change_ranks(tmp_path, world):
    """What is kept is divided evenly, and every loss stays exact. Catches a row with another's
    factor or log-probs, bnpo's denominator of the rank that it goes to, and padding on the wrong
    side."""
    trl_toy.save_model(tmp_path / "llama", "llama", torch.float32)
    printed = in_processes(world, trl_ranks.check_divided, str(tmp_path / "llama"))
    assert printed[0].splitlines()[-1] == "exact"


def test_rows_of_absolute_positions_stay(monkeypatch):
    """Fails if a row, even a filler, leaves its rank although the ranks pad prompts to different
    widths, or if a kept row is lost."""
    trainer = trl_toy.make_trainer()
    monkeypatch.setattr(type(trainer.accelerator), "gather", lambda self, _: torch.tensor([2, 3]))
    trainer.rows = {"prompt_ids": torch.zeros(4, 2)}
    kept = torch.tensor([[1, 1, 1, 0], [0, 0, 1, 0]]).bool()
    table, fills = trainer.divide(kept, torch.tensor([9, 5, 7, 4, 6, 8, 7, 6]))
    assert table.tolist() == [[1, 2, 0], [4, 4, 6]]
    assert fills.tolist() == [[False] * 3, [True, True, False]]
    trainer.rotary = True
    table, fills = trainer.divide(kept, torch.tensor([9, 5, 7, 4, 6, 8, 7, 6]))
    assert table.tolist() == [[1, 6], [2, 0]]
    assert not fills.any()


@pytest.mark.parametrize(
    ("accumulation", "generation", "iterations", "group"),
    [(1, 1, 1, 4), (4, 4, 1, 4), (8, 8, 1, 4), (8, 4, 1, 4), (2, 4, 2, 4), (4, 4, 1, 3)],
)
@pytest.mark.parametrize("world", [1, 2])
def test_whole_runs(accumulation, generation, iterations, group, world):
    """Steps, rollouts and draws are as many as there should be, and no rollout is lost between two
    ranks. Catches ranks that wait for each other, a window that is drawn again in each micro-step,
    and five prompts of three completions on two ranks."""
    layout = {
        "gradient_accumulation_steps": accumulation, "steps_per_generation": generation,
        "num_iterations": iterations, "per_device_train_batch_size": group,
        "num_generations": group,
    }  # fmt: skip
    prompts = generation == accumulation and iterations == 1
    rules = {"prompt_rule": "uniform" if prompts else "none", "prompt_prune_rate": 0.35}
    first = in_processes(world, trl_ranks.count_draws, layout, rules)[0]
    counts = json.loads(first.splitlines()[-1])
    micro_steps = 4 * accumulation
    assert counts["steps"] == 4
    assert counts["draws"] == micro_steps // min(accumulation, generation)
    assert counts["batches"] == micro_steps // (generation * iterations)
    assert counts["rows"] == counts["rows_of_ranks"]
    unit = 2 if (group, world) == (3, 2) else 1
    kept = unit * max(1, round(0.65 * generation * world / unit)) if prompts else generation * world
    assert counts["rows"] == kept * group


@pytest.mark.parametrize("kind", ["fsdp2", "zero2", "zero3"])
def test_sharded_runs(tmp_path, kind):
    """Three steps on two ranks, with idle micro-steps, end with the same weights under FSDP2 and
    DeepSpeed's ZeRO as under DDP. Catches an idle micro-step that the wrapper refuses, that adds a
    gradient, or after which the last update's gradients are still there."""
    if kind != "fsdp2":
        pytest.importorskip("deepspeed", reason="tests/trl.sh installs it")
    folder, found = tmp_path / "llama", {}
    trl_toy.save_model(folder, "llama", torch.float32)
    start = transformers.AutoModelForCausalLM.from_pretrained(folder).state_dict()
    for name, rule in (("ddp", "none"), ("ddp", "pps"), (kind, "zero"), (kind, "pps")):
        out = str(tmp_path / f"{name}-{rule}")
        in_processes(2, trl_ranks.train_sharded, str(folder), name, rule, out)
        found[name, rule], forwards = torch.load(f"{out}.pt")
        assert rule == "none" or min(forwards) < 1, "no micro-step was idle"
    for rule, reference in (("zero", "none"), ("pps", "pps")):
        for name, there in found["ddp", reference].items():
            error = (found[kind, rule][name] - there).norm()
            assert error < 1e-5 * (there - start[name]).norm() + 1e-7, (name, rule, error)
