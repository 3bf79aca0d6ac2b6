# Sourced by the run_*.sh beside it, which say toy_recipe, gsm8k_recipe and kl_key: picks model and data for the machine, passes
# variables and arguments on, and trains. No setting has a default here: what no variable sets, the recipe decides.
. examples/memory_optimization/allocator.sh

############################ user-adjustable ############################
PYTHON=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
DEVICE=${DEVICE:-auto}
for argument in "$@"; do
    case $argument in trainer.device=* | +trainer.device=* | ++trainer.device=*) DEVICE=${argument#*=} ;; esac
done
HUB_MODEL=Qwen/Qwen2.5-0.5B-Instruct
GSM8K=data/gsm8k/train.parquet
NNODES=${NNODES:-1}
NGPUS_PER_NODE=${NGPUS_PER_NODE:-1}
# Without MODEL_PATH the machine decides: the toy task on a CPU, and on a GPU that cannot get the model or its data.
choice=gsm8k
if [ -z "${MODEL_PATH:-}" ]; then
    lists_gpu=$(nvidia-smi -L 2>/dev/null | grep -q '^GPU ' && echo --nvidia-smi || true)
    choice=$("$PYTHON" -m verl_memopt.trainer.choice --device "$DEVICE" --model "$HUB_MODEL" --dataset openai/gsm8k \
        --train-file "$GSM8K" ${TRAIN_FILES:+--own-data} $lists_gpu)
fi
read -r task overrides <<<"$choice"
read -ra MACHINE <<<"$overrides"
if [ "$task" = toy ]; then
    recipe=$toy_recipe
    toy_dir=${TOY_DIR:-runs/toy_seed${SEED:-0}}
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
    "$PYTHON" -m verl_memopt toy "$toy_dir" --seed "${SEED:-0}"
    model_path=$toy_dir/model
    train_files=${TRAIN_FILES:-$toy_dir/train.parquet}
    val_files=${VAL_FILES:-$toy_dir/val.parquet}
else
    recipe=$gsm8k_recipe
    model_path=${MODEL_PATH:-$HUB_MODEL}
    train_files=${TRAIN_FILES:-$GSM8K}
    val_files=${VAL_FILES:-data/gsm8k/test.parquet}
    if [ ! -e "$train_files" ] && [ -z "${TRAIN_FILES:-}" ]; then
        "$PYTHON" recipe/rloo/prepare_gsm8k.py --hub openai/gsm8k --out data/gsm8k
    fi
fi
#########################################################################

DATA=(data.train_files="$train_files" data.val_files="$val_files")
MODEL=(actor_rollout_ref.model.path="$model_path")
TRAINER=(trainer.device="$DEVICE" trainer.nnodes="$NNODES" trainer.n_gpus_per_node="$NGPUS_PER_NODE")
# Each of these is passed on only when its variable is set; otherwise the recipe decides.
OPTIONAL=(
    ${SEED:+data.seed="$SEED" trainer.experiment_name="${recipe}_seed$SEED"}
    ${TRAIN_BATCH_SIZE:+data.train_batch_size="$TRAIN_BATCH_SIZE"}
    ${PPO_MINI_BATCH_SIZE:+actor_rollout_ref.actor.ppo_mini_batch_size="$PPO_MINI_BATCH_SIZE"}
    ${MAX_PROMPT_LENGTH:+data.max_prompt_length="$MAX_PROMPT_LENGTH"}
    ${MAX_RESPONSE_LENGTH:+data.max_response_length="$MAX_RESPONSE_LENGTH"}
    ${PPO_MAX_TOKEN_LEN_PER_GPU:+actor_rollout_ref.actor.ppo_max_token_len_per_gpu="$PPO_MAX_TOKEN_LEN_PER_GPU"}
    ${ACTOR_LR:+actor_rollout_ref.actor.optim.lr="$ACTOR_LR"}
    ${KL_COEF:+$kl_key="$KL_COEF"}
    ${ROLLOUT_N:+actor_rollout_ref.rollout.n="$ROLLOUT_N"}
    ${ROLLOUT_TP:+actor_rollout_ref.rollout.tensor_model_parallel_size="$ROLLOUT_TP"}
    ${ROLLOUT_GPU_MEM_UTIL:+actor_rollout_ref.rollout.gpu_memory_utilization="$ROLLOUT_GPU_MEM_UTIL"}
    ${TOTAL_EPOCHS:+trainer.total_epochs="$TOTAL_EPOCHS"}
    ${SAVE_FREQ:+trainer.save_freq="$SAVE_FREQ"}
    ${TEST_FREQ:+trainer.test_freq="$TEST_FREQ"}
    ${PROJECT_NAME:+trainer.project_name="$PROJECT_NAME"}
    ${EXPERIMENT_NAME:+trainer.experiment_name="$EXPERIMENT_NAME"}
)

"$PYTHON" -m verl_memopt.trainer.main_ppo --config-dir recipe/rloo --config-name "$recipe" \
    "${MACHINE[@]}" "${DATA[@]}" "${MODEL[@]}" "${TRAINER[@]}" "${OPTIONAL[@]}" "$@"
