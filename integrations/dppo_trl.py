"""
Unbiased pruning in TRL: its GRPOTrainer, with less work for the same expected gradient.

    from dppo_trl import DPPOConfig, DPPOTrainer  # instead of GRPOConfig, GRPOTrainer
    trainer = DPPOTrainer(model, reward, args=DPPOConfig(...), train_dataset=dataset)

TRL still samples, rewards and computes the loss. Its methods are wrapped; none of its code is
copied. Rules, draws and weights come from dppo.py and sampler.py.
    prompts      are dropped before rollout, from each generation batch
    completions  are dropped after reward, from the generation batch, which is one update's. What is
                 kept is sorted by length and divided among the ranks. It fills the last micro-steps
                 of the update, and the earlier ones do nothing
    weights      TRL's loss depends on the parameters through log-probs alone. So if their gradient
                 in a row is multiplied, the whole term of the row is: clip, KL, masks and vLLM's
                 correction. The multiplier is the weight 1 / P(kept) times a correction, because
                 TRL computes its denominator from the rows that it is given
`check` refuses options for which such a multiplier is not exact. docs/other-trainers.md has a run
and explains its log.

Letters: Q prompts of a generation batch, K of them rolled out, G completions each. The N = K x G
rows are spread over the ranks, n on each; B rows of a micro-batch, T tokens.
"""

import math
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import trl
from accelerate.utils import broadcast_object_list, gather_object
from datasets import Dataset
from transformers import LogitsProcessorList

import dppo
import dppo_shared
from dppo_shared import require, sampler

TRL = "1.16."  # the version whose losses are known, by what they divide by:
PER_ROW = ("grpo", "sapo", "dr_grpo", "luspo")  # the rows of the micro-batch
PER_TOKEN = ("dapo", "cispo", "vespo")  # the tokens of the generation batch

# With these values, a row's term does not depend on what else is kept, and an update has its draw.
EXACT = {
    "loss_type": (*PER_ROW, *PER_TOKEN),
    "scale_rewards": dppo.SCALES,
    "multi_objective_aggregation": ("sum_then_normalize",),
    "num_iterations": (1,),
    "entropy_coef": (0.0,),
    "use_adaptive_entropy": (False,),
    "top_entropy_quantile": (1.0,),
}
PADDED_LEFT = ("prompt_ids", "prompt_mask")  # TRL pads all other tensors on the right


