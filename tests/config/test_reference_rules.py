import logging

import pytest

from verl_memopt.config.unused_keys import ALPHA, EVERY
from verl_memopt.errors import ConfigError

AR = "actor_rollout_ref"
FOLLOWS = {f"{AR}.actor.use_kl_loss": True, EVERY: 32}


def test_a_reference_that_follows_the_policy_is_taken(settled):
    ref = settled(FOLLOWS).actor_rollout_ref.ref
    assert (ref.sync_every_steps, ref.sync_mixup_alpha) == (32, 0.9)


@pytest.mark.parametrize(
    ("more", "why", "way_out"),
    [
        ({f"{AR}.model.lora_rank": 4}, "with LoRA the reference is the policy's own base", f"Set {AR}.model.lora_rank=0"),
        ({f"{AR}.ref.quantization": "int8"}, "a quantised reference cannot take a small move", f"Set {AR}.ref.quantization=none"),
        (
            {f"{AR}.model.load_mode": "mmap", f"{AR}.ref.fsdp_config.param_offload": True},
            "a mapped file cannot be written to",
            f"Set {AR}.model.load_mode=stream",
        ),
        (
            {f"{AR}.ref.fsdp_config.fsdp_size": 1, "trainer.n_gpus_per_node": 2},
            "the shards of the reference are not those of the policy",
            f"Set {AR}.ref.fsdp_config.fsdp_size to {AR}.actor.fsdp_config.fsdp_size",
        ),
    ],
)
def test_a_reference_that_cannot_follow_is_refused_with_the_way_out(settled, more, why, way_out):
    with pytest.raises(ConfigError) as refused:
        settled(FOLLOWS | more)
    assert f"{EVERY}=32" in str(refused.value)
    assert why in str(refused.value)
    assert way_out in str(refused.value)
    settled(FOLLOWS | more | {EVERY: None})


def test_one_device_has_no_shards_that_could_differ(settled):
    reference = settled(FOLLOWS | {f"{AR}.ref.fsdp_config.fsdp_size": 1}).actor_rollout_ref.ref
    assert (reference.fsdp_config.fsdp_size, reference.sync_every_steps) == (1, FOLLOWS[EVERY])


@pytest.mark.parametrize(("more", "key"), [({EVERY: 32}, EVERY), ({f"{AR}.actor.use_kl_loss": True, ALPHA: 0.5}, ALPHA)])
def test_a_key_without_effect_is_named(settled, caplog, more, key):
    with caplog.at_level(logging.WARNING):
        settled(more)
    assert f"{key}=" in caplog.text
    assert "has no effect here" in caplog.text
