"""
What pruning could gain on a model, its data and this machine, and which group size to use: from the
log of a run.

    python train.py --method grpo --group-size 16 --steps 20 --out-dir out-grpo --save-every 0
    python -m bench ceiling out-grpo

So 20 steps of GRPO say whether pruning would pay, before it is turned on. Sample with the largest
group size that you would consider: what larger groups would do cannot be read.

Where noise limits learning, progress in a second goes as S^2 / (T V). S is the mean |advantage|, T
the time of a step and V the noise of its gradient (dppo.adaptive_keep_prob; docs/method.md has the
derivation). A run says all of it for smaller groups, too: completions of a prompt are independent
samples, so a group of 16 is four groups of 4. Their gradients correlate, because they share the
prompt: --correlation adds the noise of that, and is not measured from the run. In batches above the
critical size V does not matter, and a smaller batch gains as much as any pruning.

The completions of a group share the reading of their prompt in rollouts, and on a CPU in updates,
too, which the predicted times leave out. V is that of independent keeps: the systematic draws of
pps and adaptive have less noise.

The ceilings of prompts are what dropping prompts before the rollout could gain if the pass rate of
each were known, or the result of its last group. How pass rates are distributed is estimated from
the groups of the run. A prompt contributes the expected sum of squared advantages of its group, and
costs its rollout, and training on it if it is live. Lengths are taken to be equal.
"""

import math
import statistics
from pathlib import Path
from typing import Annotated, NamedTuple

import torch
import tyro

import dppo
from bench import JsonFile, write_json
from runtime import InputError, checkpoint, log, timer

WARM = 1  # the first step also loads and compiles
# Dense near 0 and 1, where a group's chance of being live changes fastest.
PASS_RATES = torch.cat([torch.linspace(-14, 14, 281).sigmoid(), torch.tensor([0.0, 1.0])]).double()
RESAMPLES = 500  # of the steps, for the intervals


class Step(NamedTuple):
    """The groups of a step. Costs are tokens of prompt and completion."""

    rewards: torch.Tensor  # [K, G]; NaN: unscorable
    cost: torch.Tensor  # [K, G]
    size_of_1: torch.Tensor  # [K, G], size of a completion whose |advantage| is 1
    prompt_weights: torch.Tensor  # [K]


def main(
    run: Annotated[Path, tyro.conf.Positional],
    correlation: float = 0.05,
    rest: float | None = None,
    json_file: JsonFile = None,
) -> None:
    """Print what group sizes, adaptive, and dropping prompts could gain on a run.

    Args:
        run: the run's folder
        correlation: of the gradients of two completions of a prompt (docs/method.md)
        rest: the time of everything but training over training; by default the run's own
        json_file: where to write the figures
    """
    settings = checkpoint.stored_config(run)
    if not (run / "groups.jsonl").exists():
        raise InputError(f"{run}: there is no groups.jsonl")
    rows, groups = log.read_rows(run / "log.jsonl"), log.read_rows(run / "groups.jsonl")
    found = figures(rows, groups, settings, str(run), correlation, rest)
    print(report(found))
    write_json(json_file, found)


def figures(
    rows: list[dict],
    groups: list[dict],
    settings: dict,
    name: str,
    correlation: float = 0.0,
    rest: float | None = None,
) -> dict:
    """The figures of the steps in which groups of every size are live, from the rows of log.jsonl
    and groups.jsonl. settings: scale_rewards and beta of the run. InputError if there are fewer
    than 3 such steps."""
    rows = {row["step"]: row for row in rows if row["step"] > WARM}
    steps = {row["step"]: as_step(row) for row in groups if row["step"] in rows and row["prompts"]}
    if not steps:
        raise InputError(f"{name}: no step after the first one rolled out a prompt")
    G = next(iter(steps.values())).rewards.shape[1]
    group_sizes = [size for size in range(2, G + 1) if G % size == 0]
    sizes_of = {  # step: {group size: (size [K * G], signal)}
        number: {g: sizes(step, g, settings) for g in group_sizes} for number, step in steps.items()
    }
    used = [n for n in steps if all((size > 0).any() for size, _ in sizes_of[n].values())]
    if len(used) < 3:
        raise InputError(
            f"{name}: {len(used)} steps after the first one had live groups of every size; make "
            "20, with larger batches or problems that are sometimes solved"
        )
    if rest is None:
        rest = timer.measured_rest([rows[number] for number in used])

    columns = {}  # (rule, group size): signal and log(T V) of each step, [2, steps]
    for number in used:
        step = steps[number]
        cost = (step.cost * step.prompt_weights[:, None]).flatten()
        rest_tokens = rest * cost.sum().item()
        for g, (size, signal) in sizes_of[number].items():
            correlated = (g - 1) * correlation * size.square().sum().item()
            live = (size > 0).double()
            best = dppo.adaptive_keep_prob(size, cost, rest_tokens)
            for rule, keep_prob in (("zero", live), ("adaptive", best)):
                product = time_variance(keep_prob, size, cost, rest_tokens, correlated)
                columns.setdefault((rule, g), []).append((signal, math.log(product)))
    columns = {key: torch.tensor(pairs).double().T for key, pairs in columns.items()}

    known, last_group = ceilings_of_prompts(list(steps.values()), rest, settings["scale_rewards"])
    return {
        "run": name,
        "group_size": G,
        "correlation": correlation,
        "scale_rewards": settings["scale_rewards"],
        "steps": len(rows),
        "used": len(used),
        "live_groups": 1 - statistics.mean(rows[n]["frac_reward_zero_std"] for n in steps),
        "rest": rest,
        **relative_progress(columns),
        "ceiling/completions": rate(columns["adaptive", G]) / rate(columns["zero", G]),
        "ceiling/prompts": known,
        "ceiling/last_group": last_group,
    }


