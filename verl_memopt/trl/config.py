"""TRL's config classes as dicts of the given arguments. Arguments that were not given are attributes with TRL's defaults."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from verl_memopt.config.trl_defaults import DEFAULTS
from verl_memopt.errors import ConfigError
from verl_memopt.memory.lora import PEFT, not_here, settings_in

logger = logging.getLogger(__name__)

PEFT_PASSES = {"task_type": "CAUSAL_LM", "peft_type": "LORA", "bias": "none", "init_lora_weights": True}
"""Fields of peft's LoraConfig without a counterpart here -> the only accepted value."""
PEFT_NOTES = ("base_model_name_or_path", "revision", "inference_mode", "auto_mapping", "peft_version")
"""Fields of peft's LoraConfig that peft itself fills in when it adapts a model. They are ignored."""
PEFT_TARGETS = ("q_proj", "v_proj")
"""The layers that peft adapts in most models by default."""
MACHINE = ("output_dir", "use_cpu", "bf16", "fp16")
"""Fields that transformers checks against the machine whenever a config is created."""


class GRPOConfig(dict[str, Any]):
    """TRL's ``GRPOConfig`` for the trainers of this package: a dict of the arguments that were given.

    Each argument is also an attribute, which can be read and set. The attribute of an argument that was not given has TRL's
    default. The trainers also accept TRL's own ``GRPOConfig`` and ``RLOOConfig``.
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
    """TRL's ``RLOOConfig``, in the form of :class:`GRPOConfig`."""

    algorithm: ClassVar[str] = "rloo"


class DistillationConfig(GRPOConfig):
    """TRL's ``DistillationConfig``, in the form of :class:`GRPOConfig`."""

    algorithm: ClassVar[str] = "distill"


class GKDConfig(GRPOConfig):
    """``GKDConfig`` of ``trl.experimental``, in the form of :class:`GRPOConfig`."""

    algorithm: ClassVar[str] = "gkd"


class GOLDConfig(GRPOConfig):
    """``GOLDConfig`` of ``trl.experimental``, in the form of :class:`GRPOConfig`."""

    algorithm: ClassVar[str] = "gold"


class SDFTConfig(GRPOConfig):
    """``SDFTConfig`` of ``trl.experimental``, in the form of :class:`GRPOConfig`."""

    algorithm: ClassVar[str] = "sdft"


def as_attributes(args: Any, kind: type[GRPOConfig]) -> Any:
    """Return a config whose arguments are attributes. None or a plain dict becomes a ``kind``; a config stays as it is."""
    if args is None or (isinstance(args, Mapping) and not isinstance(args, GRPOConfig)):
        return kind(args or {})
    if not isinstance(args, GRPOConfig) and (isinstance(args, type) or not dataclasses.is_dataclass(args)):
        raise ConfigError(f"args: {type(args).__name__} is not a config. Give a dict, or a config of TRL.")
    return args


def given_and_defaults(args: Any, name: str = "args") -> tuple[dict[str, Any], dict[str, Any]]:
    """Split a config into the arguments that were given and the defaults of the others.

    Every entry of a dict counts as given. In a config of TRL or peft, a value counts as given if it differs from the default.
    """
    if args is None:
        return {}, {}
    if isinstance(args, Mapping):
        return dict(args), {}
    if not dataclasses.is_dataclass(args) or isinstance(args, type):
        raise ConfigError(
            f"{name}: {type(args).__name__} is not a config. Give a dict, or a config of TRL (of peft for peft_config)."
        )
    make: Any = type(args)
    fields = {field.name: field.default for field in dataclasses.fields(args) if field.init}
    values = {name: getattr(args, name) for name in fields}
    # On some machines transformers refuses to create a config without the given values of these fields.
    given = {name: values[name] for name in MACHINE if name in fields and values[name] != fields[name]}
    plain = make(**given)
    changed = {name: value for name, value in values.items() if value != getattr(plain, name)}
    given |= {name: value for name, value in changed.items() if fields[name] is not None}
    for name, value in changed.items():
        # TRL fills in some fields from others. Such a field counts as given only if TRL would have filled in another value.
        if name not in given and value != _derived(make, given).get(name):
            given[name] = value
    if "generation_batch_size" in given:
        # TRL may have computed it from steps_per_generation. With per_device_train_batch_size fixed too, both say the same.
        given["per_device_train_batch_size"] = values["per_device_train_batch_size"]
    # A field that TRL fills in from others has no default.
    return given, {name: getattr(plain, name) for name in fields if fields[name] is not None}


def _derived(make: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return dict(vars(make(**given)))
    # The given fields alone may be refused by TRL. Then TRL fills in nothing.
    except ValueError:
        return {}


def adapter_arguments(config: Any) -> dict[str, Any]:
    """Translate peft's LoraConfig into the LoRA settings of this package."""
    if config is None:
        return {}
    defaults: dict[str, Any] = {"lora_rank": 8, "lora_alpha": 8, "target_modules": list(PEFT_TARGETS)}  # those of peft
    given = given_and_defaults(config, "peft_config")[0]
    if reasons := not_here(given):
        raise ConfigError(f"peft_config: {'; '.join(reasons)}. Leave it out.")
    for name, value in given.items():
        if name in PEFT or name in PEFT_NOTES:
            continue
        if name == "lora_dropout":
            logger.warning("peft_config: lora_dropout=%s does nothing here: adapters have no dropout", value)
        elif value and PEFT_PASSES.get(name) != value:
            raise ConfigError(
                f"peft_config: {name}={value!r:.100} has no equal here. Supported are {', '.join(PEFT)}. Leave it out."
            )
    settings = {name: sorted(value) if isinstance(value, set) else value for name, value in settings_in(given).items()}
    return {f"actor_rollout_ref.model.{name}": value for name, value in {**defaults, **settings}.items()}
