"""
How good is a model: avg@k, pass@k, maj@k on sets of problems, with an interval; or its answer to one question.

    python eval.py --model out/checkpoint --data arithmetic --k 4
    python eval.py --model Qwen/Qwen3-4B --data math500 aime24 amc23 minerva olympiadbench gaokao2023en \\
        --k 32 --max-new-tokens 32768 --temperature 0.6 --top-p 0.95 --top-k 20 --thinking --out-dir evals/4b
    python eval.py --compare evals/4b evals/4b-trained        # the same problems: paired differences
    python eval.py --check-golds --data FILE                  # which golds the reward cannot read
    python eval.py --model out/checkpoint --prompt "7+9+5?"

avg@k samples k completions per problem and averages over k, then over problems: the low-variance estimate of
pass@1. Prints one line of JSON a set and a table at the end. With --out-dir every completion is stored as it comes, and
the same command goes on where it was stopped.
"""

import collections
import json
import math
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
import tyro
from tqdm import tqdm
from transformers.utils import logging

import checkpoint
import data
import rollout
import update
import vllm_engine
from data import InputError
from rewards import math_reward, normal_form, verify
from sampler import generator_for, seed_for


@dataclass
class EvalConfig:
    model: str | None = None  # a folder such as out/checkpoint, or a hub id
    data: tuple[str, ...] = ("arithmetic",)  # names of embedded or hub sets, or files; several are fine
    k: int = 4  # completions per problem
    problems: int | None = None  # of each set at most so many; default: all of it, 300 of the embedded ones
    held_out: bool = False  # of a set, only the last 5 %, which train.py holds out of its training
    out_dir: str | None = None  # store every completion there, and go on with what is there
    compare: tuple[str, str] | None = None  # two such folders, instead of a model
    check_golds: bool = False  # does every gold of --data verify against itself? Instead of a model
    prompt: str | None = None  # answer this one question instead
    temperature: float = 1.0  # of the sampling distribution; 0: greedy
    top_k: int = 0  # only the k likeliest tokens; 0: all
    top_p: float = 1.0  # only the likeliest tokens that have this probability together
    repetition_penalty: float = 1.0  # above 1: what was said is less likely
    max_new_tokens: int | None = None  # default: what the data needs; 1,024 for --prompt
    prompt_format: Literal["auto", "chat", "plain"] = "auto"  # auto: chat where the tokenizer has a template
    thinking: bool = False  # let the chat template open a thought
    engine: Literal["compact", "hf", "vllm"] = "compact"  # what samples
    vllm_memory: float = 0.8  # share of the GPU's memory that vLLM may take
    batch_size: int = 512  # sequences sampled at once
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: cuda where there is one
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # of the arithmetic; bfloat16 on CUDA
    seed: int = 0  # of the sampling


# what decides which completions come: the same for all that is in one folder
SETTINGS = ("model", "k", "held_out", "temperature", "top_k", "top_p", "repetition_penalty", "max_new_tokens",
            "prompt_format", "thinking", "engine", "batch_size", "dtype", "seed")  # fmt: skip


# ---------------------------------------------------------------------------- completions and their rewards


def decode(completion_ids: torch.Tensor, lengths: torch.Tensor, tokenizer) -> list[str]:
    """Texts of completions [..., T] with lengths [...], flattened, without special tokens."""
    rows = zip(completion_ids.flatten(0, -2).tolist(), lengths.flatten().tolist(), strict=True)
    return [tokenizer.decode(ids[:length], skip_special_tokens=True) for ids, length in rows]


def sample_rewards(model, tokenizer, problems, prompt_ids, reward, sampling, *, k, seed):
    """(rewards, truncated), both [P, k] float64, of k completions for each of P problems; rewards NaN if unscorable."""
    rollouts = rollout.sample(model, prompt_ids, sampling, group_size=k, seed=seed)
    return score(rollouts, problems, tokenizer, reward)[1], rollouts.truncated.double().cpu()


