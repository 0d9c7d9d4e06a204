"""
Unbiased pruning in TRL: its GRPOTrainer, with less work for the same expected gradient.

    from dppo_trl import DPPOTrainer  # instead of: from trl import GRPOTrainer
    trainer = DPPOTrainer(model, reward, args=GRPOConfig(...), train_dataset=dataset)

TRL still samples, rewards and computes the loss: its methods are wrapped, none of its code is
copied. Rules, draws and weights come from dppo.py and sampler.py.
    prompts      are dropped before rollout, from each generation batch
    completions  are dropped after reward. What is kept of all that an update trains on (a window)
                 is sorted by length and dealt to the ranks. It fills the window's last micro-steps;
                 the earlier ones do nothing
    weights      TRL's loss depends on the parameters through log-probs alone. Multiplying the
                 gradient by f_i there multiplies row i's whole term: clip, KL, masks and vLLM's
                 correction. f_i is the weight 1 / P(kept) times a correction, because TRL takes
                 its denominator from the rows that it is given
`check` refuses what such a factor cannot make exact. docs/trl.md has a run and how to read its log.

Letters: Q prompts of a generation batch, K of them rolled out, G completions each, N = K x G rows
on R ranks, n of them here; B rows of a micro-batch, T tokens.
"""

from dataclasses import replace
from math import gcd
from pathlib import Path

import torch
import torch.distributed as dist
import trl
from accelerate.utils import broadcast_object_list, gather_object
from datasets import Dataset
from trl.trainer.utils import shuffle_sequence_dict

import dppo
import sampler
from dppo import RuleError

TRL = "1.16."  # the version in which the losses divide by
PER_ROW = ("grpo", "sapo", "dr_grpo", "luspo")  # the rows of the micro-batch
PER_TOKEN = ("dapo", "cispo", "vespo")  # the tokens of the generation batch
LOSSES = (*PER_ROW, *PER_TOKEN, "bnpo")  # bnpo: the tokens of the micro-batch

EXACT = {  # values with which a row's term does not depend on which other rows are kept
    "loss_type": LOSSES,
    "entropy_coef": (0.0,),
    "use_adaptive_entropy": (False,),
    "top_entropy_quantile": (1.0,),
}
EXACT_WITH_PROMPTS = EXACT | {  # nor on which prompts are
    "loss_type": (*PER_ROW, *PER_TOKEN),
    "scale_rewards": ("group", "none"),
    "multi_objective_aggregation": ("sum_then_normalize",),
    "num_iterations": (1,),
}
PADDED_LEFT = ("prompt_ids", "prompt_mask")
PADDED_RIGHT = (
    "completion_ids", "completion_mask", "tool_mask", "old_per_token_logps", "ref_per_token_logps",
    "sampling_per_token_logps", "importance_sampling_ratio",
)  # fmt: skip
MEMORY = 8  # generation batches that the mean of their tokens remembers


def loss_mask(rows: dict) -> torch.Tensor:
    """Which tokens [n, T] carry loss: not padding, not masked, not a tool's."""
    return rows["completion_mask"] * rows.get("tool_mask", 1)


