"""Errors that a user can cause or meet: one class per kind, each with its exit code.

Every message follows one pattern: the key, file or row; what is wrong with it; how to correct it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_CONTROL = {**{number: f"\\x{number:02x}" for number in (*range(32), *range(127, 160)) if chr(number) not in "\n\t"}}


def printable(text: str) -> str:
    """Replace control characters, which could steer a terminal, by their codes."""
    return text.translate(_CONTROL)


class UserError(Exception):
    """An error that the user can correct. The command line prints its message without a traceback.

    Control characters in a message, which may quote a file, a model or a service, are printed as codes.
    """

    exit_code = 2

    def __init__(self, *texts: str) -> None:
        super().__init__(*map(printable, map(str, texts)))


class Stopped(Exception):  # noqa: N818 - not an error: the run ends because a stop was requested
    """A stop was requested in the middle of work that can be repeated. The user never sees this exception."""


class ConfigError(UserError):
    """A setting is unknown, has the wrong type, conflicts with another, or cannot work on this machine."""


class DataError(UserError):
    """A dataset file, row or column is missing, malformed or too long."""


class StreamEndedError(DataError):
    """A stream that can be read only once has no full batch left. The run ends, and keeps what it has learned."""


class RewardError(UserError):
    """A reward function is missing, raised, hung, or returned something that is not a score."""

    exit_code = 1


class TeacherError(UserError):
    """A server that runs a teacher gives no answer, or another one than log-probs."""

    exit_code = 1


class AgentError(UserError):
    """An environment or a tool is missing, does not load, or has the wrong form."""

    exit_code = 1


class RolloutError(UserError):
    """The rollout engine is unavailable, asleep, or its log-probs are too far from the trainer's."""

    exit_code = 1


class TrainingError(UserError):
    """Training cannot continue: gradient norms are not finite, an update has damaged the weights, or no group has a signal."""

    exit_code = 1


class WorkerError(UserError):
    """A worker raised an error or died. The message carries the worker's own traceback."""

    exit_code = 1


@dataclass(frozen=True)
class Way:
    """A change of settings that frees memory.

    ``text`` is a sentence without a full stop, ``settings`` are (key, value) pairs, and ``cost`` is a short phrase.
    """

    text: str
    settings: tuple[tuple[str, Any], ...]
    cost: str = ""
    enough: bool = False
    """This change alone probably frees enough memory."""


@dataclass(frozen=True)
class OutOfMemory:
    """The phase in which device memory ran out, with the sizes. An unknown size is None. Model loading is phase ``init``."""

    phase: str = ""
    asked_bytes: int | None = None
    held_bytes: int | None = None
    limit_bytes: int | None = None


class DeviceMemoryError(UserError):
    """A phase needs more memory than the device, or the limit set for it, has. ``ways`` lists what to try first at the front."""

    exit_code = 1

    def __init__(self, message: str, figures: OutOfMemory = OutOfMemory(), ways: Sequence[Way] = ()) -> None:
        super().__init__(message)
        self.figures, self.ways = figures, tuple(ways)


class HostMemoryError(ConfigError):
    """The host, or the limit set for it, has no room for offloaded tensors. ``kind`` says what they are, such as activations."""

    def __init__(self, message: str, kind: str) -> None:
        super().__init__(message)
        self.kind = kind

    def __reduce__(self) -> tuple[type[HostMemoryError], tuple[str, str]]:
        # The error travels from a worker to the driver, and pickle would call the class with the message alone.
        return HostMemoryError, (str(self), self.kind)


class CheckpointError(UserError):
    """A checkpoint could not be written, or no intact checkpoint could be read."""

    exit_code = 1


class UnreadableCheckpointError(CheckpointError):
    """A checkpoint passed its checks but could not be loaded."""

    def __init__(self, message: str, step: int, fault: str) -> None:
        super().__init__(message)
        self.step = step
        self.fault = fault
