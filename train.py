"""
Train a language model with DPPO. GRPO is the special case that prunes nothing.

    torchrun train.py                                     the embedded task: no GPU, no download
    torchrun train.py --method grpo --out-dir out-grpo    the same task without pruning
    torchrun --nproc-per-node 8 train.py --model Qwen/Qwen3-0.6B --data FILE.jsonl --lr 1e-6

`python train.py` runs one process. config.py explains the flags. `Trainer.step` is the algorithm;
`main` is the run around it.

Every rank holds the whole model, or with --shard fsdp a share of the weights that are trained. With
--shard fsdp and in bfloat16 it samples from a copy. It rolls out its share of the prompts. Every
rank computes the keep decisions, advantages and denominators from the gathered batch. Gradients are
summed over ranks once per update. All randomness is a function of (seed, step, purpose, prompt), so
a resumed run repeats what an uninterrupted run would have done, with as many ranks and threads.

Letters: Q candidates of a step, K prompts rolled out, G completions each, P parameters.
"""

import contextlib
import functools
import itertools
import math
import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

import baselines
import config
import dppo
import eval as evaluation
import loading
import metrics
import rollout
import sampler
from config import Config
from runtime import InputError, checkpoint, log, ranks
from runtime.clock import Timer
from runtime.stop import Stop, Stopped, resume_command
from runtime.threads import Threads
from update import Sums, accumulate_gradients, trainer_logprobs

EVAL_K = 4  # completions per evaluation problem, as in the log's eval/avg@4
TOKENS_MEMORY = 10  # steps after which a batch's token count counts 1/e in the mean
CHECK_DRAWS = 8  # pruned gradients that a running check compares with the full one
STATISTICS = ("lengths", "truncated", "entropy", "energy")  # of Rollouts; every rank gets all


class Selection(NamedTuple):
    """Which of the Q candidates are rolled out, and how each of these K enters the update."""

    kept: torch.Tensor | None  # [Q] bool; None: greso, which has no window of candidates
    weights: torch.Tensor  # [K], 1 / P(kept); 0: rolled out, but not trained on
    position: torch.Tensor  # [K], among the Q candidates; it decides the mini-batch
    shares: torch.Tensor  # [K], how many of the Q candidates it represents in logged means


@dataclass
class Batch:
    """K prompts with G completions each. [K, G] tensors cover all ranks, token ids this one."""

    prompts: torch.Tensor  # [K], indices into the data
    mine: torch.Tensor  # the rows of this rank; `rollouts` and `texts` are theirs
    rollouts: rollout.Rollouts
    texts: list[list[str]]
    rewards: torch.Tensor  # [K, G] and all below; NaN: unscorable
    lengths: torch.Tensor
    truncated: torch.Tensor
    entropy: torch.Tensor  # nats, summed over a completion's tokens
    energy: torch.Tensor  # |onehot - softmax|^2 of the logits, summed likewise; sizes its gradient
    computed: float  # tokens that the model computed to sample these; see Rollouts


@dataclass
class FullBatch:
    """The batch before completions are pruned: what each completion adds to its gradient."""

    batch: Batch
    chosen: Selection
    advantages: torch.Tensor  # [K, G]
    scale: torch.Tensor  # [K, G], prompt weight over denominator; 0: masked
    group_square: torch.Tensor  # [K], squared size of the group's term in the full gradient
    cost: torch.Tensor  # [K, G], tokens, prompt + completion
    minibatch: torch.Tensor  # [K]; -1: none
    num_tokens: float  # completion tokens of the Q candidates, estimated if prompts are pruned


class Update(NamedTuple):
    """One optimizer update: what its draw kept, and what was measured."""

    keep: torch.Tensor  # [K, G] bool
    weights: torch.Tensor  # [K, G]
    sums: Sums
    grad_norm: float


