#!/usr/bin/env bash
# All that a first run on a GPU should measure, in at most 9 minutes: correctness, speed, memory.
#   bash runs/gpu.sh [flags of python -m bench gpu]
# Rows: runs/gpu.json; tables: runs/gpu.md. It needs torch, and packages that it takes from the
# folder wheels, if there is one, or else from PyPI. To make that folder on another machine:
#   pip download -d wheels --only-binary :all: PACKAGES of the next line
set -euo pipefail
cd "$(dirname "$0")/.."
packages=(transformers==5.23.0 tyro tqdm matplotlib pytest pytest-xdist)
source=()
[ ! -d wheels ] || source=(--no-index --find-links wheels)
pip install -q "${source[@]}" "${packages[@]}"
exec python -m bench gpu --json runs/gpu.json --page runs/gpu.md "$@"
