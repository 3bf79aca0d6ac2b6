"""LoRA: the base is frozen, and each chosen linear layer learns a low-rank addition to its weight.

Bytes saved: gradients and optimizer state of N - N_a parameters, 12 bytes each with fp32 AdamW, where N counts the parameters of
the base and N_a those of the adapters: rank x (in + out) per layer. A KL needs no second model as its reference, which saves b_w
x N / W bytes more (b_w bytes per weight, W ranks). Source: LoRA, arXiv 2106.09685.
"""

from __future__ import annotations

import json
import math
import re
import zlib
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import linear

from verl_memopt.errors import ConfigError
from verl_memopt.memory.expert_lora_torch import (
    ADAPTER,
    ExpertLora,
    adapt_experts,
    chosen_experts,
    file_prefix,
    merged_experts,
)
from verl_memopt.memory.host_buffers import host_buffer
from verl_memopt.memory.lora import Lora, matches
from verl_memopt.memory.quantized_frozen_torch import PACKED, QuantizedLinear, packed_experts, quantized_layers, stored_weight
from verl_memopt.model.families import text_name, whole_name
from verl_memopt.observe.byte_tracker import scope

KEY = "actor_rollout_ref.model"
ADAPTERS = ("lora_A", "lora_B")
"""Names of the trainable parameters of a layer, as in the peft format."""
PEFT = "base_model.model."
"""Prefix of all names in the peft format."""


class LoraLinear(nn.Linear):
    """A frozen linear layer. While ``active``, it adds ``scale * x A^T B^T`` to its output, with A [rank, in] and B [out, rank].

    It replaces a plain layer and keeps the names of its parameters.
    """

    def __init__(self, base: nn.Linear, rank: int, scale: float, dtype: torch.dtype | None = None) -> None:
        """Take over the weight and bias of a layer. The adapter is uninitialised, in ``dtype`` or the weight's dtype."""
        nn.Module.__init__(self)
        self.weight = base.weight
        self._add(base, rank, scale, dtype or base.weight.dtype)

    def _add(self, base: Any, rank: int, scale: float, dtype: torch.dtype) -> None:
        self.in_features, self.out_features, self.bias = base.in_features, base.out_features, base.bias
        self.scale, self.active = scale, True
        self.other: tuple[Tensor, Tensor] | None = None
        """A and B of another adapter. While it is set, it computes instead of the trained adapter."""
        device = stored_weight(base)[0].device
        # Uninitialised, because the values are drawn or loaded after sharding.
        self.lora_A = nn.Parameter(torch.empty(rank, self.in_features, dtype=dtype, device=device))
        self.lora_B = nn.Parameter(torch.empty(self.out_features, rank, dtype=dtype, device=device))

    @property
    def computes(self) -> torch.dtype:
        return self.weight.dtype

    @property
    def factors(self) -> tuple[Tensor, Tensor]:
        # During a pass of the reference, its adapters replace the trained ones.
        down, up = self.other or (self.lora_A, self.lora_B)
        # Adapters of a wider dtype are cast, as FSDP2 casts other parameters.
        return down.to(self.computes), up.to(self.computes)

    def forward(self, x: Tensor) -> Tensor:
        return self.adapted(x, linear(x, self.weight, self.bias))

    def adapted(self, x: Tensor, out: Tensor) -> Tensor:
        if not self.active:
            return out
        down, up = self.factors
        return out + self.scale * linear(linear(x, down), up)

    def to_file(self, part: str, factor: Tensor) -> Tensor:
        """Return A or B as a file of peft has it, which is as it is here. See :meth:`ExpertLora.to_file`."""
        return factor

    def from_file(self, part: str, stored: Tensor) -> Tensor:
        return stored


