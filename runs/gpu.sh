#!/usr/bin/env bash
# All that a first run on a GPU should measure, in at most 9 minutes: correctness, speed, memory.
#   bash runs/gpu.sh [flags of python -m bench gpu]
# Rows: runs/gpu.json; tables: runs/gpu.md.
set -euo pipefail
cd "$(dirname "$0")/.."
exec python -m bench gpu --json runs/gpu.json --page runs/gpu.md "$@"
