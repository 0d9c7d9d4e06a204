"""What leaving out zeros, adaptive and smaller groups would do for a training run, from its log.

    python -m bench ceiling out-grpo             a run of train.py --method grpo
    dppo-ceiling out-trl/completions             TRL's, with log_completions=True, logging_steps=1
    dppo-ceiling rollouts --rest console.log     verl's, of trainer.rollout_data_dir

pip installs it as dppo_ceiling.py: it imports dppo.py and torch, and pyarrow for TRL's files. Log
the largest groups that you would consider: nothing is said of larger ones.

Where noise limits learning, progress in a second goes as S^2 / (T V). S is the signal of a step's
gradient, T its time and V its noise (dppo.adaptive_keep_prob; docs/method.md has the derivation).
Completions of a prompt are independent samples, so a group of 16 is four groups of 4. But their
gradients correlate, because they share the prompt. No log shows by how much, so each comparison of
group sizes is a range over CORRELATIONS.

Of TRL and verl, characters take the place of tokens, because only ratios count, and sizes go as
|advantage| x sqrt(characters). This is for losses with one denominator for all completions, such as
their defaults, dapo and token-mean.
"""

import argparse
import collections
import json
import math
import re
import statistics
import sys
import textwrap
from pathlib import Path
from typing import Literal, NamedTuple

import torch

import dppo

RESTS = (0.1, 0.3, 1.0, 3.0)  # if the run's own is not known
CORRELATIONS = (0.0, 0.05, 0.1, 0.15, 0.2)  # measured: 0.14 and 0.16; fitted: 0.05 (docs/method.md)
ENOUGH = 20  # groups with different rewards
RULES = ("leaving out zeros", "adaptive")
PRUNED = "dppo-pruned"  # a file beside the logs of TRL and verl, if prompts were dropped

# Step, prompt, completion, and reward: of TRL the advantage, which contains the weights of reward
# functions, and which compares the completions of a group as their reward does.
COLUMNS = {
    "TRL": ("step", "prompt", "completion", "advantage"),
    "verl": ("step", "input", "output", "score"),
}
TRAINED = [f"timing_s/{part}" for part in ("old_log_prob", "ref", "update_actor")]  # verl's
WHERE_REST_IS = {
    "TRL": 'DPPOTrainer with completion_rule="none" trains as GRPOTrainer, and logs dppo/rest.',
    "verl": f"Of verl it is timing_s/step / ({' + '.join(TRAINED)}) - 1; --rest takes its log.",
}
ADAPTIVE = {
    "train.py": "leave out --method.",
    "TRL": 'take DPPOTrainer, DPPOConfig(completion_rule="adaptive"), and smaller micro-batches.',
    "verl": "add trainer.v1.trainer_mode=nanodppo.",
}


class LogError(ValueError):
    """A log cannot be read, or says too little. The message names it and the way out."""


class Step(NamedTuple):
    """The groups of a step. Costs are tokens of prompt and completion, or characters."""

    rewards: torch.Tensor  # [K, G]; NaN: unscorable
    cost: torch.Tensor  # [K, G]
    size_of_1: torch.Tensor  # [K, G], size of a completion whose |advantage| is 1
    prompt_weights: torch.Tensor  # [K]


class Run(NamedTuple):
    steps: list[Step]
    settings: dict  # of train.py; of another trainer scale_rewards and beta alone
    rest: float | None = None  # of this run, if it is known
    trainer: str = "train.py"
    note: str = ""  # on files that were left out


def main(
    path: Path, /, rest: str | None = None, scale_rewards: Literal[dppo.SCALES] | None = None
) -> None:
    """Print what leaving out zeros, adaptive and smaller groups would do for a run.

    Args:
        path: a run's folder; or a file or a folder of completions that TRL or verl logged
        rest: a number, or a file that shows it: a console log, or a tracker's row as JSON
        scale_rewards: what the trainer divides R - mean by, if that is not its default
    """
    run = read(path)
    if rest is not None:
        run = run._replace(rest=rest_of(rest))
    if scale_rewards:
        run.settings["scale_rewards"] = scale_rewards
    print(report(figures(run, str(path)), run, str(path)))


