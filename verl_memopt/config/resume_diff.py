"""What a resumed run changed in its settings, and what each change means for the run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from verl_memopt.algorithms.records import WITH_CRITIC
from verl_memopt.config.keys import flatten, leaf_keys
from verl_memopt.config.plain import to_plain
from verl_memopt.config.problems import shown
from verl_memopt.config.schema import Settings
from verl_memopt.knobs.knob import knobs

_AR = "actor_rollout_ref"
_SHARDED = (f"{_AR}.actor", f"{_AR}.ref", "critic.model", "reward_model.model")
_TRAINED = {f"{_AR}.actor": f"{_AR}.model", "critic": "critic.model"}
"""Section of each trained role -> section of its model."""

HARMLESS = "harmless"
TRAJECTORY = "changes the trajectory"
REFUSED = "refused"

HARMLESS_KEYS = {
    **dict.fromkeys(
        (
            *("trainer.logger", "trainer.table_every_steps", "trainer.track_memory_every_steps"),
            *("trainer.log_val_generations", "trainer.rollout_data_dir", "trainer.validation_data_dir"),
            *("trainer.project_name", "trainer.experiment_name", "trainer.default_local_dir"),
        ),
        "it says what is recorded, and where",
    ),
    **dict.fromkeys(
        (
            *("trainer.save_freq", "trainer.max_actor_ckpt_to_keep", "trainer.max_critic_ckpt_to_keep", "trainer.keep_best"),
            *("trainer.resume_mode", "trainer.resume_from_path"),
            *(f"{role}.checkpoint.save_contents" for role in _TRAINED),
        ),
        "it says which checkpoints are kept and read",
    ),
    **dict.fromkeys(
        (
            *("trainer.test_freq", "trainer.val_before_train", "trainer.val_only", "data.val_files", "data.val_max_samples"),
            *("data.val_batch_size", "data.validation_shuffle", f"{_AR}.rollout.val_kwargs.n"),
            *(f"{_AR}.rollout.val_kwargs.do_sample", f"{_AR}.rollout.val_kwargs.temperature"),
            *(f"{_AR}.rollout.val_kwargs.top_p", f"{_AR}.rollout.val_kwargs.top_k"),
        ),
        "training does not read it; validation scores before and after may not be comparable",
    ),
    **dict.fromkeys(
        (
            *("trainer.ray_wait_register_center_timeout", "trainer.stop_deadline_seconds", "trainer.max_skipped_steps"),
            *("ray_kwargs.ray_init", "ray_kwargs.timeline_json_file", "debug.mode"),
            *(
                f"{_AR}.nccl_timeout",
                "reward_model.num_workers",
                "reward_model.max_concurrent",
                "reward_model.sandbox_fusion.max_concurrent",
                f"{_AR}.rollout.disable_log_stats",
                f"{_AR}.rollout.mode",
            ),
            *("memory.host_limit_gb", "memory.pinned_limit_gb", f"{_AR}.rollout.max_logprob_diff"),
        ),
        "it says how processes run and when they stop",
    ),
    **dict.fromkeys(
        (
            *(key for knob in knobs() if knob.same_numbers for key in knob.keys),
            *(f"{role}.fsdp_config.forward_prefetch" for role in _SHARDED),
        ),
        "the same values are kept elsewhere, or computed again",
    ),
    "reward_model.residency": "the same weights lie elsewhere",
    **{f"{model}.lora_adapter_path": "the adapters come from the checkpoint" for model in _TRAINED.values()},
}
"""Key -> why no number of the training can depend on it. A key that is neither here nor refused changes the trajectory."""

ADAPTERS = dict.fromkeys(
    [f"{model}.{key}" for model in _TRAINED.values() for key in ("lora_rank", "target_modules", "exclude_modules")],
    "the weights of the checkpoint do not fit these adapters",
)
LENGTH_KEYS = ("trainer.total_training_steps", "trainer.total_epochs")
QUANTISED = ("int8", "int4")
STATE_FREE = frozenset({"eps", "betas", "lr", "weight_decay", "fused", "foreach", "maximize", "capturable", "differentiable"})
"""Arguments of an optimizer that its saved state does not depend on."""


@dataclass(frozen=True)
class Change:
    """A key that differs from the checkpoint's settings. kind: HARMLESS, TRAJECTORY or REFUSED. reason: may be empty."""

    key: str
    old: Any
    new: Any
    kind: str
    reason: str = ""

    def __str__(self) -> str:
        """Return the change as a log line shows it."""
        reason = f": {self.reason}" if self.reason else ""
        return f"{self.key}: {shown(self.old)} -> {shown(self.new)} ({self.kind}{reason})"


