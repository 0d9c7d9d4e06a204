"""dppo_tinker.py through SkyRL's server on this CPU: exact, killed and resumed.

tests/tinker.sh builds an environment with SkyRL and runs these tests in it; without SkyRL they are
skipped. The server serves the embedded model.
"""

import contextlib
import json
import os
import re
import secrets
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("skyrl.tinker", reason="tests/tinker.sh runs these, with SkyRL")

import tinker_server

import data
import dppo_tinker
from tasks import arithmetic

ROOT = Path(__file__).resolve().parents[2]
PORT = 8078
URL = f"http://127.0.0.1:{PORT}"
PROGRAM = """
import sys
import test_tinker_server as here
here.make_trainer(sys.argv[1], **here.RUN).train()
"""
SHORT = {"prompts_per_step": 8, "group_size": 8, "max_new_tokens": 24, "pad_datums": 16}
RUN = SHORT | {"steps": 6, "save_every": 2, "eval_every": 3, "lr": 2e-3}


class Served:
    """A server that tests share, and may kill. What it has saved outlives it."""

    def __init__(self, folder):
        self.folder, self.stack = folder, None

    def start(self):
        if not self.stack:
            self.stack = contextlib.ExitStack()
            serving = tinker_server.serving(self.folder, PORT, JAX_LOG_COMPILES="1")
            self.process = self.stack.enter_context(serving)

    def stop(self, *signals):
        """With ("-9",), as abruptly as it gets."""
        if signals:
            children = ["pgrep", "-P", str(self.process.pid)]
            found = subprocess.run(children, capture_output=True, text=True, check=True).stdout
            subprocess.run(["kill", *signals, str(self.process.pid), *found.split()], check=True)
        if self.stack:
            self.stack.close()
        self.stack = None

    def compiled(self):
        """How often it has compiled an update or a sampler."""
        names = r"Compiling (?:jit\()?(forward_backward_and_accumulate|_prefill_and_decode)"
        return len(re.findall(names, (self.folder / "server.log").read_text()))


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    server = Served(tmp_path_factory.mktemp("server"))
    yield server
    server.stop()


@pytest.fixture
def server(served):
    served.start()
    return served


@pytest.fixture(autouse=True)
def key(monkeypatch):
    monkeypatch.setenv("TINKER_API_KEY", "tml-mine")
    monkeypatch.setenv("TINKER_TELEMETRY", "0")


def problems(split, count, longest=8):
    """Chains of few numbers, of at most 32 tokens with their answers: one shape for the server."""
    tokenizer = arithmetic.make_tokenizer()
    found = (data.Problem(*arithmetic.problem(split, i)) for i in range(10 * count))
    short = [(tokenizer.encode(one.text), one.answer) for one in found if len(one.text) <= longest]
    return short[:count]


def make_trainer(folder, **options):
    return dppo_tinker.Trainer(
        problems("train", 64), problems("heldout", 16), data.reward_function("arithmetic"),
        arithmetic.make_tokenizer(), tinker_server.base_folder(), URL, out_dir=str(folder),
        **(SHORT | options),
    )  # fmt: skip


@pytest.fixture(scope="module")
def still(served, tmp_path_factory):
    """A trainer that samples all prompts and learns nothing, so that it samples the same again."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TINKER_API_KEY", "tml-mine")
        served.start()
        folder = tmp_path_factory.mktemp("still")
        return make_trainer(folder, prompt_rule="none", lr=0.0)


def step_again(trainer):
    """Step 1, which samples the same again. Its weights are saved under a new name: newer SDKs wait
    if a name is saved twice."""
    trainer.start = secrets.token_hex(4)
    return trainer.step(1)


def log_of(folder):
    path = folder / "log.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.mark.parametrize("loss_fn", dppo_tinker.LOSS_FNS)
def test_zero_is_none(still, monkeypatch, capsys, loss_fn):
    """The measured denominator is a mean of tokens and of datums. The gradient of the completions
    with an advantage is that of all, to the last digits of float32. Catches a denominator that was
    measured wrongly, and a factor that does not make up for it."""
    assert still.means == (True, True)
    monkeypatch.setattr(still, "loss_fn", loss_fn)
    monkeypatch.setattr(still, "completion_rule", "none")
    monkeypatch.setattr(still, "pad_datums", 1)  # no completion without an advantage is sent
    row = step_again(still)
    still.completion_rule = "zero"
    fewer = step_again(still)
    monkeypatch.setattr(still, "means", (False, False))  # as if the server summed
    wrong = step_again(still)
    with capsys.disabled():
        print(f"\n{loss_fn}: none {row['grad_norm']:.9f}, zero {fewer['grad_norm']:.9f}, ", end="")
        print(f"without the factor {wrong['grad_norm']:.9f}")
    assert fewer["tokens/trained"] < row["tokens/trained"]
    assert row["tokens/generated"] == fewer["tokens/generated"]
    assert fewer["grad_norm"] == pytest.approx(row["grad_norm"], rel=3e-6)
    assert wrong["grad_norm"] != pytest.approx(row["grad_norm"], rel=0.1)


def run_program(folder, log):
    """A client in a process of its own."""
    command = [sys.executable, "-c", PROGRAM, str(folder)]
    folders = ("", "integrations", "tests/integrations")
    env = {"PYTHONPATH": os.pathsep.join(str(ROOT / name) for name in folders)}
    return subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | env, cwd=ROOT)


def test_killed(server, tmp_path, capsys):
    """A client is killed in step 4 and the server in step 6, with kill -9, and both are started
    again. The log is that of a run that was not killed, up to the rounding of batches that a server
    forms by chance. Nothing is compiled after the third step.

    Catches a checkpoint that lacks something, and one that names weights which are gone.
    """
    counts, whole = [], make_trainer(tmp_path / "whole", **RUN)
    step = whole.step
    whole.step = lambda number: counts.append(server.compiled()) or step(number)
    whole.train()
    assert counts[0] > 0, "compilations are not seen"
    assert counts[3:] == counts[3:4] * 3, counts
    with open(tmp_path / "client.txt", "w") as log:
        for last in (3, 5):
            client = run_program(tmp_path / "broken", log)
            wait_for(tmp_path / "broken", last, client)
            if last == 5:
                server.stop("-9")
            client.kill()
            assert client.wait() == -9
    server.start()
    make_trainer(tmp_path / "broken", **RUN).train()
    one, other = log_of(tmp_path / "whole"), log_of(tmp_path / "broken")
    assert [row["step"] for row in other] == list(range(7))
    for row, again in zip(one, other, strict=True):
        assert again == pytest.approx(row, rel=1e-3), (row, again)
    with capsys.disabled():
        print(f"\nclient and server killed; the last row is {other[-1]}; {counts} compilations")


def wait_for(folder, step, client):
    while not any(row["step"] >= step for row in log_of(folder)):
        assert client.poll() is None, "the client ended"
        time.sleep(0.2)


def test_the_page(served, tmp_path):
    """Tinker's second command of the page, word for word, with two small steps of its program.
    Catches a command or a program that no longer runs."""
    served.stop()
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
