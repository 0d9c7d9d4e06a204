"""dppo_tinker.py against a service in this process: padding, runs, refusals. test_exact.py has the
proof.

These tests need no SDK; tests/tinker.sh runs them with it, and test_tinker_server.py with SkyRL's
server.
"""

import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import tinker_toy
import torch
from exact import error, over_completions
from tinker_toy import MEANS, PROBLEMS, Server, Toy, dppo_tinker, make_trainer

import dppo
import sampler
from dppo import RuleError
from tasks import arithmetic

ROOT = Path(__file__).resolve().parents[2]


# ---------------------------------------------------------------------------- a step


@pytest.mark.parametrize(("rule", "multiple"), [("pps", 5), ("none", 5), ("none", 40)])
def test_padding_is_exact(tmp_path, rule, multiple):
    """Lengths in multiples of 8 and datums in multiples of 5 or 40, by fillers, of which all of 16
    completions leave none. Catches a length without the padding, a number of datums without the
    fillers, and fillers that have a gradient."""
    options = {"pad_tokens": 8, "pad_datums": multiple, "completion_rule": rule}
    toy, sent = Toy(tmp_path, **options), []
    step = tinker_toy.Client.forward_backward
    record = lambda client, datums, loss_fn: sent.append(datums) or step(client, datums, loss_fn)
    with mock.patch.object(tinker_toy.Client, "forward_backward", record):
        found = over_completions(toy.gradient)
    assert error(found, toy.stock()) < 1e-12
    assert {one.model_input.length for datums in sent for one in datums} == {8}
    assert {len(datums) % multiple for datums in sent} == {0}
    live = [sum(any(one.loss_fn_inputs["advantages"]) for one in datums) for datums in sent]
    assert any(n % multiple for n in live), "no fillers were needed"


# ---------------------------------------------------------------------------- the probe


@pytest.mark.parametrize("norm", ["skyrl.ai/grad_norm", "unclipped_grad_l2:mean"])
@pytest.mark.parametrize("denominator", MEANS)
def test_the_denominator_is_measured(tmp_path, denominator, norm):
    """By either name of the gradient's norm, and on a client of its own."""
    trainer = Toy(tmp_path, denominator).trainer
    trainer.service.norm = norm
    client = trainer.service.create_lora_training_client("toy", 1, 2)
    with mock.patch.object(dppo_tinker, "tinker", tinker_toy.SDK):
        found = dppo_tinker.measure_denominator(client, "ppo", [1, 2, 3, 4, 5, 6, 1, 2, 3])
    assert found == MEANS[denominator]
    assert trainer.client.moments[2] == 0, "the probe's steps count as the run's"


@pytest.mark.parametrize("denominator", ["all tokens", "live tokens", "call", "scaled"])
def test_other_denominators_are_refused(tmp_path, denominator):
    """A mean over all tokens, over those with an advantage, over each call's datums, and scaled
    advantages. Catches a probe that takes one of them for a sum or a mean."""
    with pytest.raises(RuleError, match=r"ppo: norms \[.*use another server"):
        Toy(tmp_path, denominator)


def test_servers_without_norms_are_refused(tmp_path):
    with pytest.raises(RuleError, match=r"norms \[nan, nan, nan, nan\] .*use another server"):
        make_trainer(tmp_path, Server(norm=None))


def test_zero_sends_less(tmp_path):
    """Fails if a completion without an advantage is sent, or if another norm is logged."""
    none, zero = (Toy(tmp_path / rule, completion_rule=rule) for rule in ("none", "zero"))
    found = [toy.gradient() for toy in (none, zero)]
    assert zero.row["tokens/trained"] < none.row["tokens/trained"]
    assert zero.row["grad_norm"] == found[1].norm().item() == pytest.approx(found[0].norm().item())


def test_a_step_that_keeps_nothing(tmp_path):
    """All rewards are equal: one datum without an advantage, and a step of Adam by its momentum.
    Catches an empty request, which the SDK refuses, and a step that train.py makes and this not."""
    toy = Toy(tmp_path, completion_rule="zero")
    toy.trainer.reward = lambda text, answer: 1.0
    assert not toy.gradient().any()
    assert toy.row["kept/completions"] == 0
    assert 0 < toy.row["tokens/trained"] <= 7


