"""What a run leaves on disk survives a kill at any moment."""

import json
import multiprocessing
import os
import shutil
import signal
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
import transformers
from safetensors import SafetensorError
from toy import HANG
from transformers import PreTrainedTokenizerFast

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
    assert models.model_folder(str(tmp_path / "checkpoint")) == str(tmp_path / "checkpoint")

    refused = mock.Mock(side_effect=OSError(95, "Operation not supported"))
    monkeypatch.setattr(type(tmp_path), "symlink_to", refused)
    for step in (2, 3):
        save(step)
        assert names(tmp_path) == [f"checkpoint-00000{step - 1}", f"checkpoint-00000{step}"]
        assert step_of(checkpoint.find(tmp_path)) == step
        found = models.model_folder(str(tmp_path / "checkpoint"))
        assert found == str(tmp_path / f"checkpoint-00000{step}")
    (tmp_path / "checkpoint").write_text("checkpoint-000002")  # what a copy made of a link
    assert checkpoint.newest(tmp_path) == tmp_path / "checkpoint-000003"
    nothing = str(tmp_path / "none" / "checkpoint")
    assert models.model_folder(nothing) == nothing


def test_only_its_own_checkpoints_are_read_and_removed(save, tmp_path):
    """Catches a user's folder that sorts last, a later checkpoint that displaces the only complete
    one or is removed because it is newer, and a copied run whose link became a folder."""
    save(1)
    shutil.copytree(tmp_path / "checkpoint-000001", tmp_path / "checkpoint-best")
    for step in (2, 3, 6):
        save(step)
    (tmp_path / "checkpoint-000006" / "trainer.pt").write_bytes(b"")
    assert step_of(checkpoint.find(tmp_path)) == 3
    save(4, keep=1)
    later = ["checkpoint-000004", "checkpoint-000006", "checkpoint-best"]
    assert names(tmp_path) == ["checkpoint", *later]
    (tmp_path / "checkpoint").unlink()
    shutil.rmtree(tmp_path / "checkpoint-000006")
    shutil.copytree(tmp_path / "checkpoint-000004", tmp_path / "checkpoint")
    assert step_of(checkpoint.find(tmp_path)) == 4
    assert (tmp_path / "checkpoint").is_symlink()


def bytes_read():
    return int(Path("/proc/self/io").read_text().split()[1])


def test_a_checkpoint_is_not_read_again(save, monkeypatch):
    """Catches checksums that read 45 GiB after they are written."""
    monkeypatch.setattr(checkpoint, "BEGINNING", 99)
    before = bytes_read()
    save(1)
    assert bytes_read() - before < 9**6


DAMAGES = {  # a file, and what becomes of its bytes
    "cut": ("trainer.pt", lambda content: content[:-1]),
    "flipped": ("config.json", lambda content: flipped(content, 9)),
    "weight flipped": ("model.safetensors", lambda content: flipped(content, -9)),
    "moment flipped": ("trainer.pt", lambda content: flipped(content, 9**5)),
    "gone": ("tokenizer.json", None),
    "list gone": ("files.json", None),
    "empty": ("*", None),
}


def flipped(content, place):
    content = bytearray(content)
    content[place] ^= 1
    return content


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_skipped(save, tmp_path, monkeypatch, capsys, damage):
    """And reported. Catches a run that starts over although all of its checkpoints are damaged."""
    monkeypatch.setattr(checkpoint, "BEGINNING", 99)  # these files are short
    save(1)
    save(2)
    victim = tmp_path / "checkpoint-000002"
    name, change = DAMAGES[damage]
    for path in victim.glob(name):
        content = path.read_bytes()
        path.unlink()
        if change:
            path.write_bytes(change(content))
    assert step_of(checkpoint.find(tmp_path)) == step_of(tmp_path / "checkpoint") == 1
    message = "checkpoint-000002 is damaged: its files are not what was written"
    assert message in capsys.readouterr().out
    save(2)
    assert step_of(checkpoint.find(tmp_path)) == 2
    for path in tmp_path.glob("checkpoint-*"):
        (path / "trainer.pt").write_bytes(b"")
    with pytest.raises(InputError, match=r"no checkpoint in .* is complete: remove the folder"):
        checkpoint.find(tmp_path)


