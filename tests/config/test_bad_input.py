from contextlib import suppress

import pytest

from tools.settings_page import spelled
from verl_memopt.config.keys import leaf_types, section_keys
from verl_memopt.config.loader import load_settings, settings_from_mapping
from verl_memopt.config.unused_keys import REFUSED
from verl_memopt.errors import ConfigError

ODD = [None, True, -1, 10**30, "", [None], {"x": {"y": []}}, {1: 2}]
KEYS = [
    *leaf_types(),
    *sorted(section_keys()),
    *(alias for alias, _ in spelled()),
    *REFUSED,
    "",
    ".",
    "a..b",
    "data.",
    "data.seed.x",
]


KEYS = list(dict.fromkeys(name.replace(".*", ".key") for name in KEYS))
TOGETHER = 24
"""Keys that get an odd value at once, far apart in the tree, so that few rules read two of them."""


def refuse_or_take(settings):
    with suppress(ConfigError):
        settings_from_mapping(settings)


@pytest.mark.parametrize("value", ODD, ids=repr)
def test_no_odd_values_of_a_few_keys_end_in_anything_but_settings_or_a_config_error(least, value):
    groups = len(KEYS) // TOGETHER
    for first in range(groups):
        refuse_or_take(least | dict.fromkeys(KEYS[first::groups], value))


@pytest.mark.slow
@pytest.mark.parametrize("value", ODD, ids=repr)
def test_no_odd_value_of_any_key_ends_in_anything_but_settings_or_a_config_error(least, value):
    for key in KEYS:
        refuse_or_take(least | {key: value})


@pytest.mark.parametrize("word", ["x" * 5000, "a\0b"], ids=["too long for a file", "no character of a file"])
def test_a_word_that_is_no_override_is_named_even_where_no_file_could_have_the_name(word):
    with pytest.raises(ConfigError, match="Write key=value"):
        load_settings("ppo_trainer", [word])
