#!/usr/bin/env bash
# How far one goes on a 32 GB card: the longest response at Qwen3's 0.6B, 1.7B, 4B and 8B shapes, full fine-tuning and LoRA.
# Writes probes.jsonl (each probe as it is measured; a second call with the same OUT goes on from it), reach.json, reach.txt
# and machine.txt to OUT (default: docs/evidence/<date>-reach-<device>). Running out of memory is a result.
# SECONDS_AT_MOST bounds the whole (default: 450), SHAPES chooses some of 0.6b 1.7b 4b 8b.
# Without a GPU it runs on the CPU, where the byte tracker holds the limit: make it small then, as SMALL=1 of all.sh does.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/machine.sh"

evidence reach

# shellcheck disable=SC2086 # SHAPES and CASES are lists.
command=(
    "$PYTHON" -m benchmarks.gpu.reach --out "$OUT" --seconds "${SECONDS_AT_MOST:-450}" --limit-gb "${LIMIT_GB:-32}"
    ${SHAPES:+--shapes $SHAPES} ${CASES:+--cases $CASES} ${START:+--start "$START"} ${MOST:+--most "$MOST"}
    ${PROMPT:+--prompt "$PROMPT"} ${LAYERS:+--layers "$LAYERS"} ${VOCABULARY:+--vocabulary "$VOCABULARY"}
    ${SHRINK:+--shrink "$SHRINK"} "$@"
)
machine "$PYTHON" "${command[@]}" > "$OUT/machine.txt"
exec "${command[@]}"
