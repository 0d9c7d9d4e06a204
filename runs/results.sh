#!/usr/bin/env bash
# All rows of docs/results.md, two runs at a time on 2 cores without a GPU and without other programs.
#   bash runs/results.sh savings   equal steps, runs/savings.jsonl, 2 hours
#   bash runs/results.sh race      equal seconds, with the flags that won in runs/search.jsonl;
#                                  runs/race.jsonl, 3 hours
#   bash runs/results.sh words     equal steps of SmolLM2, three hours; after bash runs/smollm2.sh
# The same command continues where it was stopped. `python -m bench results` prints and draws the rows.
set -euo pipefail
cd "$(dirname "$0")/.."
case ${1:-} in
savings) exec python -m bench savings --json runs/savings.jsonl ;;
words) exec python -m bench savings --json runs/savings.jsonl --settings words --candidates 16 ;;
race)
    for setting in arithmetic arithmetic-mixed; do  # each on one machine
        python -m bench race --settings $setting --json runs/race.jsonl
    done
    ;;
*) echo "unknown command ${1:-}: see the first lines of $0" >&2 && exit 2 ;;
esac
