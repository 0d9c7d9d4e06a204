"""
Train a language model with DPPO (or GRPO, which is DPPO that prunes nothing).

    torchrun train.py                                                the embedded task: no GPU, no download
    torchrun train.py --method grpo --out-dir out-grpo               the same without pruning
    torchrun --nproc-per-node 8 train.py --model Qwen/Qwen3-0.6B --data FILE.jsonl --lr 1e-6

`python train.py` is the one-process form. Reads top to bottom: Config, setup, then the steps. Every rank
holds the whole model and rolls out its share of the prompts; keep decisions, advantages and denominators are
computed by every rank from the gathered batch, and gradients are summed once an update. All randomness is a
function of (seed, step, purpose), so a resumed run repeats what an uninterrupted one would have done.
"""

import contextlib
import datetime
import difflib
import io
import json
import math
import os
import sys
import time
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
import transformers
import tyro

import arithmetic
import checkpoint
import data
import dppo
import eval as evaluation
import plot
import rollout
import sampler
from data import InputError
from sampler import generator_for, seed_for
from update import accumulate_gradients, all_reduce, autocast, sum_gradients


@dataclass
class Config:
    # method
    method: Literal["grpo", "dppo"] = "dppo"  # grpo prunes nothing
    prompt_prune_rate: float | None = None  # r_q: chance of dropping a prompt of low history; default 0.3 (grpo: 0)
    completion_prune_rate: float | None = None  # r_o: chance of dropping one of low |advantage|; default 0.7 (grpo: 0)
    loss: Literal["grpo", "dr_grpo"] = "grpo"  # mean over sequences of token means, or one constant denominator
    # model and data
    model: str = "tiny"  # tiny (the embedded base model), a hub id such as Qwen/Qwen3-0.6B, or a folder
    data: str = "arithmetic"  # arithmetic, arithmetic-mixed or FILE.jsonl
    eval_data: str | None = None  # default: the held-out split, or the last 5 % of FILE
    # batch
    steps: int = 70  # optimizer updates
    prompts_per_step: int = 32  # Q: candidates of a step and the denominator; prompt pruning rolls out fewer
    group_size: int = 16  # G: completions per prompt
    max_new_tokens: int | None = None  # default: what the embedded task needs, 1,024 for files
    temperature: float = 1.0  # of sampling; the log-probs carry it
    rollout_batch: int = 128  # sequences sampled at once; bounds the memory of the key-value cache
    # optimizer
    lr: float | None = None  # default: 2e-4 for tiny, 1e-6 otherwise; constant after warm-up
    warmup: int = 5  # steps over which the learning rate rises
    grad_clip: float = 1.0  # largest gradient norm
    weight_decay: float = 0.0  # AdamW's
    eps_low: float = 0.2  # the ratio is clipped to 1 - eps_low
    eps_high: float = 0.2  # and 1 + eps_high
    # packing and machine
    pack_tokens: int | None = None  # tokens in a slot; default: 1,024 on the CPU, 4,096 on CUDA
    pack_window: int = 64  # sequences the packer looks at
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: cuda where there is one
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # of the arithmetic (weights stay float32); bfloat16 on CUDA
    # run
    seed: int = 0  # of everything that is drawn
    out_dir: str = "out"  # holds the log, the checkpoint and run.png
    resume: bool = False  # continue the run in out_dir, with its own settings
    eval_every: int = 20  # steps between evaluations; 0 = never
    eval_problems: int = 300  # at most so many, 4 completions each
    save_every: int = 20  # steps between checkpoints; 0 = never


EVAL_K = 4  # completions per evaluation problem, as the log's eval/avg@4 says
FREE_TO_CHANGE = (  # when resuming: what is not part of the experiment
    "steps", "device", "rollout_batch", "pack_tokens", "pack_window", "out_dir", "resume", "eval_every", "save_every",
)  # fmt: skip


# ---------------------------------------------------------------------------- configuration


