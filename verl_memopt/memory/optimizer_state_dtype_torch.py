"""Store numbers of an optimizer in fewer bits: moments, bfloat16 weights, and fp32 master weights in two halves.

Moments: each bucket is decoded to fp32, updated, and encoded again. Two fp32 moments take 8 bytes per parameter. bfloat16 saves 4
of them, int8 8 - 2 x (1 + 4 / 256) = 5.97, and int4 8 - 2 x (1/2 + 4 / 128) = 6.94. The length of a quantisation block is the
largest even divisor of the row length, up to 256 (int8) or 128 (int4) elements. If that would be below 32 elements, as for norms
and biases, the moments stay in fp32.

The value of a code c is

scale x sign(c) x (c / levels)^2,

where scale is one fp32 number per block, the largest magnitude in it. The square gives more codes to small values. All encodings
round stochastically, because a moment is a running mean: at beta2 = 0.999 one step changes exp_avg_sq by about a thousandth,
which rounding to nearest would always drop. Encoding never makes a second moment 0, because dividing by its root would make the
update unbounded. Blocks do not cross rows, so a shard holds whole blocks on any number of ranks. Source: block-wise states are
those of Dettmers et al., arXiv 2110.02861; 4 bits without a zero, Li et al., arXiv 2309.01507.

Weights: with stochastic rounding, bfloat16 weights can on average move by less than the spacing of bfloat16 numbers (Gupta et
al., arXiv 1502.02551). The bits that are cut off, times 2^-16, are the probability to round up in magnitude. Compared with fp32
master weights this saves 4 bytes per parameter: 2 of the weight and 2 of its gradient.

Master weights: the 4 bytes of an fp32 master weight become 2 bytes of the bfloat16 weight, which computes, and 2 bytes of the
remainder, which rests with the optimizer's state. The weight is the bits rounded half up in magnitude, ``(bits + 0x8000) >> 16``.
The remainder is the difference, a signed 16-bit number. Rounding half to even could not be undone, because a tie would have two
remainders. All arithmetic is on 32-bit integers that wrap around, so every bit pattern is restored, also that of infinities. A
finite number above the largest bfloat16 computes as infinity, as with a cast.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from verl_memopt.memory.fused import over_rows, runs_compiled

BITS = 16
"""Bits of an fp32 number that a bfloat16 number does not have."""


def round_to_bfloat16_(values: Tensor, noise: Tensor, generator: torch.Generator) -> Tensor:
    """Round each fp32 of ``values`` stochastically to one of its two bfloat16 neighbours, in place, and return them.

    Values that bfloat16 can represent, infinities and NaN do not change. ``noise`` is fp32 scratch of the same size.
    """
    assert values.dtype == noise.dtype == torch.float32, (values.dtype, noise.dtype)
    # For one sign, larger bit patterns are larger magnitudes. So a carry out of the lower bits rounds away from zero.
    bits, chance = values.view(torch.int32), noise.view(torch.int32)
    chance.random_(0, 1 << BITS, generator=generator)
    bits.add_(chance).bitwise_and_(-(1 << BITS))
    return values


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
    name: str
    dtype: torch.dtype
    per_entry: int  # elements of the parameter per entry of the plane

    def num_bytes(self, elements: int) -> int:
        return elements // self.per_entry * self.dtype.itemsize


class BucketScratch(NamedTuple):
    moments: tuple[Tensor, ...] = ()
    """fp32, for the decoded moments."""
    scratch: tuple[Tensor, ...] = ()
    """fp32, for intermediate results."""
    compared: tuple[Tensor, ...] = ()
    """The weights in the compute dtype before and after the update, and where they differ (bool)."""


@dataclass(frozen=True)
class MomentFormat:
    """How the moments ``names`` of some parameters are stored in ``planes``; ``block`` elements share a scale (1 = none)."""

    names: tuple[str, ...]
    state_dtype: str
    planes: tuple[Plane, ...]
    block: int = 1

    @property
    def decodes(self) -> bool:
        return self.state_dtype != "fp32"

    @property
    def scratch(self) -> int:
        return {"fp32": 0, "bfloat16": 1}.get(self.state_dtype, 2)

    @property
    def repeats(self) -> bool:
        # Whether decoding and encoding gives the same bytes. It does not with quantised blocks, whose codes are drawn at random.
        return self.block == 1

    def decode(self, planes: Planes, work: BucketScratch) -> tuple[Tensor, ...]:
        if not self.decodes:
            return tuple(planes[name] for name in self.names)
        for name, values in zip(self.names, work.moments, strict=True):
            if self.repeats:
                values.copy_(planes[name])
            else:
                self._decode_blocks(name, planes, values, work.scratch[0])
        return work.moments

    def encode(self, planes: Planes, work: BucketScratch, generator: torch.Generator) -> None:
        # Moments that were updated in place are already stored.
        if not self.decodes:
            return
        for name, values in zip(self.names, work.moments, strict=True):
            if self.repeats:
                # Rounded stochastically, because with rounding to nearest a running mean would stop moving.
                planes[name].copy_(round_to_bfloat16_(values, work.scratch[0], generator))
            else:
                self._encode_blocks(name, planes, values, work.scratch, generator)

    def _decode_blocks(self, moment: str, planes: Planes, values: Tensor, scratch: Tensor) -> None:
        name = f"{moment}_{self.state_dtype}"
        stored, scales, signed = planes[name], planes[f"{name}_scale"], moment == "exp_avg"
        levels = LEVELS[self.state_dtype, moment]

        def in_place() -> None:
            if self.state_dtype == "int4":
                _unpack(stored, values)
            else:
                values.copy_(stored)
            if signed:
                if self.state_dtype == "int4":
                    values.sub_(ZERO_NIBBLE)
                # A plain square would lose the sign of the code.
                values.mul_(torch.abs(values, out=scratch))
            else:
                values.square_()
            values.view(-1, self.block).mul_((scales / levels**2)[:, None])

        blocks = values.view(-1, self.block), stored.view(scales.numel(), -1), scales
        over_rows(_decode_statement, blocks, levels, signed, self.state_dtype == "int4", otherwise=in_place)

    def _encode_blocks(
        self, moment: str, planes: Planes, values: Tensor, scratch: tuple[Tensor, ...], generator: torch.Generator
    ) -> None:
        name = f"{moment}_{self.state_dtype}"
        stored, levels, signed = planes[name], LEVELS[self.state_dtype, moment], moment == "exp_avg"
        scales = planes[f"{name}_scale"]

        def in_place() -> None:
            # abs().amax() would need a temporary tensor of the bucket's size.
            torch.linalg.vector_norm(values.view(-1, self.block), ord=float("inf"), dim=1, out=scales)
            codes, other = _codes(values, scales, levels, self.block, scratch, generator)
            # The code of a second moment is at least 1, because with 0 the update would be divided by 0.
            codes.clamp_(0 if signed else 1, levels)
            if signed:
                # The codes were computed from magnitudes, so they get their signs back here.
                codes.copysign_(values)
            if self.state_dtype == "int8":
                stored.copy_(codes)
                return
            if signed:
                codes.add_(ZERO_NIBBLE)
            _pack(codes, other, stored)

        if runs_compiled(scales):
            # Drawn outside of the compiled statement, because random numbers inside it would not come from the generator.
            noise = scratch[0].uniform_(generator=generator)
            tensors = (*(flat.view(-1, self.block) for flat in (values, noise)), stored.view(scales.numel(), -1), scales)
            over_rows(_encode_statement, tensors, levels, signed, self.state_dtype == "int4")
        else:
            in_place()


def _decode_statement(values: Tensor, stored: Tensor, scales: Tensor, levels: int, signed: bool, packed: bool) -> None:
    # Decode into values, fp32 [blocks, elements]. `packed`: each byte holds two codes.
    if packed:
        # Two codes per byte, the first in the low half.
        halves = [half.repeat_interleave(2, 1) for half in (stored.int() & 15, stored.int() >> 4)]
        stored = torch.where(torch.arange(values.shape[1], device=values.device) % 2 == 0, halves[0], halves[1])
        stored = stored - ZERO_NIBBLE if signed else stored
    codes = stored.float()
    values.copy_(codes * (codes.abs() if signed else codes) * (scales / levels**2)[:, None])


def _encode_statement(
    values: Tensor, noise: Tensor, stored: Tensor, scales: Tensor, levels: int, signed: bool, packed: bool
) -> None:
    """Write the scales and codes of values, fp32 [blocks, elements]. Codes are drawn from ``noise`` as in :func:`_codes`."""
    largest = values.abs().amax(-1)
    scales.copy_(largest)
    way = values.abs() / largest.clamp_min(TINY)[:, None] * levels**2
    root = way.sqrt().floor()
    codes = (root + (way - root * root) / (2 * root + 1) + noise).floor().clamp(0 if signed else 1, levels)
    codes = codes.copysign(values) if signed else codes
    if packed:
        codes = codes + ZERO_NIBBLE if signed else codes
        codes = codes[:, ::2] + 16 * codes[:, 1::2]
    stored.copy_(codes)


def moment_format(state_dtype: str, row: int, names: tuple[str, ...] = MOMENTS) -> MomentFormat:
    """Return the format for parameters whose rows (all dimensions but the first) have ``row`` elements.

    Only the moments of AdamW are quantised in blocks.
    """
    block = block_size(row, MOST_BLOCK[state_dtype]) if state_dtype in MOST_BLOCK and names == MOMENTS else None
    if block is not None:
        planes = tuple(plane for name in names for plane in _quantised_planes(state_dtype, name, block))
        return MomentFormat(names, state_dtype, planes, block)
    dtype = torch.bfloat16 if state_dtype == "bfloat16" else torch.float32
    planes = tuple(Plane(name, dtype, 1) for name in names)
    return MomentFormat(names, "bfloat16" if planes and dtype is torch.bfloat16 else "fp32", planes)


def block_size(row: int, most: int) -> int | None:
    """Largest even divisor of ``row`` up to ``most``; None if it would be below ``LEAST_BLOCK``."""
    return next((size for size in range(most - most % 2, LEAST_BLOCK - 1, -2) if row % size == 0), None)


def _quantised_planes(state_dtype: str, moment: str, block: int) -> tuple[Plane, Plane]:
    codes = f"{moment}_{state_dtype}"
    signed = state_dtype == "int8" and moment == "exp_avg"
    dtype, per_entry = torch.int8 if signed else torch.uint8, 2 if state_dtype == "int4" else 1
    return Plane(codes, dtype, per_entry), Plane(f"{codes}_scale", torch.float32, block)


def _codes(
    values: Tensor, scales: Tensor, levels: int, block: int, scratch: tuple[Tensor, ...], generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Draw integer codes (in fp32) whose values equal the magnitudes on average. Also return scratch that may be reused.

    Let w = magnitude * levels^2 / scale, and let k be the integer part of sqrt(w). Code k + 1 is drawn with probability (w - k^2)
    / (2 k + 1), which is the position of w between k^2 and (k + 1)^2. Otherwise code k is drawn.
    """
    way, root = scratch
    torch.div(values.view(-1, block), scales.clamp_min(TINY)[:, None], out=way.view(-1, block))
    way.abs_().mul_(levels**2)
    torch.sqrt(way, out=root).floor_()
    way.addcmul_(root, root, value=-1)
    root.mul_(2).add_(1)
    way.div_(root)
    # Compute k from 2 k + 1, because there is no third scratch tensor that could hold k.
    root.sub_(1).mul_(0.5)
    way.add_(root)
    # The noise overwrites `root`. Adding noise and rounding down is stochastic rounding.
    way.add_(root.uniform_(generator=generator)).floor_()
    return way, root