def score(rollouts, problems, tokenizer, reward) -> tuple[list[list[str]], torch.Tensor]:
    """What was said to each of K problems, [K][G], and what it is worth, [K, G] float64, NaN if unscorable."""
    texts, G = decode(rollouts.completion_ids, rollouts.lengths, tokenizer), rollouts.lengths.shape[1]
    said = [texts[k * G : (k + 1) * G] for k in range(len(problems))]
    rewards = [
        [as_number(reward(text, problem.answer)) for text in own] for own, problem in zip(said, problems, strict=True)
    ]
    return said, torch.tensor(rewards, dtype=torch.float64).view(len(problems), G)


def as_number(reward: float | None) -> float:
    """A reward as tensors hold it: NaN for None, so that it can neither be averaged nor mistaken for 0."""
    if reward is not None and math.isinf(reward):
        raise ValueError(f"a reward must be a finite number or None, got {reward}")
    return math.nan if reward is None else float(reward)


# ---------------------------------------------------------------------------- figures


def avg_at_k(rewards: torch.Tensor) -> float:
    """Mean over problems of the mean over scorable completions of rewards [P, k]; NaN if none is scorable."""
    return rewards.nanmean(dim=1).nanmean().item()


def pass_at_k(rewards: torch.Tensor, k: int) -> float:
    """Chance that one of k completions is right, from the n scorable ones of which c are: the mean over problems of
    1 - C(n - c, k) / C(n, k) (arXiv:2107.03374), without bias for k <= n; problems with fewer are left out."""
    chances = []
    for row in rewards:
        n, c = int((~row.isnan()).sum()), int((row == 1).sum())
        if n >= k:
            chances.append(1.0 - math.prod(1.0 - k / i for i in range(n - c + 1, n + 1)))
    return sum(chances) / len(chances) if chances else math.nan


def maj_at_k(rewards: torch.Tensor, answers: list[list[str | None]]) -> float:
    """Mean over problems of the reward [P, k] of the most frequent answer; ties share it, no answer has no vote."""
    scores = []
    for row, said in zip(rewards.tolist(), answers, strict=True):
        ballots = [None if answer is None else normal_form(answer) for answer in said]
        votes = collections.Counter(ballot for ballot in ballots if ballot is not None)
        winners = [row[ballots.index(ballot)] for ballot in votes if votes[ballot] == max(votes.values())]
        scores.append(sum(winners) / len(winners) if winners else 0.0)
    return torch.tensor(scores, dtype=torch.float64).nanmean().item()


def bootstrap_interval(rewards: torch.Tensor, *, draws: int = 10_000) -> tuple[float, float]:
    """95 % percentile interval of avg@k over resampled problems: the error of asking these P problems, not others."""
    means = rewards.nanmean(dim=1)
    means = means[~means.isnan()]  # [P]
    if len(means) == 0:
        return float("nan"), float("nan")
    index = torch.randint(len(means), (draws, len(means)), generator=generator_for("bootstrap"))
    low, high = means[index].mean(dim=1).quantile(torch.tensor([0.025, 0.975], dtype=means.dtype)).tolist()
    return low, high


def figures(rows: list[dict]) -> dict:
    """What the stored rows of a set say; k is how many completions each has."""
    scores = torch.tensor([[as_number(score) for score in row["rewards"]] for row in rows], dtype=torch.float64)
    k = scores.shape[1]
    low, high = bootstrap_interval(scores)
    tokens = torch.tensor([row["lengths"] for row in rows], dtype=torch.float64)
    return {
        "problems": len(rows),
        "k": k,
        f"avg@{k}": avg_at_k(scores),
        "ci95": [low, high],
        **{f"pass@{n}": pass_at_k(scores, n) for n in sorted({k, *(2**i for i in range(k.bit_length()))})},
        f"maj@{k}": maj_at_k(scores, [row["answers"] for row in rows]),
        "unscorable": int(scores.isnan().sum()),
        "truncated_share": sum(sum(row["truncated"]) for row in rows) / scores.numel(),
        "mean_length": tokens.mean().item(),
    }


# ---------------------------------------------------------------------------- the three commands


