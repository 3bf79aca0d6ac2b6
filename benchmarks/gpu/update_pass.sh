#!/usr/bin/env bash
# The update pass beside its contestants: workloads e (Qwen3-0.6B's shapes), a (the published one), b and c, one after another.
# A peer whose package is not installed is a row "not installed"; one that runs out of memory is a row "out of memory".
# Writes <workload>.json as rows are measured, then .txt and machine-<workload>.txt, to OUT
# (default: docs/evidence/<date>-update-pass-<device>). BUDGET is the seconds for all workloads (default 440): where it is
# spent, fewer rounds are timed, and the table says how many. Without a GPU it runs on the CPU: make it small then, as SMALL=1 of all.sh does.
# WORKLOADS chooses others; CONTESTANTS who runs, PYTHON whose packages (benchmarks/update_pass/setup.sh makes the peers').
# Further options of `python -m benchmarks.update_pass` go at the end of the command line.
# Exit code: the first workload's that is not 0; 4 a gradient is wrong, 5 a contestant failed. The other workloads run anyway.
set -euo pipefail
peers=.venv-peers/bin/python
[ -n "${PYTHON:-}" ] || [ ! -x "$(dirname "${BASH_SOURCE[0]}")/../../$peers" ] || PYTHON=$peers
source "$(dirname "${BASH_SOURCE[0]}")/machine.sh"

WORKLOADS=${WORKLOADS:-e a b c}
BUDGET=${BUDGET:-440}
DEVICE=$("$PYTHON" -c 'from verl_memopt.distributed.device import resolve_device; print(resolve_device("auto"))')
evidence update-pass

share() { case $1 in e) echo 3 ;; a | d) echo 2 ;; *) echo 1 ;; esac; }
left=0 code=0
for workload in $WORKLOADS; do left=$((left + $(share "$workload"))); done

for workload in $WORKLOADS; do
    # What a workload does not use is there for those that follow. SECONDS counts since the script began.
    seconds=$(((BUDGET > SECONDS ? BUDGET - SECONDS : 0) * $(share "$workload") / left))
    left=$((left - $(share "$workload")))
    command=(
        "$PYTHON" -m benchmarks.update_pass --workload "$workload" --device "$DEVICE" --order alone --seconds "$seconds"
        --json "$OUT/$workload.json"
        ${CONTESTANTS:+--contestants $CONTESTANTS} ${REPEATS:+--repeats "$REPEATS"}
        ${LAYERS:+--layers "$LAYERS"} ${SHRINK:+--shrink "$SHRINK"} "$@"
    )
    machine "$PYTHON" "${command[@]}" > "$OUT/machine-$workload.txt"
    "${command[@]}" 2> >(tee "$OUT/$workload.log" >&2) | tee "$OUT/$workload.txt" || { found=$?; [ "$code" != 0 ] || code=$found; }
done
exit "$code"
