"""dppo_tinker.py against a service in this process: padding, its denominator, runs. test_exact.py
has what every trainer must do.

These tests need no SDK; tests/tinker.sh runs them with it, and test_tinker_server.py with SkyRL's
server.
"""

import inspect
import json
import os
import re
import subprocess
import sys
from concurrent.futures import Future
from pathlib import Path
from unittest import mock

import pytest
import tinker_toy
import torch
from exact import assert_same_history, calls_of, error, over_completions
from tinker_toy import MEANS, PROBLEMS, Server, Toy, dppo_tinker, make_trainer, toy_sdk

import dppo
import sampler
from dppo import RuleError
from tasks import arithmetic

ROOT = Path(__file__).resolve().parents[2]
HELD_OUT = [([6], "answer"), ([1, 1], "answer")]
BOTH = {"prompt_rule": "uniform", "prompt_prune_rate": 0.5, "completion_rule": "pps"}


def train(folder, server, **options):
    """The trainer after six steps of four candidates, with both levels of pruning."""
    options = {
        "steps": 6, "save_every": 2, "eval_every": 3, "prompts_per_step": 4, "held_out": HELD_OUT,
        "problems": PROBLEMS * 4,
    } | BOTH | options  # fmt: skip
    trainer = make_trainer(folder, server, **options)
    with toy_sdk():
        trainer.train()
    return trainer


def log_of(folder):
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


# ---------------------------------------------------------------------------- a step


@pytest.mark.parametrize(("rule", "multiple"), [("pps", 5), ("none", 6), ("none", 40)])
def test_padding_is_exact(rule, multiple):
    """Lengths in multiples of 8 and datums in multiples of 5, 6 or 40, by fillers; 16 completions
    are too few for 40, and are sent again. Catches a length without the padding, a number of datums
    without the fillers, and fillers that have a gradient."""
    toy = Toy(pad_tokens=8, pad_datums=multiple, completion_rule=rule)
    with calls_of(tinker_toy.Client, "forward_backward") as calls:
        found = over_completions(toy.gradient)
    assert error(found, toy.stock()) < 1e-12
    sent = [datums for (_client, datums, _loss_fn), _future in calls]
    assert {one.model_input.length for datums in sent for one in datums} == {8}
    assert {len(datums) % multiple for datums in sent} == {0}
    live = [sum(any(one.loss_fn_inputs["advantages"]) for one in datums) for datums in sent]
    assert any(n % multiple for n in live), "no fillers were needed"


def test_one_datum_is_sent_at_least():
    """Where all rewards are equal, the SDK refuses an empty request. Catches more than one."""
    dull = Toy(completion_rule="zero", **tinker_toy.DULL)
    dull.gradient()
    assert 0 < dull.row["tokens/trained"] <= 7


def test_the_log():
    """Names are train.py's, except for the prompts' tokens. Catches tokens that were not sent,
    another norm, and a share of groups without the prompts' weights."""
    toy = Toy(prompt_rule="dppo", prompt_prune_rate=0.5, completion_rule="pps")
    toy.teach()
    with (
        calls_of(sampler.PromptHistory, "prune") as prompts,
        calls_of(dppo, "prune_completions") as drawn,
    ):
        keep = torch.ones(4)
        while keep.all():  # until a draw leaves a prompt out
            gradient = toy.step()
            (_history, _rule, _rate, candidates, _generator), (keep, w) = prompts[-1]
    row, (_arguments, (kept, _weights)) = toy.row, drawn[-1]
    rewards, lengths, costs, _energy = (table[candidates[keep]] for table in toy.tables)
    w, mean = w[keep], rewards.nanmean(dim=1)
    dead = dppo.dead_groups(rewards)
    good = dead & (mean >= 0.5)
    share = lambda some: ((w * some).sum() / w.sum()).item()
    wanted = {
        "reward": share(mean),
        "grad_norm": gradient.norm().item(),
        "tokens/prefilled": (costs - lengths)[:, 0].sum().item(),
        "tokens/generated": lengths.sum().item(),
        "tokens/trained": (kept * (costs - 1)).sum().item(),
        "by_group/frac_mixed": share(~dead),
        "by_group/frac_all_good": share(good),
        "by_group/frac_all_bad": share(dead & ~good),
    }
    assert {name: row[name] for name in wanted} == pytest.approx(wanted)
    assert w.unique().numel() > 1
    names = json.loads((ROOT / "runs" / "main-seed0.jsonl").read_text().splitlines()[1])
    assert {x for x in row if not x.startswith("by_group/")} - {"tokens/prefilled"} <= names.keys()