def compare(first: str, second: str) -> list[dict]:
    """Of the sets that both folders hold: how much better is the second, problem by problem."""
    names = [path.name for path in sorted(Path(first).glob("*.jsonl")) if (Path(second) / path.name).exists()]
    if not names:
        raise InputError(
            f"--compare {first} {second}: they have no set in common; eval.py --out-dir makes such folders"
        )
    table = []
    for name in names:
        old, new = (
            {(row["index"], row["problem"]): row["rewards"] for row in checkpoint.read_rows(Path(folder) / name)}
            for folder in (first, second)
        )
        common = [key for key in old if key in new]
        if not common:
            raise InputError(f"--compare: {name} has no problem in common in {first} and {second}")
        before, after = (
            torch.stack([torch.tensor(list(map(as_number, of[key]))).double().nanmean() for key in common])
            for of in (old, new)
        )  # [P]
        low, high = bootstrap_interval((after - before)[:, None])
        row = {"set": name.removesuffix(".jsonl"), "problems": len(common), "first": before.nanmean().item(),
               "second": after.nanmean().item(), "difference": avg_at_k((after - before)[:, None]),
               "ci95": [low, high]}  # fmt: skip
        print(checkpoint.as_json(row))
        table.append(row)
    print(f"{'set':16s} problems  first   second  difference (95 % interval, the same problems resampled)")
    for row in table:
        print(
            f"{row['set']:16s} {row['problems']:8d}  {row['first']:.3f}   {row['second']:.3f}   "
            f"{row['difference']:+.3f} ({row['ci95'][0]:+.3f} to {row['ci95'][1]:+.3f})"
        )
    return table


def check_golds(names: tuple[str, ...]) -> None:
    """Every gold in a box as a completion, through the reward, and by math-verify alone; lists those that fail."""
    verified = number = 0
    for name in names:
        if name in data.EMBEDDED:
            raise InputError(f"--check-golds --data {name}: these golds are computed; name a set of the hub or a file")
        for row, problem in enumerate(data.read_problems(name), 1):
            gold, number = problem.answer, number + 1
            if math_reward(f"\\boxed{{{gold}}}", gold) == 1.0 and verify(gold, gold):
                verified += 1
            else:
                print(f"{name}, row {row}: gold {gold[:80]!r} of {problem.text[:80]!r}")
    print(f"verified {verified} of {number}")


def main(cfg: EvalConfig) -> list[dict]:
    """Evaluate and print; returns the JSON rows."""
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
    if cfg.compare:
        return compare(*cfg.compare)
    if cfg.check_golds:
        check_golds(cfg.data)
        return []
    if cfg.model is None:
        raise InputError("--model: give a folder such as out/checkpoint, or a hub id")
    device = rollout.choose_device(cfg.device)
    dtype = ("float32" if device == "cpu" else "bfloat16") if cfg.dtype == "auto" else cfg.dtype
    cfg = replace(cfg, device=device, dtype=dtype)
    if cfg.prompt is None:
        sets = {
            name: data.eval_problems(name, cfg.problems, of_training_file=cfg.held_out and name not in data.EMBEDDED)
            for name in cfg.data
        }
    else:
        sets = {"prompt": [data.Problem(cfg.prompt, "", "prompt")]}
    if Path(cfg.model).is_dir():  # loading takes no time; a download keeps its bar
        logging.disable_progress_bar()
    model, tokenizer = rollout.load_policy(cfg.model, device)
    rooms = {name: cfg.max_new_tokens or data.max_new_tokens(name) for name in sets}
    encoded = {}
    for name, problems in sets.items():
        room = model.config.max_position_embeddings - rooms[name]
        encoded[name] = data.encode_prompts(problems, tokenizer, room, cfg.prompt_format, cfg.thinking)
    sampling = rollout.Sampling(
        max(rooms.values()), rollout.eos_token_ids(model, tokenizer), tokenizer.pad_token_id, cfg.temperature,
        cfg.batch_size, cfg.engine, cfg.top_k, cfg.top_p, cfg.repetition_penalty, show_progress=True,
    )  # fmt: skip
    if cfg.engine == "vllm":
        longest = max(len(ids) + rooms[name] for name, (_, prompt_ids) in encoded.items() for ids in prompt_ids)
        sampling.engine = vllm_engine.Engine(
            cfg.model, vocab_size=model.vocab_size, max_tokens=longest, sequences=cfg.batch_size, dtype=dtype,
            device=device, memory=cfg.vllm_memory,
        )  # fmt: skip
    if cfg.prompt is not None:
        with update.autocast(cfg):
            answer = rollout.sample(model, encoded["prompt"][1], sampling, group_size=1, seed=seed_for(cfg.seed))
        text = decode(answer.completion_ids, answer.lengths, tokenizer)[0]
        print(text)
        return [{"prompt": cfg.prompt, "completion": text}]

    settings = {name: getattr(cfg, name) for name in SETTINGS} | {"weights": checkpoint.fingerprint(model)}
    stored = open_folder(cfg.out_dir, settings) if cfg.out_dir else None
    table = []
    for name, (problems, prompt_ids) in encoded.items():
        path = stored and stored / f"{Path(name).stem}.jsonl"
        with update.autocast(cfg):
            rows = complete(model, tokenizer, name, problems, prompt_ids, replace(sampling, max_new_tokens=rooms[name]),
                            cfg, path)  # fmt: skip
        table.append({"data": name, **figures(rows), **settings, "max_new_tokens": rooms[name]})
        print(checkpoint.as_json(table[-1]), flush=True)
    k = cfg.k
    print(f"{'set':18s} problems   avg@{k:<4d} (95 % interval)   pass@{k:<4d} maj@{k:<4d} cut off   tokens")
    for row in table:
        shares = f"{row[f'avg@{k}']:.3f}    ({row['ci95'][0]:.3f} to {row['ci95'][1]:.3f})   {row[f'pass@{k}']:.3f}"
        print(
            f"{Path(row['data']).stem[:18]:18s} {row['problems']:8d}   {shares}     {row[f'maj@{k}']:.3f}    "
            f"{row['truncated_share']:6.1%}  {row['mean_length']:7.0f}"
        )
    if len(table) > 1:
        print(f"{'average':18s} {'':8s}   {sum(row[f'avg@{k}'] for row in table) / len(table):.3f}")
    return table


