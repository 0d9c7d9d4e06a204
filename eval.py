"""
How good a model is: avg@k and pass@k on sets of problems, or its answer to one question.

    python eval.py --model out/checkpoint --data arithmetic --k 4
    python eval.py --model Qwen/Qwen3-4B --data math500 aime24 amc23 minerva olympiadbench \\
        gaokao2023en --k 32 --max-new-tokens 32768 --temperature 0.6 --top-p 0.95 --top-k 20 \\
        --thinking --out-dir evals/4b
    python eval.py --compare evals/4b evals/4b-trained     # paired differences by problem
    python eval.py --model out/checkpoint --prompt "7+9+5?"

avg@k averages over k completions of a problem, then over problems: a low-variance estimate of
pass@1. The table comes first, then a line of JSON for each set. With --out-dir each batch is stored
as soon as it is sampled, and repeating the command continues an interrupted evaluation. Stored
completions are not sampled again, but scored again: the reward may have been corrected meanwhile.
"""

import json
import math
import sys
from collections import Counter, namedtuple
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import flags


@dataclass
class EvalConfig(flags.SamplingFlags):
    data: tuple[str, ...] = ("arithmetic",)
    """One or more sets: names of embedded or hub sets, or files."""
    k: int = 4
    """Completions per problem."""
    problems: int | None = None
    """Use at most this many problems of each set. By default all, or 300 of an embedded set."""
    out_dir: str | None = None
    """Store every completion in this folder, and continue from those already stored there."""
    compare: tuple[str, str] | None = None
    """Instead of evaluating a model, compare two folders made with --out-dir."""
    prompt: str | None = None
    """Instead of evaluating the model, print its answer to this one question."""
    top_k: int = 0
    """Sample only from this many of the likeliest tokens. 0 means all tokens."""
    top_p: float = 1.0
    """Sample only from the likeliest tokens that together have this probability."""
    batch_size: int = 512
    """Sequences sampled at once; fewer where a GPU's free memory holds fewer."""


if __name__ == "__main__":
    flags.answer_help(EvalConfig)

import torch

import chat_format
import config
import data
import models
import rewards
import rollout
from dppo import seed_for
from runtime import InputError, checkpoint, console, log, ranks
from runtime.device import choose_device, choose_dtype

# Flags that do not change a completion. All others must be the same throughout one --out-dir.
FREE = ("data", "problems", "out_dir", "compare", "prompt", "vllm_memory", "device")
VLLM_MEMORY = 0.8  # share of a GPU's memory that vLLM has by default, beside nothing else


# A set, encoded. `file` has its completions, without .jsonl; `room` is its longest completion.
ProblemSet = namedtuple("ProblemSet", "name file problems prompt_ids room")


def main(cfg: EvalConfig, *, reward=None) -> list[dict]:
    """Evaluate and print; returns the JSON rows. `reward` replaces the default of each set."""
    ranks.check_single("eval.py")
    for name in ("k", "problems", "batch_size", "max_new_tokens"):
        value = getattr(cfg, name)
        config.require(cfg, name, value is None or value >= 1, "at least 1")
    config.require(cfg, "temperature", 0 <= cfg.temperature < math.inf, "at least 0")
    config.require(cfg, "top_k", cfg.top_k >= 0, "at least 0")
    config.require(cfg, "top_p", 0 < cfg.top_p <= 1, "above 0 and at most 1")
    if reward:
        rewards.takes_row(reward)  # raises if it cannot be called: now, not after sampling
    if cfg.compare:
        return compare(*cfg.compare)
    config.require(cfg, "model", cfg.model, "a folder such as out/checkpoint, or another model")
    device = choose_device(cfg.device)
    cfg = replace(cfg, device=device, dtype=choose_dtype(cfg.dtype, device))
    model, tokenizer, sets, sampling = load(cfg, reward)
    if cfg.prompt is not None:
        (row,) = complete(model, tokenizer, sets[0], sampling, replace(cfg, k=1))
        print(row["completions"][0])
        return [{"prompt": cfg.prompt, "completion": row["completions"][0]}]

    settings = {name: value for name, value in asdict(cfg).items() if name not in FREE}
    settings |= {"weights": model.fingerprint, "date": tokenizer.date}
    settings["reward"] = reward and getattr(reward, "__qualname__", type(reward).__name__)
    table = []
    with checkpoint.owned(cfg.out_dir):
        folder = open_folder(cfg.out_dir, settings) if cfg.out_dir else None
        for problem_set in sets:
            path = folder and folder / f"{problem_set.file}.jsonl"
            rows = complete(model, tokenizer, problem_set, sampling, cfg, path, reward)
            row = {"data": problem_set.name, **figures(rows)}
            print(as_line(row), flush=True)
            table.append(row | settings | {"max_new_tokens": problem_set.room})
    if len(table) > 1:
        mean = sum(row[f"avg@{cfg.k}"] for row in table) / len(table)
        print(f"{'average':36s} avg@{cfg.k} {mean:.3f}")
    for row in table:
        print(log.as_json(row))
    return table


