"""
Unbiased pruning in TRL: its GRPOTrainer, with less work for the same expected gradient.

    from dppo_trl import DPPOConfig, DPPOTrainer  # instead of GRPOConfig, GRPOTrainer
    trainer = DPPOTrainer(model, reward, args=DPPOConfig(...), train_dataset=dataset)

TRL still samples, rewards and computes the loss. Its methods are wrapped; none of its code is
copied. Rules, draws and weights come from dppo.py and sampler.py.
    prompts      are dropped before rollout, from each generation batch
    completions  are dropped after reward, from all that an update trains on (a window). What is
                 kept is sorted by length and divided among the ranks. It fills the last micro-steps
                 of the window, and the earlier ones do nothing
    weights      TRL's loss depends on the parameters through log-probs alone. So if their gradient
                 in row i is multiplied by f_i, the whole term of row i is: clip, KL, masks and
                 vLLM's correction. f_i is the weight 1 / P(kept) times a correction, because TRL
                 computes its denominator from the rows that it is given
`check` refuses options for which such a factor is not exact. docs/other-trainers.md has a run and
explains its log.

Letters: Q prompts of a generation batch, K of them rolled out, G completions each. The N = K x G
rows are spread over R ranks, n on each; B rows of a micro-batch, T tokens.
"""

from dataclasses import dataclass, field, replace
from math import gcd
from pathlib import Path

import torch
import torch.distributed as dist
import trl
from accelerate.utils import broadcast_object_list, gather_object
from datasets import Dataset
from trl.trainer.utils import shuffle_sequence_dict

import dppo
import dppo_shared
import sampler
from dppo_shared import require

TRL = "1.16."  # the version whose losses are known, by what they divide by:
PER_ROW = ("grpo", "sapo", "dr_grpo", "luspo")  # the rows of the micro-batch
PER_TOKEN = ("dapo", "cispo", "vespo")  # the tokens of the generation batch
LOSSES = (*PER_ROW, *PER_TOKEN, "bnpo")  # bnpo: the tokens of the micro-batch

OWN_SCALES = ("variance", "mean")  # of scale_rewards; TRL does not have them

EXACT = {  # with these values, a row's term does not depend on which other rows are kept
    "loss_type": LOSSES,
    "entropy_coef": (0.0,),
    "use_adaptive_entropy": (False,),
    "top_entropy_quantile": (1.0,),
}
EXACT_WITH_PROMPTS = EXACT | {  # if prompts are dropped, too: nor on which prompts are kept
    "loss_type": (*PER_ROW, *PER_TOKEN),
    "scale_rewards": tuple(dppo.SCALES),
    "multi_objective_aggregation": ("sum_then_normalize",),
    "num_iterations": (1,),
}
PADDED_LEFT = ("prompt_ids", "prompt_mask")
PADDED_RIGHT = (
    "completion_ids", "completion_mask", "tool_mask", "old_per_token_logps", "ref_per_token_logps",
    "sampling_per_token_logps", "importance_sampling_ratio",
)  # fmt: skip
MEMORY = 8  # how many generation batches the mean of their tokens remembers


def loss_mask(rows: dict) -> torch.Tensor:
    """Which tokens [n, T] carry loss: not padding, not masked, not a tool's."""
    return rows["completion_mask"] * rows.get("tool_mask", 1)


def take(rows: dict, index: slice | torch.Tensor) -> dict:
    """Some of the rows. A scalar, such as num_items_in_batch, belongs to all of them."""
    return {name: x[index] if x.ndim else x for name, x in rows.items()}


def option(default, explanation: str):
    """A field of DPPOConfig. TrlParser's --help prints the explanation."""
    return field(default=default, metadata={"help": explanation})


@dataclass
class DPPOConfig(trl.GRPOConfig):
    """GRPOConfig with the options of pruning. With both rules "none" and a scale_rewards that TRL
    has, DPPOTrainer is GRPOTrainer, bit for bit."""

    completion_rule: str = option(
        "pps",
        "Which completions are dropped after reward: none, zero, uniform, dppo, pps or adaptive.",
    )
    completion_prune_rate: float = option(
        0.7, "Share that is dropped: of tokens for pps; for dppo the chance of dropping one."
    )
    rest: float = option(
        0.4, "For adaptive: the time of all of a step but training, over training on everything."
    )
    prompt_rule: str = option(
        "none", "Which prompts are dropped before rollout: none, uniform or dppo."
    )
    prompt_prune_rate: float = option(
        0.3, "Share of prompts that is dropped; for dppo the chance of dropping one."
    )
    scale_rewards: str = option(
        "group",
        "What advantages are divided by: TRL's group, batch or none; or the group's variance, or "
        "its mean (MaxRL).",
    )


