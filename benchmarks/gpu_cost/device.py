"""A virtual GPU that counts what a GPU pays for: kernel launches, bytes moved, FLOPs, waits, copies of pageable memory.

Operations run on fake ``cuda`` tensors (``tests/virtual_gpu``), so the code takes the path of a GPU. An operation is one launch,
unless :func:`launches_of` knows better. A compiled call is as many launches as Inductor's scheduler makes kernels of it, and a
kernel of this project is one, or two if it sums over rows.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, wraps
from math import ceil
from types import FunctionType
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from torch._inductor.graph import GraphLowering
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils import _foreach_utils
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry

from benchmarks.gpu_cost.schedule import COMPUTE, TO_DEVICE, TO_HOST, Launch, Mark, Python, Step, Synchronize, Wait, Work
from benchmarks.update_pass.flops import PRODUCTS, attention_formulas
from tests.virtual_gpu.clocks import HOST, Clocks
from tests.virtual_gpu.device import VirtualGpu, _written
from verl_memopt.memory.activation_checkpointing_torch import _CheckpointedBlock
from verl_memopt.memory.fused import NO_TEMPORARIES
from verl_memopt.memory.kernels import Kernel
from verl_memopt.model.captured_block import _CapturedBlock
from verl_memopt.model.decoder import DecoderBlock

aten = torch.ops.aten

FREE = {
    "alias", "as_strided", "detach", "diagonal", "empty", "empty_like", "empty_strided", "expand", "is_same_size", "lift_fresh",
    "new_empty", "new_empty_strided", "permute", "record_stream", "reshape", "resize_", "select", "set_", "slice", "split",
    "split_with_sizes", "squeeze", "sym_numel", "sym_size", "sym_stride", "t", "transpose", "unbind", "unfold", "unsqueeze",
    "view", "view_as", "_local_scalar_dense", "_reshape_alias", "_unsafe_view", "resize_storage_bytes_",
}  # fmt: skip
"""Operations that launch nothing: views, and memory from the allocator."""

KNOWN = {
    "_flash_attention_forward": 1, "_flash_attention_backward": 3, "nonzero": 3, "linalg_vector_norm": 2, "_assert_async": 1,
    "_softmax": 1, "sort": 4,
    "select_backward": 2, "slice_backward": 2,
}  # fmt: skip
"""Kernels of operations that are not one. flash: ``flash_api.cpp``; its backward also sums the gradients of repeated key heads,
two kernels more (:func:`launches_of`). efficient: ``attention_backward.cu``, also in :func:`launches_of`."""

INDEXED = {"index", "index_select", "index_add_", "index_copy_", "index_copy", "embedding", "gather", "scatter_", "scatter_add_",
           "index_put_", "_index_put_impl_", "index_fill_"}  # fmt: skip
"""Operations that touch as much of their first tensor as the others have."""

WRITES_ONLY = {"copy_", "fill_", "zero_"}
"""In-place operations that do not read what they overwrite."""

CHUNK_ELEMENTS, CHUNKS = 2**16, 320
TENSORS = {1: 110, 2: 64, 3: 48, 4: 36, 5: 30}
"""Of a launch of a foreach operation: elements of a chunk, chunks, and tensors by lists (``MultiTensorApply.cuh``)."""


@dataclass
class Cost:
    """What some operations of one name cost. Bytes are of the device's memory."""

    launches: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    flops: int = 0

    def add(self, launches: int, read: int, written: int, flops: int = 0) -> None:
        self.launches += launches
        self.read_bytes += read
        self.written_bytes += written
        self.flops += flops


