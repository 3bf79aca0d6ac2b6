import logging
import re

import pytest

from tests.config.conftest import LEAST
from tools.settings_page import spelled
from verl_memopt.config.keys import leaf_types, section_keys, shown
from verl_memopt.config.loader import settings_from_mapping
from verl_memopt.config.unused_keys import REFUSED, refusal_of
from verl_memopt.config.values import WHY_NOT

AR = "actor_rollout_ref"
ASKING = "something else"


def texts():
    """Every sentence with which a key or a value is refused or passed by, with the key it is about."""
    yield from ((key, refusal.reason) for key, refusal in REFUSED.items())
    yield from ((f"{key}={word}", reason) for (key, word), reason in WHY_NOT.items())


def instance(row):
    """A key that the row covers and no other row does."""
    return row.replace(".*", ".some_key")


@pytest.fixture(scope="module")
def plain():
    return settings_from_mapping(LEAST)


@pytest.mark.parametrize("row", REFUSED)
def test_inert_values_change_nothing_and_earn_one_warning_and_others_are_refused(settled, plain, complaint, caplog, row):
    inert = REFUSED[row].inert
    for value in (None, *((ASKING,) if inert is None else inert)):
        caplog.clear()
        assert settled({instance(row): value}) == plain
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert caplog.messages[0] == f"{instance(row)}={shown(value)} does nothing here: {REFUSED[row].reason}."
    if inert is not None:
        message = complaint({instance(row): ASKING})
        assert message.startswith(f"{instance(row)}={ASKING}: ")
        assert message.endswith(f": {REFUSED[row].reason}.")


def test_no_row_covers_a_key_that_has_an_effect():
    assert [key for key in (*leaf_types(), *section_keys()) if refusal_of(key)] == []


def test_a_refused_section_with_accepted_spellings_in_it_names_them():
    for row in (row for row in REFUSED if row.endswith(".*")):
        section = row.removesuffix("*")
        accepted = [spelling for spelling, key in spelled() if spelling.startswith(section) and refusal_of(key) is None]
        assert [name for name in accepted if name.removeprefix(section) not in REFUSED[row].reason] == []


def test_every_key_that_a_refusal_names_exists():
    name = re.compile(r"\b(?:actor_rollout_ref|algorithm|data|trainer|custom_reward_function|reward_model)(?:\.\w+)+")
    assert [key for key, text in texts() if not set(name.findall(text)) <= set(leaf_types())] == []


@pytest.mark.parametrize("spelling", [f"{AR}.model.lora.dropout", f"{AR}.model.lora_dropout"])
def test_a_rank_is_taken_and_dropout_refused_for_what_it_is(complaint, settled, spelling):
    message = complaint({f"{AR}.model.lora.rank": 8, spelling: 0.1})
    assert message.startswith(f"{spelling}=0.1: LoRA has no dropout here: old log-probs and update would use different masks")
    assert "available" not in message
    assert settled({f"{AR}.model.lora.rank": 8, spelling: 0.0}).actor_rollout_ref.model.lora_rank == 8


def test_a_whole_section_without_effect_may_be_empty(settled):
    assert settled({"actor_rollout_ref": {"rollout": {"engine_kwargs": {"sglang": {}}}}}) == settled({})


@pytest.mark.parametrize(("key", "value"), [("actor_rollout_ref.model.use_shm", 0), ("trainer.critic_warmup", False)])
def test_zero_is_not_false(complaint, key, value):
    assert key in complaint({key: value})


WAYS = {
    f"{AR}.model.use_remove_padding": False,
    f"{AR}.model.use_shm": True,
    f"{AR}.model.use_liger": True,
    f"{AR}.model.fused_kernel_options.impl_backend": "triton",
    f"{AR}.model.torch_dtype": "bfloat16",
    f"{AR}.actor.use_remove_padding": False,
    f"{AR}.actor.fsdp_config.use_orig_params": True,
    f"{AR}.actor.fsdp_config.wrap_policy.min_num_params": 1000,
    f"{AR}.actor.profiler.enable": True,
    f"{AR}.ref.fsdp_config.optimizer_offload": True,
    f"{AR}.rollout.layered_summon": True,
    f"{AR}.rollout.profiler.tool_config.torch.discrete": True,
    "data.filter_overlong_prompts_workers": 64,
    "data.dataloader_num_workers": 4,
    "data.use_shm": True,
    "global_profiler.tool": "nsys",
    "reward_model.use_reward_loop": False,
    "reward_model.launch_reward_fn_async": True,
}
"""Keys of verl's scripts that ask for another way to the same numbers."""


@pytest.mark.parametrize("key", WAYS)
def test_another_way_to_the_same_numbers_passes_with_one_notice(settled, plain, caplog, key):
    caplog.set_level(logging.INFO)
    assert settled({key: WAYS[key]}) == plain
    (notice,) = caplog.messages
    assert notice.startswith(f"{key}={shown(WAYS[key])} does nothing here: ")


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("actor_rollout_ref.actor.strategy", "megatron", "Set fsdp2."),
        ("actor_rollout_ref.rollout.name", "trtllm", "Set vllm or hf."),
        ("actor_rollout_ref.rollout.mode", "sync", "Set async."),
        ("actor_rollout_ref.actor.fsdp_config.dtype", "fp16", "loss scaling"),
    ],
)
def test_a_choice_of_verl_that_is_not_here_is_refused_with_the_ones_that_are(complaint, key, value, reason):
    message = complaint({key: value})
    assert message.startswith(f"{key}={value}: ")
    assert reason in message
