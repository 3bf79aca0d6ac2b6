"""TRL's configs by name: a dict of the given arguments, with TRL's defaults for all others as attributes."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from verl_memopt.config.trl_defaults import DEFAULTS
from verl_memopt.errors import ConfigError
from verl_memopt.memory.lora import PEFT, not_here

logger = logging.getLogger(__name__)

PEFT_PASSES = {"task_type": "CAUSAL_LM", "peft_type": "LORA", "bias": "none", "init_lora_weights": True}
"""Fields of peft's LoraConfig without a counterpart here, and the only value that is accepted."""
PEFT_NOTES = ("base_model_name_or_path", "revision", "inference_mode", "auto_mapping", "peft_version")
"""Fields in which peft notes what it has adapted. They are ignored."""
PEFT_TARGETS = ("q_proj", "v_proj")
"""The layers that peft adapts in most models by default."""
MACHINE = ("output_dir", "use_cpu", "bf16", "fp16")
"""Fields that a config of transformers checks against the machine when it is made."""


class GRPOConfig(dict[str, Any]):
    """TRL's arguments by name, for the trainers of this package: a dict of those that were given.

    An argument is an attribute too, which can be read and set. One that was not given has TRL's default there. The trainers also
    accept a ``GRPOConfig`` or ``RLOOConfig`` of TRL.
    """

    algorithm: ClassVar[str] = "grpo"

    def __init__(self, output_dir: str | Path | Mapping[str, Any] | None = None, **values: Any) -> None:
        given = dict(output_dir) if isinstance(output_dir, Mapping) else {}
        if output_dir is not None and not isinstance(output_dir, Mapping):
            given["output_dir"] = str(output_dir)
        super().__init__(given | values)

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        if name not in DEFAULTS[self.algorithm]:
            raise AttributeError(f"{type(self).__name__} has no argument {name!r}")
        return DEFAULTS[self.algorithm][name]

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value

    def to_dict(self) -> dict[str, Any]:
        """Return all arguments, including defaults."""
        return {**DEFAULTS[self.algorithm], **self}

    def to_json_string(self) -> str:
        """Return all arguments as JSON, including defaults."""
        return json.dumps(self.to_dict(), indent=2, default=str)


class RLOOConfig(GRPOConfig):
    """As :class:`GRPOConfig`, for RLOO."""

    algorithm: ClassVar[str] = "rloo"


def as_attributes(args: Any, kind: type[GRPOConfig]) -> Any:
    """Return a config whose arguments are attributes: a config of TRL unchanged, anything else as ``kind``."""
    if args is None or (isinstance(args, Mapping) and not isinstance(args, GRPOConfig)):
        return kind(args or {})
    if not isinstance(args, GRPOConfig) and (isinstance(args, type) or not dataclasses.is_dataclass(args)):
        raise ConfigError(f"args: {type(args).__name__} is no config. Give a dict, or a config of TRL.")
    return args


def given_and_defaults(args: Any, name: str = "args") -> tuple[dict[str, Any], dict[str, Any]]:
    """Split a config into the arguments that were given and the defaults of the others.

    A dict holds only what was given. In a config of TRL or peft, values that differ from the defaults were given.
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
    # Without these, a config of transformers cannot be made on some machines.
    given = {name: values[name] for name in MACHINE if name in fields and values[name] != fields[name]}
    plain = make(**given)
    changed = {name: value for name, value in values.items() if value != getattr(plain, name)}
    given |= {name: value for name, value in changed.items() if fields[name] is not None}
    for name, value in changed.items():
        # TRL derives fields that were not given. Only a value that it would not derive was given.
        if name not in given and value != _derived(make, given).get(name):
            given[name] = value
    if "generation_batch_size" in given:
        # It may come from steps_per_generation. Both mean the same passes once the rows of a pass are fixed.
        given["per_device_train_batch_size"] = values["per_device_train_batch_size"]
    # A field that TRL derives from others has no default.
    return given, {name: getattr(plain, name) for name in fields if fields[name] is not None}


def _derived(make: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return dict(vars(make(**given)))
    # The given fields alone may not make a valid config. Then nothing can be derived.
    except ValueError:
        return {}


def adapter_arguments(config: Any) -> dict[str, Any]:
    """Translate peft's LoraConfig into LoRA settings of this package."""
    if config is None:
        return {}
    settings: dict[str, Any] = {"lora_rank": 8, "lora_alpha": 8, "target_modules": list(PEFT_TARGETS)}  # peft's defaults
    given = given_and_defaults(config, "peft_config")[0]
    if reasons := not_here(given):
        raise ConfigError(f"peft_config: {'; '.join(reasons)}. Leave it out.")
    for name, value in given.items():
        if name in PEFT:
            settings |= {} if value is None else {PEFT[name]: sorted(value) if isinstance(value, set) else value}
        elif name in PEFT_NOTES:
            continue
        elif name == "lora_dropout":
            logger.warning("peft_config: lora_dropout=%s does nothing here: adapters are computed without dropout", value)
        elif value and PEFT_PASSES.get(name) != value:
            raise ConfigError(
                f"peft_config: {name}={value!r:.100} has no equal here. LoRA reads {', '.join(PEFT)}. Leave it out."
            )
    return {f"actor_rollout_ref.model.{name}": value for name, value in settings.items()}