@console.result()
def cli(reward=None) -> None:
    """The command line: evaluate with its flags. Bad input ends in one line and exit status 2."""
    try:
        main(flags.read(EvalConfig, sys.argv[1:]), reward=reward)
    except (InputError, FloatingPointError) as problem:
        ranks.report(problem)
        sys.exit(2)


def load(cfg: EvalConfig, reward):
    """(model, tokenizer, problem sets, sampling), ready to sample from."""
    found = {}  # name -> its problems
    for name in cfg.data if cfg.prompt is None else ():
        limit = None if data.is_file(name) else cfg.problems
        found[name] = data.eval_problems(name, limit, reward)
    if cfg.prompt is not None:
        found["prompt"] = [data.Problem(cfg.prompt, "", "prompt")]
    model, tokenizer = models.load_policy(models.model_folder(cfg.model), cfg.device, cfg.dtype)
    chat_format.fix_date(tokenizer, checkpoint.first_date(cfg.out_dir))
    sets = []
    for name, problems in found.items():
        if not problems:
            raise InputError(f"--data {name} has no problem to evaluate on")
        # Two files may have the same name, so the contents of all problems name the completions.
        file = f"{Path(name).stem}-{data.content_hash(problems)}" if data.is_file(name) else name
        room = cfg.max_new_tokens or data.max_new_tokens(name)
        how = replace(cfg, max_new_tokens=room)
        fitting = models.encode(how, model, tokenizer, problems[: cfg.problems])
        sets.append(ProblemSet(name, file, *fitting, room))

    most_tokens = max(len(ids) + each.room for each in sets for ids in each.prompt_ids)
    sampling = models.sampling(
        cfg, model, tokenizer, most_tokens, batch_size=cfg.batch_size, top_k=cfg.top_k,
        vllm_memory=cfg.vllm_memory or VLLM_MEMORY, top_p=cfg.top_p, show_progress=True,
    )  # fmt: skip
    return model, tokenizer, sets, sampling


# ---------------------------------------------------------------------------- sample and score


