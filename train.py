"""
Train a language model with DPPO (or GRPO, which is DPPO that prunes nothing).

    torchrun train.py                                                the embedded task: no GPU, no download
    torchrun train.py --method grpo --out-dir out-grpo               the same without pruning
    torchrun --nproc-per-node 8 train.py --model Qwen/Qwen3-0.6B --data FILE.jsonl --lr 1e-6

`python train.py` is the one-process form; the flags are in config.py. Reads top to bottom: setup, then the steps.
Every rank holds the whole model and rolls out its share of the prompts; keep decisions, advantages and denominators
are computed by every rank from the gathered batch, and gradients are summed once an update. All randomness is a
function of (seed, step, purpose), so a resumed run repeats what an uninterrupted one would have done.
"""

import contextlib
import datetime
import itertools
import math
import os
import sys
import time
from dataclasses import asdict
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
import plot
import rollout
import sampler
from config import Config
from data import InputError
from sampler import generator_for, seed_for
from update import accumulate_gradients, all_reduce, autocast, sum_gradients

EVAL_K = 4  # completions per evaluation problem, as the log's eval/avg@4 says

# ---------------------------------------------------------------------------- the run


def main(cfg: Config) -> None:
    """One training run. Bad input raises InputError before anything is written."""

    # setup: ranks, device, folder
    cfg = config.resolve(cfg)
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if "RANK" in os.environ and not dist.is_initialized():
        if cfg.device == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        backend = "nccl" if cfg.device == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=datetime.timedelta(hours=2))  # ranks wait for the longest rollout
    out_dir, is_main = Path(cfg.out_dir), rank == 0
    log_path, samples_path = out_dir / "log.jsonl", out_dir / "samples.jsonl"
    if not cfg.resume and (out_dir / "config.json").exists():
        raise InputError(f"--out-dir {cfg.out_dir} holds a run: give --resume to continue it, or another --out-dir")
    if dist.is_initialized():
        dist.barrier()  # every rank has looked before rank 0 writes

    # setup: data before model, so that a bad file is known at once
    train_set = data.train_problems(cfg.data, hold_out=cfg.eval_data is None)
    eval_set = []
    if cfg.eval_every:
        of_training_file = cfg.eval_data is None
        eval_set = data.eval_problems(cfg.eval_data or cfg.data, cfg.eval_problems, of_training_file=of_training_file)
    reward, eval_reward = data.reward_function(cfg.data), data.reward_function(cfg.eval_data or cfg.data)

    # setup: model, tokenizer, optimizer; from the checkpoint where there is one
    saved = checkpoint.find(out_dir, rank) if cfg.resume else None
    base = cfg.model
    if base == "tiny" and (cfg.beta or not saved):
        with first_rank_first(rank):
            base = str(arithmetic.base_folder())
    if saved or Path(base).is_dir():  # loading and saving take no time; a download keeps its bar
        transformers.utils.logging.disable_progress_bar()
    model, tokenizer = rollout.load_policy(str(saved or base), cfg.device)
    reference = None
    if cfg.beta:  # the model the run began with, also when it is resumed
        reference = rollout.load_policy(base, cfg.device)[0].requires_grad_(False)
    room = model.config.max_position_embeddings - cfg.max_new_tokens
    train_set, train_ids = data.encode_prompts(train_set, tokenizer, room)
    eval_set, eval_ids = data.encode_prompts(eval_set, tokenizer, room) if eval_set else ([], [])
    num_prompts = config.num_candidates(cfg)  # Q
    if len(train_set) < num_prompts:
        allocated = f", which --cppo-allocation makes {num_prompts}" if cfg.cppo_allocation else ""
        message = f"--prompts-per-step {cfg.prompts_per_step}{allocated}: the data holds only {len(train_set)} prompts"
        raise InputError(message)
    optimizer = torch.optim.AdamW(model.parameters(), lr=cfg.lr, weight_decay=cfg.weight_decay)
    history = sampler.PromptHistory(len(train_set))
    done = 0
    if saved:
        state = torch.load(saved / "trainer.pt", map_location="cpu", weights_only=True)
        optimizer.load_state_dict(state["optimizer"])
        history.score, done = state["history"], state["step"]
        if reference and not math.isclose(checkpoint.fingerprint(reference), state["reference"], rel_tol=1e-6):
            raise InputError(f"--model {cfg.model} is not what the run in {cfg.out_dir} began with: --beta needs it")
        if len(history.score) != len(train_set):
            raise InputError(
                f"--data {cfg.data}: {len(train_set)} prompts, but the run in {cfg.out_dir} was started with "
                f"{len(history.score)}: give it the data it had, or use another --out-dir"
            )
    if saved and is_main and (ranks := checkpoint.stored_ranks(out_dir)) != world:
        print(f"resuming on {world} ranks a run of {ranks}: what is sampled depends on the number of ranks")
    if is_main:
        out_dir.mkdir(parents=True, exist_ok=True)
        for path in (log_path, samples_path):
            checkpoint.cut_rows(path, last_step=done if saved else -1)
        checkpoint.write_config(out_dir, asdict(cfg), world)
        parameters = sum(parameter.numel() for parameter in model.parameters()) / 1e6
        print(
            f"{cfg.model}: {parameters:.1f} M parameters on {world} x {cfg.device}, {cfg.dtype}; {cfg.data}: "
            f"{len(train_set)} problems to train on, {len(eval_set)} held out; loss {cfg.loss}, prompt rule "
            f"{cfg.prompt_rule}, completion rule {cfg.completion_rule}, {num_prompts} x {cfg.group_size} completions a "
            f"step; steps {done + 1} to {cfg.steps}, in {out_dir}/"
        )
        for warning in config.warnings(cfg):
            print(f"note: {warning}")

    sampling = {
        "max_new_tokens": cfg.max_new_tokens,
        "temperature": cfg.temperature,
        "batch_size": cfg.rollout_batch,
        "eos_ids": rollout.eos_token_ids(model, tokenizer),
        "pad_id": tokenizer.pad_token_id,
        "show_progress": is_main and sys.stderr.isatty(),
    }
    num_sequences = num_prompts * cfg.group_size  # Q * G, whatever is pruned
    rivals = cfg.completion_rule in baselines.COMPLETION_RULES
    prune_completions = baselines.prune_completions if rivals else dppo.prune_completions

    def evaluate(step: int) -> dict:
        """avg@4 over all ranks' shares of the held-out problems."""
        rewards = torch.zeros(len(eval_set), EVAL_K, dtype=torch.float64)
        with autocast(cfg), stops_if_not_finite(step, out_dir):
            rewards[rank::world] = evaluation.sample_rewards(
                model, tokenizer, eval_set[rank::world], eval_ids[rank::world], eval_reward, k=EVAL_K,
                seed=seed_for(cfg.seed, step, "eval", rank), **sampling,
            )[0]  # fmt: skip
        return {f"eval/avg@{EVAL_K}": evaluation.avg_at_k(all_reduce(rewards))}

    if done == 0 and cfg.eval_every:
        scores = evaluate(0)
        if is_main:
            checkpoint.append_rows(log_path, [{"step": 0, **scores}])
            print(f"step {0:5d} | eval/avg@{EVAL_K} {scores[f'eval/avg@{EVAL_K}']:.3f}", flush=True)

    for step in range(done + 1, cfg.steps + 1):
        started = clock(cfg)
        draws = generator_for(cfg.seed, step, "keep")  # no rank in it: every rank draws alike

        # 1. select prompts: the window of candidates is the denominator, whatever is pruned
        window = sampler.candidates(len(train_set), num_prompts, cfg.seed, step)  # [Q]
        # --- DPPO, before rollout: drop prompts of low history, weigh the others
        prompt_keep, prompt_weights = history.prune(cfg.prompt_rule, cfg.prompt_prune_rate, window, draws)  # [Q], [Q]
        # ---
        chosen, prompt_weights = window[prompt_keep], prompt_weights[prompt_keep]  # [K], [K]
        mine = slice(rank, None, world)  # this rank's rows of the K prompts

        # 2. sample
        prompt_ids = [train_ids[index] for index in chosen[mine].tolist()]
        seed = seed_for(cfg.seed, step, "rollout", rank)
        with autocast(cfg), stops_if_not_finite(step, out_dir):
            rollouts = rollout.sample(model, prompt_ids, group_size=cfg.group_size, seed=seed, **sampling)
        sampled = clock(cfg)

        # 3. reward; then every rank sees every rollout's numbers
        texts = evaluation.decode(rollouts.completion_ids, rollouts.lengths, tokenizer)
        golds = [train_set[index].answer for index in chosen[mine].tolist() for _ in range(cfg.group_size)]
        judged = [evaluation.as_number(reward(text, gold)) for text, gold in zip(texts, golds, strict=True)]
        table = torch.zeros(len(chosen), cfg.group_size, 5, dtype=torch.float64)  # [K, G, 5]
        own = (
            torch.tensor(judged, dtype=torch.float64).view(-1, cfg.group_size),
            rollouts.lengths,
            rollouts.truncated,
            rollouts.entropy,
            rollouts.energy,
        )
        table[mine] = torch.stack([column.cpu().double() for column in own], dim=-1)
        rewards, lengths, truncated, entropy, energy = all_reduce(table).unbind(dim=-1)  # [K, G] each

        # 4. advantage: over the full group, before any completion is dropped
        advantages = dppo.group_advantages(rewards, cfg.loss)  # [K, G]
        history.update(chosen, advantages)

        # 5. denominator: one mini-batch's share of the un-pruned batch, so it cannot depend on what was kept
        counts = 1.0 - truncated if cfg.mask_truncated else torch.ones_like(lengths)  # [K, G]
        counts = counts * prompt_weights[:, None]
        full_scale = counts * dppo.loss_scale(
            lengths, cfg.loss, num_sequences=num_sequences // cfg.minibatches, max_new_tokens=cfg.max_new_tokens,
            num_tokens=(counts * lengths).sum().item() / cfg.minibatches,
        )  # [K, G]  # fmt: skip
        prompt_tokens = torch.tensor([len(train_ids[index]) for index in chosen.tolist()])[:, None]  # [K, 1]
        cost = prompt_tokens + lengths  # [K, G]
        minibatch_of = prompt_keep.nonzero().squeeze(1) * cfg.minibatches // num_prompts  # [K], by place in the window
        scored = clock(cfg)

        # 6. prune, once for each update in 7: with the line marked in 1, the method's whole difference from GRPO
        def prune_minibatch(minibatch, generator):
            """(keep, weights) [K, G] of a draw that serves one update; nothing is kept of other mini-batches."""
            keep, weights = torch.zeros_like(full_scale, dtype=torch.bool), torch.zeros_like(full_scale)
            rows = minibatch_of == minibatch  # [K]
            size = dppo.contribution_size(advantages[rows], full_scale[rows], energy[rows], cfg.beta)
            batch = dppo.Completions(advantages[rows], rewards[rows], cost[rows], size)
            # --- DPPO, after reward: drop completions, weigh the others by 1 / (probability of keeping them)
            keep[rows], weights[rows] = prune_completions(
                cfg.completion_rule, cfg.completion_prune_rate, batch, generator
            )
            # ---
            return keep, weights

        def gradient(keep, weights):
            """The gradient of what is kept, over packs and ranks, in .grad; returns accumulate_gradients' sums."""
            optimizer.zero_grad()
            sums = accumulate_gradients(
                model, rollouts, advantages[mine], (full_scale * weights)[mine], keep[mine],
                cfg=cfg, reference=reference, show_progress=sampling["show_progress"],
            )  # fmt: skip
            sum_gradients(model)
            return all_reduce(sums)

        checks = {}
        if cfg.check_every and step % cfg.check_every == 0:
            everything = (minibatch_of == 0)[:, None].expand_as(full_scale)  # [K, G]
            vectors = []  # [P]: the full gradient of the first mini-batch, then two pruned ones
            for keep, weights in (
                (everything, everything.double()),
                prune_minibatch(0, generator_for(cfg.seed, step, "check", 0)),
                prune_minibatch(0, generator_for(cfg.seed, step, "check", 1)),
            ):
                gradient(keep, weights)
                vectors.append(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]))
            checks = dppo.check_unbiased(*vectors)
            del vectors
        checked = clock(cfg)

        # 7. update: one a mini-batch and epoch, each with a draw of its own
        learning_rate = cfg.lr * min(1.0, step / max(1, cfg.warmup))
        optimizer.param_groups[0]["lr"] = learning_rate
        updates = []
        for _epoch, minibatch in itertools.product(range(cfg.epochs), range(cfg.minibatches)):
            keep, weights = prune_minibatch(minibatch, draws)
            sums = gradient(keep, weights)
            grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), cfg.grad_clip).item()
            with stops_if_not_finite(step, out_dir):
                if not (math.isfinite(sums[0]) and math.isfinite(grad_norm)):
                    raise FloatingPointError(f"loss {sums[0].item()}, gradient norm {grad_norm}")
            optimizer.step()
            updates.append((keep, weights, sums, grad_norm))
        trained = clock(cfg)

        # 8. log; means over prompts carry the prompt weights, so that pruning does not colour them
        def mean(values):  # of [K], NaN left out
            there = ~values.isnan()
            return ((values * prompt_weights)[there].sum() / prompt_weights[there].sum()).item()

        keeps, weights, sums, grad_norms = zip(*updates, strict=True)
        keeps, weights = torch.stack(keeps), torch.stack(weights) * prompt_weights[:, None]  # [updates, K, G]
        contributes = dppo.contributes(advantages, full_scale, cfg.beta)  # [K, G]
        *_, first_tokens, _, _, first_gap = sums[0].tolist()
        loss, kl, clipped, tokens, forwarded, slots, _ = torch.stack(sums).sum(dim=0).tolist()
        full_tokens = (prompt_weights[:, None] * cost).sum().item() * cfg.epochs  # expected, un-pruned
        group_std = torch.where(dppo.dead_groups(rewards), 0.0, nan_std(rewards))  # [K]
        row = {
            "step": step,
            "loss": loss / len(updates),
            "reward": mean(rewards.nanmean(dim=1)),
            "reward_std": mean(group_std),
            "frac_reward_zero_std": mean((group_std == 0).double()),
            "completions/mean_length": mean(lengths.mean(dim=1)),
            "completions/clipped_ratio": mean(truncated.mean(dim=1)),
            "entropy": ratio(mean(entropy.mean(dim=1)), mean(lengths.mean(dim=1))),
            "clip_ratio/region_mean": ratio(clipped, tokens),
            "sampling/sampling_logp_difference/mean": ratio(first_gap, first_tokens),  # later updates have moved
            "grad_norm": sum(grad_norms) / len(updates),
            "learning_rate": learning_rate,
            "kept/prompts": len(chosen) / num_prompts,
            "kept/completions": keeps.sum().item() / (num_sequences * cfg.epochs),
            "kept/tokens": ratio(forwarded, full_tokens),
            "weight/max": weights.max().item() if keeps.any() else math.nan,
            "weight/ess": dppo.effective_sample_size(weights[:, contributes]) / cfg.epochs,  # of those that contribute
            "pack/density": ratio(forwarded, slots),
            "tokens/generated": int(lengths.sum()),
            "tokens/trained": int(forwarded),
            "time/rollout": sampled - started,
            "time/score": scored - sampled,
            "time/train": trained - checked,
            "step_time": scored - started + trained - checked,  # without the running check
            **checks,
        }
        if cfg.beta:
            mass = (full_scale * lengths * weights.sum(dim=0) / prompt_weights[:, None]).sum().item()
            row["kl"] = ratio(kl, mass)  # nats a token, weighted as the loss weighs them
        if cfg.eval_every and (step % cfg.eval_every == 0 or step == cfg.steps):
            row |= evaluate(step)
        if is_main:
            print(console_line(row, cfg.steps), flush=True)
            checkpoint.append_rows(log_path, [row])
            own = range(len(chosen))[mine][:3]  # the first completions of three prompts of this rank
            checkpoint.append_rows(samples_path, [
                {"step": step, "prompt": train_set[chosen[k]].text, "completion": texts[n * cfg.group_size],
                 "answer": train_set[chosen[k]].answer, "reward": rewards[k, 0].item(),
                 "advantage": advantages[k, 0].item(), "kept": keeps[:, k, 0].any().item(),
                 "weight": weights[:, k, 0].sum().item() / cfg.epochs}
                for n, k in enumerate(own)
            ])  # fmt: skip

            # 9. save, after the row: a checkpoint's step is always in the log
            if cfg.save_every and (step % cfg.save_every == 0 or step == cfg.steps):
                checkpoint.save(out_dir, model, tokenizer, optimizer, history, step, reference)

    if is_main:
        plot.draw_run(out_dir)
        print(f"done: {log_path}, {out_dir / 'run.png'}" + (f", {out_dir / 'checkpoint'}/" if cfg.save_every else ""))