class DPPOTrainer(trl.GRPOTrainer):
    """GRPOTrainer with a rule that drops completions and one that drops prompts."""

    def __init__(
        self,
        *args,
        completion_rule: str = "pps",
        completion_prune_rate: float = 0.7,
        prompt_rule: str = "none",
        prompt_prune_rate: float = 0.3,
        **options,
    ):
        """Rules and rates are those of dppo.completion_keep_prob and PromptHistory.keep_prob. If
        both rules are "none", this is GRPOTrainer, bit for bit."""
        super().__init__(*args, **options)
        self.completion_rule, self.completion_prune_rate = completion_rule, completion_prune_rate
        self.prompt_rule, self.prompt_prune_rate = prompt_rule, prompt_prune_rate
        self.prunes_prompts = prompt_rule != "none"
        self.prunes = self.prunes_prompts or completion_rule != "none"
        self.check()
        steps = (self.args.gradient_accumulation_steps, self.args.steps_per_generation)
        text = self.model.config.get_text_config()
        self.rotary = bool(getattr(text, "rope_parameters", None))  # its positions are relative
        self.window = min(steps)  # micro-steps that share a draw
        self.rows = None  # the generation batch on this rank, [n, ...], in TRL's shuffled order
        self.plan = None  # of each micro-step of the window: its micro-batch, or None
        self.factor = None  # f [B] of the micro-batch whose loss is being computed
        self.so_far = {"draws": 0, "batches": 0, "mean_tokens": None}
        if self.prunes_prompts:
            data, Q = self.train_dataset, self.args.generation_batch_size // self.num_generations
            sources = data["source"] if "source" in data.column_names else [""] * len(data)
            lengths = torch.tensor([len(str(prompt)) for prompt in data["prompt"]])  # characters
            self.history = sampler.PromptHistory(lengths, list(sources), Q)
            self.index = {dppo.seed_for(prompt): i for i, prompt in enumerate(data["prompt"])}

    def check(self) -> None:
        """RuleError, with the option and the way out, for what would not be exact."""
        args, rule, world = self.args, self.prompt_rule, self.accelerator.num_processes
        steps = (args.gradient_accumulation_steps, args.steps_per_generation)
        tables = {"completion_rule": dppo.COMPLETION_RULES, "prompt_rule": sampler.PROMPT_RULES}
        for name, table in tables.items():
            unbiased = [rule for rule, entry in table.items() if not entry.biased]
            dppo.check_known(name, getattr(self, name), unbiased)
        for name in ("completion_prune_rate", "prompt_prune_rate"):
            if not 0 <= getattr(self, name) < 1:
                raise RuleError(f"{name}={getattr(self, name)}: choose a rate from 0 to below 1")
        exact = EXACT_WITH_PROMPTS if self.prunes_prompts else EXACT if self.prunes else {}
        for name, values in exact.items():
            value, rules = getattr(args, name), f"{self.completion_rule!r}, prompt_rule={rule!r}"
            if value not in values:
                raise RuleError(
                    f"{name}={value!r} with completion_rule={rules}: what a completion adds to the "
                    "gradient would depend on what else is sampled or kept; choose "
                    f"{' or '.join(map(repr, values))}, or set the rules to 'none'"
                )
        problems = {
            f"trl {trl.__version__}: only the losses of {TRL}* are known here; "
            f"pip install 'trl=={TRL}*'": not trl.__version__.startswith(TRL),
            "router_aux_loss_coef: the router's loss would depend on what is kept; "
            "set it to 0.0": self.aux_loss_enabled,
            f"gradient_accumulation_steps={steps[0]}, steps_per_generation={steps[1]}: an update "
            "would mix parts of two draws; let one divide the other": max(steps) % min(steps),
            f"steps_per_generation={steps[1]} with prompt_rule={rule!r}: later updates would start "
            f"from parameters that know the draw; set it to {steps[0]} "
            "(gradient_accumulation_steps)": self.prunes_prompts and steps[1] > steps[0],
            f"prompt_rule={rule!r} remembers every prompt: give a Dataset as train_dataset and no "
            "environment_factory": self.prunes_prompts
            and (not isinstance(self.train_dataset, Dataset) or self.environment_factories),
            f"prompt_rule={rule!r} keeps any number of prompts, so {world} processes must divide "
            f"num_generations={self.num_generations}; or choose 'pps' or "
            "'uniform'": self.prunes_prompts
            and not sampler.PROMPT_RULES[rule].priority
            and self.num_generations % world,
        }
        for sentence, wrong in problems.items():
            if self.prunes and wrong:
                raise RuleError(sentence)

    # ------------------------------------------------------------------------------------- prompts

    def draw_prompts(self, inputs: list[dict]) -> tuple[list[dict], torch.Tensor, torch.Tensor]:
        """What is rolled out of a generation batch: (rows of this rank, prompts [K], weights [K]).

        uniform and pps keep a number of prompts whose completions divide evenly among the ranks.
        """
        G, world = self.num_generations, self.accelerator.num_processes
        rank = self.accelerator.process_index
        heads = [x for place, x in enumerate(inputs, rank * len(inputs)) if place % G == 0]
        candidates = gather_object(heads)  # [Q]
        prompts = torch.tensor([self.index[dppo.seed_for(x["prompt"])] for x in candidates])
        rule, rate, Q = self.prompt_rule, self.prompt_prune_rate, len(candidates)
        if self.loss_type in PER_TOKEN and self.so_far["mean_tokens"] is None:
            rule = "none"  # the first generation batch is whole, and gives the denominator
        if sampler.PROMPT_RULES[rule].priority:
            unit = world // gcd(world, G)
            rate = 1.0 - unit * max(1, round((1.0 - rate) * Q / unit)) / Q
        batch = self.so_far["batches"]
        generator = dppo.generator_for(self.args.seed, "prompts", batch)
        drawn = self.history.prune(rule, rate, prompts, generator, batch)
        keep, weights = broadcast_object_list(list(drawn))  # ranks might round differently
        rows = [dict(candidates[q]) for q in keep.nonzero().flatten().tolist() for _ in range(G)]
        n = len(rows) // world
        self._metrics["train"]["dppo/kept_prompts"].append(keep.double().mean().item())
        return rows[rank * n : (rank + 1) * n], prompts[keep], weights[keep]

    def _generate_and_score_completions(self, inputs: list[dict]) -> dict:
        """TRL's rollouts and rewards, but of the prompts that are drawn."""
        if not (self.prunes and self.model.training):
            return super()._generate_and_score_completions(inputs)
        self.so_far["batches"] += 1
        prompts = weights = None
        if self.prunes_prompts:
            inputs, prompts, weights = self.draw_prompts(inputs)
        rows = super()._generate_and_score_completions(inputs)
        if "num_images" in rows:
            raise RuleError("images: pruning was never tried with them; set both rules to 'none'")
        rows["place"] = torch.arange(len(inputs), device=self.accelerator.device)  # among all N
        rows["place"] += self.accelerator.process_index * len(inputs)
        self.gather(rows, prompts, weights)
        return rows

    def gather(self, rows: dict, prompts, weights) -> None:
        """What the rules look at, from all ranks; the prompt history learns from it."""
        mask = loss_mask(rows)
        logprobs = rows.get("sampling_per_token_logps", rows.get("old_per_token_logps"))
        # without log-probs, as if all tokens were equally surprising
        energy = mask if logprobs is None else dppo.energy_bound(logprobs.nan_to_num()) * mask
        cost = rows["prompt_mask"].sum(dim=1) + rows["completion_mask"].sum(dim=1)
        columns = (rows["advantages"], mask.sum(dim=1), cost, energy.sum(dim=1))
        table = torch.stack([column.float() for column in columns], dim=1)  # [n, 4]
        table = self.accelerator.gather(table).cpu().double().T  # [4, N]
        advantages, tokens, cost, energy = table.reshape(4, -1, self.num_generations)  # [K, G]
        weighted = self.rewards * self.reward_weights.to(self.rewards)  # [N, reward functions]
        rewards = torch.where(weighted.isnan().all(dim=1), torch.nan, weighted.nansum(dim=1))
        rewards = rewards.cpu().view_as(advantages)
        scale = (tokens > 0).double()  # of a token's loss, up to a constant
        if self.loss_type in ("grpo", "sapo"):
            scale /= tokens.clamp(min=1)
        size = dppo.contribution_size(advantages, scale, energy, self.beta)
        if not self.prunes_prompts:
            weights = torch.ones(len(size), dtype=torch.float64)
        else:
            seen = (rewards, advantages, size.square().sum(dim=1), tokens.sum(dim=1))
            self.history.update(self.so_far["batches"], prompts, weights, *seen)
            # Exact: PER_TOKEN losses divide by what is known before the draw, not by its estimate.
            estimate = (weights[:, None] * tokens).sum().item()
            mean = self.so_far["mean_tokens"] or estimate
            rows["num_items_in_batch"] = torch.tensor(mean, device=rows["place"].device)
            # 0 is not known: then the next batch is whole, too.
            self.so_far["mean_tokens"] = mean + (estimate - mean) / MEMORY or None
            share = self.num_generations / self.args.generation_batch_size  # 1 / Q
            reward = share * (weights * rewards.nanmean(dim=1)).nansum()
            self._metrics["train"]["dppo/reward"].append(reward.item())
        self.prompt_weights = weights[:, None]  # [K, 1]
        self.batch = dppo.Completions(advantages, rewards, cost, self.prompt_weights * size)

    def _calculate_rewards(self, *args) -> torch.Tensor:
        """TRL's, [N, reward functions]."""
        self.rewards = super()._calculate_rewards(*args)
        return self.rewards

    # --------------------------------------------------------------------------------- completions

    def _prepare_inputs(self, inputs):
        """The micro-batch of this micro-step; None if it has nothing to do."""
        if not (self.prunes and self.model.training):
            return super()._prepare_inputs(inputs)
        generated = self.args.steps_per_generation
        step = self._step % (generated * self.num_iterations)
        if step == 0 or self.rows is None:  # None after a resume
            self.rows = shuffle_sequence_dict(self._generate_and_score_completions(inputs))
        if step % self.window == 0 or self.plan is None:
            self.plan = self.draw_completions(step % generated // self.window)
        return self.plan[step % self.window]

    def draw_completions(self, part: int) -> list[dict | None]:
        """The plan of a window, the part-th of the generation batch: a draw of its own."""
        B, rank = self.args.per_device_train_batch_size, self.accelerator.process_index
        n = len(self.rows["place"]) * self.window // self.args.steps_per_generation
        rows = {
            name: x[part * n : (part + 1) * n] if x.ndim else x for name, x in self.rows.items()
        }
        if self.loss_type == "bnpo":  # it divides by the tokens of the un-pruned micro-batch
            tokens = loss_mask(rows).sum(dim=1).view(-1, B).sum(dim=1)
            rows["denominator"] = tokens.clamp(min=1).double().repeat_interleave(B)
        places = self.accelerator.gather(rows["place"]).cpu()  # [R * n]
        inside = torch.zeros(self.batch.size.numel(), dtype=torch.bool)
        inside[places] = True
        inside = inside.view_as(self.batch.size)  # [K, G]
        batch = replace(self.batch, cost=self.batch.cost * inside, size=self.batch.size * inside)
        generator = dppo.generator_for(self.args.seed, "completions", self.so_far["draws"])
        self.so_far["draws"] += 1
        rule, rate = self.completion_rule, self.completion_prune_rate
        _keep, weights = dppo.prune_completions(rule, rate, batch, generator)
        (weights,) = broadcast_object_list([weights * inside * self.prompt_weights])  # [K, G]
        length, factor = (table.flatten()[places] for table in (batch.cost, weights))  # [R * n]
        table, fills = self.deal((factor > 0).view(-1, n), length)  # [R, m]
        rows = self.exchange(rows, table)
        factor = torch.where(fills, 0.0, factor[table])[rank]  # [m]
        plan = [self.micro_batch(rows, factor, some) for some in torch.arange(len(factor)).split(B)]
        full = (self.prompt_weights * batch.cost).sum()  # expected of the un-pruned window
        live = weights[batch.size > 0]
        ess = (live.sum().square() / live.square().sum()).item()  # see metrics.py
        for name, value in {
            "kept_completions": (weights > 0).sum().item() / (B * self.window * len(table)),
            "kept_tokens": ((batch.cost * (weights > 0)).sum() / full).item(),
            "effective_sample_size": ess,
            "weight_max": weights.max().item(),
            "forwards": len(plan) / self.window,
        }.items():
            self._metrics["train"][f"dppo/{name}"].append(value)
        idle = None
        if self.is_deepspeed_enabled:
            # ZeRO clears old gradients when the first micro-step brings new ones; these are 0
            idle = self.micro_batch(rows, 0.0 * factor, torch.tensor([0]))
        return [idle] * (self.window - len(plan)) + plan

    def deal(self, kept: torch.Tensor, length: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The rows [R, m] that each rank trains on, shortest first, and bool [R, m]: which of them
        are fillers, to be given factor 0. `kept` [R, n] is what the draw has kept of the rows that
        each rank sampled; their lengths are [R * n].

        TRL gathers metrics in each micro-step, so all ranks must run equally many rows. A rank that
        gets fewer repeats its shortest row. A model without relative positions sees how a rank has
        padded its prompts, so rows change ranks only if all ranks pad to the same width.
        """
        world, n = kept.shape
        order = length.argsort(stable=True)
        order = order[kept.flatten()[order]]
        width = torch.tensor([self.rows["prompt_ids"].shape[1]], device=self.accelerator.device)
        if self.rotary or len(self.accelerator.gather(width).unique()) == 1:
            of_ranks = [order[rank::world] for rank in range(world)]
        else:
            of_ranks = [order[order // n == rank] for rank in range(world)]
        m = max(1, *map(len, of_ranks))
        fills = torch.arange(m) < m - torch.tensor(list(map(len, of_ranks)))[:, None]
        shortest = length.view(world, n).argmin(dim=1) + n * torch.arange(world)
        table = shortest[:, None].repeat(1, m)
        table[~fills] = torch.cat(of_ranks)
        return table, fills

    def exchange(self, rows: dict, table: torch.Tensor) -> dict:
        """This rank's rows [m] in the table [R, m] of all ranks. Row number r was sampled on rank
        r // n, as its row r % n."""
        world, rank, n = len(table), self.accelerator.process_index, len(rows["place"])
        owner = table // n  # [R, m]
        if (owner == torch.arange(world)[:, None]).all():  # they stay
            return {name: x[table[rank] - rank * n] if x.ndim else x for name, x in rows.items()}
        columns = {name: x.reshape(n, -1) for name, x in rows.items() if x.ndim}  # [n, T or 1]
        for name, x in columns.items():
            left = name in PADDED_LEFT
            columns[name] = self.accelerator.pad_across_processes(x, dim=1, pad_first=left)
        leaving = [line[of == rank] - rank * n for line, of in zip(table, owner, strict=True)]
        sent = torch.cat([x.double() for x in columns.values()], dim=1)[torch.cat(leaving)]
        order = owner[rank].argsort(stable=True)
        found, counts = sent.new_empty(len(order), sent.shape[1]), owner[rank].bincount(None, world)
        dist.all_to_all_single(found, sent, counts.tolist(), list(map(len, leaving)))
        found = found[order.argsort()].split([x.shape[1] for x in columns.values()], dim=1)
        rows = dict(rows)  # scalars stay
        for name, x in zip(columns, found, strict=True):
            rows[name] = (x if rows[name].ndim > 1 else x[:, 0]).to(rows[name].dtype)
        return rows

    def micro_batch(self, rows: dict, factor: torch.Tensor, index: torch.Tensor) -> dict:
        """Some of these rows, without columns that only pad them, and their factors f."""
        rows = {name: x[index] if x.ndim else x for name, x in rows.items()}
        if self.pad_to_multiple_of is None:
            width = max(1, rows["completion_mask"].any(dim=0).sum().item())
            rows |= {name: rows[name][:, :width] for name in PADDED_RIGHT if name in rows}
            if self.rotary:  # positions are relative, so that a shift changes nothing
                width = rows["prompt_mask"].any(dim=0).sum().item()
                rows |= {name: rows[name][:, -width:] for name in PADDED_LEFT}
        return rows | {"factor": factor[index] * self.correction(rows)}

    def correction(self, rows: dict) -> torch.Tensor | float:
        """TRL's denominator for these rows over their denominator in the un-pruned batch."""
        if self.loss_type in PER_TOKEN:
            return 1.0
        if self.loss_type in PER_ROW:
            return len(rows["place"]) / self.args.per_device_train_batch_size
        return (loss_mask(rows).sum().clamp(min=1) / rows["denominator"]).cpu()

    # ------------------------------------------------------------------------------------ the loss

    def _compute_loss(self, model, inputs) -> torch.Tensor:
        """TRL's loss of a micro-batch, whose gradient carries the factors."""
        if inputs is None:
            return torch.zeros((), device=self.accelerator.device, requires_grad=True)
        self.factor = inputs.get("factor")
        loss = super()._compute_loss(model, inputs)
        self.factor = None
        return loss

    def _get_per_token_logps_and_entropies(self, *args, **options):
        """TRL's log-probs [B, T]; in the loss, f multiplies each row's gradient."""
        logprobs, *others = super()._get_per_token_logps_and_entropies(*args, **options)
        if self.factor is not None and logprobs.requires_grad:
            factor = self.factor.to(logprobs)[:, None]
            logprobs.register_hook(lambda gradient: gradient * factor)
        return logprobs, *others

    # --------------------------------------------------------------------------------- checkpoints

    def _save_checkpoint(self, model, trial) -> None:
        """TRL's checkpoint, and in dppo.pt how many draws were made and the prompt history."""
        if self.prunes and self.args.should_save:
            folder = Path(self._get_output_dir(trial), f"checkpoint-{self.state.global_step}")
            folder.mkdir(parents=True, exist_ok=True)
            state = {"so_far": self.so_far}
            if self.prunes_prompts:
                state["prompts"] = dppo.seed_for(*self.index)
                state["history"] = vars(self.history)
            torch.save(state, folder / "dppo.pt")
        super()._save_checkpoint(model, trial)

    def _load_optimizer_and_scheduler(self, checkpoint) -> None:
        """TRL's, and dppo.pt if there is one: a run of GRPOTrainer can go on as DPPO."""
        super()._load_optimizer_and_scheduler(checkpoint)
        path = Path(checkpoint or "", "dppo.pt")
        if checkpoint is None or not self.prunes or not path.exists():
            return
        state = torch.load(path, weights_only=True)
        self.so_far = state["so_far"]
        if self.prunes_prompts and "history" in state:
            if state["prompts"] != dppo.seed_for(*self.index):
                raise RuleError(
                    f"{path}: its history is of other prompts; resume with the train_dataset of "
                    "that run, or delete the file to forget them"
                )
            vars(self.history).update(state["history"])
