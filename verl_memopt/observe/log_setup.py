"""Rank-aware logging of a process: one handler on standard error, other packages quiet."""

from __future__ import annotations

import logging
import os
import warnings

NOISY = ("transformers", "ray", "matplotlib", "PIL", "urllib3", "httpx", "httpcore", "filelock", "asyncio", "tensorboard")
"""Packages that log warnings and errors only."""


class _StandardError(logging._StderrHandler):  # type: ignore[name-defined]
    """Writes to the present standard error, so that a progress bar or a test that replaces it receives the lines."""


def is_set_up() -> bool:
    """Return whether :func:`setup_logging` was called in this process."""
    return any(isinstance(handler, _StandardError) for handler in logging.getLogger().handlers)


def setup_logging(rank: int | None = None, level: int = logging.INFO) -> None:
    """Log to standard error, each line with time, rank and level. A second call replaces the first.

    Args:
        rank: Rank of a worker. None = the driver. Ranks above 0 log warnings only.
        level: Lowest level of this project's messages. Other packages log warnings only.
    """
    root = logging.getLogger()
    for handler in [handler for handler in root.handlers if isinstance(handler, _StandardError)]:
        root.removeHandler(handler)
    handler = _StandardError()
    place = "driver" if rank is None else f"rank {rank}"
    handler.setFormatter(logging.Formatter(f"%(asctime)s {place} %(levelname)s %(name)s: %(message)s", "%H:%M:%S"))
    root.addHandler(handler)
    root.setLevel(logging.WARNING)
    logging.getLogger("verl_memopt").setLevel(level if not rank else max(level, logging.WARNING))
    for name in NOISY:
        logging.getLogger(name).setLevel(logging.WARNING)
    # A start of vLLM logs a dozen warnings about settings that are intended. The engine sets vLLM's loggers when it starts.
    logging.getLogger("vllm").setLevel(logging.ERROR)
    # transformers reads these variables when it is imported.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    logging.captureWarnings(True)
    warnings.filterwarnings("ignore", category=FutureWarning)
