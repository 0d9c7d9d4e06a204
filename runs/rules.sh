#!/usr/bin/env bash
# Every completion rule, loss and kind of update on the embedded task for 30 steps, on 1 rank and
# on 2. 2 cores without a GPU: about 25 minutes. runs/rules.sh > runs/rules.txt
set -euo pipefail
cd "$(dirname "$0")/.."
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
try() {
    local own=(--group-size 16 --prompts-per-step 32 --loss grpo --adam-beta2 0.999 --lr 6e-4)
    case "$*" in
    *"--method pps"*) own+=(--prompts-per-step 64 --prompt-prune-rate 0.6
        --completion-prune-rate 0.7) ;;
    *"--prompt-rule pps"*) own+=(--prompts-per-step 64) ;;
    esac
    for ranks in 1 2; do
        rm -rf "$folder/run"
        OMP_NUM_THREADS=$((2 / ranks)) torchrun --standalone --nproc-per-node "$ranks" train.py \
            --steps 30 --eval-every 30 --save-every 0 --out-dir "$folder/run" "${own[@]}" "$@" \
            > "$folder/text" 2>&1 || { tail -n 5 "$folder/text"; exit 1; }
        python - "$folder/run/log.jsonl" "$ranks" "$*" <<'PYTHON'
import json, statistics, sys
rows = [json.loads(line) for line in open(sys.argv[1])]
mean = lambda key, part: statistics.mean(row[key] for row in part)
first, last = (rows[place]["eval/avg@4"] for place in (0, -1))
kept, seconds = (mean(key, rows[1:]) for key in ("kept/tokens", "time/train"))
print(f"{sys.argv[3]:62s} ranks {sys.argv[2]}  avg@4 {first:.3f} -> {last:.3f}  "
      f"tokens kept {kept:.2f}  train {seconds:.2f} s", flush=True)
PYTHON
    done
}
for rule in none zero dppo pps uniform cppo cppo_batch pods dppo_floor; do
    try --method grpo --completion-rule "$rule"
done
for rule in uniform dppo pps dppo_floor greso dynamic mopps; do
    try --method grpo --prompt-rule "$rule"
done
try --method dppo
try --method pps --minibatches 2
try --method dppo_floor
try --method cppo --cppo-allocation --completion-prune-rate 0.5
for loss in dr_grpo dapo gspo cispo; do
    try --method pps --loss "$loss" --minibatches 2 --epochs 2
done
try --method pps --beta 0.05 --mask-truncated --check-every 10
