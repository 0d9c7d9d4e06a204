#!/usr/bin/env bash
# Presets for real models on real mathematics: bash runs/qwen3.sh NAME [more flags of train.py, which win]
# Written from the memory table of the README; no GPU has run them yet. pps rolls out 40 % of --prompts-per-step: twice
# the candidates that GRPO would have, four fifths of its rollouts, as in the race.
set -euo pipefail
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=3600  # torchrun kills who still saves after that many seconds, else 30
cd "$(dirname "$0")/.."
name=${1:-}
gpus=1
flags=(--out-dir "out-$name" --engine vllm --gradient-checkpointing --lr 1e-6 --warmup 10 --eval-every 20)
modern=(--method pps --loss dapo --prompts-per-step 256 --group-size 16 --max-new-tokens 3072 --steps 300)
gsm8k=(--data gsm8k --eval-data gsm8k-test)
math=(--data math --eval-data math500)
case $name in
    0.6b-gsm8k) flags+=(--model Qwen/Qwen3-0.6B "${gsm8k[@]}" --method pps --prompts-per-step 128 --group-size 8 --max-new-tokens 1024 --steps 200) ;;
    1.7b-gsm8k) flags+=(--model Qwen/Qwen3-1.7B "${gsm8k[@]}" --method pps --prompts-per-step 128 --group-size 8 --max-new-tokens 1024 --steps 200) ;;
    4b-math) flags+=(--model Qwen/Qwen3-4B "${math[@]}" "${modern[@]}") ;;                          # one GPU of 141 GB
    4b-math-8) gpus=8 flags+=(--model Qwen/Qwen3-4B "${math[@]}" "${modern[@]}" --shard fsdp) ;;    # of 80 GB
    8b-math-8) gpus=8 flags+=(--model Qwen/Qwen3-8B "${math[@]}" "${modern[@]}" --shard fsdp) ;;
    # our reconstruction of the paper's setting, from secondary sources: G = 5, 1,024 new tokens, its two rules
    4b-math-paper) flags+=(--model Qwen/Qwen3-4B "${math[@]}" --method dppo --loss grpo --prompts-per-step 128 --group-size 5 --max-new-tokens 1024 --steps 300) ;;
    *) echo "usage: bash runs/qwen3.sh 0.6b-gsm8k|1.7b-gsm8k|4b-math|4b-math-8|8b-math-8|4b-math-paper [flags]" >&2; exit 2 ;;
esac
exec ${TORCHRUN:-torchrun} --standalone --nproc-per-node $gpus train.py "${flags[@]}" "${@:2}"
