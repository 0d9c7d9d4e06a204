#!/usr/bin/env bash
# All rows of docs/race.md, two runs at a time on 2 cores without a GPU and without other programs.
#   bash runs/race.sh search    first: the flags of every method, runs/tune.jsonl, over 4 hours
#   bash runs/race.sh           the race with them, runs/race.jsonl, over 6 hours
# The same command goes on where it was stopped. notebooks/04_race.ipynb draws the rows.
set -euo pipefail
cd "$(dirname "$0")/.."
if [ "${1:-}" = search ]; then
    python -m bench tune
    exec python -m bench tune --methods dppo,pods,cppo
fi
race() { python -m bench race --settings arithmetic arithmetic-mixed --json runs/race.jsonl "$@"; }
tuned=grpo,pps,dppo,pods,cppo
race --methods $tuned,grpo-32x16,uniform,dppo_floor,greso,dynamic,mopps --seeds 3  # in turns
race --methods $tuned
python -m bench race --table
