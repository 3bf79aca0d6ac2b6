"""Compute in another dtype than the one in which parameters rest, on one device, where there is nothing to shard.

A unit, such as a decoder block, is cast as a whole into one buffer when it is about to compute, and the buffer is freed
afterwards. The module's parameters are swapped for views of that buffer during a pass. Gradients have the compute dtype. At the
end of a unit's backward they are added to ``.grad`` of the parameters at rest, which optimizer, norm and checkpoints see.

Log-probs and gradients have the bits that FSDP2 with ``MixedPrecisionPolicy`` gives on one device, as long as gradients are
summed in fp32. FSDP2 makes about 2,000 more Python calls per block of an update, and two fp32 copies of a unit's gradients.

Bytes on the device, where b_c is the width of compute, N_u counts the parameters of a unit and N_r those that are in no unit:
b_c x (N_u + N_r) of cast parameters in a pass, and as many of gradients in the compute dtype in a backward.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.autograd.graph import register_multi_grad_hook
from torch.utils._pytree import tree_map

from verl_memopt.distributed.device import aligned_starts
from verl_memopt.memory.embedding_gradient import CAST_UNIT, gradient_dtype
from verl_memopt.observe.byte_tracker import scope

KIND = "gathered parameters"
"""The kind of a unit's cast parameters in the byte tracker, the same as that of parameters that FSDP2 gathers."""


GRAPHS = "graphs"
"""The kind of the bytes that blocks hold to run as CUDA graphs."""


@dataclass(eq=False)
class _Weight:
    at_rest: nn.Parameter
    cast: nn.Parameter
    """In the compute dtype. Its storage is empty unless its unit is cast."""
    places: list[tuple[nn.Module, str]]


@dataclass(eq=False)
class CastUnit:
    """Parameters that are cast and freed together."""

    frees: bool = True
    """Free the buffer after a forward. A backward that reads the parameters casts them again."""
    again_in_backward: bool = True
    """Whether the backward of the next forward reads the parameters."""
    weights: list[_Weight] = field(default_factory=list)
    storage: torch.UntypedStorage | None = None
    num_bytes: int = 0
    is_cast: bool = False
    shares: bool = False
    """Units of equal shapes share the buffer. It stays where it is, because CUDA graphs read it. The next unit overwrites its
    gradients."""
    # The lists that each cast reads, made once.
    sources: list[Tensor] = field(default_factory=list)
    targets: list[Tensor] = field(default_factory=list)


