"""
How good is a model: avg@k on a set of problems, with a confidence interval; or its answer to one question.

    python eval.py --model out/checkpoint --data arithmetic --k 4
    python eval.py --model out/checkpoint --data arithmetic-longer
    python eval.py --model out/checkpoint --prompt "7+9+5?"

avg@k samples k completions per problem and averages over k, then over problems: the low-variance estimate of
pass@1. Prints a line of text, then the same as one line of JSON.
"""

import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import tyro
from transformers.utils import logging

import data
import rollout
import vllm_engine
from data import InputError
from sampler import generator_for, seed_for


@dataclass
class EvalConfig:
    model: str  # a folder such as out/checkpoint, or a hub id
    data: str = "arithmetic"  # arithmetic, arithmetic-mixed, arithmetic-longer or FILE.jsonl
    k: int = 4  # completions per problem
    problems: int = 300  # at most so many
    held_out: bool = False  # of a FILE, only the last 5 %, which train.py holds out of its training
    prompt: str | None = None  # answer this one question instead
    temperature: float = 1.0  # of the sampling distribution; 0: greedy
    top_k: int = 0  # only the k likeliest tokens; 0: all
    top_p: float = 1.0  # only the likeliest tokens that have this probability together
    repetition_penalty: float = 1.0  # above 1: what was said is less likely
    max_new_tokens: int | None = None  # default: what the data needs; 1,024 for --prompt
    engine: Literal["compact", "hf", "vllm"] = "compact"  # what samples
    vllm_memory: float = 0.8  # share of the GPU's memory that vLLM may take
    batch_size: int = 512  # sequences sampled at once
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: cuda where there is one
    seed: int = 0  # of the sampling


def decode(completion_ids: torch.Tensor, lengths: torch.Tensor, tokenizer) -> list[str]:
    """Texts of completions [..., T] with lengths [...], flattened, without special tokens."""
    rows = zip(completion_ids.flatten(0, -2).tolist(), lengths.flatten().tolist(), strict=True)
    return [tokenizer.decode(ids[:length], skip_special_tokens=True) for ids, length in rows]


def sample_rewards(model, tokenizer, problems, prompt_ids, reward, sampling, *, k, seed):
    """(rewards, truncated), both [P, k] float64, of k completions for each of P problems; rewards NaN if unscorable."""
    rollouts = rollout.sample(model, prompt_ids, sampling, group_size=k, seed=seed)
    texts = decode(rollouts.completion_ids, rollouts.lengths, tokenizer)
    golds = [problem.answer for problem in problems for _ in range(k)]
    scores = [as_number(reward(text, gold)) for text, gold in zip(texts, golds, strict=True)]
    return torch.tensor(scores, dtype=torch.float64).view(-1, k), rollouts.truncated.double().cpu()


def as_number(reward: float | None) -> float:
    """A reward as tensors hold it: NaN for None, so that it can neither be averaged nor mistaken for 0."""
    if reward is not None and math.isinf(reward):
        raise ValueError(f"a reward must be a finite number or None, got {reward}")
    return math.nan if reward is None else float(reward)


def avg_at_k(rewards: torch.Tensor) -> float:
    """Mean over problems of the mean over scorable completions of rewards [P, k]; NaN if none is scorable."""
    return rewards.nanmean(dim=1).nanmean().item()


def bootstrap_interval(rewards: torch.Tensor, *, draws: int = 10_000) -> tuple[float, float]:
    """95 % percentile interval of avg@k over resampled problems: the error of asking these P problems, not others."""
    means = rewards.nanmean(dim=1)
    means = means[~means.isnan()]  # [P]
    if len(means) == 0:
        return float("nan"), float("nan")
    index = torch.randint(len(means), (draws, len(means)), generator=generator_for("bootstrap"))
    low, high = means[index].mean(dim=1).quantile(torch.tensor([0.025, 0.975], dtype=means.dtype)).tolist()
    return low, high