def _pack(codes: Tensor, room: Tensor, stored: Tensor) -> None:
    pairs = codes.view(-1, 2)
    packed = room[: stored.numel()]
    # Two codes per byte, the first in the low half.
    torch.add(pairs[:, 0], pairs[:, 1], alpha=16, out=packed)
    stored.copy_(packed)


def _unpack(stored: Tensor, values: Tensor) -> None:
    pairs = values.view(-1, 2)
    # Division and floor in fp32 replace shifts and masks, which would need an integer tensor beside `stored`.
    pairs[:, 1].copy_(stored).div_(16).floor_()
    pairs[:, 0].copy_(stored).sub_(pairs[:, 1], alpha=16)


REMAINDER = Plane("remainder", torch.int16, 1)
"""The plane of the optimizer's state that holds the remainders."""
HALF = 1 << 15


def join_(weights: Sequence[Tensor], remainder: Tensor, masters: Tensor, before: Tensor | None = None) -> None:
    """Fill ``masters``, fp32 [n], from flat bfloat16 ``weights``, one after another, and their ``remainder``, int16 [n].

    ``before``, int16 [n], receives the bits of the weights, so that :func:`split_` can count changes.
    """
    bits = masters.view(torch.int32)
    parts = bits.split([weight.numel() for weight in weights])
    torch._foreach_copy_(list(parts), [weight.view(torch.int16) for weight in weights])

    def joined() -> None:
        if before is not None:
            before.copy_(bits)
        # 32-bit arithmetic wraps around, so every bit pattern is restored.
        bits.bitwise_left_shift_(BITS).add_(remainder)

    over_rows(_join_statement, (bits, remainder, before), otherwise=joined)


