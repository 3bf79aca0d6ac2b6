#!/usr/bin/env bash
# The update pass beside its contestants on whatever GPU there is: workload e, Qwen3-0.6B's shapes, and a, the published one.
# Writes <workload>.json, .txt, .png and machine-<workload>.txt to OUT (default: docs/evidence/<date>-update-pass-<device>).
# Without a GPU it runs on the CPU: make it small then, for example
#   LAYERS=2 SHRINK=16 REPEATS=1 OUT=/tmp/update_pass bash benchmarks/gpu/update_pass.sh
# WORKLOADS chooses others; CONTESTANTS who runs, PYTHON whose packages (benchmarks/update_pass/setup.sh makes the peers').
# Further options of `python -m benchmarks.update_pass` go at the end of the command line.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source benchmarks/gpu/machine.sh

PYTHON=${PYTHON:-$(for python in .venv-peers .venv; do [ -x $python/bin/python ] && echo $python/bin/python && break; done || echo python3)}
WORKLOADS=${WORKLOADS:-e a}
DEVICE=$("$PYTHON" -c 'from verl_memopt.distributed.device import resolve_device; print(resolve_device("auto"))')
OUT=${OUT:-docs/evidence/$(date +%Y-%m-%d)-update-pass-$DEVICE}
mkdir -p "$OUT"

for workload in $WORKLOADS; do
    command=(
        "$PYTHON" -m benchmarks.update_pass --workload "$workload" --json "$OUT/$workload.json" --png "$OUT/$workload.png"
        ${CONTESTANTS:+--contestants $CONTESTANTS} ${REPEATS:+--repeats "$REPEATS"}
        ${LAYERS:+--layers "$LAYERS"} ${SHRINK:+--shrink "$SHRINK"} "$@"
    )
    [ "$DEVICE" = cpu ] && command+=(--cpu)
    machine "$PYTHON" "${command[@]}" > "$OUT/machine-$workload.txt"
    "${command[@]}" | tee "$OUT/$workload.txt"
done
