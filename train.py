"""
Train a language model with DPPO (or GRPO, which is DPPO that prunes nothing).

    torchrun train.py                                                the embedded task: no GPU, no download
    torchrun train.py --method grpo --out-dir out-grpo               the same without pruning
    torchrun --nproc-per-node 8 train.py --model Qwen/Qwen3-0.6B --data FILE.jsonl --lr 1e-6

`python train.py` is the one-process form; the flags are in config.py. Reads top to bottom: setup, then the steps.
Every rank holds the whole model (--shard fsdp: a copy to sample from and a share of what is trained) and rolls out its
share of the prompts; keep decisions, advantages and denominators are computed by every rank from the gathered batch,
and gradients are summed once an update. All randomness is a function of (seed, step, purpose), so a resumed run repeats
what an uninterrupted one would have done.
"""

import contextlib
import copy
import functools
import itertools
import math
import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import transformers

import arithmetic
import baselines
import checkpoint
import config
import data
import dppo
import eval as evaluation
import log
import plot
import ranks
import rollout
import sampler
import stop
import vllm_engine
from config import Config
from data import InputError
from ranks import all_reduce, sum_gradients
from sampler import generator_for, seed_for
from update import accumulate_gradients, autocast, checkpoint_layers, trainer_logprobs

EVAL_K = 4  # completions per evaluation problem, as the log's eval/avg@4 says
CHECK_DRAWS = 8  # pruned gradients of a running check


@dataclass
class Batch:
    """K prompts with G completions each. Every rank has the numbers of all, [K, G], and the tokens of its own."""

    prompts: torch.Tensor  # [K], indices into the data
    mine: torch.Tensor  # the rows of this rank, whose `rollouts` and `texts` these are
    rollouts: rollout.Rollouts
    texts: list[list[str]]
    rewards: torch.Tensor  # NaN: unscorable
    lengths: torch.Tensor
    truncated: torch.Tensor
    entropy: torch.Tensor
    energy: torch.Tensor
    seconds: tuple[float, float]  # sampling, scoring


def join(parts: list[Batch]) -> Batch:
    """One after the other; only greso rolls out in several rounds."""
    if len(parts) == 1:
        return parts[0]
    starts = itertools.accumulate((len(part.prompts) for part in parts), initial=0)
    tensors = {
        name: torch.cat([getattr(part, name) for part in parts])
        for name in ("prompts", "rewards", "lengths", "truncated", "entropy", "energy")
    }
    return Batch(
        mine=torch.cat([part.mine + start for part, start in zip(parts, starts, strict=False)]),
        rollouts=rollout.join([part.rollouts for part in parts]),
        texts=[text for part in parts for text in part.texts],
        seconds=tuple(map(sum, zip(*(part.seconds for part in parts), strict=True))),
        **tensors,
    )


@dataclass
class Update:
    """What the pruning of a batch may look at, and what each completion's tokens are multiplied by; [K, G]."""

    batch: Batch
    advantages: torch.Tensor
    prompt_weights: torch.Tensor  # [K]; 0: not trained on
    scale: torch.Tensor  # prompt weight over denominator; 0: masked
    group_square: torch.Tensor  # [K], squared size of what the group adds to the full batch's gradient
    cost: torch.Tensor  # tokens, prompt + completion
    minibatch: torch.Tensor  # [K]; -1: none


# ---------------------------------------------------------------------------- the run


