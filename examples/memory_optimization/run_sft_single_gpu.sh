#!/usr/bin/env bash
# Supervised fine-tuning on one GPU, before RL. Without MODEL_PATH, and without a GPU or the hub: the tiny model on the toy task.
# The last line names the folder of the model; RL starts from it:
#   MODEL_PATH=checkpoints/verl_memopt/sft_gsm8k/global_step_232/actor/huggingface bash examples/memory_optimization/run_grpo.sh
# Any setting can be overridden on the command line, for example:
#   bash examples/memory_optimization/run_sft_single_gpu.sh memory=24g actor_rollout_ref.model.lora_rank=32 data.response_key=answer
# or by a variable: MODEL_PATH, TRAIN_FILES, VAL_FILES, ACTOR_LR, NGPUS_PER_NODE, ... (all of them in train.sh).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

algorithm=sft
. examples/memory_optimization/train.sh
