"""Ranks agree, and a run may be resumed on others. Gradients of several ranks: test_train.py."""

import json

import pytest
import torch
import toy
from safetensors.torch import load_file
from toy import flags, in_processes, rows

from runtime import InputError, ranks
from runtime.stop import Stop

# ---------------------------------------------------------------------------- the process group


def test_a_process_that_nobody_launched_is_alone(monkeypatch):
    """Whatever a scheduler exports. Catches a share of the batch that nobody samples."""
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert ranks.start("cpu") == (0, 1)


def broadcast_and_stop():
    rank, world = ranks.start("cpu")

    def fail():
        raise InputError(f"wrong on {rank}")

    found = ranks.broadcast(lambda: print("called", flush=True) or f"found by {rank}")
    with pytest.raises(InputError) as caught:
        ranks.broadcast(fail)
    stop = Stop()
    stop.requested = rank == 1
    print(f"{rank} of {world}: {found}, {caught.value}, {stop.agreed()}")


def test_the_ranks_agree():
    """Every rank gets the result, and the InputError, of rank 0. A request to stop on one rank
    stops all. Catches problems that each rank chooses by its own clock, and a rank that goes on,
    alone, to the next collective."""
    first, second = in_processes(2, broadcast_and_stop)
    assert first == "called\n0 of 2: found by 0, wrong on 0, True\n"
    assert second == "1 of 2: found by 0, wrong on 0, True\n"


# ---------------------------------------------------------------------------- sharded weights


def test_resumed_on_other_ranks(policy_folder, run, tmp_path):
    """A step sharded over 2 ranks, one on one rank, one sharded over 3: the log and checkpoint of a
    run on one rank. Catches a share that is saved as the whole."""
    common = {"save_every": 1, "eval_every": 1, "eval_problems": 3, "beta": 0.1}
    broken = flags(policy_folder, str(tmp_path / "broken"), **common)
    run("whole", steps=3, **common)
    in_processes(2, toy.main, [*broken, "--steps", "1", "--shard", "fsdp"])
    run("broken", steps=2, resume=True, shard="none", **common)
    in_processes(3, toy.main, [*broken, "--steps=3", "--resume", "--shard=fsdp"])
    for here, there in zip(rows(tmp_path / "whole"), rows(tmp_path / "broken"), strict=True):
        assert here.keys() == there.keys()
        for key in {"step", "reward", "grad_norm", "loss", "eval/avg@4"} & here.keys():
            assert here[key] == pytest.approx(there[key], rel=1e-4, abs=1e-6), key
    one, other = tmp_path / "whole" / "checkpoint", tmp_path / "broken" / "checkpoint"
    assert {path.name for path in one.iterdir()} == {path.name for path in other.iterdir()}
    here, there = (json.loads((folder / "config.json").read_text()) for folder in (one, other))
    assert here == there
    here, there = (load_file(folder / "model.safetensors") for folder in (one, other))
    torch.testing.assert_close(here, there, rtol=1e-4, atol=1e-5)
    load = lambda folder: torch.load(folder / "trainer.pt", weights_only=True)
    here, there = load(one), load(other)
    histories = (here["trainer"]["history"], there["trainer"]["history"])
    torch.testing.assert_close(*histories, equal_nan=True)
    here, there = here["optimizer"], there["optimizer"]
    assert here["param_groups"] == there["param_groups"]
    assert "exp_avg" in here["state"][0]
    torch.testing.assert_close(here["state"], there["state"], rtol=1e-3, atol=1e-6)
