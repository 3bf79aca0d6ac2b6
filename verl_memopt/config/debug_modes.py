"""The debug modes: which parts of a training run each one has, and which settings it changes."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from verl_memopt.algorithms.records import WITH_GREEDY_RESPONSES
from verl_memopt.config.keys import refused
from verl_memopt.memory.knob import Refusal

_MODE = "debug.mode"
_ROLLOUT = "actor_rollout_ref.rollout"


@dataclass(frozen=True)
class DebugMode:
    """The parts of a training run that a mode has.

    Attributes:
        reads_data: Prompts come from ``data.train_files``.
        has_engine: The rollout engine is built, and gets the policy's weights.
        replays: Responses come from a dump.
        scores: Reward functions or models score the responses.
        computes_log_probs: The policy and the reference compute log-probs.
        updates: The policy is updated.
        supervised: The policy learns the responses of the dataset, without rewards.
        default_steps: Number of steps if ``trainer.total_training_steps`` is null; None = as in a training run.
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
        """Whether the mode is a complete training run, which also validates and saves checkpoints."""
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
"""Value of ``debug.mode`` -> the parts of a run that it has.

``forge`` takes two steps, because the optimizer's state is allocated in the first one, and the second shows the full memory.
"""

REPLAYING = frozenset(name for name, mode in MODES.items() if mode.replays)
WITHOUT_DATA = frozenset(name for name, mode in MODES.items() if not mode.reads_data)
NOT_WHOLE = frozenset(name for name, mode in MODES.items() if not mode.is_whole)
DATA_KEYS = ("data.train_files", "data.val_files")
"""Required keys that may be missing in a mode that reads no data."""


def mode_settings(mode: str) -> dict[str, Any]:
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


def debug_rules() -> Iterator[Refusal]:
    skip, estimator, groups = f"{_ROLLOUT}.skip_rollout", "algorithm.adv_estimator", "algorithm.filter_groups.enable"
    no_greedy, remove, off = WITH_GREEDY_RESPONSES.__contains__, f"Remove {skip}.", operator.not_
    yield refused(
        {_MODE: NOT_WHOLE.__contains__, "trainer.val_only": True},
        "a validation alone runs none of what this mode checks",
        "Set trainer.val_only=false, or debug.mode=off.",
    )
    yield refused({skip: off, _MODE: REPLAYING.__contains__}, "this mode replays stored rollouts", remove)
    generating = {skip: bool, _MODE: ("rollout_only", "forge", "sync_check").__contains__}
    yield refused(generating, "this mode does not replay stored rollouts", remove)
    yield refused({skip: bool, estimator: no_greedy}, "a dump has no greedy responses", "Choose another estimator.")
    kept = "a dump holds the groups that were kept, and no groups to replace dropped ones"
    yield refused({skip: bool, groups: True}, kept, f"Set {groups}=false.")
    returned, limit = f"{_ROLLOUT}.calculate_log_probs", f"{_ROLLOUT}.max_logprob_diff"
    compared = "the check compares the engine's log-probs with the trainer's"
    yield refused({_MODE: "sync_check", returned: False}, compared, f"Set {returned}=true.")
    unlimited = "the check needs a limit for the difference between log-probs"
    yield refused({_MODE: "sync_check", limit: None}, unlimited, f"Set {limit}=auto.")
    forged = {_MODE: "forge", estimator: no_greedy}
    yield refused(forged, "forged rows have no greedy responses", "Choose another estimator.")