def complete(
    model, tokenizer, problem_set: ProblemSet, sampling, cfg, path=None, reward=None
) -> list[dict]:
    """Sample and score every problem of a set, batch by batch. What `path` has is scored again.

    A row has index, prompt (a hash of its tokens), lengths, truncated, completions, problem, answer
    and rewards. A batch is stored before it is scored, because a reward may raise.
    """
    name, _file, problems, prompt_ids, room = problem_set
    sampling = replace(sampling, max_new_tokens=room)
    reward = reward or data.reward_function(name)
    chunk = max(1, cfg.batch_size // cfg.k)  # problems in a batch
    seed, keys = seed_for(cfg.seed, name), range(len(problems))
    if data.is_file(name):  # neither the file's path nor the order of its rows matters
        seed, keys = seed_for(cfg.seed, "file"), data.draw_keys(problems)
    prompts = [data.digest(ids) for ids in prompt_ids]

    not_scored = {"rewards": [None] * cfg.k}
    # Those of earlier runs, perhaps of more --problems.
    rows = [row | not_scored for row in log.read_rows(path)] if path else []
    if any(row["prompt"] != prompt for row, prompt in zip(rows, prompts, strict=False)):
        raise InputError(
            f"{path} has completions of other prompts than {name} now gives (its problems, the "
            f"chat template or the version changed): use another --out-dir"
        )
    if path:
        log.write_rows(path, rows)
    for start in ranks.progress(range(0, len(problems), chunk), name, "batch"):
        batch = slice(start, min(start + chunk, len(problems)))
        missing = slice(len(rows), batch.stop)
        if missing.start < missing.stop:
            rollouts = rollout.sample(
                model, prompt_ids[missing], sampling, group_size=cfg.k, seed=seed,
                keys=keys[missing],
            )  # fmt: skip
            texts = rewards.seen(rollouts, tokenizer)
            lengths, truncated = rollouts.lengths.tolist(), rollouts.truncated.tolist()
            columns = (range(len(problems))[missing], prompts[missing], lengths, truncated, texts)
            names = ("index", "prompt", "lengths", "truncated", "completions")
            new = [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]
            rows += [row | not_scored for row in new]
            if path:
                log.append_rows(path, rows[missing])
        texts = [row["completions"] for row in rows[batch]]
        found = rewards.of_texts(texts, problems[batch], reward)
        for row, problem, numbers in zip(rows[batch], problems[batch], found, strict=True):
            row |= {"problem": problem.text, "answer": problem.answer}
            row["rewards"] = [None if math.isnan(number) else number for number in numbers]
    if path:
        log.write_rows(path, rows)
    return rows[: len(problems)]


def open_folder(folder: str, settings: dict) -> Path:
    """The folder of one model's completions; InputError if it was made with other settings."""
    path = Path(folder) / "config.json"
    if path.exists():
        stored = checkpoint.stored_config(path.parent, "an evaluation")
        for name, value in settings.items():
            if name != "reward" and stored.get(name) != value:
                has = f"--out-dir {folder} has {name} {stored.get(name)}, not {value}"
                raise InputError(f"{has}: use the same value, or another folder")
    log.write_text(path, json.dumps(settings, indent=2) + "\n")
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


def as_line(row: dict) -> str:
    """The figures of a set, in one line."""
    name, k, (low, high) = Path(row["data"]).stem[:18], row["k"], row["wilson95"]
    text = f"{name:18s} {row['problems']:8d} problems   avg@{k} {row[f'avg@{k}']:.3f}"
    text += f" ({low:.3f} to {high:.3f}, Wilson, 95 %)"
    text += f"   pass@{k} {row[f'pass@{k}']:.3f}" if f"pass@{k}" in row else ""
    return f"{text}   cut off {row['truncated_share']:.1%}"


# ---------------------------------------------------------------------------- compare


def compare(first: str, second: str) -> list[dict]:
    """How much better the second folder is on each set that both hold, problem by problem."""
    old, new = (checkpoint.stored_config(Path(one), "an evaluation") for one in (first, second))
    for name in old:
        if name not in ("model", "weights") and old[name] != new.get(name):
            print(f"note: the folders differ in {name}: {old[name]}, {new.get(name)}")
    table = []
    for path in sorted(Path(first).glob("*.jsonl")):
        old, new = (stored_means(Path(folder) / path.name) for folder in (first, second))
        pairs = [(old[key], new[key]) for key in old if key in new]
        if not pairs:
            continue
        before, after = torch.tensor(pairs, dtype=torch.float64).T
        difference = after - before
        low, high = wilson_interval(difference, low=-1.0)
        means = [round(mean.item(), 4) for mean in (before.mean(), after.mean())]
        mean = round(difference.mean().item(), 4)
        print(
            f"{path.stem}: {first} {means[0]:.3f}, {second} {means[1]:.3f}, difference {mean:+.3f} "
            f"({low:+.3f} to {high:+.3f}, 95 %) on {len(pairs)} problems"
        )
        row = {"set": path.stem, "problems": len(pairs), "first": first, "second": second}
        row |= {"means": means, "difference": mean, "wilson95": [round(low, 4), round(high, 4)]}
        table.append(row)
    if not table:
        raise InputError(f"--compare {first} {second}: no problem in common")
    for row in table:
        print(log.as_json(row))
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


if __name__ == "__main__":
    cli()
