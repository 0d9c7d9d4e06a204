"""
Unbiased pruning in verl: its synchronous trainer, with less work for the same expected gradient.

    VERL_USE_EXTERNAL_MODULES=dppo_verl python -m verl.trainer.main_ppo \
        trainer.v1.trainer_mode=nanodppo +trainer.v1.nanodppo.completion_rule=nonzero ...

verl's methods are wrapped; none of its code is copied. Rules, draws and weights come from dppo.py
and sampler.py.
    prompts      are dropped before rollout, from each batch of the dataloader
    completions  are dropped after reward and before log-probs. An update (a mini-batch) has the
                 completions of fixed prompts, and is drawn, padded and balanced by itself
    weights      verl's loss depends on the parameters through log-probs and entropies alone. So if
                 their gradient in a row is multiplied by its weight 1 / P(kept), which the training
                 processes do, the whole term of the row is: clip, KL, entropy bonus, masks and
                 rollout correction. Advantages and denominators are those of the un-pruned batch
`check` refuses options for which such a weight is not exact. docs/other-trainers.md explains the
options and the log.
verl's own losses dppo_tv and dppo_kl are Divergence PPO (arXiv:2602.04879), another method.

Letters: Q prompts of a batch, K of them rolled out, G completions each, N = K x G rows; M updates.
"""

import functools
import math
import types
from pathlib import Path

import numpy as np
import torch
import transfer_queue as tq
import verl
from omegaconf import OmegaConf, open_dict
from tensordict import TensorDict
from verl.protocol import DataProto
from verl.trainer.ppo.v1.trainer_base import register_trainer
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.trainer.ppo.v1.utils import compute_advantage_for_multi_trajectories as compute_advantage
from verl.utils import tensordict_utils as tu
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.seqlen_balancing import calculate_workload, get_seqlen_balanced_partitions
from verl.workers.utils.losses import ppo_loss
from verl.workers.utils.padding import response_to_nested

import dppo
import dppo_shared
from dppo_shared import require, sampler

VERL = "0.9.1"  # the version whose methods are wrapped
DEFAULTS = {
    "completion_rule": "adaptive", "completion_prune_rate": 0.7, "rest": dppo.REST,
    "prompt_rule": "none", "prompt_prune_rate": 0.3,
}  # fmt: skip
LOSSES = ("vanilla", "gspo", "sapo", "gpg", "cispo", "dro", "dppo_tv", "dppo_kl")
PARTS = "actor_rollout_ref"
EXACT = [  # values with which a row's term does not depend on what else is kept, and their options
    (LOSSES, ["actor.policy_loss.loss_mode"]),
    (("grpo", "rloo"), ["algorithm.adv_estimator"]),
    (("fsdp", "fsdp2"), ["actor.strategy"]),
    ((1,), ["actor.ppo_epochs", "actor.ulysses_sequence_parallel_size",
            "actor.fsdp_config.ulysses_sequence_parallel_size"]),
    ((None, False), [
        "actor.shuffle", "actor.use_prefix_grouper", "critic.enable", "distillation.enabled",
        "model.lora_adapter_path", "model.mtp.enable", "model.override_config.output_router_logits",
        "skip.rollout_tq.enable",
        "algorithm.rollout_correction.bypass_mode", "algorithm.rollout_correction.rollout_rs",
        "algorithm.rollout_correction.rollout_is_batch_normalize", "algorithm.use_kl_in_reward",
        "algorithm.filter_groups.enable", "trainer.v1.sampler.sync_refill_failed_groups",
        "trainer.v1.sampler.custom_sampler.path"]),
    ((0,), ["model.lora_rank"]),
    ((True,), ["hybrid_engine", "actor.use_dynamic_bsz", "rollout.log_prob_use_dynamic_bsz",
               "ref.log_prob_use_dynamic_bsz"]),
]  # fmt: skip


