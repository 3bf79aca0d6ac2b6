"""Load settings from a config name and overrides, in four steps.

Hydra composes a plain mapping; other spellings are translated to our keys; typed sections are built; rules are checked.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import shutil
from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl_memopt.algorithms.records import DISTILL, LOSSES, SFT
from verl_memopt.config.aliases import translate
from verl_memopt.config.checks import check
from verl_memopt.config.keys import (
    Problem,
    field_types,
    flatten,
    problem,
    raise_together,
    shown,
    value_at,
)
from verl_memopt.config.names import KeySources, read_names
from verl_memopt.config.role_settings import SAMPLED
from verl_memopt.config.schema import Algorithm, Settings
from verl_memopt.config.values import build
from verl_memopt.config.values_of_python import as_override, with_quotes
from verl_memopt.errors import ConfigError
from verl_memopt.memory import lora, profiles
from verl_memopt.memory.knob import has_teacher, uses_kl
from verl_memopt.observe.secrets import without_secrets_of
from verl_memopt.records import parse_json, path_fault, read_record

logger = logging.getLogger(__name__)

PACKAGED = Path(__file__).parent / "yaml"
VERLS_OWN = Path("config")
"""The value of ``--config-path`` in verl's scripts. In verl it means the configs inside verl's package."""
LAST = frozenset({"memory", "model"})
"""Groups of presets. A preset wins over the keys of a recipe's file, and the command line wins over a preset."""
_COMPOSE_ERRORS = (
    *(HydraException, OmegaConfBaseException, yaml.YAMLError),
    # Raised for files that are YAML but not a config, or that are not text.
    *(OSError, ValueError, TypeError, AttributeError, LookupError, RecursionError),
)


def load_settings(
    config_name: str,
    overrides: list[str],
    config_dir: str | None = None,
    quiet: Set[str] = frozenset(),
    values: Mapping[str, Any] = MappingProxyType({}),
) -> Settings:
    """Compose a config with overrides, and return typed and checked settings.

    Args:
        config_name: Name of the YAML file, with or without ``.yaml``.
        overrides: ``key=value`` texts, as on the command line.
        config_dir: A recipe's folder. Its files may name the packaged configs in their ``defaults`` list.
        quiet: Names in TRL's or a short spelling whose translation is not logged.
        values: Key -> plain value. They count as given on the command line, but are not parsed as text.

    Raises:
        ConfigError: The settings have problems; the message lists all of them.
    """
    groups, values = _with_groups(values, _folder(config_name, config_dir))
    overrides = [with_quotes(line) for line in _without_blanks([*overrides, *groups])]
    composed, presets = compose_mapping(config_name, overrides, config_dir, values)
    preset_keys = {key for group, name in presets.items() for key in _kept(group, name, composed)}
    return settings_from_mapping(composed, preset_keys, _written(overrides, values, config_name, config_dir), quiet)


def _with_groups(values: Mapping[str, Any], folder: Path) -> tuple[list[str], dict[str, Any]]:
    groups = _groups(PACKAGED) | _groups(folder)
    own = {key.lstrip("+"): value for key, value in values.items()}
    named = {key: value for key, value in own.items() if key in groups and isinstance(value, str | list)}
    return [f"{key}={as_override(value)}" for key, value in named.items()], {
        key: value for key, value in own.items() if key not in named
    }


def _written(overrides: list[str], values: Mapping[str, Any], config_name: str, config_dir: str | None) -> KeySources:
    parsed = [OverridesParser.create().parse_override(line) for line in overrides]
    command_line = {key for override in parsed for key in flatten({override.key_or_group: override.value()})} | flatten(
        values
    ).keys()
    file = _folder(config_name, config_dir) / f"{config_name.removesuffix('.yaml')}.yaml"
    in_file = flatten(yaml.safe_load(file.read_text()) or {}) if file.is_file() else {}
    return KeySources(command_line, in_file.keys())


def _without_blanks(overrides: list[str]) -> list[str]:
    # In a shell script, a space after the backslash at the end of a line becomes a separate argument.
    kept = [override for override in overrides if override.strip()]
    if len(kept) < len(overrides):
        logger.warning("an argument that has only spaces is ignored: a backslash with a space after it does not continue a line")
    return kept