class QuantizedLoraLinear(QuantizedLinear, LoraLinear):
    """A :class:`LoraLinear` over a frozen layer in 8 or 4 bits (QLoRA, arXiv 2305.14314)."""

    def __init__(self, base: QuantizedLinear, rank: int, scale: float, dtype: torch.dtype | None = None) -> None:
        nn.Module.__init__(self)
        self.packing, self.qweight, self.exact, self._dtype = base.packing, base.qweight, base.exact, base.computes
        self._add(base, rank, scale, dtype or base.computes)

    def forward(self, x: Tensor) -> Tensor:
        return self.adapted(x, QuantizedLinear.forward(self, x))


def apply_lora(
    model: nn.Module,
    rank: int,
    scale: float,
    target_modules: str | Sequence[str],
    exclude_modules: str | Sequence[str] | None,
    key: str = KEY,
    dtype: torch.dtype | None = None,
    target_parameters: Sequence[str] | None = None,
    computes_experts: bool = False,
) -> list[str]:
    """Freeze a model, give each chosen linear layer and expert an adapter with factor ``scale``, and return their names.

    Call this before sharding. ``dtype`` is the dtype of the adapters; None = that of each layer. Other arguments and errors are
    those of :func:`chosen_adapters`.
    """
    model.requires_grad_(False)
    # Chosen before anything is replaced, so that an error leaves the model as it was.
    layers, experts = chosen_adapters(model, (target_modules, exclude_modules, target_parameters), computes_experts, key)
    for name in layers:
        _adapt(model, name, rank, scale, dtype)
    adapt_experts(model, experts, rank, scale, dtype)
    return [*layers, *experts]


Targets = tuple[str | Sequence[str], str | Sequence[str] | None, Sequence[str] | None]
"""The settings ``target_modules``, ``exclude_modules`` and ``target_parameters``."""


def chosen_adapters(model: nn.Module, targets: Targets, computes_experts: bool, key: str = KEY) -> tuple[list[str], list[str]]:
    """Return the names of the linear layers and of the weights of experts that get adapters.

    ``computes_experts``: whether our own decoder computes the model's experts. Arguments and errors are otherwise those of
    :func:`chosen_layers` and :func:`chosen_experts`. An empty ``target_modules`` is allowed if experts get adapters.
    """
    target_modules, exclude_modules, target_parameters = targets
    experts = chosen_experts(model, target_parameters, computes_experts, key)
    only = bool(experts) and not target_modules
    return [] if only else chosen_layers(model, target_modules, exclude_modules, key), experts


ROUTER = ".router.proj"
"""End of the name of the one linear layer that has no adapter: the router of Gemma 4. Other routers are no linear layers."""


def chosen_layers(
    model: nn.Module, target_modules: str | Sequence[str], exclude_modules: str | Sequence[str] | None, key: str = KEY
) -> list[str]:
    """Return the names of the linear layers that get an adapter.

    Args:
        model: A Hugging Face model or our decoder.
        target_modules: ``all-linear`` (every linear layer but the head), a list of name endings, or a regular expression for the
            whole name.
        exclude_modules: Layers to leave out, in the same form.
        key: Section of the settings that errors name.

    Raises:
        ConfigError: No layer is chosen, or a name matches nothing. The message suggests similar names.
    """
    head = getattr(model, "get_output_embeddings", lambda: None)()
    modules = {name: module for name, module in model.named_modules() if name}
    # Quantised layers are not nn.Linear, but get adapters too.
    kinds = (nn.Linear, QuantizedLinear)
    linears = [name for name, module in modules.items() if isinstance(module, kinds) and module is not head]
    linears = [name for name in linears if not name.endswith(ROUTER)]
    endings = sorted({name.rsplit(".", 1)[-1] for name in linears})
    wrong = [
        f"{key}.target_modules: {_no_layer(ending, modules, head, endings)}"
        for ending in ([] if isinstance(target_modules, str) else target_modules)
        if not any(_matches(name, [ending]) for name in linears)
    ]
    excluded = [exclude_modules] if isinstance(exclude_modules, str) else [[ending] for ending in exclude_modules or ()]
    wrong += [
        f"{key}.exclude_modules: no part of the model is named {''.join(wanted)}{_nearest(''.join(wanted), endings)}"
        for wanted in excluded
        if wanted != "all-linear" and not any(_matches(name, wanted) for name in modules)
    ]
    if wrong:
        stacked = any(".experts." in name and parameter.ndim == 3 for name, parameter in model.named_parameters())
        note = " Weights of experts are no linear layers: name them in target_parameters." if stacked else ""
        raise ConfigError(
            f"{'; '.join(wrong)}. The linear layers end in {', '.join(endings)}; all-linear takes all of them.{note}"
        )
    chosen = [name for name in linears if _matches(name, target_modules) and not _matches(name, exclude_modules)]
    if not chosen:
        raise ConfigError(
            f"{key}.target_modules={target_modules}: no linear layer is chosen. Its layers end in {', '.join(endings)}."
        )
    return chosen


