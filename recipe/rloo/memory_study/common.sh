# What the study's scripts share: `study COMMAND ...` runs it from the root of the clone, with these variables. Sourced, not run.
#   OUT               folder of the results
#   DEVICE            auto, cpu, fake or cuda
#   REPEATS           processes for each cell (3; with --quick 1)
#   DEVICE_LIMIT_GB   limit of the device's memory, as memory.device_limit_gb (none)
#   TIME_LIMIT        seconds of a cell
#   JOBS              cells at the same time, on a machine without a GPU
#   SEED              seed of ids, weights and order
#   KS                group sizes of a script of one method (2 4 8)
#   PYTHON            the interpreter
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."
measure=(--device "${DEVICE:-auto}" --time-limit "${TIME_LIMIT:-600}" --jobs "${JOBS:-2}" --seed "${SEED:-0}")
if [ -n "${REPEATS:-}" ]; then measure+=(--repeats "$REPEATS"); fi
if [ -n "${DEVICE_LIMIT_GB:-}" ]; then measure+=(--device-limit-gb "$DEVICE_LIMIT_GB"); fi
# Cells share the cores, and their seconds mean something only if each has as many.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
study() { exec "${PYTHON:-.venv/bin/python}" -m recipe.rloo.memory_study "$1" --out "${OUT:-results}" "${@:2}"; }
one_method() { study run "${measure[@]}" --expansion "$1" --k ${KS:-2 4 8} "${@:2}"; }
