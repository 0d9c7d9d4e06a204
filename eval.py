"""
How good a model is: avg@k and pass@k on sets of problems, or its answer to one question.

    python eval.py --model out/checkpoint --data arithmetic --k 4
    python eval.py --model Qwen/Qwen3-4B --data math500 aime24 amc23 minerva olympiadbench \\
        gaokao2023en --k 32 --max-new-tokens 32768 --temperature 0.6 --top-p 0.95 --top-k 20 \\
        --thinking --out-dir evals/4b
    python eval.py --compare evals/4b evals/4b-trained     # paired differences by problem
    python eval.py --check-golds --data FILE               # reference answers that cannot be scored
    python eval.py --model out/checkpoint --prompt "7+9+5?"

avg@k averages over k completions of a problem, then over problems: a low-variance estimate of
pass@1. Each set prints one line of JSON, and a table follows. With --out-dir each batch is
stored as soon as it is scored, and repeating the command continues an interrupted evaluation.
"""

import functools
import json
import math
import sys
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from typing import NamedTuple

import flags

if __name__ == "__main__":
    flags.answer_help(flags.EvalConfig)

import torch
import tyro
from tqdm import tqdm
from transformers.utils import logging

import config
import data
import models
import rewards
import rollout
from dppo import seed_for
from engines import vllm_engine
from flags import EvalConfig
from runtime import InputError, checkpoint, console, log
from runtime.answers import OR
from runtime.device import choose_device, choose_dtype

# Flags that do not change a completion. All others must be the same throughout one --out-dir.
FREE = ("data", "problems", "out_dir", "compare", "check_golds", "prompt", "vllm_memory", "device")


class ProblemSet(NamedTuple):
    name: str
    file: str  # of its completions, without .jsonl
    problems: list[data.Problem]
    prompt_ids: list[list[int]]
    max_new_tokens: int


def main(cfg: EvalConfig, *, reward=None) -> list[dict]:
    """Evaluate and print; returns the JSON rows. `reward` replaces the default of each set."""
    check_config(cfg)
    if reward:
        rewards.takes_row(reward)  # raises if it cannot be called
    if cfg.compare:
        return compare(*cfg.compare)
    if cfg.check_golds:
        return check_golds(cfg.data)
    if cfg.model is None:
        raise InputError("--model: give a folder such as out/checkpoint, a hub id or a .gguf file")
    device = choose_device(cfg.device)
    cfg = replace(cfg, device=device, dtype=choose_dtype(cfg.dtype, device))
    model, tokenizer, sets, sampling = load(cfg, reward)
    if cfg.prompt is not None:
        (row,) = complete(model, tokenizer, sets[0], sampling, replace(cfg, k=1))
        print(row["completions"][0])
        return [{"prompt": cfg.prompt, "completion": row["completions"][0]}]

    settings = {name: value for name, value in asdict(cfg).items() if name not in FREE}
    settings |= {"weights": checkpoint.fingerprint(model), "date": tokenizer.date}
    settings["reward"] = None  # the default of each set
    if reward:
        settings["reward"] = getattr(reward, "__qualname__", type(reward).__name__)
    table = []
    with checkpoint.owned(cfg.out_dir):
        folder = open_folder(cfg.out_dir, settings) if cfg.out_dir else None
        for problem_set in sets:
            path = folder and folder / f"{problem_set.file}.jsonl"
            rows = complete(model, tokenizer, problem_set, sampling, cfg, path, reward)
            row = {"data": problem_set.name, **figures(rows)}
            row |= settings | {"max_new_tokens": problem_set.max_new_tokens}
            print(log.as_json(row), flush=True)
            table.append(row)
    print_table(table, cfg.k)
    return table


def check_config(cfg: EvalConfig) -> None:
    """InputError names a flag whose value is out of range."""
    require = functools.partial(config.require, cfg)
    for name in ("k", "problems", "batch_size", "max_new_tokens"):
        value = getattr(cfg, name)
        require(name, value is None or value >= 1, "at least 1")
    require("temperature", 0 <= cfg.temperature < math.inf, "at least 0")
    require("top_k", cfg.top_k >= 0, "at least 0")
    require("top_p", 0 < cfg.top_p <= 1, "above 0 and at most 1")


