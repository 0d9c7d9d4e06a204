"""
The measurements of `python -m bench gpu`: one function a section, which yields for each of its rows
the labels and a function that measures the rest.

A roofline is the least seconds that a GPU needs by its data sheet: operations, or bytes to read if
these take longer. A share is the roofline divided by the measured seconds.
"""

import contextlib
import functools
import gc
import importlib.metadata
import importlib.util
import itertools
import statistics
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
from bench import check, run, shapes, update
from bench import rollout as bench_rollout
from bench.masked import masked_attention
from engines import compact, vllm_engine
from models import ENGINES, checkpoint_layers
from rewards import score
from runtime.timer import clock
from train import Trainer
from update import accumulate_gradients, trainer_logprobs

GIB = 2**30
KERNELS = ("flash_attn_varlen_func", "varlen_attn")  # names in packing.py
ADAMW = 4 * (4 + 3)  # bytes a parameter: weight, gradient and two moments read; all but one written


class Bench:
    """What measurements share: their sizes (a gpu.Size), and a Trainer on random weights."""

    def __init__(self, size, folder: str):
        self.size = size
        self.folder = folder

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


def random_reward(text: str, _answer: str) -> float:
    return float(zlib.crc32(text.encode()) % 2)


def version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


# ---------------------------------------------------------------------------- correctness


def attention(bench: Bench) -> Iterator:
    for kernel, width in itertools.product(KERNELS, (32, 64, 128)):
        if getattr(packing, kernel):
            labels = {"kernel": f"{kernel}, width {width}"}
            yield labels, functools.partial(attention_errors, bench, kernel, width)


def attention_errors(bench: Bench, kernel: str, width: int) -> dict:
    """Largest errors of a kernel, and of the masked path, both in bfloat16, relative to the largest
    value of the masked path in float32 on the same inputs. 8 heads share 2 of keys and values."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, bench.size.median // 4, (12, 2), generator=generator).tolist()
    prompts = [[0] * prompt for prompt, _ in lengths]
    completions = [[0] * completion for _, completion in lengths]
    pack = packing.build_pack(prompts, completions, "cuda")
    tokens = pack.input_ids.shape[1]
    random = lambda *shape: torch.randn(shape, generator=generator).to("cuda", torch.bfloat16)
    states = [random(1, heads, tokens, width) for heads in (8, 2, 2)]
    upstream = random(1, tokens, 8, width)

    def compute(attend, dtype):
        """Values, and gradients of q, k and v."""
        inputs = [state.to(dtype, copy=True).requires_grad_() for state in states]
        out, _ = attend(None, *inputs, None, segments=pack.segments)
        out.backward(upstream.to(dtype))
        return [out.detach(), *(one.grad for one in inputs)]

    exact = compute(masked_attention, torch.float32)
    masked = compute(masked_attention, torch.bfloat16)
    real = getattr(packing, kernel)
    called = mock.create_autospec(real, side_effect=real)  # packing.py looks at the signature
    only_this = dict.fromkeys(KERNELS) | {kernel: called}
    with mock.patch.multiple(packing, **only_this):
        packed = compute(packing.packed_attention, torch.bfloat16)
    if not called.called:
        raise RuntimeError("packed_attention did not call it")

    def error(own, true):
        return ((own.float() - true).abs().max() / true.abs().max()).item()

    columns = zip(("values", "q", "k", "v"), packed, masked, exact, strict=True)
    return {name: [error(own, true), error(other, true)] for name, own, other, true in columns}


def gap(bench: Bench) -> Iterator:
    prompts = torch.arange(bench.size.gap_prompts)
    sample = functools.cache(lambda: check.roll_out(bench.trainer, prompts, 1, "gap"))
    for loss, cap in itertools.product(dppo.LOSSES, ("2", "0")):
        yield {"loss": loss, "cap": cap}, functools.partial(gap_of_loss, bench, sample, loss, cap)


def gap_of_loss(bench: Bench, sample: Callable, loss: str, cap: str) -> dict:
    """How far sampler and trainer are apart before any update, and what the clip makes of it."""
    rollouts, trainer = sample(), bench.trainer
    flags = bench.flags("--loss", loss, "--importance-cap", cap)
    cfg = config.resolve(config.parse_config(flags))
    problems = trainer.train_set[: len(rollouts.prompt_ids)]
    _, rewards = score(rollouts, problems, trainer.tokenizer, trainer.reward)  # [K, G]
    advantages = dppo.group_advantages(rewards, dppo.LOSSES[loss].scale_rewards)
    sizes = {"num_sequences": rewards.numel(), "num_tokens": rollouts.lengths.sum().item()}
    scale = dppo.loss_scale(
        rollouts.lengths, loss, max_new_tokens=cfg.max_new_tokens, **sizes
    )  # [K, G]
    keep = torch.ones_like(rollouts.truncated)
    trainer.optimizer.zero_grad()
    sums = accumulate_gradients(trainer.model, rollouts, advantages, scale, keep, cfg=cfg)
    difference = trainer_logprobs(trainer.model, rollouts, cfg) - rollouts.logprobs
    return {
        "mean gap": sums.gap / sums.completion_tokens,
        "largest gap": difference.abs().max().item(),
        "clipped": sums.clipped / sums.completion_tokens,
    }


# ---------------------------------------------------------------------------- speed and memory


def compared(seconds: float, roofline: Callable, *args) -> dict:
    """Measured seconds, the roofline's and their share; None for a GPU that is not in the table."""
    gpu = shapes.this_gpu()
    least = roofline(gpu, *args) if gpu else None
    return {"seconds": seconds, "roofline": least, "share": least and least / seconds}


