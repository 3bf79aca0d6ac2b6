"""A GPU of fake memory: device tensors have shapes, dtypes and places but no values; host tensors are real.

What a program does on a GPU is done on it, and these are errors: an operation on host and device tensors together; an access
that no wait puts in order (see :mod:`tests.virtual_gpu.clocks`); where :meth:`VirtualGpu.never_waits` says so, any operation
that makes the host wait. What is copied from the device is 0. Bytes are counted by storage, rounded up to blocks as the caching
allocator rounds them.
"""

import contextlib
import functools
import math
import weakref
from collections import Counter
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed._tools.fake_collectives  # gives collectives a meaning on fake tensors
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type
from torch.utils._pytree import tree_iter, tree_map

from recipe.rloo.memory_study.fake_device import described_efficient_backward
from tests.virtual_gpu.clocks import HOST, Clocks, Span
from tests.virtual_gpu.results import made_of, plan_of, signature

aten = torch.ops.aten
BLOCK_BYTES = 512
TOTAL_BYTES = 80 * 2**30
READS_BACK = {aten._local_scalar_dense.default, aten.item.default, aten.is_nonzero.default, aten.equal.default}
"""Operations whose answer is a Python value."""


class WaitError(AssertionError):
    """The host waited for the device in a place where it must not."""


class Stream:
    """Stands in for torch.cuda.Stream."""

    _count = 0

    def __init__(self, device=None, priority=0, name=None, **_):
        Stream._count += 1
        self.name = name or f"stream {Stream._count}"
        self.device = torch.device("cuda", 0)

    def record_event(self, event=None):
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event):
        event.wait(self)

    def wait_stream(self, other):
        _gpu().clocks.wait(self.name, _gpu().clocks.snapshot(other.name))

    def synchronize(self):
        _gpu().host_waits("Stream.synchronize")
        _gpu().clocks.synchronize(self.name)

    def query(self):
        return True


class Event:
    """Stands in for torch.cuda.Event."""

    def __init__(self, *_, **__):
        self._known = {}

    def record(self, stream=None):
        self._known = _gpu().clocks.snapshot((stream or _gpu().streams[-1]).name)

    def wait(self, stream=None):
        _gpu().clocks.wait((stream or _gpu().streams[-1]).name, self._known)

    def synchronize(self):
        _gpu().host_waits("Event.synchronize")
        _gpu().clocks.wait(HOST, self._known)

    def query(self):
        return True


class MemPool:
    """Stands in for torch.cuda.MemPool: memory that is kept once it was needed. ``size`` and ``live`` are bytes."""

    def __init__(self, *_, **__):
        self.id = self
        self.size = self.live = 0


class CudaGraph:
    """Stands in for torch.cuda.CUDAGraph. It repeats the accesses of what was captured, as one operation."""

    def __init__(self, *_, **__):
        self.reads, self.writes = {}, {}

    def replay(self):
        _gpu().replay(self)


