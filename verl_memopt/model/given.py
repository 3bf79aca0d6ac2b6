"""Write models and tokenizers that are given as objects of transformers or peft into folders that a run can read."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

from verl_memopt.errors import ConfigError

logger = logging.getLogger(__name__)

_AT = "actor_rollout_ref.model."
_WRAPPED = ".base_layer"
"""Part of the name of a weight whose layer peft has wrapped with adapters."""


def write_model(model: Any, tokenizer: Any, inputs: Path) -> dict[str, Any]:
    """Return the settings, by key, for a model and its tokenizer. Objects are written into folders in ``inputs``.

    Args:
        model: Folder, hub id, a transformers model, or a peft model with LoRA adapters.
        tokenizer: Folder, hub id or object. None = the tokenizer in the model's folder.
        inputs: Folder for inputs that are given as Python objects.

    Raises:
        ConfigError: The object is no model, or a run cannot start from it.
    """
    if isinstance(model, str | Path):
        return {f"{_AT}path": str(model), **_tokenizer_beside(tokenizer, inputs)}
    if not hasattr(model, "save_pretrained"):
        raise ConfigError(f"model: {type(model).__name__} is no model of transformers. Give a folder, a hub id or a model.")
    adapted = is_adapted(model)
    base = model.get_base_model() if adapted else model
    if getattr(base, "is_quantized", False):
        raise ConfigError(
            "model: its weights are quantised, so the exact weights are lost. Give its folder or hub id, and "
            f"{_AT}quantization or TRL's quantization_config."
        )
    source = getattr(getattr(base, "config", None), "_name_or_path", "")
    if tokenizer is None and not source:
        raise ConfigError("model: a model that was not loaded from a folder needs its tokenizer. Give tokenizer=...")
    folder = inputs / "model"
    settings = {f"{_AT}path": str(folder)}
    if adapted:
        settings |= _write_adapters(model, inputs / "adapter")
    # peft renames weights inside the base model, so restore their names.
    weights = base.state_dict()
    own = {name.replace(_WRAPPED, ""): weight for name, weight in weights.items() if ".lora_" not in name}
    base.save_pretrained(folder, **({} if own.keys() == weights.keys() else {"state_dict": own}))
    _loaded_tokenizer(tokenizer, source).save_pretrained(folder)
    if source and Path(source).is_dir():
        _take_rest(folder, Path(source))
    return settings


def _take_rest(folder: Path, source: Path) -> None:
    # A multimodal model as an object has no processor, but its folder does. Transformers also drops weights that it does not know
    # when it loads a model, such as a head for drafting.
    from verl_memopt.model.export import PROCESSORS
    from verl_memopt.model.text_part import has_more
    from verl_memopt.model.weights import WeightFolder

    for file in source.glob(PROCESSORS):
        shutil.copyfile(file, folder / file.name)
    if not has_more(source) or not any(source.glob("*.safetensors")):
        return
    written = WeightFolder(folder)
    left_out = [name for name in WeightFolder(source).apart if name not in written.apart]
    if left_out:
        logger.warning(
            "model: the object has no %s, and %d more weights of %s: the saved model will not have them. Give the folder to keep "
            "them", left_out[0], len(left_out) - 1, source,
        )  # fmt: skip


def teacher_settings(teacher: Any, inputs: Path) -> dict[str, Any]:
    """Return the settings, by key, for a teacher. An object is written into a folder in ``inputs``; it reads the policy's ids.

    Raises:
        ConfigError: The object is no model of transformers, or has adapters or quantised weights.
    """
    if teacher is None:
        return {}
    path = teacher
    if not isinstance(teacher, str | Path):
        if not hasattr(teacher, "save_pretrained") or is_adapted(teacher) or getattr(teacher, "is_quantized", False):
            raise ConfigError(
                f"teacher: {type(teacher).__name__} is no plain model of transformers. Give a folder, a hub id, or a model "
                "without adapters and quantised weights."
            )
        path = inputs / "teacher"
        teacher.save_pretrained(path)
    return {"teacher.model.path": str(path), "distill.coef": 1.0}


def is_adapted(model: Any) -> bool:
    return hasattr(model, "peft_config") and hasattr(model, "get_base_model")


def write_classifier(model: Any, tokenizer: Any, folder: Path) -> str:
    """Return the folder of a reward model. Write it to ``folder`` if ``model`` is an object or gets another tokenizer.

    Raises:
        ConfigError: The model has no tokenizer.
    """
    if isinstance(model, str | Path) and tokenizer is None:
        return str(model)
    if isinstance(model, str | Path):
        from transformers import AutoModelForSequenceClassification

        model = AutoModelForSequenceClassification.from_pretrained(model)
    source = getattr(model.config, "_name_or_path", "")
    if tokenizer is None and not source:
        raise ConfigError("reward_funcs: a reward model that was not loaded from a folder needs its tokenizer. Give its folder.")
    model.save_pretrained(folder)
    _loaded_tokenizer(tokenizer, source).save_pretrained(folder)
    return str(folder)


def _tokenizer_beside(tokenizer: Any, inputs: Path) -> dict[str, Any]:
    if tokenizer is None:
        return {}
    if isinstance(tokenizer, str | Path):
        return {f"{_AT}tokenizer_path": str(tokenizer)}
    if not hasattr(tokenizer, "save_pretrained"):
        raise ConfigError(f"tokenizer: {type(tokenizer).__name__} is no tokenizer of transformers. Give a folder or a tokenizer.")
    tokenizer.save_pretrained(inputs / "tokenizer")
    return {f"{_AT}tokenizer_path": str(inputs / "tokenizer")}


def _loaded_tokenizer(tokenizer: Any, source: str) -> Any:
    if tokenizer is not None and not isinstance(tokenizer, str | Path):
        return tokenizer
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(source if tokenizer is None else tokenizer)


def _write_adapters(model: Any, folder: Path) -> dict[str, Any]:
    names = list(model.peft_config)
    config = model.peft_config[names[0]]
    kind = str(getattr(config.peft_type, "value", config.peft_type))
    if len(names) > 1 or kind != "LORA":
        raise ConfigError(
            f"model: it has the adapters {', '.join(names)} of kind {kind}. A run can start from one set of LoRA adapters only."
        )
    model.save_pretrained(folder)
    # peft writes adapters with a name other than "default" into a subfolder of this name.
    return {f"{_AT}lora_adapter_path": str(folder if names[0] == "default" else folder / names[0])}
