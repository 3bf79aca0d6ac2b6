"""Entry point of ``python -m verl_memopt``."""

import sys

from verl_memopt.cli import main

sys.exit(main())
