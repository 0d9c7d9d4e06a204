"""What a run leaves on disk survives a kill at any moment."""

import json
import shutil

import pytest
import torch
import transformers
from safetensors import SafetensorError

import checkpoint
from data import InputError


@pytest.fixture
def save(make_policy, tmp_path):
    model, tokenizer = make_policy()

    def go(step, keep=2):
        checkpoint.save(tmp_path, model, model.state_dict(), tokenizer, {"step": step}, keep=keep)

    return go


def step_of(folder):
    return torch.load(folder / "trainer.pt", weights_only=True)["step"]


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("killed_at", ["save_pretrained", "fsync", "rename", "symlink_to", "replace", "rmtree"])
def test_killed_while_saving(save, tmp_path, monkeypatch, killed_at):
    """Whatever call of the second save never returns, a whole checkpoint is found, the link leads to it, and the next
    save is whole. Kills: saving in place, removing the old one first, a link to what is not there yet."""
    save(1)

    class Killed(BaseException):
        pass

    def die(*_args, **_kwargs):
        raise Killed

    owner = {
        "save_pretrained": transformers.Qwen3ForCausalLM, "fsync": checkpoint.os, "rmtree": checkpoint.shutil,
    }.get(killed_at, type(tmp_path))  # fmt: skip
    with monkeypatch.context() as patch:
        patch.setattr(owner, killed_at, die)
        with pytest.raises(Killed):
            save(2)
    found = checkpoint.find(tmp_path)
    assert step_of(found) == step_of(tmp_path / "checkpoint") == (2 if killed_at in ("symlink_to", "replace") else 1)
    save(3)
    assert step_of(checkpoint.find(tmp_path)) == step_of(tmp_path / "checkpoint") == 3
    assert {"checkpoint", "checkpoint-000003"} < set(names(tmp_path))
    assert not {"checkpoint.new", "checkpoint.link"} & set(names(tmp_path))


def test_the_newest_are_kept(save, tmp_path):
    """Kills: the oldest that are kept, names that sort as text."""
    for step in (8, 9, 10, 100):
        save(step, keep=3)
    assert names(tmp_path) == ["checkpoint", "checkpoint-000009", "checkpoint-000010", "checkpoint-000100"]
    assert (tmp_path / "checkpoint").resolve().name == "checkpoint-000100"


def test_only_its_own_checkpoints_are_looked_at_and_removed(save, tmp_path):
    """Kills: a folder of the user's that sorts last, a damaged later one that pushes out the only whole one, a copied
    folder whose link became a folder, a run of an older layout that is begun anew over its log."""
    save(1)
    shutil.copytree(tmp_path / "checkpoint-000001", tmp_path / "checkpoint-best")
    for step in (2, 3, 6):
        save(step)
    (tmp_path / "checkpoint-000006" / "trainer.pt").write_bytes(b"")
    assert step_of(checkpoint.find(tmp_path)) == 3
    save(4, keep=1)
    assert names(tmp_path) == ["checkpoint", "checkpoint-000004", "checkpoint-best"]
    (tmp_path / "checkpoint").unlink()
    shutil.copytree(tmp_path / "checkpoint-000004", tmp_path / "checkpoint")
    assert step_of(checkpoint.find(tmp_path)) == 4
    assert (tmp_path / "checkpoint").is_symlink()
    (tmp_path / "checkpoint").unlink()
    (tmp_path / "checkpoint-000004").rename(tmp_path / "checkpoint")
    with pytest.raises(InputError, match="is not of this version"):
        checkpoint.find(tmp_path)


@pytest.mark.parametrize("damage", ["cut", "flipped", "gone", "list gone", "folder empty"])
def test_a_damaged_checkpoint_is_passed_over(save, tmp_path, capsys, damage):
    """The one before is found, the damage is said, and the step can be saved anew. Kills: a check of the names only."""
    save(1)
    save(2)
    victim = tmp_path / "checkpoint-000002"
    weights = (victim / "model.safetensors").read_bytes()
    if damage == "cut":
        (victim / "trainer.pt").write_bytes((victim / "trainer.pt").read_bytes()[:-1])
    elif damage == "flipped":
        (victim / "model.safetensors").write_bytes(weights[:-9] + bytes([weights[-9] ^ 1]) + weights[-8:])
    elif damage == "gone":
        (victim / "tokenizer.json").unlink()
    elif damage == "list gone":
        (victim / "files.json").unlink()
    else:
        for path in victim.iterdir():
            path.unlink()
    assert step_of(checkpoint.find(tmp_path)) == step_of(tmp_path / "checkpoint") == 1
    assert "checkpoint-000002 is not whole, its files are not what was written: going on from checkpoint-000001" in (
        capsys.readouterr().out
    )
    save(2)
    assert step_of(checkpoint.find(tmp_path)) == 2
    for path in tmp_path.glob("checkpoint-*"):
        (path / "trainer.pt").write_bytes(b"")
    with pytest.raises(InputError, match="has no whole checkpoint: remove the folder to start anew"):
        checkpoint.find(tmp_path)


@pytest.mark.parametrize("where", ["weights", "trainer.pt", "sync", "log"])
def test_a_full_disk_is_said(save, tmp_path, monkeypatch, where):
    """One line that says what stays and what to do; the checkpoint before is whole."""
    save(1)

    def full(*_words, **_options):
        raise {"weights": SafetensorError("No space left"), "trainer.pt": RuntimeError("write failed")}.get(
            where, OSError(28, "No space left on device")
        )

    owner, name = {
        "weights": (transformers.Qwen3ForCausalLM, "save_pretrained"), "trainer.pt": (torch, "save"),
    }.get(where, (checkpoint.os, "fsync"))  # fmt: skip
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, full)
        with pytest.raises(InputError, match=r"cannot be written .*what was saved before is whole. Make room") as error:
            checkpoint.append_rows(tmp_path / "log.jsonl", [{"step": 2}]) if where == "log" else save(2)
    assert "\n" not in str(error.value)
    assert step_of(checkpoint.find(tmp_path)) == 1


def test_no_checkpoint_yet(tmp_path):
    assert checkpoint.find(tmp_path) is None


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
