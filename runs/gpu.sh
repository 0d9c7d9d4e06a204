#!/usr/bin/env bash
# A first run on a GPU, in a few minutes: tests/gpu, then decode rates at 64 and 256 sequences of
# 0.6B and the MFU of updates of 0.6B and 4B. Rows: runs/gpu-rates.json.
#   bash runs/gpu.sh [flags of python -m bench gpu]
# torch must be installed; the packages below come from the folder wheels if there is one, else from
# PyPI. With internet access, this makes the folder:
#   pip download -d wheels --only-binary :all: transformers==5.23.0 tyro tqdm matplotlib \
#       pytest pytest-xdist
set -euo pipefail
cd "$(dirname "$0")/.."
packages=(transformers==5.23.0 tyro tqdm matplotlib pytest pytest-xdist)
source=()
[ ! -d wheels ] || source=(--no-index --find-links wheels)
pip install -q "${source[@]}" "${packages[@]}"
pytest -n 0 -q tests/gpu || true
exec python -m bench gpu --json runs/gpu-rates.json "$@"
