"""
The measurements of `python -m bench gpu`: one function a section, which yields for each of its rows
the labels and a function that measures the rest.

Shares are of the roofline: the least seconds that bench/roofline.py computes for this GPU, divided
by the measured ones.
"""

import contextlib
import functools
import gc
import importlib.metadata
import importlib.util
import itertools
import os
import platform
import re
import statistics
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from unittest import mock

import torch

import config
import dppo
import packing
import rollout
from bench import rollout as bench_rollout
from bench import roofline, run, shapes, update
from bench.masked import masked_attention
from engines import vllm_engine
from models import checkpoint_layers
from runtime.timer import clock
from sampler import Selection
from train import Trainer
from update import trainer_logprobs

ROOT = Path(__file__).resolve().parents[1]
GIB = 2**30
TEST_SECONDS = 150


class Skipped(Exception):
    """There is nothing to measure; the message says why."""


class Bench:
    """What measurements share: their sizes (a gpu.Size), and a Trainer on random weights."""

    def __init__(self, size, folder: str):
        self.size = size
        self.folder = folder
        self.options = shapes.qwen3(size.shape)

    def flags(self, *more: str) -> list[str]:
        """Flags of train.py."""
        if not Path(self.folder, "problems.jsonl").exists():
            shapes.random_policy(self.size.shape, self.folder)
        size, data = self.size, f"{self.folder}/problems.jsonl"
        own = (
            f"--model {self.folder} --data {data} --out-dir {self.folder}/out --device cuda "
            f"--method grpo --prompts-per-step 8 --group-size {size.group} --lr 1e-6 "
            f"--max-new-tokens {size.step_tokens} --gradient-checkpointing"
        )
        return [*own.split(), *more]

    @functools.cached_property
    def trainer(self) -> Trainer:
        return Trainer(config.parse_config(self.flags("--eval-every", "0")), random_reward)

    def release(self) -> None:
        """Free the trainer's memory."""
        vars(self).pop("trainer", None)
        free_memory()


def free_memory() -> None:
    gc.collect()  # tracebacks hold tensors
    with contextlib.suppress(RuntimeError):  # after some errors CUDA refuses everything
        torch.cuda.empty_cache()


def random_reward(text: str, _gold: str) -> float:
    return float(zlib.crc32(text.encode()) % 2)


def without_paths(text: str) -> str:
    """Absolute paths cut to their last part."""
    return re.sub(r"(?<![\w.])/(?:[\w.@+-]+/)+", "", text)


# ---------------------------------------------------------------------------- machine, tests


def version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def machine(bench: Bench) -> Iterator:
    yield {}, facts


def facts() -> list[dict]:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        driver = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        driver = "nvidia-smi does not answer"
    found = {"GPU": torch.cuda.get_device_name(), "driver": driver, "CUDA": torch.version.cuda}
    found |= {"GPU's memory, GiB": torch.cuda.mem_get_info()[1] / GIB, "CPU cores": os.cpu_count()}
    found["Python"] = platform.python_version()
    found |= {name: version(name) for name in ("torch", "transformers", "flash-attn", "vllm")}
    return [{"name": name, "value": value} for name, value in found.items()]


def tests(bench: Bench) -> Iterator:
    yield {"tests": "tests/gpu"}, run_tests


def run_tests() -> dict:
    if not Path(ROOT, "tests", "gpu").is_dir():
        raise Skipped("there is no tests/gpu")
    command = [sys.executable, "-m", "pytest", "-n", "0", "-q", "tests/gpu"]
    words = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "timeout": TEST_SECONDS}
    started = time.monotonic()
    try:
        text, ending = subprocess.run(command, cwd=ROOT, check=False, **words).stdout, ""
    except subprocess.TimeoutExpired as late:
        text, ending = late.stdout or b"", f"stopped after {TEST_SECONDS} s"
    lines = without_paths(text.decode(errors="replace")).strip().splitlines() or ["no output"]
    counts = {word: int(number) for number, word in re.findall(r"(\d+) (\w+)", lines[-1])}
    bad = sum(counts.get(word, 0) for word in ("failed", "error", "errors"))
    row = {"passed": counts.get("passed", 0), "failed": bad, "not run": counts.get("skipped", 0)}
    row |= {"seconds": time.monotonic() - started, "ending": ending or lines[-1]}
    return row | {"tail": lines[-40:]}


