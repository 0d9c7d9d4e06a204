"""verl's trainer without Ray: its own methods and losses on a queue in memory and a policy of a few
parameters in float64. See exact.py."""

import copy
import functools
import types
from unittest import mock

import exact
import torch
import transfer_queue as tq
from exact import NONE, RULES, G, completion, noise, number, tables
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf
from tensordict import NonTensorStack, TensorDict
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils import tensordict_utils as tu
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.torch_functional import entropy_from_logits
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
from verl.workers.engine.utils import prepare_micro_batches
from verl.workers.utils.losses import ppo_loss

import dppo_verl

V = 7  # tokens; 0 ends a completion
BASE = {
    "algorithm.adv_estimator": "grpo", "data.seed": 0, "data.train_batch_size": 4,
    "trainer.v1.trainer_mode": "nanodppo",
    "actor_rollout_ref.actor.strategy": "fsdp", "actor_rollout_ref.rollout.n": G,
    "actor_rollout_ref.actor.ppo_mini_batch_size": 4, "actor_rollout_ref.rollout.name": "vllm",
    "actor_rollout_ref.actor.use_dynamic_bsz": True, "actor_rollout_ref.model.path": "toy",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": 160,
    "actor_rollout_ref.actor.use_kl_loss": True, "actor_rollout_ref.actor.kl_loss_coef": 0.3,
    "actor_rollout_ref.actor.entropy_coeff": 0.02, "actor_rollout_ref.actor.clip_ratio": 0.1,
    "actor_rollout_ref.actor.clip_ratio_low": 0.1, "actor_rollout_ref.actor.clip_ratio_high": 0.1,
    "actor_rollout_ref.actor.loss_scale_factor": 8,
    "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz": True,
    "actor_rollout_ref.actor.policy_loss.dro_beta": 0.2,
    "algorithm.rollout_correction.rollout_is": "token",
    "algorithm.rollout_correction.rollout_is_threshold": 1.5,
}  # fmt: skip

ACTOR = "actor_rollout_ref.actor."
LOSS, MODE = f"{ACTOR}policy_loss.loss_mode", f"{ACTOR}loss_agg_mode"
UPDATE = f"{ACTOR}ppo_mini_batch_size"
KL, ENTROPY = f"{ACTOR}use_kl_loss", f"{ACTOR}entropy_coeff"
NO_TERMS = {KL: False, ENTROPY: 0}

MODES = (
    "token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
)  # fmt: skip
LOSSES = {
    f"{loss}-{mode}": {LOSS: loss, MODE: mode}
    for loss in dppo_verl.LOSSES
    for mode in MODES
    if loss == "vanilla" or mode == ("seq-mean-token-mean" if loss == "sapo" else "token-mean")
}
LOSSES |= {  # what has a gradient without an advantage, each alone; another estimator
    "dro": {LOSS: "dro", MODE: "token-sum", **NO_TERMS},
    "kl": {MODE: "token-sum", ENTROPY: 0},
    "entropy": {MODE: "token-sum", KL: False},
    "rloo": {"algorithm.adv_estimator": "rloo", MODE: "token-sum", **NO_TERMS},
}
PER_TOKEN = [name for name in LOSSES if name.endswith("-token-mean") and "-seq-" not in name]
OWN_LENGTH = [name for name in LOSSES if name.endswith("-seq-mean-token-mean")]
FEW = {"prompts": ("bb", "ccc"), UPDATE: 2}
DULL = {**NO_TERMS, "prompts": ("dddd", "hhhh"), UPDATE: 1}
STOCK = PPOTrainerSync, {"ranks": 1, "trainer.v1.trainer_mode": "sync"}
INEXACT = [
    {MODE: "token-mean", LOSS: "sapo"}, {UPDATE: 3},
    {f"{ACTOR}loss_scale_factor": None, MODE: "seq-mean-token-sum-norm"},
]  # fmt: skip
initialize_config_module("verl.trainer.config", version_base=None)
DEFAULTS = compose("ppo_trainer")
for values, names in dppo_verl.EXACT:
    other = {"1": 2, "None": True, "True": False}.get(str(values[0]), "other")
    for name in names:
        inside = name.split(".")[0] in DEFAULTS.actor_rollout_ref
        INEXACT.append({f"actor_rollout_ref.{name}" if inside else name: other})


def configure(**changes):
    """verl's own configuration with BASE."""
    own = lambda name: f"trainer.v1.nanodppo.{name}" if name in RULES else name
    options = BASE | {own(name): value for name, value in changes.items()}
    new = ("trainer.v1.nanodppo.", "actor_rollout_ref.model.override_config.")
    config = copy.deepcopy(DEFAULTS)
    for name, value in options.items():
        OmegaConf.update(config, name, value, force_add=name.startswith(new))
    return config


