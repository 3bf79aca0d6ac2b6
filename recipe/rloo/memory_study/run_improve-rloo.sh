#!/usr/bin/env bash
# The published improved run, its String-level method: run_string-level.sh under its other name. visualize_results.sh draws what is there.
set -euo pipefail
exec "$(dirname "${BASH_SOURCE[0]}")/run_string-level.sh" "$@"
