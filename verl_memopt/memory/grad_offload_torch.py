"""What happens to a gradient as soon as backward has it: it updates its parameter, or it leaves for the host.

FSDP2 calls the hooks of its parameters once a unit's gradients are reduced and sharded. In the figures b_g is 4 for fp32
gradients, N counts the parameters, and W the ranks in the shard group.

:class:`StepInBackward` saves b_g x (N - N_u) / W bytes, where N_u counts the parameters of the largest unit: at no time is there
more than one unit's gradient. The exception is a matrix that head and embedding share: its two gradients meet in backward.
Clipping needs the norm of all gradients before the first update, so a step that clips has two passes: one that takes the norm of
each gradient and drops it, and one that divides and updates.

:class:`OffloadedGradients` saves b_g x (N - 2 N_l) / W bytes, where N_l counts the parameters of a block. Gradients rest in one
buffer a section of the optimizer, and are summed there over micro-batches. Those of a block exist while those of the block before
it leave; what follows waits. A sum over micro-batches is made on the device: what is summed so far comes back, as the addition on
a host would be slower than both copies. Adding two numbers does not depend on their order, so each bit is that of gradients that
stay on the device.

The gradient of a matrix of the vocabulary that is larger than a bucket (``optim.bucket_megabytes``) is never whole on the device:
it passes in tiles of rows, of which three together are at most a bucket: one comes with its sum so far, one is added to, one
leaves. All tokens add to a tile while it is there. So the head computes the logits of each tile once more, unless one chunk has
all tokens. The embedding adds the rows of the tokens of a tile, and tiles without tokens stay where they are. On several ranks,
and where FSDP2 casts, a tile is computed from zeros, reduced, and added to its sum. The norm of a matrix is that of the norms of
its tiles, whose rounding is another than that of the whole.
"""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from verl_memopt.distributed.device import Done, copy_stream, current_stream, mark_done, on_stream, wait_for, wait_on_host
from verl_memopt.errors import ConfigError
from verl_memopt.memory.bucketed_adamw_torch import Bucketed
from verl_memopt.memory.embedding_gradient import HOME, GradientTile, gradient_dtype
from verl_memopt.memory.grad_offload import tile_rows
from verl_memopt.memory.optimizer_offload_torch import GRADIENT, StateLanes, local, sharded_as
from verl_memopt.observe.byte_tracker import mark, scope

ACTOR = "actor_rollout_ref.actor"

CLIP_EPSILON = 1e-6
"""What ``torch.nn.utils.clip_grad_norm_`` adds to a norm before it divides by it."""


def clip_divisor(norm: Tensor, limit: float) -> Tensor:
    return ((norm.float() + CLIP_EPSILON) / limit).clamp_(min=1.0)  # the fused kernel takes fp32 alone


def is_finite(norm: Tensor) -> bool:
    # A fake tensor, which plans an update, has no value and counts as finite.
    return isinstance(norm, FakeTensor) or math.isfinite(norm.item())


