#!/usr/bin/env bash
# All rows of docs/race.md, two runs at a time on 2 cores without a GPU and without other programs.
#   bash runs/race.sh search    first: the flags of each method, runs/tune.jsonl, 2.5 hours
#   bash runs/race.sh           the race with them, runs/race.jsonl, 2.5 hours
#   bash runs/race.sh words     SmolLM2, search and race, 4 hours; after bash runs/smollm2.sh
# The same command goes on where it was stopped. notebooks/04_race.ipynb draws the rows.
set -euo pipefail
cd "$(dirname "$0")/.."
race() { python -m bench race --json runs/race.jsonl --settings "$@"; }
tuned=grpo,pps,pods,cppo  # in one command, so they take turns
case ${1:-} in
search) exec python -m bench tune --methods $tuned ;;
words)
    python -m bench tune --settings words
    race words
    ;;
"")
    race arithmetic --methods $tuned,grpo-32x16,uniform --seeds 3
    race arithmetic arithmetic-mixed --methods $tuned
    ;;
*) echo "unknown command $1: see the first lines of $0" >&2 && exit 2 ;;
esac
python -m bench race --table
