"""
What leaving out zeros, adaptive and smaller groups would do for a training run, from its log.

    python train.py --method grpo --group-size 16 --steps 20 --out-dir out-grpo --save-every 0
    python -m bench ceiling out-grpo
    python -m bench ceiling out-trl/completions --rest 2.3    TRL's, with log_completions=True
    python -m bench ceiling rollouts --rest 2.3               verl's, of trainer.rollout_data_dir

Log a run with the largest group size that you would consider: nothing is said of larger ones.
docs/other-trainers.md says how to get --rest from TRL's and verl's timings.

Where noise limits learning, progress in a second goes as S^2 / (T V). S is the signal of a step's
gradient, T its time and V its noise (dppo.adaptive_keep_prob; docs/method.md has the derivation).
Completions of a prompt are independent samples, so a group of 16 is four groups of 4. But their
gradients correlate, because they share the prompt. No log shows by how much, so each comparison of
group sizes is a range over CORRELATIONS.

TRL and verl log neither tokens nor sizes of gradients. Only ratios count, so characters take the
place of tokens, and sizes go as |advantage| x sqrt(characters). This is for losses with one
denominator for all completions, such as their defaults, dapo and token-mean.
"""

import math
import shlex
import statistics
import textwrap
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import torch
import tyro

import config
import dppo
from bench import JsonFile, write_json
from flags import Config
from runtime import InputError, checkpoint, log, timer

WARM = 1  # the first step also loads and compiles
CORRELATIONS = (0.0, 0.05, 0.1, 0.15, 0.2)  # measured: 0.14 and 0.16; fitted: 0.05 (docs/method.md)
OFF = 1.16  # the factor by which such predictions were off in our mixed task (docs/method.md)
ENOUGH = 20  # groups with different rewards
RULES = {"zero": "leaving out zeros", "adaptive": "adaptive"}  # and their titles
SHORT = 40  # steps of a run that is proposed, and what it does not have of this one
NOT_TAKEN_OVER = (
    "prompt_rule", "completion_rule", "prompt_prune_rate", "completion_prune_rate", "rest",
    "resume", "eval_every",
)  # fmt: skip

# Step, prompt, completion, and reward: of TRL the advantage, which contains the weights of reward
# functions, and which compares the completions of a group as their reward does.
COLUMNS = {
    ".parquet": ("step", "prompt", "completion", "advantage"),  # TRL
    ".jsonl": ("step", "input", "output", "score"),  # verl
}


class Step(NamedTuple):
    """The groups of a step. Costs are tokens of prompt and completion, or characters."""

    rewards: torch.Tensor  # [K, G]; NaN: unscorable
    cost: torch.Tensor  # [K, G]
    size_of_1: torch.Tensor  # [K, G], size of a completion whose |advantage| is 1
    prompt_weights: torch.Tensor  # [K]


class Run(NamedTuple):
    """What was read from a log."""

    steps: list[Step]
    settings: dict  # of train.py; of another trainer scale_rewards and beta alone
    rest: float | None = None  # of this run
    trainer: str = "train.py"


def main(
    path: Annotated[Path, tyro.conf.Positional],
    rest: float | None = None,
    scale_rewards: Literal["none", "group"] | None = None,
    json_file: JsonFile = None,
) -> None:
    """Print what leaving out zeros, adaptive and smaller groups would do for a run.

    Args:
        path: a run's folder; or a file or a folder of completions that TRL or verl logged
        rest: the time of everything but training, over the time of training on all completions. By
            default that of a run of train.py; needed for others (docs/other-trainers.md)
        scale_rewards: what the trainer divides R - mean by. By default the run's own; group, which
            is TRL's and verl's default, for others
        json_file: where to write the figures
    """
    run = read(path)
    if scale_rewards:
        run.settings["scale_rewards"] = scale_rewards
    found = figures(run, str(path), rest)
    print(report(found, run))
    write_json(json_file, found)


# ---------------------------------------------------------------------------- logs


def read(path: Path) -> Run:
    """The run that was logged in a folder or a file. InputError if there is none."""
    if (path / "groups.jsonl").exists():
        rows = [row for row in log.read_rows(path / "log.jsonl") if row["step"] > WARM]
        groups = [row for row in log.read_rows(path / "groups.jsonl") if row["prompts"]]
        steps, settings = [*map(as_step, groups)], checkpoint.stored_config(path)
        rest = timer.measured_rest(rows) if any(row["cost/kept"] for row in rows) else None
        run = Run(steps, settings, rest)
    else:
        found = [*path.rglob("*.parquet"), *path.rglob("[0-9]*.jsonl")] if path.is_dir() else [path]
        files = [file for file in sorted(found) if file.suffix in COLUMNS and file.exists()]
        steps = as_steps([row for file in files for row in rows_of(file)])
        trainer = "TRL" if files and files[0].suffix == ".parquet" else "verl"
        run = Run(steps, {"scale_rewards": "group", "beta": 0.0}, trainer=trainer)
    if not run.steps:
        raise InputError(
            f"{path}: no step is logged here. There is neither groups.jsonl (of train.py), nor a "
            ".parquet file (TRL, log_completions=True), nor 1.jsonl and so on (verl, "
            "trainer.rollout_data_dir)"
        )
    return run


