"""Settings as a plain tree, for the log, the run folder and other programs."""

from __future__ import annotations

import dataclasses
from typing import Any

import yaml

from verl_memopt.config.keys import field_types
from verl_memopt.config.schema import Settings


def to_plain(value: Any) -> Any:
    """Return a section as nested dicts and lists that YAML and JSON can hold. This does not count as reading its keys."""
    if dataclasses.is_dataclass(value):
        values = vars(value)
        return {name: to_plain(values[name]) for name in field_types(value.__class__)}
    if isinstance(value, dict):
        return {key: to_plain(item) for key, item in value.items()}
    return [to_plain(item) for item in value] if isinstance(value, list | tuple) else value


def to_yaml(settings: Settings) -> str:
    """Return the settings as YAML text in the order of the schema."""
    return str(yaml.safe_dump(to_plain(settings), sort_keys=False, allow_unicode=True))