class VirtualGpu(TorchDispatchMode):
    """One virtual device, ``cuda:0``, that replaces torch.cuda while entered. One per process at a time.

    ``capability`` selects kernels. ``total_bytes`` is its memory.
    """

    def __init__(self, capability=(9, 0), total_bytes=TOTAL_BYTES):
        super().__init__()
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.clocks = Clocks()
        self.streams = [Stream(name="default stream")]
        self.ops = Counter()
        self.waits = []
        self.allocated = self.peak = 0
        self._total_bytes, self._capability = total_bytes, capability
        self._limit = total_bytes
        self._never_waits = ("", ())
        self.zeroed_bytes = math.inf
        """A copy to the host leaves a larger tensor as it is, so that memory which nobody reads is not taken from the machine."""
        self.truth = False
        """What the host reads where a device tensor of one bool is asked for."""
        self._sizes, self._deaths = {}, {}
        self._pool, self._pooled, self._graph = None, {}, None
        self._host, self._pinned, self._recorded, self._locked = {}, set(), set(), {}
        self._stack = contextlib.ExitStack()

    @classmethod
    def _should_skip_dynamo(cls):
        return False  # nothing is compiled here, and the guard against it takes most of an operation's time

    def __enter__(self):
        global _present
        assert _present is None, "there is one virtual device a process"
        _present = self
        self._stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        self._stack.enter_context(described_efficient_backward())
        # torch.tensor(..., device="cuda") is then a host tensor that is copied, which is seen here.
        self._stack.callback(torch._C._set_only_lift_cpu_tensors, torch._C._only_lift_cpu_tensors())
        torch._C._set_only_lift_cpu_tensors(True)
        for name, value in self._names().items():
            self._stack.enter_context(mock.patch.object(torch.cuda, name, value))
        # The first fake tensor would otherwise make a real one, where torch has a build for GPUs.
        self._stack.enter_context(mock.patch.object(fake_tensor, "init_gpu_context", _nothing))
        # A generator's state is no matter where nothing has a value.
        self._stack.enter_context(mock.patch.object(torch, "Generator", _any_generator))
        self._stack.enter_context(mock.patch.object(torch.UntypedStorage, "resize_", _resizing(torch.UntypedStorage.resize_)))
        return super().__enter__()

    def __exit__(self, *exception):
        global _present
        super().__exit__(*exception)
        self._stack.close()
        _present = None

    @contextlib.contextmanager
    def never_waits(self, where, but_for=()):
        """Forbid operations in the body that make the host wait for the device.

        ``where`` names the body in errors. ``but_for`` are operations that may wait.
        """
        before, self._never_waits = self._never_waits, (where, but_for)
        try:
            yield
        finally:
            self._never_waits = before

    def host_waits(self, op):
        """Record that the host waits for the device. Raises: WaitError."""
        where, but_for = self._never_waits
        if where and op not in but_for:
            raise WaitError(f"{where}: {op} makes the host wait for the device")
        self.waits.append(op)

    # What every operation goes through.

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(is_traceable_wrapper_subclass_type(kind) for kind in types):
            return NotImplemented
        if func is torch.ops.prim.device.default:
            return args[0].fake_device if isinstance(args[0], FakeTensor) else func(*args)
        kwargs = kwargs or {}
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
            return self._pin(func(*args, **kwargs))
        given = [item for item in tree_iter((args, kwargs)) if isinstance(item, torch.Tensor)]
        if any(isinstance(tensor, FakeTensor) and tensor.untyped_storage().device.type == "cpu" for tensor in given):
            args, kwargs = tree_map(_as_host, args), tree_map(_as_host, kwargs)
            given = [item for item in tree_iter((args, kwargs)) if isinstance(item, torch.Tensor)]
        if func is aten.is_pinned.default:
            return self._is_pinned(args[0])
        if func is aten._pin_memory.default:
            return self._pin(args[0].clone())
        on_device = any(self.owns(tensor) for tensor in given)
        if not on_device and torch.device(kwargs.get("device") or "cpu").type != "cuda":
            self._host_op(func, args, kwargs, given)
            return func(*args, **kwargs)
        return self._device_op(func, args, kwargs, given)

    def owns(self, tensor):
        """Return whether a tensor lies on this device."""
        return isinstance(tensor, FakeTensor) and tensor.fake_mode is self.fake and tensor.fake_device.type == "cuda"

    def _host_op(self, func, args, kwargs, given):
        # The host uses host memory: what a stream still writes there must have been waited for.
        if _only_names(func):
            return
        known = [tensor for tensor in given if type(tensor) is not FakeTensor and tensor.device.type == "cpu"]
        followed = [tensor for tensor in known if _key(tensor) in self._host]
        if followed:
            written = _written(func, followed, args, kwargs)
            self._launch(HOST, str(func), followed, written)

    def _device_op(self, func, args, kwargs, given):
        name = str(func)
        self.ops[name] += 1
        if func is aten.record_stream.default:
            self._recorded.add(_key(args[0]))
            return None
        if func in READS_BACK:
            self.host_waits(name)
            self.clocks.synchronize()
            return self.truth if args[0].dtype is torch.bool else 0.0 if args[0].dtype.is_floating_point else 0
        lane = self.streams[-1].name
        to_host = self._goes_to_host(func, args, kwargs)
        if to_host:
            return self._copy_to_host(func, args, kwargs, lane)
        result = self._computed(func, args, kwargs)
        self._blocking_upload(func, args, kwargs, given)
        for tensor in tree_iter(result):
            if self.owns(tensor):
                self._count(tensor.untyped_storage(), lane)
        for tensor in given:
            if not self.owns(tensor):
                self._on_host(tensor)
        if not _only_names(func):
            made = [tensor for tensor in tree_iter(result) if self.owns(tensor)]
            self._launch(lane, name, given, _written(func, given, args, kwargs), made)
        return result

    def _computed(self, func, args, kwargs):
        """Return the result of a device operation: found by torch's fake tensors once for each kind of arguments."""
        key, tensors = signature(func, args, kwargs, self.fake)
        plan = _plans.get(key) if key is not None else None
        if plan is not None:
            return made_of(plan, tensors, self.fake)
        with self.fake:
            result = func(*tree_map(self._as_fake, args), **tree_map(self._as_fake, kwargs))
        if key is not None:
            plan = plan_of(result, tensors, self.fake)
            if plan is not None:
                _plans[key] = plan
        return result

    def _launch(self, lane, name, given, written, made=()):
        """Record an operation. ``written``: the arguments that it writes. ``made``: results, new unless part of an argument."""
        if self._graph is not None:
            for tensors, spans in ((given, self._graph.reads), ((*written, *made), self._graph.writes)):
                spans |= {span: None for span in _spans(tensors) if span.key not in self._pooled}
            return
        there = {_key(tensor) for tensor in given}
        writes = [*_spans(written), *_spans(tensor for tensor in made if _key(tensor) not in there)]
        taken = {id(tensor) for tensor in written}
        self.clocks.launch(lane, name, _spans(tensor for tensor in given if id(tensor) not in taken), writes)

    def _as_fake(self, item):
        if isinstance(item, _GENERATOR):
            return None
        if type(item) in (torch.Tensor, torch.nn.Parameter) and item.device.type != "meta":
            return self.fake.from_tensor(item.detach(), static_shapes=True)
        return item

    def _goes_to_host(self, func, args, kwargs):
        if func is aten._to_copy.default:
            return self.owns(args[0]) and kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cpu"
        return func is aten.copy_.default and self.owns(args[1]) and not self.owns(args[0])

    def _copy_to_host(self, func, args, kwargs, lane):
        source = args[0] if func is aten._to_copy.default else args[1]
        if func is aten._to_copy.default:
            target = torch.zeros(source.shape, dtype=kwargs.get("dtype") or source.dtype)
            blocks = not kwargs.get("non_blocking")
        else:
            target = args[0] if args[0].nbytes > self.zeroed_bytes else args[0].zero_()
            non_blocking = kwargs.get("non_blocking") or (len(args) > 2 and args[2])
            blocks = not (non_blocking and self._is_pinned(target))
        self._on_host(target)
        self._launch(lane, str(func), [source, target], [target])
        if blocks:
            self.host_waits(f"{func} to the host")
            self.clocks.synchronize(lane)
        return target

    def _blocking_upload(self, func, args, kwargs, given):
        from_host = [tensor for tensor in given if not self.owns(tensor) and tensor.dim() and tensor.device.type == "cpu"]
        if not from_host or func not in (aten._to_copy.default, aten.copy_.default):
            return
        non_blocking = kwargs.get("non_blocking") or (func is aten.copy_.default and len(args) > 2 and args[2])
        if not non_blocking:
            self.host_waits(f"{func} from the host")

    def _pin(self, tensor):
        self._on_host(tensor)
        self._pinned.add(_key(tensor))
        return tensor

    def _is_pinned(self, tensor):
        if self.owns(tensor):
            return False
        address = tensor.data_ptr()
        return _key(tensor) in self._pinned or any(start <= address < start + size for start, size in self._locked.items())

    def _lock(self, address, num_bytes, flags):
        self._locked[address] = num_bytes
        return 0

    def _unlock(self, address):
        return 0 if self._locked.pop(address, None) is not None else 1

    def _on_host(self, tensor):
        """Record that the device has read or written a host storage."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._host:
            self._host[key] = weakref.ref(storage, lambda _: self._host_freed(key))

    def _host_freed(self, key):
        # Torch keeps page-locked memory back until its copies are done, and copies pageable memory aside at once.
        del self._host[key]
        self._pinned.discard(key)
        self.clocks.forget(key)

    # Bytes.

    def _count(self, storage, lane):
        key = storage._cdata
        if key in self._sizes:
            return
        self._sizes[key] = 0
        self._deaths[key] = weakref.ref(storage, lambda _: self._forget(key))
        if self._pool is not None:
            self._pooled[key] = self._pool
        self.clocks.born(key, lane)
        self._set(key, storage.nbytes())

    def _forget(self, key):
        self._set(key, 0)
        del self._sizes[key], self._deaths[key]
        self._pooled.pop(key, None)
        if key in self._recorded:
            self._recorded.discard(key)
            self.clocks.forget(key)
            return
        self.clocks.freed(key)

    def resized(self, storage, before):
        """Record a changed storage size. At size 0 its memory is free."""
        key = storage._cdata
        if key not in self._sizes:
            return
        if before and not storage.nbytes():
            self.clocks.freed(key)
        if not before and storage.nbytes():
            self.clocks.born(key, self.streams[-1].name)
        self._set(key, storage.nbytes())

    def _set(self, key, num_bytes):
        size = -(-num_bytes // BLOCK_BYTES) * BLOCK_BYTES
        more, pool = size - self._sizes[key], self._pooled.get(key)
        if pool is not None:
            pool.live += more
            more = max(pool.live - pool.size, 0)
            pool.size += more
        if self.allocated + more > self._limit:
            raise torch.OutOfMemoryError(f"virtual GPU out of memory. Tried to allocate {num_bytes} bytes. ")
        self.allocated += more
        self._sizes[key] = size
        self.peak = max(self.peak, self.allocated)

    def holds_for_a_moment(self, num_bytes):
        """Count bytes that an operation allocates and frees."""
        if self._pool is not None:
            more = max(self._pool.live + num_bytes - self._pool.size, 0)
            self._pool.size += more
            self.allocated += more
            num_bytes = 0
        self.peak = max(self.peak, self.allocated + num_bytes)

    def held(self):
        """Return {storage key: bytes} of what lies on the device."""
        return {key: size for key, size in self._sizes.items() if size}

    # What torch.cuda offers.

    def _names(self):
        return {
            "is_available": lambda: True, "device_count": lambda: 1, "current_device": lambda: 0, "set_device": _nothing,
            "_lazy_init": _nothing, "is_initialized": lambda: True, "is_bf16_supported": lambda *_, **__: True,
            "get_device_properties": lambda *_: SimpleNamespace(name="virtual GPU", total_memory=self._total_bytes),
            "get_device_capability": lambda *_: self._capability, "get_device_name": lambda *_: "virtual GPU",
            "memory_allocated": lambda *_: self.allocated, "max_memory_allocated": lambda *_: self.peak,
            "memory_reserved": lambda *_: self.allocated, "max_memory_reserved": lambda *_: self.peak,
            "reset_peak_memory_stats": self._reset_peak, "empty_cache": _nothing,
            "mem_get_info": lambda *_: (self._total_bytes - self.allocated, self._total_bytes),
            "get_per_process_memory_fraction": lambda *_: self._limit / self._total_bytes,
            "set_per_process_memory_fraction": self._set_fraction, "synchronize": self._synchronize,
            "Stream": Stream, "Event": Event, "current_stream": lambda *_: self.streams[-1],
            "default_stream": lambda *_: self.streams[0], "stream": self._on_stream, "set_stream": self._set_stream,
            "cudart": lambda: SimpleNamespace(cudaHostRegister=self._lock, cudaHostUnregister=self._unlock),
            "get_rng_state": lambda *_: torch.zeros(16, dtype=torch.uint8), "set_rng_state": _nothing,
            "get_rng_state_all": list, "manual_seed": _nothing, "manual_seed_all": _nothing,
            "is_current_stream_capturing": lambda: self._graph is not None,
            "MemPool": MemPool, "use_mem_pool": self._in_pool, "CUDAGraph": CudaGraph, "graph": self._captured,
        }  # fmt: skip

    @contextlib.contextmanager
    def _in_pool(self, pool, device=None):
        before, self._pool = self._pool, pool
        live = pool.live
        try:
            yield
        finally:
            self._pool = before
        assert pool.live == live, "what lies in the memory of a graph is overwritten by the next one"

    @contextlib.contextmanager
    def _captured(self, graph, pool=None, stream=None, **_):
        self.host_waits("torch.cuda.graph")
        with self._in_pool(pool), self._on_stream(stream):
            self._graph = graph
            try:
                yield
            finally:
                self._graph = None

    def replay(self, graph):
        """Do what was captured on the present stream."""
        self.ops["cuda graph"] += 1
        self.clocks.launch(self.streams[-1].name, "cuda graph", list(graph.reads), list(graph.writes))

    def _reset_peak(self, *_):
        self.peak = self.allocated

    def _set_fraction(self, fraction, device=None):
        self._limit = int(self._total_bytes * fraction)

    def _synchronize(self, *_):
        self.host_waits("torch.cuda.synchronize")
        self.clocks.synchronize()

    def _set_stream(self, stream):
        self.streams[-1] = stream

    @contextlib.contextmanager
    def _on_stream(self, stream):
        if stream is None:
            yield
            return
        self.streams.append(stream)
        try:
            yield
        finally:
            self.streams.pop()


_present = None
_plans = {}
"""What an operation makes, by its :func:`signature`. It holds for every virtual device of this process."""
_GENERATOR = torch.Generator


def _any_generator(device=None):
    return _GENERATOR()


def _gpu():
    assert _present is not None, "no virtual device is entered"
    return _present


def _resizing(original):
    def resize_(storage, size):
        before = storage.nbytes()
        result = original(storage, size)
        if _present is not None:
            _present.resized(storage, before)
        return result

    return resize_


def _key(tensor):
    return tensor.untyped_storage()._cdata


def _as_host(item):
    """Return the host tensor behind a device tensor whose ``data`` was set to one."""
    if not isinstance(item, FakeTensor) or item.untyped_storage().device.type != "cpu":
        return item
    return torch.empty(0, dtype=item.dtype).set_(item.untyped_storage(), item.storage_offset(), item.shape, item.stride())


@functools.cache
def _only_names(func):
    """Return whether an operation allocates or renames memory without touching its contents."""
    return func.is_view or func._schema.name.removeprefix("aten::").startswith(("empty", "new_empty", "_unsafe_view"))


def _written(func, given, args, kwargs):
    """Return the arguments that an operation writes to."""
    names, mutable = _names_of_arguments(func)
    if not mutable:
        return []
    values = dict(zip(names, args, strict=False)) | kwargs
    there = {id(tensor) for tensor in given}
    return [t for name in mutable for t in tree_iter(values.get(name)) if isinstance(t, torch.Tensor) and id(t) in there]


@functools.cache
def _names_of_arguments(func):
    """Return the names of all arguments of an operation, and of those that it writes to."""
    arguments = func._schema.arguments
    return [a.name for a in arguments], [a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write]


def _spans(tensors):
    """Return the bytes under each tensor, from its first element to its last."""
    spans = []
    for tensor in tensors:
        if tensor.numel():
            last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
            start = tensor.storage_offset()
            spans.append(Span(_key(tensor), start * tensor.itemsize, (start + last + 1) * tensor.itemsize))
    return spans


def _nothing(*_, **__):
    return None
