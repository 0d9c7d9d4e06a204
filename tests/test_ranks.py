"""--shard fsdp is the same run: gradients, updates, checkpoints. Whole runs: test_train.py."""

import json

import pytest
import sharded
import torch
import toy
from safetensors.torch import load_file
from toy import flags, in_processes, rows
from transformers import Qwen3ForCausalLM

from runtime import InputError, ranks


def test_gradients_of_a_sharded_model(make_policy, tmp_path):
    """Updates with clipping, AdamW and the KL term: tied and untied heads, with and without
    gradient checkpointing and head chunks, two losses, ranks with unequal packs and with none.

    Catches a mean over ranks, a rank that runs fewer forwards, a tied weight in two shards, and
    gradients of gathered weights in place of the optimizer's.
    """
    for name, tied in (("tied", True), ("untied", False)):
        model, tokenizer = make_policy()
        model.config.tie_word_embeddings = tied
        torch.manual_seed(0)
        Qwen3ForCausalLM(model.config).save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    folders = (str(tmp_path / "tied"), str(tmp_path / "untied"))
    for printed in in_processes(2, sharded.main, *folders):
        assert printed.count("same") == 8


def test_resumed_on_other_ranks(policy_folder, tmp_path):
    """Two steps sharded over 2 ranks, two on one rank, two sharded over 3: the log and checkpoint
    of a run on one rank.

    Catches a share that is saved as the whole, Adam's state of another parameter, and
    a fingerprint of a share.
    """
    common = {"save_every": 2, "eval_every": 2, "eval_problems": 3, "beta": 0.1}

    def go(name, steps, world, *args):
        run = flags(policy_folder, str(tmp_path / name), weight_decay=0.1, steps=steps, **common)
        in_processes(world, toy.main, [*run, *args])

    go("whole", 6, 1)
    go("broken", 2, 2, "--shard", "fsdp")
    go("broken", 4, 1, "--resume", "--shard", "none")
    go("broken", 6, 3, "--resume", "--shard", "fsdp")
    for here, there in zip(rows(tmp_path / "whole"), rows(tmp_path / "broken"), strict=True):
        assert here.keys() == there.keys()
        for key in {"step", "reward", "grad_norm", "loss", "eval/avg@4"} & here.keys():
            assert here[key] == pytest.approx(there[key], rel=1e-4, abs=1e-6), key
    one, other = tmp_path / "whole" / "checkpoint", tmp_path / "broken" / "checkpoint"
    assert {path.name for path in one.iterdir()} == {path.name for path in other.iterdir()}
    here, there = (json.loads((folder / "config.json").read_text()) for folder in (one, other))
    assert here == there
    here, there = (load_file(folder / "model.safetensors") for folder in (one, other))
    assert here.keys() == there.keys()
    for name in here:
        torch.testing.assert_close(here[name], there[name], rtol=1e-4, atol=1e-5)
    load = lambda folder: torch.load(folder / "trainer.pt", weights_only=True)["optimizer"]
    here, there = load(one), load(other)
    assert here["param_groups"] == there["param_groups"]
    assert here["state"].keys() == there["state"].keys()
    assert "exp_avg" in here["state"][0]
    for index, entries in here["state"].items():
        for name, value in entries.items():
            torch.testing.assert_close(value, there["state"][index][name], rtol=1e-3, atol=1e-6)


def broadcast_on_ranks():
    rank, world = ranks.start("cpu")

    def fail():
        raise InputError(f"wrong on {rank}")

    found = ranks.broadcast(lambda: print("called", flush=True) or f"found by {rank}")
    try:
        ranks.broadcast(fail)
    except InputError as error:
        print(f"{rank} of {world}: {found}, {error}")


def test_the_first_rank_decides():
    """Every rank gets the result, and the InputError, of rank 0.

    Catches problems that each rank chooses by its own clock, and a base model that each rank
    trains.
    """
    first, second = in_processes(2, broadcast_on_ranks)
    assert first == "called\n0 of 2: found by 0, wrong on 0\n"
    assert second == "1 of 2: found by 0, wrong on 0\n"
