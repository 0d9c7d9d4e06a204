#!/usr/bin/env bash
# The rows of equal steps of docs/results.md, two runs at a time on 2 cores without a GPU and without
# other programs.
#   bash runs/results.sh savings   the default and the mixed task, 2 hours
#   bash runs/results.sh words     SmolLM2, three hours; after bash runs/smollm2.sh
# The same command continues where it was stopped. `python -m bench results` prints and draws the rows.
# Those of equal seconds were made by `git show 50494ff:runs/results.sh`: some of their flags are gone.
set -euo pipefail
cd "$(dirname "$0")/.."
race() {
    python -m bench race --json runs/savings.jsonl "$@"
}
case ${1:-} in
savings)
    methods=(grpo nonzero adaptive adaptive_prompts pps uniform dppo pods cppo)
    for setting in arithmetic arithmetic-mixed; do
        for prompts in 32 64; do
            race --setting $setting --steps 40 --methods "${methods[@]}" \
                --flags="--group-size 16 --lr 6e-4 --prompts-per-step $prompts"
        done
    done
    ;;
words)
    race --setting words --steps 8 --methods grpo nonzero adaptive pps dppo pods \
        --flags="--group-size 16 --lr 2e-5 --prompts-per-step 16"
    ;;
*) echo "unknown command ${1:-}: see the first lines of $0" >&2 && exit 2 ;;
esac
