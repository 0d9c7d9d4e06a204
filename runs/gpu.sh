#!/usr/bin/env bash
# A first run on a GPU, in a few minutes: tests/gpu, then ten steps of the embedded model, or of yours.
# The seconds of rollouts and updates are in out-gpu/log.jsonl.
#   bash runs/gpu.sh [flags of train.py, such as --model Qwen/Qwen3-0.6B --data gsm8k]
# torch 2.12 or later must be installed; the packages below come from the folder wheels if there is one, else from
# PyPI. With internet access, this makes the folder:
#   pip download -d wheels --only-binary :all: transformers==5.23.0 tyro tqdm matplotlib \
#       pytest pytest-xdist
set -uo pipefail  # tests that fail do not end it
cd "$(dirname "$0")/.."
packages=(transformers==5.23.0 tyro tqdm matplotlib pytest pytest-xdist)
source=()
[ ! -d wheels ] || source=(--no-index --find-links wheels)
pip install -q "${source[@]}" "${packages[@]}" || exit
pytest -n 0 -q tests/gpu
python train.py --steps 10 --out-dir out-gpu "$@"