def clock() -> float:
    """Seconds, after the device has done what was asked of it."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


@dataclass
class DPPOConfig(trl.GRPOConfig):
    """GRPOConfig with the options of pruning. With both rules "none", DPPOTrainer is GRPOTrainer,
    bit for bit."""

    completion_rule: str = "adaptive"  # or none, nonzero, uniform, dppo, pps; after reward
    completion_prune_rate: float = 0.7  # share dropped: pps of tokens; dppo: chance of dropping one
    rest: float = dppo.REST  # for adaptive: time of all but training, over training on everything
    prompt_rule: str = "none"  # uniform or dppo; before rollout
    prompt_prune_rate: float = 0.3  # share dropped; dppo: chance of dropping one


class DPPOTrainer(trl.GRPOTrainer):
    """GRPOTrainer with a rule that drops completions and one that drops prompts. `args` is a
    DPPOConfig."""

    def __init__(self, model, reward_funcs, args: DPPOConfig = None, *others, **options):
        given = type(args).__name__
        require(isinstance(args, DPPOConfig), f"args is of type {given}: give a DPPOConfig")
        super().__init__(model, reward_funcs, args, *others, **options)
        self.prunes_prompts = args.prompt_rule != "none"
        self.prunes = self.prunes_prompts or args.completion_rule != "none"
        self.check()

        self.plan = None  # the update's micro-batches, one a micro-step; None: nothing to do
        self.multiplier = None  # [B], of the micro-batch whose loss is being computed
        self.adds_logprobs = False  # to those of TRL
        self.seconds = self.preparing = 0.0  # of steps, and of making their batches; for dppo/rest

        if self.prunes_prompts:
            writes_logs = args.log_completions and args.should_save
            logs = f"{args.output_dir}/completions" if writes_logs else None
            dppo_shared.remember(self, list(self.train_dataset["prompt"]), logs)

    def check(self) -> None:
        """RuleError for options with which pruning would not be exact."""
        args = self.args
        dppo_shared.check_rules(args)
        if not self.prunes:
            return
        require(
            trl.__version__.startswith(TRL),
            f"trl {trl.__version__}: only the methods of {TRL}* are known here; "
            f"pip install 'trl=={TRL}*'",
        )
        one_update = {"steps_per_generation": (args.gradient_accumulation_steps,)}
        for name, values in (EXACT | one_update).items():
            value, choice = getattr(args, name), " or ".join(map(repr, values))
            require(
                value in values,
                f"{name}={value!r}: not exact with pruning; choose {choice}, or TRL's GRPOTrainer",
            )
        require(
            not self.aux_loss_enabled,
            "router_aux_loss_coef: the router's loss would depend on what is kept; set it to 0.0",
        )
        config = self.model.config.get_text_config()
        require(
            getattr(config, "rope_parameters", None),
            f"{config.model_type}: without rotary positions, padding would change what the model "
            "computes; use another model, or TRL's GRPOTrainer",
        )
        require(
            args.prompt_rule == "none" or isinstance(self.train_dataset, Dataset),
            f"prompt_rule={args.prompt_rule!r} remembers every prompt: give a Dataset",
        )
        rule, world, G = args.prompt_rule, self.accelerator.num_processes, self.num_generations
        require(
            rule in ("none", "uniform") or G % world == 0,
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
        prompts = dppo_shared.find_prompts(self, [row["prompt"] for row in candidates])

        rule, rate = self.args.prompt_rule, self.args.prompt_prune_rate
        if self.loss_type in PER_TOKEN and self.mean_tokens is None:
            rule = "none"  # this generation batch is whole, and gives the denominator
        if rule == "uniform":
            unit = world // math.gcd(world, G)
            kept = unit * max(1, round((1.0 - rate) * Q / unit))
            rate = 1.0 - kept / Q
        generator = dppo.generator_for(self.args.seed, "prompts", self.state.global_step + 1)
        drawn = sampler.prune_prompts(rule, rate, self.history, prompts, generator)
        keep, weights = broadcast_object_list(list(drawn))  # ranks might round differently
        self._metrics["train"]["dppo/kept_prompts"].append(keep.double().mean().item())

        places = keep.nonzero().flatten().tolist()
        rows = [dict(candidates[q]) for q in places for _ in range(G)]  # [N]
        n = len(rows) // world
        return rows[rank * n : (rank + 1) * n], prompts[keep], weights[keep]

    def gather(self, rows: dict, prompts, weights) -> None:
        """Collect from all ranks what the rules look at, and teach it to the prompt history."""
        require(
            "num_images" not in rows,
            "images: pruning was never tried with them; set both rules to 'none'",
        )
        mask = rows["completion_mask"] * rows.get("tool_mask", 1)  # [n, T], tokens with loss
        logprobs = rows.get("sampling_per_token_logps", rows.get("old_per_token_logps"))
        if self.adds_logprobs:  # TRL's loss has none
            rows.pop("sampling_per_token_logps", None)
        energy = dppo_shared.energy_of(logprobs, mask)
        cost = rows["prompt_mask"].sum(dim=1) + rows["completion_mask"].sum(dim=1)
        columns = (rows["advantages"], mask.sum(dim=1), cost, energy)
        table = torch.stack([column.float() for column in columns], dim=1)  # [n, 4]
        table = self.accelerator.gather(table).cpu().double().T  # [4, N]
        advantages, tokens, cost, energy = table.reshape(4, -1, self.num_generations)  # [K, G]
        rewards = self.rewards.cpu().view_as(advantages)

        by_length = self.loss_type in ("grpo", "sapo")
        size = dppo_shared.size_of(advantages, tokens, energy, by_length, self.beta)
        if self.prunes_prompts:
            Q = self.args.generation_batch_size // self.num_generations
            reward = dppo_shared.mean_reward(rewards, weights, Q)
            self._metrics["train"]["dppo/reward"].append(reward)
            known = self.mean_tokens or tokens.sum().item()  # without a mean, this batch is whole
            rows["num_items_in_batch"] = torch.tensor(known, device=self.accelerator.device)
            dppo_shared.learn(self, prompts, weights, rewards, advantages, tokens)
        else:
            weights = torch.ones(len(size), dtype=torch.float64)
        self.prompt_weights = weights[:, None]  # [K, 1]
        sizes = self.prompt_weights * size
        self.batch = dppo.Completions(advantages, rewards, cost, sizes, self.args.rest)

    def _calculate_rewards(self, *args) -> torch.Tensor:
        """TRL's [N, reward functions], of all ranks. Their weighted sum is kept for the rules; NaN
        if no function gave a reward."""
        of_each = super()._calculate_rewards(*args)
        weighted = of_each * self.reward_weights.to(of_each)
        self.rewards = torch.where(of_each.isnan().all(dim=1), torch.nan, weighted.nansum(dim=1))
        return of_each

    def _generate_single_turn(self, *args, **options):
        """TRL's token ids and log-probs; also of the tokens of transformers' generate, which does
        not return them, for the energies."""
        self.adds_logprobs = False
        if not (self.prunes and self.model.training):
            return super()._generate_single_turn(*args, **options)
        model = self.accelerator.unwrap_model(self.model_wrapped)
        generate = model.generate
        table = []  # of each sampled token [n, 1], and of all that may be the next one [n, V]

        def take(ids):
            table[-1] = table[-1].gather(1, ids[:, -1:])

        def see(ids, scores):
            if table:  # the token after the last call is known now
                take(ids)
            table.append((scores.float() / self.temperature).log_softmax(dim=-1))
            return scores

        def collecting(**inputs):
            found = generate(**inputs, logits_processor=LogitsProcessorList([see]))
            take(found)
            return found

        model.generate = collecting
        try:
            ids, logprobs = super()._generate_single_turn(*args, **options)
        finally:
            del model.generate
        if logprobs is None and table:
            self.adds_logprobs = True
            rows = torch.cat(table, dim=1).tolist()  # [n, T]
            logprobs = [row[: len(some)] for row, some in zip(rows, ids, strict=True)]
        return ids, logprobs

    # --------------------------------------------------------------------------------- completions

    def _prepare_inputs(self, inputs):
        """The micro-batch of this micro-step; None if it has nothing to do."""
        if not self.model.training:
            return super()._prepare_inputs(inputs)
        if not self.prunes:
            began = clock()
            inputs = super()._prepare_inputs(inputs)
            self.preparing += clock() - began
            return inputs
        step = self._step % self.args.gradient_accumulation_steps
        if step == 0:
            prompts = weights = None
            if self.prunes_prompts:
                inputs, prompts, weights = self.draw_prompts(inputs)
            rows = self._generate_and_score_completions(inputs)
            self.gather(rows, prompts, weights)
            # TRL shuffles here. Its random numbers are used up, so that both sample alike.
            torch.randperm(len(rows["advantages"]))
            self.plan = self.draw_completions(rows)
        return self.plan[step]

    def draw_completions(self, rows: dict) -> list[dict | None]:
        """Draw from a generation batch, [n, ...] on this rank, and plan the rank's micro-steps.

        TRL gathers metrics in each micro-step, so all ranks must run equally many rows. If the
        ranks do not divide their number, some ranks run the shortest row besides, with weight 0.
        """
        B, batch = self.args.per_device_train_batch_size, self.batch
        world, rank = self.accelerator.num_processes, self.accelerator.process_index
        generator = dppo.generator_for(self.args.seed, "completions", self.state.global_step)
        _keep, weights = dppo.prune_completions(
            self.args.completion_rule, self.args.completion_prune_rate, batch, generator
        )
        weights = weights * self.prompt_weights  # [K, G]
        (weights,) = broadcast_object_list([weights])  # ranks might round differently

        order = batch.cost.flatten().argsort(stable=True)  # [N], shortest first
        kept = order[weights.flatten()[order] > 0]
        m = max(1, math.ceil(len(kept) / world))  # rows of each rank
        fillers = m * world - len(kept)
        kept = torch.cat([order[:1].repeat(fillers), kept])
        row_weights = weights.flatten()[kept]
        row_weights[:fillers] = 0.0
        rows = self.exchange(rows, kept[rank::world])
        row_weights = row_weights[rank::world]  # [m]
        plan = [self.micro_batch(rows, row_weights, some) for some in torch.arange(m).split(B)]

        figures = dppo_shared.completion_figures(
            weights, self.prompt_weights, batch.cost, self.args.generation_batch_size
        )
        micro_steps = self.args.gradient_accumulation_steps
        figures["forwards"] = len(plan) / micro_steps
        for name, value in figures.items():
            self._metrics["train"][f"dppo/{name}"].append(value)

        idle = None
        if self.is_deepspeed_enabled:
            # ZeRO forgets the last update's gradients only when new ones come; these are all 0.
            idle = self.micro_batch(rows, 0.0 * row_weights, torch.tensor([0]))
        return [idle] * (micro_steps - len(plan)) + plan

    def exchange(self, rows: dict, places: torch.Tensor) -> dict:
        """The rows [m] that have these places [m] among the N rows of all ranks. A scalar, such as
        num_items_in_batch, belongs to all rows."""
        found = dict(rows)
        for name, x in rows.items():
            if x.ndim:
                # TRL pads this ratio with 1, because vespo sums its logs.
                pad = 1 if name == "importance_sampling_ratio" else 0
                padded = self.accelerator.pad_across_processes(
                    x, dim=1, pad_index=pad, pad_first=name in PADDED_LEFT
                )
                found[name] = self.accelerator.gather(padded)[places]
        return found

    def micro_batch(self, rows: dict, row_weights: torch.Tensor, index: torch.Tensor) -> dict:
        """Some of these rows, without columns that are padding in all of them, and what multiplies
        the gradients of their log-probs."""
        rows = {name: x[index] if x.ndim else x for name, x in rows.items()}
        if self.pad_to_multiple_of is None:
            left = rows["prompt_mask"].any(dim=0).sum().item()
            right = max(1, rows["completion_mask"].any(dim=0).sum().item())
            for name, x in rows.items():
                if x.ndim == 2:
                    rows[name] = x[:, -left:] if name in PADDED_LEFT else x[:, :right]
        # TRL divides by the rows that it is given, instead of B, or by the tokens of all rows.
        share = len(index) / self.args.per_device_train_batch_size
        correction = share if self.loss_type in PER_ROW else 1.0
        return rows | {"multiplier": row_weights[index] * correction}

    # ------------------------------------------------------------------------------------ the loss

    def training_step(self, *args, **options) -> torch.Tensor:
        """TRL's. Without pruning, each generation batch logs the dppo/rest of its micro-steps."""
        if self.prunes:
            return super().training_step(*args, **options)
        began = clock()
        loss = super().training_step(*args, **options)
        self.seconds += clock() - began
        if self._step % (self.args.steps_per_generation * self.num_iterations) == 0:
            rest = self.preparing / (self.seconds - self.preparing)
            self._metrics["train"]["dppo/rest"].append(rest)
            self.seconds = self.preparing = 0.0
        return loss

    def _compute_loss(self, model, inputs) -> torch.Tensor:
        """TRL's loss of a micro-batch, whose gradient carries the multipliers."""
        if inputs is None:
            return torch.zeros((), device=self.accelerator.device, requires_grad=True)
        self.multiplier = inputs.get("multiplier")
        return super()._compute_loss(model, inputs)

    def _get_per_token_logps_and_entropies(self, *args, **options):
        """TRL's log-probs [B, T]; in the loss, each row's gradient is multiplied."""
        logprobs, *others = super()._get_per_token_logps_and_entropies(*args, **options)
        if self.multiplier is not None and logprobs.requires_grad:
            multiplier = self.multiplier.to(logprobs)[:, None]
            logprobs.register_hook(lambda gradient: gradient * multiplier)
        return logprobs, *others

    # --------------------------------------------------------------------------------- checkpoints

    def _save_checkpoint(self, model, trial) -> None:
        """TRL's checkpoint, and dppo.pt, with the prompt history and the mean of tokens. Draws
        follow from the seed and the step."""
        if self.prunes_prompts and self.args.should_save:
            name = f"checkpoint-{self.state.global_step}"
            dppo_shared.save(Path(self._get_output_dir(trial), name), self)
        super()._save_checkpoint(model, trial)

    def _load_optimizer_and_scheduler(self, checkpoint) -> None:
        """TRL's, and dppo.pt."""
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None and self.prunes_prompts:
            dppo_shared.load(Path(checkpoint), self, "train_dataset")
