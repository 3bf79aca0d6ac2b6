#!/usr/bin/env bash
# Records the run that README.md and these pages show: the default CPU run in a fresh folder, its charts and its files. A second run,
# of as many steps, is shown in a terminal of 100 columns.
#   bash docs/record.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

run=build/record/rloo_toy
rm -rf "$run"
mkdir -p "$run" docs/record/rloo_toy docs/images
DEVICE=cpu bash examples/memory_optimization/run_rloo_single_gpu.sh trainer.default_local_dir="$run" > "$run/console.txt"
cp "$run"/*.png docs/images/
# The path of this checkout says nothing about the run.
for name in console.txt summary.json metrics.jsonl memory_timeline.csv config.yaml; do
    sed "s|$PWD/||g" "$run/$name" > "docs/record/rloo_toy/$name"
done

rm -rf build/record/terminal
script --quiet --return --command "stty cols 100; DEVICE=cpu bash examples/memory_optimization/run_rloo_single_gpu.sh \
    trainer.default_local_dir=build/record/terminal" /dev/null > build/record/terminal.txt
sed "s|$PWD/||g" build/record/terminal.txt | .venv/bin/python docs/screen.py "make train" --lines 35 > docs/images/terminal.svg
