#!/bin/sh
# The tests of minimal.py, sampling and training with other versions of transformers: the oldest and
# the newest that were tried. Each gets an environment of its own. From the root of the repository:
# sh tests/versions.sh [VERSION...]
set -e
for version in ${@:-5.0.0 5.24.0}; do
    venv=.venv-transformers-$version
    if [ ! -x "$venv/bin/pytest" ]; then
        python3 -m venv "$venv"
        grep -v -e '^transformers' -e '^tokenizers' requirements.txt > "$venv/requirements.txt"
        "$venv/bin/pip" install -q -r "$venv/requirements.txt" "transformers==$version"
    fi
    "$venv/bin/pytest" -W error::DeprecationWarning tests/test_minimal.py tests/test_rollout.py \
        tests/test_decoder.py tests/test_packing.py \
        tests/test_update.py tests/test_unbiased.py tests/test_train.py tests/test_models.py
done
