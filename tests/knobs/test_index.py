import json
from pathlib import Path

import pytest

import verl_memopt.config
from verl_memopt.config.keys import leaf_keys, value_at
from verl_memopt.config.schema import Optim, Settings
from verl_memopt.knobs.knob import PARTS, SECTIONS, as_json, knob_named, knobs, text_of
from verl_memopt.knobs.profiles import PROFILES

KEYS = set(leaf_keys())
EACH = pytest.mark.parametrize("knob", knobs(), ids=lambda knob: knob.name)


def test_names_and_places_are_one_each():
    assert len({knob.name for knob in knobs()}) == len({knob.place for knob in knobs()}) == len(knobs()) == 25
    rows = [knob.row.place for knob in knobs() if knob.row is not None]
    assert len(set(rows)) == len(rows)


@EACH
def test_a_knob_is_named_as_its_file(knob):
    assert knob_named(knob.name) is knob
    assert (Path(verl_memopt.__file__).parent / "knobs" / f"{knob.name}.py").is_file()


@EACH
def test_a_knob_says_what_it_does_when_to_use_it_and_what_it_saves_and_costs(knob):
    text = text_of(knob.name)
    assert tuple(text) == ("", *PARTS)
    assert all(words.endswith(".") and len(words) > 10 for words in text.values())
    assert text[""].count(". ") == 0, "one sentence"
    assert 0 < len(knob.cost.split()) <= 5


@EACH
def test_every_key_that_a_knob_names_is_a_setting(knob):
    assert knob.keys or knob.besides
    named = {
        *knob.keys,
        *(unused.key for unused in knob.unused_keys),
        *(key for refusal in knob.refuses for key in refusal.keys),
        *(advice.key for advice in knob.advice),
        *(key for factor in knob.factors for level in factor.levels.values() for key in level),
        *knob.no_factor,
    }
    if knob.row is not None:
        named |= {override.partition("=")[0] for override in (*knob.row.on, *knob.row.off)}
    assert named <= KEYS


@EACH
def test_a_default_is_that_of_the_settings(knob):
    assert all(value_at(Settings(), key) == default for key, default in knob.defaults().items())


def test_fields_of_a_section_stand_in_the_order_of_the_knobs():
    names = list(Optim.__dataclass_fields__)
    assert names[:4] == ["optimizer", "optimizer_impl", "override_optimizer_config", "bucket_megabytes"]
    assert names.index("state_dtype") < names.index("stochastic_rounding") < names.index("in_backward")


def test_no_two_knobs_add_the_same_field_to_a_section():
    for section in SECTIONS:
        names = [name for knob in knobs() if section in knob.settings for name in knob.settings[section].__annotations__]
        assert len(names) == len(set(names))


def test_the_index_is_json():
    first = json.loads(json.dumps(as_json()))[0]
    assert first.keys() == {
        "name",
        "does",
        "use_it_when",
        "saves",
        "costs",
        "works_with",
        "keys",
        "defaults",
        "besides",
        "refuses",
    }


def test_every_profile_that_can_be_chosen_is_in_the_index():
    folder = Path(verl_memopt.config.__file__).parent / "yaml" / "memory"
    assert {path.stem for path in folder.glob("*.yaml")} == {*PROFILES, "none"}
    assert knob_named("profiles").besides == tuple(f"memory={name}" for name in PROFILES)