def make(config=None, **options):
    """verl's own part of a trainer is left out."""
    with mock.patch.object(PPOTrainerSync, "__init__", return_value=None):
        return dppo_verl.DPPOTrainer(config or configure(**options))


class Queue:
    """TransferQueue in memory: {key: {field: value}}. Numbers are float64."""

    def __init__(self):
        self.rows, self.tags = {}, {}

    def get(self, keys, partition_id=None, select_fields=None):
        found = [self.rows[key] for key in keys]
        shared = set.intersection(*map(set, found))
        names = shared & set(select_fields or shared)
        nested = lambda some: torch.nested.as_nested_tensor(some, layout=torch.jagged)
        stack = lambda some: nested(some) if torch.is_tensor(some[0]) else NonTensorStack(*some)
        return TensorDict({x: stack([row[x] for row in found]) for x in names}, len(keys))

    def put(self, keys, partition_id=None, fields=None, tags=None):
        for key, fields_of in zip(keys, fields, strict=True):
            row = self.rows.setdefault(key, {})
            for name, x in fields_of.items():
                row[name] = x.double() if torch.is_tensor(x) and x.is_floating_point() else x
        self.tags |= dict(zip(keys, tags or (), strict=bool(tags)))
        return tq.KVBatchMeta(keys, [self.tags[key] for key in keys], partition_id)


def row_of(prompt, g):
    """The fields of a prompt's g-th completion, some of whose tokens are masked."""
    ids, rollout = completion(prompt, g)
    prompts = torch.tensor([1 + number(prompt) % 5, 3][: 1 + len(prompt) % 2])
    mask = [int(t == 0 or number(prompt, g, t, "mask") % 5 > 0) for t in range(len(ids))]
    scores = torch.zeros(len(ids)).double()
    scores[-1] = float(g < len(prompt) % G)  # as many are right as the prompt has letters
    input_ids = torch.cat([prompts, torch.tensor(ids)])
    return {
        "prompts": prompts, "responses": torch.tensor(ids), "input_ids": input_ids,
        "position_ids": torch.arange(len(input_ids)), "response_mask": torch.tensor(mask),
        "loss_mask": torch.tensor(mask), "rm_scores": scores,
        "rollout_log_probs": torch.tensor(rollout).double(),
    }  # fmt: skip


class Policy:
    """Logits of the next token by the last one, [V, V], through the FSDP engine's own preparation
    of inputs and outputs."""

    engine = types.SimpleNamespace(
        pad_to_length=False, use_ulysses_sp=False,
        engine_config=types.SimpleNamespace(
            entropy_checkpointing=False, entropy_from_logits_with_chunking=False
        ),
        _get_packed_pad_size=lambda n: 0, _gather_and_unpad_packed=lambda x, n: x,
        compute_entropy_from_logits=entropy_from_logits,
    )  # fmt: skip

    def __init__(self):
        generator = torch.Generator().manual_seed(0)
        self.logits = torch.randn(V, V, generator=generator).double().requires_grad_()

    def forward(self, data):
        inputs, args = FSDPEngineWithLMHead.prepare_model_inputs(self.engine, data)
        output = types.SimpleNamespace(logits=self.logits[inputs["input_ids"]])
        return FSDPEngineWithLMHead.prepare_model_outputs(self.engine, output, args, data, None)


PROMPTS = ("f", "bb", "ccc", "dddd")  # of the last, none is right
ENGINE = {"use_remove_padding": True, "max_token_len_per_gpu": 160}