def check(config, trainer) -> None:
    """RuleError for options with which pruning would not be exact."""
    dppo_shared.check_rules(trainer.args)
    if not trainer.prunes:
        return
    otherwise = "or set both rules of trainer.v1.nanodppo to none"
    for values, names in EXACT:
        choice = " or ".join("null" if x is None else str(x) for x in values)
        for name in names:
            option = f"{PARTS}.{name}" if name.split(".")[0] in config[PARTS] else name
            value = OmegaConf.select(config, option)
            require(
                value in values,
                f"{option}={value}: not exact or never tried with pruning; set it to {choice}, "
                f"{otherwise}",
            )
    require(
        verl.__version__ == VERL,
        f"verl {verl.__version__}: only the methods of {VERL} are known here; pip install "
        f"verl=={VERL}, {otherwise}",
    )
    actor = config[PARTS].actor
    require(
        actor.loss_agg_mode != "seq-mean-token-sum-norm" or actor.loss_scale_factor is not None,
        f"{PARTS}.actor.loss_scale_factor=null: verl would divide by the longest row that is kept; "
        f"set it to data.max_response_length, {otherwise}",
    )
    require(
        actor.policy_loss.loss_mode != "sapo" or actor.loss_agg_mode == "seq-mean-token-mean",
        f"{PARTS}.actor.loss_agg_mode={actor.loss_agg_mode} with sapo: it would be that of the KL "
        "loss and entropy bonus only; set it to seq-mean-token-mean",
    )
    mini_batch, Q = actor.ppo_mini_batch_size, config.data.train_batch_size
    require(
        Q % mini_batch == 0,
        f"{PARTS}.actor.ppo_mini_batch_size={mini_batch} does not divide "
        f"data.train_batch_size={Q}: an update would be cut short; choose a divisor, {otherwise}",
    )


def pruned_loss(config, model_output: dict, data: TensorDict, dp_group=None):
    """verl's ppo_loss of a micro-batch in a training process, with the gradient of each row times
    its weight and the tokens of the un-pruned mini-batch as denominator: both are in data["dppo"],
    [n, 2]."""
    table = data["dppo"].values() if data["dppo"].is_nested else data["dppo"]
    weights, tokens = table.view(-1, 2).T
    weights = weights.repeat_interleave(data["input_ids"].offsets().diff())  # of each token
    output = dict(model_output)
    for name in {"log_probs", "entropy"} & output.keys():
        flat = output[name] = output[name].values() if output[name].is_nested else output[name]
        if flat.requires_grad:
            flat.register_hook(lambda gradient: gradient * weights.to(gradient))
    tu.assign_non_tensor(data, batch_num_tokens=tokens[0].item())
    return ppo_loss(config, output, data, dp_group)


