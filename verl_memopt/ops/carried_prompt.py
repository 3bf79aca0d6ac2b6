"""A prompt that is computed once for answers in several micro-batches: its keys and values are carried from one to the next.

The prompt's own forward keeps a graph and gives each block's keys and values, and the last token's state. The micro-batches of
its answers read these one after another, each with its own backward, and their gradients are added up. At the end the prompt's
backward starts from the sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

Tables = tuple[Tensor, Tensor]
"""cos and sin of the rotary positions, [1, T, D] each."""


class Recorder:
    """Collects the keys and values [T, n] of each block while a prompt's forward runs; what is computed again is not new.

    No dataclass: FSDP2 hands a copy of one to each unit.
    """

    def __init__(self) -> None:
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}
        self.tables: Tables | None = None

    def extend(self, block: int, key: Tensor, value: Tensor, tables: Tables) -> tuple[Tensor, Tensor, Tables]:
        """Takes note of a block's keys and values, and gives them as they are."""
        if block not in self.keys:
            self.keys[block], self.values[block], self.tables = key, value, tables
        return key, value, tables

    def outputs(self) -> tuple[Tensor, ...]:
        """Gives cos, sin, then keys and values block by block."""
        assert self.tables is not None
        return *self.tables, *(pair for block in sorted(self.keys) for pair in (self.keys[block], self.values[block]))


class CarriedPrompt:
    """What a prompt's forward gave, as the micro-batches of its answers read it.

    Gradients from them are added up in fp32 (or wider), P x n each, and rounded once.
    """

    def __init__(self, state: Tensor, outputs: Sequence[Tensor]) -> None:
        """state: [1, h], the last token's after the last block. outputs: of :meth:`Recorder.outputs`."""
        # Leaves share their storage with the graph's own tensors, over which attention writes gradients in the end.
        self._state, *self._pairs = (_Carried(root) for root in (state, *outputs[2:]))
        self._tables: Tables = (outputs[0], outputs[1])

    def before_states(self, hidden: Tensor) -> Tensor:
        """Gives the last token's state before others: [T, h] -> [1 + T, h]."""
        return self._state.before(hidden)

    def extend(self, block: int, key: Tensor, value: Tensor, tables: Tables) -> tuple[Tensor, Tensor, Tables]:
        """Gives a block's keys, values and tables, those of the prompt before those that are given."""
        keys, values = self._pairs[2 * block : 2 * block + 2]
        cos, sin = (torch.cat(pair, dim=1) for pair in zip(self._tables, tables, strict=True))
        return keys.before(key), values.before(value), (cos, sin)

    def backward(self) -> None:
        """Runs the prompt's backward, after those of all its answers; no more of them may come."""
        carried = [one for one in (self._state, *self._pairs) if one.total is not None]
        torch.autograd.backward([one.root for one in carried], [one.gradient() for one in carried])


class _Carried:
    """One tensor [P, n] of a prompt's graph, and the sum of its gradients from answers."""

    def __init__(self, root: Tensor) -> None:
        self.root = root
        self.leaf = root.detach().requires_grad_(root.requires_grad)
        self.total: Tensor | None = None

    def before(self, own: Tensor) -> Tensor:
        """Gives it and, after it, a tensor [T, n] of answers."""
        return _Before.apply(self.leaf, own, self)

    def add(self, grad: Tensor) -> None:
        if self.total is None:
            self.total = torch.zeros_like(grad, dtype=torch.promote_types(grad.dtype, torch.float32))
        self.total.add_(grad)

    def gradient(self) -> Tensor:
        """Gives the sum in the tensor's dtype, and lets go of it."""
        assert self.total is not None
        total, self.total = self.total.to(self.root.dtype), None
        return total


class _Before(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, leaf: Tensor, own: Tensor, carried: _Carried) -> Tensor:
        ctx.carried, ctx.tokens = carried, leaf.shape[0]
        return torch.cat([leaf, own])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, None]:
        if ctx.needs_input_grad[0]:
            ctx.carried.add(grad[: ctx.tokens])
        return None, grad[ctx.tokens :], None
