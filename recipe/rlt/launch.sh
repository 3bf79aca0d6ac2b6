# Sourced by launch_mono.sh and launch_multi.sh. Checks the machine, chooses models and data, and becomes the training process.
#   default_config   the config that runs if no argument names one
#   devices          number of GPUs of the run; if it is 1, the run sees only one GPU
# Variables: MODEL_PATH, STUDENT_PATH, TRAIN_FILES, VAL_FILES, TOY_DIR, SEED, DEVICE, PYTHON. Arguments have priority over them.
. examples/memory_optimization/allocator.sh

PYTHON=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
DEVICE=${DEVICE:-auto}
configs=recipe/rlt/config
refuse() { echo "${0##*/}: $*" >&2 && exit 2; }

# The first argument may name a config: teacher_rlt_mono, or a path to a YAML file.
config=$default_config
if [ $# -gt 0 ] && [[ $1 != *=* && $1 != -* ]]; then
    config=${1%.yaml}
    shift
fi
case $config in
*/*) config_dir=${config%/*} config=${config##*/} ;;
*) config_dir=$configs ;;
esac
# In the published command, the name of the config contains a folder that does not exist here.
[ "$config_dir" != cfgs/run_cfg ] || [ -e "$config_dir/$config.yaml" ] || config_dir=$configs
[ -f "$config_dir/$config.yaml" ] || refuse "$config: there is no $config_dir/$config.yaml. Use one of $(cd "$configs" && echo *.yaml)."

names_model= names_student= names_data= sleeps=true
for argument in "$@"; do
    case ${argument#++} in
    model=tiny) refuse "model=tiny: the toy task of RLT has two tiny models of its own. Use the config teacher_rlt_toy." ;;
    model=* | model_name_or_path=* | actor_rollout_ref.model.path=*) names_model=yes ;;
    student_model=* | reward_model.model.path=*) names_student=yes ;;
    data.train_files=*) names_data=yes ;;
    trainer.device=*) DEVICE=${argument#*=} ;;
    actor_rollout_ref.rollout.free_cache_engine=[fF]alse | vllm_sleep_level=0) sleeps= ;;
    esac
done

# vLLM's sleep does not work with expandable segments of memory.
if [ -n "$sleeps" ] && [[ "${PYTORCH_ALLOC_CONF:-}${PYTORCH_CUDA_ALLOC_CONF:-}" =~ expandable_segments:[Tt]rue ]]; then
    refuse "expandable_segments:True and an engine that sleeps exclude each other. Unset PYTORCH_ALLOC_CONF and" \
        "PYTORCH_CUDA_ALLOC_CONF, or set actor_rollout_ref.rollout.free_cache_engine=false."
fi

# A run on one GPU sees only the first of the visible GPUs, so that it cannot use another one.
lists_gpu=$(nvidia-smi -L 2>/dev/null | grep '^GPU ' >/dev/null && echo --nvidia-smi || true)
if [ "$devices" = 1 ] && { [ -n "$lists_gpu" ] || [ -n "${CUDA_VISIBLE_DEVICES:-}" ]; }; then
    export CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES-0}
    export CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES%%,*}
fi

machine=
task=rlt
if [ "$config" = teacher_rlt_toy ]; then
    task=toy
elif [ -z "${MODEL_PATH:-}$names_model" ] && [ "$config_dir" = "$configs" ]; then
    hub_model=$(sed -n 's|^    path: \([^ ]*/[^ ]*\).*|\1|p' "$config_dir/$config.yaml" | head -n 1)
    choice=$("$PYTHON" -m recipe.choose_model --device "$DEVICE" --model "$hub_model" \
        --dataset bespokelabs/Bespoke-Stratos-17k --train-file "${TRAIN_FILES:-data/rlt/train.parquet}" \
        ${names_data:+--own-data} ${TRAIN_FILES:+--own-data} $lists_gpu)
    read -r chosen machine <<<"$choice"
    [ "$chosen" = toy ] && task=toy
fi
if [ "$task" = toy ]; then
    config=teacher_rlt_toy config_dir=$configs devices=1
    toy_dir=${TOY_DIR:-runs/rlt_toy_seed${SEED:-0}}
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
    "$PYTHON" recipe/rlt/make_toy.py "$toy_dir" --seed "${SEED:-0}"
    MODEL_PATH=${MODEL_PATH:-$toy_dir/teacher} STUDENT_PATH=${STUDENT_PATH:-$toy_dir/student}
    TRAIN_FILES=${TRAIN_FILES:-$toy_dir/train.parquet} VAL_FILES=${VAL_FILES:-$toy_dir/val.parquet}
elif [ -z "${TRAIN_FILES:-}$names_data" ] && [ "$config_dir" = "$configs" ] && [ ! -e data/rlt/train.parquet ]; then
    "$PYTHON" recipe/rlt/prepare_rlt.py --hub bespokelabs/Bespoke-Stratos-17k --out data/rlt
fi
read -ra MACHINE <<<"$machine"

exec "$PYTHON" -m verl_memopt.trainer.main_ppo --config-dir "$config_dir" --config-name "$config" "${MACHINE[@]}" \
    trainer.device="$DEVICE" trainer.n_gpus_per_node="$devices" \
    ${SEED:+data.seed="$SEED"} \
    ${TRAIN_FILES:+data.train_files="$TRAIN_FILES"} ${VAL_FILES:+data.val_files="$VAL_FILES"} \
    ${MODEL_PATH:+actor_rollout_ref.model.path="$MODEL_PATH"} ${STUDENT_PATH:+reward_model.model.path="$STUDENT_PATH"} "$@"
