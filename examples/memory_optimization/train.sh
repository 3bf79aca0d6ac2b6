# Sourced by the run_*.sh in this folder: picks model and data for the machine, passes variables and arguments on, and trains.
# A script sets these variables:
#   algorithm                     rloo, grpo, ppo or sft
#   experiment                    first part of the name of its runs; without it the recipe names them
#   memory                        memory profile, unless an argument names one; without it there is no profile
#   hub_model, hub_lr             model that a GPU trains without MODEL_PATH and model=, and its learning rate
#   nnodes, n_gpus_per_node, tp   devices of the real model; the tiny one takes at most two per node
#   KNOBS                         further settings, as key=value
# If neither a script nor a variable gives a setting, the recipe decides. Arguments take precedence over everything.
. examples/memory_optimization/allocator.sh

case $algorithm in
rloo) recipe_dir=recipe/rloo toy_recipe=toy gsm8k_recipe=gsm8k kl_key=algorithm.kl_ctrl.kl_coef ;;
grpo) recipe_dir=recipe/rloo toy_recipe=toy_grpo gsm8k_recipe=gsm8k_grpo kl_key=actor_rollout_ref.actor.kl_loss_coef ;;
ppo) recipe_dir=recipe/ppo toy_recipe=toy gsm8k_recipe=gsm8k kl_key=algorithm.kl_ctrl.kl_coef ;;
sft) recipe_dir=recipe/sft toy_recipe=toy gsm8k_recipe=gsm8k kl_key=actor_rollout_ref.actor.kl_loss_coef ;;
*) echo "ALGORITHM=$algorithm: unknown. Use rloo, grpo, ppo or sft." >&2 && exit 2 ;;
esac

############################ user-adjustable ############################
PYTHON=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
DEVICE=${DEVICE:-auto}
memory=${MEMORY:-${memory:-}}
preset=
declare -p KNOBS >/dev/null 2>&1 || KNOBS=()
for argument in "$@"; do
    case $argument in
    trainer.device=* | +trainer.device=* | ++trainer.device=*) DEVICE=${argument#*=} ;;
    memory=*) memory= ;;
    model=*) preset=${argument#*=} ;;
    esac
done
HUB_MODEL=${hub_model:-Qwen/Qwen2.5-0.5B-Instruct}
GSM8K=data/gsm8k/train.parquet
NNODES=${NNODES:-${nnodes:-1}}
# Without MODEL_PATH the machine decides: the toy task on a CPU, and on a GPU that cannot get the model or its data.
choice=gsm8k
if [ "$preset" = tiny ]; then
    choice=toy
elif [ -z "${MODEL_PATH:-}$preset" ]; then
    lists_gpu=$(nvidia-smi -L 2>/dev/null | grep '^GPU ' >/dev/null && echo --nvidia-smi || true)
    choice=$("$PYTHON" -m recipe.choose_model --device "$DEVICE" --model "$HUB_MODEL" --dataset openai/gsm8k \
        --train-file "$GSM8K" ${TRAIN_FILES:+--own-data} $lists_gpu)
fi
read -r task overrides <<<"$choice"
read -ra MACHINE <<<"$overrides"
at_most() { echo $(($1 < $2 ? $1 : $2)); }
if [ "$task" = toy ]; then
    recipe=$toy_recipe
    toy_dir=${TOY_DIR:-runs/toy_seed${SEED:-0}}
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
    "$PYTHON" -m verl_memopt toy "$toy_dir" --seed "${SEED:-0}"
    model_path=$toy_dir/model
    train_files=${TRAIN_FILES:-$toy_dir/train.parquet}
    val_files=${VAL_FILES:-$toy_dir/val.parquet}
    NGPUS_PER_NODE=${NGPUS_PER_NODE:-$(at_most 2 "${n_gpus_per_node:-1}")}
else
    recipe=$gsm8k_recipe
    model_path=${MODEL_PATH:-}
    [ -n "$model_path$preset" ] || model_path=$HUB_MODEL
    train_files=${TRAIN_FILES:-$GSM8K}
    val_files=${VAL_FILES:-data/gsm8k/test.parquet}
    NGPUS_PER_NODE=${NGPUS_PER_NODE:-${n_gpus_per_node:-1}}
    ACTOR_LR=${ACTOR_LR:-${hub_lr:-}}
    if [ ! -e "$train_files" ] && [ -z "${TRAIN_FILES:-}" ]; then
        "$PYTHON" recipe/rloo/prepare_gsm8k.py --hub openai/gsm8k --out data/gsm8k
    fi
fi
ROLLOUT_TP=${ROLLOUT_TP:-${tp:+$(at_most "$NGPUS_PER_NODE" "$tp")}}
#########################################################################

DATA=(data.train_files="$train_files" data.val_files="$val_files")
MODEL=(${model_path:+actor_rollout_ref.model.path="$model_path"})
TRAINER=(
    trainer.device="$DEVICE" trainer.nnodes="$NNODES" trainer.n_gpus_per_node="$NGPUS_PER_NODE"
    ${experiment:+trainer.experiment_name="${experiment}_${algorithm}_$task"}
)
# Each of these is passed on only when its variable is set; otherwise the recipe decides.
OPTIONAL=(
    ${SEED:+data.seed="$SEED" trainer.experiment_name="${experiment:-$recipe}${experiment:+_${algorithm}_$task}_seed$SEED"}
    ${TRAIN_BATCH_SIZE:+data.train_batch_size="$TRAIN_BATCH_SIZE"}
    ${PPO_MINI_BATCH_SIZE:+actor_rollout_ref.actor.ppo_mini_batch_size="$PPO_MINI_BATCH_SIZE"}
    ${MAX_PROMPT_LENGTH:+data.max_prompt_length="$MAX_PROMPT_LENGTH"}
    ${MAX_RESPONSE_LENGTH:+data.max_response_length="$MAX_RESPONSE_LENGTH"}
    ${PPO_MAX_TOKEN_LEN_PER_GPU:+actor_rollout_ref.actor.ppo_max_token_len_per_gpu="$PPO_MAX_TOKEN_LEN_PER_GPU"}
    ${ACTOR_LR:+actor_rollout_ref.actor.optim.lr="$ACTOR_LR"}
    ${CRITIC_LR:+critic.optim.lr="$CRITIC_LR"}
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

"$PYTHON" -m verl_memopt.trainer.main_ppo --config-dir "$recipe_dir" --config-name "$recipe" ${memory:+memory="$memory"} \
    "${MACHINE[@]}" "${DATA[@]}" "${MODEL[@]}" "${TRAINER[@]}" "${KNOBS[@]}" "${OPTIONAL[@]}" "$@"
