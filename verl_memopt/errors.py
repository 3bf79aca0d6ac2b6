"""The errors a user can cause or meet, one class a kind, each with the exit code a run ends with.

Every message follows one pattern: the key, file or row; what is wrong with it; the way out.
"""


class UserError(Exception):
    """Something the user can mend. The command line prints the message alone, without a traceback."""

    exit_code = 2


class ConfigError(UserError):
    """A setting is unknown, of the wrong type, in conflict with another, or impossible on this machine."""


class DataError(UserError):
    """A dataset file, row or column is missing, malformed or too long."""


class RewardError(UserError):
    """A reward function is missing, raised, hung, or returned something that is no score."""

    exit_code = 1


class RolloutError(UserError):
    """The rollout engine is unavailable, asleep, or its log-probs are too far from the trainer's."""

    exit_code = 1


class WorkerError(UserError):
    """A worker raised or died. The message carries the worker's own traceback."""

    exit_code = 1


class DeviceMemoryError(UserError):
    """The device, or the limit set for it, has no room for a phase.

    phase: where it ran out. asked_bytes: size of the allocation that was refused. held_bytes: bytes held at that moment.
    limit_bytes: the most there may be. A figure that is not known is None.
    """

    exit_code = 1

    def __init__(
        self,
        message: str,
        phase: str = "",
        asked_bytes: int | None = None,
        held_bytes: int | None = None,
        limit_bytes: int | None = None,
    ) -> None:
        super().__init__(message)
        self.phase = phase
        self.asked_bytes = asked_bytes
        self.held_bytes = held_bytes
        self.limit_bytes = limit_bytes


class CheckpointError(UserError):
    """A checkpoint could not be written, or none that is whole could be read."""

    exit_code = 1


class UnreadableCheckpointError(CheckpointError):
    """A checkpoint looked whole and could not be loaded. step: its step. fault: what the loader said."""

    def __init__(self, message: str, step: int, fault: str) -> None:
        super().__init__(message)
        self.step = step
        self.fault = fault
