"""
Train a language model with DPPO. GRPO is the special case that prunes nothing.

    python train.py                                       the embedded task: no GPU, no download
    python train.py --method grpo --out-dir out-grpo      the same task with GRPO
    torchrun --nproc-per-node 8 train.py --model Qwen/Qwen3-0.6B --data FILE.jsonl --lr 1e-6

flags.py explains the flags. `Trainer.step` is the algorithm, from top to bottom; `run`, below it,
is the loop that evaluates, logs, saves and stops. minimal.py is the same step on one page, for one
task and one rank.

Three numbers multiply the loss of a completion's tokens (and with --importance-cap each token's
importance ratio):

    prompt_weights  [K]     1 / P(its prompt was kept), before rollout
    scale           [K, G]  1 / denominator of the full batch; 0 if the completion is masked
    weights         [K, G]  1 / P(the completion was kept), after reward; 0 if it was dropped

`factor` is the product of the first two. It is what the draw of completions sees.

Several ranks: each holds the whole model, or with --shard fsdp a share of the trained weights. It
samples its share of the prompts. Then all ranks get the rewards and lengths of all prompts, compute
the same advantages and denominators, and draw the same keep decisions. The kept completions are
divided again, because pruning leaves the ranks with unequal work. All randomness is a function of
(seed, step, purpose, prompt), so a resumed run repeats what an uninterrupted run would have done,
given the same number of ranks and threads.

Letters: Q candidates of a step, K prompts rolled out, k of them by this rank, G completions each,
M mini-batches, which are the updates of a step.
"""

import functools
import math
import shlex
import sys
from dataclasses import asdict
from pathlib import Path

import flags

if __name__ == "__main__":
    flags.answer_help(flags.Config)

import torch
import torch.distributed as dist

import config
import data
import dppo
import eval as evaluation
import lora
import metrics
import models
import rollout
import sampler
from flags import Config
from rewards import score
from runtime import InputError, NotFiniteError, checkpoint, console, log, ranks
from runtime.stop import Stop
from runtime.timer import Timer
from update import accumulate_gradients, trainer_logprobs

TOKENS_MEMORY = 10  # steps until a batch's token count weighs 1/e in the mean
EVAL_K = 4  # completions per evaluation problem, as in the log's eval/avg@4
DEAD_STEPS = 5  # steps in a row with gradient 0, after which a run says so
NOT_FINITE = (
    "step {} is not finite ({}): it is not saved, and --resume would repeat it. Start again in a "
    "new --out-dir from --model {}, with a lower --lr or --dtype float32"
)
SOME_NONE = (
    "the reward is None for some completions of a prompt, which leaves them out of their group. "
    "Return 0.0 for a wrong one"
)
NOTHING_LEARNED = (
    "the gradient was 0 for {steps} steps, so nothing was learned. Mean reward {reward:.3g} (nan: "
    "all rewards are None). --max-new-tokens {max_new_tokens} cut off {cut_off:.0%} of the "
    "completions. See {folder}/samples.jsonl"
)


