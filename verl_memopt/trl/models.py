"""The models of a trainer as objects of transformers and peft, in host memory. The workers train separate copies."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verl_memopt.errors import ConfigError
from verl_memopt.model.folder import refuse_odd_files
from verl_memopt.model.given import is_adapted

REFERENCE_PATH = "actor_rollout_ref.ref.model.path"


class ArgumentError(ConfigError, ValueError):
    """A trainer got a wrong argument. The class is also a ValueError, because TRL raises one and a script may catch it."""


def loaded(name: str | Path, arguments: Mapping[str, Any] | None, trusted: bool) -> Any:
    """Load the model of a folder or hub id. ``arguments`` are passed to ``from_pretrained``."""
    from transformers import AutoConfig

    from verl_memopt.model.text_part import auto_class

    if Path(name).is_dir():
        refuse_odd_files(Path(name), f"model: {name}")
    kind = auto_class(AutoConfig.from_pretrained(name, trust_remote_code=trusted))
    return kind.from_pretrained(name, **{"trust_remote_code": trusted, "dtype": "auto", **(arguments or {})})


def with_adapters(model: Any, config: Any) -> Any:
    """Wrap a model in peft's adapters."""
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as problem:
        raise ArgumentError("model: a model with adapters needs peft, which is not installed. Install peft.") from problem
    return get_peft_model(model, LoraConfig(**config) if isinstance(config, Mapping) else config)


def take_trained(model: Any, folder: Path, trusted: bool) -> None:
    """Copy the trained weights in ``folder`` into a model. If the model has adapters, copy only the adapters."""
    if is_adapted(model):
        from peft import set_peft_model_state_dict
        from safetensors.torch import load_file

        set_peft_model_state_dict(model, load_file(folder / "adapter" / "adapter_model.safetensors"))
        return
    model.load_state_dict(loaded(folder, None, trusted).state_dict())


# The reference of the KL: the model that training started from, until it moves towards the policy.


def reference(start: Any, arguments: Mapping[str, Any] | None, trusted: bool) -> Any:
    """Return a frozen copy of a model, which may be an object, a folder or a hub id."""
    model = loaded(start, arguments, trusted) if isinstance(start, str | Path) else copy.deepcopy(start)
    return model.eval().requires_grad_(False)


def starting_model(run: Path) -> str:
    """Return the folder or hub id of the model that a run's reference started from."""
    return str(_settings_of(run).get(REFERENCE_PATH) or _settings_of(run)["actor_rollout_ref.model.path"])


def take_moved(model: Any, run: Path) -> None:
    """Copy the weights of a moving reference from the run's newest checkpoint. If the reference never moves, do nothing.

    Raises:
        ArgumentError: The run saved no checkpoint.
    """
    from verl_memopt.distributed.sharded_state import StoredTensors
    from verl_memopt.model.families import whole_name
    from verl_memopt.run.checkpoints import CheckpointStore
    from verl_memopt.trainer.loop import REFERENCE

    if _settings_of(run).get("actor_rollout_ref.ref.sync_every_steps") is None:
        return
    newest = CheckpointStore(run, None).newest()
    if newest is None:
        raise ArgumentError(f"ref_model: the reference has moved, and {run} has no checkpoint of it. Set save_strategy=steps.")
    stored = StoredTensors(newest.folder / REFERENCE)
    weights = {name.removeprefix("lm."): stored.read(name) for name in stored.names}
    if model.config.get_text_config() is not model.config:
        weights = {whole_name(name): weight for name, weight in weights.items()}
    model.load_state_dict(weights, strict=False)  # a head that is tied to the embedding is not stored


def _settings_of(run: Path) -> dict[str, Any]:
    import yaml

    from verl_memopt.config.keys import flatten

    return flatten(yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8")))
