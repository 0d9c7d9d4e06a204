"""What tests/integrations/test_trl_ranks.py runs in several processes, each of them a rank."""

import json
import os

import torch
import trl
from accelerate import PartialState
from accelerate.utils import DistributedType
from trl_toy import (
    MANY,
    SAME_LENGTH,
    Measured,
    error,
    exact_world,
    make_trainer,
    over_completions,
    over_prompts,
)  # fmt: skip

import dppo_trl


class WeightedFillers(dppo_trl.DPPOTrainer):
    """Rows that fill up a rank's micro-batches have their weights."""

    def draw_completions(self, part):
        plan = super().draw_completions(part)
        rows = [rows for rows in plan if rows is not None]
        weight = {}
        for places, factors in ((x["place"].tolist(), x["factor"].tolist()) for x in rows):
            for place, factor in zip(places, factors, strict=True):
                weight[place] = max(factor, weight.get(place, 0.0))
        for x in rows:
            x["factor"] = torch.tensor([weight[place] for place in x["place"].tolist()]).double()
        return plan


def check_ranks(folder):
    """Both levels of pruning are exact, also over several updates; a weighted filler is not."""
    layout = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
    with exact_world():
        for loss in dppo_trl.LOSSES:
            options = {"loss_type": loss, **layout}
            stock = Measured(folder, trl.GRPOTrainer, **options).gradients()
            found = over_completions(Measured(folder, **options))
            assert error(found, stock) < 1e-12, (loss, error(found, stock))
        options = {"loss_type": "grpo", **layout}
        stock = Measured(folder, trl.GRPOTrainer, **options).gradients()
        biased = over_completions(Measured(folder, WeightedFillers, **options))
        assert error(biased, stock) > 1e-3, error(biased, stock)
        several = {"loss_type": "bnpo", "per_device_train_batch_size": 2, "num_iterations": 2}
        several |= {"gradient_accumulation_steps": 2, "steps_per_generation": 4}
        stock = Measured(folder, trl.GRPOTrainer, **several).gradients()
        found = over_completions(Measured(folder, **several))
        assert error(found, stock) < 1e-12, error(found, stock)
        options |= {"prompts": SAME_LENGTH}
        stock = Measured(folder, trl.GRPOTrainer, **options).gradients()
        for rule in ("uniform", "dppo", "pps"):
            rules = {"prompt_rule": rule, "prompt_prune_rate": 0.3, "completion_rule": "zero"}
            found = over_prompts(Measured(folder, **options, rules=rules).gradients)
            assert error(found, stock) < 1e-12, (rule, error(found, stock))
    print("exact")


def check_divided(folder, llama):
    """Rows change ranks, and every loss is exact. The kept rows of two ranks differ by at most one,
    and at most one filler makes up for it. A Llama's prompts of several lengths travel, too."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    layout = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 8 // world}
    with exact_world():
        for loss in dppo_trl.LOSSES:
            options = {"loss_type": loss, "prompts": SAME_LENGTH, **layout}
            stock = Measured(folder, trl.GRPOTrainer, **options).gradients()
            measured = Measured(folder, **options)
            assert error(found := over_completions(measured), stock) < 1e-12, (loss, found, stock)
            rows = [rows for rows in measured.trainer.plan if rows is not None]
            place = torch.cat([x["place"][x["factor"] > 0] for x in rows])
            mine = measured.trainer.rows["place"]
            count = torch.tensor([len(place), int(torch.isin(place, mine).sum())])
            count = measured.trainer.accelerator.gather(count[None])  # [R, 2]
            assert count[:, 0].max() - count[:, 0].min() <= 1
            assert sum(len(x["place"]) for x in rows) == count[:, 0].max()
            assert (count[:, 1] < count[:, 0]).any(), "no row has changed ranks"
        for loss in ("grpo", "bnpo"):
            options = {"loss_type": loss, "prompts": ["a", "b", "cdefg", "c"], **layout}
            stock = Measured(llama, trl.GRPOTrainer, **options).gradients()
            measured = Measured(llama, **options, rules={"completion_rule": "zero"})
            assert error(measured.gradients(), stock) < 1e-4, (loss, rank)
    print("exact")


def count_draws(folder, layout, rules):
    """Prints how many steps a run made, and how many draws."""
    trainer = make_trainer(folder, prompts=MANY, rules=rules, max_steps=4, **layout)
    trainer.train()
    rows, ranks = trainer.batch.size.numel(), trainer.accelerator.num_processes
    counts = {"rows": rows, "rows_of_ranks": ranks * len(trainer.rows["place"])}
    print(json.dumps(counts | {"steps": trainer.state.global_step} | trainer.so_far))


BATCH = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
ZERO = {
    "zero_allow_untested_optimizer": True, "gradient_clipping": "auto", "train_batch_size": 16,
    "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4,
}  # fmt: skip
SAVE = "stage3_gather_16bit_weights_on_model_save"
KINDS = {  # accelerate's flag, options of GRPOConfig, and the type that accelerate then reports
    "ddp": (None, {}, "MULTI_CPU"),
    "fsdp2": (
        "ACCELERATE_USE_FSDP",
        {"fsdp": True, "fsdp_config": {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}},
        "FSDP",
    ),
    "zero2": (
        "ACCELERATE_USE_DEEPSPEED",
        {"deepspeed": ZERO | {"zero_optimization": {"stage": 2}}},
        "DEEPSPEED",
    ),
    "zero3": (
        "ACCELERATE_USE_DEEPSPEED",
        {"deepspeed": ZERO | {"zero_optimization": {"stage": 3, SAVE: True}}},
        "DEEPSPEED",
    ),
}


def train_sharded(folder, kind, rule, out):
    """Three steps of SGD. Except for DDP, accelerate takes the CPUs for GPUs. `out`.pt gets all
    weights, and of each step the share of micro-steps that computed something."""
    flag, options, name = KINDS[kind]
    if flag:
        os.environ[flag] = "true"
        options = options | {"use_cpu": False}
        PartialState._prepare_backend = lambda *args: ("gloo", DistributedType.MULTI_GPU)
        PartialState.set_device = lambda state: setattr(state, "device", torch.device("cpu"))
    trainer = make_trainer(
        folder, prompts=MANY, rules={"completion_rule": rule}, max_steps=3, optim="sgd",
        learning_rate=1.0, output_dir=out, **BATCH, **options,
    )  # fmt: skip
    trainer.train()
    assert trainer.accelerator.distributed_type.name == name
    weights = trainer.accelerator.get_state_dict(trainer.model_wrapped)
    forwards = [row.get("dppo/forwards", 1.0) for row in trainer.state.log_history[:3]]
    if trainer.accelerator.is_main_process:
        torch.save(({name: x.float() for name, x in weights.items()}, forwards), f"{out}.pt")
