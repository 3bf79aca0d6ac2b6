"""Which parts must be on the device in which phase, in one table, and the moves that make it so."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from verl_memopt.distributed.device import empty_cache
from verl_memopt.memory.param_offload_torch import OffloadedParams
from verl_memopt.memory.streamed_params_torch import StreamedParams
from verl_memopt.observe.phase import MIB

logger = logging.getLogger(__name__)


POLICY = "policy params"
REFERENCE = "reference params"
CRITIC = "critic params"
REWARD_MODEL = "reward model params"
"""Of the model that scores: a reward model, or a recipe's frozen model."""

NEEDS: dict[str, frozenset[str]] = {
    "gen": frozenset(),
    "testing": frozenset(),
    "reward": frozenset({REWARD_MODEL}),
    "old_log_prob": frozenset({POLICY}),
    "ref": frozenset({REFERENCE}),
    "values": frozenset({CRITIC}),
    "update_critic": frozenset({CRITIC}),
    "update_actor": frozenset({POLICY}),
    "update_weights": frozenset({POLICY}),
    "sync_ref": frozenset(),
    "save_checkpoint": frozenset(),
    "load_checkpoint": frozenset({POLICY}),
    "load_critic": frozenset({CRITIC}),
}
"""Phase -> the parts that must be on the device in it. Every other part that may rest on the host does.

The engine's weights and its KV cache are not here: the engine sleeps and wakes through methods of its own. Optimizer state is not
here either: it is needed inside an optimizer step only, never for a whole phase. A checkpoint is written from where parts rest,
and the reference follows the policy where both rest. A part that streams is never there for a whole phase: its blocks come and
go in its own pass.
"""


class Residency:
    """Moves the parts of one worker between the phases of a step.

    A part that the next phase also needs stays. Parts that it does not need leave before those that it needs come, so the two are
    never on the device together. A move that fails leaves every part wholly in one place.
    """

    def __init__(self, device: torch.device) -> None:
        """Start without parts."""
        self._device = device
        self._parts: list[tuple[OffloadedParams | StreamedParams, frozenset[str]]] = []
        self._turns: list[tuple[OffloadedParams, OffloadedParams]] = []
        self._logged: set[str] = set()

    def add(self, part: OffloadedParams | StreamedParams, also: Iterable[str] = ()) -> None:
        """Add a part. It is needed where the table says its name, or one of the names in ``also``."""
        self._parts.append((part, frozenset({part.name, *also})))

    def take_turns(self, one: OffloadedParams, other: OffloadedParams) -> None:
        """Note that two parts use the same storages. Where a phase needs the one that is away, it takes over from the other."""
        self._turns += [(one, other), (other, one)]

    def find(self, name: str) -> OffloadedParams | StreamedParams | None:
        """Return the part of that name; None where it never leaves the device."""
        return next((part for part, _ in self._parts if part.name == name), None)

    def rest(self) -> int:
        """Move every part to the host, and return the bytes moved."""
        return self._leave(frozenset())

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Put exactly the parts that the phase needs on the device. Those that the next phase needs too stay afterwards.

        The bytes moved are logged the first time a phase moves any.
        """
        needed = NEEDS[name]
        # First, while the other part is still on the device: the two use the same storages, and one takes them over from the
        # other.
        exchanged = sum(one.take_over(other) for one, other in self._turns if one.name in needed and other.on_device)
        left = self._leave(needed)
        arrived = exchanged + sum(part.to_device() for part, names in self._parts if names & needed)
        if (left or arrived) and name not in self._logged:
            self._logged.add(name)
            logger.info("%s: %.1f MiB to the device, %.1f MiB off it, from now on once a step", name, arrived / MIB, left / MIB)
        yield

    def _leave(self, needed: frozenset[str]) -> int:
        left = sum(part.to_host() for part, names in self._parts if not names & needed)
        if left:
            # The freed memory must be available to the engine too, which allocates without this process's allocator.
            empty_cache(self._device)
        return left