class StepInBackward:
    """Updates each parameter as soon as its gradient arrives: FSDP2 calls the hooks when a unit's gradients are sharded."""

    def __init__(self, optimizer: Optimizer, key: str = ACTOR, backward_on: torch.device | None = None) -> None:
        """Register hooks on all parameters of an optimizer. Errors name the model by the settings section ``key``.

        ``backward_on`` is the device that computes gradients; None = the parameters' device.
        """
        assert isinstance(optimizer, Bucketed), type(optimizer)
        self._optimizer, self._key = optimizer, key
        self._norms: dict[int, Tensor] = {}
        device = local(optimizer.param_groups[0]["params"][0]).device
        self._copied_from = None if backward_on is None or backward_on.type == device.type else backward_on
        # All three stay on the device: reading one in backward would make the host wait at each parameter.
        self._sum, self._stopped, self._moved = (torch.zeros((), device=device) for _ in range(3))
        self._measured: Tensor | None = None
        self._measures = False
        self._divisor: Tensor | None = None
        # The garbage collector does not see the hook of a parameter, so the hook must not refer to the optimizer.
        weak = weakref.proxy(self)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.register_post_accumulate_grad_hook(lambda parameter: weak.update(parameter))

    def check(self, num_micro_batches: int) -> None:
        if num_micro_batches > 1:
            raise ConfigError(
                f"{self._key}.optim.in_backward=true: an optimizer step has {num_micro_batches} micro-batches, and a gradient is "
                f"used as soon as it is there. Raise {self._key}.ppo_max_token_len_per_gpu (or ppo_micro_batch_size_per_gpu) "
                f"until one holds a whole mini-batch, lower ppo_mini_batch_size, or set {self._key}.optim.in_backward=false."
            )

    def passes(self, num_micro_batches: int, limit: float | None) -> Iterator[None]:
        """Yield once for each pass of a step over its micro-batches, whose backward updates the parameters.

        With a ``limit`` of the norm there are two passes. The first takes the norm of each gradient and drops it. The second
        divides and updates. If the norm is not finite there is no second one, so nothing has changed when the step is skipped.
        """
        self.check(num_micro_batches)
        if limit is None:
            yield
            return
        self._measures = True
        try:
            yield
        finally:
            self._measures = False
        norm = self.norm()
        self._measured = norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        if is_finite(norm):
            self._divisor = clip_divisor(norm, limit)
            try:
                yield
            finally:
                self._norms.clear()
                self._divisor = None

    def norm(self) -> Tensor:
        """Norm of the whole gradient since the last call; a sharded scalar if parameters are sharded."""
        if self._measured is not None:
            measured, self._measured = self._measured, None
            return measured
        # In the order of the parameters, as the norm of gradients that are all there.
        parameters = (parameter for group in self._optimizer.param_groups for parameter in group["params"])
        norms = [self._norms[id(parameter)] for parameter in parameters if id(parameter) in self._norms]
        self._norms.clear()
        self._sum.zero_()
        return torch.linalg.vector_norm(torch.stack(norms))

    def take_moved(self) -> Tensor:
        moved = self._moved.clone()  # fp32 scalar: 1 if this rank has updated a parameter since the last call
        self._moved.zero_()
        return moved

    @torch.no_grad()
    def update(self, parameter: Tensor) -> None:
        """Update a parameter from its gradient and free the gradient.

        After a non-finite gradient no further parameter is updated. While norms are measured, none is.
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
    """Moves each gradient of an optimizer's parameters to the host. FSDP2 hands them over reduced and sharded, by unit."""

    def __init__(
        self,
        optimizer: Optimizer,
        blocks: Iterable[nn.Module],
        matrices: Iterable[nn.Module] = (),
        reduce: torch.dtype = torch.float32,
    ) -> None:
        """Allocate the host memory and register the hooks.

        ``blocks`` decide how many bytes may be under way at once: the gradients of the largest one. ``matrices`` (embedding and
        head) are the modules whose ``weight`` [V, h] may get its gradient in tiles. Tiles of a gathered weight are reduced in
        dtype ``reduce``.
        """
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
        self._lanes, self.reduce = StateLanes(self._device, KIND), reduce
        self._tile_norms: dict[int, Tensor] = {}
        # The garbage collector does not see what parameters refer to, so they must not keep this object alive.
        weak = weakref.proxy(self)
        for parameter in self._parameters:
            parameter.register_post_accumulate_grad_hook(lambda parameter: weak.take(parameter))
            setattr(parameter, HOME, weak)
        self._tiled: dict[int, nn.Parameter] = {}
        for module in matrices:
            weight: Any = module.weight
            if id(weight) in self._places and weight.numel() * gradient_dtype(weight).itemsize > self.bucket_bytes:
                self._tiled[id(weight)] = weight
                # The gathered parameter is another tensor than the shard, and has to find the same tiles.
                if isinstance(weight, DTensor):
                    module.register_forward_pre_hook(lambda module, _, rows=weight: weak.adopt(module.weight, rows))

    @property
    def has_any(self) -> bool:
        return bool(self._optimizer.arrived)

    @property
    def bucket_bytes(self) -> int:
        return self._optimizer.bucket_bytes

    def norm(self) -> Tensor:
        compute_stream = current_stream(self._device)
        while self._leaving:
            self._wait_for_first(compute_stream)
        # In the order of the parameters, as the norm of gradients that are all there.
        norms = [self._norms[id(parameter)] for parameter in self._parameters if id(parameter) in self._optimizer.arrived]
        self._norms.clear()  # a scalar on the device for each parameter
        return torch.linalg.vector_norm(torch.stack(norms))

    def divide(self, divisor: Tensor | None) -> None:
        self._optimizer.divisor = divisor

    @torch.no_grad()
    def bring(self, parameter: Tensor) -> None:
        dtype = gradient_dtype(parameter)
        self._make_room(parameter.numel() * dtype.itemsize)  # what leaves may be as large: the same matrix, of the pass before
        grad = torch.empty_like(parameter, dtype=dtype)
        if id(parameter) in self._optimizer.arrived:
            compute_stream = current_stream(self._device)
            wait_for(self._stream, mark_done(compute_stream))
            with on_stream(self._stream):
                grad.copy_(self._places[id(parameter)], non_blocking=True)
            wait_for(compute_stream, mark_done(self._stream))
        else:
            grad.zero_()
        parameter.grad = grad
        self._brought.add(id(parameter))

    def adopt(self, whole: nn.Parameter, rows: nn.Parameter) -> None:
        """Let the gathered matrix ``whole``, which computes, use the gradient tiles of the shard ``rows``, which is optimized."""
        self._tiled[id(whole)] = rows
        setattr(whole, HOME, weakref.proxy(self))

    def tiles(self, parameter: Tensor) -> GradientTiles | None:
        rows = self._tiled.get(id(parameter))
        return None if rows is None else GradientTiles(self, parameter, rows)

    @torch.no_grad()
    def passing(self, parameter: Tensor, ranges: Sequence[slice], needed: Collection[int] | None) -> Iterator[tuple[int, Tensor]]:
        """Yield ranges of this rank's rows on the device, each with its sum so far, and store each one afterwards.

        ``needed``: numbers of the ranges that are added to; others may be left out. None = all.
        """
        name, place = id(parameter), self._places[id(parameter)]
        arrived, width = name in self._optimizer.arrived, place[:1].numel()
        norms = self._tile_norms.get(name) if arrived else None
        numbers = range(len(ranges)) if norms is None or needed is None else sorted(needed)
        if norms is None:
            norms = self._tile_norms[name] = torch.zeros(len(ranges), device=self._device)
        elements = [{GRADIENT: slice(ranges[at].start * width, ranges[at].stop * width)} for at in numbers]
        self._make_room(self.bucket_bytes)
        passing = self._lanes.passing({GRADIENT: place.view(-1)}, elements, from_zero=not arrived)
        for number, planes in zip(numbers, passing, strict=True):
            rows = planes[GRADIENT].view(-1, width)
            yield number, rows
            norms[number].copy_(torch.linalg.vector_norm(rows, dtype=torch.float32))
        size = torch.Size((norms.numel() * _num_shards(parameter),))
        self._norms[name] = torch.linalg.vector_norm(sharded_as(parameter, norms, size))
        self._optimizer.arrived.add(name)

    @torch.no_grad()
    def take(self, parameter: Tensor) -> None:
        gradient, place, name = parameter.grad, self._places[id(parameter)], id(parameter)
        # Autograd calls its hooks also where a function has added the gradient itself, which is gone then.
        if gradient is None:
            return
        shard = local(gradient)
        mark(KIND, [shard])
        self._make_room(shard.nbytes)
        compute_stream = current_stream(self._device)
        if name in self._optimizer.arrived and name not in self._brought:
            # In pieces, so that the sum that comes back never takes as much as the gradient.
            for sum_so_far, added in zip(place.view(-1).split(PIECE), shard.view(-1).split(PIECE), strict=True):
                with scope(kind=KIND):
                    arriving = torch.empty_like(added)
                wait_for(self._stream, mark_done(compute_stream))
                with on_stream(self._stream):
                    arriving.copy_(sum_so_far, non_blocking=True)
                wait_for(compute_stream, mark_done(self._stream))
                # Summed on the device: an addition on the host is slower than both copies.
                added.add_(arriving)
        # Taken on the device, while the whole sum is there.
        self._norms[name] = torch.linalg.vector_norm(gradient)
        wait_for(self._stream, mark_done(compute_stream))
        with on_stream(self._stream), scope(kind=KIND):
            place.copy_(shard, non_blocking=True)
        if self._stream is not None:
            self._leaving.append((shard, mark_done(self._stream)))
        self._optimizer.arrived.add(name)
        self._brought.discard(name)
        self._tile_norms.pop(name, None)
        parameter.grad = None

    def _make_room(self, num_bytes: int) -> None:
        # Make later work wait until the gradients under way, plus `num_bytes`, are no more than a block's.
        compute_stream = current_stream(self._device)
        while self._leaving and num_bytes + sum(tensor.nbytes for tensor, _ in self._leaving) > self._most:
            self._wait_for_first(compute_stream)

    def _wait_for_first(self, stream: Any) -> None:
        # The gradient is let go after the wait for its copy.
        _, done = leaving = self._leaving.popleft()
        wait_for(stream, done)
        del leaving

    def _num_bytes(self, parameter: Tensor) -> int:
        return local(parameter).numel() * gradient_dtype(parameter).itemsize if parameter.requires_grad else 0


