"""Whole weights on each of several ranks, shared with the rank's engine. Each rank updates only its rows.

A trained weight has two tensors that view the same memory. The whole weight is a view of this rank's engine, and computes. The
other tensor is a DTensor of this rank's rows, sharded as FSDP2 would shard them. Optimizer, norm, checkpoints and all other code
outside of a pass see only the rows. Gradients of a unit are reduced and scattered to the rows as soon as they are complete. After
a step each rank has updated its own rows in place. It gathers the rows of other ranks straight into the whole weight, and this is
also the weight sync.

With LoRA only the adapters are trained. Nothing updates the frozen base, so it is always whole and has no rows.

Bytes: let N count the parameters, N_u those of the largest unit and N_a those of adapters, W the ranks, b_c the bytes per
parameter in the compute dtype and b_w at rest. A rank holds b_c x N bytes of weights, and gradients and moments of N / W
parameters. FSDP2 beside an engine holds b_c x N in the engine, b_w x N / W of shards and b_c x 2 x N_u of gathered units. An
engine that sleeps frees the first of these outside of rollouts, but an engine that shares does not. So an update then holds b_c x
N x (1 - 1/W) bytes more. With LoRA a rank holds b_c x N bytes of the base (or its quantised bytes), b_w x N_a of whole adapters,
and gradients and moments of N_a / W parameters.
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
    late: bool = False  # reduced only at the end of a backward
    weights: list[_Weight] = field(default_factory=list)
    arrived: set[int] = field(default_factory=set)


class GatheredWeights:
    """Trained weights of a model that are whole on each rank. Outside of a pass the model has the rows as its parameters.

    All ranks call the same methods in the same order.

    Attributes:
        stale: Rows were written since the last gather.
        reduces: The next backward reduces gradients. Otherwise whole gradients are summed.
    """

    def __init__(self, units: Sequence[nn.Module], mesh: DeviceMesh, reduce: torch.dtype) -> None:
        """``units`` are modules such as blocks, whose gradients are reduced together over ``mesh`` in dtype ``reduce``."""
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
        """Replace the trained parameters of a model by their rows. The next forward first gathers the whole weights."""
        places: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None and parameter.requires_grad:
                    places.setdefault(parameter, []).append((module, name))
        # Gradients of parameters in no unit are complete only at the end of a backward, where a tied matrix gets its second
        # gradient.
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
            # A weak reference, because the garbage collector does not see what parameters refer to: they would keep this object
            # alive.
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
        # All gathers are started before the first wait.
        self.stale, works = False, []
        for weight in self._weights:
            whole = weight.whole.detach()
            if whole.shape[0] % self._size == 0:
                works.append(dist.all_gather_into_tensor(whole, local(weight.rows), group=self._group, async_op=True))
            else:
                parts = enumerate(whole.split(self._shard_rows(whole)))
                # all_gather_into_tensor needs equal parts. If the rows do not divide evenly, each rank broadcasts its own.
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
        if parameter.grad is None:  # already reduced: autograd also calls the hook if a function has added the gradient itself
            return
        mark("whole gradients", [parameter.grad])
        unit = self._unit_of[id(parameter)]
        unit.arrived.add(id(parameter))
        # Reduced as early as possible, so that whole gradients exist for only one unit at a time.
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
        # A view of the whole weight, so that a step on the rows writes into the memory of the engine.
        return nn.Parameter(self._as_dtensor(whole.detach()[start:stop], whole), whole.requires_grad)

    def _as_dtensor(self, rows: Tensor, whole: Tensor) -> DTensor:
        shape, stride = whole.shape, whole.stride()
        return DTensor.from_local(rows, self._mesh, self._placements, run_check=False, shape=shape, stride=stride)

    def _reduce(self, unit: _ReducedUnit) -> None:
        # Wait for the previous reduction, then start reducing the gradients of a unit.
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
            # Each rank gets an equal share of rows, with padding. This is the layout that reduce_scatter needs.
            torch._chunk_cat(grads, 0, self._size, out=whole)
            for weight in weights:
                weight.whole.grad = None
            # All references are dropped, so that the whole gradients are freed before the scattered buffer is allocated.
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
            # Replicas of the shard group have computed other rows of the batch.
            dist.all_reduce(mean, op=dist.ReduceOp.AVG, group=self._replicas)
        mean = mean.to(gradient_dtype(weights[0].rows))
        mark("grads", [mean])
        start = 0
        for weight in weights:
            rows, own = weight.rows, local(weight.rows)
            reduced = mean[start : start + own.numel()].view(own.shape)
            # This also skips the padding.
            start += self._shard_rows(weight.whole) * weight.whole[0].numel()
            if rows.grad is None:
                rows.grad = self._as_dtensor(reduced, weight.whole)
            else:
                local(rows.grad).add_(reduced)
            # Autograd did not accumulate this gradient, so its hooks are called here, as FSDP2 does.
            for hook in (rows._post_accumulate_grad_hooks or {}).values():
                hook(rows)
