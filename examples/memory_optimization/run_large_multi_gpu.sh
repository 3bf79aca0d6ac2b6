#!/usr/bin/env bash
# One machine with several cards, and a model that no single card holds. The training state is sharded over all cards, and each group of
# four cards shares one engine.
#   NGPUS_PER_NODE=4 bash examples/memory_optimization/run_large_multi_gpu.sh model=qwen3_8b
# Any setting can be overridden on the command line, or by a variable of train.sh. Without a GPU: the tiny model on the toy task.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

algorithm=${ALGORITHM:-grpo}
experiment=large_multi_gpu
memory=large_multi_gpu
n_gpus_per_node=8
tp=4
hub_model=Qwen/Qwen2.5-7B-Instruct
. examples/memory_optimization/train.sh
