"""What a device operation returns, remembered by what it was given.

Torch's fake tensors find the shape of a result by running the operation without values, which takes most of the time of a life on
the virtual GPU. A result depends on shapes, strides, dtypes and devices alone, so each operation on the same ones is run once.
"""

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._mode_utils import no_dispatch

PLAIN = (int, float, bool, complex, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
"""Types of arguments that are compared by value."""
GENERATOR = torch.Generator
"""The class itself: a virtual device puts something else under its name."""
NEVER = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view}
"""Operations with these tags have results that depend on values, or change the shape of what they are given."""
NEVER_NAMED = ("aten::set_", "aten::resize_", "aten::_unsafe_view", "aten::lift", "aten::lift_fresh", "aten::lift_fresh_copy")


class _UnknownError(Exception):
    """An argument has a kind that no signature can hold."""


def signature(func, args, kwargs, mode):
    """Return what the result of a call depends on, and the tensors of the call in order.

    Args:
        mode: the fake mode that device tensors belong to.

    Returns:
        A key that equal calls share, or None where the operation has to be run each time; and the tensors.
    """
    if not _can_be_remembered(func):
        return None, []
    tensors = []
    try:
        key = (func, torch.get_default_dtype(), _key(args, tensors, mode), _key(tuple(kwargs.items()), tensors, mode))
    except _UnknownError:
        return None, []
    return key, tensors


def plan_of(result, tensors, mode):
    """Return a plan to make an equal result again from equal tensors. None if that is impossible.

    The first item of a plan says what the rest is: ``("value", value)``; ``("given", index)`` for an argument that is returned;
    ``("view", index, shape, stride, offset, dtype, device)``; ``("new", shape, stride, dtype, device)``; or ``("all", type,
    plans)``.
    """
    return _plan(result, tensors, [tensor.untyped_storage()._cdata for tensor in tensors], set(), mode)


def made_of(plan, tensors, mode):
    """Return the result of a plan."""
    kind, *rest = plan
    if kind == "value":
        return rest[0]
    if kind == "given":
        return tensors[rest[0]]
    if kind == "all":
        return rest[0](made_of(part, tensors, mode) for part in rest[1])
    with no_dispatch():
        if kind == "view":
            index, shape, stride, offset, dtype, device = rest
            made = torch.empty(0, dtype=dtype, device="meta")
            made.set_(tensors[index].untyped_storage(), offset, shape, stride)
        else:
            shape, stride, dtype, device = rest
            made = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        return FakeTensor(mode, made, device)


_remembered = {}


def _can_be_remembered(func):
    if func not in _remembered:
        schema = func._schema
        ours = schema.name.startswith("aten::") and schema.name not in NEVER_NAMED and not schema.name.startswith("aten::resize")
        # Whether one of these gives a view is decided in each call.
        composite = func.is_view and torch._C._dispatch_has_kernel_for_dispatch_key(
            func.name(), torch._C.DispatchKey.CompositeImplicitAutograd
        )
        _remembered[func] = ours and not composite and not NEVER & set(func.tags)
    return _remembered[func]


def _key(item, tensors, mode):
    kind = type(item)
    if kind is FakeTensor:
        if not _is_plain(item, mode):
            raise _UnknownError
        tensors.append(item)
        return item.shape, item.stride(), item.dtype, item.storage_offset(), item.fake_device
    if kind in (torch.Tensor, torch.nn.Parameter):
        if item.device.type != "cpu" or item.layout is not torch.strided:
            raise _UnknownError
        tensors.append(item)
        return item.shape, item.stride(), item.dtype, item.storage_offset()
    if kind in (tuple, list, torch.Size):
        return kind, tuple([_key(part, tensors, mode) for part in item])
    if kind in PLAIN:
        return kind, item
    if isinstance(item, GENERATOR):
        return GENERATOR
    raise _UnknownError


def _is_plain(tensor, mode):
    """Return whether a fake tensor belongs to this mode and is fully described by shape, stride, dtype, offset and device."""
    return tensor.fake_mode is mode and tensor.constant is None and tensor.layout is torch.strided


def _plan(result, tensors, storages, new, mode):
    """Return the plan of a result. ``new``: storages of results that are neither an argument nor a view of one."""
    kind = type(result)
    if kind in (tuple, list):
        plans = [_plan(part, tensors, storages, new, mode) for part in result]
        return None if None in plans else ("all", kind, plans)
    if kind in PLAIN:
        return "value", result
    if kind is not FakeTensor or not _is_plain(result, mode):
        return None
    for index, tensor in enumerate(tensors):
        if tensor is result:
            return "given", index
    shape, stride = tuple(result.shape), result.stride()
    storage = result.untyped_storage()
    if storage._cdata in storages:
        index = storages.index(storage._cdata)
        if type(tensors[index]) is not FakeTensor:
            return None
        return "view", index, shape, stride, result.storage_offset(), result.dtype, result.fake_device
    last = sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) if result.numel() else -1
    if storage._cdata in new or result.storage_offset() or storage.nbytes() != (last + 1) * result.itemsize:
        return None
    new.add(storage._cdata)
    return "new", shape, stride, result.dtype, result.fake_device
