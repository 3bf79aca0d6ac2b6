import dataclasses

import pytest

from tools.reads import record_reads
from verl_memopt.config.loader import to_plain
from verl_memopt.config.schema import Actor, ActorRolloutRef, Fsdp, Ref, Settings


def test_a_leaf_read_is_recorded_under_its_dotted_key(settled):
    settings = settled({})
    with record_reads(settings) as seen:
        assert settings.data.seed is None
        assert settings.actor_rollout_ref.actor.optim.lr == 1e-6
    assert seen == {"data.seed", "actor_rollout_ref.actor.optim.lr"}


def test_equal_sections_are_told_apart(settled):
    settings = settled({})
    roles = settings.actor_rollout_ref
    actor, ref = roles.actor.fsdp_config.mixed_precision, roles.ref.fsdp_config.mixed_precision
    assert actor == ref
    with record_reads(settings) as seen:
        assert ref.reduce_dtype == "fp32"
    assert seen == {"actor_rollout_ref.ref.fsdp_config.mixed_precision.reduce_dtype"}


def test_one_section_under_two_keys_is_an_error():
    shared = Fsdp()
    settings = Settings(actor_rollout_ref=ActorRolloutRef(actor=Actor(fsdp_config=shared), ref=Ref(fsdp_config=shared)))
    with pytest.raises(AssertionError, match="two keys"), record_reads(settings):
        pass


def test_printing_comparing_copying_and_saving_are_no_reads(settled):
    settings = settled({})
    with record_reads(settings) as seen:
        assert repr(settings) == repr(settled({}))
        assert settings == settled({})
        assert to_plain(settings) == to_plain(settled({}))
        assert dataclasses.replace(settings.data, seed=3).seed == 3
    assert seen == set()


def test_reads_of_other_settings_and_reads_afterwards_are_not_recorded(settled):
    settings, others = settled({}), settled({})
    with record_reads(settings) as seen:
        assert others.data.seed is None
    assert settings.data.shuffle is True
    assert seen == set()
    assert "__getattribute__" not in vars(type(settings.data))


def test_the_schema_is_usable_again_after_an_exception(settled):
    settings = settled({})
    with pytest.raises(ValueError), record_reads(settings):
        raise ValueError
    assert "__getattribute__" not in vars(Settings)
