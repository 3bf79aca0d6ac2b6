"""``python -m verl_memopt``: the command line."""

import sys

from verl_memopt.cli import main

sys.exit(main())
