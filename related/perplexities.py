"""
Structured pruning in figures: `python -m related.perplexities`, about 40 minutes of one core.

Every method of related/structured.py prunes the same model to three sizes, and two of them also
with both recoveries. Each pruned model is judged by its perplexity on text that is held out, by the
seconds that the choice took, and by the time of a decoded token.
"""

import itertools
import math
import statistics
import sys
import time

import tyro

import models
import rollout
from bench import JsonFile, write_json
from engines import compact
from related import pruned, stream, structured, text
from related.recovery import recover
from runtime import InputError
from runtime.device import choose_device
from runtime.timer import clock
from tasks import gguf

SPARSITIES = (0.25, 0.375, 0.5)
RECOVERED = ("2ssp", "loss")  # the methods that are also run with both recoveries
SEEDS = 3  # of random
SAMPLES, TOKENS = 8, 256  # sequences to calibrate on, and as many to judge by; tokens of each
EXPENSIVE = ("logit", "loss")  # a forward for each block, so they see half of the sequences
AT_ONCE, DECODED, ROUNDS = 16, 8, 3  # completions that are timed, tokens of each, repetitions
KEY = ("method", "sparsity", "seed", "recovery")
COLUMNS = "{:8} {:>8} {:>4} {:8} {:>10} {:>9} {:>7} {:>8}"


def main(
    model: str = "smollm2",
    data: str = "python-docs",
    methods: tuple[str, ...] = structured.METHODS,
    json_file: JsonFile = None,
) -> None:
    """Prune a model by each method to each sparsity, and measure perplexity and seconds.

    Args:
        model: smollm2, a .gguf file, a folder, or a hub id
        data: python-docs or a text file, of which a tenth is held out
        methods: of related/structured.py
        json_file: where to write the rows {method, sparsity, seed, recovery, removed, parameters,
            of_blocks, perplexity, seconds (of choosing), recovery_seconds, decode_ms, decode_ratio
            (to the whole model)}
    """
    bench = Bench(model, data)
    rows = []
    print(COLUMNS.format(*KEY, "perplexity", "choose s", "fit s", "decoding"))
    for row in itertools.chain([bench.whole_model()], bench.pruned_models(methods)):
        rows.append(row)
        write_json(json_file, rows)
        key = (row[name] for name in KEY)
        figures = (row["perplexity"], row["seconds"], row["recovery_seconds"], row["decode_ratio"])
        print(COLUMNS.format(*key, *(f"{figure:,.4g}" for figure in figures)), flush=True)


class Bench:
    """A model, its text, and what was measured of models of each shape."""

    def __init__(self, model: str, data: str):
        self.device = choose_device("auto")
        self.policy, tokenizer = models.load_policy(gguf.model_folder(model), self.device)
        self.policy.set_attn_implementation("sdpa")
        windows = text.read(data, tokenizer, SAMPLES, TOKENS).to(self.device)
        self.calibration, self.held_out = windows
        self.decoded = {}  # (milliseconds, ratio), by shape

    def clock(self) -> float:
        """Seconds; on a CPU those of this process alone, of all threads, whatever else runs."""
        return time.process_time() if self.device == "cpu" else clock(self.device)

    def whole_model(self) -> dict:
        """The row that the others are compared with."""
        chosen = {"method": "none", "sparsity": 0.0, "seed": 0, "recovery": "none", "removed": []}
        return chosen | {"seconds": 0.0, "recovery_seconds": 0.0} | self.measure(self.policy)

    def pruned_models(self, methods):
        """The rows of each method, sparsity, seed and recovery."""
        for method, sparsity in itertools.product(methods, SPARSITIES):
            for seed in range(SEEDS if method == "random" else 1):
                started = self.clock()
                seen = SAMPLES // 2 if method in EXPENSIVE else SAMPLES
                source, removed = structured.choose(
                    self.policy, self.calibration[:seen], method, sparsity, seed
                )
                chosen = {"method": method, "sparsity": sparsity, "seed": seed, "removed": removed}
                chosen["seconds"] = self.clock() - started
                for name in structured.RANKS if method in RECOVERED else ("none",):
                    smaller, seconds = self.rebuild(source, removed, structured.RANKS[name])
                    chosen |= {"recovery": name, "recovery_seconds": seconds}
                    yield chosen | self.measure(smaller)

    def rebuild(self, source, removed: list[str], rank: int | None):
        """(the smaller model, seconds that its recovery took)"""
        started = self.clock()
        tensors = {} if rank is None else recover(source, self.calibration, removed, rank)
        seconds = self.clock() - started
        smaller = pruned.rebuild(source, removed, rank, tensors).to(self.device)
        smaller.vocab_size = self.policy.vocab_size
        return smaller, seconds

    def measure(self, model) -> dict:
        """The part of a row that does not depend on how the model came about."""
        blocks = stream.size(model.base_model.layers)
        decode_ms, decode_ratio = self.decode(model)
        return {
            "parameters": stream.size(model),
            "of_blocks": blocks / stream.size(self.policy.base_model.layers),
            "perplexity": math.exp(stream.mean_loss(model, self.held_out)),
            "decode_ms": decode_ms,
            "decode_ratio": decode_ratio,
        }

    def decode(self, model) -> tuple[float, float]:
        """Milliseconds of a token of AT_ONCE completions, and their ratio to the whole model's,
        which takes turns with it. Measured once for each shape of model."""
        shape = stream.size(model), len(model.base_model.layers)
        if shape not in self.decoded:
            pairs = [(self.time_rollout(model, seed), self.time_rollout(self.policy, seed))
                     for seed in range(ROUNDS)]  # fmt: skip
            milliseconds = statistics.median(ours for ours, _ in pairs)
            ratio = statistics.median(ours / whole for ours, whole in pairs)
            self.decoded[shape] = milliseconds, ratio
        return self.decoded[shape]

    def time_rollout(self, model, seed: int) -> float:
        """Milliseconds a token."""
        # No completion ends early.
        sampling = rollout.Sampling(DECODED, eos_ids=[-1], pad_id=0, engine=compact)
        prompt = self.held_out[0, :32].tolist()
        started = self.clock()
        rollout.sample(model, [prompt], sampling, group_size=AT_ONCE, seed=seed)
        return 1000 * (self.clock() - started) / DECODED


if __name__ == "__main__":
    try:
        tyro.cli(main)
    except InputError as problem:
        print(f"error: {problem}", file=sys.stderr)
        sys.exit(2)
