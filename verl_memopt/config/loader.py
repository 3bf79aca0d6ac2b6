"""Settings from a config name and overrides: compose, translate spellings, build typed sections, check.

Hydra composes a plain mapping, the rest is ours.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl_memopt.config.aliases import apply_aliases, our_key
from verl_memopt.config.build import build
from verl_memopt.config.checks import check
from verl_memopt.config.keys import flatten
from verl_memopt.config.links import followers_of
from verl_memopt.config.plain import to_plain
from verl_memopt.config.problems import Problem, raise_together, shown
from verl_memopt.config.refusals import drop_inert
from verl_memopt.config.schema import REQUIRED, Settings
from verl_memopt.errors import ConfigError

logger = logging.getLogger(__name__)

PACKAGED = Path(__file__).parent / "yaml"
LAST = frozenset({"memory"})
"""Groups of profiles: they win over a recipe's keys, and the command line over theirs."""
_COMPOSE_ERRORS = (HydraException, OmegaConfBaseException, yaml.YAMLError)


def load_settings(config_name: str, overrides: list[str], config_dir: str | None = None) -> Settings:
    """Return the settings of a named config with overrides on top, typed, linked and checked.

    Args:
        config_name: a packaged config, or a file of ``config_dir``.
        overrides: ``key=value`` as on a command line.
        config_dir: a recipe's folder; its files may name the packaged configs in their ``defaults`` list.

    Raises:
        ConfigError: one, that lists everything wrong, before anything is started.
    """
    return settings_from_mapping(compose_mapping(config_name, overrides, config_dir))


def settings_from_mapping(given: Mapping[str, Any]) -> Settings:
    """Return the settings of a nested mapping that holds only the keys that differ from the defaults.

    Spellings are translated, keys without effect are dropped with a warning, typed sections are built and then checked.

    Raises:
        ConfigError: one, that lists everything wrong.
    """
    values, problems = _in_our_words(given)
    settings, mistyped = build(values)
    problems += mistyped
    doubtful = {key for found in problems for key in found.keys}
    doubtful |= followers_of(doubtful)
    problems += [found for found in check(settings, frozenset(values)) if not doubtful.intersection(found.keys)]
    raise_together(problems)
    return settings


def _in_our_words(given: Mapping[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
    """Return dotted key -> value under our names and with our values, without keys that have no effect here."""
    flat = {key: value for key, value in flatten(given, our_key).items() if value != REQUIRED}
    ours, conflicts = apply_aliases(flat)
    kept, refused = drop_inert(ours)
    return kept, conflicts + refused


def compose_mapping(config_name: str, overrides: list[str], config_dir: str | None = None) -> dict[str, Any]:
    """Return what Hydra makes of a config name and overrides, interpolations resolved, as a plain nested mapping."""
    folder = _folder(config_name, config_dir)
    prepared: list[str] = []
    problems: list[Problem] = []
    for override in overrides:
        try:
            prepared.append(_prepared(override, folder))
        except ConfigError as error:
            problems.append(Problem((), str(error)))
    raise_together(problems)
    composed = _composed(folder, config_name, prepared)
    _log_profile(overrides, composed)
    return composed


def _composed(folder: Path, config_name: str, overrides: list[str]) -> dict[str, Any]:
    quoted = str(PACKAGED).replace("\\", "\\\\").replace("'", "\\'")
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(folder), version_base="1.3"):
            return _resolved(compose(config_name, [*overrides, f"hydra.searchpath=['file://{quoted}']"]))
    except _COMPOSE_ERRORS as error:
        raise ConfigError(f"{config_name}: {_one_line(error)}. Mend the override or the file it names.") from error
    finally:
        GlobalHydra.instance().clear()


def _folder(config_name: str, config_dir: str | None) -> Path:
    folder = PACKAGED if config_dir is None else Path(config_dir).resolve()
    if not folder.is_dir():
        raise ConfigError(f"config_dir={config_dir}: no such folder. Give the folder that holds {config_name}.yaml.")
    names = sorted({file.stem for place in (folder, PACKAGED) for file in place.glob("*.yaml")})
    if config_name.removesuffix(".yaml") not in names:
        raise ConfigError(f"config_name={config_name}: no such config. Choose one of {', '.join(names)}.")
    return folder


def _prepared(line: str, folder: Path) -> str:
    """Return the override as Hydra takes it for a key that the YAML may omit."""
    override = _parsed(line)
    key = override.key_or_group
    if key.split(".")[0] == "hydra":
        raise ConfigError(f"{line}: Hydra only composes the settings here, its own keys have no effect. Remove the override.")
    if override.is_sweep_override():
        raise ConfigError(f"{line}: several values for one key. Write a list as {key}=[a,b]; sweeps are not available.")
    if not key:
        raise ConfigError(f"{line}: no key before the sign. Write key=value.")
    if key not in _groups(PACKAGED) | _groups(folder):
        return line if override.type is OverrideType.DEL or override.package else "++" + line.lstrip("+")
    if override.type is not OverrideType.DEL and not isinstance(override.value(), str | list):
        raise ConfigError(f"{line}: a group takes the name of one of its files. Write {key}=<name>.")
    if key in LAST and override.type is not OverrideType.DEL:
        # Appended, it stands after the recipe's own keys; a command line's keys still come after it.
        return "+" + line.lstrip("+")
    return line.lstrip("+") if key in _groups(PACKAGED) else line


def _log_profile(overrides: list[str], composed: dict[str, Any]) -> None:
    """Say which keys a memory profile set, and which of its keys the command line set otherwise."""
    chosen = {parsed.key_or_group: parsed.value() for parsed in map(_parsed, overrides)}
    for group in LAST & chosen.keys():
        profile = flatten(yaml.safe_load((PACKAGED / group / f"{chosen[group]}.yaml").read_text()) or {})
        final = flatten(composed)
        kept = [f"{key}={shown(value)}" for key, value in profile.items() if key in final and final[key] == value]
        other = [
            f"{key}={shown(final[key])} (profile: {shown(value)})"
            for key, value in profile.items()
            if key in final and final[key] != value
        ]
        logger.info("%s=%s sets %s", group, chosen[group], ", ".join(kept) or "nothing")
        if other:
            logger.info("%s=%s: the command line says %s", group, chosen[group], ", ".join(other))


def _groups(folder: Path) -> set[str]:
    """Return the names of the config groups in a folder: its subfolders, as Hydra writes them."""
    return {place.relative_to(folder).as_posix() for place in folder.rglob("*") if place.is_dir()}


def _parsed(line: str) -> Override:
    try:
        return OverridesParser.create().parse_override(line)
    except HydraException as error:
        raise ConfigError(f"{line}: {_one_line(error)}. Write key=value, and quote text with special characters.") from error


def _resolved(config: DictConfig) -> dict[str, Any]:
    """Return the composed keys alone, their interpolations resolved against the defaults as well."""
    whole = OmegaConf.merge(OmegaConf.create(to_plain(Settings())), config)
    resolved: Any = OmegaConf.to_container(whole, resolve=True)
    picked: dict[str, Any] = _pick(resolved, OmegaConf.to_container(config, resolve=False))
    return picked


def _pick(resolved: Any, shape: Any) -> Any:
    return {name: _pick(resolved[name], below) for name, below in shape.items()} if isinstance(shape, dict) else resolved


def _one_line(error: Exception) -> str:
    """Return Hydra's message without its list of search paths."""
    return " ".join(str(error).split()).partition(" Config search path:")[0].rstrip(".")
