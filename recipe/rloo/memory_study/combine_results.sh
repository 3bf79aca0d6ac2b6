#!/usr/bin/env bash
# combined.csv and summary.json from the runs in OUT. It ends with the worst outcome, 4 where arms that must agree do not.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
exec "$PYTHON" -m recipe.rloo.memory_study combine --out "$OUT" "$@"