def _no_layer(ending: str, modules: Mapping[str, nn.Module], head: Any, endings: Sequence[str]) -> str:
    found = [module for name, module in modules.items() if _matches(name, [ending])]
    if not found:
        return f"no layer is named {ending}{_nearest(ending, endings)}"
    if any(module is head for module in found):
        return f"{ending} is the head, whose weights the chunked log-prob reads: it has no adapter"
    if any(isinstance(module, nn.Embedding) for module in found):
        return f"{ending} is the embedding, and only linear layers have adapters"
    return f"{ending} is no linear layer, but {type(found[0]).__name__}"


def _nearest(name: str, endings: Sequence[str]) -> str:
    near = get_close_matches(name, [*endings, "all-linear"], n=2)
    return f" (near: {', '.join(near)})" if near else ""


def _adapt(model: nn.Module, name: str, rank: int, scale: float, dtype: torch.dtype | None = None) -> None:
    layer = model.get_submodule(name)
    kind: Any = QuantizedLoraLinear if isinstance(layer, QuantizedLinear) else LoraLinear
    # Under the same name, so that checkpoints and exports find the weight of the base.
    model.set_submodule(name, kind(layer, rank, scale, dtype))


def _matches(name: str, wanted: str | Sequence[str] | None) -> bool:
    if wanted is None:
        return False
    if isinstance(wanted, str):
        return wanted == "all-linear" or re.fullmatch(wanted, name) is not None
    return matches(name, wanted)


AnyAdapter = LoraLinear | ExpertLora


def adapters(model: nn.Module) -> dict[str, AnyAdapter]:
    kinds = (LoraLinear, ExpertLora)
    return {name.removeprefix("lm."): module for name, module in model.named_modules() if isinstance(module, kinds)}


def _file_names(layers: Mapping[str, AnyAdapter], adapted: Container[str] | None = None) -> dict[str, tuple[str, str]]:
    """Return the names of A and B of each layer in a file of peft.

    ``adapted``: names of the layers that the file adapts. None = all.
    """
    adapted = layers if adapted is None else adapted
    prefixes = {name: file_prefix(name, adapted) if isinstance(layer, ExpertLora) else name for name, layer in layers.items()}
    return {name: (f"{PEFT}{own}.lora_A.weight", f"{PEFT}{own}.lora_B.weight") for name, own in prefixes.items()}


class _Factor(NamedTuple):
    """A or B of a layer, as a file of peft has it."""

    layer: AnyAdapter
    part: str

    @property
    def parameter(self) -> nn.Parameter:
        factor: nn.Parameter = getattr(self.layer, self.part)
        return factor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.layer.to_file(self.part, torch.empty(self.parameter.shape, device="meta")).shape)

    def whole(self, wanted: bool) -> Tensor:
        """Return the full tensor on the host, or an empty one if it is not ``wanted``. All ranks gather in step."""
        found = _on_host(self.parameter, wanted)
        return self.layer.to_file(self.part, found) if wanted else found

    def set(self, stored: Tensor) -> None:
        _copy_whole(self.parameter, self.layer.from_file(self.part, stored))


