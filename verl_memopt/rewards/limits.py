"""Limits of one reward process and of everything it starts: memory, processor time, open files."""

from __future__ import annotations

import resource
from dataclasses import dataclass
from typing import Self

from verl_memopt.config.schema import CustomReward

KEY = "custom_reward_function"

CPU_PER_SECOND = 32
"""Default limit: processor seconds of a row for each second of its time limit."""


@dataclass(frozen=True)
class Limits:
    """Limits of one reward process."""

    memory_gb: float
    """Largest GiB of one process, and of a reward process together with all that it starts."""
    cpu_seconds: float
    """Largest processor time of one row, over all threads and processes."""
    open_files: int
    """Largest number of open files of one process."""

    @classmethod
    def of(cls, custom: CustomReward) -> Self:
        """Return the limits of the settings."""
        cpu_seconds = CPU_PER_SECOND * custom.timeout_seconds if custom.cpu_seconds is None else custom.cpu_seconds
        return cls(custom.memory_gb, cpu_seconds, custom.open_files)

    @property
    def memory_bytes(self) -> int:
        """``memory_gb`` in bytes."""
        return int(self.memory_gb * 2**30)

    def bind_process(self) -> None:
        """Set the limits that the kernel enforces per process, for this process and all that it starts from now on."""
        for kind, limit in ((resource.RLIMIT_DATA, self.memory_bytes), (resource.RLIMIT_NOFILE, self.open_files)):
            hard = resource.getrlimit(kind)[1]
            limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
            resource.setrlimit(kind, (limit, limit))

    def broken_by_memory(self) -> str:
        """Return advice for a process that ran out of memory, for messages."""
        return f"{KEY}.memory_gb={self.memory_gb:g} limits the memory of a reward process. Raise it if the function needs more."
