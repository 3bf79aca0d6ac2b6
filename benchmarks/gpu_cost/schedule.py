"""A model of when the operations of a counted update run: seconds, how busy the device is, and what bounds each phase.

One host thread issues steps in the order of the program. An operation starts once it is issued, once its stream has done what
came before and has reached the events that it waits for, and once its engine is free: kernels share one engine, and so do copies
of one direction. The host itself runs ahead, except where the program makes it wait.
"""

from __future__ import annotations

from bisect import insort
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

COMPUTE, TO_DEVICE, TO_HOST = "compute", "to device", "to host"
HOST, COPIES = "host", "copies"
PRODUCT, ATTENTION, OTHER = "product", "attention", "other"


@dataclass(frozen=True)
class Work:
    num_bytes: int
    flops: int = 0
    attends: bool = False

    @property
    def kind(self) -> str:
        return ATTENTION if self.attends else PRODUCT if self.flops else OTHER


@dataclass(frozen=True, kw_only=True)
class Step:
    """Something that the host does. ``inside``: in a block of the model. ``times``: it stands for so many (:func:`deepened`)."""

    phase: str = ""
    inside: bool = False
    times: float = 1.0


@dataclass(frozen=True)
class Launch(Step):
    """Kernels, or one copy, that the host queues on a stream. Kernels with the same ``graph`` belong to one replay of a graph."""

    lane: str
    engine: str
    kernels: tuple[Work, ...]
    graph: int | None = None
    pageable: bool = False
    blocks: bool = False
    """The host waits for it."""


@dataclass(frozen=True)
class Mark(Step):
    """An event on a stream. Its name is unique."""

    lane: str
    event: int


@dataclass(frozen=True)
class Wait(Step):
    """A stream, or the host, waits for an event."""

    lane: str
    event: int


@dataclass(frozen=True)
class Synchronize(Step):
    """The host waits for a stream. None = for all."""

    lane: str | None = None


@dataclass(frozen=True)
class Python(Step):
    """Python calls of the host between operations."""

    calls: int


@dataclass(frozen=True)
class Machine:
    """Rates in bytes, FLOPs and seconds. The fractions say what part of the stated peak kernels reach."""

    peak: float
    bandwidth: float
    bus: float
    product_fraction: float
    attention_fraction: float
    bandwidth_fraction: float
    call_seconds: float
    """Of the host, for each Python call, with the work of torch in C++ between two calls, such as views."""
    launch_seconds: float
    """Of the host, to queue one kernel or one copy."""
    event_seconds: float = 0.0
    """Of the host, to record an event or to queue a wait, with its share of the change to another stream."""
    least_seconds: float = 0.0
    """Of a kernel on the device."""
    copy_seconds: float = 0.0
    """Of a copy besides its bytes."""
    pageable_fraction: float = 0.25
    replay_seconds: float = 12e-6
    """Of the host, to replay a graph."""
    gap_seconds: float = 1e-6
    """Of the device, between two kernels of a graph."""

    def seconds(self, kernel: Work) -> float:
        fraction = {PRODUCT: self.product_fraction, ATTENTION: self.attention_fraction, OTHER: 1.0}[kernel.kind]
        computing, moving = kernel.flops / (self.peak * fraction), kernel.num_bytes / (self.bandwidth * self.bandwidth_fraction)
        return max(computing, moving, self.least_seconds)

    def device_seconds(self, launch: Launch) -> float:
        if launch.engine == COMPUTE:
            return sum(map(self.seconds, launch.kernels))
        rate = self.bus * (self.pageable_fraction if launch.pageable else 1.0)
        return sum(self.copy_seconds + kernel.num_bytes / rate for kernel in launch.kernels)


@dataclass
class Outcome:
    """Seconds. ``kernels``: in which a kernel runs. ``copies``: of all copies. ``bare_copies``: in which copies run alone."""

    wall: float = 0.0
    kernels: float = 0.0
    copies: float = 0.0
    bare_copies: float = 0.0
    host: float = 0.0
    """In which the host works and does not wait."""
    launches: float = 0.0
    flops: float = 0.0
    by_kind: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    phases: defaultdict[str, defaultdict[str, float]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(float)))
    """Phase -> what the computing stream did: ``compute``, or waiting for the ``host`` or for ``copies``."""

    def bound(self) -> str:
        """Return what the computing stream spends most time with."""
        return max((COMPUTE, HOST, COPIES), key=lambda what: sum(split[what] for split in self.phases.values()))


class _Engine:
    """Runs one operation at a time. An operation may go into a gap that earlier ones have left."""

    def __init__(self) -> None:
        self.spans: list[tuple[float, float]] = []

    def run(self, ready: float, seconds: float) -> float:
        start, place = ready, len(self.spans)
        while place and self.spans[place - 1][1] > ready:
            place -= 1
        for first, last in self.spans[place:]:
            if first - start >= seconds:
                break
            start = max(start, last)
        insort(self.spans, (start, start + seconds))
        return start


