"""
What pruning saves at equal steps: every method has the same candidates, steps, learning rate and
objective.

    python -m bench savings --settings arithmetic --candidates 32 --seeds 1     in five minutes
    bash runs/results.sh savings                          all rows of docs/results.md, hours

This is the question of a user who has a run of GRPO and leaves all of its settings alone. `bench
race` asks the other one: a number of seconds, and everything may be tuned.
"""

from pathlib import Path

from bench import JsonFile, results, runs
from bench.runs import Run
from runtime import log

OWN = Path("out-savings/rows.jsonl")
FIRST_SEED = 10
METHODS = {  # flags. Rates are the usual ones of each method; blind draws keep what pps keeps
    "grpo": "--method grpo",
    "grpo_zero": "--method grpo_zero",
    "adaptive": "--method adaptive --rest 0.1111",
    "adaptive_prompts": (
        "--method adaptive --rest 0.1111 --prompt-rule uniform --prompt-prune-rate 0.6"
    ),
    "pps": "--method pps --completion-prune-rate 0.9",
    "uniform": "--completion-rule uniform --method grpo --completion-prune-rate 0.9",
    "dppo": "--method dppo",
    "pods": "--method pods --completion-prune-rate 0.8",
    "cppo": "--method cppo --completion-prune-rate 0.8",
}
OF_SETTING = {  # flags that all methods share
    "arithmetic": "--group-size 16 --lr 6e-4",
    "arithmetic-mixed": "--group-size 16 --lr 6e-4",
    "words": "--group-size 16 --lr 2e-5",
}
STEPS = {"arithmetic": 40, "arithmetic-mixed": 40, "words": 8}
OF_WORDS = ("grpo", "grpo_zero", "adaptive", "pps", "dppo", "pods")  # a run takes ten minutes


def main(
    settings: tuple[str, ...] = ("arithmetic", "arithmetic-mixed"),
    candidates: tuple[int, ...] = (32, 64),
    seeds: int = 5,
    workers: int = 2,
    json_file: JsonFile = OWN,
) -> None:
    """Run all methods with equal steps, and print the tables. A seed of all methods is one block.

    Args:
        settings: arithmetic, arithmetic-mixed, words (SmolLM2, after bash runs/smollm2.sh)
        candidates: prompts of a step, before any are dropped
        seeds: of each method
        workers: runs at a time, each with one thread
        json_file: where the rows of all runs are; the same command resumes after a stop
    """
    runs.check_settings(settings, OF_SETTING)
    blocks = [
        Run(
            setting, name, f"{flags} {OF_SETTING[setting]} --prompts-per-step {count}", seed,
            steps=STEPS[setting],
        )
        for seed in range(FIRST_SEED, FIRST_SEED + seeds)
        for count in candidates
        for setting in settings
        for name, flags in METHODS.items()
        if setting != "words" or name in OF_WORDS
    ]  # fmt: skip
    runs.make(blocks, json_file, workers)
    for setting in settings:
        print(f"\n{setting}: accuracy after equal steps, and seconds\n")
        print(results.savings_table(log.read_rows(json_file), setting))
