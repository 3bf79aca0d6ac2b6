#!/usr/bin/env bash
# RLOO on one GPU. Without MODEL_PATH, and without a GPU or the hub: the tiny model on the toy task.
# Any setting can be overridden on the command line, for example:
#   bash examples/memory_optimization/run_rloo_single_gpu.sh actor_rollout_ref.rollout.n=16 trainer.total_training_steps=20
# or by a variable: MODEL_PATH, TRAIN_FILES, VAL_FILES, ROLLOUT_N, ACTOR_LR, NGPUS_PER_NODE, ... (all of them in train.sh).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

algorithm=rloo
. examples/memory_optimization/train.sh
