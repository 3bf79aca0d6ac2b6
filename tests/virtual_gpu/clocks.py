"""Finds accesses to memory that no wait puts in order, from what each stream was asked to do and to wait for.

Vector clocks: every operation is a tick of its stream; an event holds what its stream knew when it was recorded; who waits for it
knows as much from then on. Two accesses of one storage, at least one a write, must be known to each other in one direction.
(torch's own sanitizer for CUDA streams, torch/cuda/_sanitizer.py, rests on the same idea, and needs a driver.)
"""

from dataclasses import dataclass, field, replace

HOST = "host"


class RaceError(AssertionError):
    """Two accesses without an order between them: the result depends on which happens first."""


@dataclass(frozen=True)
class Span:
    """A range of one storage: bytes ``low`` to ``high`` of the storage ``key``."""

    key: int
    low: int
    high: int


@dataclass(frozen=True)
class _Access:
    lane: str
    tick: int
    op: str
    low: int
    high: int

    def covers(self, other):
        return self.low <= other.low and other.high <= self.high

    def meets(self, other):
        return self.low < other.high and other.low < self.high


@dataclass
class _Storage:
    owner: str
    writes: list[_Access] = field(default_factory=list)
    reads: list[_Access] = field(default_factory=list)
    before: tuple[_Access, ...] = ()
    """Uses of memory that was let go on the same lane before: this storage may be the same memory."""


class Clocks:
    """What each lane (a stream, or the host) has seen of all others. Lanes are named."""

    def __init__(self):
        self._known = {HOST: {HOST: 0}}
        self._storages = {}
        self._unknown = {}

    def launch(self, lane, op, reads, writes):
        """Record an operation that the host queues on a lane or does itself.

        Args:
            reads, writes: The spans that it touches.

        Raises:
            RaceError: Nothing orders an earlier access of the same bytes before this one.
        """
        known = self._lane(lane)
        if lane != HOST:
            _merge(known, self._known[HOST])
        if self._unknown.get(lane):
            self._unknown[lane] = [a for a in self._unknown[lane] if known.get(a.lane, 0) < a.tick]
        tick = known[lane] = known.get(lane, 0) + 1
        for span in reads:
            storage, access = self._storage(span.key, lane), _Access(lane, tick, op, span.low, span.high)
            self._check(access, storage.writes, "reads")
            storage.reads = [a for a in storage.reads if not (a.lane == lane and access.covers(a))] + [access]
        for span in writes:
            storage, access = self._storage(span.key, lane), _Access(lane, tick, op, span.low, span.high)
            self._check(access, [*storage.writes, *storage.reads], "writes")
            self._check(access, [replace(a, low=span.low, high=span.high) for a in storage.before], "is given the memory of")
            storage.writes = [a for a in storage.writes if not access.covers(a)] + [access]
            storage.reads, storage.before = [a for a in storage.reads if not access.covers(a)], ()

    def _storage(self, key, lane):
        if key not in self._storages:
            self._storages[key] = _Storage(lane)
        return self._storages[key]

    def freed(self, key):
        """Record that a storage has no holder any more. Its lane may reuse the memory at once."""
        storage = self._storages.pop(key, None)
        if storage is None:
            return
        # What the host knows, its next launch on the owner's lane knows as well.
        known = dict(self._lane(storage.owner))
        _merge(known, self._known[HOST])
        uses = [*storage.writes, *storage.reads]
        self._unknown.setdefault(storage.owner, []).extend(a for a in uses if known.get(a.lane, 0) < a.tick)

    def forget(self, key):
        """Forget a storage that is gone."""
        self._storages.pop(key, None)

    def born(self, key, lane):
        """Record the lane on which a storage was allocated."""
        self._storages[key] = _Storage(lane, before=tuple(self._unknown.get(lane, ())))

    def snapshot(self, lane):
        """Return what a lane has seen so far, as an event."""
        return dict(self._lane(lane))

    def wait(self, lane, event):
        """Order everything that a lane does from here on after an event."""
        _merge(self._lane(lane), event)

    def synchronize(self, lane=None):
        """Make the host wait for a lane, or for all."""
        for each in list(self._known) if lane is None else [lane]:
            _merge(self._known[HOST], self._lane(each))

    def _lane(self, lane):
        # A stream that is new knows what the host had done by then.
        return self._known.setdefault(lane, dict(self._known[HOST]))

    def _check(self, access, earlier, verb):
        known = self._known[access.lane]
        for other in earlier:
            if known.get(other.lane, 0) < other.tick and access.meets(other):
                raise RaceError(
                    f"{access.op} on {access.lane} {verb} what {other.op} on {other.lane} uses, and has not waited for it"
                )


def _merge(known, other):
    for lane, tick in other.items():
        if known.get(lane, 0) < tick:
            known[lane] = tick
