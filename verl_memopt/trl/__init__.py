"""TRL's trainers by name: a script of TRL runs with ``from verl_memopt.trl import GRPOConfig, GRPOTrainer``.

The arguments are TRL's. What has an equal here is used under its own name (docs/from_trl.md), and what has none is refused by
name. ``trainer.run`` is the finished run (:class:`verl_memopt.api.Run`).
"""

from __future__ import annotations

import dataclasses
import logging
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from verl_memopt import api
from verl_memopt.config.trl_defaults import DEFAULTS
from verl_memopt.errors import ConfigError
from verl_memopt.trl.rewards import (
    accuracy_reward,
    get_cosine_scaled_reward,
    get_repetition_penalty_reward,
    get_soft_overlong_punishment,
    reasoning_accuracy_reward,
    think_format_reward,
)

__all__ = [
    "GRPOConfig", "GRPOTrainer", "RLOOConfig", "RLOOTrainer", "accuracy_reward", "get_cosine_scaled_reward",
    "get_repetition_penalty_reward", "get_soft_overlong_punishment", "reasoning_accuracy_reward", "think_format_reward",
]  # fmt: skip

logger = logging.getLogger(__name__)

REFUSED = {
    "callbacks": "the loop is not the one of transformers. Read run.metrics, or give logger=[...] for TensorBoard or W&B",
    "compute_metrics": "a validation reports rewards. Return a dict with further numbers from the reward function",
    "environment_factory": "there are no environments with several turns. Leave it out",
    "optimizers": "the optimizer is set by actor_rollout_ref.actor.optim. Leave it out",
    "quantization_config": "set actor_rollout_ref.model.quantization, under adapters, or actor_rollout_ref.ref.quantization",
    "reward_processing_classes": "a reward model's tokenizer is that of its folder. Leave it out",
    "rollout_func": "the engine is chosen by actor_rollout_ref.rollout.name. Leave it out",
    "tools": "there are no tool calls in rollouts. Leave it out",
}
"""Arguments of TRL's trainers without an equal, and why."""

PEFT = {"r": "lora_rank", "lora_alpha": "lora_alpha", "target_modules": "target_modules", "exclude_modules": "exclude_modules"}
"""Fields of peft's LoraConfig and our keys below ``actor_rollout_ref.model``."""
PEFT_PASSES = {"task_type": "CAUSAL_LM", "peft_type": "LORA", "bias": "none", "init_lora_weights": True}
"""Further fields, and the value that asks for nothing."""


MACHINE = ("output_dir", "use_cpu", "bf16", "fp16")
"""Fields that a config of transformers checks against the machine."""


class GRPOConfig(dict[str, Any]):
    """TRL's arguments by name, for the trainers of this file. A ``GRPOConfig`` or ``RLOOConfig`` of TRL serves as well."""


class RLOOConfig(GRPOConfig):
    """As :class:`GRPOConfig`, for RLOO."""


