"""
Unbiased pruning in verl: its synchronous trainer, with less work for the same expected gradient.

    VERL_USE_EXTERNAL_MODULES=dppo_verl python -m verl.trainer.main_ppo \
        trainer.v1.trainer_mode=nanodppo +trainer.v1.nanodppo.completion_rule=pps ...

verl still samples, rewards and computes the loss: its methods are wrapped, none of its code is
copied. Rules, draws and weights come from dppo.py and sampler.py.
    prompts      are dropped before rollout, from each batch of the dataloader
    completions  are dropped after reward and before log-probs. Every mini-batch (an update) holds
                 fixed prompts and has a draw of its own; what is kept is padded and balanced within
    weights      verl's loss depends on the parameters through log-probs and entropies. In the
                 training processes, f_i multiplies their gradient in row i, and thereby the row's
                 whole term: clip, KL loss, entropy bonus, masks, and rollout correction. f_i is
                 1 / P(kept). Advantages and denominators are those of the un-pruned batch
`check` refuses what such a factor cannot make exact. docs/verl.md has runs and explains the log.
verl's losses dppo_tv and dppo_kl are Divergence PPO (arXiv:2602.04879), another method.

Letters: Q prompts of a batch, K of them rolled out, G completions each, M mini-batches of a step,
n rows of a micro-batch, T tokens.
"""

import functools
import logging
import math
import os
from collections import Counter

import numpy as np
import torch
import transfer_queue as tq
import verl
from omegaconf import OmegaConf, open_dict
from tensordict import TensorDict
from verl.protocol import DataProto
from verl.trainer.ppo.v1.trainer_base import register_trainer
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.trainer.ppo.v1.utils import compute_advantage_for_multi_trajectories
from verl.utils import tensordict_utils as tu
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.seqlen_balancing import calculate_workload, get_seqlen_balanced_partitions
from verl.workers.utils.losses import ppo_loss
from verl.workers.utils.padding import response_to_nested

import dppo
import sampler
from dppo import RuleError

