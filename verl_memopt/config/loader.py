"""Settings from a config name and overrides: compose, translate spellings, build typed sections, check.

Hydra composes a plain mapping, the rest is ours.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl_memopt.config import adapter
from verl_memopt.config.aliases import translate
from verl_memopt.config.build import build
from verl_memopt.config.checks import check
from verl_memopt.config.keys import flatten
from verl_memopt.config.plain import to_plain
from verl_memopt.config.preset_budgets import with_room_for_samples
from verl_memopt.config.problems import Problem, raise_together, shown
from verl_memopt.config.schema import Settings
from verl_memopt.config.trl import Written, translate_trl
from verl_memopt.errors import ConfigError

logger = logging.getLogger(__name__)

PACKAGED = Path(__file__).parent / "yaml"
VERLS_OWN = Path("config")
"""What verl's scripts give as ``--config-path`` for verl's packaged configs."""
LAST = frozenset({"memory", "model"})
"""Groups of presets: they win over a recipe's keys, and the command line over theirs."""
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
    overrides = _without_blanks(overrides)
    composed, presets = _compose(config_name, overrides, config_dir)
    of_presets = {key for group, name in presets.items() for key in _kept(group, name, composed)}
    return settings_from_mapping(composed, of_presets, _written(overrides, config_name, config_dir))


def _written(overrides: list[str], config_name: str, config_dir: str | None) -> Written:
    """Return the keys that the user wrote on the command line, and those of the config file itself."""
    parsed = [OverridesParser.create().parse_override(line) for line in overrides]
    command_line = {key for each in parsed for key in flatten({each.key_or_group: each.value()})}
    file = _folder(config_name, config_dir) / f"{config_name.removesuffix('.yaml')}.yaml"
    of_file = flatten(yaml.safe_load(file.read_text()) or {}) if file.is_file() else {}
    return Written(command_line, of_file.keys())


def _without_blanks(overrides: list[str]) -> list[str]:
    """Return the overrides that say something. A space after the backslash that ends a line of a script is an argument too."""
    said = [override for override in overrides if override.strip()]
    if len(said) < len(overrides):
        logger.warning("an argument of spaces alone is left out: a backslash with a space after it does not continue a line")
    return said


def settings_from_mapping(
    tree: Mapping[str, Any], of_presets: Set[str] = frozenset(), written: Written | None = None
) -> Settings:
    """Return the settings of a mapping, nested or with dotted keys, that holds only the keys that differ from the defaults.

    Spellings are translated, keys without effect are dropped with a warning, typed sections are built and then checked.

    Args:
        tree: the mapping.
        of_presets: keys that a preset set and the user did not. They earn no warning where they have no effect: a profile serves
            runs with a critic or a reference and runs without.
        written: the keys that the user wrote, which a name of TRL must not meet; None = all keys of the mapping.

    Raises:
        ConfigError: one, that lists everything wrong.
    """
    tree, of_trl = translate_trl(tree, written)
    translated, problems = translate(tree)
    problems = of_trl + problems
    for model in adapter.MODELS:
        of_folder, faults = adapter.adapter_settings(model, translated)
        translated |= of_folder
        problems += faults
    translated = with_room_for_samples(translated, of_presets - (written.command_line if written else frozenset()))
    settings, values, mistyped = build(translated)
    problems += mistyped
    wrong = {key for each in problems for key in each.keys}
    problems += check(settings, values, frozenset(translated) - of_presets, wrong)
    raise_together(problems)
    return settings


def compose_mapping(config_name: str, overrides: list[str], config_dir: str | None = None) -> dict[str, Any]:
    """Return what Hydra makes of a config name and overrides, interpolations resolved, as a plain nested mapping.

    Args:
        config_name: a packaged config, or a file of ``config_dir``.
        overrides: ``key=value`` as on a command line.
        config_dir: a recipe's folder.

    Raises:
        ConfigError: there is no such config, or Hydra cannot read the config or an override.
    """
    return _compose(config_name, overrides, config_dir)[0]


