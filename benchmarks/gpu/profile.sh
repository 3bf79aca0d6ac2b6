#!/usr/bin/env bash
# Launches and time per kernel group of one update, the share of products, and the ratio to the device's peak: Qwen3-0.6B's
# shapes with random weights, with default settings, with CUDA graphs and with memory=constrained, each with and without
# torch.compile.
# Writes profile.json as profiles are measured, then profile.txt and machine.txt, kernels.txt with the time of each of this
# project's kernels beside the compiled statement, and counted.txt with the launches that benchmarks.gpu_cost counts without a GPU,
# to OUT (default: docs/evidence/<date>-profile-<device>).
# Without a GPU it runs on the CPU, where operations stand for kernels: make it small then, as SMALL=1 of all.sh does.
# BUDGET is the seconds after which no further profile begins (default 400). PROFILES and COMPILE choose ("default
# graphs constrained", "off on"). Further options of `python -m benchmarks.gpu.profile_update`, and after -- settings of every profile, go
# at the end of the command line. Exit code: 5 where a profile failed or was not begun, 1 where the counter failed.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/machine.sh"

evidence profile

command=(
    "$PYTHON" -m benchmarks.gpu.profile_update --seconds "${BUDGET:-400}" --json "$OUT/profile.json"
    ${SHAPE:+--shape "$SHAPE"} ${LAYERS:+--layers "$LAYERS"} ${SHRINK:+--shrink "$SHRINK"} ${REPEATS:+--repeats "$REPEATS"}
    ${PROMPT:+--prompt "$PROMPT"} ${RESPONSE:+--response "$RESPONSE"} ${PROFILES:+--profiles $PROFILES} ${COMPILE:+--compile $COMPILE}
    "$@"
)
machine "$PYTHON" "${command[@]}" > "$OUT/machine.txt"
"${command[@]}" 2> >(tee "$OUT/profile.log" >&2) | tee "$OUT/profile.txt"

"$PYTHON" -m benchmarks.gpu.kernel_times --json "$OUT/kernels.json" 2> "$OUT/kernels.log" | tee "$OUT/kernels.txt" || {
    echo "profile.sh: the times of kernels failed; see $OUT/kernels.log" >&2
}

# Beside it, what benchmarks.gpu_cost counts of the same work: launches of the compiled update, on a fake device in another process.
cost=(
    "$PYTHON" -m benchmarks.gpu_cost --models 0.6b --off-policy --groups 2 --prompt "${PROMPT:-1024}" --response "${RESPONSE:-1024}"
    ${LAYERS:+--layers "$LAYERS"} --ops 40 --json "$OUT/counted.json"
)
CUDA_VISIBLE_DEVICES="" "${cost[@]}" 2> "$OUT/counted.log" | tee "$OUT/counted.txt" || {
    echo "profile.sh: the counter failed; see $OUT/counted.log" >&2
    exit 1
}