def main(cfg: EvalConfig) -> dict:
    """Evaluate and print; returns the JSON row."""
    for name, low in (("k", 1), ("problems", 1), ("batch_size", 1), ("max_new_tokens", 1)):
        if getattr(cfg, name) is not None and getattr(cfg, name) < low:
            raise InputError(f"--{name.replace('_', '-')} {getattr(cfg, name)}: must be at least {low}")
    for name, good, rule in (
        ("temperature", 0 <= cfg.temperature < math.inf, "at least 0"),
        ("top_k", cfg.top_k >= 0, "at least 0"),
        ("top_p", 0 < cfg.top_p <= 1, "above 0 and at most 1"),
        ("repetition_penalty", 0 < cfg.repetition_penalty < math.inf, "above 0"),
    ):
        if not good:
            raise InputError(f"--{name.replace('_', '-')} {getattr(cfg, name)}: must be {rule}")
    if cfg.prompt is None:
        problems = data.eval_problems(cfg.data, cfg.problems, of_training_file=cfg.held_out)
    else:
        problems = [data.Problem(cfg.prompt, "", "prompt")]
    device = rollout.choose_device(cfg.device)
    if Path(cfg.model).is_dir():  # loading takes no time; a download keeps its bar
        logging.disable_progress_bar()
    model, tokenizer = rollout.load_policy(cfg.model, device)
    max_new_tokens = cfg.max_new_tokens
    if max_new_tokens is None:
        max_new_tokens = data.max_new_tokens(cfg.data) if cfg.prompt is None else data.FILE_TOKENS
    room = model.config.max_position_embeddings - max_new_tokens
    problems, prompt_ids = data.encode_prompts(problems, tokenizer, room)
    engine = cfg.engine
    if engine == "vllm":
        longest, dtype = max(map(len, prompt_ids)), "float32" if device == "cpu" else "bfloat16"
        engine = vllm_engine.Engine(
            cfg.model, vocab_size=model.vocab_size, max_tokens=longest + max_new_tokens, sequences=cfg.batch_size,
            dtype=dtype, device=device, memory=cfg.vllm_memory,
        )  # fmt: skip
    sampling = rollout.Sampling(
        max_new_tokens, rollout.eos_token_ids(model, tokenizer), tokenizer.pad_token_id, cfg.temperature,
        cfg.batch_size, engine, cfg.top_k, cfg.top_p, cfg.repetition_penalty, show_progress=True,
    )  # fmt: skip
    if cfg.prompt is not None:
        answer = rollout.sample(model, prompt_ids, sampling, group_size=1, seed=seed_for(cfg.seed))
        text = decode(answer.completion_ids, answer.lengths, tokenizer)[0]
        print(text)
        return {"prompt": cfg.prompt, "completion": text}

    reward = data.reward_function(cfg.data)
    rewards, truncated = sample_rewards(
        model, tokenizer, problems, prompt_ids, reward, sampling, k=cfg.k, seed=seed_for(cfg.seed)
    )
    low, high = bootstrap_interval(rewards)
    row = {
        "model": cfg.model,
        "data": cfg.data,
        "problems": len(problems),
        "k": cfg.k,
        f"avg@{cfg.k}": avg_at_k(rewards),
        "ci95": [low, high],
        "unscorable": int(rewards.isnan().sum()),
        "truncated_share": truncated.mean().item(),
        "engine": cfg.engine,
        "temperature": cfg.temperature,
        "top_k": cfg.top_k,
        "top_p": cfg.top_p,
        "repetition_penalty": cfg.repetition_penalty,
        "max_new_tokens": max_new_tokens,
        "seed": cfg.seed,
    }
    print(
        f"{cfg.data}: avg@{cfg.k} {row[f'avg@{cfg.k}']:.3f}, 95 % interval {low:.3f} to {high:.3f} over "
        f"{len(problems)} problems; {row['truncated_share']:.1%} cut off at {max_new_tokens} tokens"
    )
    print(json.dumps(row))
    return row


if __name__ == "__main__":
    try:
        main(tyro.cli(EvalConfig))
    except (InputError, FloatingPointError) as problem:
        print(f"error: {problem}", file=sys.stderr)
        sys.exit(2)
