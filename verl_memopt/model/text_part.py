"""The text part of a folder whose model reads more than text, such as images, or has a head for drafting beside its layers.

Only the text part is built and trained: an ordinary causal language model, under its own names. The other weights stay in their
files, and each saved model gets a copy of them.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from verl_memopt.errors import ConfigError
from verl_memopt.model.families import family_of, text_name
from verl_memopt.records import json_of

AXES = ("mrope_section", "mrope_interleaved")
"""Entries of ``rope_parameters`` for positions with three axes. A text has equal positions on all of them, which is ordinary
rotary embedding."""

DTYPE_NAMES = ("dtype", "torch_dtype")
TIED = "tie_word_embeddings"

IN_RUN = frozenset({"use_cache", "architectures", "transformers_version", *DTYPE_NAMES, TIED})
"""Fields that a run sets in its own copy of the text part's config, and that :func:`whole_config` does not compare."""


class _Layers(TypedDict):
    num_hidden_layers: NotRequired[int | None]
    num_nextn_predict_layers: NotRequired[int | None]
    num_kv_shared_layers: NotRequired[int | None]


class _Typed(_Layers):
    model_type: NotRequired[str]
    text_config: NotRequired[_Layers | None]


class _Sized(TypedDict):
    hidden_size: int


class _WithText(TypedDict):
    text_config: _Sized


def text_config(config: PretrainedConfig) -> PretrainedConfig:
    """Return the config of the text part as that of a causal language model. A config of text alone is returned as it is."""
    family = family_of(config.model_type)
    if family.text is None:
        return config
    part = config.get_text_config()
    text = copy.deepcopy(part) if part.model_type == family.text else _as_type(part, family.text)
    # Transformers does not hand this field on to the text part, whose head would then be random.
    text.tie_word_embeddings = _tied(config) or (_tied(part) and not _ties_by_mistake(config, part))
    text.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family.text]]
    text.name_or_path = config.name_or_path
    return text


def _tied(config: PretrainedConfig) -> bool:
    return bool(getattr(config, TIED, False))


def _ties_by_mistake(config: PretrainedConfig, part: PretrainedConfig) -> bool:
    # The default of one type ties in its text part alone, which transformers does not read there.
    return _tied(type(part)()) and not _tied(type(config)())


def _as_type(part: PretrainedConfig, model_type: str) -> PretrainedConfig:
    # The same layers under other class names.
    known, fields = CONFIG_MAPPING[model_type](), part.to_dict()
    # Some configs have no default for the size of a head, which their models read all the same.
    fields = {name: fields[name] for name in fields if (hasattr(known, name) or name == "head_dim") and name != "model_type"}
    if hasattr(known, "norm_topk_prob"):
        fields["norm_topk_prob"] = True  # the router of a multimodal type always divides, and its config does not say so
    fields["rope_parameters"] = {name: value for name, value in fields["rope_parameters"].items() if name not in AXES}
    text: PretrainedConfig = type(known)(**fields)
    return text


def auto_class(config: PretrainedConfig) -> Any:
    """Return the class of transformers that loads a folder with this config, with all its parts."""
    return AutoModelForCausalLM if config.get_text_config() is config else AutoModelForImageTextToText


def is_part(config: PretrainedConfig) -> bool:
    """Whether a config of :func:`text_config` describes only a part of the model in its folder."""
    return family_of(_model_type(Path(str(config.name_or_path)))).text is not None


def turned_hidden(folder: Path) -> int | None:
    """Return the hidden size of a model whose files may have the experts turned. None = they have none or plain ones."""
    if not family_of(_model_type(folder)).turned:
        return None
    config = json_of(folder / "config.json", _WithText, "Fetch or save the model again.", ConfigError)
    return config["text_config"]["hidden_size"]


def has_more(folder: Path) -> bool:
    """Whether a folder may hold more than a text model, by the type in its config.json."""
    return bool(family_of(_model_type(folder)).apart or _unread(folder))