def load(cfg: EvalConfig, reward):
    """(model, tokenizer, problem sets, sampling), ready to sample from."""
    if cfg.prompt is not None:
        named = {"prompt": ("prompt", [data.Problem(cfg.prompt, "", "prompt")])}
    else:
        named = {name: read_set(name, cfg, reward) for name in cfg.data}

    source = models.model_folder(cfg.model)
    if Path(source).is_dir():  # no bar for loading a folder; a download keeps its own
        logging.disable_progress_bar()
    model, tokenizer = models.load_policy(source, cfg.device, cfg.dtype)
    data.fix_date(tokenizer, checkpoint.first_date(cfg.out_dir))

    sets = []
    for name, (file, problems) in named.items():
        room = cfg.max_new_tokens or data.max_new_tokens(name)
        fitting = data.encode_prompts(
            problems, tokenizer, models.prompt_room(model, room), cfg.prompt_format, cfg.thinking,
            cfg.instruction, model,
        )  # fmt: skip
        sets.append(ProblemSet(name, file, *fitting, room))

    engine = cfg.engine
    if engine == "vllm":
        longest = max(len(ids) + each.max_new_tokens for each in sets for ids in each.prompt_ids)
        engine = vllm_engine.Engine(
            source, vocab_size=model.vocab_size, max_tokens=longest, sequences=cfg.batch_size,
            dtype=cfg.dtype, device=cfg.device, memory=cfg.vllm_memory,
        )  # fmt: skip
    sampling = models.sampling(
        model, tokenizer, max(each.max_new_tokens for each in sets), engine,
        temperature=cfg.temperature, batch_size=cfg.batch_size, top_k=cfg.top_k, top_p=cfg.top_p,
        show_progress=True,
    )  # fmt: skip
    return model, tokenizer, sets, sampling


def read_set(name: str, cfg: EvalConfig, reward) -> tuple[str, list[data.Problem]]:
    """(name of the file of completions, problems) of a set.

    A file's completions are named after the contents of all of its problems, because two files may
    have the same name.
    """
    options = {"of_training_file": cfg.held_out, "reward": reward}
    if not data.is_file(name):
        return name, data.eval_problems(name, cfg.problems, **options)
    problems = data.eval_problems(name, None, **options)
    return f"{Path(name).stem}-{data.content_hash(problems)}", problems[: cfg.problems]


# ---------------------------------------------------------------------------- sample and score


def sample_rewards(model, tokenizer, problems, prompt_ids, reward, sampling, *, k, seed, keys=None):
    """(rewards, truncated) of k completions for each of P problems, both [P, k] float64.

    A reward is NaN if the completion cannot be scored. keys: see rollout.sample.
    """
    options = {"group_size": k, "seed": seed, "keys": keys}
    rollouts = rollout.sample(model, prompt_ids, sampling, **options)
    return rewards.score(rollouts, problems, tokenizer, reward)[1], rollouts.truncated.double()