def settings_from_mapping(
    tree: Mapping[str, Any],
    preset_keys: Set[str] = frozenset(),
    written: KeySources | None = None,
    quiet: Set[str] = frozenset(),
) -> Settings:
    """Build settings from a mapping, nested or with dotted keys. Keys that are missing have their defaults.

    Spellings are translated, keys without effect are dropped with a warning, and the typed sections are built and checked.

    Args:
        tree: The settings.
        preset_keys: Keys that a preset set and the user did not. If they have no effect there is no warning, because the same
            profile is used with and without a critic or a reference.
        written: Keys that the user wrote. Two spellings of one such key are a problem. None = all keys of ``tree``.
        quiet: As in :func:`load_settings`.

    Raises:
        ConfigError: The settings have problems; the message lists all of them.
    """
    named, sources, name_problems = read_names(tree, written, quiet)
    written = None if written is None else sources
    translated, problems = translate(named)
    problems = name_problems + problems
    for model in MODELS:
        from_folder, faults = adapter_settings(model, translated)
        translated |= from_folder
        problems += faults
    translated = with_room_for_samples(translated, preset_keys - (written.command_line if written else frozenset()))
    settings, values, mistyped = build(translated)
    if not mistyped and (one_copy := profiles.one_copy(settings, _by_user(translated, preset_keys, written))):
        instead = build(translated | one_copy)
        if profiles.can_be(instead[0]):
            (settings, values, _), preset_keys, translated = instead, preset_keys | one_copy.keys(), translated | one_copy
            shared = ", ".join(f"{key}={shown(value)}" for key, value in one_copy.items())
            logger.info("the profile lets trainer and engine share one copy of the weights on each device: %s", shared)
    if not mistyped and (streams := profiles.streamed(settings, _by_user(translated, preset_keys, written))):
        preset_keys, translated = preset_keys | streams.keys(), translated | streams
        settings, values, _ = build(translated)
        shown_keys = ", ".join(f"{key}={value}" for key, value in streams.items())
        logger.info("on one device the profile streams frozen models from the host: %s", shown_keys)
    problems += mistyped
    wrong = {key for found in problems for key in found.keys}
    problems += check(settings, values, frozenset(translated) - preset_keys, wrong)
    raise_together(problems)
    return settings


def _by_user(translated: Mapping[str, Any], preset_keys: Set[str], written: KeySources | None) -> Set[str]:
    # A key that the user wrote is the user's key, even if its value is the preset's.
    return (frozenset(translated) - preset_keys) | (written.command_line if written else frozenset())


