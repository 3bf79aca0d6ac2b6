#!/usr/bin/env bash
# Several machines with several cards each. Run it once, on the first machine; it starts Ray on all of them and stops it at the end.
#   sbatch --nodes=2 --gpus-per-node=8 examples/memory_optimization/run_multi_node.sh    # the nodes of the Slurm job
#   NODES="host1 host2" bash examples/memory_optimization/run_multi_node.sh              # by ssh; the first is this machine
#   RAY_ADDRESS=host1:6379 NNODES=2 bash examples/memory_optimization/run_multi_node.sh  # Ray runs already
# All machines have this folder at the same path, and the model: a hub id, or a folder that all of them see.
# Any setting can be overridden on the command line, or by a variable of train.sh. Without a GPU: the tiny model on the toy task.
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:-$(dirname "${BASH_SOURCE[0]}")/../..}"

algorithm=${ALGORITHM:-grpo}
experiment=multi_node
memory=large_multi_gpu
n_gpus_per_node=8
tp=4
hub_model=Qwen/Qwen2.5-7B-Instruct
nnodes=2

############################ user-adjustable ############################
RAY_PORT=${RAY_PORT:-6379}
RAY_WAIT_SECONDS=${RAY_WAIT_SECONDS:-300}
PYTHON=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
RAY=${RAY:-$([ -x .venv/bin/ray ] && echo "$PWD/.venv/bin/ray" || echo ray)}
#########################################################################

if [ -z "${RAY_ADDRESS:-}" ]; then
    . examples/memory_optimization/ray_nodes.sh
fi
KNOBS=(ray_kwargs.ray_init.address="$RAY_ADDRESS")
. examples/memory_optimization/train.sh
