#!/usr/bin/env bash
# The published baseline, its Basic method: run_basic.sh under its other name. visualize_results.sh draws what is there.
set -euo pipefail
exec "$(dirname "${BASH_SOURCE[0]}")/run_basic.sh" "$@"
