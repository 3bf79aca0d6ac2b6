"""Resuming: the checkpoint that a run continues, its seeds, and the differences between its settings and the checkpoint's."""

from __future__ import annotations

import dataclasses
import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from verl_memopt.algorithms.records import WITH_CRITIC
from verl_memopt.config.keys import flatten, leaf_types, shown
from verl_memopt.config.loader import to_plain
from verl_memopt.config.reward_rules import FURTHER
from verl_memopt.config.schema import Actor, Critic, Data, Rollout, Settings, Trainer
from verl_memopt.distributed.file_records import digest_of
from verl_memopt.errors import ConfigError
from verl_memopt.memory.knob import knobs
from verl_memopt.observe.own_files import differs_from_name
from verl_memopt.observe.run_folder import BEST_MODEL, FINAL_MODEL, is_run_file
from verl_memopt.observe.secrets import without_secrets_of
from verl_memopt.run.checkpoints import Checkpoint, CheckpointStore, is_checkpoint, read_checkpoint
from verl_memopt.run.environment import Environment

logger = logging.getLogger(__name__)

Shapes = Mapping[str, tuple[int, ...]]

WAY_OUT = "Set it back to continue this run, or start another: trainer.experiment_name=..., or trainer.resume_mode=disable."
MOST_NAMED = 3
"""Largest number of weights that an error names."""


def checkpoint_store(trainer: Trainer, has_validation: bool, run_dir: Path) -> CheckpointStore:
    # ``trainer.keep_best=null`` means true for a run that validates.
    validates = has_validation and trainer.test_freq > 0
    keep_best = validates if trainer.keep_best is None else trainer.keep_best
    return CheckpointStore(run_dir, trainer.max_actor_ckpt_to_keep, keep_best, trainer.keep_best_checkpoint)


def loaded_parts(actor: Actor, critic: Critic | None) -> dict[str, list[str]]:
    roles: dict[str, Actor | Critic | None] = {"actor_rollout_ref.actor": actor, "critic": critic}
    return {f"{name}.checkpoint.load_contents": list(role.checkpoint.load_contents or []) for name, role in roles.items() if role}


def find_checkpoint(
    trainer: Trainer, loaded: Mapping[str, Sequence[str]], store: CheckpointStore, unreadable: Mapping[int, str]
) -> Checkpoint | None:
    """Return the checkpoint that ``trainer.resume_mode`` selects; None for a fresh start.

    ``loaded``: see :func:`loaded_parts`. ``unreadable``: step -> fault of checkpoints that could not be loaded.

    Raises:
        CheckpointError: The named checkpoint is not whole, or there are checkpoints but none of them is whole.
        ConfigError: The checkpoint would be loaded without the model.
    """
    if trainer.resume_mode == "disable":
        return None
    if trainer.resume_mode == "auto":
        checkpoint = store.newest(unreadable)
    else:
        assert trainer.resume_from_path is not None, "checked when settings are loaded"
        checkpoint = _named_checkpoint(Path(trainer.resume_from_path))
        # The checkpoint may be in the folder of another run. Then this run must neither mark nor remove it.
        store.resumed(checkpoint)
    for key, contents in loaded.items():
        if checkpoint is not None and "model" not in contents:
            raise ConfigError(
                f"{key}={list(contents)}: a run cannot go on from {checkpoint.folder} without "
                "the model. Add model (also to save_contents), or set trainer.resume_mode=disable."
            )
    return checkpoint


def _named_checkpoint(path: Path) -> Checkpoint:
    folder = path.expanduser().resolve()
    newest = None if is_checkpoint(folder) else CheckpointStore(folder, None).newest()
    return read_checkpoint(folder) if newest is None else newest


