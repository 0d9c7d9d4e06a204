"""dppo_trl.py on several processes: exact by enumeration, rows that change ranks, DDP, FSDP2 and
DeepSpeed. tests/trl.sh builds an environment with TRL and DeepSpeed and runs these tests in it.

Functions that begin with rank_ run on every rank.
"""

import os

import pytest
import torch
from exact import over_completions, over_prompts
from toy import FORKS, in_processes

from proof import relative_error

pytest.importorskip("trl", reason="tests/trl.sh runs these, with TRL")
import trl_toy
from accelerate import PartialState
from accelerate.utils import DistributedType
from trl_toy import Toy, make

FORKS.set_forkserver_preload(["toy", "trl_toy"])


def rank_exact():
    trl_toy.model_folder()  # before the process group, in which only rank 0 would write it
    layout = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    for loss in ("grpo", "vespo"):  # per row and per token; test_exact.py has the others
        toy = Toy(loss_type=loss, **layout)
        assert relative_error(over_completions(toy.gradient), toy.stock()) < 1e-12, loss
        multipliers = torch.cat([x["multiplier"] for x in toy.plan()])
        kept = toy.trainer.accelerator.gather((multipliers > 0).sum()[None])  # [ranks]
        assert kept.max() - kept.min() <= 1
        assert len(multipliers) == kept.max()
    for rule in ("uniform", "dppo"):
        rules = {"prompt_rule": rule, "prompt_prune_rate": 0.3, "completion_rule": "nonzero"}
        toy = Toy(loss_type="grpo", **layout, **rules)
        toy.teach()
        assert relative_error(over_prompts(toy.gradient), toy.stock()) < 1e-12, rule


def test_ranks_are_exact():
    """Both levels of pruning with DistributedDataParallel. Rows change ranks, and prompts have
    several lengths. The kept rows of two ranks differ by at most one, for which fillers make up."""
    in_processes(4, rank_exact)


# ---------------------------------------------------------------------------- sharded models


ZERO3 = {
    "zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True},
    "train_batch_size": 16, "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 4, "zero_allow_untested_optimizer": True,
    "gradient_clipping": "auto",
}  # fmt: skip
LAYERS = {"transformer_layer_cls_to_wrap": ["GPTNeoXLayer"]}
KINDS = {  # options of GRPOConfig, and the type that accelerate reports
    "ddp": ({}, "MULTI_CPU"),
    "fsdp2": ({"fsdp": True, "fsdp_config": LAYERS}, "FSDP"),
    "zero3": ({"deepspeed": ZERO3}, "DEEPSPEED"),
}


def rank_sharded(kind, out):
    """Three steps of SGD. Except for DDP, accelerate takes the CPUs for GPUs. `out`.pt gets all
    weights, and of each step the share of micro-steps that computed something."""
    options, name = KINDS[kind]
    if kind != "ddp":
        os.environ[f"ACCELERATE_USE_{name}"] = "true"
        options = options | {"use_cpu": False}
        PartialState._prepare_backend = lambda *args: ("gloo", DistributedType.MULTI_GPU)
        PartialState.set_device = lambda state: setattr(state, "device", torch.device("cpu"))
    trainer = make(
        dtype="float32", prompts=trl_toy.MANY, max_steps=3, optim="sgd",
        learning_rate=1.0, output_dir=out, per_device_train_batch_size=2,
        gradient_accumulation_steps=4, **options,
    )  # fmt: skip
    trainer.train()
    assert trainer.accelerator.distributed_type.name == name
    weights = trainer.accelerator.get_state_dict(trainer.model_wrapped)
    forwards = [row["dppo/forwards"] for row in trainer.state.log_history[:3]]
    if trainer.accelerator.is_main_process:
        torch.save(({name: x.float() for name, x in weights.items()}, forwards), f"{out}.pt")


@pytest.mark.parametrize("kind", ["fsdp2", "zero3"])
def test_sharded_runs(tmp_path, kind):
    """Three steps on two ranks, with idle micro-steps, end with the same weights under FSDP2 and
    DeepSpeed's ZeRO as under DDP. Catches an idle micro-step that the wrapper refuses, that adds a
    gradient, or after which the last update's gradients are still there."""
    if kind != "fsdp2":
        pytest.importorskip("deepspeed", reason="tests/trl.sh installs it")
    found = {}
    for name in ("ddp", kind):
        in_processes(2, rank_sharded, name, str(tmp_path / name))
        found[name], forwards = torch.load(tmp_path / f"{name}.pt")
        assert min(forwards) < 1, "no micro-step was idle"
    for name, wanted in found["ddp"].items():
        torch.testing.assert_close(found[kind][name], wanted, rtol=0, atol=1e-5)