def as_step(row: dict) -> Step:
    """The tensors of a row of groups.jsonl. A reward that JSON has as null is NaN."""
    rewards = [[math.nan if reward is None else reward for reward in g] for g in row["rewards"]]
    tables = (rewards, row["tokens"], row["size_of_1"], row["prompt_weights"])
    return Step(*(torch.tensor(table, dtype=torch.float64) for table in tables))


def sizes(step: Step, group_size: int, settings: dict) -> tuple[torch.Tensor, float]:
    """(size [K * G], signal) of a step whose groups are cut into groups of group_size.

    A prompt of weight w counts as w prompts: its squared sizes and its costs times w. So T and V
    are estimates of those of all candidates.
    """
    K, G = step.rewards.shape
    blocks = step.rewards.reshape(-1, group_size)
    advantages = dppo.group_advantages(blocks, settings["scale_rewards"]).view(K, G)
    ones = torch.ones_like(advantages)
    size = dppo.contribution_size(advantages, step.size_of_1, ones, settings["beta"])
    weight = step.prompt_weights[:, None]
    trained = step.size_of_1 > 0  # a masked completion carries no signal
    signal = ((weight * advantages.abs() * trained).sum() / (weight.sum() * G)).item()
    return (size * weight.sqrt()).flatten(), signal


def time_variance(keep_prob, size, cost, rest_tokens: float, correlated: float = 0.0) -> float:
    """T V of keep probabilities, as dppo.adaptive_keep_prob explains it. `correlated` is the noise
    that is added because the completions of a prompt correlate."""
    live = size > 0
    time = rest_tokens + (keep_prob * cost).sum()
    variance = (size[live].square() / keep_prob[live]).sum()
    return (time * (variance + correlated)).item()


def rate(column: torch.Tensor) -> float:
    """S^2 / (T V) of signals and log(T V), [2, steps]: the mean of S, the geometric mean of T V."""
    signal, product = column.mean(dim=1)
    return (signal.square() / product.exp()).item()


def relative_progress(columns: dict) -> dict:
    """{"zero/4": [progress, half of its 95 % interval]}, relative to the best group size without
    pruning. Intervals are a bootstrap over steps (Efron 1979)."""
    best = max((key for key in columns if key[0] == "zero"), key=lambda key: rate(columns[key]))
    steps = columns[best].shape[1]
    drawn = torch.randint(steps, (RESAMPLES, steps), generator=torch.Generator().manual_seed(0))

    def rates(key):  # [RESAMPLES]
        signal, product = columns[key][:, drawn].mean(dim=-1)
        return signal.square() / product.exp()

    progress = {}
    for (rule, size), column in columns.items():
        spread = (rates((rule, size)) / rates(best)).std().item()
        progress[f"{rule}/{size}"] = [rate(column) / rate(columns[best]), 1.96 * spread]
    return progress


# ---------------------------------------------------------------------------- prompts


