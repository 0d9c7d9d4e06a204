"""What tests/integrations/test_trl_ranks.py runs in several processes, each of them a rank."""

import json
import os

import torch
from accelerate import PartialState
from accelerate.utils import DistributedType
from exact import error, over_prompts
from trl_toy import MANY, SAME_LENGTH, Toy, make_trainer

import dppo_trl


class WeightedFillers(dppo_trl.DPPOTrainer):
    """A mistake: rows that fill up a rank's micro-batches have their weights."""

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


def check_ranks():
    """Both levels of pruning are exact, also over several updates; a weighted filler is not."""
    layout = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
    several = {"loss_type": "bnpo", "num_iterations": 2, "steps_per_generation": 4}
    several |= {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    for options in [*({"loss_type": loss, **layout} for loss in dppo_trl.LOSSES), several]:
        toy = Toy(**options)
        assert error(found := toy.over_windows(), toy.stock()) < 1e-12, (options, found)
    layout |= {"loss_type": "grpo"}
    toy = Toy(WeightedFillers, **layout)
    assert error(found := toy.over_windows(), toy.stock()) > 1e-3, found
    for rule in ("uniform", "dppo"):
        rules = {"prompt_rule": rule, "prompt_prune_rate": 0.3, "completion_rule": "zero"}
        toy = Toy(**layout, **rules)
        toy.teach()
        assert error(found := over_prompts(toy.gradient), toy.stock()) < 1e-12, (rule, found)
    print("exact")


def check_divided(llama):
    """Rows change ranks, and every loss is exact. The kept rows of two ranks differ by at most one,
    and at most one filler makes up for it. A Llama's prompts of several lengths travel, too."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    layout = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 8 // world}
    for loss in dppo_trl.LOSSES:
        toy = Toy(loss_type=loss, prompts=SAME_LENGTH, **layout)
        assert error(found := toy.over_windows(), toy.stock()) < 1e-12, (loss, found)
        rows = toy.plan()
        place = torch.cat([x["place"][x["factor"] > 0] for x in rows])
        mine = toy.trainer.rows["place"]
        count = torch.tensor([len(place), int(torch.isin(place, mine).sum())])
        count = toy.trainer.accelerator.gather(count[None])  # [R, 2]
        assert count[:, 0].max() - count[:, 0].min() <= 1
        assert sum(len(x["place"]) for x in rows) == count[:, 0].max()
        assert (count[:, 1] < count[:, 0]).any(), "no row has changed ranks"
    for loss in ("grpo", "bnpo"):
        options = {"loss_type": loss, "prompts": ["a", "b", "cdefg", "c"], **layout}
        toy = Toy(folder=llama, completion_rule="zero", **options)
        assert error(toy.gradient(), toy.stock()) < 1e-4, (loss, rank)
    print("exact")


def count_draws(layout, rules):
    """Prints how many steps a run made, and how many draws."""
    trainer = make_trainer(prompts=MANY, max_steps=4, **rules, **layout)
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
        folder=folder, prompts=MANY, completion_rule=rule, max_steps=3, optim="sgd",
        learning_rate=1.0, output_dir=out, **BATCH, **options,
    )  # fmt: skip
    trainer.train()
    assert trainer.accelerator.distributed_type.name == name
    weights = trainer.accelerator.get_state_dict(trainer.model_wrapped)
    forwards = [row.get("dppo/forwards", 1.0) for row in trainer.state.log_history[:3]]
    if trainer.accelerator.is_main_process:
        torch.save(({name: x.float() for name, x in weights.items()}, forwards), f"{out}.pt")
