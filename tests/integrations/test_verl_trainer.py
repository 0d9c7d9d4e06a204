"""dppo_verl.py without Ray: verl's engine, a step's queue and log, checkpoints, refusals.

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

import pytest
import torch
import transformers

import dppo
from dppo import RuleError

verl = pytest.importorskip("verl", reason="tests/verl.sh runs these, with verl")
import verl_toy as toy  # noqa: E402  it needs verl, too
from exact import error  # noqa: E402
from hydra import compose, initialize_config_module  # noqa: E402
from verl_toy import (  # noqa: E402
    ACTOR,
    LOSS,
    MODE,
    PLAIN,
    PROMPT_RATE,
    PROMPT_RULE,
    RATE,
    RULE,
    UPDATE,
    Toy,
    dppo_verl,
    tokens_of,
)

ROOT = Path(__file__).resolve().parents[2]


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


def test_none_is_verls_trainer():
    """Both rules none: verl's gradients, batches, figures and loss, bit for bit. Catches a wrapper
    that does something when it is switched off."""
    options = {RULE: "none", "ranks": 1}
    none, stock = Toy(**options), Toy(toy.PPOTrainerSync, ranks=1)
    none.set_loss = pytest.fail
    assert torch.equal(none.step(), stock.step())
    assert none.metrics == stock.metrics
    assert [tag["seq_len"] for tag in none.returned.tags] == [
        tag["seq_len"] for tag in stock.returned.tags
    ]


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


def test_what_the_rules_see():
    """Fails if sizes are not of the loss's own scale, the terms that need no advantage, and the
    sampler's log-probs, or if a failed rollout has a reward."""
    seen = []
    prune = dppo.prune_completions
    record = lambda rule, rate, batch, generator: (
        seen.append(batch) or prune(rule, rate, batch, generator)
    )
    pruned = Toy(prompts=("bb", "ccc"), **{UPDATE: 2, MODE: "seq-mean-token-mean"})
    sample = pruned.sample

    def one_failed(global_steps, partition_id, batch_size):
        batch, metrics = sample(global_steps, partition_id, batch_size)
        return batch.select_keys([key for key in batch.keys if not key.endswith("_2_0")]), metrics

    pruned.trainer.replay_buffer.sample = one_failed
    with mock.patch.object(dppo, "prune_completions", record):
        pruned.step()
    (batch,) = seen
    assert batch.rewards[:, 2].isnan().all()
    assert not batch.size[:, 2].any()
    assert not batch.cost[:, 2].any()
    for k, prompt in enumerate(("bb", "ccc")):
        for g in (0, 1, 3):
            row = toy.completion(prompt, g)
            mask = row["response_mask"].double()
            energy = (2 * (row["rollout_log_probs"].exp() - 1).square() * mask).sum()
            beta = 0.3 + 0.02
            size = (batch.advantages[k, g].abs() + beta) * energy.sqrt() / mask.sum()
            assert batch.size[k, g].item() == pytest.approx(size.item())
            assert batch.cost[k, g] == len(row["input_ids"])
            assert batch.rewards[k, g] == row["rm_scores"].sum()


def test_equal_rewards_are_dull():
    """Two groups of three rewards of 0.1, through verl's own advantages: their scores are exactly
    0. Catches a rounding error that the history takes for an advantage."""
    seen, prune = [], dppo.prune_completions
    record = lambda rule, rate, batch, generator: (
        seen.append(batch) or prune(rule, rate, batch, generator)
    )
    options = {PROMPT_RULE: "uniform", PROMPT_RATE: 0.0, MODE: "token-sum", UPDATE: 2}
    pruned = Toy(prompts=("bb", "ccc"), **options)
    sample = pruned.sample

    def equal_and_one_failed(global_steps, partition_id, batch_size):
        batch, metrics = sample(global_steps, partition_id, batch_size)
        for key in batch.keys:
            pruned.queue.rows[key]["rm_scores"][-1] = 0.1
        return batch.select_keys([key for key in batch.keys if not key.endswith("_2_0")]), metrics

    pruned.trainer.replay_buffer.sample = equal_and_one_failed
    with mock.patch.object(dppo, "prune_completions", record):
        pruned.step()
    assert seen[0].advantages.any(), "verl's advantages are exact zeros"
    assert pruned.trainer.history.past_advantage.tolist() == [0.0, 0.0]


def test_a_batch_that_keeps_nothing():
    """Fails if it runs no update, for which verl waits, or one that moves the weights."""
    pruned = Toy(**PLAIN | {"prompts": ("dddd", "hhhh"), UPDATE: 1, RULE: "zero"})
    assert not pruned.step().any()
    assert len(pruned.gradients) == 2
    assert pruned.metrics["dppo/kept_completions"] == 0


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


