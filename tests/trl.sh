#!/bin/sh
# Tests of integrations/dppo_trl.py. Builds an environment with TRL and DeepSpeed (some minutes) and
# runs them there. From the root of the repository: sh tests/trl.sh [FOLDER]
set -e
venv=${1:-.venv-trl}
if [ ! -x "$venv/bin/pytest" ]; then
    python3 -m venv "$venv"
    "$venv/bin/pip" install -q -r requirements-trl.txt setuptools
    # DeepSpeed compiles what it uses, with the system's C++ compiler. --no-deps keeps this torch.
    DS_BUILD_OPS=0 "$venv/bin/pip" install -q --no-deps --no-build-isolation deepspeed==0.19.8 \
        py-cpuinfo==9.0.0 ninja==1.13.2 einops==0.8.2 hjson==3.1.0 msgpack==1.2.4 pydantic \
        pydantic-core annotated-types typing-inspection nvidia-ml-py
fi
"$venv/bin/python" -m pytest -o addopts= -v -p no:cacheprovider \
    tests/integrations/test_exact.py tests/integrations/test_trl.py \
    tests/integrations/test_trl_ranks.py
