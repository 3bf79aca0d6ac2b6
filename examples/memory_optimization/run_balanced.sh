#!/usr/bin/env bash
# One card (48 to 80 GB) that holds the training state while the engine sleeps: little moves to the host, so steps are fast.
#   bash examples/memory_optimization/run_balanced.sh model=qwen3_1_7b
# Any setting can be overridden on the command line, or by a variable of train.sh. Without a GPU: the tiny model on the toy task.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

algorithm=${ALGORITHM:-rloo}
experiment=balanced
memory=balanced
hub_model=Qwen/Qwen2.5-1.5B-Instruct
. examples/memory_optimization/train.sh