class DPPOTrainer(trl.GRPOTrainer):
    """GRPOTrainer with a rule that drops completions and one that drops prompts. `args` is a
    DPPOConfig."""

    def __init__(self, model, reward_funcs, args: DPPOConfig | None = None, *others, **options):
        require(
            isinstance(args, DPPOConfig),
            f"args is a {type(args).__name__}: DPPOTrainer needs a DPPOConfig, which has all of "
            "GRPOConfig's options",
        )
        super().__init__(model, reward_funcs, args, *others, **options)
        self.prunes_prompts = args.prompt_rule != "none"
        self.prunes = self.prunes_prompts or args.completion_rule != "none"
        self.check()
        if args.scale_rewards in OWN_SCALES:
            self.scale_rewards = "none"  # TRL's part; see `rescale`

        # the micro-steps that share a draw: those of an update, or of a shorter generation batch
        self.window = min(self.args.gradient_accumulation_steps, self.args.steps_per_generation)
        text_config = self.model.config.get_text_config()
        self.rotary = bool(getattr(text_config, "rope_parameters", None))  # relative positions
        self.rows = None  # the generation batch on this rank, [n, ...], in TRL's shuffled order
        self.plan = None  # the window's micro-batches, one a micro-step; None: nothing to do
        self.factor = None  # f [B] of the micro-batch whose loss is being computed
        self.so_far = {"draws": 0, "batches": 0, "mean_tokens": None}

        if self.prunes_prompts:
            prompts = list(self.train_dataset["prompt"])
            self.index = dppo_shared.index_prompts(prompts)
            self.history = sampler.PromptHistory(len(prompts))

    def check(self) -> None:
        """RuleError for options with which pruning would not be exact."""
        args = self.args
        dppo_shared.check_rules(args)
        dppo.check_known("scale_rewards", args.scale_rewards, ("batch", *dppo.SCALES))
        own_scale = args.scale_rewards in OWN_SCALES
        require(
            args.multi_objective_aggregation == "sum_then_normalize" or not own_scale,
            f"scale_rewards={args.scale_rewards!r} is for the sum of all rewards; set "
            "multi_objective_aggregation to 'sum_then_normalize'",
        )
        require(
            trl.__version__.startswith(TRL) or not (self.prunes or own_scale),
            f"trl {trl.__version__}: only the methods of {TRL}* are known here; "
            f"pip install 'trl=={TRL}*'",
        )
        if not self.prunes:
            return
        rules = f"completion_rule={args.completion_rule!r}, prompt_rule={args.prompt_rule!r}"
        for name, values in (EXACT_WITH_PROMPTS if self.prunes_prompts else EXACT).items():
            value, choice = getattr(args, name), " or ".join(map(repr, values))
            require(
                value in values,
                f"{name}={value!r} with {rules}: what a completion adds to the gradient would "
                f"depend on what else is sampled or kept; choose {choice}, or set the rules to "
                "'none'",
            )
        require(
            not self.aux_loss_enabled,
            "router_aux_loss_coef: the router's loss would depend on what is kept; set it to 0.0",
        )
        update, generation = args.gradient_accumulation_steps, args.steps_per_generation
        require(
            max(update, generation) % min(update, generation) == 0,
            f"gradient_accumulation_steps={update}, steps_per_generation={generation}: an update "
            "would mix parts of two draws; let one divide the other",
        )
        if self.prunes_prompts:
            self.check_prompts()

    def check_prompts(self) -> None:
        """RuleError for options with which the prompt rule would not be exact."""
        args, rule = self.args, self.args.prompt_rule
        update, generation = args.gradient_accumulation_steps, args.steps_per_generation
        require(
            generation == update,
            f"steps_per_generation={generation} with prompt_rule={rule!r}: an update needs one "
            f"draw of prompts of its own; set it to {update} (gradient_accumulation_steps)",
        )
        require(
            isinstance(self.train_dataset, Dataset) and not self.environment_factories,
            f"prompt_rule={rule!r} remembers every prompt: give a Dataset as train_dataset and no "
            "environment_factory",
        )
        world, G = self.accelerator.num_processes, self.num_generations
        require(
            rule == "uniform" or G % world == 0,
            f"prompt_rule={rule!r} keeps a varying number of prompts, so {world} processes must "
            f"divide num_generations={G}; or choose 'uniform'",
        )

    # ------------------------------------------------------------------------------------- prompts

    def draw_prompts(self, inputs: list[dict]) -> tuple[list[dict], torch.Tensor, torch.Tensor]:
        """What is rolled out of a generation batch: (this rank's rows, prompts [K], weights [K]).

        The rule uniform keeps a number of prompts whose completions divide evenly among the
        ranks.
        """
        G = self.num_generations
        world, rank = self.accelerator.num_processes, self.accelerator.process_index

        # TRL repeats each prompt G times, and a group may straddle two ranks.
        place = rank * len(inputs)  # of this rank's first row, among those of all ranks
        first_rows = [row for i, row in enumerate(inputs, place) if i % G == 0]
        candidates = gather_object(first_rows)  # [Q]
        Q = len(candidates)
        prompts = dppo_shared.find_prompts(self.index, [row["prompt"] for row in candidates])

        rule, rate = self.args.prompt_rule, self.args.prompt_prune_rate
        if self.loss_type in PER_TOKEN and self.so_far["mean_tokens"] is None:
            rule = "none"  # this generation batch is whole, and gives the denominator
        if rule == "uniform":
            unit = world // gcd(world, G)
            kept = unit * max(1, round((1.0 - rate) * Q / unit))
            rate = 1.0 - kept / Q
        generator = dppo.generator_for(self.args.seed, "prompts", self.so_far["batches"])
        drawn = self.history.prune(rule, rate, prompts, generator)
        keep, weights = broadcast_object_list(list(drawn))  # ranks might round differently
        self._metrics["train"]["dppo/kept_prompts"].append(keep.double().mean().item())

        places = keep.nonzero().flatten().tolist()
        rows = [dict(candidates[q]) for q in places for _ in range(G)]  # [N]
        n = len(rows) // world
        return rows[rank * n : (rank + 1) * n], prompts[keep], weights[keep]

    def _generate_and_score_completions(self, inputs: list[dict]) -> dict:
        """TRL's rollouts and rewards, of the prompts that are drawn."""
        if not (self.prunes and self.model.training):
            return self.rescale(super()._generate_and_score_completions(inputs))
        self.so_far["batches"] += 1
        prompts = weights = None
        if self.prunes_prompts:
            inputs, prompts, weights = self.draw_prompts(inputs)
        rows = self.rescale(super()._generate_and_score_completions(inputs))
        require(
            "num_images" not in rows,
            "images: pruning was never tried with them; set both rules to 'none'",
        )
        first = self.accelerator.process_index * len(inputs)
        # the number of each row among all N, which TRL's shuffle takes along
        rows["place"] = torch.arange(len(inputs), device=self.accelerator.device) + first
        self.gather(rows, prompts, weights)
        return rows

    def gather(self, rows: dict, prompts, weights) -> None:
        """Collect from all ranks what the rules look at, and teach it to the prompt history."""
        mask = loss_mask(rows)
        logprobs = rows.get("sampling_per_token_logps", rows.get("old_per_token_logps"))
        energy = dppo_shared.energy_of(logprobs, mask)
        cost = rows["prompt_mask"].sum(dim=1) + rows["completion_mask"].sum(dim=1)
        columns = (rows["advantages"], mask.sum(dim=1), cost, energy)
        table = torch.stack([column.float() for column in columns], dim=1)  # [n, 4]
        table = self.accelerator.gather(table).cpu().double().T  # [4, N]
        advantages, tokens, cost, energy = table.reshape(4, -1, self.num_generations)  # [K, G]
        rewards = self.total_rewards().cpu().view_as(advantages)

        by_length = self.loss_type in ("grpo", "sapo")
        size = dppo_shared.size_of(advantages, tokens, energy, by_length, self.beta)
        if self.prunes_prompts:
            dppo_shared.learn(self.history, prompts, rewards, advantages, tokens)
            Q = self.args.generation_batch_size // self.num_generations
            reward = dppo_shared.mean_reward(rewards, weights, Q)
            self._metrics["train"]["dppo/reward"].append(reward)
            mean = self.set_denominator(weights, tokens)
            rows["num_items_in_batch"] = torch.tensor(mean, device=rows["place"].device)
        else:
            weights = torch.ones(len(size), dtype=torch.float64)
        self.prompt_weights = weights[:, None]  # [K, 1]
        self.batch = dppo.Completions(advantages, rewards, cost, self.prompt_weights * size)

    def set_denominator(self, weights, tokens) -> float:
        """The tokens that a loss of PER_TOKEN divides by: their mean before this batch, because it
        was known before the draw. Then this batch enters the mean."""
        estimate = (weights[:, None] * tokens).sum().item()  # of all Q prompts
        mean = self.so_far["mean_tokens"]
        self.so_far["mean_tokens"] = dppo_shared.update_mean(mean, estimate, MEMORY)
        return estimate if mean is None else mean  # the first batch is whole, so it can count

    def _calculate_rewards(self, *args) -> torch.Tensor:
        """TRL's, [N, reward functions]."""
        self.rewards = super()._calculate_rewards(*args)
        return self.rewards

    def total_rewards(self) -> torch.Tensor:
        """The rewards [N] of all ranks: TRL's weighted sum. NaN: no function gave one."""
        weighted = self.rewards * self.reward_weights.to(self.rewards)  # [N, reward functions]
        return torch.where(weighted.isnan().all(dim=1), torch.nan, weighted.nansum(dim=1))

    def rescale(self, rows: dict) -> dict:
        """The same rows. If TRL does not have the scale, dppo.group_advantages gives advantages."""
        scale = self.args.scale_rewards
        if scale not in OWN_SCALES:
            return rows
        G = self.num_generations if self.model.training else self.num_generations_eval
        groups = self.total_rewards().view(-1, G)
        advantages = dppo.group_advantages(groups, scale).flatten()  # [N]
        logged = self._logs["advantages"]  # TRL has just added its own to these
        for _ in range(min(len(advantages), len(logged))):  # the table has room for a batch
            logged.pop()
        logged.extend(advantages.tolist())
        n = len(rows["advantages"])
        first = self.accelerator.process_index * n
        return rows | {"advantages": advantages[first : first + n].to(rows["advantages"])}

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
        """Draw from one window, the part-th of the generation batch, and plan its micro-steps."""
        B, rank = self.args.per_device_train_batch_size, self.accelerator.process_index
        n = len(self.rows["place"]) * self.window // self.args.steps_per_generation
        rows = take(self.rows, slice(part * n, (part + 1) * n))
        if self.loss_type == "bnpo":  # it divides by the tokens of the un-pruned micro-batch
            tokens = loss_mask(rows).sum(dim=1).view(-1, B).sum(dim=1)
            rows["denominator"] = tokens.clamp(min=1).double().repeat_interleave(B)

        # The rule sees the rows of this window only: those of others cost nothing and have size 0.
        places = self.accelerator.gather(rows["place"]).cpu()  # [R * n]
        inside = torch.zeros(self.batch.size.numel(), dtype=torch.bool)
        inside[places] = True
        inside = inside.view_as(self.batch.size)  # [K, G]
        cost = self.batch.cost * inside
        rest = self.args.rest * cost.sum().item()
        batch = replace(self.batch, cost=cost, size=self.batch.size * inside, rest=rest)
        generator = dppo.generator_for(self.args.seed, "completions", self.so_far["draws"])
        self.so_far["draws"] += 1
        _keep, weights = dppo.prune_completions(
            self.args.completion_rule, self.args.completion_prune_rate, batch, generator
        )
        weights = weights * inside * self.prompt_weights  # [K, G]
        (weights,) = broadcast_object_list([weights])  # ranks might round differently

        length = batch.cost.flatten()[places]  # [R * n]
        factor = weights.flatten()[places]  # [R * n]
        table, fills = self.divide((factor > 0).view(-1, n), length)  # [R, m]
        rows = self.exchange(rows, table)
        factor = torch.where(fills, 0.0, factor[table])[rank]  # [m]
        plan = [self.micro_batch(rows, factor, some) for some in torch.arange(len(factor)).split(B)]

        num_completions = B * self.window * len(table)
        figures = dppo_shared.completion_figures(
            weights, self.prompt_weights, batch.cost, batch.size, num_completions
        )
        figures["forwards"] = len(plan) / self.window
        for name, value in figures.items():
            self._metrics["train"][f"dppo/{name}"].append(value)

        idle = None
        if self.is_deepspeed_enabled:
            # ZeRO forgets the last update's gradients only when new ones come; these are all 0.
            idle = self.micro_batch(rows, 0.0 * factor, torch.tensor([0]))
        return [idle] * (self.window - len(plan)) + plan

    def divide(self, kept: torch.Tensor, length: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Divide the kept rows among the ranks: the rows [R, m] that each trains on, shortest
        first, and which of them are fillers, bool [R, m], whose factor is to be 0. `kept` [R, n] is
        what was kept of the rows that each rank sampled; their lengths are [R * n].

        TRL gathers metrics in each micro-step, so all ranks must run equally many rows. A rank that
        gets fewer repeats its shortest row. A model without relative positions sees how a rank has
        padded its prompts, so its rows change ranks only if all ranks pad to the same width.
        """
        world, n = kept.shape
        order = length.argsort(stable=True)
        order = order[kept.flatten()[order]]
        width = torch.tensor([self.rows["prompt_ids"].shape[1]], device=self.accelerator.device)
        if self.rotary or len(self.accelerator.gather(width).unique()) == 1:
            of_ranks = [order[rank::world] for rank in range(world)]
        else:
            of_ranks = [order[order // n == rank] for rank in range(world)]
        counts = torch.tensor([len(rows) for rows in of_ranks])
        m = max(1, int(counts.max()))
        fills = torch.arange(m) < m - counts[:, None]
        shortest = length.view(world, n).argmin(dim=1) + n * torch.arange(world)
        table = shortest[:, None].repeat(1, m)
        table[~fills] = torch.cat(of_ranks)
        return table, fills

    def exchange(self, rows: dict, table: torch.Tensor) -> dict:
        """This rank's rows [m] in the table [R, m] of all ranks. Row number r was sampled on rank
        r // n, as its row r % n."""
        world, rank, n = len(table), self.accelerator.process_index, len(rows["place"])
        owner = table // n  # [R, m], the rank that has the row
        if (owner == torch.arange(world)[:, None]).all():  # no row changes ranks
            return take(rows, table[rank] - rank * n)
        columns = {name: x.reshape(n, -1) for name, x in rows.items() if x.ndim}  # [n, T or 1]
        for name, x in columns.items():
            left = name in PADDED_LEFT
            columns[name] = self.accelerator.pad_across_processes(x, dim=1, pad_first=left)
        widths = [x.shape[1] for x in columns.values()]

        # All columns travel as one table of float64, which holds token ids without loss.
        leaving = [line[of == rank] - rank * n for line, of in zip(table, owner, strict=True)]
        sent = torch.cat([x.double() for x in columns.values()], dim=1)[torch.cat(leaving)]
        order = owner[rank].argsort(stable=True)  # rows arrive by rank
        found, counts = sent.new_empty(len(order), sent.shape[1]), owner[rank].bincount(None, world)
        dist.all_to_all_single(found, sent, counts.tolist(), list(map(len, leaving)))
        found = found[order.argsort()].split(widths, dim=1)

        rows = dict(rows)  # scalars stay
        for name, x in zip(columns, found, strict=True):
            rows[name] = (x if rows[name].ndim > 1 else x[:, 0]).to(rows[name].dtype)
        return rows

    def micro_batch(self, rows: dict, factor: torch.Tensor, index: torch.Tensor) -> dict:
        """Some of these rows, without columns that are padding in all of them, and their f."""
        rows = take(rows, index)
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
            state = {"so_far": self.so_far}
            if self.prunes_prompts:
                state |= dppo_shared.history_state(self.history, self.index)
            name = f"checkpoint-{self.state.global_step}"
            dppo_shared.save(Path(self._get_output_dir(trial), name), state)
        super()._save_checkpoint(model, trial)

    def _load_optimizer_and_scheduler(self, checkpoint) -> None:
        """TRL's, and dppo.pt if there is one: a run of GRPOTrainer can go on as DPPO."""
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None or not self.prunes:
            return
        folder = Path(checkpoint)
        state = dppo_shared.load(folder)
        if state is None:
            return
        self.so_far = state["so_far"]
        if self.prunes_prompts and "history" in state:
            dppo_shared.restore_history(self.history, self.index, state, folder, "train_dataset")
