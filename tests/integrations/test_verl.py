"""dppo_verl.py without Ray: several updates, verl's engine, a step's queue and log, checkpoints.
test_exact.py has what every trainer must do.

tests/verl.sh builds an environment with verl and runs these tests in it; without verl they are
skipped.
"""

import re
import shutil
import subprocess
import sys
import types
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
import transformers
from exact import calls_of, error, over_completions, over_prompts

import dppo
from dppo import RuleError

pytest.importorskip("verl", reason="tests/verl.sh runs these, with verl")
import verl
import verl_toy as toy
from hydra import compose, initialize_config_module
from verl.trainer.ppo import core_algos
from verl_toy import (
    ACTOR,
    ENTROPY,
    FEW,
    KL,
    LOSS,
    MODE,
    NO_TERMS,
    PROMPT_RATE,
    PROMPT_RULE,
    RATE,
    RULE,
    UPDATE,
    Toy,
    dppo_verl,
    tokens_of,
)  # fmt: skip

ROOT = Path(__file__).resolve().parents[2]


# ---------------------------------------------------------------------------- completions


@pytest.mark.parametrize(
    ("scale", "one_right", "one_wrong"),
    [("variance", (4, -4 / 3), (4 / 3, -4)), ("mean", (3, -1), (1 / 3, -1))],
)
def test_own_estimators(scale, one_right, one_wrong):
    """Two groups of four, whose rows alternate, with one right and with one wrong completion.
    Catches another group, another scale, and tokens without loss that get an advantage."""
    estimator = core_algos.get_adv_estimator_fn(f"grpo_{scale}")
    rewards = torch.tensor([[0, 1.0], [0, 0], [0, 0], [1, 0], [0, 0], [1, 0], [0, 0], [1, 0]])
    mask = torch.tensor([[1, 1], [1, 0]] * 4)
    index = np.array(["a", "b"] * 4)
    found, _ = estimator(token_level_rewards=rewards, response_mask=mask, index=index, config=None)
    (right, wrong), (other_right, other_wrong) = one_right, one_wrong
    groups = [[right, wrong, wrong, wrong], [other_wrong, other_right, other_right, other_right]]
    wanted = torch.tensor(groups).T.flatten()[:, None] * mask
    torch.testing.assert_close(found, wanted, check_dtype=False)


