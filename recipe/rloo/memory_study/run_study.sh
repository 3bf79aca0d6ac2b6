#!/usr/bin/env bash
# The whole study: every method at k = 2, 4, 8, what really saves up to k = 64, the table, the charts.
#   bash recipe/rloo/memory_study/run_study.sh --quick
# It ends with the worst outcome: 0 completed, 1 failed, 2 refused, 3 out of memory, 4 diverged, 5 time limit. Variables: common.sh.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
exec "$PYTHON" -m recipe.rloo.memory_study study --out "$OUT" "${options[@]}" "$@"
