#!/bin/sh
# Tests of integrations/dppo_verl.py. Builds an environment with verl (some minutes) and runs them
# there. From the root of the repository: sh tests/verl.sh [FOLDER]
set -e
venv=${1:-.venv-verl}
if [ ! -x "$venv/bin/pytest" ]; then
    python3 -m venv "$venv"
    "$venv/bin/pip" install -q torch==2.13.0 'verl[verl-core]==0.9.1' 'transformers<5.11' pytest
fi
# without conftest.py, which needs what train.py needs; Ray would give its workers a low priority
OMP_NUM_THREADS=1 RAY_worker_niceness=0 "$venv/bin/python" -m pytest -o addopts= --noconftest -v \
    -s -W ignore -p no:cacheprovider tests/integrations/test_exact.py \
    tests/integrations/test_verl.py
