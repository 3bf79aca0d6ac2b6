#!/usr/bin/env bash
# Everything that is owed on a GPU, in one command, for a machine without internet.
#
#   bash benchmarks/gpu/wheels.sh                 beforehand, where there is internet: build/wheels
#   bash benchmarks/gpu/all.sh                    on the GPU machine, all parts
#   ONLY="1 4" bash benchmarks/gpu/all.sh         these parts
#   SMALL=1 ONLY="2" OUT=/tmp/gpu bash benchmarks/gpu/all.sh    a rehearsal on a CPU: small shapes
#
#   1 tests        the environment and `pytest -m gpu`
#   2 ladder       the ladder of memory knobs: Qwen3-0.6B, 28 layers, a limit of 32 GB
#   3 update_pass  workloads e, a, b and c beside every peer that is installed
#   4 train        the toy task and a 0.6B shape, trained under 32 GB without Ray and vLLM
#   5 reach        the longest response under 32 GB at 0.6B, 1.7B, 4B and 8B shapes
#   6 profile      kernel launches and time per kernel group of one update
#   7 one_copy     full-parameter updates of an 8B shape under 24 and 32 GB
#
# Each part has PART_SECONDS (default: 480) and writes its evidence as it goes to docs/evidence/<date>-gpu-<part>-<device>, or to
# OUT/<part>: machine.txt, what it printed (output.txt), and its JSON. A part that fails or runs out of time does not stop the
# next one, and what it wrote stays. The summary comes last, and is in summary.txt and summary.json where OUT is set. The exit
# code is 1 where a part failed. TAR=FILE packs all evidence into one file, again after each part.
#
# WHEELS (default: build/wheels) is the folder of wheels.sh: packages that this Python lacks are installed from it into a
# temporary folder. PYTHON chooses the interpreter, COMMIT names the commit where there is no git.
set -uo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/machine.sh"

WHEELS=${WHEELS:-build/wheels}
PART_SECONDS=${PART_SECONDS:-480}
PARTS=${ONLY:-1 2 3 4 5 6 7}
DATE=$(date +%Y-%m-%d)
DEVICE=$(device_slug)
declare -A NAMES=([1]=tests [2]=ladder [3]=update_pass [4]=train [5]=reach [6]=profile [7]=one_copy)
for part in $PARTS; do
    [ -n "${NAMES[$part]:-}" ] || { echo "all.sh: ONLY=$part: no such part. Use numbers from 1 to 7." >&2; exit 2; }
done
unset ONLY  # Another script's word for another choice.
export PYTHON PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=${TRANSFORMERS_VERBOSITY:-error}

# The rehearsal: the same code on shapes that two cores compute in seconds.
if [ "${SMALL:-0}" = 1 ]; then
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} KNOBS=${KNOBS:-chunked_logprob activation_checkpointing lora}
    export TESTS=${TESTS:-tests} LAYERS=${LAYERS:-2} VOCABULARY=${VOCABULARY:-1024} SHRINK=${SHRINK:-32} REPEATS=${REPEATS:-1}
    export ROWS=${ROWS:-2} PROMPT=${PROMPT:-32} RESPONSE=${RESPONSE:-16} STEPS=${STEPS:-2} TOY_STEPS=${TOY_STEPS:-8}
    export BUDGET=${BUDGET:-120} ANSWERS=${ANSWERS:-4} PROMPTS=${PROMPTS:-2}
    export GROUP_SIZES=${GROUP_SIZES:-2} SHAPES=${SHAPES:-"0.6b 8b"} REACH_LIMIT_GB=${REACH_LIMIT_GB:-0.03} MOST=${MOST:-512}
fi

site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
if [ -d "$WHEELS" ]; then
    mapfile -t wheels < <("$PYTHON" benchmarks/gpu/missing_wheels.py "$WHEELS" | grep .)
    if [ "${#wheels[@]}" -gt 0 ]; then
        echo "installing ${#wheels[@]} wheels of $WHEELS for this run"
        "$PYTHON" -m pip --disable-pip-version-check --quiet install --no-index --no-deps --target "$site" "${wheels[@]}" \
            || { echo "all.sh: the wheels of $WHEELS do not install. Collect them again: benchmarks/gpu/wheels.sh." >&2; exit 2; }
        export PYTHONPATH=$PYTHONPATH:$site
    fi
fi
"$PYTHON" -c 'import verl_memopt.trainer.build, verl_memopt.config.loader' \
    || { echo "all.sh: packages are missing. Collect them: benchmarks/gpu/wheels.sh, and name the folder in WHEELS." >&2; exit 2; }

tests() { bash benchmarks/gpu/tests.sh; }
ladder() { ONLY=${KNOBS:-} bash benchmarks/gpu/ladder.sh; }
update_pass() {
    # shellcheck disable=SC2086 # GROUP_SIZES is a list.
    WORKLOADS=${WORKLOADS:-e a b c} BUDGET=${BUDGET:-$((PART_SECONDS - 40))} bash benchmarks/gpu/update_pass.sh ${GROUP_SIZES:+--k $GROUP_SIZES}
}
train() { bash benchmarks/gpu/train.sh; }
reach() { LIMIT_GB=${REACH_LIMIT_GB:-${LIMIT_GB:-32}} SECONDS_AT_MOST=${SECONDS_AT_MOST:-$((PART_SECONDS - 30))} bash benchmarks/gpu/reach.sh; }
profile() { BUDGET=${BUDGET:-$((PART_SECONDS - 80))} bash benchmarks/gpu/profile.sh; }
one_copy() { bash benchmarks/gpu/one_copy.sh; }
export -f tests ladder update_pass train reach profile one_copy

summary=()
failed=0
for part in $PARTS; do
    name=${NAMES[$part]}
    folder=${OUT:+$OUT/$name}
    folder=${folder:-docs/evidence/$DATE-gpu-$name-$DEVICE}
    mkdir -p "$folder"
    echo "== part $part, $name: $folder"
    started=$(date +%s)
    OUT=$folder PART_SECONDS=$PART_SECONDS timeout --kill-after=20 "$PART_SECONDS" bash -c "set -euo pipefail; $name" 2>&1 | tee "$folder/output.txt"
    code=${PIPESTATUS[0]}
    case $code in
    0) status=done ;;
    124 | 137) status="out of time" ;;
    *) status="failed ($code)" ;;
    esac
    [ "$code" = 0 ] || failed=1
    summary+=("$part|$name|$status|$(($(date +%s) - started))|$folder")
    echo "== part $part, $name: $status"
    if [ -n "${TAR:-}" ]; then
        tar -czf "$TAR.partial" $(printf '%s\n' "${summary[@]}" | cut -d'|' -f5) && mv "$TAR.partial" "$TAR"
    fi
done

table() {
    local part name status seconds folder
    printf '%-4s  %-11s  %-12s  %7s  %s\n' part name status seconds evidence
    printf '%s\n' "${summary[@]}" | while IFS='|' read -r part name status seconds folder; do
        printf '%-4s  %-11s  %-12s  %7s  %s\n' "$part" "$name" "$status" "$seconds" "$folder"
    done
}
table
if [ -n "${OUT:-}" ]; then
    table > "$OUT/summary.txt"
    printf '%s\n' "${summary[@]}" | "$PYTHON" -c 'import json, sys
names = ("part", "name", "status", "seconds", "evidence")
rows = [dict(zip(names, line.rstrip("\n").split("|"))) for line in sys.stdin]
print(json.dumps([{**row, "part": int(row["part"]), "seconds": int(row["seconds"])} for row in rows], indent=1))' > "$OUT/summary.json"
fi
exit $failed
