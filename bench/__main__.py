"""
The measurements behind the tables in docs/. Run from the root of the repository.

    python -m bench savings     what pruning saves at equal steps
    python -m bench race        which method is most accurate after a budget of seconds
    python -m bench results     the tables and pictures of docs/results.md, from their rows
    python -m bench variance    error of each completion rule, from real gradients
    python -m bench check       pruned gradients against full ones over whole runs, and a planted
                                mistake that this must find
    python -m bench ceiling     which group size to use, and what pruning gains, from a run's log
    python -m bench law         time to an accuracy for every group size, with and without pruning
    python -m bench step        seconds of a training step and its parts
    python -m bench rollout     tokens per second of each engine but vLLM
    python -m bench update      packed and padded updates

`--json FILE` writes the rows; runs/*.json come from it. With `--shape 0.6b`, step, rollout and
update use random weights of a size for a GPU (runs/gpu.sh).
"""

import sys

import transformers
import tyro

from bench import ceiling, check, law, race, results, rollout, savings, step, update, variance
from runtime import InputError, console

MODULES = (results, savings, race, variance, check, ceiling, law, step, rollout, update)
COMMANDS = {module.__name__.removeprefix("bench."): module.main for module in MODULES}


def main(args: list[str] | None = None) -> None:
    """Run one command; args default to the command line's."""
    tyro.extras.subcommand_cli_from_dict(COMMANDS, prog="python -m bench", args=args)


if __name__ == "__main__":
    console.result()  # tables have a ±
    transformers.utils.logging.disable_progress_bar()
    try:
        main()
    except InputError as problem:
        print(f"error: {problem}", file=sys.stderr)
        sys.exit(2)
