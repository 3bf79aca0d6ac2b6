"""What each debug mode leaves out of a run, and the settings that follow from it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from verl_memopt.algorithms.records import WITH_GREEDY_RESPONSES
from verl_memopt.memory.knob import Refusal

if TYPE_CHECKING:
    from verl_memopt.config.schema import Settings

_MODE = "debug.mode"
_ROLLOUT = "actor_rollout_ref.rollout"


@dataclass(frozen=True)
class DebugMode:
    """The parts of a training run that a mode runs.

    Attributes:
        reads_data: Prompts come from ``data.train_files``.
        has_engine: The rollout engine is built, and gets the policy's weights.
        replays: Responses come from a dump.
        scores: Answers get a reward from functions or models.
        computes_log_probs: The policy and the reference compute log-probs.
        updates: The policy learns.
        supervised: The policy learns the responses of the dataset, which nothing scores.
        default_steps: Steps where ``trainer.total_training_steps`` is null; None = as in a training run.
    """

    reads_data: bool = True
    has_engine: bool = True
    replays: bool = False
    scores: bool = True
    computes_log_probs: bool = True
    updates: bool = True
    supervised: bool = False
    default_steps: int | None = None

    @property
    def is_whole(self) -> bool:
        """Whether the mode is a training run: it validates, and saves and keeps checkpoints."""
        return self.reads_data and self.updates


MODES: dict[str, DebugMode] = {
    "off": DebugMode(),
    "dry": DebugMode(),
    "rollout_only": DebugMode(scores=False, computes_log_probs=False, updates=False, default_steps=1),
    "score_only": DebugMode(reads_data=False, has_engine=False, replays=True, updates=False),
    "train_only": DebugMode(reads_data=False, has_engine=False, replays=True, scores=False),
    "forge": DebugMode(reads_data=False, scores=False, default_steps=2),
    "memory": DebugMode(),
    "deterministic": DebugMode(),
    "sync_check": DebugMode(),
}
"""Value of ``debug.mode`` -> what it runs. The second step of ``forge`` is the first with optimizer state."""

REPLAYING = frozenset(name for name, mode in MODES.items() if mode.replays)
WITHOUT_DATA = frozenset(name for name, mode in MODES.items() if not mode.reads_data)
NOT_WHOLE = frozenset(name for name, mode in MODES.items() if not mode.is_whole)
DATA_KEYS = ("data.train_files", "data.val_files")
"""Required keys that a mode without data does not need."""


def of_mode(mode: str) -> dict[str, Any]:
    """Return dotted key -> value of the settings that a mode decides.

    Args:
        mode: Value of ``debug.mode``.
    """
    if mode in NOT_WHOLE:
        off = {"data.val_files": None, "trainer.val_before_train": False, "trainer.save_freq": -1, "trainer.test_freq": -1}
        return off if MODES[mode].updates else {**off, "actor_rollout_ref.actor.checkpoint.load_contents": ["model"]}
    if mode == "deterministic":
        roles = ("actor_rollout_ref.actor", "actor_rollout_ref.ref", "critic.model", "reward_model.model")
        return {
            **{f"{role}.fsdp_config.full_determinism": True for role in roles},
            "actor_rollout_ref.actor.use_torch_compile": False,
            "actor_rollout_ref.ref.use_torch_compile": False,
        }
    return {"trainer.track_memory_every_steps": 1} if mode == "memory" else {}


def _replays(settings: Settings) -> bool:
    return bool(settings.actor_rollout_ref.rollout.skip_rollout)


def _checks_sync(settings: Settings) -> bool:
    return settings.debug.mode == "sync_check"


def debug_rules() -> Iterator[Refusal]:
    """Yield what a debug mode, or a replay, cannot be combined with."""
    yield Refusal(
        (_MODE, "trainer.val_only"),
        lambda settings: settings.trainer.val_only and settings.debug.mode in NOT_WHOLE,
        "a validation alone runs none of what this mode looks at",
        "Set trainer.val_only=false, or debug.mode=off.",
    )
    yield Refusal(
        (f"{_ROLLOUT}.skip_rollout", _MODE),
        lambda settings: not _replays(settings) and settings.debug.mode in REPLAYING,
        "this mode replays stored rollouts",
        f"Remove {_ROLLOUT}.skip_rollout.",
    )
    yield Refusal(
        (f"{_ROLLOUT}.skip_rollout", _MODE),
        lambda settings: _replays(settings) and settings.debug.mode in ("rollout_only", "forge", "sync_check"),
        "this mode does not replay stored rollouts",
        f"Remove {_ROLLOUT}.skip_rollout.",
    )
    yield Refusal(
        (f"{_ROLLOUT}.skip_rollout", "algorithm.adv_estimator"),
        lambda settings: _replays(settings) and settings.algorithm.adv_estimator in WITH_GREEDY_RESPONSES,
        "a dump has no greedy responses",
        "Choose another estimator.",
    )
    yield Refusal(
        (f"{_ROLLOUT}.skip_rollout", "algorithm.filter_groups.enable"),
        lambda settings: _replays(settings) and settings.algorithm.filter_groups.enable,
        "a dump holds the groups that were kept, and no further ones",
        "Set algorithm.filter_groups.enable=false.",
    )
    yield Refusal(
        (_MODE, f"{_ROLLOUT}.calculate_log_probs"),
        lambda settings: _checks_sync(settings) and not settings.actor_rollout_ref.rollout.calculate_log_probs,
        "the check compares the engine's log-probs with the trainer's",
        f"Set {_ROLLOUT}.calculate_log_probs=true.",
    )
    yield Refusal(
        (_MODE, f"{_ROLLOUT}.max_logprob_diff"),
        lambda settings: _checks_sync(settings) and settings.actor_rollout_ref.rollout.max_logprob_diff is None,
        "the check needs a limit for the difference of log-probs",
        f"Set {_ROLLOUT}.max_logprob_diff=auto.",
    )
    yield Refusal(
        (_MODE, "algorithm.adv_estimator"),
        lambda settings: settings.debug.mode == "forge" and settings.algorithm.adv_estimator in WITH_GREEDY_RESPONSES,
        "forged rows have no greedy responses",
        "Choose another estimator.",
    )