# ---------------------------------------------------------------------------- small things of the run


@contextlib.contextmanager
def first_rank_first(rank: int):
    """What rank 0 makes (and caches), the others wait for and find."""
    if dist.is_initialized() and rank > 0:
        dist.barrier()
    yield
    if dist.is_initialized() and rank == 0:
        dist.barrier()


def clock(cfg) -> float:
    """Seconds, after the device has finished what it was given."""
    if cfg.device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def ratio(part: float, whole: float) -> float:
    """part / whole, NaN (null in the log) where there is nothing to divide by."""
    return part / whole if whole else math.nan


def nan_std(rewards: torch.Tensor) -> torch.Tensor:
    """Sample standard deviation [K] of rewards [K, G], unscorable ones left out; NaN for fewer than two."""
    centred = rewards - rewards.nanmean(dim=1, keepdim=True)
    return (centred.square().nansum(dim=1) / ((~rewards.isnan()).sum(dim=1) - 1)).sqrt()


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


def console_line(row: dict, steps: int) -> str:
    """One aligned line a step."""
    width = len(str(steps))
    line = (
        f"step {row['step']:{width}d}/{steps} | reward {row['reward']:.3f} | kept {row['kept/completions']:.2f} | "
        f"w_max {row['weight/max']:4.1f} | density {row['pack/density']:.2f} | entropy {row['entropy']:.3f} | "
        f"gnorm {row['grad_norm']:5.2f} | sample {row['time/rollout']:5.2f}s | train {row['time/train']:5.2f}s"
    )
    return line + (f" | eval/avg@{EVAL_K} {row[f'eval/avg@{EVAL_K}']:.3f}" if f"eval/avg@{EVAL_K}" in row else "")


if __name__ == "__main__":
    try:
        main(config.parse_config(sys.argv[1:]))
    except InputError as problem:
        if int(os.environ.get("RANK", "0")) > 0:
            time.sleep(5)  # rank 0 says it, and torchrun ends the others; whoever lives on has an error of its own
        print(f"error: {problem}", file=sys.stderr, flush=True)
        sys.exit(2)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
