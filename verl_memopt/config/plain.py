"""Settings as a plain tree, for the log, the run folder and other programs."""

from __future__ import annotations

import dataclasses
from typing import Any

import yaml

from verl_memopt.config.keys import field_types
from verl_memopt.config.schema import Settings


def to_plain(settings: Any) -> dict[str, Any]:
    """Return a section as nested dicts and lists that YAML and JSON can hold; does not count as reading its keys."""
    values = vars(settings)
    return {name: _plain(values[name]) for name in field_types(settings.__class__)}


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return to_plain(value)
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def to_yaml(settings: Settings) -> str:
    """Return the settings as YAML text in the order of the schema."""
    return str(yaml.safe_dump(to_plain(settings), sort_keys=False, allow_unicode=True))