def split_(
    masters: Tensor,
    room: Tensor,
    weights: Sequence[Tensor],
    remainder: Tensor,
    compared: tuple[Tensor, Tensor, Tensor] | None = None,
) -> None:
    """Split ``masters`` into weights and remainder, the inverse of :func:`join_`. ``room`` is fp32 [n]; both are overwritten.

    ``compared`` is the bits from before the update, bool [n] as scratch, and an int64 scalar that counts changed weights.
    """
    bits, high = masters.view(torch.int32), room.view(torch.int32)
    before, total = (None, None) if compared is None else (compared[0], compared[2])

    def halved() -> None:
        # Rounded half up in magnitude, which join_ can undo. Rounding half to even could not be undone.
        torch.add(bits, HALF, out=high).bitwise_right_shift_(BITS)
        remainder.copy_(bits.sub_(high, alpha=1 << BITS))
        if compared is not None:
            compared[2].add_(torch.ne(compared[0], high, out=compared[1]).sum())

    over_rows(_split_statement, (bits, high, remainder, before), total, otherwise=halved)
    parts = high.split([weight.numel() for weight in weights])
    torch._foreach_copy_([weight.view(torch.int16) for weight in weights], list(parts))


def _join_statement(bits: Tensor, remainder: Tensor, before: Tensor | None) -> None:
    if before is not None:
        before.copy_(bits)
    bits.copy_((bits << BITS) + remainder)


def _split_statement(bits: Tensor, high: Tensor, remainder: Tensor, before: Tensor | None, total: Tensor | None) -> None:
    up = (bits + HALF) >> BITS
    high.copy_(up)
    remainder.copy_(bits - (up << BITS))
    if before is not None and total is not None:
        total.add_((before != up).sum())
