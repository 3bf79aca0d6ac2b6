"""Settings from a config name and overrides: compose, translate spellings, build typed sections, check.

Hydra composes a plain mapping, the rest is ours.
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

from verl_memopt.algorithms.records import LOSSES, SFT
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
from verl_memopt.config.schema import Algorithm, Settings
from verl_memopt.config.values import build
from verl_memopt.config.values_of_python import as_override, with_quotes
from verl_memopt.errors import ConfigError
from verl_memopt.memory import lora, profiles
from verl_memopt.memory.knob import needs_reference
from verl_memopt.observe.secrets import without_secrets_of
from verl_memopt.records import parse_json, path_fault, read_record

logger = logging.getLogger(__name__)

PACKAGED = Path(__file__).parent / "yaml"
VERLS_OWN = Path("config")
"""The ``--config-path`` in verl's scripts, which means verl's packaged configs."""
LAST = frozenset({"memory", "model"})
"""Groups of presets: they win over a recipe's keys, and the command line wins over them."""
_COMPOSE_ERRORS = (
    *(HydraException, OmegaConfBaseException, yaml.YAMLError),
    *(OSError, ValueError, TypeError, AttributeError, LookupError, RecursionError),  # of files that hold something else
)


def load_settings(
    config_name: str,
    overrides: list[str],
    config_dir: str | None = None,
    quiet: Set[str] = frozenset(),
    values: Mapping[str, Any] = MappingProxyType({}),
) -> Settings:
    """Compose a named config with overrides on top, and return typed, linked and checked settings.

    Args:
        config_name: Name of the YAML file, with or without ``.yaml``.
        overrides: ``key=value`` lines, as on the command line.
        config_dir: A recipe's folder; its files may name the packaged configs in their ``defaults`` list.
        quiet: Names whose reading is not logged.
        values: Key -> plain value. They count as written on the command line, and are never parsed as text.

    Raises:
        ConfigError: Lists everything that is wrong, before anything is started.
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
    # A space after the backslash that ends a line of a script becomes an argument of its own.
    kept = [override for override in overrides if override.strip()]
    if len(kept) < len(overrides):
        logger.warning("an argument of spaces alone is left out: a backslash with a space after it does not continue a line")
    return kept


def settings_from_mapping(
    tree: Mapping[str, Any],
    preset_keys: Set[str] = frozenset(),
    written: KeySources | None = None,
    quiet: Set[str] = frozenset(),
) -> Settings:
    """Build settings from a mapping, nested or with dotted keys, that holds only the keys that differ from the defaults.

    Spellings are translated, keys without effect are dropped with a warning, and typed sections are built and then checked.

    Args:
        tree: The settings.
        preset_keys: Keys that a preset set and the user did not. They cause no warning if they have no effect, because one
            profile serves runs with and without a critic or a reference.
        written: Keys that the user wrote, for which a second spelling is a problem; None = all keys of ``tree``.
        quiet: Names whose reading is not logged.

    Raises:
        ConfigError: Lists everything that is wrong.
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
            logger.info("on each device the profile sets one copy of the weights instead of moving them: %s", shared)
    if not mistyped and (streams := profiles.streamed(settings, _by_user(translated, preset_keys, written))):
        preset_keys, translated = preset_keys | streams.keys(), translated | streams
        settings, values, _ = build(translated)
        logger.info("on one device the profile streams the reference instead of moving it: %s=%s", *next(iter(streams.items())))
    problems += mistyped
    wrong = {key for found in problems for key in found.keys}
    problems += check(settings, values, frozenset(translated) - preset_keys, wrong)
    raise_together(problems)
    return settings


def _by_user(translated: Mapping[str, Any], preset_keys: Set[str], written: KeySources | None) -> Set[str]:
    # A key that the user wrote counts as the user's even if it has the preset's value.
    return (frozenset(translated) - preset_keys) | (written.command_line if written else frozenset())


