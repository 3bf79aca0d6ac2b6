#!/usr/bin/env bash
# The ladder of memory knobs on the shapes of Qwen3-0.6B, under the limit of a 32 GB card, on whatever GPU there is.
# Writes ladder.json, ladder.txt, ladder.png and machine.txt to OUT (default: docs/evidence/<date>-ladder-<device>).
# ladder.json and ladder.txt are rewritten after each row. A row that does not fit under the limit is a row with the status
# "out of memory", and the ladder goes on. Ctrl-C or SIGTERM keeps what was measured and prints it.
# Exit code: 0 when the ladder ended, 1 when not one row fitted, 130 or 143 when it was interrupted.
# Without a GPU it runs on the CPU: make it small then, as SMALL=1 of all.sh does.
# Settings of every row go at the end of the command line.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/machine.sh"

SHAPE=${SHAPE:-qwen3-0.6b}
ROWS=${ROWS:-8}
PROMPT=${PROMPT:-1024}
RESPONSE=${RESPONSE:-256}
LIMIT_GB=${LIMIT_GB:-32}
evidence ladder

command=(
    "$PYTHON" -m verl_memopt knobs --measure --shape "$SHAPE" ${LAYERS:+--layers "$LAYERS"} ${VOCABULARY:+--vocabulary "$VOCABULARY"}
    --rows "$ROWS" --prompt "$PROMPT" --response "$RESPONSE" ${ONLY:+--only $ONLY} --json "$OUT/ladder.json" --text "$OUT/ladder.txt" --png "$OUT/ladder.png"
    memory.device_limit_gb="$LIMIT_GB" "$@"
)
machine "$PYTHON" "${command[@]}" > "$OUT/machine.txt"
exec "${command[@]}"
