"""The seconds of a training step and of its parts, method by method: `python -m bench step`."""

import statistics
import tempfile
import zlib

import torch

from bench import JsonFile, run, shapes, sized, write_json

PARTS = (
    "step_time", "time/rollout", "time/score", "time/train", "tokens/generated", "tokens/trained"
)  # fmt: skip


def main(
    shape: shapes.Shape,
    steps: int = 10,
    skip: int = 2,
    methods: tuple[str, ...] = ("grpo", "pps"),
    new_tokens: int = 512,
    json_file: JsonFile = None,
) -> None:
    """Time train.py's steps: 8 completions of each of 32 prompts a step (pps: of 26 of 64).

    Args:
        shape: size of the model. Its weights are random, and so are the rewards and the 256 prompts
            of 20 to 200 tokens
        steps: steps of a run
        skip: first steps of a run that do not count
        methods: what to time
        new_tokens: limit of a completion
        json_file: where to write the rows {method, part, median}
    """
    parts = PARTS + (("memory/peak_gib",) if torch.cuda.is_available() else ())
    reward = lambda text, _answer: float(zlib.crc32(text.encode()) % 2)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        shapes.random_policy(shape, folder)
        args = f"--model {folder} --data {folder}/problems.jsonl --steps {steps} --lr 1e-6"
        args += f" --max-new-tokens {new_tokens} --group-size 8 --gradient-checkpointing"
        for method in methods:
            _, log_rows = run([*sized(method), *args.split()], reward=reward)
            for part in parts:
                median = statistics.median(row[part] for row in log_rows[skip:])
                rows.append({"method": method, "part": part, "median": median})
    print(f"\nmedians of steps {skip + 1} to {steps}, {torch.get_num_threads()} threads")
    for row in rows:
        print(f"{row['method']:10s} {row['part']:18s} {row['median']:12.3f}")
    write_json(json_file, rows)
