#!/usr/bin/env bash
# The race (python -m bench race). 2 cores without a GPU.
#   bash runs/race.sh        grpo, dppo and pps, default setting, 2 seeds, live: 10 minutes
#   bash runs/race.sh all    everything in docs/race.md: hours. Both settings at once, one thread
#                            each; continues where it was stopped
# Records go to runs/race.jsonl; notebooks/04_race.ipynb draws them. best_grpo and best_pps have the
# flags that won `python -m bench search` (runs/search.jsonl).
set -euo pipefail
cd "$(dirname "$0")/.."
if [ "${1:-}" != all ]; then
    exec python -m bench race --methods grpo,dppo,pps --seeds 2 --folder out-race-short
fi
race() {  # whichever ends last writes the records of both
    OMP_NUM_THREADS=1 python -m bench race --folder out-race --json runs/race.jsonl --settings "$@"
}
rows=grpo,best_grpo,best_pps,pps
race arithmetic --seeds 5 --methods $rows,grpo_zero:4,dppo:4,cppo:3,pods:3,mopps:3,dppo_floor:3,\
cppo_allocated:2,greso:2,dynamic:2 & first=$!
race arithmetic-mixed --seeds 5 --methods $rows,grpo_zero:3,dppo:3,cppo:2,pods:2,mopps:2,\
dppo_floor:2,cppo_allocated:1,greso:1,dynamic:1
wait $first
race arithmetic --methods grpo,trl --seeds 1  # pip install -r requirements-trl.txt