def _compose(config_name: str, overrides: list[str], config_dir: str | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the mapping of :func:`compose_mapping`, and the presets of the command line: group -> name.

    Raises:
        ConfigError: there is no such config, or Hydra cannot read the config or an override.
    """
    folder = _folder(config_name, config_dir)
    signed: list[str] = []
    presets: dict[str, Any] = {}
    problems: list[Problem] = []
    for line in overrides:
        try:
            override = OverridesParser.create().parse_override(line)
            sign = _sign(override, folder)
        except HydraException as error:
            mend = "Write key=value, and quote text with special characters."
            problems.append(Problem((), f"{shown(line)}: {_one_line(error)}. {mend}"))
        except ConfigError as error:
            problems.append(Problem((), f"{line}: {error}"))
        else:
            # Written once without the user's own plus signs, so that a key works whether or not a file already sets it.
            signed.append(line if sign is None else sign + line.lstrip("+"))
            if override.key_or_group in LAST:
                presets[override.key_or_group] = override.value()
    raise_together(problems)

    packaged = str(PACKAGED).replace("\\", "\\\\").replace("'", "\\'")
    # Hydra keeps one state for the process, and a call that failed before may have left it behind.
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(folder), version_base="1.3"):
            config = compose(config_name, [*signed, f"hydra.searchpath=['file://{packaged}']"])
        # An interpolation may name a key that only the defaults have.
        resolved = OmegaConf.to_container(OmegaConf.merge(OmegaConf.create(to_plain(Settings())), config), resolve=True)
    except _COMPOSE_ERRORS as error:
        raise ConfigError(f"{config_name}: {_one_line(error)}. Mend the override or the file it names.") from error
    finally:
        GlobalHydra.instance().clear()
    composed: dict[str, Any] = _part(resolved, OmegaConf.to_container(config, resolve=False))
    for group, name in presets.items():
        _log_preset(group, name, composed)
    return composed, presets


def _folder(config_name: str, config_dir: str | None) -> Path:
    """Return the folder of a config.

    Raises:
        ConfigError: there is no such folder, or no such config in it.
    """
    folder = PACKAGED if config_dir is None else Path(config_dir).resolve()
    if not folder.is_dir() and Path(config_dir or "") == VERLS_OWN:
        logger.info("config_dir=%s is read as the packaged configs: verl looks for it in its own package", config_dir)
        folder = PACKAGED
    if not folder.is_dir():
        raise ConfigError(f"config_dir={config_dir}: no such folder. Give the folder that holds {config_name}.yaml.")
    names = sorted({file.stem for each in (folder, PACKAGED) for file in each.glob("*.yaml")})
    if config_name.removesuffix(".yaml") not in names:
        raise ConfigError(f"config_name={config_name}: no such config. Choose one of {', '.join(names)}.")
    return folder


def _sign(override: Override, folder: Path) -> str | None:
    """Return the sign with which Hydra takes an override, whether or not a file sets its key; None = as it is written.

    Raises:
        ConfigError: the override cannot have an effect.
    """
    key, packaged = override.key_or_group, _groups(PACKAGED)
    if key.split(".")[0] == "hydra":
        raise ConfigError("Hydra only composes the settings here, its own keys have no effect. Remove the override.")
    if override.is_sweep_override():
        raise ConfigError(f"several values for one key. Write a list as {key}=[a,b]; sweeps are not available.")
    if not key:
        raise ConfigError("no key before the sign. Write key=value.")
    is_deleted = override.type is OverrideType.DEL
    if key not in packaged | _groups(folder):
        return None if is_deleted or override.package else "++"
    if not is_deleted and not isinstance(override.value(), str | list):
        raise ConfigError(f"a group takes the name of one of its files. Write {key}=<name>.")
    if key in LAST and not is_deleted:
        # Appended, a profile stands after the recipe's own keys. A command line's keys still come after it.
        return "+"
    return "" if key in packaged else None


def _groups(folder: Path) -> set[str]:
    """Return the names of the config groups in a folder: its subfolders, as Hydra writes them."""
    return {below.relative_to(folder).as_posix() for below in folder.rglob("*") if below.is_dir()}


def _part(tree: Any, keys: Any) -> Any:
    """Return the part of a nested mapping that has the keys of another."""
    return {name: _part(tree[name], below) for name, below in keys.items()} if isinstance(keys, dict) else tree


def _preset(group: str, name: str) -> dict[str, Any]:
    """Return the keys that a preset sets."""
    return flatten(yaml.safe_load((PACKAGED / group / f"{name}.yaml").read_text()) or {})


def _kept(group: str, name: str, composed: Mapping[str, Any]) -> list[str]:
    """Return the keys of a preset that hold its value in the end."""
    final = flatten(composed)
    return [key for key, value in _preset(group, name).items() if key in final and final[key] == value]


def _log_preset(group: str, name: str, composed: Mapping[str, Any]) -> None:
    """Log which keys a preset set, and which of its keys the command line set otherwise."""
    preset, final, kept = _preset(group, name), flatten(composed), _kept(group, name, composed)
    changed = {key: value for key, value in preset.items() if key in final and key not in kept}
    other = [f"{key}={shown(final[key])} (profile: {shown(value)})" for key, value in changed.items()]
    logger.info("%s=%s sets %s", group, name, ", ".join(f"{key}={shown(final[key])}" for key in kept) or "nothing")
    if other:
        logger.info("%s=%s: the command line says %s", group, name, ", ".join(other))


def _one_line(error: Exception) -> str:
    """Return Hydra's message without its list of search paths."""
    return " ".join(str(error).split()).partition(" Config search path:")[0].rstrip(".")
