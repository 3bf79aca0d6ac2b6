#!/usr/bin/env bash
# Makes .venv-bench beside .venv, with TRL and what it needs.
#
#   benchmarks/toy_trl/setup.sh
#   PYTHON=python3.12 benchmarks/toy_trl/setup.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
benchmarks/own_environment.sh .venv-bench benchmarks/toy_trl
