"""LoRA settings that the user leaves out are read from the folder of the trained adapters, as in verl."""

from __future__ import annotations

import json
import logging
from collections.abc import Set
from pathlib import Path
from typing import Any

from verl_memopt.config.problems import Problem, problem, shown

logger = logging.getLogger(__name__)

_MODEL = "actor_rollout_ref.model"
PATH, _RANK = f"{_MODEL}.lora_adapter_path", f"{_MODEL}.lora_rank"
_READ = {
    "r": _RANK,
    "lora_alpha": f"{_MODEL}.lora_alpha",
    "target_modules": f"{_MODEL}.target_modules",
    "exclude_modules": f"{_MODEL}.exclude_modules",
}
"""Name in adapter_config.json -> our key."""
_OTHER_KINDS = ("use_dora", "use_rslora", "rank_pattern", "alpha_pattern", "modules_to_save")
"""Names in adapter_config.json whose value must be empty or false: with any other the adapters compute something else."""


def adapter_settings(path: Any, user_keys: Set[str]) -> tuple[dict[str, Any], list[Problem]]:
    """Return the LoRA settings of an adapter folder, our dotted key -> value, and what is wrong with the folder.

    The folder is read if ``lora_rank`` is not given and it has an ``adapter_config.json``. A key that is given is left out.

    Args:
        path: value of ``lora_adapter_path``; anything but a text is no folder.
        user_keys: the keys that the user set, under our names.
    """
    if not isinstance(path, str) or _RANK in user_keys or not (file := Path(path) / "adapter_config.json").is_file():
        return {}, []
    try:
        config = json.loads(file.read_text())
        kinds = [name for name in _OTHER_KINDS if config.get(name)]
    except (OSError, ValueError, AttributeError):
        return {}, [problem({PATH: path}, "its adapter_config.json is no JSON object", f"Set {_RANK}.")]
    if kinds:
        what = f"its adapter_config.json asks for {', '.join(kinds)}; adapters here have one rank and the scale lora_alpha / rank"
        return {}, [problem({PATH: path}, what, "Give adapters without them.")]
    if config.get("lora_dropout"):
        logger.warning("%s=%s: the adapters were trained with dropout, and are trained on without it", PATH, path)
    of_folder = {key: config[name] for name, key in _READ.items() if config.get(name) is not None and key not in user_keys}
    logger.info("%s=%s sets %s", PATH, path, ", ".join(f"{key}={shown(value)}" for key, value in of_folder.items()))
    return of_folder, []
