"""Adapters on the experts of a mixture, whose weights are one tensor for all experts of a block and no linear layers.

Expert e computes with ``W[e] + scale * B[e] A[e]``, without ever making that sum (``ExpertLinear`` of
``model/expert_products.py``). peft has the same adapters (``target_parameters`` of its LoraConfig), and this is what its files
hold for E experts of n inputs and m outputs:

- ``lora_A.weight`` [E x rank, n]: all rows of the first expert, then those of the second.
- ``lora_B.weight`` [m, rank x E]: a column has the number (place in the rank) x E + expert, so experts alternate.
- Which dimension of a weight has the inputs follows from transformers: [E, m, n], or [E, n, m] if the module is
  ``is_transposed`` (gpt-oss). Before peft 0.19 it was [E, n, m] for all, so older files of other models exchange A and B. Their
  shapes do not fit here.
- Adapters of two weights of a module nest in the order of the weights: those of ``down_proj`` have the name ``experts.lora_A``,
  and those of ``gate_up_proj`` ``experts.base_layer.lora_A``. Alone, either has the first name.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

import torch
from torch import Tensor, nn

from verl_memopt.errors import ConfigError
from verl_memopt.memory.lora import EXPERT_WEIGHTS, matches
from verl_memopt.memory.quantized_frozen_torch import PACKED

ADAPTER = "_lora"
"""Behind the name of such a weight: the module with its adapters."""


class ExpertLora(nn.Module):
    """Adapters of all experts of a block for one of their weights: A [E, rank, in] and B [E, out, rank]."""

    def __init__(self, experts: Any, name: str, rank: int, scale: float, dtype: torch.dtype | None = None) -> None:
        """The adapters are uninitialised, in ``dtype`` or that of the weight ``name`` of ``experts``."""
        super().__init__()
        self.transposed = bool(getattr(experts, "is_transposed", False))
        """Whether the weight is stored as [E, in, out]."""
        packed = getattr(experts, "packed", {}).get(name)
        weight = getattr(experts, name if packed is None else name + PACKED)
        self.num_experts = len(weight)
        sides, computes = (weight.shape[1:], weight.dtype) if packed is None else (packed.sides, packed.computes)
        self.out_features, self.in_features = reversed(sides) if self.transposed else sides
        self.scale, self.active = scale, True
        self.other: tuple[Tensor, Tensor] | None = None
        """A and B of other adapters. While they are set, they compute instead of the trained ones."""
        dtype = dtype or computes
        # Uninitialised, because the values are drawn or loaded after sharding.
        self.lora_A = nn.Parameter(torch.empty(self.num_experts, rank, self.in_features, dtype=dtype, device=weight.device))
        self.lora_B = nn.Parameter(torch.empty(self.num_experts, self.out_features, rank, dtype=dtype, device=weight.device))

    @property
    def factors(self) -> tuple[Tensor, Tensor]:
        return self.other or (self.lora_A, self.lora_B)

    def to_file(self, part: str, factor: Tensor) -> Tensor:
        """Return A as [E x rank, in], or B as [out, rank x E]. ``part`` is ``lora_A`` or ``lora_B``."""
        return factor.flatten(0, 1) if part == "lora_A" else factor.permute(1, 2, 0).flatten(1)

    def from_file(self, part: str, stored: Tensor) -> Tensor:
        if part == "lora_A":
            return stored.view(self.num_experts, stored.shape[0] // self.num_experts, self.in_features)
        return stored.view(self.out_features, stored.shape[1] // self.num_experts, self.num_experts).permute(2, 0, 1)


def factors_and_scales(experts: Any) -> tuple[tuple[Tensor | None, ...], tuple[float, ...]]:
    """Return A and B of both weights of a block's experts, and the scales of both. None = a weight has no adapters.

    Both are empty if there are no adapters, or if they are switched off.
    """
    layers = [getattr(experts, name + ADAPTER, None) for name in EXPERT_WEIGHTS]
    own = [layer if layer is not None and layer.active else None for layer in layers]
    if not any(own):
        return (), ()
    factors = (factor for layer in own for factor in ((None, None) if layer is None else layer.factors))
    return tuple(factors), tuple(0.0 if layer is None else layer.scale for layer in own)


def merged_experts(weight: Tensor, down: Tensor, up: Tensor, scale: float, transposed: bool, out: Tensor | None = None) -> Tensor:
    """Return the weights of some experts with their adapters added in fp32, expert by expert, in ``out`` or a new tensor.

    ``weight`` is [E, out, in] or, if ``transposed``, [E, in, out]. ``down`` and ``up`` are A [E, rank, in] and B [E, out, rank].
    """
    out = torch.empty_like(weight) if out is None else out
    for expert, (own, a, b) in enumerate(zip(weight, down, up, strict=True)):
        change = scale * b.float() @ a.float()
        # Not in place: `float` of an fp32 weight is the weight itself.
        out[expert].copy_(own.float() + (change.t() if transposed else change))
    return out


def file_prefix(name: str, adapted: Container[str]) -> str:
    """Return the name of adapters of experts in a file of peft, without ``.lora_A.weight``.

    ``name`` is that of their module, and ``adapted`` are the names of all modules with adapters.
    """
    experts, _, weight = name.removesuffix(ADAPTER).rpartition(".")
    outer = f"{experts}.{EXPERT_WEIGHTS[1]}{ADAPTER}"
    return f"{experts}.base_layer" if weight == EXPERT_WEIGHTS[0] and outer in adapted else experts


def adapter_module(weight: str) -> str:
    """Return the name of the module with the adapters of a weight of a linear layer or of experts, by the weight's name."""
    return weight.removesuffix(".weight") if weight.endswith(".weight") else weight + ADAPTER