class Toy(exact.Toy):
    """A trainer, its queue, and the gradients of its updates."""

    def __init__(
        self, kind=dppo_verl.DPPOTrainer, prompts=PROMPTS, ranks=2, engine=ENGINE, **changes
    ):
        self.options = changes | {"prompts": prompts, "engine": engine}
        self.config = configure(**{"data.train_batch_size": len(prompts)}, **changes)
        self.trainer, self.queue = kind(self.config), Queue()
        self.ranks, self.engine = ranks, engine
        self.messages = [[{"role": "user", "content": x}] for x in prompts]
        self.trainer.train_dataset = [{"raw_prompt": x} for x in self.messages]
        self.trainer.global_steps = 0
        self.trainer.tokenizer = types.SimpleNamespace(eos_token_id=0)
        self.trainer.replay_buffer = types.SimpleNamespace(sample=self.sample)
        self.trainer.reward_loop_manager = self.trainer.checkpoint_manager = mock.Mock()
        self.trainer.curr_step_profile = False
        self.trainer.actor_rollout_wg = types.SimpleNamespace(
            _dispatch_info={"actor": list(range(ranks))},
            set_loss_fn=functools.partial(setattr, self, "loss"),
            update_actor=self.update,
        )  # fmt: skip
        self.arrive = lambda batch: batch  # changes what has been sampled
        with mock.patch.object(PPOTrainerSync, "_init_dataloader"):
            self.trainer._init_dataloader()
        actor = self.config.actor_rollout_ref.actor
        self.loss = functools.partial(ppo_loss, omega_conf_to_dataclass(actor))
        with mock.patch.object(PPOTrainerSync, "_setup"):
            self.trainer._setup()

        def row(prompt, g):
            row = row_of(prompt, g)
            logprobs = row["rollout_log_probs"][row["response_mask"] > 0].tolist()
            return row["rm_scores"].sum().item(), len(row["input_ids"]), logprobs

        self.tables = tables(prompts, row)
        if self.config.algorithm.adv_estimator == "rloo":
            self.scale = "none"
        self.beta = actor.use_kl_loss * actor.kl_loss_coef + actor.entropy_coeff
        if actor.policy_loss.loss_mode == "dro":
            self.beta += actor.policy_loss.dro_beta

    def log(self):
        return self.metrics, [tag["seq_len"] for tag in self.returned.tags]

    def figures(self):
        return {name[5:]: x for name, x in self.metrics.items() if name.startswith("dppo/")}

    def stock(self, prompts=None):
        """Both rules none, which is verl's trainer: the gradient [P] of one update of these
        prompts, by default of all, on one rank."""
        prompts = prompts or self.options["prompts"]
        one_update = {"prompts": prompts, UPDATE: len(prompts), "ranks": 1}
        (gradient,) = Toy(**self.options | NONE | one_update).step()
        return gradient

    def sample(self, global_steps, partition_id, batch_size):
        """In place of rollouts and rewards: all completions of the prompts that were submitted."""
        keys, found = [], []
        assert batch_size == len(self.submitted["uid"])
        rows = zip(self.submitted["uid"], self.submitted["raw_prompt"], strict=True)
        for uid, prompt in sorted(rows, key=lambda x: noise(x[1])):  # the queue has its own order
            for g in range(G):
                keys.append(f"{uid}_{g}_0")
                found.append(row_of(prompt[0]["content"], g) | {"uid": uid})
        tags = [{"seq_len": len(row["input_ids"])} for row in found]
        return self.arrive(self.queue.put(keys, partition_id, found, tags)), {}

    def step(self):
        """A step of the trainer through verl's own methods: the gradient [P] of each update."""
        self.gradients, self.trained, self.forwarded = [], [], []
        self.policy, self.metrics = Policy(), {}
        self.trainer.global_steps += 1
        self.trainer.train_dataloader_it = iter([{"raw_prompt": self.messages}])
        with (
            mock.patch.multiple(tq, kv_batch_get=self.queue.get, kv_batch_put=self.queue.put),
            mock.patch.multiple(
                PPOTrainerSync,
                _compute_old_log_prob=self.log_probs,
                _compute_ref_log_prob=self.log_probs,
            ),
        ):
            self.submitted = self.trainer._next_train_batch()
            self.returned = self.trainer._step_once(self.metrics, {}, len(self.messages))
        return torch.stack(self.gradients)

    def log_probs(self, batch, metrics):
        """In place of the training processes: fixed ones of other policies."""
        for row in map(self.queue.rows.get, batch.keys):
            for name in ("old_log_probs", "ref_log_prob"):
                shift = [0.4 * noise(name, t, x) for t, x in enumerate(row["responses"].tolist())]
                row[name] = row["rollout_log_probs"] + torch.tensor(shift).double()
        return batch

    def update(self, batch):
        """In place of the training processes: FSDP's mean of the ranks' gradients."""
        extra, shares = batch.extra_info, batch.chunk(self.ranks)
        assert len(batch) % self.ranks == 0
        size = extra["mini_batch_size"] // self.ranks
        data = [self.queue.get(share.keys) for share in shares]
        options = {"epochs": extra["epochs"], "seed": 1, "dataloader_kwargs": {"shuffle": False}}
        for parts in zip(*(tu.make_iterator(x, size, **options) for x in data), strict=True):
            tokens = sum(part["loss_mask"].values().sum().item() for part in parts)
            self.policy.logits.grad = None
            for part in parts:
                tu.assign_non_tensor(
                    part, batch_num_tokens=tokens, dp_size=self.ranks, temperature=1.0,
                    global_batch_size=extra["global_batch_size"], micro_batch_size_per_gpu=1,
                    calculate_entropy=True, use_dynamic_bsz=True, **self.engine,
                )  # fmt: skip
                self.trained.append(part)
                for micro in prepare_micro_batches(part)[0]:
                    self.forwarded.append(len(micro))
                    output = self.policy.forward(micro)
                    loss, _ = self.loss(model_output=output, data=micro, dp_group=None)
                    (loss / self.ranks).backward()
            self.gradients.append(self.policy.logits.grad.flatten())
        return TensorDict({}, []).set_non_tensor("metrics", {"mfu": 0.0})