class Trainer:
    """Model, optimizer, prompt history, tokenizer and data. `step` is the algorithm.

    reward(completion, answer), or reward(completion, answer, row), returns a finite number, or None
    if the reference answer cannot be scored. Without one, the data's own reward is used. Raises
    InputError for bad input before anything is written.
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
        if cfg.device == "cuda":
            models.check_memory(cfg)
        problems = models.load_problems(cfg, reward)  # first: a bad file is reported at once
        self.train_set, self.eval_set, self.reward, self.eval_reward = problems
        parts = {"trainer": type(self), "reward": self.reward, "eval reward": self.eval_reward}
        self.parts = {part: checkpoint.name_of(thing) for part, thing in parts.items()}
        self.saved = find_checkpoint(cfg, self.parts)  # the rest is loaded by `restore`
        loaded = models.load_models(cfg, self.saved)
        # `model` is trained, and `policy` samples: a copy, or the same object.
        self.model, self.policy, self.reference = loaded.model, loaded.policy, loaded.reference
        self.tokenizer, self.base = loaded.tokenizer, loaded.base
        encode = functools.partial(models.encode, cfg, self.model, self.tokenizer)
        self.train_set, self.train_ids = encode(self.train_set)
        self.eval_set, self.eval_ids = encode(self.eval_set)
        config.check_prompts(cfg, len(self.train_set))
        # A resumed run must have the same problems. It must have the same prompts, too: the chat
        # template of a base may have changed.
        self.content = data.content_hash(self.train_set) + data.digest(self.train_ids)
        prompts = self.train_ids + self.eval_ids
        self.sampling = models.make_sampling(cfg, loaded, prompts, self.show_progress)

        self.prompt_tokens = torch.tensor([len(ids) for ids in self.train_ids])  # [prompts]
        self.history = sampler.PromptHistory(len(self.train_set))
        divides_by_tokens = dppo.LOSSES[cfg.loss].denominator == "batch tokens"
        self.needs_mean_tokens = config.prunes_prompts(cfg) and divides_by_tokens
        self.mean_tokens = None  # of the un-pruned batches of the last steps
        trained = [weight for weight in self.model.parameters() if weight.requires_grad]
        self.optimizer = torch.optim.AdamW(
            trained, lr=cfg.lr, betas=(0.9, 0.95), weight_decay=0.0, fused=cfg.device == "cuda"
        )
        self.is_whole = True  # False while a step has updated only a part of this

    def step(self, step: int) -> tuple[dict, dict[str, list[dict]]]:
        """One step of DPPO; returns its row for log.jsonl, and the rows of other files by name.

        GRPO is this step without the lines between `--- DPPO` and `---`. A test cuts them out. So
        each variable first gets GRPO's value, and the marked lines overwrite it. To keep the
        estimate exact, do not let anything that was dropped change an advantage or a denominator.
        """
        cfg = self.cfg
        Q, G, M = cfg.prompts_per_step, cfg.group_size, cfg.minibatches
        generator = dppo.generator_for(cfg.seed, step, "keep")  # the same on every rank
        started = self.timer.start()

        # 1. Select the candidates of this step.
        candidates = self.candidates(step)  # [Q]
        kept_prompts = torch.ones_like(candidates, dtype=torch.bool)  # [Q]; GRPO keeps all
        prompt_weights = torch.ones_like(candidates, dtype=torch.float64)  # [Q]
        # --- DPPO, before rollout: drop prompts at random, weight what is kept by 1 / P(kept)
        counts_tokens = self.needs_mean_tokens and self.mean_tokens is None  # see 5
        prompt_rule = "none" if counts_tokens else cfg.prompt_rule
        kept_prompts, prompt_weights = sampler.prune_prompts(
            prompt_rule, cfg.prompt_prune_rate, self.history, candidates, generator, M
        )
        # ---
        prompts, prompt_weights = candidates[kept_prompts], prompt_weights[kept_prompts]  # [K], [K]

        # 2. Sample G completions of each prompt. Each rank has its share of the prompts.
        mine = torch.arange(len(prompts))[self.rank :: self.world]  # [k], places among the K
        indices = prompts[mine].tolist()
        with self.timer.measure("rollout"):
            lora.refresh(self.policy, self.model)  # if it samples from a copy of the weights
            rollouts = rollout.sample(
                self.policy, [self.train_ids[index] for index in indices], self.sampling,
                group_size=G, seed=dppo.seed_for(cfg.seed, step, "rollout"),
                keys=indices,
            )  # fmt: skip

        # 3. Reward them. Then all ranks get what the next lines need of all prompts.
        with self.timer.measure("score"):
            problems = [self.train_set[index] for index in indices]
            texts, scores = score(rollouts, problems, self.tokenizer, self.reward)  # [k, G]
        columns = [
            scores, rollouts.lengths, rollouts.truncated, rollouts.entropy, rollouts.energy
        ]  # fmt: skip
        table = torch.zeros(len(prompts), G, len(columns), dtype=torch.float64)
        table[mine] = torch.stack([column.double() for column in columns], dim=-1)
        rewards, lengths, truncated, entropy, energy = ranks.all_reduce(table).unbind(dim=-1)
        # [K, G] each. A reward of NaN: its reference answer cannot be scored. Energy: the squared
        # gradient of a completion's log-probs at the logits (dppo.py), from which come the sizes.

        # 4. Advantages, over full groups.
        advantages = dppo.group_advantages(rewards, cfg.scale_rewards)  # [K, G]

        # 5. The denominator counts all Q candidates, kept or not, divided by M: each of the M
        # updates has Q / M of them.
        trained = 1.0 - truncated * cfg.mask_truncated  # [K, G]; 0: masked
        sampled_tokens = (prompt_weights[:, None] * trained * lengths).sum().item()  # estimated
        num_tokens = sampled_tokens
        # --- DPPO, for dapo and cispo, which divide by the batch's tokens: if prompts are pruned
        # these are not known, and dividing by this draw's estimate would be biased. The mean of the
        # last steps is used instead. The first step has none: it keeps all prompts and counts them.
        if self.needs_mean_tokens and self.mean_tokens is not None:
            num_tokens = self.mean_tokens
        # ---
        scale = trained * dppo.loss_scale(
            lengths, cfg.loss, num_sequences=Q * G // M, num_tokens=num_tokens / M,
            max_new_tokens=cfg.max_new_tokens,
        )  # [K, G]  # fmt: skip
        factor = prompt_weights[:, None] * scale  # [K, G]

        # 6. Each update has a fixed part of the candidates, and its own draw. prune_prompts drew
        # from the same parts. If a part depended on what was kept, the estimate would be biased.
        minibatch = kept_prompts.nonzero()[:, 0] * M // Q  # [K], the update of each prompt
        cost = self.prompt_tokens[prompts, None] + lengths  # [K, G], tokens to train on
        keep = torch.ones_like(factor, dtype=torch.bool)  # [K, G]; GRPO keeps all
        weights = torch.ones_like(factor)  # [K, G]
        # --- DPPO, after reward: drop completions by their size, weight what is kept by 1 / P(kept)
        for number in range(M):
            rows = minibatch == number  # [K]
            size = dppo.contribution_size(advantages[rows], factor[rows], energy[rows], cfg.beta)
            part = dppo.Completions(advantages[rows], rewards[rows], cost[rows], size, cfg.rest)
            keep[rows], weights[rows] = dppo.prune_completions(
                cfg.completion_rule, cfg.completion_prune_rate, part, generator
            )
        # ---

        # 7. Update.
        for group in self.optimizer.param_groups:
            # The optimizer's own rate, under the name that PyTorch gives it. Checkpoints hold it.
            highest = group.setdefault("initial_lr", group["lr"])
            group["lr"] = config.learning_rate(cfg, step, highest)
        stats, grad_norms = [], []
        with self.timer.measure("train"):
            # The log-probs that ratios compare with.
            if not cfg.importance_cap:
                old_logprobs = rollouts.logprobs  # the engine's, which are there
            elif M == 1:
                old_logprobs = None  # the model's in this update: nothing has moved it yet
            else:
                old_logprobs = trainer_logprobs(self.model, rollouts, cfg, keep[mine])
            for number in range(M):
                in_update = (minibatch == number)[:, None]  # [K, 1]
                sums = accumulate_gradients(
                    self.model, rollouts, advantages, factor * weights, keep & in_update, cfg=cfg,
                    old_logprobs=old_logprobs, mine=mine, reference=self.reference,
                )  # fmt: skip
                norm = torch.nn.utils.clip_grad_norm_(
                    self.model.parameters(), cfg.grad_clip or math.inf
                )
                grad_norms.append(ranks.whole(norm).item())
                stats.append(sums)
                if not (math.isfinite(sums.loss) and math.isfinite(grad_norms[-1])):
                    raise NotFiniteError(f"loss {sums.loss}, gradient norm {grad_norms[-1]}")
                self.is_whole = False
                self.optimizer.step()
                self.optimizer.zero_grad()  # now: rollouts and evaluations can use the memory

        # 8. Remember the groups. Later steps draw by what is known of their prompts.
        self.history.update(prompts, advantages)
        if self.needs_mean_tokens:
            self.mean_tokens = num_tokens + (sampled_tokens - num_tokens) / TOKENS_MEMORY
            if self.mean_tokens == 0:  # all were masked: the next step keeps all, and counts again
                self.mean_tokens = None

        both_weights = prompt_weights[:, None] * weights  # [K, G], for the log
        row = metrics.row(
            cfg, prompt_weights=prompt_weights, rewards=rewards, lengths=lengths,
            truncated=truncated, entropy=entropy, advantages=advantages, scale=scale, cost=cost,
            keep=keep, weights=both_weights, stats=stats, grad_norms=grad_norms,
        )  # fmt: skip
        times = self.timer.seconds | {"step_time": self.timer.now() - started}
        used = {"learning_rate": self.optimizer.param_groups[0]["lr"]}
        row = {"step": step} | row | used | times
        samples = metrics.samples(
            step, problems, texts, rewards[mine], advantages[mine], keep[mine], both_weights[mine]
        )
        groups = metrics.groups(step, prompts, prompt_weights, rewards, cost, scale, energy)
        self.is_whole = True
        return row, {"samples": samples, "groups": [groups]}

    def candidates(self, step: int) -> torch.Tensor:
        """The prompts [Q] that a step considers, as indices into the data."""
        cfg = self.cfg
        return sampler.candidates(len(self.train_set), cfg.prompts_per_step, cfg.seed, step)

    # ------------------------------------------------------------------------ beside the step

    def evaluate(self, step: int) -> dict:
        """avg@4 on the held-out problems; {} if it is not due. Step 0 is the model as it was
        loaded."""
        every = self.cfg.eval_every
        if not every or (step % every and step != self.cfg.steps):
            return {}
        scores = self.scores(len(self.eval_set), step, "eval")
        return {f"eval/{name}": value for name, value in scores.items()}

    def accuracy(self, count: int, *purpose) -> float:
        """The avg@4 of `scores`."""
        return self.scores(count, *purpose)[f"avg@{EVAL_K}"]

    def scores(self, count: int, *purpose) -> dict[str, float]:
        """avg@4 on the first `count` held-out problems, of all ranks. If the reward is the user's,
        also `accuracy`, the same mean by the data's own. `purpose` ends the seed."""
        mine = slice(self.rank, count, self.world)
        lora.refresh(self.policy, self.model)
        rollouts = rollout.sample(
            self.policy, self.eval_ids[mine], self.sampling, group_size=EVAL_K,
            seed=dppo.seed_for(self.cfg.seed, *purpose), keys=range(count)[mine],
        )  # fmt: skip
        own = data.reward_function(self.cfg.eval_data or self.cfg.data)
        judges = {f"avg@{EVAL_K}": self.eval_reward}
        if self.eval_reward is not own:
            judges["accuracy"] = own
        found = {}
        for name, judge in judges.items():
            rewards = torch.zeros(count, EVAL_K, dtype=torch.float64)
            _, rewards[mine] = score(rollouts, self.eval_set[mine], self.tokenizer, judge)
            found[name] = evaluation.avg_at_k(ranks.all_reduce(rewards))
        if math.isnan(found.get("accuracy", 0.0)):  # there are no reference answers
            del found["accuracy"]
        return found

    def state(self) -> dict:
        """What a checkpoint holds of this besides the model and the optimizer."""
        return {
            "content": self.content,
            "history": vars(self.history),
            "mean_tokens": self.mean_tokens,
        }

    def load_state(self, state: dict) -> None:
        self.history.restore(state["history"])
        self.mean_tokens = state["mean_tokens"]


