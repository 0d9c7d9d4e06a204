#!/bin/sh
# GRPO and pps through SkyRL's Tinker server on this CPU, three paired seeds: the rows of
# runs/tinker-race.jsonl. Needs the environment of tests/tinker.sh. From the root of the repository:
#     sh runs/tinker.sh [FOLDER]
# If it is stopped, the same command continues. grpo is run as zero, which has its gradient and sends
# fewer datums; the table counts what grpo itself would have sent.
set -e
mkdir -p out/tinker
cat > out/tinker/race.py <<'PROGRAM'
from tasks import arithmetic
import data
import dppo_tinker
from transformers import AutoTokenizer

base = str(arithmetic.BASE)
tokenizer = AutoTokenizer.from_pretrained(base)
rules = {
    "pps": {"prompts_per_step": 32, "prompt_rule": "uniform", "prompt_prune_rate": 0.6},
    "grpo": {"prompts_per_step": 16, "prompt_rule": "none", "completion_rule": "zero"},
}


def encode(problems):
    problems, ids = data.encode_prompts(problems, tokenizer, 200)
    return [(i, one.answer) for i, one in zip(ids, problems, strict=True)]


for seed in range(3):
    for method, options in rules.items():
        print(method, seed, flush=True)
        dppo_tinker.Trainer(
            encode(data.train_problems("arithmetic")),
            encode(data.eval_problems("arithmetic", 100)),
            data.reward_function("arithmetic"),
            tokenizer,
            base,
            "http://127.0.0.1:8077",
            out_dir=f"out/tinker/{method}-{seed}",
            **options, group_size=8, max_new_tokens=55, lr=2e-3, seed=seed, steps=25,
            eval_every=5, save_every=5, pad_datums=16,
        ).train()
PROGRAM
"${1:-.venv-tinker}/bin/python" tests/integrations/tinker_server.py out/tinker/race.py
"${1:-.venv-tinker}/bin/python" - <<'PROGRAM'
import sys
from pathlib import Path

sys.path.insert(0, "")
from bench import stamped
from runtime import log

rows = [
    {"method": method, "seed": seed} | row
    for method in ("grpo", "pps")
    for seed in range(3)
    for row in log.read_rows(Path(f"out/tinker/{method}-{seed}/log.jsonl"))
]
log.write_rows(Path("runs/tinker-race.jsonl"), stamped(rows))
PROGRAM
