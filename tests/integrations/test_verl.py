"""dppo_verl.py without Ray: several updates, verl's engine, a step's queue and log, checkpoints.
test_exact.py has what every trainer must do.

tests/verl.sh builds an environment with verl and runs these tests in it; without verl they are
skipped.
"""

import functools
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
from exact import assert_same_history, calls_of, error, over_completions, over_prompts

import dppo
from dppo import RuleError

pytest.importorskip("verl", reason="tests/verl.sh runs these, with verl")
import verl
import verl_toy as toy
from hydra import compose, initialize_config_module
from verl.trainer.ppo import core_algos, padding_utils
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
from verl_toy import (
    ACTOR,
    ENTROPY,
    FEW,
    KL,
    LOSS,
    MODE,
    NO_TERMS,
    UPDATE,
    Toy,
    dppo_verl,
    tokens_of,
)  # fmt: skip

ROOT = Path(__file__).resolve().parents[2]


# ---------------------------------------------------------------------------- completions


@pytest.mark.parametrize("scale", ["variance", "mean"])
def test_own_estimators(scale):
    """Two groups of four, whose rows alternate, with one right and with one wrong completion.
    Catches another group, another scale, and tokens without loss that get an advantage."""
    estimator = core_algos.get_adv_estimator_fn(f"grpo_{scale}")
    rewards = torch.tensor([[0, 1.0], [0, 0], [0, 0], [1, 0], [0, 0], [1, 0], [0, 0], [1, 0]])
    mask = torch.tensor([[1, 1], [1, 0]] * 4)
    index = np.array(["a", "b"] * 4)
    found, _ = estimator(token_level_rewards=rewards, response_mask=mask, index=index, config=None)
    groups = dppo.group_advantages(torch.tensor([[1.0, 0, 0, 0], [0, 1, 1, 1]]), scale)
    torch.testing.assert_close(found, groups.T.flatten()[:, None] * mask, check_dtype=False)


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
    pruned = Toy(**FEW | options, completion_rule=rule, completion_prune_rate=0.5)
    assert error(over_completions(pruned.gradient), pruned.stock()) < 1e-12


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("ranks", [1, 2])
def test_each_update_is_exact(size, ranks):
    """Updates of 2 or 1 of 4 prompts: the expected gradient of each is verl's for its prompts.

    Catches rows that move to another update, another update's denominator, and a budget that
    several of them share.
    """
    options = {MODE: "token-mean", UPDATE: size}
    pruned = Toy(**options, completion_rule="pps", completion_prune_rate=0.5, ranks=ranks)
    for part in range(4 // size):
        stock = toy.stock(toy.PROMPTS[part * size : (part + 1) * size], **options)
        found = over_completions(pruned.gradient, part)[part]
        assert error(found, stock) < 1e-12
        assert len(pruned.gradients) == 4 // size
        assert len(set(pruned.sizes)) == 1, "updates of unequal size"


def test_padding_has_no_weight(monkeypatch):
    """Rows that pad copy a row, here with all of its tokens. Catches the factor of that row."""
    copy = lambda row, tag, eos: (dict(row), tag | {"is_padding": True})
    monkeypatch.setattr(padding_utils, "construct_minimal_padding_template", copy)
    pruned = Toy(**FEW, **{MODE: "token-sum"}, completion_rule="uniform", completion_prune_rate=0.4)
    assert error(over_completions(pruned.gradient), pruned.stock()) < 1e-12
    assert any(key.startswith("pad") for key in pruned.queue.rows)


class EnginePolicy:
    """A GPT-2 in float64 through the FSDP engine's own preparation of inputs and outputs."""

    def __init__(self):
        self.model = gpt2()
        self.engine = types.SimpleNamespace(
            pad_to_length=False, use_ulysses_sp=False, module=self.model,
            engine_config=types.SimpleNamespace(
                entropy_checkpointing=False, entropy_from_logits_with_chunking=False
            ),
            _get_packed_pad_size=lambda n: 0, _gather_and_unpad_packed=lambda x, n: x,
            compute_entropy_from_logits=toy.entropy,
        )  # fmt: skip

    def forward(self, data):
        inputs, args = FSDPEngineWithLMHead.prepare_model_inputs(self.engine, data)
        if inputs["attention_mask"] is None:
            inputs.pop("attention_mask")
        output = self.model(**inputs, use_cache=False)
        return FSDPEngineWithLMHead.prepare_model_outputs(self.engine, output, args, data, None)

    def zero(self):
        self.model.zero_grad()

    def gradient(self):
        return torch.cat([parameter.grad.flatten() for parameter in self.model.parameters()])


@functools.cache
def gpt2():
    nothing = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    sizes = {"vocab_size": toy.V, "n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 16}
    config = transformers.GPT2Config(**sizes, **nothing, bos_token_id=0, eos_token_id=0)
    config._attn_implementation = "sdpa"
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(config).double()


@pytest.mark.parametrize("dynamic", [True, False])
@pytest.mark.parametrize("remove_padding", [True, False])
def test_exact_in_verls_engine(remove_padding, dynamic):
    """verl's engine packs rows or pads them, and micro-batches have another order or not. Catches a
    factor that is given to another row's tokens."""
    engine = {
        "use_remove_padding": remove_padding, "use_dynamic_bsz": dynamic,
        "max_token_len_per_gpu": 12,
    }  # fmt: skip
    pruned = Toy(policy=EnginePolicy, engine=engine, ranks=1, **FEW, completion_prune_rate=0.4)
    assert error(over_completions(pruned.gradient), pruned.stock()) < 1e-12
    assert error(pruned.gradient(), pruned.stock()) > 0.01
    assert len(pruned.forwarded) > 1


# ---------------------------------------------------------------------------- prompts


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
def test_prompts_of_several_updates_are_exact(mode):
    """Two updates of two candidates, of which one is rolled out. Catches prompts that are given to
    updates after the draw."""
    rules = {"prompt_rule": "uniform", "prompt_prune_rate": 0.5, "completion_rule": "none"}
    pruned = Toy(**{MODE: mode, UPDATE: 2}, **rules)
    pruned.teach(mean_tokens=60.0)
    for part, found in enumerate(over_prompts(pruned.gradient)):
        prompts = toy.PROMPTS[2 * part : 2 * part + 2]
        wanted = toy.stock(prompts, **{MODE: mode, UPDATE: 2})
        if mode == "token-mean":
            wanted *= tokens_of(prompts) / 30
        assert error(found, wanted) < 1e-12


def test_draws_of_each_update():
    """Fails if a high rate leaves an update without prompts, if one draw serves both updates, which
    in some steps would take both prompts from one of them, or if updates or steps share a seed."""
    rules = {"prompt_rule": "uniform", "prompt_prune_rate": 0.99}
    pruned = Toy(**{MODE: "token-sum", UPDATE: 2}, **rules, data__seed=7)
    with calls_of(dppo, "generator_for") as calls:
        for _step in range(8):
            pruned.step()
            assert sorted(q // 2 for q, _ in pruned.trainer.groups.values()) == [0, 1]
            assert {weight for _, weight in pruned.trainer.groups.values()} == {2.0}
    keys = [key for key, _generator in calls]
    assert len(keys) == len(set(keys)) == 8 * (1 + 2)
    assert {key[0] for key in keys} == {7}


# ---------------------------------------------------------------------------- a step


def test_dropped_rows_are_not_forwarded():
    """What is trained on are the rows that were kept and padding with factor 0; every row that was
    sampled is returned, so that verl clears it.

    Catches work that is only masked, rows that leak in the queue, and a figure of something else.
    """
    pruned = Toy(completion_prune_rate=0.6, **{UPDATE: 2, MODE: "token-mean"})
    pruned.step()
    table = torch.cat([part["dppo"].values().view(-1, 2) for part in pruned.trained])
    (factor, tokens), rows = table.T, len(table)
    assert sum(pruned.forwarded) == rows < 16
    assert pruned.sizes == [rows // 2] * 2
    padding = [key for key in pruned.queue.rows if key.startswith("pad")]
    assert len(pruned.queue.rows) == 16 + len(padding)
    assert set(pruned.returned.keys) == set(pruned.queue.rows)
    assert (factor > 0).sum() + len(padding) == rows
    assert set(tokens.tolist()) == {tokens_of(toy.PROMPTS[:2]), tokens_of(toy.PROMPTS[2:])}
    assert pruned.metrics["dppo/forwards"] == rows / 16


def test_failed_rollouts():
    """A completion of each prompt is missing: it has no reward and costs nothing. Catches a place
    that shifts, and one that is trained on."""
    pruned = Toy(**FEW)
    sample = pruned.sample

    def one_failed(*args, **options):
        batch, metrics = sample(*args, **options)
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
    pruned = Toy(**options, completion_rule="pps", completion_prune_rate=0.6)
    pruned.step()
    assert pruned.sizes == [12]


# ---------------------------------------------------------------------------- checkpoints


def test_checkpoints(tmp_path, monkeypatch):
    """The history and the mean of tokens go with verl's checkpoint, before it is named the latest;
    other prompts are refused; a run of verl's own trainer can go on.

    Catches a history that is not saved, or not loaded.
    """
    seen, file = [], tmp_path / "global_step_1" / "dppo.pt"
    stock = toy.PPOTrainerSync
    monkeypatch.setattr(stock, "_save_checkpoint", lambda _: seen.append(file.exists()))
    monkeypatch.setattr(stock, "_load_checkpoint", lambda _: None)
    options = {
        "prompt_rule": "uniform", MODE: "token-mean", "trainer__default_local_dir": str(tmp_path),
    }  # fmt: skip

    def loaded(**changes):
        trainer = Toy(**options | changes).trainer
        trainer.global_steps = 1
        trainer._load_checkpoint()
        return trainer

    assert loaded().mean_tokens is None, "there is no dppo.pt yet"
    run = Toy(**options)
    run.step()
    run.trainer._save_checkpoint()
    assert seen == [True]
    path = {"trainer__resume_mode": "resume_path", "trainer__resume_from_path": str(file.parent)}
    for place in ({}, path | {"trainer__default_local_dir": "elsewhere"}):
        again = loaded(**place)
        assert again.mean_tokens == run.trainer.mean_tokens > 0
        assert_same_history(run.trainer.history, again.history)
    with pytest.raises(RuleError, match=r"dppo\.pt: its history is of other prompts; resume with"):
        loaded(prompts=("f", "bb", "ccc", "g"))


# ---------------------------------------------------------------------------- refusals


def test_other_versions_are_refused(monkeypatch):
    """Fails if methods of a verl that nobody read are wrapped."""
    monkeypatch.setattr(verl, "__version__", "0.10.0")
    with pytest.raises(RuleError, match=r"verl 0\.10\.0: .*pip install verl==0\.9\.1, or"):
        Toy()
    Toy(completion_rule="none")


def test_other_data_is_refused():
    """Fails if two prompts share a history, or a group of other rollouts is pruned."""
    repeated = {"prompts": ("f", "bb", "f", "ccc")}
    said = r"train_files: 1 of 4 prompts repeat others.*set it to none"
    with pytest.raises(RuleError, match=said):
        Toy(**repeated, prompt_rule="uniform")
    pruned = Toy(**repeated)  # completions alone need no history
    pruned.step()
    sample = pruned.sample

    def several_outputs(*args, **options):
        batch, metrics = sample(*args, **options)
        batch.keys[3] = batch.keys[3].replace("_0", "_1")
        return batch, metrics

    pruned.trainer.replay_buffer.sample = several_outputs
    pruned.queue.tags = mock.MagicMock()
    said = r"rollout\.n=4, but the agent loop .*: change it to n rollouts"
    with pytest.raises(RuleError, match=said):
        pruned.step()


def test_a_missing_seed_is_reported(capsys):
    """Fails if a run whose order cannot be repeated does not say so."""
    assert Toy(data__seed=None).trainer.seed == 0
    assert "data.seed=null: draws use seed 0" in capsys.readouterr().out
    Toy(data__seed=None, completion_rule="none")
    assert "data.seed" not in capsys.readouterr().out


# ---------------------------------------------------------------------------- the plug-in


def run_python(folder, *arguments, **environment):
    """A new process, in a folder and without this one's environment."""
    environment |= {"PATH": "/usr/bin"}
    return subprocess.run(
        [sys.executable, "-W", "ignore", *arguments], cwd=folder, check=False, text=True,
        capture_output=True, env=environment,
    )  # fmt: skip


@pytest.mark.parametrize("first", [{}, {"VERL_USE_EXTERNAL_MODULES": "dppo_verl"}])
def test_verl_finds_it(first):
    """The trainer is registered by its import and as verl's external module, under a name that verl
    does not use. Catches a circular import."""
    code = "" if first else "import dppo_verl; "
    code += "from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY as names; "
    code += "print(sorted(names))"
    done = run_python(ROOT, "-c", code, PYTHONPATH=str(ROOT / "integrations"), **first)
    assert done.stdout.endswith("['colocate_async', 'nanodppo', 'separate_async', 'sync']\n")


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
    done = run_python(tmp_path, "-m", "dppo_verl", PYTHONPATH=str(tmp_path))
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