def test_the_log(tmp_path):
    """Names are train.py's, except for the prompts' tokens. Catches tokens that were not sent, and
    a share of groups without the prompts' weights."""
    toy = Toy(tmp_path, prompt_rule="dppo", prompt_prune_rate=0.5, completion_rule="pps")
    toy.teach()
    drawn, own, history = [], [], sampler.PromptHistory
    prune, weights = history.prune, dppo.prune_completions
    see_prompts = lambda *args: drawn.append((args[3], *prune(*args))) or drawn[-1][1:]
    see = lambda *args: own.append((args[2], *weights(*args))) or own[-1][1:]
    with (
        mock.patch.object(history, "prune", see_prompts),
        mock.patch.object(dppo, "prune_completions", see),
    ):
        for number in range(9):  # the first draw that leaves a prompt out
            toy.trainer.number = number
            row = (toy.gradient(), toy.row)[1]
            if not drawn[-1][1].all():
                break
    (candidates, keep, w), (_batch, kept, _own) = drawn[-1], own[-1]
    rewards, lengths, costs = (table[candidates[keep]] for table in toy.tables)
    w, mean = w[keep], rewards.nanmean(dim=1)
    dead = dppo.dead_groups(rewards)
    good = dead & (mean >= 0.5)
    wanted = {
        "reward": ((w * mean).sum() / w.sum()).item(),
        "tokens/prefilled": (costs - lengths)[:, 0].sum().item(),
        "tokens/generated": lengths.sum().item(),
        "tokens/trained": (kept * (costs - 1)).sum().item(),
    }
    for name, some in {"mixed": ~dead, "all_good": good, "all_bad": dead & ~good}.items():
        wanted[f"by_group/frac_{name}"] = ((w * some).sum() / w.sum()).item()
    assert {name: row[name] for name in wanted} == pytest.approx(wanted)
    assert w.unique().numel() > 1
    names = json.loads((ROOT / "runs" / "main-seed0.jsonl").read_text().splitlines()[1])
    assert {x for x in row if not x.startswith("by_group/")} - {"tokens/prefilled"} <= names.keys()


def test_sizes_are_those_of_surprises(tmp_path):
    """Fails if sizes do not come from the log-probs that sampling returns."""
    toy, seen = Toy(tmp_path), []
    over_completions(toy.gradient, seen=seen)
    (batch,), order = seen, sampler.candidates(4, 4, 0, 1)
    for k, q in enumerate(order.tolist()):
        for g, one in enumerate(toy.rows[q]):
            energy = sum(2 * (1 - torch.tensor(x).exp()) ** 2 for x in one.logprobs)
            size = abs(batch.advantages[k, g]) * energy.sqrt() / len(one.tokens) / 16
            if size > dppo.SIZE_FLOOR * batch.size.max():
                assert batch.size[k, g] == pytest.approx(size.item(), rel=1e-6)


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


# ---------------------------------------------------------------------------- runs

HELD_OUT = [([6], "answer"), ([1, 1], "answer")]
BOTH = {"prompt_rule": "uniform", "prompt_prune_rate": 0.5, "completion_rule": "pps"}


def train(folder, server, **options):
    options = {"steps": 6, "save_every": 2, "eval_every": 3, "problems": PROBLEMS * 4} | options
    held_out = options.pop("held_out", HELD_OUT)
    trainer = make_trainer(folder, server, held_out=held_out, prompts_per_step=4, **BOTH, **options)
    with mock.patch.object(dppo_tinker, "tinker", tinker_toy.SDK):
        trainer.train()
    return trainer


def state(folder):
    return torch.load(folder / "state.pt")


