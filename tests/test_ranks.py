"""Ranks share the work evenly, and --shard fsdp is the same run: gradients, updates, checkpoints.
Whole runs: test_train.py."""

import itertools
import json
import os
import time

import pytest
import torch
import toy
from safetensors.torch import load_file
from toy import flags, in_processes, rows

import config
import models
import update
from rollout import Rollouts
from runtime import InputError, checkpoint, ranks
from runtime.stop import Stop

# ---------------------------------------------------------------------------- the process group


@pytest.fixture
def launched(monkeypatch):
    """Set the variables of a launcher, and no others."""

    def set_only(variables):
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR"):
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return set_only


def test_a_process_that_nobody_launched_is_alone(run, tmp_path, launched):
    """Whatever a scheduler exports. Catches a share of the batch that nobody samples."""
    run("plain", steps=1)
    launched({"WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"})
    run("exported", steps=1)
    plain, exported = (toy.rows(tmp_path / name)[0] for name in ("plain", "exported"))
    assert plain["reward"] == exported["reward"]
    assert json.loads((tmp_path / "exported" / "config.json").read_text())["ranks"] == 1


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


# ---------------------------------------------------------------------------- shares of the work


def shared_out():
    """On each rank: checks what it receives, also if log-probs are computed again for later
    updates."""
    rank, _ = ranks.start("cpu")
    K, G, T = 5, 4, 6
    draw = torch.Generator().manual_seed(3)
    lengths = torch.randint(0, T + 1, (K, G), generator=draw)
    keep = torch.rand(K, G, generator=draw) < 0.6
    keep[1] = False
    prompt_ids = [[100 + k] * (k + 1) for k in range(K)]
    mine = (torch.tensor([0, 1, 1, 0, 1]) == rank).nonzero()[:, 0]
    # a token's id says whose it is; its log-probs follow from it
    ids = torch.arange(K * G * T).view(K, G, T)
    own = ids[mine]
    nothing = torch.zeros(own.shape[:2])
    rollouts = Rollouts(
        [prompt_ids[k] for k in mine.tolist()], own, -own / 1000.0, nothing, nothing,
        lengths[mine], nothing.bool(),
    )  # fmt: skip
    for old in (None, 2 * rollouts.logprobs):
        received = update.share_out(update.kept_sequences(rollouts, keep, mine, old))
        for one in received:
            k, g = divmod(one.place, G)
            expected = ids[k, g, : lengths[k, g]]
            assert one.prompt == prompt_ids[k]
            assert one.completion == expected.tolist()
            torch.testing.assert_close(one.logprobs, -expected / 1000.0)
            factor = 1 if old is None else 2
            torch.testing.assert_close(one.old_logprobs, factor * one.logprobs)
            # not a view: with it the whole table would travel
            assert one.logprobs.untyped_storage().nbytes() == 4 * len(expected)
    places = [one.place for one in received]
    assert places == sorted(places)
    tokens = sum(map(update.work, received))
    print(places, keep.flatten().nonzero()[:, 0].tolist(), tokens, sep=";")


def test_sequences_arrive_whole_and_once():
    """Catches a sequence that is lost, that arrives twice, or with another's tokens or log-probs,
    and ranks with unequal work. Of 3 ranks, the last one has sampled nothing."""
    printed = [line.split(";") for line in in_processes(3, shared_out)]
    got = sorted(place for places, *_ in printed for place in eval(places))
    assert got == eval(printed[0][1])
    tokens = [int(tokens) for *_, tokens in printed]
    assert max(tokens) - min(tokens) <= 2


def watch(owner, name):
    """Print when each call of owner.name begins and ends."""
    work = getattr(owner, name)

    def watched(*args):
        began = time.monotonic()
        time.sleep(0.1)
        found = work(*args)
        print("span", began, time.monotonic(), flush=True)
        return found

    setattr(owner, name, watched)


def assert_in_turns(printed, calls):
    lines = [line.split() for line in "".join(printed).splitlines()]
    spans = sorted(tuple(map(float, words[1:])) for words in lines if words[0] == "span")
    assert len(spans) == calls
    assert all(end <= began for (_, end), (began, _) in itertools.pairwise(spans))


def load_slowly(folder):
    ranks.start("cpu")
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE"):  # as some launchers do not set
        del os.environ[name]
    watch(models, "read")
    cfg = config.resolve(config.Config(model=folder, device="cpu", beta=0.1, shard="fsdp"))
    models.load_models(cfg, None)


def test_ranks_load_in_turns(policy_folder):
    """The model, the reference and the copy that samples. Catches ranks that hold a model on the
    host at the same time: eight of 8B are 260 GB."""
    assert_in_turns(in_processes(2, load_slowly, policy_folder), calls=6)


# ---------------------------------------------------------------------------- sharded weights


def resume_slowly(args):
    watch(checkpoint, "load_state")
    toy.main(args)


def test_resumed_on_other_ranks(policy_folder, run, tmp_path):
    """A step sharded over 2 ranks, one on one rank, one sharded over 3: the log and checkpoint of a
    run on one rank.

    Catches a share that is saved as the whole, Adam's state of another parameter, a part of the
    history that is lost, and ranks that read the optimizer's state at the same time.
    """
    common = {"save_every": 1, "eval_every": 1, "eval_problems": 3, "beta": 0.1}
    broken = flags(policy_folder, str(tmp_path / "broken"), **common)
    run("whole", steps=3, **common)
    in_processes(2, toy.main, [*broken, "--steps", "1", "--shard", "fsdp"])
    run("broken", steps=2, resume=True, shard="none", **common)
    printed = in_processes(3, resume_slowly, [*broken, "--steps=3", "--resume", "--shard=fsdp"])
    assert_in_turns(printed, calls=3)
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
