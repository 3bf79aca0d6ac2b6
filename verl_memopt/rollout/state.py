"""Which parts of an engine hold memory, and whether its weights are complete."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from verl_memopt.errors import RolloutError

PARTS = ("weights", "kv_cache")


class EngineState:
    """Refuses calls that the engine cannot serve in its present state, and names the call that must come first.

    ``awake -> sleep -> asleep -> wake_up(weights) -> load_weights -> wake_up(kv_cache) -> awake``

    Args:
        whole: The weights were read from a folder, so the engine can generate before the first load.
    """

    def __init__(self, whole: bool) -> None:
        """Start awake."""
        self._awake = set(PARTS)
        self._whole = whole
        self._closed = False

    def check_ready(self) -> None:
        """Check that the engine can generate.

        Raises:
            RolloutError: It is shut down, asleep, or without complete weights.
        """
        self._check_open()
        if self._awake != set(PARTS):
            asleep = " and ".join(part for part in PARTS if part not in self._awake)
            raise RolloutError(f"rollout engine: {asleep} asleep. Call wake_up for each part before generating.")
        if not self._whole:
            raise RolloutError(
                "rollout engine: its weights are incomplete. Load the trainer's weights before generating, or set "
                "actor_rollout_ref.rollout.load_format=auto to read them from the model folder."
            )

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Mark the weights as incomplete until the body, which loads them, ends without an error.

        Raises:
            RolloutError: The weights are asleep.
        """
        self._check_open()
        if "weights" not in self._awake:
            raise RolloutError('rollout engine: its weights are asleep. Call wake_up("weights") before loading.')
        self._whole = False
        yield
        self._whole = True

    def slept(self, keeps_weights: bool = False) -> None:
        """Record a sleep. An engine may be put to sleep again.

        Args:
            keeps_weights: The weights are kept elsewhere, and are complete as soon as they wake.
        """
        self._check_open()
        self._awake.clear()
        self._whole = self._whole and keeps_weights

    def waking(self, part: str) -> bool:
        """Record that a part wakes, and return False if it was awake.

        Raises:
            RolloutError: The part is unknown, or the KV cache wakes before the weights.
        """
        self._check_open()
        if part not in PARTS:
            raise RolloutError(f"rollout engine: wake_up({part!r}) is unknown. Use one of {', '.join(PARTS)}.")
        if part == "kv_cache" and "weights" not in self._awake:
            raise RolloutError('rollout engine: wake_up("kv_cache") before the weights. Call wake_up("weights") first.')
        was_asleep = part not in self._awake
        self._awake.add(part)
        return was_asleep

    def stays_asleep(self, part: str) -> None:
        """Undo :meth:`waking`, because the part could not wake."""
        self._awake.discard(part)

    def close(self) -> bool:
        """Record the shutdown, and return False if there was one before."""
        was_open, self._closed = not self._closed, True
        return was_open

    def is_awake(self, part: str) -> bool:
        """Return whether a part holds memory now."""
        return part in self._awake

    @property
    def asleep(self) -> bool:
        """True if no part is awake."""
        return not self._awake

    def _check_open(self) -> None:
        if self._closed:
            raise RolloutError("rollout engine: it was shut down. Build a new one.")
