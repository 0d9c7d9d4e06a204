#!/usr/bin/env bash
# The rows of equal steps of docs/results.md, two runs at a time on 2 cores without a GPU and without
# other programs.
#   bash runs/results.sh savings   the default and the mixed task, 2 hours
#   bash runs/results.sh words     SmolLM2, three hours; after bash runs/smollm2.sh
#   bash runs/results.sh reach     seconds to an accuracy, two hours
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
reach)
    until_accuracy() {
        python -m bench race --json runs/reach.jsonl --seeds 10 --first-seed 20 "$@"
    }
    batch="--prompts-per-step 32 --group-size 4"
    until_accuracy --setting arithmetic --reach 0.98 --methods \
        "adaptive=--method adaptive $batch --steps 120 --lr 6e-4" \
        "nonzero=--method nonzero $batch --steps 120 --lr 9e-4" \
        "adaptive, rest 0.1=--method adaptive --rest 0.1 $batch --steps 120 --lr 6e-4" \
        "pps=--method pps --completion-prune-rate 0.9 $batch --steps 120 --lr 6e-4" \
        "adaptive, 16 x 8=--method adaptive --prompts-per-step 16 --group-size 8 --steps 120 --lr 6e-4"
    until_accuracy --setting arithmetic-mixed --reach 0.95 --methods \
        "adaptive, 32 x 4=--method adaptive $batch --steps 150 --lr 4e-4" \
        "nonzero=--method nonzero $batch --steps 150 --lr 4e-4" \
        "adaptive, 32 x 4, rest 0.1=--method adaptive --rest 0.1 $batch --steps 150 --lr 4e-4"
    ;;
*) echo "unknown command ${1:-}: see the first lines of $0" >&2 && exit 2 ;;
esac
