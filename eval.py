"""
How good a model is: avg@k, pass@k and maj@k on sets of problems, or its answer to one question.

    python eval.py --model out/checkpoint --data arithmetic --k 4
    python eval.py --model Qwen/Qwen3-4B --data math500 aime24 amc23 minerva olympiadbench \\
        gaokao2023en --k 32 --max-new-tokens 32768 --temperature 0.6 --top-p 0.95 --top-k 20 \\
        --thinking --out-dir evals/4b
    python eval.py --compare evals/4b evals/4b-trained     # paired differences, problem by problem
    python eval.py --check-golds --data FILE               # list the golds that cannot be scored
    python eval.py --model out/checkpoint --prompt "7+9+5?"

avg@k averages over k completions of a problem, then over problems: a low-variance estimate of
pass@1. Each set prints one line of JSON, and a table follows. With --out-dir every completion is
stored at once, and repeating the command continues an interrupted evaluation.
"""

import collections
import json
import math
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple

import torch
import tyro
from tqdm import tqdm
from transformers.utils import logging

import data
import models
import rollout
from dppo import generator_for, seed_for
from engines import vllm_engine
from rewards import as_number, decode, math_reward, normal_form, score, verify
from runtime import InputError, checkpoint, log
from runtime.device import choose_device, choose_dtype
from tasks import gguf


@dataclass
class EvalConfig:
    model: str | None = None
    """The model to evaluate: a folder such as out/checkpoint, a hub id, smollm2 or a .gguf file."""
    data: tuple[str, ...] = ("arithmetic",)
    """One or more sets: names of embedded or hub sets, or files."""
    k: int = 4
    """Completions per problem."""
    problems: int | None = None
    """Use at most this many problems of each set. By default all, or 300 of an embedded set."""
    held_out: bool = False
    """Use only the last 5 % of a set, which train.py holds out of its training."""
    out_dir: str | None = None
    """Store every completion in this folder, and continue from those already stored there."""
    compare: tuple[str, str] | None = None
    """Instead of evaluating a model, compare two such folders."""
    check_golds: bool = False
    """Instead of evaluating a model, list the golds of --data that the reward cannot verify."""
    prompt: str | None = None
    """Instead of evaluating the model, print its answer to this one question."""
    temperature: float = 1.0
    """Sampling temperature. 0 is greedy decoding."""
    top_k: int = 0
    """Sample only from this many of the likeliest tokens. 0 means all tokens."""
    top_p: float = 1.0
    """Sample only from the likeliest tokens that together have this probability."""
    repetition_penalty: float = 1.0
    """A value above 1 makes tokens that already occurred less likely."""
    max_new_tokens: int | None = None
    """Longest completion, in tokens. By default what the data need; 1,024 for --prompt."""
    prompt_format: Literal["auto", "chat", "plain"] = "auto"
    """How a problem becomes a prompt. auto is chat if the tokenizer has a chat template."""
    thinking: bool = False
    """Let the chat template open a thinking block."""
    engine: Literal["compact", "hf", "vllm"] = "compact"
    """What samples: this repository's loop, transformers' generate, or vLLM."""
    vllm_memory: float = 0.8
    """Share of the GPU's memory that vLLM may use."""
    batch_size: int = 512
    """Number of sequences sampled at once."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to run. auto is cuda if there is a GPU."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of the arithmetic. auto is bfloat16 on CUDA and float32 on the CPU."""
    seed: int = 0
    """Seed of the sampling."""


# The settings that determine the completions: everything in one --out-dir shares them.
SETTINGS = (
    "model", "k", "held_out", "temperature", "top_k", "top_p", "repetition_penalty",
    "max_new_tokens", "prompt_format", "thinking", "engine", "batch_size", "dtype", "seed",
)  # fmt: skip


class ProblemSet(NamedTuple):
    name: str
    problems: list[data.Problem]
    prompt_ids: list[list[int]]
    max_new_tokens: int


# ---------------------------------------------------------------------------- figures


def sample_rewards(model, tokenizer, problems, prompt_ids, reward, sampling, *, k, seed, keys=None):
    """(rewards, truncated) of k completions for each of P problems, both [P, k] float64.

    A reward is NaN if the completion cannot be scored. keys: see rollout.sample.
    """
    options = {"group_size": k, "seed": seed, "keys": keys}
    rollouts = rollout.sample(model, prompt_ids, sampling, **options)
    return score(rollouts, problems, tokenizer, reward)[1], rollouts.truncated.double()


def avg_at_k(rewards: torch.Tensor) -> float:
    """Mean over problems of the mean over scorable completions of rewards [P, k]; NaN if none."""
    return rewards.nanmean(dim=1).nanmean().item()