@dataclass
class Counted:
    """What a call cost: operations by name, and what made host or streams wait. ``uploads``: copies from host to device."""

    ops: dict[str, Cost] = field(default_factory=dict)
    kernels: list[tuple[int, int]] = field(default_factory=list)
    """Bytes and FLOPs of each launch."""
    host_waits: Counter[str] = field(default_factory=Counter)
    """Waits between the first launch and the last, in which a GPU may run out of work."""
    border_waits: Counter[str] = field(default_factory=Counter)
    """Waits before the first launch or after the last."""
    stream_waits: int = 0
    uploads: int = 0
    pageable_uploads: int = 0
    compiled_calls: int = 0
    recomputed_flops: int = 0
    """Of the second forwards of checkpointed blocks."""
    steps: list[Step] = field(default_factory=list)
    """What the host did, in order (:mod:`benchmarks.gpu_cost.schedule`)."""


STAND_INS = ("/tests/virtual_gpu/", "/torch/_subclasses/", "/torch/_library/", "/unittest/mock.py", "/benchmarks/gpu_cost/")
"""Files of which no Python runs on a real GPU."""

COMPILED_CALLS = 90
"""Python calls of a compiled call: guards, torch's wrappers and Inductor's code, as counted for one on a CPU."""

KERNEL_CALLS = 20
"""Python calls of a kernel of this project: its wrapper and Triton's launcher. Stated, not counted."""


class RecordingClocks(Clocks):
    """Clocks that note which stream records and awaits which event."""

    def __init__(self, note: Callable[[Step], None]) -> None:
        super().__init__()
        self._note, self._events = note, list[Any]()

    def snapshot(self, lane: str) -> Any:
        event = super().snapshot(lane)
        self._events.append(event)  # kept, so that no other event gets its id
        self._note(Mark(lane, id(event)))
        return event

    def wait(self, lane: str, event: Any) -> None:
        super().wait(lane, event)
        self._note(Wait(lane, id(event)))

    def synchronize(self, lane: str | None = None) -> None:
        super().synchronize(lane)
        self._note(Synchronize(lane))


