#!/bin/sh
# Tests of integrations/dppo_tinker.py. Builds an environment with SkyRL and the Tinker SDK (2.3 GB,
# some minutes), starts SkyRL's server on the CPU with the embedded model, and runs the tests there.
# From the root of the repository: sh tests/tinker.sh [FOLDER]
set -e
venv=${1:-.venv-tinker}
if [ ! -x "$venv/bin/pytest" ]; then
    python3 -m venv "$venv"
    # newer SDKs expect protobuf answers; the rest is what the embedded task needs
    "$venv/bin/pip" install -q "skyrl[tinker,jax]==0.3.0" tinker==0.18.2 torch==2.13.0 \
        math-verify==0.9.0 tyro==1.0.17 tqdm==4.70.1 matplotlib==3.11.2 gguf==0.19.0 pytest==9.2.0
fi
"$venv/bin/python" -m pytest -o addopts= -v -p no:cacheprovider \
    tests/integrations/test_exact.py tests/integrations/test_tinker.py \
    tests/integrations/test_tinker_server.py
