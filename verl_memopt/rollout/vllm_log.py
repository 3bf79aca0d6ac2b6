"""What vLLM logs: errors alone while an engine starts, and warnings afterwards. A log level that the user sets wins."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

LEVEL_VARIABLE = "VLLM_LOGGING_LEVEL"
"""Environment variable with the level of vLLM's loggers. A user who sets it decides, and nothing here changes a level."""

NOISY_LOGGERS = ("vllm.renderers.base", "vllm.model_executor.model_loader.reload.layerwise")
"""Loggers that warn of a missing tokenizer, which is not needed, and of tied weights, which are intended."""


@contextmanager
def quiet_start() -> Iterator[None]:
    """Show vLLM's errors alone while an engine starts, and its warnings afterwards, except those of ``NOISY_LOGGERS``."""
    if LEVEL_VARIABLE in os.environ:
        yield
        return
    os.environ[LEVEL_VARIABLE] = logging.getLevelName(logging.ERROR)
    _set_level(logging.ERROR)
    try:
        yield
    finally:
        del os.environ[LEVEL_VARIABLE]
        _set_level(logging.WARNING)
        for name in NOISY_LOGGERS:
            logging.getLogger(name).setLevel(logging.ERROR)


def _set_level(level: int) -> None:
    """Set the level of vLLM's loggers and of the handler that vLLM created. Other handlers stay unchanged."""
    vllm_logger = logging.getLogger("vllm")
    vllm_logger.setLevel(level)
    for handler in vllm_logger.handlers:
        if type(handler.formatter).__module__.startswith("vllm"):
            handler.setLevel(level)
