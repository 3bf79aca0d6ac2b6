#!/usr/bin/env bash
# PPO with the seven memory features that the README in this folder explains. Set each by its variable below, or by its key:
#   MODEL_PATH=Qwen/Qwen2.5-1.5B-Instruct ./run_memory_optimized_ppo.sh trainer.n_gpus_per_node=4
# Any setting can be overridden on the command line, or by a variable of train.sh. Without a GPU: the tiny model on the toy task.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

algorithm=ppo
experiment=memory_optimized
hub_model=Qwen/Qwen2.5-0.5B-Instruct

############################ user-adjustable ############################
gradient_checkpointing=${GRADIENT_CHECKPOINTING:-true}
activation_offload=${ACTIVATION_OFFLOAD:-true}
param_offload=${PARAM_OFFLOAD:-true}
optimizer_offload=${OPTIMIZER_OFFLOAD:-true}
token_budget=${PPO_MAX_TOKEN_LEN_PER_GPU:-8192}
logprob_chunk_tokens=${LOGPROB_CHUNK_TOKENS:-256}
gpu_mem_util=${ROLLOUT_GPU_MEM_UTIL:-0.5}
free_cache_engine=${FREE_CACHE_ENGINE:-null} # null = on a GPU
#########################################################################

KNOBS=(
    # 1 gradient checkpointing
    {actor_rollout_ref,critic}.model.enable_gradient_checkpointing="$gradient_checkpointing"
    # 2 activation offload
    {actor_rollout_ref,critic}.model.enable_activation_offload="$activation_offload"
    # 3 parameters rest on the host
    {actor_rollout_ref.actor,actor_rollout_ref.ref,critic.model}.fsdp_config.param_offload="$param_offload"
    # 4 the optimizer's state rests on the host
    {actor_rollout_ref.actor,critic.model}.fsdp_config.optimizer_offload="$optimizer_offload"
    # 5 micro-batches by tokens
    actor_rollout_ref.actor.use_dynamic_bsz=true
    {actor_rollout_ref.actor,critic}.ppo_max_token_len_per_gpu="$token_budget"
    actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=$((2 * token_budget))
    # 6 log-probs in chunks of tokens (rows are always packed without pad tokens)
    actor_rollout_ref.model.logprob_chunk_tokens="$logprob_chunk_tokens"
    # 7 the engine's share of the card, and whether the engine frees it while the trainer computes
    actor_rollout_ref.rollout.gpu_memory_utilization="$gpu_mem_util"
    actor_rollout_ref.rollout.free_cache_engine="$free_cache_engine"
)
. examples/memory_optimization/train.sh