def parse_config(argv: list[str]) -> Config:
    """The Config of a command line; with --resume, on top of what the run in out_dir was started with."""
    cfg = _parse(argv, Config())
    stored = Path(cfg.out_dir) / "config.json"
    if cfg.resume and stored.exists():
        run = Config(**json.loads(stored.read_text())["config"])
        cfg = _parse(argv, run)
        for field in fields(Config):
            now, then = getattr(cfg, field.name), getattr(run, field.name)
            if now != then and field.name not in FREE_TO_CHANGE:
                flag = field.name.replace("_", "-")
                raise InputError(
                    f"--{flag} {now}: the run in {cfg.out_dir} has {then}; leave it, or use another --out-dir"
                )
    return cfg


def _parse(argv: list[str], default: Config) -> Config:
    """tyro's parser, with its complaint folded into one line."""
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            cfg, unknown = tyro.cli(Config, args=argv, default=default, return_unknown_args=True)
    except SystemExit as stop:
        if stop.code == 0:  # --help
            raise
        words = complaint.getvalue().translate({ord(c): " " for c in "╭─╮│╰╯"}).split()
        raise InputError(" ".join(words)) from None
    if unknown:
        known = [f"--{field.name.replace('_', '-')}" for field in fields(Config)]
        near = difflib.get_close_matches(unknown[0].replace("_", "-"), known, n=1)
        hint = f"did you mean {near[0]}?" if near else "see --help"
        raise InputError(f"unknown flag {unknown[0]}: {hint}")
    return cfg


def resolve(cfg: Config) -> Config:
    """Check every value and fill in the defaults that depend on others; InputError names the value."""

    def check(name, good, rule):
        if getattr(cfg, name) is not None and not good(getattr(cfg, name)):
            raise InputError(f"--{name.replace('_', '-')} {getattr(cfg, name)}: must be {rule}")

    for name in ("prompt_prune_rate", "completion_prune_rate"):
        check(
            name, lambda rate: 0 <= rate < 1, "at least 0 and below 1: at 1 nothing is kept, and no weight can mend it"
        )
        if cfg.method == "grpo":
            check(name, lambda rate: rate == 0, "0 with --method grpo, which prunes nothing: use --method dppo")
    for name in (
        "steps",
        "prompts_per_step",
        "max_new_tokens",
        "rollout_batch",
        "pack_tokens",
        "pack_window",
        "eval_problems",
    ):
        check(name, lambda count: count >= 1, "at least 1")
    check("group_size", lambda size: size >= 2, "at least 2: a group of one has no advantage")
    for name in ("lr", "temperature", "grad_clip"):
        check(name, lambda value: 0 < value < math.inf, "above 0 and finite")
    for name in ("warmup", "weight_decay", "eval_every", "save_every"):
        check(name, lambda value: 0 <= value < math.inf, "at least 0")
    check("eps_low", lambda eps: 0 < eps < 1, "above 0 and below 1")
    check("eps_high", lambda eps: 0 < eps < math.inf, "above 0")
    device = rollout.choose_device(cfg.device)
    defaults = {
        "prompt_prune_rate": 0.0 if cfg.method == "grpo" else 0.3,
        "completion_prune_rate": 0.0 if cfg.method == "grpo" else 0.7,
        "max_new_tokens": max(data.max_new_tokens(name) for name in (cfg.data, cfg.eval_data or cfg.data)),
        "lr": 2e-4 if cfg.model == "tiny" else 1e-6,
        "pack_tokens": 1024 if device == "cpu" else 4096,
    }
    dtype = ("float32" if device == "cpu" else "bfloat16") if cfg.dtype == "auto" else cfg.dtype
    missing = {name: value for name, value in defaults.items() if getattr(cfg, name) is None}
    return replace(cfg, device=device, dtype=dtype, **missing)


# ---------------------------------------------------------------------------- the run