def _factors(model: nn.Module) -> dict[str, _Factor]:
    layers = adapters(model)
    names = _file_names(layers)
    return {name: _Factor(layer, part) for own, layer in layers.items() for name, part in zip(names[own], ADAPTERS, strict=True)}


def initialize_adapters(model: nn.Module, seed: int) -> None:
    """Draw each A (Kaiming uniform) and set each B to zero, so that the model initially computes the same as its base.

    A layer's values depend only on the seed and its name, not on the number of ranks.
    """
    for name, layer in adapters(model).items():
        generator = torch.Generator().manual_seed((seed << 32) ^ zlib.crc32(name.encode()))
        # Drawn as a whole and then cut, so that the values do not depend on how rows are sharded.
        bound = 1 / math.sqrt(layer.in_features)
        whole = torch.empty(layer.lora_A.shape).uniform_(-bound, bound, generator=generator)
        _copy_whole(layer.lora_A, whole)
        _copy_whole(layer.lora_B, torch.zeros(layer.lora_B.shape))


def _copy_whole(parameter: Tensor, whole: Tensor) -> None:
    # Copy a full tensor into a parameter. If the parameter is sharded on its first dimension, it gets this rank's rows.
    if not isinstance(parameter, DTensor):
        parameter.detach().copy_(whole)
        return
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    parameter.to_local().detach().copy_(whole[offset[0] : offset[0] + shape[0]])


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    layers = list(adapters(model).values())
    for layer in layers:
        layer.active = False
    try:
        yield
    finally:
        for layer in layers:
            layer.active = True


StartingAdapter = Mapping[str, Tensor]
"""The adapters that training started from: name in the peft format -> host tensor in the compute dtype."""


def starting_adapter(folder: Path, model: nn.Module, dtype: torch.dtype, device: torch.device, key: str = KEY) -> StartingAdapter:
    """Read the adapters of a folder in the peft format, in ``dtype``; page-locked if ``device`` is a GPU.

    Raises:
        ConfigError: See :func:`load_adapter`.
    """
    wanted = {name: factor.shape for name, factor in _factors(model).items()}
    tensors = _read(folder, wanted, wanted, key)
    # One page-locked buffer for all tensors, because each allocation takes whole pages.
    buffers = host_buffer(sum(tensors[name].numel() for name in wanted) * dtype.itemsize, device, "params")
    parts = buffers.split([tensors[name].numel() * dtype.itemsize for name in wanted])
    return {
        name: part.view(dtype).view(tensors[name].shape).copy_(tensors[name]) for name, part in zip(wanted, parts, strict=True)
    }


def other_adapter(folder: Path, model: nn.Module, dtype: torch.dtype, scale: float, key: str) -> StartingAdapter:
    """Read adapters of any rank and scale for the adapted layers of a model, in ``dtype``, on the host.

    Layers without adapters in the folder get empty ones, so that the base alone computes there.

    Args:
        folder: A folder in the peft format.
        model: The model, with adapters of its own.
        dtype: The compute dtype.
        scale: The factor of the folder's adapters.
        key: The setting that names the folder, for errors.

    Raises:
        ConfigError: The folder adapts other layers, or layers of another shape.
    """
    path, layers, found = folder / "adapter_model.safetensors", adapters(model), dict[str, Tensor]()
    if not path.is_file():
        raise ConfigError(f"{key}={folder}: it has no adapter_model.safetensors. Give a folder in the peft format.")
    tensors, own = load_file(path), _file_names(layers)
    theirs = _file_names(layers, _adapted_in(folder, layers))
    for name, layer in layers.items():
        down, up = (tensors.pop(part, None) for part in theirs[name])
        down = torch.empty(0, layer.in_features) if down is None else down
        up = torch.empty(layer.out_features, 0) if up is None else up
        if (down.shape[1], up.shape[0], down.shape[0]) != (layer.in_features, layer.out_features, up.shape[1]):
            raise ConfigError(
                f"{key}={folder}: its adapter of {name} has the shapes {tuple(down.shape)} and {tuple(up.shape)}, and the layer "
                f"has {layer.in_features} inputs and {layer.out_features} outputs. Give adapters of the policy's base."
            )
        found[own[name][0]] = down.to(dtype)
        found[own[name][1]] = (up.float() * (scale / layer.scale)).to(dtype)
    if tensors:
        raise ConfigError(
            f"{key}={folder}: it adapts {', '.join(sorted(tensors)[:3])}, where the policy has no adapters. Give the policy "
            "adapters on these layers (actor_rollout_ref.model.target_modules and target_parameters), or set teacher.model.path "
            "to the adapters' base."
        )
    return found


