"""Products of rows with the weights of their experts, and the sums of the weights' gradients.

A GPU has one kernel for all experts of a tile. On a CPU the kernel would be a loop over experts too. Frozen weights may be bytes.
These are decoded for a product alone: on a CPU those of one expert, on a GPU those of a few.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch._guards import detect_fake_mode

from verl_memopt.memory.quantized_frozen import DECODED_AT_ONCE
from verl_memopt.memory.quantized_frozen_torch import PackedExperts
from verl_memopt.memory.recompute_elementwise import PRODUCT_ROWS
from verl_memopt.memory.recompute_elementwise_torch import add_product, wide_dtype


class ExpertTile(NamedTuple):
    experts: range
    rows: slice
    """Rows of these experts, among all rows in the order of the experts."""
    counts: list[int]
    """Number of rows of each of these experts."""


class RoutedRows:
    """The rows that experts compute: each token once for each of its k experts, in the order of the experts.

    Attributes:
        order: int64 [t x k], the place of each row in the flat [t, k] of the router.
        tokens: int64 [t x k], the token of each row.
        counts: Number of rows of each expert.
    """

    def __init__(self, chosen: Tensor, num_experts: int) -> None:
        flat = chosen.flatten()
        self.order = flat.argsort(stable=True)
        self.tokens = self.order // chosen.shape[1]
        if detect_fake_mode() is None:
            # One wait for the device. The sizes of the products must be known on the host.
            self.counts: list[int] = torch.bincount(flat, minlength=num_experts).tolist()
        else:
            # Fake tensors have no values, so tokens are spread evenly.
            part, more = divmod(flat.numel(), num_experts)
            self.counts = [part + (place < more) for place in range(num_experts)]

    def tiles(self, least: int) -> Iterator[ExpertTile]:
        """Yield the experts in groups with about equally many rows, of which an expert is never cut."""
        limit = min(-(-sum(self.counts) // least), PRODUCT_ROWS.get(self.order.device.type, 8192))
        first, start, held = 0, 0, 0
        for expert, count in enumerate(self.counts):
            if held and held + count > limit:
                yield ExpertTile(range(first, expert), slice(start, start + held), self.counts[first:expert])
                first, start, held = expert, start + held, 0
            held += count
        yield ExpertTile(range(first, len(self.counts)), slice(start, start + held), self.counts[first:])


ALIGNED_BYTES = 16
"""The kernel needs rows of a multiple of this many bytes."""


def _has_kernel(*tensors: Tensor) -> bool:
    return all(
        tensor.device.type != "cpu" and tensor.dtype == torch.bfloat16 and tensor.shape[-1] * 2 % ALIGNED_BYTES == 0
        for tensor in tensors
    )


def _ends(tile: ExpertTile, device: torch.device) -> Tensor:
    return torch.tensor(tile.counts, dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device, non_blocking=True)


def of_experts(tile: ExpertTile) -> Iterator[tuple[int, slice]]:
    # Yield each expert that has rows, and which rows of the tile these are.
    start = 0
    for expert, count in zip(tile.experts, tile.counts, strict=True):
        if count:
            yield expert, slice(start, start + count)
        start += count


def turned_weights(weights: Tensor, turn: bool) -> Tensor:
    return weights.transpose(1, 2) if turn else weights


@dataclass(frozen=True)
class ExpertWeights:
    """The weights of all experts [E, m, n], or their bytes [E, m, row bytes], with the record that decodes these."""

    stored: Tensor
    packed: PackedExperts | None = None

    def __len__(self) -> int:
        return len(self.stored)

    @property
    def outputs(self) -> int:
        return self.stored.shape[1]

    @property
    def inputs(self) -> int:
        return self.stored.shape[2] if self.packed is None else self.packed.packing.in_features

    def of(self, experts: range, dtype: torch.dtype) -> Tensor:
        """Return the weights [e, m, n] of some experts. ``dtype`` is that of decoded weights."""
        if self.packed is None:
            return self.stored[experts.start : experts.stop]
        return self.packed.weights(self.stored, experts, dtype)

    def have_kernel(self, x: Tensor) -> bool:
        # Decoded weights have the dtype of the rows.
        return _has_kernel(x) if self.packed is not None else _has_kernel(x, self.stored)

    def parts(self, tile: ExpertTile) -> Iterator[ExpertTile]:
        """Yield parts of a tile whose weights exist at once, with places of rows among those of the tile: whole weights do."""
        least = len(tile.counts) if self.packed is None else 1
        size, start = max(DECODED_AT_ONCE // (self.outputs * self.inputs), least), 0
        for first in range(0, len(tile.counts), size):
            counts = tile.counts[first : first + size]
            experts = tile.experts[first : first + size]
            yield ExpertTile(experts, slice(start, start + sum(counts)), counts)
            start += sum(counts)


def _grouped(x: Tensor, weights: ExpertWeights, tile: ExpertTile, back: bool, out: Tensor | None = None) -> Tensor:
    parts = [part for part in weights.parts(tile) if sum(part.counts)]

    def product(part: ExpertTile) -> Tensor:
        own = weights.of(part.experts, x.dtype)
        return torch._grouped_mm(x[part.rows], own if back else own.transpose(1, 2), offs=_ends(part, x.device))

    if len(parts) == 1 and out is None:
        return product(parts[0])
    out = x.new_empty(x.shape[0], weights.inputs if back else weights.outputs) if out is None else out
    for part in parts:
        out[part.rows] = product(part)
    return out


def products(
    x: Tensor, weights: ExpertWeights, tile: ExpertTile, out: Tensor | None = None, bias: Tensor | None = None
) -> Tensor:
    """Return ``x @ weights[e].t() + bias[e]`` [r, m] for the rows of each expert e in a tile.

    ``x`` is [r, n], ``weights`` [E, m, n] and ``bias`` [E, m].
    """
    if weights.have_kernel(x) and weights.outputs * 2 % ALIGNED_BYTES == 0:
        out = _grouped(x, weights, tile, False, out)
        if bias is not None:
            for expert, rows in of_experts(tile):
                out[rows].add_(bias[expert])
        return out
    # Written into ``out``, because selective checkpointing would keep the output of a plain product.
    out = x.new_empty(x.shape[0], weights.outputs) if out is None else out
    for expert, rows in of_experts(tile):
        weight = weights.of(range(expert, expert + 1), x.dtype)[0]
        if bias is None:
            torch.mm(x[rows], weight.t(), out=out[rows])
        else:
            torch.addmm(bias[expert], x[rows], weight.t(), out=out[rows])
        del weight  # before the next one is decoded
    return out


def add_products(x: Tensor, weights: ExpertWeights, tile: ExpertTile, out: Tensor, scale: float) -> None:
    """Add ``scale * x @ weights[e].t()`` to ``out`` [r, m]. x [r, n], weights [E, m, n], which are no bytes."""
    if weights.have_kernel(x) and weights.outputs * 2 % ALIGNED_BYTES == 0:
        out.add_(products(x, weights, tile), alpha=scale)
        return
    for expert, rows in of_experts(tile):
        torch.addmm(out[rows], x[rows], weights.stored[expert].t(), alpha=scale, out=out[rows])


def products_back(grad: Tensor, weights: ExpertWeights, tile: ExpertTile) -> Tensor:
    """Return ``grad @ weights[e]`` [r, n] for the rows of each expert e in a tile. grad [r, m], weights [E, m, n]."""
    if weights.have_kernel(grad) and weights.inputs * 2 % ALIGNED_BYTES == 0:
        return _grouped(grad, weights, tile, True)
    out = grad.new_empty(grad.shape[0], weights.inputs)
    for expert, rows in of_experts(tile):
        weight = weights.of(range(expert, expert + 1), grad.dtype)[0]
        torch.mm(grad[rows], weight, out=out[rows])
        del weight  # before the next one is decoded
    return out


class ExpertSum:
    """The gradient of the weights of all experts [E, m, n] or, ``turned``, [E, n, m]; or of one matrix, or of their biases."""

    def __init__(self, weight: Tensor, turned: bool = False) -> None:
        self._weight, self._is_turned = weight, turned
        self._total: Tensor | None = None

    def _made(self, alone: bool) -> Tensor:
        if self._total is None:
            dtype = self._weight.dtype if alone else wide_dtype(self._weight.dtype)
            self._total = torch.zeros_like(self._weight, dtype=dtype, memory_format=torch.contiguous_format)
        return self._total

    def add(self, grad: Tensor, x: Tensor, tile: ExpertTile, alone: bool) -> None:
        # grad [r, m], x [r, n]
        total = turned_weights(self._made(alone), self._is_turned)
        if _has_kernel(grad, x):
            found = torch._grouped_mm(grad.t(), x, offs=_ends(tile, x.device))
            total[tile.experts.start : tile.experts.stop].add_(found)
            return
        for expert, rows in of_experts(tile):
            add_product(total[expert], grad[rows], x[rows])

    def add_rows(self, grad: Tensor, tile: ExpertTile, alone: bool) -> None:
        # grad [r, m] of biases [E, m]
        total = self._made(alone)
        for expert, rows in of_experts(tile):
            total[expert] += grad[rows].sum(0, dtype=total.dtype)

    def add_vector(self, grad: Tensor, alone: bool) -> None:
        total = self._made(alone)
        total += grad.sum(0, dtype=total.dtype)

    def add_matrix(self, grad: Tensor, x: Tensor, alone: bool) -> None:
        add_product(self._made(alone), grad, x)

    def gradient(self) -> Tensor:
        # No row at all is possible if a rank has no tokens. The sum is freed.
        total, self._total = self._made(alone=True), None
        return total.to(self._weight.dtype)


class ExpertLinear:
    """A linear layer of all experts inside an autograd function. It computes rows tile by tile, and sums gradients over tiles.

    Expert e computes x W[e]^T + b[e] + scale * (x A[e]^T) B[e]^T.

    Args:
        tensors: W [E, m, n] or, if ``turned``, [E, n, m]. b [E, m]. A [E, rank, n] and B [E, m, rank] of adapters, which may rest
            in a longer dtype than that of x. None = there is none.
        turned: See above.
        scale: That of the adapters.
        packed: How W is decoded, if it is bytes.
        needed: Which of the four tensors get a gradient.
    """

    def __init__(
        self,
        tensors: Sequence[Tensor | None],
        turned: bool,
        scale: float,
        packed: PackedExperts | None,
        needed: Sequence[bool],
    ) -> None:
        stored, self.bias, *self._stored_factors = tensors
        assert stored is not None
        self.weights, self._scale = ExpertWeights(turned_weights(stored, turned), packed), scale
        self._has_adapters = self._stored_factors[0] is not None
        self._cast: tuple[ExpertWeights, ExpertWeights] | None = None
        self._weight_sum, self._bias_sum, self._down_sum, self._up_sum = (
            ExpertSum(tensor, turned and place == 0) if want and tensor is not None else None
            for place, (tensor, want) in enumerate(zip(tensors, needed, strict=True))
        )

    def _factors(self, like: Tensor) -> tuple[ExpertWeights, ExpertWeights]:
        # A and B in the dtype in which rows compute. They are cast once for all tiles, because a tile has few rows of an expert.
        if self._cast is None:
            down, up = self._stored_factors
            assert down is not None
            assert up is not None
            self._cast = ExpertWeights(down.to(like.dtype)), ExpertWeights(up.to(like.dtype))
        return self._cast

    def output(self, x: Tensor, tile: ExpertTile, out: Tensor | None = None) -> Tensor:
        """Return the outputs [r, m] for rows x [r, n] of a tile, in ``out`` if it is given."""
        out = products(x, self.weights, tile, out, self.bias)
        if self._has_adapters:
            down, up = self._factors(x)
            add_products(products(x, down, tile), up, tile, out, self._scale)
        return out

    def through(self, grad: Tensor, tile: ExpertTile) -> Tensor:
        """Return the gradient of x [r, n] from that of the outputs [r, m]."""
        out = products_back(grad, self.weights, tile)
        if self._has_adapters:
            down, up = self._factors(grad)
            turned = ExpertWeights(down.stored.transpose(1, 2))
            add_products(products_back(grad, up, tile), turned, tile, out, self._scale)
        return out

    def add(self, grad: Tensor, x: Tensor, tile: ExpertTile, alone: bool) -> None:
        """Add to the gradients of W, A and B. ``alone``: these are all rows, so that sums need no more digits than tensors."""
        if self._weight_sum is not None:
            self._weight_sum.add(grad, x, tile, alone)
        if self._down_sum is not None:
            self._down_sum.add(products_back(grad, self._factors(x)[1], tile).mul_(self._scale), x, tile, alone)
        if self._up_sum is not None:
            self._up_sum.add(grad, products(x, self._factors(x)[0], tile).mul_(self._scale), tile, alone)

    @property
    def sums_bias(self) -> bool:
        return self._bias_sum is not None

    def add_bias(self, grad: Tensor, tile: ExpertTile, alone: bool) -> None:
        if self._bias_sum is not None:
            self._bias_sum.add_rows(grad, tile, alone)

    def gradients(self) -> list[Tensor | None]:
        # Return the gradients of the four tensors. None = not needed.
        sums = (self._weight_sum, self._bias_sum, self._down_sum, self._up_sum)
        return [None if total is None else total.gradient() for total in sums]
