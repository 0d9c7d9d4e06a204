"""
Train a language model with DPPO. GRPO is the special case that prunes nothing.

    torchrun train.py                                     the embedded task: no GPU, no download
    torchrun train.py --method grpo --out-dir out-grpo    the same task with GRPO
    torchrun --nproc-per-node 8 train.py --model Qwen/Qwen3-0.6B --data FILE.jsonl --lr 1e-6

`python train.py` runs one process. config.py explains the flags. `Trainer.step` is the algorithm;
run.py is the run around it: log, evaluations, checkpoints.

Every rank holds the whole model, or with --shard fsdp a share of the weights that are trained. With
--shard fsdp, or in bfloat16, it samples from a copy. Before the rollout, prompts are divided among
the ranks so that each expects equally many tokens. After pruning, the kept completions are divided
again, because pruning leaves the ranks with unequal work. Every rank computes the keep decisions,
advantages and denominators from the gathered batch. Gradients are summed over ranks once per
update. All randomness is a function of (seed, step, purpose, prompt), so a resumed run repeats
what an uninterrupted run would have done, with as many ranks and threads.

Letters: Q candidates of a step, K prompts rolled out, G completions each, P parameters.
"""

import math
import sys
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist

import config
import dppo
import metrics
import models
import packing
import rewards
import rollout
import run
import sampler
from config import Config
from runtime import InputError, deal, ranks
from runtime.timer import Timer
from update import UpdateStats, accumulate_gradients, trainer_logprobs

TOKENS_MEMORY = 10  # steps after which a batch's token count counts 1/e in the mean
STATISTICS = ("lengths", "truncated", "entropy", "energy")  # of Rollouts; every rank gets all


@dataclass
class Batch:
    """K prompts with G completions each. [K, G] tensors cover all ranks, token ids this one."""

    prompts: torch.Tensor  # [K], indices into the data
    rank: torch.Tensor  # [K, G], that sampled it
    mine: torch.Tensor  # the rows with completions of this rank; `rollouts` and `texts` are theirs
    rollouts: rollout.Rollouts
    texts: list[list[str]]
    rewards: torch.Tensor  # [K, G] and all below; NaN: unscorable
    lengths: torch.Tensor
    truncated: torch.Tensor
    entropy: torch.Tensor  # nats, summed over a completion's tokens
    energy: torch.Tensor  # |onehot - softmax|^2 of the logits, summed likewise; sizes its gradient


@dataclass
class FullBatch:
    """The K prompts before completions are pruned: what each adds to the gradient of all Q."""

    batch: Batch
    chosen: sampler.Selection
    advantages: torch.Tensor  # [K, G]
    scale: torch.Tensor  # [K, G], 1 / denominator of the un-pruned batch; 0: masked
    factor: torch.Tensor  # [K, G], prompt weight x scale; a completion's own weight comes later
    cost: torch.Tensor  # [K, G], tokens, prompt + completion
    minibatch: torch.Tensor  # [K], the update that it belongs to
    num_tokens: float  # completion tokens of the Q candidates, estimated if prompts are pruned


class Update(NamedTuple):
    """One optimizer update: what its draw kept, and what was measured."""

    keep: torch.Tensor  # [K, G] bool
    weights: torch.Tensor  # [K, G]
    sums: UpdateStats
    grad_norm: float


