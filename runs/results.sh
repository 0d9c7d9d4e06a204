#!/usr/bin/env bash
# The rows of docs/results.md, on CPU cores without a GPU and without other programs.
#   bash runs/results.sh peers     train.py and TRL, an hour; after pip install -r requirements-trl.txt
#   bash runs/results.sh savings   equal steps, an hour
#   bash runs/results.sh words     SmolLM2, three hours; after bash runs/smollm2.sh
#   bash runs/results.sh reach     seconds to an accuracy, two hours
# The same command continues where it was stopped. `python -m bench results` prints and draws the rows.
# Those of reach.jsonl that are named adaptive alone measured their rest; it was not yet a constant.
set -euo pipefail
cd "$(dirname "$0")/.."
case ${1:-} in
peers)
    PYTHONPATH=integrations python -m bench peers
    ;;
savings)
    python -m bench race --json runs/savings.jsonl --steps 40 \
        --methods grpo nonzero adaptive adaptive_prompts pps uniform dppo pods cppo \
        --flags="--group-size 16 --lr 6e-4 --prompts-per-step 64"
    ;;
words)
    batch="--prompts-per-step 16 --group-size 8"
    equal_seconds() {
        python -m bench race --json runs/words.jsonl --setting words --reach 1 "$@"
    }
    equal_seconds --seeds 5 --methods \
        "nonzero, 4e-5=--method nonzero $batch --steps 12 --lr 4e-5 --eval-every 4" \
        "nonzero, 2e-5=--method nonzero $batch --steps 9 --lr 2e-5 --eval-every 3" \
        "adaptive, 2e-5=--method adaptive $batch --steps 15 --lr 2e-5 --eval-every 5"
    equal_seconds --seeds 3 --methods \
        "LoRA 8, 2e-4=--method adaptive $batch --steps 15 --lora 8 --lr 2e-4 --eval-every 5" \
        "LoRA 8, 4e-4=--method adaptive $batch --steps 15 --lora 8 --lr 4e-4 --eval-every 5"
    ;;
reach)
    until_accuracy() {
        python -m bench race --json runs/reach.jsonl --seeds 10 --first-seed 30 "$@"
    }
    four="--prompts-per-step 32 --group-size 4"
    eight="--prompts-per-step 16 --group-size 8"
    sixteen="--prompts-per-step 8 --group-size 16"
    until_accuracy --setting arithmetic --reach 0.98 --methods \
        "adaptive, rest 0.1, 16 x 8=--method adaptive $eight --steps 120 --lr 6e-4" \
        "nonzero, 16 x 8=--method nonzero $eight --steps 120 --lr 4e-4" \
        "adaptive, rest 0.1, 8 x 16=--method adaptive $sixteen --steps 150 --lr 4e-4" \
        "nonzero, 8 x 16=--method nonzero $sixteen --steps 150 --lr 6e-4" \
        "adaptive, rest 0.1, 32 x 4=--method adaptive $four --steps 120 --lr 6e-4" \
        "nonzero, 32 x 4=--method nonzero $four --steps 120 --lr 9e-4"
    until_accuracy --setting arithmetic-mixed --reach 0.95 --methods \
        "adaptive, rest 0.1, 16 x 8=--method adaptive $eight --steps 150 --lr 2.5e-4" \
        "nonzero, 16 x 8=--method nonzero $eight --steps 150 --lr 2.5e-4" \
        "adaptive, rest 0.1, 8 x 16=--method adaptive $sixteen --steps 200 --lr 4e-4" \
        "nonzero, 8 x 16=--method nonzero $sixteen --steps 200 --lr 4e-4" \
        "adaptive, rest 0.1, 32 x 4=--method adaptive $four --steps 150 --lr 4e-4" \
        "nonzero, 32 x 4=--method nonzero $four --steps 150 --lr 4e-4"
    ;;
*) echo "unknown command ${1:-}: see the first lines of $0" >&2 && exit 2 ;;
esac
