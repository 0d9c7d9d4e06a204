#!/usr/bin/env bash
# Reinforcement learning of a pruned model against that of the whole one (docs/other-prunings.md):
# SmolLM2 without a quarter of its blocks' parameters (2ssp), and as it comes. Both get the same
# supervised start on word problems, then 24 steps of pps with two seeds. 2 cores, one for each.
#   bash runs/pruned-policy.sh [DTYPE]   resumable; float32 on CPUs without AMX
# Records go to runs/pruned-policy.jsonl.
set -euo pipefail
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=1
out=out-pruned-policy dtype=${1:-bfloat16}

common=(--prompt-format plain --dtype "$dtype")
source runs/resumable.sh
policy() {  # policy NAME MODEL: its supervised start, and pps with both seeds
    train tasks.sft $out/$1 --model $2
    for seed in 0 1; do
        train train $out/$1-seed$seed --model $out/$1/checkpoint --seed $seed \
            --data words --method pps --prompts-per-step 32 --rollout-batch 256 \
            --lr 2e-5 --lr-schedule linear --steps 24 \
            --eval-every 4 --eval-problems 128 --keep-checkpoints 1
    done
}
[ -e $out/2ssp/config.json ] || python -m related.structured --model smollm2 --sparsity 0.25 \
    --method 2ssp --out-dir $out/2ssp
policy whole smollm2 & first=$!
policy pruned $out/2ssp
wait $first
python - <<END
from pathlib import Path
from bench import stamped
from runtime import log
rows = [
    {"model": model, "seed": seed} | row
    for model in ("whole", "pruned")
    for seed in (0, 1)
    for row in log.read_rows(Path(f"$out/{model}-seed{seed}/log.jsonl"))
]
log.write_rows(Path("runs/pruned-policy.jsonl"), stamped(rows))
END
