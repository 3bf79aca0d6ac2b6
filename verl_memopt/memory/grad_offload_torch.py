"""Gradients rest on the host, in one buffer a section of the optimizer, and are summed there over micro-batches.

Bytes saved: b_g x (N - N_l - max(N_l, V h)) / W bytes, where b_g is 4 for fp32 gradients, N counts the parameters, N_l those of a
block, V h the elements of the vocabulary's matrix, and W the ranks in the shard group. The gradients of a block exist while those
of the block before it, or of the head, leave; what follows waits. Head and embedding come one after the other, also where they
share a matrix.

A sum over micro-batches is made on the device: what is summed so far comes back, as the addition on a host would be slower than
both copies. Adding two numbers does not depend on their order, so each bit is that of gradients that stay on the device.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from verl_memopt.distributed.device import Done, copy_stream, current_stream, mark_done, on_stream, wait_for
from verl_memopt.memory.bucketed_adamw_torch import Bucketed
from verl_memopt.memory.embedding_gradient import HOME, gradient_dtype
from verl_memopt.memory.optimizer_layout import local
from verl_memopt.observe.byte_tracker import mark, scope

KIND = "grads"
PIECE = 2**22
"""Elements of a sum that come back to the device at once."""


class OffloadedGradients:
    """Takes each gradient of an optimizer's parameters to the host. FSDP2 hands them over reduced and sharded, unit by unit."""

    def __init__(self, optimizer: Optimizer, blocks: Iterable[nn.Module]) -> None:
        """Allocate the places on the host, and register the hooks. ``blocks`` say how many bytes may be on their way at once."""
        assert isinstance(optimizer, Bucketed), type(optimizer)
        self._optimizer = optimizer
        self._parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self._device = local(self._parameters[0]).device
        self._places = optimizer.rest_gradients(gradient_dtype, KIND)
        self._most = max((sum(map(self._num_bytes, block.parameters())) for block in blocks), default=0)
        self._stream = copy_stream(self._device)
        self._leaving: deque[tuple[Tensor, Done]] = deque()
        self._norms: dict[int, Tensor] = {}
        self._brought: set[int] = set()
        # The garbage collector does not see the hook of a parameter, so the hook must not refer to this object.
        home = _Home(self)
        for parameter in self._parameters:
            parameter.register_post_accumulate_grad_hook(home.take)
            setattr(parameter, HOME, home)

    @property
    def has_any(self) -> bool:
        """Whether gradients wait for a step."""
        return bool(self._optimizer.arrived)

    def norm(self) -> Tensor:
        """Return the norm of the whole gradient; a sharded scalar where parameters are sharded."""
        here = current_stream(self._device)
        while self._leaving:
            self._wait_for_first(here)
        # In the order of the parameters, as the norm of gradients that are all there.
        norms = [self._norms[id(each)] for each in self._parameters if id(each) in self._optimizer.arrived]
        self._norms.clear()  # a scalar on the device for each parameter
        return torch.linalg.vector_norm(torch.stack(norms))

    def divide(self, divisor: Tensor | None) -> None:
        """Have the next step divide all gradients by a scalar on the device; None = by nothing."""
        self._optimizer.divisor = divisor

    @torch.no_grad()
    def bring(self, parameter: Tensor) -> None:
        """Put what is summed so far of a plain parameter's gradient into ``.grad``, to be added to in place."""
        grad = torch.empty_like(parameter, dtype=gradient_dtype(parameter))
        if id(parameter) in self._optimizer.arrived:
            here = current_stream(self._device)
            self._make_room(grad.nbytes)
            wait_for(self._stream, mark_done(here))
            with on_stream(self._stream):
                grad.copy_(self._places[id(parameter)], non_blocking=True)
            wait_for(here, mark_done(self._stream))
        else:
            grad.zero_()
        parameter.grad = grad
        self._brought.add(id(parameter))

    @torch.no_grad()
    def take(self, parameter: Tensor) -> None:
        """Add a gradient to its place on the host, and drop it. Nothing waits, but for room on the device."""
        gradient, place, name = parameter.grad, self._places[id(parameter)], id(parameter)
        assert gradient is not None
        shard = local(gradient)
        mark(KIND, [shard])
        self._make_room(shard.nbytes)
        here = current_stream(self._device)
        if name in self._optimizer.arrived and name not in self._brought:
            for sum_so_far, added in zip(place.view(-1).split(PIECE), shard.view(-1).split(PIECE), strict=True):
                with scope(kind=KIND):
                    arriving = torch.empty_like(added)
                wait_for(self._stream, mark_done(here))
                with on_stream(self._stream):
                    arriving.copy_(sum_so_far, non_blocking=True)
                wait_for(here, mark_done(self._stream))
                added.add_(arriving)
        self._norms[name] = torch.linalg.vector_norm(gradient)
        wait_for(self._stream, mark_done(here))
        with on_stream(self._stream), scope(kind=KIND):
            place.copy_(shard, non_blocking=True)
        if self._stream is not None:
            self._leaving.append((shard, mark_done(self._stream)))
        self._optimizer.arrived.add(name)
        self._brought.discard(name)
        parameter.grad = None

    def _make_room(self, num_bytes: int) -> None:
        """Let later work wait until a block's gradients at most are on their way, with so many bytes more."""
        here = current_stream(self._device)
        while self._leaving and num_bytes + sum(tensor.nbytes for tensor, _ in self._leaving) > self._most:
            self._wait_for_first(here)

    def _wait_for_first(self, stream: Any) -> None:
        # The gradient is let go after the wait for its copy.
        _, done = leaving = self._leaving.popleft()
        wait_for(stream, done)
        del leaving

    def _num_bytes(self, parameter: Tensor) -> int:
        return local(parameter).numel() * gradient_dtype(parameter).itemsize if parameter.requires_grad else 0


class _Home:
    """What parameters refer to. Once the gradients' owner is gone it does nothing."""

    def __init__(self, owner: OffloadedGradients) -> None:
        self._owner = weakref.ref(owner)

    def bring(self, parameter: Tensor) -> None:
        self._get().bring(parameter)

    def take(self, parameter: Tensor) -> None:
        # Autograd calls its hooks also where a function has added the gradient itself, which is gone then.
        if parameter.grad is not None:
            self._get().take(parameter)

    def _get(self) -> OffloadedGradients:
        owner = self._owner()
        assert owner is not None, "the optimizer lives as long as backward runs"
        return owner
