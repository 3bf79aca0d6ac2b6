"""What happens to a gradient as soon as backward has it: it updates its parameter, or it leaves for the host.

FSDP2 calls the hooks of its parameters once a unit's gradients are reduced and sharded. In the figures b_g is 4 for fp32
gradients, N counts the parameters, and W the ranks in the shard group.

:class:`StepInBackward` saves b_g x (N - N_u) / W bytes, where N_u counts the parameters of the largest unit: at no time is there
more than one unit's gradient. The exception is a matrix that head and embedding share: its two gradients meet in backward.
Clipping needs the norm of all gradients before the first update, so a step that clips has two passes: one that takes the norm of
each gradient and drops it, and one that divides and updates.

:class:`OffloadedGradients` saves b_g x (N - N_l - max(N_l, V h)) / W bytes, where N_l counts the parameters of a block and V h
the elements of the vocabulary's matrix. Gradients rest in one buffer a section of the optimizer, and are summed there over
micro-batches. Those of a block exist while those of the block before it, or of the head, leave; what follows waits. Head and
embedding come one after the other, also where they share a matrix. A sum over micro-batches is made on the device: what is
summed so far comes back, as the addition on a host would be slower than both copies. Adding two numbers does not depend on their
order, so each bit is that of gradients that stay on the device.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from verl_memopt.distributed.device import Done, copy_stream, current_stream, mark_done, on_stream, wait_for, wait_on_host
from verl_memopt.errors import ConfigError
from verl_memopt.memory.bucketed_adamw_torch import Bucketed
from verl_memopt.memory.embedding_gradient import HOME, gradient_dtype
from verl_memopt.memory.optimizer_offload_torch import local
from verl_memopt.observe.byte_tracker import mark, scope

ACTOR = "actor_rollout_ref.actor"


class StepInBackward:
    """Updates each parameter as its gradient comes. FSDP2 calls the hooks once a unit's gradients are reduced and sharded.

    Attributes:
        measured: The norm that a first pass has found, which :meth:`norm` returns next; None = there was no such pass.
    """

    def __init__(self, optimizer: Optimizer, key: str = ACTOR, backward_on: torch.device | None = None) -> None:
        """Register the hooks of all parameters of an optimizer, whose model errors name by the settings section ``key``.

        ``backward_on`` is the device that computes gradients; None for that of the parameters.
        """
        assert isinstance(optimizer, Bucketed), type(optimizer)
        self._optimizer, self._key = optimizer, key
        self._norms: dict[int, Tensor] = {}
        device = local(optimizer.param_groups[0]["params"][0]).device
        self._copied_from = None if backward_on is None or backward_on.type == device.type else backward_on
        # All three stay on the device: reading one in backward would make the host wait at each parameter.
        self._sum, self._stopped, self._moved = (torch.zeros((), device=device) for _ in range(3))
        self.measured: Tensor | None = None
        self._measures = False
        self._divisor: Tensor | None = None
        # The garbage collector does not see the hook of a parameter, so the hook must not refer to the optimizer.
        weak = weakref.proxy(self)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.register_post_accumulate_grad_hook(lambda parameter: weak.update(parameter))

    def check(self, num_micro_batches: int) -> None:
        """Raise a ConfigError if an optimizer step has several micro-batches, over which gradients would be summed."""
        if num_micro_batches > 1:
            raise ConfigError(
                f"{self._key}.optim.in_backward=true: an optimizer step has {num_micro_batches} micro-batches, and a gradient is "
                f"used as soon as it is there. Raise {self._key}.ppo_max_token_len_per_gpu (or ppo_micro_batch_size_per_gpu) "
                f"until one holds a whole mini-batch, lower ppo_mini_batch_size, or set {self._key}.optim.in_backward=false."
            )

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Have backward in the body take the norm of each gradient and drop it: nothing is updated."""
        self._measures = True
        try:
            yield
        finally:
            self._measures = False

    @contextmanager
    def dividing(self, divisor: Tensor) -> Iterator[None]:
        """Have backward in the body update with gradients that are divided by a scalar. All of them are known to be finite."""
        self._divisor = divisor
        try:
            yield
        finally:
            self._norms.clear()
            self._divisor = None

    def norm(self) -> Tensor:
        """Return the norm of the whole gradient since the last call; a sharded scalar where parameters are sharded."""
        if self.measured is not None:
            measured, self.measured = self.measured, None
            return measured
        # In the order of the parameters, as the norm of gradients that are all there.
        parameters = (parameter for group in self._optimizer.param_groups for parameter in group["params"])
        norms = [self._norms[id(parameter)] for parameter in parameters if id(parameter) in self._norms]
        self._norms.clear()
        self._sum.zero_()
        return torch.linalg.vector_norm(torch.stack(norms))

    def take_moved(self) -> Tensor:
        """Return 1 (fp32 scalar) if this rank has updated a parameter since the last call, else 0."""
        moved = self._moved.clone()
        self._moved.zero_()
        return moved

    @torch.no_grad()
    def update(self, parameter: Tensor) -> None:
        """Update a parameter from its gradient and free the gradient. Nothing moves after a gradient that was not finite.

        Where the norm is measured, nothing moves at all.
        """
        # A parameter that has a norm already got a gradient in this step, so this is a second micro-batch.
        self.check(1 + (id(parameter) in self._norms))
        assert parameter.grad is not None
        if self._copied_from is not None:
            # FSDP2's CPU offload calls the hook on the stream of the copy to the host, while the copy may still be under way.
            wait_on_host(self._copied_from)
        with scope(kind="optimizer scratch"):
            self._norms[id(parameter)] = torch.linalg.vector_norm(parameter.grad)
            if self._divisor is not None:
                local(parameter.grad).div_(self._divisor)
                self._optimizer.step_parameter(parameter)
            if self._measures or self._divisor is not None:
                parameter.grad = None
                return
            # A sum stays infinite or NaN once a term is.
            self._sum.add_(local(self._norms[id(parameter)]))
            self._stopped.copy_(self._sum.isfinite().logical_not_())
            self._moved.copy_(torch.maximum(self._moved, 1 - self._stopped))
            self._optimizer.step_parameter(parameter, self._stopped)
        parameter.grad = None


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
        self._places = optimizer.rest_gradients()
        self._most = max((sum(map(self._num_bytes, block.parameters())) for block in blocks), default=0)
        self._stream = copy_stream(self._device)
        self._leaving: deque[tuple[Tensor, Done]] = deque()
        self._norms: dict[int, Tensor] = {}
        self._brought: set[int] = set()
        # The garbage collector does not see what parameters refer to, so they must not keep this object alive.
        weak = weakref.proxy(self)
        for parameter in self._parameters:
            parameter.register_post_accumulate_grad_hook(lambda parameter: weak.take(parameter))
            setattr(parameter, HOME, weak)

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
        dtype = gradient_dtype(parameter)
        self._make_room(parameter.numel() * dtype.itemsize)  # what leaves may be as large: the same matrix, of the pass before
        grad = torch.empty_like(parameter, dtype=dtype)
        if id(parameter) in self._optimizer.arrived:
            here = current_stream(self._device)
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
        # Autograd calls its hooks also where a function has added the gradient itself, which is gone then.
        if gradient is None:
            return
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