def test_datums_have_the_sdks_types():
    """With the SDK: ids shifted by one, zeros on the prompt, float32. Catches a list that the SDK
    takes for something else."""
    tinker = pytest.importorskip("tinker", reason="tests/tinker.sh runs this, with the SDK")
    rows = [([5, 6, 7], [1, 2], [-1.0, -2.0], [0.5, 0.5]), ([3], [4], [-3.0], [1.0])]
    long, short = dppo_tinker.make_datums(rows, (True, True), multiple=6)
    assert isinstance(long, tinker.Datum)
    assert long.model_input.to_ints() == [5, 6, 7, 1, 0, 0]
    assert short.model_input.to_ints() == [3, 0, 0, 0, 0, 0]
    columns = {name: (x.dtype, x.tolist()) for name, x in long.loss_fn_inputs.items()}
    assert columns == {
        "target_tokens": ("int64", [6, 7, 1, 2, 0, 0]),
        "logprobs": ("float32", [0, 0, -1, -2, 0, 0]),
        "advantages": ("float32", [0, 0, 6, 6, 0, 0]),  # 0.5 x 6 tokens x 2 datums
    }
    assert short.loss_fn_inputs["advantages"].tolist() == [12, 0, 0, 0, 0, 0]


# ---------------------------------------------------------------------------- servers


@pytest.mark.parametrize("norm", ["skyrl.ai/grad_norm", "unclipped_grad_l2:mean"])
@pytest.mark.parametrize("denominator", MEANS)
def test_the_denominator_is_measured(tmp_path, denominator, norm):
    """By either name of the gradient's norm, and on a client of its own."""
    trainer = make_trainer(tmp_path, Server(denominator, norm))
    assert trainer.means == MEANS[denominator]
    assert not trainer.client.gradients, "the probe's steps count as the run's"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *(
            ({"denominator": kind}, r"ppo: norms \[.*use another server")
            for kind in ("all tokens", "live tokens", "call", "scaled")
        ),
        ({"norm": None}, r"norms \[nan, nan, nan, nan\] .*use another server"),
        ({"logprobs": False}, r"returns no log-probs .*use one that does"),
    ],
)
def test_other_servers_are_refused(tmp_path, options, message):
    """A mean over all tokens, over those with an advantage, over each call's datums, and scaled
    advantages. Catches a probe that takes one of them for a sum or a mean."""
    with pytest.raises(RuleError, match=message):
        train(tmp_path, Server(**options))


def test_what_the_server_is_asked(tmp_path):
    """Fails if the warm-up is not of five steps, or reaches more than lr; if two steps, two prompts
    or an evaluation share random numbers; or if seeds are more than servers take."""
    with calls_of(tinker_toy.Client, "optim_step") as steps, calls_of(Server, "sample") as samples:
        train(tmp_path, Server(), lr=0.1)
    adams = [adam for (_client, adam), _future in steps]
    rates = [0.0] * 4 + [0.02, 0.04, 0.06, 0.08, 0.1, 0.1]
    assert [adam.learning_rate for adam in adams] == pytest.approx(rates)
    assert {(adam.beta1, adam.beta2, adam.eps) for adam in adams} == {(0.9, 0.999, 1e-8)}
    seeds = [options.seed for (_server, _prompt, _count, options), _future in samples]
    assert len(seeds) == len(set(seeds)) == 6 * 2 + 3 * 2
    assert 0 <= min(seeds) < max(seeds) < 2**30


# ---------------------------------------------------------------------------- runs


@pytest.mark.parametrize("loss", ["grpo", "dapo"])
def test_stopped_and_resumed(tmp_path, loss):
    """The server fails in step 6, after the checkpoint of step 4: one line says so. The same call
    goes on: log, weights, the optimizer, history and denominator are those of a run that went
    through. Catches a draw that starts over, and anything that a checkpoint forgets."""
    whole = train(tmp_path / "whole", Server(), loss=loss)
    server = Server(dies_at=5)
    with pytest.raises(RuleError, match=r"optim_step failed with TinkerError\('connection") as said:
        train(tmp_path / "broken", server, loss=loss)
    assert "\n" not in str(said.value)
    assert [row["step"] for row in log_of(tmp_path / "broken")] == [0, 1, 2, 3, 4, 5]
    assert len(torch.load(tmp_path / "broken" / "state.pt")[3]) == 5, "steps 0 to 4"
    server.dies_at = -1
    resumed = train(tmp_path / "broken", server, loss=loss)
    log = log_of(tmp_path / "whole")
    assert log_of(tmp_path / "broken") == log
    assert len(log) == 7
    assert torch.equal(whole.client.theta, resumed.client.theta)
    assert torch.equal(whole.client.momentum, resumed.client.momentum)
    assert_same_history(whole.history, resumed.history)
    assert whole.mean_tokens == resumed.mean_tokens
    assert log[1]["kept/prompts"] == (1.0 if loss == "dapo" else 0.5), "dapo counts tokens first"


