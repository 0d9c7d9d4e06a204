"""What structured pruning does to a model and what it takes: `python -m bench structured`.

Methods, metrics and recoveries of related/structured.py, judged on text that is held out.
"""

import copy
import functools
import itertools
import json
import math
import statistics
import time

import models
import rollout
from bench import JsonFile, write_json
from related import pruned, recovery, stream, structured, text
from runtime.device import choose_device
from runtime.timer import clock
from tasks import gguf

EXPENSIVE = ("logit", "loss")  # a forward for each unit
KEY = ("method", "units", "sparsity", "seed", "recovery", "data", "samples", "tokens", "rank")
COLUMNS = "{:8} {:9} {:8} {:4} {:8} {:>10} {:>10} {:>9} {:>7} {:>8}"
DECODED, AT_ONCE, ROUNDS = 8, 16, 3  # tokens of each of the completions that are timed


def main(
    model: str = "smollm2",
    data: str = "python-docs",
    sparsities: tuple[float, ...] = (0.25, 0.375, 0.5),
    methods: tuple[str, ...] = structured.METHODS,
    units: tuple[str, ...] = ("blocks",),
    recovered: tuple[str, ...] = ("2ssp", "loss"),
    seeds: int = 3,
    samples: int = 8,
    tokens: int = 256,
    rank: int = 32,
    json_file: JsonFile = None,
) -> None:
    """Prune a model by each method to each sparsity, and measure perplexity and seconds.

    Rows that the file of --json already holds are not repeated.

    Args:
        model: as in train.py
        data: text to calibrate on and, another part of it, to evaluate on; see related/text.py
        sparsities: shares of the blocks' parameters to remove
        methods: of related/structured.py
        units: what depth metrics remove: blocks, attention or ffn
        recovered: methods that are also run with both recoveries
        seeds: runs of random
        samples: sequences to calibrate on, half of them for logit and loss; and to evaluate on
        tokens: of a sequence
        rank: of the low-rank recovery
        json_file: where to write the rows {method, units, sparsity, seed, recovery, removed,
            parameters, of_blocks, perplexity, seconds (of choosing), recovery_seconds, decode_ms,
            decode_ratio (to the whole model)}
    """
    rows = json.loads(json_file.read_text()) if json_file and json_file.exists() else []
    done = {tuple(row[name] for name in KEY) for row in rows}
    plan = [("none", "blocks", 0.0, 0, "none")]
    for method, sparsity in itertools.product(methods, sparsities):
        kinds = ("blocks",) if method == "2ssp" else units
        drawn = range(seeds if method == "random" else 1)
        recoveries = structured.RECOVERIES if method in recovered else ("none",)
        options = itertools.product(kinds, [sparsity], drawn, recoveries)
        plan += [(method, *option) for option in options]
    plan = [key for key in plan if (*key, data, samples, tokens, rank) not in done]
    measure = Measure(model, data, samples, tokens, rank)
    print(COLUMNS.format(*KEY[:5], "parameters", "perplexity", "choose s", "fit s", "decoding"))
    for key in plan:
        rows.append(dict(zip(KEY, (*key, data, samples, tokens, rank), strict=True)))
        rows[-1] |= measure.row(*key)
        write_json(json_file, rows)
        names = ("parameters", "perplexity", "seconds", "recovery_seconds", "decode_ratio")
        print(COLUMNS.format(*key, *(f"{rows[-1][name]:,.4g}" for name in names)), flush=True)


class Measure:
    """A model and its text. What several rows need is computed once."""

    def __init__(self, model, data, samples, tokens, rank):
        device = choose_device("auto")
        self.policy, tokenizer = models.load_policy(gguf.model_folder(model), device)
        self.policy.set_attn_implementation("sdpa")
        windows = text.read(data, tokenizer, samples, tokens).to(device)
        self.calibration, self.held_out = windows
        self.rank, self.device = rank, device
        self.scored = functools.cache(self._score)  # by all sparsities
        self.choose = functools.lru_cache(maxsize=1)(self._choose)  # by all recoveries
        self.decoded = {}  # by shape

    def clock(self) -> float:
        """Seconds; on a CPU those of this process alone, of all threads, whatever else runs."""
        return time.process_time() if self.device == "cpu" else clock(self.device)

    def row(self, method, units, sparsity, seed, kind) -> dict:
        """Prune once more, or take the whole model (none), and measure it."""
        smaller, removed, seconds, fitting = self.policy, [], 0.0, 0.0
        if method != "none":
            source, removed, seconds = self.choose(method, units, sparsity, seed)
            rank = {"none": None, "bias": 0, "lowrank": self.rank}[kind]
            started = self.clock()
            fit = lambda: recovery.recover(source, self.calibration, removed, rank)
            tensors = {} if rank is None else fit()
            fitting = self.clock() - started
            smaller = pruned.rebuild(source, removed, rank, tensors).to(self.device)
            smaller.vocab_size = self.policy.vocab_size
        decode_ms, decode_ratio = self.decode(smaller)
        return {
            "removed": removed,
            "parameters": stream.size(smaller),
            "of_blocks": stream.size(smaller.base_model.layers)
            / stream.size(self.policy.base_model.layers),
            "perplexity": math.exp(stream.mean_loss(smaller, self.held_out)),
            "seconds": seconds,
            "recovery_seconds": fitting,
            "decode_ms": decode_ms,
            "decode_ratio": decode_ratio,
        }

    def _score(self, method, units, seed):
        candidates = structured.units_of(self.policy, units)
        half = len(self.calibration) // 2
        part = self.calibration[:half] if method in EXPENSIVE else self.calibration
        started = self.clock()
        scores = structured.importance(self.policy, part, candidates, method, seed)
        return candidates, scores, self.clock() - started

    def _choose(self, method, units, sparsity, seed):
        """(the model to take sub-layers from, their names, seconds)"""
        if method == "2ssp":
            started, narrow = self.clock(), copy.deepcopy(self.policy)
            removed = structured.two_stage(narrow, self.calibration, sparsity)
            return narrow, removed, self.clock() - started
        candidates, scores, seconds = self.scored(method, units, seed)
        removed = structured.least_important(self.policy, candidates, scores, sparsity)
        return self.policy, removed, seconds

    def decode(self, model) -> tuple[float, float]:
        """Milliseconds of a token of AT_ONCE completions, and their ratio to the whole model's,
        which takes turns with it. Measured once for each shape of model."""
        shape = stream.size(model), len(model.base_model.layers)
        if shape not in self.decoded:
            sampling = rollout.Sampling(DECODED, eos_ids=[-1], pad_id=0)  # none of them ends
            prompt, times = [self.held_out[0, :32].tolist()], {model: [], self.policy: []}
            for number, one in itertools.product(range(ROUNDS), times):
                started = self.clock()
                rollout.sample(one, prompt, sampling, group_size=AT_ONCE, seed=number)
                times[one].append(1000 * (self.clock() - started) / DECODED)
            pairs = zip(times[model], times[self.policy], strict=True)
            ratio = statistics.median(ours / whole for ours, whole in pairs)
            self.decoded[shape] = statistics.median(times[model]), ratio
        return self.decoded[shape]
