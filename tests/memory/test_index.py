import json
from pathlib import Path

import pytest

import verl_memopt.config
from verl_memopt.config.keys import leaf_keys, value_at
from verl_memopt.config.schema import Settings
from verl_memopt.memory.knob import as_json, knob_named, knobs
from verl_memopt.memory.profiles import PROFILES

KEYS = set(leaf_keys())
EACH = pytest.mark.parametrize("knob", knobs(), ids=lambda knob: knob.name)


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