def main(cfg: Config) -> None:
    """One training run. Bad input raises InputError before anything is written."""

    # setup: ranks, device, folder
    cfg = resolve(cfg)
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
    source = str(saved or cfg.model)
    if source == "tiny":
        with first_rank_first(rank):
            source = str(arithmetic.base_folder())
    if Path(source).is_dir():  # loading and saving take no time; a download keeps its bar
        transformers.utils.logging.disable_progress_bar()
    model, tokenizer = rollout.load_policy(source, cfg.device)
    room = model.config.max_position_embeddings - cfg.max_new_tokens
    train_set, train_ids = data.encode_prompts(train_set, tokenizer, room)
    eval_set, eval_ids = data.encode_prompts(eval_set, tokenizer, room) if eval_set else ([], [])
    if len(train_set) < cfg.prompts_per_step:
        raise InputError(f"--prompts-per-step {cfg.prompts_per_step}: the data holds only {len(train_set)} prompts")
    optimizer = torch.optim.AdamW(model.parameters(), lr=cfg.lr, weight_decay=cfg.weight_decay)
    history = sampler.PromptHistory(len(train_set))
    done = 0
    if saved:
        state = torch.load(saved / "trainer.pt", map_location="cpu", weights_only=True)
        optimizer.load_state_dict(state["optimizer"])
        history.score, done = state["history"], state["step"]
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
            f"{len(train_set)} problems to train on, {len(eval_set)} held out; {cfg.method}, {cfg.prompts_per_step} x "
            f"{cfg.group_size} completions a step; steps {done + 1} to {cfg.steps}, in {out_dir}/"
        )

    sampling = {
        "max_new_tokens": cfg.max_new_tokens,
        "temperature": cfg.temperature,
        "batch_size": cfg.rollout_batch,
        "eos_ids": rollout.eos_token_ids(model, tokenizer),
        "pad_id": tokenizer.pad_token_id,
        "show_progress": is_main and sys.stderr.isatty(),
    }
    num_sequences = cfg.prompts_per_step * cfg.group_size  # Q * G, whatever is pruned

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
        window = sampler.candidates(len(train_set), cfg.prompts_per_step, cfg.seed, step)  # [Q]
        # --- DPPO, before rollout: drop prompts of low history, weigh the others
        prompt_keep, prompt_weights = dppo.prune(history.keep_prob(window, cfg.prompt_prune_rate), draws)  # [Q], [Q]
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
        scores = [evaluation.as_number(reward(text, gold)) for text, gold in zip(texts, golds, strict=True)]
        table = torch.zeros(len(chosen), cfg.group_size, 4, dtype=torch.float64)  # [K, G, 4]
        own = (
            torch.tensor(scores, dtype=torch.float64).view(-1, cfg.group_size),
            rollouts.lengths,
            rollouts.truncated,
            rollouts.entropy,
        )
        table[mine] = torch.stack([column.cpu().double() for column in own], dim=-1)
        rewards, lengths, truncated, entropy = all_reduce(table).unbind(dim=-1)  # [K, G] each

        # 4. advantage: over the full group, before any completion is dropped
        advantages = dppo.group_advantages(rewards, cfg.loss)  # [K, G]
        history.update(chosen, advantages)

        # 5. prune: with the line marked in 1, the method's whole difference from GRPO; rates 0: all kept, weights 1
        # --- DPPO, after reward: drop completions of low |advantage|, weigh the others
        keep, weights = dppo.prune(dppo.completion_keep_prob(advantages, rewards, cfg.completion_prune_rate), draws)
        weights = weights * prompt_weights[:, None]  # [K, G]
        # ---
        scored = clock(cfg)

        # 6. denominator: from the un-pruned batch, so it cannot depend on what was kept
        scale = weights * dppo.loss_scale(
            lengths, cfg.loss, num_sequences=num_sequences, max_new_tokens=cfg.max_new_tokens
        )  # [K, G]

        # 7. update: pack what is kept, sum gradients over packs, then over ranks
        optimizer.zero_grad()
        sums = accumulate_gradients(
            model, rollouts, advantages[mine], scale[mine], keep[mine], cfg=cfg, show_progress=sampling["show_progress"]
        )
        loss, clipped, tokens, forwarded, slots, gap = all_reduce(sums).tolist()
        sum_gradients(model)
        learning_rate = cfg.lr * min(1.0, step / max(1, cfg.warmup))
        optimizer.param_groups[0]["lr"] = learning_rate
        grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), cfg.grad_clip).item()
        with stops_if_not_finite(step, out_dir):
            if not (math.isfinite(loss) and math.isfinite(grad_norm)):
                raise FloatingPointError(f"loss {loss}, gradient norm {grad_norm}")
        optimizer.step()
        trained = clock(cfg)

        # 8. log; means over prompts carry the prompt weights, so that pruning does not colour them
        def mean(values, weights=prompt_weights):  # of [K], NaN left out
            there = ~values.isnan()
            return ((values * weights)[there].sum() / weights[there].sum()).item()

        prompt_tokens = torch.tensor([len(train_ids[index]) for index in chosen.tolist()])[:, None]  # [K, 1]
        full_tokens = (prompt_weights[:, None] * (prompt_tokens + lengths)).sum().item()  # expected, un-pruned
        group_std = torch.where(dppo.dead_groups(rewards), 0.0, nan_std(rewards))  # [K]
        row = {
            "step": step,
            "loss": loss,
            "reward": mean(rewards.nanmean(dim=1)),
            "reward_std": mean(group_std),
            "frac_reward_zero_std": mean((group_std == 0).double()),
            "completions/mean_length": mean(lengths.mean(dim=1)),
            "completions/clipped_ratio": mean(truncated.mean(dim=1)),
            "entropy": ratio(mean(entropy.mean(dim=1)), mean(lengths.mean(dim=1))),
            "clip_ratio/region_mean": ratio(clipped, tokens),
            "sampling/sampling_logp_difference/mean": ratio(gap, tokens),
            "grad_norm": grad_norm,
            "learning_rate": learning_rate,
            "kept/prompts": len(chosen) / cfg.prompts_per_step,
            "kept/completions": keep.sum().item() / num_sequences,
            "kept/tokens": ratio(forwarded, full_tokens),
            "weight/max": weights.max().item() if keep.any() else math.nan,
            "weight/ess": dppo.effective_sample_size(weights),
            "pack/density": ratio(forwarded, slots),
            "tokens/generated": int(lengths.sum()),
            "tokens/trained": int(forwarded),
            "time/rollout": sampled - started,
            "time/score": scored - sampled,
            "time/train": trained - scored,
            "step_time": trained - started,
        }
        if cfg.eval_every and (step % cfg.eval_every == 0 or step == cfg.steps):
            row |= evaluate(step)
        if is_main:
            print(console_line(row, cfg.steps), flush=True)
            checkpoint.append_rows(log_path, [row])
            own = range(len(chosen))[mine][:3]  # the first completions of three prompts of this rank
            checkpoint.append_rows(samples_path, [
                {"step": step, "prompt": train_set[chosen[k]].text, "completion": texts[n * cfg.group_size],
                 "answer": train_set[chosen[k]].answer, "reward": rewards[k, 0].item(),
                 "advantage": advantages[k, 0].item(), "kept": keep[k, 0].item(), "weight": weights[k, 0].item()}
                for n, k in enumerate(own)
            ])  # fmt: skip

            # 9. save, after the row: a checkpoint's step is always in the log
            if cfg.save_every and (step % cfg.save_every == 0 or step == cfg.steps):
                checkpoint.save(out_dir, model, tokenizer, optimizer, history, step)

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
        main(parse_config(sys.argv[1:]))
    except InputError as problem:
        if int(os.environ.get("RANK", "0")) > 0:
            time.sleep(5)  # rank 0 says it, and torchrun ends the others; whoever lives on has an error of its own
        print(f"error: {problem}", file=sys.stderr, flush=True)
        sys.exit(2)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
