#!/usr/bin/env bash
# The four charts of the combined results in OUT.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
exec "$PYTHON" -m recipe.rloo.memory_study charts --out "$OUT" "$@"