def join(parts: list[Batch]) -> Batch:
    """Concatenate batches; only greso rolls out in several rounds."""
    if len(parts) == 1:
        return parts[0]
    starts = itertools.accumulate((len(part.prompts) for part in parts), initial=0)
    names = ("prompts", "rewards", *STATISTICS)
    return Batch(
        mine=torch.cat([part.mine + start for part, start in zip(parts, starts, strict=False)]),
        rollouts=rollout.join([part.rollouts for part in parts]),
        texts=[text for part in parts for text in part.texts],
        **{name: torch.cat([getattr(part, name) for part in parts]) for name in names},
        computed=sum(part.computed for part in parts),
    )


# ---------------------------------------------------------------------------- the trainer


class Trainer:
    """A run: model, optimizer, prompt history, tokenizer and data. `step` is the algorithm.

    reward(completion, gold) returns a finite number, or None if the gold cannot be scored. Without
    one, the data's own reward is used. Raises InputError for bad input before anything is written.
    """

    def __init__(self, cfg: Config, reward=None):
        self.cfg = cfg = config.resolve(cfg)
        self.rank, self.world = ranks.start(cfg.device)
        if cfg.shard == "fsdp" and not dist.is_initialized():
            raise InputError(
                "--shard fsdp: no ranks share the weights; start train.py with torchrun"
            )
        self.out_dir = Path(cfg.out_dir)
        self.is_main = self.rank == 0
        self.show_progress = self.is_main and sys.stderr.isatty()
        self.stop = Stop()
        self.timer = Timer(cfg.device)
        self.threads = Threads(cfg.device)
        self.threads.fit()
        self._check_folder()
        problems = loading.load_problems(cfg, reward)  # first: a bad file is reported at once
        self.train_set, self.eval_set, self.reward, self.eval_reward = problems
        saved = ranks.broadcast(checkpoint.find, self.out_dir) if cfg.resume else None
        models = loading.load_models(cfg, saved)
        self.model, self.tokenizer, self.policy, self.reference, _ = models
        self.train_set, self.train_ids = loading.encode(cfg, models, self.train_set)
        self.eval_set, self.eval_ids = loading.encode(cfg, models, self.eval_set)
        config.check_prompts(cfg, len(self.train_set))
        prompts = self.train_ids + self.eval_ids
        self.sampling = loading.make_sampling(cfg, models, prompts, self.show_progress)
        self._make_state(saved)

    # ------------------------------------------------------------------------ the algorithm

    def step(self, step: int) -> tuple[dict, list[dict]]:
        """One step of DPPO; returns its rows for log.jsonl and samples.jsonl.

        Raises Stopped only before the first update, when nothing that is saved has changed.
        """
        started = self.timer.start()
        generator = sampler.generator_for(self.cfg.seed, step, "keep")  # the same on every rank
        greso = self.greso and self.greso.copy()

        # 1. Select prompts. The window of Q candidates is the denominator, whatever is pruned.
        window = self.candidates(step)  # [Q]
        if greso:  # a biased baseline (greso, dynamic, mopps): no window, no 1 / P(kept)
            batch, chosen = self.roll_out_greso(greso, step, generator)
        else:
            # --- DPPO, before rollout: drop prompts by history, weight the rest by 1 / P(kept)
            kept, weights = self.prune_prompts(window, step, generator)  # [Q], [Q]
            # ---
            chosen = Selection(kept, weights[kept], kept.nonzero().squeeze(1), weights[kept])
            # 2. Sample G completions for each prompt, and 3. reward each of them.
            batch = self.roll_out(window[kept], step, "rollout")

        # 4. Advantage, over the full group, and 5. denominator, over the full batch.
        full = self.full_batch(batch, chosen)
        history = self.history.summary(step, window, chosen.kept)

        # 6. Prune completions and 7. update, once per mini-batch and epoch, each with its own draw.
        updates = []
        with self.timer.measure("train"):
            learning_rate = self.set_learning_rate(step)
            old_logprobs = self.old_logprobs(batch)
            for minibatch in [*range(self.cfg.minibatches)] * self.cfg.epochs:
                # --- DPPO, after reward: drop completions, weight the rest by 1 / P(kept)
                keep, weights = self.prune_completions(full, minibatch, generator)  # [K, G]
                # ---
                updates.append(self.update(step, full, keep, weights, old_logprobs))
            self.learn(step, full)
            self.greso = greso
        times = self.timer.seconds | {"step_time": self.timer.now() - started}
        row = {"step": step} | metrics.row(self.cfg, full, updates, learning_rate) | times | history
        return row, metrics.samples(step, self.cfg, full, updates, self.train_set)

    def candidates(self, step: int) -> torch.Tensor:
        """The window [Q] of prompts that a step considers."""
        num_train = len(self.train_set)
        return sampler.candidates(num_train, self.num_candidates, self.cfg.seed, step)

    def prune_prompts(self, window, step, generator) -> tuple[torch.Tensor, torch.Tensor]:
        """Stage 1: (keep, weights) [Q] of one draw. The identity with --prompt-rule none."""
        rule, rate = self.cfg.prompt_rule, self.cfg.prompt_prune_rate
        if self.needs_mean_tokens and self.mean_tokens is None:
            rule = "none"  # the first step, which counts the un-pruned batch's tokens
        return self.history.prune(rule, rate, window, generator, step, self.cfg.minibatches)

    def roll_out(self, prompts, step, *purpose) -> Batch:
        """Stages 2 and 3 for prompts [K], with random numbers of their own for each purpose."""
        with self.timer.measure("rollout"):
            ranks.refresh(self.policy, self.model)
        mine = torch.arange(len(prompts))[self.rank :: self.world]
        # A prompt's key is its index, and how many times it came before: greso may repeat it.
        keys = [(q.item(), int((prompts[:place] == q).sum())) for place, q in enumerate(prompts)]
        seed = sampler.seed_for(self.cfg.seed, step, *purpose)
        with self.stops_if_not_finite(step):
            own = [keys[k] for k in mine]
            rollouts, texts, rewards = self.stop.run(self._sample_and_score, own, seed)
        columns = [rewards, *(getattr(rollouts, name) for name in STATISTICS)]  # of this rank
        shape = (len(prompts), self.cfg.group_size, len(columns))
        table = torch.zeros(shape, dtype=torch.float64)  # [K, G, columns]
        table[mine] = torch.stack([column.double() for column in columns], dim=-1)
        computed = ranks.all_reduce(torch.tensor(rollouts.computed, dtype=torch.float64)).item()
        columns = ranks.all_reduce(table).unbind(dim=-1)
        return Batch(prompts, mine, rollouts, texts, *columns, computed)

    def _sample_and_score(self, keys, seed):
        prompt_ids = [self.train_ids[index] for index, _ in keys]
        options = {"group_size": self.cfg.group_size, "seed": seed, "keys": keys}
        with self.timer.measure("rollout"):
            rollouts = rollout.sample(self.policy, prompt_ids, self.sampling, **options)
        with self.timer.measure("score"):
            problems = [self.train_set[index] for index, _ in keys]
            texts, rewards = evaluation.score(rollouts, problems, self.tokenizer, self.reward)
        return rollouts, texts, rewards

    def roll_out_greso(self, greso, step, generator) -> tuple[Batch, Selection]:
        """Stages 1 to 3 of GRESO (baselines.py); `greso` is a copy, which this advances."""
        order = functools.partial(sampler.epoch_order, len(self.train_set), self.cfg.seed)
        roll_out = lambda prompts, number: self.roll_out(prompts, step, "rollout", number)
        rounds, weights, position = greso.collect(roll_out, self.num_candidates, order, generator)
        shares = torch.full_like(weights, self.num_candidates / len(weights))
        return join(rounds), Selection(None, weights, position, shares)

    def full_batch(self, batch: Batch, chosen: Selection) -> FullBatch:
        """Stages 4 and 5. The denominator is that of one mini-batch of the un-pruned batch.

        dapo and cispo divide by its tokens. Where prompts are pruned these are not known, and a
        count that depends on the draw would be biased, so it is that of the last steps, on average.
        """
        cfg = self.cfg
        advantages = dppo.group_advantages(batch.rewards, cfg.loss)  # [K, G]
        counts = torch.ones_like(batch.lengths)  # [K, G]; 0: masked
        if cfg.mask_truncated:
            counts = 1.0 - batch.truncated
        weights = chosen.weights[:, None]  # [K, 1]
        num_tokens = (counts * weights * batch.lengths).sum().item()  # an unbiased estimate
        denominator = {
            "num_sequences": self.num_candidates * cfg.group_size // cfg.minibatches,
            "num_tokens": (self.mean_tokens or num_tokens) / cfg.minibatches,
            "max_new_tokens": cfg.max_new_tokens,
        }
        scale = counts * dppo.loss_scale(batch.lengths, cfg.loss, **denominator)  # [K, G]
        size = dppo.contribution_size(advantages, scale, batch.energy, cfg.beta)  # [K, G]
        group_square = size.square().sum(dim=1)  # [K]
        cost = self.prompt_tokens[batch.prompts, None] + batch.lengths  # [K, G]
        minibatch = chosen.position * cfg.minibatches // self.num_candidates  # [K]
        minibatch = torch.where(chosen.weights > 0, minibatch, -1)
        sizes = (weights * scale, group_square, cost)
        return FullBatch(batch, chosen, advantages, *sizes, minibatch, num_tokens)

    def prune_completions(self, full, minibatch, generator) -> tuple[torch.Tensor, torch.Tensor]:
        """Stage 6: (keep, weights) [K, G] of one draw; other mini-batches are not kept.

        With --completion-rule none everything is kept, with weight 1.
        """
        cfg = self.cfg
        keep = torch.zeros_like(full.scale, dtype=torch.bool)
        weights = torch.zeros_like(full.scale)
        rows = full.minibatch == minibatch  # [K]
        advantages = full.advantages[rows]
        energy = full.batch.energy[rows]
        size = dppo.contribution_size(advantages, full.scale[rows], energy, cfg.beta)
        part = dppo.Completions(advantages, full.batch.rewards[rows], full.cost[rows], size)
        module = baselines if cfg.completion_rule in baselines.COMPLETION_RULES else dppo
        rule, rate = cfg.completion_rule, cfg.completion_prune_rate
        keep[rows], weights[rows] = module.prune_completions(rule, rate, part, generator)
        return keep, weights

    def backward(self, full, keep, weights, old_logprobs=None) -> Sums:
        """The gradient of what is kept, summed over packs and ranks, in .grad."""
        self.optimizer.zero_grad()
        mine = full.batch.mine
        rows = (full.advantages[mine], (full.scale * weights)[mine], keep[mine])  # of this rank
        options = {"cfg": self.cfg, "old_logprobs": old_logprobs, "reference": self.reference}
        sums = self.stop.run(
            accumulate_gradients, self.model, full.batch.rollouts, *rows, **options,
            show_progress=self.show_progress, collective=self.cfg.shard == "fsdp",
        )  # fmt: skip
        ranks.sum_gradients(self.model)
        return Sums(*ranks.all_reduce(torch.tensor(sums, dtype=torch.float64)).tolist())

    def update(self, step, full, keep, weights, old_logprobs=None) -> Update:
        """Stage 7: one optimizer update. After the first, a stop waits for the end of the step."""
        sums = self.backward(full, keep, weights, old_logprobs)
        parameters = self.model.parameters()
        norm = torch.nn.utils.clip_grad_norm_(parameters, self.cfg.grad_clip)
        grad_norm = ranks.whole(norm).item()
        with self.stops_if_not_finite(step):
            if not (math.isfinite(sums.loss) and math.isfinite(grad_norm)):
                raise FloatingPointError(f"loss {sums.loss}, gradient norm {grad_norm}")
        self.stop.held = True
        self.optimizer.step()
        return Update(keep, weights, sums, grad_norm)

    def old_logprobs(self, batch: Batch) -> torch.Tensor | None:
        """The trainer's log-probs before the step's first update, if a later one needs them."""
        cfg = self.cfg
        if not cfg.importance_cap or cfg.epochs * cfg.minibatches == 1:
            return None
        args = (trainer_logprobs, self.model, batch.rollouts, cfg)
        return self.stop.run(*args, collective=cfg.shard == "fsdp")

    def learn(self, step: int, full: FullBatch) -> None:
        """Update what later steps draw and divide by, with the groups that were rolled out."""
        batch, tokens = full.batch, full.batch.lengths.sum(dim=1)  # [K]
        seen = (batch.rewards, full.advantages, full.group_square, tokens)
        self.history.update(step, batch.prompts, full.chosen.weights, *seen)
        if self.needs_mean_tokens:
            mean = self.mean_tokens or full.num_tokens
            # 0 is not known: then the next step counts again.
            self.mean_tokens = mean + (full.num_tokens - mean) / TOKENS_MEMORY or None

    def set_learning_rate(self, step: int) -> float:
        """Warm-up, then --lr-schedule; a decay reaches almost 0 in the last step."""
        cfg = self.cfg
        remaining = min(1.0, (cfg.steps + 1 - step) / max(1, cfg.steps + 1 - cfg.warmup))
        cosine = (1 - math.cos(math.pi * remaining)) / 2
        decay = {"constant": 1.0, "linear": remaining, "cosine": cosine}[cfg.lr_schedule]
        learning_rate = cfg.lr * min(1.0, step / max(1, cfg.warmup)) * decay
        self.optimizer.param_groups[0]["lr"] = learning_rate
        return learning_rate

    # ------------------------------------------------------------------------ around the algorithm

    def advance(self) -> tuple[dict, list[dict]]:
        """The next step, and the running check before it if it is due; returns what `step` does."""
        step = self.done + 1
        self.threads.fit()
        checks = self.check(step)
        row, samples = self.step(step)
        self.stop.held = False
        return row | checks, samples

    def check(self, step: int) -> dict:
        """The running check that both prunings are unbiased; {} if it is not due.

        All Q candidates are rolled out once more; training does not use these rollouts. Their full
        gradient (of the first mini-batch) is compared with CHECK_DRAWS pruned ones, each with its
        own prompt draw and its own completion draw.
        """
        every = self.cfg.check_every
        if not every or step % every:
            return {}
        window = self.candidates(step)
        batch = self.roll_out(window, step, "check rollout")
        ones = torch.ones(len(window), dtype=torch.float64)
        position = torch.arange(len(window))

        def gradient(full, keep, weights):  # [P]
            self.backward(full, keep, weights)
            parameters = self.model.parameters()
            return torch.cat([ranks.whole(parameter.grad).flatten() for parameter in parameters])

        def pruned(number):  # [P]
            generator = sampler.generator_for(self.cfg.seed, step, "check keep", number)
            _, weights = self.prune_prompts(window, step, generator)
            full = self.full_batch(batch, Selection(None, weights, position, weights))
            return gradient(full, *self.prune_completions(full, 0, generator))

        full = self.full_batch(batch, Selection(None, ones, position, ones))
        keep = (full.minibatch == 0)[:, None].expand_as(full.scale)
        everything = gradient(full, keep, keep.double())
        return dppo.check_unbiased(everything, map(pruned, range(CHECK_DRAWS)))

    def evaluation_due(self, step: int) -> bool:
        every = self.cfg.eval_every
        return every > 0 and (step % every == 0 or step == self.cfg.steps)

    def evaluate(self, step: int) -> dict:
        """avg@4 on the held-out problems, of all ranks; {} if it is not due or was interrupted."""
        if not self.evaluation_due(step):
            return {}
        mine = slice(self.rank, None, self.world)
        options = {"seed": sampler.seed_for(self.cfg.seed, step, "eval"), "k": EVAL_K}
        options["keys"] = range(len(self.eval_set))[mine]
        ranks.refresh(self.policy, self.model)
        problems, ids = self.eval_set[mine], self.eval_ids[mine]
        args = (self.policy, self.tokenizer, problems, ids, self.eval_reward, self.sampling)
        try:
            with self.stops_if_not_finite(step):
                scores = self.stop.run(evaluation.sample_rewards, *args, **options)
        except Stopped:
            return {}
        rewards = torch.zeros(len(self.eval_set), EVAL_K, dtype=torch.float64)
        rewards[mine] = scores[0]
        return {f"eval/avg@{EVAL_K}": evaluation.avg_at_k(ranks.all_reduce(rewards))}

    @contextlib.contextmanager
    def stops_if_not_finite(self, step: int):
        """Turn a FloatingPointError into the message of a run that cannot continue."""
        try:
            yield
        except FloatingPointError as error:
            raise InputError(
                f"step {step} is not finite ({error}): nothing of it was saved; the last "
                f"checkpoint, if any, is in {self.out_dir / 'checkpoint'}. Lower --lr, or look at "
                f"{self.out_dir / 'log.jsonl'}"
            ) from None

    # ------------------------------------------------------------------------ set-up

    def _check_folder(self) -> None:
        if not self.cfg.resume and (self.out_dir / "config.json").exists():
            raise InputError(
                f"--out-dir {self.cfg.out_dir} holds a run: give --resume to continue it, or "
                f"another --out-dir"
            )
        ranks.barrier()  # every rank has looked before rank 0 writes

    def _make_state(self, saved: Path | None) -> None:
        """Everything that a checkpoint holds besides the weights, from `saved` if there is one."""
        cfg = self.cfg
        self.num_candidates = config.num_candidates(cfg)  # Q
        self.prompt_tokens = torch.tensor([len(ids) for ids in self.train_ids])  # [prompts]
        sources = [problem.source for problem in self.train_set]
        self.history = sampler.PromptHistory(self.prompt_tokens, sources, self.num_candidates)
        self.greso = None
        if cfg.prompt_rule in baselines.SELECTORS:
            self.greso = baselines.selector(cfg.prompt_rule, len(sources))
        self.needs_mean_tokens = cfg.loss in dppo.TOKEN_MEANS and cfg.prompt_prune_rate > 0
        self.mean_tokens = None  # of the un-pruned batches of the last steps
        options = {"lr": cfg.lr, "weight_decay": cfg.weight_decay, "fused": cfg.device == "cuda"}
        self.optimizer = torch.optim.AdamW(self.model.parameters(), **options)
        self.done = 0  # steps whose rows are in the log
        self.evaluated = not self.evaluation_due(0)  # no evaluation is pending after step `done`
        self.saved_at = 0  # the step of the newest checkpoint
        if saved:
            self._restore(checkpoint.load_state(saved))

    def _restore(self, state: dict) -> None:
        cfg = self.cfg
        if self.reference:
            fingerprint = checkpoint.fingerprint(self.reference)
            if not math.isclose(fingerprint, state["reference"], rel_tol=1e-6):
                raise InputError(
                    f"--model {cfg.model} is not the model that the run in {cfg.out_dir} began "
                    f"with, which --beta needs"
                )
        if not torch.equal(state["history"]["kind"], self.history.kind):
            raise InputError(
                f"--data {cfg.data}: {len(self.train_set)} prompts, but the run in {cfg.out_dir} "
                f"was started with {len(state['history']['kind'])}, or with others: give it the "
                f"data it had, or use another --out-dir"
            )
        ranks.load_optimizer(self.optimizer, state["optimizer"])
        vars(self.history).update(state["history"])
        if self.greso:
            vars(self.greso).update(state["greso"])
        self.mean_tokens = state.get("mean_tokens")
        self.done = self.saved_at = state["step"]
        self.evaluated = state["evaluated"] or not self.evaluation_due(self.done)

    # ------------------------------------------------------------------------ the run folder

    def open_folder(self) -> None:
        """Write config.json, cut the log back to the checkpoint, and say what the run is."""
        cfg = self.cfg
        self.log = log.Log(self.out_dir) if self.is_main else None
        if self.is_main:
            if self.done and (stored := checkpoint.stored_ranks(self.out_dir)) != self.world:
                how = "sums round differently, so samples will differ in time"
                print(f"resuming a run of {stored} ranks on {self.world}: {how}")
            self.log.open(self.done)
            if cfg.track:
                self.log.start_tracker(cfg.track, asdict(cfg))
            checkpoint.write_config(self.out_dir, asdict(cfg), self.world)
            sizes = (len(self.train_set), len(self.eval_set))
            print(metrics.first_lines(cfg, self.model, self.world, *sizes, self.done + 1))

    def write(self, row: dict, samples: list[dict]) -> None:
        """Log a finished step."""
        if self.is_main:
            self.log.write(row, samples, metrics.console_line(row, self.cfg.steps))
        self.done = row["step"]
        self.evaluated = f"eval/avg@{EVAL_K}" in row or not self.evaluation_due(self.done)

    def write_evaluation(self, scores: dict) -> None:
        """Add a late evaluation to the row of the last step; step 0 is the model as loaded."""
        if self.is_main and scores:
            self.log.amend(self.done, scores)
        self.evaluated = bool(scores)

    def save(self) -> None:
        """A checkpoint of the last logged step. All ranks contribute to that of a sharded model."""
        self.saved_at = self.done
        if not self.is_main and self.cfg.shard == "none":
            return
        state = {
            "step": self.done,
            "evaluated": self.evaluated,
            "optimizer": ranks.gather(self.optimizer.state_dict()),
            "history": vars(self.history),
            "greso": vars(self.greso) if self.greso else None,
            "mean_tokens": self.mean_tokens,
            "reference": checkpoint.fingerprint(self.reference) if self.reference else None,
        }
        weights = ranks.weights(self.model)
        if self.is_main:
            args = (self.out_dir, self.model, weights, self.tokenizer, state)
            checkpoint.save(*args, keep=self.cfg.keep_checkpoints)

    def close(self) -> None:
        """Draw run.png, say how the run ended, and wait for the other ranks."""
        if self.is_main:
            self.log.close()
            if self.done < self.cfg.steps or not self.evaluated:
                command = resume_command(self.cfg.out_dir)
                print(f"stopped after step {self.done}; resume with: {command}", flush=True)
            else:
                saved = f", {self.out_dir / 'checkpoint'}/" if self.saved_at else ""
                print(f"done: {self.log.path}, {self.out_dir / 'run.png'}{saved}")
        ranks.finish()
        if self.cfg.engine == "vllm":
            self.sampling.engine.close()