class Trainer:
    """Model, optimizer, prompt history, tokenizer and data. `step` is the algorithm.

    reward(completion, answer) returns a finite number, or None if the reference answer cannot be
    scored. Without one, the data's own reward is used. Raises InputError for bad input before
    anything is written.
    """

    def __init__(self, cfg: Config, reward=None):
        self.cfg = cfg = config.resolve(cfg)
        self.rank, self.world = ranks.start(cfg.device)
        self.is_main = self.rank == 0
        self.show_progress = self.is_main and sys.stderr.isatty()
        self.timer = Timer(cfg.device)
        if cfg.model == "tiny":
            # A second thread gains 4 %. Beside another program it makes a step 4.5 times as long.
            torch.set_num_threads(1)
        problems = models.load_problems(cfg, reward)  # first: a bad file is reported at once
        self.train_set, self.eval_set, self.reward, self.eval_reward = problems
        run.check_start(cfg)
        self.saved = run.find_checkpoint(cfg)  # the weights are loaded here, the rest by run.Run
        loaded = models.load_models(cfg, self.saved)
        self.model, self.tokenizer, self.policy, self.reference, _ = loaded
        self.train_set, self.train_ids = models.encode(cfg, loaded, self.train_set)
        self.eval_set, self.eval_ids = models.encode(cfg, loaded, self.eval_set)
        config.check_prompts(cfg, len(self.train_set))
        prompts = self.train_ids + self.eval_ids
        self.sampling = models.make_sampling(cfg, loaded, prompts, self.show_progress)

        self.prompt_tokens = torch.tensor([len(ids) for ids in self.train_ids])  # [prompts]
        sources = [problem.source for problem in self.train_set]
        self.history = sampler.PromptHistory(self.prompt_tokens, sources, cfg.prompts_per_step)
        divides_by_tokens = dppo.LOSSES[cfg.loss].denominator == "batch tokens"
        self.needs_mean_tokens = config.prunes_prompts(cfg) and divides_by_tokens
        self.mean_tokens = None  # of the un-pruned batches of the last steps
        self.optimizer = models.make_optimizer(cfg, self.model.parameters())

    def step(self, step: int) -> tuple[dict, list[dict]]:
        """One step of DPPO; returns its rows for log.jsonl and samples.jsonl."""
        started = self.timer.start()
        generator = dppo.generator_for(self.cfg.seed, step, "keep")  # the same on every rank

        # 1. Select prompts. The denominator counts all Q candidates, whatever is pruned.
        window = self.candidates(step)  # [Q]
        # --- DPPO, before rollout: drop prompts by history, weight the rest by 1 / P(kept)
        chosen = self.prune_prompts(window, step, generator)  # K of them
        # ---

        # 2. Sample G completions for each prompt, and 3. reward each of them.
        batch = self.roll_out(chosen.prompts, step, "rollout")

        # 4. Advantage, over the full group, and 5. denominator, over the full batch.
        full = self.full_batch(batch, chosen)
        history = metrics.history(self.history, step, window, chosen.kept)

        # 6. Prune completions and 7. update, once per mini-batch, each with its own draw.
        updates = []
        with self.timer.measure("train"):
            learning_rate = config.learning_rate(self.cfg, step)
            self.optimizer.param_groups[0]["lr"] = learning_rate
            minibatches = range(self.cfg.minibatches)
            # --- DPPO, after reward: drop completions, weight the rest by 1 / P(kept)
            draws = [self.prune_completions(full, number, generator) for number in minibatches]
            # ---
            old_logprobs = self.old_logprobs(batch, draws)
            for keep, weights in draws:  # [K, G]
                updates.append(self.update(step, full, keep, weights, old_logprobs))
            self.update_history(step, full)
        times = self.timer.seconds | {"step_time": self.timer.now() - started}
        row = {"step": step} | metrics.row(self.cfg, full, updates, learning_rate) | times | history
        return row, metrics.samples(step, self.cfg, full, updates, self.train_set)

    def candidates(self, step: int) -> torch.Tensor:
        """The window [Q] of prompts that a step considers."""
        cfg = self.cfg
        return sampler.candidates(len(self.train_set), cfg.prompts_per_step, cfg.seed, step)

    def prune_prompts(self, window, step, generator) -> sampler.Selection:
        """Stage 1: draw from the window [Q]. With --prompt-rule none all are kept, weight 1."""
        cfg = self.cfg
        rule = cfg.prompt_rule
        if self.needs_mean_tokens and self.mean_tokens is None:
            rule = "none"  # the first step, which counts the un-pruned batch's tokens
        keep, weights = self.history.prune(
            rule, cfg.prompt_prune_rate, window, generator, step, cfg.minibatches
        )  # [Q], [Q]
        position = keep.nonzero().squeeze(1)  # [K]
        return sampler.Selection(window[keep], weights[keep], position, keep)

    def roll_out(self, prompts, step, *purpose) -> Batch:
        """Stages 2 and 3 for different prompts [K], with random numbers of their own for each
        purpose."""
        with self.timer.measure("rollout"):
            ranks.refresh(self.policy, self.model)
        expected = self.history.relative_tokens(prompts, step)  # [K]
        rank = deal.rollouts(expected.tolist(), self.cfg.group_size, self.world, True)  # [K, G]
        wanted = rank == self.rank
        mine = wanted.any(dim=1).nonzero()[:, 0]
        indices = prompts[mine].tolist()
        seed = dppo.seed_for(self.cfg.seed, step, *purpose)
        with run.stops_if_not_finite(self.cfg, step):
            rollouts, texts, scores = self._sample_and_score(indices, seed)
        columns = [scores, *(getattr(rollouts, name) for name in STATISTICS)]  # of this rank
        table = torch.zeros(*rank.shape, len(columns), dtype=torch.float64)  # [K, G, columns]
        table[wanted] = torch.stack([c[wanted[mine]].double() for c in columns], dim=-1)
        columns = ranks.all_reduce(table).unbind(dim=-1)
        return Batch(prompts, rank, mine, rollouts, texts, *columns)

    def _sample_and_score(self, indices, seed):
        prompt_ids = [self.train_ids[index] for index in indices]
        # A prompt's random numbers follow from the seed and its key. The 0 keeps them as they were
        # when a prompt could be sampled more than once in a step.
        keys = [(index, 0) for index in indices]
        options = {"group_size": self.cfg.group_size, "seed": seed, "keys": keys}
        with self.timer.measure("rollout"):
            rollouts = rollout.sample(self.policy, prompt_ids, self.sampling, **options)
        with self.timer.measure("score"):
            problems = [self.train_set[index] for index in indices]
            texts, scores = rewards.score(rollouts, problems, self.tokenizer, self.reward)
        return rollouts, texts, scores

    def full_batch(self, batch: Batch, chosen: sampler.Selection) -> FullBatch:
        """Stages 4 and 5. The denominator is the un-pruned batch's, over the mini-batches.

        dapo and cispo divide by its tokens. Where prompts are pruned these are not known, and to
        divide by this draw's estimate would be biased: the divisor is the last steps' mean.
        """
        cfg = self.cfg
        advantages = dppo.group_advantages(batch.rewards, cfg.loss)  # [K, G]
        trained = 1.0 - batch.truncated * cfg.mask_truncated  # [K, G]; 0: masked
        num_tokens = trained * chosen.weights[:, None] * batch.lengths
        num_tokens = num_tokens.sum().item()  # on average those of all Q
        denominator = {
            "num_sequences": cfg.prompts_per_step * cfg.group_size // cfg.minibatches,
            "num_tokens": (self.mean_tokens or num_tokens) / cfg.minibatches,
            "max_new_tokens": cfg.max_new_tokens,
        }
        scale = trained * dppo.loss_scale(batch.lengths, cfg.loss, **denominator)  # [K, G]
        cost = self.prompt_tokens[batch.prompts, None] + batch.lengths  # [K, G]
        minibatch = chosen.position * cfg.minibatches // cfg.prompts_per_step  # [K]
        factor = chosen.weights[:, None] * scale
        return FullBatch(batch, chosen, advantages, scale, factor, cost, minibatch, num_tokens)

    def prune_completions(self, full, minibatch, generator) -> tuple[torch.Tensor, torch.Tensor]:
        """Stage 6: (keep, weights) [K, G] of one draw; other mini-batches are not kept.

        With --completion-rule none everything is kept, with weight 1.
        """
        cfg = self.cfg
        keep = torch.zeros_like(full.factor, dtype=torch.bool)
        weights = torch.zeros_like(full.factor)
        rows = full.minibatch == minibatch  # [K]
        advantages, energy = full.advantages[rows], full.batch.energy[rows]
        size = dppo.contribution_size(advantages, full.factor[rows], energy, cfg.beta)
        part = dppo.Completions(advantages, full.batch.rewards[rows], full.cost[rows], size)
        rule, rate = cfg.completion_rule, cfg.completion_prune_rate
        keep[rows], weights[rows] = dppo.prune_completions(rule, rate, part, generator)
        return keep, weights

    def backward(self, full, keep, weights, old_logprobs=None) -> UpdateStats:
        """The gradient of what is kept, summed over packs and ranks, in .grad."""
        self.optimizer.zero_grad()
        batch, rollouts = full.batch, full.batch.rollouts
        advantages, factor = full.advantages, full.factor * weights  # [K, G] each
        if self.world > 1:  # each rank gets its share of what all of them have kept
            prompt_ids = [self.train_ids[index] for index in batch.prompts.tolist()]
            share_prompts = packing.shares_prompts(self.cfg.device)
            width = self.model.config.hidden_size
            rollouts, places, old_logprobs = deal.exchange(
                rollouts, batch.rank, keep, batch.lengths, prompt_ids, share_prompts, width,
                old_logprobs,
            )  # fmt: skip
            advantages = advantages.flatten()[places, None]  # [n, 1]
            factor = factor.flatten()[places, None]  # [n, 1]
            keep = keep.flatten()[places, None]  # [n, 1]
        sums = accumulate_gradients(
            self.model, rollouts, advantages, factor, keep, cfg=self.cfg,
            old_logprobs=old_logprobs, reference=self.reference, show_progress=self.show_progress,
        )  # fmt: skip
        ranks.sum_gradients(self.model)
        return UpdateStats(*ranks.all_reduce(torch.tensor(sums, dtype=torch.float64)).tolist())

    def update(self, step, full, keep, weights, old_logprobs=None) -> Update:
        """Stage 7: one optimizer update."""
        sums = self.backward(full, keep, weights, old_logprobs)
        longest = self.cfg.grad_clip or math.inf
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), longest)
        grad_norm = ranks.whole(norm).item()
        with run.stops_if_not_finite(self.cfg, step):
            if not (math.isfinite(sums.loss) and math.isfinite(grad_norm)):
                raise FloatingPointError(f"loss {sums.loss}, gradient norm {grad_norm}")
        self.optimizer.step()
        return Update(keep, weights, sums, grad_norm)

    def old_logprobs(self, batch: Batch, draws: list) -> torch.Tensor | None:
        """The trainer's log-probs [., G, T], taken before the step's first update, of completions
        that any draw has kept and this rank has sampled; None if no later update needs them."""
        cfg = self.cfg
        if not cfg.importance_cap or len(draws) == 1:
            return None
        kept = torch.stack([keep for keep, _ in draws]).any(dim=0) & (batch.rank == self.rank)
        return trainer_logprobs(self.model, batch.rollouts, cfg, kept[batch.mine])

    def group_squares(self, full: FullBatch) -> torch.Tensor:
        """Squared size [K] of each group's term in the full gradient, without prompt weights."""
        energy = full.batch.energy  # [K, G]
        size = dppo.contribution_size(full.advantages, full.scale, energy, self.cfg.beta)  # [K, G]
        return size.square().sum(dim=1)

    def update_history(self, step: int, full: FullBatch) -> None:
        """Update what later steps draw and divide by, with the groups that were rolled out."""
        batch, prompt_weights = full.batch, full.chosen.weights
        square, tokens = self.group_squares(full), batch.lengths.sum(dim=1)  # [K], [K]
        self.history.update(
            step, batch.prompts, prompt_weights, batch.rewards, full.advantages, square, tokens
        )
        if self.needs_mean_tokens:
            mean = self.mean_tokens or full.num_tokens
            # 0 cannot be divided by. None makes the next step keep all prompts and count.
            self.mean_tokens = mean + (full.num_tokens - mean) / TOKENS_MEMORY or None

    def state(self) -> dict:
        """What a checkpoint holds of this besides the model and the optimizer."""
        return {"history": vars(self.history), "mean_tokens": self.mean_tokens}

    def load_state(self, state: dict) -> None:
        vars(self.history).update(state["history"])
        self.mean_tokens = state["mean_tokens"]


def main(cfg: Config, *, reward=None, until: int | None = None, trainer_class=Trainer) -> None:
    """One training run. Raises InputError for bad input before anything is written. `until`: stop
    after this step as if by SIGTERM; learning-rate schedules still end at cfg.steps."""
    run.Run(trainer_class(cfg, reward)).go(until)


def cli(reward=None, trainer_class=Trainer, args: list[str] | None = None) -> None:
    """The command line: train with its flags. Bad input ends in one line and exit status 2."""
    try:
        cfg = config.parse_config(sys.argv[1:] if args is None else args)
        main(cfg, reward=reward, trainer_class=trainer_class)
    except (InputError, dppo.RuleError) as problem:
        ranks.report(problem)
        sys.exit(2)
    finally:
        if dist.is_initialized() and "vllm" not in sys.modules:  # vLLM destroys the group itself
            dist.destroy_process_group()


if __name__ == "__main__":
    cli()
