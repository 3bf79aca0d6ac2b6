"""Ctrl-C and termination: the first asks the run to stop after the present step, the second stops it at once."""

from __future__ import annotations

import logging
import signal
from types import FrameType, TracebackType
from typing import Any

logger = logging.getLogger(__name__)

EXIT_CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}


class Interrupts:
    """Catches SIGINT and SIGTERM while it is entered; ``exit_code`` is set once one has come.

    at_once: the first one too raises KeyboardInterrupt, for work that has nothing to finish.
    """

    def __init__(self, at_once: bool = False) -> None:
        self._at_once = at_once
        self.exit_code: int | None = None
        self._before: dict[int, Any] = {}

    @property
    def asked(self) -> bool:
        return self.exit_code is not None

    def __enter__(self) -> Interrupts:
        self._before = {number: signal.signal(number, self._caught) for number in EXIT_CODES}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _caught(self, number: int, frame: FrameType | None) -> None:
        stop = self._at_once or self.asked
        self.exit_code = self.exit_code or EXIT_CODES[signal.Signals(number)]
        if stop:
            raise KeyboardInterrupt
        logger.warning("%s: stopping after this step, then saving; once more stops at once", signal.Signals(number).name)
