"""The seconds of a training step and of its parts, method by method: `python -m bench step`."""

import itertools
import statistics
import tempfile
import zlib

import torch

from bench import JsonFile, run, shapes, sized, write_json

PARTS = (
    "step_time", "time/rollout", "time/score", "time/train", "tokens/generated", "tokens/trained"
)  # fmt: skip


def main(
    rounds: int = 3,
    steps: int = 32,
    skip: int = 16,
    methods: tuple[str, ...] = ("grpo", "dppo", "pps"),
    shape: shapes.Shape = "embedded",
    new_tokens: int = 512,
    json_file: JsonFile = None,
) -> None:
    """Time train.py's steps. Methods take turns, and each round has a seed of its own.

    Args:
        rounds: runs of each method
        steps: steps of a run
        skip: first steps of a run that do not count; by default 16, an epoch of 32 prompts a step,
            in which there is no history to prune by
        methods: what to compare; ratios are to the first
        shape: embedded: base model and problems of the embedded task. Otherwise random weights of
            that size, 256 random prompts of 20 to 200 tokens, random rewards, and 8 completions of
            each of 32 prompts a step (pps: of 26 of 64)
        new_tokens: limit of a completion, unless the shape is embedded
        json_file: where to write the rows {method, round, part, median}
    """
    parts = PARTS + (("memory/peak_gib",) if torch.cuda.is_available() else ())
    rows = []
    args, reward = [], None
    with tempfile.TemporaryDirectory() as folder:
        if shape != "embedded":
            shapes.random_policy(shape, folder)
            args += ["--model", folder, "--data", f"{folder}/problems.jsonl"]
            args += ["--max-new-tokens", str(new_tokens), "--group-size", "8"]
            args += ["--gradient-checkpointing"]
            reward = lambda text, _answer: float(zlib.crc32(text.encode()) % 2)
        for number, method in itertools.product(range(rounds), methods):
            own = sized(method, f"--steps {steps} --seed {number} {' '.join(args)}")
            _, log_rows = run(own, reward=reward)
            for part in parts:
                median = statistics.median(row[part] for row in log_rows[skip:])
                rows.append({"method": method, "round": number, "part": part, "median": median})
    threads = torch.get_num_threads()
    print(f"\nmedians over {rounds} runs of steps {skip + 1} to {steps}, {threads} threads;")
    print(f"in brackets the ratio to {methods[0]} and its range over the runs")
    print(table(rows, methods, parts))
    write_json(json_file, rows)


def table(rows: list[dict], methods: tuple[str, ...], parts: tuple[str, ...]) -> str:
    """One line per part: each method's median, with the ratio to the first method's."""

    def medians(method, part):
        return [row["median"] for row in rows if (row["method"], row["part"]) == (method, part)]

    lines = [f"{'':16s}" + "".join(f"{method:>10s}{'':28s}" for method in methods)]
    for part in parts:
        line = f"{part:16s}"
        for method in methods:
            pairs = zip(medians(method, part), medians(methods[0], part), strict=True)
            ratios = sorted(own / first for own, first in pairs)
            spread = ""
            if method != methods[0]:
                middle = statistics.median(ratios)
                spread = f"({middle:.2f}, {ratios[0]:.2f} to {ratios[-1]:.2f})"
            line += f"{statistics.median(medians(method, part)):10.3f} {spread:27s}"
        lines.append(line.rstrip())
    return "\n".join(lines)
