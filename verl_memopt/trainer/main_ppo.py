"""``python -m verl_memopt.trainer.main_ppo``: the training entry under verl's module name. It takes the same overrides."""

import sys
from collections.abc import Sequence

from verl_memopt.cli import build_parser, guarded, run


def main(argv: Sequence[str] | None = None) -> int:
    """Run the training entry and return its exit code. A user's error is printed as its message, without a traceback.

    Args:
        argv: The arguments. None takes them from the command line, and then also watches for signals until the process ends.
    """
    return guarded(lambda: run(argv, build_parser("python -m verl_memopt.trainer.main_ppo")), watched=argv is None)


if __name__ == "__main__":
    sys.exit(main())
