"""Frozen weights in 8 or 4 bits: linear layers and experts keep codes and scales, and decode a weight for each matrix product.

The base under adapters may be such a frozen model. Backward decodes the weight again to compute the gradient of the input.

Bytes saved: b_w - 1.03 bytes for each parameter in the blocks' linear layers and experts with int8 (groups of 128), and
b_w - 0.56 with nf4 (groups of 64). b_w is the bytes per weight without the knob. Codes are sharded over ranks like weights,
unless an engine shares them.

Results are not exact. The worker measures the error of the log-probs when it loads the model, and logs it.

Source of the nf4 levels: QLoRA, arXiv 2305.14314.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from verl_memopt.errors import ConfigError
from verl_memopt.memory.quantized_frozen import (
    FORMATS,
    MXFP4,
    STORED,
    code_bytes,
    groups_of,
    row_bytes,
)

NF4_LEVELS = (
    -1.0, -0.6961928, -0.5250731, -0.3949175, -0.2844414, -0.1847734, -0.09105003, 0.0,
    0.0795803, 0.1609302, 0.2461123, 0.3379152, 0.4407098, 0.5626170, 0.7229568, 1.0,
)  # fmt: skip
"""Quantiles of a normal distribution, scaled to [-1, 1]."""


@dataclass(frozen=True)
class Packing:
    """Stores a weight [out, in] as bytes, uint8 [out, code bytes + scales' bytes]: each row's codes, then its scales.

    Scales are stored as bytes beside their codes, so that no mixed-precision policy rounds them, and so that rows can be sharded,
    or joined with the rows of another weight.
    """

    kind: str
    in_features: int

    @property
    def groups(self) -> int:
        return groups_of(self.kind, self.in_features)

    @property
    def code_bytes(self) -> int:
        return code_bytes(self.kind, self.in_features)

    @property
    def row_bytes(self) -> int:
        return row_bytes(self.kind, self.in_features)

    def quantize(self, weight: Tensor) -> Tensor:
        """Encode rows [rows, in] of any float dtype as uint8 [rows, row bytes]."""
        rows, group = weight.shape[0], FORMATS[self.kind].group
        # The last group is padded with zeros, which do not change its scale.
        grouped = weight.new_zeros(rows, self.groups * group, dtype=torch.float32)
        grouped[:, : self.in_features] = weight
        grouped = grouped.view(rows, self.groups, group)
        # The largest magnitude of a group maps to the outermost code.
        scale = grouped.abs().amax(-1)
        # A group of zeros has scale 0, and 0 / 0 would be NaN.
        codes = _encode(grouped / scale.clamp(min=1e-30)[..., None], self.kind).view(rows, self.code_bytes)
        return torch.cat([codes, scale.contiguous().view(torch.uint8).view(rows, 4 * self.groups)], dim=1)

    def dequantize(self, stored: Tensor, dtype: torch.dtype, pairs: Tensor | None = None) -> Tensor:
        """Decode the bytes of some rows to [rows, in] in ``dtype``.

        ``pairs`` is the table :func:`nf4_pairs` in this dtype on this device. None = it is made and copied there.
        """
        if self.kind == MXFP4:
            return mxfp4_decoded(stored[:, : self.code_bytes], stored[:, self.code_bytes :], dtype)
        rows = stored.shape[0]
        scale = stored[:, self.code_bytes :].contiguous().view(torch.float32)
        levels = self._levels(stored[:, : self.code_bytes], dtype, pairs).view(rows, self.groups, FORMATS[self.kind].group)
        return levels.mul_(scale[..., None].to(dtype)).view(rows, -1)[:, : self.in_features]

    def _levels(self, codes: Tensor, dtype: torch.dtype, pairs: Tensor | None) -> Tensor:
        if self.kind == "int8":
            # The codes are a slice of longer rows, so they are copied into contiguous memory first.
            return codes.contiguous().view(torch.int8).to(dtype).div_(127)
        # Copied without waiting, because each layer needs the table in each micro-batch.
        pairs = nf4_pairs(dtype).to(codes.device, non_blocking=True) if pairs is None else pairs
        return pairs[codes.int()]


def stored_weight(layer: Any) -> tuple[Tensor, Packing | None]:
    if not isinstance(layer, QuantizedLinear):
        return layer.weight, None
    return (layer.qweight, layer.packing) if layer.exact is None else (layer.exact().to(layer.computes), None)


def whole_weight(stored: Tensor, packing: Packing | None, dtype: torch.dtype) -> Tensor:
    return stored if packing is None else packing.dequantize(stored, dtype)  # [out, in]


class QuantizedLinear(nn.Module):
    """A frozen linear layer that keeps bytes, ``qweight``, and decodes its weight for each product.

    The bytes are uninitialised at first. If ``exact`` is set, it returns the unquantised weight, which is then used.
    """

    def __init__(self, base: nn.Linear, kind: str) -> None:
        super().__init__()
        self.packing = Packing(kind, base.in_features)
        self.in_features, self.out_features = base.in_features, base.out_features
        shape = (self.out_features, self.packing.row_bytes)
        # It is a parameter, although nothing trains it, because FSDP2 only shards and moves parameters.
        self.qweight = nn.Parameter(torch.empty(shape, dtype=torch.uint8, device=base.weight.device), requires_grad=False)
        self.bias, self._dtype = base.bias, base.weight.dtype
        self.exact: Callable[[], Tensor] | None = None

    @property
    def computes(self) -> torch.dtype:
        return self._dtype

    def forward(self, x: Tensor) -> Tensor:
        if self.exact is not None:
            # Only while the error of the quantisation is measured.
            return linear(x, self.exact().to(x.dtype), self.bias)
        output: Tensor = _PackedProduct.apply(x, self.qweight, self.bias, self.packing)
        return output


class _PackedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, stored: Tensor, bias: Tensor | None, packing: Packing) -> Tensor:
        # Only the codes are saved. Backward decodes the weight again.
        ctx.save_for_backward(stored)
        ctx.packing = packing
        return linear(x, packing.dequantize(stored, x.dtype), bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (stored,) = ctx.saved_tensors
        # The base is frozen: only the input has a gradient.
        return grad @ ctx.packing.dequantize(stored, grad.dtype), None, None, None


def _encode(share: Tensor, kind: str) -> Tensor:
    if kind == "int8":
        return (share * 127).round_().to(torch.int8).view(torch.uint8)
    levels = torch.tensor(NF4_LEVELS, dtype=torch.float32).to(share.device, non_blocking=True)
    # The nearest level: the border between two levels is halfway.
    middles = (levels[1:] + levels[:-1]) / 2
    codes = torch.bucketize(share.contiguous(), middles, out_int32=True).to(torch.uint8)
    # Two codes per byte, the first in the low half.
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def nf4_pairs(dtype: torch.dtype) -> Tensor:
    """Table [256, 2]: for each byte, the levels of its two nf4 codes."""
    levels, codes = torch.tensor(NF4_LEVELS, dtype=dtype, device="cpu"), torch.arange(256, device="cpu")
    return torch.stack([levels[codes & 15], levels[codes >> 4]], dim=-1)


# MXFP4, in which experts of gpt-oss are published: two codes per byte, the first in the low half, and a power of two per group.

MXFP4_LEVELS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes of codes 0 to 7. Codes 8 to 15 are the same with a minus."""


def mxfp4_decoded(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Decode codes, uint8 [..., n / 2], and scales, uint8 [..., n / 32], to weights [..., n] in ``dtype``. bfloat16 is exact."""
    levels = torch.tensor(MXFP4_LEVELS, dtype=dtype, device="cpu")
    levels, both = torch.cat((levels, -levels)), torch.arange(256, device="cpu")
    pairs = torch.stack([levels[both & 15], levels[both >> 4]], dim=-1).to(codes.device, non_blocking=True)
    powers = torch.exp2(both.float() - 127).to(dtype).to(codes.device, non_blocking=True)
    out = pairs[codes.int()].view(*scales.shape, STORED[MXFP4].group)
    return out.mul_(powers[scales.int()][..., None]).flatten(-2)


# Experts: the weights of all experts of a block are one tensor, of which one expert or a few are decoded at a time.

PACKED = "_packed"
"""Behind the name of experts whose parameter has bytes: uint8 [E, m, row bytes]."""
EXPERTS = ("gate_up_proj", "down_proj")
"""Names of the weights of a block's experts."""


@dataclass(eq=False)
class PackedExperts:
    """How the bytes of all experts of a block, uint8 [E, m, row bytes], are decoded: those of gate and up, or those of down.

    Attributes:
        packing: The format of a row. The input is last, however the model stores whole weights.
        outputs: Number m of rows of an expert.
        turned: Whether the model stores whole weights as [E, n, m], and not as [E, m, n].
        computes: The dtype of the weights before they were packed.
        exact: Returns the unquantised weight [m, n] of an expert, which is then used. None = the bytes are decoded.
    """

    packing: Packing
    outputs: int
    turned: bool
    computes: torch.dtype
    exact: Callable[[int], Tensor] | None = None

    @property
    def sides(self) -> tuple[int, int]:
        """The shape of an expert's whole weight in the model."""
        width = self.packing.in_features
        return (width, self.outputs) if self.turned else (self.outputs, width)

    def weights(self, stored: Tensor, experts: range, dtype: torch.dtype) -> Tensor:
        """Return the weights [e, m, n] of some experts in ``dtype``. ``stored`` are the bytes of all experts."""
        if self.exact is not None:
            return torch.stack([self.exact(expert).to(dtype) for expert in experts])
        rows = stored[experts.start : experts.stop].flatten(0, 1)
        return self.packing.dequantize(rows, dtype).unflatten(0, (len(experts), self.outputs))

    def whole(self, stored: Tensor, exactly: bool = True) -> Tensor:
        """Decode all experts, in the form in which the model stores whole weights, and in the dtype ``computes``.

        ``exactly``: MXFP4 becomes bfloat16, which holds its values exactly.
        """
        dtype = torch.bfloat16 if exactly and self.packing.kind == MXFP4 else self.computes
        out = torch.empty((len(stored), *self.sides), dtype=dtype, device=stored.device)
        for own, one in zip(out, stored, strict=True):
            (own.t() if self.turned else own).copy_(self.packing.dequantize(one, dtype))
        return out


def pack_experts(blocks: Sequence[Any], kind: str) -> None:
    """Replace the weights of blocks' experts by parameters for bytes, uninitialised. ``kind`` is a key of ``STORED``.

    The module of a block's experts gets an attribute ``packed``: name of a weight -> how it is decoded.
    """
    for block in blocks:
        # In a mixture some blocks may have an MLP, and others an MLP beside experts.
        experts: Any = getattr(getattr(block, "mlp", None), "experts", getattr(block, "experts", None))
        if experts is None:
            continue
        experts.packed = {}
        for name in EXPERTS:
            weight, turned = getattr(experts, name), bool(getattr(experts, "is_transposed", False))
            outputs, width = reversed(weight.shape[1:]) if turned else weight.shape[1:]
            experts.packed[name] = PackedExperts(Packing(kind, width), outputs, turned, weight.dtype)
            stored = torch.empty((len(weight), outputs, row_bytes(kind, width)), dtype=torch.uint8, device=weight.device)
            delattr(experts, name)
            setattr(experts, name + PACKED, nn.Parameter(stored, requires_grad=False))


def packed_experts(model: nn.Module) -> dict[str, PackedExperts]:
    """Return how the packed experts of a model are decoded, by the names of their whole weights."""
    return {
        f"{name.removeprefix('lm.')}.{weight}": packed
        for name, module in model.named_modules()
        for weight, packed in getattr(module, "packed", {}).items()
    }


KEPT = frozenset(("gate", "router", "shared_expert_gate", "in_proj_a", "in_proj_b", "conv1d"))
"""Modules of blocks that are not quantised, with all in them. They are small, and an error of a router would send tokens to other
experts."""


def check_quantizable(blocks: list[nn.Module], key: str) -> None:
    """Refuse blocks with a matrix that is not quantised and does not have to stay as it is, or with a weight of two layers.

    Call this when experts are packed already: those that transformers computes are not.

    Raises:
        ConfigError: There is such a matrix. ``key`` is the setting with its value, which the error names.
    """
    linears = [module.weight for block in blocks for module in block.modules() if isinstance(module, nn.Linear)]
    linear_weights = {id(weight) for weight in linears}
    named = [(name, parameter) for block in blocks for name, parameter in block.named_parameters() if parameter.ndim > 1]
    other = next((name for name, parameter in named if id(parameter) not in linear_weights and not _may_stay(name)), None)
    if other is not None or len(linear_weights) < len(linears):
        what = "two linear layers share a weight" if other is None else f"{other} is the weight of no linear layer (experts?)"
        raise ConfigError(f"{key}: in the model's blocks {what}, and only linear layers are quantised. Set it to none.")


def _may_stay(name: str) -> bool:
    module, _, parameter = name.rpartition(".")
    return parameter.endswith((PACKED, "bias")) or not KEPT.isdisjoint(module.split("."))


def quantize_blocks(blocks: list[nn.Module], kind: str) -> None:
    """Replace each linear layer of the blocks by a :class:`QuantizedLinear`, but those of ``KEPT``. Call this before sharding.

    ``kind`` is a key of ``FORMATS``. The new layers hold no values until their bytes are filled.
    """
    for block in blocks:
        # Listed first, because replacing layers changes what is iterated over.
        layers = [(name, module) for name, module in block.named_modules() if isinstance(module, nn.Linear)]
        for name, layer in layers:
            if KEPT.isdisjoint(name.split(".")):
                block.set_submodule(name, QuantizedLinear(layer, kind))


def quantized_layers(model: nn.Module) -> dict[str, QuantizedLinear]:
    return {name.removeprefix("lm."): module for name, module in model.named_modules() if isinstance(module, QuantizedLinear)}


Region = tuple[slice, ...]


@contextmanager
def exact_weights(model: nn.Module, read: Callable[[str, Region], Tensor]) -> Iterator[None]:
    """Inside the body, each layer and expert computes with its unquantised weight. It is read when needed and dropped afterwards.

    ``read`` returns a region of a tensor of the checkpoint by its name. () = the whole tensor.
    """
    layers = quantized_layers(model)
    experts = {name: packed for name, packed in packed_experts(model).items() if packed.packing.kind != MXFP4}

    def expert_weight(name: str, packed: PackedExperts, number: int) -> Tensor:
        weight = read(name, (slice(number, number + 1), *(slice(0, size) for size in packed.sides)))[0]
        return weight.t() if packed.turned else weight

    for name, layer in layers.items():
        layer.exact = partial(read, f"{name}.weight", ())
    for name, packed in experts.items():
        packed.exact = partial(expert_weight, name, packed)
    try:
        yield
    finally:
        for layer in layers.values():
            layer.exact = None
        for packed in experts.values():
            packed.exact = None
