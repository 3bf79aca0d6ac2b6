#!/usr/bin/env bash
# LoRA on one 24 GB card: fp32 adapters of rank 32 on a frozen model in bfloat16, which trainer and engine share.
#   LORA_RANK=16 bash examples/memory_optimization/run_lora_24gb.sh model=llama3_2_3b
# Any setting can be overridden on the command line, or by a variable of train.sh. Without a GPU: the tiny model on the toy task.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

algorithm=${ALGORITHM:-rloo}
experiment=lora_24gb
memory=24g
hub_model=Qwen/Qwen3-4B
hub_lr=1e-5
KNOBS=(
    actor_rollout_ref.model.lora_rank="${LORA_RANK:-32}"
    actor_rollout_ref.model.lora_alpha="${LORA_ALPHA:-64}"
    # The engine computes in bfloat16, even if the recipe computes in fp32.
    actor_rollout_ref.rollout.max_logprob_diff=auto
)
. examples/memory_optimization/train.sh
