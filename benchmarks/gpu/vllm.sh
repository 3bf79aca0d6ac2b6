#!/usr/bin/env bash
# FSDP2's trainer and vLLM in one process on one card: what vllm_part.py lists, each step in a process of its own.
# Writes vllm.jsonl and vllm.txt (a line a figure, as it is measured), a log a step and machine.txt to OUT
# (default: docs/evidence/<date>-vllm-<device>). SECONDS_AT_MOST bounds the whole (default: 520), VLLM_STEPS chooses some steps.
# Without a GPU it runs on the CPU: make it small then, as SMALL=1 of all.sh does.
# Exit code: 1 where a step failed or ran out of time.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/machine.sh"

evidence vllm

# shellcheck disable=SC2086 # VLLM_STEPS is a list.
command=(
    "$PYTHON" -m benchmarks.gpu.vllm_part --out "$OUT" --seconds "${SECONDS_AT_MOST:-520}" ${VLLM_STEPS:+--steps $VLLM_STEPS}
    ${LAYERS:+--layers "$LAYERS"} ${VOCABULARY:+--vocabulary "$VOCABULARY"} ${SHRINK:+--shrink "$SHRINK"}
    ${PROMPT:+--prompt "$PROMPT"} ${RESPONSE:+--response "$RESPONSE"} ${ANSWERS:+--answers "$ANSWERS"}
    ${TOY_STEPS:+--toy-steps "$TOY_STEPS"} "$@"
)
machine "$PYTHON" "${command[@]}" > "$OUT/machine.txt"
exec "${command[@]}"
