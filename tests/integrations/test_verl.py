"""dppo_verl.py without Ray: several updates, verl's engine, a step's queue and log, checkpoints.
test_exact.py has what every trainer must do.
"""

import re
from pathlib import Path

import pytest
import torch
from exact import assert_same_history, calls_of, over_completions, over_prompts

import dppo
from dppo import RuleError
from proof import relative_error

pytest.importorskip("verl", reason="tests/verl.sh runs these, with verl")
import verl
import verl_toy as toy
from verl_toy import FEW, MODE, UPDATE, Toy


@pytest.mark.parametrize("remove_padding", [True, False])
def test_exact_in_several_micro_batches(remove_padding):
    """verl's engine packs rows or pads them, and micro-batches have another order. Catches a weight
    that is given to another row's tokens."""
    engine = {"use_remove_padding": remove_padding, "max_token_len_per_gpu": 12}
    pruned = Toy(engine=engine, ranks=1, **FEW, completion_prune_rate=0.4)
    assert relative_error(over_completions(pruned.gradient), pruned.stock()) < 1e-12
    assert len(pruned.forwarded) > 1


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
def test_each_update_is_exact(mode):
    """Two updates of two candidates: after both draws, the expected gradient of each is verl's for
    its candidates. Catches prompts that are given to updates after the draw, rows that move to
    another update, another update's denominator, and updates of unequal size."""
    rules = {"prompt_rule": "dppo", "prompt_prune_rate": 0.5, "completion_prune_rate": 0.5}
    pruned = Toy(**{MODE: mode, UPDATE: 2}, **rules)
    pruned.teach(mean_tokens=60.0)
    for part in (0, 1):
        found = over_prompts(lambda part=part: over_completions(pruned.gradient, part))[part]
        own = slice(2 * part, 2 * part + 2)
        wanted = pruned.stock(toy.PROMPTS[own])
        if mode == "token-mean":
            wanted *= pruned.tables[2][own].sum() / 30
        assert relative_error(found, wanted) < 1e-12
        assert len(set(map(len, pruned.trained))) == 1


def test_draws_of_each_update():
    """Fails if a high rate leaves an update without prompts, if one draw serves both updates, which
    in some steps would take both prompts from one of them, or if updates or steps share a seed."""
    rules = {"prompt_rule": "uniform", "prompt_prune_rate": 0.99}
    pruned = Toy(**{MODE: "token-sum", UPDATE: 2}, **rules, **{"data.seed": 7})
    with calls_of(dppo, "generator_for") as calls:
        for _step in range(8):
            pruned.step()
            assert sorted(q // 2 for q, _ in pruned.trainer.groups.values()) == [0, 1]
    keys = [key for key, _generator in calls]
    assert len(keys) == len(set(keys)) == 8 * (1 + 2)
    assert {key[0] for key in keys} == {7}


def test_dropped_rows_are_not_forwarded():
    """What is trained on are the rows that were kept and padding of weight 0; every row that was
    sampled is returned, so that verl clears it."""
    pruned = Toy(completion_rule="pps", **{UPDATE: 2, MODE: "token-mean"})
    pruned.step()
    table = torch.cat([part["dppo"].values().view(-1, 2) for part in pruned.trained])
    (weights, tokens), rows = table.T, len(table)
    assert rows < 16
    padding = [key for key in pruned.queue.rows if key.startswith("pad")]
    assert set(pruned.returned.keys) == set(pruned.queue.rows)
    assert (weights > 0).sum() + len(padding) == rows
    assert set(tokens.tolist()) == {x.sum().item() for x in pruned.tables[2].split(2)}
    assert pruned.metrics["dppo/forwards"] == rows / 16


def test_failed_rollouts():
    """A completion of each prompt is missing: it has no reward and costs nothing. Catches a place
    that shifts, and one that is trained on."""
    pruned = Toy(**FEW)
    pruned.arrive = lambda batch: batch.select_keys([x for x in batch.keys if "_2_" not in x])
    with calls_of(dppo, "prune_completions") as calls:
        pruned.step()
    (((_rule, _rate, batch, _generator), _drawn),) = calls
    rewards, costs, _lengths, _energy = pruned.tables
    there = torch.arange(4) != 2
    assert torch.equal(batch.rewards[:, there], rewards[:, there])
    assert torch.equal(batch.cost, costs * there)
    assert not batch.size[:, 2].any()


def test_checkpoints(tmp_path, monkeypatch):
    """The history and the mean of tokens go with verl's checkpoint, before it is named the latest;
    other prompts are refused; a run of verl's own trainer can go on."""
    seen, file = [], tmp_path / "global_step_1" / "dppo.pt"
    stock = toy.PPOTrainerSync
    monkeypatch.setattr(stock, "_save_checkpoint", lambda _: seen.append(file.exists()))
    monkeypatch.setattr(stock, "_load_checkpoint", lambda _: None)
    options = {
        "prompt_rule": "uniform", MODE: "token-mean", "trainer.default_local_dir": str(tmp_path),
    }  # fmt: skip

    def loaded(**changes):
        trainer = Toy(**options | changes).trainer
        trainer.global_steps = 1
        trainer._load_checkpoint()
        return trainer

    assert loaded().mean_tokens is None, "there is no dppo.pt yet"
    run = Toy(**options)
    run.step()
    run.trainer._save_checkpoint()
    assert seen == [True]
    path = {"trainer.resume_mode": "resume_path", "trainer.resume_from_path": str(file.parent)}
    for place in ({}, path | {"trainer.default_local_dir": "elsewhere"}):
        again = loaded(**place)
        assert again.mean_tokens == run.trainer.mean_tokens > 0
        assert_same_history(run.trainer.history, again.history)
    with pytest.raises(RuleError, match=r"dppo\.pt: its history is of other prompts"):
        loaded(prompts=("f", "bb", "ccc", "g"))


def test_what_is_refused(monkeypatch):
    """Fails if a group of other rollouts is pruned, or if methods of a verl that nobody read are
    wrapped."""
    pruned = Toy()

    def several_outputs(batch):
        batch.keys[3] = batch.keys[3].replace("_0", "_1")
        return batch

    pruned.arrive = several_outputs
    with pytest.raises(RuleError, match=r"rollout\.n=4, but the agent loop"):
        pruned.step()
    monkeypatch.setattr(verl, "__version__", "0.10.0")
    with pytest.raises(RuleError, match=r"verl 0\.10\.0"):
        toy.make()


def test_the_pages_options():
    """Every option of the page is one of verl's, and the trainer takes it. Catches a misspelt name
    and a missing +."""
    page = Path(__file__).parents[2].joinpath("docs", "other-trainers.md").read_text()
    command = re.search(r"^    python -m verl\.trainer\.main_ppo ((?:.*\\\n)+.*)$", page, re.M)[1]
    options = command.replace("\\\n", " ").split()
    assert toy.make(toy.compose("ppo_trainer", overrides=options)).prunes