@pytest.mark.parametrize("loss", ["grpo", "dapo"])
def test_stopped_and_resumed(tmp_path, loss):
    """The server fails in step 6, after the checkpoint of step 4: one line says so. The same call
    goes on: log, weights, Adam's moments, history and denominator are those of a run that went
    through. Catches a draw that starts over, and anything that a checkpoint forgets."""
    whole = train(tmp_path / "whole", Server(), loss=loss)
    server = Server(dies_at=5)
    with pytest.raises(RuleError, match=r"optim_step failed with TinkerError\('connection") as said:
        train(tmp_path / "broken", server, loss=loss)
    assert "\n" not in str(said.value)
    log = (tmp_path / "broken" / "log.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in log] == [0, 1, 2, 3, 4, 5]
    assert len(state(tmp_path / "broken")[3]) == 5, "steps 0 to 4"
    server.dies_at = -1
    resumed = train(tmp_path / "broken", server, loss=loss)
    texts = [(tmp_path / name / "log.jsonl").read_text() for name in ("whole", "broken")]
    assert texts[0] == texts[1]
    assert len(texts[0].splitlines()) == 7
    assert torch.equal(whole.client.theta, resumed.client.theta)
    assert all(map(torch.equal, whole.client.moments[:2], resumed.client.moments[:2]))
    assert resumed.client.moments[2] == 6
    for name, value in vars(whole.history).items():
        other = vars(resumed.history)[name]
        torch.testing.assert_close(value, other, rtol=0, atol=0, equal_nan=True)
    assert not whole.history.past_advantage.isnan().all()
    assert whole.mean_tokens == resumed.mean_tokens
    first = json.loads(texts[0].splitlines()[1])
    assert first["kept/prompts"] == (1.0 if loss == "dapo" else 0.5), "dapo counts tokens first"


def test_evaluations(tmp_path):
    """At step 0 and every third: the mean of four completions of each. Catches one of trained
    problems, and a nan in the file."""
    trainer = train(tmp_path, Server(), held_out=[([2], "answer 1"), ([3], "answer 1")])
    rows = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "eval/avg@4" in row] == [0, 3, 6]
    trainer.service.saved.clear()
    with mock.patch.object(dppo_tinker, "tinker", tinker_toy.SDK):
        _, rewards = trainer.sample(trainer.held_out, 4, "eval", 6)
    assert rows[6]["eval/avg@4"] == rewards.nanmean().item()
    assert rows[0].keys() == {"step", "eval/avg@4"}
    train(tmp_path / "none", Server(), held_out=[])
    with mock.patch.object(tinker_toy, "reward", return_value=None):
        train(tmp_path / "nan", Server(), steps=1)
    last = (tmp_path / "nan" / "log.jsonl").read_text().splitlines()[-1]
    assert json.loads(last)["reward"] is None


def test_learning_rates(tmp_path):
    """Fails if the warm-up is not of five steps, or reaches more than lr."""
    rates = []
    step = tinker_toy.Client.optim_step
    record = lambda client, adam: rates.append(adam) or step(client, adam)
    with mock.patch.object(tinker_toy.Client, "optim_step", record):
        train(tmp_path, Server(), lr=0.1)
    assert [one.learning_rate for one in rates] == pytest.approx(
        [0.0] * 4 + [0.02, 0.04, 0.06, 0.08, 0.1, 0.1]
    )
    assert {(one.beta1, one.beta2, one.eps) for one in rates} == {(0.9, 0.999, 1e-8)}


def test_samples_are_new(tmp_path):
    """Fails if two steps, two prompts or an evaluation share random numbers, or if seeds are more
    than servers take."""
    seeds = []
    sample = tinker_toy.Policy.sample
    record = lambda policy, prompt, count, options: (
        seeds.append(options.seed) or sample(policy, prompt, count, options)
    )
    with mock.patch.object(tinker_toy.Policy, "sample", record):
        train(tmp_path, Server())
    assert len(seeds) == len(set(seeds)) == 6 * 2 + 3 * 2
    assert 0 <= min(seeds) < max(seeds) < 2**30


# ---------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss": "gspo"}, "loss='gspo' is not exact .*'grpo', 'dr_grpo', 'dapo', 'cispo'"),
        ({"loss": "gppo"}, "loss='gppo' is not exact .*'grpo'"),
        ({"loss_fn": "dro"}, "loss_fn='dro' is not exact .*'importance_sampling', 'ppo', 'cispo'"),
        ({"loss_fn": "dppo"}, "loss_fn='dppo' is not exact"),
        ({"loss_fn": "cross_entropy"}, "loss_fn='cross_entropy' is not exact"),
        ({"prompts_per_step": 5}, "prompts_per_step=5: only 4 problems"),
        ({"scale_rewards": "std"}, "unknown scale_rewards 'std': .*none, group, variance, mean"),
    ],
)
def test_refusals(tmp_path, options, message):
    """What would not be exact is refused with the option and the way out, before the server is
    asked for anything."""
    server = Server()
    with pytest.raises(RuleError, match=message):
        make_trainer(tmp_path, server, **options)
    assert not server.clients


