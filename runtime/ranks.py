"""
Several processes under torchrun: each rank rolls out its share of the prompts; gradients are
summed over ranks.

With --shard fsdp every rank keeps a share of the weights, of their gradients and of the optimizer's
state (PyTorch's FSDP2). A layer's weights are gathered when it computes and released after; its
gradients are summed over ranks and split at once. So every forward and backward is a collective,
and all ranks must run the same number of them. Sampling cannot be a collective, because each rank
stops when its own completions end: it uses a whole copy of the model, refreshed beforehand.
"""

import datetime
import heapq
import os
import socket
import sys
import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from tqdm import tqdm
from transformers.modeling_layers import GradientCheckpointingLayer

from runtime import InputError
from runtime.device import choose_device

MAX = dist.ReduceOp.MAX
# A rank that waits longer for another ends the run. NCCL's own 10 minutes are too short while one
# rank downloads a model.
LIMIT = datetime.timedelta(minutes=30)


def start(device: str) -> tuple[int, int]:
    """(rank, number of ranks); joins the process group if torchrun launched this process.

    A launcher sets RANK. Without it this is the only process, whatever else is in the environment:
    schedulers and containers export WORLD_SIZE for programs that they do not launch."""
    if "RANK" in os.environ and not dist.is_initialized():
        cuda = choose_device(device) == "cuda"
        if cuda:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl" if cuda else "gloo", timeout=LIMIT)
    return rank(), world()


def check_single(program: str) -> None:
    """InputError if this is one of several processes, which would all write the same files."""
    several = os.environ.get("WORLD_SIZE", "1")
    if "RANK" in os.environ and several != "1":
        raise InputError(f"{program} is one process, not {several}: start it without torchrun")


def rank() -> int:
    """The number of this process, from 0."""
    return dist.get_rank() if dist.is_initialized() else 0


def is_first() -> bool:
    """Whether this is the process that prints and writes: rank 0, or the only one."""
    return rank() == 0


def world() -> int:
    """The number of processes."""
    return dist.get_world_size() if dist.is_initialized() else 1


def launcher() -> str:
    """The command that starts a program with as many processes."""
    return f"torchrun --nproc-per-node {world()}" if world() > 1 else "python"


def say(text: str) -> None:
    """Print a line, on the first rank only."""
    if is_first():
        print(text, flush=True)


def progress(items, name: str, unit: str):
    """The items, with a progress bar on the first rank if they take longer than seconds."""
    bar = {"desc": name, "unit": unit, "delay": 3, "leave": False}
    return tqdm(items, disable=not is_first(), **bar)


def barrier() -> None:
    """Wait until every rank is here."""
    all_reduce(torch.zeros(1))


def broadcast(work, *args, **kwargs):
    """work(*args, **kwargs) on rank 0; every rank returns its result or raises its InputError.

    Anything that depends on time or disk is decided on rank 0 and broadcast. All ranks call this.
    """
    result = None
    if is_first():
        try:
            result = work(*args, **kwargs)
        except InputError as error:
            result = error
    result = all_gather(result)[0]
    if isinstance(result, InputError):
        raise result
    return result


def in_turns(work, *args, **kwargs):
    """work(*args, **kwargs) on each rank, one at a time on each machine. All ranks call this."""
    machines = all_gather(socket.gethostname())
    my_turn = machines[: rank()].count(machines[rank()])
    for turn in range(world()):
        if turn == my_turn:
            result = work(*args, **kwargs)
        barrier()
    return result


def finish() -> None:
    """Wait for the others at the end of a run: torchrun kills all ranks when one exits early."""
    barrier()
    if world() > 1:
        time.sleep(0.2)  # gloo aborts a process that exits before its last tensors are released


def report(problem: Exception) -> None:
    """Print the error that ends this process."""
    print(f"error: {problem}", file=sys.stderr, flush=True)


def all_reduce(tensor: torch.Tensor, op=dist.ReduceOp.SUM) -> torch.Tensor:
    """Reduce over ranks in place, by default to the sum; NaN stays NaN. One process: unchanged."""
    if world() > 1:
        if dist.get_backend() == "nccl" and tensor.device.type == "cpu":
            tensor.copy_(all_reduce(tensor.cuda(), op))
        else:
            dist.all_reduce(tensor, op)
    return tensor


def all_gather(items) -> list:
    """The items of every rank, by rank; they are pickled. All ranks must call it."""
    if world() == 1:
        return [items]
    of_ranks = [None] * world()
    dist.all_gather_object(of_ranks, items)
    return of_ranks


def largest_first(work: list[float], world: int) -> list[int]:
    """The rank of each piece of work: the largest first, each to the rank that has the least so far
    (Graham 1969). Every rank computes the same."""
    loads = [(0.0, rank) for rank in range(world)]
    rank_of = [0] * len(work)
    for piece in sorted(range(len(work)), key=lambda piece: -work[piece]):
        load, rank_of[piece] = heapq.heappop(loads)
        heapq.heappush(loads, (load + work[piece], rank_of[piece]))
    return rank_of


def sum_gradients(model) -> None:
    """Sum all gradients over ranks; FSDP has already summed sharded ones.

    There is no DDP wrapper, so a rank that kept nothing simply contributes zeros.
    """
    for parameter in model.parameters():
        if parameter.requires_grad:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            if not is_sharded(model):
                all_reduce(parameter.grad)


# ---------------------------------------------------------------------------- --shard fsdp


def shard(model, device: str) -> None:
    """Leave this rank its share of every parameter. Call before making an optimizer."""
    mesh = init_device_mesh(device, (dist.get_world_size(),))  # else FSDP takes CUDA if it exists
    layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    for module in (*layers, model):
        # The root is resharded too. Left whole after a forward without a backward, the embedding
        # and the head would keep the weights from before the update, and model.parameters() would
        # not be the optimizer's.
        fully_shard(module, mesh=mesh, reshard_after_forward=True)
        module.set_gradient_divide_factor(1.0)  # sum over ranks; FSDP's default is the mean
        module.set_force_sum_reduction_for_comms(True)  # as a plain sum, the only one gloo has


def is_sharded(model) -> bool:
    return isinstance(model, FSDPModule)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The full tensor of a sharded one, on every rank; all ranks must call it. Others stay."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gather(state):
    """A nested dict with full tensors on rank 0's CPU and None in their place on other ranks.

    All ranks must call it.
    """
    if isinstance(state, dict):
        return {key: gather(value) for key, value in state.items()}
    if isinstance(state, DTensor):
        full = state.full_tensor()
        return full.cpu() if dist.get_rank() == 0 else None
    return state


def weights(model) -> dict[str, torch.Tensor]:
    """The state_dict to write: full tensors on rank 0, tied weights once under the first name."""
    names = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        names.setdefault(tensor, name)
    return gather({name: tensor.detach() for tensor, name in names.items()})


def load_optimizer(optimizer, state: dict) -> None:
    """optimizer.load_state_dict from full tensors; sharded parameters keep this rank's share."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for index, entries in state["state"].items():
        parameter = parameters[index]
        if not isinstance(parameter, DTensor):
            continue
        mesh, placements = parameter.device_mesh, parameter.placements
        for name, value in entries.items():
            if value.shape == parameter.shape:  # not the step count
                share = distribute_tensor(value, mesh, placements, src_data_rank=None)
                entries[name] = share.clone()  # a view would keep the full tensor alive
    optimizer.load_state_dict(state)
