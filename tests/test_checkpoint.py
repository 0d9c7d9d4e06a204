"""What a run leaves on disk survives a kill at any moment."""

import json

import pytest
import torch

import checkpoint
import sampler


@pytest.fixture
def parts(make_policy):
    model, tokenizer = make_policy()
    return model, tokenizer, torch.optim.AdamW(model.parameters()), sampler.PromptHistory(torch.arange(4), ["a"] * 4, 2)


def step_of(folder):
    return torch.load(folder / "trainer.pt", weights_only=True)["step"]


@pytest.mark.parametrize("killed_at", ["save_pretrained", "fsync", "rename", "second rename", "rmtree"])
def test_killed_while_saving(parts, tmp_path, monkeypatch, killed_at):
    """Whatever call of the second save never returns, a whole checkpoint is found. Kills: saving in place, removing
    the old one first, forgetting the one set aside."""
    checkpoint.save(tmp_path, *parts, 1)

    class Killed(BaseException):
        pass

    calls = []
    rename, rmtree = type(tmp_path).rename, checkpoint.shutil.rmtree

    def die(*_args, **_kwargs):
        raise Killed

    def die_at_second(path, target):
        calls.append(target)
        if len(calls) == 2:
            raise Killed
        return rename(path, target)

    if killed_at == "save_pretrained":
        monkeypatch.setattr(parts[1], "save_pretrained", die)
    elif killed_at == "fsync":
        monkeypatch.setattr(checkpoint.os, "fsync", die)
    elif killed_at == "rename":
        monkeypatch.setattr(type(tmp_path), "rename", die)
    elif killed_at == "second rename":
        monkeypatch.setattr(type(tmp_path), "rename", die_at_second)
    else:  # the last call: the first removes what an earlier kill left beside
        monkeypatch.setattr(
            checkpoint.shutil, "rmtree", lambda path, **k: die() if path.name.endswith("old") else rmtree(path, **k)
        )
    with pytest.raises(Killed):
        checkpoint.save(tmp_path, *parts, 2)
    monkeypatch.undo()
    found = checkpoint.find(tmp_path, rank=0)
    assert found == tmp_path / "checkpoint"
    assert step_of(found) == (2 if killed_at == "rmtree" else 1)
    checkpoint.save(tmp_path, *parts, 3)
    assert step_of(checkpoint.find(tmp_path, rank=0)) == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint"]


def test_no_checkpoint_yet(tmp_path):
    assert checkpoint.find(tmp_path, rank=0) is None


def test_rows_after_the_checkpoint_are_cut(tmp_path):
    """And a line that was being written. Kills: cutting the checkpoint's own row, choking on the half line."""
    log = tmp_path / "log.jsonl"
    checkpoint.append_rows(log, [{"step": step, "x": float("nan")} for step in range(4)])
    with open(log, "a") as file:
        file.write('{"step": 1, "x"')
    assert len(checkpoint.cut_rows(log, lambda row: row["step"] <= 2)) == 3
    assert [json.loads(line) for line in log.read_text().splitlines()] == [{"step": s, "x": None} for s in range(3)]
    checkpoint.cut_rows(log, lambda row: False)
    assert log.read_text() == ""
    assert checkpoint.cut_rows(tmp_path / "nothing.jsonl", lambda row: True) == []


def test_config_without_git(tmp_path, monkeypatch):
    """A machine without git: no commit, no crash; and what was there before is replaced whole."""
    monkeypatch.setenv("PATH", "")
    checkpoint.write_config(tmp_path, {"seed": 1}, 2)
    written = json.loads((tmp_path / "config.json").read_text())
    assert (written["config"], written["ranks"], written["commit"]) == ({"seed": 1}, 2, None)
    assert checkpoint.stored_ranks(tmp_path) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]
