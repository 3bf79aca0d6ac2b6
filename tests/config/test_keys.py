import dataclasses

import pytest

from tools.reads import record_reads
from verl_memopt.config.keys import (
    Problem,
    field_types,
    flatten,
    leaf_types,
    leaf_values,
    problem,
    raise_together,
    replaced,
    section_keys,
    shown,
    value_at,
    walk,
)
from verl_memopt.config.loader import to_plain
from verl_memopt.config.schema import Actor, ActorRolloutRef, Data, Fsdp, Ref, Settings
from verl_memopt.config.values_of_python import as_override
from verl_memopt.errors import ConfigError
from verl_memopt.observe.secrets import argument_without_secrets, without_secrets

AR = "actor_rollout_ref"


def test_a_section_comes_before_its_own_keys():
    keys = [key for key, _ in walk()]
    assert (
        keys.index("data") < keys.index("data.train_files") < keys.index("data.custom_cls") < keys.index("data.custom_cls.path")
    )
    assert len(keys) == len(set(keys))


def test_a_key_holds_a_value_or_further_keys_and_never_both():
    assert not set(leaf_types()) & section_keys()
    assert set(leaf_types()) | section_keys() == {key for key, _ in walk()}
    assert f"{AR}.actor.optim" in section_keys()
    assert f"{AR}.actor.optim.lr" in leaf_types()


def test_types_are_resolved_and_a_value_is_found_under_its_key():
    assert leaf_types()["data.shuffle"] is bool
    assert leaf_types()["data.seed"] == int | None
    assert field_types(Settings)["data"] is Data
    assert value_at(Settings(), "data.max_prompt_length") == 512
    with pytest.raises(AttributeError):
        value_at(Settings(), "data.max_promt_length")


def test_the_values_of_all_keys_build_equal_settings():
    values = leaf_values(Settings()) | {"data.seed": 3}
    assert list(values) == list(leaf_types())
    assert leaf_values(replaced(Settings(), values)) == values


def test_replacing_changes_the_given_keys_and_no_other():
    before = Settings()
    after = replaced(before, {"data.seed": 3, f"{AR}.actor.optim.lr": 0.5, f"{AR}.actor.optim.clip_grad": 2.0})
    changed = {key for key in leaf_types() if value_at(before, key) != value_at(after, key)}
    assert changed == {"data.seed", f"{AR}.actor.optim.lr", f"{AR}.actor.optim.clip_grad"}
    assert value_at(after, f"{AR}.actor.optim.lr") == 0.5
    assert before == Settings()
    assert dataclasses.is_dataclass(after)


def test_a_nested_mapping_becomes_dotted_keys():
    spelled = {"override": f"{AR}.model.override_config"}
    for tree, expected in (
        ({"data": {"seed": 1, "sampler": {"path": "a.py"}}, "trainer": {}}, {"data.seed": 1, "data.sampler.path": "a.py"}),
        # A mapping that is a value stays whole, also under another spelling.
        ({AR: {"model": {"override_config": {"a": {"b": 1}}}}}, {f"{AR}.model.override_config": {"a": {"b": 1}}}),
        ({"ray_kwargs": {"ray_init": {}}}, {"ray_kwargs.ray_init": {}}),
        ({"override": {"a": 1}}, {"override": {"a": 1}}),
        # What no section has is kept to be complained of.
        ({"dat": {"seed": 1}, "empty": {}}, {"dat.seed": 1, "empty": {}}),
    ):
        assert flatten(tree, lambda key: spelled.get(key, key)) == expected


def test_a_problem_opens_with_every_key_and_its_value_and_ends_with_the_way_out():
    found = problem({"a.b": 1, "c": None}, "they clash", "Remove c.")
    assert found == Problem(("a.b", "c"), "a.b=1, c=null: they clash. Remove c.")


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "null"), (True, "true"), (0.5, "0.5"), ("cpu", "cpu"), ("", "''"), (" ", "' '"), (["a", None, [1]], "[a,null,[1]]")],
)
def test_a_value_is_shown_as_it_would_be_written(value, text):
    assert shown(value) == text


def test_one_problem_is_its_own_message_and_several_are_told_together_and_each_once():
    one, *others = Problem(("a",), "a: wrong."), Problem(("b",), "b: wrong."), Problem(("a", "c"), "a: wrong.")
    for problems, text in (([one], "a: wrong."), ([one, *others], "2 problems in the settings:\na: wrong.\nb: wrong.")):
        with pytest.raises(ConfigError) as caught:
            raise_together(problems)
        assert str(caught.value) == text


def test_a_leaf_read_is_recorded_under_its_dotted_key_and_equal_sections_are_told_apart(settled):
    settings = settled({})
    roles = settings.actor_rollout_ref
    actor, ref = roles.actor.fsdp_config.mixed_precision, roles.ref.fsdp_config.mixed_precision
    assert actor == ref
    with record_reads(settings) as seen:
        assert settings.data.seed is None
        assert ref.reduce_dtype == "fp32"
    assert seen == {"data.seed", f"{AR}.ref.fsdp_config.mixed_precision.reduce_dtype"}


def test_printing_comparing_copying_saving_and_reads_of_other_settings_or_afterwards_are_not_recorded(settled):
    settings, others = settled({}), settled({})

    def reads_and_fails():
        assert repr(settings) == repr(others)
        assert settings == others
        assert to_plain(settings) == to_plain(others)
        assert dataclasses.replace(settings.data, seed=3).seed == 3
        raise ValueError(others.data.seed)

    with pytest.raises(ValueError), record_reads(settings) as seen:
        reads_and_fails()
    assert settings.data.shuffle is True
    assert seen == set()
    assert not any("__getattribute__" in vars(section) for section in (Settings, type(settings.data)))
    shared = Fsdp()
    settings = Settings(actor_rollout_ref=ActorRolloutRef(actor=Actor(fsdp_config=shared), ref=Ref(fsdp_config=shared)))
    with pytest.raises(AssertionError, match="two keys"), record_reads(settings):
        pass


KWARGS = "custom_reward_function.reward_kwargs"


@pytest.mark.parametrize("name", ["api_key", "hf_token", "x-api-key", "Authorization", "judge_password"])
@pytest.mark.parametrize("secret", ["sk42", "sk-4,2}x", "sk 4'2"])
def test_a_secret_of_any_form_is_hidden_in_settings_and_on_the_command_line(name, secret):
    hidden = [argument_without_secrets(f"{KWARGS}={as_override({'judge': {name: secret}, 'tokens': 7})}")]
    hidden += [argument_without_secrets(f"{KWARGS}.{name}={as_override(secret)}")]
    hidden += [str(without_secrets({"judge": {name: secret}, "tokens": 7}))]
    assert all("hidden:" in text for text in hidden)
    assert not any(part in text for text in hidden for part in ("sk", "2}x", "4'2", "4\\'2"))
    assert "tokens:7" in hidden[0].replace(" ", "")
