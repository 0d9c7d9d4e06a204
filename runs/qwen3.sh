#!/usr/bin/env bash
# Presets for real models on real mathematics; flags after the name override the preset:
#   bash runs/qwen3.sh NAME [flags of train.py]
# Derived from the memory figures in docs/running.md; no GPU has run them yet. At its end, and after
# 20 steps by `python -m bench ceiling out-NAME`, a run says what pruning saves on the machine.
set -euo pipefail
# Under torchrun, ranks that are still saving are killed after this many seconds (default: 30).
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=3600
cd "$(dirname "$0")/.."
name=${1:-}
gpus=1
flags=(--out-dir "out-$name" --engine vllm --gradient-checkpointing)
gsm8k=(--data gsm8k --eval-data gsm8k-test --prompts-per-step 64 --group-size 8)
gsm8k+=(--max-new-tokens 1024 --steps 200)
math=(--data math --eval-data math500)
modern=(--loss dapo --prompts-per-step 192 --group-size 8 --max-new-tokens 3072)
modern+=(--steps 300)
# our reconstruction of the paper's setting, from secondary sources; 15 epochs of MATH's 7,500
# problems are 870 steps
paper=(--method dppo --loss grpo --prompts-per-step 128 --group-size 5 --max-new-tokens 1024)
paper+=(--steps 870)
case $name in
    0.6b-gsm8k) flags+=(--model Qwen/Qwen3-0.6B "${gsm8k[@]}") ;;  # one GPU of 80 GB
    1.7b-gsm8k) flags+=(--model Qwen/Qwen3-1.7B "${gsm8k[@]}") ;;  # one GPU of 80 GB
    4b-math) flags+=(--model Qwen/Qwen3-4B "${math[@]}" "${modern[@]}") ;;  # one GPU of 141 GB
    4b-math-8) gpus=8 flags+=(--model Qwen/Qwen3-4B "${math[@]}" "${modern[@]}" --shard fsdp) ;;
    8b-math-8) gpus=8 flags+=(--model Qwen/Qwen3-8B "${math[@]}" "${modern[@]}" --shard fsdp) ;;
    # one GPU of 48 GB, and one of 80
    4b-math-lora) flags+=(--model Qwen/Qwen3-4B "${math[@]}" "${modern[@]}" --lora 32) ;;
    8b-math-lora) flags+=(--model Qwen/Qwen3-8B "${math[@]}" "${modern[@]}" --lora 32) ;;
    4b-math-paper) flags+=(--model Qwen/Qwen3-4B "${math[@]}" "${paper[@]}") ;;
    *)
        presets="0.6b-gsm8k|1.7b-gsm8k|4b-math|4b-math-8|8b-math-8|4b-math-lora|8b-math-lora"
        presets+="|4b-math-paper"
        echo "usage: bash runs/qwen3.sh $presets [flags]" >&2
        exit 2
        ;;
esac
exec ${TORCHRUN:-torchrun} --standalone --nproc-per-node $gpus train.py "${flags[@]}" "${@:2}"