VERL = "0.9.1"  # the version whose methods are wrapped
DEFAULTS = {
    "completion_rule": "pps", "completion_prune_rate": 0.7,
    "prompt_rule": "none", "prompt_prune_rate": 0.3,
}  # fmt: skip
LOSSES = ("vanilla", "gspo", "sapo", "gpg", "cispo", "dro", "dppo_tv", "dppo_kl")
MEANS = ("seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
ESTIMATORS = ("grpo", "rloo")  # one number for each completion, from its own group
ROWS, BATCH = "it compares rows, or divides by those present", "pruning would need the whole batch"
UNTRIED, OFF = "pruning was never tried with it", (None, False)
ACTOR, CORRECTION = "actor_rollout_ref.actor", "algorithm.rollout_correction"
EXACT = {  # option: (values with which a row's term does not depend on what is kept, else why not)
    f"{ACTOR}.policy_loss.loss_mode": (LOSSES, ROWS),
    f"{ACTOR}.loss_agg_mode": (("token-mean", "token-sum", *MEANS), ROWS),
    "algorithm.adv_estimator": (ESTIMATORS, "advantages would need more than their own group"),
    "algorithm.use_kl_in_reward": (OFF, BATCH),
    "algorithm.filter_groups.enable": (OFF, "the groups that replace others have no weights"),
    "trainer.v1.sampler.sync_refill_failed_groups": (OFF, "the new groups have no weights"),
    "trainer.v1.sampler.custom_sampler.path": ((None,), "it may choose groups by itself"),
    f"{CORRECTION}.rollout_rs": ((None,), "what it rejects changes the count of tokens"),
    f"{CORRECTION}.rollout_is_batch_normalize": (OFF, ROWS),
    f"{CORRECTION}.bypass_mode": (OFF, ROWS),
    f"{ACTOR}.ppo_epochs": ((1,), "a later epoch would start from parameters that know the draw"),
    f"{ACTOR}.strategy": (("fsdp", "fsdp2"), UNTRIED),
    f"{ACTOR}.ulysses_sequence_parallel_size": ((1,), UNTRIED),
    f"{ACTOR}.use_prefix_grouper": (OFF, UNTRIED),
    "actor_rollout_ref.hybrid_engine": ((True,), "a draw must belong to one update"),
    "actor_rollout_ref.model.mtp.enable": (OFF, UNTRIED),
    "actor_rollout_ref.model.override_config.output_router_logits": (
        OFF, "the router's loss would depend on what is kept"
    ),
    "critic.enable": (OFF, UNTRIED),
    "distillation.enabled": (OFF, UNTRIED),
    "skip.rollout_tq.enable": (OFF, "stored rollouts do not know which prompts are kept"),
}  # fmt: skip
MEMORY = 8  # batches that the mean of their tokens remembers


def pruned_loss(config, model_output: dict, data: TensorDict, dp_group=None):
    """verl's ppo_loss of a micro-batch in a training process, with the gradient of row i times f_i
    and the un-pruned mini-batch's tokens as denominator: both are in data["dppo"], [n, 2]."""
    table = data["dppo"]
    factor, tokens = (table.values() if table.is_nested else table).view(-1, 2).unbind(dim=1)
    factor = factor.repeat_interleave(data["input_ids"].offsets().diff())  # of each token
    output = dict(model_output)
    for name in {"log_probs", "entropy"} & output.keys():
        flat = output[name].values() if output[name].is_nested else output[name]
        if flat.requires_grad:
            flat.register_hook(lambda gradient: gradient * factor.to(gradient))
        output[name] = flat
    tu.assign_non_tensor(data, batch_num_tokens=tokens[0].item())
    return ppo_loss(config, output, data, dp_group)


@register_trainer("nanodppo")
class DPPOTrainer(PPOTrainerSync):
    """verl's synchronous trainer with a rule that drops completions and one that drops prompts.
    Their options are in trainer.v1.nanodppo. If both are "none", it is PPOTrainerSync."""

    def __init__(self, config):
        options = OmegaConf.select(config, "trainer.v1.nanodppo") or {}
        for name in options:
            dppo.check_known("option of trainer.v1.nanodppo", name, DEFAULTS)
        vars(self).update(DEFAULTS | dict(options))
        self.prunes_prompts = self.prompt_rule != "none"
        self.prunes = self.prunes_prompts or self.completion_rule != "none"
        check(config, self)
        with open_dict(config):
            config.trainer.v1.trainer_mode = "sync"  # verl compares this name in seven places
        super().__init__(config)
        self.actor, self.Q = config.actor_rollout_ref.actor, config.data.train_batch_size
        self.M, self.G = (
            self.Q // self.actor.ppo_mini_batch_size,
            config.actor_rollout_ref.rollout.n,
        )
        self.seed, self.mean_tokens = config.data.get("seed") or 0, None

    def _setup(self):
        """verl's, and the loss of the training processes."""
        super()._setup()
        if not self.prunes:
            return
        actor, workers = omega_conf_to_dataclass(self.actor), self.actor_rollout_wg
        workers.set_loss_fn(functools.partial(pruned_loss, actor))
        send = workers.update_actor

        def update_actor(batch):
            batch.extra_info["mini_batch_size"] = self.rows_per_update  # verl's is un-pruned
            return send(batch)

        workers.update_actor = update_actor

    # ------------------------------------------------------------------------------------- prompts

    def _init_dataloader(self):
        """verl's, and the history of its prompts."""
        super()._init_dataloader()
        if not self.prunes_prompts:
            return
        rows = [self.train_dataset[i] for i in range(len(self.train_dataset))]
        prompts = [row["raw_prompt"] for row in rows]
        self.index = {dppo.seed_for(prompt): i for i, prompt in enumerate(prompts)}
        if twins := len(rows) - len(self.index):
            raise RuleError(
                f"data.train_files: {twins} of {len(rows)} prompts occur twice, and prompt_rule="
                f"{self.prompt_rule} remembers each by its text; remove them, or set it to none"
            )
        lengths = torch.tensor([len(str(prompt)) for prompt in prompts])  # characters
        sources = [str(row.get("data_source", "")) for row in rows]
        self.history = sampler.PromptHistory(lengths, sources, self.Q)

    def _next_train_batch(self, num_prompts=None) -> TensorDict:
        """verl's Q prompts, or K of them; `groups` {uid: (place among the Q, weight)}."""
        batch = super()._next_train_batch(num_prompts)
        keep, weights = torch.ones(self.Q, dtype=torch.bool), torch.ones(self.Q).double()
        if self.prunes_prompts:
            prompts = torch.tensor([self.index[dppo.seed_for(x)] for x in batch["raw_prompt"]])
            rule, rate = self.prompt_rule, self.prompt_prune_rate
            if self.actor.loss_agg_mode == "token-mean" and self.mean_tokens is None:
                rule = "none"  # the first batch is whole, and gives the denominator
            if sampler.PROMPT_RULES[rule].priority:  # at least one prompt for each update
                rate = min(rate, 1.0 - self.M / self.Q)
            step = self.global_steps
            generator = dppo.generator_for(self.seed, "prompts", step)
            keep, weights = self.history.prune(rule, rate, prompts, generator, step, self.M)
            self.prompts = prompts[keep]  # [K]
        places = keep.nonzero().flatten()
        uids = list(batch["uid"])
        self.groups = {uids[q]: (q, weights[q].item()) for q in places.tolist()}
        return tu.index_select_tensor_dict(batch, places) if self.prunes_prompts else batch

    def _step_once(self, metrics, timing_raw, sample_batch_size):
        """verl's step on what is kept. Returns all rows, whose metrics verl logs and which it then
        clears from the queue."""
        if not self.prunes:
            return super()._step_once(metrics, timing_raw, sample_batch_size)
        batch = super()._step_once(metrics, timing_raw, len(self.groups))
        padding = [i for i, tag in enumerate(batch.tags) if tag.get("is_padding")]
        return tq.KVBatchMeta(
            keys=self.sampled.keys + [batch.keys[i] for i in padding],
            tags=self.sampled.tags + [batch.tags[i] for i in padding],
            partition_id=batch.partition_id,
        )

    # --------------------------------------------------------------------------------- completions

    def _balance_batch(self, batch, metrics, **options):
        """The rows that are kept of a batch with rewards, padded and balanced in each mini-batch,
        with f and the denominator of each row in the field `dppo`."""
        if not self.prunes:
            return super()._balance_batch(batch, metrics, **options)
        self.sampled = batch
        kept, tokens = self.draw_completions(batch, metrics)
        self.counts = Counter(part for part, _ in kept.values())
        batch = super()._balance_batch(batch.select_keys(list(kept)), metrics, **options)  # pads
        rows, padding = [[] for _ in range(self.M)], []
        for i, key in enumerate(batch.keys):
            (rows[kept[key][0]] if key in kept else padding).append(i)
        shares = []  # [M][ranks][rows]
        for part in rows:
            part += [padding.pop() for _ in range(self.rows_per_update - len(part))]
            length = torch.tensor([batch.tags[i]["seq_len"] for i in part])
            split = get_seqlen_balanced_partitions(calculate_workload(length), self.ranks, True)
            shares.append([[part[i] for i in of_rank] for of_rank in split])
        place = {i: part for part, split in enumerate(shares) for i in sum(split, [])}
        order = [i for rank in range(self.ranks) for split in shares for i in split[rank]]
        table = [[kept.get(batch.keys[i], (0, 0.0))[1], tokens[place[i]]] for i in order]
        batch.reorder(order)
        fields = TensorDict({"dppo": torch.tensor(table, dtype=torch.float64)}, len(batch))
        tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=fields)
        metrics["dppo/forwards"] = len(batch) / (self.Q * self.G)
        return batch

    def _get_required_batch_multiple(self, dp_size: int) -> int:
        """To how many rows verl pads: M updates of equal size."""
        if not self.prunes:
            return super()._get_required_batch_multiple(dp_size)
        parts, unit = self.config.actor_rollout_ref, dp_size
        if not self.actor.use_dynamic_bsz:
            sizes = [self.actor.ppo_micro_batch_size_per_gpu]
            sizes += [parts.rollout.log_prob_micro_batch_size_per_gpu]
            if self.use_reference_policy and not parts.ref.log_prob_use_dynamic_bsz:
                sizes += [parts.ref.log_prob_micro_batch_size_per_gpu]
            unit *= math.lcm(*sizes)
        self.ranks, self.rows_per_update = dp_size, -(-max(self.counts.values()) // unit) * unit
        return self.M * self.rows_per_update

    def look_at(self, batch) -> dict[str, torch.Tensor]:
        """What the rules look at, of each row: [N]. The advantages are verl's, of full groups."""
        fields = ["response_mask", "rm_scores", "rollout_log_probs"]
        data = tq.kv_batch_get(batch.keys, batch.partition_id, fields)
        nested, algorithm = data["response_mask"], self.config.algorithm
        data = DataProto(batch=data.to_padded_tensor())
        scores, mask = data.batch["rm_scores"], data.batch["response_mask"].double()
        data.batch["token_level_scores"] = data.batch["token_level_rewards"] = scores
        uids = [key.rsplit("_", 2)[0] for key in batch.keys]
        data.non_tensor_batch["uid"] = np.array(uids, dtype=object)
        data = compute_advantage_for_multi_trajectories(
            data, batch_keys=batch.keys, adv_estimator=algorithm.adv_estimator,
            gamma=algorithm.gamma, lam=algorithm.lam, num_repeat=self.G,
            norm_adv_by_std_in_grpo=algorithm.get("norm_adv_by_std_in_grpo", True),
            config=algorithm,
        ).batch  # fmt: skip
        fields = {x: response_to_nested(data[x], nested) for x in ("advantages", "returns")}
        self.advantages = TensorDict(fields, batch_size=len(batch))
        tokens, energy = mask.sum(dim=1), mask
        if "rollout_log_probs" in data:  # else as if all tokens were equally surprising
            energy = dppo.energy_bound(data["rollout_log_probs"].double()) * mask
        return {
            "advantages": (data["advantages"] * mask).sum(dim=1) / tokens.clamp(min=1),
            "rewards": scores.double().sum(dim=1),
            "cost": torch.tensor([tag["seq_len"] for tag in batch.tags]).double(),
            "tokens": tokens,
            "energy": energy.sum(dim=1),
        }

    def draw_completions(self, batch, metrics) -> tuple[dict, list[float]]:
        """({key: (mini-batch, f)} of the rows that are kept, tokens of each un-pruned mini-batch).
        The prompt history learns from the rows."""
        K, G, row = len(self.groups), self.G, {uid: r for r, uid in enumerate(self.groups)}
        places = []
        for uid, session, output in (key.rsplit("_", 2) for key in batch.keys):
            if int(session) >= G or int(output):
                raise RuleError(
                    f"rollout {session}, output {output} of a prompt: pruning needs one output of "
                    f"each of rollout.n={G} rollouts; change the agent loop, or set both rules to "
                    "none"
                )
            places.append(row[uid] * G + int(session))
        seen = {}
        for name, values in self.look_at(batch).items():  # [K, G]; a failed rollout has no row
            table = torch.full((K * G,), math.nan if name == "rewards" else 0.0).double()
            table[places] = values.double()
            seen[name] = table.view(K, G)
        q, prompt_weights = torch.tensor(list(self.groups.values())).double().T
        prompt_weights = prompt_weights[:, None]  # [K, 1]
        tokens, cost, energy = (seen.pop(name) for name in ("tokens", "cost", "energy"))
        scale = (tokens > 0).double()  # of a token's loss, up to a constant
        actor, loss = self.actor, self.actor.policy_loss
        if "seq-mean-token-mean" == actor.loss_agg_mode or loss.loss_mode == "sapo":
            scale /= tokens.clamp(min=1)
        beta = actor.use_kl_loss * actor.kl_loss_coef + abs(actor.entropy_coeff)
        beta += loss.dro_beta if loss.loss_mode == "dro" else 0.0
        size = dppo.contribution_size(seen["advantages"], scale, energy, beta)
        weights, part_of = torch.zeros(K, G).double(), q.long() // actor.ppo_mini_batch_size
        for part in part_of.unique().tolist():  # an update: a draw of its own
            of = part_of == part
            rows = [x[of] for x in (*seen.values(), cost, prompt_weights * size)]
            generator = dppo.generator_for(self.seed, "completions", self.global_steps, part)
            rule, rate = self.completion_rule, self.completion_prune_rate
            drawn = dppo.prune_completions(rule, rate, dppo.Completions(*rows), generator)
            weights[of] = drawn[1] * prompt_weights[of]
        denominators = torch.zeros(self.M).double().index_add(0, part_of, tokens.sum(dim=1))
        if self.prunes_prompts:
            estimate = (prompt_weights * tokens).sum().item()
            if self.mean_tokens is not None:  # known before the draw, unlike the estimate
                denominators[:] = self.mean_tokens / self.M
            mean = self.mean_tokens or estimate
            self.mean_tokens = mean + (estimate - mean) / MEMORY or None  # 0 is not known
            squares = size.square().sum(dim=1)
            lesson = (seen["rewards"], seen["advantages"], squares, tokens.sum(dim=1))
            self.history.update(self.global_steps, self.prompts, prompt_weights[:, 0], *lesson)
            reward = (prompt_weights[:, 0] * seen["rewards"].nanmean(dim=1)).nansum() / self.Q
            metrics |= {"dppo/reward": reward.item(), "dppo/kept_prompts": K / self.Q}
        live, kept = weights[size > 0], (weights > 0) & (cost > 0)
        metrics["dppo/kept_completions"] = kept.sum().item() / (self.Q * G)
        metrics["dppo/kept_tokens"] = ((cost * kept).sum() / (prompt_weights * cost).sum()).item()
        metrics["dppo/weight_max"] = weights.max().item()
        metrics["dppo/effective_sample_size"] = (live.sum() ** 2 / live.square().sum()).item()
        chosen = {
            key: (part_of[place // G].item(), weights.flatten()[place].item())
            for key, place in zip(batch.keys, places, strict=True)
            if kept.flatten()[place]
        }
        shortest = min(zip(batch.tags, batch.keys, strict=True), key=lambda x: x[0]["seq_len"])[1]
        return chosen or {shortest: (0, 0.0)}, denominators.clamp(min=1).tolist()

    def _compute_advantage(self, batch, metrics):
        """verl's, whose groups are no longer full; then those of the full groups."""
        batch = super()._compute_advantage(batch, metrics)
        if self.prunes:
            sampled = self.sampled
            tq.kv_batch_put(sampled.keys, sampled.partition_id, fields=self.advantages)
        return batch

    # --------------------------------------------------------------------------------- checkpoints

    def _save_checkpoint(self):
        """In dppo.pt the prompt history and the mean of tokens. Then verl's checkpoint, which names
        itself the latest when it is complete. Draws follow from the seed and the step."""
        if self.prunes_prompts:
            path = os.path.join(
                self.config.trainer.default_local_dir, f"global_step_{self.global_steps}"
            )
            os.makedirs(path, exist_ok=True)
            state = {"prompts": dppo.seed_for(*self.index), "history": vars(self.history)}
            torch.save(state | {"mean_tokens": self.mean_tokens}, os.path.join(path, "dppo.pt"))
        super()._save_checkpoint()

    def _load_checkpoint(self):
        """verl's, and dppo.pt if there is one: a run of verl's own trainer can go on as DPPO."""
        super()._load_checkpoint()
        trainer = self.config.trainer
        path = os.path.join(trainer.default_local_dir, f"global_step_{self.global_steps}")
        if trainer.resume_mode == "resume_path":
            path = trainer.resume_from_path
        path = os.path.join(path, "dppo.pt")
        if not (self.prunes_prompts and self.global_steps and os.path.exists(path)):
            return
        state = torch.load(path, weights_only=True)
        if state["prompts"] != dppo.seed_for(*self.index):
            raise RuleError(
                f"{path}: its history is of other prompts; resume with the data.train_files of "
                "that run, or delete the file to forget them"
            )
        vars(self.history).update(state["history"])
        self.mean_tokens = state["mean_tokens"]


def check(config, rules) -> None:
    """RuleError, with the option and the way out, for what would not be exact."""
    tables = {"completion_rule": dppo.COMPLETION_RULES, "prompt_rule": sampler.PROMPT_RULES}
    for name, table in tables.items():
        unbiased = [rule for rule, entry in table.items() if not entry.biased]
        dppo.check_known(name, getattr(rules, name), unbiased)
    for name in ("completion_prune_rate", "prompt_prune_rate"):
        if not 0 <= getattr(rules, name) < 1:
            raise RuleError(f"{name}={getattr(rules, name)}: choose a rate from 0 to below 1")
    if not rules.prunes:
        return
    for option, (values, reason) in EXACT.items():
        value = OmegaConf.select(config, option)
        if value not in values:
            choice = " or ".join("null" if x is None else str(x) for x in values)
            raise RuleError(
                f"{option}={value} with trainer_mode=nanodppo: {reason}; set it to {choice}, or both "
                "rules to none"
            )
    actor, Q = config.actor_rollout_ref.actor, config.data.train_batch_size
    one = actor.ppo_mini_batch_size
    problems = {
        f"verl {verl.__version__}: only the methods of {VERL} are known here; pip install "
        f"verl=={VERL}": verl.__version__ != VERL,
        f"{ACTOR}.loss_scale_factor=null with loss_agg_mode={actor.loss_agg_mode}: verl would divide "
        "by the longest row that is kept; set it to data.max_response_length":
        actor.loss_agg_mode == "seq-mean-token-sum-norm" and actor.loss_scale_factor is None,
        f"{ACTOR}.ppo_mini_batch_size={one} with data.train_batch_size={Q}: an update would be cut "
        "short; let one divide the other": Q % one,
        f"{ACTOR}.shuffle=True: rows would move to updates that did not draw them; set it to False "
        f"or ppo_mini_batch_size to {Q}": actor.shuffle and one < Q,
    }  # fmt: skip
    for sentence, wrong in problems.items():
        if wrong:
            raise RuleError(sentence)
    if config.data.get("seed") is None:
        logging.getLogger(__name__).warning(
            "data.seed=null: the draws of pruning use seed 0, and verl's own order of prompts cannot "
            "be repeated; set data.seed to a number"
        )
