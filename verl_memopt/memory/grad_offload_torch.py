"""Use each gradient as soon as backward has computed it: update its parameter, or copy it to the host.

FSDP2 calls the hooks of parameters once the gradients of their unit are reduced and sharded. Below, b_g is the bytes per element
of a gradient (4 for fp32), N counts the parameters, and W the ranks in the shard group.

:class:`StepInBackward` saves b_g x (N - N_u) / W bytes, where N_u counts the parameters of the largest unit: only the gradients
of one unit exist at a time. The exception is a matrix that head and embedding share, whose two gradients exist together in
backward. Clipping needs the norm of all gradients before the first update. So a step that clips has two passes. The first
computes the norm of each gradient and drops the gradient. The second divides the gradients and updates.

:class:`OffloadedGradients` saves b_g x (N - 2 N_l) / W bytes, where N_l counts the parameters of a block. Gradients rest in one
host buffer per section of the optimizer, and are summed there over micro-batches. While the gradients of one block are copied to
the host, those of the next block are computed; further work waits. Sums are computed on the device: the stored sum is copied
back, because an addition on the host would be slower than both copies. The order of two summands does not matter, so the result
equals that of gradients that stay on the device, bit for bit.

The gradient of a vocabulary matrix that is larger than a bucket (``optim.bucket_megabytes``) is never whole on the device. It
passes in tiles of rows. At most three tiles, together one bucket, are there at once: one is arriving with its stored sum, one is
added to, and one is leaving. All tokens add to a tile while it is there. So the head computes the logits of each tile once more,
unless one chunk holds all tokens. The embedding adds the rows of those tokens that belong to the tile, and tiles without tokens
stay on the host. On several ranks, and where FSDP2 casts, a tile is computed from zeros, reduced over ranks, and added to its
stored sum. The norm of such a matrix is computed from the norms of its tiles, so it is rounded differently from the norm of the
whole matrix.
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
"""``torch.nn.utils.clip_grad_norm_`` adds this to the norm before it divides by it."""


def clip_divisor(norm: Tensor, limit: float) -> Tensor:
    return ((norm.float() + CLIP_EPSILON) / limit).clamp_(min=1.0)  # the fused kernel only takes fp32


def is_finite(norm: Tensor) -> bool:
    # A fake tensor (used to predict memory) has no value and counts as finite.
    return isinstance(norm, FakeTensor) or math.isfinite(norm.item())


class StepInBackward:
    """Updates each parameter inside backward, in a hook that FSDP2 calls when the gradients of the unit are sharded."""

    def __init__(self, optimizer: Optimizer, key: str = ACTOR, backward_on: torch.device | None = None) -> None:
        """Register hooks on all parameters of an optimizer. ``key`` is the section of the model's settings, for errors.

        ``backward_on`` is the device that computes gradients; None = the device of the parameters.
        """
        assert isinstance(optimizer, Bucketed), type(optimizer)
        self._optimizer, self._key = optimizer, key
        self._norms: dict[int, Tensor] = {}
        device = local(optimizer.param_groups[0]["params"][0]).device
        self._copied_from = None if backward_on is None or backward_on.type == device.type else backward_on
        # All three stay on the device, because reading one in backward would make the host wait at each parameter.
        self._sum, self._stopped, self._moved = (torch.zeros((), device=device) for _ in range(3))
        self._measured: Tensor | None = None
        self._measures = False
        self._divisor: Tensor | None = None
        # A weak reference, because the garbage collector does not see the hooks of parameters: it could never free a cycle
        # through them.
        weak = weakref.proxy(self)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.register_post_accumulate_grad_hook(lambda parameter: weak.update(parameter))

    def check(self, num_micro_batches: int) -> None:
        if num_micro_batches > 1:
            raise ConfigError(
                f"{self._key}.optim.in_backward=true: an optimizer step has {num_micro_batches} micro-batches, and gradients "
                f"cannot accumulate. Raise {self._key}.ppo_max_token_len_per_gpu (or ppo_micro_batch_size_per_gpu) "
                f"until one holds a whole mini-batch, lower ppo_mini_batch_size, or set {self._key}.optim.in_backward=false."
            )

    def passes(self, num_micro_batches: int, limit: float | None) -> Iterator[None]:
        """Yield once for each pass that a step makes over its micro-batches. The last pass updates the parameters in backward.

        With a ``limit`` for the norm there are two passes. The first computes the norm of each gradient and drops the gradient.
        The second divides the gradients and updates. If the norm is not finite there is no second pass: the step is skipped and
        nothing has changed.
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
        """Norm of all gradients since the last call. It is a sharded scalar if the parameters are sharded."""
        if self._measured is not None:
            measured, self._measured = self._measured, None
            return measured
        # In the order of the parameters, so that the norm is rounded as if all gradients were on the device.
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

        After a non-finite gradient no further parameter is updated. While :meth:`passes` measures norms, none is updated.
        """
        # If this parameter already has a norm, this is its second gradient in the step, from a second micro-batch.
        self.check(1 + (id(parameter) in self._norms))
        assert parameter.grad is not None
        if self._copied_from is not None:
            # FSDP2's CPU offload calls the hook while the copy of the gradient to the host may still be under way.
            wait_on_host(self._copied_from)
        with scope(kind="optimizer scratch"):
            self._norms[id(parameter)] = torch.linalg.vector_norm(parameter.grad)
            if self._divisor is not None:
                local(parameter.grad).div_(self._divisor)
                self._optimizer.step_parameter(parameter)
            if self._measures or self._divisor is not None:
                parameter.grad = None
                return
            # The sum of all norms stays infinite or NaN once one norm is.
            self._sum.add_(local(self._norms[id(parameter)]))
            self._stopped.copy_(self._sum.isfinite().logical_not_())
            self._moved.copy_(torch.maximum(self._moved, 1 - self._stopped))
            self._optimizer.step_parameter(parameter, self._stopped)
        parameter.grad = None


KIND = "grads"
PIECE = 2**22
"""Elements of a stored sum that are copied back to the device at once."""


class OffloadedGradients:
    """Moves the gradients of an optimizer's parameters to the host, as soon as FSDP2 has reduced and sharded them."""

    def __init__(
        self,
        optimizer: Optimizer,
        blocks: Iterable[nn.Module],
        matrices: Iterable[nn.Module] = (),
        reduce: torch.dtype = torch.float32,
    ) -> None:
        """Allocate the host memory and register the hooks.

        ``blocks``: copies of at most as many bytes as the gradients of the largest block may be under way at once. ``matrices``
        (embedding and head) are the modules whose ``weight`` [V, h] may get its gradient in tiles. ``reduce`` is the dtype in
        which tiles of a gathered weight are reduced.
        """
        assert isinstance(optimizer, Bucketed), type(optimizer)
        self._optimizer = optimizer
        self._parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self._device = local(self._parameters[0]).device
        self._places = optimizer.rest_gradients()
        blocks = list(blocks)
        self._most = max((sum(map(self._num_bytes, block.parameters())) for block in blocks), default=0)
        units = ({id(parameter) for parameter in block.parameters() if id(parameter) in self._places} for block in blocks)
        self._units = {name: unit for unit in units for name in unit}
        self._stream, self._adding = copy_stream(self._device), copy_stream(self._device)
        self._leaving: deque[tuple[list[Tensor], Done]] = deque()
        self._stored: dict[int, Done] = {}
        self._norms: dict[int, Tensor] = {}
        self._brought: set[int] = set()
        self._lanes, self.reduce = StateLanes(self._device, KIND), reduce
        self._tile_norms: dict[int, Tensor] = {}
        # A weak reference, because the garbage collector does not see what parameters refer to: they would keep this object
        # alive.
        weak = weakref.proxy(self)
        for parameter in self._parameters:
            parameter.register_post_accumulate_grad_hook(lambda parameter: weak.take(parameter))
            setattr(parameter, HOME, weak)
        self._tiled: dict[int, nn.Parameter] = {}
        for module in matrices:
            weight: Any = module.weight
            if id(weight) in self._places and weight.numel() * gradient_dtype(weight).itemsize > self.bucket_bytes:
                self._tiled[id(weight)] = weight
                # A gathered or cast parameter is another tensor than the one at rest, but must use the same tiles.
                module.register_forward_pre_hook(lambda module, _, rows=weight: weak.adopt(module.weight, rows))

    @property
    def has_any(self) -> bool:
        return bool(self._optimizer.arrived or self._optimizer.taken)

    @property
    def bucket_bytes(self) -> int:
        return self._optimizer.bucket_bytes

    def norm(self) -> Tensor:
        self._send()
        compute_stream = current_stream(self._device)
        while self._leaving:
            self._wait_for_first(compute_stream)
        # In the order of the parameters, so that the norm is rounded as if all gradients were on the device.
        norms = [self._norms[id(parameter)] for parameter in self._parameters if id(parameter) in self._optimizer.arrived]
        self._norms.clear()  # each is a scalar on the device
        return torch.linalg.vector_norm(torch.stack(norms))

    def divide(self, divisor: Tensor | None) -> None:
        self._optimizer.divisor = divisor

    @torch.no_grad()
    def bring(self, parameter: Tensor) -> None:
        dtype = gradient_dtype(parameter)
        self._send()
        self._make_room(parameter.numel() * dtype.itemsize)  # the same matrix of the last micro-batch may still be leaving
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
        """Let the gathered matrix ``whole`` use the gradient tiles of the shard ``rows``, which the optimizer updates."""
        self._tiled[id(whole)] = rows
        setattr(whole, HOME, weakref.proxy(self))

    def tiles(self, parameter: Tensor) -> GradientTiles | None:
        rows = self._tiled.get(id(parameter))
        return None if rows is None else GradientTiles(self, parameter, rows)

    @torch.no_grad()
    def passing(self, parameter: Tensor, ranges: Sequence[slice], needed: Collection[int] | None) -> Iterator[tuple[int, Tensor]]:
        """Yield the stored sums of ranges of this rank's rows on the device, and store each one again afterwards.

        ``needed``: numbers of the ranges that the caller adds to; others may be left out. None = all ranges.
        """
        self._send()
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
        gradient, name = parameter.grad, id(parameter)
        # Autograd also calls the hook if a function has added the gradient itself. That gradient has already left.
        if gradient is None:
            return
        mark(KIND, [local(gradient)])
        unit, taken = self._units.get(name, {name}), self._optimizer.taken
        if name in taken or not unit.issuperset(taken):
            self._send()
        taken[name] = gradient
        parameter.grad = None
        # The gradients of a block leave together: fewer and larger copies, and fewer events.
        if len(taken) == len(unit):
            self._send()

    @torch.no_grad()
    def _send(self) -> None:
        """Add the stored sums to the gradients taken so far, compute their norms, and store them."""
        taken = dict(self._optimizer.taken)
        self._optimizer.taken.clear()
        if not taken:
            return
        # In the order in which they rest, because stored sums of neighbours arrive in one copy.
        shards = {name: local(taken[name]) for name in sorted(taken, key=lambda name: _place(self._places[name]))}
        self._make_room(sum(shard.nbytes for shard in shards.values()))
        # Backward goes on while the stored sums arrive and are added: nothing that it computes waits for a copy, except for room.
        wait_for(self._adding, mark_done(current_stream(self._device)))
        summed = [name for name in shards if name in self._optimizer.arrived and name not in self._brought]
        for done in {id(done): done for done in map(self._stored.get, summed)}.values():
            wait_for(self._adding, done)
        fresh = [name for name in shards if name not in summed]
        for names in ([fresh] if fresh else []) + self._neighbours(summed):
            with on_stream(self._adding), scope(kind=KIND):
                if names is not fresh:
                    self._add_stored([self._places[name] for name in names], [shards[name] for name in names])
                # Computed here, while the whole sum is on the device.
                norms = torch._foreach_norm([taken[name] for name in names])
            self._norms |= zip(names, norms, strict=True)
            wait_for(self._stream, mark_done(self._adding))
            with on_stream(self._stream), scope(kind=KIND):
                for name in names:
                    self._places[name].copy_(shards[name], non_blocking=True)
            if self._stream is not None:
                done = mark_done(self._stream)
                self._stored |= dict.fromkeys(names, done)
                self._leaving.append(([shards[name] for name in names], done))
        self._optimizer.arrived.update(taken)
        self._brought -= taken.keys()
        for name in taken:
            self._tile_norms.pop(name, None)

    def _neighbours(self, names: Sequence[int]) -> list[list[int]]:
        # Parameters whose gradients rest beside each other, in groups of at most PIECE elements, or of one parameter.
        groups: list[list[int]] = []
        end, room = (0, -1), 0
        for name in names:
            (storage, start), size = _place(self._places[name]), self._places[name].numel()
            if (storage, start) != end or size > room:
                groups.append([])
                room = PIECE
            groups[-1].append(name)
            end, room = (storage, start + size), room - size
        return groups

    def _add_stored(self, places: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        # In pieces, so that the sums that are copied back take little memory beside the gradients. Summed on the device: an
        # addition on the host is slower than both copies.
        flat = [gradient.view(-1) for gradient in gradients]
        count = sum(gradient.numel() for gradient in flat)
        whole = places[0].as_strided((count,), (1,), places[0].storage_offset())
        if len(flat) == 1:
            pieces: Iterable[tuple[Tensor, Sequence[Tensor]]] = (
                (sums, [part]) for sums, part in zip(whole.split(PIECE), flat[0].split(PIECE), strict=True)
            )
        else:
            pieces = [(whole, flat)]
        for sums, parts in pieces:
            arriving = torch.empty_like(sums, device=self._device)
            arriving.copy_(sums, non_blocking=True)
            torch._foreach_add_(list(parts), list(arriving.split([part.numel() for part in parts])))

    def _make_room(self, num_bytes: int) -> None:
        # Make later work wait until the gradients under way, plus `num_bytes`, take no more bytes than the gradients of a block.
        compute_stream = current_stream(self._device)
        while self._leaving and num_bytes + sum(one.nbytes for tensors, _ in self._leaving for one in tensors) > self._most:
            self._wait_for_first(compute_stream)

    def _wait_for_first(self, stream: Any) -> None:
        # The gradients are freed after the wait for their copy.
        _, done = leaving = self._leaving.popleft()
        wait_for(stream, done)
        del leaving

    def _num_bytes(self, parameter: Tensor) -> int:
        return local(parameter).numel() * gradient_dtype(parameter).itemsize if parameter.requires_grad else 0


def _place(tensor: Tensor) -> tuple[int, int]:
    return tensor.untyped_storage()._cdata, int(tensor.storage_offset())


class GradientTiles:
    """Tiles of the gradient of a vocabulary matrix [V, h]. A tile has equally many rows of every rank.

    Attributes:
        count: Number of tiles.
    """

    def __init__(self, home: OffloadedGradients, whole: Tensor, rows: Tensor) -> None:
        """``whole`` is the matrix that computes, ``rows`` this rank's shard. They are the same object if nothing is gathered."""
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
            needed = None  # ranks have tokens of different tiles, but all must reduce the same tiles
        for number, rest in self._home.passing(self._rows, ranges, needed):
            count = min(self._step, self._rank_rows - number * self._step)
            # If nothing is gathered or cast, tokens add to the sum itself.
            if self._whole is self._rows:
                yield GradientTile(number, rest, self._parts(number, count, rest))
                continue
            with scope(kind=KIND):
                new = rest.new_zeros(self._ranks * count, rest.shape[1], dtype=gradient_dtype(self._whole))
            yield GradientTile(number, new, self._parts(number, count, new))
            # A rank whose shard ends inside the tile ignores the reduced rows that it does not have.
            rest.add_(_reduced(new, self._rows, self._home.reduce)[: rest.shape[0]])

    def _parts(self, number: int, count: int, tile: Tensor) -> list[tuple[slice, Tensor]]:
        parts = []
        # A tile holds rows of all ranks, rank after rank, so that a reduce-scatter gives each rank its own rows.
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
    # Return this rank's rows of a tile [n, h]: averaged over ranks in `dtype`, then cast to the dtype of the gradient.
    if not isinstance(rows, DTensor):
        return tile.to(gradient_dtype(rows))
    with scope(kind="collective buffers"):
        mean = tile.to(dtype)
        for dim, placed in enumerate(rows.placements):
            group, ranks = rows.device_mesh.get_group(dim), rows.device_mesh.size(dim)
            # The same order as in FSDP2: first scatter within the shard group, then average over replicas.
            if ranks > 1 and placed.is_shard():
                whole, mean = mean, mean.new_empty(mean.shape[0] // ranks, mean.shape[1])
                dist.reduce_scatter_tensor(mean, whole, op=dist.ReduceOp.AVG, group=group)
        for dim, placed in enumerate(rows.placements):
            group, ranks = rows.device_mesh.get_group(dim), rows.device_mesh.size(dim)
            if ranks > 1 and not placed.is_shard():
                dist.all_reduce(mean, op=dist.ReduceOp.AVG, group=group)
        return mean.to(gradient_dtype(rows))