@register_trainer("nanodppo")
class DPPOTrainer(PPOTrainerSync):
    """verl's synchronous trainer with a rule that drops completions and one that drops prompts.
    Their options are in trainer.v1.nanodppo. If both rules are "none", it is verl's trainer."""

    def __init__(self, config):
        options = dict(OmegaConf.select(config, "trainer.v1.nanodppo") or {})
        for name in options:
            dppo.check_known("option of trainer.v1.nanodppo", name, DEFAULTS)
        options = DEFAULTS | options
        self.args = types.SimpleNamespace(**options)
        self.prunes_prompts = self.args.prompt_rule != "none"
        self.prunes = self.prunes_prompts or self.args.completion_rule != "none"
        check(config, self)
        print(f"nanodppo: {', '.join(f'{name}={value}' for name, value in options.items())}")
        self.actor = config[PARTS].actor
        self.G = config[PARTS].rollout.n
        self.Q = config.data.train_batch_size
        self.M = self.Q // self.actor.ppo_mini_batch_size
        self.seed = config.data.get("seed") or 0
        with open_dict(config):
            config.trainer.v1.trainer_mode = "sync"  # verl compares this name in seven places
        super().__init__(config)

    def _setup(self):
        """verl's. The training processes get the pruned loss, and mini-batches of what is kept."""
        super()._setup()
        if not self.prunes:
            return
        workers, actor = self.actor_rollout_wg, omega_conf_to_dataclass(self.actor)
        workers.set_loss_fn(functools.partial(pruned_loss, actor))
        workers.update_actor = functools.partial(self.send, workers.update_actor)

    def send(self, update_actor, batch):
        batch.extra_info["mini_batch_size"] = self.rows_per_update  # verl's is un-pruned
        return update_actor(batch)

    # ------------------------------------------------------------------------------------- prompts

    def _init_dataloader(self):
        """verl's, and the history of its prompts."""
        super()._init_dataloader()
        if not self.prunes_prompts:
            return
        prompts = [self.train_dataset[i]["raw_prompt"] for i in range(len(self.train_dataset))]
        dppo_shared.remember(self, prompts, self.config.trainer.get("rollout_data_dir"))

    def _next_train_batch(self, num_prompts=None) -> TensorDict:
        """verl's next Q prompts, or K of them. `groups` is {uid: (place among the Q, weight)}."""
        batch = super()._next_train_batch(num_prompts)
        uids = list(batch["uid"])
        self.groups = {uid: (q, 1.0) for q, uid in enumerate(uids)}
        if not self.prunes_prompts:
            return batch
        prompts = dppo_shared.find_prompts(self, batch["raw_prompt"])
        rule, rate = self.args.prompt_rule, self.args.prompt_prune_rate
        if rule == "uniform":  # at least one prompt for each update
            rate = min(rate, 1.0 - self.M / self.Q)
        if self.actor.loss_agg_mode == "token-mean" and self.mean_tokens is None:
            rule = "none"  # this batch is whole, and gives the denominator
        generator = dppo.generator_for(self.seed, "prompts", self.global_steps)
        keep, weights = sampler.prune_prompts(rule, rate, self.history, prompts, generator, self.M)
        self.prompts = prompts[keep]  # [K]
        places = keep.nonzero().flatten()  # [K]
        self.groups = {uids[q]: (q, weights[q].item()) for q in places.tolist()}
        return tu.index_select_tensor_dict(batch, places)

    # --------------------------------------------------------------------------------- completions

    def _step_once(self, metrics, timing_raw, sample_batch_size):
        """verl's step. Returns all rows: verl logs their figures and clears them from its queue."""
        if not self.prunes:
            return super()._step_once(metrics, timing_raw, sample_batch_size)
        batch = super()._step_once(metrics, timing_raw, len(self.groups))
        keys, tags = self.sampled.keys + batch.keys, self.sampled.tags + batch.tags
        rows = dict(zip(keys, tags, strict=True))
        return tq.KVBatchMeta([*rows], [*rows.values()], batch.partition_id)

    def _balance_batch(self, batch, metrics, **options):
        """What is kept of a batch with rewards, padded and balanced in each update. The field
        `dppo` has the weight and the denominator of every row."""
        if not self.prunes:
            return super()._balance_batch(batch, metrics, **options)
        kept, tokens = self.draw_completions(batch, metrics)
        self.sampled = batch
        self.parts = [part for part, _ in kept.values()]
        batch = super()._balance_batch(batch.select_keys(list(kept)), metrics, **options)  # pads
        updates, padding = [[] for _ in range(self.M)], []
        table = torch.zeros(len(batch), 2, dtype=torch.float64)  # padding keeps the weight 0
        for i, key in enumerate(batch.keys):
            if key in kept:
                part, table[i, 0] = kept[key]
                updates[part].append(i)
            else:
                padding.append(i)
        order = [[] for _ in range(self.ranks)]
        for part, rows in enumerate(updates):
            rows += [padding.pop() for _ in range(self.rows_per_update - len(rows))]
            table[rows, 1] = tokens[part]
            workload = calculate_workload(torch.tensor([batch.tags[i]["seq_len"] for i in rows]))
            shares = get_seqlen_balanced_partitions(workload, self.ranks, equal_size=True)
            for of_rank, share in zip(order, shares, strict=True):
                of_rank += [rows[i] for i in share]
        tq.kv_batch_put(batch.keys, batch.partition_id, TensorDict({"dppo": table}, len(batch)))
        batch.reorder([i for rows in order for i in rows])
        metrics["dppo/forwards"] = len(batch) / (self.Q * self.G)
        return batch

    def _get_required_batch_multiple(self, dp_size: int) -> int:
        """To how many rows verl pads: M updates of equal size on each rank."""
        if not self.prunes:
            return super()._get_required_batch_multiple(dp_size)
        self.ranks = dp_size
        largest = max(self.parts.count(part) for part in self.parts)  # rows of an update
        self.rows_per_update = dp_size * math.ceil(largest / dp_size)
        return self.M * self.rows_per_update

    def look_at(self, batch) -> torch.Tensor:
        """Advantages, rewards, tokens with loss, all tokens, and the energy of each row, [5, N].
        The advantages are verl's, of full groups."""
        fields, config = ["response_mask", "rm_scores", "rollout_log_probs"], self.config.algorithm
        data = tq.kv_batch_get(batch.keys, batch.partition_id, fields)
        nested, data = data["response_mask"], DataProto(batch=data.to_padded_tensor())
        scores, mask = data.batch["rm_scores"], data.batch["response_mask"].double()
        data.batch["token_level_scores"] = data.batch["token_level_rewards"] = scores
        data.non_tensor_batch["uid"] = np.array([x.rsplit("_", 2)[0] for x in batch.keys], object)
        options = {"norm_adv_by_std_in_grpo": config.norm_adv_by_std_in_grpo, "config": config}
        data = compute_advantage(data, batch.keys, config.adv_estimator, **options).batch
        fields = {x: response_to_nested(data[x], nested) for x in ("advantages", "returns")}
        self.advantages = TensorDict(fields, batch_size=len(batch))
        logprobs = data["rollout_log_probs"].double() if "rollout_log_probs" in data else None
        energy = dppo_shared.energy_of(logprobs, mask)
        tokens = mask.sum(dim=1)
        advantages = (data["advantages"] * mask).sum(dim=1) / tokens.clamp(min=1)
        cost = torch.tensor([tag["seq_len"] for tag in batch.tags]).double()
        return torch.stack([advantages, scores.sum(dim=1), tokens, cost, energy])

    def draw_completions(self, batch, metrics) -> tuple[dict, list[float]]:
        """({key: (update, weight)} of the rows that are kept, the denominator of each update). The
        prompt history learns from the rows."""
        K, G, actor = len(self.groups), self.G, self.actor
        number = {uid: k for k, uid in enumerate(self.groups)}
        names = [key.rsplit("_", 2) for key in batch.keys]  # verl's uid_session_output
        require(
            all(int(session) < G and int(output) == 0 for _, session, output in names),
            f"{PARTS}.rollout.n={G}, but the agent loop has made more rollouts of a prompt, or "
            "several outputs of one: change it to n rollouts of one output",
        )
        places = [number[uid] * G + int(session) for uid, session, _ in names]
        seen = torch.zeros(5, K * G, dtype=torch.float64)  # a failed rollout has no row: no tokens,
        seen[1] = torch.nan  # and no reward
        seen[:, places] = self.look_at(batch)
        advantages, rewards, tokens, cost, energy = seen.view(5, K, G)

        groups = torch.tensor([*self.groups.values()], dtype=torch.float64)  # [K, 2]
        update_of = groups[:, 0].long() // actor.ppo_mini_batch_size  # [K]
        prompt_weights = groups[:, 1:]  # [K, 1]
        by_length = actor.loss_agg_mode == "seq-mean-token-mean"
        beta = actor.use_kl_loss * actor.kl_loss_coef + abs(actor.entropy_coeff)
        beta += actor.policy_loss.dro_beta if actor.policy_loss.loss_mode == "dro" else 0.0
        size = dppo_shared.size_of(advantages, tokens, energy, by_length, beta)

        weights = torch.zeros(K, G, dtype=torch.float64)
        for part in update_of.unique().tolist():
            own = update_of == part  # [K]
            sizes = prompt_weights[own] * size[own]
            look = dppo.Completions(advantages[own], rewards[own], cost[own], sizes, self.args.rest)
            generator = dppo.generator_for(self.seed, "completions", self.global_steps, part)
            _keep, drawn = dppo.prune_completions(
                self.args.completion_rule, self.args.completion_prune_rate, look, generator
            )
            weights[own] = drawn * prompt_weights[own] * (cost[own] > 0)

        full = torch.zeros(self.M, dtype=torch.float64).index_add(0, update_of, tokens.sum(dim=1))
        if self.prunes_prompts:
            if self.mean_tokens is not None:  # known before the draw
                full[:] = self.mean_tokens / self.M
            w = prompt_weights[:, 0]  # [K]
            dppo_shared.learn(self, self.prompts, w, rewards, advantages, tokens)
            metrics["dppo/reward"] = dppo_shared.mean_reward(rewards, w, self.Q)
            metrics["dppo/kept_prompts"] = K / self.Q
        figures = dppo_shared.completion_figures(weights, prompt_weights, cost, self.Q * G)
        metrics |= {f"dppo/{name}": value for name, value in figures.items()}

        kept, flat = {}, weights.flatten().tolist()
        for key, place in zip(batch.keys, places, strict=True):
            if flat[place]:
                kept[key] = (update_of[place // G].item(), flat[place])
        if not kept:  # verl waits for an update: one row with weight 0
            kept = {batch.keys[0]: (0, 0.0)}
        return kept, full.clamp(min=1).tolist()

    def _compute_advantage(self, batch, metrics):
        """verl's, whose groups are no longer full, then the advantages of the full groups."""
        batch = super()._compute_advantage(batch, metrics)
        if self.prunes:
            tq.kv_batch_put(self.sampled.keys, batch.partition_id, fields=self.advantages)
        return batch

    # --------------------------------------------------------------------------------- checkpoints

    def _save_checkpoint(self):
        """dppo.pt, with the prompt history and the mean of tokens, then verl's checkpoint, which
        ends by naming itself the latest. Draws follow from the seed and the step."""
        if self.prunes_prompts:
            folder = Path(self.config.trainer.default_local_dir, f"global_step_{self.global_steps}")
            dppo_shared.save(folder, self)
        super()._save_checkpoint()

    def _load_checkpoint(self):
        """verl's, and dppo.pt."""
        super()._load_checkpoint()
        if not (self.prunes_prompts and self.global_steps):
            return
        options = self.config.trainer
        folder = Path(options.default_local_dir, f"global_step_{self.global_steps}")
        if options.resume_mode == "resume_path":
            folder = Path(options.resume_from_path)
        dppo_shared.load(folder, self, "data.train_files")
