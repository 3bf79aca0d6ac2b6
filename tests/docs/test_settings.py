"""Settings that the pages name: each key exists, and what one cell of a table tells to set can be set together."""

import re
from functools import cache

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from tests.docs.pages import DOCS, README, SETTING, cells, page_name, without_blocks
from verl_memopt.config.aliases import PRESET
from verl_memopt.config.keys import flatten, leaf_types, section_keys
from verl_memopt.config.loader import compose_mapping, load_settings, settings_from_mapping
from verl_memopt.errors import ConfigError
from verl_memopt.memory.profiles import PROFILES

PAGES = [
    README,
    *(DOCS / f"{name}.md" for name in ("get_started", "out_of_memory", "recipes", "how_it_works", "metrics", "run_files")),
]
LEAST = ["data.train_files=a.parquet", "data.val_files=b.parquet", "actor_rollout_ref.model.path=m"]


def asked(text):
    """Return the settings with a value in a piece of a page; one whose value is left open is not among them."""
    return [token for token in SETTING.findall(text) if "=" in token and "..." not in token]


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_every_key_exists(page):
    known = leaf_types().keys() | section_keys() | {PRESET}
    for token in SETTING.findall(without_blocks(page)):
        key, _, value = token.partition("=")
        if key in ("memory", "debug"):
            assert key == "debug" or value in PROFILES, token
        else:
            assert key in known, token


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_every_setting_loads_and_so_do_those_of_one_cell_together(page):
    for piece in cells(page):
        overrides = asked(piece)
        for override in overrides:
            assert refusal(override, *NEEDED.get(override, ())) is None
        if len(overrides) > 1 and re.sub(SETTING, "", piece).strip() == "":
            assert refusal(*overrides) is None


@cache
def composed():
    """Return the keys of a recipe, which every setting is put on top of."""
    return flatten(compose_mapping("gsm8k_grpo", LEAST, "recipe/rloo")[0])


@cache
def refusal(*overrides):
    """Return why settings are refused; None where they load. Only presets have to be composed each time."""
    keys = [override.partition("=")[0] for override in overrides]
    try:
        if any("." not in key for key in keys):
            load_settings("gsm8k_grpo", [*LEAST, *overrides], "recipe/rloo")
        else:
            values = (OverridesParser.create().parse_override(override).value() for override in overrides)
            settings_from_mapping(composed() | dict(zip(keys, values, strict=True)))
    except ConfigError as error:
        return str(error)
    return None


AR = "actor_rollout_ref"
NEEDED = {
    "algorithm.adv_estimator=optimal_token_baseline": (f"{AR}.actor.calculate_sum_pi_squared=true",),
    "algorithm.adv_estimator=sft": (
        *(f"{AR}.actor.policy_loss.loss_mode=gpg", f"{AR}.actor.use_kl_loss=false", f"{AR}.rollout.n=1"),
    ),
    f"{AR}.rollout.n=1": ("algorithm.adv_estimator=reinforce_plus_plus",),
    f"{AR}.rollout.tensor_model_parallel_size=2": ("trainer.n_gpus_per_node=2",),
    f"{AR}.rollout.share_weights=true": (f"{AR}.actor.fsdp_config.split_master_weights=true",),
    f"{AR}.actor.optim.stochastic_rounding=true": (f"{AR}.actor.fsdp_config.model_dtype=bfloat16",),
    f"{AR}.model.quantization=nf4": (f"{AR}.model.lora_rank=16",),
    f"{AR}.model.load_mode=mmap": (f"{AR}.ref.fsdp_config.param_offload=true",),
    "reward_model.reward_manager=rlt": ("reward_model.enable=true", "reward_model.model.path=student"),
    "trainer.resume_mode=resume_path": ("trainer.resume_from_path=checkpoints/run/global_step_1",),
}
"""Setting -> others without which it is refused; the page names them beside it."""