def simulate(steps: Sequence[Step], machine: Machine) -> Outcome:
    found, engines = Outcome(), {name: _Engine() for name in (COMPUTE, TO_DEVICE, TO_HOST)}
    host, lanes, events = 0.0, defaultdict[str, float](float), dict[int, float]()
    before = 0.0  # end of what the computing engine did last
    phase = ""
    for step in replays_joined(steps):
        issuing = step.times * issue_seconds(step, machine)
        host, found.host = host + issuing, found.host + issuing
        match step:
            case Mark():
                events[step.event] = max(lanes[step.lane], host)
            case Wait() if step.lane == HOST:
                host = max(host, events.get(step.event, 0.0))
            case Wait():
                lanes[step.lane] = max(lanes[step.lane], events.get(step.event, 0.0))
            case Synchronize():
                host = max(host, *(end for name, end in lanes.items() if step.lane in (None, name)), 0.0)
            case Launch():
                phase = step.phase
                gaps = machine.gap_seconds * len(step.kernels) if step.graph is not None else 0.0
                seconds = step.times * (machine.device_seconds(step) + gaps)
                start = engines[step.engine].run(max(host, lanes[step.lane]), seconds)
                lanes[step.lane] = start + seconds
                found.launches += step.times * len(step.kernels)
                if step.engine == COMPUTE:
                    for kernel in step.kernels:
                        found.by_kind[kernel.kind] += step.times * machine.seconds(kernel)
                        found.flops += step.times * kernel.flops
                    split, idle = found.phases[phase], max(start - before, 0.0)
                    late = min(idle, max(host - before, 0.0))
                    for what, part in ((COMPUTE, seconds), (HOST, late), (COPIES, idle - late)):
                        split[what] += part
                    before = max(before, start + seconds)
                if step.blocks:
                    host = max(host, lanes[step.lane])
    found.wall = max(host, *lanes.values(), 0.0)
    found.phases[phase][COPIES if host < found.wall else HOST] += found.wall - before
    kernels, copies = engines[COMPUTE].spans, [*engines[TO_DEVICE].spans, *engines[TO_HOST].spans]
    found.kernels, found.copies = length(kernels), length(copies)
    found.bare_copies = length(joined([*kernels, *copies])) - found.kernels
    return found


def issue_seconds(step: Step, machine: Machine) -> float:
    """Return what the host needs for a step, without waiting."""
    match step:
        case Python():
            return step.calls * machine.call_seconds
        case Launch():
            replayed = step.graph is not None
            return machine.replay_seconds if replayed else machine.launch_seconds * len(step.kernels)
        case Mark() | Wait() if step.lane != HOST:
            return machine.event_seconds
    return 0.0


def deepened(few: Sequence[Step], many: Sequence[Step], layers: tuple[int, int], wanted: int, machine: Machine) -> list[Step]:
    """Return the steps of ``many`` for a model of ``wanted`` layers, from those of models of ``layers`` layers.

    Each kind of step of each phase, in blocks and outside, stands for as many as a straight line through both says.
    """
    if layers[0] == layers[1]:
        return list(many)
    costs = [defaultdict[object, float](float), defaultdict[object, float](float)]
    for cost, steps in zip(costs, (few, many), strict=True):
        for step in steps:
            cost[_sort(step)] += _amount(step, machine)
    further = (wanted - layers[1]) / (layers[1] - layers[0])
    times = {sort: max(1 + further * (1 - costs[0][sort] / amount), 0.0) for sort, amount in costs[1].items() if amount}
    return [replace(step, times=times.get(_sort(step), 1.0)) for step in many]


def _sort(step: Step) -> object:
    if not isinstance(step, Launch):
        return type(step), step.phase, step.inside
    kinds = frozenset(kernel.kind for kernel in step.kernels)
    return Launch, step.phase, step.inside, step.engine, kinds, step.graph is not None


def _amount(step: Step, machine: Machine) -> float:
    match step:
        case Python():
            return step.calls
        case Launch():
            return machine.device_seconds(step)
    return 1.0


def joined(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Join spans that meet: what runs at the same time counts once."""
    whole: list[tuple[float, float]] = []
    for start, stop in sorted(spans):
        if whole and start <= whole[-1][1]:
            whole[-1] = whole[-1][0], max(whole[-1][1], stop)
        else:
            whole.append((start, stop))
    return whole


def length(spans: Iterable[tuple[float, float]]) -> float:
    return sum(stop - start for start, stop in spans)


def replays_joined(steps: Sequence[Step]) -> list[Step]:
    """Return the same steps, where the kernels of one replay are one step."""
    made: list[Step] = []
    for step in steps:
        last = made[-1] if made else None
        if isinstance(step, Launch) and isinstance(last, Launch) and step.graph is not None and last.graph == step.graph:
            made[-1] = replace(last, kernels=(*last.kernels, *step.kernels))
        else:
            made.append(step)
    return made
