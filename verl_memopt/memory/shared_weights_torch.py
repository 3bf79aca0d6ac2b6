"""Whole weights on each of several ranks, the engine's own, of which a rank updates its rows alone.

A trained weight has two faces. The whole one is a view of this rank's engine, and computes. The other is a DTensor of this rank's
rows, as FSDP2 shards them, and is a view of the same memory: it is what optimizer, norm, checkpoints and everything else outside
of a pass see. A gradient is reduced and scattered as soon as its unit has it, onto the rows. After a step each rank has its own
rows in place, and gathers those of the others straight into theirs, which is the weight sync too.

With LoRA the adapters are what is trained. A frozen base is whole at all times: nothing updates it, so it has no rows.

Bytes, for N parameters, N_u of the largest unit and W ranks: b_c x N of weights, whoever computes, and N / W of gradients and
moments. FSDP2 beside an engine holds b_c x N, b_w x N / W and b_c x 2 x N_u of gathered ones. An engine that sleeps leaves the
first of these outside of rollouts, and one that shares does not: then an update holds b_c x N x (1 - 1/W) more. With N_a
parameters of adapters there are b_c x N of a base, or its packed bytes, b_w x N_a of whole adapters, and N_a / W of gradients and
moments.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from verl_memopt.memory.embedding_gradient import HOME, gradient_dtype
from verl_memopt.memory.optimizer_offload_torch import local
from verl_memopt.observe.byte_tracker import mark, scope


@dataclass(eq=False)
class _Weight:
    whole: nn.Parameter
    rows: nn.Parameter
    places: list[tuple[nn.Module, str]]


@dataclass(eq=False)
class _ReducedUnit:
    late: bool = False  # reduced at the end of a backward
    weights: list[_Weight] = field(default_factory=list)
    arrived: set[int] = field(default_factory=set)


class GatheredWeights:
    """The trained weights of a model that lie whole on every rank. Outside of a pass the model has the rows in their place.

    All ranks call the same methods in the same order.

    Attributes:
        stale: Rows were written since the last gather.
        reduces: The next backward reduces gradients; otherwise they are summed whole.
    """

    def __init__(self, units: Sequence[nn.Module], mesh: DeviceMesh, reduce: torch.dtype) -> None:
        """``units`` are the modules, such as blocks, whose gradients are reduced together, over ``mesh`` in dtype ``reduce``."""
        self._modules, self._mesh, self._reduce_dtype = list(units), mesh, reduce
        shards = mesh.ndim - 1
        self._group, self._size, self._rank = mesh.get_group(shards), mesh.size(shards), mesh.get_local_rank(shards)
        self._replicas = mesh.get_group(0) if shards else None
        self._placements: list[Placement] = [*[Replicate()] * shards, Shard(0)]
        self._weights: list[_Weight] = []
        self._units: list[_ReducedUnit] = []
        self._unit_of: dict[int, _ReducedUnit] = {}
        self._under_way: tuple[Any, list[_Weight], Tensor, Tensor] | None = None
        self._computes = False
        self.stale, self.reduces = True, True

    def take_over(self, model: nn.Module) -> None:
        """Replace the trained parameters of a model by rows. Its next forward gathers them first."""
        places: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None and parameter.requires_grad:
                    places.setdefault(parameter, []).append((module, name))
        # What belongs to no unit is complete at the end of a backward alone: a tied matrix gets its second gradient there.
        self._units = [*(_ReducedUnit() for _ in self._modules), _ReducedUnit(late=True)]
        unit_of = {
            parameter: unit for module, unit in zip(self._modules, self._units, strict=False) for parameter in module.parameters()
        }
        weak = weakref.proxy(self)
        for whole, where in places.items():
            weight = _Weight(whole, self._sharded(whole), where)
            unit = unit_of.get(whole, self._units[-1])
            unit.weights.append(weight)
            self._weights.append(weight)
            self._unit_of[id(whole)] = unit
            # The garbage collector does not see what parameters refer to, so they must not keep this object alive.
            whole.register_post_accumulate_grad_hook(lambda parameter: weak.take(parameter))
            setattr(whole, HOME, weak)
        self._put()
        model.register_forward_pre_hook(lambda *_: weak.compute())

    def compute(self) -> None:
        if not self._computes:
            self.gather()
            self._computes = True
            self._put()

    def rest(self) -> None:
        if self._computes:
            self._computes = False
            self._put()

    @contextmanager
    def computing(self) -> Iterator[None]:
        self.compute()
        try:
            yield
        finally:
            self.rest()

    @torch.no_grad()
    def gather(self) -> None:
        if not self.stale:
            return
        # All gathers are started before any is waited for.
        self.stale, works = False, []
        for weight in self._weights:
            whole = weight.whole.detach()
            if whole.shape[0] % self._size == 0:
                works.append(dist.all_gather_into_tensor(whole, local(weight.rows), group=self._group, async_op=True))
            else:
                parts = enumerate(whole.split(self._shard_rows(whole)))
                # all_gather_into_tensor needs equal parts; uneven rows are broadcast by their owners.
                works += [dist.broadcast(part, group=self._group, group_src=rank, async_op=True) for rank, part in parts]
        for work in works:
            work.wait()

    def bring(self, parameter: Tensor) -> None:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter, dtype=gradient_dtype(parameter))

    def tiles(self, parameter: Tensor) -> None:
        """Always None: the gradients of a unit are reduced together."""

    @torch.no_grad()
    def take(self, parameter: Tensor) -> None:
        if parameter.grad is None:  # reduced already; autograd calls its hooks where a function has added the gradient itself
            return
        mark("whole gradients", [parameter.grad])
        unit = self._unit_of[id(parameter)]
        unit.arrived.add(id(parameter))
        # Reduced as early as possible, so that whole gradients of one unit at a time exist.
        if self.reduces and not unit.late and len(unit.arrived) == len(unit.weights):
            self._reduce(unit)

    @torch.no_grad()
    def end_backward(self) -> None:
        if self.reduces:
            for unit in self._units:
                self._reduce(unit)
            self._finish()

    def _put(self) -> None:
        for weight in self._weights:
            for module, name in weight.places:
                module._parameters[name] = weight.whole if self._computes else weight.rows

    def _shard_rows(self, whole: Tensor) -> int:
        return -(-whole.shape[0] // self._size)

    def _sharded(self, whole: nn.Parameter) -> nn.Parameter:
        rows = self._shard_rows(whole)
        start, stop = (min(rank * rows, whole.shape[0]) for rank in (self._rank, self._rank + 1))
        # A view of the whole weight: a step on the rows writes into the engine's own memory.
        return nn.Parameter(self._as_dtensor(whole.detach()[start:stop], whole), whole.requires_grad)

    def _as_dtensor(self, rows: Tensor, whole: Tensor) -> DTensor:
        shape, stride = whole.shape, whole.stride()
        return DTensor.from_local(rows, self._mesh, self._placements, run_check=False, shape=shape, stride=stride)

    def _reduce(self, unit: _ReducedUnit) -> None:
        # Start reducing a unit's gradients, once the reduction before is over.
        self._finish()
        pairs = [(weight, weight.whole.grad) for weight in unit.weights if weight.whole.grad is not None]
        unit.arrived.clear()
        if not pairs:
            return
        weights, grads = [weight for weight, _ in pairs], [grad for _, grad in pairs]
        pairs.clear()
        with scope(kind="collective buffers"):
            sizes = [self._shard_rows(weight.whole) * weight.whole[0].numel() for weight in weights]
            whole = torch.empty(self._size, sum(sizes), dtype=self._reduce_dtype, device=weights[0].whole.device)
            # Cut into equal shares of rows for each rank, padded: the layout that reduce_scatter takes.
            torch._chunk_cat(grads, 0, self._size, out=whole)
            for weight in weights:
                weight.whole.grad = None
            # Both names are dropped, so that the whole gradients are freed before the scattered buffer exists.
            grads.clear()
            mean = torch.empty(sum(sizes), dtype=whole.dtype, device=whole.device)
        op, flat = dist.ReduceOp.AVG, whole.view(-1)
        work = dist.reduce_scatter_tensor(mean, flat, op=op, group=self._group, async_op=True)
        self._under_way = work, weights, mean, flat

    def _finish(self) -> None:
        # Add the result of the running reduction to the rows' gradients.
        if self._under_way is None:
            return
        (work, weights, mean, _), self._under_way = self._under_way, None
        work.wait()
        if self._replicas is not None:
            # Replicas of the shard group have seen other rows.
            dist.all_reduce(mean, op=dist.ReduceOp.AVG, group=self._replicas)
        mean = mean.to(gradient_dtype(weights[0].rows))
        mark("grads", [mean])
        start = 0
        for weight in weights:
            rows, own = weight.rows, local(weight.rows)
            reduced = mean[start : start + own.numel()].view(own.shape)
            # Past the padding, too.
            start += self._shard_rows(weight.whole) * weight.whole[0].numel()
            if rows.grad is None:
                rows.grad = self._as_dtensor(reduced, weight.whole)
            else:
                local(rows.grad).add_(reduced)
            # As FSDP2 does: a gradient that was not accumulated by autograd has its hooks called here.
            for hook in (rows._post_accumulate_grad_hooks or {}).values():
                hook(rows)
