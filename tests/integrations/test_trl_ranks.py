"""dppo_trl.py on several processes: exact by enumeration, rows that change ranks, DDP, FSDP2 and
DeepSpeed. tests/trl.sh builds an environment with TRL and DeepSpeed and runs these tests in it.

Functions that begin with rank_ run on every rank.
"""

import os

import pytest
import torch
import transformers
from exact import error, over_prompts
from toy import in_processes

pytest.importorskip("trl", reason="tests/trl.sh runs these, with TRL")
import trl_toy
from accelerate import PartialState
from accelerate.utils import DistributedType
from trl_toy import Toy, dppo_trl, make_trainer


def rank_exact():
    trl_toy.model_folder("llama")  # before the process group, in which only rank 0 would write it
    world = int(os.environ["WORLD_SIZE"])
    layout = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 8 // world}
    halves = {"gradient_accumulation_steps": 4 // world, "steps_per_generation": 8 // world}
    several = layout | halves | {"loss_type": "bnpo", "num_iterations": 2}
    same = {"prompts": trl_toy.SAME_LENGTH}  # so that rows change ranks
    losses = [{"loss_type": loss} | layout for loss in dppo_trl.LOSSES]
    for options in [*(same | loss for loss in losses), *losses[:1], several]:
        toy = Toy(**options)
        assert error(found := toy.over_windows(), toy.stock()) < 1e-12, (options, found)
        rows = toy.plan()
        place = torch.cat([x["place"][x["factor"] > 0] for x in rows])
        stay = torch.isin(place, toy.trainer.rows["place"])
        counts = torch.tensor([[len(place), int(stay.sum())]])
        kept, stay = toy.trainer.accelerator.gather(counts).T  # [R] each
        if "prompts" in options:
            assert kept.max() - kept.min() <= 1
            assert sum(len(x["place"]) for x in rows) == kept.max()
            assert (stay < kept).any(), "no row has changed ranks"
    for rule in ("uniform", "dppo"):
        rules = {"prompt_rule": rule, "prompt_prune_rate": 0.3, "completion_rule": "zero"}
        toy = Toy(loss_type="grpo", **layout, **rules)
        toy.teach()
        assert error(found := over_prompts(toy.gradient), toy.stock()) < 1e-12, (rule, found)
    for loss in ("grpo", "bnpo"):
        options = {"loss_type": loss, "prompts": ["a", "b", "cdefg", "c"], **layout}
        toy = Toy(model="llama", completion_rule="zero", **options)
        assert error(toy.gradient(), toy.stock()) < 1e-4, loss


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_are_exact(world):
    """Both levels of pruning with DistributedDataParallel: every loss, several updates, rows that
    change ranks, and rows that stay. The kept rows of two ranks differ by at most one, for which
    one filler makes up. A Llama's prompts of several lengths travel, too.

    Catches a filler that has a weight, a row with another's factor or log-probs, bnpo's denominator
    of the rank that it goes to, and padding on the wrong side.
    """
    in_processes(world, rank_exact)


def test_rows_of_absolute_positions_stay(monkeypatch):
    """Fails if a row, even a filler, leaves its rank although the ranks pad prompts to different
    widths, or if a kept row is lost."""
    trainer = make_trainer()
    monkeypatch.setattr(type(trainer.accelerator), "gather", lambda self, _: torch.tensor([2, 3]))
    trainer.rows = {"prompt_ids": torch.zeros(4, 2)}
    kept = torch.tensor([[1, 1, 1, 0], [0, 0, 1, 0]]).bool()
    length = torch.tensor([9, 5, 7, 4, 6, 8, 7, 6])
    table, fills = trainer.divide(kept, length)
    assert table.tolist() == [[1, 2, 0], [4, 4, 6]]
    assert fills.tolist() == [[False] * 3, [True, True, False]]
    trainer.rotary = True
    table, fills = trainer.divide(kept, length)
    assert table.tolist() == [[1, 6], [2, 0]]
    assert not fills.any()


def rank_counts(layout, rules, counts):
    """A run of four steps, whose numbers of draws, generation batches and last rows are counts."""
    trainer = make_trainer(prompts=trl_toy.MANY, max_steps=4, **rules, **layout)
    trainer.train()
    rows, ranks = trainer.batch.size.numel(), trainer.accelerator.num_processes
    assert trainer.state.global_step == 4
    assert (trainer.so_far["draws"], trainer.so_far["batches"], rows) == counts
    assert ranks * len(trainer.rows["place"]) == rows, "a rollout is lost between ranks"


@pytest.mark.parametrize(
    ("accumulation", "generation", "iterations", "group"),
    [(1, 1, 1, 4), (4, 4, 1, 4), (8, 8, 1, 4), (8, 4, 1, 4), (2, 4, 2, 4), (4, 4, 1, 3)],
)
@pytest.mark.parametrize("world", [1, 2])
def test_whole_runs(accumulation, generation, iterations, group, world):
    """Catches ranks that wait for each other, a window that is drawn again in each micro-step, and
    five prompts of three completions on two ranks."""
    layout = {
        "gradient_accumulation_steps": accumulation, "steps_per_generation": generation,
        "num_iterations": iterations, "per_device_train_batch_size": group,
        "num_generations": group,
    }  # fmt: skip
    micro_steps, kept = 4 * accumulation, generation * world
    draws = micro_steps // min(accumulation, generation)
    prompts = generation == accumulation and iterations == 1
    if prompts:
        unit = 2 if (group, world) == (3, 2) else 1
        kept = unit * max(1, round(0.65 * kept / unit))
    rules = {"prompt_rule": "uniform" if prompts else "none", "prompt_prune_rate": 0.35}
    counts = draws, micro_steps // (generation * iterations), kept * group
    in_processes(world, rank_counts, layout, rules, counts)


# ---------------------------------------------------------------------------- sharded models


def deepspeed(stage):
    zero = {"stage": stage, "stage3_gather_16bit_weights_on_model_save": True}
    sizes = {
        "train_batch_size": 16, "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 4,
    }  # fmt: skip
    free = {"zero_allow_untested_optimizer": True, "gradient_clipping": "auto"}
    return {"deepspeed": {"zero_optimization": zero} | sizes | free}


FSDP2 = {"fsdp": True, "fsdp_config": {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}}
KINDS = {  # options of GRPOConfig, and the type that accelerate reports
    "ddp": ({}, "MULTI_CPU"),
    "fsdp2": (FSDP2, "FSDP"),
    "zero2": (deepspeed(2), "DEEPSPEED"),
    "zero3": (deepspeed(3), "DEEPSPEED"),
}


def rank_sharded(kind, rule, out):
    """Three steps of SGD. Except for DDP, accelerate takes the CPUs for GPUs. `out`.pt gets all
    weights, and of each step the share of micro-steps that computed something."""
    options, name = KINDS[kind]
    if kind != "ddp":
        os.environ[f"ACCELERATE_USE_{name}"] = "true"
        options = options | {"use_cpu": False}
        PartialState._prepare_backend = lambda *args: ("gloo", DistributedType.MULTI_GPU)
        PartialState.set_device = lambda state: setattr(state, "device", torch.device("cpu"))
    trainer = make_trainer(
        model="llama", prompts=trl_toy.MANY, completion_rule=rule, max_steps=3, optim="sgd",
        learning_rate=1.0, output_dir=out, per_device_train_batch_size=2,
        gradient_accumulation_steps=4, **options,
    )  # fmt: skip
    trainer.train()
    assert trainer.accelerator.distributed_type.name == name
    weights = trainer.accelerator.get_state_dict(trainer.model_wrapped)
    forwards = [row.get("dppo/forwards", 1.0) for row in trainer.state.log_history[:3]]
    if trainer.accelerator.is_main_process:
        torch.save(({name: x.float() for name, x in weights.items()}, forwards), f"{out}.pt")


@pytest.mark.parametrize("kind", ["fsdp2", "zero2", "zero3"])
def test_sharded_runs(tmp_path, kind):
    """Three steps on two ranks, with idle micro-steps, end with the same weights under FSDP2 and
    DeepSpeed's ZeRO as under DDP. Catches an idle micro-step that the wrapper refuses, that adds a
    gradient, or after which the last update's gradients are still there."""
    if kind != "fsdp2":
        pytest.importorskip("deepspeed", reason="tests/trl.sh installs it")
    folder, found = trl_toy.model_folder("llama"), {}
    start = transformers.AutoModelForCausalLM.from_pretrained(folder).state_dict()
    for name, rule in (("ddp", "none"), ("ddp", "pps"), (kind, "zero"), (kind, "pps")):
        out = str(tmp_path / f"{name}-{rule}")
        in_processes(2, rank_sharded, name, rule, out)
        found[name, rule], forwards = torch.load(f"{out}.pt")
        assert rule == "none" or min(forwards) < 1, "no micro-step was idle"
    for rule, reference in (("zero", "none"), ("pps", "pps")):
        for name, there in found["ddp", reference].items():
            error = (found[kind, rule][name] - there).norm()
            assert error < 1e-5 * (there - start[name]).norm() + 1e-7, (name, rule, error)
