"""Which parts of an engine hold memory now, and whether its weights can be trusted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from verl_memopt.errors import RolloutError

PARTS = ("weights", "kv_cache")


class EngineState:
    """Refuses what an engine cannot do now, and says what has to come first.

    ``awake -> sleep -> asleep -> wake_up(weights) -> load_weights -> wake_up(kv_cache) -> awake``
    """

    def __init__(self, whole: bool) -> None:
        """whole: the weights were read from a folder, so that generating makes sense before the first load."""
        self._awake = set(PARTS)
        self._whole = whole
        self._closed = False

    def check_ready(self) -> None:
        """Raises RolloutError unless the engine can generate."""
        self._check_open()
        if self._awake != set(PARTS):
            asleep = " and ".join(part for part in PARTS if part not in self._awake)
            raise RolloutError(f"rollout engine: {asleep} asleep. Call wake_up for each part before generating.")
        if not self._whole:
            raise RolloutError(
                "rollout engine: it has no whole weights. Load the trainer's weights before generating, or set "
                "actor_rollout_ref.rollout.load_format=auto to read them from the model folder."
            )

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Around a load: the weights count as whole only when it ends without an error."""
        self._check_open()
        if "weights" not in self._awake:
            raise RolloutError('rollout engine: its weights are asleep. Call wake_up("weights") before loading.')
        self._whole = False
        yield
        self._whole = True

    def slept(self, keeps_weights: bool = False) -> None:
        """Records a sleep; an engine that sleeps already may be sent to sleep again.

        keeps_weights: they rest elsewhere, and are whole again as soon as they wake.
        """
        self._check_open()
        self._awake.clear()
        self._whole = self._whole and keeps_weights

    def waking(self, part: str) -> bool:
        """Records that a part wakes; False when it was awake. Errors: RolloutError for an unknown part or a wrong order."""
        self._check_open()
        if part not in PARTS:
            raise RolloutError(f"rollout engine: wake_up({part!r}) is unknown. Use one of {', '.join(PARTS)}.")
        if part == "kv_cache" and "weights" not in self._awake:
            raise RolloutError('rollout engine: wake_up("kv_cache") before the weights. Call wake_up("weights") first.')
        was_asleep = part not in self._awake
        self._awake.add(part)
        return was_asleep

    def stays_asleep(self, part: str) -> None:
        """Takes :meth:`waking` back: the part could not wake."""
        self._awake.discard(part)

    def close(self) -> bool:
        """Records the shutdown; False when there was one before."""
        was_open, self._closed = not self._closed, True
        return was_open

    def is_awake(self, part: str) -> bool:
        """Whether a part holds memory now."""
        return part in self._awake

    @property
    def asleep(self) -> bool:
        """Whether nothing is awake."""
        return not self._awake

    def _check_open(self) -> None:
        if self._closed:
            raise RolloutError("rollout engine: it was shut down. Build a new one.")
