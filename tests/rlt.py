"""A tiny RLT run: the toy task with models that were warmed up for one step, and its settings."""

import dataclasses
import json

from recipe.rlt.make_toy import RltToyRecipe, make_rlt_toy
from tests.trainer.conftest import AR, LEAST
from verl_memopt.config.loader import settings_from_mapping
from verl_memopt.config.schema import Data
from verl_memopt.data.toy import Descent

MODEL, RLT = "reward_model.model", "reward_model.rlt"
BRIEF = Descent(steps=1, batch_size=2)


def brief_toy(folder, **recipe):
    """Return the folder of a toy task whose models have learned nothing."""
    recipe = dataclasses.replace(RltToyRecipe(num_validation=9, student=BRIEF, teacher=BRIEF), **recipe)
    return make_rlt_toy(folder, recipe=recipe)


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def data_of(**more):
    """Return the ``data`` section of a run. Files are given separately."""
    return Data(**{"train_files": None, "val_files": None, "seed": 0, "max_prompt_length": 4000, **more})


def values_of(toy, run_dir, more=None):
    """Return the keys of a run on the toy task with a student of its own."""
    own = {
        "data.train_files": str(toy / "train.parquet"),
        "data.val_files": str(toy / "val.parquet"),
        "data.max_prompt_length": 64,
        "data.max_response_length": 40,
        "data.train_batch_size": 2,
        "data.seed": 1,
        "algorithm.adv_estimator": "grpo",
        f"{AR}.model.path": str(toy / "teacher"),
        f"{AR}.actor.ppo_max_token_len_per_gpu": 256,
        f"{AR}.actor.use_kl_loss": True,
        f"{AR}.actor.kl_loss_coef": 0.04,
        f"{AR}.ref.fsdp_config.dtype": "fp32",
        f"{AR}.rollout.n": 3,
        f"{AR}.rollout.temperature": 0.7,
        "reward_model.enable": True,
        "reward_model.reward_manager": "rlt",
        f"{MODEL}.path": str(toy / "student"),
        f"{MODEL}.fsdp_config.dtype": "fp32",
        f"{RLT}.tag_format": "short",
        f"{RLT}.max_tokens_per_micro_batch": 256,
        "trainer.default_local_dir": str(run_dir),
    }
    return LEAST | own | (more or {})


def settings_of(toy, run_dir, more=None):
    """Return the settings of a run of :func:`values_of`."""
    return settings_from_mapping(values_of(toy, run_dir, more))


ALIAS = {f"{MODEL}.path": None}
"""The reference is the student."""
SWAP = {"reward_model.residency": "swap", f"{AR}.ref.fsdp_config.param_offload": True}
"""The student takes turns with the reference."""