def test_evaluations(tmp_path):
    """At step 0 and every third: the mean of four completions of each. Catches one of trained
    problems, and a nan in the file."""
    trainer = train(tmp_path, Server(), held_out=[([2], "unscorable"), ([3], "unscorable")])
    rows = log_of(tmp_path)
    assert [row["step"] for row in rows if "eval/avg@4" in row] == [0, 3, 6]
    trainer.service.saved.clear()
    with toy_sdk():
        _, rewards = trainer.sample(trainer.held_out, 4, "eval", 6)
    assert rows[6]["eval/avg@4"] == rewards.nanmean().item()
    assert rows[0].keys() == {"step", "eval/avg@4"}
    train(tmp_path / "none", Server(), held_out=[])
    with mock.patch.object(tinker_toy, "reward", return_value=None):
        train(tmp_path / "nan", Server(), steps=1)
    assert log_of(tmp_path / "nan")[-1]["reward"] is None


def test_other_runs_are_not_resumed(tmp_path):
    """Fails if a run continues with other data, model, seed or sizes; what is there stays."""
    server = Server()
    train(tmp_path, server)
    before = (tmp_path / "state.pt").read_bytes()
    for other in ({"problems": PROBLEMS[:3] * 4}, {"seed": 1}, {"lora_rank": 8}):
        with pytest.raises(RuleError, match=r"state\.pt is of another model, seed or data"):
            train(tmp_path, server, **other)
    with pytest.raises(RuleError, match="create_training_client_from_state_with_optimizer failed"):
        train(tmp_path, Server())  # it does not have the weights
    assert (tmp_path / "state.pt").read_bytes() == before


# ---------------------------------------------------------------------------- bad input


def test_answers_are_not_awaited_for_ever(monkeypatch):
    """Fails if a server that hangs hangs the client: TimeoutError is one line, too."""
    monkeypatch.setattr(dppo_tinker, "TIMEOUT", 0.01)

    def forward_backward():
        return Future()

    said = r"forward_backward failed with TimeoutError.*program continues"
    with pytest.raises(RuleError, match=said):
        dppo_tinker.ask(forward_backward)


def test_no_sdk():
    """Without the SDK there is one sentence, with the way out."""
    check = "import sys; sys.modules['tinker'] = None; import dppo_tinker"
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'integrations'}"}
    done = subprocess.run(
        [sys.executable, "-c", check], capture_output=True, text=True, check=False, env=environment
    )
    assert re.search(r"RuleError: Tinker's SDK is missing: pip install .*$", done.stderr)


def test_no_key(monkeypatch):
    """Fails if the server is asked without a key, or if a command that prints one is not enough."""
    monkeypatch.setattr(tinker_toy, "KEY", {})
    monkeypatch.delenv("TINKER_API_KEY", raising=False)
    monkeypatch.delenv("TINKER_CREDENTIAL_CMD", raising=False)
    with pytest.raises(RuleError, match=r"TINKER_API_KEY is not set: .* tml-"):
        tinker_toy.make()
    monkeypatch.setenv("TINKER_CREDENTIAL_CMD", "cat key")
    tinker_toy.make()


# ---------------------------------------------------------------------------- the page

PAGE = (ROOT / "docs" / "other-trainers.md").read_text().split("\n## Tinker\n")[1]


def small_program():
    """The page's program with two small steps."""
    (program,) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    for large, small in (("steps=25", "steps=2"), ("step=32", "step=8"), ('c", 100', 'c", 8')):
        assert large in program
        program = program.replace(large, small)
    return program


def test_the_program(policy_folder, monkeypatch, tmp_path):
    """Catches one that no longer runs, and a figure of the log that the page does not have."""
    monkeypatch.setattr(arithmetic, "BASE", policy_folder)
    monkeypatch.setattr(dppo_tinker, "tinker", tinker_toy.SDK)
    server = Server()
    monkeypatch.setattr(tinker_toy.SDK, "ServiceClient", lambda base_url: server, raising=False)
    monkeypatch.setitem(sys.modules, "dppo_tinker", dppo_tinker)
    monkeypatch.setenv("TINKER_API_KEY", "tml-toy")
    monkeypatch.chdir(tmp_path)
    exec(small_program(), {})
    named = set(re.findall(r"^\| `(tokens/\w+)` \|", PAGE, re.MULTILINE))
    logged = log_of(tmp_path / "out-tinker")[2]
    assert {name for name in logged if name.startswith("tokens/")} == named


def test_options_are_explained():
    """Fails if the page names an option that there is not, or with another default."""
    signature = inspect.signature(dppo_tinker.Trainer).parameters
    rows = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \| ([^|]+) \|", PAGE, re.MULTILINE)
    for names, defaults in rows:
        found = [signature[name].default for name in re.findall(r"\w+", names)]
        read = [float(x) if x[0].isdigit() else x for x in defaults.split(", ")]
        read = [None if x == "None" else x for x in read]
        assert found == read, names
    assert len(rows) == 11
