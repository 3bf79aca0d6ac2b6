#!/usr/bin/env bash
# One card that is too small for the training state beside the engine: parts that a phase does not need move to the host. Name your card's
# profile:
#   bash examples/memory_optimization/run_single_gpu_constrained.sh memory=16g model=llama3_2_1b
# Any setting can be overridden on the command line, or by a variable of train.sh. Without a GPU: the tiny model on the toy task.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

algorithm=${ALGORITHM:-rloo}
experiment=constrained
memory=constrained
hub_model=Qwen/Qwen2.5-0.5B-Instruct
. examples/memory_optimization/train.sh
