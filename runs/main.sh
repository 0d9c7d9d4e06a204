#!/usr/bin/env bash
# The accuracies of the main command from the base model, 3 seeds, also on longer chains.
# 2 cores without a GPU: about a minute a seed.
# Logs: out-{0,1,2}; runs/main-seed0.jsonl and .png are of the first.
set -euo pipefail
cd "$(dirname "$0")/.."
for seed in 0 1 2; do
    time python train.py --seed "$seed" --out-dir "out-$seed"
    python eval.py --model "out-$seed/checkpoint" --data arithmetic-longer
done
python eval.py --model tasks/arithmetic-base --data arithmetic-longer
python -c "import bench; bench.keep_log('out-0/log.jsonl', 'runs/main-seed0.jsonl')"
cp out-0/run.png runs/main-seed0.png
