#!/usr/bin/env bash
# All that a first run on a GPU should measure, in at most 9 minutes: correctness, speed, memory.
#   bash runs/gpu.sh [flags of python -m bench gpu]
# Rows: runs/gpu.json; tables: runs/gpu.md. It needs torch, transformers, and from wheels/, if that
# folder exists, or PyPI:
#   pip download -d wheels --only-binary :all: tyro tqdm matplotlib pytest pytest-xdist
set -euo pipefail
cd "$(dirname "$0")/.."
if ! python -c "import tyro, tqdm, matplotlib, pytest, xdist" 2> /dev/null; then
    source=()
    [ -d wheels ] && source=(--no-index --find-links wheels)
    pip install -q "${source[@]}" tyro tqdm matplotlib pytest pytest-xdist
fi
exec python -m bench gpu --json runs/gpu.json --page runs/gpu.md "$@"
