"""Models whose parameters live on the host, and are copied to the device block by block, or unit by unit by FSDP2.

A frozen model that streams (:class:`StreamedParams`): the next block arrives while the present one computes. Inside a pass it
takes

b x max(2 x N_l, V x h) bytes

on the device, and none outside of a pass. b is the bytes per parameter in the compute dtype (or in a quantised block), N_l counts
the parameters of a block, and V x h those of a vocabulary matrix. One buffer holds two blocks. Another holds the embedding or the
LM head while it computes. The two buffers never exist together. Other parameters (the final norm, the head of a reward model)
stay on the device. The whole model is copied once per micro-batch. A tied embedding and head is copied twice, because blocks come
between. The blocks are copied once more for each prompt whose keys and values are computed separately.

FSDP2's own CPU offload (:func:`native_offload`): shards, gradients and optimizer state live on the host, and the optimizer runs
there. The device holds only gathered units. This saves (b_w + b_o + b_g) x N / W bytes of weights, optimizer state and gradients,
which is 16 x N / W with fp32 AdamW.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map

from verl_memopt.distributed.device import CopyStream, Done, fsdp_params, fsdp_units, is_gpu
from verl_memopt.memory.host_buffers import ALIGNMENT, host_allocator, host_buffer
from verl_memopt.observe.byte_tracker import scope

KIND = "params"


def native_offload(wanted: bool) -> OffloadPolicy:
    # False, because FSDP2 would page-lock its own copies. allocate_on_host decides what is page-locked.
    return CPUOffloadPolicy(False) if wanted else OffloadPolicy()


def allocate_on_host(model: nn.Module, device: torch.device) -> None:
    """Allocate one uninitialised host buffer for the shards of a model without storage, and its buffers on the device.

    The host buffer holds each shard in the padded size that FSDP2 gathers, so FSDP2 makes no copy. On a GPU the host memory of
    gradients is counted too. Host memory is page-locked if the limits allow it, so that copies of weights and gradients do not
    block.
    """
    sharded = {id(param.sharded_param): param for unit in fsdp_units(model) for param in fsdp_params(unit)}
    sizes = {id(parameter): _shard(parameter).numel() * parameter.itemsize for parameter in model.parameters()}
    sizes |= {key: param.padded_sharded_param_size.numel() * param.sharded_param.itemsize for key, param in sharded.items()}
    locked_before = host_allocator().pinned_bytes
    buffer = host_buffer(sum(sizes.values()), device, KIND)
    locked = host_allocator().pinned_bytes > locked_before
    slots = dict(zip(sizes, buffer.split(list(sizes.values())), strict=True))
    for key, param in sharded.items():
        typed = slots[key].view(param.sharded_param.dtype)
        # Only the padding is cleared, because FSDP2 gathers it with the shard. Loading the weights fills the rest.
        typed[_shard(param.sharded_param).numel() :].zero_()
        # FSDP2 gathers from this tensor. It would copy and pad a shard in other memory.
        param._sharded_param_data = typed

    def place(tensor: Tensor) -> Tensor:
        if id(tensor) not in slots:
            return torch.empty_like(tensor, device=device)
        shard = _shard(tensor)
        local = slots[id(tensor)].view(shard.dtype)[: shard.numel()].view(shard.shape)
        # Not DTensor.from_local, which would copy the host tensor to the device of the mesh.
        return DTensor(local, tensor._spec, requires_grad=False) if isinstance(tensor, DTensor) else local

    if is_gpu(device):
        trained = [param for param in sharded.values() if param.sharded_param.requires_grad]
        _count_gradients(model, trained, locked)
    model._apply(place)


def _count_gradients(model: nn.Module, trained: list[FSDPParam], shards_are_locked: bool) -> None:
    # Count the host memory of gradients as long as the model lives. Let FSDP2 page-lock it if the limit allows it.
    sizes = [param.sharded_size.numel() * param.sharded_param.itemsize for param in trained]
    # torch's allocator of page-locked memory rounds each gradient up to a power of two.
    rounded = sum(1 << (size - 1).bit_length() for size in sizes if size)
    locks = shards_are_locked and host_allocator().may_pin(rounded)
    weakref.finalize(model, host_allocator().count_elsewhere(rounded if locks else sum(sizes), locks, "grads"))
    for param in trained:
        param.pin_memory = locks


def _shard(parameter: Tensor) -> Tensor:
    return parameter._local_tensor if isinstance(parameter, DTensor) else parameter


@dataclass(eq=False)
class _StreamedUnit:
    """Parameters that are copied to the device together.

    ``host`` holds their bytes, uint8. ``shown`` lists (module, name, parameter on the host, first byte in ``host``) for each. On
    the device they start at byte ``first`` of a buffer of ``room`` bytes.
    """

    host: Tensor
    shown: list[tuple[nn.Module, str, nn.Parameter, int]]
    first: int = 0
    room: int = 0

    @property
    def stop(self) -> int:
        return self.first + self.host.numel()


class StreamedParams:
    """Parameters of a model that are copied to the device block by block. This is a part of the residency table."""

    name = ""
    """Name of the part; set by the caller that adds it to the table."""
    on_device = False

    def __init__(
        self,
        blocks: Sequence[nn.Module],
        vocabulary: Sequence[Sequence[nn.Module]],
        device: torch.device,
        inputs: torch.dtype | None = None,
    ) -> None:
        """Allocate the parameters on the host, uninitialised, and register the hooks.

        Args:
            blocks: Blocks in the order in which they compute.
            vocabulary: Embedding and LM head, each in a list of its own, or both in one list if they share a matrix.
            device: Device on which the model computes.
            inputs: Cast a block's floating point inputs to this dtype, as FSDP2 does; None = no cast.
        """
        self.resting: dict[Tensor, nn.Parameter] = {}
        """Parameter of the model (without storage) -> the parameter on the host that replaces it."""
        self._device, self._arriving = device, CopyStream(device)
        self._buffer: Tensor | None = None
        self._present: dict[_StreamedUnit, Done] = {}
        self._blocks = [self._unit([block]) for block in blocks]
        self._matrices: list[_StreamedUnit] = []
        most = max(unit.host.numel() for unit in self._blocks)
        for place, (unit, block) in enumerate(zip(self._blocks, blocks, strict=True)):
            # The two halves take turns: a block computes in one half while the next block is copied into the other.
            unit.first, unit.room = place % 2 * most, 2 * most
            self._hook(block, unit, self._blocks[place + 1 : place + 2])
            if inputs is not None:
                block.register_forward_pre_hook(partial(_cast, inputs), with_kwargs=True)
        for modules in vocabulary:
            unit = self._unit(modules)
            unit.room = unit.host.numel()
            self._matrices.append(unit)
            for module in modules:
                self._hook(module, unit, ())

    @property
    def num_bytes(self) -> int:
        return sum(unit.host.numel() for unit in (*self._blocks, *self._matrices))

    @property
    def most_bytes(self) -> int:
        return max(unit.room for unit in (*self._blocks, *self._matrices))

    def to_host(self) -> int:
        self.release()
        # Nothing is copied: the parameters rest on the host.
        return 0

    def to_device(self) -> int:
        return 0

    def release(self) -> None:
        # Free the buffer on the device at the end of a pass.
        for done in self._present.values():
            self._arriving.wait(done)
        self._present.clear()
        self._buffer = None

    def _unit(self, modules: Sequence[nn.Module]) -> _StreamedUnit:
        parts = [part for module in modules for part in module.modules()]
        members = [(part, name, own) for part in parts for name, own in part._parameters.items() if own is not None]
        starts: dict[nn.Parameter, int] = {}
        end = 0
        for _, _, parameter in members:
            if parameter not in starts:
                assert parameter not in self.resting, "two blocks share a parameter"
                starts[parameter] = end
                end += -(-parameter.nbytes // ALIGNMENT) * ALIGNMENT
        host = host_buffer(end, self._device, KIND)
        for parameter, start in starts.items():
            self.resting[parameter] = _view(host, start, parameter)
        return _StreamedUnit(
            host, [(part, name, self.resting[parameter], starts[parameter]) for part, name, parameter in members]
        )

    def _hook(self, module: nn.Module, unit: _StreamedUnit, following: Sequence[_StreamedUnit]) -> None:
        module.register_forward_pre_hook(without_arguments(partial(self._enter, unit, following)))
        # Also after an error: otherwise the module would keep parameters in a buffer that other blocks overwrite.
        module.register_forward_hook(without_arguments(partial(_show, unit, None)), always_call=True)

    def _enter(self, unit: _StreamedUnit, following: Sequence[_StreamedUnit]) -> None:
        self._bring(unit)
        self._arriving.wait(self._present[unit])
        _show(unit, self._buffer)
        for other in following:
            self._bring(other)

    def _bring(self, unit: _StreamedUnit) -> None:
        # Queue the copy of a unit to the device. No effect if the unit is there or on its way.
        if unit in self._present:
            return
        if self._buffer is None or self._buffer.numel() != unit.room:
            self.release()
            with scope(kind=KIND):
                self._buffer = torch.empty(unit.room, dtype=torch.uint8, device=self._device)
        self._present = {
            other: done for other, done in self._present.items() if other.stop <= unit.first or unit.stop <= other.first
        }
        # Work on the old bytes at this place is already queued, and the copy waits for it.
        self._present[unit] = self._arriving.copy([self._buffer[unit.first : unit.stop]], [unit.host])


def _show(unit: _StreamedUnit, buffer: Tensor | None) -> None:
    # Set the parameters of a unit's modules to views of a buffer. None = to the parameters on the host.
    for module, name, resting, start in unit.shown:
        module._parameters[name] = resting if buffer is None else _view(buffer, unit.first + start, resting)


def _cast(dtype: torch.dtype, _: nn.Module, args: Any, kwargs: Any) -> Any:
    # Forward pre-hook: cast the floating point inputs of a module.
    return tree_map(
        lambda leaf: leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf, (args, kwargs)
    )


def _view(buffer: Tensor, start: int, like: Tensor) -> nn.Parameter:
    part = buffer[start : start + like.nbytes].view(like.dtype).view(like.shape)
    return nn.Parameter(part, requires_grad=False)


def without_arguments(call: Callable[[], None]) -> Callable[..., None]:
    return lambda *_: call()