REFUSED = [
    ({LOSS: "sapo", PROMPT_RULE: "pps"}, "loss_agg_mode=token-mean with sapo .*set it to seq-mean"),
    ({"trainer__v1__nanodppo__rate": 0.5}, "unknown option of trainer.v1.nanodppo 'rate'"),
]
INEXACT = [
    ({LOSS: "geo_mean"}, "loss_mode=geo_mean: .*set it to vanilla or gspo"),
    ({LOSS: "clip_cov"}, "loss_mode=clip_cov: .*set it to vanilla or gspo"),
    ({LOSS: "kl_cov"}, "loss_mode=kl_cov: .*set it to vanilla or gspo"),
    ({MODE: "seq-mean"}, "loss_agg_mode=seq-mean: .*set it to token-mean or"),
    ({f"{ACTOR}ppo_epochs": 2}, "ppo_epochs=2: .*; set it to 1"),
    ({f"{ACTOR}strategy": "megatron"}, "strategy=megatron: .*set it to fsdp or fsdp2"),
    (
        {f"{ACTOR}ulysses_sequence_parallel_size": 2},
        "actor.ulysses_sequence_parallel_size=2: .*set it to 1",
    ),
    (
        {f"{ACTOR}fsdp_config__ulysses_sequence_parallel_size": 2},
        "fsdp_config.ulysses_sequence_parallel_size=2: .*set it to 1",
    ),
    ({f"{ACTOR}use_prefix_grouper": True}, "use_prefix_grouper=True: .*set it to null or False"),
    ({f"{ACTOR}shuffle": True}, "actor.shuffle=True: .*set it to null or False"),
    ({UPDATE: 3}, "ppo_mini_batch_size=3 does not divide data.train_batch_size=4: .*a divisor"),
    (
        {MODE: "seq-mean-token-sum-norm", f"{ACTOR}loss_scale_factor": None},
        "loss_scale_factor=null: .*set it to data.max_response_length",
    ),
    ({"actor_rollout_ref__model__mtp__enable": True}, "mtp.enable=True: .*set it to"),
    (
        {"actor_rollout_ref__model__override_config__output_router_logits": True},
        "output_router_logits=True: .*set it to null or False",
    ),
    ({"actor_rollout_ref__hybrid_engine": False}, "hybrid_engine=False: .*set it to True"),
    ({"algorithm__adv_estimator": "gae"}, "adv_estimator=gae: .*set it to grpo or grpo_var"),
    ({"algorithm__adv_estimator": "remax"}, "adv_estimator=remax: .*set it to grpo or grpo_var"),
    ({"algorithm__use_kl_in_reward": True}, "use_kl_in_reward=True: .*set it to null or False"),
    ({"algorithm__filter_groups__enable": True}, "filter_groups.enable=True: .*set it to null or"),
    (
        {"algorithm__rollout_correction__rollout_rs": "token_k1"},
        "rollout_rs=token_k1: .*to null or",
    ),
    (
        {"algorithm__rollout_correction__rollout_is_batch_normalize": True},
        "rollout_is_batch_normalize=True: .*set it to null or False",
    ),
    ({"algorithm__rollout_correction__bypass_mode": True}, "bypass_mode=True: .*set it to"),
    (
        {"trainer__v1__sampler__sync_refill_failed_groups": True},
        "sync_refill_failed_groups=True: .*set it to null or False",
    ),
    (
        {"trainer__v1__sampler__custom_sampler__path": "x.py"},
        "custom_sampler.path=x.py: .*to null or",
    ),
    ({"critic__enable": True}, "critic.enable=True: .*set it to null or False"),
    ({"distillation__enabled": True}, "distillation.enabled=True: .*set it to null or False"),
    ({"skip__rollout_tq__enable": True}, "rollout_tq.enable=True: .*set it to null or False"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED + INEXACT)
def test_refusals(options, message):
    """What would not be exact is refused in one sentence with the option and the way out; without
    pruning, verl's own options are verl's business. Catches a sentence about another option."""
    config = toy.configure(**options)
    with pytest.raises(ValueError, match=message) as caught:
        dppo_verl.DPPOTrainer(config)
    assert "\n" not in str(caught.value)
    if (options, message) in INEXACT:
        config = toy.configure(**options, **{RULE: "none"})
        with mock.patch.object(toy.PPOTrainerSync, "__init__", return_value=None):
            dppo_verl.DPPOTrainer(config)


def test_other_versions_are_refused(monkeypatch):
    """Fails if methods of a verl that nobody read are wrapped."""
    monkeypatch.setattr(verl, "__version__", "0.10.0")
    with pytest.raises(RuleError, match=r"verl 0\.10\.0: .*pip install verl==0\.9\.1, or"):
        Toy()
    Toy(**{RULE: "none"})


def test_other_data_is_refused():
    """Fails if two prompts share a history, or a group of other rollouts is pruned."""
    with pytest.raises(
        RuleError, match=r"train_files: 1 of 4 prompts repeat others.*set it to none"
    ):
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