def rollouts(bench: Bench) -> Iterator:
    for batch, engine in itertools.product(bench.size.batches, ("compact", "hf")):
        labels = {"engine": engine, "at once": batch}
        yield labels, functools.partial(time_rollout, bench, engine, batch)
    if importlib.util.find_spec("vllm"):  # it chooses its own batches
        labels = {"engine": "vllm", "at once": max(bench.size.batches)}
        yield labels, functools.partial(time_rollout, bench, "vllm", max(bench.size.batches))


def time_rollout(bench: Bench, engine: str, batch: int) -> dict:
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
        else:
            engine = ENGINES[engine]
        sampling = rollout.Sampling(new_tokens, [], 0, batch_size=batch, engine=engine)
        short = replace(sampling, max_new_tokens=2)
        bench_rollout.measure(*models, prompts, short, cfg, seed=0)  # warms up
        found = bench_rollout.measure(*models, prompts, sampling, cfg, seed=1)
    sizes = (trainer.model, list(map(len, prompts)), group, new_tokens, batch)
    row = {"tokens/s": found["tokens"] / found["seconds"], "largest gap": found["gap"]}
    return row | compared(found["seconds"], rollout_seconds, *sizes)


def updates(bench: Bench) -> Iterator:
    for shape in bench.size.update_shapes:
        yield {"shape": shape}, functools.partial(time_update, bench, shape)


def time_update(bench: Bench, shape: str) -> dict:
    """The second of two updates. Computed memory: 16 bytes a parameter for weights, gradients and
    AdamW's moments, layers' inputs, and 1.5 GiB for the head."""
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
    state = 16 * parameters(model) / GIB
    inputs = 4 * options.num_hidden_layers * options.hidden_size * cfg.pack_tokens / GIB
    flops = shapes.model_flops(options, lengths)
    return {
        "tokens/s": sum(map(sum, lengths)) / seconds,
        "MFU": gpu and flops / (middle - started) / gpu.flops,
        **compared(seconds, update_seconds, model, lengths),
        "state GiB": torch.cuda.memory_allocated() / GIB,
        "computed state": state,
        "peak GiB": torch.cuda.max_memory_allocated() / GIB,
        "computed peak": state + inputs + 1.5,
    }


