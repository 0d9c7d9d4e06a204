"""verl's real trainer on a CPU, for tests: a platform, gloo, and a rollout server that samples.

verl imports this module in every process (VERL_USE_EXTERNAL_MODULES). Ray is told of GPUs, which
only counts slots. A rollout is a function of the weights, the prompt, its number and the step, so
runs with other workers or other batches sample the same tokens.
"""

import contextlib
import itertools
import os
import sys
import types
from pathlib import Path

import numpy as np
import ray
import torch
import verl.utils.distributed
from transformers import AutoModelForCausalLM, DynamicCache
from verl.plugin.platform.platform_cuda import PlatformCUDA
from verl.plugin.platform.platform_manager import PlatformRegistry

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "integrations")]
import dppo  # noqa: E402

torch.set_num_threads(1)

# ------------------------------------------------------------------------------------ the platform


class NoDevice(types.ModuleType):
    """In place of torch.cuda: what torch.cpu does not have returns 0."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        some = {"mem_get_info": lambda *_: (2**30, 2**30), "get_device_name": lambda *_: "CPU"}
        return some.get(name) or getattr(torch.cpu, name, lambda *args, **options: 0)


def nothing(*args, **options):
    return None


@PlatformRegistry.register("cpu")
class Cpu(PlatformCUDA):
    device_name, device_module = "cpu", NoDevice("cpu")
    set_device = synchronize = set_allocator_settings = lambda *_: None

    def is_available(self):
        return True

    def current_device(self):
        return torch.device("cpu")

    def device_count(self):
        return 1

    def communication_backend_name(self):
        return "gloo"

    def is_ipc_supported(self):
        return False

    def nvtx_range(self, msg):
        return contextlib.nullcontext()


join = verl.utils.distributed.initialize_global_process_group_ray
verl.utils.distributed.initialize_global_process_group_ray = lambda timeout_second=None, _=None: (
    join(timeout_second, "gloo")
)
torch.Tensor.pin_memory = lambda self, *args, **options: self  # of FSDP2's reference model


# -------------------------------------------------------------------------------------- rollouts

# verl asks for its platform as soon as more of it is imported, and so does dppo_verl
from verl.experimental.agent_loop import agent_loop  # noqa: E402
from verl.trainer.ppo.v1 import trainer_base  # noqa: E402
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer  # noqa: E402
from verl.workers.rollout import base, replica  # noqa: E402

import dppo_verl  # noqa: E402, F401


@torch.no_grad()
def sample(model, ids, seed, tokens):
    """(token ids, log-probs) of a completion at temperature 1: the largest of logits + Gumbel noise
    is a sample."""
    uniform = dppo.generator_for(seed, "gumbel").random((tokens, model.config.vocab_size))
    noise = torch.from_numpy(-np.log(-np.log(np.maximum(uniform, 1e-300)))).float()
    cache, new, found, logprobs = DynamicCache(), torch.tensor([ids]), [], []
    for t in range(tokens):
        logits = model(new, past_key_values=cache).logits[0, -1].float()
        new = (logits + noise[t]).argmax().view(1, 1)
        found.append(new.item())
        logprobs.append(logits.log_softmax(dim=0)[found[-1]].item())
        if found[-1] == model.config.eos_token_id:
            break
    return found, logprobs


@ray.remote(num_cpus=0)
class Server:
    def __init__(self, path, tokens):
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self.step, self.tokens = 0, tokens

    async def generate(self, request_id, prompt_ids, sampling_params, **options):
        seed = sampling_params["seed"]
        ids, logprobs = sample(self.model, list(prompt_ids), seed, self.tokens)
        steps = {"global_steps": self.step}
        return replica.TokenOutput(
            token_ids=ids, log_probs=logprobs, stop_reason="completed", extra_fields=steps
        )

    async def load(self, state, step):
        self.model.load_state_dict(state, strict=False)
        self.step = self.step if step is None else step

    async def idle(self, *args, **options):
        return None

    sleep = wake_up = abort_all_requests = resume_generation = clear_kv_cache = idle
    release_kv_cache = resume_kv_cache = start_profile = stop_profile = idle


class Replica(replica.RolloutReplica):
    async def launch_servers(self):
        options = {"name": f"server{self.replica_rank}", "max_concurrency": 2000}
        path, tokens = self.model_config.path, self.config.response_length
        self._server_handle = Server.options(**options).remote(path, tokens)
        self._server_address, self.servers = options["name"], [self._server_handle]


class Adapter(base.BaseRollout):
    """In each training process: sends its weights to the server of its rank."""

    async def resume(self, tags):
        return None

    async def release(self):
        return None

    async def update_weights(self, weights, global_steps=None, **options):
        whole = lambda x: x.full_tensor() if hasattr(x, "full_tensor") else x
        state = {name: whole(x).detach().to(torch.float32, copy=True) for name, x in weights}
        server = ray.get_actor(f"server{os.environ['RANK']}")
        await server.load.remote(state, global_steps)


base._ROLLOUT_REGISTRY["cpu", "async"] = f"{__name__}.Adapter"
replica.RolloutReplicaRegistry.register("cpu", lambda: Replica)


@agent_loop.register("plain")
class PlainLoop(agent_loop.AgentLoopBase):
    """The prompt is the text itself: the embedded task's tokenizer has no chat template."""

    def __init__(self, trainer_config, server_manager, tokenizer, **options):
        self.seed = trainer_config.config.data.seed
        self.server, self.tokenizer = server_manager, tokenizer

    async def run(self, sampling_params, **row):
        text, step = row["raw_prompt"][0]["content"], int(row["global_steps"])
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        params = sampling_params | {
            "seed": dppo.seed_for(self.seed, text, int(row["session_id"]), step)
        }
        out = await self.server.generate(text, prompt_ids=ids, sampling_params=params)
        seconds = {"generate_sequences": 0.0, "tool_calls": 0.0, "compute_score": 0.0}
        return agent_loop.AgentLoopOutput(
            prompt_ids=ids, response_ids=out.token_ids, response_mask=[1] * len(out.token_ids),
            response_logprobs=out.log_probs, num_turns=2,
            metrics=seconds | {"num_preempted": -1}, extra_fields=out.extra_fields,
        )  # fmt: skip


def in_order(self, partition_id, uids, rows):
    """In verl, rollouts come in the order in which they ended, and sums differ by rounding."""
    return materialize(self, partition_id, uids, dict(sorted(rows.items())))


materialize, number = ReplayBuffer._materialize_batch, itertools.count()
ReplayBuffer._materialize_batch = in_order
trainer_base.uuid = types.SimpleNamespace(uuid4=lambda: f"{next(number):09}")  # of prompts
