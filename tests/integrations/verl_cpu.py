"""verl's real trainer on a CPU, for tests: a platform, gloo, and completions in place of an engine.

verl imports this module in every process (VERL_USE_EXTERNAL_MODULES). Ray is told of GPUs, which
only counts slots. A completion is a function of the prompt, its number and the step, so it is the
same in runs with other workers or other batches.
"""

import contextlib
import itertools
import random
import types

import ray
import torch
import verl.utils.distributed
from verl.plugin.platform.platform_cuda import PlatformCUDA
from verl.plugin.platform.platform_manager import PlatformRegistry

torch.set_num_threads(1)


class NoDevice(types.ModuleType):
    """In place of torch.cuda: what torch.cpu does not have returns 0."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        some = {"mem_get_info": lambda *_: (2**30, 2**30), "get_device_name": lambda *_: "CPU"}
        return some.get(name) or getattr(torch.cpu, name, lambda *args, **options: 0)


@PlatformRegistry.register("cpu")
class Cpu(PlatformCUDA):
    device_name, device_module = "cpu", NoDevice("cpu")
    set_device = synchronize = set_allocator_settings = lambda *_: None
    is_available = lambda self: True
    current_device = lambda self: torch.device("cpu")
    device_count = lambda self: 1
    communication_backend_name = lambda self: "gloo"
    is_ipc_supported = lambda self: False
    nvtx_range = lambda self, msg: contextlib.nullcontext()


join = verl.utils.distributed.initialize_global_process_group_ray
verl.utils.distributed.initialize_global_process_group_ray = lambda timeout_second=None, _=None: (
    join(timeout_second, "gloo")
)
torch.Tensor.pin_memory = lambda self, *args, **options: self  # of FSDP2's reference model


# verl asks for its platform as soon as more of it is imported, and so does dppo_verl
from verl.experimental.agent_loop import agent_loop  # noqa: E402
from verl.trainer.ppo.v1 import trainer_base  # noqa: E402
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer  # noqa: E402
from verl.workers.rollout import base, replica  # noqa: E402

import dppo_verl  # noqa: E402, F401
from tasks import arithmetic  # noqa: E402


@ray.remote(num_cpus=0)
class Server:
    async def idle(self, *args, **options):
        return None

    sleep = wake_up = abort_all_requests = resume_generation = clear_kv_cache = idle
    release_kv_cache = resume_kv_cache = start_profile = stop_profile = idle


class Replica(replica.RolloutReplica):
    async def launch_servers(self):
        self._server_handle, self._server_address = Server.remote(), "nowhere"
        self.servers = [self._server_handle]


class Adapter(base.BaseRollout):
    """In each training process. The completions do not depend on its weights."""

    async def resume(self, tags):
        return None

    async def release(self):
        return None

    async def update_weights(self, weights, global_steps=None, **options):
        for _name, _weight in weights:  # ranks gather each of them together
            pass


base._ROLLOUT_REGISTRY["cpu", "async"] = f"{__name__}.Adapter"
replica.RolloutReplicaRegistry.register("cpu", lambda: Replica)


@agent_loop.register("plain")
class PlainLoop(agent_loop.AgentLoopBase):
    """The prompt is the text itself, and the completion the imperfect teacher's, some of which are
    right."""

    def __init__(self, trainer_config, server_manager, tokenizer, **options):
        self.tokenizer = tokenizer

    async def run(self, sampling_params, **row):
        text, step = row["raw_prompt"][0]["content"], int(row["global_steps"])
        rng = random.Random(f"{text}/{row['session_id']}/{step}")
        answer = arithmetic.worked_answer(text, arithmetic.CARRY_PROB, rng)
        ids = [*self.tokenizer.encode(answer), self.tokenizer.eos_token_id]
        seconds = {"generate_sequences": 0.0, "tool_calls": 0.0, "compute_score": 0.0}
        return agent_loop.AgentLoopOutput(
            prompt_ids=self.tokenizer.encode(text), response_ids=ids, response_mask=[1] * len(ids),
            response_logprobs=[-1.0] * len(ids), num_turns=2,
            metrics=seconds | {"num_preempted": -1}, extra_fields={"global_steps": step},
        )  # fmt: skip


def in_order(self, partition_id, uids, rows):
    """In verl, rollouts come in the order in which they ended, and sums differ by rounding."""
    return materialize(self, partition_id, uids, dict(sorted(rows.items())))


materialize, number = ReplayBuffer._materialize_batch, itertools.count()
ReplayBuffer._materialize_batch = in_order
trainer_base.uuid = types.SimpleNamespace(uuid4=lambda: f"{next(number):09}")  # of prompts
