#!/usr/bin/env bash
# What the machine has, and the tests that need a GPU: `pytest -m gpu`. Without a GPU they are skipped, each with its reason.
# Writes environment.json, pytest.txt and machine.txt to OUT (default: docs/evidence/<date>-tests-<device>).
# pytest.txt has a line a test as it ends, so that a run that is cut off keeps its results.
# TESTS chooses files or folders (default: tests). Options of pytest go at the end of the command line.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/machine.sh"

evidence tests

# shellcheck disable=SC2086 # TESTS is a list.
command=("$PYTHON" -m pytest -m gpu -vv -rs --tb=short -p no:cacheprovider ${TESTS:-tests} "$@")
machine "$PYTHON" "${command[@]}" > "$OUT/machine.txt"
"$PYTHON" -m benchmarks.gpu.environment "$OUT/environment.json"
"${command[@]}" 2>&1 | tee "$OUT/pytest.txt"