# ---------------------------------------------------------------------------- the run


def run(trainer: Trainer, until: int | None = None) -> None:
    """Train: all steps up to --steps or `until`, or until a signal asks for a stop.

    A step is evaluated, then written to the log, then saved. So a run that is stopped or killed at
    any moment continues from its newest checkpoint, and repeats the steps after it exactly.
    """
    cfg, out_dir, stop = trainer.cfg, Path(trainer.cfg.out_dir), Stop()
    # In turns: each rank reads the whole state of the optimizer, and keeps its share. For 8B this
    # is 64 GB. `done`: steps that have ended.
    done = ranks.in_turns(restore, trainer) if trainer.saved else 0
    logger = start_log(trainer, done) if trainer.is_main else None
    last = cfg.steps if until is None else min(cfg.steps, until)
    dead_steps = 0  # in a row
    row, others, is_written = {"step": 0}, {}, False

    def write(row, others):
        if logger:
            logger.write(row, others, console.lines(row, others.get("samples"), cfg))

    with stop.listening():
        try:
            if done == 0 and cfg.eval_every:  # the model as it was loaded
                write(row | trainer.evaluate(0), others)
            is_written = True
            stopped = stop.agreed()
            while done < last and not stopped:
                row, others = trainer.step(done + 1)
                done, is_written = done + 1, False
                row |= trainer.evaluate(done)
                write(row, others)
                is_written = True
                dead_steps = dead_steps + 1 if row["grad_norm"] == 0 else 0
                if logger and row["frac_reward_some_none"] > 0:
                    logger.note(SOME_NONE)
                if logger and dead_steps == DEAD_STEPS:
                    note = NOTHING_LEARNED.format(
                        steps=DEAD_STEPS,
                        reward=row["reward"],
                        max_new_tokens=cfg.max_new_tokens,
                        cut_off=row["completions/clipped_ratio"],
                        folder=out_dir,
                    )
                    logger.note(note)
                stopped = stop.agreed()
                due = cfg.save_every and (done % cfg.save_every == 0 or done == cfg.steps)
                if due or stopped or (done == last and done < cfg.steps):
                    save_run(trainer, done)
        except NotFiniteError as error:
            saved = checkpoint.newest(out_dir) or cfg.model
            raise InputError(NOT_FINITE.format(done + is_written, error, saved)) from None
        except Exception:
            # A reward or a rule of the user's. Other ranks may be elsewhere, so rank 0 saves alone.
            if done and trainer.is_whole and trainer.is_main and cfg.shard == "none":
                if not is_written:
                    write(row, others)
                save_run(trainer, done)
                print(stopped_after(done, trainer), flush=True)
            raise

        if logger:  # still listening, so that a scheduler's second signal does not interrupt this
            logger.close()
            if done < cfg.steps:
                print(stopped_after(done, trainer), flush=True)
            else:
                print(console.summary(log.read_rows(logger.path)))
                print(f"done: {out_dir}/")
    ranks.finish()
    if cfg.engine == "vllm":
        trainer.sampling.engine.close()


