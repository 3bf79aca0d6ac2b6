"""Frozen models in 8 or 4 bits: each linear layer of the blocks keeps codes and scales, and decodes its weight for each product.

Bytes saved: b_w - 1.03 bytes for each parameter in the blocks' linear layers with int8 (groups of 128), and b_w - 0.56 with nf4
(groups of 64). b_w is the width of the masters. Codes are sharded over ranks as weights are.

Not exact: the worker measures the error of the log-probs when it loads the model, and logs it.

Source of the nf4 levels: QLoRA, arXiv 2305.14314.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

NF4_LEVELS = (
    -1.0, -0.6961928, -0.5250731, -0.3949175, -0.2844414, -0.1847734, -0.09105003, 0.0,
    0.0795803, 0.1609302, 0.2461123, 0.3379152, 0.4407098, 0.5626170, 0.7229568, 1.0,
)  # fmt: skip
"""Quantiles of a normal distribution, scaled to [-1, 1]."""


class Format(NamedTuple):
    """Bits of a code, and how many weights along the input share an fp32 scale."""

    bits: int
    group: int


FORMATS = {"int8": Format(8, 128), "nf4": Format(4, 64)}
"""Values of ``ref.quantization`` beside none."""


class QuantizedLinear(nn.Module):
    """A frozen linear layer stored as bytes: ``qweight`` uint8 [out, code bytes + 4 x groups], a row's scales after its codes.

    The scales lie among the bytes so that no mixed-precision policy rounds them, and so that rows can be sharded together.
    ``exact`` returns the unquantised weight while an error is measured.
    """

    def __init__(self, base: nn.Linear, kind: str) -> None:
        """Take over the shape and bias of a layer. The bytes are uninitialised."""
        super().__init__()
        self.kind, self.form = kind, FORMATS[kind]
        self.in_features, self.out_features = base.in_features, base.out_features
        self.groups = -(-self.in_features // self.form.group)
        self.code_bytes = self.groups * self.form.group * self.form.bits // 8
        shape = (self.out_features, self.code_bytes + 4 * self.groups)
        self.qweight = nn.Parameter(torch.empty(shape, dtype=torch.uint8, device=base.weight.device), requires_grad=False)
        self.bias = base.bias
        self.exact: Callable[[], Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Return the output [..., out] of x [..., in]."""
        weight = self.dequantize(self.qweight, x.dtype) if self.exact is None else self.exact().to(x.dtype)
        return linear(x, weight, self.bias)

    def quantize(self, weight: Tensor) -> Tensor:
        """Return the bytes of some rows [rows, in] of any float dtype, uint8 [rows, code bytes + 4 x groups]."""
        rows, padded = weight.shape[0], self.groups * self.form.group
        grouped = weight.new_zeros(rows, padded, dtype=torch.float32)
        grouped[:, : self.in_features] = weight
        grouped = grouped.view(rows, self.groups, self.form.group)
        scale = grouped.abs().amax(-1)
        # A group of zeros has scale 0, and 0 / 0 would be NaN.
        codes = _encode(grouped / scale.clamp(min=1e-30)[..., None], self.kind).view(rows, self.code_bytes)
        return torch.cat([codes, scale.contiguous().view(torch.uint8).view(rows, 4 * self.groups)], dim=1)

    def dequantize(self, qweight: Tensor, dtype: torch.dtype) -> Tensor:
        """Return [rows, in] in ``dtype`` from the bytes of some rows."""
        rows = qweight.shape[0]
        scale = qweight[:, self.code_bytes :].contiguous().view(torch.float32)
        levels = _decode(qweight[:, : self.code_bytes], self.kind, dtype).view(rows, self.groups, self.form.group)
        return (levels * scale[..., None].to(dtype)).view(rows, -1)[:, : self.in_features]


def _encode(share: Tensor, kind: str) -> Tensor:
    """Return uint8 codes of values in [-1, 1]. Two nf4 codes share a byte, the first in its low half."""
    if kind == "int8":
        return (share * 127).round_().to(torch.int8).view(torch.uint8)
    levels = _levels(torch.float32, share.device)
    middles = (levels[1:] + levels[:-1]) / 2
    codes = torch.bucketize(share.contiguous(), middles).to(torch.uint8)
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def _levels(dtype: torch.dtype, device: torch.device) -> Tensor:
    # Sent without waiting: every layer needs it, in every micro-batch.
    return torch.tensor(NF4_LEVELS, dtype=dtype).to(device, non_blocking=True)


def _decode(codes: Tensor, kind: str, dtype: torch.dtype) -> Tensor:
    """Return the levels of codes, in [-1, 1]."""
    if kind == "int8":
        return codes.contiguous().view(torch.int8).to(dtype) / 127
    levels = _levels(dtype, codes.device)
    halves = torch.stack([codes & 15, codes >> 4], dim=-1)
    return levels[halves.view(codes.shape[0], -1).int()]


def quantize_blocks(blocks: list[nn.Module], kind: str) -> None:
    """Replace every linear layer of the blocks by a :class:`QuantizedLinear` of a kind in ``FORMATS``. Call this before sharding.

    The new layers hold no values until their bytes are filled.
    """
    for block in blocks:
        layers = [(name, module) for name, module in block.named_modules() if isinstance(module, nn.Linear)]
        for name, layer in layers:
            block.set_submodule(name, QuantizedLinear(layer, kind))


def quantized_layers(model: nn.Module) -> dict[str, QuantizedLinear]:
    """Return the quantised layers by their name in a Hugging Face checkpoint."""
    return {name.removeprefix("lm."): module for name, module in model.named_modules() if isinstance(module, QuantizedLinear)}


@contextmanager
def exact_weights(model: nn.Module, read: Callable[[str], Tensor]) -> Iterator[None]:
    """Make each layer compute with its unquantised weight inside the body. A weight is read when needed and dropped afterwards.

    ``read`` returns a whole tensor by its name in the checkpoint.
    """
    layers = quantized_layers(model)
    for name, layer in layers.items():
        layer.exact = partial(read, f"{name}.weight")
    try:
        yield
    finally:
        for layer in layers.values():
            layer.exact = None
