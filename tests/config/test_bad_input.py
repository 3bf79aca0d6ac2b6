from contextlib import suppress

import pytest

from verl_memopt.config.aliases import spelled
from verl_memopt.config.keys import leaf_keys, section_keys
from verl_memopt.config.loader import settings_from_mapping
from verl_memopt.config.unused_keys import REFUSED
from verl_memopt.errors import ConfigError

ODD = [None, True, -1, 10**30, "", [None], {"x": {"y": []}}, {1: 2}]
KEYS = [
    *leaf_keys(),
    *sorted(section_keys()),
    *(alias for alias, _ in spelled()),
    *REFUSED,
    "",
    ".",
    "a..b",
    "data.",
    "data.seed.x",
]


@pytest.mark.parametrize("value", ODD, ids=repr)
def test_no_odd_value_of_any_key_ends_in_anything_but_settings_or_a_config_error(least, value):
    for key in dict.fromkeys(name.replace(".*", ".key") for name in KEYS):
        with suppress(ConfigError):
            settings_from_mapping(least | {key: value})