def stopped_after(step: int, trainer: Trainer) -> str:
    """The last line of a run that can be continued, with the command that does."""
    folder = shlex.quote(trainer.cfg.out_dir)
    command = f"{ranks.launcher()} {sys.argv[0]} --resume --out-dir {folder}"
    return f"stopped after step {step}; to continue: {command}"


def start_log(trainer: Trainer, done: int) -> log.Log:
    """Write config.json, cut the log back to the checkpoint, and say what the run is."""
    cfg, out_dir = trainer.cfg, Path(trainer.cfg.out_dir)
    logger = log.Log(out_dir)
    logger.open(done)
    if cfg.track:
        logger.start_tracker(cfg.track, asdict(cfg))
    date = trainer.tokenizer.date
    checkpoint.write_config(out_dir, asdict(cfg), trainer.world, date, trainer.parts)
    millions = sum(parameter.numel() for parameter in trainer.policy.parameters()) / 1e6
    problems, held_out = len(trainer.train_set), len(trainer.eval_set)
    trained = f"LoRA of rank {cfg.lora}" if cfg.lora else "all weights"
    print(
        f"{cfg.model}: {millions:.1f} M parameters on {trainer.world} x {cfg.device}, {cfg.dtype}; "
        f"{cfg.data}: {problems} problems to train on, {held_out} held out"
    )
    print(
        f"prompt rule {cfg.prompt_rule}, completion rule {cfg.completion_rule}, loss {cfg.loss}; "
        f"{trained}, learning rate {cfg.lr:g}; {cfg.prompts_per_step} x {cfg.group_size} "
        f"completions a step; from step {done} to {cfg.steps}, in {cfg.out_dir}/"
    )
    print(console.COLUMNS)
    said = trainer.train_set[0].instruction if cfg.instruction is None else cfg.instruction
    if said:
        print(f"after each problem, prompts say: {said}")
    for note in config.warnings(cfg):
        logger.note(note)
    return logger


