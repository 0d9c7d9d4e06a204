#!/bin/sh
# GRPO and pps through SkyRL's Tinker server on this CPU, paired seeds: the rows of
# runs/tinker-race.jsonl. Needs the environment of tests/tinker.sh. From the root of the repository:
#     sh runs/tinker.sh [FOLDER]
# grpo is run as zero, which has its gradient and sends fewer datums; `tokens/grpo` is what grpo
# would have sent.
set -e
python=${1:-.venv-tinker}/bin/python
out=out/tinker
mkdir -p "$out/state"
export XLA_FLAGS="--xla_cpu_multi_thread_eigen=false" OMP_NUM_THREADS=1 JAX_PLATFORMS=cpu
model=$("$python" -c "import arithmetic; print(arithmetic.base_folder())" | tail -1)
"$python" tests/tinker_server.py "$model" "$out/state" 8077 > "$out/server.log" 2>&1 &
server=$!
trap 'kill $server' EXIT
for seed in 0 1 2; do
    for method in pps grpo; do
        TINKER_API_KEY=tml-mine "$python" - "$model" "$method" "$seed" <<'PROGRAM'
import sys

from transformers import AutoTokenizer

import data
import dppo_tinker

model, method, seed = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(model)


def encode(problems):
    problems, ids = data.encode_prompts(problems, tokenizer, 200)
    return [(i, one.answer, one.source) for i, one in zip(ids, problems, strict=True)]


rules = {"prompts_per_step": 32}
if method == "grpo":
    rules = {"prompts_per_step": 16, "prompt_rule": "none", "completion_rule": "zero"}
dppo_tinker.Trainer(
    encode(data.train_problems("arithmetic", hold_out=True)),
    encode(data.eval_problems("arithmetic", 100)),
    data.reward_function("arithmetic"),
    tokenizer,
    model,
    "http://127.0.0.1:8077",
    out_dir=f"out/tinker/{method}-{seed}",
    **rules, group_size=8, max_new_tokens=55, lr=2e-3, seed=int(seed), steps=25, eval_every=5,
    pad_datums=16,
).train()
PROGRAM
    done
done
