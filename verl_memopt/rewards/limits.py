"""What one reward process and everything it starts may take: memory, processor time, open files."""

from __future__ import annotations

import resource
from dataclasses import dataclass
from typing import Self

from verl_memopt.config.schema import CustomReward

KEY = "custom_reward_function"

CPU_PER_SECOND = 32
"""Processor seconds a row may take for each second of its time limit, unless it is set."""


@dataclass(frozen=True)
class Limits:
    memory_gb: float
    """Most GiB of one process, and of a reward process with all that it starts."""
    cpu_seconds: float
    """Most processor time of one row, all threads and processes together."""
    open_files: int
    """Most open files of one process."""

    @classmethod
    def of(cls, custom: CustomReward) -> Self:
        """Return the limits that the settings ask for."""
        given = custom.cpu_seconds
        return cls(custom.memory_gb, CPU_PER_SECOND * custom.timeout_seconds if given is None else given, custom.open_files)

    @property
    def memory_bytes(self) -> int:
        return int(self.memory_gb * 2**30)

    def bind_process(self) -> None:
        """Set the limits that the kernel holds for one process, here and in what this process starts from now on."""
        for kind, most in ((resource.RLIMIT_DATA, self.memory_bytes), (resource.RLIMIT_NOFILE, self.open_files)):
            hard = resource.getrlimit(kind)[1]
            most = most if hard == resource.RLIM_INFINITY else min(most, hard)
            resource.setrlimit(kind, (most, most))

    def broken_by_memory(self) -> str:
        """Return how to go on after a process found no memory, for messages."""
        return f"{KEY}.memory_gb={self.memory_gb:g} is the most a reward process may hold; raise it if the function needs more."