@pytest.mark.parametrize(
    ("rule", "options"),
    [
        *(("pps", {f"{ACTOR}kl_loss_type": kind}) for kind in ("kl", "abs", "mse", "low_var_kl")),
        ("zero", {LOSS: "dro", **NO_TERMS, "prompts": ("bb", "dddd")}),
        ("zero", {KL: True, ENTROPY: 0, "prompts": ("bb", "dddd")}),
        ("zero", {KL: False, ENTROPY: 0.02, "prompts": ("bb", "dddd")}),
    ],
)
def test_terms_without_advantages(rule, options):
    """Each of verl's estimates of KL, and zero where no completion of a group is right: it has a
    gradient if there is a KL loss, an entropy bonus or dro's penalty. Catches a gradient that the
    factor misses, and a term that is dropped for sure because its advantage is 0."""
    pruned = Toy(**FEW | options, **{RULE: rule, RATE: 0.5})
    assert error(over_completions(pruned.gradient), pruned.stock()) < 1e-12


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("ranks", [1, 2])
def test_each_update_is_exact(size, ranks):
    """Updates of 2 or 1 of 4 prompts: the expected gradient of each is verl's for its prompts.

    Catches rows that move to another update, another update's denominator, and a budget that
    several of them share.
    """
    options = {MODE: "token-mean", UPDATE: size}
    pruned = Toy(**options, **{RULE: "pps", RATE: 0.5}, ranks=ranks)
    for part in range(4 // size):
        prompts = Toy.PROMPTS[part * size : (part + 1) * size]
        stock = toy.stock(prompts, **options)
        found = over_completions(pruned.gradient, part)[part]
        assert error(found, stock) < 1e-12
        assert len(pruned.gradients) == 4 // size
        assert len(set(pruned.sizes)) == 1, "updates of unequal size"


def test_every_draw_has_random_numbers_of_its_own():
    """Three steps of two updates. Catches a seed that updates or steps share."""
    pruned = Toy(**{UPDATE: 2, PROMPT_RULE: "uniform", MODE: "token-sum", "data__seed": 7})
    with calls_of(dppo, "generator_for") as calls:
        for _step in range(3):
            pruned.step()
    keys = [key for key, _generator in calls]
    assert len(keys) == len(set(keys)) == 3 * (1 + 2)
    assert {key[0] for key in keys} == {7}


# ---------------------------------------------------------------------------- prompts


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
def test_prompts_of_several_updates_are_exact(mode):
    """Two updates of two candidates, of which one is rolled out. Catches prompts that are given to
    updates after the draw."""
    options = {MODE: mode, PROMPT_RULE: "uniform", PROMPT_RATE: 0.5, RULE: "none", UPDATE: 2}
    pruned = Toy(**options)
    pruned.teach(mean_tokens=60.0)
    for part, found in enumerate(over_prompts(pruned.gradient)):
        prompts = Toy.PROMPTS[2 * part : 2 * part + 2]
        wanted = toy.stock(prompts, **{MODE: mode, UPDATE: 2})
        if mode == "token-mean":
            wanted *= tokens_of(prompts) / 30
        assert error(found, wanted) < 1e-12


def test_weights_on_padding_fail(monkeypatch):
    """Rows that pad have factor 0, even if their tokens had losses; with the factor of the row that
    they copy, the gradient is biased."""
    from verl.trainer.ppo import padding_utils

    copy = lambda row, tag, eos: (dict(row), tag | {"is_padding": True})
    monkeypatch.setattr(padding_utils, "construct_minimal_padding_template", copy)
    pruned = Toy(**FEW, **{MODE: "token-sum", RULE: "uniform", RATE: 0.4})
    stock = pruned.stock()
    assert error(over_completions(pruned.gradient), stock) < 1e-12
    put = pruned.queue.put

    def with_weights(keys, partition_id=None, fields=None, tags=None):
        if fields is not None and "dppo" in fields:
            table = fields["dppo"]
            pad = torch.tensor([key.startswith("pad") for key in keys])
            table[pad, 0] = table[~pad, 0][0]
        return put(keys, partition_id, fields, tags)

    pruned.queue.put = with_weights
    assert error(over_completions(pruned.gradient), stock) > 1e-3


# ---------------------------------------------------------------------------- verl's engine


@pytest.mark.parametrize("dynamic", [True, False])
@pytest.mark.parametrize("remove_padding", [True, False])
def test_the_hook_in_verls_engine(remove_padding, dynamic):
    """A GPT-2 in float64 through the FSDP engine's own preparation of inputs and outputs, which
    packs rows or pads them, and micro-batches in another order or in order. The gradient is the sum
    of f_i times that of row i alone.

    Catches a factor that is given to another row's tokens.
    """
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

    nothing = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    sizes = {"vocab_size": toy.V, "n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 16}
    config = transformers.GPT2Config(**sizes, **nothing, bos_token_id=0, eos_token_id=0)
    config._attn_implementation = "sdpa"
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config).double()
    engine = types.SimpleNamespace(
        pad_to_length=False, use_ulysses_sp=False, module=model,
        engine_config=types.SimpleNamespace(
            entropy_checkpointing=False, entropy_from_logits_with_chunking=False
        ),
        _get_packed_pad_size=lambda n: 0, _gather_and_unpad_packed=lambda x, n: x,
        compute_entropy_from_logits=toy.entropy,
    )  # fmt: skip
    pruned = Toy(prompts=("bb", "ccc"), ranks=1, **{UPDATE: 2, RULE: "pps", RATE: 0.4})
    pruned.remove_padding, pruned.dynamic, pruned.limit = remove_padding, dynamic, 12

    def forward(data):
        inputs, args = FSDPEngineWithLMHead.prepare_model_inputs(engine, data)
        inputs.pop("attention_mask") if inputs["attention_mask"] is None else None
        output = model(**inputs, use_cache=False)
        return FSDPEngineWithLMHead.prepare_model_outputs(engine, output, args, data, None)

    order = []
    loss = pruned.loss

    def recorded(model_output, data, dp_group):
        order.extend(data["dppo"].values().view(-1, 2)[:, 0].tolist())
        return loss(model_output=model_output, data=data, dp_group=dp_group)

    parameters = list(model.parameters())
    pruned.make_policy = lambda: types.SimpleNamespace(
        zero=model.zero_grad, move=lambda lr: None, forward=forward,
        gradient=lambda: torch.cat([x.grad.flatten() for x in parameters]),
    )  # fmt: skip
    pruned.loss = recorded
    (found,) = pruned.step()
    whole = list(order)
    assert len(set(whole)) > 2
    assert len(pruned.forwarded) > 1
    (data,) = pruned.trained
    total = torch.zeros_like(found)
    for row in range(len(data)):
        alone = dppo_verl.tu.index_select_tensor_dict(data, [row])
        factor = alone["dppo"].values()[0].item()
        rest = alone["dppo"].values()[1:].clone()
        table = torch.cat([torch.ones(1, dtype=torch.float64), rest])[None]
        alone["dppo"] = torch.nested.as_nested_tensor(list(table), layout=torch.jagged)
        model.zero_grad()
        loss(model_output=forward(alone), data=alone, dp_group=None)[0].backward()
        total += factor * torch.cat([x.grad.flatten() for x in parameters])
    assert error(found, total) < 1e-12
    if dynamic:
        assert whole != data["dppo"].values().view(-1, 2)[:, 0].tolist(), "nothing was reordered"


# ---------------------------------------------------------------------------- a step


def test_dropped_rows_are_not_forwarded():
    """What is trained on are the rows that were kept and padding with factor 0; every row that was
    sampled is returned, so that verl clears it.

    Catches work that is only masked, rows that leak in the queue, and a figure of something else.
    """
    pruned = Toy(**{RULE: "pps", RATE: 0.6, UPDATE: 2, MODE: "token-mean"})
    pruned.step()
    factor = torch.cat([part["dppo"].values().view(-1, 2)[:, 0] for part in pruned.trained])
    kept, rows = factor[factor > 0], len(factor)
    assert sum(pruned.forwarded) == rows < 16
    assert pruned.sizes == [rows // 2] * 2
    sampled = {key for key in pruned.queue.rows if not key.startswith("pad")}
    padding = set(pruned.queue.rows) - sampled
    assert len(sampled) == 16
    assert set(pruned.returned.keys) == sampled | padding
    assert len(kept) + len(padding) == rows
    tables = [part["dppo"].values().view(-1, 2) for part in pruned.trained]
    assert {x for table in tables for x in table[:, 1].tolist()} == {
        tokens_of(Toy.PROMPTS[:2]),
        tokens_of(Toy.PROMPTS[2:]),
    }
    assert pruned.metrics["dppo/forwards"] == rows / 16


def test_failed_rollouts():
    """A completion of each prompt is missing: it has no reward and costs nothing. Catches a place
    that shifts, and one that is trained on."""
    pruned = Toy(**toy.FEW)
    sample = pruned.sample

    def one_failed(*args):
        batch, metrics = sample(*args)
        return batch.select_keys([key for key in batch.keys if not key.endswith("_2_0")]), metrics

    pruned.trainer.replay_buffer.sample = one_failed
    with calls_of(dppo, "prune_completions") as calls:
        pruned.step()
    (((_rule, _rate, batch, _generator), _drawn),) = calls
    assert batch.rewards[:, 2].isnan().all()
    assert not batch.size[:, 2].any()
    assert not batch.cost[:, 2].any()
    there = torch.tensor([0, 1, 3])
    rewards, _lengths, costs, _energy = (table[:, there] for table in pruned.tables)
    assert torch.equal(batch.rewards[:, there], rewards)
    assert torch.equal(batch.cost[:, there], costs.double())


def test_whole_micro_batches():
    """Fails if verl, without dynamic micro-batches, gets an update that its sizes do not divide."""
    options = {
        f"{ACTOR}use_dynamic_bsz": False, f"{ACTOR}ppo_micro_batch_size_per_gpu": 2,
        "actor_rollout_ref__rollout__log_prob_use_dynamic_bsz": False,
        "actor_rollout_ref__rollout__log_prob_micro_batch_size_per_gpu": 3,
        "actor_rollout_ref__ref__log_prob_use_dynamic_bsz": True,
    }  # fmt: skip
    pruned = Toy(**options, **{RULE: "pps", RATE: 0.6})
    pruned.step()
    assert pruned.sizes == [12]


def test_at_least_one_prompt_for_each_update():
    """Fails if a high rate leaves an update without prompts, or if one draw serves both updates,
    which in some steps would take both prompts from one of them."""
    options = {PROMPT_RULE: "uniform", PROMPT_RATE: 0.99, MODE: "token-sum", UPDATE: 2}
    pruned = Toy(**options)
    for _step in range(8):
        pruned.step()
        assert sorted(q // 2 for q, _ in pruned.trainer.groups.values()) == [0, 1]
        assert {weight for _, weight in pruned.trainer.groups.values()} == {2.0}


# ---------------------------------------------------------------------------- checkpoints


def test_checkpoints(tmp_path, monkeypatch):
    """The history and the mean of tokens go with verl's checkpoint, before it is named the latest;
    other prompts are refused; a run of verl's own trainer can go on.

    Catches a history that is not saved, or not loaded.
    """
    seen = []
    monkeypatch.setattr(
        toy.PPOTrainerSync, "_save_checkpoint", lambda _: seen.append(file.exists())
    )
    monkeypatch.setattr(toy.PPOTrainerSync, "_load_checkpoint", lambda _: None)
    options = {
        PROMPT_RULE: "uniform",
        MODE: "token-mean",
        "trainer__default_local_dir": str(tmp_path),
    }
    file = tmp_path / "global_step_1" / "dppo.pt"
    one, other = Toy(**options), Toy(**options)
    one.step()
    other.trainer.global_steps = 1
    other.trainer._load_checkpoint()  # a run of verl's trainer
    assert other.trainer.mean_tokens is None
    one.trainer._save_checkpoint()
    assert seen == [True]
    other.trainer._load_checkpoint()
    assert other.trainer.mean_tokens == one.trainer.mean_tokens > 0
    for name, value in vars(one.trainer.history).items():
        torch.testing.assert_close(
            value, vars(other.trainer.history)[name], rtol=0, atol=0, equal_nan=True
        )
    path = {"trainer__resume_mode": "resume_path", "trainer__resume_from_path": str(file.parent)}
    third = Toy(**options | path | {"trainer__default_local_dir": "elsewhere"})
    third.trainer.global_steps = 1
    third.trainer._load_checkpoint()
    assert third.trainer.mean_tokens == one.trainer.mean_tokens
    fourth = Toy(**options, prompts=("f", "bb", "ccc", "g"))
    fourth.trainer.global_steps = 1
    with pytest.raises(RuleError, match=r"dppo\.pt: its history is of other prompts; resume with"):
        fourth.trainer._load_checkpoint()


# ---------------------------------------------------------------------------- refusals


def test_other_versions_are_refused(monkeypatch):
    """Fails if methods of a verl that nobody read are wrapped."""
    monkeypatch.setattr(verl, "__version__", "0.10.0")
    with pytest.raises(RuleError, match=r"verl 0\.10\.0: .*pip install verl==0\.9\.1, or"):
        Toy()
    Toy(**{RULE: "none"})


def test_other_data_is_refused():
    """Fails if two prompts share a history, or a group of other rollouts is pruned."""
    said = r"train_files: 1 of 4 prompts repeat others.*set it to none"
    with pytest.raises(RuleError, match=said):
        Toy(prompts=("f", "bb", "f", "ccc"), **{PROMPT_RULE: "uniform"})
    pruned = Toy(prompts=("f", "bb", "f", "ccc"))  # completions alone need no history
    pruned.step()
    sample = pruned.sample

    def several_outputs(*args, **options):
        batch, metrics = sample(*args, **options)
        batch.keys[3] = batch.keys[3].replace("_0", "_1")
        return batch, metrics

    pruned.trainer.replay_buffer.sample = several_outputs
    pruned.queue.tags = mock.MagicMock()
    with pytest.raises(
        RuleError, match=r"rollout\.n=4, but the agent loop .*: change it to n rollouts"
    ):
        pruned.step()


def test_a_missing_seed_is_reported(capsys):
    """Fails if a run whose order cannot be repeated does not say so."""
    assert Toy(data__seed=None).trainer.seed == 0
    assert "data.seed=null: draws use seed 0" in capsys.readouterr().out
    Toy(data__seed=None, **{RULE: "none"})
    assert "data.seed" not in capsys.readouterr().out


def test_verl_finds_it():
    """The trainer is registered by the plug-in's import, under a name that verl does not use, in
    a process that imports verl alone. Catches a circular import."""
    code = (
        "import verl; from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY as names; "
        "print(sorted(names))"
    )
    for first in ("", "import dppo_verl; "):
        environment = {"VERL_USE_EXTERNAL_MODULES": "" if first else "dppo_verl"}
        environment |= {"PATH": "/usr/bin", "PYTHONPATH": str(ROOT / "integrations")}
        found = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", first + code], cwd=ROOT, check=True, text=True,
            capture_output=True, env=environment,
        ).stdout  # fmt: skip
        assert found.endswith("['colocate_async', 'nanodppo', 'separate_async', 'sync']\n")


@pytest.mark.parametrize(
    ("edit", "installed", "said"),
    [
        ("", True, "verl 0.9.1 finds the trainer nanodppo: "),
        ("", False, "can be imported, but verl does not load it: pip install nanodppo"),
        ("import missing_module", True, "ModuleNotFoundError: No module named 'missing_module'"),
    ],
)
def test_the_check(tmp_path, edit, installed, said):
    """`python -m dppo_verl` as a plug-in, not installed, and broken: verl itself says nothing of
    an error. Catches a check that passes whatever verl finds."""
    for name in ("dppo.py", "sampler.py", "integrations/dppo_shared.py"):
        shutil.copy(ROOT / name, tmp_path)
    text = (ROOT / "integrations" / "dppo_verl.py").read_text()
    (tmp_path / "dppo_verl.py").write_text(text.replace("import dppo\n", f"import dppo\n{edit}\n"))
    if installed:
        info = tmp_path / "nanodppo-0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: nanodppo\nVersion: 0\n")
        (info / "entry_points.txt").write_text("[verl.plugins]\nnanodppo = dppo_verl\n")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "dppo_verl"], cwd=tmp_path, check=False, text=True,
        capture_output=True, env={"PATH": "/usr/bin", "PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    assert said in done.stdout + done.stderr
    assert (done.returncode == 0) == (installed and not edit)


PAGE = (ROOT / "docs" / "other-trainers.md").read_text().split("\n## verl\n")[1]


def test_the_pages_options():
    """Every option of the page is one of verl's, and the trainer takes it. Catches a misspelt name
    and a missing +."""
    command = re.search(r"^    python -m verl\.trainer\.main_ppo ((?:.*\\\n)+.*)$", PAGE, re.M)[1]
    cases = [command.replace("\\\n", " ").split()]
    losses = PAGE.split("The losses, with the papers' clips:\n\n")[1].split("\n\n")[0]
    for options in losses.split("    # ")[1:]:
        _name, *lines = options.splitlines()
        cases.append([*cases[0], *" ".join(lines).split()])
    assert len(cases) == 5
    for options in cases:
        with initialize_config_module("verl.trainer.config", version_base=None):
            config = compose("ppo_trainer", overrides=options)
        with mock.patch.object(toy.PPOTrainerSync, "__init__", return_value=None):
            trainer = dppo_verl.DPPOTrainer(config)
        assert trainer.prunes_prompts
