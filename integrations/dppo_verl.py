"""
Unbiased pruning in verl: its synchronous trainer, with less work for the same expected gradient.

    VERL_USE_EXTERNAL_MODULES=dppo_verl python -m verl.trainer.main_ppo \
        trainer.v1.trainer_mode=nanodppo +trainer.v1.nanodppo.completion_rule=pps ...

verl's methods are wrapped, none of its code is copied; rules, draws and weights are dppo.py's.
    prompts      are dropped before rollout, from each batch of the dataloader
    completions  are dropped after reward and before log-probs. An update (a mini-batch) holds the
                 completions of fixed prompts, and is drawn, padded and balanced by itself
    weights      verl's loss depends on the parameters through log-probs and entropies alone. In the
                 training processes their gradient in row i is multiplied by f_i = 1 / P(kept), and
                 thereby the row's whole term: clip, KL, entropy bonus, masks, rollout correction.
                 Advantages and denominators are those of the un-pruned batch
`check` refuses what such a factor cannot make exact. docs/verl.md has runs and explains the log.
verl's own losses dppo_tv and dppo_kl are Divergence PPO (arXiv:2602.04879), another method.

Letters: Q prompts of a batch, K of them rolled out, G completions each, N = K x G rows; M updates.
"""

import functools
import math
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
import sampler

