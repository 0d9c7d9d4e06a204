"""
The measurements behind the tables in docs/. Run from the root of the repository.

    python -m bench ceiling     what pruning and smaller groups would do for a run, from its log
    python -m bench peers       train.py against TRL, until an accuracy
    python -m bench race        methods at equal steps, or until an accuracy
    python -m bench results     the tables and pictures of docs/, from their rows

`--json FILE` writes the rows.
"""

import sys

import transformers
import tyro

from bench import ceiling, peers, race, results
from runtime import InputError, console, ranks

MODULES = (ceiling, peers, race, results)
COMMANDS = {module.__name__.removeprefix("bench."): module.main for module in MODULES}


def main(args: list[str] | None = None) -> None:
    """Run one command; args default to the command line's."""
    ranks.check_single("bench")
    tyro.extras.subcommand_cli_from_dict(COMMANDS, prog="python -m bench", args=args)


if __name__ == "__main__":
    transformers.utils.logging.disable_progress_bar()
    with console.result():  # tables have a ±
        try:
            main()
        except (InputError, ceiling.LogError) as problem:
            print(f"error: {problem}", file=sys.stderr)
            sys.exit(2)