def command() -> None:
    """dppo-ceiling, for those who have no clone."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("path", type=Path)
    parser.add_argument("--rest")
    parser.add_argument("--scale-rewards", choices=dppo.SCALES)
    options = parser.parse_args()
    try:
        main(options.path, options.rest, options.scale_rewards)
    except LogError as problem:
        print(f"error: {problem}", file=sys.stderr)
        sys.exit(2)


# ---------------------------------------------------------------------------- logs


def read(path: Path) -> Run:
    """The run that was logged in a folder or a file. LogError if there is none, or several."""
    if (path / "groups.jsonl").exists():
        from runtime import timer  # of the clone that made it

        steps = [as_step(row) for row in rows_of(path / "groups.jsonl") if row["prompts"]]
        settings = json.loads((path / "config.json").read_text())["config"]
        return Run(steps, settings, timer.measured_rest(rows_of(path / "log.jsonl")))
    files, tables, note = files_of(path), [], ""
    trainer = "TRL" if files[0].suffix == ".parquet" else "verl"
    for file in files:
        try:
            rows = [*enumerate(rows_of(file), 1)]
        except (OSError, ValueError) as error:
            if file == files[0] or file != files[-1]:
                raise LogError(f"{file} cannot be read: {' '.join(str(error).split())}") from None
            note = f"Left out: {file.name}, which is not whole. "
        else:
            tables.append([values_of(row, COLUMNS[trainer], f"{file}, row {i}") for i, row in rows])
    sampled = sampled_once(tables)
    if repeated := len(tables) - len(sampled):
        note += (
            f"Left out: {repeated} files that repeat completions, or prompts, as evaluations do."
        )
    return Run(as_steps(sampled), {"scale_rewards": "group", "beta": 0.0}, None, trainer, note)


def as_step(row: dict) -> Step:
    """A row of groups.jsonl. A reward that JSON has as null is NaN."""
    rewards = [[math.nan if reward is None else reward for reward in g] for g in row["rewards"]]
    tables = (rewards, row["tokens"], row["size_of_1"], row["prompt_weights"])
    return Step(*(torch.tensor(table, dtype=torch.float64) for table in tables))


def files_of(path: Path) -> list[Path]:
    """The files of one run in order: `path`, those in this folder, or those in one below it."""
    is_log = lambda file: file.suffix == ".parquet" or re.fullmatch(r"\d+\.jsonl", file.name)
    files = [path] if path.is_file() else [*filter(is_log, path.rglob("*"))]
    files = [file for file in files if file.parent == path] or files
    runs = sorted({f"{file.parent}/*{file.suffix}" for file in files})
    if not files:
        raise LogError(
            f"{path}: no step is logged here: neither groups.jsonl (train.py), nor a .parquet file "
            "(TRL, log_completions=True), nor 1.jsonl and so on (verl, trainer.rollout_data_dir)"
        )
    if len(runs) > 1:
        raise LogError(f"{path} has logs of {len(runs)} runs: give one of {', '.join(runs[:5])}")
    if (files[0].parent / PRUNED).exists():
        raise LogError(f"{path}: this run dropped prompts; log one with prompt_rule none")
    return sorted(files, key=lambda file: [*map(int, re.findall(r"\d+", file.name))])


def rows_of(file: Path) -> list[dict]:
    """The rows of a file, but for a last line that is being written."""
    if file.suffix == ".parquet":
        import pyarrow.parquet  # of datasets

        return pyarrow.parquet.ParquetFile(file).read().to_pylist()
    return [*map(json.loads, file.read_text(encoding="utf-8-sig").split("\n")[:-1])]


def values_of(row: dict, names: tuple, where: str) -> tuple:
    """(step, group, characters of the prompt, of the completion, reward) of a row."""
    if not row.keys() >= {*names}:
        raise LogError(f"{where} is not of a log with the columns {', '.join(names)}")
    step, prompt, completion, reward = (row[name] for name in names)
    if reward is None or repr(reward) == "nan":
        reward = math.nan  # always the same object, so that equal rows are equal
    is_reward = isinstance(reward, int | float) and not math.isinf(reward)
    texts = [isinstance(text, str | list) for text in (prompt, completion)]
    for name, is_good in zip(names, (step is not None, *texts, is_reward), strict=True):
        if not is_good:
            raise LogError(f"{where}: {name} is {row[name]!r:.60}, which cannot be read")
    group = re.sub(r"_\d+_\d+$", "", str(row.get("uid") or prompt))  # uid_session_output of verl
    return step, group, characters(prompt), characters(completion), reward


def characters(content) -> int:
    """Of a text; of a chat's turns, and of their parts. Calls of tools and images have none."""
    if isinstance(content, str):
        return len(content)
    if isinstance(content, dict):
        return characters(content.get("content") or content.get("text") or "")
    return sum(map(characters, content))


def sampled_once(tables: list[list[tuple]]) -> list[list[tuple]]:
    """The files of training's own completions, each once. TRL logs its last batch each time, also
    one that it uses again. An evaluation replaces a file, and always has the same prompts."""
    fresh = {tuple(row[1:] for row in table): table for table in reversed(tables)}
    prompts = {rows: tuple(group for group, *_ in rows) for rows in fresh}
    times = collections.Counter(prompts.values())
    trained = [table for rows, table in fresh.items() if times[prompts[rows]] == 1]
    return trained[::-1] or [*fresh.values()][::-1]  # all data may be one batch


