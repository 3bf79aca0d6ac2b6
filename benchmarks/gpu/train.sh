#!/usr/bin/env bash
# Trains the toy task, then a model of Qwen3-0.6B's shapes under the limit of a 32 GB card: no Ray, no vLLM.
# Writes train.json, train.txt, machine.txt, and the runs' own records to OUT (default: docs/evidence/<date>-train-<device>).
# Without a GPU it runs on the CPU: make it small then, as SMALL=1 of all.sh does.
# RUNS chooses one of them: toy or shape. Settings of the second run go at the end of the command line.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/machine.sh"

evidence train

# shellcheck disable=SC2086 # RUNS is a list.
command=(
    "$PYTHON" -m benchmarks.gpu.train --out "$OUT" ${STEPS:+--steps "$STEPS"} ${TOY_STEPS:+--toy-steps "$TOY_STEPS"}
    ${LAYERS:+--layers "$LAYERS"} ${VOCABULARY:+--vocabulary "$VOCABULARY"} ${SHRINK:+--shrink "$SHRINK"}
    ${PROMPT:+--prompt "$PROMPT"} ${RESPONSE:+--response "$RESPONSE"} ${ANSWERS:+--answers "$ANSWERS"} ${PROMPTS:+--prompts "$PROMPTS"}
    ${RUNS:+--runs $RUNS} --limit-gb "${LIMIT_GB:-32}" "$@"
)
machine "$PYTHON" "${command[@]}" > "$OUT/machine.txt"
exec "${command[@]}"
