#!/usr/bin/env bash
# RLOO on one RTX 5090 (32 GB), every weight trained.
# <cards> written by python -m tools.cards
# The largest preset that fits with its profile alone, by `verl-memopt fit`: model=qwen3_5_9b.
# </cards>
#   bash examples/memory_optimization/run_rtx5090_rloo.sh model=qwen2_5_3b data.max_response_length=2048
# Any setting can be overridden on the command line, or by a variable of train.sh. Without a GPU: the tiny model on the toy task.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

algorithm=rloo
experiment=rtx5090
memory=32g
hub_model=Qwen/Qwen2.5-1.5B-Instruct
. examples/memory_optimization/train.sh
