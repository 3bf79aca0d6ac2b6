"""Streams for real CPU tensors on which a copy happens as late as a GPU may leave it.

A copy on a side stream happens when somebody waits for it, and reads its source then. What is read too early is stale, what is
overwritten too early is copied wrong, and the numbers of a run say so. A copy from device to host on the computing stream is in
order there, but the host sees it only after ``synchronize``. Inside :func:`late_streams` the CPU is such a device.
"""

import contextlib
import weakref
from dataclasses import dataclass

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from verl_memopt.distributed import device as device_room
from verl_memopt.observe import byte_tracker

copy_ = torch.ops.aten.copy_.default


@dataclass(frozen=True)
class Event:
    """A point in a stream, after everything that was queued until ``place``."""

    stream: object
    place: int


class LateStream:
    """A stream whose copies wait in a queue. The computing stream is one with an empty queue."""

    def __init__(self, streams, computes=False):
        self.device = torch.device("cpu")
        self._streams, self._computes = streams, computes
        self._line = []
        self._done = 0

    def record_event(self):
        return Event(self, len(self._line))

    def wait_event(self, event):
        if self._computes:
            event.stream.run_to(event.place)
        else:
            self._line.append(lambda: event.stream.run_to(event.place))

    def wait_stream(self, other):
        self.wait_event(other.record_event())

    def synchronize(self):
        """Make the host wait. Nothing is left to do, because the computing stream has waited for everything."""
        assert self._computes, "the host waits for the computation alone"

    def queue(self, target, source):
        """Queue a copy. Only the holders of the tensors keep them alive, as on a GPU."""
        ends = weakref.ref(target.untyped_storage()), weakref.ref(source.untyped_storage())
        views = [(t.dtype, t.shape, t.stride(), t.storage_offset()) for t in (target, source)]

        def copy():
            storages = [end() for end in ends]
            assert all(storage is not None for storage in storages), "memory was let go before its copy was waited for"
            (into, out) = (_view(storage, *view) for storage, view in zip(storages, views, strict=True))
            into.copy_(out)

        self._line.append(copy)
        self._streams.copies += 1

    def run_to(self, place):
        """Run the queued copies up to a place."""
        while self._done < place:
            self._done += 1
            self._line[self._done - 1]()
            self._line[self._done - 1] = None

    @property
    def length(self):
        return len(self._line)


class LateStreams:
    """The stream functions of torch.cuda. ``copies`` counts queued copies."""

    def __init__(self):
        self.copies = 0
        self._computing = LateStream(self, computes=True)
        self._all = weakref.WeakSet()
        self._unseen = []

    def Stream(self, device):  # noqa: N802 - torch's name
        stream = LateStream(self)
        self._all.add(stream)
        return stream

    def current_stream(self, device):
        return self._computing

    @contextlib.contextmanager
    def stream(self, stream):
        with _Queueing(stream):
            yield

    def synchronize(self, device=None):
        """Run everything that is queued, and show the host what came from the device."""
        for stream in list(self._all):
            stream.run_to(stream.length)
        for deliver in self._unseen:
            deliver()
        self._unseen.clear()

    def hide_from_host(self, target, source):
        """Hide a copy to the host until the host has waited for it."""
        value = source.clone()
        self._unseen.append(lambda: target.copy_(value))


class _Queueing(TorchDispatchMode):
    """Queues the copies of its body instead of making them. Other work of the body runs at once, after the copies before it."""

    def __init__(self, stream):
        super().__init__()
        self._stream = stream

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is not copy_:
            if not (func.is_view or func._schema.name.startswith("aten::empty")):
                self._stream.run_to(self._stream.length)
            return func(*args, **(kwargs or {}))
        self._stream.queue(args[0], args[1])
        return args[0]


class _Hiding(TorchDispatchMode):
    """Hides from the host the result of a copy that does not wait."""

    def __init__(self, streams):
        super().__init__()
        self._streams = streams

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        non_blocking = func is copy_ and ((len(args) > 2 and args[2]) or (kwargs or {}).get("non_blocking"))
        if non_blocking and _is_host(args[0]) and not _is_host(args[1]):
            args[0].fill_(0)
            self._streams.hide_from_host(args[0], args[1])
            return args[0]
        return func(*args, **(kwargs or {}))


def _is_host(tensor):
    return tensor.untyped_storage()._cdata in byte_tracker._declared


def _view(storage, dtype, shape, stride, offset):
    return torch.empty(0, dtype=dtype).set_(storage, offset, shape, stride)


@contextlib.contextmanager
def late_streams():
    """Turn the CPU into a device with late streams in the body. Yields LateStreams."""
    streams = LateStreams()
    device_room.STREAMS["cpu"] = streams
    try:
        with _Hiding(streams):
            yield streams
    finally:
        del device_room.STREAMS["cpu"]
