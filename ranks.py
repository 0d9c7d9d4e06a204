"""
Several processes, under torchrun: each rank rolls out its share of the prompts, and gradients are summed.

`--shard fsdp`: every rank keeps a share of the weights, of their gradients and of the optimizer's state (PyTorch's
FSDP2). A layer's weights are gathered when it computes and let go after; its gradients are summed over ranks and cut
up at once. So every forward and backward is a collective, and all ranks make equally many (update._packed). Sampling is
no such thing: each rank ends when its completions do. It has a whole copy of the model, refreshed before.
"""

import datetime
import functools
import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers.modeling_layers import GradientCheckpointingLayer

import packing
from data import InputError

MAX = dist.ReduceOp.MAX


def start(device: str) -> tuple[int, int]:
    """(rank, how many): joins the group if torchrun made one."""
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if "RANK" in os.environ and not dist.is_initialized():
        if device == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        backend = "nccl" if device == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=datetime.timedelta(hours=2))  # ranks wait for the longest rollout
    return rank, world


def barrier() -> None:
    """All have come here."""
    if dist.is_initialized():
        dist.barrier()


def first_says(work, *words, **options):
    """work(*words, **options) of rank 0, or its InputError, on every rank: what a clock or a disk has a part in is
    decided once, and what is made is made once."""
    found = [None]
    if int(os.environ.get("RANK", "0")) == 0:
        try:
            found[0] = work(*words, **options)
        except InputError as error:
            found[0] = error
    if dist.is_initialized():
        dist.broadcast_object_list(found)
    if isinstance(found[0], InputError):
        raise found[0]
    return found[0]


def all_reduce(tensor: torch.Tensor, op=dist.ReduceOp.SUM) -> torch.Tensor:
    """Sum over ranks, in place; NaN stays NaN. One process: nothing to do."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        if dist.get_backend() == "nccl" and tensor.device.type == "cpu":
            tensor.copy_(all_reduce(tensor.cuda(), op))
        else:
            dist.all_reduce(tensor, op)
    return tensor


def sum_gradients(model) -> None:
    """One all-reduce of all gradients. No wrapper: a rank that kept nothing contributes zeros and is done. FSDP has
    summed those of sharded weights."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    if dist.is_initialized() and dist.get_world_size() > 1 and not is_sharded(model):
        flat = all_reduce(torch.cat([parameter.grad.flatten() for parameter in parameters]))
        for parameter, grad in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
            parameter.grad.copy_(grad.view_as(parameter))


# ---------------------------------------------------------------------------- --shard fsdp


def shard(model, device: str) -> None:
    """Leave this rank its share of every parameter. Before an optimizer is given them; after checkpoint_layers."""
    mesh = init_device_mesh(device, (dist.get_world_size(),))  # FSDP's own choice is CUDA wherever there is one
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    for module in (*layers, model):
        # True also for the last one, the embedding and the head: left whole after a forward without a backward, they
        # would be those of before the update, and model.parameters() would not be the optimizer's
        fully_shard(module, mesh=mesh, reshard_after_forward=True)
        module.set_gradient_divide_factor(1.0)  # the sum over ranks, where FSDP's default is the mean
        module.set_force_sum_reduction_for_comms(True)  # and that by a plain sum, gloo has no other
    model.packed_logprobs = functools.partial(_packed_logprobs, model)
    register_fsdp_forward_method(model, "packed_logprobs")  # FSDP knows of `forward` alone, which is not called


def _packed_logprobs(model, pack, temperature):
    logprobs, entropy = packing.packed_logprobs(model, pack, temperature=temperature)
    return logprobs.clone(), entropy  # it may be a view, of which FSDP warns


def is_sharded(model) -> bool:
    return isinstance(model, FSDPModule)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The full tensor of a sharded one, on every rank; all of them have to ask. Others are what they are."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def refresh(copy, model) -> None:
    """Give the whole copy the weights of the sharded model, one at a time. Not sharded: the copy is the model."""
    if copy is not model:
        for theirs, ours in zip(copy.parameters(), model.parameters(), strict=True):
            theirs.copy_(whole(ours))


def gather(state):
    """A nested dict with full tensors, in the first rank's memory; None in their place on others. All have to ask."""
    if isinstance(state, dict):
        return {key: gather(value) for key, value in state.items()}
    if isinstance(state, DTensor):
        full = state.full_tensor()
        return full.cpu() if dist.get_rank() == 0 else None
    return state


def weights(model) -> dict[str, torch.Tensor]:
    """state_dict() as it is written: full tensors on the first rank, and what is tied once, by its first name."""
    names = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        names.setdefault(tensor, name)
    return gather({name: tensor.detach() for tensor, name in names.items()})


def load_optimizer(optimizer, state: dict) -> None:
    """optimizer.load_state_dict of full tensors, of which a sharded parameter's rank keeps its share."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for index, entries in state["state"].items():
        parameter = parameters[index]
        for name, value in entries.items():
            if isinstance(parameter, DTensor) and value.shape == parameter.shape:  # not the number of steps
                share = distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
                entries[name] = share.clone()  # it is a view of all
    optimizer.load_state_dict(state)