def test_rules_of_ones_own(tmp_path, monkeypatch):
    """Fails if a rule that is added after the import is refused."""
    rule = dppo.by_probability(lambda batch, rate: batch.live.double(), rate=None)
    monkeypatch.setitem(dppo.COMPLETION_RULES, "mine", rule)
    make_trainer(tmp_path, Server(), completion_rule="mine")


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


def test_missing_log_probs(tmp_path):
    with pytest.raises(RuleError, match=r"returns no log-probs .*use one that does"):
        train(tmp_path, Server(logprobs=False))


def test_answers_are_not_awaited_for_ever(monkeypatch):
    """Fails if a server that hangs hangs the client: TimeoutError is one line, too."""
    monkeypatch.setattr(dppo_tinker, "TIMEOUT", 0.01)
    from concurrent.futures import Future

    def forward_backward(*_):
        return Future()

    with pytest.raises(
        RuleError, match=r"forward_backward failed with TimeoutError.*program continues"
    ):
        dppo_tinker.ask(forward_backward)


def test_no_sdk():
    """Without the SDK there is one sentence, with the way out."""
    check = "import sys; sys.modules['tinker'] = None; import dppo_tinker"
    command = [sys.executable, "-c", check]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'integrations'}"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert re.search(r"RuleError: Tinker's SDK is missing: pip install .*$", done.stderr)


def test_no_key(tmp_path, monkeypatch):
    """Without a key, or a command that prints one, the server is not asked."""
    server = Server()
    monkeypatch.setattr(tinker_toy.SDK, "ServiceClient", server, raising=False)
    monkeypatch.setattr(dppo_tinker, "tinker", tinker_toy.SDK)
    monkeypatch.delenv("TINKER_API_KEY", raising=False)
    monkeypatch.delenv("TINKER_CREDENTIAL_CMD", raising=False)
    tools = (tinker_toy.reward, tinker_toy.Tokenizer(), "toy", "http://toy")
    options = {"prompts_per_step": 4, "out_dir": tmp_path}
    with pytest.raises(RuleError, match=r"TINKER_API_KEY is not set: .* tml-"):
        dppo_tinker.Trainer(PROBLEMS, [], *tools, **options)
    assert not server.clients
    monkeypatch.setenv("TINKER_CREDENTIAL_CMD", "cat key")
    dppo_tinker.Trainer(PROBLEMS, [], *tools, **options)
    assert server.clients


# ---------------------------------------------------------------------------- the page

PAGE = (ROOT / "docs" / "other-trainers.md").read_text().split("\n## Tinker\n")[1]


def test_the_program(policy_folder, monkeypatch, tmp_path):
    """Two small steps of the page's program. Catches one that no longer runs, and a figure of the
    log that the page does not have."""
    (program,) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    for large, small in (("steps=25", "steps=2"), ("step=32", "step=8"), ('c", 100', 'c", 8')):
        assert large in program
        program = program.replace(large, small)
    monkeypatch.setattr(arithmetic, "BASE", policy_folder)
    monkeypatch.setattr(dppo_tinker, "tinker", tinker_toy.SDK)
    monkeypatch.setattr(tinker_toy.SDK, "ServiceClient", Server(), raising=False)
    monkeypatch.setitem(sys.modules, "dppo_tinker", dppo_tinker)
    monkeypatch.setenv("TINKER_API_KEY", "tml-toy")
    monkeypatch.chdir(tmp_path)
    exec(program, {})
    log = (tmp_path / "out-tinker" / "log.jsonl").read_text().splitlines()
    named = set(re.findall(r"^\| `(tokens/\w+)` \|", PAGE, re.MULTILINE))
    assert {name for name in json.loads(log[2]) if name.startswith("tokens/")} == named


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