def ceilings_of_prompts(steps: list[Step], rest: float, scale_rewards: str) -> tuple[float, float]:
    """The ceilings of pruning prompts whose pass rates are known, or the result of whose last group
    is (none right, some, all); NaN unless rewards are 0 and 1 and some group is live."""
    G = steps[0].rewards.shape[1]
    groups = torch.zeros(G + 1, dtype=torch.float64)  # with 0, 1, .., G right; 1 / P(kept) each
    for step in steps:
        if not ((step.rewards == 0) | (step.rewards == 1)).all():
            return math.nan, math.nan
        groups.index_add_(0, step.rewards.sum(dim=1).long(), step.prompt_weights)
    if not groups[1:-1].any():
        return math.nan, math.nan

    right = torch.arange(G + 1)
    chance = torch.distributions.Binomial(G, PASS_RATES[:, None]).log_prob(right.double()).exp()
    share = shares_of_pass_rates(groups, chance)  # [pass rates]
    rewards = (torch.arange(G) < right[:, None]).double()  # [G + 1, G]
    squares = dppo.group_advantages(rewards, scale_rewards).square().sum(dim=1)
    dead = torch.stack([chance[:, 0], chance[:, -1]], dim=1)  # [pass rates, 2]
    size2 = chance @ squares  # [pass rates]
    cost = rest + 1 - dead.sum(dim=1)
    blind = (share @ cost) * (share @ size2)

    # Prompts are kept in proportion to size / sqrt(cost), of the prompt or of its class on average.
    known = blind / (share @ (size2 * cost).sqrt()).square()
    classes = torch.cat([dead, 1 - dead.sum(dim=1, keepdim=True)], dim=1)  # [pass rates, 3]
    of_class = ((share * size2) @ classes * ((share * cost) @ classes)).sqrt()  # [3]
    return known.item(), (blind / of_class.sum().square()).item()


def shares_of_pass_rates(groups: torch.Tensor, chance: torch.Tensor) -> torch.Tensor:
    """The shares of PASS_RATES of maximum likelihood (Laird 1978), from the number of groups with
    0, 1, .., G right [G + 1] and their chances [pass rates, G + 1]."""
    logits = torch.zeros_like(PASS_RATES, requires_grad=True)
    optimizer = torch.optim.LBFGS([logits], max_iter=300, line_search_fn="strong_wolfe")

    def loss():
        optimizer.zero_grad()
        mixed = (logits.softmax(dim=0) @ chance).clamp(min=1e-300)  # [G + 1]
        loss = -(groups / groups.sum() * mixed.log()).sum()
        loss.backward()
        return loss

    optimizer.step(loss)
    return logits.detach().softmax(dim=0)


# ---------------------------------------------------------------------------- the report


def report(figures: dict) -> str:
    """The figures in words."""
    G = figures["group_size"]
    group_sizes = [int(key.removeprefix("zero/")) for key in figures if key.startswith("zero/")]
    progress = lambda rule, size: figures[f"{rule}/{size}"][0]
    number = lambda value: "   -" if math.isnan(value) else f"{value:.2f}"

    def line(rule, title):
        cells = ("{:6.2f} ± {:.2f}".format(*figures[f"{rule}/{size}"]) for size in group_sizes)
        return f"  {title:20s}" + "".join(cells)

    best = max(group_sizes, key=lambda size: progress("zero", size))
    pruned = max(group_sizes, key=lambda size: progress("adaptive", size))
    lines = [
        f"{figures['run']}: {figures['steps']} steps after the first one, {figures['used']} of "
        "them used: those in which every group size has unequal rewards. Rewards differ in "
        f"{figures['live_groups']:.2f} of the groups.",
        f"Everything but training takes {figures['rest']:.2f} of the time of training on every "
        "completion (rest).",
        "",
        "How fast the model learns, where noise limits it, by group size. The best size without "
        "pruning is 1.00 (95 % over steps):",
        "  " + " " * 20 + "".join(f"{size:6d}       " for size in group_sizes),
        line("zero", "GRPO without zeros"),
        line("adaptive", "adaptive"),
        "",
        f"GRPO without zeros is predicted to learn fastest with groups of {best}.",
        f"adaptive with groups of {pruned} is predicted to be {progress('adaptive', pruned):.2f} "
        "times as fast.",
        f"With groups of {G}, as in this run, adaptive is {figures['ceiling/completions']:.2f} "
        "times as fast as GRPO without zeros.",
        "(This takes the gradients of a prompt's completions to correlate by "
        f"{figures['correlation']:g}. 0.05 was fitted to a model of 0.8 M parameters; try "
        "--correlation 0 and 0.2.)",
        "(Not counted: smaller groups read more prompts. Where most tokens are the prompt's, they "
        "are slower than this.)",
        "",
        "Dropping prompts before the rollout could be so many times as fast as dropping as many at "
        "random:",
        f"  {number(figures['ceiling/prompts'])}  if each prompt's pass rate were known",
        f"  {number(figures['ceiling/last_group'])}  if the result of its last group is known "
        "(none right, some, all)",
    ]
    if figures["scale_rewards"] != "none":
        lines.append(
            f"With --scale-rewards {figures['scale_rewards']} each group size has an objective of "
            "its own; with none all have the same."
        )
    return "\n".join(lines)
