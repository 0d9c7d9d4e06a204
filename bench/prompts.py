"""What the prompt level costs with a large data set: `python -m bench prompts`."""

import tempfile
import time
from pathlib import Path

import torch

import dppo
import metrics
import sampler


def main(count: int = 1_000_000, candidates: int = 512, group_size: int = 16) -> None:
    """Time a step's prompt level on `count` prompts, and weigh its history in memory and on disk.

    Args:
        count: prompts of the data, of 8 sources
        candidates: Q of a step
        group_size: G
    """
    generator, draws = torch.Generator().manual_seed(0), dppo.generator_for(0)
    lengths = torch.randint(20, 500, (count,), generator=generator)
    sources = [f"source {index % 8}" for index in range(count)]
    started = time.perf_counter()
    history = sampler.PromptHistory(lengths, sources, candidates)
    made = time.perf_counter() - started
    print(f"{count} prompts, {candidates} candidates a step; made in {made:.2f} s")
    seconds = []  # (before the rollout, after it) of each step
    for step in range(1, 103):
        started = time.perf_counter()
        window = sampler.candidates(count, candidates, 0, step)
        keep, weights = history.prune("pps", 0.3, window, draws, step)
        metrics.history(history, step, window, keep)
        before = time.perf_counter() - started
        rewards = (torch.rand(int(keep.sum()), group_size, generator=generator) < 0.5).double()
        advantages = dppo.group_advantages(rewards, "grpo")
        square = advantages.square().sum(dim=1)
        tokens = 1000.0 * torch.ones(len(rewards), dtype=torch.float64)
        started = time.perf_counter()
        history.update(step, window[keep], weights[keep], rewards, advantages, square, tokens)
        seconds.append((before, time.perf_counter() - started))
    first = 1000 * sum(seconds[0])
    later = sorted(1000 * sum(pair) for pair in seconds[2:])
    tensors = [value for value in vars(history).values() if torch.is_tensor(value)]
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    with tempfile.TemporaryDirectory() as folder:
        torch.save(vars(history), f"{folder}/history.pt")
        weight = Path(folder, "history.pt").stat().st_size
    print(
        f"a step: median {later[50]:.1f} ms, at most {later[-1]:.1f} ms; one that shuffles an "
        f"epoch: {first:.1f} ms"
    )
    print(
        f"history {size / 1e6:.1f} MB in memory, {weight / 1e6:.1f} MB in a checkpoint; order "
        f"{count * 8e-6:.1f} MB"
    )
