"""The two moments of AdamW in fewer bits than fp32. Each bucket is decoded to fp32, updated, and encoded again.

Bytes saved: two fp32 moments take 8 bytes a parameter. bfloat16 saves 4 of them, int8 8 - 2 x (1 + 4 / 256) = 5.97, and int4 8
- 2 x (1/2 + 4 / 128) = 6.94. A block is as long as the largest even divisor of a row, up to 256 (int8) or 128 (int4) elements.
Parameters whose rows have no such block of at least 32 elements, such as norms and biases, keep fp32 moments.

A code c stands for scale x sign(c) x (c / levels)^2. Each block has one fp32 scale, the largest magnitude in it. The square
spends codes on small values. All encodings round stochastically, because a moment is a running mean: at beta2 = 0.999 one step
changes exp_avg_sq by a thousandth, which rounding to nearest would always drop. A second moment never becomes 0 by encoding, so
its square root never makes the update unbounded. Blocks do not cross rows, so a shard holds whole blocks on any number of
ranks.

Source: block-wise states are those of Dettmers et al., arXiv 2110.02861; 4 bits without a zero, Li et al., arXiv 2309.01507.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from verl_memopt.memory.stochastic_rounding_torch import round_to_bfloat16_

MOMENTS = ("exp_avg", "exp_avg_sq")
MOST_BLOCK = {"int8": 256, "int4": 128}
LEAST_BLOCK = 32
LEVELS = {("int8", "exp_avg"): 127, ("int8", "exp_avg_sq"): 255, ("int4", "exp_avg"): 7, ("int4", "exp_avg_sq"): 15}
ZERO_NIBBLE = 8
"""Added to a signed 4-bit code to store it in half a byte."""
TINY = 1.2e-38
"""Replaces the scale of a block of zeros: the smallest normal fp32."""

Planes = Mapping[str, Tensor]


@dataclass(frozen=True)
class Plane:
    """One stored tensor of a moment. Each entry stands for ``per_entry`` elements of the parameter."""

    name: str
    dtype: torch.dtype
    per_entry: int


@dataclass(frozen=True)
class Work:
    """Room for one bucket: in fp32 the two decoded moments and scratch. What a format does not need is empty.

    ``before`` and ``after`` are for the weights as they compute, in half precision, and ``differs`` (bool) for where they differ;
    empty where they are not compared.
    """

    exp_avg: Tensor
    exp_avg_sq: Tensor
    scratch: tuple[Tensor, ...]
    before: Tensor
    after: Tensor
    differs: Tensor


@dataclass(frozen=True)
class MomentFormat:
    """How the moments of some parameters are stored, in which tensors (``planes``).

    A bucket is cut at multiples of ``block`` elements. ``decodes``: the moments need room in fp32, which ``decode`` fills.
    ``encode`` writes them back, with a generator for rounding and ``scratch`` fp32 tensors. There are so many ``moments``.
    """

    planes: tuple[Plane, ...]
    block: int
    decodes: bool
    scratch: int
    decode: Callable[[Planes, Work], tuple[Tensor, ...]]
    encode: Callable[[Planes, Work, torch.Generator], None]
    moments: int = 2

    @property
    def repeats(self) -> bool:
        """Whether encoding decoded moments gives the same bytes again. Codes of blocks are drawn anew each time."""
        return self.block == 1

    def bytes_of(self, elements: int) -> int:
        """Return the bytes of both moments of so many elements."""
        return sum(elements // plane.per_entry * plane.dtype.itemsize for plane in self.planes)


def moment_format(state_dtype: str, row: int) -> MomentFormat:
    """Return the format for parameters whose rows (all dimensions but the first) have ``row`` elements."""
    if state_dtype == "bfloat16":
        planes = tuple(Plane(name, torch.bfloat16, 1) for name in MOMENTS)
        return MomentFormat(planes, 1, True, 1, _decode_bf16, _encode_bf16)
    block = block_size(row, MOST_BLOCK[state_dtype]) if state_dtype in MOST_BLOCK else None
    if block is None:
        planes = tuple(Plane(name, torch.float32, 1) for name in MOMENTS)
        return MomentFormat(planes, 1, False, 0, _as_they_are, _leave)
    planes = tuple(plane for name in MOMENTS for plane in _quantised_planes(state_dtype, name, block))
    return MomentFormat(
        planes, block, True, 2, partial(_decode_blocks, state_dtype, block), partial(_encode_blocks, state_dtype, block)
    )


MOMENTUM = "momentum_buffer"


def momentum_format(state_dtype: str, exists: bool) -> MomentFormat:
    """Return the format of SGD's momentum, fp32 or bfloat16; that of no state at all where it does not exist."""
    if not exists:
        return MomentFormat((), 1, False, 0, lambda planes, work: (), _leave, 0)
    if state_dtype == "bfloat16":
        return MomentFormat((Plane(MOMENTUM, torch.bfloat16, 1),), 1, True, 1, _decode_momentum, _encode_momentum, 1)
    return MomentFormat((Plane(MOMENTUM, torch.float32, 1),), 1, False, 0, lambda planes, work: (planes[MOMENTUM],), _leave, 1)


def _decode_momentum(planes: Planes, work: Work) -> tuple[Tensor]:
    return (work.exp_avg.copy_(planes[MOMENTUM]),)


