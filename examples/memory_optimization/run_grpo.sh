#!/usr/bin/env bash
# GRPO on one GPU, or several with NGPUS_PER_NODE. Without MODEL_PATH, and without a GPU or the hub: the tiny model on the toy task.
# Any setting can be overridden on the command line, for example:
#   bash examples/memory_optimization/run_grpo.sh actor_rollout_ref.rollout.n=16 trainer.total_training_steps=20
# or by a variable: MODEL_PATH, TRAIN_FILES, VAL_FILES, ROLLOUT_N, ACTOR_LR, NGPUS_PER_NODE, ... (all of them in train.sh).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

algorithm=grpo
. examples/memory_optimization/train.sh