def complete(
    model, tokenizer, problem_set: ProblemSet, sampling, cfg, path=None, reward=None
) -> list[dict]:
    """Sample and score every problem of a set, batch by batch. Rows that `path` has are reused.

    A row has index, problem, answer, rewards, lengths, truncated and completions.
    """
    name, _file, problems, prompt_ids, room = problem_set
    sampling = replace(sampling, max_new_tokens=room)
    reward = reward or data.reward_function(name)
    chunk = max(1, cfg.batch_size // cfg.k)  # problems in a batch
    seed, keys = seed_for(cfg.seed, name), range(len(problems))
    if data.is_file(name):  # neither the file's path nor the order of its rows matters
        seed, keys = seed_for(cfg.seed, "file"), data.draw_keys(problems)

    rows = log.read_rows(path)[: len(problems)] if path else []
    expected = [(problem.text, problem.answer) for problem in problems[: len(rows)]]
    if [(row["problem"], row.get("answer")) for row in rows] != expected:
        raise InputError(f"{path} has other problems or answers than {name}: use another --out-dir")
    if path and len(rows) < len(problems):  # sample a batch again if some of it is missing
        rows = log.cut_rows(path, lambda row: row["index"] < len(rows) // chunk * chunk)

    starts = range(len(rows), len(problems), chunk)
    for start in tqdm(starts, desc=name, unit="batch", delay=3, leave=False):
        batch = range(len(problems))[start : start + chunk]
        ids, asked = [prompt_ids[index] for index in batch], [problems[index] for index in batch]
        options = {"seed": seed, "keys": [keys[index] for index in batch]}
        rollouts = rollout.sample(model, ids, sampling, group_size=cfg.k, **options)
        texts, scores = rewards.score(rollouts, asked, tokenizer, reward)
        new = [
            {
                "index": index,
                "problem": problem.text,
                "answer": problem.answer,
                "rewards": [None if math.isnan(score) else score for score in scores[row].tolist()],
                "lengths": rollouts.lengths[row].tolist(),
                "truncated": rollouts.truncated[row].tolist(),
                "completions": texts[row],
            }
            for row, (index, problem) in enumerate(zip(batch, asked, strict=True))
        ]
        if path:
            log.append_rows(path, new)
        rows += new
    return rows


def open_folder(folder: str, settings: dict) -> Path:
    """The folder of one model's completions; InputError if it was made with other settings."""
    path = Path(folder) / "config.json"
    if not path.exists():
        log.write_text(path, json.dumps(settings, indent=2) + "\n")
        return path.parent
    stored = log.read_json(path)
    if "config" in stored:
        raise InputError(f"--out-dir {folder} holds a run of training: use another folder")
    for name, value in settings.items():
        if stored.get(name) != value:
            has = f"--out-dir {folder} has {name} {stored.get(name)}, not {value}"
            raise InputError(f"{has}: use the same value, or another folder")
    return path.parent


# ---------------------------------------------------------------------------- figures


def avg_at_k(rewards: torch.Tensor) -> float:
    """Mean over problems of the mean over scorable completions of rewards [P, k]; NaN if none."""
    return rewards.nanmean(dim=1).nanmean().item()


def pass_at_k(rewards: torch.Tensor, k: int) -> float:
    """The probability that at least one of k completions is right (arXiv:2107.03374), for rewards
    that are 1 if a completion is right, else 0.

    With n scorable completions of a problem, c of them right, 1 - C(n - c, k) / C(n, k) is unbiased
    for k <= n. This is its mean over problems; those with fewer than k are left out.
    """
    chances = []
    for row in rewards:
        n = int((~row.isnan()).sum())
        c = int((row == 1).sum())
        if n >= k:
            chances.append(1.0 - math.comb(n - c, k) / math.comb(n, k))
    return sum(chances) / len(chances) if chances else math.nan


def wilson_interval(means: torch.Tensor, low=0.0, high=1.0) -> tuple[float, float]:
    """Wilson's 95 % score interval of the mean of problems' means [P], which lie from low to high.

    It measures the error due to the choice of these P problems. Means that are all low or high, as
    of one completion, are P draws of that kind. Others vary less, and so are worth more draws: n,
    whose standard error would be the same.
    """
    means = means[~means.isnan()]
    if len(means) == 0:
        return math.nan, math.nan
    least, most = means.aminmax()
    low, high = min(low, least.item()), max(high, most.item())
    z, mean = 1.96, means.mean().item()
    error = means.std(correction=0).item() / math.sqrt(len(means))
    n = (mean - low) * (high - mean) / error**2 if least < most else len(means)
    centre = (n * mean + z**2 * (low + high) / 2) / (n + z**2)
    half = z * math.hypot(n * error, z * (high - low) / 2) / (n + z**2)
    return max(low, centre - half), min(high, centre + half)


def stored_rewards(rows: list[dict]) -> torch.Tensor:
    """The rewards [P, k] of stored rows, float64; NaN if a completion cannot be scored."""
    scores = [[math.nan if score is None else score for score in row["rewards"]] for row in rows]
    return torch.tensor(scores, dtype=torch.float64)


def figures(rows: list[dict]) -> dict:
    """The figures of a set from its stored rows, each of k completions."""
    scores = stored_rewards(rows)
    k = scores.shape[1]
    tokens = torch.tensor([row["lengths"] for row in rows], dtype=torch.float64)
    powers = {2**i for i in range(k.bit_length())}
    right_or_wrong = ((scores == 0) | (scores == 1) | scores.isnan()).all()
    shares = {f"pass@{n}": pass_at_k(scores, n) for n in sorted(powers | {k}) if right_or_wrong}
    return {
        "problems": len(rows),
        "k": k,
        f"avg@{k}": avg_at_k(scores),
        "wilson95": list(wilson_interval(scores.nanmean(dim=1))),
        **shares,  # other rewards do not say which completions are right
        "unscorable": int(scores.isnan().sum()),
        "truncated_share": sum(sum(row["truncated"]) for row in rows) / scores.numel(),
        "mean_length": tokens.mean().item(),
    }


def print_table(table: list[dict], k: int) -> None:
    """One line per set, and the average over several."""
    print(f"{'set':18s} problems   avg@{k:<4d} (Wilson, 95 %)    pass@{k:<4d} cut off")
    for row in table:
        name, (low, high) = Path(row["data"]).stem[:18], row["wilson95"]
        print(
            f"{name:18s} {row['problems']:8d}   {row[f'avg@{k}']:.3f}    ({low:.3f} to {high:.3f})"
            f"   {row.get(f'pass@{k}', math.nan):.3f}     {row['truncated_share']:6.1%}"
        )
    if len(table) > 1:
        print(f"{'average':27s}   {sum(row[f'avg@{k}'] for row in table) / len(table):.3f}")


# ---------------------------------------------------------------------------- compare and check


def compare(first: str, second: str) -> list[dict]:
    """How much better the second folder is on each set that both hold, problem by problem."""
    table = []
    paths = [Path(folder) / "config.json" for folder in (first, second)]
    old, new = (log.read_json(path) if path.exists() else {} for path in paths)
    for name in old.keys() & new.keys() - {"model", "weights"}:
        if old[name] != new[name]:
            print(f"note: the folders differ in {name}: {old[name]}, {new[name]}")
    for path in sorted(Path(first).glob("*.jsonl")):
        old, new = (stored_means(Path(folder) / path.name) for folder in (first, second))
        pairs = [(old[key], new[key]) for key in old if key in new]
        if not pairs:
            continue
        before, after = torch.tensor(pairs, dtype=torch.float64).T
        difference = after - before
        row = {
            "set": path.stem,
            "problems": len(pairs),
            "first": round(before.mean().item(), 4),
            "second": round(after.mean().item(), 4),
            "difference": round(difference.mean().item(), 4),
            "wilson95": [round(end, 4) for end in wilson_interval(difference, low=-1.0)],
        }
        print(log.as_json(row))
        table.append(row)
    if not table:
        hint = "eval.py --out-dir makes such folders"
        raise InputError(f"--compare {first} {second}: no problem in common; {hint}")
    return table


def stored_means(path: Path) -> dict[tuple, float]:
    """{((problem, answer), which of their occurrences): the mean reward of its scorable
    completions}, without problems that have none. Where a model dropped a prompt, later rows have
    other indices."""
    seen, means = Counter(), {}
    for row in log.read_rows(path):
        asked = row["problem"], row.get("answer")
        mean = stored_rewards([row]).nanmean().item()
        if not math.isnan(mean):
            means[asked, seen[asked]] = mean
        seen[asked] += 1
    return means


def check_golds(names: tuple[str, ...]) -> list[dict]:
    """Compare every reference answer with itself."""
    verified = number = 0
    for name in names:
        embedded = name in data.EMBEDDED
        problems = data.eval_problems(name, None) if embedded else data.read_problems(name)
        for row, problem in enumerate(problems, 1):
            answer = problem.answer
            each = answer.split(OR)
            right = all(rewards.math_reward(f"\\boxed{{{one}}}", one) == 1.0 for one in each)
            if not right:
                print(f"{name}, row {row}: answer {answer[:80]!r} of {problem.text[:80]!r}")
            number, verified = number + 1, verified + right
    print(f"verified {verified} of {number}")
    return []


if __name__ == "__main__":
    console.escape()
    try:
        main(tyro.cli(EvalConfig))
    except (InputError, FloatingPointError) as problem:
        print(f"error: {problem}", file=sys.stderr)
        sys.exit(2)