def _stacked(model: nn.Module) -> Iterator[tuple[str, str, Any]]:
    # (name of a weight of experts, name of the module of these experts, the module)
    for place, module in model.named_modules():
        for weight in EXPERT_WEIGHTS if place.endswith(".experts") else ():
            stored = getattr(module, weight, getattr(module, weight + PACKED, None))
            if isinstance(stored, nn.Parameter) and stored.ndim == 3:
                yield f"{place}.{weight}", place, module


def chosen_experts(model: nn.Module, target_parameters: Sequence[str] | None, computed: bool, key: str) -> list[str]:
    """Return the names of the weights of experts that get adapters.

    Args:
        model: A Hugging Face model or our decoder.
        target_parameters: Endings of names, such as ``mlp.experts.gate_up_proj``. None = no expert gets adapters.
        computed: Whether our own decoder computes the model's experts.
        key: Section of the settings that errors name.

    Raises:
        ConfigError: A name matches no weight of experts, or transformers computes the experts.
    """
    if not target_parameters:
        return []
    names, setting = [name for name, _, _ in _stacked(model)], f"{key}.target_parameters"
    if not names:
        raise ConfigError(f"{setting}={list(target_parameters)}: the model has no experts. Name its layers in target_modules.")
    if not computed:
        kind = getattr(getattr(model, "config", None), "model_type", "this")
        raise ConfigError(
            f"{setting}={list(target_parameters)}: transformers computes the experts of models of type {kind}, and adapters are "
            "part of our own experts. Leave the key out, so that other layers get adapters."
        )
    parameters = [name for name, _ in model.named_parameters()]
    endings = sorted({re.sub(r"^.*\.\d+\.", "", name) for name in names})
    wrong = [
        f"{setting}: {_no_experts(ending, parameters, endings)}" for ending in target_parameters if not _chooses(ending, names)
    ]
    if wrong:
        raise ConfigError(f"{'; '.join(wrong)}. The weights of experts are {', '.join(endings)}.")
    return [name for name in names if matches(name, target_parameters)]


def _chooses(ending: str, names: Sequence[str]) -> bool:
    return any(matches(name, [ending]) for name in names)


def _no_experts(ending: str, parameters: Sequence[str], endings: Sequence[str]) -> str:
    if any(matches(name, [ending]) for name in parameters):
        return f"{ending} is no weight of experts. Name linear layers in target_modules; other tensors have no adapters"
    near = get_close_matches(ending, [*endings, *EXPERT_WEIGHTS], n=2)
    return f"no tensor is named {ending}" + (f" (near: {', '.join(near)})" if near else "")


def adapt_experts(model: nn.Module, names: Sequence[str], rank: int, scale: float, dtype: torch.dtype | None) -> None:
    places: Mapping[str, tuple[str, Any]] = {name: (place, module) for name, place, module in _stacked(model)}
    for name in names:
        place, module = places[name]
        weight = name.removeprefix(f"{place}.")
        module.add_module(weight + ADAPTER, ExpertLora(module, weight, rank, scale, dtype))