def split_names(folder: Path, stored: Iterable[str]) -> tuple[dict[str, str], list[str]]:
    """Tell the weights of the text model from the others in a folder.

    Args:
        folder: Its config.json says which weights belong to the text.
        stored: Names of all weights in the folder.

    Returns:
        Name in the text model -> name in the folder, and the names of the other weights.

    Raises:
        ConfigError: Two weights of the folder have the same name in the text model.
    """
    family, unread = family_of(_model_type(folder)), _unread(folder)
    if not family.apart and not unread:
        return {name: name for name in stored}, []
    names, apart = dict[str, str](), list[str]()
    for name in stored:
        own = text_name(name)
        if name.startswith(family.apart) or own.startswith(unread):
            apart.append(name)
            continue
        if own in names:
            raise ConfigError(f"{folder}: {name} and {names[own]} are the same weight of the text. Save the model again.")
        names[own] = name
    return names, apart


UNREAD = tuple(f"self_attn.{part}." for part in ("k_proj", "v_proj", "k_norm", "v_norm"))
"""Beginnings of the names of a layer's weights that Gemma 4 does not read where the layer has the keys of an earlier one."""


def _unread(folder: Path) -> tuple[str, ...]:
    # Beginnings of the names of weights that published folders have and the text model does not read.
    path = folder / "config.json"
    whole = json_of(path, _Typed, "Fetch or save the model again.", ConfigError) if path.is_file() else _Typed()
    text = whole.get("text_config") or whole
    reading, layers = text.get("num_kv_shared_layers") or 0, text.get("num_hidden_layers") or 0
    parts = [f"model.layers.{layer}.{part}" for layer in range(layers - reading, layers) for part in UNREAD]
    # Layers for drafting are behind the others in GLM-4.5.
    drafting = range(layers, layers + (text.get("num_nextn_predict_layers") or 0))
    return *parts, *(f"model.layers.{layer}." for layer in drafting)


def _model_type(folder: Path) -> str:
    path = folder / "config.json"
    return json_of(path, _Typed, "Fetch or save the model again.", ConfigError).get("model_type", "") if path.is_file() else ""


def whole_config(text: PretrainedConfig) -> dict[str, Any]:
    """Return the config of the whole model, for a config of :func:`text_config` of which fields may have been changed since.

    It is the content of the config.json from which ``text`` was read. A changed field is changed in its text part.
    """
    source = Path(str(text.name_or_path))
    raw = json_of(source / "config.json", dict[str, Any], "Fetch or save the model again.", ConfigError)
    whole = AutoConfig.from_pretrained(source)
    before, now = text_config(whole).to_dict(), text.to_dict()
    changed = {name: now[name] for name in (before.keys() & now.keys()) - IN_RUN if before[name] != now[name]}
    if "rope_parameters" in changed:
        for older in ("rope_scaling", "rope_theta"):  # they would have priority over the new value
            raw["text_config"].pop(older, None)
        axes = whole.get_text_config().rope_parameters
        changed["rope_parameters"] |= {name: axes[name] for name in AXES if name in axes}
    raw["text_config"] |= changed
    if {bool(getattr(config, TIED, False)) for config in (whole, whole.get_text_config())} != {text.tie_word_embeddings}:
        raw[TIED] = raw["text_config"][TIED] = text.tie_word_embeddings
    return raw


def stated_dtype(config: Mapping[str, Any]) -> str | None:
    """Return the dtype in the content of a config.json. Many configs of several parts state it only in the text part."""
    text = config.get("text_config")
    places = (config, text if isinstance(text, dict) else {})
    named: str | None = next((place[name] for place in places for name in DTYPE_NAMES if place.get(name)), None)
    return named


def with_dtype(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the content of a config.json with another dtype, wherever it states one."""
    text = config.get("text_config")
    if isinstance(text, dict) and any(text.get(key) for key in DTYPE_NAMES):
        config = {**config, "text_config": _with(text, name)}
        return _with(config, name) if any(config.get(key) for key in DTYPE_NAMES) else dict(config)
    return _with(config, name)


def _with(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    # Of two spellings the newer one counts.
    return {**config, "torch_dtype" if config.get("torch_dtype") and not config.get("dtype") else "dtype": name}