def compose_mapping(
    config_name: str,
    overrides: list[str],
    config_dir: str | None = None,
    values: Mapping[str, Any] = MappingProxyType({}),
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Let Hydra compose a config and overrides. Return (settings, presets).

    The settings are a plain nested mapping with resolved interpolations. The presets are group -> name, for each preset that the
    command line selects. ``values``: see :func:`load_settings`.
    """
    folder = _folder(config_name, config_dir)
    packaged_groups, groups = _groups(PACKAGED), _groups(folder)
    signed: list[str] = []
    presets: dict[str, Any] = {}
    problems: list[Problem] = []
    for text in overrides:
        try:
            line = _with_profile(text)
            override = OverridesParser.create().parse_override(line)
            sign = _sign(override, packaged_groups, groups, folder)
        except HydraException as error:
            way_out = "Write key=value, and quote text with special characters."
            if os.path.isfile(text):  # unlike Path.is_file it returns False for a text that cannot be a file name
                way_out = _as_file(text)
            problems.append(Problem((), f"{shown(text)}: {_one_line(error)}. {way_out}"))
        except ConfigError as error:
            problems.append(Problem((), f"{text:.200}: {error}"))
        except ValueError as error:  # such as a number with more digits than Python parses
            problems.append(Problem((), f"{text:.200}: {error!s:.200}"))
        else:
            # Replace the user's plus signs by our sign, so that a key works whether or not a file already sets it.
            signed.append(line if sign is None else sign + line.lstrip("+"))
            if override.key_or_group in LAST:
                presets[override.key_or_group] = override.value()
    raise_together(problems)

    # Hydra has one global state per process, and an earlier call that failed may have left it set.
    GlobalHydra.instance().clear()
    try:
        with _with_named_profiles(folder) as (first, others), initialize_config_dir(str(first), version_base="1.3"):
            config = compose(config_name, [*signed, f"hydra.searchpath=[{','.join(map(_quoted, others))}]"])
        given = OmegaConf.to_container(config, resolve=False)
        resolved = given
        if "${" in str(given):  # an interpolation may refer to a key that only the defaults or `values` have
            plain = {key: value for key, value in values.items() if "${" not in str(value)}
            parts = (to_plain(Settings()), given, _with_values({}, plain))
            whole = OmegaConf.merge(*[OmegaConf.create(part) for part in parts])
            resolved = OmegaConf.to_container(whole, resolve=True)
    except _COMPOSE_ERRORS as error:
        raise ConfigError(f"{config_name}: {_one_line(error)}. Correct the override or the file it names.") from error
    finally:
        GlobalHydra.instance().clear()
    composed: dict[str, Any] = _with_values(_part(resolved, given), values)
    for group, name in presets.items():
        _log_preset(group, name, composed)
    return composed, presets


def _with_values(tree: dict[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    for key, value in values.items():
        *sections, name = key.split(".")
        place = tree
        for section in sections:
            below = place.get(section)
            place[section] = place = dict(below) if isinstance(below, Mapping) else {}
        # A dict is merged into an existing dict, as on a command line.
        place[name] = _added(place.get(name), value)
    return tree


def _added(before: Any, value: Any) -> Any:
    if not (isinstance(before, Mapping) and isinstance(value, Mapping)):
        return value
    return {**before, **{name: _added(before.get(name), added) for name, added in value.items()}}


def _with_profile(line: str) -> str:
    # Replace the size of a card, as in ``memory=24``, by the name of its profile.
    key, sign, value = line.partition("=")
    if key.lstrip("+") != "memory" or not sign:
        return line
    return f"{key}={profiles.profile_named(value.strip(chr(34) + chr(39)))}"


@contextmanager
def _with_named_profiles(folder: Path) -> Iterator[tuple[Path, list[Path]]]:
    """Yield (folder that Hydra reads first, folders that it searches next).

    Hydra accepts no number in a ``defaults`` list. If a file selects a profile there by the size of a card (``memory: 32``),
    Hydra reads copies of the folder's files that have the profile's name instead.
    """
    files = list(folder.glob("*.yaml"))
    named = {file.name: text for file in files if (text := _with_named_profile(file)) is not None}
    if not named:
        yield folder, [PACKAGED]
        return
    with TemporaryDirectory(prefix="verl_memopt-") as copies:
        for file in files:  # the config itself must be in the first folder, even if another file names the profile
            shutil.copyfile(file, Path(copies) / file.name)
        for name, text in named.items():
            (Path(copies) / name).write_text(text, encoding="utf-8")
        yield Path(copies), [folder, PACKAGED]


def _with_named_profile(file: Path) -> str | None:
    # If the defaults list of the file gives the size of a card, return the file's text with the profile's name; else None.
    try:
        text = file.read_text(encoding="utf-8")
        tree = yaml.compose(text, Loader=yaml.SafeLoader)
    except (OSError, ValueError, yaml.YAMLError):
        return None  # Hydra reports the fault if it reads the file
    sections = tree.value if isinstance(tree, yaml.MappingNode) else []
    lists = [node.value for key, node in sections if key.value == "defaults" and isinstance(node, yaml.SequenceNode)]
    entries = [entry for items in lists for item in items if isinstance(item, yaml.MappingNode) for entry in item.value]
    changed = text
    for key, node in reversed(entries):
        group = str(key.value).removeprefix("override ").strip().removeprefix("/")
        if group != "memory" or not isinstance(node, yaml.ScalarNode):
            continue
        try:
            name = profiles.profile_named(node.value)
        except ConfigError as error:
            raise ConfigError(f"{file}: memory={node.value}: {error}") from error
        if name != node.value:
            changed = changed[: node.start_mark.index] + name + changed[node.end_mark.index :]
    return None if changed == text else changed


def _quoted(folder: Path) -> str:
    # The form of an entry of Hydra's search path.
    escaped = str(folder).replace("\\", "\\\\").replace("'", "\\'")
    return f"'file://{escaped}'"


def _folder(config_name: str, config_dir: str | None) -> Path:
    folder = PACKAGED if config_dir is None else Path(config_dir).resolve()
    if not folder.is_dir() and Path(config_dir or "") == VERLS_OWN:
        logger.info("config_dir=%s means the packaged configs, because verl looks for it in its own package", config_dir)
        folder = PACKAGED
    if not folder.is_dir():
        raise ConfigError(f"config_dir={config_dir}: no such folder. Give the folder that holds {config_name}.yaml.")
    names = sorted({file.stem for place in (folder, PACKAGED) for file in place.glob("*.yaml")})
    if config_name.removesuffix(".yaml") not in names:
        raise ConfigError(f"config_name={config_name}: no such config. Choose one of {', '.join(names)}. {_as_file(config_name)}")
    return folder


def _as_file(text: str) -> str:
    # If the user gave the path of a file instead of a config name, show the options that load this file.
    path = Path(text)
    if path.suffix in (".yaml", ".yml") and path.is_file():
        return f"For this file give --config-dir {path.parent} --config-name {path.stem}."
    return "For one of your own give --config-dir as well."


def _sign(override: Override, packaged: set[str], groups: set[str], folder: Path) -> str | None:
    # Return the sign with which Hydra accepts an override whether or not a file sets its key; None = keep the user's sign.
    key = override.key_or_group
    if key.split(".")[0] == "hydra":
        raise ConfigError("Hydra's own keys have no effect here, because Hydra only composes the settings. Remove the override.")
    if override.is_sweep_override():
        raise ConfigError(f"several values for one key. Write a list as {key}=[a,b]; sweeps are not available.")
    if not key:
        raise ConfigError("there is no key before the sign. Write key=value.")
    is_deleted = override.type is OverrideType.DEL
    if key not in packaged | groups:
        return None if is_deleted or override.package else "++"
    if not is_deleted and not isinstance(override.value(), str | list):
        raise ConfigError(f"{key} is a group, and its value is the name of one of its files. Write {key}=<name>.")
    if key in packaged and isinstance(value := override.value(), str):
        _check_preset(key, value, folder)
    if key in LAST and not is_deleted:
        # Hydra appends a group with a plus sign after the recipe's keys, so that the preset wins over them. Keys of the command
        # line still come later.
        return "+"
    return "" if key in packaged else None


def _check_preset(group: str, name: str, folder: Path) -> None:
    names = sorted({file.stem for place in (folder, PACKAGED) for file in (place / group).glob("*.yaml")})
    if name in names or name.endswith(".yaml"):
        return
    near = get_close_matches(name.rpartition("/")[2].lower().replace("-", "_"), names, 1)
    meant = f" Did you mean {group}={near[0]}?" if near else ""
    other = {
        "model": f" For a folder or a hub id write actor_rollout_ref.model.path={name}.",
        "memory": " For another card write its GB, such as memory=24.",
    }.get(group, "")
    raise ConfigError(f"there is no such preset.{meant} There are {', '.join(names)}.{other}")


def _groups(folder: Path) -> set[str]:
    return {below.relative_to(folder).as_posix() for below in folder.rglob("*") if below.is_dir()}


def _part(tree: Any, keys: Any) -> Any:
    return {name: _part(tree[name], below) for name, below in keys.items()} if isinstance(keys, dict) else tree


@cache
def _preset(group: str, name: str) -> Mapping[str, Any]:
    return flatten(yaml.safe_load((PACKAGED / group / f"{name}.yaml").read_text()) or {})


def _kept(group: str, name: str, composed: Mapping[str, Any]) -> list[str]:
    final = flatten(composed)
    return [key for key, value in _preset(group, name).items() if key in final and final[key] == value]


def _log_preset(group: str, name: str, composed: Mapping[str, Any]) -> None:
    preset, final, kept = _preset(group, name), flatten(composed), _kept(group, name, composed)
    changed = {key: value for key, value in preset.items() if key in final and key not in kept}
    other = [f"{key}={shown(final[key])} (profile: {shown(value)})" for key, value in changed.items()]
    logger.info("%s=%s sets %s", group, name, ", ".join(f"{key}={shown(final[key])}" for key in kept) or "nothing")
    if other:
        logger.info("%s=%s: the command line says %s", group, name, ", ".join(other))


def _one_line(error: Exception) -> str:
    # Hydra's messages end with a long list of search paths, which is cut off.
    return " ".join(str(error).split()).partition(" Config search path:")[0].rstrip(".")


# Settings as nested dicts, for the log, the run folder and other programs.


def changed(settings: Settings, keys: Mapping[str, Any]) -> Settings:
    """Return a copy of the settings in which ``keys`` have new values.

    Raises:
        ConfigError: The new settings have problems.
    """
    return settings_from_mapping({**flatten(to_plain(settings)), **keys})


def to_plain(value: Any) -> Any:
    """Convert a section to nested dicts and lists for YAML and JSON.

    Reading ``vars`` instead of attributes keeps the keys out of a record of which keys were read.
    """
    if dataclasses.is_dataclass(value):
        values = vars(value)
        return {name: to_plain(values[name]) for name in field_types(value.__class__)}
    if isinstance(value, dict):
        return {key: to_plain(item) for key, item in value.items()}
    return [to_plain(item) for item in value] if isinstance(value, list | tuple) else value


def to_yaml(settings: Settings, secrets: bool = True) -> str:
    """Return the settings as YAML in the order of the schema. ``secrets=False`` replaces each secret by a checksum."""
    plain = to_plain(settings)
    if not secrets:
        plain = _with_values({}, {key: without_secrets_of(key, value) for key, value in flatten(plain).items()})
    return str(yaml.safe_dump(plain, sort_keys=False, allow_unicode=True))


# Raise the token budgets of memory profiles to the longest sample of a run.
#
# A profile does not know the lengths of a run. A sample is never split over micro-batches, so a budget below the longest sample
# cannot be kept: it is raised to the length of that sample, with a warning. A budget that the user wrote is not raised; it is
# refused if it is too small.

LENGTHS = ("data.max_prompt_length", "data.max_response_length")
BUDGETS = {
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": "actor_rollout_ref.actor.fsdp_config",
    "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu": "actor_rollout_ref.actor.fsdp_config",
    "critic.ppo_max_token_len_per_gpu": "critic.model.fsdp_config",
}
"""Key of a token budget per device -> section with the sequence-parallel size, the number of devices that share a micro-batch."""


def with_room_for_samples(values: Mapping[str, Any], preset_keys: Set[str]) -> dict[str, Any]:
    lengths = [values.get(key, value_at(Settings(), key)) for key in LENGTHS]
    if not all(isinstance(length, int) for length in lengths):
        return dict(values)  # the type check reports a length of a wrong type
    longest = {}
    for key, section in BUDGETS.items():
        ranks = values.get(f"{section}.ulysses_sequence_parallel_size")
        longest[key] = -(-sum(lengths) // (ranks if isinstance(ranks, int) and ranks > 0 else 1))
    raised = {key: tokens for key, tokens in longest.items() if key in preset_keys and values[key] < tokens}
    critic_only = raised.keys() <= {"critic.ppo_max_token_len_per_gpu"}
    if raised and not critic_only:
        logger.warning(
            "the profile's budget of %d tokens is raised to %d, the longest sample (%s + %s), so the run needs more "
            "memory than the profile's file states. Lower these lengths to stay within its figures",
            min(values[key] for key in raised), max(raised.values()), *LENGTHS,
        )  # fmt: skip
    return {**values, **raised}


# LoRA settings that the user does not give are read from the folder of trained adapters, as in verl.

MODELS = ("actor_rollout_ref.model", "critic.model")
"""Sections of the models that may have adapters."""
_SNAPSHOT = frozenset({"snapshots"})
"""Name of the folder in the hub's cache whose subfolders have commits as names, and not models."""


def adapter_settings(model: str, user_values: Mapping[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
    """Read LoRA settings from ``lora_adapter_path`` of a model; return (our key -> value, problems of the folder).

    Without a folder that has an ``adapter_config.json`` nothing is returned. Keys that the user set are left out.

    Args:
        model: Section of the model.
        user_values: Our key -> value, for the keys that the user set.
    """
    key, rank = f"{model}.lora_adapter_path", f"{model}.lora_rank"
    path = user_values.get(key)
    if not isinstance(path, str) or path_fault(path) or not (file := Path(path) / "adapter_config.json").is_file():
        return {}, []
    try:
        config = parse_json(read_record(file, follow=True), dict[str, Any])
        saved = config.get("modules_to_save")
        # A saved critic has its value head beside the adapters, in `modules_to_save`.
        reasons = lora.not_here(config | ({"modules_to_save": None} if model == MODELS[1] and saved == ["score"] else {}))
    except (OSError, ValueError, AttributeError):
        return {}, [problem({key: path}, "its adapter_config.json is no JSON object", f"Set {rank}.")]
    if reasons:
        return {}, [problem({key: path}, f"its adapter_config.json has {'; '.join(reasons)}", "Give adapters without them.")]
    if rank in user_values and config.get("r") not in (None, user_values[rank]):
        given = {rank: user_values[rank], key: path}
        return {}, [problem(given, f"the adapters have rank {config['r']}", f"Leave out {rank}.")]
    base, own = (str(name or "") for name in (config.get("base_model_name_or_path"), user_values.get(f"{model}.path")))
    if base and own and not _SNAPSHOT & {Path(base).parent.name, Path(own).parent.name} and Path(base).name != Path(own).name:
        logger.warning("%s=%s: the adapters were trained on %s, but the model is %s", key, path, base, own)
    if config.get("lora_dropout"):
        logger.warning("%s=%s: the adapters were trained with dropout, and are trained on without it", key, path)
    read = {f"{model}.{ours}": value for ours, value in lora.settings_in(config).items()}
    from_folder = {name: value for name, value in read.items() if name not in user_values}
    for name in (f"{model}.lora_alpha", f"{model}.use_rslora"):
        if name in read and name in user_values and user_values[name] != read[name]:
            logger.warning("%s=%s: the adapters of %s were trained with %s", name, user_values[name], path, shown(read[name]))
    if from_folder:
        logger.info("%s=%s sets %s", key, path, ", ".join(f"{name}={shown(value)}" for name, value in from_folder.items()))
    return from_folder, []


# The objective of a run in one log line, so that nobody has to derive it from a recipe, a profile and a command line.

_BYPASS = {"ppo_clip": "one clipped ratio of policy to engine per token", "reinforce": "log-probs without a ratio"}


def objective(algorithm: Algorithm, loss: str, kl_in_loss: str | None, teacher: str | None = None) -> str:
    """Describe the estimator, the loss, every KL, the teacher and the group filter of a run in one line.

    ``kl_in_loss``: coefficient and estimator of the KL in the loss; None = no KL in the loss. ``teacher``: what is learned from a
    teacher; None = there is none.
    """
    if algorithm.adv_estimator == SFT:
        supervised = "supervised: the mean negative log-prob per token of the dataset's responses"
        return supervised if teacher is None else f"{supervised}, {teacher}"
    if algorithm.adv_estimator == DISTILL and teacher is not None and kl_in_loss is None:
        return f"distillation: {teacher}"
    correction, loss_in_words = algorithm.rollout_correction, f"loss {loss} ({LOSSES[loss].ratio})"
    if correction.bypass_mode:
        loss_in_words = f"loss {correction.loss_type} ({_BYPASS[correction.loss_type]})"
    normalized = " (normalised over the step)" if algorithm.normalize_advantages and algorithm.adv_estimator == "rloo" else ""
    parts = [f"advantages {algorithm.adv_estimator}{normalized}", loss_in_words]
    if teacher is not None:
        parts.append(teacher)
    if kl_in_loss is not None:
        parts.append(f"KL in the loss {kl_in_loss}")
    if algorithm.use_kl_in_reward:
        parts.append(f"KL in the reward {algorithm.kl_ctrl.kl_coef:g} x {algorithm.kl_penalty}")
    if kl_in_loss is None and not algorithm.use_kl_in_reward:
        parts.append("no KL")
    if correction.rollout_is is not None and not (correction.bypass_mode and correction.loss_type == "ppo_clip"):
        parts.append(f"importance weights per {correction.rollout_is}")
    if correction.rollout_rs is not None:
        parts.append(f"rejection {correction.rollout_rs}")
    if algorithm.use_pf_ppo:
        parts.append(f"rows drawn by score ({algorithm.pf_ppo.reweight_method})")
    if algorithm.filter_groups.enable:
        parts.append(f"groups whose responses have the same {algorithm.filter_groups.metric or 'score'} are dropped")
    return ", ".join(parts)


def reference_in_words(settings: Settings) -> str:
    model, key = settings.actor_rollout_ref.model, "actor_rollout_ref.ref.adapter"
    if model.lora_adapter_path is None:
        return f"{model.path} without adapters"
    if settings.actor_rollout_ref.ref.adapter == "base":
        return f"{model.path} without the adapters that training starts from ({key}=base)"
    return f"{model.path} with the initial adapters from {model.lora_adapter_path} ({key}=base leaves the adapters out)"


def teacher_in_words(settings: Settings) -> str | None:
    if not has_teacher(settings):
        return None
    distill, teacher = settings.distill, settings.teacher
    itself = "the policy itself" if teacher.weights == "policy" else "the reference"
    if teacher.model.lora_adapter_path is not None:
        itself = f"the policy's base with the adapters {teacher.model.lora_adapter_path}"
    name = teacher.model.path or teacher.endpoint.url or itself
    if teacher.log_probs_key is not None:
        name = f"the column {teacher.log_probs_key}"
    over = "exact" if distill.top_k is None else f"over the teacher's {distill.top_k} most probable tokens and the rest"
    names = {
        "reverse_kl": f"KL from the policy to the teacher, {over}",
        "forward_kl": f"KL from the teacher to the policy, {over}",
        "jsd": f"JSD with beta {distill.beta:g}, exact",
        SAMPLED: "KL from the policy to the teacher, estimated from the sampled token, in the advantage",
    }
    return f"{distill.coef:g} x {names[distill.divergence]} (teacher: {name})"


def log_objective(settings: Settings) -> None:
    algorithm, actor = settings.algorithm, settings.actor_rollout_ref.actor
    loss = actor.policy_loss.loss_mode
    kl_in_loss = f"{actor.kl_loss_coef:g} x {actor.kl_loss_type}" if actor.use_kl_loss else None
    logger.info("objective: %s", objective(algorithm, loss, kl_in_loss, teacher_in_words(settings)))
    if uses_kl(settings) and settings.actor_rollout_ref.model.lora_rank:
        logger.info("the KL's reference is %s", reference_in_words(settings))
    bypass_loss = algorithm.rollout_correction.loss_type if algorithm.rollout_correction.bypass_mode else None
    if bypass_loss is not None and loss != "vanilla":
        logger.warning(
            "actor_rollout_ref.actor.policy_loss.loss_mode=%s has no effect: with algorithm.rollout_correction.bypass_mode=true "
            "the loss is loss_type=%s of that section.", loss, bypass_loss,
        )  # fmt: skip
    elif algorithm.adv_estimator not in ("rloo", DISTILL) and loss == "sequence":
        logger.warning(
            "algorithm.adv_estimator=%s with actor_rollout_ref.actor.policy_loss.loss_mode=sequence, which is RLOO's loss and "
            "the value of rloo_trainer. For PPO's loss set it to vanilla, or use --config-name ppo_trainer or grpo_trainer.",
            algorithm.adv_estimator,
        )
