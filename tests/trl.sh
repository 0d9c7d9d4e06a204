#!/bin/sh
# Tests of dppo_trl.py. Builds an environment with TRL (some minutes) and runs them there. From the
# root of the repository: sh tests/trl.sh [FOLDER]
set -e
venv=${1:-.venv-trl}
if [ ! -x "$venv/bin/pytest" ]; then
    python3 -m venv "$venv"
    "$venv/bin/pip" install -q -r requirements-trl.txt
fi
"$venv/bin/python" -m pytest -o addopts= -s -p no:cacheprovider tests/test_trl.py
