"""
A training run around train.Trainer: evaluations, running checks, log, checkpoints, stops, resume.

A step is in the log before its checkpoint is written. Whatever a checkpoint holds changes only in a
step's updates, so a run that is stopped or killed at any moment goes on where it was.

Letters: Q candidates of a step, P parameters.
"""

import contextlib
import json
import math
import sys
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist

import dppo
import eval as evaluation
import metrics
import sampler
from config import Config
from related import tail
from runtime import InputError, checkpoint, log, ranks
from runtime.stop import Stopped, resume_command

EVAL_K = 4  # completions per evaluation problem, as in the log's eval/avg@4
CHECK_DRAWS = 8  # pruned gradients that a running check compares with the full one
DEAD_STEPS = 5  # without a live group, before a run says so


class Run:
    """The run of a Trainer, new or restored."""

    check_draws = CHECK_DRAWS

    def __init__(self, trainer):
        self.trainer, self.cfg = trainer, trainer.cfg
        self.out_dir = Path(trainer.cfg.out_dir)
        saved = trainer.saved or {"step": 0, "evaluated": False}
        self.done = saved["step"]  # steps whose rows are in the log
        self.saved_at = self.done  # the step of the newest checkpoint
        self.evaluated = saved["evaluated"] or not self.evaluation_due(self.done)
        self.dead_steps = 0  # in a row, without a live group
        self.said = set()  # notes that are not repeated
        if self.cfg.resume and self.done >= self.cfg.steps and self.evaluated:
            more = ", or give more --steps" * (self.cfg.lr_schedule == "constant")
            raise InputError(
                f"--resume: the run in {self.out_dir} has ended after its {self.done} steps: use "
                f"another --out-dir{more}"
            )

    def go(self, until: int | None = None) -> None:
        """All steps up to --steps or `until`, or until a stop is requested."""
        self.open_folder()
        stop = self.trainer.stop
        with stop.listening():
            with contextlib.suppress(Stopped):
                if not self.evaluated:  # before the first step, or if one was interrupted
                    self.write_evaluation(self.evaluate(self.done))
                last = self.cfg.steps if until is None else min(self.cfg.steps, until)
                while self.done < last and not stop.agree():
                    row, samples = self.advance()
                    self.write(row | self.evaluate(row["step"]), samples)

                    # after the row, so that a checkpoint's step is always in the log
                    every = self.cfg.save_every
                    if every and (self.done % every == 0 or self.done == self.cfg.steps):
                        self.save()
            if self.done > self.saved_at and (stop.agreed or self.done < self.cfg.steps):
                self.save()
        self.close()

    def advance(self) -> tuple[dict, list[dict]]:
        """The next step, and the running check before it if it is due; returns what `step` does."""
        step = self.done + 1
        self.trainer.threads.fit()
        every = self.cfg.check_every
        due = every and step % every == 0
        checks = check(self.trainer, step, self.check_draws) if due else {}
        row, samples = self.trainer.step(step)
        self.trainer.stop.held = False
        return row | checks, samples

    # ------------------------------------------------------------------------ evaluation

    def evaluation_due(self, step: int) -> bool:
        every = self.cfg.eval_every
        return every > 0 and (step % every == 0 or step == self.cfg.steps)

    def evaluate(self, step: int) -> dict:
        """avg@4 on the held-out problems, of all ranks; {} if it is not due or was interrupted."""
        if not self.evaluation_due(step):
            return {}
        t = self.trainer
        mine = slice(t.rank, None, t.world)
        options = {"seed": dppo.seed_for(self.cfg.seed, step, "eval"), "k": EVAL_K}
        options["keys"] = range(len(t.eval_set))[mine]
        ranks.refresh(t.policy, t.model)
        problems, ids = t.eval_set[mine], t.eval_ids[mine]
        args = (t.policy, t.tokenizer, problems, ids, t.eval_reward, t.sampling)
        try:
            with stops_if_not_finite(self.cfg, step):
                scores, _truncated = t.stop.run(evaluation.sample_rewards, *args, **options)
        except Stopped:
            return {}
        rewards = torch.zeros(len(t.eval_set), EVAL_K, dtype=torch.float64)
        rewards[mine] = scores
        return {f"eval/avg@{EVAL_K}": evaluation.avg_at_k(ranks.all_reduce(rewards))}

    # ------------------------------------------------------------------------ log and checkpoints

    def open_folder(self) -> None:
        """Write config.json, cut the log back to the checkpoint, and say what the run is."""
        t = self.trainer
        self.log = log.Log(self.out_dir) if t.is_main else None
        if t.is_main:
            if self.done and (stored := checkpoint.stored_ranks(self.out_dir)) != t.world:
                how = "sums round differently, so samples will differ in time"
                print(f"resuming a run of {stored} ranks on {t.world}: {how}")
            self.log.open(self.done)
            if self.cfg.track:
                self.log.start_tracker(self.cfg.track, asdict(self.cfg))
            checkpoint.write_config(self.out_dir, asdict(self.cfg), t.world, name_of(t.reward))
            sizes = (len(t.train_set), len(t.eval_set))
            print(metrics.first_lines(self.cfg, t.policy, t.world, *sizes, self.done + 1))

    def write(self, row: dict, samples: list[dict]) -> None:
        """Log a finished step."""
        dead = row["frac_reward_zero_std"]
        if not math.isnan(dead):  # a step that stopped at --rollout-checkpoint says nothing
            self.dead_steps = self.dead_steps + 1 if dead == 1 else 0
        if self.trainer.is_main:
            self.log.write(row, samples, metrics.console_line(row, self.cfg.steps))
        if row["frac_reward_some_none"] > 0:
            self.note_once("some none", metrics.SOME_NONE)
        if self.dead_steps == DEAD_STEPS:
            samples_path = self.out_dir / "samples.jsonl"
            note = metrics.nothing_learned(row["reward"], DEAD_STEPS, samples_path)
            self.note_once("nothing learned", note)
        self.done = row["step"]
        self.evaluated = f"eval/avg@{EVAL_K}" in row or not self.evaluation_due(self.done)

    def note_once(self, topic: str, note: str) -> None:
        """Print a note, unless the run has printed one of this topic."""
        if self.trainer.is_main and topic not in self.said:
            print(f"note: {note}")
        self.said.add(topic)

    def write_evaluation(self, scores: dict) -> None:
        """Add a late evaluation to the row of the last step; step 0 is the model as loaded."""
        if self.trainer.is_main and scores:
            self.log.amend(self.done, scores)
        self.evaluated = bool(scores)

    def save(self) -> None:
        """A checkpoint of the last logged step. All ranks contribute to that of a sharded model."""
        t = self.trainer
        self.saved_at = self.done
        if not t.is_main and self.cfg.shard == "none":
            return
        state = {
            "step": self.done,
            "evaluated": self.evaluated,
            "optimizer": ranks.gather(t.optimizer.state_dict()),
            "history": vars(t.history),
            "selector": vars(t.selector) if t.selector else None,
            "mean_tokens": t.mean_tokens,
            "reference": checkpoint.fingerprint(t.reference) if t.reference else None,
        }
        weights = ranks.weights(t.model)
        if t.is_main:
            args = (self.out_dir, t.model, weights, t.tokenizer, state)
            checkpoint.save(*args, keep=self.cfg.keep_checkpoints)

    def close(self) -> None:
        """Draw run.png, say how the run ended, and wait for the other ranks."""
        if self.trainer.is_main:
            self.log.close()
            if self.done < self.cfg.steps or not self.evaluated:
                command = resume_command(self.cfg.out_dir)
                line = f"stopped after step {self.done}; resume with: {command}"
                print(line, flush=True)
                if self.trainer.stop.agreed:
                    ranks.repeat_below_torchrun(line)
            else:
                current = self.saved_at == self.done
                saved = f", {self.out_dir / 'checkpoint'}/" if current else ""
                print(f"done: {self.log.path}, {self.out_dir / 'run.png'}{saved}")
        ranks.finish()
        if self.cfg.engine == "vllm":
            self.trainer.sampling.engine.close()


