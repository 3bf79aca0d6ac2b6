"""The index of every memory knob: keys, defaults, what each saves and costs, what it pairs with and what it refuses.

Read from the knob files themselves: the text is each file's docstring, the keys are its ``KNOB`` (or ``KNOBS``), the
defaults are the settings'. ``verl-memopt knobs`` prints it, ``docs/memory.md`` is generated from it.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
from dataclasses import asdict, dataclass
from typing import Any

import verl_memopt.memory
from verl_memopt.config.keys import value_at
from verl_memopt.config.schema import Settings
from verl_memopt.memory.knob import Knob, Refusal

SECTIONS = ("Saves", "Costs", "Pairs with")

LADDER = (
    "chunked_logprob",
    "recompute_elementwise",
    "prune_last_block",
    "tiled_mlp",
    "activation_checkpointing",
    "activation_offload",
    "shared_prompt",
    "token_budget",
    "bucketed_adamw",
    "optimizer_offload",
    "optimizer_state_dtype",
    "stochastic_rounding",
    "optimizer_in_backward",
    "param_offload",
    "native_offload",
    "resharding",
    "sharding_units",
    "precision",
    "lora",
    "quantized_frozen",
    "weight_buckets",
    "rollout_memory",
    "load_mode",
    "limits",
    "profiles",
)
"""The order in which knobs are listed: what costs least first, within training, then the engine, then the host."""


@dataclass(frozen=True)
class Entry:
    """One knob of the index."""

    name: str
    title: str
    """First sentence of the file's docstring."""
    keys: tuple[str, ...]
    defaults: dict[str, Any]
    besides: tuple[str, ...]
    saves: str
    costs: str
    pairs: str
    refuses: tuple[Refusal, ...]
    on: tuple[str, ...]
    off: tuple[str, ...]


NOT_KNOBS = ("document", "embedding_gradient", "knob", "knobs", "shapes")
"""Files of this room that describe knobs and are none."""


def index() -> list[Entry]:
    """Gives every knob, in the order of the ladder; one that the order does not name comes last."""
    found = [_entry(module, knob) for module in _modules() for knob in _knobs(module)]
    place = {name: number for number, name in enumerate(LADDER)}
    return sorted(found, key=lambda entry: (place.get(entry.name, len(place)), entry.name))


def as_json(entries: list[Entry]) -> list[dict[str, Any]]:
    """Gives the index as plain values."""
    return [asdict(entry) for entry in entries]


def knob_named(name: str) -> Knob:
    """Gives a knob by its name."""
    return next(knob for module in _modules() for knob in _knobs(module) if knob.name == name)


def in_yaml(value: object) -> str:
    """Gives a default as a settings file writes it."""
    return {None: "null", True: "true", False: "false"}[value] if value is None or isinstance(value, bool) else str(value)


def _modules() -> list[Any]:
    files = pkgutil.walk_packages(verl_memopt.memory.__path__, "verl_memopt.memory.")
    names = sorted(info.name for info in files if not info.ispkg and info.name.rpartition(".")[2] not in NOT_KNOBS)
    return [importlib.import_module(name) for name in names]


def _knobs(module: Any) -> tuple[Knob, ...]:
    return getattr(module, "KNOBS", (module.KNOB,) if hasattr(module, "KNOB") else ())


def _entry(module: Any, knob: Knob) -> Entry:
    text = sections(module.__doc__ or "")
    settings = Settings()
    return Entry(
        name=knob.name,
        title=text[""],
        keys=knob.keys,
        defaults={key: value_at(settings, key) for key in knob.keys},
        besides=knob.besides,
        saves=text["Saves"],
        costs=text["Costs"],
        pairs=text["Pairs with"],
        refuses=knob.refuses,
        on=knob.on,
        off=knob.off,
    )


def sections(docstring: str) -> dict[str, str]:
    """Gives the parts of a knob file's docstring: its first sentence under "", then Saves, Costs and Pairs with."""
    pattern = rf"^\s*({'|'.join(SECTIONS)}):"
    pieces = re.split(pattern, docstring, flags=re.MULTILINE)
    found = {"": pieces[0], **dict(zip(pieces[1::2], pieces[2::2], strict=True))}
    assert found.keys() >= set(SECTIONS), f"a knob file says {', '.join(SECTIONS)}; this one says {list(found)[1:]}"
    return {name: " ".join(text.split("\n\n")[0].split()) for name, text in found.items()}
