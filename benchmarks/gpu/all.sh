#!/usr/bin/env bash
# Everything that is owed on a GPU, in one command, for a machine without internet.
#
#   bash benchmarks/gpu/wheels.sh                 beforehand, where there is internet: build/wheels
#   bash benchmarks/gpu/vllm_bare.sh              the same for part 8: build/vllm_bare
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
#   8 vllm         trainer and vLLM in one process: tokens, sleep, sync, shared weights, the toy, 8B under 24 GB, speed
#
# A card for a quarter of an hour, ten minutes a call: what brings most comes first. Leave the wheels of the peers at home
# (PEERS=0 wheels.sh).
#   first   ONLY=8 TAR=FIRST.tgz bash benchmarks/gpu/all.sh                          nine minutes
#   second  ONLY=6 PROFILES="graphs default constrained" COMPILE=on PART_SECONDS=120 TAR=SECOND.tgz ...    two minutes
#   third   ONLY=1 TESTS="tests/memory/activations/test_kernels.py tests/gpu/test_bytes.py" PART_SECONDS=90 TAR=THIRD.tgz ...
#   fourth  ONLY=7 LIMITS=32 PART_SECONDS=120 TAR=FOURTH.tgz ...                     two minutes
#   then    ONLY="3 5 2 6" in other calls. ONLY=8 VLLM_STEPS="card speed" takes up the steps of part 8 that were cut off.
#
# Each part has PART_SECONDS (default: 480, part 8 540) and writes its evidence as it goes to docs/evidence/<date>-gpu-<part>-<device>,
# or to OUT/<part>: machine.txt, what it printed (output.txt), and its JSON. A part that fails or runs out of time does not stop the
# next one, and what it wrote stays. The summary comes last, and is in summary.txt and summary.json where OUT is set. The exit
# code is 1 where a part failed. TAR=FILE packs all evidence into one file, again after each part.
#
# WHEELS (default: build/wheels) is the folder of wheels.sh: packages that this Python lacks are installed from it into a
# temporary folder. VLLM_WHEELS (default: build/vllm_bare) is that of vllm_bare.sh, for part 8 alone. PYTHON chooses the
# interpreter, COMMIT names the commit where there is no git.
set -uo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/machine.sh"

WHEELS=${WHEELS:-build/wheels}
VLLM_WHEELS=${VLLM_WHEELS:-build/vllm_bare}
PARTS=${ONLY:-1 2 3 4 5 6 7 8}
DATE=$(date +%Y-%m-%d)
DEVICE=$(device_slug)
declare -A NAMES=([1]=tests [2]=ladder [3]=update_pass [4]=train [5]=reach [6]=profile [7]=one_copy [8]=vllm)
for part in $PARTS; do
    [ -n "${NAMES[$part]:-}" ] || { echo "all.sh: ONLY=$part: no such part. Use numbers from 1 to 8." >&2; exit 2; }
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
install_missing() {  # install_missing WHEELS SITE: those whose package this Python lacks
    local wheels
    [ -d "$1" ] || return 0
    mapfile -t wheels < <("$PYTHON" benchmarks/gpu/missing_wheels.py "$1" | grep .)
    [ "${#wheels[@]}" -gt 0 ] || return 0
    echo "installing ${#wheels[@]} wheels of $1 for this run"
    "$PYTHON" -m pip --disable-pip-version-check --quiet install --no-index --no-deps --no-compile --target "$2" "${wheels[@]}" \
        || { echo "all.sh: the wheels of $1 do not install. Collect them again, into an empty folder." >&2; exit 2; }
}
install_missing "$WHEELS" "$site/all"
export PYTHONPATH=$PYTHONPATH:$site/all VLLM_SITE=$site/vllm
case " $PARTS " in *" 8 "*) install_missing "$VLLM_WHEELS" "$VLLM_SITE" ;; esac
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
vllm() { PYTHONPATH=$PYTHONPATH:$VLLM_SITE SECONDS_AT_MOST=${SECONDS_AT_MOST:-$((PART_SECONDS - 15))} bash benchmarks/gpu/vllm.sh; }
export -f tests ladder update_pass train reach profile one_copy vllm

summary=()
failed=0
for part in $PARTS; do
    name=${NAMES[$part]}
    folder=${OUT:+$OUT/$name}
    folder=${folder:-docs/evidence/$DATE-gpu-$name-$DEVICE}
    mkdir -p "$folder"
    echo "== part $part, $name: $folder"
    started=$(date +%s)
    seconds=${PART_SECONDS:-$([ "$name" != vllm ] && echo 480 || { [ "${SMALL:-0}" = 1 ] && echo 1200; } || echo 540)}
    OUT=$folder PART_SECONDS=$seconds timeout --kill-after=20 "$seconds" bash -c "set -euo pipefail; $name" 2>&1 | tee "$folder/output.txt"
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