def as_step(row: dict) -> Step:
    """The tensors of a row of groups.jsonl. A reward that JSON has as null is NaN."""
    rewards = [[math.nan if reward is None else reward for reward in g] for g in row["rewards"]]
    tables = (rewards, row["tokens"], row["size_of_1"], row["prompt_weights"])
    return Step(*(torch.tensor(table, dtype=torch.float64) for table in tables))


def rows_of(file: Path) -> list[tuple]:
    """(step, prompt, completion, reward) of each row of a file of TRL or verl."""
    import pyarrow.parquet  # of datasets

    names = COLUMNS[file.suffix]
    try:
        if file.suffix == ".parquet":
            rows = pyarrow.parquet.ParquetFile(file).read(names).to_pylist()
        else:
            rows = log.read_rows(file)
        return [tuple(row[name] for name in names) for row in rows]
    except (OSError, ValueError, KeyError) as error:
        columns = ", ".join(names)
        raise InputError(f"{file} is no log with the columns {columns} ({error!r})") from None


def as_steps(rows: list[tuple]) -> list[Step]:
    """The groups of each step: the rows of a prompt, of which most have G. A prompt that was drawn
    twice is two groups; what is left of an incomplete one is left out."""
    text = lambda x: x if isinstance(x, str) else "".join(str(turn["content"]) for turn in x)
    groups = {}  # (step, prompt): [[reward, length of prompt and completion, length], ..]
    for step, prompt, completion, reward in rows:
        asked, length = text(prompt), len(text(completion))
        row = [math.nan if reward is None else reward, len(asked) + length, length]
        groups.setdefault((step, asked), []).append(row)
    G = statistics.mode(map(len, groups.values())) if groups else 0
    of_steps = {}
    for (step, _prompt), group in groups.items():
        of_steps.setdefault(step, []).extend(group[: len(group) // G * G])
    steps = []
    for step in filter(None, of_steps.values()):
        rewards, cost, length = torch.tensor(step, dtype=torch.float64).view(-1, G, 3).unbind(dim=2)
        steps.append(Step(rewards, cost, length.sqrt(), torch.ones(len(cost)).double()))
    return steps


# ---------------------------------------------------------------------------- figures


def figures(run: Run, name: str, rest: float | None = None) -> dict:
    """What the report says, as numbers. InputError if that would be little more than chance."""
    steps, rest = run.steps, run.rest if rest is None else rest
    weights = torch.cat([step.prompt_weights for step in steps])
    live = torch.cat([~dppo.dead_groups(step.rewards) for step in steps])
    if live.sum() < ENOUGH:
        raise InputError(
            f"{name}: rewards differ in {int(live.sum())} of {len(live)} groups, and {ENOUGH} are "
            "needed: log more steps, or take problems that are sometimes solved"
        )
    if not rest or rest < 0:
        raise InputError(
            f"{name}: give --rest above 0, the time of everything but training over the time of "
            "training on all completions (docs/other-trainers.md says how to get it)"
        )
    G = steps[0].rewards.shape[1]
    group_sizes = [size for size in range(2, G + 1) if G % size == 0]
    table = torch.stack([sums_of(run, size, rest) for size in group_sizes], dim=2)
    signal, time, noise, all_noise = table  # [rules, group sizes] each
    # Correlated gradients of a prompt's completions add to V (Kish 1965).
    others = torch.tensor(group_sizes)[:, None] - 1
    correlated = others * torch.tensor(CORRELATIONS) * all_noise[..., None]
    speed = (signal.square() / time)[..., None] / (noise[..., None] + correlated)
    speed = speed.nan_to_num() / speed[0, -1]  # [rules, group sizes, correlations]; no signal: 0
    sampled = sum((step.cost * step.prompt_weights[:, None]).sum().item() for step in steps)
    found = {
        "path": name,
        "steps": len(steps),
        "prompts": len(live) / len(steps),
        "group_sizes": group_sizes,
        "live_groups": (weights[live].sum() / weights.sum()).item(),
        "rest": rest,
        "seconds": (time[0] / time[0, -1]).tolist(),
        "comparable": run.settings["scale_rewards"] == "none" or has_two_rewards(steps),
    }
    for i, rule in enumerate(RULES):
        found[rule] = {
            "trained": time[i, -1].item() / sampled - rest,
            "faster": (1 + rest) * sampled / time[i, -1].item(),
            "noise": (noise[i, -1] / all_noise[i, -1]).item(),
            "speed": speed[i].tolist(),
            "fastest": fastest(group_sizes, speed[i]),
        }
    return found


def sums_of(run: Run, group_size: int, rest: float) -> torch.Tensor:
    """S, T, V, and V without pruning, of each of RULES, [4, rules]: sums over the steps, whose
    groups are cut into groups of group_size."""
    total = torch.zeros(4, len(RULES), dtype=torch.float64)
    for step in run.steps:
        size, signal = sizes(step, group_size, run.settings)
        cost = (step.cost * step.prompt_weights[:, None]).flatten()
        best = dppo.adaptive_keep_prob(size, cost, rest)
        keep_prob = torch.stack([(size > 0).double(), best])
        time, noise = time_and_noise(keep_prob, size, cost, rest)
        all_noise = size.square().sum()
        total += torch.stack(torch.broadcast_tensors(signal, time, noise, all_noise))
    return total


def sizes(step: Step, group_size: int, settings: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """(size [K * G], signal []) of a step whose groups are cut into groups of group_size.

    The signal is the sum of advantage x (R - mean). Undivided advantages have an expected gradient
    of (1 - 1/G) times that of the mean reward, and a signal of (1 - 1/G) times the variance. So
    signals compare group sizes for any rewards.

    A prompt of weight w counts as w prompts: its squared sizes and its costs times w.
    """
    K, G = step.rewards.shape
    blocks = step.rewards.reshape(-1, group_size)
    advantages = dppo.group_advantages(blocks, settings["scale_rewards"]).view(K, G)
    centred = dppo.group_advantages(blocks, "none").view(K, G)
    ones = torch.ones_like(advantages)
    size = dppo.contribution_size(advantages, step.size_of_1, ones, settings["beta"])
    weight = step.prompt_weights[:, None]
    trained = step.size_of_1 > 0  # a masked completion carries no signal
    signal = (weight * advantages * centred * trained).sum()
    return (size * weight.sqrt()).flatten(), signal


def time_and_noise(keep_prob, size, cost, rest: float) -> tuple[torch.Tensor, torch.Tensor]:
    """T and V [...] of keep probabilities [..., n], as dppo.adaptive_keep_prob explains them."""
    live = size > 0
    noise = (size[live].square() / keep_prob[..., live]).sum(dim=-1)
    return rest * cost.sum() + (keep_prob * cost).sum(dim=-1), noise


def fastest(group_sizes: list[int], speed: torch.Tensor) -> list[int]:
    """The group sizes that may be the fastest: at some correlation they are within OFF of the one
    that is. speed is [group sizes, correlations]."""
    near = (OFF * speed >= speed.amax(dim=0)).any(dim=1)
    return [size for size, is_near in zip(group_sizes, near, strict=True) if is_near]


def has_two_rewards(steps: list[Step]) -> bool:
    """Whether no group has more than two different rewards."""
    groups = [group[~group.isnan()] for step in steps for group in step.rewards]
    return all(len(group.unique()) <= 2 for group in groups)


# ---------------------------------------------------------------------------- the report


def report(found: dict, run: Run) -> str:
    """The figures in words."""
    unit = "tokens" if run.trainer == "train.py" else "characters"
    source = "measured in this run" if found["rest"] == run.rest else "--rest"
    rows = [(title, found[rule]["trained"], found[rule]["faster"]) for rule, title in RULES.items()]
    rows.append(("no training at all", 0.0, 1 + 1 / found["rest"]))
    same_batch = [
        f"  {title:20}{trained:9.2f}{faster:14.2f} times as fast" for title, trained, faster in rows
    ]
    lines = [
        f"{found['path']}: {found['steps']} steps of {found['prompts']:.0f} prompts x "
        f"{found['group_sizes'][-1]} completions of {run.trainer}. Rewards differ in "
        f"{found['live_groups']:.2f} of the groups. Everything but training takes "
        f"{found['rest']:.2f} of the time of training on all completions ({source}).",
        "All that follows is computed from this log; none of it was run.",
        "",
        f"The same batch, if the time of training goes with the {unit} that are trained on:",
        f"  {'compared with all':20}{'trains on':>9}{'a step is':>14}",
        *same_batch,
        "Zeros are completions without a gradient, so leaving them out changes nothing. Adaptive "
        "keeps the gradient on average. By estimated sizes, its variance is at most "
        f"{found['adaptive']['noise']:.2f} times as large.",
        "",
        *about_group_sizes(found, run),
    ]
    wrap = textwrap.TextWrapper(100, break_long_words=False, break_on_hyphens=False).fill
    return "\n".join(line if line.startswith("  ") else wrap(line) for line in lines)


def about_group_sizes(found: dict, run: Run) -> list[str]:
    """What the figures say about smaller groups."""
    group_sizes, zero, adaptive = found["group_sizes"], found["zero"], found["adaptive"]
    if not found["comparable"]:
        return [
            "Nothing can be said of other group sizes. Rewards have more than two values and are "
            "divided by their deviation, so each group size has an objective of its own."
        ]

    cells = {
        title: [f"{min(speeds):.2f} to {max(speeds):.2f}" for speeds in found[rule]["speed"]]
        for rule, title in RULES.items()
    }
    cells[RULES["zero"]][-1] = "1.00"  # what all are compared with
    lines = [
        "Smaller groups, with as many completions, of more prompts. Where noise limits learning, "
        f"it would be so many times as fast as with groups of {group_sizes[-1]} without zeros:",
        f"  {'groups of':20}" + "".join(f"{size:15d}" for size in group_sizes),
        *(f"  {title:20}" + "".join(f"{cell:>15}" for cell in row) for title, row in cells.items()),
        f"Ranges are for correlations of {CORRELATIONS[0]:g} to {CORRELATIONS[-1]:g} between the "
        "gradients of a prompt's completions, which no log shows. Left out: smaller groups read "
        "more prompts, so where prompts are long they gain less.",
        f"Fastest without zeros: groups of {listed(zero['fastest'])}. Fastest with adaptive: "
        f"groups of {listed(adaptive['fastest'])}.",
    ]
    if 2 in zero["fastest"] + adaptive["fastest"]:
        lines.append(
            "Beware of groups of 2: one of five of our runs never learned the mixed task with them."
        )
    if run.settings["scale_rewards"] != "none":
        lines.append(
            "Rewards are divided by their deviation: each group size has an objective of its own."
        )
    slowest = {n: min(zero["speed"][n]) for n, size in enumerate(group_sizes[:-1]) if size > 2}
    if slowest and zero["fastest"] != group_sizes[-1:]:
        lines += ["", *two_runs(found, run, max(slowest, key=slowest.get))]
    return lines


def listed(group_sizes: list[int]) -> str:
    """Those that cannot be told apart, in words."""
    *others, last = map(str, group_sizes)
    return f"{', '.join(others)} or {last}, which this log cannot tell apart" if others else last


def two_runs(found: dict, run: Run, n: int) -> list[str]:
    """The runs that would settle whether groups of the n-th size are faster."""
    size, G = found["group_sizes"][n], found["group_sizes"][-1]
    times = G // size
    prompts = round(found["prompts"]) * times
    if run.trainer == "TRL":
        change = f"num_generations={size}, and all else the same (TRL's batches count completions)"
    elif run.trainer == "verl":
        change = (
            f"actor_rollout_ref.rollout.n={size} data.train_batch_size={prompts} and {times} times "
            "its actor_rollout_ref.actor.ppo_mini_batch_size"
        )
    else:
        prompts = run.settings["prompts_per_step"]
        steps = round(SHORT / found["seconds"][n])  # in as many seconds
        return [
            "Two short runs would settle it, by their accuracy at the end. They take about as many "
            "seconds. (If another command than python train.py started this run, put that first.)",
            "  " + command(run.settings, G, prompts, SHORT),
            "  " + command(run.settings, size, prompts * times, steps),
        ]
    return [
        "Two short runs would settle it, by their held-out accuracy after as many seconds: one as "
        f"now, and one with {change}."
    ]


def command(settings: dict, group_size: int, prompts: int, steps: int) -> str:
    """The command of a run without zeros, with these settings otherwise."""
    flags = {name: value for name, value in settings.items() if name not in NOT_TAKEN_OVER}
    flags |= {"method": "nonzero", "group_size": group_size, "prompts_per_step": prompts}
    flags |= {"steps": steps, "out_dir": f"out-{prompts}x{group_size}"}
    parts = ["python train.py"]
    for field in fields(Config):
        value = flags.get(field.name, field.default)
        if value != field.default:
            parts.append(config.flag(field.name))
            parts += [] if value is True else [shlex.quote(str(value))]
    return " ".join(parts)