# ---------------------------------------------------------------------------- correctness


def attention(bench: Bench) -> Iterator:
    kernels = ("flash_attn_varlen_func", "varlen_attn")  # names in packing.py
    for kernel, width, shared in itertools.product(kernels, (32, 64, 128), (False, True)):
        labels = {"kernel": f"{kernel}, width {width}", "prompts": "shared" if shared else "own"}
        yield labels, functools.partial(attention_errors, bench, kernel, width, shared)


def attention_errors(bench: Bench, kernel: str, width: int, shared: bool) -> dict:
    """Largest errors of a kernel, and of the masked path, both in bfloat16, relative to the largest
    value of the masked path in float32 on the same inputs. 8 heads share 2 of keys and values."""
    real, calls = getattr(packing, kernel), []
    if real is None:
        raise Skipped("not installed")

    @functools.wraps(real)
    def counted(*args, **kwargs):
        calls.append(kernel)
        return real(*args, **kwargs)

    others = dict.fromkeys(("flash_attn_varlen_func", "varlen_attn"))
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, bench.size.median // 4, (3, 5), generator=generator).tolist()
    # each row: a prompt and its four completions
    prompts = [[number] * prompt for number, (prompt, *own) in enumerate(lengths) for _ in own]
    completions = [[0] * length for _, *own in lengths for length in own]
    pack = packing.build_pack(prompts, completions, "cuda", share_prompts=shared)
    tokens = pack.input_ids.shape[1]
    random = lambda *shape: torch.randn(shape, generator=generator).to("cuda", torch.bfloat16)
    states = [random(1, heads, tokens, width) for heads in (8, 2, 2)]
    upstream = random(1, tokens, 8, width)

    def compute(attend, dtype):  # values, and gradients of q, k and v
        inputs = [state.to(dtype, copy=True).requires_grad_() for state in states]
        out, _ = attend(None, *inputs, None, segments=pack.segments)
        out.backward(upstream.to(dtype))
        return [out.detach(), *(one.grad for one in inputs)]

    exact = compute(masked_attention, torch.float32)
    masked = compute(masked_attention, torch.bfloat16)
    with mock.patch.multiple(packing, **others | {kernel: counted}):
        packed = compute(packing.packed_attention, torch.bfloat16)
    if not calls:
        raise RuntimeError("packed_attention did not call it")
    error = lambda own, true: ((own.float() - true).abs().max() / true.abs().max()).item()
    errors = [[error(*pair) for pair in zip(own, exact, strict=True)] for own in (packed, masked)]
    return dict(zip(("values", "q", "k", "v"), map(list, zip(*errors, strict=True)), strict=True))


def gap(bench: Bench) -> Iterator:
    prompts = torch.arange(bench.size.gap_prompts)
    sample = functools.cache(lambda: bench.trainer.roll_out(prompts, 1, "gap"))
    for loss in dppo.LOSSES:
        yield {"loss": loss}, functools.partial(gap_of_loss, bench, sample, loss)


def gap_of_loss(bench: Bench, sample: Callable, loss: str) -> dict:
    """How far sampler and trainer are apart before any update, and what the clip makes of it."""
    batch, trainer = sample(), bench.trainer
    ones = torch.ones(len(batch.prompts), dtype=torch.float64)
    chosen = Selection(batch.prompts, ones, torch.arange(len(ones)))
    row, before = {}, trainer.cfg
    difference = trainer_logprobs(trainer.model, batch.rollouts, before) - batch.rollouts.logprobs
    try:
        for name, more in (("train.py's cap", ()), ("no cap", ("--importance-cap", "0"))):
            flags = bench.flags("--loss", loss, *more)
            trainer.cfg = config.resolve(config.parse_config(flags))
            full = trainer.full_batch(batch, chosen)
            keep = torch.ones_like(full.scale, dtype=torch.bool)
            sums = trainer.backward(full, keep, keep.double())
            row[f"clipped, {name}"] = sums.clipped / sums.completion_tokens
    finally:
        trainer.cfg = before
    largest = difference.abs().max().item()
    return {"mean gap": sums.gap / sums.completion_tokens, "largest gap": largest} | row


