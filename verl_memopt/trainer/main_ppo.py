"""``python -m verl_memopt.trainer.main_ppo``: the training entry under verl's module name. It takes the same overrides."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from verl_memopt.errors import UserError
from verl_memopt.run.interrupts import SignalWatch


def main(argv: Sequence[str] | None = None) -> int:
    """Run the training entry and return its exit code. A user's error is printed as its message, without a traceback.

    Args:
        argv: The arguments. None takes them from the command line, and then also watches for signals until the process ends.
    """
    watch = SignalWatch() if argv is None else None
    try:
        from verl_memopt.cli import run

        return run(argv, prog="python -m verl_memopt.trainer.main_ppo")
    except UserError as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return error.exit_code
    finally:
        if watch is not None:
            watch.hold_while_ending()


if __name__ == "__main__":
    sys.exit(main())