def _adapted_in(folder: Path, layers: Mapping[str, AnyAdapter]) -> list[str]:
    # Which adapters of experts a folder has, by its config.
    wanted = json.loads((folder / "adapter_config.json").read_text()).get("target_parameters") or ()
    return [name for name in layers if name.endswith(ADAPTER) and matches(name.removesuffix(ADAPTER), wanted)]


@contextmanager
def as_reference(model: nn.Module, start: StartingAdapter | None, device: torch.device) -> Iterator[None]:
    """Inside the body, compute with the adapters that training started from. They are on the device only in the body.

    ``start``: None = compute with the base alone.
    """
    if start is None:
        with adapters_off(model):
            yield
        return
    layers = adapters(model)
    names = _file_names(layers)
    with scope(kind="params"):
        for name, layer in layers.items():
            # Only for this pass; the copy on the host stays.
            down, up = (start[each].to(device, non_blocking=True) for each in names[name])
            layer.other = layer.from_file("lora_A", down), layer.from_file("lora_B", up).contiguous()
    try:
        yield
    finally:
        for layer in layers.values():
            layer.other = None


def merged_weights(
    weights: Iterator[tuple[str, Tensor]], model: nn.Module, exact: Callable[[str], Tensor] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield each tensor of the base once, with its adapter (if any) added in fp32. The adapters themselves are left out.

    A merged tensor is sharded like its base, and computed when the iterator reaches it. All ranks must iterate in step, because
    the small A of a layer is gathered, and so is B where the base is not sharded. ``exact`` returns the unquantised weight of a
    quantised layer or of packed experts by its name. None = the quantised weight is decoded.
    """
    layers = {_base_name(name, layer): layer for name, layer in adapters(model).items()}
    packed, experts = {f"{name}.qweight": layer for name, layer in quantized_layers(model).items()}, packed_experts(model)
    for stored, value in weights:
        name, weight = stored, value
        # Adapters are not yielded: they are merged into their base tensor.
        if name.rsplit(".", 1)[-1] in ADAPTERS:
            continue
        if stored.endswith(PACKED):
            name = stored.removesuffix(PACKED)
            if exact is None and name in layers:  # into the decoded copy
                weight = experts[name].whole(value.detach(), exactly=False)
                yield name, _merged(weight, layers[name], out=weight)
                continue
            weight = experts[name].whole(value.detach()) if exact is None else exact(name).to(value.device)
        if stored in packed:
            name, layer = stored.removesuffix("qweight") + "weight", packed[stored]
            # The adapter is merged into the exact weight, if that can be read.
            exact_weight = layer.packing.dequantize(value.detach(), layer.computes) if exact is None else exact(name)
            weight = exact_weight.to(value.device)
        yield name, _merged(weight, layers[name]) if name in layers else weight


def _base_name(name: str, layer: AnyAdapter) -> str:
    return name.removesuffix(ADAPTER) if isinstance(layer, ExpertLora) else f"{name}.weight"


def _merged(weight: Tensor, layer: AnyAdapter, out: Tensor | None = None) -> Tensor:
    with torch.no_grad():
        if not isinstance(weight, DTensor):
            return _with(weight, _gathered(layer.lora_A), _gathered(layer.lora_B), layer, out)
        # Base and B are sharded by rows: this rank's rows of the base need all of A, and this rank's rows of B. Experts are
        # sharded one by one, and so are their adapters.
        assert isinstance(layer.lora_A, DTensor)
        assert isinstance(layer.lora_B, DTensor)
        down = layer.lora_A.to_local() if isinstance(layer, ExpertLora) else layer.lora_A.full_tensor()
        local = _with(weight.to_local(), down, layer.lora_B.to_local(), layer)
        return DTensor.from_local(
            local, weight.device_mesh, weight.placements, run_check=False, shape=weight.shape, stride=weight.stride()
        )


def _with(weight: Tensor, down: Tensor, up: Tensor, layer: AnyAdapter, out: Tensor | None = None) -> Tensor:
    if isinstance(layer, ExpertLora):
        return merged_experts(weight, down, up, layer.scale, layer.transposed, out)
    return with_adapter(weight, down, up, layer.scale)


def _gathered(parameter: Tensor) -> Tensor:
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


def with_adapter(weight: Tensor, down: Tensor, up: Tensor, scale: float) -> Tensor:
    """Compute ``weight + scale * up @ down`` in fp32 and return it in the weight's dtype.

    ``weight`` is some rows of [out, in], ``down`` is A [rank, in], and ``up`` is the same rows of B [out, rank].
    """
    return (weight.float() + scale * up.float() @ down.float()).to(weight.dtype)


def save_adapter(
    folder: Path,
    model: nn.Module,
    base: str,
    settings: Lora,
    writes: bool,
    start: StartingAdapter | None = None,
    in_whole: bool = False,
) -> None:
    """Write the adapters to a folder in the peft format: adapter_config.json and adapter_model.safetensors.

    Args:
        folder: Created if missing.
        model: The model. Modules that are trained in full, such as the critic's head, are written too (``modules_to_save``).
        base: Name of the base model.
        settings: Rank, alpha and scaling.
        writes: Whether this rank writes. All ranks must call this function, because they gather in step.
        start: Write these adapters instead of the trained ones.
        in_whole: The base is the text part of a multimodal model. Write the names of the layers in the whole model.
    """
    trained = {} if start is not None else whole_parameters(model)
    # All ranks gather in step, even if they do not write.
    tensors = start if start is not None else {name: factor.whole(writes) for name, factor in _factors(model).items()}
    tensors = {**tensors, **{name: _on_host(parameter, writes) for name, parameter in _beside(trained).items()}}
    if not writes:
        return
    folder.mkdir(parents=True, exist_ok=True)
    if in_whole:
        tensors = {PEFT + whole_name(name.removeprefix(PEFT)): tensor for name, tensor in tensors.items()}
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    names = sorted({name.rsplit(".", 1)[-1] for name, layer in adapters(model).items() if isinstance(layer, LoraLinear)})
    config = {
        "peft_type": "LORA", "task_type": "TOKEN_CLS" if trained else "CAUSAL_LM",
        "base_model_name_or_path": base, "r": settings.lora_rank, "lora_alpha": settings.lora_alpha, "lora_dropout": 0.0,
        "target_modules": names, "target_parameters": settings.target_parameters, "use_rslora": settings.use_rslora,
        "bias": "none", "fan_in_fan_out": False,
        "modules_to_save": sorted({name.rsplit(".", 1)[0] for name in trained}) or None,
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")


def stored_adapters(model: nn.Module) -> dict[str, Tensor]:
    """Return A and B of all adapters, for an engine with the same base.

    Names are those of the peft format for linear layers. The names and shapes of adapters of experts are those of their modules.
    """
    layers = adapters(model).items()
    return {f"{PEFT}{name}.{part}.weight": getattr(layer, part) for name, layer in layers for part in ADAPTERS}


@torch.no_grad()
def copy_adapters(tensors: Mapping[str, Tensor], model: nn.Module, scale: float) -> None:
    # The first call adds adapters to the layers.
    if not adapters(model):
        for name, down in ((name, tensor) for name, tensor in tensors.items() if name.endswith(".lora_A.weight")):
            layer, rank = name.removeprefix(PEFT).removesuffix(".lora_A.weight"), down.shape[-2]
            if layer.endswith(ADAPTER):
                adapt_experts(model, [layer.removesuffix(ADAPTER)], rank, scale, None)
            else:
                _adapt(model, layer, rank, scale)
        model.requires_grad_(False)
    for name, own in stored_adapters(model).items():
        own.copy_(tensors[name])


def _beside(trained: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    return {f"{PEFT}{name}": parameter for name, parameter in trained.items()}


def _on_host(parameter: Tensor, wanted: bool) -> Tensor:
    # Return the full tensor on the host, or an empty tensor if it is not `wanted`. All ranks gather in step.
    whole = _gathered(parameter)
    # copy=True, because on a CPU run `to` would return the parameter's own memory.
    return whole.detach().to("cpu", copy=True).contiguous() if wanted else torch.empty(0)


def whole_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters that are trained in full beside the adapters, by their names in a Hugging Face checkpoint."""
    named = ((name.removeprefix("lm."), parameter) for name, parameter in model.named_parameters() if parameter.requires_grad)
    return {name: parameter for name, parameter in named if name.rsplit(".", 1)[-1] not in ADAPTERS}


def load_adapter(folder: Path, model: nn.Module, key: str = KEY) -> None:
    """Load the adapters from a folder in the peft format, and modules that are trained in full if the folder has them.

    Raises:
        ConfigError: Tensors are missing, unexpected or of another shape. The message lists them.
    """
    own, modules_beside = _factors(model), _beside(whole_parameters(model))
    needed = {name: factor.shape for name, factor in own.items()}
    tensors = _read(folder, needed | {name: tuple(each.shape) for name, each in modules_beside.items()}, needed, key)
    for name, factor in own.items():
        factor.set(tensors[name])
    for name, parameter in modules_beside.items():
        if name in tensors:
            _copy_whole(parameter, tensors[name])


Sizes = Mapping[str, tuple[int, ...]]
"""Name of a tensor in a file -> its shape."""


def _read(folder: Path, allowed: Sizes, needed: Sizes, key: str) -> dict[str, Tensor]:
    # Read a peft folder. It must have every tensor of `needed`, and none outside `allowed`.
    setting, path = f"{key}.lora_adapter_path={folder}", folder / "adapter_model.safetensors"
    if not path.is_file():
        raise ConfigError(f"{setting}: it has no adapter_model.safetensors. Give a folder in the peft format.")
    # Adapters of a multimodal model have the names of its text part, of which other names are unexpected.
    stored = load_file(path)
    tensors = {name if name in allowed else PEFT + text_name(name.removeprefix(PEFT)): stored[name] for name in stored}
    # All problems are collected, because a wrong rank or a wrong list of layers shows as a pattern.
    problems = [f"missing {name}" for name in needed if name not in tensors]
    problems += [f"unexpected {name}" for name in tensors if name not in allowed]
    problems += [f"{name} holds whole numbers" for name, tensor in tensors.items() if not tensor.is_floating_point()]
    problems += [
        f"{name} has shape {tuple(tensors[name].shape)}, the settings ask for {allowed[name]}"
        for name in allowed.keys() & tensors.keys()
        if tuple(tensors[name].shape) != allowed[name]
    ]
    if problems:
        raise ConfigError(
            f"{setting}: it does not fit lora_rank, target_modules and target_parameters: {'; '.join(problems[:6])}."
        )
    return tensors