# ---------------------------------------------------------------------------- the start of a run


def name_of(reward) -> str:
    """What a run's config.json calls its reward: its name and its module's file. It may be a
    function, a partial of one, or an object that can be called."""
    function = getattr(reward, "func", reward)
    named = function if hasattr(function, "__qualname__") else type(function)
    file = getattr(sys.modules.get(named.__module__), "__file__", None) or named.__module__
    return f"{named.__qualname__} of {Path(file).name}"


def check_start(cfg: Config, reward) -> None:
    """InputError if there is a run that would be overwritten, none to resume, one with another
    reward, or no rank to share the weights with."""
    folder = Path(cfg.out_dir)
    holds_run = (folder / "config.json").exists()
    has_steps = any(row["step"] > 0 for row in log.read_rows(folder / "log.jsonl"))
    if holds_run and has_steps and not cfg.resume:
        raise InputError(
            f"--out-dir {cfg.out_dir} holds a run: give --resume to continue it, or another "
            f"--out-dir"
        )
    if cfg.resume and not holds_run:
        raise InputError(
            f"--resume: {cfg.out_dir} holds no run: give the --out-dir of a run, or leave --resume "
            f"out to start one there"
        )
    if cfg.resume:
        before = json.loads((folder / "config.json").read_text()).get("reward")
        if before and before != name_of(reward):
            raise InputError(
                f"--resume: the run in {cfg.out_dir} has the reward {before}, not "
                f"{name_of(reward)}: resume it with the program that started it"
            )
    if cfg.shard == "fsdp" and not dist.is_initialized():
        raise InputError("--shard fsdp: no ranks share the weights; start train.py with torchrun")
    ranks.barrier()  # every rank has looked before rank 0 writes


