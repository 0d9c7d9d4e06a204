#!/usr/bin/env bash
# The race (python -m bench race). 2 cores without a GPU.
#   bash runs/race.sh        grpo, dppo and pps, default setting, 2 seeds, live: 10 minutes
#   bash runs/race.sh all    everything in docs/race.md: hours, two runs at a time after the first
#                            seed; continues where it was stopped
# Records go to runs/race.jsonl; notebooks/04_race.ipynb draws them.
set -euo pipefail
cd "$(dirname "$0")/.."
if [ "${1:-}" != all ]; then
    exec python -m bench race --methods grpo,dppo,pps --seeds 2 --folder out-race-short
fi
race() {
    python -m bench race --folder out-race --json runs/race.jsonl --alone 1 --settings "$@"
}
few=cppo:3,cppo_allocated:3,greso:3,dppo,dppo_floor:3
race arithmetic --methods "grpo,grpo_zero,$few,pps" --seeds 5
race arithmetic-mixed --methods "grpo:8,grpo_zero,$few,pps:8" --seeds 5
race arithmetic --methods grpo,trl --seeds 1  # pip install -r requirements-trl.txt