class GradientTiles:
    """Tiles of the gradient of a vocabulary matrix [V, h]. Each tile has the same number of rows from every rank.

    Attributes:
        count: Number of tiles.
    """

    def __init__(self, home: OffloadedGradients, whole: Tensor, rows: Tensor) -> None:
        """``whole`` is the matrix that computes, ``rows`` this rank's shard at rest; the same object if nothing is gathered."""
        self._home, self._whole, self._rows = home, whole, rows
        self._ranks = _num_shards(rows)
        vocabulary, width = whole.shape
        self._rank_rows = -(-vocabulary // self._ranks)
        row_bytes = width * self._ranks * max(gradient_dtype(weight).itemsize for weight in (whole, rows))
        self._step = tile_rows(home.bucket_bytes, row_bytes)
        self.count = -(-self._rank_rows // self._step)

    def places(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        rank, row = ids // self._rank_rows, ids % self._rank_rows
        number = row // self._step
        first = number * self._step
        return number, rank * (self._rank_rows - first).clamp(max=self._step) + row - first

    @torch.no_grad()
    def passing(self, needed: Collection[int] | None = None) -> Iterator[GradientTile]:
        own = local(self._rows).shape[0]
        ranges = [slice(min(start, own), min(start + self._step, own)) for start in range(0, self._rank_rows, self._step)]
        if isinstance(self._rows, DTensor) and self._rows.device_mesh.size() > 1:
            needed = None  # each rank has tokens of other tiles, but all reduce the same ones
        for number, rest in self._home.passing(self._rows, ranges, needed):
            count = min(self._step, self._rank_rows - number * self._step)
            # Nothing is gathered or cast: tokens add to the sum itself.
            if self._whole is self._rows:
                yield GradientTile(number, rest, self._parts(number, count, rest))
                continue
            with scope(kind=KIND):
                new = rest.new_zeros(self._ranks * count, rest.shape[1], dtype=gradient_dtype(self._whole))
            yield GradientTile(number, new, self._parts(number, count, new))
            # Ranks with fewer rows than a whole tile drop what was reduced for rows that they lack.
            rest.add_(_reduced(new, self._rows, self._home.reduce)[: rest.shape[0]])

    def _parts(self, number: int, count: int, tile: Tensor) -> list[tuple[slice, Tensor]]:
        parts = []
        # A tile holds rows of all ranks, rank after rank, so that a reduce-scatter gives each rank its own.
        for rank in range(self._ranks):
            start, vocabulary = rank * self._rank_rows + number * self._step, self._whole.shape[0]
            stop = min(start + count, vocabulary)
            if start < stop:
                parts.append((slice(start, stop), tile[rank * count : rank * count + stop - start]))
        return parts


def _num_shards(parameter: Tensor) -> int:
    if not isinstance(parameter, DTensor):
        return 1
    return math.prod(
        size for size, placed in zip(parameter.device_mesh.shape, parameter.placements, strict=True) if placed.is_shard()
    )


def _reduced(tile: Tensor, rows: Tensor, dtype: torch.dtype) -> Tensor:
    # This rank's rows of a tile [n, h], averaged over ranks in `dtype`, in the dtype of their gradient.
    assert isinstance(rows, DTensor), type(rows)
    with scope(kind="collective buffers"):
        mean = tile.to(dtype)
        for dim, placed in enumerate(rows.placements):
            group, ranks = rows.device_mesh.get_group(dim), rows.device_mesh.size(dim)
            # The order of FSDP2 with replicas: scatter within the shard group, then average over replicas.
            if ranks > 1 and placed.is_shard():
                whole, mean = mean, mean.new_empty(mean.shape[0] // ranks, mean.shape[1])
                dist.reduce_scatter_tensor(mean, whole, op=dist.ReduceOp.AVG, group=group)
        for dim, placed in enumerate(rows.placements):
            group, ranks = rows.device_mesh.get_group(dim), rows.device_mesh.size(dim)
            if ranks > 1 and not placed.is_shard():
                dist.all_reduce(mean, op=dist.ReduceOp.AVG, group=group)
        return mean.to(gradient_dtype(rows))
