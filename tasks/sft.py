"""
Supervised training on worked solutions: the start that a model needs before it can be rewarded.

    python -m tasks.sft --model smollm2 --data words --out-dir out/sft
    python train.py --model out/sft/checkpoint --data words

GRPO learns nothing from a group whose completions are all wrong, so a model must already
solve some problems. A run is one process, and is not resumed: it takes minutes.
"""

import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import flags


@dataclass
class Config(flags.Flags):
    model: str = "smollm2"
    data: tuple[str, ...] = ("words",)
    """One or more sets with worked solutions: words, gsm8k, math, or files."""
    steps: int = 100
    """Optimizer updates."""
    batch_size: int = 32
    """Problems in an update."""
    lr: float = 2e-4
    """Learning rate of AdamW, times a warm-up of 10 steps, times a linear fall to 0."""
    out_dir: str = "out/sft"
    """The run folder: config.json, log.jsonl and, at the end, the checkpoint."""


if __name__ == "__main__":
    flags.answer_help(Config)

import torch

import chat_format
import config
import data
import models
import packing
import sampler
from runtime import InputError, checkpoint, console, log, ranks
from runtime.device import autocast, choose_device, choose_dtype
from runtime.timer import clock
from tasks import word_problems

PACK_TOKENS = 2048  # tokens in one forward and backward pass
WARMUP = 10  # steps until the learning rate is at its highest


def worked(name: str) -> list[data.Problem]:
    """The problems of a set that have a worked solution: of `words`, or of the rows to train on."""
    if name == "words":
        numbers = range(word_problems.SFT_PROBLEMS)
        return [data.Problem(*word_problems.problem("sft", number)) for number in numbers]
    problems, _ = data.problem_sets(name, None, 0)
    solved = [problem for problem in problems if problem.solution]
    if without := len(problems) - len(solved):
        ranks.say(f"note: {without} of {len(problems)} problems of {name} have no worked solution")
    return solved


def encode(cfg: Config, tokenizer, longest: int, model=None) -> list[tuple[list[int], list[int]]]:
    """(prompt, solution) token ids of each problem that fits into `longest` tokens.

    The prompts are those that train.py samples from.
    """
    problems = [problem for name in cfg.data for problem in worked(name)]
    problems, prompts = chat_format.encode_prompts(
        problems, tokenizer, longest, cfg.prompt_format, False, cfg.instruction, model
    )
    # A solution ends with the token that ends a turn in the chat template; without a template, with
    # the tokenizer's end token; without that, with another one that the model names.
    ends = [tokenizer.eos_token_id, *chat_format.end_tokens(tokenizer, model)]
    if cfg.prompt_format != "plain":
        ends = [chat_format.turn_end(tokenizer), *ends]
    end = next((token for token in ends if token is not None), None)
    if end is None:
        raise InputError(f"--model {cfg.model}: nothing names its end token: set eos_token")
    if any(chat_format.open_thoughts(tokenizer, prompts)):
        way_out = "which the solutions would not close: use --prompt-format plain"
        raise InputError(f"--model {cfg.model}: its template opens a thought, {way_out}")
    texts = [problem.solution for problem in problems]
    solutions = [[*ids, end] for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]]
    chat_format.say_lost(chat_format.lost_characters(texts, solutions, tokenizer, model))
    pairs = zip(prompts, solutions, strict=True)
    return [pair for pair in pairs if len(pair[0]) + len(pair[1]) <= longest]


def update(model, optimizer, batch, cfg: Config) -> dict:
    """One update on the mean loss, -log p, of the batch's solution tokens; {loss, grad_norm}."""
    tokens = sum(len(solution) for _, solution in batch)
    lengths = [len(prompt + solution) - 1 for prompt, solution in batch]
    optimizer.zero_grad()
    total = 0.0
    for members in packing.plan_packs(lengths, PACK_TOKENS, window=cfg.batch_size):
        prompts, solutions = zip(*(batch[member] for member in members), strict=True)
        pack = packing.build_pack(prompts, solutions, model.device)
        with autocast(cfg):
            loss = -packing.packed_logprobs(model, pack)[0].sum() / tokens
        loss.backward()
        total += loss.item()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    if not norm.isfinite():
        raise InputError(f"--lr {cfg.lr}: the gradient is {norm}; lower it")
    optimizer.step()
    return {"loss": total, "grad_norm": norm.item()}


def main(cfg: Config) -> None:
    """One supervised run: all steps, then a checkpoint. Raises InputError for bad input before
    anything is written."""
    ranks.check_single("tasks.sft")
    for name in ("steps", "batch_size", "lr"):
        config.require(cfg, name, getattr(cfg, name) > 0, "above 0")
    device = choose_device(cfg.device)
    cfg = replace(cfg, device=device, dtype=choose_dtype(cfg.dtype, device))
    out_dir = Path(cfg.out_dir)
    with checkpoint.owned(cfg.out_dir):
        if (out_dir / "config.json").exists():
            checkpoint.stored_config(out_dir, "a supervised start")
        if checkpoint.newest(out_dir):
            raise InputError(f"--out-dir {out_dir} holds a checkpoint: use another folder")
        model, tokenizer = models.load_policy(models.model_folder(cfg.model), device, samples=False)
        chat_format.fix_date(tokenizer, checkpoint.first_date(None))
        pairs = encode(cfg, tokenizer, model.longest, model)
        most = len(pairs)
        config.require(cfg, "batch_size", cfg.batch_size <= most, f"at most {most}, the problems")
        optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.0)
        record = log.Log(out_dir)
        record.open(0)
        checkpoint.write_config(out_dir, asdict(cfg), 1, tokenizer.date)
        for step in range(1, cfg.steps + 1):
            started = clock(device)
            rate = cfg.lr * min(step / WARMUP, 1.0) * (1 - (step - 1) / cfg.steps)
            optimizer.param_groups[0]["lr"] = rate
            chosen = sampler.candidates(len(pairs), cfg.batch_size, cfg.seed, step)
            row = update(model, optimizer, [pairs[i] for i in chosen], cfg)
            row |= {"step": step, "learning_rate": rate, "step_time": clock(device) - started}
            line = "step {step} | loss {loss:.3f} | gnorm {grad_norm:.2f} | {step_time:.1f}s"
            record.write(row, {}, line.format(**row))
        checkpoint.save(out_dir, model, ranks.weights(model), tokenizer, {"step": step}, keep=1)
        print(f"saved {out_dir}/checkpoint", flush=True)


if __name__ == "__main__":
    with console.go_on():
        try:
            main(flags.read(Config, sys.argv[1:]))
        except InputError as problem:
            ranks.report(problem)
            sys.exit(2)