def pass_at_k(rewards: torch.Tensor, k: int) -> float:
    """The probability that at least one of k completions is right (arXiv:2107.03374).

    With n scorable completions of a problem, c of them right, 1 - C(n - c, k) / C(n, k) is unbiased
    for k <= n. This is its mean over problems; those with fewer than k are left out.
    """
    chances = []
    for row in rewards:
        n = int((~row.isnan()).sum())
        c = int((row == 1).sum())
        if n >= k:
            chances.append(1.0 - math.prod(1.0 - k / i for i in range(n - c + 1, n + 1)))
    return sum(chances) / len(chances) if chances else math.nan


def maj_at_k(rewards: torch.Tensor, answers: list[list[str | None]]) -> float:
    """Mean over problems of the reward [P, k] of the most frequent answer.

    Tied answers share the vote by their mean reward; None does not vote. Answers with equal normal
    forms count as one, with the reward of the first.
    """
    scores = []
    for row, given in zip(rewards.tolist(), answers, strict=True):
        forms = [None if answer is None else normal_form(answer) for answer in given]
        votes = collections.Counter(form for form in forms if form is not None)
        most = max(votes.values(), default=0)
        winners = [row[forms.index(form)] for form in votes if votes[form] == most]
        scores.append(sum(winners) / len(winners) if winners else 0.0)
    return torch.tensor(scores, dtype=torch.float64).nanmean().item()


def bootstrap_interval(rewards: torch.Tensor, *, draws: int = 10_000) -> tuple[float, float]:
    """95 % percentile interval of avg@k over resampled problems.

    It measures the error due to the choice of these P problems.
    """
    means = rewards.nanmean(dim=1)
    means = means[~means.isnan()]  # [P]
    if len(means) == 0:
        return float("nan"), float("nan")
    generator = generator_for("bootstrap")
    index = torch.from_numpy(generator.integers(len(means), size=(draws, len(means))))
    ends = torch.tensor([0.025, 0.975], dtype=means.dtype)
    low, high = means[index].mean(dim=1).quantile(ends).tolist()
    return low, high


def figures(rows: list[dict]) -> dict:
    """The figures of a set from its stored rows, each of k completions."""
    scores = torch.tensor(
        [[as_number(score) for score in row["rewards"]] for row in rows], dtype=torch.float64
    )
    k = scores.shape[1]
    low, high = bootstrap_interval(scores)
    tokens = torch.tensor([row["lengths"] for row in rows], dtype=torch.float64)
    powers = (2**i for i in range(k.bit_length()))
    return {
        "problems": len(rows),
        "k": k,
        f"avg@{k}": avg_at_k(scores),
        "ci95": [low, high],
        **{f"pass@{n}": pass_at_k(scores, n) for n in sorted({k, *powers})},
        f"maj@{k}": maj_at_k(scores, [row["answers"] for row in rows]),
        "unscorable": int(scores.isnan().sum()),
        "truncated_share": sum(sum(row["truncated"]) for row in rows) / scores.numel(),
        "mean_length": tokens.mean().item(),
    }


# ---------------------------------------------------------------------------- compare and check


def compare(first: str, second: str) -> list[dict]:
    """How much better the second folder is on each set that both hold, problem by problem."""
    paths = sorted(Path(first).glob("*.jsonl"))
    names = [path.name for path in paths if (Path(second) / path.name).exists()]
    if not names:
        folders = f"--compare {first} {second}"
        raise InputError(f"{folders}: no set in common; eval.py --out-dir makes such folders")
    table = []
    for name in names:
        old, new = (
            {(row["index"], row["problem"]): row["rewards"] for row in log.read_rows(path)}
            for path in (Path(first) / name, Path(second) / name)
        )
        common = [key for key in old if key in new]
        if not common:
            raise InputError(f"--compare: {name} has no problem in common in {first} and {second}")
        before, after = (problem_means([of[key] for key in common]) for of in (old, new))
        difference = (after - before)[:, None]  # [P, 1]
        row = {
            "set": name.removesuffix(".jsonl"),
            "problems": len(common),
            "first": before.nanmean().item(),
            "second": after.nanmean().item(),
            "difference": avg_at_k(difference),
            "ci95": list(bootstrap_interval(difference)),
        }
        print(log.as_json(row))
        table.append(row)
    interval = "95 % interval, the same problems resampled"
    print(f"{'set':16s} problems  first   second  difference ({interval})")
    for row in table:
        print(
            f"{row['set']:16s} {row['problems']:8d}  {row['first']:.3f}   {row['second']:.3f}   "
            f"{row['difference']:+.3f} ({row['ci95'][0]:+.3f} to {row['ci95'][1]:+.3f})"
        )
    return table


