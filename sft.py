"""
Supervised training on worked solutions: the start that a model needs before it can be rewarded.

    python sft.py --model smollm2 --data words --out-dir out/sft
    torchrun train.py --model out/sft/checkpoint --data words

A group whose completions are all wrong teaches nothing, so reinforcement learning needs a model
that solves some of its problems. The loss of a step is the mean negative log-probability of the
solution tokens in its batch. Packing, head, checkpoints and log are train.py's. The order of the
problems is a function of (seed, step), so a resumed run repeats what an uninterrupted one would
have done.
"""

import json
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

import torch
import tyro

import data
import packing
import rollout
import sampler
from runtime import InputError, checkpoint, gguf, log, ranks
from runtime.clock import clock
from runtime.device import choose_device, choose_dtype
from runtime.stop import Stop, resume_command
from runtime.threads import Threads
from update import autocast


@dataclass
class Config:
    model: str = "smollm2"
    """The model to train: smollm2, a .gguf file, a folder, or a hub id."""
    data: tuple[str, ...] = ("words",)
    """One or more sets with worked solutions: words, gsm8k, math, or files."""
    problems: int | None = None
    """Use at most this many problems of each set. By default all, or 10,000 of words."""
    prompt_format: Literal["auto", "chat", "plain"] = "auto"
    """How a problem becomes a prompt, as in train.py, which needs the same value."""
    max_tokens: int = 512
    """Leave out problems that are longer than this, solution included."""
    steps: int = 45
    """Optimizer updates."""
    batch_size: int = 32
    """Problems in an update."""
    lr: float = 1e-4
    """Largest learning rate of AdamW; it falls linearly to 0."""
    warmup: int = 10
    """Steps over which the learning rate rises linearly."""
    pack_tokens: int = 2048
    """Tokens in a slot, the unit of one forward pass."""
    out_dir: str = "out/sft"
    """The run folder: config.json, log.jsonl and the newest checkpoint."""
    resume: bool = False
    """Continue the run in --out-dir from its checkpoint, with its own settings."""
    save_every: int = 20
    """Steps between checkpoints."""
    seed: int = 0
    """Seed of the order of the problems."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to run. auto is cuda if there is a GPU."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of the arithmetic. auto is bfloat16 on CUDA, else float32."""


def check(cfg: Config) -> Config:
    """Resolve device and dtype; InputError for a bad value, or a folder that holds another run."""
    for name in ("max_tokens", "steps", "batch_size", "lr", "warmup", "pack_tokens", "save_every"):
        if not getattr(cfg, name) > 0:
            raise InputError(f"--{name.replace('_', '-')} {getattr(cfg, name)}: must be above 0")
    device = choose_device(cfg.device)
    cfg = replace(cfg, device=device, dtype=choose_dtype(cfg.dtype, device), data=list(cfg.data))
    path = Path(cfg.out_dir) / "config.json"
    stored = json.loads(path.read_text())["config"] if path.exists() else asdict(cfg)
    changed = [name for name, value in asdict(cfg).items() if stored[name] != value]
    if path.exists() and (not cfg.resume or set(changed) - {"resume"}):
        hint = "give --resume and its own flags to continue it, or another --out-dir"
        raise InputError(f"--out-dir {cfg.out_dir} holds a run: {hint}")
    return cfg


def encode(cfg: Config, tokenizer) -> list[tuple[list[int], list[int]]]:
    """(prompt, solution) token ids of each problem; a solution ends with the end token."""
    problems = [problem for name in cfg.data for problem in data.sft_problems(name, cfg.problems)]
    problems, prompts = data.encode_prompts(problems, tokenizer, cfg.max_tokens, cfg.prompt_format)
    texts = [problem.solution for problem in problems]
    solutions = tokenizer(texts, add_special_tokens=False)["input_ids"]
    pairs = zip(prompts, ([*ids, tokenizer.eos_token_id] for ids in solutions), strict=True)
    fits = [pair for pair in pairs if sum(map(len, pair)) <= cfg.max_tokens]
    if len(fits) < cfg.batch_size:
        found = f"only {len(fits)} problems and their solutions fit --max-tokens {cfg.max_tokens}"
        raise InputError(f"--batch-size {cfg.batch_size}: {found}")
    return fits


def update(model, optimizer, batch, cfg: Config, share: slice) -> dict:
    """One optimizer update of all ranks, each with its share of the batch; {loss, grad_norm}."""
    tokens = sum(len(solution) for _, solution in batch)
    mine = batch[share]
    lengths = [len(prompt) + len(solution) - 1 for prompt, solution in mine]
    total = torch.zeros(1, dtype=torch.float64)
    optimizer.zero_grad()
    for members in packing.plan_packs(lengths, cfg.pack_tokens, window=cfg.batch_size):
        texts = zip(*(mine[member] for member in members), strict=True)
        with autocast(cfg):
            pack = packing.build_pack(*texts, model.device)
            logprobs, _ = packing.packed_logprobs(model, pack)  # [N]
        loss = -logprobs.sum() / tokens
        loss.backward()
        total += loss.item()
    ranks.sum_gradients(model)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return {"loss": ranks.all_reduce(total).item(), "grad_norm": norm.item()}


def main(cfg: Config) -> None:
    """One supervised run. Raises InputError for bad input before anything is written."""
    cfg = check(cfg)
    rank, world = ranks.start(cfg.device)
    out_dir, stop = Path(cfg.out_dir), Stop()
    Threads(cfg.device).fit()
    saved = ranks.broadcast(checkpoint.find, out_dir) if cfg.resume else None
    source = saved or ranks.broadcast(gguf.model_folder, cfg.model)
    model, tokenizer = rollout.load_policy(str(source), cfg.device)
    pairs = encode(cfg, tokenizer)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.0)
    done = 0
    if saved:
        state = checkpoint.load_state(saved)
        optimizer.load_state_dict(state["optimizer"])
        done = state["step"]
    record = log.Log(out_dir)
    if rank == 0:
        record.open(done)
        checkpoint.write_config(out_dir, asdict(cfg), world)
        print(f"{len(pairs)} problems; steps {done + 1} to {cfg.steps}, in {out_dir}/", flush=True)
    with stop.listening():
        while done < cfg.steps and not stop.agree():
            done, started = done + 1, clock(cfg.device)
            places = sampler.candidates(len(pairs), cfg.batch_size, cfg.seed, done).tolist()
            batch = [pairs[place] for place in places]
            rate = cfg.lr * min(done / cfg.warmup, 1.0) * (1 - (done - 1) / cfg.steps)
            optimizer.param_groups[0]["lr"] = rate
            row = {"step": done, "learning_rate": rate}
            row |= update(model, optimizer, batch, cfg, slice(rank, None, world))
            row["step_time"] = clock(cfg.device) - started
            line = "step {step} | loss {loss:.3f} | gnorm {grad_norm:.2f} | {step_time:.1f}s"
            if rank == 0:
                record.write(row, [], line.format(**row))
                if done % cfg.save_every == 0 or done == cfg.steps or stop.requested:
                    state = {"step": done, "optimizer": optimizer.state_dict()}
                    weights = ranks.weights(model)
                    checkpoint.save(out_dir, model, weights, tokenizer, state, keep=1)
    if rank == 0:
        end = f"stopped after step {done}; resume with: {resume_command(cfg.out_dir)}"
        print(f"done: {out_dir / 'checkpoint'}/" if done == cfg.steps else end)
    ranks.finish()


if __name__ == "__main__":
    try:
        main(tyro.cli(Config))
    except InputError as problem:
        print(f"error: {problem}", file=sys.stderr)
        sys.exit(2)
