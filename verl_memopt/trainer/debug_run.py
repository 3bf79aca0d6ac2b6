"""Debug modes in a run: the settings that they decide, where they write, and the steps of the modes without an update."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from verl_memopt.algorithms.kl import kl_estimate
from verl_memopt.algorithms.records import SFT
from verl_memopt.config.debug_modes import MODES, DebugMode, of_mode
from verl_memopt.config.keys import replaced, shown, value_at
from verl_memopt.config.schema import Settings
from verl_memopt.observe.metrics import reward_metrics, summary_of
from verl_memopt.run.environment import Environment
from verl_memopt.trainer.replay import ROLLOUTS, Forge, NoPrompts, Replay, build_forge, build_replay, dump_folder
from verl_memopt.trainer.rollouts import StepBatch
from verl_memopt.trainer.step import StepResult, TrainingStep

SEED = 0
"""``data.seed`` of the mode ``deterministic`` where it is null."""
VAL_ONLY = "val_only"
"""Folder inside the run's that holds the record of ``trainer.val_only``."""

logger = logging.getLogger(__name__)


def mode_of(settings: Settings) -> DebugMode:
    """Return what the run's debug mode runs. A supervised run has no engine, and scores nothing."""
    mode = MODES[settings.debug.mode]
    is_supervised = settings.algorithm.adv_estimator == SFT
    return replace(mode, has_engine=False, scores=False, supervised=True) if is_supervised else mode


def debug_settings(settings: Settings) -> Settings:
    """Return the settings with those that the debug mode decides, and log each that changes."""
    decided = of_mode(settings.debug.mode)
    if settings.debug.mode == "deterministic" and settings.data.seed is None:
        decided["data.seed"] = SEED
        if settings.actor_rollout_ref.rollout.seed is None:
            decided["actor_rollout_ref.rollout.seed"] = SEED
    mode, trainer = mode_of(settings), settings.trainer
    if mode.default_steps is not None and trainer.total_training_steps is None:
        decided["trainer.total_training_steps"] = mode.default_steps
    changed = {key: value for key, value in decided.items() if value_at(settings, key) != value}
    if not changed:
        return settings
    logger.info(
        "debug.mode=%s sets %s", settings.debug.mode, ", ".join(f"{key}={shown(value)}" for key, value in changed.items())
    )
    return replaced(settings, changed)


def record_folder(settings: Settings, run_dir: Path) -> Path:
    """Return where a run writes its record: the run folder, or one inside it for a run that must not change that record."""
    if settings.trainer.val_only:
        return run_dir / VAL_ONLY
    return run_dir if mode_of(settings).is_whole else run_dir / settings.debug.mode


def written_dump(settings: Settings, record: Path) -> Path | None:
    """Return the folder of the dump that a run writes; None for none. It is never the dump that the run replays."""
    mode, folder = settings.debug.mode, settings.trainer.rollout_data_dir
    if mode == "rollout_only":
        return dump_folder(settings)
    own = None if folder is None else Path(folder).expanduser()
    if settings.actor_rollout_ref.rollout.skip_rollout and own in (None, dump_folder(settings)):
        return record / ROLLOUTS if mode == "score_only" else None
    return own


def replay_of(settings: Settings, environment: Environment) -> Replay | Forge | None:
    """Return where the rows of a step come from in place of the engine; None where the engine generates them."""
    if settings.debug.mode == "forge":
        return build_forge(settings, environment.tokenizer, environment.embedding_rows)
    if not settings.actor_rollout_ref.rollout.skip_rollout:
        return None
    mode = mode_of(settings)
    return build_replay(settings, environment.tokenizer, environment.embedding_rows, not mode.scores, mode.updates)


def replayed_steps(settings: Settings, environment: Environment, done: int) -> int:
    """Return the last step of a run without data: ``trainer.total_training_steps``, at most the last step of the dump.

    Raises:
        DataError: The dump has no step after those, or its first step cannot be replayed.
    """
    steps, replay = settings.trainer.total_training_steps, replay_of(settings, environment)
    if isinstance(replay, Replay):
        last = replay.last_step(done + 1)
        replay.read(done + 1)  # a dump that does not fit shows before a worker starts
        return last if steps is None else min(last, steps)
    assert steps is not None, "a mode without a dump has a default number of steps"
    return done + steps


def rollout_step(learner: TrainingStep, step: int) -> StepResult:
    """Answer the prompts of a step, and nothing more."""
    rollouts = learner.rollouts
    assert not isinstance(rollouts.prompts, NoPrompts)
    return _described(learner, rollouts.generate(rollouts.prompts.next(), step))


def score_step(learner: TrainingStep, step: int) -> StepResult:
    """Score the answers of a step, and compute their log-probs."""
    batch = learner.scored(step)
    batch.metrics |= summary_of("critic/score", batch.scores)
    batch.metrics |= reward_metrics(result.extra for result in batch.results)
    old, reference = batch.rows.old_log_probs, batch.rows.ref_log_probs
    assert old is not None
    batch.metrics |= summary_of("score/log_prob", old)
    if reference is not None:
        batch.metrics |= summary_of("score/kl_to_reference", kl_estimate(old, reference, "kl"))
    return _described(learner, batch)


def _described(learner: TrainingStep, batch: StepBatch) -> StepResult:
    """Return the result of a step that ends early."""
    batch.metrics |= learner.step_metrics.lengths(batch)
    return learner.result(batch)


STEPS: dict[str, Callable[[TrainingStep, int], StepResult]] = {"rollout_only": rollout_step, "score_only": score_step}
"""Debug mode -> its step; every other mode runs whole training steps."""