def problem_means(rewards: list[list[float | None]]) -> torch.Tensor:
    """Mean reward [P] of each problem's scorable completions, float64; NaN if it has none."""
    rows = [torch.tensor(list(map(as_number, row))) for row in rewards]
    return torch.stack([row.double().nanmean() for row in rows])


def check_golds(names: tuple[str, ...]) -> None:
    """Compare every gold with itself, by the reward and by math-verify alone; print failures."""
    verified = number = 0
    for name in names:
        if name in data.EMBEDDED:
            hint = "these golds are computed; name a set of the hub or a file"
            raise InputError(f"--check-golds --data {name}: {hint}")
        for row, problem in enumerate(data.read_problems(name), 1):
            gold = problem.answer
            number += 1
            if math_reward(f"\\boxed{{{gold}}}", gold) == 1.0 and verify(gold, gold):
                verified += 1
            else:
                print(f"{name}, row {row}: gold {gold[:80]!r} of {problem.text[:80]!r}")
    print(f"verified {verified} of {number}")


# ---------------------------------------------------------------------------- evaluate


def main(cfg: EvalConfig, *, reward=None) -> list[dict]:
    """Evaluate and print; returns the JSON rows. `reward` replaces the default of each set."""
    check_config(cfg)
    if cfg.compare:
        return compare(*cfg.compare)
    if cfg.check_golds:
        check_golds(cfg.data)
        return []
    if cfg.model is None:
        raise InputError("--model: give a folder such as out/checkpoint, a hub id or a .gguf file")
    device = choose_device(cfg.device)
    cfg = replace(cfg, device=device, dtype=choose_dtype(cfg.dtype, device))
    model, tokenizer, sets, sampling = load(cfg, reward)
    if cfg.prompt is not None:
        seed = seed_for(cfg.seed)
        answer = rollout.sample(model, sets[0].prompt_ids, sampling, group_size=1, seed=seed)
        text = decode(answer.completion_ids, answer.lengths, tokenizer)[0]
        print(text)
        return [{"prompt": cfg.prompt, "completion": text}]
    table = evaluate_sets(model, tokenizer, sets, sampling, cfg, reward)
    print_table(table, cfg.k)
    return table


def check_config(cfg: EvalConfig) -> None:
    """InputError names a flag whose value is out of range."""
    for name in ("k", "problems", "batch_size", "max_new_tokens"):
        if getattr(cfg, name) is not None and getattr(cfg, name) < 1:
            raise InputError(f"--{name.replace('_', '-')} {getattr(cfg, name)}: must be at least 1")
    for name, good, rule in (
        ("temperature", 0 <= cfg.temperature < math.inf, "at least 0"),
        ("top_k", cfg.top_k >= 0, "at least 0"),
        ("top_p", 0 < cfg.top_p <= 1, "above 0 and at most 1"),
        ("repetition_penalty", 0 < cfg.repetition_penalty < math.inf, "above 0"),
    ):
        if not good:
            raise InputError(f"--{name.replace('_', '-')} {getattr(cfg, name)}: must be {rule}")


def load(cfg: EvalConfig, reward):
    """(model, tokenizer, problem sets, sampling), ready to sample from."""
    found = {}
    if cfg.prompt is not None:
        found["prompt"] = [data.Problem(cfg.prompt, "", "prompt")]
    for name in cfg.data if cfg.prompt is None else ():
        part = cfg.held_out and name not in data.EMBEDDED
        found[name] = data.eval_problems(name, cfg.problems, of_training_file=part, reward=reward)
    source = gguf.model_folder(cfg.model)
    if Path(source).is_dir():  # no bar for loading a folder; a download keeps its own
        logging.disable_progress_bar()
    model, tokenizer = models.load_policy(source, cfg.device, cfg.dtype)
    sets = []
    for name, problems in found.items():
        room = cfg.max_new_tokens or data.max_new_tokens(name)
        limit = model.config.max_position_embeddings - room
        fitting = data.encode_prompts(problems, tokenizer, limit, cfg.prompt_format, cfg.thinking)
        sets.append(ProblemSet(name, *fitting, room))
    sampling = rollout.Sampling.for_policy(
        model, tokenizer, max(one.max_new_tokens for one in sets),
        temperature=cfg.temperature, batch_size=cfg.batch_size, engine=cfg.engine, top_k=cfg.top_k,
        top_p=cfg.top_p, repetition_penalty=cfg.repetition_penalty, show_progress=True,
    )  # fmt: skip
    if cfg.engine == "vllm":
        longest = max(len(ids) + one.max_new_tokens for one in sets for ids in one.prompt_ids)
        sampling.engine = vllm_engine.Engine(
            source, vocab_size=model.vocab_size, max_tokens=longest, sequences=cfg.batch_size,
            dtype=cfg.dtype, device=cfg.device, memory=cfg.vllm_memory,
        )  # fmt: skip
    return model, tokenizer, sets, sampling


