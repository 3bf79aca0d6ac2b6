#!/usr/bin/env bash
# Full-parameter updates of an 8B shape on one card: three steps with random weights under a device limit, measured beside foreseen.
# The weights are there once, for engine and trainer; moments are int8, masters exact, and gradients step in the backward.
# Writes <model>-<limit>.txt, .json and .jsonl (each phase when it ends) and machine.txt to OUT (default:
# docs/evidence/<date>-one-copy-<device>). The host needs about 34 GiB for 8B. Old log-probs, update and sync run; generation does not.
# MODELS (default: 8b) of 0.6b 1.7b 4b 8b 14b 32b, LIMITS (default: 24 32) in GiB, PROMPT, RESPONSE, GROUP (1024, 2048, 8).
# Without a GPU it runs on the CPU: make it small then, as SMALL=1 of all.sh does.
# Settings of every run go at the end of the command line. Exit code: 1 where a run did not fit or failed.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/machine.sh"

evidence one-copy
actor=actor_rollout_ref.actor fsdp=actor_rollout_ref.actor.fsdp_config
code=0
: > "$OUT/machine.txt"
for model in ${MODELS:-8b}; do
    for limit in ${LIMITS:-24 32}; do
        name=$model-${limit}gb
        command=(
            "$PYTHON" -m benchmarks.gpu_cost.one_copy --measure --model "$model" ${LAYERS:+--layers "$LAYERS"} ${SHRINK:+--shrink "$SHRINK"}
            --prompt "${PROMPT:-1024}" --response "${RESPONSE:-2048}" --group "${GROUP:-8}"
            --json "$OUT/$name.json" --keep "$OUT/$name.jsonl" memory=24g memory.device_limit_gb="$limit"
            $actor.optim.state_dtype=int8 $fsdp.mixed_precision.reduce_dtype=bfloat16 $fsdp.dtype=bfloat16
            $fsdp.param_offload=false $fsdp.grad_offload=false $fsdp.split_master_weights=true
            actor_rollout_ref.rollout.share_weights=true actor_rollout_ref.rollout.dtype=bfloat16 $actor.optim.in_backward=true
            actor_rollout_ref.model.activation_offload_device_gb=2.5 $actor.ppo_max_token_len_per_gpu=20480 "$@"
        )
        machine "$PYTHON" "${command[@]}" >> "$OUT/machine.txt"
        "${command[@]}" 2> >(tee "$OUT/$name.log" >&2) | tee "$OUT/$name.txt" || code=1
    done
done
exit $code
