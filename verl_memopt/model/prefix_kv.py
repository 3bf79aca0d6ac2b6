"""Prefix KV: the keys and values of a prompt, computed once for answers in several micro-batches.

In a layer that carries a state from token to token, its last inputs and states take their place, where other tokens go on.

The forward of the prompt keeps its graph. It returns the keys and values of each block and the state of the last token. The
micro-batches of the answers read these one after another. Each has its own backward, and the gradients of the keys, values and
state are summed. At the end the backward of the prompt starts from these sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

Tables = tuple[Tensor, Tensor]
"""Cosines and sines of the positions, [1, T, D] each."""

_NONE = np.zeros(0, dtype=np.int64)


class PrefixRecorder:
    """Collects the keys and values [P, n] of each block during the forward of a prompt.

    ``outer`` is the prefix KV of the tokens before this prompt. None = the prompt is the beginning.

    The second forward of a checkpointed block records nothing. It is not a dataclass, because FSDP2 would pass a copy of a
    dataclass to each unit.
    """

    def __init__(self, outer: PrefixKV | None = None) -> None:
        self.outer, self.extends = outer, outer is not None
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}
        self.tables: Tables | None = None

    def extend(self, block: int, key: Tensor, value: Tensor, tables: Tables) -> tuple[Tensor, Tensor, Tables]:
        # Record the keys and values of a block, and return the arguments behind those of the tokens before.
        if block not in self.keys:
            self.keys[block], self.values[block], self.tables = key, value, tables
        return (key, value, tables) if self.outer is None else self.outer.extend(block, key, value, tables)

    @property
    def given(self) -> np.ndarray:
        return _NONE if self.outer is None else self.outer.given

    def states(self, block: int, tails: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        return (tails, states) if self.outer is None else self.outer.states(block, tails, states)

    def record(self, block: int, tails: Tensor, states: Tensor) -> None:
        # Record what a layer with a state hands on at the branches of the prompt.
        if block not in self.keys:
            self.keys[block], self.values[block] = tails, states

    def outputs(self) -> tuple[Tensor, ...]:
        assert self.tables is not None
        return *self.tables, *(pair for block in sorted(self.keys) for pair in (self.keys[block], self.values[block]))


class PrefixKV:
    """The keys and values of a prompt, and the sums of their gradients over the micro-batches of its answers.

    Gradients are summed in fp32 or wider, [P, n] each, and rounded once.
    """

    extends = True

    def __init__(
        self,
        state: Tensor,
        outputs: Sequence[Tensor],
        outer: PrefixKV | None = None,
        sums_gradients: bool | None = None,
        branches: np.ndarray | None = None,
    ) -> None:
        """Keep the results of a forward.

        Args:
            state: [s, h], the last block's output for the tokens that predict others, such as the last one.
            outputs: The result of :meth:`PrefixRecorder.outputs`.
            outer: The prefix KV of the tokens before. It must outlive this object.
            sums_gradients: Sum the gradients of all tensors. None = of those that require one. Set it if they have no graph.
            branches: int64, the tokens of the path after which layers that carry a state kept it.
        """
        self.outer, self.branches = outer, _NONE if branches is None else branches
        # Each leaf shares storage with a tensor of the prompt's graph. At the end the prompt's backward writes gradients into it.
        self._state, *self._pairs = (_PrefixTensor(root, sums_gradients) for root in (state, *outputs[2:]))
        self._tables: Tables = (outputs[0], outputs[1])

    def prepend_state(self, hidden: Tensor) -> Tensor:
        """Prepend the states that are kept to those of answers: [T, h] -> [s + T, h]."""
        hidden = self._state.prepend_to(hidden)
        return hidden if self.outer is None else self.outer.prepend_state(hidden)

    def extend(self, block: int, key: Tensor, value: Tensor, tables: Tables) -> tuple[Tensor, Tensor, Tables]:
        # Keys and values alternate, block by block.
        keys, values = self._pairs[2 * block : 2 * block + 2]
        cos, sin = (torch.cat(pair, dim=1) for pair in zip(self._tables, tables, strict=True))
        key, value, tables = keys.prepend_to(key), values.prepend_to(value), (cos, sin)
        return (key, value, tables) if self.outer is None else self.outer.extend(block, key, value, tables)

    @property
    def given(self) -> np.ndarray:
        """int64, the tokens of the path whose states are kept, ascending."""
        return self.branches if self.outer is None else np.concatenate([self.outer.given, self.branches])

    def states(self, block: int, tails: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """Return the last inputs and the states of a layer after the tokens ``given``. The arguments have no rows."""
        kept_tails, kept_states = self._pairs[2 * block : 2 * block + 2]
        tails, states = kept_tails.prepend_to(tails), kept_states.prepend_to(states)
        return (tails, states) if self.outer is None else self.outer.states(block, tails, states)

    def record(self, block: int, tails: Tensor, states: Tensor) -> None:
        """Do nothing: a pack behind the prompt hands no state on."""

    def backward(self, again: Sequence[Tensor] | None = None) -> None:
        """Run the backward of the prompt, after the backwards of all answers.

        ``again``: the state and the outputs of a second forward, if the first one kept no graph.
        """
        # It starts from all tensors, even if an answer gave a tensor no gradient, because all ranks must reduce the same units.
        tensors = self._state, *self._pairs
        roots = [tensor.root for tensor in tensors] if again is None else [again[0], *again[3:]]
        used = [pair for pair in zip(roots, tensors, strict=True) if pair[0].requires_grad]
        torch.autograd.backward([root for root, _ in used], [tensor.gradient() for _, tensor in used])


Prefix: TypeAlias = PrefixKV | PrefixRecorder
"""The prefix KV in the forward of answers, or the recorder in the forward of the prompt."""


class _PrefixTensor:
    """One tensor [P, n] of the prompt's graph, and the sum of the gradients that the answers give it."""

    def __init__(self, root: Tensor, sums_gradients: bool | None = None) -> None:
        self.root = root
        # At this leaf the backward of each answer ends, so that the prompt's graph runs backward only once.
        self.leaf = root.detach().requires_grad_(root.requires_grad if sums_gradients is None else sums_gradients)
        self.total: Tensor | None = None

    def prepend_to(self, own: Tensor) -> Tensor:
        return _Prepend.apply(self.leaf, own, self)

    def add(self, grad: Tensor) -> None:
        if self.total is None:
            self.total = torch.zeros_like(grad, dtype=torch.promote_types(grad.dtype, torch.float32))
        self.total.add_(grad)

    def gradient(self) -> Tensor:
        # Returns the sum in the dtype of the tensor, or zeros, and frees the fp32 sum.
        total, self.total = self.total, None
        return torch.zeros_like(self.root) if total is None else total.to(self.root.dtype)


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
        # The gradient of the prefix is not returned, because it was added to the fp32 sum. Autograd would sum in the compute
        # dtype.
        return None, grad[ctx.tokens :], None
