"""LoRA settings that the user leaves out are read from the folder of the trained adapters, as in verl."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verl_memopt.config.problems import Problem, problem, shown

logger = logging.getLogger(__name__)

MODELS = ("actor_rollout_ref.model", "critic.model")
"""Sections of the models that may have adapters."""
_READ = {"r": "lora_rank", "lora_alpha": "lora_alpha", "target_modules": "target_modules", "exclude_modules": "exclude_modules"}
"""Name in adapter_config.json -> name of our key below the model's section."""
_OTHER_KINDS = ("use_dora", "use_rslora", "rank_pattern", "alpha_pattern", "modules_to_save")
"""Names in adapter_config.json whose value must be empty or false: with any other the adapters compute something else."""


def adapter_settings(model: str, user_values: Mapping[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
    """Return the LoRA settings of a model's adapter folder, our dotted key -> value, and what is wrong with the folder.

    The folder is read if ``lora_rank`` is not given and it has an ``adapter_config.json``. A key that is given is left out.

    Args:
        model: One of :data:`MODELS`.
        user_values: Dotted key -> value of the keys that the user set, under our names.
    """
    key, rank = f"{model}.lora_adapter_path", f"{model}.lora_rank"
    path = user_values.get(key)
    if not isinstance(path, str) or rank in user_values or not (file := Path(path) / "adapter_config.json").is_file():
        return {}, []
    try:
        config = json.loads(file.read_text())
        kinds = [name for name in _OTHER_KINDS if config.get(name)]
    except (OSError, ValueError, AttributeError):
        return {}, [problem({key: path}, "its adapter_config.json is no JSON object", f"Set {rank}.")]
    if kinds:
        what = f"its adapter_config.json asks for {', '.join(kinds)}; adapters here have one rank and the scale lora_alpha / rank"
        return {}, [problem({key: path}, what, "Give adapters without them.")]
    if config.get("lora_dropout"):
        logger.warning("%s=%s: the adapters were trained with dropout, and are trained on without it", key, path)
    read = {f"{model}.{ours}": config[name] for name, ours in _READ.items() if config.get(name) is not None}
    of_folder = {name: value for name, value in read.items() if name not in user_values}
    logger.info("%s=%s sets %s", key, path, ", ".join(f"{name}={shown(value)}" for name, value in of_folder.items()))
    return of_folder, []