def compose_mapping(
    config_name: str,
    overrides: list[str],
    config_dir: str | None = None,
    values: Mapping[str, Any] = MappingProxyType({}),
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Let Hydra compose a config name and overrides, and return a plain nested mapping with interpolations resolved.

    The second mapping has the presets that the command line names: group -> name. ``values``: see :func:`load_settings`.
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
            mend = "Write key=value, and quote text with special characters."
            if os.path.isfile(text):  # False for what can be no name of a file, where Path.is_file raises
                mend = _as_file(text)
            problems.append(Problem((), f"{shown(text)}: {_one_line(error)}. {mend}"))
        except ConfigError as error:
            problems.append(Problem((), f"{text:.200}: {error}"))
        except ValueError as error:  # a number with more digits than Python reads is one
            problems.append(Problem((), f"{text:.200}: {error!s:.200}"))
        else:
            # Written once without the user's own plus signs, so that a key works whether or not a file already sets it.
            signed.append(line if sign is None else sign + line.lstrip("+"))
            if override.key_or_group in LAST:
                presets[override.key_or_group] = override.value()
    raise_together(problems)

    # Hydra keeps one state for the process, and a call that failed before may have left it behind.
    GlobalHydra.instance().clear()
    try:
        with _with_named_profiles(folder) as (first, others), initialize_config_dir(str(first), version_base="1.3"):
            config = compose(config_name, [*signed, f"hydra.searchpath=[{','.join(map(_quoted, others))}]"])
        given = OmegaConf.to_container(config, resolve=False)
        resolved = given
        if "${" in str(given):  # one may name a key that only the defaults or the values have
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
        # A dict is merged into one that is there, as on a command line.
        place[name] = _added(place.get(name), value)
    return tree


def _added(before: Any, value: Any) -> Any:
    if not (isinstance(before, Mapping) and isinstance(value, Mapping)):
        return value
    return {**before, **{name: _added(before.get(name), added) for name, added in value.items()}}


def _with_profile(line: str) -> str:
    # Replace the size of a card in ``memory=24`` by the name of its profile.
    key, sign, value = line.partition("=")
    if key.lstrip("+") != "memory" or not sign:
        return line
    return f"{key}={profiles.profile_named(value.strip(chr(34) + chr(39)))}"


@contextmanager
def _with_named_profiles(folder: Path) -> Iterator[tuple[Path, list[Path]]]:
    """Yield the folder that Hydra reads first, and the folders it searches after it.

    Hydra takes no number in a list of defaults. If a file's list names a profile by the size of a card (``memory: 32``), Hydra
    reads copies of the folder's files that have the profile's name instead.
    """
    files = list(folder.glob("*.yaml"))
    named = {file.name: text for file in files if (text := _with_named_profile(file)) is not None}
    if not named:
        yield folder, [PACKAGED]
        return
    with TemporaryDirectory(prefix="verl_memopt-") as copies:
        for file in files:  # the first folder needs the one that is named too
            shutil.copyfile(file, Path(copies) / file.name)
        for name, text in named.items():
            (Path(copies) / name).write_text(text, encoding="utf-8")
        yield Path(copies), [folder, PACKAGED]


def _with_named_profile(file: Path) -> str | None:
    # The text of a config whose list of defaults names a profile by its size, with the profile's name; else None.
    try:
        text = file.read_text(encoding="utf-8")
        tree = yaml.compose(text, Loader=yaml.SafeLoader)
    except (OSError, ValueError, yaml.YAMLError):
        return None  # Hydra says what is wrong, if it reads the file
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
    # An entry of Hydra's search path.
    escaped = str(folder).replace("\\", "\\\\").replace("'", "\\'")
    return f"'file://{escaped}'"


def _folder(config_name: str, config_dir: str | None) -> Path:
    folder = PACKAGED if config_dir is None else Path(config_dir).resolve()
    if not folder.is_dir() and Path(config_dir or "") == VERLS_OWN:
        logger.info("config_dir=%s is read as the packaged configs: verl looks for it in its own package", config_dir)
        folder = PACKAGED
    if not folder.is_dir():
        raise ConfigError(f"config_dir={config_dir}: no such folder. Give the folder that holds {config_name}.yaml.")
    names = sorted({file.stem for place in (folder, PACKAGED) for file in place.glob("*.yaml")})
    if config_name.removesuffix(".yaml") not in names:
        raise ConfigError(f"config_name={config_name}: no such config. Choose one of {', '.join(names)}. {_as_file(config_name)}")
    return folder


def _as_file(text: str) -> str:
    # A path in the place of a name gets the exact command.
    path = Path(text)
    if path.suffix in (".yaml", ".yml") and path.is_file():
        return f"For this file give --config-dir {path.parent} --config-name {path.stem}."
    return "For one of your own give --config-dir as well."


def _sign(override: Override, packaged: set[str], groups: set[str], folder: Path) -> str | None:
    # The sign that makes Hydra take an override whether or not a file sets its key; None = leave it as it is written.
    key = override.key_or_group
    if key.split(".")[0] == "hydra":
        raise ConfigError("Hydra only composes the settings here, its own keys have no effect. Remove the override.")
    if override.is_sweep_override():
        raise ConfigError(f"several values for one key. Write a list as {key}=[a,b]; sweeps are not available.")
    if not key:
        raise ConfigError("no key before the sign. Write key=value.")
    is_deleted = override.type is OverrideType.DEL
    if key not in packaged | groups:
        return None if is_deleted or override.package else "++"
    if not is_deleted and not isinstance(override.value(), str | list):
        raise ConfigError(f"a group takes the name of one of its files. Write {key}=<name>.")
    if key in packaged and isinstance(value := override.value(), str):
        _check_preset(key, value, folder)
    if key in LAST and not is_deleted:
        # Appended, a profile stands after the recipe's own keys. A command line's keys still come after it.
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
    # Hydra's messages end in a long list of search paths.
    return " ".join(str(error).split()).partition(" Config search path:")[0].rstrip(".")


# Settings as a plain tree, for the log, the run folder and other programs.


def changed(settings: Settings, keys: Mapping[str, Any]) -> Settings:
    """Return settings with other values of some keys.

    Raises:
        ConfigError: The new combination is refused.
    """
    return settings_from_mapping({**flatten(to_plain(settings)), **keys})


def to_plain(value: Any) -> Any:
    """Convert a section to nested dicts and lists for YAML and JSON. This does not count as reading its keys."""
    if dataclasses.is_dataclass(value):
        values = vars(value)
        return {name: to_plain(values[name]) for name in field_types(value.__class__)}
    if isinstance(value, dict):
        return {key: to_plain(item) for key, item in value.items()}
    return [to_plain(item) for item in value] if isinstance(value, list | tuple) else value


def to_yaml(settings: Settings, secrets: bool = True) -> str:
    """Write the settings as YAML in the order of the schema. ``secrets=False`` writes a checksum in place of each secret."""
    plain = to_plain(settings)
    if not secrets:
        plain = _with_values({}, {key: without_secrets_of(key, value) for key, value in flatten(plain).items()})
    return str(yaml.safe_dump(plain, sort_keys=False, allow_unicode=True))


# Token budgets of memory profiles that make room for the longest sample of a run.
#
# A profile cannot know a run's lengths. A sample is never split, so a budget below the longest sample cannot be kept anyway: it
# becomes the length of that sample, and a log line says so. A budget that the user wrote stays, and is refused if it is too
# small.

LENGTHS = ("data.max_prompt_length", "data.max_response_length")
BUDGETS = {
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": "actor_rollout_ref.actor.fsdp_config",
    "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu": "actor_rollout_ref.actor.fsdp_config",
    "critic.ppo_max_token_len_per_gpu": "critic.model.fsdp_config",
}
"""Token budget per device, as profiles set it -> the section that says how many devices share a micro-batch."""


def with_room_for_samples(values: Mapping[str, Any], preset_keys: Set[str]) -> dict[str, Any]:
    lengths = [values.get(key, value_at(Settings(), key)) for key in LENGTHS]
    if not all(isinstance(length, int) for length in lengths):
        return dict(values)  # reported elsewhere
    longest = {}
    for key, section in BUDGETS.items():
        ranks = values.get(f"{section}.ulysses_sequence_parallel_size")
        longest[key] = -(-sum(lengths) // (ranks if isinstance(ranks, int) and ranks > 0 else 1))
    raised = {key: tokens for key, tokens in longest.items() if key in preset_keys and values[key] < tokens}
    critic_only = raised.keys() <= {"critic.ppo_max_token_len_per_gpu"}
    if raised and not critic_only:
        logger.warning(
            "the profile's budget of %d tokens is raised to %d, the longest sample (%s + %s), so the run needs more memory than "
            "the profile's file says. Lower the lengths to keep its figures",
            min(values[key] for key in raised), max(raised.values()), *LENGTHS,
        )  # fmt: skip
    return {**values, **raised}


# LoRA settings that the user leaves out are read from the folder of the trained adapters, as in verl.

MODELS = ("actor_rollout_ref.model", "critic.model")
"""Sections of the models that may have adapters."""
_SNAPSHOT = frozenset({"snapshots"})
"""Folder of the hub's cache whose subfolders are named by commits instead of models."""


def adapter_settings(model: str, user_values: Mapping[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
    """Read the LoRA settings from a model's adapter folder; return our dotted key -> value, and the folder's problems.

    The folder is read if it has an ``adapter_config.json``. Keys that the user set are left out.

    ``user_values``: Dotted key -> value of the keys that the user set, under our names.
    """
    key, rank = f"{model}.lora_adapter_path", f"{model}.lora_rank"
    path = user_values.get(key)
    if not isinstance(path, str) or path_fault(path) or not (file := Path(path) / "adapter_config.json").is_file():
        return {}, []
    try:
        config = parse_json(read_record(file, follow=True), dict[str, Any])
        saved = config.get("modules_to_save")
        # The critic's head is written beside its adapters.
        reasons = lora.not_here(config | ({"modules_to_save": None} if model == MODELS[1] and saved == ["score"] else {}))
    except (OSError, ValueError, AttributeError):
        return {}, [problem({key: path}, "its adapter_config.json is no JSON object", f"Set {rank}.")]
    if reasons:
        return {}, [problem({key: path}, f"its adapter_config.json has {'; '.join(reasons)}", "Give adapters without them.")]
    if rank in user_values and config.get("r") not in (None, user_values[rank]):
        given = {rank: user_values[rank], key: path}
        return {}, [problem(given, f"the adapters have rank {config['r']}", f"Leave {rank} out.")]
    base, own = (str(name or "") for name in (config.get("base_model_name_or_path"), user_values.get(f"{model}.path")))
    if base and own and not _SNAPSHOT & {Path(base).parent.name, Path(own).parent.name} and Path(base).name != Path(own).name:
        logger.warning("%s=%s: the adapters were trained on %s, and the model is %s", key, path, base, own)
    if config.get("lora_dropout"):
        logger.warning("%s=%s: the adapters were trained with dropout, and are trained on without it", key, path)
    read = {f"{model}.{ours}": config[name] for name, ours in lora.PEFT.items() if config.get(name) is not None}
    from_folder = {name: value for name, value in read.items() if name not in user_values}
    for name in (f"{model}.lora_alpha", f"{model}.use_rslora"):
        if name in read and name in user_values and user_values[name] != read[name]:
            logger.warning("%s=%s: the adapters of %s were trained with %s", name, user_values[name], path, shown(read[name]))
    if from_folder:
        logger.info("%s=%s sets %s", key, path, ", ".join(f"{name}={shown(value)}" for name, value in from_folder.items()))
    return from_folder, []


# What a run trains, in one line, so that nobody has to work it out from a recipe, a profile and a command line.

_BYPASS = {"ppo_clip": "one clipped ratio to the engine per token", "reinforce": "log-probs without a ratio"}


def objective(algorithm: Algorithm, loss: str, kl_in_loss: str | None) -> str:
    """Describe the estimator, the loss, every KL and the group filter of a run in one line.

    ``kl_in_loss``: coefficient and kind of the KL in the loss; None = there is none.
    """
    if algorithm.adv_estimator == SFT:
        return "supervised, the mean negative log-prob of the tokens of the dataset's responses"
    correction, loss_in_words = algorithm.rollout_correction, f"loss {loss} ({LOSSES[loss].ratio})"
    if correction.bypass_mode:
        loss_in_words = f"loss {correction.loss_type} ({_BYPASS[correction.loss_type]})"
    normalized = " (normalised over the step)" if algorithm.normalize_advantages and algorithm.adv_estimator == "rloo" else ""
    parts = [f"advantages {algorithm.adv_estimator}{normalized}", loss_in_words]
    if kl_in_loss is not None:
        parts.append(f"KL in the loss {kl_in_loss}")
    if algorithm.use_kl_in_reward:
        parts.append(f"KL in the reward {algorithm.kl_ctrl.kl_coef:g} x {algorithm.kl_penalty}")
    if len(parts) == 2:
        parts.append("no KL")
    if correction.rollout_is is not None and not (correction.bypass_mode and correction.loss_type == "ppo_clip"):
        parts.append(f"importance weights per {correction.rollout_is}")
    if correction.rollout_rs is not None:
        parts.append(f"rejection {correction.rollout_rs}")
    if algorithm.use_pf_ppo:
        parts.append(f"rows drawn by score ({algorithm.pf_ppo.reweight_method})")
    if algorithm.filter_groups.enable:
        parts.append(f"groups whose responses agree in {algorithm.filter_groups.metric or 'score'} left out")
    return ", ".join(parts)


def reference_in_words(settings: Settings) -> str:
    model, key = settings.actor_rollout_ref.model, "actor_rollout_ref.ref.adapter"
    if model.lora_adapter_path is None:
        return f"{model.path} without adapters"
    if settings.actor_rollout_ref.ref.adapter == "base":
        return f"{model.path} without the adapters that training starts from ({key}=base)"
    return f"{model.path} with the adapters of {model.lora_adapter_path}, as training starts ({key}=base takes the base alone)"


def log_objective(settings: Settings) -> None:
    algorithm, actor = settings.algorithm, settings.actor_rollout_ref.actor
    loss = actor.policy_loss.loss_mode
    kl_in_loss = f"{actor.kl_loss_coef:g} x {actor.kl_loss_type}" if actor.use_kl_loss else None
    logger.info("objective: %s", objective(algorithm, loss, kl_in_loss))
    if needs_reference(settings) and settings.actor_rollout_ref.model.lora_rank:
        logger.info("the KL's reference is %s", reference_in_words(settings))
    bypass_loss = algorithm.rollout_correction.loss_type if algorithm.rollout_correction.bypass_mode else None
    if bypass_loss is not None and loss != "vanilla":
        logger.warning(
            "actor_rollout_ref.actor.policy_loss.loss_mode=%s has no effect: algorithm.rollout_correction.bypass_mode=true has "
            "losses of its own, loss_type=%s.", loss, bypass_loss,
        )  # fmt: skip
    elif algorithm.adv_estimator != "rloo" and loss == "sequence":
        logger.warning(
            "algorithm.adv_estimator=%s with actor_rollout_ref.actor.policy_loss.loss_mode=sequence, which is RLOO's loss and "
            "what rloo_trainer sets. For PPO's loss set it to vanilla, or use --config-name ppo_trainer or grpo_trainer.",
            algorithm.adv_estimator,
        )