class _Trainer:
    algorithm = ""

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        peft_config: Any = None,
        **others: Any,
    ) -> None:
        """Check the arguments. Nothing is started yet.

        Args:
            model: Folder, hub id or a model of transformers.
            reward_funcs: One reward function or several, or the folder of a reward model.
            args: A config of TRL or of this file, or a dict with TRL's names.
            train_dataset: Rows with ``prompt`` and further columns, as TRL has them.
            eval_dataset: Held-out rows.
            processing_class: Tokenizer of a model that is no folder.
            peft_config: A LoraConfig of peft, or a dict of its fields.
            others: Refused where they say anything.

        Raises:
            ConfigError: An argument has no equal here.
        """
        for name, value in others.items():
            if name not in REFUSED:
                raise ConfigError(f"{name}: {type(self).__name__} has no such argument. Remove it.")
            if value is not None and value != (None, None):
                raise ConfigError(f"{name}: {REFUSED[name]}.")
        if train_dataset is None:
            raise ConfigError("train_dataset: there are no rows to train on. Give a dataset.")
        self._settings, defaults = _given(args, "args")
        self._defaults = defaults or DEFAULTS[self.algorithm]
        self._weights = self._settings.pop("reward_weights", None)
        self._settings |= _adapters(peft_config)
        functions = reward_funcs if isinstance(reward_funcs, Sequence) and not isinstance(reward_funcs, str) else [reward_funcs]
        models = [each for each in functions if not callable(each) or hasattr(each, "save_pretrained")]
        if models and (len(functions) > 1 or not isinstance(models[0], str)):
            raise ConfigError(
                f"reward_funcs: {models[0]!r:.100} beside functions, or no folder. A reward model stands alone: give its folder "
                "or hub id, or call it inside a function."
            )
        if models:
            self._settings |= {"reward_model.enable": True, "reward_model.model.path": models[0]}
        self._call = {
            "model": model,
            "dataset": train_dataset,
            "rewards": None if models else list(functions),
            "eval_dataset": eval_dataset,
            "tokenizer": processing_class,
        }
        self.run: api.Run | None = None

    def train(self, resume_from_checkpoint: bool | str | Path | None = None) -> Any:
        """Train, and return TRL's ``TrainOutput``: ``global_step``, ``training_loss`` and ``metrics`` of the last step.

        ``resume_from_checkpoint``: True = continue in ``output_dir``; a path = continue at that ``global_step_N`` folder.

        Raises:
            UserError: As :func:`verl_memopt.train`.
        """
        settings = dict(self._settings)
        folder = settings.pop("output_dir", None)
        named = isinstance(resume_from_checkpoint, str | Path)
        if named:
            settings |= {"trainer.resume_mode": "resume_path", "trainer.resume_from_path": str(resume_from_checkpoint)}
        call = api.Call(
            **self._call,
            settings=settings,
            trl_defaults=self._defaults,
            algorithm=self.algorithm,
            reward_weights=self._weights,
            run_dir=folder,
            resume=bool(resume_from_checkpoint) and not named,
        )
        self.run = api.train_call(call)
        rows = self.run.metrics
        last = rows[-1] if rows else {}
        return SimpleNamespace(global_step=last.get("step", 0), training_loss=last.get("actor/pg_loss"), metrics=last)

    @property
    def state(self) -> Any:
        """``log_history`` and ``global_step``, as TRL's trainers have them."""
        rows = [] if self.run is None else self.run.metrics
        return SimpleNamespace(log_history=rows, global_step=rows[-1].get("step", 0) if rows else 0)

    def save_model(self, output_dir: str | Path | None = None) -> None:
        """Copy the trained model to a folder. None = it stays where it is, in ``model/`` of the run's folder.

        Raises:
            ConfigError: Nothing was trained yet.
        """
        if self.run is None:
            raise ConfigError("save_model: nothing was trained yet. Call train() first.")
        if output_dir is not None:
            shutil.copytree(self.run.model_path, output_dir, dirs_exist_ok=True)


class GRPOTrainer(_Trainer):
    """TRL's ``GRPOTrainer``."""

    algorithm = "grpo"


class RLOOTrainer(_Trainer):
    """TRL's ``RLOOTrainer``."""

    algorithm = "rloo"


def _given(args: Any, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what somebody gave, and the defaults beside it.

    Of a dict that is all of it and none. A config of TRL or peft has defaults, and what differs from them was given.
    """
    if args is None:
        return {}, {}
    if isinstance(args, Mapping):
        return dict(args), {}
    if not dataclasses.is_dataclass(args) or isinstance(args, type):
        raise ConfigError(
            f"{name}: {type(args).__name__} is no config. Give a dict, or a config of TRL (of peft for peft_config)."
        )
    make: Any = type(args)
    fields = {field.name: field.default for field in dataclasses.fields(args) if field.init}
    values = {name: getattr(args, name) for name in fields}
    # Without these a config of transformers does not come to be on every machine.
    given = {name: values[name] for name in MACHINE if name in fields and values[name] != fields[name]}
    plain = make(**given)
    changed = {name: value for name, value in values.items() if value != getattr(plain, name)}
    given |= {name: value for name, value in changed.items() if fields[name] is not None}
    for name, value in changed.items():
        # What was left open is derived from the rest, so only what would be derived otherwise was given.
        if name not in given and value != _derived(make, given).get(name):
            given[name] = value
    if "generation_batch_size" in given:
        # steps_per_generation may have said it. Both mean the same passes where the rows of a pass are known.
        given["per_device_train_batch_size"] = values["per_device_train_batch_size"]
    # What TRL derives from the other fields is no default.
    return given, {name: getattr(plain, name) for name in fields if fields[name] is not None}


def _derived(make: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return all fields of a config that got some of them; none where they are not enough for one."""
    try:
        return dict(vars(make(**given)))
    except ValueError:
        return {}


def _adapters(config: Any) -> dict[str, Any]:
    """Return the LoRA settings of peft's LoraConfig."""
    if config is None:
        return {}
    settings: dict[str, Any] = {"lora_rank": 8, "lora_alpha": 8}  # peft's defaults
    for name, value in _given(config, "peft_config")[0].items():
        if name in PEFT:
            settings |= {} if value is None else {PEFT[name]: sorted(value) if isinstance(value, set) else value}
        elif name == "lora_dropout":
            logger.warning("peft_config: lora_dropout=%s does nothing here: adapters are computed without dropout", value)
        elif value and PEFT_PASSES.get(name) != value:
            raise ConfigError(
                f"peft_config: {name}={value!r:.100} has no equal here. LoRA reads {', '.join(PEFT)}. Leave it out."
            )
    return {f"actor_rollout_ref.model.{name}": value for name, value in settings.items()}