def evaluate_sets(model, tokenizer, sets, sampling, cfg, reward=None) -> list[dict]:
    """Evaluate set by set, and print each one's row of figures."""
    settings = {name: getattr(cfg, name) for name in SETTINGS}
    settings["weights"] = checkpoint.fingerprint(model)
    folder = open_folder(cfg.out_dir, settings) if cfg.out_dir else None
    table = []
    for one in sets:
        path = folder and folder / f"{Path(one.name).stem}.jsonl"
        own = replace(sampling, max_new_tokens=one.max_new_tokens)
        rows = complete(model, tokenizer, one, own, cfg, path, reward)
        row = {"data": one.name, **figures(rows), **settings, "max_new_tokens": one.max_new_tokens}
        table.append(row)
        print(log.as_json(row), flush=True)
    return table


def print_table(table: list[dict], k: int) -> None:
    """One line per set, and the average over several."""
    figures = f"avg@{k:<4d} (95 % interval)   pass@{k:<4d} maj@{k:<4d} cut off   tokens"
    print(f"{'set':18s} problems   {figures}")
    for row in table:
        low, high = row["ci95"]
        print(
            f"{Path(row['data']).stem[:18]:18s} {row['problems']:8d}   {row[f'avg@{k}']:.3f}    "
            f"({low:.3f} to {high:.3f})   {row[f'pass@{k}']:.3f}     {row[f'maj@{k}']:.3f}    "
            f"{row['truncated_share']:6.1%}  {row['mean_length']:7.0f}"
        )
    if len(table) > 1:
        print(f"{'average':18s} {'':8s}   {sum(row[f'avg@{k}'] for row in table) / len(table):.3f}")


def complete(model, tokenizer, one: ProblemSet, sampling, cfg, path, reward=None) -> list[dict]:
    """Sample and score every problem of a set, batch by batch; rows already in `path` are reused.

    A row has index, problem, gold, rewards, answers, lengths, truncated and completions.
    """
    name, problems, prompt_ids, _ = one
    chunk = max(1, cfg.batch_size // cfg.k)
    rows = log.read_rows(path)[: len(problems)] if path else []
    expected = [(problem.text, problem.answer) for problem in problems[: len(rows)]]
    if [(row["problem"], row["gold"]) for row in rows] != expected:
        raise InputError(f"{path} has other problems or golds than {name}: use another --out-dir")
    if path and len(rows) < len(problems):  # sample a batch again if some of it is missing
        rows = log.cut_rows(path, lambda row: row["index"] < len(rows) // chunk * chunk)
    reward = reward or data.reward_function(name)
    starts = range(len(rows), len(problems), chunk)
    for start in tqdm(starts, desc=name, unit="batch", delay=3, leave=False):
        some = slice(start, start + chunk)
        options = {"seed": seed_for(cfg.seed, name), "keys": range(len(problems))[some]}
        rollouts = rollout.sample(model, prompt_ids[some], sampling, group_size=cfg.k, **options)
        texts, rewards = score(rollouts, problems[some], tokenizer, reward)
        scores = [[None if math.isnan(x) else x for x in row] for row in rewards.tolist()]
        new = [
            {
                "index": start + number,
                "problem": problem.text,
                "gold": problem.answer,
                "rewards": scores[number],
                "answers": [data.final_answer(name, text) for text in texts[number]],
                "lengths": rollouts.lengths[number].tolist(),
                "truncated": rollouts.truncated[number].tolist(),
                "completions": texts[number],
            }
            for number, problem in enumerate(problems[some])
        ]
        if path:
            log.append_rows(path, new)
        rows += new
    return rows


def open_folder(folder: str, settings: dict) -> Path:
    """The folder of one model's completions; InputError if it was made with other settings."""
    path = Path(folder) / "config.json"
    if path.exists():
        stored = json.loads(path.read_text())
        for name, value in settings.items():
            same = stored.get(name) == value
            if name == "weights" and name in stored:  # a sum, which rounds by the number of threads
                same = math.isclose(stored[name], value, rel_tol=1e-9)
            if not same:
                has = f"--out-dir {folder} has {name} {stored.get(name)}, not {value}"
                raise InputError(f"{has}: use the same value, or another folder")
    else:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(settings, indent=2) + "\n")
    return path.parent


if __name__ == "__main__":
    try:
        main(tyro.cli(EvalConfig))
    except (InputError, FloatingPointError) as problem:
        print(f"error: {problem}", file=sys.stderr)
        sys.exit(2)