def find_checkpoint(cfg: Config) -> Path | None:
    """The checkpoint to resume from, if any."""
    return ranks.broadcast(checkpoint.find, Path(cfg.out_dir)) if cfg.resume else None


def restore(trainer, folder: Path) -> dict:
    """Give a Trainer what a checkpoint holds besides the weights; returns how far the run was."""
    cfg, state = trainer.cfg, checkpoint.load_state(folder)
    if trainer.reference:
        fingerprint = checkpoint.fingerprint(trainer.reference)
        if not math.isclose(fingerprint, state["reference"], rel_tol=1e-6):
            raise InputError(
                f"--model {cfg.model} is not the model that the run in {cfg.out_dir} began with, "
                f"which --beta needs"
            )
    if not torch.equal(state["history"]["kind"], trainer.history.kind):
        raise InputError(
            f"--data {cfg.data}: {len(trainer.train_set)} prompts, but the run in {cfg.out_dir} "
            f"was started with {len(state['history']['kind'])}, or with others: give it the data "
            f"it had, or use another --out-dir"
        )
    ranks.load_optimizer(trainer.optimizer, state["optimizer"])
    vars(trainer.history).update(state["history"])
    if trainer.selector:
        vars(trainer.selector).update(state["selector"])
    trainer.mean_tokens = state.get("mean_tokens")
    return {"step": state["step"], "evaluated": state["evaluated"]}


@contextlib.contextmanager
def stops_if_not_finite(cfg: Config, step: int):
    """Turn a FloatingPointError into the message of a run that cannot continue."""
    try:
        yield
    except FloatingPointError as error:
        folder = Path(cfg.out_dir)
        raise InputError(
            f"step {step} is not finite ({error}): nothing of it was saved; the last checkpoint, "
            f"if any, is in {folder / 'checkpoint'}. Lower --lr, or look at {folder / 'log.jsonl'}"
        ) from None


# ---------------------------------------------------------------------------- the running check


def check(trainer, step: int, draws: int) -> dict:
    """The running check that the prunings are unbiased.

    All Q candidates are rolled out once more; training does not use these rollouts. Their full
    gradient (of the first mini-batch) is compared with `draws` pruned ones, each with its own
    prompt draw and its own completion draw.
    """
    window = trainer.candidates(step)
    batch = trainer.roll_out(window, step, "check rollout")

    position = torch.arange(len(window))

    def full_batch(weights, beyond=1.0):  # [Q]; as if all had been rolled out, some for nothing
        chosen = sampler.Selection(window, weights, position)
        return trainer.full_batch(batch, tail.weigh(chosen, batch, trainer.cfg, beyond))

    def gradient(full, keep, weights):  # [P]
        trainer.backward(full, keep, weights)
        parameters = trainer.model.parameters()
        return torch.cat([ranks.whole(parameter.grad).flatten() for parameter in parameters])

    def pruned(number):  # [P]
        generator = dppo.generator_for(trainer.cfg.seed, step, "check keep", number)
        chosen = trainer.prune_prompts(window, step, generator)
        weights = torch.zeros(len(window), dtype=torch.float64)
        weights[chosen.position] = chosen.weights
        full = full_batch(weights, tail.toss(trainer, generator).weight)
        return gradient(full, *trainer.prune_completions(full, 0, generator))

    full = full_batch(torch.ones(len(window), dtype=torch.float64))
    keep = (full.minibatch == 0)[:, None].expand_as(full.factor)
    everything = gradient(full, keep, keep.double())
    return metrics.check_unbiased(everything, map(pruned, range(draws)))
