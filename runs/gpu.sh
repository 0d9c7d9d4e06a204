#!/usr/bin/env bash
# A first run on a GPU, in a few minutes: tests/gpu, then a step, rollouts and updates of Qwen3's
# shapes with random weights. Rows: out-gpu/*.json.
#   bash runs/gpu.sh
# torch must be installed; the packages below come from the folder wheels if there is one, else from
# PyPI. With internet access, this makes the folder:
#   pip download -d wheels --only-binary :all: transformers==5.23.0 tyro tqdm matplotlib \
#       pytest pytest-xdist
set -uo pipefail  # what fails, running out of memory included, does not end the others
cd "$(dirname "$0")/.."
packages=(transformers==5.23.0 tyro tqdm matplotlib pytest pytest-xdist)
source=()
[ ! -d wheels ] || source=(--no-index --find-links wheels)
pip install -q "${source[@]}" "${packages[@]}" || exit
mkdir -p out-gpu
pytest -n 0 -q tests/gpu
measure() {  # measure NAME COMMAND FLAGS...
    python -m bench "${@:2}" --json "out-gpu/$1.json"
}
measure step step --shape 0.6b --new-tokens 128
measure rollout rollout --shape 0.6b --rounds 2 --batches 64 256 --new-tokens 128
measure update-0.6b update --shape 0.6b --rounds 2 --sequences 64
measure update-4b update --shape 4b --rounds 2 --sequences 64
