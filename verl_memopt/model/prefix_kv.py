"""Prefix KV: the keys and values of a prompt, computed once for answers that lie in several micro-batches.

The forward of the prompt keeps its graph. It gives the keys and values of each block and the state of the last token. The
micro-batches of the answers read these one after another, each with a backward of its own, and their gradients are summed. At the
end the backward of the prompt starts from the sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

Tables = tuple[Tensor, Tensor]
"""cos and sin of the rotary positions, [1, T, D] each."""


class PrefixRecorder:
    """Collects the keys and values [P, n] of each block while the forward of a prompt runs.

    A second forward of a checkpointed block records nothing. This is no dataclass, because FSDP2 hands each unit a copy of a
    dataclass.
    """

    def __init__(self) -> None:
        """Start with nothing recorded."""
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}
        self.tables: Tables | None = None

    def extend(self, block: int, key: Tensor, value: Tensor, tables: Tables) -> tuple[Tensor, Tensor, Tables]:
        """Record a block's keys and values, and return the arguments unchanged."""
        if block not in self.keys:
            self.keys[block], self.values[block], self.tables = key, value, tables
        return key, value, tables

    def outputs(self) -> tuple[Tensor, ...]:
        """Return cos, sin, then keys and values block by block."""
        assert self.tables is not None
        return *self.tables, *(pair for block in sorted(self.keys) for pair in (self.keys[block], self.values[block]))


class PrefixKV:
    """The keys and values of a prompt, and the sums of their gradients from the micro-batches of its answers.

    The gradients are summed in fp32 or wider, [P, n] each, and rounded once.
    """

    def __init__(self, state: Tensor, outputs: Sequence[Tensor]) -> None:
        """Take over the outputs of a prompt's forward.

        Args:
            state: [1, h], the state of the last token after the last block.
            outputs: As :meth:`PrefixRecorder.outputs` returns them.
        """
        # Leaves share their storage with the tensors of the graph; attention's backward writes gradients into these in the end.
        self._state, *self._pairs = (_PrefixTensor(root) for root in (state, *outputs[2:]))
        self._tables: Tables = (outputs[0], outputs[1])

    def prepend_state(self, hidden: Tensor) -> Tensor:
        """Prepend the state of the prompt's last token to the states of answers: [T, h] -> [1 + T, h]."""
        return self._state.prepend_to(hidden)

    def extend(self, block: int, key: Tensor, value: Tensor, tables: Tables) -> tuple[Tensor, Tensor, Tables]:
        """Prepend a block's keys, values and rotary tables of the prompt to those of answers.

        Args:
            block: Index of the block.
            key: [T, n], of the answers.
            value: [T, n], of the answers.
            tables: Cos and sin [1, T, D], of the answers.
        """
        keys, values = self._pairs[2 * block : 2 * block + 2]
        cos, sin = (torch.cat(pair, dim=1) for pair in zip(self._tables, tables, strict=True))
        return keys.prepend_to(key), values.prepend_to(value), (cos, sin)

    def backward(self) -> None:
        """Run the backward of the prompt. The backwards of all its answers must be over."""
        # What got no gradient is left out. These roots are no scalars, so autograd would refuse a missing gradient.
        used = [one for one in (self._state, *self._pairs) if one.total is not None]
        torch.autograd.backward([one.root for one in used], [one.gradient() for one in used])


Prefix: TypeAlias = PrefixKV | PrefixRecorder
"""What a block's attention gets: the prefix KV of its answers, or the recorder where a prefix itself is computed."""


class _PrefixTensor:
    """One tensor [P, n] of the prompt's graph, and the sum of its gradients from answers."""

    def __init__(self, root: Tensor) -> None:
        self.root = root
        self.leaf = root.detach().requires_grad_(root.requires_grad)
        self.total: Tensor | None = None

    def prepend_to(self, own: Tensor) -> Tensor:
        """Return this tensor followed by one of the answers [T, n]: [P + T, n]."""
        return _Prepend.apply(self.leaf, own, self)

    def add(self, grad: Tensor) -> None:
        """Add a gradient [P, n] to the sum."""
        if self.total is None:
            self.total = torch.zeros_like(grad, dtype=torch.promote_types(grad.dtype, torch.float32))
        self.total.add_(grad)

    def gradient(self) -> Tensor:
        """Return the sum in the tensor's dtype, and drop it here."""
        assert self.total is not None
        total, self.total = self.total.to(self.root.dtype), None
        return total


class _Prepend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, leaf: Tensor, own: Tensor, prefix: _PrefixTensor) -> Tensor:
        ctx.prefix, ctx.tokens = prefix, leaf.shape[0]
        return torch.cat([leaf, own])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, None]:
        if ctx.needs_input_grad[0]:
            ctx.prefix.add(grad[: ctx.tokens])
        # The gradient of the prefix is not returned: it was added to an fp32 sum, while autograd would add it up in the
        # compute dtype.
        return None, grad[ctx.tokens :], None