def complete(model, tokenizer, name, problems, prompt_ids, sampling, cfg, path: Path | None) -> list[dict]:
    """Rows {index, problem, gold, rewards, answers, lengths, truncated, completions} of every problem, batch by batch;
    what `path` holds is not done again."""
    chunk = max(1, cfg.batch_size // cfg.k)
    rows = checkpoint.read_rows(path)[: len(problems)] if path else []
    if [(row["problem"], row["gold"]) for row in rows] != [(one.text, one.answer) for one in problems[: len(rows)]]:
        raise InputError(f"{path} holds other problems or golds than {name}: use another --out-dir")
    if path and len(rows) < len(problems):  # a batch that was cut short is drawn again, whole
        rows = checkpoint.cut_rows(path, lambda row: row["index"] < len(rows) // chunk * chunk)
    reward = data.reward_function(name)
    for start in tqdm(range(len(rows), len(problems), chunk), desc=name, unit="batch", delay=3, leave=False):
        some = slice(start, start + chunk)
        rollouts = rollout.sample(
            model, prompt_ids[some], sampling, group_size=cfg.k, seed=seed_for(cfg.seed, name, start)
        )
        texts, rewards = score(rollouts, problems[some], tokenizer, reward)
        new = [
            {
                "index": start + number, "problem": problem.text, "gold": problem.answer,
                "rewards": [None if math.isnan(value) else value for value in rewards[number].tolist()],
                "answers": [data.final_answer(name, text) for text in texts[number]],
                "lengths": rollouts.lengths[number].tolist(), "truncated": rollouts.truncated[number].tolist(),
                "completions": texts[number],
            }
            for number, problem in enumerate(problems[some])
        ]  # fmt: skip
        if path:
            checkpoint.append_rows(path, new)
        rows += new
    return rows


def open_folder(folder: str, settings: dict) -> Path:
    """The folder of one model's completions; InputError if it is another model's, or sampled otherwise."""
    path = Path(folder) / "config.json"
    if path.exists():
        there = json.loads(path.read_text())
        for name, value in settings.items():
            if there.get(name) != value:
                raise InputError(
                    f"--out-dir {folder} has {name} {there.get(name)}, not {value}: give what it has, or another folder"
                )
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