# ---------------------------------------------------------------------------- the run


def main(cfg: Config, *, reward=None, until: int | None = None) -> None:
    """One training run. Raises InputError for bad input before anything is written.

    reward: see Trainer. until: stop after this step as if by SIGTERM; learning-rate schedules still
    end at cfg.steps.
    """
    trainer = Trainer(cfg, reward)
    trainer.open_folder()
    cfg, stop = trainer.cfg, trainer.stop
    with stop.listening():
        with contextlib.suppress(Stopped):
            if not trainer.evaluated:  # before the first step, or if an evaluation was interrupted
                trainer.write_evaluation(trainer.evaluate(trainer.done))
            last = cfg.steps if until is None else min(cfg.steps, until)
            while trainer.done < last and not stop.agree():
                row, samples = trainer.advance()
                trainer.write(row | trainer.evaluate(row["step"]), samples)

                # after the row, so that a checkpoint's step is always in the log
                done = trainer.done
                if cfg.save_every and (done % cfg.save_every == 0 or done == cfg.steps):
                    trainer.save()
        if trainer.done > trainer.saved_at and (stop.agreed or trainer.done < cfg.steps):
            trainer.save()
    trainer.close()


def cli(reward=None) -> None:
    """The command line: train with its flags. Bad input ends in one line and exit status 2."""
    try:
        main(config.parse_config(sys.argv[1:]), reward=reward)
    except InputError as problem:
        if int(os.environ.get("RANK", "0")) > 0:
            time.sleep(5)  # rank 0 reports it first, and torchrun then ends the other ranks
        print(f"error: {problem}", file=sys.stderr, flush=True)
        sys.exit(2)
    finally:
        if dist.is_initialized() and "vllm" not in sys.modules:  # vLLM destroys the group itself
            dist.destroy_process_group()


if __name__ == "__main__":
    cli()
