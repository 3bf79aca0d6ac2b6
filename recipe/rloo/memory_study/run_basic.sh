#!/usr/bin/env bash
# The runs of one published method, here algorithm.expansion=token. Variables: common.sh; KS="2 4" picks group sizes.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
exec "$PYTHON" -m recipe.rloo.memory_study run --out "$OUT" "${options[@]}" --expansion token --k ${KS:-2 4 8} "$@"
