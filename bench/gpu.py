"""
Decode rates and updates on a GPU: `python -m bench gpu`; runs/gpu.sh runs tests/gpu first.

Models have random weights, so nothing is downloaded. A measurement that fails, running out of
memory included, leaves its error in its row. The JSON is rewritten after every row.
"""

import functools
import gc

import torch

import config
import rollout
from bench import JsonFile, sampling_copy, shapes, update, write_json
from bench import rollout as bench_rollout
from models import ENGINES, checkpoint_layers
from runtime.timer import clock

GROUP = 8  # completions of each prompt
GIB = 2**30


def main(
    decode: shapes.Shape = "0.6b",
    updates: tuple[shapes.Shape, ...] = ("0.6b", "4b"),
    batches: tuple[int, ...] = (64, 256),
    new_tokens: int = 256,
    sequences: int = 64,
    median: int = 600,
    json_file: JsonFile = None,
) -> None:
    """Measure tokens per second of rollouts, and MFU and memory of updates.

    Args:
        decode: the model that samples
        updates: the models that are updated
        batches: sequences sampled at once
        new_tokens: of each completion; where lengths vary, on average half of them, and there are
            four times as many sequences
        sequences: of an update
        median: of their log-normal lengths
        json_file: where to write the rows
    """
    work = []
    for batch in batches:
        for engine, varied in (("compact", False), ("compact", True), ("hf", False)):
            labels = {"decode": decode, "engine": engine, "at once": batch, "lengths vary": varied}
            work.append((labels, functools.partial(time_rollout, new_tokens=new_tokens)))
    for shape in updates:
        labels = {"update": shape, "sequences": sequences, "median": median}
        work.append((labels, time_update))
    rows = []
    for labels, measure in work:
        torch.cuda.reset_peak_memory_stats()
        try:
            found = measure(*labels.values())
            found["peak GiB"] = torch.cuda.max_memory_allocated() / GIB
        except Exception as error:
            found = {"error": f"{type(error).__name__}: {error}"}
        gc.collect()  # tracebacks hold tensors
        torch.cuda.empty_cache()
        rows.append(labels | found)
        print(rows[-1], flush=True)
        write_json(json_file, rows)


def time_rollout(shape: str, engine: str, batch: int, varied: bool, new_tokens: int) -> dict:
    """Rollouts of `batch` sequences or, if lengths vary, of four times as many."""
    cfg = config.resolve(config.Config(device="cuda", group_size=GROUP))
    model = shapes.random_model(shape, "cuda")
    # The untrained model draws all tokens about equally often, so ends are geometric.
    ends = range(2 * model.vocab_size // new_tokens) if varied else []
    prompts = bench_rollout.random_prompts(batch // GROUP * (4 if varied else 1), model.vocab_size)
    sampling = functools.partial(
        rollout.Sampling, eos_ids=[*ends], pad_id=0, batch_size=batch, engine=ENGINES[engine]
    )
    both = model, sampling_copy(model, cfg)
    bench_rollout.measure(*both, prompts, sampling(2), cfg, seed=0)  # warms up
    found = bench_rollout.measure(*both, prompts, sampling(new_tokens), cfg, seed=1)
    return found | {"tokens/s": found["tokens"] / found["seconds"]}


def time_update(shape: str, sequences: int, median: int) -> dict:
    """The second of two updates, with gradient checkpointing. MFU is of forward and backward."""
    cfg = config.resolve(config.Config(device="cuda"))
    model = shapes.random_model(shape, "cuda")
    sizes = (sequences // GROUP, GROUP, median, median // 4, model.vocab_size)
    work = update.log_normal_work(*sizes)
    checkpoint_layers(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    for _ in range(2):
        optimizer.zero_grad()
        started = clock("cuda")
        tokens = update.packed_update(model, work, cfg)
        seconds = clock("cuda") - started
        optimizer.step()
    flops = shapes.model_flops(model.config, [*work.sequences().values()])
    gpu = shapes.this_gpu()
    mfu = gpu and flops / seconds / gpu.flops
    return {"MFU": mfu, "tokens/s": tokens / seconds, "seconds": seconds}
