"""Every model preset, memory profile and debug mode composes with the RLT recipes.

Hydra composes a recipe once. Presets hold nothing but keys, which come after the recipe's, so their keys are laid over it here. A
sample of combinations shows that this is what Hydra makes of the command line.
"""

import logging
from functools import cache
from itertools import product

import pytest
import yaml

from verl_memopt.config.keys import flatten, value_at
from verl_memopt.config.loader import PACKAGED, compose_mapping, load_settings, settings_from_mapping
from verl_memopt.config.names import KeySources
from verl_memopt.memory.profiles import PROFILES

RECIPE = "recipe/rlt/config"
RECIPES = ("teacher_rlt_mono", "teacher_rlt_multi", "teacher_rlt_toy")
MODELS = sorted(path.stem for path in (PACKAGED / "model").glob("*.yaml"))
MEMORY = ("none", *PROFILES)
DEBUG = sorted(path.stem for path in (PACKAGED / "debug").glob("*.yaml"))
MORE = {
    "score_only": {"actor_rollout_ref.rollout.skip_dump_dir": "rollouts"},
    "train_only": {"actor_rollout_ref.rollout.skip_dump_dir": "rollouts"},
}
"""Debug mode -> what it needs besides."""
TEACHER, STUDENT = "actor_rollout_ref.model.path", "reward_model.model.path"
BUDGET = "actor_rollout_ref.actor.ppo_max_token_len_per_gpu"
REFERENCE = "actor_rollout_ref.ref.fsdp_config.param_offload"
OFFLOADED, SHARED = (f"actor_rollout_ref.actor.fsdp_config.{key}" for key in ("param_offload", "grad_offload"))


@cache
def recipe_keys(recipe):
    """Return the keys of a recipe, composed."""
    return flatten(compose_mapping(recipe, [], RECIPE)[0])


@cache
def preset_keys(group, name):
    return flatten(yaml.safe_load((PACKAGED / group / f"{name}.yaml").read_text()) or {})


def composed(recipe, model, memory, debug):
    """Return the settings of a recipe with a model, a profile and a debug mode."""
    presets = preset_keys("memory", memory) | preset_keys("model", model)
    recipe = dict(recipe_keys(recipe))
    if recipe[STUDENT] == recipe[TEACHER]:  # it follows the teacher's
        recipe[STUDENT] = presets[TEACHER]
    tree = recipe | presets | {"debug.mode": preset_keys("debug", debug)["mode"]} | MORE.get(debug, {})
    return settings_from_mapping(tree, presets.keys(), KeySources(frozenset()))


def of_hydra(recipe, model, memory, debug):
    more = [f"{key}={value}" for key, value in MORE.get(debug, {}).items()]
    return load_settings(recipe, [f"model={model}", f"memory={memory}", f"debug={debug}", *more], RECIPE)


@pytest.mark.parametrize("profiles_of_a_model", [1, pytest.param(len(MEMORY), marks=pytest.mark.slow)])
@pytest.mark.parametrize("debug", DEBUG)
def test_every_model_and_profile_composes_with_the_debug_mode(debug, profiles_of_a_model) -> None:
    logging.disable(logging.WARNING)
    try:
        for (place, model), further in product(enumerate(MODELS, DEBUG.index(debug)), range(profiles_of_a_model)):
            memory = MEMORY[(place + further) % len(MEMORY)]
            settings = composed("teacher_rlt_mono", model, memory, debug)
            assert settings.debug.mode == preset_keys("debug", debug)["mode"]
            assert settings.actor_rollout_ref.model.path == preset_keys("model", model)["actor_rollout_ref.model.path"]
            assert settings.reward_model.recipe
            kept = {key: value for key, value in preset_keys("memory", memory).items() if "max_token_len" not in key}
            if value_at(settings, SHARED):  # one copy of the weights in place of weights that leave
                kept |= {OFFLOADED: False} if OFFLOADED in kept else {}
            if value_at(settings, REFERENCE) == "stream":  # a reference that streams in place of one that moves
                kept |= {REFERENCE: "stream"} if REFERENCE in kept else {}
            assert {key: value_at(settings, key) for key in kept} == kept
            longest = settings.data.max_prompt_length + settings.data.max_response_length
            assert value_at(settings, BUDGET) >= longest
    finally:
        logging.disable(logging.NOTSET)


SAMPLE = list(zip(MODELS, MEMORY, DEBUG, strict=False))[::3]


@pytest.mark.parametrize(("model", "memory", "debug"), SAMPLE)
def test_hydra_composes_the_same(model, memory, debug) -> None:
    assert composed("teacher_rlt_mono", model, memory, debug) == of_hydra("teacher_rlt_mono", model, memory, debug)


def test_the_recipe_for_one_gpu_has_the_published_values() -> None:
    settings = load_settings("teacher_rlt_mono", [], RECIPE)
    roles, rollout = settings.actor_rollout_ref, settings.actor_rollout_ref.rollout
    assert settings.data.train_batch_size * rollout.n == 32
    assert (rollout.n, settings.data.max_response_length, rollout.gpu_memory_utilization) == (8, 4096, 0.7)
    assert rollout.enable_prefix_caching
    assert roles.ref.fsdp_config.param_offload
    assert settings.reward_model.model.fsdp_config.param_offload
    assert (roles.actor.kl_loss_coef, rollout.temperature, roles.actor.optim.lr) == (0.04, 0.7, 1e-6)
    assert (roles.ref.sync_every_steps, roles.ref.sync_mixup_alpha) == (32, 0.9)
    assert settings.trainer.n_gpus_per_node == 1


def test_the_student_is_the_teachers_start_unless_another_is_named() -> None:
    students = [
        load_settings("teacher_rlt_mono", more, RECIPE).reward_model.model.path
        for more in (
            ["model=llama3_2_1b"],
            ["model_name_or_path=/m/teacher"],
            ["student_model=/m/student"],
            ["student_model=null"],
        )
    ]
    assert students == ["meta-llama/Llama-3.2-1B-Instruct", "Qwen/Qwen2.5-1.5B-Instruct", "/m/student", None]