class CountingGpu(VirtualGpu):
    """Counts operations while :meth:`counting` lasts."""

    def __init__(self) -> None:
        super().__init__()
        self.clocks = RecordingClocks(self._step)
        self.zeroed_bytes = 2**20
        self._into: Counted | None = None
        self._calls = self._inside = self._replays = self._again = self._updating = 0
        self._uploaded: dict[int, bytes] = {}
        self._pending: list[tuple[tuple[Any, ...], int, str, int]] = []
        self._launched = 0
        self._waited: list[tuple[str, int]] = []
        self._flops: dict[Any, Callable[..., int]] = {**flop_registry, **PRODUCTS, **attention_formulas()}

    def counted(self, call: Callable[[], Any]) -> Counted:
        self._into = into = Counted()
        self._launched = 0
        self._waited.clear()
        self._pending.clear()
        wait = self.clocks.wait

        def waits(lane: str, event: Any) -> None:
            into.stream_waits += lane != HOST
            wait(lane, event)

        try:
            # Fake tensors count among those that torch's foreach operations take.
            taken = [*_foreach_utils._foreach_supported_types, FakeTensor]
            with ExitStack() as stack:
                stack.enter_context(mock.patch.object(self.clocks, "wait", waits))
                stack.enter_context(mock.patch.object(_foreach_utils, "_foreach_supported_types", taken))
                stack.enter_context(mock.patch.object(DecoderBlock, "forward", self._in_block(DecoderBlock.forward)))
                for block in (_CheckpointedBlock, _CapturedBlock):
                    backward = staticmethod(self._in_block(block.backward))
                    stack.enter_context(mock.patch.object(block, "backward", backward))
                stack.enter_context(mock.patch.object(DecoderBlock, "compute", self._recomputing(DecoderBlock.compute)))
                for register, change in ((register_optimizer_step_pre_hook, 1), (register_optimizer_step_post_hook, -1)):
                    stack.callback(register(lambda *_, change=change: self._update(change)).remove)
                stack.callback(sys.setprofile, None)
                sys.setprofile(self._count_call)
                call()
                sys.setprofile(None)
                self._flush()
        finally:
            self._into = None
        for op, launched in self._waited:
            (into.host_waits if 0 < launched < self._launched else into.border_waits)[op] += 1
        return into

    # What the schedule needs to know besides.

    def __torch_dispatch__(self, *given: Any, **named: Any) -> Any:
        sys.setprofile(None)
        try:
            return super().__torch_dispatch__(*given, **named)
        finally:
            if self._into is not None:
                sys.setprofile(self._count_call)

    def _count_call(self, frame: Any, event: str, _: Any) -> None:
        self._calls += event == "call" and not _stands_in(frame.f_code.co_filename)

    def _step(self, step: Step) -> None:
        if self._into is not None:
            self._flush()
            self._into.steps.append(replace(step, phase=self._phase(), inside=self._inside > 0))

    def _flush(self) -> None:
        assert self._into is not None
        if self._calls:
            self._into.steps.append(Python(self._calls, phase=self._phase(), inside=self._inside > 0))
            self._calls = 0

    def _phase(self) -> str:
        backward = torch._C._current_graph_task_id() != -1
        return "optimizer" if self._updating else "backward" if backward else "forward"

    def _launched_step(self, engine: str, kernels: Sequence[Work], pageable: bool = False, blocks: bool = False) -> Launch:
        return Launch(self.streams[-1].name, engine, tuple(kernels), pageable=pageable, blocks=blocks)

    def _in_block(self, call: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(call)
        def run(*given: Any, **named: Any) -> Any:
            self._inside += 1
            try:
                return call(*given, **named)
            finally:
                self._inside -= 1

        return run

    # Graphs: their kernels are counted when they are captured, and cost what they cost at each replay.

    @contextmanager
    def _captured(self, graph: Any, *given: Any, **named: Any) -> Iterator[None]:
        outside = self._into, self._pending
        self._into, self._pending = graph.counted, graph.pending = Counted(), []
        try:
            with super()._captured(graph, *given, **named):
                yield
        finally:
            self._into, self._pending = outside
            self._calls = 0

    def replay(self, graph: Any) -> None:
        super().replay(graph)
        into = self._into
        if into is None:
            return
        self._launched += 1
        self._replays += 1
        self._flush()
        for name, cost in graph.counted.ops.items():
            into.ops.setdefault(name, Cost()).add(cost.launches, cost.read_bytes, cost.written_bytes, cost.flops)
        into.kernels += graph.counted.kernels
        lane, phase, first = self.streams[-1].name, self._phase(), len(into.steps)
        launches = [(place, step) for place, step in enumerate(graph.counted.steps) if isinstance(step, Launch)]
        into.steps += [replace(step, lane=lane, graph=self._replays, phase=phase, inside=True) for _, step in launches]
        places = {place: first + position for position, (place, _) in enumerate(launches)}
        self._pending += [(key, rows, name, places[place]) for key, rows, name, place in graph.pending]

    def _recomputing(self, call: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(call)
        def run(*given: Any, **named: Any) -> Any:
            again = torch._C._current_graph_task_id() != -1
            self._again += again
            try:
                return call(*given, **named)
            finally:
                self._again -= again

        return run

    def _update(self, change: int) -> None:
        self._updating += change

    def host_waits(self, op: str) -> None:
        super().host_waits(op)
        self._waited.append((op, self._launched))

    def finish(self, into: Counted) -> None:
        """Add the compiled calls. Outside of the mode, because they are compiled here, as far as the scheduler."""
        for key, rows, name, place in self._pending:
            sizes = [(round(read * rows), round(written * rows)) for read, written in kernels_of(*key)]
            for read, written in sizes:
                into.ops.setdefault(name, Cost()).add(1, read, written)
                into.kernels.append((read + written, 0))
            step = into.steps[place]
            assert isinstance(step, Launch)
            into.steps[place] = replace(step, kernels=tuple(Work(read + written) for read, written in sizes))
            into.compiled_calls += 1

    def record(
        self, function: Callable[..., Any], tensors: Sequence[Tensor | None], others: Sequence[Any], uncompiled: Callable[[], Any]
    ) -> Any:
        """Take note of a call that is compiled on a GPU; its results come from the uncompiled function, which is not counted."""
        into, self._into = self._into, None
        sys.setprofile(None)
        try:
            result = uncompiled()
        finally:
            self._into = into
        if into is None:
            return result
        self._launched += 1
        if isinstance(function, Kernel):
            cost, sizes = (
                into.ops.setdefault(f"kernel {function.__name__} {place()}", Cost()),
                kernel_bytes(function, tensors, others),
            )
            for read, written in sizes:
                cost.add(1, read, written)
                into.kernels.append((read + written, 0))
            self._calls += KERNEL_CALLS
            self._step(self._launched_step(COMPUTE, [Work(read + written) for read, written in sizes]))
        else:
            key, rows = region_of(function, tensors, others)
            self._calls += COMPILED_CALLS
            self._step(self._launched_step(COMPUTE, ()))
            self._pending.append((key, rows, f"compiled {function.__name__} {place()}", len(into.steps) - 1))
        sys.setprofile(self._count_call)
        return result

    def _device_op(self, func: Any, args: Any, kwargs: Any, given: Any) -> Any:
        into = self._into
        before = 0 if into is None else len(into.steps)
        result = super()._device_op(func, args, kwargs, given)
        name = func.__name__.partition(".")[0]
        if name in ("_to_copy", "copy_"):
            self._upload(args[0] if name == "_to_copy" else args[1], result, into)
        # A copy of a tensor to itself, as FSDP2 makes of what is in its place already, is left out by torch.
        if into is None or name in FREE or (name == "copy_" and args[0] is args[1]):
            return result
        self._launched += 1
        made = [one for one in tree_iter(result) if self.owns(one)]
        launches = launches_of(name, args, kwargs, given)
        made += [one for one in _written(func, given, args, kwargs) if self.owns(one)]
        read, written = moved_bytes(name, args, kwargs, given, made)
        formula = self._flops.get(func._overloadpacket)
        flops = 0 if formula is None else operations(formula, args, kwargs, result, self._value)
        into.ops.setdefault(f"{name} {place()}", Cost()).add(launches, read, written, flops)
        into.kernels.extend([((read + written) // launches, flops // launches)] * launches)
        into.recomputed_flops += flops if self._again else 0
        self._schedule(name, args, kwargs, result, [Work((read + written) // launches, flops // launches)] * launches, before)
        return result

    def _schedule(self, name: str, args: Any, kwargs: Any, result: Any, kernels: Sequence[Work], before: int) -> None:
        assert self._into is not None
        waits = self._into.steps[before:]  # of a copy that blocks; it comes before its wait
        del self._into.steps[before:]
        source, target = (args[0], result) if name == "_to_copy" else (args[1], args[0]) if name == "copy_" else (None, None)
        if isinstance(source, Tensor) and isinstance(target, Tensor) and self.owns(source) != self.owns(target):
            host = target if self.owns(source) else source
            pageable = not self._is_pinned(host)
            free = kwargs.get("non_blocking") or (name == "copy_" and len(args) > 2 and args[2])
            engine = TO_HOST if host is target else TO_DEVICE
            self._step(self._launched_step(engine, [Work(target.nbytes)], pageable, not free or pageable))
        else:
            attends = "attention" in name
            self._step(self._launched_step(COMPUTE, [replace(kernel, attends=attends) for kernel in kernels]))
        self._into.steps.extend(waits)

    def _upload(self, source: Any, result: Any, into: Counted | None) -> None:
        if not isinstance(source, Tensor) or self.owns(source) or not self.owns(result):
            return
        if not source.dtype.is_floating_point and source.dtype is not torch.bool:
            self._uploaded[result.untyped_storage()._cdata] = source.numpy().tobytes()
        if into is not None and source.dim():
            into.uploads += 1
            into.pageable_uploads += not self._is_pinned(source)

    def _value(self, tensor: Any) -> Any:
        """Return what the host sent to an int32 tensor of the device: attention's cost depends on lengths."""
        if not self.owns(tensor) or tensor.dtype is not torch.int32:
            return tensor
        sent = self._uploaded[tensor.untyped_storage()._cdata]
        start = tensor.storage_offset() * tensor.itemsize
        values = np.frombuffer(sent, dtype=np.int32, count=tensor.numel(), offset=start)
        return torch.from_numpy(values.copy())


def operations(
    formula: Callable[..., int], args: Any, kwargs: Any, result: Any, value: Callable[[Any], Any] = lambda given: given
) -> int:
    if getattr(formula, "_get_raw", False):
        return int(formula(*map(value, args), **kwargs, out_val=result))
    shapes = torch.utils._pytree.tree_map(lambda one: one.shape if isinstance(one, Tensor) else one, (args, kwargs, result))
    return int(formula(*shapes[0], **shapes[1], out_shape=shapes[2]))


def kernel_bytes(kernel: Kernel, tensors: Sequence[Tensor | None], others: Sequence[Any]) -> list[tuple[int, int]]:
    """Return what each launch of a kernel of ours reads and writes."""
    pairs = [(tensor, access) for tensor, access in zip(tensors, kernel.access, strict=True) if tensor is not None]
    sums = [others[index] for index in kernel.sums if others[index] is not None]
    shared = [other for other in others if isinstance(other, Tensor) and not any(other is total for total in sums)]
    read = sum(map(span_bytes, _distinct([*(tensor for tensor, access in pairs if access != "w"), *shared])))
    written = sum(map(span_bytes, _distinct([tensor for tensor, access in pairs if access != "r"])))
    partial = kernel.partial_bytes(tensors, others)
    if not partial:
        return [(read, written)]
    added = sum(map(span_bytes, sums))
    return [(read, written + partial), (partial + added, added)]


@cache
def _stands_in(file: str) -> bool:
    return any(part in file for part in STAND_INS)


def place() -> str:
    """Return where in this project, or in FSDP2, the present operation is called; empty for a step of autograd."""
    frame = sys._getframe(2)
    while frame is not None:
        folder, _, name = frame.f_code.co_filename.rpartition("/")
        ours = "/verl_memopt/" in frame.f_code.co_filename and name not in ("fused.py", "kernels.py")
        if ours or folder.endswith("_fully_shard"):
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def launches_of(name: str, args: Sequence[Any], kwargs: Any, given: Sequence[Tensor]) -> int:
    if name.startswith(("_foreach", "_fused_adam")):
        lists = [one for one in args if isinstance(one, (list, tuple)) and one and isinstance(one[0], Tensor)]
        chunks = sum(ceil(one.numel() / CHUNK_ELEMENTS) for one in lists[0])
        apart = max(ceil(chunks / CHUNKS), ceil(len(lists[0]) / TENSORS.get(len(lists), 30)))
        return apart + (1 if name == "_foreach_norm" else 0)
    if name == "cat":
        return ceil(len(args[0]) / 128)
    if name == "all_gather_copy_in":
        return ceil(len(args[0]) / TENSORS[2])
    if name.endswith("efficient_attention_backward"):
        # The workspace is filled with zeros. In fp32 the sums of output times gradient are a product, a sum and a copy.
        grad = args[0] if name == "_efficient_attention_backward" else args[0].transpose(1, 2)
        return 2 + 3 * (grad.dtype == torch.float32) + (not grad.is_contiguous())
    repeated = name == "_flash_attention_backward" and args[1].shape[-2] != args[2].shape[-2]
    return KNOWN.get(name, 1) + 2 * repeated


def moved_bytes(name: str, args: Sequence[Any], kwargs: Any, given: Sequence[Tensor], made: Sequence[Tensor]) -> tuple[int, int]:
    """Return the bytes that an operation reads and writes, each tensor of it once."""
    written = list(_distinct(made))
    if name in INDEXED:
        first, *others = (one for one in given if one.dim())
        touched = sum(map(span_bytes, others if name.endswith("_") or name == "index_copy" else written))
        if name == "index_copy":
            return span_bytes(first) + touched, span_bytes(first) + touched
        reads = sum(map(span_bytes, others)) + touched
        return reads, touched
    skipped = {id(written[0])} if name in WRITES_ONLY and written else set()
    out = kwargs.get("out")
    if isinstance(out, Tensor) and not (name == "addmm" and args[0] is out and kwargs.get("beta", 1) != 0):
        skipped.add(id(out))
    read = [one for one in _distinct(given) if id(one) not in skipped]
    if name == "addmm" and kwargs.get("beta", 1) == 0:
        read = [one for one in read if one is not args[0]]
    if name == "copy_":
        read = [one for one in read if one is not args[0]]
    return sum(map(span_bytes, read)), sum(map(span_bytes, written))


def span_bytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor's distinct elements: an expanded one repeats some."""
    count = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        count *= size if stride else 1
    return count * tensor.itemsize


def _distinct(tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    seen = set()
    for one in tensors:
        key = (one.untyped_storage()._cdata, one.storage_offset(), tuple(one.shape), one.dtype)
        if key not in seen:
            seen.add(key)
            yield one


def _root(error: BaseException) -> BaseException:
    while (before := getattr(error, "inner_exception", None) or error.__cause__) is not None:
        error = before
    return error


class _ScheduledError(Exception):
    """Ends a compilation after its scheduler ran."""


ROWS = 64
"""Of the tensors that a function is compiled for. Bytes are in proportion to rows."""


def region_of(
    function: Callable[..., Any], tensors: Sequence[Tensor | None], others: Sequence[Any]
) -> tuple[tuple[Any, ...], int]:
    """Return what a compiled call is compiled for, as :func:`kernels_of` takes it, and its number of rows."""
    rows = next(len(one) for one in tensors if one is not None)
    places = [None if one is None else (one.storage_offset(), id(one)) for one in tensors]
    shapes = tuple(None if one is None else (one.dtype, tuple(one.shape[1:]), places.index(place))
                   for one, place in zip(tensors, places, strict=True))  # fmt: skip
    rest = tuple((one.dtype, tuple(one.shape)) if isinstance(one, Tensor) else one for one in others)
    return (function, shapes, rest), rows


def _inputs(shapes: Sequence[Any], others: Sequence[Any]) -> tuple[list[Tensor | None], list[Any]]:
    tensors: list[Tensor | None] = []
    for shape in shapes:
        first = None if shape is None else shape[2]
        fresh = first is None or first == len(tensors)
        tensors.append(None if shape is None else torch.zeros(ROWS, *shape[1], dtype=shape[0]) if fresh else tensors[first])
    return tensors, [torch.zeros(one[1], dtype=one[0]) if isinstance(one, tuple) else one for one in others]


@cache
def kernels_of(function: Callable[..., Any], shapes: Sequence[Any], others: Sequence[Any]) -> list[tuple[float, float]]:
    """Return the kernels that Inductor's scheduler makes of a function: the bytes that each reads and writes for a row.

    Arguments are as :func:`region_of` returns them. The backend is C++, which fuses as the one of a GPU does or less: a softmax
    over wide rows, one kernel there, is three here.
    """
    tensors, rest = _inputs(shapes, others)
    found: list[tuple[float, float]] = []

    def scheduled(graph: GraphLowering) -> Any:
        graph.init_wrapper_code()
        graph._update_scheduler()
        for node in graph.scheduler.nodes:
            found.append((node.get_read_buffer_sizes() / ROWS, node.get_write_buffer_sizes() / ROWS))
        raise _ScheduledError

    code = function.__code__.replace(co_name=f"{function.__name__}_counted")
    own = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
    off = {"fx_graph_cache": False, "force_disable_caches": True}
    with mock.patch.object(GraphLowering, "codegen", scheduled), torch._inductor.config.patch(off):
        try:
            torch.compile(own, options=NO_TEMPORARIES, dynamic=False)(*tensors, *rest)
        except Exception as error:
            if not isinstance(_root(error), _ScheduledError):
                raise
    return found
