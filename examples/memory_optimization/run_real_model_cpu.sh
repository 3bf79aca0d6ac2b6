#!/usr/bin/env bash
# GRPO with a real instruct model on a CPU: SmolLM2-135M-Instruct learns to calculate. The model comes from the package index, once.
# Any setting can be overridden on the command line, for example:
#   bash examples/memory_optimization/run_real_model_cpu.sh actor_rollout_ref.rollout.n=16 trainer.total_training_steps=20
# Variables: SEED, MODEL_PATH (another instruct model), MODEL_DIR and DATA_DIR (where model and data are made), OMP_NUM_THREADS.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

PYTHON=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
threads=$(nproc)
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((threads < 8 ? threads : 8))}
model_path=${MODEL_PATH:-${MODEL_DIR:-runs/smollm2_135m}}
data_dir=${DATA_DIR:-runs/arithmetic_seed${SEED:-0}}
[ -n "${MODEL_PATH:-}" ] || "$PYTHON" -m recipe.real_model.make_model "$model_path"
"$PYTHON" -m recipe.real_model.prepare_arithmetic "$data_dir" --seed "${SEED:-0}"

"$PYTHON" -m verl_memopt.trainer.main_ppo --config-dir recipe/real_model --config-name arithmetic \
    data.train_files="$data_dir/train.parquet" data.val_files="$data_dir/val.parquet" actor_rollout_ref.model.path="$model_path" \
    trainer.device=cpu ${SEED:+data.seed="$SEED" trainer.experiment_name="real_model_seed$SEED"} "$@"
