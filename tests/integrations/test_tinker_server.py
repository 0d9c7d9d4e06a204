"""dppo_tinker.py through SkyRL's server on this CPU: its denominator, a restart, the page.

tests/tinker.sh builds an environment with SkyRL and runs these tests in it; without SkyRL they are
skipped. The server serves the embedded model.
"""

import json
import re
import secrets
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("skyrl.tinker", reason="tests/tinker.sh runs these, with SkyRL")

import tinker_server

import data
import dppo_tinker
from tasks import arithmetic

ROOT = Path(__file__).resolve().parents[2]
PORT = 8078
SIZES = {"prompts_per_step": 8, "group_size": 8, "max_new_tokens": 24, "pad_datums": 16}


def problems(split, count, longest=8):
    """Chains of few numbers, of at most 32 tokens with their answers: one shape for the server."""
    tokenizer = arithmetic.make_tokenizer()
    found = (data.Problem(*arithmetic.problem(split, i)) for i in range(10 * count))
    short = [(tokenizer.encode(one.text), one.answer) for one in found if len(one.text) <= longest]
    return short[:count]


@pytest.fixture
def make_trainer(monkeypatch, tmp_path):
    monkeypatch.setenv("TINKER_API_KEY", "tml-mine")
    monkeypatch.setenv("TINKER_TELEMETRY", "0")

    def make(folder, **options):
        return dppo_tinker.Trainer(
            problems("train", 64), problems("heldout", 16), data.reward_function("arithmetic"),
            arithmetic.make_tokenizer(), tinker_server.base_folder(), f"http://127.0.0.1:{PORT}",
            out_dir=str(tmp_path / folder), **(SIZES | options),
        )  # fmt: skip

    return make


def log_of(folder):
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def test_zero_is_none(make_trainer, tmp_path, capsys):
    """The measured denominator is a mean of tokens and of datums. The gradient of the completions
    with an advantage is that of all, to the last digits of float32. Catches a denominator that was
    measured wrongly, and a factor that does not make up for it."""
    with tinker_server.serving(tmp_path / "server", PORT):
        trainer = make_trainer("still", lr=0.0)  # it learns nothing, so it samples the same again
        means = trainer.means

        def step(**options):
            """Step 1, whose weights are saved under a new name: newer SDKs wait for old ones."""
            vars(trainer).update(options, start=secrets.token_hex(4), pad_datums=1)
            return trainer.step(1)

        assert means == (True, True)
        for loss_fn in dppo_tinker.LOSS_FNS:
            row = step(loss_fn=loss_fn, completion_rule="none", means=means)
            fewer = step(completion_rule="zero")
            wrong = step(means=(False, False))  # as if the server summed
            norms = [x["grad_norm"] for x in (row, fewer, wrong)]
            with capsys.disabled():
                print(f"\n{loss_fn}: none, zero, and zero without the factor: {norms}")
            assert fewer["tokens/trained"] < row["tokens/trained"]
            assert row["tokens/generated"] == fewer["tokens/generated"]
            assert fewer["grad_norm"] == pytest.approx(row["grad_norm"], rel=3e-6)
            assert wrong["grad_norm"] != pytest.approx(row["grad_norm"], rel=0.1)


def test_the_server_is_restarted(make_trainer, tmp_path):
    """The log of two and two steps is that of four, up to the rounding of batches that a server
    forms by chance. Catches a checkpoint that lacks something, and one that names weights which are
    gone."""
    run = {"save_every": 2, "eval_every": 2, "lr": 2e-3}
    for folders, steps in ((["parts"], 2), (["parts", "whole"], 4)):
        with tinker_server.serving(tmp_path / "server", PORT):
            for folder in folders:
                make_trainer(folder, steps=steps, **run).train()
    parts, whole = log_of(tmp_path / "parts"), log_of(tmp_path / "whole")
    assert [row["step"] for row in parts] == list(range(5))
    for row, again in zip(whole, parts, strict=True):
        assert again == pytest.approx(row, rel=1e-3), (row, again)


def test_the_page(tmp_path):
    """Tinker's second command of the page, word for word, with two small steps of its program.
    Catches a command or a program that no longer runs."""
    page = (ROOT / "docs" / "other-trainers.md").read_text().split("\n## Tinker\n")[1]
    (program,) = re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    for large, small in (("steps=25", "steps=2"), ("step=32", "step=8"), ('c", 100', 'c", 8')):
        assert large in program
        program = program.replace(large, small)
    (tmp_path / "train_tinker.py").write_text(program)
    (command,) = re.findall(
        r"^    \S+/python (tests/integrations/tinker_server\.py .*)$", page, re.MULTILINE
    )
    server, *arguments = command.split()
    done = subprocess.run(
        [sys.executable, str(ROOT / server), *arguments], cwd=tmp_path, check=False,
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert [row["step"] for row in log_of(tmp_path / "out-tinker")] == [0, 1, 2]