VERL = "0.9.1"  # the version whose methods are wrapped
DEFAULTS = {
    "completion_rule": "pps", "completion_prune_rate": 0.7,
    "prompt_rule": "none", "prompt_prune_rate": 0.3,
}  # fmt: skip
LOSSES = ("vanilla", "gspo", "sapo", "gpg", "cispo", "dro", "dppo_tv", "dppo_kl")
MEANS = ("seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
MODES, PARTS = ("token-mean", "token-sum", *MEANS), "actor_rollout_ref"
EXACT = [  # (values with which a row's term does not depend on what else is kept, their options)
    (LOSSES, ["actor.policy_loss.loss_mode"]),
    (MODES, ["actor.loss_agg_mode"]),
    (("grpo", "rloo"), ["algorithm.adv_estimator"]),
    (("fsdp", "fsdp2"), ["actor.strategy"]),
    ((1,), ["actor.ppo_epochs", "actor.ulysses_sequence_parallel_size",
            "actor.fsdp_config.ulysses_sequence_parallel_size"]),
    ((None, False), [
        "actor.shuffle", "actor.use_prefix_grouper", "critic.enable", "distillation.enabled",
        "model.mtp.enable", "model.override_config.output_router_logits", "skip.rollout_tq.enable",
        "algorithm.rollout_correction.bypass_mode", "algorithm.rollout_correction.rollout_rs",
        "algorithm.rollout_correction.rollout_is_batch_normalize", "algorithm.use_kl_in_reward",
        "algorithm.filter_groups.enable", "trainer.v1.sampler.sync_refill_failed_groups",
        "trainer.v1.sampler.custom_sampler.path"]),
    ((True,), ["hybrid_engine"]),
]  # fmt: skip
MEMORY = 8  # batches that the mean of their tokens remembers


def check(config, rules) -> None:
    """RuleError, with the option and the way out, for what would not be exact."""
    tables = {"completion_rule": dppo.COMPLETION_RULES, "prompt_rule": sampler.PROMPT_RULES}
    for name, table in tables.items():
        unbiased = [rule for rule, entry in table.items() if not entry.biased]
        dppo.check_known(name, getattr(rules, name), unbiased)
    for name in ("completion_prune_rate", "prompt_prune_rate"):
        if not 0 <= getattr(rules, name) < 1:
            raise dppo.RuleError(f"{name}={getattr(rules, name)}: choose a rate from 0 to below 1")
    if not rules.prunes:
        return
    actor, Q, problems = config[PARTS].actor, config.data.train_batch_size, {}
    one, norm = actor.ppo_mini_batch_size, actor.loss_agg_mode == MEANS[2]
    for values, names in EXACT:
        choice = " or ".join("null" if x is None else str(x) for x in values)
        way_out = f"not exact or never tried with pruning; set it to {choice}"
        for name in names:
            option = f"{PARTS}.{name}" if name.split(".")[0] in config[PARTS] else name
            value = OmegaConf.select(config, option)
            problems[f"{option}={value}: {way_out}"] = value not in values
    problems |= {
        f"verl {verl.__version__}: only the methods of {VERL} are known here; pip install "
        f"verl=={VERL}": verl.__version__ != VERL,
        f"{PARTS}.actor.loss_scale_factor=null: verl would divide by the longest row that is kept; "
        "set it to data.max_response_length": norm and actor.loss_scale_factor is None,
        f"{PARTS}.actor.ppo_mini_batch_size={one} does not divide data.train_batch_size={Q}: an "
        "update would be cut short; choose a divisor": Q % one,
    }
    for sentence, wrong in problems.items():
        if wrong:
            raise dppo.RuleError(f"{sentence}, or both rules of trainer.v1.nanodppo to none")
    if config.data.get("seed") is None:
        print("data.seed=null: draws use seed 0, but verl's order of prompts cannot be repeated")


def pruned_loss(config, model_output: dict, data: TensorDict, dp_group=None):
    """verl's ppo_loss of a micro-batch in a training process, with the gradient of row i times f_i
    and the tokens of the un-pruned mini-batch as denominator: both are in data["dppo"], [n, 2]."""
    table = data["dppo"].values() if data["dppo"].is_nested else data["dppo"]
    factor, tokens = table.view(-1, 2).T
    factor = factor.repeat_interleave(data["input_ids"].offsets().diff())  # of each token
    output = dict(model_output)
    for name in {"log_probs", "entropy"} & output.keys():
        flat = output[name] = output[name].values() if output[name].is_nested else output[name]
        if flat.requires_grad:
            flat.register_hook(lambda gradient: gradient * factor.to(gradient))
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
        vars(self).update(DEFAULTS | options)
        self.prunes_prompts = self.prompt_rule != "none"
        self.prunes = self.prunes_prompts or self.completion_rule != "none"
        check(config, self)
        if not self.prunes:
            self.__class__ = PPOTrainerSync  # without the methods below
        self.actor, self.G = config[PARTS].actor, config[PARTS].rollout.n
        self.Q, self.seed = config.data.train_batch_size, config.data.get("seed") or 0
        self.M, self.mean_tokens = self.Q // self.actor.ppo_mini_batch_size, None
        with open_dict(config):
            config.trainer.v1.trainer_mode = "sync"  # verl compares this name in seven places
        PPOTrainerSync.__init__(self, config)

    def _setup(self):
        """verl's. The training processes get the pruned loss, and mini-batches of what is kept."""
        super()._setup()
        workers, actor = self.actor_rollout_wg, omega_conf_to_dataclass(self.actor)
        workers.set_loss_fn(functools.partial(pruned_loss, actor))
        workers.update_actor = functools.partial(self.send, workers.update_actor)

    def send(self, update_actor, batch):
        batch.extra_info["mini_batch_size"] = self.rows_per_update  # verl's is un-pruned
        return update_actor(batch)

    def _init_dataloader(self):
        """verl's, and the history of its prompts."""
        super()._init_dataloader()
        if not self.prunes_prompts:
            return
        data = [self.train_dataset[i] for i in range(len(self.train_dataset))]
        self.index = {dppo.seed_for(row["raw_prompt"]): i for i, row in enumerate(data)}
        if twins := len(data) - len(self.index):
            raise dppo.RuleError(
                f"data.train_files: {twins} of {len(data)} prompts repeat others, but prompt_rule="
                f"{self.prompt_rule} knows a prompt by its text; remove them, or set it to none"
            )
        lengths = torch.tensor([len(str(row["raw_prompt"])) for row in data])  # characters
        sources = [str(row.get("data_source")) for row in data]
        self.history = sampler.PromptHistory(lengths, sources, self.Q)

    def _next_train_batch(self, num_prompts=None) -> TensorDict:
        """verl's next Q prompts, or K of them. `groups` is {uid: (place among the Q, weight)}."""
        batch = super()._next_train_batch(num_prompts)
        uids, step = list(batch["uid"]), self.global_steps
        self.groups = {uid: (q, 1.0) for q, uid in enumerate(uids)}
        if not self.prunes_prompts:
            return batch
        prompts = torch.tensor([self.index[dppo.seed_for(x)] for x in batch["raw_prompt"]])
        rule, rate = self.prompt_rule, self.prompt_prune_rate
        if sampler.PROMPT_RULES[rule].priority:  # it keeps a number: at least one for each update
            rate = min(rate, 1.0 - self.M / self.Q)
        if self.actor.loss_agg_mode == "token-mean" and self.mean_tokens is None:
            rule = "none"  # the first batch is whole, and gives the denominator
        generator = dppo.generator_for(self.seed, "prompts", step)
        keep, weights = self.history.prune(rule, rate, prompts, generator, step, self.M)
        self.prompts, places = prompts[keep], keep.nonzero().flatten()  # [K]
        self.groups = {uids[q]: (q, weights[q].item()) for q in places.tolist()}
        return tu.index_select_tensor_dict(batch, places)

    def _step_once(self, metrics, timing_raw, sample_batch_size):
        """verl's step. Returns all rows: verl logs their figures and clears them from its queue."""
        batch = super()._step_once(metrics, timing_raw, len(self.groups))
        keys, tags = self.sampled.keys + batch.keys, self.sampled.tags + batch.tags
        rows = dict(zip(keys, tags, strict=True))
        return tq.KVBatchMeta([*rows], [*rows.values()], batch.partition_id)

    def _balance_batch(self, batch, metrics, **options):
        """What is kept of a batch with rewards, padded and balanced in each update. The field
        `dppo` has f and the denominator of every row."""
        kept, tokens = self.draw_completions(batch, metrics)
        self.sampled, self.parts = batch, [part for part, _ in kept.values()]
        batch = super()._balance_batch(batch.select_keys(list(kept)), metrics, **options)  # pads
        updates, padding = [[] for _ in range(self.M)], []
        table = torch.zeros(len(batch), 2, dtype=torch.float64)  # padding keeps f = 0
        for i, key in enumerate(batch.keys):
            part, table[i, 0] = kept.get(key, (None, 0.0))
            (padding if part is None else updates[part]).append(i)
        order = [[] for _ in range(self.ranks)]
        for part, rows in enumerate(updates):
            rows += [padding.pop() for _ in range(self.rows_per_update - len(rows))]
            table[rows, 1] = tokens[part]
            workload = calculate_workload(torch.tensor([batch.tags[i]["seq_len"] for i in rows]))
            shares = get_seqlen_balanced_partitions(workload, self.ranks, equal_size=True)
            order = [o + [rows[i] for i in share] for o, share in zip(order, shares, strict=True)]
        tq.kv_batch_put(batch.keys, batch.partition_id, TensorDict({"dppo": table}, len(batch)))
        batch.reorder([i for rows in order for i in rows])
        metrics["dppo/forwards"] = len(batch) / (self.Q * self.G)
        return batch

    def _get_required_batch_multiple(self, dp_size: int) -> int:
        """To how many rows verl pads: M updates of equal size, whole micro-batches on each rank."""
        of, sizes = "log_prob_micro_batch_size_per_gpu", [1]
        if not self.actor.use_dynamic_bsz:
            sizes += [self.actor.ppo_micro_batch_size_per_gpu, self.config[PARTS].rollout[of]]
        if self.use_reference_policy and not self.config[PARTS].ref.log_prob_use_dynamic_bsz:
            sizes += [self.config[PARTS].ref[of]]
        self.ranks, unit = dp_size, dp_size * math.lcm(*sizes)
        self.rows_per_update = unit * math.ceil(max(map(self.parts.count, set(self.parts))) / unit)
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
        tokens, energy = mask.sum(dim=1), mask
        if "rollout_log_probs" in data:  # else as if all tokens were equally surprising
            energy = dppo.energy_bound(data["rollout_log_probs"].double()) * mask
        advantages = (data["advantages"] * mask).sum(dim=1) / tokens.clamp(min=1)
        cost = torch.tensor([tag["seq_len"] for tag in batch.tags]).double()
        return torch.stack([advantages, scores.sum(dim=1), tokens, cost, energy.sum(dim=1)])

    def draw_completions(self, batch, metrics) -> tuple[dict, list[float]]:
        """({key: (update, f)} of the rows that are kept, the denominator of each update). The
        prompt history learns from the rows."""
        K, G, actor = len(self.groups), self.G, self.actor
        number = {uid: k for k, uid in enumerate(self.groups)}
        names = [key.rsplit("_", 2) for key in batch.keys]
        places = [number[uid] * G + int(session) for uid, session, _ in names]
        if any(int(session) >= G or int(output) for _, session, output in names):
            raise dppo.RuleError(
                f"{PARTS}.rollout.n={G}, but the agent loop has made more rollouts of a prompt, or "
                "several outputs of one: change it to n rollouts of one output"
            )
        seen = torch.zeros(5, K * G, dtype=torch.float64)  # a failed rollout has no row: no tokens,
        seen[1] = torch.nan  # and no reward
        seen[:, places] = self.look_at(batch)
        advantages, rewards, tokens, cost, energy = seen.view(5, K, G)
        groups = torch.tensor([*self.groups.values()], dtype=torch.float64)  # [K, 2]
        update_of, prompt_weights = groups[:, 0].long() // actor.ppo_mini_batch_size, groups[:, 1:]
        scale = (tokens > 0).double()  # of a token's loss, up to a constant
        if actor.loss_agg_mode == MEANS[1] or actor.policy_loss.loss_mode == "sapo":
            scale /= tokens.clamp(min=1)
        beta = actor.use_kl_loss * actor.kl_loss_coef + abs(actor.entropy_coeff)
        beta += actor.policy_loss.dro_beta if actor.policy_loss.loss_mode == "dro" else 0.0
        size = dppo.contribution_size(advantages, scale, energy, beta)
        weights = torch.zeros(K, G, dtype=torch.float64)
        for part in update_of.unique().tolist():
            of = update_of == part
            look = (advantages[of], rewards[of], cost[of], prompt_weights[of] * size[of])
            generator = dppo.generator_for(self.seed, "completions", self.global_steps, part)
            rule = (self.completion_rule, self.completion_prune_rate)
            _, drawn = dppo.prune_completions(*rule, dppo.Completions(*look), generator)
            weights[of] = drawn * prompt_weights[of] * (cost[of] > 0)
        full = torch.zeros(self.M, dtype=torch.float64).index_add(0, update_of, tokens.sum(dim=1))
        if self.prunes_prompts:
            if self.mean_tokens is not None:  # known before the draw, unlike the estimate below
                full[:] = self.mean_tokens / self.M
            self.learn(metrics, prompt_weights[:, 0], rewards, advantages, size, tokens)
        live, f = weights[size > 0], weights.flatten().tolist()
        metrics |= {
            "dppo/kept_completions": (weights > 0).sum().item() / (self.Q * G),
            "dppo/kept_tokens": (cost[weights > 0].sum() / (prompt_weights * cost).sum()).item(),
            "dppo/weight_max": weights.max().item(),
            "dppo/effective_sample_size": (live.sum() ** 2 / live.square().sum()).item(),
        }
        rows = zip(batch.keys, places, strict=True)
        kept = {key: (update_of[p // G].item(), f[p]) for key, p in rows if f[p]}
        return kept or {batch.keys[0]: (0, 0.0)}, full.clamp(min=1).tolist()

    def learn(self, metrics, weights, rewards, advantages, size, tokens) -> None:
        """Teaches the prompt history and the mean of tokens; weights are [K], others [K, G]."""
        seen = (rewards, advantages, size.square().sum(dim=1), tokens.sum(dim=1))
        self.history.update(self.global_steps, self.prompts, weights, *seen)
        estimate = (weights * tokens.sum(dim=1)).sum().item()
        mean = self.mean_tokens or estimate  # below, 0 is not known: the next batch is whole, too
        self.mean_tokens = mean + (estimate - mean) / MEMORY or None
        metrics["dppo/reward"] = ((weights * rewards.nanmean(dim=1)).nansum() / self.Q).item()
        metrics["dppo/kept_prompts"] = len(weights) / self.Q

    def _compute_advantage(self, batch, metrics):
        """verl's, whose groups are no longer full, then the advantages of the full groups."""
        batch = super()._compute_advantage(batch, metrics)
        tq.kv_batch_put(self.sampled.keys, batch.partition_id, fields=self.advantages)
        return batch

    def _save_checkpoint(self):
        """dppo.pt, with the prompt history and the mean of tokens, then verl's checkpoint, which
        ends by naming itself the latest. Draws follow from the seed and the step."""
        if self.prunes_prompts:
            folder = Path(self.config.trainer.default_local_dir, f"global_step_{self.global_steps}")
            folder.mkdir(parents=True, exist_ok=True)
            state = {"prompts": dppo.seed_for(*self.index), "history": vars(self.history)}
            torch.save(state | {"mean_tokens": self.mean_tokens}, folder / "dppo.pt")
        super()._save_checkpoint()

    def _load_checkpoint(self):
        """verl's, and dppo.pt if there is one: a run of verl's own trainer can go on as DPPO."""
        super()._load_checkpoint()
        options = self.config.trainer
        folder = Path(options.default_local_dir, f"global_step_{self.global_steps}")
        if options.resume_mode == "resume_path":
            folder = Path(options.resume_from_path)
        if not (self.prunes_prompts and self.global_steps and (folder / "dppo.pt").exists()):
            return
        state = torch.load(folder / "dppo.pt", weights_only=True)
        if state["prompts"] != dppo.seed_for(*self.index):
            raise dppo.RuleError(
                f"{folder}/dppo.pt: its history is of other prompts; resume with the "
                "data.train_files of that run, or delete the file to forget them"
            )
        vars(self.history).update(state["history"])
        self.mean_tokens = state["mean_tokens"]
