"""What a run leaves on disk survives a kill at any moment."""

import multiprocessing
import os
import shutil
import signal
import time
from unittest import mock

import pytest
import torch
import transformers
from toy import HANG

import models
from runtime import InputError, checkpoint, log, ranks


@pytest.fixture
def save(make_policy, tmp_path):
    model, tokenizer = make_policy()

    def go(step, keep=2):
        weights, state = ranks.weights(model), {"step": step, "moments": torch.ones(9**6)}
        checkpoint.save(tmp_path, model, weights, tokenizer, state, keep=keep)

    return go


def step_of(folder):
    return torch.load(folder / "trainer.pt", weights_only=True)["step"]


def names(folder):
    return sorted(path.name for path in folder.iterdir())


KILLED_AT = ("save_pretrained", "fsync", "rename", "symlink_to", "replace", "rmtree")


@pytest.mark.parametrize("killed_at", KILLED_AT)
def test_killed_while_saving(save, tmp_path, monkeypatch, killed_at):
    """Whichever call of the second save never returns, a complete checkpoint is found, the link
    leads to it, and the next save is complete. Catches saving in place, removing the old checkpoint
    first, and a link to one that does not exist yet."""
    save(1)
    owners = {"save_pretrained": transformers.Qwen3ForCausalLM, "fsync": os, "rmtree": shutil}
    with monkeypatch.context() as patch:
        killed = mock.Mock(side_effect=KeyboardInterrupt)
        patch.setattr(owners.get(killed_at, type(tmp_path)), killed_at, killed)
        with pytest.raises(KeyboardInterrupt):
            save(2)
    last = 2 if killed_at in ("symlink_to", "replace") else 1
    assert step_of(checkpoint.find(tmp_path)) == step_of(tmp_path / "checkpoint") == last
    save(3)
    assert step_of(checkpoint.find(tmp_path)) == step_of(tmp_path / "checkpoint") == 3
    assert {"checkpoint", "checkpoint-000003"} < set(names(tmp_path))
    assert not {"checkpoint.new", "checkpoint.link"} & set(names(tmp_path))


def test_the_newest_are_kept(save, tmp_path):
    """Catches keeping the oldest, names that sort as text, and steps of seven digits that are not
    found."""
    for step in (8, 9, 100, 999_999, 1_000_000):
        save(step, keep=3)
    kept = [f"checkpoint-{step}" for step in ("000100", "1000000", "999999")]
    assert names(tmp_path) == ["checkpoint", *kept]
    for newest in (checkpoint.find(tmp_path), checkpoint.newest(tmp_path), tmp_path / "checkpoint"):
        assert step_of(newest) == 1_000_000


def test_without_links(save, tmp_path, monkeypatch):
    """On Google Drive, exFAT or SMB the newest checkpoint is found all the same, also as the
    --model out/checkpoint of the pages. Catches a run that ends because it cannot make the link,
    and an old checkpoint in its place."""
    save(1)
    refused = mock.Mock(side_effect=OSError(95, "Operation not supported"))
    monkeypatch.setattr(type(tmp_path), "symlink_to", refused)
    for step in (2, 3):
        save(step)
        assert names(tmp_path) == [f"checkpoint-00000{step - 1}", f"checkpoint-00000{step}"]
        assert step_of(checkpoint.find(tmp_path)) == step
        found = models.model_folder(str(tmp_path / "checkpoint"))
        assert found == str(tmp_path / f"checkpoint-00000{step}")


def test_only_its_own_checkpoints_are_read_and_removed(save, tmp_path):
    """Catches a user's folder that sorts last, and a later checkpoint that displaces the only
    complete one or is removed because it is newer."""
    save(1)
    shutil.copytree(tmp_path / "checkpoint-000001", tmp_path / "checkpoint-best")
    for step in (2, 3, 6):
        save(step)
    (tmp_path / "checkpoint-000006" / "trainer.pt").write_bytes(b"")
    assert step_of(checkpoint.find(tmp_path)) == 3
    save(4, keep=1)
    later = ["checkpoint-000004", "checkpoint-000006", "checkpoint-best"]
    assert names(tmp_path) == ["checkpoint", *later]


@pytest.mark.parametrize("damaged", ["model.safetensors", "files.json"])
def test_a_damaged_checkpoint_is_skipped(save, tmp_path, capsys, damaged):
    """And reported. Catches a run that starts over although all of its checkpoints are damaged."""
    save(1)
    save(2)
    path = tmp_path / "checkpoint-000002" / damaged
    path.write_bytes(path.read_bytes()[:-9])
    assert step_of(checkpoint.find(tmp_path)) == step_of(tmp_path / "checkpoint") == 1
    assert "checkpoint-000002 is damaged: a file is missing, or has" in capsys.readouterr().out
    save(2)
    assert step_of(checkpoint.find(tmp_path)) == 2
    for path in tmp_path.glob("checkpoint-*"):
        (path / "trainer.pt").write_bytes(b"")
    with pytest.raises(InputError, match=r"no checkpoint in .* is complete: use another --out-dir"):
        checkpoint.find(tmp_path)


def test_what_cannot_be_read_is_not_damaged(save, tmp_path, monkeypatch):
    """A colleague's file, or one on a disk in trouble. Catches an older checkpoint in its place,
    which then overwrites it."""
    save(1)
    save(2)
    refuse = mock.Mock(side_effect=PermissionError(13, "Permission denied"))
    monkeypatch.setattr(type(tmp_path), "read_text", refuse)
    with pytest.raises(PermissionError):
        checkpoint.find(tmp_path)


def hold(folder, ready):
    """Own the folder until killed."""
    with checkpoint.owned(folder):
        ready.send(None)
        time.sleep(HANG)


def test_one_folder_has_one_owner(tmp_path):
    """Also while the owner is suspended. Catches a second process that writes to the folder, and
    a folder that is never free again."""
    folder = tmp_path / "deep" / "run"
    forks = multiprocessing.get_context("fork")
    here, there = forks.Pipe()
    owner = forks.Process(target=hold, args=(folder, there))
    owner.start()
    here.recv()
    os.kill(owner.pid, signal.SIGSTOP)
    try:
        with pytest.raises(InputError, match="is in use by another"), checkpoint.owned(folder):
            pass
    finally:
        owner.kill()
    owner.join()
    with checkpoint.owned(folder):
        (folder / "config.json").write_text("{}")
    assert names(folder) == ["config.json", "lock"]


def test_a_folder_that_cannot_hold_a_checkpoint(tmp_path):
    """Its name is no UTF-8. Catches an error of the first save, after hours."""
    folder = os.fsdecode(bytes(tmp_path) + b"/caf\xe9")
    with pytest.raises(InputError, match="cannot be written: 'utf-8'"), checkpoint.owned(folder):
        pass
    assert not names(tmp_path)


def test_a_full_disk(save, tmp_path, monkeypatch):
    """Catches a half-written checkpoint that keeps the disk full, and an empty file in place of the
    one before."""
    log.write_text(tmp_path / "config.json", "old")
    full = mock.Mock(side_effect=OSError(28, "No space left on device"))
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        save(1)
    with pytest.raises(OSError, match="No space left"):
        log.write_text(tmp_path / "config.json", "new")
    assert (tmp_path / "config.json").read_text() == "old"
    assert not (tmp_path / "checkpoint.new").exists()