def compare_settings(
    settings: Settings, environment: Environment, checkpoint: Checkpoint, contents: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Log how the settings, and the files that they name, differ from those of the checkpoint, in one line per key.

    ``settings``: must have concrete seeds. ``contents``: the result of :func:`contents_of`.

    Raises:
        ConfigError: The run cannot continue with a change.
    """
    driver, folder = checkpoint.driver, checkpoint.folder
    if driver["seed"] != settings.data.seed:
        raise ConfigError(
            f"data.seed={settings.data.seed}: the run in {folder.parent} was made with {driver['seed']}. Leave data.seed out to "
            "continue it, or start another: trainer.experiment_name=..., or trainer.resume_mode=disable."
        )
    differences = changes(driver["settings"], settings)
    for change in differences:
        logger.log(logging.INFO if change.kind == HARMLESS else logging.WARNING, "since %s: %s", folder.name, change)
    changed = {change.key for change in differences}
    kept = kept_settings(settings)
    for key, digest in driver.get("contents", {}).items():
        if key not in changed and contents.get(key, digest) != digest:
            logger.warning("since %s: %s=%s: other contents (%s)", folder.name, key, shown(kept[key]), TRAJECTORY)
    refused = [f"{change.key}={change.new}: {change}" for change in differences if change.kind == REFUSED]
    models = [("actor_rollout_ref.model.path", settings.actor_rollout_ref.model.path, driver["weights"], environment.weights)]
    # A run without a critic may continue from a checkpoint that has one, so only runs with a critic compare its weights.
    if environment.critic_weights and driver.get("critic_weights"):
        models.append(
            ("critic.model.path", str(settings.critic.model.path), driver["critic_weights"], environment.critic_weights)
        )
    elif environment.critic_weights:
        refused.append(f"algorithm.adv_estimator={settings.algorithm.adv_estimator}: there is no critic in {folder}")
    for key, path, before, now in models:
        different = _different(before, now)
        if different:
            refused.append(f"{key}={path}: its weights are not those of {folder} ({different})")
    if refused:
        raise ConfigError(f"{'. '.join(refused)}. {WAY_OUT}")


def with_seeds(data: Data, rollout: Rollout, resumed_seed: int | None) -> tuple[Data, Rollout]:
    """Return both sections with concrete seeds: from the settings, or else from the resumed run, or else drawn and logged.

    The seed of the rollout defaults to the seed of the data. ``resumed_seed``: None for a fresh start.
    """
    seed = data.seed
    if seed is not None and rollout.seed is not None:
        return data, rollout
    if seed is None:
        seed = secrets.randbelow(2**31) if resumed_seed is None else resumed_seed
        logger.info(
            "data.seed is not set; this run uses %d (%s)", seed, "drawn" if resumed_seed is None else "from the checkpoint"
        )
    rollout_seed = seed if rollout.seed is None else rollout.seed
    return dataclasses.replace(data, seed=seed), dataclasses.replace(rollout, seed=rollout_seed)


def plain_shapes(weights: Shapes) -> dict[str, list[int]]:
    return {name: list(shape) for name, shape in weights.items()}


def _different(before: Mapping[str, Any], now: Shapes) -> str:
    shapes = {name: (_shape(before.get(name)), _shape(now.get(name))) for name in sorted(before.keys() | now.keys())}
    names = [name for name, (stored, present) in shapes.items() if stored != present]
    texts = [f"{name}: {shapes[name][0]} there, {shapes[name][1]} here" for name in names[:MOST_NAMED]]
    more = [f"{len(names) - MOST_NAMED} more"] if len(names) > MOST_NAMED else []
    return "; ".join([*texts, *more])


def _shape(shape: Any) -> str:
    return "missing" if shape is None else "x".join(map(str, shape))


# The changes in the settings of a resumed run, and the effect of each change on the run.


_AR = "actor_rollout_ref"
_SHARDED = (f"{_AR}.actor", f"{_AR}.ref", "critic.model", "reward_model.model")
_TRAINED = {f"{_AR}.actor": f"{_AR}.model", "critic": "critic.model"}
"""Section of each trained role -> section of its model."""

HARMLESS = "harmless"
TRAJECTORY = "changes the trajectory"
REFUSED = "refused"

_BY_REASON = {
    "it decides what is recorded, and where": (
        *("trainer.logger", "trainer.table_every_steps", "trainer.track_memory_every_steps"),
        *("trainer.log_val_generations", "trainer.rollout_data_dir", "trainer.validation_data_dir"),
        *("trainer.project_name", "trainer.experiment_name", "trainer.default_local_dir"),
    ),
    "it decides which checkpoints are kept and read": (
        *("trainer.save_freq", "trainer.max_actor_ckpt_to_keep", "trainer.max_critic_ckpt_to_keep", "trainer.keep_best"),
        *("trainer.keep_best_checkpoint", "trainer.save_final_model", "trainer.resume_mode", "trainer.resume_from_path"),
        "trainer.private_files",
        *(f"{role}.checkpoint.save_contents" for role in _TRAINED),
    ),
    "training does not use it; validation scores before and after may not be comparable": (
        *("trainer.test_freq", "trainer.val_before_train", "trainer.val_only", "data.val_files", "data.val_max_samples"),
        *("data.val_batch_size", "data.validation_shuffle"),
        *(f"{_AR}.rollout.val_kwargs.{key}" for key in ("n", "do_sample", "temperature", "top_p", "top_k")),
    ),
    "it decides how processes run and when they stop": (
        *("trainer.ray_wait_register_center_timeout", "trainer.stop_deadline_seconds", "trainer.max_skipped_steps"),
        *("ray_kwargs.ray_init", "ray_kwargs.timeline_json_file", "debug.mode", f"{_AR}.nccl_timeout"),
        *(f"reward_model.{key}" for key in ("num_workers", "max_concurrent", "sandbox_fusion.max_concurrent")),
        *(f"{_AR}.rollout.{key}" for key in ("disable_log_stats", "mode", "max_logprob_diff")),
        *("memory.card_gb", "memory.host_limit_gb", "memory.pinned_limit_gb"),
    ),
    "the same values are stored elsewhere, or computed again": (
        *(key for knob in knobs() if knob.same_numbers for key in knob.keys),
        *(f"{role}.fsdp_config.forward_prefetch" for role in _SHARDED),
    ),
    "the same weights are stored elsewhere": ("reward_model.residency",),
    "the adapters come from the checkpoint": [f"{model}.lora_adapter_path" for model in _TRAINED.values()],
}
HARMLESS_KEYS = {key: reason for reason, keys in _BY_REASON.items() for key in keys}
"""Key -> why no number of the training depends on it. A key that is neither here nor refused changes the trajectory."""

LAYERS = ("lora_rank", "target_modules", "exclude_modules", "target_parameters")
"""Settings that say which adapters there are."""
ADAPTERS = dict.fromkeys(
    [f"{model}.{key}" for model in _TRAINED.values() for key in LAYERS],
    "the weights of the checkpoint do not fit these adapters",
)
LENGTH_KEYS = ("trainer.total_training_steps", "trainer.total_epochs")
QUANTISED = ("int8", "int4")
STATE_FREE = frozenset({"eps", "betas", "lr", "weight_decay", "fused", "foreach", "maximize", "capturable", "differentiable"})
"""Arguments of an optimizer that have no influence on the form of its saved state."""


@dataclass(frozen=True)
class SettingChange:
    """A key whose value differs from the checkpoint's. ``kind``: HARMLESS, TRAJECTORY or REFUSED. ``reason`` may be empty."""

    key: str
    old: Any
    new: Any
    kind: str
    reason: str = ""

    def __str__(self) -> str:
        reason = f": {self.reason}" if self.reason else ""
        return f"{self.key}: {shown(self.old)} -> {shown(self.new)} ({self.kind}{reason})"


def kept_settings(settings: Settings) -> dict[str, Any]:
    """Return the settings in the form that a checkpoint keeps: dotted key -> plain value, without secrets."""
    flat = flatten(to_plain(settings))
    return _without_secrets({key: flat.get(key, {}) for key in leaf_types()})


def _without_secrets(kept: Mapping[str, Any]) -> dict[str, Any]:
    return {key: without_secrets_of(key, value) for key, value in kept.items()}


def contents_of(settings: Settings, environment: Environment) -> dict[str, str]:
    """Return the key of each file or folder that training reads -> a checksum of its contents.

    Of the large files of a model only parts are hashed. Data sources on the hub are left out.
    """
    digests: dict[str, str] = {}
    for key, paths in _files_read(settings, environment).items():
        if key not in HARMLESS_KEYS and paths and all(path.exists() for path in paths):
            with suppress(OSError):  # the code that reads the file later reports the error
                digests[key] = ",".join(digest_of(path) for path in paths)
    return digests


def _files_read(settings: Settings, environment: Environment) -> dict[str, list[Path]]:
    # The files need not exist.
    folders = {
        f"{_AR}.model.path": environment.folder, f"{_AR}.ref.model.path": environment.reference_folder,
        "critic.model.path": environment.critic_folder,
    }  # fmt: skip
    found = {}
    for key, value in kept_settings(settings).items():
        if key.endswith(("path", "_files")) and key not in ("trainer.resume_from_path", "trainer.default_local_dir"):
            named = [folders[key]] if key in folders else value if isinstance(value, list) else [value]
            found[key] = [Path(str(path)).expanduser() for path in named if path is not None]
    found[FURTHER] = [Path(path).expanduser() for path in settings.reward_model.further_models.values()]
    return found


def check_own_files(settings: Settings, environment: Environment, folder: Path, continues: bool) -> None:
    """Refuse settings that name files which this start moves or overwrites in its own folder.

    ``continues``: the start continues the run in that folder.
    """
    for key, paths in _files_read(settings, environment).items():
        if changed := next((path for path in paths if differs_from_name(path)), None):
            raise ConfigError(f"{key}={changed}: it has other contents than were written. Start the run from Python again.")
        for path in (named.resolve() for named in paths if named.resolve().is_relative_to(folder.resolve())):
            name = path.relative_to(folder.resolve()).parts[:1]
            if name and (name[0] in (FINAL_MODEL, BEST_MODEL) or (is_run_file(name[0]) and not continues)):
                raise ConfigError(
                    f"{key}={path}: an earlier run left it in {folder}, where this run would replace it. Give this "
                    "run another folder: trainer.default_local_dir=..., or run_dir=... from Python."
                )


def changes(before: Mapping[str, Any], settings: Settings) -> list[SettingChange]:
    """Return which settings differ from those that a checkpoint kept, in the order of the schema.

    If a key did not exist when the checkpoint was made, it counts as having had its default. In a run without a critic, the
    critic's keys are left out. ``before``: the result of :func:`kept_settings` at that time.
    """
    now, old = kept_settings(settings), {**kept_settings(Settings()), **_without_secrets(before)}
    has_critic = now["algorithm.adv_estimator"] in WITH_CRITIC
    changed = [key for key in now if old[key] != now[key] and (has_critic or not key.startswith("critic."))]
    return [SettingChange(key, old[key], now[key], *_meaning(key, old, now)) for key in changed]


def _meaning(key: str, old: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[str, str]:
    if key in HARMLESS_KEYS:
        return HARMLESS, HARMLESS_KEYS[key]
    if key in ADAPTERS:
        return REFUSED, ADAPTERS[key]
    rule = RULES.get(key)
    return (TRAJECTORY, "") if rule is None else rule(key, old, now)


def _length(key: str, old: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[str, str]:
    # A change of the run's length matters only if the schedule of the learning rate depends on it.
    for optim in (f"{role}.optim" for role in _TRAINED):
        flat = now[f"{optim}.lr_scheduler_type"] in ("constant", "constant_with_warmup", "inverse_sqrt")
        warm = now[f"{optim}.lr_warmup_steps"] > 0 or now[f"{optim}.lr_warmup_steps_ratio"] == 0
        if not (now[f"{optim}.total_training_steps"] > 0 or (flat and warm)):
            return TRAJECTORY, "the learning rate depends on the length of the run"
    return HARMLESS, "the learning rate does not depend on it"


STATE_FITS: dict[str, Callable[[Any, Any, str], bool]] = {
    "optimizer": lambda old, new, optimizer: False,
    "optimizer_impl": lambda old, new, optimizer: False,
    "state_dtype": lambda old, new, optimizer: old not in QUANTISED and new not in QUANTISED,
    "momentum": lambda old, new, optimizer: bool(old and new),
    "stochastic_rounding": lambda old, new, optimizer: optimizer != "SGD",  # SGD counts its steps for the rounding alone
    "override_optimizer_config": lambda old, new, optimizer: all(
        (old or {}).get(name) == (new or {}).get(name) for name in {**(old or {}), **(new or {})}.keys() - STATE_FREE
    ),
}
"""Key of an optimizer -> function of (old value, new value, name of the optimizer): whether the checkpoint's state fits."""


def _optimizer(key: str, old: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[str, str]:
    role, _, name = key.partition(".optim.")
    is_loaded = "optimizer" in (now[f"{role}.checkpoint.load_contents"] or [])
    fits = STATE_FITS[name](old[key], now[key], now[f"{role}.optim.optimizer"])
    return (TRAJECTORY, "") if fits or not is_loaded else (REFUSED, "the optimizer's state in the checkpoint does not fit")


def _reference_sync(key: str, old: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[str, str]:
    if now[key] is None:
        return TRAJECTORY, "the reference goes back to the weights of its folder"
    return TRAJECTORY, "" if old[key] is not None else "the reference starts from the weights of its folder"


def _streaming(key: str, old: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[str, str]:
    return REFUSED, "a place in a stream is no place among rows that were read whole"


RULES: dict[str, Callable[[str, Mapping[str, Any], Mapping[str, Any]], tuple[str, str]]] = {
    **dict.fromkeys(LENGTH_KEYS, _length),
    f"{_AR}.ref.sync_every_steps": _reference_sync,
    "data.streaming": _streaming,
    **{f"{role}.optim.{name}": _optimizer for role in _TRAINED for name in STATE_FITS},
}
"""Key -> function that returns kind and reason of its change, for keys whose effect depends on other keys or on the values."""