class CastUnits:
    """The parameters of a one-device model that rest in one dtype and compute in another.

    Between passes the model has the parameters at rest. A forward of the model swaps them; the end of a backward, or
    :meth:`rest`, swaps them back.

    Attributes:
        modules: The units, in forward order.
    """

    def __init__(
        self,
        units: Sequence[nn.Module],
        compute: torch.dtype,
        frees: bool = True,
        own_dtype: Sequence[nn.Module] = (),
        sharing: Sequence[nn.Module] = (),
    ) -> None:
        """Nothing is cast yet: call :meth:`take_over` once the model's parameters are allocated.

        Args:
            units: Modules, such as decoder blocks, that are cast one by one.
            compute: The dtype to cast floating-point parameters and inputs of units to.
            frees: Free a unit's cast parameters after its forward, and cast them again for its backward. False keeps them.
            own_dtype: Modules whose parameters compute in the dtype in which they rest.
            sharing: Those of ``units`` that compute from one buffer in turn. All their parameters are copied there, also those
                that rest in ``compute``.
        """
        self.modules, self._compute, self._frees, self._own_dtype = list(units), compute, frees, list(own_dtype)
        self._sharing, self._shared = set(sharing), dict[tuple[Any, ...], Tensor]()
        self._units: list[CastUnit] = []
        self._swapped = self._ends = False

    def take_over(self, model: nn.Module) -> None:
        own = {parameter for module in self._own_dtype for parameter in module.parameters()}
        copied = {parameter for module in self._sharing for parameter in module.parameters()}
        places: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None and parameter not in own and (parameter in copied or self._needs_cast(parameter)):
                    places.setdefault(parameter, []).append((module, name))
        # Parameters in no unit are cast with the model. They stay cast from the start of a forward to the end of its backward.
        root = CastUnit(frees=False)
        self._units = [
            *(CastUnit(self._frees or module in self._sharing, shares=module in self._sharing) for module in self.modules),
            root,
        ]
        for module, unit in zip(self.modules, self._units, strict=False):
            # Units must not share a parameter, such as a tied one: the unit that casts it would free it while the other one
            # computes.
            members = [parameter for parameter in dict.fromkeys(module.parameters()) if parameter in places]
            self._fill(unit, {parameter: places.pop(parameter) for parameter in members})
        self._fill(root, places)
        for module, unit in zip(self.modules, self._units, strict=False):
            setattr(module, CAST_UNIT, unit)
            self._watch(module, unit)
        self._watch(model, root, is_root=True)

    def rest(self) -> None:
        """Free all cast parameters, and give the model its parameters at rest."""
        for unit in self._units:
            _free(unit)
        if self._swapped:
            self._swapped = False
            for weight in self._weights():
                for module, name in weight.places:
                    module._parameters[name] = weight.at_rest

    def abandon(self) -> None:
        """Make the model ready for a new forward after an error: as :meth:`rest`, and drop gradients of unfinished backwards."""
        self.rest()
        self._ends = False
        for weight in self._weights():
            weight.cast.grad = None

    def _needs_cast(self, parameter: Tensor) -> bool:
        return parameter.is_floating_point() and parameter.dtype != self._compute

    def _weights(self) -> Iterator[_Weight]:
        return (weight for unit in self._units for weight in unit.weights)

    def _fill(self, unit: CastUnit, members: Mapping[nn.Parameter, list[tuple[nn.Module, str]]]) -> None:
        if not members:
            return
        # First all matrices, then all vectors: neighbouring matrices of one width can be multiplied in one product.
        order = sorted(members, key=lambda parameter: (members[parameter][0][1], -parameter.dim()))
        starts = aligned_starts([parameter.numel() * self._compute.itemsize for parameter in order])
        first = order[0]
        shape = tuple((parameter.shape, start) for parameter, start in zip(order, starts, strict=False))
        room = self._shared.get(shape) if unit.shares else None
        if room is None:
            with scope(kind=GRAPHS if unit.shares else KIND):
                room = torch.empty(starts[-1], dtype=torch.uint8, device=first.device)
        if unit.shares:
            self._shared[shape] = room
        cast: dict[nn.Parameter, nn.Parameter] = {}
        for parameter, start in zip(order, starts, strict=False):
            part = room[start : start + parameter.numel() * self._compute.itemsize].view(self._compute).view(parameter.shape)
            cast[parameter] = nn.Parameter(part, parameter.requires_grad)
        unit.weights = [_Weight(parameter, cast[parameter], where) for parameter, where in members.items()]
        unit.sources = [weight.at_rest.detach() for weight in unit.weights]
        unit.targets = [weight.cast.detach() for weight in unit.weights]
        unit.storage, unit.num_bytes = room.untyped_storage(), starts[-1]
        if not unit.shares:
            unit.storage.resize_(0)

    def _watch(self, module: nn.Module, unit: CastUnit, is_root: bool = False) -> None:
        weak = weakref.proxy(self)  # the module's hooks must not keep the model alive

        def enter(_: nn.Module, args: Any, kwargs: Any) -> Any:
            if is_root:
                weak._swap()
            return weak._enter(unit, args, kwargs)

        module.register_forward_pre_hook(enter, with_kwargs=True)
        module.register_forward_hook(lambda _, args, output: weak._leave(unit, output))

    def _swap(self) -> None:
        self._ends = False  # true only where a backward has raised an error
        if not self._swapped:
            self._swapped = True
            for weight in self._weights():
                for module, name in weight.places:
                    module._parameters[name] = weight.cast

    def _enter(self, unit: CastUnit, args: Any, kwargs: Any) -> Any:
        self._cast(unit)
        inputs = list(_tensors((args, kwargs)))
        changes = any(self._needs_cast(tensor) for tensor in inputs)
        if changes:
            args, kwargs = tree_map(self._as_computed, (args, kwargs))
            inputs = list(_tensors((args, kwargs)))
        waited_for = [tensor for tensor in inputs if tensor.requires_grad] if torch.is_grad_enabled() else []
        weak = weakref.proxy(self)
        # The gradient of a unit's input is complete when its backward is over. A unit whose input needs no gradient waits for the
        # end of the whole backward.
        if len(waited_for) == 1:
            waited_for[0].register_hook(lambda _: weak._leave_backward(unit))
        elif waited_for:
            register_multi_grad_hook(waited_for, lambda _: weak._leave_backward(unit))
        return (args, kwargs) if changes else None

    def _leave(self, unit: CastUnit, output: Any) -> None:
        if unit.frees:
            _free(unit)
        if torch.is_grad_enabled():
            weak, again = weakref.proxy(self), unit.again_in_backward
            for tensor in _tensors(output):
                if tensor.grad_fn is not None:
                    # A hook of the node, since it runs after those of the tensor: the next unit is freed before this one is cast.
                    tensor.grad_fn.register_prehook(lambda _: weak._enter_backward(unit, again))

    def _enter_backward(self, unit: CastUnit, again: bool) -> None:
        if not self._ends:
            self._ends = True
            Variable._execution_engine.queue_callback(self._end_backward)
        if again:
            self._cast(unit)

    def _leave_backward(self, unit: CastUnit) -> None:
        _free(unit)
        self._add_gradients(unit)

    def _end_backward(self) -> None:
        self._ends = False
        self.rest()
        for unit in self._units:
            self._add_gradients(unit)

    @torch.no_grad()
    def _cast(self, unit: CastUnit) -> None:
        if unit.is_cast or unit.storage is None:
            return
        if not unit.shares:
            with scope(kind=KIND):
                unit.storage.resize_(unit.num_bytes)
        # Autograd must not see this write as a change: nodes that saved the parameters get the same values again.
        with torch.autograd._unsafe_preserve_version_counter(tuple(unit.targets)):
            torch._foreach_copy_(unit.targets, unit.sources)
        unit.is_cast = True

    @torch.no_grad()
    def _add_gradients(self, unit: CastUnit) -> None:
        # Add the gradients in the compute dtype to those of the parameters at rest, and drop them.
        arrived = [weight for weight in unit.weights if weight.cast.grad is not None]
        sums = [weight.at_rest.grad for weight in arrived if weight.at_rest.grad is not None]
        if sums and len(sums) == len(arrived):
            torch._foreach_add_(sums, [weight.cast.grad for weight in arrived if weight.cast.grad is not None])
        for weight in arrived:
            rest, grad = weight.at_rest, weight.cast.grad
            assert grad is not None
            weight.cast.grad = None
            if rest.grad is None:
                with scope(kind="grads"):
                    rest.grad = grad.to(gradient_dtype(rest), copy=unit.shares)
            elif len(sums) != len(arrived):
                rest.grad.add_(grad)
            del grad  # freed before the next one is converted
            # Autograd, which did not accumulate this gradient, would have called them.
            for hook in (rest._post_accumulate_grad_hooks or {}).values():
                hook(rest)

    def _as_computed(self, value: Any) -> Any:
        return value.to(self._compute) if isinstance(value, Tensor) and self._needs_cast(value) else value


def _free(unit: CastUnit) -> None:
    if unit.is_cast and unit.storage is not None:
        if not unit.shares:
            unit.storage.resize_(0)
        unit.is_cast = False


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        yield from _tensors(tuple(value.values()))
