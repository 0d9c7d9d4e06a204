#!/bin/sh
# Tests of dppo_trl.py. Builds an environment with TRL and DeepSpeed (some minutes) and runs them
# there. From the root of the repository: sh tests/trl.sh [FOLDER]. The last output is
# runs/trl-tests.txt.
set -e
venv=${1:-.venv-trl}
if [ ! -x "$venv/bin/pytest" ]; then
    python3 -m venv "$venv"
    "$venv/bin/pip" install -q -r requirements-trl.txt setuptools
    # It is compiled on use, for which it needs a C++ compiler. Without --no-deps, pip might
    # replace torch.
    DS_BUILD_OPS=0 "$venv/bin/pip" install -q --no-deps --no-build-isolation deepspeed==0.19.8 \
        py-cpuinfo==9.0.0 ninja==1.13.2 einops==0.8.2 hjson==3.1.0 msgpack==1.2.4 pydantic \
        pydantic-core annotated-types typing-inspection nvidia-ml-py
fi
"$venv/bin/python" -m pytest -o addopts= -s -p no:cacheprovider tests/test_trl.py
