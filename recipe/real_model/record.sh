#!/usr/bin/env bash
# Records the runs that the docs show: seeds 0 to 4 one after another, their results, and the files and the chart of the first run.
# A seed that has ended in build/record is kept, and a seed that was stopped continues, so this script may be stopped and restarted.
#   bash recipe/real_model/record.sh
#   SEEDS="0 1" bash recipe/real_model/record.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

PYTHON=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
record=docs/record/real_model runs=()
for seed in ${SEEDS:-0 1 2 3 4}; do
    run=build/record/real_model_seed$seed
    runs+=("$run")
    mkdir -p "$run"
    [ -f "$run/model/config.json" ] || # written at the end
        SEED=$seed bash examples/memory_optimization/run_real_model_cpu.sh trainer.default_local_dir="$run" >>"$run.console.txt"
done
mkdir -p "$record"
"$PYTHON" -m recipe.real_model.results "${runs[@]}" >"$record/results.txt"
cp "${runs[0]}/reward_and_validation.png" docs/images/real_model_reward.png
# The path of this checkout is of no interest, so it is removed.
sed "s|$PWD/||g" "${runs[0]}.console.txt" >"$record/console.txt"
for name in summary.json metrics.jsonl; do
    sed "s|$PWD/||g" "${runs[0]}/$name" >"$record/$name"
done
