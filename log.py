"""
What a step's row in log.jsonl says, and the line on the console. train.py adds step, times, history/* (see
sampler.PromptHistory.summary), check/* and eval/*.

Names are TRL's where it has one. A figure that does not exist in a step is NaN here and null in the file.

Letters: K prompts rolled out, G completions each.
"""

import importlib
import math
import uuid
from dataclasses import asdict
from pathlib import Path

import torch

import config
import dppo
from data import InputError
from update import SUMS


def row(cfg: config.Config, update, shares: torch.Tensor, updates: list[tuple], learning_rate: float) -> dict:
    """The figures of a step from its train.Update and, for each optimizer update, (keep [K, G], weights [K, G], sums of
    accumulate_gradients, gradient norm).

    shares [K] says for how many of the Q candidates each prompt stands in means and in the un-pruned batch's tokens:
    its weight, so that pruning does not colour them; greso has none, and its means are of what it rolled out.
    """
    batch, prompt_weights = update.batch, update.prompt_weights
    rewards, lengths = batch.rewards, batch.lengths  # [K, G]

    def mean(values):  # of [K], NaN left out
        there = ~values.isnan()
        return ((values * shares)[there].sum() / shares[there].sum()).item()

    keeps, completion_weights, sums, grad_norms = zip(*updates, strict=True)
    keeps, completion_weights = torch.stack(keeps), torch.stack(completion_weights)  # [updates, K, G]
    weights = completion_weights * prompt_weights[:, None]
    contributes = dppo.contributes(update.advantages, update.scale, cfg.beta)  # [K, G]
    first, total = (dict(zip(SUMS, part.tolist(), strict=True)) for part in (sums[0], torch.stack(sums).sum(dim=0)))
    group_std = torch.where(dppo.dead_groups(rewards), 0.0, nan_std(rewards))  # [K]
    num_prompts = config.num_candidates(cfg)  # Q
    full_tokens = (shares[:, None] * update.cost).sum().item() * cfg.epochs  # expected, un-pruned
    figures = {
        "loss": total["loss"] / len(updates),
        "reward": mean(rewards.nanmean(dim=1)),
        "reward_std": mean(group_std),
        "frac_reward_zero_std": mean((group_std == 0).double()),
        "completions/mean_length": mean(lengths.mean(dim=1)),
        "completions/clipped_ratio": mean(batch.truncated.mean(dim=1)),
        "entropy": ratio(mean(batch.entropy.mean(dim=1)), mean(lengths.mean(dim=1))),
        "entropy/trained": ratio(first["entropy"], first["completion_tokens"]),
        "clip_ratio/region_mean": ratio(total["clipped"], total["completion_tokens"]),
        # of the first update: later ones have moved
        "sampling/sampling_logp_difference/mean": ratio(first["gap"], first["completion_tokens"]),
        "grad_norm": sum(grad_norms) / len(updates),
        "learning_rate": learning_rate,
        "kept/prompts": len(rewards) / num_prompts,
        "kept/completions": keeps.sum().item() / (num_prompts * cfg.group_size * cfg.epochs),
        "kept/tokens": ratio((keeps * update.cost).sum().item(), full_tokens),
        "weight/max": weights.max().item() if keeps.any() else math.nan,
        "weight/prompt_max": prompt_weights.max().item() if len(prompt_weights) else math.nan,
        "weight/ess": dppo.effective_sample_size(weights[:, contributes]) / cfg.epochs,  # of those that contribute
        "pack/density": ratio(total["tokens"], total["slots"]),
        "tokens/generated": int(lengths.sum()),
        "tokens/trained": int(total["tokens"]),
        "time/rollout": batch.seconds[0],
        "time/score": batch.seconds[1],
    }
    if cfg.importance_cap:
        tokens = first["completion_tokens"]
        figures["sampling/importance_sampling_ratio/mean"] = ratio(first["importance"], tokens)
        figures["sampling/importance_sampling_ratio/capped"] = ratio(first["capped"], tokens)
    if cfg.device == "cuda":  # since the last row
        figures["memory/peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        torch.cuda.reset_peak_memory_stats()
    if cfg.beta:
        mass = (update.scale * lengths * completion_weights.sum(dim=0)).sum().item()
        figures["kl"] = ratio(total["kl"], mass)  # nats a token, weighted as the loss weighs them
    return figures


def ratio(part: float, whole: float) -> float:
    """part / whole, NaN where there is nothing to divide by."""
    return part / whole if whole else math.nan


def nan_std(rewards: torch.Tensor) -> torch.Tensor:
    """Sample standard deviation [K] of rewards [K, G], unscorable ones left out; NaN for fewer than two."""
    centred = rewards - rewards.nanmean(dim=1, keepdim=True)
    return (centred.square().nansum(dim=1) / ((~rewards.isnan()).sum(dim=1) - 1)).sqrt()


def samples(cfg: config.Config, update, updates: list[tuple], problems: list) -> list[dict]:
    """Rows for samples.jsonl: the first completions of three prompts of this rank."""
    batch = update.batch
    return [
        {
            "prompt": problems[batch.prompts[k]].text,
            "completion": batch.texts[number][0],
            "answer": problems[batch.prompts[k]].answer,
            "reward": batch.rewards[k, 0].item(),
            "advantage": update.advantages[k, 0].item(),
            "kept": any(keep[k, 0].item() for keep, *_ in updates),
            "weight": sum(weights[k, 0].item() for _, weights, *_ in updates)
            * update.prompt_weights[k].item()
            / cfg.epochs,
        }
        for number, k in enumerate(batch.mine[:3].tolist())
    ]


def first_lines(cfg: config.Config, model, world: int, problems: int, held_out: int, step: int) -> str:
    """What the run is, and what a user may not expect of it."""
    parameters, prompts = sum(parameter.numel() for parameter in model.parameters()) / 1e6, config.num_candidates(cfg)
    return "\n".join([
        f"{cfg.model}: {parameters:.1f} M parameters on {world} x {cfg.device}, {cfg.dtype}; {cfg.data}: {problems} "
        f"problems to train on, {held_out} held out; loss {cfg.loss}, prompt rule {cfg.prompt_rule}, completion rule "
        f"{cfg.completion_rule}, {prompts} x {cfg.group_size} completions a step; steps {step} to {cfg.steps}, in "
        f"{cfg.out_dir}/",
        *(f"note: {warning}" for warning in config.warnings(cfg, steps_per_epoch=problems // prompts)),
    ])  # fmt: skip


def console_line(figures: dict, steps: int) -> str:
    """One aligned line a step."""
    width = len(str(steps))
    entropy = figures["entropy/trained"] if math.isnan(figures["entropy"]) else figures["entropy"]  # vLLM gives none
    line = (
        f"step {figures['step']:{width}d}/{steps} | reward {figures['reward']:.3f} | kept "
        f"{figures['kept/completions']:.2f} | w_max {figures['weight/max']:4.1f} | density "
        f"{figures['pack/density']:.2f} | entropy {entropy:.3f} | gnorm {figures['grad_norm']:5.2f} | "
        f"sample {figures['time/rollout']:5.2f}s | train {figures['time/train']:5.2f}s"
    )
    scores = [f" | {name} {value:.3f}" for name, value in figures.items() if name.startswith("eval/")]
    return line + "".join(scores)


def start_tracker(cfg: config.Config, out_dir: Path):
    """The module --track names, wandb or one with its init, log and finish (trackio). A resumed run is the same run
    there. log.jsonl stays the record."""
    try:
        tracker = importlib.import_module(cfg.track)
    except ImportError as error:
        raise InputError(f"--track {cfg.track}: cannot import it ({error}); pip install {cfg.track}") from None
    path = out_dir / "track-id"
    if not path.exists():
        path.write_text(f"{out_dir.name}-{uuid.uuid4().hex[:8]}")
    name = path.read_text()
    options = {"id": name} if cfg.track == "wandb" else {}  # others know a run by its name
    tracker.init(project="nanodppo", name=name, config=asdict(cfg), resume="allow", **options)
    return tracker


def track(tracker, row: dict) -> None:
    """The numbers of a step's row that exist."""
    if tracker:
        numbers = {key: value for key, value in row.items() if not isinstance(value, list) and math.isfinite(value)}
        tracker.log(numbers, step=numbers.pop("step"))
