#!/usr/bin/env bash
# Makes .venv-peers beside .venv, with TRL and verl: the environment of benchmarks/update_pass.
#
#   benchmarks/estimators/setup.sh
set -euo pipefail
exec "$(dirname "${BASH_SOURCE[0]}")/../update_pass/setup.sh"