def kept_settings(settings: Settings) -> dict[str, Any]:
    """Return the settings as a checkpoint keeps them: dotted key -> plain value."""
    flat = flatten(to_plain(settings))
    return {key: flat.get(key, {}) for key in leaf_keys()}


def changes(before: Mapping[str, Any], settings: Settings) -> list[Change]:
    """Return what settings change of those that a checkpoint kept, in the order of the schema.

    A key that did not exist when the checkpoint was made counts as if it had had its default. In a run without a critic,
    the critic's keys are left out.

    Args:
        before: as :func:`kept_settings` gave it.
        settings: of the run that goes on.
    """
    defaults, now = kept_settings(Settings()), kept_settings(settings)
    # A checkpoint of an older version lacks keys that came later.
    old = {key: before.get(key, defaults[key]) for key in now}
    has_critic = now["algorithm.adv_estimator"] in WITH_CRITIC
    return [_judged(key, old, now) for key in now if old[key] != now[key] and (has_critic or not key.startswith("critic."))]


def _judged(key: str, old: Mapping[str, Any], now: Mapping[str, Any]) -> Change:
    kind, reason = _meaning(key, old, now)
    return Change(key, old[key], now[key], kind, reason)


def _meaning(key: str, old: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[str, str]:
    if key in HARMLESS_KEYS:
        return HARMLESS, HARMLESS_KEYS[key]
    if key in ADAPTERS:
        return REFUSED, ADAPTERS[key]
    rule = RULES.get(key)
    return (TRAJECTORY, "") if rule is None else rule(key, old, now)


def _length(key: str, old: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[str, str]:
    """Return the kind of a change in the run's length. It matters where the schedule has no length of its own and needs one."""
    if any(_reads_length(f"{role}.optim", now) for role in _TRAINED):
        return TRAJECTORY, "the learning rate depends on the length of the run"
    return HARMLESS, "the learning rate does not depend on it"


def _reads_length(optim: str, now: Mapping[str, Any]) -> bool:
    """Return whether the schedule of a section ``optim`` depends on the length of the run."""
    flat = now[f"{optim}.lr_scheduler_type"] in ("constant", "constant_with_warmup", "inverse_sqrt")
    warm = now[f"{optim}.lr_warmup_steps"] >= 0 or now[f"{optim}.lr_warmup_steps_ratio"] == 0
    return not (now[f"{optim}.total_training_steps"] > 0 or (flat and warm))


def _another_optimizer(key: str, old: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[str, str]:
    if not _optimizer_is_loaded(key, now):
        return TRAJECTORY, ""
    return REFUSED, "the optimizer's state in the checkpoint does not fit"


def _state_dtype(key: str, old: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[str, str]:
    quantised = old[key] in QUANTISED or now[key] in QUANTISED
    return _another_optimizer(key, old, now) if quantised else (TRAJECTORY, "")


def _optimizer_arguments(key: str, old: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[str, str]:
    one, other = old[key] or {}, now[key] or {}
    changed = {name for name in one.keys() | other.keys() if one.get(name) != other.get(name)}
    return (TRAJECTORY, "") if changed <= STATE_FREE else _another_optimizer(key, old, now)


def _optimizer_is_loaded(key: str, now: Mapping[str, Any]) -> bool:
    """Return whether the state of the optimizer that a key is about is read from the checkpoint."""
    role = next(role for role in _TRAINED if key.startswith(role + "."))
    return "optimizer" in (now[f"{role}.checkpoint.load_contents"] or [])


def _reference_sync(key: str, old: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[str, str]:
    if now[key] is None:
        return TRAJECTORY, "the reference goes back to the weights of its folder"
    return TRAJECTORY, "" if old[key] is not None else "the reference starts from the weights of its folder"


RULES: dict[str, Callable[[str, Mapping[str, Any], Mapping[str, Any]], tuple[str, str]]] = {
    **dict.fromkeys(LENGTH_KEYS, _length),
    f"{_AR}.ref.sync_every_steps": _reference_sync,
    **{
        f"{role}.optim.{key}": rule
        for role in _TRAINED
        for key, rule in {
            "optimizer": _another_optimizer,
            "optimizer_impl": _another_optimizer,
            "state_dtype": _state_dtype,
            "override_optimizer_config": _optimizer_arguments,
        }.items()
    },
}
"""Keys whose meaning depends on other keys or on the values."""
