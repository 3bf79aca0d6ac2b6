# What the study's scripts share: they run from the root of the clone, with these variables. Sourced, not run.
#   OUT               folder of the results
#   DEVICE            auto, cpu, fake or cuda
#   REPEATS           processes for each cell (3; with --quick 1)
#   DEVICE_LIMIT_GB   limit of the device's memory, as memory.device_limit_gb (none)
#   TIME_LIMIT        seconds of a cell
#   JOBS              cells at the same time, on a machine without a GPU
#   SEED              seed of ids, weights and order
#   PYTHON            the interpreter
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."
OUT=${OUT:-results}
PYTHON=${PYTHON:-.venv/bin/python}
options=(--device "${DEVICE:-auto}" --time-limit "${TIME_LIMIT:-600}" --jobs "${JOBS:-2}" --seed "${SEED:-0}")
if [ -n "${REPEATS:-}" ]; then options+=(--repeats "$REPEATS"); fi
if [ -n "${DEVICE_LIMIT_GB:-}" ]; then options+=(--device-limit-gb "$DEVICE_LIMIT_GB"); fi
# Cells share the cores, and their seconds mean something only if each has as many.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
