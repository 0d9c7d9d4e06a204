#!/usr/bin/env bash
# All that a first run on a GPU should measure, in about 9 minutes: correctness, speed, memory.
#   bash runs/gpu.sh [flags of python -m bench gpu]
# The tests that need a GPU come first. Rows: runs/gpu.json; tables: runs/gpu.md. torch must be
# installed; the packages below come from the folder wheels if there is one, else from PyPI. With
# internet access, this makes the folder:
#   pip download -d wheels --only-binary :all: transformers==5.23.0 tyro tqdm matplotlib \
#       pytest pytest-xdist
set -euo pipefail
cd "$(dirname "$0")/.."
packages=(transformers==5.23.0 tyro tqdm matplotlib pytest pytest-xdist)
source=()
[ ! -d wheels ] || source=(--no-index --find-links wheels)
pip install -q "${source[@]}" "${packages[@]}"
pytest -n 0 -q tests/gpu || true
exec python -m bench gpu --json runs/gpu.json --page runs/gpu.md "$@"
