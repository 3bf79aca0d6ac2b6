#!/usr/bin/env bash
# Makes .venv-peers beside .venv, with TRL, verl, Liger and what this project needs.
#
#   benchmarks/update_pass/setup.sh
#   PYTHON=python3.12 benchmarks/update_pass/setup.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
benchmarks/own_environment.sh .venv-peers benchmarks/update_pass
# Liger's modules import Triton, also where nothing of it runs. A CUDA build of torch brings its own.
.venv-peers/bin/python -c 'import triton' 2>/dev/null \
    || .venv-peers/bin/python -m pip --disable-pip-version-check --quiet install "$(grep '^triton==' requirements/constraints.txt)"
# PPO left TRL after 1.12. This version stands in a folder of its own, which only the contestant trl_ppo puts on its path.
[ -d .venv-peers/trl-with-ppo/trl ] \
    || .venv-peers/bin/python -m pip --disable-pip-version-check --quiet install --no-deps --target .venv-peers/trl-with-ppo trl==1.12.0