def steps(bench: Bench) -> Iterator:
    for method, prompts in bench.size.step_prompts:
        yield {"method": method}, functools.partial(time_steps, bench, method, prompts)


def time_steps(bench: Bench, method: str, prompts: int) -> dict:
    bench.release()
    sizes = ("--prompts-per-step", str(prompts), "--steps", str(bench.size.steps))
    _, rows = run(bench.flags("--method", method, *sizes), reward=random_reward)
    rows = rows[min(2, len(rows) - 1) :]
    parts = ("step_time", "time/rollout", "time/score", "time/train")
    names = (*parts, "tokens/generated", "tokens/trained", "memory/peak_gib")
    return {name: statistics.median(row[name] for row in rows) for name in names}


# ---------------------------------------------------------------------------- rooflines


def parameters(model) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def rollout_seconds(
    gpu: shapes.GPU, model, prompts: list[int], group_size: int, new_tokens: int, at_once: int
) -> float:
    """Completions of `new_tokens` each, for prompts of these lengths, `at_once` at a time.

    Prompts are read once for all their completions: operations. Each decoded token of a batch reads
    all weights, and every sequence's keys and values, in bfloat16: bytes, or operations if those
    take longer.
    """
    options = model.config
    layers, width = options.num_hidden_layers, options.head_dim
    weights = 2 * parameters(model)  # bytes; also operations for a token
    cached = 2 * 2 * layers * options.num_key_value_heads * width  # bytes of a token's key, value
    attended = (
        4 * layers * options.num_attention_heads * width
    )  # operations for a token attended to
    step, seconds = max(1, at_once // group_size), 0.0
    for start in range(0, len(prompts), step):
        some = prompts[start : start + step]
        # The prompts' forward, a third of forward and backward, yields the first tokens.
        prefill = shapes.model_flops(options, [(length - 1, 1) for length in some]) / 3
        seconds += prefill / gpu.flops
        sequences = len(some) * group_size
        for token in range(1, new_tokens):
            context = group_size * sum(some) + sequences * token  # that all of them attend to
            read = (weights + cached * context) / gpu.bandwidth
            computed = (weights * sequences + attended * context) / gpu.flops
            seconds += max(read, computed)
    return seconds


def update_seconds(gpu: shapes.GPU, model, sequences: list[tuple[int, int]]) -> float:
    """One AdamW update on sequences of (prompt, completion) tokens, with gradient checkpointing:
    operations of two forwards and a backward, and bytes of the optimizer's state."""
    flops = 4 / 3 * shapes.model_flops(model.config, sequences)  # this counts one forward
    return flops / gpu.flops + ADAMW * parameters(model) / gpu.bandwidth


# ---------------------------------------------------------------------------- where time goes


def profile(bench: Bench) -> Iterator:
    size = bench.size

    def decode():
        prompts = bench.trainer.train_ids[: size.batches[0] // size.group]
        sampling = rollout.Sampling(16, [], 0, batch_size=size.batches[0], engine=compact)
        options = {"group_size": size.group, "seed": 0}
        rollout.sample(bench.trainer.policy, prompts, sampling, **options)

    vocabulary = shapes.SHAPES[size.shape][-1]
    sizes = (1, size.group, size.median, size.median // 4, vocabulary)
    work = functools.cache(functools.partial(update.log_normal_work, *sizes))

    def pack():
        update.packed_update(bench.trainer.model, work(), bench.trainer.cfg)

    yield {"work": "16 tokens"}, functools.partial(kernels, decode, 16)
    yield {"work": "a pack"}, functools.partial(kernels, pack, 1)


def kernels(work: Callable, parts: int) -> dict:
    """Kernels launched by work that has so many equal parts. Busy is the device's time over the
    wall's, measured without the profiler."""
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
    seconds = sum(event.self_device_time_total for event in on_device) / 1e6
    launches = sum(event.count for event in on_device)
    return {"launches each": launches / parts, "device ms": 1000 * seconds, "busy": seconds / wall}
