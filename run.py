"""
A training run around train.Trainer: evaluations, log, checkpoints, stops, resume.

A step is evaluated, then written to the log, then saved. So a run that is stopped or killed at any
moment goes on from its newest checkpoint, and repeats the steps after it exactly.

Letters: P parameters.
"""

import contextlib
import math
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist

import dppo
import eval as evaluation
import metrics
from config import Config
from runtime import InputError, checkpoint, log, ranks
from runtime.stop import Stop, resume_command

EVAL_K = 4  # completions per evaluation problem, as in the log's eval/avg@4
DEAD_STEPS = 5  # in a row without a live group, after which a run says so


class Run:
    """The run of a Trainer, new or restored."""

    def __init__(self, trainer):
        self.trainer, self.cfg = trainer, trainer.cfg
        self.out_dir = Path(trainer.cfg.out_dir)
        self.stop = Stop()
        self.done = 0  # steps whose rows are in the log
        if trainer.saved:
            self.done = restore(trainer, trainer.saved)
        self.saved_at = self.done  # the step of the newest checkpoint
        self.dead_steps = 0  # in a row
        self.said_some_none = False
        if self.cfg.resume and self.done >= self.cfg.steps:
            more = ", or give more --steps" * (self.cfg.lr_schedule == "constant")
            raise InputError(
                f"--resume: the run in {self.out_dir} has ended after its {self.done} steps: use "
                f"another --out-dir{more}"
            )

    def go(self, until: int | None = None) -> None:
        """All steps up to --steps or `until`, or until a stop is requested."""
        self.open_folder()
        with self.stop.listening():
            if self.done == 0 and self.cfg.eval_every:
                self.write_first(self.evaluate(0))
            last = self.cfg.steps if until is None else min(self.cfg.steps, until)
            stopped = self.stop.agreed()
            while self.done < last and not stopped:
                row, samples = self.trainer.step(self.done + 1)
                self.write(row | self.evaluate(row["step"]), samples)
                stopped = self.stop.agreed()
                if self.save_due() or stopped or self.done == last < self.cfg.steps:
                    self.save()
        self.close()

    # ------------------------------------------------------------------------ evaluation

    def evaluate(self, step: int) -> dict:
        """avg@4 on the held-out problems, of all ranks; {} if it is not due. Step 0 is the model as
        it was loaded."""
        every = self.cfg.eval_every
        if not every or (step % every and step != self.cfg.steps):
            return {}
        t = self.trainer
        mine = slice(t.rank, None, t.world)
        ranks.refresh(t.policy, t.model)
        with stops_if_not_finite(self.cfg, step):
            scores, _truncated = evaluation.sample_rewards(
                t.policy, t.tokenizer, t.eval_set[mine], t.eval_ids[mine], t.eval_reward,
                t.sampling, k=EVAL_K, seed=dppo.seed_for(self.cfg.seed, step, "eval"),
                keys=range(len(t.eval_set))[mine],
            )  # fmt: skip
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
            checkpoint.write_config(self.out_dir, asdict(self.cfg), t.world)
            problems, held_out = len(t.train_set), len(t.eval_set)
            first = self.done + 1
            print(metrics.first_lines(self.cfg, t.policy, t.world, problems, held_out, first))

    def write_first(self, scores: dict) -> None:
        """Log the evaluation of the model as it was loaded, as step 0."""
        if self.trainer.is_main:
            said = " | ".join(f"{name} {score:.3f}" for name, score in scores.items())
            self.log.write({"step": 0} | scores, [], f"step {0:5d} | {said}")

    def write(self, row: dict, samples: list[dict]) -> None:
        """Log a finished step."""
        self.done = row["step"]
        self.dead_steps = self.dead_steps + 1 if row["frac_reward_zero_std"] == 1 else 0
        if not self.trainer.is_main:
            return
        self.log.write(row, samples, metrics.console_line(row, self.cfg.steps))
        if row["frac_reward_some_none"] > 0 and not self.said_some_none:
            self.said_some_none = True
            print(f"note: {metrics.SOME_NONE}")
        if self.dead_steps == DEAD_STEPS:
            samples_path = self.out_dir / "samples.jsonl"
            note = metrics.nothing_learned(row["reward"], DEAD_STEPS, samples_path)
            print(f"note: {note}")

    def save_due(self) -> bool:
        every = self.cfg.save_every
        return every > 0 and (self.done % every == 0 or self.done == self.cfg.steps)

    def save(self) -> None:
        """A checkpoint of the last logged step. All ranks contribute to that of a sharded model."""
        t = self.trainer
        self.saved_at = self.done
        if not t.is_main and self.cfg.shard == "none":
            return
        state = {
            "step": self.done,
            "optimizer": ranks.gather(t.optimizer.state_dict()),
            "reference": checkpoint.fingerprint(t.reference) if t.reference else None,
            "trainer": t.state(),
        }
        weights = ranks.weights(t.model)
        if t.is_main:
            keep = self.cfg.keep_checkpoints
            checkpoint.save(self.out_dir, t.model, weights, t.tokenizer, state, keep=keep)

    def close(self) -> None:
        """Draw run.png, say how the run ended, and wait for the other ranks."""
        if self.trainer.is_main:
            self.log.close()
            if self.done < self.cfg.steps:
                command = resume_command(self.cfg.out_dir)
                print(f"stopped after step {self.done}; resume with: {command}", flush=True)
            else:
                current = self.saved_at == self.done
                saved = f", {self.out_dir / 'checkpoint'}/" if current else ""
                print(f"done: {self.log.path}, {self.out_dir / 'run.png'}{saved}")
        ranks.finish()
        if self.cfg.engine == "vllm":
            self.trainer.sampling.engine.close()


# ---------------------------------------------------------------------------- the start of a run


def check_start(cfg: Config) -> None:
    """InputError if a run would be overwritten, if there is none to resume, or if --shard fsdp has
    no ranks to share the weights."""
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
    if cfg.shard == "fsdp" and not dist.is_initialized():
        raise InputError("--shard fsdp: no ranks share the weights; start train.py with torchrun")
    ranks.barrier()  # every rank has looked before rank 0 writes


def find_checkpoint(cfg: Config) -> Path | None:
    """The checkpoint to resume from, if any."""
    return ranks.broadcast(checkpoint.find, Path(cfg.out_dir)) if cfg.resume else None


def restore(trainer, folder: Path) -> int:
    """Give a Trainer what a checkpoint holds besides the weights; returns its step."""
    cfg, state = trainer.cfg, checkpoint.load_state(folder)
    if trainer.reference:
        fingerprint = checkpoint.fingerprint(trainer.reference)
        if not math.isclose(fingerprint, state["reference"], rel_tol=1e-6):
            raise InputError(
                f"--model {cfg.model} is not the model that the run in {cfg.out_dir} began with, "
                f"which --beta needs"
            )
    saved = state["trainer"]
    if saved.keys() != trainer.state().keys():
        raise InputError(
            f"--resume: another program than this one trained the run in {cfg.out_dir}: resume it "
            f"with the command that started it"
        )
    kind = saved["history"]["kind"]
    if not torch.equal(kind, trainer.history.kind):
        raise InputError(
            f"--data {cfg.data}: {len(trainer.train_set)} prompts, but the run in {cfg.out_dir} "
            f"was started with {len(kind)}, or with others: give it the data it had, or use "
            f"another --out-dir"
        )
    ranks.load_optimizer(trainer.optimizer, state["optimizer"])
    trainer.load_state(saved)
    return state["step"]


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