# ---------------------------------------------------------------------------- checkpoints


def find_checkpoint(cfg: Config, parts: dict) -> Path | None:
    """The checkpoint that a run resumes from, if any. InputError if a run would be overwritten, if
    it has another trainer or reward, or if --shard fsdp has no ranks to share the weights."""
    folder = Path(cfg.out_dir)
    holds_run = (folder / "config.json").exists()
    if holds_run:
        checkpoint.stored_config(folder)  # InputError if it is no run of training
    has_steps = any(row["step"] > 0 for row in log.read_rows(folder / "log.jsonl"))
    if (has_steps or checkpoint.newest(folder)) and not (cfg.resume and holds_run):
        raise InputError(
            f"--out-dir {cfg.out_dir} holds a run: give --resume to continue it, or another "
            f"--out-dir"
        )
    if holds_run and cfg.resume:
        checkpoint.check_parts(folder, parts)
    if cfg.shard == "fsdp" and not dist.is_initialized():
        raise InputError("--shard fsdp: no ranks share the weights; start train.py with torchrun")
    ranks.barrier()  # every rank has looked before rank 0 writes
    return ranks.broadcast(checkpoint.find, folder) if cfg.resume else None


def save_run(trainer: Trainer, step: int) -> None:
    """A checkpoint after a step. All ranks contribute to that of a sharded model."""
    cfg = trainer.cfg
    if not trainer.is_main and cfg.shard == "none":
        return
    optimizer, weights = ranks.gather(trainer.optimizer.state_dict()), ranks.weights(trainer.model)
    if trainer.is_main:
        stored = {"step": step, "optimizer": optimizer, "trainer": trainer.state()}
        model, tokenizer = trainer.model, trainer.tokenizer
        checkpoint.save(Path(cfg.out_dir), model, weights, tokenizer, stored, trainer.base)


def restore(trainer: Trainer) -> int:
    """Give the Trainer what its checkpoint holds besides the weights; returns the step. InputError
    for other problems, whose places in the prompt history would be wrong."""
    stored = checkpoint.load_state(trainer.saved)
    state = stored["trainer"]
    if state["content"] != trainer.content:
        wrong = "not the problems, or the prompts, that the run began with"
        raise InputError(f"--data {trainer.cfg.data}: {wrong}")
    ranks.load_optimizer(trainer.optimizer, stored["optimizer"])
    trainer.load_state(state)
    return stored["step"]


# ---------------------------------------------------------------------------- the program


def main(cfg: Config, *, reward=None, until: int | None = None, trainer_class=Trainer) -> None:
    """One training run. Raises InputError for bad input before anything is written. `until`: stop
    after this step as if by SIGTERM; learning-rate schedules still end at cfg.steps."""
    ranks.start(cfg.device)  # only rank 0 owns the folder
    threads = torch.get_num_threads()
    try:
        with checkpoint.owned(cfg.out_dir):
            run(trainer_class(cfg, reward), until)
    finally:
        torch.set_num_threads(threads)


@console.go_on()
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