@pytest.mark.parametrize(
    ("owner", "name", "error"),
    [
        (transformers.Qwen3ForCausalLM, "save_pretrained", SafetensorError("No space")),
        (PreTrainedTokenizerFast, "save_pretrained", Exception("No space\n(os error)")),
        (torch, "save", RuntimeError("write failed")),
        (os, "fsync", OSError(28, "No space left on device")),
    ],
)
def test_a_full_disk_is_reported(save, tmp_path, monkeypatch, owner, name, error):
    """Each library has an error of its own. Catches a full disk that damages the checkpoint before,
    an empty file in place of the one before, and an end without what is safe and what to do."""
    save(1)
    log.write_text(tmp_path / "a.json", "before")

    monkeypatch.setattr(owner, name, mock.Mock(side_effect=error))
    writes = [lambda: save(2)]
    if owner is os:
        writes.append(lambda: log.append_rows(tmp_path / "log.jsonl", [{"step": 2}]))
        writes.append(lambda: log.write_text(tmp_path / "a.json", "after"))
    for write in writes:
        message = r"cannot be written .*everything saved before is intact. Make room"
        with pytest.raises(InputError, match=message) as caught:
            write()
        assert "\n" not in str(caught.value)
    assert (tmp_path / "a.json").read_text() == "before"
    assert step_of(checkpoint.find(tmp_path)) == 1
    assert not (tmp_path / "checkpoint.new").exists(), "it would keep the disk full"


def hold(folder, workers):
    """Own the folder until killed, beside a worker that outlives this process."""
    with checkpoint.owned(folder):
        worker = os.fork()
        if worker:
            workers.send(worker)
        time.sleep(HANG)


def test_one_folder_has_one_owner(tmp_path):
    """Also while the owner is suspended; and its lock ends with it. Catches a second process that
    writes to the folder, a folder that is never free again, say because a reward's worker still
    has the lock, and one that is left behind empty."""
    folder = tmp_path / "deep" / "run"
    forks = multiprocessing.get_context("fork")
    here, there = forks.Pipe()
    owner = forks.Process(target=hold, args=(folder, there))
    owner.start()
    worker = here.recv()
    try:
        os.kill(owner.pid, signal.SIGSTOP)
        message = f"--out-dir {folder} is in use by another process: wait for it to end"
        with pytest.raises(InputError, match=message), checkpoint.owned(folder):
            pass
        owner.kill()
        owner.join()
        with checkpoint.owned(folder):
            (folder / "config.json").write_text("{}")
    finally:
        owner.kill()
        os.kill(worker, signal.SIGKILL)
    assert names(folder) == ["config.json", "lock"]
    with pytest.raises(ZeroDivisionError), checkpoint.owned(tmp_path / "new" / "run"):
        _ = 1 / 0
    assert not (tmp_path / "new").exists()


def test_fingerprints(make_policy):
    """Catches a change of one bit that passes for the same model, and a sum of one type only."""
    model, _ = make_policy()
    before = checkpoint.fingerprint(model)
    assert checkpoint.fingerprint(make_policy()[0]) == before
    weight = model.model.norm.weight.data
    weight[0] = torch.nextafter(weight[0], torch.tensor(9.0))
    assert checkpoint.fingerprint(model) != before
    for dtype in (torch.bfloat16, torch.float64):
        assert checkpoint.fingerprint(model.to(dtype)) not in (0, before)


@pytest.mark.parametrize("text", ['{"conf', "[1]"])
def test_a_file_that_is_not_what_was_written(tmp_path, text):
    """Catches a traceback from a folder that a full disk left broken."""
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(InputError, match=r"config.json is not what was written there: remove it"):
        checkpoint.stored_config(tmp_path)
    (tmp_path / "log.jsonl").write_text(f'{{"step": 1}}\n{text}\n')
    with pytest.raises(InputError, match=r"log.jsonl, line 2 is not what was written"):
        log.read_rows(tmp_path / "log.jsonl")


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    folder = tmp_path / "file" / "run"
    message = f"--out-dir {folder} cannot be written .*: choose another folder"
    with pytest.raises(InputError, match=message), checkpoint.owned(folder):
        pass


def test_config_without_git(tmp_path, monkeypatch):
    """Catches a run that fails where git is missing, and a config.json that is left unfinished."""
    monkeypatch.setenv("PATH", "")
    checkpoint.write_config(tmp_path, {"seed": 1}, 2, None)
    written = json.loads((tmp_path / "config.json").read_text())
    assert (written["config"], written["ranks"], written["commit"]) == ({"seed": 1}, 2, None)
    assert names(tmp_path) == ["config.json"]