def main(cfg: Config) -> None:
    """One training run. Bad input raises InputError before anything is written."""

    # setup: ranks, device, folder
    cfg = config.resolve(cfg)
    rank, world = ranks.start(cfg.device)
    if cfg.shard == "fsdp" and not dist.is_initialized():
        raise InputError("--shard fsdp: there are no ranks to share the weights; start train.py with torchrun")
    out_dir, is_main = Path(cfg.out_dir), rank == 0
    log_path, samples_path = out_dir / "log.jsonl", out_dir / "samples.jsonl"
    if not cfg.resume and (out_dir / "config.json").exists():
        raise InputError(f"--out-dir {cfg.out_dir} holds a run: give --resume to continue it, or another --out-dir")
    ranks.barrier()  # every rank has looked before rank 0 writes

    # setup: data before model, so that a bad file is known at once
    train_set = ranks.first_says(data.train_problems, cfg.data, hold_out=cfg.eval_data is None)
    eval_set = []
    if cfg.eval_every:
        of_training_file = cfg.eval_data is None
        name, limit = cfg.eval_data or cfg.data, cfg.eval_problems
        eval_set = ranks.first_says(data.eval_problems, name, limit, of_training_file=of_training_file)
    reward, eval_reward = data.reward_function(cfg.data), data.reward_function(cfg.eval_data or cfg.data)

    # setup: model, tokenizer, optimizer; from the checkpoint where there is one
    saved = ranks.first_says(checkpoint.find, out_dir) if cfg.resume else None
    base = cfg.model
    if base == "tiny" and (cfg.beta or not saved):
        base = str(ranks.first_says(arithmetic.base_folder))
    if saved or Path(base).is_dir():  # loading and saving take no time; a download keeps its bar
        transformers.utils.logging.disable_progress_bar()
    model, tokenizer = rollout.load_policy(str(saved or base), cfg.device)
    if cfg.gradient_checkpointing:
        checkpoint_layers(model)
    reference = None
    if cfg.beta:  # the model the run began with, also when it is resumed
        reference = rollout.load_policy(base, cfg.device)[0].requires_grad_(False)
    policy = model  # what samples
    if cfg.shard == "fsdp":
        for sharded in filter(None, (model, reference)):
            ranks.shard(sharded, cfg.device)
        policy = rollout.load_policy(str(saved or base), cfg.device)[0].requires_grad_(False)
        policy.to(getattr(torch, cfg.dtype))
    encode = functools.partial(
        data.encode_prompts, tokenizer=tokenizer, prompt_format=cfg.prompt_format, thinking=cfg.thinking,
        max_prompt_tokens=model.config.max_position_embeddings - cfg.max_new_tokens,
    )  # fmt: skip
    train_set, train_ids = encode(train_set)
    eval_set, eval_ids = encode(eval_set) if eval_set else ([], [])
    num_prompts = config.num_candidates(cfg)  # Q
    config.check_prompts(cfg, len(train_set))

    # setup: how to sample
    show_progress = is_main and sys.stderr.isatty()
    sampling = rollout.Sampling(
        cfg.max_new_tokens, rollout.eos_token_ids(model, tokenizer), tokenizer.pad_token_id, cfg.temperature,
        cfg.rollout_batch, cfg.engine, show_progress=show_progress,
    )  # fmt: skip
    if cfg.engine == "vllm":
        max_tokens = max(map(len, train_ids + eval_ids)) + cfg.max_new_tokens
        sampling.engine = vllm_engine.Engine(
            str(saved or base), vocab_size=model.vocab_size, max_tokens=max_tokens, sequences=cfg.rollout_batch,
            dtype=cfg.dtype, device=cfg.device, memory=cfg.vllm_memory,
        )  # fmt: skip
        longest = sorted(train_ids, key=len)[-4:]  # blocks of them are cached, if of any
        sampling.engine.check(policy, longest, sampling, lambda rollouts: trainer_logprobs(policy, rollouts, cfg))

    # setup: what a checkpoint holds
    fused = cfg.device == "cuda"
    optimizer = torch.optim.AdamW(model.parameters(), lr=cfg.lr, weight_decay=cfg.weight_decay, fused=fused)
    prompt_tokens = torch.tensor([len(ids) for ids in train_ids])  # [P]
    history = sampler.PromptHistory(prompt_tokens, [problem.source for problem in train_set], num_prompts)
    greso = baselines.Greso(len(train_set)) if cfg.prompt_rule == "greso" else None
    done, evaluated = 0, False  # steps that are in the log; whether the evaluation due after them is
    if saved:
        state = checkpoint.restore(saved, cfg, len(train_set), optimizer, history, greso, reference)
        done, evaluated = state["step"], state["evaluated"]
    if saved and is_main and (stored := checkpoint.stored_ranks(out_dir)) != world:
        print(f"resuming on {world} ranks a run of {stored}: what is sampled depends on the number of ranks")
    if is_main:
        out_dir.mkdir(parents=True, exist_ok=True)
        for path in (log_path, samples_path):
            checkpoint.cut_rows(path, lambda row: saved and row["step"] <= done)  # drops what was not saved
        checkpoint.write_config(out_dir, asdict(cfg), world)
        print(log.first_lines(cfg, model, world, len(train_set), len(eval_set), done + 1))

    tracker = log.start_tracker(cfg, out_dir) if is_main and cfg.track else None
    num_sequences = num_prompts * cfg.group_size  # Q * G, whatever is pruned
    prune_prompts = functools.partial(
        history.prune, cfg.prompt_rule, cfg.prompt_prune_rate, minibatches=cfg.minibatches
    )
    rivals = cfg.completion_rule in baselines.COMPLETION_RULES
    prune_completions = baselines.prune_completions if rivals else dppo.prune_completions

    asked = stop.Stop()  # by SIGTERM or Ctrl-C
    call = lambda work, *words, **options: work(*words, **options)
    unless_asked = asked.unless_asked if cfg.shard == "none" else call  # a sharded forward is a collective
    due = lambda step: cfg.eval_every > 0 and (step % cfg.eval_every == 0 or step == cfg.steps)

    def evaluate(step: int) -> dict:
        """avg@4 over all ranks' shares of the held-out problems, if it is due; {} if not, or if the run is to stop."""
        if not due(step):
            return {}
        rewards = torch.zeros(len(eval_set), EVAL_K, dtype=torch.float64)
        ranks.refresh(policy, model)
        with autocast(cfg), stops_if_not_finite(step, out_dir):
            scores = asked.unless_asked(
                evaluation.sample_rewards, policy, tokenizer, eval_set[rank::world], eval_ids[rank::world], eval_reward,
                sampling, k=EVAL_K, seed=seed_for(cfg.seed, step, "eval", rank),
            )  # fmt: skip
        if asked.agreed():
            return {}
        rewards[rank::world] = scores[0]
        return {f"eval/avg@{EVAL_K}": evaluation.avg_at_k(all_reduce(rewards))}

    def sample_and_score(own, seed):
        with autocast(cfg):
            prompt_ids = [train_ids[index] for index in own]
            rollouts = rollout.sample(policy, prompt_ids, sampling, group_size=cfg.group_size, seed=seed)
        sampled = clock(cfg)
        texts, rewards = evaluation.score(rollouts, [train_set[index] for index in own], tokenizer, reward)
        return rollouts, texts, rewards, sampled

    def roll_out(prompts, *key) -> Batch:
        """Sample G completions of each of the prompts [K] and reward them; then every rank sees all numbers."""
        started = clock(cfg)
        ranks.refresh(policy, model)
        mine = torch.arange(len(prompts))[rank::world]
        own = prompts[mine].tolist()
        with stops_if_not_finite(key[0], out_dir):
            done = asked.unless_asked(sample_and_score, own, seed_for(cfg.seed, *key, rank))
        if asked.agreed():
            raise stop.Stopped
        rollouts, texts, rewards, sampled = done
        numbers = (rewards, rollouts.lengths, rollouts.truncated, rollouts.entropy, rollouts.energy)  # [K, G] each
        table = torch.zeros(len(prompts), cfg.group_size, 5, dtype=torch.float64)  # [K, G, 5]
        table[mine] = torch.stack([column.cpu().double() for column in numbers], dim=-1)
        everything = all_reduce(table).unbind(dim=-1)
        return Batch(prompts, mine, rollouts, texts, *everything, (sampled - started, clock(cfg) - sampled))

    def prepare(batch, prompt_weights, place) -> Update:
        """4. and 5. of a step, for prompts [K] with these weights [K] at these places [K] of the window."""
        # 4. advantage: over the full group, before any completion is dropped
        advantages = dppo.group_advantages(batch.rewards, cfg.loss)  # [K, G]

        # 5. denominator: one mini-batch's share of the un-pruned batch, so it cannot depend on what was kept
        counts = 1.0 - batch.truncated if cfg.mask_truncated else torch.ones_like(batch.lengths)  # [K, G]
        weights = prompt_weights[:, None]  # [K, 1]
        scale = counts * dppo.loss_scale(
            batch.lengths, cfg.loss, num_sequences=num_sequences // cfg.minibatches, max_new_tokens=cfg.max_new_tokens,
            num_tokens=(counts * weights * batch.lengths).sum().item() / cfg.minibatches,
        )  # [K, G]  # fmt: skip
        size = dppo.contribution_size(advantages, scale, batch.energy, cfg.beta)  # [K, G]
        minibatch = torch.where(prompt_weights > 0, place * cfg.minibatches // num_prompts, -1)  # [K]
        cost = prompt_tokens[batch.prompts, None] + batch.lengths  # [K, G]
        return Update(batch, advantages, prompt_weights, weights * scale, size.square().sum(dim=1), cost, minibatch)

    def prune_minibatch(update, minibatch, generator):
        """6. of a step: (keep, weights) [K, G] of one draw; nothing is kept of other mini-batches."""
        keep, weights = torch.zeros_like(update.scale, dtype=torch.bool), torch.zeros_like(update.scale)
        rows = update.minibatch == minibatch  # [K]
        advantages, energy = update.advantages[rows], update.batch.energy[rows]
        size = dppo.contribution_size(advantages, update.scale[rows], energy, cfg.beta)
        group = dppo.Completions(advantages, update.batch.rewards[rows], update.cost[rows], size)
        # --- DPPO, after reward: drop completions, weigh the others by 1 / (chance of being kept)
        keep[rows], weights[rows] = prune_completions(cfg.completion_rule, cfg.completion_prune_rate, group, generator)
        # ---
        return keep, weights

    def gradient(update, keep, weights, old_logprobs=None):
        """The gradient of what is kept, over packs and ranks, in .grad; returns accumulate_gradients' sums."""
        optimizer.zero_grad()
        mine = update.batch.mine
        sums = unless_asked(
            accumulate_gradients, model, update.batch.rollouts, update.advantages[mine],
            (update.scale * weights)[mine], keep[mine], cfg=cfg, old_logprobs=old_logprobs, reference=reference,
            show_progress=show_progress,
        )  # fmt: skip
        if asked.agreed():
            raise stop.Stopped
        sum_gradients(model)
        return all_reduce(sums)

    def check(step, window) -> dict:
        """The running check of both levels: all Q candidates rolled out apart from the run, their full gradient (of
        the first mini-batch), and CHECK_DRAWS pruned ones, each from a prompt draw and a completion draw of its own."""
        batch, place = roll_out(window, step, "check"), torch.arange(num_prompts)

        def whole_gradient(update, keep, weights):  # [parameters]
            gradient(update, keep, weights)
            return torch.cat([ranks.whole(parameter.grad).flatten() for parameter in model.parameters()])

        def pruned(number):
            draws = generator_for(cfg.seed, step, "check", number)
            update = prepare(batch, prune_prompts(window, draws, step)[1], place)
            return whole_gradient(update, *prune_minibatch(update, 0, draws))

        update = prepare(batch, torch.ones(num_prompts, dtype=torch.float64), place)
        keep = (update.minibatch == 0)[:, None].expand_as(update.scale)
        return dppo.check_unbiased(whole_gradient(update, keep, keep.double()), map(pruned, range(CHECK_DRAWS)))

    def train_step(step: int) -> tuple[dict, list[dict]]:
        """One step: its rows for the log and the samples. Until the first update nothing that is saved has changed."""
        draws = generator_for(cfg.seed, step, "keep")  # no rank in it: every rank draws alike
        window = sampler.candidates(len(train_set), num_prompts, cfg.seed, step)  # [Q]
        checks = check(step, window) if cfg.check_every and step % cfg.check_every == 0 else {}
        started = clock(cfg)

        # 1. select prompts: the window of candidates is the denominator, whatever is pruned; 2. sample; 3. reward
        if greso:  # a rival without window and weights: it rolls out until Q groups are alive
            prompt_keep, order = None, functools.partial(sampler.epoch_order, len(train_set), cfg.seed)
            more = lambda prompts, number: roll_out(prompts, step, "rollout", number)
            rounds, prompt_weights, place = greso.collect(more, num_prompts, order, draws)
            batch, shares = join(rounds), torch.full_like(prompt_weights, num_prompts / len(prompt_weights))
        else:
            # --- DPPO, before rollout: drop prompts by their history, weigh the others by 1 / (chance of being kept)
            prompt_keep, prompt_weights = prune_prompts(window, draws, step)  # [Q], [Q]
            # ---
            prompt_weights, place = prompt_weights[prompt_keep], prompt_keep.nonzero().squeeze(1)  # [K], [K]
            batch, shares = roll_out(window[prompt_keep], step, "rollout"), prompt_weights

        # 4. advantage, 5. denominator
        update = prepare(batch, prompt_weights, place)
        known = history.summary(step, window, prompt_keep)

        # 6. prune, 7. update: once a mini-batch and epoch, each with a draw of its own
        learning_rate = cfg.lr * min(1.0, step / max(1, cfg.warmup)) * decay(cfg, step)
        optimizer.param_groups[0]["lr"] = learning_rate
        updates, trains, old_logprobs = [], clock(cfg), None
        if cfg.importance_cap and cfg.epochs * cfg.minibatches > 1:
            old_logprobs = unless_asked(trainer_logprobs, model, batch.rollouts, cfg)
        for _epoch, minibatch in itertools.product(range(cfg.epochs), range(cfg.minibatches)):
            keep, weights = prune_minibatch(update, minibatch, draws)
            sums = gradient(update, keep, weights, old_logprobs)
            grad_norm = ranks.whole(torch.nn.utils.clip_grad_norm_(model.parameters(), cfg.grad_clip)).item()
            with stops_if_not_finite(step, out_dir):
                if not (math.isfinite(sums[0]) and math.isfinite(grad_norm)):
                    raise FloatingPointError(f"loss {sums[0].item()}, gradient norm {grad_norm}")
            asked.held = True  # from here on the step is finished, whoever asks
            optimizer.step()
            updates.append((keep, weights, sums, grad_norm))
        history.update(
            step, batch.prompts, prompt_weights, batch.rewards, update.advantages, update.group_square,
            batch.lengths.sum(dim=1),
        )  # fmt: skip
        step_time = clock(cfg) - started

        # 8. log
        row = {
            "step": step,
            **log.row(cfg, update, shares, updates, learning_rate),
            "time/train": started + step_time - trains,
            "step_time": step_time,  # without the running check
            **known,
            **checks,
        }
        return row, [{"step": step} | row for row in log.samples(cfg, update, updates, train_set)]

    def save(step: int, evaluated: bool) -> None:
        """A checkpoint after this step, whose row is in the log. Of a sharded model all ranks give their part."""
        if not is_main and cfg.shard == "none":
            return
        state = {
            "step": step, "evaluated": evaluated, "optimizer": ranks.gather(optimizer.state_dict()),
            "history": vars(history), "greso": vars(greso) if greso else None,
            "reference": checkpoint.fingerprint(reference) if reference else None,
        }  # fmt: skip
        weights = ranks.weights(model)
        if is_main:
            checkpoint.save(out_dir, model, weights, tokenizer, state, keep=cfg.keep_checkpoints)

    # the run: done counts the steps whose rows are in the log, saved_at those of the newest checkpoint
    saved_at, before = done, None
    with asked.listening():
        with contextlib.suppress(stop.Stopped):
            if due(done) and not evaluated:  # before the first step, or where a run was stopped while it evaluated
                scores = evaluate(done)
                if is_main and scores:
                    print(f"step {done:5d} | eval/avg@{EVAL_K} {scores[f'eval/avg@{EVAL_K}']:.3f}", flush=True)
                    *earlier, last = checkpoint.read_rows(log_path) if done else [{"step": 0}]
                    checkpoint.write_rows(log_path, [*earlier, last | scores])
                evaluated = bool(scores)
            while done < cfg.steps and not asked.agreed():
                before = copy.deepcopy(vars(greso)) if greso else None
                row, some = train_step(done + 1)
                asked.held = False
                scores = evaluate(done + 1)
                if is_main:
                    row |= scores
                    print(log.console_line(row, cfg.steps), flush=True)
                    checkpoint.append_rows(log_path, [row])
                    checkpoint.append_rows(samples_path, some)
                    log.track(tracker, row)
                done, evaluated, before = done + 1, bool(scores) or not due(done + 1), None

                # 9. save, after the row: a checkpoint's step is always in the log
                if cfg.save_every and (done % cfg.save_every == 0 or done == cfg.steps):
                    save(done, evaluated)
                    saved_at = done
        if before:  # a step that was given up: what it did to greso's memory is not to be saved
            vars(greso).update(before)
        if asked.asked_anywhere and done > saved_at:
            save(done, evaluated)

    if is_main:
        if log_path.exists():  # not if it was stopped before its first row
            plot.draw_run(out_dir)
        if done < cfg.steps or not evaluated:
            print(f"stopped after step {done}; go on with: {stop.resume_command(cfg.out_dir)}", flush=True)
        else:
            print(f"done: {log_path}, {out_dir / 'run.png'}" + (f", {out_dir / 'checkpoint'}/" if saved_at else ""))
        if tracker:
            tracker.finish()
    ranks.barrier()  # torchrun ends all ranks if one dies, so none leaves before the first has written
    if world > 1:
        time.sleep(0.2)  # gloo's threads abort a process that ends before they have let go of its last tensors
    if cfg.engine == "vllm":
        sampling.engine.close()


# ---------------------------------------------------------------------------- small things of the run


def decay(cfg, step: int) -> float:
    """Factor of the learning rate after warm-up: 1, or from 1 down to almost 0 in the last step."""
    left = min(1.0, (cfg.steps + 1 - step) / max(1, cfg.steps + 1 - cfg.warmup))
    return {"constant": 1.0, "linear": left, "cosine": (1 - math.cos(math.pi * left)) / 2}[cfg.lr_schedule]


def clock(cfg) -> float:
    """Seconds, after the device has finished what it was given."""
    if cfg.device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


@contextlib.contextmanager
def stops_if_not_finite(step: int, out_dir: Path):
    """Turns a FloatingPointError into the message of a run that cannot go on; this step is not saved."""
    try:
        yield
    except FloatingPointError as error:
        raise InputError(
            f"step {step} is not finite ({error}): nothing of it was saved; the last checkpoint, if any, is in "
            f"{out_dir / 'checkpoint'}. Lower --lr, or look at {out_dir / 'log.jsonl'}"
        ) from None


if __name__ == "__main__":
    try:
        main(config.parse_config(sys.argv[1:]))
    except InputError as problem:
        if int(os.environ.get("RANK", "0")) > 0:
            time.sleep(5)  # rank 0 says it, and torchrun ends the others; whoever lives on has an error of its own
        print(f"error: {problem}", file=sys.stderr, flush=True)
        sys.exit(2)
    finally:
        if dist.is_initialized() and "vllm" not in sys.modules:  # vLLM destroys the group, with its own in it
            dist.destroy_process_group()