# ---------------------------------------------------------------------------- speed and memory


def compared(seconds: float, least: float | None) -> list:
    """[measured seconds, the roofline's, their share]; None for a GPU that is not in the table."""
    return [seconds, least, least and least / seconds]


def rollouts(bench: Bench) -> Iterator:
    for batch, engine in itertools.product(bench.size.batches, ("compact", "hf", "vllm")):
        if engine != "vllm" or batch == max(bench.size.batches):  # vLLM chooses its own batches
            labels = {"engine": engine, "at once": batch}
            yield labels, functools.partial(time_rollout, bench, engine, batch)


def time_rollout(bench: Bench, engine: str, batch: int) -> dict:
    if engine == "vllm" and not importlib.util.find_spec("vllm"):
        raise Skipped("not installed")
    trainer, new_tokens = bench.trainer, bench.size.new_tokens
    policy, cfg, group = trainer.policy, trainer.cfg, bench.size.group
    prompts, models = trainer.train_ids[: batch // group], (trainer.model, policy)
    with contextlib.ExitStack() as stack:
        if engine == "vllm":
            longest = max(map(len, prompts)) + new_tokens
            sizes = {"vocab_size": policy.vocab_size, "max_tokens": longest, "sequences": batch}
            options = {"dtype": cfg.dtype, "device": "cuda", "memory": cfg.vllm_memory}
            engine = vllm_engine.Engine(bench.folder, **sizes, **options)
            stack.callback(engine.close)
        sampling = rollout.Sampling(new_tokens, [], 0, batch_size=batch, engine=engine)
        short = replace(sampling, max_new_tokens=2)
        bench_rollout.measure(*models, prompts, short, cfg, seed=0)  # warms up
        found = bench_rollout.measure(*models, prompts, sampling, cfg, seed=1)
    gpu, sizes = shapes.this_gpu(), (list(map(len, prompts)), group, new_tokens, batch)
    least = gpu and roofline.rollout_seconds(bench.options, gpu, *sizes)
    row = {"tokens/s": found["tokens"] / found["seconds"], "largest gap": found["gap"]}
    return row | {"seconds, roofline, share": compared(found["seconds"], least)}


def updates(bench: Bench) -> Iterator:
    for shape in bench.size.update_shapes:
        yield {"shape": shape}, functools.partial(time_update, bench, shape)


def time_update(bench: Bench, shape: str) -> dict:
    """The second of two updates. Computed memory: docs/real-models.md's state, layers' inputs and
    1.5 GiB for the head."""
    bench.release()
    cfg = config.resolve(config.Config(device="cuda"))
    median, groups = bench.size.median, bench.size.sequences // bench.size.group
    sizes = (groups, bench.size.group, median, median // 4, shapes.SHAPES[shape][-1])
    work = update.log_normal_work(*sizes)
    lengths, gpu = list(work.sequences().values()), shapes.this_gpu()
    model = shapes.random_model(shape, "cuda")
    checkpoint_layers(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    for _ in range(2):
        optimizer.zero_grad()
        torch.cuda.reset_peak_memory_stats()
        started = clock("cuda")
        update.packed_update(model, work, cfg)
        middle = clock("cuda")
        optimizer.step()
        seconds = clock("cuda") - started
    options = model.config
    state = 16 * roofline.parameters(options) / GIB
    inputs = 4 * options.num_hidden_layers * options.hidden_size * cfg.pack_tokens / GIB
    peaks = [torch.cuda.max_memory_allocated() / GIB, state + inputs + 1.5]
    flops = shapes.model_flops(options, lengths)
    least = gpu and roofline.update_seconds(options, gpu, lengths)
    return {
        "tokens/s": sum(map(sum, lengths)) / seconds,
        "MFU": gpu and flops / (middle - started) / gpu.flops,
        "seconds, roofline, share": compared(seconds, least),
        "state GiB, computed": [torch.cuda.memory_allocated() / GIB, state],
        "peak GiB, computed": peaks,
    }


def steps(bench: Bench) -> Iterator:
    first = {}  # seconds of a step of the first method
    for method, prompts in bench.size.step_prompts:
        yield {"method": method}, functools.partial(time_steps, bench, method, prompts, first)


def time_steps(bench: Bench, method: str, prompts: int, first: dict) -> dict:
    bench.release()
    sizes = ("--prompts-per-step", str(prompts), "--steps", str(bench.size.steps))
    flags = bench.flags("--method", method, *sizes)
    trainer, rows = run(flags, update.Recorder, random_reward)
    rows = rows[min(2, len(rows) - 1) :]
    median = lambda key: statistics.median(row[key] for row in rows)
    work, gpu, least = trainer.works[-1], shapes.this_gpu(), None
    if gpu:
        lengths = list(map(len, work.rollouts.prompt_ids))
        sampled = (bench.size.group, bench.size.step_tokens, trainer.cfg.rollout_batch)
        trained = list(work.sequences().values())
        least = [
            roofline.rollout_seconds(bench.options, gpu, lengths, *sampled),
            roofline.update_seconds(bench.options, gpu, trained),
        ]
    parts = ("time/rollout", "time/score", "time/train", "step_time")
    return {
        "seconds: rollout, score, train, all": list(map(median, parts)),
        "roofline: rollout, train": least,
        "tokens generated, trained": list(map(median, ("tokens/generated", "tokens/trained"))),
        "peak GiB": max(row["memory/peak_gib"] for row in rows),
        "of grpo": median("step_time") / first.setdefault("seconds", median("step_time")),
    }


# ---------------------------------------------------------------------------- where time goes


def profile(bench: Bench) -> Iterator:
    size = bench.size

    def decode():
        prompts = bench.trainer.train_ids[: size.batches[0] // size.group]
        sampling = rollout.Sampling(16, [], 0, batch_size=size.batches[0])
        options = {"group_size": size.group, "seed": 0}
        rollout.sample(bench.trainer.policy, prompts, sampling, **options)

    sizes = (1, size.group, size.median, size.median // 4, bench.options.vocab_size)
    work = functools.cache(functools.partial(update.log_normal_work, *sizes))

    def pack():
        update.packed_update(bench.trainer.model, work(), bench.trainer.cfg)

    yield {"work": "16 tokens"}, functools.partial(kernels, decode, 16)
    yield {"work": "a pack"}, functools.partial(kernels, pack, 1)


def kernels(work: Callable, parts: int) -> list[dict]:
    """Totals, then the 15 kernels that take most of the device's time, of work that has so many
    equal parts. Busy is the device's time over the wall's, measured without the profiler."""
    work()
    started = clock("cuda")
    work()
    wall = clock("cuda") - started
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as record:
        work()
        torch.cuda.synchronize()
    on_device = [
        event
        for event in record.key_averages()
        if event.device_type.name == "CUDA" and not getattr(event, "is_user_annotation", False)
    ]
    if not on_device:
        raise RuntimeError("the profiler recorded no kernel")
    time_of = lambda event: event.self_device_time_total / 1e3
    every = sum(map(time_of, on_device))
    rows = [("all", sum(event.count for event in on_device), every)]
    top = sorted(on_device, key=time_of, reverse=True)[:15]
    rows += [(event.key[:60], event.count, time_of(event)) for event in top]
    found = [
        {"kernel": name, "launches each": n / parts, "device ms": ms, "of device time": ms / every}
        for name, n, ms in rows
    ]
    found[0]["busy"] = every / 1e3 / wall
    return found