def as_steps(tables: list[list[tuple]]) -> list[Step]:
    """The groups of each step, none of them from two files. Most groups have G rows. One that was
    drawn twice is two groups; what is left of an incomplete one is left out."""
    groups = {}  # (file, step, group): [[reward, length of prompt and completion, length], ..]
    for number, table in enumerate(tables):
        for step, group, asked, length, reward in table:
            groups.setdefault((number, step, group), []).append([reward, asked + length, length])
    G = statistics.mode(map(len, groups.values())) if groups else 0
    of_steps = {}
    for (number, step, _group), rows in groups.items():
        of_steps.setdefault((number, step), []).extend(rows[: len(rows) // G * G])
    steps = []
    for step in filter(None, of_steps.values()):
        rewards, cost, length = torch.tensor(step, dtype=torch.float64).view(-1, G, 3).unbind(dim=2)
        steps.append(Step(rewards, cost, length.sqrt(), torch.ones(len(cost)).double()))
    return steps


def rest_of(given: str) -> float:
    """The rest that --rest gives: a number, or the median of the steps in a file but the first,
    which warms up. verl's console log has a step a line; JSON may have a pair a line."""
    text = f"dppo/rest: {given}"
    rests = []
    if Path(given).is_file():
        text = re.sub(r",\s*\n", ", ", Path(given).read_text(errors="replace"))
    pair = re.compile(r"((?:dppo|timing_s)/\w+)[\"']?\s*[:=]\s*[\"']?(?:np\.float64\()?([\d.e+-]+)")
    for line in text.splitlines():
        row = {name: float(value) for name, value in pair.findall(line)}
        if "dppo/kept_tokens" in row:
            raise LogError(f"--rest {given}: this run pruned; give the log of one that did not")
        trained = sum(row.get(name, 0.0) for name in TRAINED)
        if trained and "timing_s/step" in row:
            row["dppo/rest"] = row["timing_s/step"] / trained - 1
        rests += [row["dppo/rest"]] if "dppo/rest" in row else []
    rest = statistics.median(rests[1:] or rests or [0.0])
    if not 0 < rest < math.inf:
        raise LogError(f"--rest {given}: no number above 0. {' '.join(WHERE_REST_IS.values())}")
    return rest


# ---------------------------------------------------------------------------- figures


def figures(run: Run, name: str) -> dict:
    """What the report says, as numbers. LogError if that would be little more than chance."""
    steps = run.steps
    rests = [run.rest] if run.rest else RESTS
    weights = torch.cat([step.prompt_weights for step in steps])
    live = torch.cat([~dppo.dead_groups(step.rewards) for step in steps])
    if live.sum() < ENOUGH:
        raise LogError(
            f"{name}: rewards differ in {int(live.sum())} of {len(live)} groups, and {ENOUGH} are "
            "needed: log more steps, or take problems that are sometimes solved"
        )
    G = steps[0].rewards.shape[1]
    group_sizes = [size for size in range(2, G + 1) if G % size == 0]
    sums = [sums_of(run, size) for size in group_sizes]
    signal, trained, noise, all_noise = torch.stack(sums, dim=2)  # [rules, group sizes] each
    sampled = sum((step.cost * step.prompt_weights[:, None]).sum().item() for step in steps)
    time = sampled * torch.tensor(rests)[:, None, None] + trained  # [rests, rules, group sizes]
    # Correlated gradients of a prompt's completions add to V (Kish 1965).
    others = torch.tensor(group_sizes)[:, None] - 1
    correlated = others * torch.tensor(CORRELATIONS) * all_noise[..., None]
    speed = (signal.square() / time)[..., None] / (noise[..., None] + correlated)
    speed = speed.nan_to_num() / speed[:, :1, -1:]  # [rests, rules, group sizes, correlations]
    everything = sampled * torch.tensor(rests)[:, None] + sampled  # [rests, 1]
    return {
        "steps": len(steps),
        "prompts": len(live) / len(steps),
        "group_sizes": group_sizes,
        "live_groups": (weights[live].sum() / weights.sum()).item(),
        "rests": rests,
        "trained": (trained[:, -1] / sampled).tolist(),  # of RULES
        "noise": (noise[:, -1] / all_noise[:, -1]).tolist(),
        "faster": (everything / time[..., -1]).T.tolist(),  # of RULES, at each rest
        "speed": speed.transpose(0, 1).tolist(),  # likewise, of group sizes, at CORRELATIONS
    }


def sums_of(run: Run, group_size: int) -> torch.Tensor:
    """S, tokens trained on, V, and V without pruning, of each of RULES, [4, rules]: sums over the
    steps, whose groups are cut into groups of group_size."""
    total = torch.zeros(4, len(RULES), dtype=torch.float64)
    for step in run.steps:
        size, signal = sizes(step, group_size, run.settings)
        cost = (step.cost * step.prompt_weights[:, None]).flatten()
        adaptive = dppo.adaptive_keep_prob(size, cost, dppo.REST)
        keep_prob = torch.stack([(size > 0).double(), adaptive])
        trained, live = (keep_prob * cost).sum(dim=1), size > 0
        noise = (size[live].square() / keep_prob[:, live]).sum(dim=1)
        all_noise = size.square().sum()
        total += torch.stack(torch.broadcast_tensors(signal, trained, noise, all_noise))
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
    advantages[advantages.abs() < 1e-5] = 0.0  # an exact 0 that TRL has logged in float32
    centred = dppo.group_advantages(blocks, "none").view(K, G)
    ones = torch.ones_like(advantages)
    size = dppo.contribution_size(advantages, step.size_of_1, ones, settings["beta"])
    weight = step.prompt_weights[:, None]
    trained = step.size_of_1 > 0  # a masked completion carries no signal
    signal = (weight * advantages * centred * trained).sum()
    return (size * weight.sqrt()).flatten(), signal


# ---------------------------------------------------------------------------- the report


def report(found: dict, run: Run, name: str) -> str:
    rests = found["rests"]
    unit = "tokens" if run.trainer == "train.py" else "characters"
    rows = [*zip(RULES, found["trained"], found["faster"], strict=True)]
    rows.append(("no training at all", 0.0, [1 + 1 / rest for rest in rests]))
    cells = lambda values: "".join(f"{value:>14}" for value in values)
    lines = [
        f"{name}: {found['steps']} steps of {found['prompts']:.0f} prompts x "
        f"{found['group_sizes'][-1]} completions of {run.trainer}. Rewards differ in "
        f"{found['live_groups']:.2f} of the groups. All that follows is computed from this log; "
        f"none of it was run. {run.note}",
        "",
        "Rest is the time of everything but training, over that of training on all completions. "
        + (WHERE_REST_IS[run.trainer] if len(rests) > 1 else ""),
        "",
        f"The same batch, if the time of training goes with the {unit} that are trained on:",
        f"  {'compared with all':20}{'trains on':>9}" + cells(f"rest {rest:.2g}" for rest in rests),
        *(
            f"  {title:20}{trained:9.2f}{cells(f'{x:.2f}' for x in faster)} times as fast"
            for title, trained, faster in rows
        ),
        "Zeros are completions without a gradient, so leaving them out changes nothing. Adaptive "
        f"keeps the gradient on average, with about {found['noise'][1]:.2f} times the variance: by "
        "estimated sizes, for independent draws; the draw that trains adds less. A log of early "
        "steps understates, because more groups die as the model learns.",
        "",
        *about_group_sizes(found, run, cells),
        "",
        f"To train with adaptive, {ADAPTIVE[run.trainer]}",
    ]
    wrap = textwrap.TextWrapper(100, break_long_words=False, break_on_hyphens=False).fill
    return "\n".join(line if line.startswith("  ") else wrap(line) for line in lines)


def about_group_sizes(found: dict, run: Run, cells) -> list[str]:
    is_divided = run.settings["scale_rewards"] != "none"
    groups = [group[~group.isnan()] for step in run.steps for group in step.rewards]
    if is_divided and any(len(group.unique()) > 2 for group in groups):
        return [
            "Nothing can be said of other group sizes. Rewards have more than two values and are "
            "divided by their deviation, so each group size has an objective of its own."
        ]
    rows = []
    for n, rest in enumerate(found["rests"]):
        for title, speeds in zip(RULES, found["speed"], strict=True):
            ranges = [f"{min(x):.2f} to {max(x):.2f}" for x in speeds[n]]
            rows.append(f"  {f'{title}, rest {rest:.2g}':28}{cells(ranges)}")
    return [
        "Smaller groups, with as many completions, of more prompts. Where noise limits learning, "
        f"it would be so many times as fast as with groups of {found['group_sizes'][-1]} without "
        "zeros:",
        f"{'  groups of':30}{cells(found['group_sizes'])}",
        *rows,
        f"Ranges are for correlations of {CORRELATIONS[0]:g} to {CORRELATIONS[-1]:g} between the "
        "gradients of a prompt's completions, which no log shows. Left out: smaller groups read "
        "more prompts, so where prompts are long they gain less."
        + is_divided
        * " Rewards are divided by their deviation: each size has its own objective.",
    ]
