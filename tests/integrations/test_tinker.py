"""dppo_tinker.py against a service in this process: padding, its denominator, runs. test_exact.py
has what every trainer must do.

These tests need no SDK; tests/tinker.sh runs them with it, and test_tinker_server.py with SkyRL's
server.
"""

import inspect
import json
import re
import sys
from pathlib import Path
from unittest import mock

import pytest
import tinker_toy
import torch
from exact import assert_same_history, calls_of, error, over_completions
from tinker_toy import MEANS, PROBLEMS, Server, Toy, dppo_tinker, make, toy_sdk

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
    trainer = make(server, folder, **options)
    with toy_sdk():
        trainer.train()
    return trainer


def log_of(folder):
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


# ---------------------------------------------------------------------------- a step


@pytest.mark.parametrize(("rule", "multiple"), [("pps", 5), ("none", 6), ("none", 40)])
def test_padding_is_exact(rule, multiple):
    """Datums in multiples of 5, 6 or 40, by fillers; 16 completions are too few for 40, and are
    sent again. Catches a number of datums without the fillers, and fillers that have a gradient."""
    toy = Toy(pad_datums=multiple, completion_rule=rule)
    with calls_of(tinker_toy.Client, "forward_backward") as calls:
        found = over_completions(toy.gradient)
    assert error(found, toy.stock()) < 1e-12
    sent = [datums for (_client, datums, _loss_fn), _future in calls]
    assert {len(datums) % multiple for datums in sent} == {0}
    live = [sum(any(one.loss_fn_inputs["advantages"]) for one in datums) for datums in sent]
    assert any(n % multiple for n in live), "no fillers were needed"


def test_the_log():
    """Names are train.py's, except for the prompts' tokens. Catches tokens that were not sent, and
    another norm."""
    toy = Toy(prompt_rule="uniform", prompt_prune_rate=0.5, completion_rule="none")
    with calls_of(tinker_toy.Client, "forward_backward") as calls:
        gradient = toy.step()
    (((_client, datums, _loss_fn), _future),) = calls
    lengths = [datum.model_input.length for datum in datums]
    generated = sum(sum(x != 0 for x in datum.loss_fn_inputs["logprobs"]) for datum in datums)
    row = toy.row
    assert row["grad_norm"] == gradient.norm().item()
    assert row["tokens/trained"] == sum(lengths)
    assert row["tokens/generated"] == generated
    assert row["tokens/prefilled"] == (sum(lengths) + len(datums) - generated) / 4  # G
    names = json.loads((ROOT / "runs" / "main-seed0.jsonl").read_text().splitlines()[1])
    assert row.keys() - {"tokens/prefilled"} <= names.keys()


def test_datums_have_the_sdks_types():
    """With the SDK: ids shifted by one, zeros on the prompt, float32. Catches a list that the SDK
    takes for something else."""
    tinker = pytest.importorskip("tinker", reason="tests/tinker.sh runs this, with the SDK")
    rows = [([5, 6, 7], [1, 2], [-1.0, -2.0], [0.5, 0.5]), ([3], [4], [-3.0], [1.0])]
    long, short = dppo_tinker.make_datums(rows, (True, True))
    assert isinstance(long, tinker.Datum)
    assert long.model_input.to_ints() == [5, 6, 7, 1]
    columns = {name: (x.dtype, x.tolist()) for name, x in long.loss_fn_inputs.items()}
    assert columns == {
        "target_tokens": ("int64", [6, 7, 1, 2]),
        "logprobs": ("float32", [0, 0, -1, -2]),
        "advantages": ("float32", [0, 0, 4, 4]),  # 0.5 x 4 tokens x 2 datums
    }
    assert short.loss_fn_inputs["advantages"].tolist() == [2]


# ---------------------------------------------------------------------------- servers


@pytest.mark.parametrize("norm", ["skyrl.ai/grad_norm", "unclipped_grad_l2:mean"])
@pytest.mark.parametrize("denominator", MEANS)
def test_the_denominator_is_measured(denominator, norm):
    """By either name of the gradient's norm, and on a client of its own."""
    trainer = make(Server(denominator, norm))
    assert trainer.means == MEANS[denominator]
    assert not trainer.client.gradients, "the probe's steps count as the run's"


@pytest.mark.parametrize("denominator", ["all tokens", "live tokens", "call", "scaled", None])
def test_other_servers_are_refused(denominator):
    """A mean over all tokens, over those with an advantage, over each call's datums, scaled
    advantages, and no norm. Catches a probe that takes one of them for a sum or a mean."""
    server = Server(denominator) if denominator else Server(norm=None)
    with pytest.raises(RuleError, match=r"ppo: norms \[.*use another server"):
        make(server)


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
    with mock.patch.object(tinker_toy, "reward", return_value=None):
        train(tmp_path / "nan", Server(), steps=1, held_out=[])
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


# ---------------------------------------------------------------------------- the page

PAGE = (ROOT / "docs" / "other-trainers.md").read_text().split("\n## Tinker\n")[1]


def test_the_program(policy_folder, monkeypatch, tmp_path):
    """The page's program with two small steps. Catches one that no longer runs, and a figure of the
    log that the page does not have."""
    (program,) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    for large, small in (("steps=25", "steps=2"), ("step=32", "step=8"), ('c", 100', 'c", 8')):
        assert large in program
        program = program.replace(large, small)
    monkeypatch.setattr(arithmetic, "BASE", policy_folder)
    monkeypatch.setattr(dppo_tinker, "tinker", tinker_toy.SDK)
    server = Server()
    monkeypatch.setattr(tinker_toy.SDK, "ServiceClient", lambda base_url: server, raising=False)
    monkeypatch.setitem(sys.modules, "dppo_tinker", dppo_tinker)
    monkeypatch.chdir(tmp_path)
    exec(program, {})
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
