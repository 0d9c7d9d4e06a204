"""
Measurements behind the README's figures. Rivals alternate in one run; medians and ratios are reported.

    python bench.py step --json runs/step.json      seconds of a training step and its parts, GRPO against DPPO
"""

import json
import statistics
import tempfile
from pathlib import Path
from typing import Annotated

import torch
import transformers
import tyro

import config
import train

PARTS = ("step_time", "time/rollout", "time/score", "time/train", "tokens/generated", "tokens/trained")


def step(
    rounds: int = 3,
    steps: int = 32,
    skip: int = 16,
    json_file: Annotated[Path | None, tyro.conf.arg(name="json")] = None,
) -> None:
    """Time train.py's steps from the same base model, `rounds` times GRPO then DPPO, each run with a seed of its own.

    Args:
        rounds: runs of each method
        steps: steps of a run
        skip: first steps of a run left out: the first epoch (16 steps), in which there is no history to prune by
        json_file: where to write the rows {method, round, part, median}
    """
    rows = []
    for number in range(rounds):
        for method in ("grpo", "dppo"):
            with tempfile.TemporaryDirectory() as folder:
                words = ["--method", method, "--steps", str(steps), "--seed", str(number), "--out-dir", f"{folder}/run"]
                train.main(config.parse_config([*words, "--eval-every", "0", "--save-every", "0"]))
                log = [json.loads(line) for line in Path(folder, "run", "log.jsonl").read_text().splitlines()][skip:]
            for part in PARTS:
                median = statistics.median(row[part] for row in log)
                rows.append({"method": method, "round": number, "part": part, "median": median})

    def medians(method, part):
        return [row["median"] for row in rows if (row["method"], row["part"]) == (method, part)]

    print(f"\nmedians over {rounds} alternating runs of steps {skip + 1} to {steps}, {torch.get_num_threads()} threads")
    print(f"{'':16s} {'grpo':>9s} {'dppo':>9s}  ratio, and its range over the runs")
    for part in PARTS:
        grpo, dppo = medians("grpo", part), medians("dppo", part)
        ratios = sorted(d / g for d, g in zip(dppo, grpo, strict=True))
        print(f"{part:16s} {statistics.median(grpo):9.3f} {statistics.median(dppo):9.3f}  "
              f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})")  # fmt: skip
    if json_file:
        json_file.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    transformers.utils.logging.disable_progress_bar()
    tyro.extras.subcommand_cli_from_dict({"step": step})
