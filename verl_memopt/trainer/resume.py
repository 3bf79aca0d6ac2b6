"""Resuming: which checkpoint a run continues, with which seed, and how its settings differ from the checkpoint's."""

from __future__ import annotations

import dataclasses
import logging
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from verl_memopt.config.resume_diff import HARMLESS, REFUSED, changes
from verl_memopt.config.schema import Actor, Critic, Data, Rollout, Settings, Trainer
from verl_memopt.errors import ConfigError
from verl_memopt.trainer.checkpoints import Checkpoint, CheckpointStore, read_checkpoint
from verl_memopt.trainer.environment import Environment

logger = logging.getLogger(__name__)

Shapes = Mapping[str, tuple[int, ...]]

WAY_OUT = "Set it back to go on with this run, or start another: trainer.experiment_name=..., or trainer.resume_mode=disable."
MOST_NAMED = 3
"""Most weights that an error names."""


def checkpoint_store(trainer: Trainer, has_validation: bool, run_dir: Path) -> CheckpointStore:
    """Return the checkpoint store of a run. ``trainer.keep_best=null`` means true for a run that validates."""
    validates = has_validation and trainer.test_freq > 0
    keep_best = validates if trainer.keep_best is None else trainer.keep_best
    return CheckpointStore(run_dir, trainer.max_actor_ckpt_to_keep, keep_best)


def loaded_parts(actor: Actor, critic: Critic | None) -> dict[str, list[str]]:
    """Return the setting of each trained role that lists what it loads from a checkpoint, with its value."""
    roles: dict[str, Actor | Critic] = {"actor_rollout_ref.actor": actor}
    if critic is not None:
        roles["critic"] = critic
    return {f"{name}.checkpoint.load_contents": list(role.checkpoint.load_contents or []) for name, role in roles.items()}


def find_checkpoint(
    trainer: Trainer, loaded: Mapping[str, Sequence[str]], store: CheckpointStore, unreadable: Mapping[int, str]
) -> Checkpoint | None:
    """Return the checkpoint that ``trainer.resume_mode`` selects; None for a fresh start.

    Args:
        trainer: ``resume_mode`` and ``resume_from_path``.
        loaded: as :func:`loaded_parts` gives it.
        store: checkpoints of the run.
        unreadable: step -> fault of checkpoints that looked whole but could not be loaded.

    Raises:
        CheckpointError: the named checkpoint is not whole, or there are checkpoints but none is.
        ConfigError: the checkpoint would be loaded without the model.
    """
    if trainer.resume_mode == "disable":
        return None
    if trainer.resume_mode == "auto":
        checkpoint = store.newest(unreadable)
    else:
        assert trainer.resume_from_path is not None, "checked when settings are loaded"
        checkpoint = read_checkpoint(Path(trainer.resume_from_path))
        # The checkpoint may lie in another run's folder, and must then not be marked or removed as one of this run.
        store.resumed(checkpoint)
    for key, contents in loaded.items():
        if checkpoint is not None and "model" not in contents:
            raise ConfigError(
                f"{key}={list(contents)}: a run cannot go on from {checkpoint.folder} without "
                "the model. Add model (and to save_contents), or set trainer.resume_mode=disable."
            )
    return checkpoint


def compare_settings(settings: Settings, environment: Environment, checkpoint: Checkpoint) -> None:
    """Log how the settings differ from those of the checkpoint, one line for each key.

    Args:
        settings: of the run, with concrete seeds.
        environment: has the shapes of the weights that the run trains.
        checkpoint: from which the run continues.

    Raises:
        ConfigError: the run cannot continue with such a change.
    """
    driver, folder = checkpoint.driver, checkpoint.folder
    _check_seed(settings, checkpoint)
    differences = changes(driver["settings"], settings)
    for change in differences:
        logger.log(logging.INFO if change.kind == HARMLESS else logging.WARNING, "since %s: %s", folder.name, change)
    refused = [f"{change.key}={change.new}: {change}" for change in differences if change.kind == REFUSED]
    models = [("actor_rollout_ref.model.path", settings.actor_rollout_ref.model.path, driver["weights"], environment.weights)]
    # A run without a critic goes on from a checkpoint that has one.
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
    """Return both sections with concrete seeds: those of the settings, else the resumed run's, else drawn and logged.

    Args:
        data: its seed may be None.
        rollout: its seed may be None, and is then that of the data.
        resumed_seed: ``data.seed`` of the checkpoint; None for a fresh start.

    Returns:
        The very sections that were passed if both have a seed, else copies.
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
    """Return the shapes of a model as a checkpoint stores them."""
    return {name: list(shape) for name, shape in weights.items()}


def _check_seed(settings: Settings, checkpoint: Checkpoint) -> None:
    """Refuse another ``data.seed`` than the checkpoint's."""
    if checkpoint.driver["seed"] != settings.data.seed:
        raise ConfigError(
            f"data.seed={settings.data.seed}: the run in {checkpoint.folder.parent} was made with {checkpoint.driver['seed']}. "
            "Leave data.seed out to go on with it, or start another: trainer.experiment_name=..., or trainer.resume_mode=disable."
        )


def _different(before: Mapping[str, Any], now: Shapes) -> str:
    """Return a text that names weights whose shapes differ or that one side lacks; empty where all are equal."""
    shapes = {name: (_shape(before.get(name)), _shape(now.get(name))) for name in sorted(before.keys() | now.keys())}
    names = [name for name, (there, here) in shapes.items() if there != here]
    texts = [f"{name}: {shapes[name][0]} there, {shapes[name][1]} here" for name in names[:MOST_NAMED]]
    more = [f"{len(names) - MOST_NAMED} more"] if len(names) > MOST_NAMED else []
    return "; ".join([*texts, *more])


def _shape(shape: Any) -> str:
    return "missing" if shape is None else "x".join(map(str, shape))