def _encode_momentum(planes: Planes, work: Work, generator: torch.Generator) -> None:
    planes[MOMENTUM].copy_(round_to_bfloat16_(work.exp_avg, work.scratch[0], generator))


def block_size(row: int, most: int) -> int | None:
    """Return the largest even divisor of ``row`` up to ``most``; None where it would be below ``LEAST_BLOCK``."""
    return next((size for size in range(most - most % 2, LEAST_BLOCK - 1, -2) if row % size == 0), None)


def _as_they_are(planes: Planes, work: Work) -> tuple[Tensor, Tensor]:
    return planes["exp_avg"], planes["exp_avg_sq"]


def _leave(planes: Planes, work: Work, generator: torch.Generator) -> None:
    """Do nothing: the moments were updated where they rest."""


def _decode_bf16(planes: Planes, work: Work) -> tuple[Tensor, Tensor]:
    return work.exp_avg.copy_(planes["exp_avg"]), work.exp_avg_sq.copy_(planes["exp_avg_sq"])


def _encode_bf16(planes: Planes, work: Work, generator: torch.Generator) -> None:
    for name in MOMENTS:
        planes[name].copy_(round_to_bfloat16_(getattr(work, name), work.scratch[0], generator))


def _quantised_planes(state_dtype: str, moment: str, block: int) -> tuple[Plane, Plane]:
    codes = f"{moment}_{state_dtype}"
    signed = state_dtype == "int8" and moment == "exp_avg"
    dtype, per_entry = torch.int8 if signed else torch.uint8, 2 if state_dtype == "int4" else 1
    return Plane(codes, dtype, per_entry), Plane(f"{codes}_scale", torch.float32, block)


def _decode_blocks(state_dtype: str, block: int, planes: Planes, work: Work) -> tuple[Tensor, Tensor]:
    for moment in MOMENTS:
        values, levels = getattr(work, moment), LEVELS[state_dtype, moment]
        if state_dtype == "int4":
            _unpack(planes[f"{moment}_int4"], values)
        else:
            values.copy_(planes[f"{moment}_int8"])
        if moment == "exp_avg":
            if state_dtype == "int4":
                values.sub_(ZERO_NIBBLE)
            # A plain square would lose the sign of the code.
            values.mul_(torch.abs(values, out=work.scratch[0]))
        else:
            values.square_()
        values.view(-1, block).mul_((planes[f"{moment}_{state_dtype}_scale"] / levels**2)[:, None])
    return work.exp_avg, work.exp_avg_sq


def _encode_blocks(state_dtype: str, block: int, planes: Planes, work: Work, generator: torch.Generator) -> None:
    for moment in MOMENTS:
        values, stored = getattr(work, moment), planes[f"{moment}_{state_dtype}"]
        scales = planes[f"{moment}_{state_dtype}_scale"]
        # abs().amax() would need a temporary tensor of the bucket's size.
        torch.linalg.vector_norm(values.view(-1, block), ord=float("inf"), dim=1, out=scales)
        codes, other = _codes(values, scales, LEVELS[state_dtype, moment], block, work.scratch, generator)
        codes.clamp_(0 if moment == "exp_avg" else 1, LEVELS[state_dtype, moment])
        if moment == "exp_avg":
            # The codes were computed from magnitudes, so they get their signs back here.
            codes.copysign_(values)
        if state_dtype == "int8":
            stored.copy_(codes)
            continue
        if moment == "exp_avg":
            codes.add_(ZERO_NIBBLE)
        _pack(codes, other, stored)


def _codes(
    values: Tensor, scales: Tensor, levels: int, block: int, scratch: tuple[Tensor, ...], generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Return whole codes (fp32) whose squares are the magnitudes in expectation, and scratch that is free again.

    With w = magnitude * levels^2 / scale, and k the integer part of the root of w, the chance of the next code is
    (w - k^2) / (2 k + 1), which is the position of w between the values of the two codes.
    """
    way, root = scratch
    torch.div(values.view(-1, block), scales.clamp_min(TINY)[:, None], out=way.view(-1, block))
    way.abs_().mul_(levels**2)
    torch.sqrt(way, out=root).floor_()
    way.addcmul_(root, root, value=-1)
    root.mul_(2).add_(1)
    way.div_(root)
    # Back from 2 k + 1 to k, because there is no third scratch tensor that could have kept k.
    root.sub_(1).mul_(0.5)
    way.add_(root)
    # The noise takes the room of `root`. What is cut off after the addition is rounded stochastically.
    way.add_(root.uniform_(generator=generator)).floor_()
    return way, root


def _pack(codes: Tensor, room: Tensor, stored: Tensor) -> None:
    pairs = codes.view(-1, 2)
    packed = room[: stored.numel()]
    torch.add(pairs[:, 0], pairs[:, 1], alpha=16, out=packed)
    stored.copy_(packed)


def _unpack(stored: Tensor, values: Tensor) -> None:
    pairs = values.view(-1, 2)
    # Division and floor in fp32 replace shifts and masks, which would need an integer tensor beside `stored`.
    pairs[:, 1].copy_(stored).div_(16).floor_()
    pairs[:, 0].copy_(stored).sub_(pairs[:, 1], alpha=16)
